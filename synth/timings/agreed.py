"""Pairs of tactics whose numbers agree with the fallback's: what ``synth verify`` compared and found right.

``synth contribute`` reads the file of them (:mod:`synth.timings.records`): what is for others was compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from synth.catalog.shapes import MoEShape
from synth.errors import SynthError
from synth.flashinfer.tactics import Tactic
from synth.timings.denied import DENIED
from synth.timings.measurements import Origin
from synth.timings.records import RecordFile

#: How the fallback is written where a tactic may stand.
FALLBACK_TEXT = "fallback"


@dataclass(frozen=True)
class Agreement:
    """A pair that gives the fallback's numbers.

    Attributes
    ----------
    shape : MoEShape
    tactics : tuple of (Tactic or None)
        gemm1's and gemm2's; None for the fallback.
    tokens : int
        With this many tokens.
    deviation : float
        Largest difference from the fallback's output over the largest output.
    date : str
        Day on which it was compared, for example ``"2025-12-02"``.
    """

    shape: MoEShape
    tactics: tuple[Tactic | None, Tactic | None]
    tokens: int
    deviation: float
    date: str = ""

    @property
    def case(self) -> tuple[str, str, str, int]:
        """What a file holds only once, and the order in it."""
        gemm1, gemm2 = (str(t or FALLBACK_TEXT) for t in self.tactics)
        return str(self.shape), gemm1, gemm2, self.tokens

    def record(self) -> dict[str, Any]:
        """Return the agreement as the file has it."""
        shape, gemm1, gemm2, tokens = self.case
        return {
            "shape": shape,
            "gemm1": gemm1,
            "gemm2": gemm2,
            "tokens": tokens,
            "deviation": self.deviation,
            "date": self.date,
        }

    @classmethod
    def parse(cls, record: Any) -> Agreement:
        """Read what :meth:`record` gives.

        Raises
        ------
        SynthError
            When a field is missing or is not what it should be.
        """
        try:
            texts = [record[name] for name in ("shape", "gemm1", "gemm2", "date")]
            tokens, deviation = record["tokens"], record["deviation"]
        except (KeyError, TypeError):
            raise SynthError("it lacks a field") from None
        if not all(isinstance(text, str) for text in texts):
            raise SynthError("a text is not one")
        if type(tokens) is not int or tokens < 1:
            raise SynthError("its tokens are not a number from 1")
        if isinstance(deviation, bool) or not isinstance(deviation, (int, float)) or not 0 <= deviation < math.inf:
            raise SynthError("its deviation is not a number from 0")
        shape, gemm1, gemm2, date = texts
        pair = _tactic(gemm1), _tactic(gemm2)
        return cls(MoEShape.parse(shape), pair, tokens, float(deviation), date)


def _tactic(text: str) -> Tactic | None:
    return None if text == FALLBACK_TEXT else Tactic.parse(text)


#: ``agreed.json``.
AGREED = RecordFile("agreed", "compared pair", Agreement.parse)


def load_agreed(roots: Sequence[Path], origin: Origin) -> tuple[Agreement, ...]:
    """Return the pairs that agree and of which no tactic was ever denied: that it was right once doesn't acquit it.

    Raises
    ------
    SynthError
        As :meth:`synth.timings.records.RecordFile.load`.
    """
    denied = {(d.stage, d.tactic) for d in DENIED.load(roots, origin)}
    return tuple(a for a in AGREED.load(roots, origin) if denied.isdisjoint(enumerate(a.tactics, 1)))
