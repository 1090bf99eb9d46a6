"""Tactics whose numbers were found wrong: remembered for one device and FlashInfer version, and never chosen there.

``synth verify`` writes a file of them (:mod:`synth.timings.records`), and ``synth emit`` reads it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from synth.catalog.schemes import STAGES
from synth.catalog.shapes import MoEShape
from synth.errors import SynthError
from synth.flashinfer.tactics import Tactic
from synth.timings.records import RecordFile


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


#: ``denied.json``.
DENIED = RecordFile("denied", "denied tactic", Denial.parse)
