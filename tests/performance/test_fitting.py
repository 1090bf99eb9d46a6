from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from synth.catalog.paths import find_model, model_file
from synth.errors import SynthError
from synth.performance.calibration import calibrated_probability
from synth.performance.fitting import Fitted, fit, save
from synth.performance.held_out import hold_out
from synth.performance.model import PerformanceModel
from synth.timings.folders import load
from synth.timings.table import Timings

SHIPPED = Path(__file__).parents[2] / "measurements"


@pytest.fixture(scope="module")
def few() -> Timings:
    """Four shapes of three families in three buckets."""
    (t,) = load(SHIPPED, "NVIDIA H200", "fp8", problems=[])
    wanted = [t.labels.index(x) for x in ("olmoe", "qwen3-30b-a3b", "qwen3-235b-tp4", "mixtral-8x7b-tp4")]
    return t.select(np.isin(t.shape, wanted) & np.isin(t.tokens, [1, 64, 1024]))


@pytest.fixture(scope="module")
def steps() -> list[tuple[int, int]]:
    return []


@pytest.fixture(scope="module")
def fitted(few: Timings, steps: list[tuple[int, int]]) -> Fitted:
    return fit(few, lambda done, total: steps.append((done, total)))


def test_the_regret_is_that_of_families_held_out(fitted: Fitted, few: Timings) -> None:
    own, *others = fitted.evaluations
    found = hold_out(few, stated=False)
    np.testing.assert_array_equal(own.regrets, found.judge.evaluate("model", found.ms).regrets)
    assert own.name == "model"
    assert [e.name for e in others] == ["fallback", "best single tactic", "nearest shape", "tokens per expert"]
    assert own.all.count == 4 * 2 * 3
    assert own.all.geomean < others[0].all.geomean


def test_the_model_carries_its_held_out_regret_and_spread(fitted: Fitted) -> None:
    assert fitted.calibration is not None
    own = fitted.evaluations[0].all
    held_out = fitted.model.held_out_
    assert held_out["by"] == "family"
    assert held_out["regret"]["geomean"] == pytest.approx(own.geomean, rel=1e-5)
    assert held_out["regret"]["count"] == own.count
    assert fitted.model.spread_ == pytest.approx(fitted.calibration.spread, rel=1e-3)


def test_the_model_carries_what_held_out_choices_taught(fitted: Fitted) -> None:
    found = fitted.model.calibration_
    names = {f"within_{margin}_{what}" for margin in ("0.01", "0.02") for what in ("intercept", "slope")}
    assert set(found) == names
    p = calibrated_probability(fitted.model, np.array([0.2, 0.5, 0.9]), 0.01)
    assert ((p > 0) & (p < 1)).all() and (np.diff(p) >= 0).all()


def test_progress_counts_the_fits(fitted: Fitted, steps: list[tuple[int, int]]) -> None:
    assert steps == [(1, 3), (2, 3), (3, 3)]


def test_the_model_itself_is_fitted_on_everything(fitted: Fitted, few: Timings) -> None:
    assert all(fitted.model.knows(few.shapes[i]) for i in np.unique(few.shape))


def test_one_family_alone_is_fitted_without_a_regret(few: Timings) -> None:
    alone = fit(few.select(few.shape == few.labels.index("olmoe")))
    assert alone.evaluations == () and alone.calibration is None
    assert alone.model.spread_ == 1.0 and alone.model.held_out_ == {}


def test_nothing_to_fit_is_one_line(few: Timings) -> None:
    with pytest.raises(SynthError, match="no timings to fit"):
        fit(few.select(np.zeros(0, np.int64)))


def test_a_saved_model_is_found_and_equal(fitted: Fitted, tmp_path: Path) -> None:
    path = save(fitted.model, tmp_path)
    assert path == tmp_path / model_file("NVIDIA H200", "fp8", "0.7.4")
    assert find_model([tmp_path], "NVIDIA H200", "fp8", "0.7.4") == path
    again = PerformanceModel.load(path)
    assert again.fingerprint() == fitted.model.fingerprint()
    assert again.held_out_ == fitted.model.held_out_ and again.calibration_ == fitted.model.calibration_
    before = path.read_bytes()
    assert save(again, tmp_path).read_bytes() == before


def test_a_simulated_model_is_kept_where_emit_does_not_look(few: Timings, tmp_path: Path) -> None:
    simulated = dataclasses.replace(few, origin=dataclasses.replace(few.origin, simulated=True))
    path = save(PerformanceModel(choice_trees=2, time_trees=2).fit(simulated), tmp_path)
    assert path.is_file() and PerformanceModel.load(path).origin_.simulated
    assert find_model([tmp_path], "NVIDIA H200", "fp8", "0.7.4") is None
