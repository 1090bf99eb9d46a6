from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synth.catalog.models import family_of
from synth.catalog.shapes import MoEShape
from synth.errors import SynthError
from synth.flashinfer.tactics import load_table
from synth.performance import evaluation
from synth.performance.evaluation import (
    Calibration,
    Judge,
    Regret,
    baselines,
    calibrate,
    held_out_groups,
)
from synth.performance.held_out import HeldOut, hold_out
from synth.performance.model import Cells, PerformanceModel, Prediction
from synth.performance.ties import TIE
from synth.timings.folders import combine
from synth.timings.origin import Origin
from synth.timings.rows import Row
from synth.timings.table import ShapeTimings, Timings

H200 = Origin.make("NVIDIA H200", "sm90", "bf16")
TABLE = load_table("sm90", "bf16")
F1, F2 = TABLE.fallback_id(1), TABLE.fallback_id(2)
#: Of three families, by the text before the first dash.
A, B, C = MoEShape(1024, 512, 16, 2), MoEShape(1024, 576, 16, 2), MoEShape(4096, 2048, 8, 2)


def timings(layers: Iterable[tuple[MoEShape, str, dict[tuple[int, ...], float]]]) -> Timings:
    """Build timings: (shape, label, {(stage, tokens, tactic) or (pass, stage, tokens, tactic): ms})."""
    parts = []
    for shape, label, cells in layers:
        rows = [Row(*(key if len(key) == 4 else (1, *key)), ms) for key, ms in cells.items()]
        passes = {row.pass_: {"source": "made up"} for row in rows}
        parts.append(ShapeTimings.from_rows(H200, shape, label, passes, rows))
    (found,) = combine(parts)
    return found


def tiny() -> Timings:
    """Return three families; gemm1 in one bucket, tactics 0 (the fallback), 1 and 2."""
    return timings(
        [
            (A, "aa-1", {(1, 8, F1): 4.0, (1, 8, 1): 1.0, (1, 8, 2): 2.0}),
            (B, "bb-1", {(1, 8, F1): 3.0, (1, 8, 1): 1.5, (1, 8, 2): 1.0}),
            (C, "cc-1", {(1, 8, F1): 1.0, (1, 8, 1): 3.0, (1, 8, 2): 2.0}),
        ]
    )


class Oracle(PerformanceModel):
    """Predicts one millisecond for everything and remembers what it was fitted on and asked for."""

    seen: list[tuple[set[str], set[MoEShape]]]

    def fit(self, timings: Timings) -> Oracle:
        self.fitted = {timings.labels[i] for i in np.unique(timings.shape)}
        return self

    def predict(self, cells: Cells) -> Prediction:
        self.seen.append((self.fitted, {cells.shapes[i] for i in np.unique(cells.shape)}))
        return Prediction(np.ones(len(cells)), np.full(len(cells), 0.1), np.full(len(cells), 0.1))


# --- regret ----------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(1.0, 20.0), min_size=1, max_size=40))
def test_a_summary_is_bounded_by_its_regrets(values: list[float]) -> None:
    r = Regret.of(np.array(values))
    assert min(values) * (1 - 1e-12) <= r.geomean <= max(values) * (1 + 1e-12)
    assert r.p95 <= r.p99 <= r.max == max(values)
    assert r.count == len(values)
    assert set(r.as_dict()) == {"geomean", "p95", "p99", "max", "count"}


def test_a_summary_by_hand() -> None:
    r = Regret.of(np.array([1.0, 1.0, 2.0, 8.0]))
    assert r.geomean == pytest.approx(2.0) and r.max == 8.0
    assert r.p95 == pytest.approx(2.0 + 0.85 * 6.0)


def test_an_oracle_has_no_regret(bf16: Timings) -> None:
    judge = Judge(bf16)
    found = judge.evaluate("oracle", judge.timings.ms)
    # Ties within TIE are broken by order.
    assert found.all.max <= 1.0 + TIE and found.all.geomean < 1.0 + TIE / 2
    assert len(found.regrets) == len(judge.keys) == found.stage(1).count + found.stage(2).count


def test_the_fallbacks_regret_by_hand() -> None:
    fallback = next(iter(baselines(Judge(tiny()))))
    assert fallback.name == "fallback"
    assert {label: r.max for label, r in fallback.shapes().items()} == {"aa-1": 4.0, "bb-1": 3.0, "cc-1": 1.0}
    assert fallback.all.geomean == pytest.approx(12.0 ** (1 / 3))
    plain = fallback.as_dict()
    assert plain["gemm1"]["count"] == 3 and "gemm2" not in plain and plain["second_pass"] is None


def test_real_fallback_regret_is_its_time_over_the_best(bf16: Timings) -> None:
    judge = Judge(bf16)
    fallback = next(iter(baselines(judge)))
    t = judge.timings
    for i in range(0, len(judge.keys), 97):
        stage = judge.keys[i, 1]
        rows = np.flatnonzero(judge.bucket == i)
        own = rows[t.tactic[rows] == TABLE.fallback_id(stage)]
        assert fallback.regrets[i] == pytest.approx(t.ms[own[0]] / t.ms[rows].min())


def test_repeats_are_judged_by_their_mean_and_a_later_pass_alone_by_itself() -> None:
    t = timings(
        [
            (
                A,
                "aa-1",
                {(1, 1, 8, 1): 1.0, (1, 1, 8, 2): 2.0, (2, 1, 8, 1): 4.0, (2, 1, 8, 2): 2.0, (1, 1, 16, 1): 1.0},
            ),
        ]
    )
    judge = Judge(t)
    # Means: tactic 1 sqrt(1 * 4) = 2, tactic 2 sqrt(2 * 2) = 2; the second pass alone says 4 against 2.
    score = np.where(judge.timings.tactic == 1, 1.0, 2.0)
    found = judge.evaluate("first", score)
    assert found.regrets.tolist() == pytest.approx([1.0, 1.0])
    assert found.second[0] == 2.0 and np.isnan(found.second[1])
    second = found.second_pass()
    assert second is not None and (second.geomean, second.count) == (2.0, 1)
    assert found.as_dict()["second_pass"]["max"] == 2.0


def test_nothing_to_judge_by_is_one_line() -> None:
    t = tiny()
    with pytest.raises(SynthError, match="no timings to judge by"):
        Judge(t.select(np.zeros(0, np.int64)))


def test_a_cell_is_found_by_what_it_is() -> None:
    judge = Judge(tiny())
    t = judge.timings
    np.testing.assert_array_equal(judge.rows_of(t.shape, t.stage, t.tokens, t.tactic), np.arange(len(t)))
    # Another shape, stage, token count, tactic, and none at all.
    columns = np.array([(0, 1, 8, 1), (3, 1, 8, 1), (0, 2, 8, 1), (0, 1, 7, 1), (0, 1, 8, 3), (0, 1, 8, -1)]).T
    assert judge.rows_of(*columns).tolist() == [1, -1, -1, -1, -1, -1]


# --- holding out -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quant", ["bf16", "fp8"])
def test_a_family_is_never_split(request: pytest.FixtureRequest, quant: str) -> None:
    t: Timings = request.getfixturevalue(quant)
    groups = held_out_groups(t, "family")
    families = [{family_of(t.labels[i]) for i in group} for group in groups]
    assert all(len(names) == 1 for names in families)
    assert len({next(iter(names)) for names in families}) == len(groups) > 3
    assert sorted(np.concatenate(groups).tolist()) == list(range(len(t.shapes)))
    assert [len(g) for g in held_out_groups(t, "shape")] == [1] * len(t.shapes)


def test_shapes_without_rows_are_in_no_group() -> None:
    t = tiny()
    groups = held_out_groups(t.select(t.shape != 1), "family")
    assert [g.tolist() for g in groups] == [[0], [2]]


@pytest.mark.parametrize("by", ["family", "shape"])
def test_one_group_alone_cannot_be_held_out(by: str) -> None:
    t = tiny()
    with pytest.raises(SynthError, match=f"only one {by} was timed"):
        held_out_groups(t.select(t.shape == 0), by)


@pytest.mark.parametrize("by", ["family", "shape"])
def test_a_model_is_never_asked_for_what_it_was_fitted_on(few: Timings, by: str) -> None:
    Oracle.seen = []
    steps: list[tuple[int, int]] = []
    found = hold_out(few, lambda done, total: steps.append((done, total)), by=by, make=Oracle, stated=False)
    judge, ms, sd = found.judge, found.ms, found.log_sd
    assert (ms == 1.0).all() and (sd == 0.1).all() and len(ms) == len(judge.timings)
    label_of = dict(zip(few.shapes, few.labels, strict=True))
    asked = [shape for _, shapes in Oracle.seen for shape in shapes]
    assert sorted(asked) == sorted({few.shapes[i] for i in np.unique(few.shape)})
    for fitted, shapes in Oracle.seen:
        held = {label_of[s] for s in shapes}
        assert fitted and not fitted & held
        if by == "family":
            assert not {family_of(x) for x in fitted} & {family_of(x) for x in held}
    assert steps == [(i + 1, len(Oracle.seen)) for i in range(len(Oracle.seen))]


@pytest.fixture(scope="module")
def held_out(bf16: Timings) -> HeldOut:
    return hold_out(bf16, stated=False)


def test_unseen_families_lose_less_than_one_percent(held_out: HeldOut, bf16: Timings) -> None:
    found, *simple = held_out.evaluations()
    assert found.all.count == len(held_out.judge.keys)
    assert found.all.geomean <= 1.009
    assert found.all.p95 <= 1.05
    second = found.second_pass()
    assert second is not None and second.geomean <= 1.009 and second.count >= 200
    assert set(found.shapes()) == set(bf16.labels)
    others = {e.name: e.all.geomean for e in simple}
    assert set(others) == {"fallback", "best single tactic", "nearest shape", "tokens per expert"}
    assert all(found.all.geomean < other for other in others.values()), others


def test_unseen_families_are_predicted_with_an_honest_deviation(held_out: HeldOut) -> None:
    found = calibrate(held_out.judge, held_out.ms, held_out.log_sd)
    assert 0.3 < found.spread < 3.0
    assert 0.8 < found.coverage < 0.97
    assert found.error < 0.05


# --- baselines and calibration by hand -------------------------------------------------------------------------------


def chosen(t: Timings, name: str, by: str = "family") -> dict[str, float]:
    (found,) = [e for e in baselines(Judge(t), by) if e.name == name]
    return {label: round(r.geomean, 9) for label, r in found.shapes().items()}


def test_the_best_single_tactic_is_that_of_the_other_families() -> None:
    # Logs of relative times, tactics 0, 1, 2: A ln 4, 0, ln 2; B ln 3, ln 1.5, 0; C 0, ln 3, ln 2.
    # Without A: products 3, 4.5, 2, so tactic 2; without B: 4, 3, 4, so 1; without C: 12, 1.5, 2, so 1.
    assert chosen(tiny(), "best single tactic") == {"aa-1": 2.0, "bb-1": 1.5, "cc-1": 3.0}


def test_the_nearest_shape_lends_its_best_tactic() -> None:
    # A and B are neighbours; C, far from both, is nearest to B.
    assert chosen(tiny(), "nearest shape") == {"aa-1": 2.0, "bb-1": 1.5, "cc-1": 2.0}


def test_a_family_does_not_lend_to_itself() -> None:
    t = tiny()
    renamed = dataclasses.replace(t, labels=("aa-1", "aa-2", "cc-1"))
    # Both of family aa only have C to learn from, whose best is the fallback.
    assert chosen(renamed, "nearest shape")["aa-1"] == 4.0
    assert chosen(renamed, "nearest shape")["aa-2"] == 3.0
    assert chosen(renamed, "nearest shape", by="shape")["aa-1"] == 2.0


def test_tokens_per_expert_looks_at_the_load_and_not_at_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    # One sends each token to twice as many of its experts as the other: its 8 tokens are the other's 16.
    few, many = MoEShape(1024, 512, 16, 1), MoEShape(1024, 512, 16, 2)
    bucket = {
        (few, 16): {F1: 2.0, 1: 1.0, 2: 4.0},
        (few, 8): {F1: 2.0, 1: 4.0, 2: 1.0},
        (many, 8): {F1: 4.0, 1: 1.0, 2: 8.0},
    }
    far = {m: {F1: 1.0, 1: 9.0, 2: 9.0} for m in (4096, 8192)}
    t = timings(
        [
            (few, "bb-1", {(1, m, i): ms for (s, m), v in bucket.items() if s == few for i, ms in v.items()}),
            (many, "cc-1", {(1, m, i): ms for (s, m), v in bucket.items() if s == many for i, ms in v.items()}),
            (C, "dd-1", {(1, m, i): ms for m, v in far.items() for i, ms in v.items()}),
        ]
    )
    # With one neighbour instead of eight the nearest bucket alone decides.
    monkeypatch.setattr(evaluation, "_NEIGHBOURS", 1)
    assert chosen(t, "tokens per expert")["cc-1"] == 1.0
    assert chosen(t, "nearest shape")["cc-1"] == 8.0


@settings(max_examples=10, deadline=None)
@given(st.floats(0.3, 3.0), st.integers(0, 1000))
def test_calibration_finds_how_much_too_sure_a_model_is(few: Timings, factor: float, seed: int) -> None:
    judge = Judge(few)
    rng = np.random.default_rng(seed)
    sd = rng.uniform(0.01, 0.04, len(judge.timings))
    ms = judge.timings.ms * np.exp(factor * sd * rng.normal(size=len(sd)))
    found = calibrate(judge, ms, sd)
    assert isinstance(found, Calibration)
    assert found.spread == pytest.approx(factor, rel=0.25)
    assert found.coverage == pytest.approx(0.9, abs=0.06)
