from __future__ import annotations

import math
from pathlib import Path

import pytest
from inline import InlinePool
from made_up import BUCKETS, DEVICE, FAILING, LARGE, SMALL

from synth.catalog.schemes import STAGES
from synth.collecting.runner import RunnerSpec
from synth.collecting.simulated import simulated_runner
from synth.flashinfer.tactics import load_table
from synth.timings.files import write
from synth.timings.origin import Origin
from synth.timings.rows import Row
from synth.timings.table import ShapeTimings


@pytest.fixture(scope="session")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Measurements of two shapes to replay, one tactic failed."""
    root = tmp_path_factory.mktemp("table")
    tactics = load_table("sm90", "bf16")
    for layer in (SMALL, LARGE):
        rows = []
        for stage in STAGES:
            for tokens in BUCKETS:
                for i in tactics.ids(stage):
                    failed = layer is SMALL and (stage, tokens, i) == FAILING
                    ms = 0.01 * (1 + i % 7) * (1 + tokens / 64) * layer.shape.hidden / 512
                    rows.append(Row(1, stage, tokens, i, math.nan if failed else ms, error="no" if failed else None))
        origin = Origin.make(DEVICE, "sm90", "bf16")
        write(ShapeTimings.from_rows(origin, layer.shape, layer.label, {1: {"source": "made up"}}, rows), root)
    return root


@pytest.fixture
def spec(table: Path) -> RunnerSpec:
    return simulated_runner([table])


@pytest.fixture
def inline(spec: RunnerSpec) -> InlinePool:
    return InlinePool(spec)
