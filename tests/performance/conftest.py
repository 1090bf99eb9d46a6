"""The shipped measurements, and parts of them that are fitted quickly."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from synth.measurements import Timings, load
from synth.performance.model import PerformanceModel

SHIPPED = Path(__file__).parent.parent.parent / "measurements"


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
