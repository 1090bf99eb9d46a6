"""What many tests share: a config of one layer, the shipped timings, and parts of them that are fitted quickly."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

from synth.catalog.shapes import Deployment, MoEShape
from synth.configs.model import Entry
from synth.configs.module import dumps_bundled
from synth.configs.v1 import dumps_json
from synth.flashinfer.buckets import token_buckets
from synth.flashinfer.calls import ENGINES
from synth.flashinfer.keys import file_keys
from synth.flashinfer.tactics import load_table
from synth.flashinfer.versions import build_metadata
from synth.performance.model import PerformanceModel
from synth.timings.folders import load
from synth.timings.table import Timings

# Shared machines make single examples slow at times; that says nothing about the code.
settings.register_profile("synth", deadline=None)
settings.load_profile("synth")

H200 = "NVIDIA H200"
OLMOE = Deployment("olmoe", 1, 1, "bf16", "swiglu", False, MoEShape(2048, 1024, 64, 8))


@pytest.fixture
def olmoe() -> Deployment:
    return OLMOE


@pytest.fixture
def entries() -> list[Entry]:
    """Every key of one layer, both engines, up to 8192 tokens; ids vary with the bucket."""
    table = load_table("sm90", "bf16")
    keys = {
        key: Entry(key, table.ids(stage)[i % len(table.ids(stage))], 0.25, 0.5, 1.0, 45)
        for engine in ENGINES
        for stage in (1, 2)
        for i, bucket in enumerate(token_buckets(8192))
        for key in file_keys(OLMOE, engine, bucket, stage, "sm90")
    }
    return list(keys.values())


@pytest.fixture
def write(tmp_path: Path, entries: list[Entry]) -> Callable[..., Path]:
    """Write a good file, changed as asked, and return its path."""

    def write_file(
        change: Callable[[dict[str, object]], object] | None = None,
        *,
        name: str = "config.json",
        metadata: dict[str, object] | None = None,
    ) -> Path:
        path = tmp_path / name
        metadata = build_metadata(H200) if metadata is None else metadata
        if path.suffix == ".py":
            path.write_bytes(dumps_bundled(metadata, entries))
            return path
        content = json.loads(dumps_json(metadata, entries))
        if change is not None:
            change(content)
        path.write_text(json.dumps(content), encoding="utf-8")
        return path

    return write_file


SHIPPED = Path(__file__).parents[1] / "measurements"


@pytest.fixture(scope="session")
def bf16() -> Timings:
    (timings,) = load(SHIPPED, "NVIDIA H200", "bf16", problems=[])
    return timings


@pytest.fixture(scope="session")
def fp8() -> Timings:
    (timings,) = load(SHIPPED, "NVIDIA H200", "fp8", problems=[])
    return timings


@pytest.fixture(scope="session")
def few(bf16: Timings) -> Timings:
    """Four shapes of three families in four buckets, first pass."""
    wanted = [bf16.labels.index(x) for x in ("olmoe", "qwen3-30b-a3b", "qwen3-235b-tp4", "mixtral-8x7b-tp4")]
    return bf16.select(np.isin(bf16.shape, wanted) & np.isin(bf16.tokens, [1, 16, 256, 2048]) & (bf16.pass_ == 1))


@pytest.fixture(scope="session")
def small_model(few: Timings) -> PerformanceModel:
    return PerformanceModel(choice_trees=3, time_trees=2).fit(few)


@pytest.fixture(scope="session")
def bf16_model(bf16: Timings) -> PerformanceModel:
    """The model of all shipped bf16 timings, as `synth fit` makes it."""
    return PerformanceModel().fit(bf16)
