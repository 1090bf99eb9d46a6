"""How good choices are believed to be: their expected regret, and the probability that they are near the best."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from synth.performance.geometry import Floats, Ints
from synth.performance.roofline import TacticColumns
from synth.performance.shared_errors import KERNEL, covariance, expected

#: Shares behind the best whose probabilities are stated.
NEAR = (0.01, 0.02)
#: Groups whose draws are held at once.
_GROUPS_AT_ONCE = 256
#: Added to variances before their root is taken.
_LITTLE = 1e-9
#: Draws that estimate probabilities, and their seed.
_DRAWS = 256


@dataclass(frozen=True)
class Outlook:
    """How good the choice of each bucket is believed to be.

    Attributes
    ----------
    regret : ndarray of float64, shape (buckets,)
        Expected logarithm of its regret.
    within : ndarray of float64, shape (buckets, margins)
        Probability that its time is at most this share above the best.
    """

    regret: Floats
    within: Floats


def prior_outlook(
    place: Ints,
    tactic: Ints,
    ms: Floats,
    choice_sd: Floats,
    chosen: Ints,
    columns: TacticColumns,
    margins: Sequence[float] = NEAR,
    *,
    most: int = 1,
) -> Outlook:
    """Return what a posterior's outlook is before any timing, for many shapes at once.

    Parameters
    ----------
    place : ndarray of int64, shape (n,)
        Number of each candidate's (shape, stage, bucket), from 0 and sorted; every place has one.
    tactic, ms, choice_sd : ndarray, shape (n,)
        As in :meth:`synth.performance.posterior.Posterior.prior`.
    chosen : ndarray of int64, shape (places,)
        Row of each place's choice.
    most : int
        Draws are made for so many candidates of a place, if none has more.
    """
    mean, behind = expected(place, ms)
    members, filled = padded(place, most)
    shared = covariance(np.ones_like(members), tactic[members], behind[members], choice_sd[members], columns, KERNEL)
    return outlook(mean[members], shared, filled, chosen - members[:, 0], margins)


def padded(group: Ints, most: int = 1) -> tuple[Ints, NDArray[np.bool_]]:
    """Return the members of each group, shape (groups, `most` or more), padded with its first, and which aren't."""
    start = np.flatnonzero(np.concatenate([[True], group[1:] != group[:-1]]))
    size = np.diff(np.append(start, len(group)))
    place = np.arange(max(int(size.max()), most))
    filled = place < size[:, None]
    return np.where(filled, start[:, None] + place, start[:, None]), filled


def outlook(
    mean: Floats, covariance: Floats, filled: NDArray[np.bool_], chosen: Ints, margins: Sequence[float]
) -> Outlook:
    """Estimate by draws how far each group's choice is behind its best.

    Parameters
    ----------
    mean : ndarray of float64, shape (groups, n)
    covariance : ndarray of float64, shape (groups, n, n)
    filled : ndarray of bool, shape (groups, n)
        Which are candidates; the rest repeats one.
    chosen : ndarray of int64, shape (groups,)
    """
    groups = np.arange(len(mean))
    to = covariance - covariance[groups, chosen][:, None, :]
    spread = to - to[groups, :, chosen][:, :, None]
    # The choice doesn't differ from itself, so that the matrix is singular without the little added.
    root = np.linalg.cholesky(spread + _LITTLE * np.eye(mean.shape[1]))
    lead = np.where(filled, mean - mean[groups, chosen][:, None], np.inf)
    limits = np.log1p(np.asarray(margins))
    regret = np.empty(len(mean))
    within = np.empty((len(mean), len(limits)))
    draws = _normal_draws(mean.shape[1])
    for at in np.array_split(groups, max(1, len(groups) // _GROUPS_AT_ONCE)):
        off = root[at] @ draws.T
        off += lead[at, :, None]
        lost = -np.minimum(off.min(axis=1), 0.0)
        regret[at] = lost.mean(axis=1)
        within[at] = (lost[:, :, None] <= limits).mean(axis=1)
    return Outlook(regret, within)


@functools.lru_cache(maxsize=64)
def _normal_draws(count: int) -> Floats:
    """Return always the same draws, shape (draws, count)."""
    return np.random.default_rng(0).standard_normal((_DRAWS, count))
