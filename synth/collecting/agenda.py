"""What is still to time: batches that wait for a worker, layer by layer.

What they hold is either said by the plan's own lists, as far down as the budget goes (:class:`Lists`), or decided
round by round by a strategy (:class:`Rounds`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from synth.choosing.picks import Seen, Strategy
from synth.choosing.plan import Batch, Plan, depth_for, rank_costs, take, timing_seconds, worth

#: What a journal holds only once: layer, pass, stage, tokens, tactic.
Key = tuple[int, int, int, int, int]
#: Batches that workers have in hand, each with the tactics that nothing was heard of yet.
InHand = Sequence[tuple[Batch, Sequence[int]]]

# More tokens than any bucket has.
_NO_TOKENS = 1 << 40
# The share of a budget that is too little to go over the plan once more.
_SPARE = 0.03
# Cells that a strategy is asked for at most in one round.
_MOST_A_ROUND = 4096


@dataclass
class _Work:
    """Tactics of a batch that wait for a worker; None: what the plan and the budget say."""

    batch: Batch
    tactics: list[int] | None = None


class Agenda:
    """Batches that wait. This alone only passes on what was given back; see its two kinds.

    Parameters
    ----------
    plan : Plan
    done : set of Key
        Cells that are timed; the caller adds to it.

    Attributes
    ----------
    before : int
        Timings of the plan that were there in the beginning.
    planned : int
        Timings that there will be in the end, as far as was known at the last :meth:`fit`.
    most : int
        How many timings a person is told that there will be, at least.
    """

    most = 0

    def __init__(self, plan: Plan, done: set[Key]) -> None:
        self.plan, self.done = plan, done
        self.before, self.planned = len(done), 0
        self._waiting: dict[int, deque[_Work]] = {i: deque() for i in range(len(plan.layers))}
        # Token count from which on a layer is left out.
        self._dropped_from: dict[int, int] = {}
        # Predicted seconds of what was handed out.
        self._predicted: dict[Key, float] = {}

    def __bool__(self) -> bool:
        return any(self._waiting.values())

    def more(self, seconds: float, idle_s: float) -> bool:
        """Queue more, now that nothing waits; False where there is nothing.

        Parameters
        ----------
        seconds : float
            Seconds of measuring that are left on all GPUs, as they were predicted.
        idle_s : float
            The most seconds that a waiting worker has left.
        """
        return False

    def cut_short(self, out_of_time: bool) -> bool:
        """Say whether the budget was up before everything was timed; `out_of_time`: a worker ran out of it."""
        return out_of_time

    def layer_for(self, own: int | None, taken: Collection[int | None]) -> int | None:
        """Return the layer to go on with: its own, else one that nobody has, else the one with the most left."""
        waiting = [layer for layer, queue in self._waiting.items() if queue]
        if not waiting or own in waiting:
            return own if waiting else None
        free = [layer for layer in waiting if layer not in taken]
        return free[0] if free else max(waiting, key=lambda layer: len(self._waiting[layer]))

    def pop(self, layer: int, fit: Callable[[], None]) -> tuple[Batch, list[int]]:
        """Return a batch of a layer that has some, and which of its tactics to time; there may be none.

        Parameters
        ----------
        fit : callable
            Calls :meth:`fit` with what is left now.
        """
        work = self._waiting[layer].popleft()
        tactics = self._begin(work, fit)
        self._predicted.update({(*work.batch.key, t): s for t, s in self.seconds(work.batch, tactics).items()})
        return work.batch, tactics

    def give_back(self, batch: Batch, tactics: Sequence[int]) -> None:
        """Put what an item left over back to the front of its layer."""
        self._waiting[batch.layer].appendleft(_Work(batch, list(tactics)))

    def drop(self, layer: int, from_tokens: int) -> None:
        """Leave out what remains of a layer from a token count on."""
        self._dropped_from[layer] = min(from_tokens, self._dropped_from.get(layer, from_tokens))
        queue = self._waiting[layer]
        for work in [w for w in queue if w.batch.tokens >= from_tokens]:
            queue.remove(work)
            self._forget(work)

    def tokens(self, layer: int) -> list[int]:
        """Return the token counts of a layer at which something waits, sorted."""
        return sorted({work.batch.tokens for work in self._waiting[layer]})

    def fit(self, seconds: float, in_hand: InHand) -> None:
        """Fit what waits into the seconds of measuring that are left, at the speed seen so far."""
        self.planned = len(self.done) + sum(len(tactics) for _, tactics in in_hand)
        self.planned += sum(len(self._tactics_of(work)) for queue in self._waiting.values() for work in queue)

    @staticmethod
    def seconds(batch: Batch, tactics: Sequence[int]) -> dict[int, float]:
        """Return the predicted seconds of some tactics."""
        ms = dict(zip(batch.tactics, batch.ms, strict=True))
        return {t: timing_seconds(ms[t]) for t in tactics}

    def predicted(self, key: Key, otherwise: float = 0.0) -> float:
        """Return the predicted seconds of a cell that was handed out."""
        return self._predicted.get(key, otherwise)

    def started_s(self, in_hand: InHand) -> float:
        """Return the predicted seconds of what workers have in hand or gave back."""
        waiting = [(w.batch, w.tactics) for q in self._waiting.values() for w in q if w.tactics is not None]
        return sum(self.predicted((*b.key, t)) for some in (in_hand, waiting) for b, tactics in some for t in tactics)

    def queued_s(self) -> float:
        """Return the predicted seconds of the batches that nobody has started, as far as the plan goes."""
        return 0.0

    def _queue(self, works: Iterable[_Work]) -> None:
        for work in works:
            if work.batch.tokens < self._dropped_from.get(work.batch.layer, _NO_TOKENS):
                self._waiting[work.batch.layer].append(work)

    def _begin(self, work: _Work, fit: Callable[[], None]) -> list[int]:
        return list(work.tactics or ())

    def _tactics_of(self, work: _Work) -> Sequence[int]:
        return work.tactics or ()

    def _forget(self, work: _Work) -> None:
        """Take what a batch costs out of what waits."""


class Lists(Agenda):
    """The first candidates of every batch of the plan; under a budget, as many as it has room for."""

    def __init__(self, plan: Plan, done: set[Key]) -> None:
        super().__init__(plan, done)
        # Tactics of each batch that come into question, and their predicted seconds, none for those timed.
        self._lists: dict[tuple[int, int, int, int], list[tuple[int, float]]] = {}
        # Seconds of all that wait, by their place in the lists; and how far down the lists the budget goes.
        self._ranks: list[float] = []
        self._depth = math.inf
        # Timings that were there when the lists were gone over last.
        self._filled_at = -1
        self._fill()
        self.before = sum(key in done for key in self._keys())

    def more(self, seconds: float, idle_s: float) -> bool:
        """Queue what a budget had no room for as long as it was thought to be shorter; see :class:`Agenda`."""
        budget = self.plan.budget_s
        if budget is None or len(self.done) == self._filled_at or idle_s <= _SPARE * budget:
            return False
        self._filled_at = len(self.done)
        self._fill()
        return bool(self)

    def cut_short(self, out_of_time: bool) -> bool:
        """See :class:`Agenda`."""
        return any(key not in self.done for key in self._keys())

    def fit(self, seconds: float, in_hand: InHand) -> None:
        """See :class:`Agenda`."""
        if self.plan.budget_s is not None:
            self._depth = depth_for(seconds - self.started_s(in_hand), self._ranks)
        super().fit(seconds, in_hand)

    def queued_s(self) -> float:
        """See :class:`Agenda`."""
        if math.isinf(self._depth):
            return sum(self._ranks)
        whole = int(self._depth)
        more = self._ranks[whole] * (self._depth - whole) if whole < len(self._ranks) else 0.0
        return sum(self._ranks[:whole]) + more

    def _keys(self) -> Iterable[Key]:
        return ((*key, tactic) for key, some in self._lists.items() for tactic, _ in some)

    def _fill(self) -> None:
        """Queue every batch that has candidates left."""
        for batch in self.plan.batches:
            n = worth(batch, self.plan.budget_s is not None)
            some = zip(batch.tactics[:n], map(timing_seconds, batch.ms), strict=False)
            self._lists[batch.key] = [(t, 0.0 if (*batch.key, t) in self.done else s) for t, s in some]
        self._queue(_Work(b) for b in self.plan.batches if any(s for _, s in self._lists[b.key]))
        self._ranks = rank_costs([s for _, s in self._lists[w.batch.key]] for q in self._waiting.values() for w in q)

    def _begin(self, work: _Work, fit: Callable[[], None]) -> list[int]:
        if work.tactics is not None:
            return work.tactics
        if self.plan.budget_s is not None:
            fit()
        self._forget(work)
        return self.plan.order(work.batch, self._tactics_of(work))

    def _tactics_of(self, work: _Work) -> Sequence[int]:
        if work.tactics is not None:
            return work.tactics
        some = self._lists[work.batch.key]
        return [t for t, seconds in some[: take(work.batch, self._depth)] if seconds]

    def _forget(self, work: _Work) -> None:
        if work.tactics is None:
            for rank, (_, seconds) in enumerate(self._lists[work.batch.key]):
                # What rounding leaves must not look like work.
                rest = self._ranks[rank] - seconds
                self._ranks[rank] = rest if rest > 1e-9 else 0.0


class Rounds(Agenda):
    """What a strategy asks for, one round after the other.

    Parameters
    ----------
    strategy : Strategy
    seen : sequence of Seen
        Timings so far, in order; the caller adds to it.
    """

    def __init__(self, plan: Plan, done: set[Key], strategy: Strategy, seen: Sequence[Seen]) -> None:
        super().__init__(plan, done)
        self._strategy, self._seen = strategy, seen
        self._batches = {b.key: b for b in plan.batches}
        self._limit = math.inf if plan.budget_s is not None else len(plan)
        self.most = 0 if plan.budget_s is not None else len(plan)
        self._satisfied = False

    def more(self, seconds: float, idle_s: float) -> bool:
        """Queue what the strategy wants timed next; see :class:`Agenda`."""
        if self._satisfied:
            return False
        most = int(min(self._limit - len(self._seen), _MOST_A_ROUND))
        picks = self._strategy.next(self._seen, most, seconds) if most >= 1 and seconds > 0 else []
        together: dict[tuple[int, int, int, int], list[int]] = {}
        for pick in picks:
            key = (pick.layer, self.plan.passes[0], pick.stage, pick.tokens)
            if (*key, pick.tactic) not in self.done:
                together.setdefault(key, []).append(pick.tactic)
        batches = ((self._batches[key], tactics) for key, tactics in together.items())
        self._queue(_Work(batch, self.plan.order(batch, tactics)) for batch, tactics in batches)
        self._satisfied = not self
        return bool(self)
