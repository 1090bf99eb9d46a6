"""What a run knows of each of its workers, and how long one may say nothing."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from synth.choosing.plan import Batch
from synth.collecting.agenda import InHand, Key
from synth.collecting.worker import Begin

#: A layer during which workers died this often is skipped.
MAX_LAYER_DEATHS = 5
# How much a prediction of durations weighs against what is observed, in seconds.
_PRIOR_S = 0.5


@dataclass(frozen=True)
class Limits:
    """Seconds after which a worker that says nothing counts as hanging, by what it does.

    A timing has `timing_s`, or `timing_factor` times what it should take if that is longer.
    """

    start_s: float = 1800.0
    shape_s: float = 600.0
    bucket_s: float = 300.0
    reference_s: float = 60.0
    timing_s: float = 20.0
    timing_factor: float = 50.0

    def of(self, begun: Begin) -> float:
        """Return the limit of one phase."""
        limit: float = getattr(self, f"{begun.phase}_s")
        return max(limit, self.timing_factor * begun.expected_s) if begun.phase == "timing" else limit


@dataclass
class Slot:
    """What is known of one worker.

    Attributes
    ----------
    name : str
        As its pool calls it.
    state : str
    layer : int or None
        Whose weights it holds.
    work : Batch or None
        Of the item that it has.
    pending : list of int
        Tactics of the item that nothing was heard of yet, in order.
    begun : Begin or None
        What it is at.
    since : float
        When it was heard of last.
    used_s : float
        Seconds of measuring in this run.
    out_of_time : bool
        It stopped before a timing that didn't fit into the budget.
    deaths : int
        Without a good timing in between.
    """

    name: str
    state: Literal["starting", "idle", "busy", "finishing", "gone"] = "starting"
    layer: int | None = None
    work: Batch | None = None
    pending: list[int] = field(default_factory=list)
    begun: Begin | None = None
    since: float = 0.0
    used_s: float = 0.0
    out_of_time: bool = False
    deaths: int = 0

    def turn_to(self, state: Literal["starting", "idle", "finishing"], begun: Begin | None = None) -> None:
        """Note what the worker does from now on."""
        self.state, self.begun, self.since = state, begun, time.monotonic()

    def take(self, batch: Batch, tactics: list[int]) -> None:
        """Note the item that the worker was given."""
        self.work, self.pending, self.layer, self.state = batch, list(tactics), batch.layer, "busy"
        self.since = time.monotonic()

    def lay_down(self) -> None:
        """Note that the worker has no item any more."""
        self.work, self.pending = None, []


class Crew:
    """All workers of a run, the seconds of measuring that they have left, and how fast they are.

    Parameters
    ----------
    names : sequence of str
        The pool's slots.
    budget_s : float or None
        Seconds of measuring for each worker.
    used_before_s : float
        Seconds that earlier runs have spent of it, over all workers.

    Attributes
    ----------
    slots : dict of str to Slot
    """

    def __init__(self, names: Sequence[str], budget_s: float | None, used_before_s: float) -> None:
        self.slots = {name: Slot(name) for name in names}
        self._budget_s, self._used_before_s = budget_s, used_before_s
        # Predicted and observed seconds of the timings so far.
        self._predicted_s = self._observed_s = 0.0

    def __iter__(self) -> Iterator[Slot]:
        return iter(self.slots.values())

    @property
    def scale(self) -> float:
        """Observed over predicted seconds."""
        return (self._observed_s + _PRIOR_S) / (self._predicted_s + _PRIOR_S)

    def learn(self, predicted_s: float, observed_s: float) -> None:
        """Take in what a timing cost."""
        self._predicted_s += predicted_s
        self._observed_s += observed_s

    def left_s(self, slot: Slot) -> float:
        """Return the seconds of measuring that a worker has left."""
        if self._budget_s is None:
            return math.inf
        return 0.0 if slot.out_of_time else self._budget_s - self._used_before_s / len(self.slots) - slot.used_s

    def all_left_s(self) -> float:
        """Return the seconds of measuring that all workers have left, as they were predicted."""
        return sum(max(self.left_s(slot), 0.0) for slot in self if slot.state != "gone") / self.scale

    def idle_s(self) -> float:
        """Return the most seconds that a waiting worker has left."""
        return max((self.left_s(slot) for slot in self if slot.state == "idle"), default=0.0)

    def wall_s(self, predicted_s: float) -> float:
        """Return how long they will take together for what was predicted to take so many seconds."""
        left = predicted_s * self.scale / max(sum(slot.state != "gone" for slot in self), 1)
        return max(min(left, max(map(self.left_s, self), default=math.inf)), 0.0)

    def in_hand(self) -> InHand:
        """Return the batches that workers have, with what nothing was heard of yet."""
        return [(slot.work, slot.pending) for slot in self if slot.work is not None]


class Deaths:
    """What workers died of, and what follows from it.

    A cell at which a worker failed is marked. One at which it was ended from outside may not be to blame and gets a
    second chance; the next death there counts. A reference cell that ends workers is not timed any more.

    Attributes
    ----------
    references : set of int
        Layers whose reference cell is left out.
    of_layer : Counter of int
        Workers that died of each layer.
    """

    def __init__(self) -> None:
        self.references: set[int] = set()
        self.of_layer: Counter[int] = Counter()
        self._lost: Counter[Key] = Counter()

    def blame(self, slot: Slot, fault: bool) -> int | None:
        """Take in that the worker of a slot died; return the tactic to be marked as failed, if there is one.

        Parameters
        ----------
        fault : bool
            It was not ended from outside.
        """
        batch, begun = slot.work, slot.begun
        if batch is None or begun is None:
            return None
        self.of_layer[batch.layer] += fault
        if begun.phase == "timing" and begun.tactic in slot.pending:
            key = (*batch.key, begun.tactic)
            if fault or self._lost[key]:
                return begun.tactic
            self._lost[key] += 1
            # Last, so that the others are timed whatever happens.
            slot.pending.remove(begun.tactic)
            slot.pending.append(begun.tactic)
        elif begun.phase == "reference" and fault:
            self.references.add(batch.layer)
        return None
