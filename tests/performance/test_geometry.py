from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom

from synth.catalog.shapes import MoEShape
from synth.performance.geometry import EXTENTS, LARGE_ROWS, Sites, sites, uniform_rows


@st.composite
def shapes(draw: st.DrawFn) -> MoEShape:
    experts, ep = draw(st.integers(1, 256)), draw(st.sampled_from([1, 2, 8]))
    top_k = draw(st.integers(1, min(experts * ep, 12)))
    return MoEShape(draw(st.integers(1, 64)) * 128, draw(st.integers(1, 32)) * 64, experts, top_k, ep)


def site(shape: MoEShape, tokens: int, stage: int = 1) -> Sites:
    return sites([shape], np.array([0]), np.array([stage]), np.array([tokens]))


@pytest.mark.parametrize("tokens", [1, 2, 17, 256, 3000, 32768])
@pytest.mark.parametrize("probability", [1 / 512, 8 / 256, 0.3, 0.99])
def test_rows_are_binomial(tokens: int, probability: float) -> None:
    found = uniform_rows(tokens, probability)
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
    mean, variance = uniform_rows(tokens, probability).tiles(extent)
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
    found = uniform_rows(tokens, probability)
    assert found.probability.sum() == pytest.approx(1.0)
    assert found.mean() == pytest.approx(tokens * probability, rel=1e-5)
    mean, variance = found.tiles(128)
    assert np.isfinite(mean) and variance >= 0.0
    assert mean >= tokens * probability / 128 * (1.0 - 1e-5)
    assert len(found.rows) < 2_000_000
