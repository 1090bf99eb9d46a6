"""One run: work to workers, what they say into the record, and others in place of those that die.

What is left to time is in :mod:`synth.collecting.agenda`, what is known of the workers in
:mod:`synth.collecting.slots`, and what is written in :mod:`synth.collecting.record`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from synth.choosing.picks import Strategy
from synth.choosing.plan import Batch, Plan, estimate_memory, summarize
from synth.collecting.agenda import Agenda, Lists, Rounds
from synth.collecting.journal import Journal, JournalError
from synth.collecting.pools import Event, Pool
from synth.collecting.record import Record
from synth.collecting.reporters import CollectSummary, Progress, Reporter
from synth.collecting.results import journal_to_measurements
from synth.collecting.slots import MAX_LAYER_DEATHS, Crew, Deaths, Limits, Slot
from synth.collecting.worker import Begin, Broken, Finished, Item, Refused, SetUp, Started, Timed
from synth.errors import SynthError

#: A worker that dies this often without one good timing in between is not started again.
MAX_DEATHS = 3
# A run that looks after its workers this rarely was stopped itself, for example by Ctrl-Z.
_AWAY_S = 5.0


class Run:
    """One run: hands out work, hears the workers, and replaces those that die."""

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
        self.began = self.looked_at = time.monotonic()
        self.record = record = Record(plan, journal)
        self.agenda: Agenda = (
            Lists(plan, record.done) if strategy is None else Rounds(plan, record.done, strategy, record.seen)
        )
        self.crew = Crew(pool.slots, plan.budget_s, record.used_before_s)
        self.deaths = Deaths()
        self.interrupted = False
        self.failure = self.last_death = ""
        self.writable = True
        self.setup_s = 0.0
        self._fit()

    # --- the loop ---

    def go(self) -> None:
        """Run to the end, whatever that is; see :meth:`summary`."""
        self.reporter.on_plan(summarize(self.plan, max(len(self.crew.slots), 1)), self.agenda.before)
        try:
            if self.agenda or self._more():
                for slot in self.crew:
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
        """End the run; the first reason counts."""
        self.failure = self.failure or reason

    def _fail(self, e: SynthError) -> None:
        self.writable = self.writable and not isinstance(e, JournalError)
        self.fail(str(e))

    def _loop(self) -> None:
        while not self.interrupted and not self.failure:
            for slot in self.crew:
                if slot.state == "idle":
                    self._assign(slot)
            states = {slot.state for slot in self.crew}
            if "busy" not in states and not (self.agenda and "starting" in states):
                if not self.agenda and self._more():
                    continue
                self._finish()
            if all(slot.state == "gone" for slot in self.crew):
                return
            for name, event in self.pool.events(0.1):
                self._hear(self.crew.slots[name], event)
            self._watch()

    def _finish(self) -> None:
        """Nobody works any more: each times its last reference and ends; who only wanted to help needs not."""
        for slot in self.crew:
            if slot.state == "idle":
                slot.turn_to("finishing", Begin("reference"))
                self.pool.send(slot.name, None)
            elif slot.state == "starting":
                self.pool.kill(slot.name)
                slot.state = "gone"

    def _stop(self) -> None:
        """End every worker; what they had said before still counts."""
        for slot in self.crew:
            said = self.pool.kill(slot.name)
            if self.writable:
                try:
                    self._rest(slot, said)
                except JournalError as e:
                    self._fail(e)

    # --- what workers say ---

    def _hear(self, slot: Slot, event: Event) -> None:
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

    def _rest(self, slot: Slot, said: Sequence[Event]) -> None:
        for event in said:
            if isinstance(event, Timed):
                self._hear_timing(slot, event)

    def _hear_started(self, slot: Slot, event: Started) -> None:
        environment = event.environment
        if problem := self.record.start(environment):
            self.fail(problem)
            return
        slot.turn_to("idle")
        slot.layer = None
        self.reporter.on_worker(slot.name, f"timing on {environment.get('device', 'an unnamed device')}")
        if (memory := environment.get("memory_free_bytes")) is not None:
            self._leave_out_what_is_too_large(slot, float(memory))

    def _hear_timing(self, slot: Slot, timed: Timed) -> None:
        if timed.reference is not None:
            self.record.add_reference(slot.name, timed)
        elif slot.work is None or timed.tactic not in slot.pending:
            return
        slot.used_s += timed.seconds
        if timed.ms is not None:
            slot.deaths = 0
        if timed.reference is None:
            self._add(slot, timed)

    def _add(self, slot: Slot, timed: Timed) -> None:
        """Take in how a tactic of a worker's item went."""
        assert slot.work is not None
        key = self.record.add(slot.name, slot.work, timed)
        slot.pending.remove(timed.tactic)
        cell = self.plan.cell(slot.work, timed.tactic)
        if timed.ms is None:
            self.reporter.on_failure(cell, timed.error or "", self._progress())
        else:
            self.crew.learn(self.agenda.predicted(key, timed.seconds), timed.seconds)
            self.reporter.on_timing(cell, timed.ms, timed.throttled, self._progress())

    def _hear_finished(self, slot: Slot, event: Finished) -> None:
        if slot.state == "finishing":
            slot.state = "gone"
            return
        slot.out_of_time = event.out_of_time
        self._give_back(slot)
        slot.turn_to("idle")

    def _hear_refused(self, slot: Slot, event: Refused) -> None:
        batch = slot.work
        if event.scope == "run" or batch is None:
            self.fail(event.error)
            return
        layer = self.plan.layers[batch.layer]
        if event.scope == "shape":
            slot.layer = None
            self._drop(slot, batch.layer, 0, f"{layer} is skipped: {event.error}")
        else:
            self._drop(slot, batch.layer, batch.tokens, f"{layer} stops before {batch.tokens} tokens: {event.error}")
        slot.turn_to("idle")

    # --- what goes wrong ---

    def _watch(self) -> None:
        """Bury workers that haven't said anything for too long."""
        now = time.monotonic()
        away, self.looked_at = now - self.looked_at > _AWAY_S, now
        for slot in self.crew:
            if away:
                # The whole run was stopped, its workers maybe too.
                slot.since = now
            if slot.state in ("idle", "gone") or self.failure:
                continue
            limit = self.limits.of(slot.begun or Begin("start"))
            if now - slot.since <= limit:
                continue
            heard = len(slot.pending)
            self._rest(slot, self.pool.kill(slot.name))
            # What it said at the very end is not the timing that hangs.
            if len(slot.pending) == heard:
                self._bury(slot, f"no answer for {limit:.0f} s, so it counts as hanging", fault=True)
            else:
                self._bury(slot, "no answer", fault=False)

    def _bury(self, slot: Slot, reason: str, fault: bool) -> None:
        """Deal with a dead worker: mark the cell it died of, put the rest back, start another."""
        self.last_death = reason
        self.record.note(f"{slot.name}: {reason}")
        self.reporter.on_worker(slot.name, reason)
        slot.deaths += 1
        batch = slot.work
        if (tactic := self.deaths.blame(slot, fault)) is not None:
            self._add(slot, Timed(tactic, None, reason, False, 0.0))
        self._give_back(slot)
        slot.layer = slot.begun = None
        if batch is not None and (deaths := self.deaths.of_layer[batch.layer]) >= MAX_LAYER_DEATHS:
            self._drop(slot, batch.layer, 0, f"{self.plan.layers[batch.layer]} is skipped: {deaths} workers died of it")
        if slot.state == "finishing":
            slot.state = "gone"
        elif slot.deaths >= MAX_DEATHS:
            slot.state = "gone"
            self.reporter.on_worker(slot.name, f"given up after {slot.deaths} deaths in a row")
        else:
            self._start(slot)

    def _leave_out_what_is_too_large(self, slot: Slot, memory: float) -> None:
        for index, layer in enumerate(self.plan.layers):
            counts = self.agenda.tokens(index)
            for tokens in counts:
                needed = estimate_memory(layer.shape, layer.quant, tokens)
                if needed > memory:
                    why = f"it needs about {needed / 2**30:.1f} GiB and the GPU has {memory / 2**30:.1f} GiB free"
                    what = "is skipped" if tokens == counts[0] else f"stops before {tokens} tokens"
                    self._drop(slot, index, tokens, f"{layer} {what}: {why}")
                    break

    def _drop(self, slot: Slot, layer: int, from_tokens: int, line: str) -> None:
        """Leave out what remains of a layer from a token count on."""
        slot.lay_down()
        self.agenda.drop(layer, from_tokens)
        if self.record.skip(line):
            self.reporter.on_worker(slot.name, line)
        self._fit()

    def _give_back(self, slot: Slot) -> None:
        """Put what an item left over back to the front of its layer."""
        if slot.work is not None and slot.pending:
            self.agenda.give_back(slot.work, slot.pending)
        slot.lay_down()

    # --- what comes next ---

    def _start(self, slot: Slot) -> None:
        slot.turn_to("starting", Begin("start"))
        self.pool.start(slot.name)

    def _assign(self, slot: Slot) -> None:
        """Give a waiting worker something to do, if there is anything."""
        left = self.crew.left_s(slot)
        if left <= 0:
            return
        taken = {s.layer for s in self.crew if s.state == "busy"}
        while (layer := self.agenda.layer_for(slot.layer, taken)) is not None:
            batch, tactics = self.agenda.pop(layer, self._fit)
            if tactics:
                slot.take(batch, tactics)
                self.pool.send(slot.name, self._item(batch, tactics, left))
                return

    def _item(self, batch: Batch, tactics: Sequence[int], left_s: float) -> Item:
        layer = self.plan.layers[batch.layer]
        table = self.plan.table(layer)
        seconds = self.agenda.seconds(batch, tactics)
        return Item(
            index=batch.layer,
            layer=layer,
            stage=batch.stage,
            tokens=batch.tokens,
            tactics=tuple(tactics),
            seconds=tuple(seconds[t] * self.crew.scale for t in tactics),
            counts=(len(table.gemm1), len(table.gemm2)),
            reference=None if batch.layer in self.deaths.references else self.plan.reference(batch.layer),
            seconds_left=left_s,
        )

    def _fit(self) -> None:
        self.agenda.fit(self.crew.all_left_s(), self.crew.in_hand())

    def _more(self) -> bool:
        """Queue more, now that nothing is left; False where that is nothing."""
        more = self.agenda.more(self.crew.all_left_s(), self.crew.idle_s())
        self._fit()
        return more

    def _progress(self) -> Progress:
        done = len(self.record.done)
        planned = max(self.agenda.planned, self.agenda.most, done)
        predicted_s = self.agenda.started_s(self.crew.in_hand()) + self.agenda.queued_s()
        return Progress(done, planned, self.record.failed, self.crew.wall_s(predicted_s))

    # --- the end ---

    def summary(self, measurements: Path | None) -> CollectSummary:
        """Return what was done, after putting it into the measurements files."""
        self._fit()
        record = self.record
        outcome: Literal["finished", "budget", "interrupted", "failed"] = "finished"
        reason = self.failure
        if reason:
            outcome = "failed"
        elif self.interrupted:
            outcome = "interrupted"
        elif self.agenda and all(s.deaths >= MAX_DEATHS for s in self.crew):
            outcome, reason = "failed", f"no worker is left: {self.last_death or 'there is none'}"
        elif self.plan.budget_s is not None and self.agenda.cut_short(any(s.out_of_time for s in self.crew)):
            outcome = "budget"
        files: tuple[Path, ...] = ()
        if measurements is not None and record.done and record.head is not None:
            try:
                files = tuple(journal_to_measurements(self.journal.path, measurements))
            except SynthError as e:
                outcome, reason = "failed", reason or str(e)
        return CollectSummary(
            outcome=outcome,
            reason=reason,
            timed=record.timed,
            failed=record.failed,
            throttled=record.throttled,
            before=self.agenda.before,
            missing=self.agenda.planned - len(record.done),
            skipped=tuple(record.skipped),
            measuring_s=sum(s.used_s for s in self.crew),
            setup_s=self.setup_s,
            wall_s=time.monotonic() - self.began,
            drift=record.drift(),
            journal=self.journal.path,
            files=files,
        )
