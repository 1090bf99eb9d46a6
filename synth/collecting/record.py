"""A run's side of the journal: what may be written into it, what is written, and what that adds up to."""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from synth.choosing.picks import Pick, Seen
from synth.choosing.plan import Batch, Plan
from synth.collecting.agenda import Key
from synth.collecting.journal import MUST_MATCH, Entry, Head, Journal
from synth.collecting.reporters import Drift
from synth.collecting.results import drift_of
from synth.collecting.worker import Timed
from synth.errors import SynthError
from synth.timings.rows import Row


class Record:
    """What the journal of a plan holds, earlier runs included, and the lines of this one.

    Parameters
    ----------
    plan : Plan
    journal : Journal

    Attributes
    ----------
    head : Head or None
        None until the first worker of a new journal has started.
    done : set of Key
        Cells that are timed.
    seen : list of Seen
        Their timings, in order.
    used_before_s : float
        Seconds of measuring of earlier runs.
    timed, failed, throttled : int
        Timings of this run, those of them that failed, those taken while throttled.
    skipped : list of str
        Lines about what was left out.

    Raises
    ------
    SynthError
        When the journal is another plan's.
    """

    def __init__(self, plan: Plan, journal: Journal) -> None:
        self._plan, self._journal = plan, journal
        self.head: Head | None = None
        self.done: set[Key] = set()
        self.seen: list[Seen] = []
        self.used_before_s = 0.0
        self.timed = self.failed = self.throttled = 0
        self.skipped: list[str] = []
        self._references: list[Entry] = []
        self._session = 0
        self._in_session = False
        content = journal.content
        if content is None:
            return
        if content.head.plan != plan.identity:
            raise SynthError(f"{journal.path} is the journal of another plan; name another place for this one")
        self.head, self._session = content.head, len(content.sessions)
        self._references += content.references
        self.done |= {e.key for e in content.entries}
        self.seen += [_seen(e) for e in content.entries]
        self.used_before_s = sum(e.seconds for e in (*content.entries, *content.references))
        if content.torn:
            self.skipped.append(f"the journal's last line was cut short ({content.torn} bytes); it is dropped")
        if n := len(content.problems):
            first = content.problems[0]
            self.skipped.append(f"{n} line{'s' * (n > 1)} of the journal can't be read, first {first.row}; timed again")

    def start(self, environment: Mapping[str, Any]) -> str:
        """Begin the journal and this run's session in it, where that isn't done yet.

        Returns
        -------
        str
            What makes timings taken in this environment ones that don't belong in this journal; empty otherwise.
        """
        new = self.head is None
        head = self.head or _new_head(self._plan, environment)
        if problem := _mismatch(self._plan, head, environment):
            return problem
        if new:
            self.head = head
            self._journal.begin(head)
        if not self._in_session:
            self._journal.session(_now(), environment)
            self._in_session = True
        return ""

    def add(self, worker: str, batch: Batch, timed: Timed) -> Key:
        """Write a timing of a batch, or how it failed, and return its cell."""
        ms = math.nan if timed.ms is None else timed.ms
        row = Row(batch.pass_, batch.stage, batch.tokens, timed.tactic, ms, timed.throttled, timed.error)
        entry = Entry(batch.layer, row, timed.seconds, worker)
        self._journal.add(entry)
        self.done.add(entry.key)
        self.seen.append(_seen(entry))
        self.timed += 1
        self.failed += timed.ms is None
        self.throttled += timed.throttled
        return entry.key

    def add_reference(self, worker: str, timed: Timed) -> None:
        """Write a timing of a reference cell."""
        assert timed.reference is not None and timed.ms is not None
        layer, stage, tokens, tactic = timed.reference
        row = Row(self._plan.passes[0], stage, tokens, tactic, timed.ms, timed.throttled)
        entry = Entry(layer, row, timed.seconds, worker, self._session, reference=True)
        self._journal.add(entry)
        self._references.append(entry)

    def note(self, text: str) -> None:
        """Write a line for people."""
        # Before the head is written there is nothing to append to.
        if self._in_session:
            self._journal.note(text)

    def skip(self, line: str) -> bool:
        """Note what is left out; False where that was said before."""
        if line in self.skipped:
            return False
        self.skipped.append(line)
        self.note(line)
        return True

    def drift(self) -> tuple[Drift, ...]:
        """Return the drift of the reference cell of each layer that has one."""
        by_layer = (
            drift_of(str(layer), [e for e in self._references if e.layer == i])
            for i, layer in enumerate(self._plan.layers)
        )
        return tuple(drift for drift in by_layer if drift is not None)


def _new_head(plan: Plan, environment: Mapping[str, Any]) -> Head:
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


def _mismatch(plan: Plan, head: Head, environment: Mapping[str, Any]) -> str:
    """Say what makes timings taken in this environment ones that don't belong in this journal."""
    for name in ("device", "arch", "flashinfer"):
        value = getattr(plan, name)
        if environment.get(name, value) != value:
            return f"the plan is for {name} {value} and this is {environment[name]}; plan for what is here"
    if dict(environment.get("policy", plan.policy)) != dict(plan.policy):
        return "the plan has another timing policy than the runner; plan with the runner's"
    before = {**head.environment, "simulated": head.simulated}
    now = {"simulated": False, **environment}
    for name in MUST_MATCH:
        then, here = before.get(name), now.get(name)
        if then != here and then is not None and here is not None:
            return (
                f"the journal began with {name} {then} and this is {here}; "
                "take the rest as another pass (--pass) or go on where it began"
            )
    return ""


def _seen(entry: Entry) -> Seen:
    return Seen(Pick(entry.layer, entry.row.stage, entry.row.tokens, entry.row.tactic), entry.row.ms)


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
