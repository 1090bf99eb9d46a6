"""What a strategy says: the cells to time next, given those timed so far."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Pick(NamedTuple):
    """A cell to time: index of the layer, stage, tokens, tactic id."""

    layer: int
    stage: int
    tokens: int
    tactic: int


class Seen(NamedTuple):
    """A timing: the cell, and its time in ms, NaN where the tactic failed."""

    pick: Pick
    ms: float


class Strategy(Protocol):
    """Decides what to time next. One object serves one run, from its first round to its last."""

    def next(self, seen: Sequence[Seen], most: int, seconds: float) -> list[Pick]:
        """Return the cells of the next round, none when more timings aren't worth their time.

        Parameters
        ----------
        seen : sequence of Seen
            All timings so far, in order.
        most : int
            How many cells may still be timed.
        seconds : float
            Seconds of GPU time that may still be spent.
        """
