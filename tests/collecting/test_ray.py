from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from made_up import LARGE, SMALL, small_plan
from test_running import Listener, all_keys, keys

import synth
from synth.choosing.plan import Cell
from synth.collecting.journal import read_journal
from synth.collecting.reporters import Progress
from synth.collecting.runner import GPU_RUNNER
from synth.collecting.running import collect
from synth.collecting.simulated import simulated_runner
from synth.errors import SynthError

ray: Any = pytest.importorskip("ray", reason="Ray isn't installed (extra 'ray')")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes of one CPU each."""
    from ray.cluster_utils import Cluster

    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setenv("PYTHONPATH", str(Path(synth.__file__).parent.parent))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    node = {"num_cpus": 1, "num_gpus": 0, "object_store_memory": 80_000_000}
    made = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    made.other = made.add_node(**node)
    try:
        ray.init(address=made.address, log_to_driver=False)
        yield made
    finally:
        ray.shutdown()
        made.shutdown()
        monkeypatch.undo()


def test_a_cluster_without_gpus_times_nothing(cluster: Any, tmp_path: Path) -> None:
    with pytest.raises(SynthError, match="has no GPU"):
        collect(small_plan(), GPU_RUNNER, tmp_path / "j", ray="auto")


def test_a_node_that_is_lost_loses_no_timing(cluster: Any, table: Path, tmp_path: Path) -> None:
    from synth.collecting.ray_pool import RayPool

    class Saboteur(Listener):
        def on_timing(self, cell: Cell, ms: float, throttled: bool, progress: Progress) -> None:
            super().on_timing(cell, ms, throttled, progress)
            workers = {e.worker for e in read_journal(tmp_path / "j").entries}
            if cluster.other is not None and progress.done > 40 and len(workers) == 2:
                cluster.remove_node(cluster.other, allow_graceful=False)
                cluster.other = None

    spec = simulated_runner([table], speed=2.0)
    plan = small_plan((SMALL, LARGE), buckets=(1, 64))
    pool = RayPool(spec, "auto")
    assert len(pool.slots) == 2
    listener = Saboteur()
    summary = collect(plan, spec, tmp_path / "j", pool=pool, reporter=listener)
    assert summary.outcome == "finished"
    assert cluster.other is None and any("the Ray worker is lost" in line for line in listener.lines)
    assert Counter(keys(tmp_path / "j")) == Counter(all_keys(plan))
    # Nothing but the cell that fails in the table is marked: a lost node is no cell's fault.
    assert summary.failed == 1


def test_without_ray_one_line_says_how_to_get_it(table: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SynthError, match=r"pip install .*\[ray\]"):
        collect(small_plan(), simulated_runner([table]), tmp_path / "j", ray="auto")
    assert not (tmp_path / "j").exists()
