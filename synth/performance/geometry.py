"""Tiles, active experts and rows of a grouped GEMM under random routing: exact, and vectorised over cells.

Every token picks ``top_k`` distinct experts uniformly, so the rows of one expert follow
``M ~ Binomial(tokens, top_k / total_experts)``. What a kernel does with an expert's rows depends on
``ceil(M / tile)``, whose mean and variance follow from the binomial's probabilities.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln

from synth.catalog.shapes import MoEShape

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


@functools.lru_cache(maxsize=65536)
def uniform_rows(tokens: int, probability: float) -> RowDistribution:
    """Return the distribution of one expert's rows under uniform random routing.

    Parameters
    ----------
    tokens : int
        Tokens in the batch.
    probability : float
        Chance that a token goes to this expert, in (0, 1].
    """
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
        Probability that an active expert has more than ``LARGE_ROWS`` rows.
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


def sites(shapes: Sequence[MoEShape], shape: Ints, stage: Ints, tokens: Ints) -> Sites:
    """Compute the geometry of ``(shapes[shape[i]], stage[i], tokens[i])`` for every i.

    Parameters
    ----------
    shapes : sequence of MoEShape
    shape, stage, tokens : ndarray of int64, shape (s,)
        Index into `shapes`, stage 1 or 2, tokens in the batch.
    """
    column = functools.partial(np.array, dtype=np.float64)
    experts = column([s.experts for s in shapes])[shape]
    nk = column([[s.gemm_nk(1), s.gemm_nk(2)] for s in shapes]).reshape(-1, 2, 2)[shape, stage - 1]
    table: dict[tuple[int, float], tuple[float, ...]] = {}
    probability = [s.expert_probability for s in shapes]
    keys = [(int(t), probability[i]) for i, t in zip(shape.tolist(), tokens.tolist(), strict=True)]
    for key in keys:
        if key not in table:
            table[key] = _row_summary(*key)
    summary = column([table[key] for key in keys]).reshape(len(keys), -1)
    e = len(EXTENTS)
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
        tiles_sd=np.sqrt(experts[:, None] * summary[:, 3 + e :]),
    )


@functools.lru_cache(maxsize=65536)
def _row_summary(tokens: int, probability: float) -> tuple[float, ...]:
    m = uniform_rows(tokens, probability)
    active = m.active()
    tiles = [m.tiles(extent) for extent in EXTENTS]
    return (m.mean(), active, m.exceeds(LARGE_ROWS) / active, *(t[0] for t in tiles), *(t[1] for t in tiles))
