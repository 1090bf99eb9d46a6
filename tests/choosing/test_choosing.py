from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest

from synth.catalog.devices import get_device
from synth.catalog.shapes import MoEShape
from synth.choosing.choose import Choice, carried_over, choose
from synth.choosing.sources import analytical_source
from synth.errors import SynthError
from synth.flashinfer.tactics import load_table
from synth.performance.model import Analysis, Cells, PerformanceModel, Prediction
from synth.performance.roofline import Hardware, Work, tactic_columns
from synth.performance.routing import Routing
from synth.performance.ties import TIE
from synth.timings.folders import combine, load
from synth.timings.origin import Origin
from synth.timings.rows import Row
from synth.timings.table import ShapeTimings, Timings, times_by_bucket

SHIPPED = Path(__file__).parents[2] / "measurements"
TABLE = load_table("sm90", "bf16")
OLMOE = MoEShape(2048, 1024, 64, 8)
UNSEEN = MoEShape(2048, 896, 64, 8)
H200 = Origin.make("NVIDIA H200", "sm90", "bf16")


class Made:
    """A model that predicts what a function of (stage, tactic id) says, in ms."""

    def __init__(
        self,
        ms: Callable[[int, int], float],
        log_sd: float = 0.02,
        analytic: Callable[[int, int], float] | None = None,
        choice: object = True,
        choice_sd: float = 0.3,
    ) -> None:
        self.table = TABLE
        self.origin_ = Origin.make("NVIDIA H200", TABLE.arch, TABLE.quant)
        self.analytical, self.residual_ = choice is None, None
        self.calibration_: dict[str, float] = {}
        self.columns = tactic_columns(TABLE, Hardware.of(get_device("NVIDIA H200"), "bf16"))
        self._ms, self._analytic, self._log_sd, self._choice_sd = ms, analytic or ms, log_sd, choice_sd

    def predict(self, cells: Cells) -> Prediction:
        ms = self._times(self._ms, cells)
        sd = np.full(len(ms), self._log_sd)
        return Prediction(ms, sd, np.full(len(ms), self._choice_sd))

    def analyse(self, cells: Cells) -> Analysis:
        ms = self._times(self._analytic, cells)
        return Analysis(cells, *cells.sites(), Work(*[ms] * len(Work._fields)), ms)

    def correct(self, at: Analysis) -> Prediction:
        return self.predict(at.cells)

    @staticmethod
    def _times(function: Callable[[int, int], float], cells: Cells) -> np.ndarray:
        return np.array([function(s, t) for s, t in zip(cells.stage.tolist(), cells.tactic.tolist(), strict=True)])


def made_up(times: dict[tuple[int, int, int], float], failed: Iterable[tuple[int, int, int]] = ()) -> Timings:
    """Build timings of OLMOE from {(stage, tokens, tactic): ms}."""
    rows = [Row(1, *cell, ms) for cell, ms in times.items()]
    rows += [Row(1, *cell, math.nan, error="shared memory") for cell in failed]
    (found,) = combine([ShapeTimings.from_rows(H200, OLMOE, "olmoe", {1: {"source": "made up"}}, rows)])
    return found


def sweep(tokens: int, fast: dict[int, float]) -> dict[tuple[int, int, int], float]:
    """Return 2 ms for every tactic of a bucket, but for those in `fast`."""
    return {(stage, tokens, i): fast.get(i, 2.0) for stage in (1, 2) for i in TABLE.ids(stage)}


def one(choices: list[Choice], stage: int, fused: bool = True) -> Choice:
    (found,) = [c for c in choices if c.stage == stage and c.fused_finalize is fused]
    return found


@pytest.fixture(scope="module")
def timings() -> Timings:
    (found,) = load(SHIPPED, "NVIDIA H200", "bf16", problems=[])
    return found


@pytest.fixture(scope="module")
def model(timings: Timings) -> PerformanceModel:
    few = timings.select(np.isin(timings.tokens, [1, 16, 128, 1024]))
    return PerformanceModel(choice_trees=6, time_trees=4).fit(few)


# --- which tactic ----------------------------------------------------------------------------------------------------


def test_the_fastest_prediction_is_chosen_and_explained() -> None:
    ms = {5: 1.0, 7: 1.25, TABLE.fallback_id(1): 3.0}
    c = one(choose(Made(lambda s, t: ms.get(t, 2.0)), [OLMOE], [16]), 1)
    assert (c.tactic_id, c.tactic, c.ms) == (5, TABLE.tactic(5), 1.0)
    assert (c.runner_up, c.runner_up_ms, c.fallback_ms) == (TABLE.tactic(7), 1.25, 3.0)
    assert c.margin == 0.25
    assert c.candidates == len(TABLE.gemm1)
    assert c.source == "predicted" and c.beats_fallback


def test_choices_come_in_order_of_shapes_fusion_stages_buckets() -> None:
    shapes, buckets = [MoEShape(2048, 64 * i, 64, 8) for i in range(1, 11)], [16, 1]
    seen: list[int] = []
    found = choose(Made(lambda s, t: 1.0 + t), shapes, buckets, fused_finalize=(True, False), progress=seen.append)
    places = [(c.shape, c.fused_finalize, c.stage, c.bucket) for c in found]
    expected = {(s, f, stage, b) for s in shapes for f in (True, False) for stage in (1, 2) for b in buckets}
    assert len(places) == len(expected) and set(places) == expected
    assert seen[-1] == 10 and seen == sorted(seen)


def test_without_the_fused_finalize_no_fused_tactic_is_picked(model: PerformanceModel, timings: Timings) -> None:
    unfused = sum(not t.finalize for t in TABLE.gemm2)
    for measured in (None, timings):
        found = choose(model, [OLMOE, UNSEEN], [1, 16, 512, 4096], timings=measured, fused_finalize=(True, False))
        assert any(c.tactic.finalize for c in found)
        for c in found:
            if not c.fused_finalize:
                assert not c.tactic.finalize and not c.runner_up.finalize
                assert c.candidates <= (len(TABLE.gemm1) if c.stage == 1 else unfused)


def test_a_device_without_timings_is_analytical() -> None:
    source = analytical_source(get_device("NVIDIA RTX PRO 6000 Blackwell Server Edition"), "bf16")
    assert {c.source for c in choose(source.model, [OLMOE], [1, 512])} == {"analytical"}


def test_the_order_of_shapes_and_buckets_changes_nothing(model: PerformanceModel, timings: Timings) -> None:
    shapes = [OLMOE, UNSEEN, MoEShape(4096, 1536, 128, 8), *(MoEShape(1024, 64 * i, 8, 2) for i in range(1, 9))]
    there = choose(model, shapes, [1, 128, 2048], timings=timings)
    back = choose(model, shapes[::-1], [2048, 1, 128], timings=timings)

    def plain(choices: list[Choice]) -> dict[tuple[object, ...], tuple[object, ...]]:
        return {(c.shape, c.stage, c.bucket): (c.tactic_id, c.source, f"{c.ms:.6g}") for c in choices}

    assert plain(there) == plain(back)


def test_the_order_of_measured_rows_changes_nothing(model: PerformanceModel, timings: Timings) -> None:
    mixed = timings.select(np.random.default_rng(0).permutation(len(timings)))
    for a, b in zip(
        choose(model, [OLMOE], [1, 256], timings=timings), choose(model, [OLMOE], [1, 256], timings=mixed), strict=True
    ):
        assert a.tactic_id == b.tactic_id and a.ms == pytest.approx(b.ms)


# --- measured --------------------------------------------------------------------------------------------------------


def test_what_was_swept_is_chosen_from_its_timings(timings: Timings) -> None:
    wrong = Made(lambda s, t: 1.0 if t in (0, TABLE.fallback_id(2)) else 2.0)
    table = timings.averaged()
    mine = table.shapes.index(OLMOE)
    expected = {(s, m): min(times.values()) for (i, s, m), times in times_by_bucket(table).items() if i == mine}
    buckets = sorted({m for _, m in expected})
    found = choose(wrong, [OLMOE], buckets, timings=timings)
    assert len(found) == len(expected) > 30
    for c in found:
        ms = expected[c.stage, c.bucket]
        assert c.source == "measured"
        assert ms <= c.ms <= ms * (1 + TIE)


def test_other_buckets_and_shapes_are_predicted() -> None:
    t = made_up(sweep(16, {3: 1.0}))
    found = choose(Made(lambda s, t: 1.0 if t == 9 else 2.0), [OLMOE, UNSEEN], [16, 32], timings=t)
    by_place = {(c.shape, c.bucket): (c.source, c.tactic_id) for c in found if c.stage == 1}
    assert by_place.pop((OLMOE, 16)) == ("measured", 3)
    assert set(by_place.values()) == {("predicted", 9)}


def test_a_few_timings_are_not_a_sweep() -> None:
    t = made_up({(1, 16, i): 1.0 + i for i in range(10, 40)})
    c = one(choose(Made(lambda s, t: 1.0 if t == 2 else 2.0), [OLMOE], [16], timings=t), 1)
    assert (c.source, c.tactic_id) == ("predicted", 2)


def test_unfused_servers_need_only_the_unfused_tactics_swept() -> None:
    unfused = [i for i, t in TABLE.items(2) if not t.finalize]
    plain = {(2, 16, i): 1.0 if i == unfused[3] else 2.0 for i in unfused}
    fused = next(i for i, t in TABLE.items(2) if t.finalize)
    model = Made(lambda s, t: 0.2 if t == fused else 2.0)
    found = choose(model, [OLMOE], [16], timings=made_up(plain), fused_finalize=(True, False))
    assert (one(found, 2, fused=False).source, one(found, 2, fused=False).tactic_id) == ("measured", unfused[3])
    assert (one(found, 2, fused=True).source, one(found, 2, fused=True).tactic_id) == ("predicted", fused)


def test_predictions_are_shifted_onto_the_few_timings_there_are() -> None:
    # The model is twice too fast: 1 ms is really 2 ms, and tactic 2's 0.9 ms are no better than the measured 1.5 ms.
    t = made_up({(1, 16, i): 1.5 if i == 10 else 2.0 for i in range(10, 30)})
    c = one(choose(Made(lambda s, t: 0.9 if t == 2 else 1.0), [OLMOE], [16], timings=t), 1)
    assert (c.tactic_id, c.ms) == (10, 1.5)
    c = one(choose(Made(lambda s, t: 0.5 if t == 2 else 1.0), [OLMOE], [16], timings=t), 1)
    assert (c.source, c.tactic_id) == ("predicted", 2)


def test_the_best_timing_counts_even_where_the_formula_saw_no_hope() -> None:
    t = made_up({(1, 16, i): 1.0 if i == 10 else 2.0 for i in range(10, 30)})
    model = Made(lambda s, t: 2.0, analytic=lambda s, t: 9.0 if t == 10 else 1.0)
    c = one(choose(model, [OLMOE], [16], timings=t), 1)
    assert (c.source, c.tactic_id, c.ms) == ("verified", 10, 1.0)


def test_a_choice_is_verified_when_it_was_timed_and_is_surely_near_the_best() -> None:
    model = Made(lambda s, t: 1.0 if t == 10 else 1.3, choice_sd=0.01)
    c = one(choose(model, [OLMOE], [16], timings=made_up({(1, 16, 10): 1.1})), 1)
    assert (c.source, c.tactic_id, c.ms) == ("verified", 10, 1.1)
    assert c.within[0] > 0.9
    assert c.regret < 0.001
    unsure = Made(lambda s, t: 1.0 if t == 10 else 1.02, choice_sd=0.1)
    c = one(choose(unsure, [OLMOE], [16], timings=made_up({(1, 16, 10): 1.1})), 1)
    assert (c.source, c.within[0] < 0.9) == ("predicted", True)


def test_one_timing_that_is_far_too_fast_flips_nothing_until_it_is_repeated() -> None:
    """No real timing among the repeated ones was ever that fast by mistake, but a timer may fail."""
    model = Made(lambda s, t: 1.5 if t == 10 else 2.0, choice_sd=0.01)
    bad = sweep(16, {10: 1.5, 11: 1.1})
    assert one(choose(model, [OLMOE], [16], timings=made_up(bad)), 1).tactic_id == 10
    rows = [Row(p, *cell, ms) for cell, ms in bad.items() for p in (1, 2)]
    (twice,) = combine([ShapeTimings.from_rows(H200, OLMOE, "olmoe", {1: {}, 2: {}}, rows)])
    assert one(choose(model, [OLMOE], [16], timings=twice), 1).tactic_id == 11


def test_one_disturbed_repeat_flips_nothing() -> None:
    model = Made(lambda s, t: 1.0 if t in (10, 11) else 2.0, choice_sd=0.05)
    times = sweep(16, {10: 1.0, 11: 1.05})
    rows = [Row(1, *cell, ms) for cell, ms in times.items()]
    rows += [Row(2, *cell, 1.4 if cell == (1, 16, 10) else ms) for cell, ms in times.items()]
    (t,) = combine([ShapeTimings.from_rows(H200, OLMOE, "olmoe", {1: {}, 2: {}}, rows)])
    c = one(choose(model, [OLMOE], [16], timings=t), 1)
    assert (c.tactic_id, c.ms) == (10, 1.0)


def test_denied_tactics_are_never_chosen() -> None:
    t = made_up(sweep(16, {4: 1.0, 5: 1.2}))
    model = Made(lambda s, t: 2.0)
    denied = [(1, TABLE.tactic(4)), (2, TABLE.tactic(5))]
    assert one(choose(model, [OLMOE], [16], timings=t, denied=denied), 1).tactic_id == 5
    with pytest.raises(SynthError, match="every tactic of a stage is denied"):
        choose(model, [OLMOE], [16], denied=[(1, tactic) for _, tactic in TABLE.items(1)])


def test_repeats_are_averaged_and_ties_go_by_order() -> None:
    best = min(TABLE.ids(1), key=lambda i: TABLE.tactic(i))
    other = next(i for i in TABLE.ids(1) if i not in (best, TABLE.fallback_id(1)))
    c = one(choose(Made(lambda s, t: 1.0), [OLMOE], [16], timings=made_up(sweep(16, {best: 1.0005, other: 1.0}))), 1)
    assert c.tactic_id == best
    assert c.margin < 0


def test_a_tactic_that_failed_is_not_chosen_from_a_sweep() -> None:
    times = sweep(16, {4: 1.0})
    fastest = (1, 16, 5)
    del times[fastest]
    c = one(choose(Made(lambda s, t: 0.5 if t == 5 else 2.0), [OLMOE], [16], timings=made_up(times, [fastest])), 1)
    assert (c.source, c.tactic_id) == ("measured", 4)


@pytest.mark.parametrize("failures", [3, 8, 20])
def test_a_tactic_that_failed_is_not_chosen_where_many_failed(failures: int) -> None:
    """FlashInfer would serve it as a hit, and the kernel would fail inside the server."""
    failed = [(1, 16, i) for i in range(5, 5 + failures)]
    times = {cell: ms for cell, ms in sweep(16, {4: 1.0}).items() if cell not in failed}
    fast = {i for _, _, i in failed}
    c = one(choose(Made(lambda s, t: 0.5 if t in fast else 2.0), [OLMOE], [16], timings=made_up(times, failed)), 1)
    assert c.tactic_id not in fast
    assert c.runner_up not in {TABLE.tactic(i) for i in fast}


def test_a_tactic_that_ever_failed_here_is_not_chosen() -> None:
    times = sweep(16, {4: 1.0, 5: 0.5})
    rows = [Row(1, *cell, ms) for cell, ms in times.items()] + [Row(2, 1, 16, 5, math.nan, error="x")]
    (t,) = combine([ShapeTimings.from_rows(H200, OLMOE, "olmoe", {1: {}, 2: {}}, rows)])
    assert one(choose(Made(lambda s, t: 2.0), [OLMOE], [16], timings=t), 1).tactic_id == 4


# --- the fallback ----------------------------------------------------------------------------------------------------


def test_the_fallback_itself_is_left_out() -> None:
    for c in choose(Made(lambda s, t: 1.0 if t == TABLE.fallback_id(s) else 2.0), [OLMOE], [1, 16]):
        assert c.tactic_id == TABLE.fallback_id(c.stage) and not c.beats_fallback


@pytest.mark.parametrize(
    ("gain", "log_sd", "sure"), [(1.02, 0.02, False), (1.10, 0.02, True), (1.10, 0.2, False), (3.0, 0.2, True)]
)
def test_a_choice_that_may_not_beat_the_fallback_is_left_out(gain: float, log_sd: float, sure: bool) -> None:
    model = Made(lambda s, t: gain if t == TABLE.fallback_id(s) else 1.0 if t == TABLE.ids(s)[5] else 5.0, log_sd)
    assert {c.beats_fallback for c in choose(model, [OLMOE], [16])} == {sure}


def test_a_measured_gain_within_the_noise_of_repeats_is_left_out() -> None:
    for gain, sure in ((1.01, False), (1.2, True)):
        fast = {TABLE.fallback_id(1): gain, 5: 1.0, TABLE.fallback_id(2): gain, 60: 1.0}
        found = choose(Made(lambda s, t: 1.0), [OLMOE], [16], timings=made_up(sweep(16, fast)))
        assert {(c.source, c.beats_fallback) for c in found} == {("measured", sure)}


def test_a_hopeless_fallback_is_still_compared() -> None:
    model = Made(lambda s, t: 40.0 if t == TABLE.fallback_id(s) else 1.0 + t / 1000)
    found = choose(model, [OLMOE], [16], fused_finalize=(True, False))
    assert all(c.fallback_ms == 40.0 and c.beats_fallback for c in found)


def test_analytically_hopeless_tactics_are_not_looked_at() -> None:
    slow = set(range(10, 30))
    model = Made(lambda s, t: 0.1 if t in slow else 1.0 + t / 1000, analytic=lambda s, t: 9.0 if t in slow else 1.0)
    c = one(choose(model, [OLMOE], [16]), 1)
    assert c.tactic_id not in slow and c.candidates == len(TABLE.gemm1) - len(slow)


def test_the_real_model_compares_the_fallback_everywhere(model: PerformanceModel, timings: Timings) -> None:
    shapes = [UNSEEN, MoEShape(7168, 2048, 8, 8, 32), MoEShape(4096, 14336, 8, 2)]
    for c in choose(model, shapes, [1, 64, 8192], timings=timings, fused_finalize=(True, False)):
        assert math.isfinite(c.fallback_ms) and c.fallback_ms >= c.ms * (1 - TIE)
        assert c.candidates >= 2
        assert c.runner_up_ms >= c.ms * (1 - TIE)
        assert c.beats_fallback <= (c.fallback_ms > c.ms)


def test_a_choice_without_a_fallbacks_time_is_left_out() -> None:
    times = sweep(16, {4: 1.0})
    for stage in (1, 2):
        del times[stage, 16, TABLE.fallback_id(stage)]
    found = choose(Made(lambda s, t: 2.0), [OLMOE], [16], timings=made_up(times))
    assert not any(c.beats_fallback for c in found if math.isnan(c.fallback_ms))


def test_where_every_plausible_tactic_failed_nothing_is_written() -> None:
    t = made_up({}, [(1, 16, i) for i, _ in TABLE.items(1)])
    c = one(choose(Made(lambda s, t: 1.0 if t == 2 else 2.0), [OLMOE], [16], timings=t), 1)
    assert not c.beats_fallback


# --- skewed routing --------------------------------------------------------------------------------------------------

SKEWED = Routing.zipf(1.0)


class Skewed(Made):
    """A model that predicts `factors` times as much for some tactics under any routing but uniform."""

    def __init__(self, ms: Callable[[int, int], float], factors: dict[int, float], log_sd: float = 0.02) -> None:
        super().__init__(ms, log_sd)
        self.factors = factors

    def predict(self, cells: Cells) -> Prediction:
        found = super().predict(cells)
        factor = [1.0 if cells.routing.is_uniform else self.factors.get(t, 1.0) for t in cells.tactic.tolist()]
        return dataclasses.replace(found, ms=found.ms * np.array(factor))


def test_a_sweep_is_scaled_by_what_the_model_says_of_the_routing() -> None:
    t = made_up(sweep(16, {4: 1.0, 5: 1.1, TABLE.fallback_id(1): 3.0}))
    model = Skewed(lambda s, i: 1.05, {4: 1.3, TABLE.fallback_id(1): 2.0})
    plain = one(choose(model, [OLMOE], [16], timings=t), 1)
    assert (plain.source, plain.tactic_id, plain.ms) == ("measured", 4, 1.0)
    c = one(choose(model, [OLMOE], [16], timings=t, routing=SKEWED), 1)
    assert (c.source, c.tactic_id, c.runner_up) == ("predicted", 5, TABLE.tactic(4))
    assert (c.ms, c.runner_up_ms, c.fallback_ms) == pytest.approx((1.1, 1.3, 6.0), rel=0.01)
    assert c.candidates == len(TABLE.gemm1)


def test_what_the_model_misses_by_far_is_not_carried_over() -> None:
    assert carried_over(1.0, 1.05, 2.1) == pytest.approx(2.0)
    assert carried_over(3.0, 1.0, 2.0) == pytest.approx(6.0)
    # Measured in half of what the model says: that much faster it need not be under another routing.
    assert carried_over(0.5, 1.0, 0.4) == pytest.approx(0.36)
    t = made_up(sweep(16, {4: 1.0, 5: 1.2}))
    model = Skewed(lambda s, i: {4: 1.0, 5: 2.4}.get(i, 2.0), {5: 0.6})
    c = one(choose(model, [OLMOE], [16], timings=t, routing=SKEWED), 1)
    assert (c.tactic_id, c.runner_up_ms) == (4, pytest.approx(0.9 * 2.4 * 0.6, rel=0.01))


def test_a_scaled_timing_is_as_unsure_as_the_prediction() -> None:
    fast = {TABLE.fallback_id(1): 1.2, 5: 1.0, TABLE.fallback_id(2): 1.2, 60: 1.0}
    t = made_up(sweep(16, fast))
    for log_sd, sure in ((0.02, True), (0.2, False)):
        found = choose(Skewed(lambda s, i: 1.0, {}, log_sd), [OLMOE], [16], timings=t, routing=SKEWED)
        assert {(c.source, c.beats_fallback) for c in found} == {("predicted", sure)}
    assert {c.beats_fallback for c in choose(Skewed(lambda s, i: 1.0, {}, 0.2), [OLMOE], [16], timings=t)} == {True}


def test_timings_of_tactics_that_the_formula_rules_out_are_scaled_too() -> None:
    t = made_up({(1, 16, i): 1.0 if i == 10 else 2.0 for i in range(10, 30)})
    model = Skewed(lambda s, i: 1.0 if i == 10 else 2.0, {10: 1.5})
    model._analytic = lambda s, i: 9.0 if i == 10 else 1.0
    c = one(choose(model, [OLMOE], [16], timings=t, routing=SKEWED), 1)
    assert (c.source, c.tactic_id, c.ms) == ("predicted", 10, pytest.approx(1.5))


def test_failed_tactics_stay_out_under_any_routing() -> None:
    times = sweep(16, {4: 1.0})
    del times[1, 16, 5]
    t = made_up(times, [(1, 16, 5)])
    c = one(choose(Skewed(lambda s, i: 0.5 if i == 5 else 2.0, {5: 0.1}), [OLMOE], [16], timings=t, routing=SKEWED), 1)
    assert (c.source, c.tactic_id) == ("predicted", 4)


def test_the_real_model_answers_any_routing(model: PerformanceModel, timings: Timings) -> None:
    shapes, buckets = [OLMOE, UNSEEN], [1, 64, 1024]
    even = choose(model, shapes, buckets, timings=timings, routing=Routing.zipf(0.0))
    assert even == choose(model, shapes, buckets, timings=timings)
    skewed = choose(model, shapes, buckets, timings=timings, routing=Routing.zipf(1.2), fused_finalize=(True, False))
    assert {c.source for c in skewed} == {"predicted"}
    assert all(math.isfinite(c.ms) and c.ms > 0 for c in skewed)
    assert not any(c.tactic.finalize for c in skewed if not c.fused_finalize)
    # 64 tokens on few experts read fewer weights.
    ms = [{(c.shape, c.stage): c.ms for c in found if c.bucket == 64 and c.fused_finalize} for found in (even, skewed)]
    assert all(ms[1][place] < ms[0][place] for place in ms[0])
    rtx = analytical_source(get_device("NVIDIA RTX PRO 6000 Blackwell Server Edition"), "bf16").model
    assert {c.source for c in choose(rtx, [OLMOE], [64], routing=SKEWED)} == {"analytical"}


def test_counts_of_another_model_are_refused(model: PerformanceModel) -> None:
    with pytest.raises(SynthError, match="counts of 3 experts, but a layer has 64"):
        choose(model, [OLMOE], [16], routing=Routing.counts([[3, 2, 1]]))
