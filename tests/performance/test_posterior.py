from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synth.catalog.devices import get_device
from synth.catalog.shapes import MoEShape
from synth.flashinfer.tactics import load_table
from synth.performance.model import Cells, PerformanceModel
from synth.performance.posterior import (
    Posterior,
    Timed,
    believe,
    candidates,
    noise_sd,
    prior_outlook,
    timed_of,
    update,
)
from synth.performance.roofline import Hardware, tactic_columns
from synth.timings.table import Timings

OLMOE = MoEShape(2048, 1024, 64, 8)
BUCKETS = (1, 16, 256, 2048)


def timed(*cells: tuple[int, int, float]) -> Timed:
    """Build single timings from (tokens, tactic, ms)."""
    tokens, tactic, ms = zip(*cells, strict=True)
    return Timed(np.array(tokens), np.array(tactic), np.array(ms), np.ones(len(cells), dtype=np.int64))


@pytest.fixture
def prior(small_model: PerformanceModel) -> Posterior:
    return believe(small_model, OLMOE, 1, BUCKETS)


def relative(p: Posterior, row: int) -> float:
    """Return a row's expected log time beside its bucket's mean."""
    return float(p.mean[row] - p.mean[p.tokens == p.tokens[row]].mean())


def test_candidates_are_the_near_ones_at_most_sixteen_and_what_must_be() -> None:
    ms = np.concatenate([1.0 + 0.001 * np.arange(30), [1.0, 1.05, 9.0]])
    bucket = np.repeat([1, 0], [30, 3])
    must = np.zeros(33, dtype=bool)
    must[[29, 32]] = True
    rows = candidates(bucket, ms, must)
    assert rows.tolist() == [30, 31, 32, *range(16), 29]


def test_a_timing_fixes_its_cell_and_moves_the_same_tactic_nearby_more_than_far_away(prior: Posterior) -> None:
    tactic = next(int(i) for i in prior.tactic[prior.tokens == 16] if {1, 256} & set(prior.tokens[prior.tactic == i]))
    rows = {int(t): int(r) for t, r in zip(prior.tokens, range(len(prior)), strict=True) if prior.tactic[r] == tactic}
    after = prior.copy()
    ms = float(np.exp(prior.mean[rows[16]] + 0.01))
    after.observe(rows[16], ms)
    assert after.mean[rows[16]] == pytest.approx(np.log(ms), abs=0.003)
    assert after.covariance[rows[16], rows[16]] < float(noise_sd(ms)) ** 2 * 1.01
    moved = {t: relative(after, r) - relative(prior, r) for t, r in rows.items() if t != 16}
    assert all(m > 0 for m in moved.values())
    assert sorted(moved, key=lambda t: abs(np.log2(t / 16))) == sorted(moved, key=lambda t: -moved[t])


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_the_order_of_unsurprising_timings_does_not_matter(small_model: PerformanceModel, data: st.DataObject) -> None:
    p = believe(small_model, OLMOE, 2, BUCKETS)
    rows = data.draw(st.lists(st.integers(0, len(p) - 1), min_size=1, max_size=6, unique=True))
    shifts = data.draw(st.lists(st.floats(-0.005, 0.005), min_size=len(rows), max_size=len(rows)))
    ms = {r: float(np.exp(p.mean[r] + s)) for r, s in zip(rows, shifts, strict=True)}
    a, b = p.copy(), p.copy()
    for r in rows:
        a.observe(r, ms[r])
    for r in reversed(rows):
        b.observe(r, ms[r])
    np.testing.assert_allclose(a.mean, b.mean, atol=1e-9)
    np.testing.assert_allclose(a.covariance, b.covariance, atol=1e-12)
    assert np.linalg.eigvalsh(a.covariance).min() > -1e-9


def test_a_surprise_is_the_cells_own(prior: Posterior) -> None:
    small, large = prior.copy(), prior.copy()
    others = np.arange(len(prior)) != 0
    small.observe(0, float(np.exp(prior.mean[0] + 0.02)))
    large.observe(0, float(np.exp(prior.mean[0] + 0.9)))
    per_unit = np.abs(large.mean - prior.mean)[others].max() / 0.9
    assert per_unit < 0.3 * np.abs(small.mean - prior.mean)[others].max() / 0.02
    assert large.mean[0] == pytest.approx(prior.mean[0] + 0.9, abs=0.01)


def test_a_far_too_fast_single_timing_is_left_out_and_a_repeated_one_is_not(small_model: PerformanceModel) -> None:
    p = believe(small_model, OLMOE, 1, [16])
    p.covariance = p.covariance * 0.01
    ms = float(np.exp(p.mean[3] - 0.5))
    before = p.mean.copy()
    p.observe(3, ms)
    assert (p.mean == before).all()
    assert p.timed[3] == 1
    assert 3 not in p.open()
    p.observe(3, ms, repeats=2)
    assert p.mean[3] == pytest.approx(np.log(ms), abs=0.01)


def test_a_slower_gpu_shifts_all_predictions(small_model: PerformanceModel) -> None:
    before = believe(small_model, OLMOE, 1, BUCKETS)
    rows = [int(np.flatnonzero(before.tokens == t)[0]) for t in BUCKETS]
    cells = [(int(before.tokens[r]), int(before.tactic[r]), float(1.5 * np.exp(before.mean[r]))) for r in rows]
    after = believe(small_model, OLMOE, 1, BUCKETS, timed(*cells))
    np.testing.assert_allclose(np.median(after.mean - before.mean), np.log(1.5), atol=0.02)


def test_cells_that_failed_are_no_candidates(small_model: PerformanceModel, prior: Posterior) -> None:
    first = int(prior.chosen()[1])
    gone = (int(prior.tokens[first]), int(prior.tactic[first]))
    p = believe(small_model, OLMOE, 1, BUCKETS, without=[gone])
    assert gone not in set(zip(p.tokens.tolist(), p.tactic.tolist(), strict=True))
    ruled = prior.copy()
    ruled.rule_out(first)
    assert ruled.chosen()[1] != first
    assert first not in ruled.open()


def test_a_timing_is_worth_nothing_where_all_is_known_and_most_where_two_are_level(prior: Posterior) -> None:
    rows = prior.open()
    worth = prior.worth(rows)
    assert (worth >= -1e-9).all()
    assert worth.max() > 1e-4
    known = prior.copy()
    known.covariance = known.covariance * 1e-8
    assert known.worth(rows).max() < 1e-6


def test_assuming_a_timing_removes_doubt_and_keeps_the_expectation(prior: Posterior) -> None:
    p = prior.copy()
    row = int(p.open()[0])
    p.assume(row)
    assert (p.mean == prior.mean).all()
    assert p.covariance[row, row] < 0.1 * prior.covariance[row, row]
    assert row not in p.open()


def test_the_outlook_of_a_prior_is_the_same_computed_for_many_at_once(small_model: PerformanceModel) -> None:
    p = believe(small_model, OLMOE, 1, BUCKETS)
    one = p.outlook()
    cells = Cells((OLMOE,), np.zeros(len(p), dtype=np.int64), np.ones(len(p), dtype=np.int64), p.tokens, p.tactic)
    ids = np.array(small_model.table.ids(1))
    every = Cells(
        (OLMOE,),
        np.zeros(4 * len(ids), dtype=np.int64),
        np.ones(4 * len(ids), dtype=np.int64),
        np.repeat(BUCKETS, len(ids)),
        np.tile(ids, 4),
    )
    said = small_model.predict(every)
    key = {(t, i): n for n, (t, i) in enumerate(zip(every.tokens.tolist(), every.tactic.tolist(), strict=True))}
    rows = np.array([key[t, i] for t, i in zip(cells.tokens.tolist(), cells.tactic.tolist(), strict=True)])
    place = np.searchsorted(BUCKETS, p.tokens)
    many = prior_outlook(place, p.tactic, said.ms[rows], said.choice_sd[rows], p.chosen(), small_model.columns)
    np.testing.assert_allclose(many.regret, one.regret, atol=1e-9)
    np.testing.assert_allclose(many.within, one.within)
    assert ((one.within >= 0) & (one.within <= 1)).all()
    assert (one.within[:, 0] <= one.within[:, 1]).all()


def test_a_sweep_of_real_timings_leaves_next_to_no_expected_regret(few: Timings, small_model: PerformanceModel) -> None:
    before = believe(small_model, OLMOE, 2, BUCKETS)
    after = believe(small_model, OLMOE, 2, BUCKETS, timed_of(few, OLMOE)[2])
    assert after.outlook().regret.mean() < 0.002 < before.outlook().regret.mean()
    assert after.outlook().within[:, 0].min() > 0.9
    rows = few.select((few.shape == few.labels.index("olmoe")) & (few.stage == 2))
    for row in after.chosen().tolist():
        mine = rows.select(rows.tokens == after.tokens[row])
        assert mine.ms[mine.tactic == after.tactic[row]][0] <= 1.01 * mine.ms.min()


def test_timings_of_tactics_that_the_model_rules_out_still_count() -> None:
    columns = tactic_columns(load_table("sm90", "bf16"), Hardware.of(get_device("NVIDIA H200"), "bf16"))
    tokens, tactic = np.full(20, 16), np.arange(20)
    ms = np.where(tactic == 7, 3.0, 1.0 + 0.001 * tactic)
    p = update(tokens, tactic, ms, np.full(20, 0.3), columns, timed((16, 7, 0.8), (16, 0, 1.0)))
    assert p.tactic[p.chosen()].tolist() == [7]
