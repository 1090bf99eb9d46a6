"""How the errors of a model's predictions go together, and how far a timing can be trusted.

The predictions for one (shape, stage) are off by errors that its cells share: the level of a bucket, a tactic that this
shape likes less than others do, a tile, a cluster size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from synth.performance.geometry import Floats, Ints, least_by
from synth.performance.roofline import TacticColumns

#: Predictions further than this behind the best are too optimistic …
_TRUSTED = 0.02
#: … by this share of what exceeds it (the forest is fitted on the near tactics).
_OPTIMISM = 0.5
#: Repeats of a timing differ by this much (logarithm) …
_NOISE = 0.0035
#: … and by this much in ms, the timer's own.
_JITTER_MS = 0.00015


class Kernel(NamedTuple):
    """How errors of the predictions are shared. Deviations are of logarithms, lengths in doublings of the tokens."""

    #: A candidate's own deviation: its least, and how it grows with the trees' disagreement and behind the best.
    least: float = 0.006
    disagreement: float = 0.9
    behind: float = 0.1
    #: Shares of its variance that it has in common with: itself in other buckets, equal tiles, equal tile along
    #: tokens, equal cluster; and what it has alone.
    tactic: float = 0.48
    tile: float = 0.10
    rows: float = 0.02
    cluster: float = 0.15
    alone: float = 0.25
    length: float = 3.0
    #: The level of a bucket, which no choice depends on: over all buckets, and of one bucket.
    level: float = 0.055
    level_length: float = 4.0
    level_alone: float = 0.004


KERNEL = Kernel()


def noise_sd(ms: Floats | float) -> Floats:
    """Return the standard deviation of the logarithm of one timing of `ms`."""
    return np.asarray(np.hypot(_NOISE, _JITTER_MS / np.asarray(ms)))


def expected(bucket: Ints, ms: Floats) -> tuple[Floats, Floats]:
    """Return the expected log ms of candidates, and how far behind their bucket's best they are predicted."""
    behind = np.log(ms / least_by(bucket, ms, int(bucket[-1]) + 1)[bucket])
    return np.log(ms) + _OPTIMISM * np.maximum(behind - _TRUSTED, 0.0), behind


def covariance(
    tokens: Ints, tactic: Ints, behind: Floats, choice_sd: Floats, columns: TacticColumns, kernel: Kernel
) -> Floats:
    """Return the covariance of predictions' errors, shape (…, n, n) for arguments of shape (…, n)."""
    k, c = kernel, columns.select(tactic)
    doublings = np.log2(tokens)
    apart = np.abs(doublings[..., :, None] - doublings[..., None, :])
    together = apart == 0.0

    def equal(*fields: NDArray[Any]) -> NDArray[np.bool_]:
        same = np.ones(apart.shape, dtype=bool)
        for values in fields:
            same &= values[..., :, None] == values[..., None, :]
        return same

    itself = equal(tactic)
    shared = np.exp(-apart / k.length) * (
        k.tactic * itself
        + k.tile * equal(c.m, c.n, c.sm80, c.swap, c.stages)
        + k.rows * equal(c.m, c.sm80, c.swap)
        + k.cluster * equal(c.cluster_m, c.cluster_n, c.sm80, c.finalize)
    )
    sd = np.sqrt(k.least**2 + (k.disagreement * choice_sd) ** 2 + (k.behind * behind) ** 2)
    own = sd[..., :, None] * sd[..., None, :] * (shared + k.alone * (itself & together))
    return np.asarray(own + k.level**2 * np.exp(-apart / k.level_length) + k.level_alone**2 * together)
