"""Whole layers: what is around the GEMMs, weights that stay in L2, and what a fit can tell from them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synth.catalog.devices import get_device
from synth.catalog.shapes import MoEShape
from synth.flashinfer.tactics import load_table
from synth.performance.geometry import sites
from synth.performance.layers import LayerModel, LayerTimes, _of_a_rank_with_rows
from synth.performance.model import Cells
from synth.performance.roofline import DEFAULTS, Hardware, Roofline, tactic_columns, work
from synth.performance.routing import UNIFORM, Routing

CARD = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
QUANT = "nvfp4"
TABLE = load_table("sm120", QUANT)
HARDWARE = Hardware.of(get_device(CARD), QUANT)
#: All of L2 keeps weights, and its bytes are free; no weights ever stay.
ALL_STAY, NONE_STAY = (0.0, -20.0), (-20.0, 0.0)
NOTHING_AROUND = (-20.0, -20.0, -20.0)
SHAPES = (
    MoEShape(2048, 768, 128, 8), MoEShape(4096, 1536, 32, 8, 4), MoEShape(2880, 1440, 128, 4),
    MoEShape(7168, 256, 256, 8), MoEShape(2048, 1024, 64, 8), MoEShape(5120, 2048, 16, 1),
    MoEShape(4096, 3584, 8, 2), MoEShape(2688, 1856, 128, 6, gated=False),
)  # fmt: skip
TOKENS = (1, 8, 64, 512, 4096)


def layers(
    shapes: Sequence[MoEShape] = SHAPES,
    tokens: Sequence[int] = TOKENS,
    *,
    engine: str = "A",
    tuned: bool = True,
    routing: Routing = UNIFORM,
) -> LayerTimes:
    """Return every shape at every token count, without times yet."""
    shape, counts = (g.ravel() for g in np.meshgrid(np.arange(len(shapes)), tokens, indexing="ij"))
    labels = tuple(map(str, shapes))
    return LayerTimes(
        CARD, QUANT, engine, tuned, routing, tuple(shapes), labels, shape, counts, np.ones(len(shape))
    )  # fmt: skip


def timed(model: LayerModel, times: LayerTimes) -> LayerTimes:
    return dataclasses.replace(times, ms=model.predict(times, TABLE, HARDWARE))


def changed(**by: float) -> Roofline:
    """Return the default constants with some of them changed by these amounts."""
    return Roofline(tuple(value + by.get(name, 0.0) for name, value in DEFAULTS.items()))


def model_of(
    roofline: Roofline | None = None,
    resident: tuple[float, ...] = (-1.0, -0.7),
    around: tuple[float, ...] = (-4.5, 0.0, -9.5),
) -> LayerModel:
    return LayerModel(roofline or Roofline(), resident, {"A": around, "B": around})


def weight_bytes(shape: MoEShape) -> float:
    n1, k1 = shape.gemm_nk(1)
    n2, k2 = shape.gemm_nk(2)
    return (n1 * k1 + n2 * k2) * HARDWARE.weight_bytes * shape.experts


# --- what a layer is -------------------------------------------------------------------------------------------------


def test_a_layer_is_its_two_fastest_gemms_and_what_is_around_them() -> None:
    model = model_of(resident=NONE_STAY)
    times = layers()
    total = model.predict(times, TABLE, HARDWARE)
    around = model.around(times, TABLE, HARDWARE)
    for i in (3, 7, 19, 39):
        shape, tokens = times.shapes[times.shape[i]], int(times.tokens[i])
        best = []
        for stage in (1, 2):
            ids = np.array(TABLE.ids(stage))
            one = np.ones_like(ids)
            s, at = Cells((shape,), one * 0, one * stage, one * tokens, ids).sites()
            # The mean rank of this layer has rows, or this is the rank that is timed.
            s = _of_a_rank_with_rows(s)
            columns = tactic_columns(TABLE, HARDWARE)
            best.append(Roofline().predict(work(s, at, ids, columns, HARDWARE), ids, columns, HARDWARE).min())
        assert total[i] == pytest.approx(around[i] + sum(best), rel=1e-6)


def test_around_the_gemms_are_launches_rows_and_experts() -> None:
    times = layers((MoEShape(4096, 1536, 128, 8),), (16, 32))
    launch, expert = 0.01, 1e-4
    one, two = model_of(around=(np.log(launch), -20.0, -20.0)).around(times, TABLE, HARDWARE)
    assert one == pytest.approx(launch, rel=1e-3) == two
    one, two = model_of(around=(-20.0, -20.0, np.log(expert))).around(times, TABLE, HARDWARE)
    assert one == pytest.approx(128 * expert, rel=1e-3) == two
    one, two = model_of(around=(-20.0, 0.0, -20.0)).around(times, TABLE, HARDWARE)
    # Each token's row is read, and written once an expert.
    moved = 4096 * 16 * (2.0 + 8 * HARDWARE.activation_bytes)
    assert one == pytest.approx(moved / HARDWARE.dram, rel=0.01)
    assert two == pytest.approx(2.0 * one, rel=0.01)


@settings(max_examples=40)
@given(
    st.lists(st.floats(-0.7, 0.7), min_size=len(DEFAULTS), max_size=len(DEFAULTS)),
    st.sampled_from(SHAPES),
    st.integers(1, 20_000),
    st.booleans(),
)
def test_the_fallback_is_never_faster_than_the_fastest(
    off: list[float], shape: MoEShape, tokens: int, balanced: bool
) -> None:
    model = model_of(changed(**dict(zip(DEFAULTS, off, strict=True))))
    times = layers((shape,), (tokens,), routing=Routing.balanced() if balanced else UNIFORM)
    fast, slow = (model.predict(times, TABLE, HARDWARE, tuned=tuned) for tuned in (True, False))
    assert np.isfinite(fast).all() and (fast > 0.0).all() and (fast <= slow).all()


def test_which_tactics_ran_is_what_the_table_says_unless_told_otherwise() -> None:
    model, tuned, plain = model_of(), layers(), layers(tuned=False)
    fast, slow = (model.predict(t, TABLE, HARDWARE) for t in (tuned, plain))
    assert (fast < slow).any()
    np.testing.assert_array_equal(model.predict(plain, TABLE, HARDWARE, tuned=True), fast)
    np.testing.assert_array_equal(model.predict(tuned, TABLE, HARDWARE, tuned=False), slow)


def test_some_layers_are_predicted_as_among_all() -> None:
    model, times = model_of(), layers()
    rows = np.array([0, 7, 38])
    np.testing.assert_allclose(
        model.predict(times.select(rows), TABLE, HARDWARE), model.predict(times, TABLE, HARDWARE)[rows], rtol=1e-12
    )
    odd = times.tokens % 2 == 1
    assert len(times.select(odd)) == odd.sum()


# --- weights that stay in L2 -----------------------------------------------------------------------------------------


def test_weights_that_fit_into_l2_are_faster_and_others_are_not() -> None:
    small, large = MoEShape(1024, 256, 16, 4), MoEShape(7168, 2048, 64, 8)
    assert weight_bytes(small) < 0.1 * HARDWARE.l2_bytes < 10.0 * HARDWARE.l2_bytes < weight_bytes(large)
    times = layers((small, large), (64,))
    cold, warm = (
        model_of(resident=r, around=NOTHING_AROUND).predict(times, TABLE, HARDWARE) for r in (NONE_STAY, ALL_STAY)
    )
    assert warm[0] < 0.97 * cold[0]
    assert warm[1] == pytest.approx(cold[1], rel=0.01) and warm[1] <= cold[1]


def test_the_more_of_l2_keeps_weights_the_faster() -> None:
    times = layers()
    by_part = [model_of(resident=(part, -2.0)).predict(times, TABLE, HARDWARE) for part in (-8.0, -2.0, -1.0, 0.0)]
    for less, more in itertools.pairwise(by_part):
        assert (more <= less).all() and (more < less).any()


def test_bytes_of_l2_as_slow_as_memory_change_nothing() -> None:
    times = layers()
    np.testing.assert_allclose(
        model_of(resident=(0.0, 0.0)).predict(times, TABLE, HARDWARE),
        model_of(resident=NONE_STAY).predict(times, TABLE, HARDWARE),
        rtol=1e-9,
    )


# --- the rank that is timed ------------------------------------------------------------------------------------------


def test_a_mean_rank_with_less_than_one_expert_stands_for_one_with_one() -> None:
    shape = MoEShape(7168, 2048, 8, 8, 32)
    mean = sites((shape,), np.array([0]), np.array([1]), np.array([1]), Routing.balanced())
    assert mean.active[0] == pytest.approx(0.25)
    rank = _of_a_rank_with_rows(mean)
    assert rank.active[0] == pytest.approx(1.0) and rank.rows[0] == pytest.approx(1.0)
    np.testing.assert_allclose(rank.tiles, 1.0)


def test_ranks_with_rows_are_left_as_they_are() -> None:
    shape = MoEShape(7168, 2048, 8, 8, 32)
    for tokens in (4, 64, 4096):
        mean = sites((shape,), np.array([0]), np.array([2]), np.array([tokens]), Routing.balanced())
        rank = _of_a_rank_with_rows(mean)
        for field in dataclasses.fields(mean):
            np.testing.assert_array_equal(getattr(rank, field.name), getattr(mean, field.name))


def test_fewer_tokens_than_ranks_take_as_long_as_one_expert() -> None:
    times = layers((MoEShape(7168, 2048, 8, 8, 32),), (1, 2, 3), routing=Routing.balanced())
    a, b, c = model_of(around=NOTHING_AROUND).predict(times, TABLE, HARDWARE)
    # What is left of the difference is the finalize step, which counts tokens.
    assert a == pytest.approx(b, rel=0.01) == pytest.approx(c, rel=0.01)


# --- fitting ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def true() -> LayerModel:
    return LayerModel(
        changed(launch_ms=0.3, dram=0.2, panels=-0.2, mma=-0.2, load_ms=0.3),
        (-1.2, -0.9),
        {"A": (-4.0, 0.2, -9.0), "B": (-4.7, -0.2, -9.8)},
    )


@pytest.fixture(scope="module")
def both(true: LayerModel) -> list[LayerTimes]:
    return [
        timed(true, layers(engine=engine, tuned=tuned, routing=Routing.balanced()))
        for engine, tuned in (("A", True), ("B", False))
    ]


def test_a_fit_recovers_what_layers_show(true: LayerModel, both: list[LayerTimes]) -> None:
    fitted = LayerModel.fit(both, TABLE, HARDWARE, Roofline(), pull=0.02)
    assert set(fitted.overheads) == {"A", "B"}
    for times in both:
        before = model_of().predict(times, TABLE, HARDWARE) / times.ms - 1.0
        after = fitted.predict(times, TABLE, HARDWARE) / times.ms - 1.0
        assert np.median(np.abs(after)) < 0.002 < 0.05 < np.median(np.abs(before))
        assert np.abs(after).max() < 0.03
    # Bandwidth decides what most layers take, so that it is found; the gain of tactics follows.
    dram = list(DEFAULTS).index("dram")
    assert fitted.roofline.constants[dram] == pytest.approx(true.roofline.constants[dram], abs=0.02)
    unseen = layers((MoEShape(3072, 1024, 64, 6), MoEShape(6144, 512, 160, 8)), routing=Routing.balanced())
    gain, expected = (
        np.log(m.predict(unseen, TABLE, HARDWARE, tuned=False) / m.predict(unseen, TABLE, HARDWARE, tuned=True))
        for m in (fitted, true)
    )
    np.testing.assert_allclose(gain, expected, atol=0.03)


def test_a_fit_that_begins_at_the_truth_stays_there(true: LayerModel) -> None:
    own = LayerModel(true.roofline, (-1.0, -0.7), {"A": (-4.5, 0.0, -9.5)})
    fitted = LayerModel.fit([timed(own, layers())], TABLE, HARDWARE, true.roofline)
    np.testing.assert_allclose(fitted.roofline.constants, true.roofline.constants, atol=1e-4)
    np.testing.assert_allclose(fitted.resident, own.resident, atol=1e-4)
    np.testing.assert_allclose(fitted.overheads["A"], own.overheads["A"], atol=1e-4)


def test_constants_that_layers_do_not_show_stay_where_they_were(both: list[LayerTimes]) -> None:
    """No multistage kernel is in the table of nvfp4, so that no layer says anything of theirs."""
    fitted = LayerModel.fit(both, TABLE, HARDWARE, Roofline())
    for name, value in zip(DEFAULTS, fitted.roofline.constants, strict=True):
        if name.startswith("sm80"):
            assert value == pytest.approx(DEFAULTS[name], abs=1e-4)


def test_a_stronger_pull_keeps_constants_nearer_to_where_they_began(both: list[LayerTimes]) -> None:
    begin = np.array(Roofline().constants)
    away = [
        np.linalg.norm(np.array(LayerModel.fit(both, TABLE, HARDWARE, Roofline(), pull=p).roofline.constants) - begin)
        for p in (0.1, 1.0, 30.0, 1000.0)
    ]
    assert away[0] > away[1] > away[2] > away[3]
    assert away[3] < 0.01


def test_engines_differ_in_what_is_around_the_gemms_alone(both: list[LayerTimes], true: LayerModel) -> None:
    fitted = LayerModel.fit(both, TABLE, HARDWARE, Roofline(), pull=0.02)
    a, b = (fitted.around(t, TABLE, HARDWARE) for t in both)
    x, y = (true.around(t, TABLE, HARDWARE) for t in both)
    np.testing.assert_allclose(a - b, x - y, rtol=0.05, atol=5e-4)


def test_a_fit_is_the_same_every_time(both: list[LayerTimes]) -> None:
    a, b = (LayerModel.fit(both, TABLE, HARDWARE, Roofline()) for _ in range(2))
    assert a == b
