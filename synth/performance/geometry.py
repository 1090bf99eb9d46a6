"""Tiles, active experts and rows of a grouped GEMM under random routing: exact, and vectorised over cells.

Every token picks ``top_k`` distinct experts, expert i with probability p_i, so the rows of one expert follow
``M ~ Binomial(tokens, p_i)``. Under uniform routing ``p_i = top_k / total_experts``; under another one it is
:meth:`synth.performance.routing.Routing.inclusion`. What a kernel does with an expert's rows depends on
``ceil(M / tile)``, whose mean and variance follow from the binomial's probabilities.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from synth.catalog.shapes import MoEShape
from synth.performance.routing import UNIFORM, Routing

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: Tile extents along tokens (tile times cluster) at which the expected number of tiles is tabulated.
EXTENTS = (16, 32, 64, 128, 256, 512)
#: An expert with more rows than this is "large": some tactics slow down sharply there.
LARGE_ROWS = 64


def least_by(group: Ints, values: Floats, groups: int) -> Floats:
    """Return the least of `values` in each group, infinity for a group without one, shape (groups,)."""
    least = np.full(groups, np.inf)
    np.minimum.at(least, group, values)
    return least


def first_of_each(group: Ints, score: Floats) -> Ints:
    """Return the index of the least score in each group, by group; every group has one."""
    order = np.lexsort((score, group))
    first = np.concatenate([[True], group[order][1:] != group[order][:-1]])
    return np.asarray(order[first])


@dataclass(frozen=True)
class RowDistribution:
    """How many rows one expert gets: the possible numbers and their probabilities.

    Attributes
    ----------
    rows : ndarray of int64, shape (r,)
        Consecutive row counts that carry all but 1e-15 of the probability.
    probability : ndarray of float64, shape (r,)
        Their probabilities; they sum to 1.
    """

    rows: Ints
    probability: Floats

    def mean(self) -> float:
        """Return the expected number of rows."""
        return float(self.rows @ self.probability)

    def active(self) -> float:
        """Return the probability that the expert gets a row at all."""
        return float(self.probability[self.rows > 0].sum())

    def tiles(self, extent: int) -> tuple[float, float]:
        """Return mean and variance of ``ceil(M / extent)``."""
        n = -(-self.rows // extent)
        mean = float(n @ self.probability)
        return mean, max(float((n * n) @ self.probability) - mean * mean, 0.0)

    def exceeds(self, rows: int) -> float:
        """Return the probability of more than `rows` rows."""
        return float(self.probability[self.rows > rows].sum())


def expert_rows(tokens: int, probability: float) -> RowDistribution:
    """Return the distribution of one expert's rows.

    Parameters
    ----------
    tokens : int
        Tokens in the batch.
    probability : float
        Chance that a token goes to this expert, in (0, 1].
    """
    from scipy.special import gammaln

    if probability >= 1.0:
        return RowDistribution(np.array([tokens]), np.array([1.0]))
    mean = tokens * probability
    # Chernoff: beyond ten standard deviations plus fifty rows less than 1e-15 of the probability is left.
    width = 10.0 * np.sqrt(mean * (1.0 - probability)) + 50.0
    rows = np.arange(max(0, int(mean - width)), min(tokens, int(mean + width)) + 1, dtype=np.int64)
    log_p = (
        gammaln(tokens + 1.0)
        - gammaln(rows + 1.0)
        - gammaln(tokens - rows + 1.0)
        + rows * np.log(probability)
        + (tokens - rows) * np.log1p(-probability)
    )
    p = np.exp(log_p)
    return RowDistribution(rows, p / p.sum())


@dataclass(frozen=True)
class Sites:
    """Geometry of many (shape, stage, tokens) sites; every array has one row a site.

    Attributes
    ----------
    tokens, n, k, experts, top_k, ep_size, stage : ndarray of float64, shape (s,)
        The site itself: N and K of its GEMM, experts on this rank.
    gated : ndarray of float64, shape (s,)
        1 where gemm1 has a gate.
    rows : ndarray of float64, shape (s,)
        Expected rows over all experts of this rank.
    active : ndarray of float64, shape (s,)
        Expected experts with at least one row.
    large : ndarray of float64, shape (s,)
        Share of the active experts that have more than ``LARGE_ROWS`` rows.
    tiles, tiles_sd : ndarray of float64, shape (s, len(EXTENTS))
        Mean and standard deviation of the number of tiles along tokens, over all experts of this rank,
        for each extent of ``EXTENTS``. Experts are taken as independent for the deviation.
    """

    tokens: Floats
    n: Floats
    k: Floats
    experts: Floats
    top_k: Floats
    ep_size: Floats
    stage: Floats
    gated: Floats
    rows: Floats
    active: Floats
    large: Floats
    tiles: Floats
    tiles_sd: Floats

    def __len__(self) -> int:
        return len(self.tokens)


def sites(shapes: Sequence[MoEShape], shape: Ints, stage: Ints, tokens: Ints, routing: Routing = UNIFORM) -> Sites:
    """Compute the geometry of ``(shapes[shape[i]], stage[i], tokens[i])`` for every i.

    All ranks of an expert-parallel layer get the same config, and any of them may hold the popular experts. So what
    is given is the mean over ranks: the mean over all experts of the layer, times those that a rank holds.

    Parameters
    ----------
    shapes : sequence of MoEShape
    shape, stage, tokens : ndarray of int64, shape (s,)
        Index into `shapes`, stage 1 or 2, tokens in the batch.
    routing : Routing
        How tokens spread over the experts.

    Raises
    ------
    SynthError
        When the routing is not one of a shape: counts of another number of experts.
    """
    column = functools.partial(np.array, dtype=np.float64)
    experts = column([s.experts for s in shapes])[shape]
    nk = column([[s.gemm_nk(1), s.gemm_nk(2)] for s in shapes]).reshape(-1, 2, 2)[shape, stage - 1]
    if routing.is_uniform:
        probability = [s.expert_probability for s in shapes]
        summary = _table(
            _row_summary, [(t, probability[i]) for i, t in zip(shape.tolist(), tokens.tolist(), strict=True)]
        )
    else:
        layer = [(s.experts * s.ep_size, s.top_k, routing) for s in shapes]
        summary = _table(_mean_summary, [(t, *layer[i]) for i, t in zip(shape.tolist(), tokens.tolist(), strict=True)])
    e = len(EXTENTS)
    # Where tokens are dealt in turn, experts aren't independent: the tiles of all of them don't vary.
    varies = 0.0 if routing.is_balanced else 1.0
    return Sites(
        tokens=tokens.astype(np.float64),
        n=nk[:, 0],
        k=nk[:, 1],
        experts=experts,
        top_k=column([s.top_k for s in shapes])[shape],
        ep_size=column([s.ep_size for s in shapes])[shape],
        stage=stage.astype(np.float64),
        gated=column([s.gated for s in shapes])[shape],
        rows=experts * summary[:, 0],
        active=experts * summary[:, 1],
        large=summary[:, 2],
        tiles=experts[:, None] * summary[:, 3 : 3 + e],
        tiles_sd=varies * np.sqrt(experts[:, None] * summary[:, 3 + e :]),
    )


def _table(summarize: Callable[..., tuple[float, ...]], keys: list[Any]) -> Floats:
    """Return the summary of every key, one row each; each distinct key is summarised once."""
    found = {key: summarize(*key) for key in dict.fromkeys(keys)}
    return np.array([found[key] for key in keys], dtype=np.float64).reshape(len(keys), -1)


@functools.lru_cache(maxsize=65536)
def _row_summary(tokens: int, probability: float) -> tuple[float, ...]:
    """Return rows, activity, share of large ones, and tiles' means and variances of an expert with a probability."""
    rows, active, large, *tiles = _summary(tokens, probability)
    return (rows, active, large / active, *tiles)


@functools.lru_cache(maxsize=8192)
def _mean_summary(tokens: int, experts: int, top_k: int, routing: Routing) -> tuple[float, ...]:
    """Return the mean over a layer's experts of what :func:`_row_summary` gives, `large` weighted by activity."""
    if routing.is_balanced:
        n, active, large, *tiles = _described(_dealt_rows(tokens, experts, top_k))
        return (n, active, large / active, *tiles)
    p, counts = np.unique(routing.inclusion(experts, top_k), return_counts=True)
    # Experts without tokens have no rows; equally likely ones have the same.
    used = [(float(q), float(n)) for q, n in zip(p, counts, strict=True) if q > 0.0]
    rows = np.array([_summary(tokens, q) for q, _ in used])
    share = np.array([n for _, n in used]) / experts
    mean: Floats = share @ rows
    mean[2] /= mean[1]
    return tuple(mean.tolist())


def _summary(tokens: int, probability: float) -> tuple[float, ...]:
    """Return rows, activity, probability of being large, and tiles' means and variances of one expert."""
    return _described(expert_rows(tokens, probability))


def _dealt_rows(tokens: int, experts: int, top_k: int) -> RowDistribution:
    """Return the rows of an expert where all rows are dealt to the experts in turn."""
    least, over = divmod(tokens * top_k, experts)
    return RowDistribution(np.array([least, least + 1]), np.array([1.0 - over / experts, over / experts]))


def _described(m: RowDistribution) -> tuple[float, ...]:
    tiles = [m.tiles(extent) for extent in EXTENTS]
    return (m.mean(), m.active(), m.exceeds(LARGE_ROWS), *(t[0] for t in tiles), *(t[1] for t in tiles))
