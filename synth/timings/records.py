"""What comparing numbers found: tactics that gave wrong ones, and pairs of tactics that agree with the fallback.

``synth verify`` writes both, small JSON files beside the measurements of a device, FlashInfer version and
quantization, a record a line::

    <root>/<device slug>/flashinfer-<version>/<quant>/denied.json
    <root>/<device slug>/flashinfer-<version>/<quant>/agreed.json

``synth emit`` never chooses what is in the first, and ``synth contribute`` reads the second: what is for others was
compared. Another FlashInfer version may have mended a kernel, or broken another, so that nothing is carried over.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from synth.catalog import untrusted
from synth.catalog.files import locked, write_atomically
from synth.catalog.schemes import STAGES
from synth.catalog.shapes import MoEShape
from synth.errors import SynthError
from synth.flashinfer.tactics import Tactic
from synth.timings.origin import Origin

#: Version of the file format.
SCHEMA = 1
#: How the fallback is written where a tactic may stand.
FALLBACK_TEXT = "fallback"
#: Largest difference from the fallback's output, as a share of the largest output, that rounding explains. Tactics
#: add up in different orders, and gemm2's fused finalize adds the experts' outputs after rounding each to bf16: up to
#: 0.012 was seen of right ones in bf16. FP8 rounds to 3 bits of mantissa between the two GEMMs, where a last bit of
#: the sum before it decides.
TOLERANCE: Mapping[str, float] = {"bf16": 0.02, "fp8": 0.05}
_MAX_BYTES = 16 << 20


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise SynthError("a text is not one")
    return value


def _number(wrong: str, low: float, high: float, *kinds: type) -> dict[str, Callable[[Any], Any]]:
    def read(value: Any) -> Any:
        if type(value) not in kinds or not low <= value <= high:
            raise SynthError(wrong)
        return kinds[-1](value)

    return {"read": read, "write": kinds[-1]}


# How a field is read from JSON and written to it.
_TEXT = {"read": _text, "write": str}
_SHAPE = {"read": lambda value: MoEShape.parse(_text(value)), "write": str}
_TACTIC = {"read": lambda value: Tactic.parse(_text(value)), "write": str}
_TACTIC_OR_FALLBACK = {
    "read": lambda value: None if value == FALLBACK_TEXT else Tactic.parse(_text(value)),
    "write": lambda tactic: FALLBACK_TEXT if tactic is None else str(tactic),
}
_TOKENS = _number("its tokens are not a number from 1", 1, math.inf, int)
_FINITE = _number("its deviation is not a number from 0", 0, sys.float_info.max, int, float)
_STAGE_OF_DENIAL, _TOKENS_OF_DENIAL = (
    _number("its stage or its tokens are not valid", 1, high, int) for high in (max(STAGES), math.inf)
)
# JSON knows no infinity.
_FINITE_OR_NULL = {
    "read": lambda value: math.inf if value in (None, math.inf) else _FINITE["read"](value),
    "write": lambda deviation: deviation if math.isfinite(deviation) else None,
}


class _Record:
    """What such a file holds, a dataclass whose fields are the file's, in their order.

    Attributes
    ----------
    key : tuple of str
        Fields of which a file holds equal ones only once, the first first in the order of its records.
    """

    key: ClassVar[tuple[str, ...]]

    @property
    def case(self) -> tuple[Any, ...]:
        """What a file holds only once, and the order in it."""
        record = self.record()
        return tuple(record[name] for name in self.key)

    def record(self) -> dict[str, Any]:
        """Return the record as the file has it."""
        return {f.name: f.metadata["write"](getattr(self, f.name)) for f in fields(self)}  # type: ignore[arg-type]

    @classmethod
    def parse(cls: type[R], record: Any) -> R:
        """Read what :meth:`record` gives.

        Raises
        ------
        SynthError
            When a field is missing or is not what it should be.
        """
        described = fields(cls)  # type: ignore[arg-type]
        if not isinstance(record, dict) or any(f.name not in record for f in described):
            raise SynthError("it lacks a field")
        return cls(**{f.name: f.metadata["read"](record[f.name]) for f in described})


R = TypeVar("R", bound=_Record)


@dataclass(frozen=True)
class Denial(_Record):
    """A tactic that gave wrong numbers.

    Attributes
    ----------
    stage : int
    tactic : Tactic
    shape : MoEShape
        The layer in which it did.
    tokens : int
        With this many tokens.
    deviation : float
        Largest difference from the fallback's output over the largest output; infinite where the output isn't finite
        or there was none.
    error : str
        How it ended where there was no output.
    date : str
        Day on which it was found, for example ``"2025-12-02"``.
    """

    key = ("shape", "stage", "tactic", "tokens")

    stage: int = field(metadata=_STAGE_OF_DENIAL)
    tactic: Tactic = field(metadata=_TACTIC)
    shape: MoEShape = field(metadata=_SHAPE)
    tokens: int = field(metadata=_TOKENS_OF_DENIAL)
    deviation: float = field(default=math.inf, metadata=_FINITE_OR_NULL)
    error: str = field(default="", metadata=_TEXT)
    date: str = field(default="", metadata=_TEXT)

    def __str__(self) -> str:
        how = self.error or (f"off by {self.deviation:.1%}" if math.isfinite(self.deviation) else "not finite")
        return f"gemm{self.stage} {self.tactic} on {self.shape} at {self.tokens} tokens: {how}"


@dataclass(frozen=True)
class Agreement(_Record):
    """A pair of tactics that gives the fallback's numbers.

    Attributes
    ----------
    shape : MoEShape
    gemm1, gemm2 : Tactic or None
        The pair; None for the fallback.
    tokens : int
        With this many tokens.
    deviation : float
        Largest difference from the fallback's output over the largest output.
    date : str
        Day on which it was compared, for example ``"2025-12-02"``.
    """

    key = ("shape", "gemm1", "gemm2", "tokens")

    shape: MoEShape = field(metadata=_SHAPE)
    gemm1: Tactic | None = field(metadata=_TACTIC_OR_FALLBACK)
    gemm2: Tactic | None = field(metadata=_TACTIC_OR_FALLBACK)
    tokens: int = field(metadata=_TOKENS)
    deviation: float = field(metadata=_FINITE)
    date: str = field(default="", metadata=_TEXT)

    @property
    def tactics(self) -> tuple[Tactic | None, Tactic | None]:
        """The pair."""
        return self.gemm1, self.gemm2


@dataclass(frozen=True)
class RecordFile(Generic[R]):
    """One kind of file.

    Attributes
    ----------
    name : str
        Of the file, without its ending, and of the list in it.
    what : str
        What a record is, for errors.
    kind : type
        The records.
    """

    name: str
    what: str
    kind: type[R]

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
                found.append(self.kind.parse(record))
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


#: The tactics that are never chosen.
DENIED = RecordFile("denied", "denied tactic", Denial)
#: The pairs that were found right.
AGREED = RecordFile("agreed", "compared pair", Agreement)


def load_agreed(roots: Sequence[Path], origin: Origin) -> tuple[Agreement, ...]:
    """Return the pairs that agree and of which no tactic was ever denied: that it was right once doesn't acquit it.

    Raises
    ------
    SynthError
        As :meth:`RecordFile.load`.
    """
    denied = {(d.stage, d.tactic) for d in DENIED.load(roots, origin)}
    return tuple(a for a in AGREED.load(roots, origin) if denied.isdisjoint(enumerate(a.tactics, 1)))
