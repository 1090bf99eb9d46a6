"""Small JSON files beside the measurements of a device, FlashInfer version and quantization, a record a line::

    <root>/<device slug>/flashinfer-<version>/<quant>/<name>.json

Another FlashInfer version may have mended a kernel, or broken another, so that nothing is carried over.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from synth.catalog import untrusted
from synth.catalog.files import locked, write_atomically
from synth.errors import SynthError
from synth.timings.measurements import Origin

#: Version of the file format.
SCHEMA = 1
_MAX_BYTES = 16 << 20


class Recorded(Protocol):
    """What such a file holds."""

    @property
    def case(self) -> tuple[Any, ...]:
        """What a file holds only once, and the order in it."""

    def record(self) -> dict[str, Any]:
        """Return the record as the file has it."""


R = TypeVar("R", bound=Recorded)


@dataclass(frozen=True)
class RecordFile(Generic[R]):
    """One kind of file.

    Attributes
    ----------
    name : str
        Of the file, without its ending, and of the list in it.
    what : str
        What a record is, for errors.
    parse : callable
        Reads what ``record`` gives; raises :class:`SynthError` with what is wrong.
    """

    name: str
    what: str
    parse: Callable[[Any], R]

    def path(self, origin: Origin, root: Path) -> Path:
        """Return the file under a folder of measurements; it may not exist."""
        return origin.folder(root) / f"{self.name}.json"

    def load(self, roots: Iterable[Path], origin: Origin) -> tuple[R, ...]:
        """Return what the files under some folders hold, each case once.

        Raises
        ------
        SynthError
            When a file is damaged, or is another device's or version's.
        """
        found: dict[Hashable, R] = {}
        for root in roots:
            path = self.path(origin, root)
            if path.is_file():
                for one in self._read(path, origin):
                    found.setdefault(one.case, one)
        return tuple(sorted(found.values(), key=lambda one: one.case))

    def add(self, records: Sequence[R], origin: Origin, root: Path) -> Path:
        """Add records to the file under `root` and return its path; a later one replaces the same case's earlier one.

        Raises
        ------
        SynthError
            When the file that is there is damaged, or can't be written.
        """
        path = self.path(origin, root)
        with locked(path.parent):
            every = {one.case: one for one in (*self.load([root], origin), *records)}
            lines = ",\n  ".join(json.dumps(every[case].record(), ensure_ascii=False) for case in sorted(every))
            head = json.dumps(_head(origin), indent=1, ensure_ascii=False)
            write_atomically(path, f'{head[:-2]},\n "{self.name}": [\n  {lines}\n ]\n}}\n'.encode())
        return path

    def _read(self, path: Path, origin: Origin) -> list[R]:
        way_out = "mend the file or remove it, and run `synth verify` again"
        data = untrusted.read_bytes(path, _MAX_BYTES, "record file")
        try:
            content = untrusted.loads(data)
        except ValueError as e:
            raise SynthError(f"{path} is not JSON ({e}); {way_out}") from e
        if not isinstance(content, dict) or not isinstance(content.get(self.name), list):
            raise SynthError(f"{path} is not a list of {self.what}s; {way_out}")
        for name, value in _head(origin).items():
            if content.get(name) != value:
                raise SynthError(f"{path}: its {name} is {content.get(name)!r} and not {value!r}; {way_out}")
        found = []
        for number, record in enumerate(content[self.name], 1):
            try:
                found.append(self.parse(record))
            except SynthError as e:
                raise SynthError(f"{path}: {self.what} {number}: {e}; {way_out}") from e
        return found


def _head(origin: Origin) -> Mapping[str, Any]:
    return {
        "schema": SCHEMA,
        "device": origin.device,
        "flashinfer": origin.flashinfer,
        "quant": origin.quant,
        "simulated": origin.simulated,
    }
