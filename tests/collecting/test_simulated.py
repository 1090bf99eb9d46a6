from __future__ import annotations

import io
import statistics
import time
from pathlib import Path

import pytest
from inline import InlinePool
from made_up import DEVICE, FAILING, SMALL, small_plan
from rich.console import Console

from synth.choosing.plan import timing_seconds
from synth.collecting.reporters import RichReporter, duration
from synth.collecting.running import collect
from synth.collecting.simulated import Fault, SimulatedRunner, simulated_runner
from synth.errors import SynthError, TacticError
from synth.timings.folders import load_shapes


def runner(table: Path, **options: object) -> SimulatedRunner:
    made = SimulatedRunner([str(table)], **options)  # type: ignore[arg-type]
    made.prepare(SMALL.shape, "bf16", "swiglu")
    made.prepare_bucket(1, 64)
    return made


def test_it_replays_the_table_with_its_noise(table: Path) -> None:
    part = next(p for p in load_shapes(table) if p.shape == SMALL.shape)
    truth = next(r.ms for r in part.rows() if r.cell == (1, 1, 64, 5))
    made = runner(table, noise=0.01)
    times = [made.time(1, 64, 5) for _ in range(400)]
    assert statistics.mean(times) == pytest.approx(truth, rel=0.005)
    assert 0.008 < statistics.stdev(times) / truth < 0.012
    again = runner(table, noise=0.01)
    assert [again.time(1, 64, 5) for _ in range(400)] == times
    assert runner(table, noise=0.01, seed=1).time(1, 64, 5) != times[0]
    assert made.environment()["simulated"] is True


def test_it_replays_failures(table: Path) -> None:
    with pytest.raises(TacticError, match="no"):
        runner(table).time(*FAILING)
    with pytest.raises(TacticError, match="no timing to replay"):
        runner(table).time(1, 4096, 5)


def test_it_takes_its_time_where_asked_to(table: Path) -> None:
    made = runner(table, speed=2.0)
    began = time.perf_counter()
    ms = made.time(1, 64, 5)
    assert time.perf_counter() - began >= timing_seconds(ms) / 2
    assert made.clock() == pytest.approx(timing_seconds(ms))


def test_it_needs_something_to_replay(table: Path, tmp_path: Path) -> None:
    with pytest.raises(SynthError, match="no timings of NVIDIA H100"):
        SimulatedRunner([str(table)], "NVIDIA H100")
    with pytest.raises(SynthError, match="no timings to replay"):
        SimulatedRunner([str(table)], DEVICE).prepare(SMALL.shape, "fp8", "swiglu")
    with pytest.raises(SynthError, match="no timings of any device"):
        SimulatedRunner([str(tmp_path)])


def test_a_person_sees_progress_and_what_goes_wrong(table: Path, tmp_path: Path) -> None:
    spec = simulated_runner([table], faults=[Fault("sticky", cell=(1, 64, 7))])
    text = io.StringIO()
    with RichReporter(Console(file=text, force_terminal=True, width=160)) as reporter:
        collect(small_plan(), spec, tmp_path / "j", pool=InlinePool(spec), reporter=reporter)
    shown = text.getvalue()
    assert "inline: timing on NVIDIA H200" in shown
    assert "small bf16 gemm1 64 tokens tactic 7: CUDA error" in shown
    assert "252/252" in shown and "2 failed" in shown and "left" in shown


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.4, "59 s"), (59.9, "1 min 00 s"), (125, "2 min 05 s"), (7380, "2 h 03 min")]
)
def test_durations_are_said_as_people_say_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text
