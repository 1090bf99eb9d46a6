from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from synth.performance.calibration import (
    INTERVAL_SD,
    Reliability,
    calibrated_probability,
    corrected,
    correction,
    cross_fitted,
    interval_factor,
    learn,
)
from synth.performance.model import PerformanceModel

RNG = np.random.default_rng(3)


def model(calibration: dict[str, float]) -> PerformanceModel:
    made = PerformanceModel()
    made.calibration_ = calibration
    return made


def test_true_probabilities_are_left_alone() -> None:
    p = RNG.uniform(0.02, 0.98, 20_000)
    found = correction(p, RNG.random(len(p)) < p)
    assert found == pytest.approx((0.0, 1.0), abs=0.06)


def test_overconfidence_is_taken_back() -> None:
    truth = RNG.uniform(0.05, 0.95, 20_000)
    hit = RNG.random(len(truth)) < truth
    stated = corrected(truth, (0.0, 3.0))
    before, after = Reliability.of(stated, hit), Reliability.of(corrected(stated, correction(stated, hit)), hit)
    assert before.error > 0.1 > 0.03 > after.error
    assert after.brier < before.brier


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=30), st.data())
def test_a_correction_keeps_probabilities_in_order(p: list[float], data: st.DataObject) -> None:
    hit = np.array(data.draw(st.lists(st.booleans(), min_size=len(p), max_size=len(p))))
    values = np.sort(np.array(p))
    found = corrected(values, correction(values, hit))
    assert ((found >= 0.0) & (found <= 1.0)).all()
    assert (np.diff(found) >= -1e-12).all()


def test_all_hits_do_not_run_away() -> None:
    found = correction(np.full(10, 0.9), np.ones(10, dtype=bool))
    assert np.isfinite(found).all() and corrected(np.array([0.9]), found)[0] < 1.0


def test_a_family_is_corrected_by_the_others_alone() -> None:
    family = np.array(["a", "a", "b"])
    values = np.array([1.0, 2.0, 10.0])

    def mean(rows: np.ndarray) -> object:
        return lambda mine: np.full(mine.sum(), values[rows].mean())

    assert cross_fitted(mean, family).tolist() == [10.0, 10.0, 1.5]  # type: ignore[arg-type]
    assert cross_fitted(mean, np.array(["a"] * 3)).tolist() == [values.mean()] * 3  # type: ignore[arg-type]


@given(st.floats(0.2, 5.0))
def test_the_interval_factor_covers_nine_of_ten(scale: float) -> None:
    error = scale * np.random.default_rng(0).normal(size=2000)
    inside = np.abs(error / interval_factor(error)) <= INTERVAL_SD * (1 + 1e-9)
    assert inside.mean() == pytest.approx(0.9, abs=0.001)


def test_reliability_by_hand() -> None:
    found = Reliability.of(np.array([0.6, 0.6, 0.92, 0.92]), np.array([True, False, True, True]))
    assert found.count == (2, 2)
    assert found.stated == pytest.approx((0.6, 0.92)) and found.happened == (0.5, 1.0)
    assert found.error == pytest.approx((0.1 + 0.08) / 2)
    assert found.brier == pytest.approx((0.16 + 0.36 + 2 * 0.0064) / 4)
    assert [b["count"] for b in found.as_dict()["bins"]] == [2, 2]


def test_a_model_applies_what_was_learnt() -> None:
    p = RNG.uniform(0.02, 0.98, (5000, 2))
    regrets = np.where(RNG.random(5000) < p[:, 0] ** 2, 1.0, 1.05)
    made = model(learn(p, regrets, (0.01, 0.02)))
    found = calibrated_probability(made, p[:, 0], 0.01)
    assert Reliability.of(found, regrets <= 1.01).error < 0.05


def test_a_model_without_calibration_changes_nothing() -> None:
    p = np.array([0.0, 0.3, 1.0])
    assert calibrated_probability(model({}), p, 0.01) is p
    # Nothing was learnt of this margin.
    assert calibrated_probability(model(learn(p[:, None], p + 1.0, (0.02,))), p, 0.01) is p
