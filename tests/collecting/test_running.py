from __future__ import annotations

import errno
import math
import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from inline import InlinePool
from made_up import DEVICE, FAILING, LARGE, SMALL, small_plan

from synth.choosing.picks import Pick, Seen
from synth.choosing.plan import Cell, Plan, PlanSummary, estimate_memory, timing_seconds
from synth.collecting import worker as worker_module
from synth.collecting.journal import read_journal
from synth.collecting.reporters import CollectSummary, Progress, Reporter
from synth.collecting.runner import RunnerSpec
from synth.collecting.running import collect
from synth.collecting.simulated import Fault, SimulatedRunner, simulated_runner
from synth.errors import SynthError
from synth.timings.folders import load_shapes

Key = tuple[int, int, int, int, int]


class Listener(Reporter):
    """Keeps what it hears."""

    def __init__(self) -> None:
        self.cells: list[Cell] = []
        self.failures: list[str] = []
        self.lines: list[str] = []
        self.progress: list[Progress] = []
        self.plans: list[tuple[PlanSummary, int]] = []
        self.summaries: list[CollectSummary] = []

    def on_plan(self, plan: PlanSummary, done: int) -> None:
        self.plans.append((plan, done))

    def on_timing(self, cell: Cell, ms: float, throttled: bool, progress: Progress) -> None:
        self.cells.append(cell)
        self.progress.append(progress)

    def on_failure(self, cell: Cell, error: str, progress: Progress) -> None:
        self.cells.append(cell)
        self.failures.append(f"{cell}: {error}")

    def on_worker(self, worker: str, text: str) -> None:
        self.lines.append(text)

    def on_done(self, summary: CollectSummary) -> None:
        self.summaries.append(summary)


def keys(journal: Path) -> list[Key]:
    content = read_journal(journal)
    assert not content.problems
    return [e.key for e in content.entries]


def all_keys(plan: Plan) -> set[Key]:
    index = {layer: i for i, layer in enumerate(plan.layers)}
    return {(index[c.layer], c.pass_, c.stage, c.tokens, c.tactic) for c in plan.cells()}


def run(plan: Plan, spec: RunnerSpec, journal: Path, **options: object) -> CollectSummary:
    return collect(plan, spec, journal, pool=InlinePool(spec), **options)  # type: ignore[arg-type]


def test_a_run_times_every_cell_once_and_writes_measurements(spec: RunnerSpec, tmp_path: Path) -> None:
    plan = small_plan((SMALL, LARGE))
    listener = Listener()
    summary = run(plan, spec, tmp_path / "j", reporter=listener, measurements=tmp_path / "m")
    assert (summary.outcome, summary.timed, summary.missing, summary.failed) == ("finished", len(plan), 0, 1)
    assert Counter(keys(tmp_path / "j")) == Counter(all_keys(plan))
    assert Counter(listener.cells) == Counter(plan.cells())
    assert listener.summaries == [summary]
    assert listener.plans[0][1] == 0
    assert listener.progress[-1].done == listener.progress[-1].total == len(plan)
    parts = load_shapes(tmp_path / "m")
    assert sorted(summary.files) == sorted(p.path for p in parts if p.path)
    assert {p.label for p in parts} == {"small", "large"}
    assert all(p.origin.simulated for p in parts)
    assert sum(map(len, parts)) == len(plan)
    small = next(p for p in parts if p.label == "small")
    assert [r.error for r in small.rows() if r.cell[1:] == FAILING] == ["no"]
    assert math.isclose(summary.measuring_s, sum(e.seconds for e in everything(tmp_path / "j")), rel_tol=1e-3)


def everything(journal: Path) -> list[worker_module.Timed]:
    content = read_journal(journal)
    return [*content.entries, *content.references]  # type: ignore[list-item]


def test_the_same_call_again_has_nothing_to_do(spec: RunnerSpec, tmp_path: Path) -> None:
    run(small_plan(), spec, tmp_path / "j")
    before = (tmp_path / "j").read_bytes()
    again = run(small_plan(), spec, tmp_path / "j")
    assert (again.outcome, again.timed, again.before) == ("finished", 0, len(small_plan()))
    assert (tmp_path / "j").read_bytes() == before


def test_more_of_the_same_plan_goes_on_in_its_journal(spec: RunnerSpec, tmp_path: Path) -> None:
    some = run(small_plan(fraction=0.2), spec, tmp_path / "j", measurements=tmp_path / "m")
    rest = run(small_plan(), spec, tmp_path / "j", measurements=tmp_path / "m")
    assert some.timed + rest.timed == len(small_plan())
    assert Counter(keys(tmp_path / "j")) == Counter(all_keys(small_plan()))
    (part,) = load_shapes(tmp_path / "m")
    assert len(part) == len(small_plan()) and list(part.passes) == [1]


def test_passes_become_passes(spec: RunnerSpec, tmp_path: Path) -> None:
    run(small_plan(passes=(1, 2), buckets=(64,)), spec, tmp_path / "j", measurements=tmp_path / "m")
    (part,) = load_shapes(tmp_path / "m")
    ms = {n: part.ms[part.pass_ == n] for n in (1, 2)}
    assert len(ms[1]) == len(ms[2]) == 126
    assert not (ms[1] == ms[2]).any()


def test_the_journal_of_another_plan_is_refused(spec: RunnerSpec, tmp_path: Path) -> None:
    run(small_plan(), spec, tmp_path / "j")
    with pytest.raises(SynthError, match="journal of another plan"):
        run(small_plan(buckets=(1,)), spec, tmp_path / "j")


@pytest.mark.parametrize("change", [{"device": "NVIDIA H100"}, {"flashinfer": "0.7.3"}, {"policy": {"timer": "x"}}])
def test_a_gpu_that_the_plan_is_not_for_times_nothing(change: dict[str, object], table: Path, tmp_path: Path) -> None:
    spec = RunnerSpec("test_running:Elsewhere", {"change": change, "measurements": [str(table)]})
    summary = run(small_plan(), spec, tmp_path / "j", measurements=tmp_path / "m")
    assert summary.outcome == "failed"
    assert next(iter(change)).replace("policy", "timing policy") in summary.reason
    assert not (tmp_path / "j").exists() and not summary.files


class Elsewhere(SimulatedRunner):
    """A runner whose environment, counts or start are changed."""

    def __init__(
        self,
        measurements: list[str],
        change: dict[str, object] | None = None,
        counts: tuple[int, int] | None = None,
        broken: str = "",
    ) -> None:
        if broken:
            raise RuntimeError(broken)
        super().__init__(measurements)
        self._change, self._counts = change or {}, counts

    def environment(self) -> dict[str, object]:
        return {**super().environment(), **self._change}

    def counts(self, quant: str) -> tuple[int, int]:
        return self._counts or super().counts(quant)


@pytest.mark.parametrize("name", ["driver", "cuda", "torch"])
def test_a_journal_does_not_go_on_under_another_stack(name: str, table: Path, tmp_path: Path) -> None:
    def spec(version: str) -> RunnerSpec:
        return RunnerSpec("test_running:Elsewhere", {"change": {name: version}, "measurements": [str(table)]})

    run(small_plan(fraction=0.1), spec("1"), tmp_path / "j")
    before = keys(tmp_path / "j")
    summary = run(small_plan(), spec("2"), tmp_path / "j")
    assert summary.outcome == "failed" and f"began with {name} 1" in summary.reason
    assert keys(tmp_path / "j") == before
    assert run(small_plan(), spec("1"), tmp_path / "j").outcome == "finished"


def test_tactic_counts_are_asserted_before_anything_is_timed(table: Path, tmp_path: Path) -> None:
    spec = RunnerSpec("test_running:Elsewhere", {"counts": (45, 80), "measurements": [str(table)]})
    summary = run(small_plan(), spec, tmp_path / "j")
    assert summary.outcome == "failed" and "45 gemm1 and 80 gemm2" in summary.reason
    assert keys(tmp_path / "j") == []


def test_a_driver_that_is_gone_ends_the_run(table: Path, tmp_path: Path) -> None:
    spec = RunnerSpec("test_running:Elsewhere", {"broken": "CUDA driver gone", "measurements": [str(table)]})
    listener = Listener()
    summary = run(small_plan(), spec, tmp_path / "j", reporter=listener)
    assert summary.outcome == "failed" and summary.reason == "no worker is left: RuntimeError: CUDA driver gone"
    assert listener.lines[-1] == "given up after 3 deaths in a row"


def test_a_layer_too_large_is_skipped_and_the_others_are_timed(table: Path, tmp_path: Path) -> None:
    spec = simulated_runner([table], memory_bytes=10e6)
    listener = Listener()
    summary = run(small_plan((LARGE, SMALL)), spec, tmp_path / "j", reporter=listener)
    assert summary.outcome == "finished" and summary.missing == 0
    assert {k[0] for k in keys(tmp_path / "j")} == {1}
    (line,) = summary.skipped
    assert line.startswith("large bf16 is skipped: ") and "GiB" in line
    assert line in listener.lines


def test_a_bucket_too_large_is_skipped_and_the_smaller_ones_are_timed(table: Path, tmp_path: Path) -> None:
    spec = simulated_runner([table], memory_bytes=8.7e6)
    summary = run(small_plan(buckets=(1, 64, 512)), spec, tmp_path / "j")
    assert {k[3] for k in keys(tmp_path / "j")} == {1, 64}
    (line,) = summary.skipped
    assert line.startswith("small bf16 stops before 512 tokens: ")


def test_what_is_too_large_is_left_out_before_it_is_allocated(table: Path, tmp_path: Path) -> None:
    change = {"memory_free_bytes": estimate_memory(SMALL.shape, "bf16", 64)}
    spec = RunnerSpec("test_running:Elsewhere", {"change": change, "measurements": [str(table)]})
    summary = run(small_plan((LARGE, SMALL), buckets=(1, 64, 512)), spec, tmp_path / "j")
    assert {(k[0], k[3]) for k in keys(tmp_path / "j")} == {(1, 1), (1, 64)}
    assert summary.outcome == "finished" and summary.missing == 0
    assert summary.skipped[0].startswith("large bf16 is skipped: it needs about")
    assert summary.skipped[1].startswith("small bf16 stops before 512 tokens: it needs about")


def test_a_layer_that_cannot_be_timed_is_skipped(spec: RunnerSpec, tmp_path: Path) -> None:
    unknown = replace(SMALL, shape=replace(SMALL.shape, hidden=768), label="unknown")
    summary = run(small_plan((unknown, SMALL)), spec, tmp_path / "j")
    assert {k[0] for k in keys(tmp_path / "j")} == {1}
    assert "unknown bf16 is skipped" in summary.skipped[0]


def test_throttled_timings_are_marked(table: Path, tmp_path: Path) -> None:
    cell = (1, 64, 7)
    spec = simulated_runner([table], faults=[Fault("throttle", cell=cell)])
    summary = run(small_plan(), spec, tmp_path / "j", measurements=tmp_path / "m")
    assert summary.throttled == 1
    (part,) = load_shapes(tmp_path / "m")
    assert [r.cell[1:] for r in part.rows() if r.throttled] == [cell]


def test_a_sticky_error_marks_its_cell_and_a_fresh_worker_goes_on(table: Path, tmp_path: Path) -> None:
    spec = simulated_runner([table], faults=[Fault("sticky", cell=(1, 64, 7))])
    listener = Listener()
    summary = run(small_plan(), spec, tmp_path / "j", reporter=listener)
    assert summary.outcome == "finished" and summary.failed == 2
    assert Counter(keys(tmp_path / "j")) == Counter(all_keys(small_plan()))
    assert sum(line.startswith("timing on") for line in listener.lines) == 2
    assert any("tactic 7: CUDA error" in line for line in listener.failures)


def test_a_layer_that_kills_five_workers_is_skipped(table: Path, tmp_path: Path) -> None:
    spec = simulated_runner([table], faults=[Fault("sticky", cell=(1, 64, i)) for i in range(9)])
    summary = run(small_plan((SMALL, LARGE), buckets=(1, 64)), spec, tmp_path / "j")
    assert [line for line in summary.skipped] == [
        "small bf16 is skipped: 5 workers died of it",
        "large bf16 is skipped: 5 workers died of it",
    ]
    errors = [e for e in read_journal(tmp_path / "j").entries if e.row.error]
    assert sum("CUDA error" in (e.row.error or "") for e in errors) == 10


def test_workers_that_only_die_end_the_run(table: Path, tmp_path: Path) -> None:
    spec = simulated_runner([table], faults=[Fault("sticky")])
    summary = run(small_plan(), spec, tmp_path / "j")
    assert summary.outcome == "failed"
    assert summary.reason.startswith("no worker is left: CUDA error")


def test_a_reference_that_kills_is_not_timed_again(table: Path, tmp_path: Path) -> None:
    plan = small_plan()
    reference = plan.reference(0)
    spec = simulated_runner([table], faults=[Fault("sticky", cell=reference)])
    summary = run(plan, spec, tmp_path / "j")
    assert summary.outcome == "finished" and not summary.drift
    assert Counter(keys(tmp_path / "j")) == Counter(all_keys(plan))


def test_the_reference_is_timed_throughout(spec: RunnerSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "REFERENCE_EVERY_S", 0.5)
    plan = small_plan((SMALL, LARGE), buckets=(1, 64, 512))
    summary = run(plan, spec, tmp_path / "j", measurements=tmp_path / "m")
    assert [d.layer for d in summary.drift] == ["small bf16", "large bf16"]
    for drift, part in zip(summary.drift, sorted(load_shapes(tmp_path / "m"), key=lambda p: p.shape), strict=True):
        index = [d.layer for d in summary.drift].index(drift.layer)
        spent = sum(e.seconds for e in read_journal(tmp_path / "j").entries if e.layer == index)
        assert drift.times >= 2 + spent / 0.6
        assert (drift.stage, drift.tokens, drift.tactic) == plan.reference(index)
        assert abs(drift.drift) < 0.03 and 0 < drift.max_deviation < 0.03
        assert part.passes[1]["reference"]["times"] == drift.times


@pytest.mark.parametrize("wrong", [0.2, 1.0, 5.0])
@pytest.mark.parametrize("share", [0.1, 0.3, 0.6])
def test_a_budget_holds_whatever_the_predictions_are_worth(
    wrong: float, share: float, table: Path, tmp_path: Path
) -> None:
    spec = simulated_runner([table])
    truth = {(p.shape, r.cell[1:]): r.ms for p in load_shapes(table) for r in p.rows()}

    def predict(shape: object, quant: str, stage: int, tokens: int, ids: list[int]) -> list[float]:
        ms = [truth[shape, (stage, tokens, i)] for i in ids]  # type: ignore[index]
        return [wrong * (x if x == x else 1.0) for x in ms]

    budget = share * sum(timing_seconds(ms) for ms in truth.values() if ms == ms)
    plan = small_plan((SMALL, LARGE), buckets=(1, 64, 512), budget_s=budget, predict=predict)
    summary = run(plan, spec, tmp_path / "j")
    assert summary.outcome == "budget"
    assert 0.9 * budget <= summary.measuring_s <= 1.1 * budget
    if share == 0.6:
        # The most promising candidates are timed in every bucket.
        timed = set(keys(tmp_path / "j"))
        assert all((*b.key, b.tactics[0]) in timed for b in plan.batches)


def test_what_is_left_of_a_budget_is_spent_on_resuming(spec: RunnerSpec, tmp_path: Path) -> None:
    first = run(small_plan(budget_s=1.0), spec, tmp_path / "j")
    again = run(small_plan(budget_s=1.0), spec, tmp_path / "j")
    assert again.measuring_s < 0.1
    more = run(small_plan(budget_s=1.5), spec, tmp_path / "j")
    assert first.measuring_s + again.measuring_s + more.measuring_s == pytest.approx(1.5, rel=0.1)
    assert len(keys(tmp_path / "j")) == first.timed + again.timed + more.timed


def test_the_time_left_follows_what_is_observed(spec: RunnerSpec, tmp_path: Path) -> None:
    plan = small_plan(predict=lambda s, q, g, m, ids: [0.001] * len(ids))
    listener = Listener()
    summary = run(plan, spec, tmp_path / "j", reporter=listener)
    middle = len(listener.progress) // 2
    done_s = sum(timing_seconds(0.04) for _ in range(middle))
    assert listener.progress[middle].left_s > 0.5 * (summary.measuring_s - done_s)
    assert listener.progress[-1].left_s == pytest.approx(0, abs=1e-6)


def test_ctrl_c_ends_the_run_and_the_same_call_goes_on(spec: RunnerSpec, tmp_path: Path) -> None:
    class Stop(Listener):
        def on_timing(self, cell: Cell, ms: float, throttled: bool, progress: Progress) -> None:
            super().on_timing(cell, ms, throttled, progress)
            if progress.done == 40:
                os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    summary = run(small_plan(), spec, tmp_path / "j", reporter=Stop(), measurements=tmp_path / "m")
    assert summary.outcome == "interrupted"
    assert summary.timed == 40 and summary.missing == len(small_plan()) - 40
    assert signal.getsignal(signal.SIGINT) is before
    (part,) = load_shapes(tmp_path / "m")
    assert len(part) == 40
    rest = run(small_plan(), spec, tmp_path / "j", measurements=tmp_path / "m")
    assert (rest.outcome, rest.before, rest.timed) == ("finished", 40, len(small_plan()) - 40)
    (part,) = load_shapes(tmp_path / "m")
    assert len(part) == len(small_plan()) and list(part.passes) == [1]
    assert len(part.passes[1]["resumed"]) == 1


def test_a_full_disk_ends_the_run_and_loses_nothing(spec: RunnerSpec, tmp_path: Path) -> None:
    room = 9000

    def write(fd: int, data: bytes) -> int:
        nonlocal room
        n = os.write(fd, data[:room])
        room -= n
        if n == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return n

    listener = Listener()
    summary = run(small_plan(), spec, tmp_path / "j", reporter=listener, write=write)
    assert summary.outcome == "failed" and "No space left on device" in summary.reason
    kept = keys(tmp_path / "j")
    assert len(kept) == summary.timed == len(listener.cells) > 20
    rest = run(small_plan(), spec, tmp_path / "j")
    assert rest.before == len(kept)
    assert Counter(keys(tmp_path / "j")) == Counter(all_keys(small_plan()))


class Killed(BaseException):
    """The process is gone."""


def killing(after: int) -> Callable[[int, bytes], int]:
    """Return a write that ends the process after some bytes, in the middle of a line or between two."""

    def write(fd: int, data: bytes) -> int:
        nonlocal after
        n = os.write(fd, data[:after]) if after else 0
        after -= n
        if n < len(data):
            raise Killed
        return n

    return write


def test_a_thousand_kills_lose_no_timing_and_double_none(spec: RunnerSpec, tmp_path: Path) -> None:
    chance = random.Random(7)
    plan = small_plan(buckets=(64,))
    expected = Counter(all_keys(plan))
    kills = finished = torn = 0
    while kills < 1000:
        journal = tmp_path / f"{finished}.jsonl"
        heard: list[Cell] = []
        while True:
            listener = Listener()
            summary = None
            try:
                summary = run(plan, spec, journal, reporter=listener, write=killing(chance.randrange(3000)))
            except Killed:
                kills += 1
            heard += listener.cells
            # A head that never began leaves no journal.
            raw = journal.read_bytes() if journal.exists() else b""
            torn += bool(raw) and not raw.endswith(b"\n")
            if raw.count(b"\n"):
                # What anybody was told of is there, once.
                assert Counter(keys(journal)) == Counter(
                    (plan.layers.index(c.layer), c.pass_, c.stage, c.tokens, c.tactic) for c in heard
                )
            else:
                assert not heard
            if summary is not None and summary.outcome == "finished":
                break
        assert Counter(keys(journal)) == expected
        finished += 1
    assert finished >= 5
    assert torn > 300


def test_simulated_numbers_never_pass_for_measured(spec: RunnerSpec, tmp_path: Path) -> None:
    run(small_plan(), spec, tmp_path / "j", measurements=tmp_path / "m")
    head = read_journal(tmp_path / "j").head
    assert head.simulated and head.device == DEVICE
    assert [p.origin.simulated for p in load_shapes(tmp_path / "m")] == [True]


# --- rounds ----------------------------------------------------------------------------------------------------------


class Scripted:
    """Asks for given rounds, one after the other, and keeps what it was told."""

    def __init__(self, *rounds: list[Pick]) -> None:
        self.rounds = list(rounds)
        self.told: list[tuple[list[Seen], int, float]] = []

    def next(self, seen: Sequence[Seen], most: int, seconds: float) -> list[Pick]:
        self.told.append((list(seen), most, seconds))
        done = {s.pick for s in seen}
        while self.rounds and done >= set(self.rounds[0]):
            self.rounds.pop(0)
        return self.rounds[0][:most] if self.rounds else []


FIRST = [Pick(0, 1, 1, 3), Pick(0, 1, 1, 5), Pick(0, 2, 64, 60)]
SECOND = [Pick(0, 2, 64, 77), Pick(0, 1, 64, 2)]


def picked(journal: Path) -> list[Pick]:
    return [Pick(layer, stage, tokens, tactic) for layer, _, stage, tokens, tactic in keys(journal)]


def test_rounds_decide_what_is_timed_and_hear_of_it(spec: RunnerSpec, tmp_path: Path) -> None:
    strategy = Scripted(FIRST, SECOND)
    done = run(small_plan(), spec, tmp_path / "j", strategy=strategy, measurements=tmp_path / "m")
    assert (done.outcome, done.timed, done.failed, done.missing) == ("finished", 5, 1, 0)
    assert set(picked(tmp_path / "j")) == {*FIRST, *SECOND}
    heard = [{s.pick for s in seen} for seen, _, _ in strategy.told]
    assert heard == [set(), set(FIRST), {*FIRST, *SECOND}]
    assert [s.pick for s in strategy.told[-1][0] if math.isnan(s.ms)] == [Pick(0, *FAILING)]
    (part,) = load_shapes([tmp_path / "m"])
    assert len(part) == 5


def test_rounds_end_at_the_plans_number_of_timings(spec: RunnerSpec, tmp_path: Path) -> None:
    plan = small_plan(fraction=0.01)
    done = run(plan, spec, tmp_path / "j", strategy=Scripted(FIRST, SECOND))
    assert done.timed == sum(b.limit for b in plan.batches) == 4
    assert done.outcome == "finished"


def test_a_second_run_tells_the_rounds_what_the_first_one_timed(spec: RunnerSpec, tmp_path: Path) -> None:
    assert run(small_plan(), spec, tmp_path / "j", strategy=Scripted(FIRST)).timed == 3
    strategy = Scripted(FIRST, SECOND)
    done = run(small_plan(), spec, tmp_path / "j", strategy=strategy)
    assert (done.before, done.timed) == (3, 2)
    assert {s.pick for s in strategy.told[0][0]} == set(FIRST)
    assert run(small_plan(), spec, tmp_path / "j", strategy=Scripted(FIRST, SECOND)).timed == 0


def test_rounds_stop_when_the_budget_is_spent(spec: RunnerSpec, tmp_path: Path) -> None:
    every = [Pick(0, 1, t, i) for t in (1, 64) for i in range(45)]
    strategy = Scripted(*([p] for p in every))
    done = run(small_plan(budget_s=0.1), spec, tmp_path / "j", strategy=strategy)
    assert done.outcome == "budget"
    assert 0 < done.timed < 45
    assert done.measuring_s < 0.12
    left = [seconds for _, _, seconds in strategy.told]
    assert left == sorted(left, reverse=True)


def test_a_worker_that_dies_during_a_round_loses_nothing(table: Path, tmp_path: Path) -> None:
    fault = Fault("sticky", cell=(2, 64, 60), once=str(tmp_path / "once"))
    spec = simulated_runner([table], faults=[fault])
    done = run(small_plan(), spec, tmp_path / "j", strategy=Scripted(FIRST, SECOND))
    assert done.outcome == "finished"
    assert set(picked(tmp_path / "j")) == {*FIRST, *SECOND}
