"""Running a plan: work to workers, timings to the journal, and a clear end whatever happens."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from synth.choosing.picks import Pick, Seen, Strategy
from synth.choosing.plan import (
    Batch,
    Plan,
    depth_for,
    estimate_memory,
    rank_costs,
    summarize,
    take,
    timing_seconds,
    worth,
)
from synth.collecting.journal import MUST_MATCH, Entry, Head, Journal, JournalError, Write
from synth.collecting.pools import Event, Pool, ProcessPool
from synth.collecting.reporters import CollectSummary, Progress, Reporter, SilentReporter
from synth.collecting.results import drift_of, journal_to_measurements
from synth.collecting.runner import RunnerSpec
from synth.collecting.worker import Begin, Broken, Finished, Item, Refused, SetUp, Started, Timed
from synth.errors import SynthError
from synth.timings.rows import Row

#: A worker that dies this often without one good timing in between is not started again.
MAX_DEATHS = 3
#: A layer during which workers died this often is skipped.
MAX_LAYER_DEATHS = 5
# How much a prediction of durations weighs against what is observed, in seconds.
_PRIOR_S = 0.5
# The share of a budget that is too little to go over the plan once more.
_SPARE = 0.03
# Cells that a strategy is asked for at most in one round.
_MOST_A_ROUND = 4096
# A run that looks after its workers this rarely was stopped itself, for example by Ctrl-Z.
_AWAY_S = 5.0


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
        if begun.phase == "timing":
            return max(self.timing_s, self.timing_factor * begun.expected_s)
        limits = {
            "start": self.start_s,
            "shape": self.shape_s,
            "bucket": self.bucket_s,
            "reference": self.reference_s,
        }
        return limits[begun.phase]


def collect(
    plan: Plan,
    runner: RunnerSpec,
    journal: Path,
    *,
    strategy: Strategy | None = None,
    gpus: Sequence[int] = (0,),
    ray: str | None = None,
    pool: Pool | None = None,
    reporter: Reporter | None = None,
    measurements: Path | None = None,
    limits: Limits | None = None,
    write: Write = os.write,
) -> CollectSummary:
    """Time what `plan` says and `journal` doesn't hold yet.

    Ctrl-C and SIGTERM end the run after the line being written; the same call goes on later. A second Ctrl-C ends
    it at once, which loses nothing either.

    Parameters
    ----------
    plan : Plan
        What to time.
    runner : RunnerSpec
        What times it.
    journal : Path
        Where each timing goes; usually ``plan.journal_path(root)``.
    strategy : Strategy, optional
        Decides round by round which cells of the plan are timed, as many in all as the plan and its budget allow;
        without it the first candidates of every bucket are.
    gpus : sequence of int
        One worker process is started on each.
    ray : str, optional
        Address of a Ray cluster (``"auto"``, ``"local"``, ``"ray://…"``), whose every GPU gets a worker instead.
    pool : Pool, optional
        Workers of another kind instead; closed at the end.
    reporter : Reporter, optional
        Hears of everything that happens.
    measurements : Path, optional
        Root of the measurements files that get the timings at the end, whatever the end is.
    limits : Limits, optional
        When a worker counts as hanging.
    write : callable
        ``os.write``, or what a test puts in its place.

    Returns
    -------
    CollectSummary
        What was done; its `outcome` says how it ended.

    Raises
    ------
    SynthError
        When the run can't begin: the journal is another plan's, in use, or can't be written.
    """
    if pool is None:
        pool = _make_pool(runner, gpus, ray)
    try:
        opened = Journal(journal, write)
    except BaseException:
        pool.close()
        raise
    run: _Run | None = None
    try:
        run = _Run(plan, pool, opened, reporter or SilentReporter(), limits or Limits(), strategy)
        with _signals(run):
            run.go()
    finally:
        pool.close()
        try:
            opened.close()
        except JournalError as e:
            if run is None:
                raise
            run.fail(str(e))
    summary = run.summary(measurements)
    run.reporter.on_done(summary)
    return summary


def _make_pool(runner: RunnerSpec, gpus: Sequence[int], ray: str | None) -> Pool:
    if ray is None:
        return ProcessPool(runner, gpus)
    from synth.collecting.ray_pool import RayPool

    return RayPool(runner, ray)


@contextlib.contextmanager
def _signals(run: _Run) -> Iterator[None]:
    """Make Ctrl-C and SIGTERM end the run between two lines."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        if run.interrupted:
            raise KeyboardInterrupt
        run.interrupted = True

    before = {s: signal.signal(s, stop) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass
class _Work:
    """Tactics of a batch that wait for a worker; None: what the plan and the budget say."""

    batch: Batch
    tactics: list[int] | None = None


@dataclass
class _Slot:
    """What is known of one worker."""

    name: str
    state: Literal["starting", "idle", "busy", "finishing", "gone"] = "starting"
    layer: int | None = None
    work: Batch | None = None
    # Tactics of the item that nothing was heard of yet, in order.
    pending: list[int] = field(default_factory=list)
    begun: Begin | None = None
    since: float = 0.0
    used_s: float = 0.0
    out_of_time: bool = False
    # Deaths without a good timing in between.
    deaths: int = 0


class _Run:
    def __init__(
        self,
        plan: Plan,
        pool: Pool,
        journal: Journal,
        reporter: Reporter,
        limits: Limits,
        strategy: Strategy | None,
    ) -> None:
        self.plan, self.pool, self.journal, self.reporter, self.limits = plan, pool, journal, reporter, limits
        self.strategy = strategy
        self.batches = {b.key: b for b in plan.batches}
        # Timings that rounds are decided by, and how many there may be in all.
        self.seen: list[Seen] = []
        self.satisfied = False
        self.most = math.inf if plan.budget_s is not None else sum(b.limit for b in plan.batches)
        self.interrupted = False
        self.began = time.monotonic()
        self.slots = {name: _Slot(name) for name in pool.slots}
        self.head: Head | None = None
        self.in_session = False
        self.failure = ""
        self.writable = True
        self.looked_at = self.began
        self.last_death = ""
        self.skipped: list[str] = []
        self.timed = self.failed = self.throttled = 0
        self.setup_s = 0.0
        self.references: list[Entry] = []
        self.bad_references: set[int] = set()
        self.layer_deaths: Counter[int] = Counter()
        self.lost: Counter[tuple[int, int, int, int, int]] = Counter()
        # Predicted and observed seconds of the timings so far.
        self.predicted_s = self.observed_s = 0.0
        self.expected: dict[tuple[int, int, int, int, int], float] = {}
        done: set[tuple[int, int, int, int, int]] = set()
        self.used_before_s = 0.0
        self.session = 0
        if journal.content is not None:
            self._continue(journal)
            done = {e.key for e in journal.content.entries}
            self.seen = [_seen(e) for e in journal.content.entries]
            self.used_before_s = sum(e.seconds for e in (*journal.content.entries, *journal.content.references))
        self.done = done
        self.todo: dict[int, deque[_Work]] = {i: deque() for i in range(len(plan.layers))}
        # Token count from which on a layer is left out.
        self.dropped_from: dict[int, int] = {}
        self.candidates: dict[tuple[int, int, int, int], list[tuple[int, float]]] = {}
        self.rank_costs: list[float] = []
        self.planned = 0
        self.depth = float("inf")
        if strategy is None:
            self._fill_queues()
            self.before = sum((*key, t) in done for key, some in self.candidates.items() for t, _ in some)
        else:
            self.before = len(done)
        # Timings that were there when the queues were filled last.
        self.filled_at = -1

    # --- the loop ---

    def go(self) -> None:
        self.reporter.on_plan(summarize(self.plan, max(len(self.slots), 1)), self.before)
        try:
            if self._anything_left() or self._next_round():
                for slot in self.slots.values():
                    self._start(slot)
                self._loop()
        except SynthError as e:
            self._fail(e)
        except KeyboardInterrupt:
            # It may have come in the middle of a line.
            self.interrupted, self.writable = True, False
        finally:
            self._stop()

    def fail(self, reason: str) -> None:
        self.failure = self.failure or reason

    def _fail(self, e: SynthError) -> None:
        self.writable = self.writable and not isinstance(e, JournalError)
        self.fail(str(e))

    def _loop(self) -> None:
        while not self.interrupted and not self.failure:
            for slot in self.slots.values():
                if slot.state == "idle":
                    self._assign(slot)
            states = {slot.state for slot in self.slots.values()}
            if "busy" not in states and not (self._anything_left() and "starting" in states):
                if self._go_deeper() or self._next_round():
                    continue
                self._finish()
            if all(slot.state == "gone" for slot in self.slots.values()):
                return
            for name, event in self.pool.events(0.1):
                self._hear(self.slots[name], event)
            self._watch()

    def _finish(self) -> None:
        """Nobody works any more: each times its last reference and ends; who only wanted to help needs not."""
        for slot in self.slots.values():
            if slot.state == "idle":
                slot.state, slot.since, slot.begun = "finishing", time.monotonic(), Begin("reference")
                self.pool.send(slot.name, None)
            elif slot.state == "starting":
                self.pool.kill(slot.name)
                slot.state = "gone"

    def _stop(self) -> None:
        """End every worker; what they had said before still counts."""
        for slot in self.slots.values():
            said = self.pool.kill(slot.name)
            if self.writable:
                try:
                    self._rest(slot, said)
                except JournalError as e:
                    self._fail(e)

    def _hear(self, slot: _Slot, event: Event) -> None:
        if slot.state == "gone":
            return
        slot.since = time.monotonic()
        if isinstance(event, Begin):
            slot.begun = event
        elif isinstance(event, Timed):
            self._hear_timing(slot, event)
        elif isinstance(event, SetUp):
            self.setup_s += event.seconds
        elif isinstance(event, Started):
            self._hear_started(slot, event)
        elif isinstance(event, Finished):
            self._hear_finished(slot, event)
        elif isinstance(event, Refused):
            self._hear_refused(slot, event)
        elif isinstance(event, Broken):
            self._rest(slot, self.pool.kill(slot.name))
            self._bury(slot, event.error, fault=True)
        else:
            self._bury(slot, event.reason, event.fault)

    def _rest(self, slot: _Slot, said: Sequence[Event]) -> None:
        for event in said:
            if isinstance(event, Timed):
                self._hear_timing(slot, event)

    # --- what workers say ---

    def _hear_started(self, slot: _Slot, event: Started) -> None:
        environment = event.environment
        if self.head is None:
            self.head = self._new_head(environment)
            if problem := self._mismatch(environment):
                self.fail(problem)
                return
            self.journal.begin(self.head)
        elif problem := self._mismatch(environment):
            self.fail(problem)
            return
        if not self.in_session:
            self.journal.session(_now(), environment)
            self.in_session = True
        slot.state, slot.begun, slot.layer = "idle", None, None
        self.reporter.on_worker(slot.name, f"timing on {environment.get('device', 'an unnamed device')}")
        if (memory := environment.get("memory_free_bytes")) is not None:
            self._leave_out_what_is_too_large(slot, float(memory))

    def _hear_timing(self, slot: _Slot, event: Timed) -> None:
        if event.reference is not None:
            layer, stage, tokens, tactic = event.reference
            assert event.ms is not None
            row = Row(self.plan.passes[0], stage, tokens, tactic, event.ms, event.throttled)
            entry = Entry(layer, row, event.seconds, slot.name, self.session, reference=True)
            self.journal.add(entry)
            self.references.append(entry)
            slot.used_s += event.seconds
            slot.deaths = 0
            return
        batch = slot.work
        if batch is None or event.tactic not in slot.pending:
            return
        slot.used_s += event.seconds
        if event.ms is not None:
            slot.deaths = 0
        self._record(slot, batch, event.tactic, event.ms, event.error, event.throttled, event.seconds)

    def _record(
        self,
        slot: _Slot,
        batch: Batch,
        tactic: int,
        ms: float | None,
        error: str | None,
        throttled: bool,
        seconds: float,
    ) -> None:
        key = (*batch.key, tactic)
        row = Row(batch.pass_, batch.stage, batch.tokens, tactic, float("nan") if ms is None else ms, throttled, error)
        self.journal.add(Entry(batch.layer, row, seconds, slot.name))
        slot.pending.remove(tactic)
        self.done.add(key)
        self.seen.append(Seen(Pick(batch.layer, batch.stage, batch.tokens, tactic), row.ms))
        self.timed += 1
        self.throttled += throttled
        cell = self.plan.cell(batch, tactic)
        if ms is None:
            self.failed += 1
            self.reporter.on_failure(cell, error or "", self._progress())
        else:
            self.predicted_s += self.expected.get(key, seconds)
            self.observed_s += seconds
            self.reporter.on_timing(cell, ms, throttled, self._progress())

    def _hear_finished(self, slot: _Slot, event: Finished) -> None:
        if slot.state == "finishing":
            slot.state = "gone"
            return
        slot.out_of_time = event.out_of_time
        self._give_back(slot)
        slot.state, slot.begun = "idle", None

    def _hear_refused(self, slot: _Slot, event: Refused) -> None:
        if event.scope == "run" or slot.work is None:
            self.fail(event.error)
            return
        batch = slot.work
        layer = self.plan.layers[batch.layer]
        if event.scope == "shape":
            slot.layer = None
            self._drop(slot, batch.layer, 0, f"{layer} is skipped: {event.error}")
        else:
            self._drop(slot, batch.layer, batch.tokens, f"{layer} stops before {batch.tokens} tokens: {event.error}")
        slot.state, slot.begun = "idle", None

    # --- what goes wrong ---

    def _watch(self) -> None:
        now = time.monotonic()
        away, self.looked_at = now - self.looked_at > _AWAY_S, now
        for slot in self.slots.values():
            if away:
                # The whole run was stopped, its workers maybe too.
                slot.since = now
            if slot.state in ("idle", "gone") or self.failure:
                continue
            begun = slot.begun or Begin("start")
            limit = self.limits.of(begun)
            if now - slot.since <= limit:
                continue
            heard = len(slot.pending)
            self._rest(slot, self.pool.kill(slot.name))
            # What it said at the very end is not the timing that hangs.
            if len(slot.pending) == heard:
                self._bury(slot, f"no answer for {limit:.0f} s, so it counts as hanging", fault=True)
            else:
                self._bury(slot, "no answer", fault=False)

    def _bury(self, slot: _Slot, reason: str, fault: bool) -> None:
        """Deal with a dead worker: mark the cell it died of, put the rest back, start another."""
        self.last_death = reason
        begun, batch = slot.begun, slot.work
        self._note(f"{slot.name}: {reason}")
        self.reporter.on_worker(slot.name, reason)
        finishing = slot.state == "finishing"
        slot.deaths += 1
        if batch is not None and begun is not None:
            if begun.phase == "timing" and begun.tactic in slot.pending:
                key = (*batch.key, begun.tactic)
                if fault or self.lost[key]:
                    self._record(slot, batch, begun.tactic, None, reason, False, 0.0)
                else:
                    # Ended from outside, perhaps not because of this cell: it gets a second chance, last.
                    self.lost[key] += 1
                    slot.pending.remove(begun.tactic)
                    slot.pending.append(begun.tactic)
            elif begun.phase == "reference" and fault:
                self.bad_references.add(batch.layer)
            if fault:
                self.layer_deaths[batch.layer] += 1
        self._give_back(slot)
        slot.layer, slot.begun = None, None
        if batch is not None and self.layer_deaths[batch.layer] >= MAX_LAYER_DEATHS:
            deaths = self.layer_deaths[batch.layer]
            self._drop(slot, batch.layer, 0, f"{self.plan.layers[batch.layer]} is skipped: {deaths} workers died of it")
        if finishing:
            slot.state = "gone"
        elif slot.deaths >= MAX_DEATHS:
            slot.state = "gone"
            self.reporter.on_worker(slot.name, f"given up after {slot.deaths} deaths in a row")
        else:
            self._start(slot)

    def _leave_out_what_is_too_large(self, slot: _Slot, memory: float) -> None:
        for index, layer in enumerate(self.plan.layers):
            counts = sorted({work.batch.tokens for work in self.todo[index]})
            for tokens in counts:
                needed = estimate_memory(layer.shape, layer.quant, tokens)
                if needed > memory:
                    why = f"it needs about {needed / 2**30:.1f} GiB and the GPU has {memory / 2**30:.1f} GiB free"
                    what = "is skipped" if tokens == counts[0] else f"stops before {tokens} tokens"
                    self._drop(slot, index, tokens, f"{layer} {what}: {why}")
                    break

    def _note(self, text: str) -> None:
        # Before the head is written there is nothing to append to.
        if self.in_session:
            self.journal.note(text)

    def _drop(self, slot: _Slot, layer: int, from_tokens: int, line: str) -> None:
        """Leave out what remains of a layer from a token count on."""
        self.dropped_from[layer] = min(from_tokens, self.dropped_from.get(layer, from_tokens))
        slot.work, slot.pending = None, []
        queue = self.todo[layer]
        for work in [w for w in queue if w.batch.tokens >= from_tokens]:
            queue.remove(work)
            self._forget_cost(work)
        if line not in self.skipped:
            self.skipped.append(line)
            self._note(line)
            self.reporter.on_worker(slot.name, line)
        self._replan()

    def _give_back(self, slot: _Slot) -> None:
        """Put what an item left over back to the front of its layer."""
        if slot.work is not None and slot.pending:
            self.todo[slot.work.layer].appendleft(_Work(slot.work, list(slot.pending)))
        slot.work, slot.pending = None, []

    # --- what comes next ---

    def _start(self, slot: _Slot) -> None:
        slot.state, slot.begun, slot.since = "starting", Begin("start"), time.monotonic()
        self.pool.start(slot.name)

    def _assign(self, slot: _Slot) -> None:
        """Give a waiting worker something to do, if there is anything."""
        left = self._left_s(slot)
        if left <= 0:
            return
        while (layer := self._layer_for(slot)) is not None:
            work = self.todo[layer].popleft()
            batch = work.batch
            if work.tactics is None:
                if self.plan.budget_s is not None:
                    self._replan()
                self._forget_cost(work)
                n = min(take(batch, self.depth), len(self.candidates[batch.key]))
                tactics = [t for t, _ in self.candidates[batch.key][:n] if (*batch.key, t) not in self.done]
                tactics = self.plan.order(batch, tactics)
            else:
                tactics = work.tactics
            if tactics:
                self._give(slot, batch, tactics, left)
                return

    def _give(self, slot: _Slot, batch: Batch, tactics: list[int], left_s: float) -> None:
        layer = self.plan.layers[batch.layer]
        table = self.plan.table(layer)
        seconds = {t: timing_seconds(ms) for t, ms in zip(batch.tactics, batch.ms, strict=True)}
        self.expected.update({(*batch.key, t): seconds[t] for t in tactics})
        item = Item(
            layer=batch.layer,
            pass_=batch.pass_,
            stage=batch.stage,
            tokens=batch.tokens,
            shape=layer.shape,
            quant=layer.quant,
            activation=layer.activation,
            tactics=tuple(tactics),
            seconds=tuple(seconds[t] * self._scale for t in tactics),
            counts=(len(table.gemm1), len(table.gemm2)),
            reference=None if batch.layer in self.bad_references else self.plan.reference(batch.layer),
            seconds_left=left_s,
        )
        slot.work, slot.pending, slot.layer, slot.state = batch, list(tactics), batch.layer, "busy"
        slot.since = time.monotonic()
        self.pool.send(slot.name, item)

    def _layer_for(self, slot: _Slot) -> int | None:
        """Return the layer to go on with: its own, else one that nobody has, else the one with the most left."""
        waiting = [layer for layer, queue in self.todo.items() if queue]
        if not waiting:
            return None
        if slot.layer in waiting:
            return slot.layer
        taken = {s.layer for s in self.slots.values() if s.state == "busy"}
        free = [layer for layer in waiting if layer not in taken]
        return free[0] if free else max(waiting, key=lambda layer: len(self.todo[layer]))

    @property
    def _scale(self) -> float:
        """Observed over predicted seconds."""
        return (self.observed_s + _PRIOR_S) / (self.predicted_s + _PRIOR_S)

    def _left_s(self, slot: _Slot) -> float:
        """Return the seconds of measuring that a worker has left."""
        if self.plan.budget_s is None:
            return float("inf")
        if slot.out_of_time:
            return 0.0
        return self.plan.budget_s - self.used_before_s / len(self.slots) - slot.used_s

    def _forget_cost(self, work: _Work) -> None:
        if work.tactics is None:
            for rank, (_, seconds) in enumerate(self.candidates[work.batch.key]):
                # What rounding leaves must not look like work.
                rest = self.rank_costs[rank] - seconds
                self.rank_costs[rank] = rest if rest > 1e-9 else 0.0

    def _fill_queues(self) -> None:
        """Queue every batch that has candidates left."""
        budget = self.plan.budget_s is not None
        for batch in self.plan.batches:
            n = worth(batch, budget)
            some = list(zip(batch.tactics[:n], map(timing_seconds, batch.ms), strict=False))
            self.candidates[batch.key] = [(t, 0.0 if (*batch.key, t) in self.done else s) for t, s in some]
            left = any((*batch.key, t) not in self.done for t, _ in some)
            if left and batch.tokens < self.dropped_from.get(batch.layer, 1 << 40):
                self.todo[batch.layer].append(_Work(batch))
        self.rank_costs = rank_costs(
            [s for _, s in self.candidates[w.batch.key]] for q in self.todo.values() for w in q
        )
        self._replan()

    def _go_deeper(self) -> bool:
        """Queue what a budget had no room for as long as it was thought to be shorter; False where that is nothing."""
        if (
            self.plan.budget_s is None
            or self.strategy is not None
            or self._anything_left()
            or len(self.done) == self.filled_at
        ):
            return False
        if not any(s.state == "idle" and self._left_s(s) > _SPARE * self.plan.budget_s for s in self.slots.values()):
            return False
        self.filled_at = len(self.done)
        self._fill_queues()
        return self._anything_left()

    def _next_round(self) -> bool:
        """Queue what the strategy wants timed next; False where that is nothing."""
        if self.strategy is None or self.satisfied:
            return False
        left = sum(max(self._left_s(s), 0.0) for s in self.slots.values() if s.state != "gone")
        most = min(self.most - len(self.seen), _MOST_A_ROUND)
        picks = self.strategy.next(self.seen, int(most), left / self._scale) if most >= 1 and left > 0 else []
        together: dict[tuple[int, int, int, int], list[int]] = {}
        for pick in picks:
            key = (pick.layer, self.plan.passes[0], pick.stage, pick.tokens)
            if pick.tokens < self.dropped_from.get(pick.layer, 1 << 40) and (*key, pick.tactic) not in self.done:
                together.setdefault(key, []).append(pick.tactic)
        for key, tactics in together.items():
            batch = self.batches[key]
            self.todo[batch.layer].append(_Work(batch, self.plan.order(batch, tactics)))
        self._replan()
        self.satisfied = not together
        return bool(together)

    def _replan(self) -> None:
        """Fit what is still to do into what is left of the budget, at the speed seen so far."""
        started = self._started_s()
        if self.plan.budget_s is not None:
            left = sum(max(self._left_s(s), 0.0) for s in self.slots.values() if s.state != "gone")
            self.depth = depth_for(left / self._scale - started, self.rank_costs)
        self.planned = len(self.done) + sum(len(s.pending) for s in self.slots.values())
        for queue in self.todo.values():
            for work in queue:
                self.planned += len(self._tactics_of(work))

    def _tactics_of(self, work: _Work) -> list[int]:
        if work.tactics is not None:
            return work.tactics
        some = self.candidates[work.batch.key]
        return [t for t, seconds in some[: take(work.batch, self.depth)] if seconds]

    def _started_s(self) -> float:
        """Return the predicted seconds of what workers have in hand or gave back."""
        batches = [(s.work, s.pending) for s in self.slots.values() if s.work is not None]
        batches += [(w.batch, w.tactics) for q in self.todo.values() for w in q if w.tactics is not None]
        return sum(self.expected.get((*batch.key, t), 0.0) for batch, tactics in batches for t in tactics)

    def _anything_left(self) -> bool:
        return any(self.todo.values())

    def _progress(self) -> Progress:
        workers = max(sum(s.state != "gone" for s in self.slots.values()), 1)
        to_do = self._started_s() + self._queued_s()
        left = to_do * self._scale / workers
        if self.plan.budget_s is not None:
            left = min(left, max((self._left_s(s) for s in self.slots.values()), default=0.0))
        planned = max(self.planned, len(self.done))
        if self.strategy is not None and self.most < math.inf:
            planned = max(planned, int(self.most))
        return Progress(len(self.done), planned, self.failed, max(left, 0.0))

    def _queued_s(self) -> float:
        """Return the predicted seconds of the batches that nobody has started, as far as the plan goes."""
        if self.depth == float("inf"):
            return sum(self.rank_costs)
        whole = int(self.depth)
        more = self.rank_costs[whole] * (self.depth - whole) if whole < len(self.rank_costs) else 0.0
        return sum(self.rank_costs[:whole]) + more

    # --- journal and summary ---

    def _continue(self, journal: Journal) -> None:
        assert journal.content is not None
        self.head = journal.content.head
        self.references = list(journal.content.references)
        self.session = len(journal.content.sessions)
        if self.head.plan != self.plan.identity:
            raise SynthError(f"{journal.path} is the journal of another plan; name another place for this one")
        if journal.content.torn:
            self.skipped.append(f"the journal's last line was cut short ({journal.content.torn} bytes); it is dropped")
        if n := len(journal.content.problems):
            first = journal.content.problems[0]
            self.skipped.append(f"{n} line{'s' * (n > 1)} of the journal can't be read, first {first.row}; timed again")

    def _new_head(self, environment: dict[str, Any]) -> Head:
        plan = self.plan
        return Head(
            run=uuid.uuid4().hex[:16],
            plan=plan.identity,
            layers=plan.layers,
            device=str(environment.get("device", "")),
            arch=str(environment.get("arch", plan.arch)),
            flashinfer=str(environment.get("flashinfer", "")),
            policy=plan.policy,
            simulated=bool(environment.get("simulated", False)),
            environment=environment,
            date=_now(),
        )

    def _mismatch(self, environment: dict[str, Any]) -> str:
        """Say what makes this worker's timings ones that don't belong in this journal."""
        assert self.head is not None
        planned = {"device": self.plan.device, "arch": self.plan.arch, "flashinfer": self.plan.flashinfer}
        for name, value in planned.items():
            if environment.get(name, value) != value:
                return f"the plan is for {name} {value} and this is {environment[name]}; plan for what is here"
        if dict(environment.get("policy", self.plan.policy)) != dict(self.plan.policy):
            return "the plan has another timing policy than the runner; plan with the runner's"
        before = {**self.head.environment, "simulated": self.head.simulated}
        now = {"simulated": False, **environment}
        for name in MUST_MATCH:
            then, here = before.get(name), now.get(name)
            if then != here and then is not None and here is not None:
                return (
                    f"the journal began with {name} {then} and this is {here}; "
                    "take the rest as another pass (--pass) or go on where it began"
                )
        return ""

    def summary(self, measurements: Path | None) -> CollectSummary:
        self._replan()
        missing = self.planned - len(self.done)
        dead = self._anything_left() and all(s.deaths >= MAX_DEATHS for s in self.slots.values())
        outcome: Literal["finished", "budget", "interrupted", "failed"] = "finished"
        reason = self.failure
        if reason:
            outcome = "failed"
        elif self.interrupted:
            outcome = "interrupted"
        elif dead or (not self.slots and self._anything_left()):
            outcome, reason = "failed", f"no worker is left: {self.last_death or 'there is none'}"
        elif self.plan.budget_s is not None and self._cut_short():
            outcome = "budget"
        files: tuple[Path, ...] = ()
        if measurements is not None and self.done and self.head is not None:
            try:
                files = tuple(journal_to_measurements(self.journal.path, measurements))
            except SynthError as e:
                outcome, reason = "failed", reason or str(e)
        drift = [
            drift_of(str(layer), [e for e in self.references if e.layer == i])
            for i, layer in enumerate(self.plan.layers)
        ]
        return CollectSummary(
            outcome=outcome,
            reason=reason,
            timed=self.timed,
            failed=self.failed,
            throttled=self.throttled,
            before=self.before,
            missing=missing,
            skipped=tuple(self.skipped),
            measuring_s=sum(s.used_s for s in self.slots.values()),
            setup_s=self.setup_s,
            wall_s=time.monotonic() - self.began,
            drift=tuple(d for d in drift if d is not None),
            journal=self.journal.path,
            files=files,
        )

    def _cut_short(self) -> bool:
        if self.strategy is not None:
            return any(slot.out_of_time for slot in self.slots.values())
        return any((*key, t) not in self.done for key, some in self.candidates.items() for t, _ in some)


def _seen(entry: Entry) -> Seen:
    return Seen(Pick(entry.layer, entry.row.stage, entry.row.tokens, entry.row.tactic), entry.row.ms)


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
