from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from studies.replaying import Point, Replayed, hold_out_and_replay, known_device, new_device

from synth.choosing.plan import timing_seconds
from synth.performance.evaluation import Judge
from synth.performance.held_out import swept_shapes
from synth.performance.model import PerformanceModel
from synth.timings.folders import load
from synth.timings.table import Timings

SHIPPED = Path(__file__).parents[2] / "measurements"
BUCKETS = [1, 16, 128, 1024]


@pytest.fixture(scope="module")
def few() -> Timings:
    """Four shapes of three families in four buckets, all passes."""
    (t,) = load(SHIPPED, "NVIDIA H200", "fp8", problems=[])
    wanted = [t.labels.index(x) for x in ("olmoe", "qwen3-30b-a3b", "qwen3-235b-tp4", "mixtral-8x7b-tp4")]
    return t.select(np.isin(t.shape, wanted) & np.isin(t.tokens, BUCKETS))


def small() -> PerformanceModel:
    return PerformanceModel(choice_trees=6, time_trees=3, jobs=1)


@pytest.fixture(scope="module")
def held_out(few: Timings) -> Replayed:
    return hold_out_and_replay(few, "family", make=small, shares=(0.0, 0.05, 1.0), seeds=2)


def test_every_way_is_replayed_at_every_share(held_out: Replayed, few: Timings) -> None:
    shapes = np.unique(few.shape).tolist()
    seen = {(p.way, p.seed, p.mark, int(p.evaluation.keys[0, 0])) for p in held_out.points}
    assert len(seen) == len(held_out.points)
    ways = [("active", 0, 0.0), ("active", 0, 0.05), ("active", 0, 1.0)]
    ways += [(w, s, m) for w in ("stratified", "random") for s in (0, 1) for m in (0.05, 1.0)]
    assert seen == {(*way, shape) for way in ways for shape in shapes}


def test_no_more_is_timed_than_was_asked_for(held_out: Replayed) -> None:
    for p in held_out.points:
        assert p.timings <= round(p.mark * p.sweep)
        assert (p.seconds == 0.0) == (p.timings == 0)
        assert len(p.evaluation.keys) == len(p.tactic) == len(p.best) == len(p.expected) == 2 * len(BUCKETS)
    whole = [p for p in held_out.points if p.mark == 1.0 and p.way != "active"]
    assert whole and all(p.timings == p.sweep for p in whole)


def test_seconds_are_those_of_the_sweep(held_out: Replayed, few: Timings) -> None:
    whole = next(p for p in held_out.points if p.mark == 1.0 and p.way == "random")
    shape = whole.evaluation.keys[0, 0]
    first = few.select((few.shape == shape) & (few.pass_ == 1))
    assert whole.seconds == pytest.approx(float(np.sum(timing_seconds(first.ms))))
    assert whole.sweep_seconds == pytest.approx(whole.seconds, rel=0.05)


def test_timings_are_worth_something(held_out: Replayed) -> None:
    none, some, every = (held_out.at(share) for share in (0.0, 0.05, 1.0))
    assert none.evaluation.all.geomean >= some.evaluation.all.geomean >= every.evaluation.all.geomean
    assert every.evaluation.all.geomean < 1.001
    assert none.expected.mean() > some.expected.mean() > every.expected.mean() >= 0.0


def test_a_probability_is_stated_of_every_choice(held_out: Replayed) -> None:
    for p in held_out.points:
        assert ((p.within >= 0.0) & (p.within <= 1.0)).all()
        assert (p.within[:, 1] >= p.within[:, 0]).all()
        assert len(p.error) == len(p.error_shape)
    assert len(held_out.at(0.0).error) > 0


def test_the_replay_is_the_same_every_time(few: Timings) -> None:
    shape = int(few.shape[0])
    model = small().fit(few.select(few.shape != shape))

    def once() -> list[Point]:
        return known_device(few, shape, model, shares=(0.02, 0.1))

    for a, b in zip(once(), once(), strict=True):
        assert (a.way, a.timings, a.seconds) == (b.way, b.timings, b.seconds)
        np.testing.assert_array_equal(a.tactic, b.tactic)


def test_without_shares_nothing_is_replayed(few: Timings) -> None:
    found = hold_out_and_replay(few, "family", make=small, shares=())
    assert found.points == () and (found.ms > 0).all() and (found.log_sd > 0).all()


def test_a_sampled_shape_is_not_replayed(few: Timings) -> None:
    shapes = np.unique(few.shape)
    assert swept_shapes(Judge(few)).tolist() == shapes.tolist()
    sampled = few.select((few.shape != shapes[0]) | (np.arange(len(few)) % 3 == 0))
    assert swept_shapes(Judge(sampled)).tolist() == shapes[1:].tolist()


@pytest.mark.parametrize("way", ["active", "stratified", "random"])
def test_a_new_device_learns_from_its_own_timings(few: Timings, way: str) -> None:
    early, late = new_device(few, way, 0, (0.05, 0.5))
    assert (early.way, early.mark, late.mark) == (way, 0.05, 0.5)
    assert 0 < early.timings < late.timings <= round(0.5 * late.sweep)
    assert len(early.evaluation.keys) == 4 * 2 * len(BUCKETS)
    assert np.isnan(early.expected).all() and len(early.error) == 0
    if way == "active":
        assert 1.0 < late.evaluation.all.geomean < early.evaluation.all.geomean < 2.0


def test_points_are_joined(held_out: Replayed) -> None:
    of = [p for p in held_out.points if (p.way, p.seed, p.mark) == ("random", 1, 0.05)]
    one = Point.joined(of)
    assert one.timings == sum(p.timings for p in of) and one.seconds == sum(p.seconds for p in of)
    assert one.evaluation.all.count == sum(p.evaluation.all.count for p in of)
    assert (one.way, one.seed, one.mark) == ("random", 1, 0.05)
