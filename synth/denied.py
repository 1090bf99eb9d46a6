"""Tactics whose numbers were found wrong: remembered for one device and FlashInfer version, and never chosen there.

One file lies beside the measurements of its device, FlashInfer version and quantization::

    <root>/<device slug>/flashinfer-<version>/<quant>/denied.json

``synth verify`` writes it, a record a line, and ``synth emit`` reads it. Another version may have mended a kernel, or
broken another, so that nothing is carried over.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from synth.catalog.shapes import MoEShape
from synth.catalog.tactics import STAGES, Tactic
from synth.errors import SynthError
from synth.files import locked, write_atomically
from synth.measurements import Origin

#: Version of the file format.
SCHEMA = 1
FILE = "denied.json"


@dataclass(frozen=True)
class Denial:
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

    stage: int
    tactic: Tactic
    shape: MoEShape
    tokens: int
    deviation: float = math.inf
    error: str = ""
    date: str = ""

    def __str__(self) -> str:
        how = self.error or (f"off by {self.deviation:.1%}" if math.isfinite(self.deviation) else "not finite")
        return f"gemm{self.stage} {self.tactic} on {self.shape} at {self.tokens} tokens: {how}"

    @property
    def case(self) -> tuple[str, int, str, int]:
        """What a file holds only once, and the order in it."""
        return str(self.shape), self.stage, str(self.tactic), self.tokens

    def record(self) -> dict[str, Any]:
        """Return the denial as the file has it."""
        return {
            "stage": self.stage,
            "tactic": str(self.tactic),
            "shape": str(self.shape),
            "tokens": self.tokens,
            # JSON knows no infinity.
            "deviation": self.deviation if math.isfinite(self.deviation) else None,
            "error": self.error,
            "date": self.date,
        }

    @classmethod
    def parse(cls, record: Any) -> Denial:
        """Read what :meth:`record` gives.

        Raises
        ------
        SynthError
            When a field is missing or is not what it should be.
        """
        try:
            stage, tokens, deviation = record["stage"], record["tokens"], record["deviation"]
            texts = [record[name] for name in ("tactic", "shape", "error", "date")]
        except (KeyError, TypeError):
            raise SynthError("it lacks a field") from None
        if type(stage) is not int or stage not in STAGES or type(tokens) is not int or tokens < 1:
            raise SynthError("its stage or its tokens are not valid")
        if not all(isinstance(text, str) for text in texts):
            raise SynthError("a text is not one")
        if deviation is None:
            deviation = math.inf
        elif isinstance(deviation, bool) or not isinstance(deviation, (int, float)) or not deviation >= 0:
            raise SynthError("its deviation is not a number from 0")
        tactic, shape, error, date = texts
        return cls(stage, Tactic.parse(tactic), MoEShape.parse(shape), tokens, float(deviation), error, date)


def path_of(origin: Origin, root: Path) -> Path:
    """Return the file under a folder of measurements; it may not exist."""
    return origin.folder(root) / FILE


def load(roots: Iterable[Path], origin: Origin) -> tuple[Denial, ...]:
    """Return what the files of a device, FlashInfer version and quantization under some folders deny.

    Raises
    ------
    SynthError
        When a file is damaged, or is another device's or version's.
    """
    found: dict[tuple[str, int, str, int], Denial] = {}
    for root in roots:
        path = path_of(origin, root)
        if path.is_file():
            for denial in _read(path, origin):
                found.setdefault(denial.case, denial)
    return tuple(found[case] for case in sorted(found))


def add(denials: Sequence[Denial], origin: Origin, root: Path) -> Path:
    """Add denials to the file under `root` and return its path; a later one replaces the same case's earlier one.

    Raises
    ------
    SynthError
        When the file that is there is damaged, or can't be written.
    """
    path = path_of(origin, root)
    with locked(path.parent):
        every = {d.case: d for d in (*load([root], origin), *denials)}
        lines = ",\n  ".join(json.dumps(every[case].record(), ensure_ascii=False) for case in sorted(every))
        head = json.dumps(_head(origin), indent=1, ensure_ascii=False)
        write_atomically(path, f'{head[:-2]},\n "denied": [\n  {lines}\n ]\n}}\n'.encode())
    return path


def _head(origin: Origin) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "device": origin.device,
        "flashinfer": origin.flashinfer,
        "quant": origin.quant,
        "simulated": origin.simulated,
    }


def _read(path: Path, origin: Origin) -> list[Denial]:
    way_out = "mend the file or remove it, and run `synth verify` again"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise SynthError(f"can't read {path}: {e.strerror or e}") from e
    except (ValueError, RecursionError) as e:
        raise SynthError(f"{path} is not JSON ({e}); {way_out}") from e
    if not isinstance(content, dict) or not isinstance(content.get("denied"), list):
        raise SynthError(f"{path} is not a list of denied tactics; {way_out}")
    for name, value in _head(origin).items():
        if content.get(name) != value:
            raise SynthError(f"{path}: its {name} is {content.get(name)!r} and not {value!r}; {way_out}")
    denials = []
    for number, record in enumerate(content["denied"], 1):
        try:
            denials.append(Denial.parse(record))
        except SynthError as e:
            raise SynthError(f"{path}: denied tactic {number}: {e}; {way_out}") from e
    return denials
