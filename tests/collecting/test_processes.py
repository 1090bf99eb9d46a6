from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from made_up import LARGE, SMALL, small_plan
from test_running import Listener, all_keys, keys

import synth
from synth.choosing.plan import Cell
from synth.collecting import run
from synth.collecting.gpus import find_gpus, visible_name
from synth.collecting.journal import read_journal
from synth.collecting.pools import ProcessPool
from synth.collecting.reporters import Progress
from synth.collecting.running import collect
from synth.collecting.simulated import Fault, simulated_runner
from synth.collecting.slots import Limits
from synth.errors import SynthError

CELL = (1, 64, 7)


def test_two_gpus_share_the_work(table: Path, tmp_path: Path) -> None:
    plan = small_plan((SMALL, LARGE))
    summary = collect(plan, simulated_runner([table], speed=5), tmp_path / "j", gpus=(0, 1))
    assert summary.outcome == "finished"
    assert Counter(keys(tmp_path / "j")) == Counter(all_keys(plan))
    by_worker = Counter(e.worker for e in read_journal(tmp_path / "j").entries)
    assert set(by_worker) == {"gpu0", "gpu1"} and min(by_worker.values()) > 50


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("hang", "no answer for 1 s"),
        ("crash", "ended with exit code 3"),
        ("sticky", "illegal memory access"),
    ],
)
def test_a_cell_that_ends_its_worker_is_marked_and_a_fresh_one_goes_on(
    kind: str, reason: str, table: Path, tmp_path: Path
) -> None:
    spec = simulated_runner([table], faults=[Fault(kind, cell=CELL)])  # type: ignore[arg-type]
    listener = Listener()
    limits = Limits(timing_s=1.0, timing_factor=1.0)
    summary = collect(small_plan(), spec, tmp_path / "j", reporter=listener, limits=limits)
    assert (summary.outcome, summary.failed) == ("finished", 2)
    assert Counter(keys(tmp_path / "j")) == Counter(all_keys(small_plan()))
    (error,) = [e.row.error for e in read_journal(tmp_path / "j").entries if e.row.cell[1:] == CELL]
    assert error is not None and reason in error
    assert sum(line.startswith("timing on") for line in listener.lines) == 2


def test_a_worker_that_is_killed_once_costs_nothing(table: Path, tmp_path: Path) -> None:
    spec = simulated_runner([table], faults=[Fault("die", at=30, once=str(tmp_path / "died"))])
    summary = collect(small_plan(), spec, tmp_path / "j")
    assert (summary.outcome, summary.failed) == ("finished", 1)
    assert (tmp_path / "died").exists()
    assert Counter(keys(tmp_path / "j")) == Counter(all_keys(small_plan()))


def test_a_cell_that_kills_again_is_marked(table: Path, tmp_path: Path) -> None:
    spec = simulated_runner([table], faults=[Fault("die", cell=CELL)])
    summary = collect(small_plan(), spec, tmp_path / "j")
    assert (summary.outcome, summary.failed) == ("finished", 2)
    (error,) = [e.row.error for e in read_journal(tmp_path / "j").entries if e.row.cell[1:] == CELL]
    assert error == "the worker process was ended by SIGKILL"


def test_the_cells_of_a_gpu_that_is_given_up_go_to_the_others(table: Path, tmp_path: Path) -> None:
    # The first worker that gets to its first timing dies, and so do the next two, all on one GPU or on two.
    faults = [Fault("die", at=1, once=str(tmp_path / f"died{i}")) for i in range(3)]
    spec = simulated_runner([table], speed=20, faults=faults)
    listener = Listener()
    summary = collect(small_plan(), spec, tmp_path / "j", gpus=(0, 1), reporter=listener)
    assert summary.outcome == "finished"
    assert Counter(keys(tmp_path / "j")) == Counter(all_keys(small_plan()))
    assert sum("SIGKILL" in line for line in listener.lines) == 3


SCRIPT = """
import multiprocessing, sys
sys.path.insert(0, sys.argv[3])
from pathlib import Path
from made_up import LARGE, SMALL, small_plan
from synth.collecting.reporters import Reporter
from synth.collecting.running import collect
from synth.collecting.simulated import simulated_runner

class Pids(Reporter):
    def on_worker(self, worker, text):
        print(*(p.pid for p in multiprocessing.active_children()), flush=True)

if __name__ == "__main__":
    collect(small_plan((SMALL, LARGE)), simulated_runner([sys.argv[1]], speed=2.0), Path(sys.argv[2]), gpus=(0, 1),
            reporter=Pids())
"""


def start(table: Path, journal: Path, script: Path) -> subprocess.Popen[str]:
    script.write_text(SCRIPT)
    here = Path(__file__).parents[1] / "support"
    root = Path(synth.__file__).parent.parent
    return subprocess.Popen(
        [sys.executable, str(script), str(table), str(journal), str(here)],
        env={**os.environ, "PYTHONPATH": str(root)},
        stdout=subprocess.PIPE,
        text=True,
    )


def gone(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return stat.rsplit(")", 1)[1].split()[0] == "Z"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
def test_a_run_that_is_killed_goes_on_and_leaves_no_worker_behind(table: Path, tmp_path: Path) -> None:
    chance = random.Random(3)
    plan = small_plan((SMALL, LARGE))
    journal = tmp_path / "j"
    before: set[tuple[int, ...]] = set()
    for _ in range(4):
        process = start(table, journal, tmp_path / "run.py")
        assert process.stdout is not None
        pids = {int(p) for p in process.stdout.readline().split()}
        time.sleep(chance.uniform(0.0, 0.4))
        process.kill()
        process.wait()
        pids |= {int(p) for p in process.stdout.read().split()}
        process.stdout.close()
        until = time.monotonic() + 10
        while not all(map(gone, pids)) and time.monotonic() < until:
            time.sleep(0.02)
        assert pids and all(map(gone, pids))
        now = keys(journal)
        assert len(now) == len(set(now)) and before <= set(now)
        before = set(now)
    assert 0 < len(before) < len(plan)
    summary = collect(plan, simulated_runner([table]), journal)
    assert (summary.outcome, summary.before) == ("finished", len(before))
    assert Counter(keys(journal)) == Counter(all_keys(plan))


def test_ctrl_c_reaches_only_the_parent(table: Path, tmp_path: Path) -> None:
    process = start(table, tmp_path / "j", tmp_path / "run.py")
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) == 0
    process.stdout.close()
    assert 0 < len(keys(tmp_path / "j")) < len(small_plan((SMALL, LARGE)))


def test_a_run_that_was_stopped_marks_no_cell_when_it_goes_on(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "_AWAY_S", 0.5)

    class Absent(Listener):
        """Stops the worker and the run for longer than a timing may take."""

        def on_timing(self, cell: Cell, ms: float, throttled: bool, progress: Progress) -> None:
            super().on_timing(cell, ms, throttled, progress)
            if len(self.cells) == 20:
                (worker,) = multiprocessing.active_children()
                assert worker.pid is not None
                os.kill(worker.pid, signal.SIGSTOP)
                time.sleep(1.2)
                threading.Timer(0.3, os.kill, (worker.pid, signal.SIGCONT)).start()

    listener = Absent()
    spec = simulated_runner([table], speed=2.0)
    limits = Limits(timing_s=1.0, timing_factor=1.0)
    summary = collect(small_plan(), spec, tmp_path / "j", reporter=listener, limits=limits)
    assert (summary.outcome, summary.failed) == ("finished", 1)
    assert len(listener.lines) == 1


def test_gpus_are_numbers_or_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert find_gpus("0") == (0,)
    assert find_gpus("0, 2") == (0, 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-abc")
    assert find_gpus("all") == (0, 1)
    assert visible_name(1) == "GPU-abc"
    with pytest.raises(SynthError, match="there is no GPU 2"):
        visible_name(2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(SynthError, match="there is no GPU here"):
        find_gpus("all")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert visible_name(3) == "3"
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SynthError, match="name them"):
        find_gpus("all")
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: A (UUID: x)'\necho 'GPU 1: A (UUID: y)'\n")
    tool.chmod(0o755)
    assert find_gpus("all") == (0, 1)


@pytest.mark.parametrize("text", ["", "a", "0,0", "-1", "0,", "1.5"])
def test_other_gpus_are_refused(text: str) -> None:
    with pytest.raises(SynthError, match="--gpus"):
        find_gpus(text)


@pytest.mark.parametrize("gpus", [(), (0, 0), (-1,)])
def test_a_pool_needs_different_gpus(gpus: tuple[int, ...], table: Path) -> None:
    with pytest.raises(SynthError, match="different numbers"):
        ProcessPool(simulated_runner([table]), gpus)
