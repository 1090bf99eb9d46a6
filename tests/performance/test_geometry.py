from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom

from synth.catalog.shapes import MoEShape
from synth.errors import SynthError
from synth.performance.geometry import EXTENTS, LARGE_ROWS, Sites, expert_rows, sites
from synth.performance.routing import UNIFORM, Routing


@st.composite
def shapes(draw: st.DrawFn) -> MoEShape:
    experts, ep = draw(st.integers(1, 256)), draw(st.sampled_from([1, 2, 8]))
    top_k = draw(st.integers(1, min(experts * ep, 12)))
    return MoEShape(draw(st.integers(1, 64)) * 128, draw(st.integers(1, 32)) * 64, experts, top_k, ep)


def site(shape: MoEShape, tokens: int, stage: int = 1, routing: Routing = UNIFORM) -> Sites:
    return sites([shape], np.array([0]), np.array([stage]), np.array([tokens]), routing)


@pytest.mark.parametrize("tokens", [1, 2, 17, 256, 3000, 32768])
@pytest.mark.parametrize("probability", [1 / 512, 8 / 256, 0.3, 0.99])
def test_rows_are_binomial(tokens: int, probability: float) -> None:
    found = expert_rows(tokens, probability)
    exact = binom.pmf(found.rows, tokens, probability)
    np.testing.assert_allclose(found.probability, exact, rtol=1e-8, atol=1e-14)
    assert exact.sum() == pytest.approx(1.0, abs=1e-11)
    assert found.mean() == pytest.approx(tokens * probability)
    assert found.active() == pytest.approx(1.0 - (1.0 - probability) ** tokens)
    assert found.exceeds(LARGE_ROWS) == pytest.approx(binom.sf(LARGE_ROWS, tokens, probability), abs=1e-9)


@pytest.mark.parametrize("extent", EXTENTS)
def test_tiles_are_those_of_the_whole_binomial(extent: int) -> None:
    tokens, probability = 1500, 8 / 128
    m = np.arange(tokens + 1)
    weight, n = binom.pmf(m, tokens, probability), np.ceil(m / extent)
    mean, variance = expert_rows(tokens, probability).tiles(extent)
    assert mean == pytest.approx(weight @ n, rel=1e-9)
    assert variance == pytest.approx(weight @ (n - weight @ n) ** 2, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(
    ("shape", "tokens"),
    [
        (MoEShape(512, 256, 64, 8), 100),
        (MoEShape(512, 256, 16, 1, 8), 300),
        (MoEShape(512, 256, 8, 2), 200),
        (MoEShape(512, 256, 128, 4), 3),
    ],
)
def test_routing_without_replacement_gives_the_same_means(shape: MoEShape, tokens: int) -> None:
    rng = np.random.default_rng(0)
    draws = 1500
    active, tiles = np.empty(draws), np.empty((draws, len(EXTENTS)))
    for i in range(draws):
        scores = rng.random((tokens, shape.experts * shape.ep_size))
        chosen = np.argpartition(scores, shape.top_k - 1, axis=1)[:, : shape.top_k]
        rows = np.bincount(chosen.ravel(), minlength=scores.shape[1])[: shape.experts]
        active[i] = (rows > 0).sum()
        tiles[i] = [np.ceil(rows / extent).sum() for extent in EXTENTS]
    s = site(shape, tokens)

    def within(sample: np.ndarray, mean: float) -> bool:
        return abs(sample.mean() - mean) <= 5.0 * sample.std() / np.sqrt(draws) + 1e-3

    assert within(active, s.active[0])
    for j in range(len(EXTENTS)):
        assert within(tiles[:, j], s.tiles[0, j])
        # Experts compete for the same tokens, so their sum varies less than that of independent ones.
        assert tiles[:, j].std() <= 1.1 * s.tiles_sd[0, j] + 1e-6


@settings(max_examples=150)
@given(shapes(), st.integers(1, 20000))
def test_counts_bound_each_other(shape: MoEShape, tokens: int) -> None:
    s = site(shape, tokens)
    rows, active, tiles = s.rows[0], s.active[0], s.tiles[0]
    extents, slack = np.array(EXTENTS), 1.0 + 1e-9
    assert rows == pytest.approx(tokens * shape.top_k / shape.ep_size)
    assert 0.0 < active <= min(rows, shape.experts) * slack
    assert (tiles * slack >= active).all() and (tiles * slack >= rows / extents).all()
    assert (tiles <= (active + rows / extents) * slack).all()
    assert (np.diff(tiles) <= 1e-9 * tiles[0]).all()
    assert (s.tiles_sd[0] >= 0.0).all() and 0.0 <= s.large[0] <= slack


@settings(max_examples=60)
@given(shapes(), st.integers(1, 5000), st.integers(1, 500))
def test_more_tokens_never_need_less(shape: MoEShape, tokens: int, more: int) -> None:
    a, b = site(shape, tokens), site(shape, tokens + more)
    for name in ("rows", "active", "tiles"):
        assert (getattr(b, name) >= getattr(a, name) * (1.0 - 1e-9)).all(), name


@settings(max_examples=30)
@given(st.lists(st.tuples(shapes(), st.sampled_from([1, 2]), st.integers(1, 9000)), min_size=1, max_size=12))
def test_many_sites_at_once_are_the_same_as_one_by_one(wanted: list[tuple[MoEShape, int, int]]) -> None:
    together = sites(
        [shape for shape, _, _ in wanted],
        np.arange(len(wanted)),
        np.array([stage for _, stage, _ in wanted]),
        np.array([tokens for _, _, tokens in wanted]),
    )
    assert len(together) == len(wanted)
    for i, (shape, stage, tokens) in enumerate(wanted):
        alone = site(shape, tokens, stage)
        assert (together.n[i], together.k[i]) == shape.gemm_nk(stage)
        for name in Sites.__dataclass_fields__:
            np.testing.assert_array_equal(getattr(together, name)[i], getattr(alone, name)[0], err_msg=name)


def test_expert_parallel_ranks_share_the_rows_of_the_whole_layer() -> None:
    whole, rank = site(MoEShape(512, 256, 256, 8), 777), site(MoEShape(512, 256, 32, 8, 8), 777)
    for name in ("rows", "active", "tiles"):
        np.testing.assert_allclose(getattr(whole, name), 8.0 * getattr(rank, name), rtol=1e-12)
    assert whole.large[0] == rank.large[0]


@given(st.integers(1, 2**31 - 1), st.sampled_from([1, 3, 8]))
def test_where_every_token_goes_to_every_expert_nothing_is_random(tokens: int, experts: int) -> None:
    s = site(MoEShape(512, 256, experts, experts), tokens)
    assert s.rows[0] == experts * tokens and s.active[0] == experts
    assert s.tiles[0].tolist() == [experts * -(-tokens // extent) for extent in EXTENTS]
    assert not s.tiles_sd.any()


@pytest.mark.parametrize("probability", [1e-9, 1 / 512, 0.5, 1.0 - 1e-9])
def test_huge_batches_stay_accurate(probability: float) -> None:
    tokens = 2**31 - 1
    found = expert_rows(tokens, probability)
    assert found.probability.sum() == pytest.approx(1.0)
    assert found.mean() == pytest.approx(tokens * probability, rel=1e-5)
    mean, variance = found.tiles(128)
    assert np.isfinite(mean) and variance >= 0.0
    assert mean >= tokens * probability / 128 * (1.0 - 1e-5)
    assert len(found.rows) < 2_000_000


# --- skewed routing --------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(shapes(), st.integers(1, 20000), st.sampled_from(["zipf:0.3", "zipf:1", "zipf:2.5", "zipf:10", "hot:1"]))
def test_counts_bound_each_other_under_skewed_routing(shape: MoEShape, tokens: int, text: str) -> None:
    s, even = site(shape, tokens, routing=Routing.parse(text)), site(shape, tokens)
    extents, slack = np.array(EXTENTS), 1.0 + 1e-9
    assert s.rows[0] == pytest.approx(even.rows[0])
    assert 0.0 < s.active[0] <= even.active[0] * slack
    tiles = s.tiles[0]
    assert (tiles * slack >= s.active[0]).all() and (tiles * slack >= s.rows[0] / extents).all()
    assert (tiles <= (s.active[0] + s.rows[0] / extents) * slack).all()
    assert (s.tiles_sd[0] >= 0.0).all() and 0.0 <= s.large[0] <= slack


def test_equally_likely_experts_are_uniform_routing_however_they_are_given() -> None:
    shape = MoEShape(512, 256, 16, 4, 8)
    even = site(shape, 300)
    counted = site(shape, 300, routing=Routing.counts([[7.0] * 128]))
    for name in Sites.__dataclass_fields__:
        np.testing.assert_allclose(getattr(counted, name), getattr(even, name), rtol=1e-9, err_msg=name)
        np.testing.assert_array_equal(getattr(site(shape, 300, 1, Routing.zipf(0.0)), name), getattr(even, name))


@pytest.mark.parametrize("text", ["zipf:0.6", "zipf:1.2", "hot:1", "balanced"])
@pytest.mark.parametrize(
    ("shape", "tokens"),
    [(MoEShape(512, 256, 64, 8), 300), (MoEShape(512, 256, 8, 4, 4), 700), (MoEShape(8, 8, 8, 2), 9)],
)
def test_drawn_routings_have_the_geometry_that_is_computed(shape: MoEShape, tokens: int, text: str) -> None:
    routing, rng, draws = Routing.parse(text), np.random.default_rng(0), 600
    total = shape.experts * shape.ep_size
    rows, active, large = (np.empty(draws) for _ in range(3))
    tiles = np.empty((draws, len(EXTENTS)))
    for i in range(draws):
        mine = np.bincount(routing.sample(total, shape.top_k, tokens, rng).ravel(), minlength=total)[: shape.experts]
        rows[i], active[i], large[i] = mine.sum(), (mine > 0).sum(), (mine > LARGE_ROWS).sum()
        tiles[i] = [np.ceil(mine / extent).sum() for extent in EXTENTS]
    s = site(shape, tokens, routing=routing)

    def within(sample: np.ndarray, mean: float) -> bool:
        return abs(sample.mean() - mean) <= 5.0 * sample.std() / np.sqrt(draws) + 1e-3

    assert within(rows, s.rows[0]) and within(active, s.active[0]) and within(large, s.large[0] * s.active[0])
    for j in range(len(EXTENTS)):
        assert within(tiles[:, j], s.tiles[0, j])
        if shape.ep_size == 1:
            # Which experts a rank holds varies between draws, and is no part of the deviation.
            assert tiles[:, j].std() <= 1.1 * s.tiles_sd[0, j] + 1e-6


def test_ranks_share_the_rows_of_the_whole_layer_under_skewed_routing_too() -> None:
    routing = Routing.zipf(1.0)
    whole = site(MoEShape(512, 256, 256, 8), 777, routing=routing)
    rank = site(MoEShape(512, 256, 32, 8, 8), 777, routing=routing)
    for name in ("rows", "active", "tiles"):
        np.testing.assert_allclose(getattr(whole, name), 8.0 * getattr(rank, name), rtol=1e-12)
    assert whole.large[0] == rank.large[0]


def test_one_expert_with_every_token_is_full_and_the_others_share_the_rest() -> None:
    s = site(MoEShape(512, 256, 4, 1), 1000, routing=Routing.always(1))
    assert (s.rows[0], s.active[0], s.large[0]) == (1000.0, 1.0, 1.0)
    assert s.tiles[0].tolist() == [-(-1000 // extent) for extent in EXTENTS] and not s.tiles_sd.any()


def test_counts_of_another_number_of_experts_are_refused() -> None:
    with pytest.raises(SynthError, match="counts of 3 experts, but a layer has 64"):
        site(MoEShape(512, 256, 64, 8), 8, routing=Routing.counts([[1, 2, 3]]))


# --- balanced routing ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(
    ("shape", "tokens"),
    [
        (MoEShape(512, 256, 64, 8), 1),
        (MoEShape(512, 256, 64, 8), 100),
        (MoEShape(512, 256, 64, 8), 8192),
        (MoEShape(512, 256, 6, 4), 3),
        (MoEShape(512, 256, 3, 1), 10_000),
    ],
)
def test_dealt_tokens_are_counted_by_hand(shape: MoEShape, tokens: int, stage: int) -> None:
    rows = np.bincount(np.arange(tokens * shape.top_k) % shape.experts, minlength=shape.experts)
    s = site(shape, tokens, stage, Routing.balanced())
    assert s.rows[0] == pytest.approx(rows.sum())
    assert s.active[0] == pytest.approx((rows > 0).sum())
    assert s.large[0] == pytest.approx((rows > LARGE_ROWS).sum() / (rows > 0).sum())
    np.testing.assert_allclose(s.tiles[0], [np.ceil(rows / extent).sum() for extent in EXTENTS])
    assert not s.tiles_sd.any()
    assert (s.n[0], s.k[0]) == shape.gemm_nk(stage)


@settings(max_examples=100)
@given(shapes(), st.integers(1, 20000))
def test_dealt_tokens_reach_as_many_experts_as_can_be_and_never_vary(shape: MoEShape, tokens: int) -> None:
    even, dealt = site(shape, tokens), site(shape, tokens, routing=Routing.balanced())
    total = shape.experts * shape.ep_size
    assert dealt.rows[0] == pytest.approx(even.rows[0])
    assert dealt.active[0] == pytest.approx(min(total, tokens * shape.top_k) / shape.ep_size)
    assert dealt.active[0] >= even.active[0] * (1.0 - 1e-9)
    assert not dealt.tiles_sd.any()
    extents, slack = np.array(EXTENTS), 1.0 + 1e-9
    assert (dealt.tiles[0] * slack >= dealt.rows[0] / extents).all()
    assert (dealt.tiles[0] <= (dealt.active[0] + dealt.rows[0] / extents) * slack).all()
    assert 0.0 <= dealt.large[0] <= slack


def test_ranks_share_what_is_dealt_to_the_whole_layer() -> None:
    whole = site(MoEShape(512, 256, 256, 8), 777, routing=Routing.balanced())
    rank = site(MoEShape(512, 256, 32, 8, 8), 777, routing=Routing.balanced())
    for name in ("rows", "active", "tiles"):
        np.testing.assert_allclose(getattr(whole, name), 8.0 * getattr(rank, name), rtol=1e-12)
    assert whole.large[0] == rank.large[0]
