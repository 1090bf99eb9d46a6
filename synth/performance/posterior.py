"""What a few timings of a layer say about its other cells.

The model's predictions for one (shape, stage) are off by errors that its cells share: the level of a bucket, a tactic
that this shape likes less than others do, a tile, a cluster size. A joint normal distribution over the logarithms of
the candidates' times holds these errors; each timing narrows it. From it come the choice, the probability that the
choice is near the best, the regret that is left, and what one more timing would be worth.

The method is that of the knowledge gradient with correlated beliefs (Frazier, Powell, Dayanik: The Knowledge-Gradient
Policy for Correlated Normal Beliefs, INFORMS Journal on Computing 21(4), 2009).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from synth.catalog.schemes import STAGES
from synth.catalog.shapes import MoEShape
from synth.flashinfer.legality import runnable_ids, smem_block_bytes
from synth.performance.geometry import Floats, Ints, least_by
from synth.performance.model import Cells, PerformanceModel
from synth.performance.outlook import NEAR, Outlook, outlook, padded, prior_outlook
from synth.performance.roofline import TacticColumns
from synth.performance.shared_errors import KERNEL, Kernel, covariance, expected, noise_sd
from synth.timings.table import Timings

#: Tactics predicted within this logarithm of their bucket's best are candidates …
_REACH = 0.12
#: … but at most this many in a bucket.
_MOST = 16
#: An error this many deviations away is taken as the cell's own rather than one that it shares.
_SURPRISE = 2.0
#: After this many rounds such errors no longer change what is said of the others.
_ROUNDS_OF_OWN = 3
#: Timings of a bucket that show a shift of all predictions, those predicted fastest; and how many it takes.
_ANCHORS = 5
_FEW = 3
#: A single timing faster than believed by this logarithm, and this many deviations, is a fault of the timer: of 5,395
#: that were repeated, 20 were fast by 5 deviations, of which the repeat confirmed 64 % or more; none was this fast.
_TOO_FAST = 0.25
_SURELY = 8.0
#: Nodes that integrate over a standard normal.
_NODES = 9
#: Candidates this many deviations behind the best can't become the choice, and aren't worth a timing.
_HOPELESS = 4.0
#: Timed tactics within this factor of the fastest timed one are candidates whatever the model says.
_CLOSE = 1.1
#: Added to the logarithm of a failed tactic's time.
_RULED_OUT = 1000
#: More than there are tactics in a table.
_IDS = 4096

__all__ = (
    "NEAR",
    "Outlook",
    "Posterior",
    "Timed",
    "believe",
    "candidates",
    "noise_sd",
    "prior_outlook",
    "timed_of",
    "update",
)


def candidates(bucket: Ints, ms: Floats, must: NDArray[np.bool_]) -> Ints:
    """Return the rows that come into question, sorted by bucket.

    Parameters
    ----------
    bucket : ndarray of int64, shape (rows,)
        Bucket of each row, 0 and up.
    ms : ndarray of float64, shape (rows,)
        Predicted times.
    must : ndarray of bool, shape (rows,)
        Rows to keep in any case.
    """
    behind = np.log(ms / least_by(bucket, ms, int(bucket.max(initial=-1)) + 1)[bucket])
    order = np.lexsort((behind, bucket))
    first = np.searchsorted(bucket[order], bucket[order])
    rank = np.empty(len(bucket), dtype=np.int64)
    rank[order] = np.arange(len(bucket)) - first
    keep = np.flatnonzero(((behind < _REACH) & (rank < _MOST)) | must)
    return np.asarray(keep[np.argsort(bucket[keep], kind="stable")])


@dataclass(frozen=True)
class Timed:
    """Timings of one (shape, stage) that a posterior takes in; every array has shape (timings,).

    Attributes
    ----------
    tokens, tactic : ndarray of int64
    ms : ndarray of float64
        Time of the cell, the mean of its repeats.
    repeats : ndarray of int64
        How many there were.
    extra_sd : float
        Deviation of the logarithms beyond the noise of timings, where they were taken under other conditions.
    """

    tokens: Ints
    tactic: Ints
    ms: Floats
    repeats: Ints
    extra_sd: float = 0.0


def timed_of(timings: Timings, shape: MoEShape) -> dict[int, Timed]:
    """Return the good timings of a shape by stage."""
    rows = np.isin(timings.shape, [i for i, s in enumerate(timings.shapes) if s == shape])
    merged, repeats = timings.select(rows).merged()
    return {
        stage: Timed(merged.tokens[at].astype(np.int64), merged.tactic[at].astype(np.int64), merged.ms[at], repeats[at])
        for stage in STAGES
        if len(at := np.flatnonzero(merged.stage == stage))
    }


def believe(
    model: PerformanceModel,
    shape: MoEShape,
    stage: int,
    buckets: Sequence[int],
    timed: Timed | None = None,
    *,
    without: Collection[tuple[int, int]] = (),
) -> Posterior:
    """Return what a model and some timings say about one stage of a shape.

    Parameters
    ----------
    buckets : sequence of int
        Token counts.
    timed : Timed, optional
        Timings of this shape and stage; those of other token counts count too.
    without : collection of (int, int)
        (tokens, tactic) that are no candidates, since they failed.
    """
    smem = smem_block_bytes(model.origin_.device, model.table.arch)
    ids = np.array(runnable_ids(model.table, stage, shape, smem), dtype=np.int64)
    counts = np.unique(np.concatenate([np.asarray(buckets, dtype=np.int64), timed.tokens if timed else ids[:0]]))
    tokens, tactic = np.repeat(counts, len(ids)), np.tile(ids, len(counts))
    one = np.ones(len(tokens), dtype=np.int64)
    prediction = model.predict(Cells((shape,), one * 0, one * stage, tokens, tactic))
    rows = np.flatnonzero(~np.isin(tokens * _IDS + tactic, [t * _IDS + i for t, i in without]))
    return update(tokens[rows], tactic[rows], prediction.ms[rows], prediction.choice_sd[rows], model.columns, timed)


def update(
    tokens: Ints, tactic: Ints, ms: Floats, choice_sd: Floats, columns: TacticColumns, timed: Timed | None
) -> Posterior:
    """Return what predictions of one (shape, stage), and some timings, say.

    Parameters
    ----------
    tokens, tactic, ms, choice_sd
        As in :meth:`Posterior.prior`, but of all tactics that may be chosen.
    timed : Timed or None
        Timings of other cells than these are passed over.
    """
    _, bucket = np.unique(tokens, return_inverse=True)
    must = np.zeros(len(tokens), dtype=bool)
    if timed is not None:
        row = _rows_of(tokens, tactic, timed.tokens, timed.tactic)
        near = ms <= math.exp(_REACH) * least_by(bucket, ms, int(bucket.max()) + 1)[bucket]
        ms = ms * math.exp(_shift(timed, np.log(ms), np.where(near[row], row, -1)))
        counts, place = np.unique(timed.tokens, return_inverse=True)
        close = timed.ms <= _CLOSE * least_by(place, timed.ms, len(counts))[place]
        must[row[close & (row >= 0)]] = True
    rows = candidates(bucket, ms, must)
    posterior = Posterior.prior(tokens[rows], tactic[rows], ms[rows], choice_sd[rows], columns)
    if timed is not None:
        posterior.condition(timed)
    return posterior


@dataclass
class Posterior:
    """A joint normal distribution of log ms over candidates of one (shape, stage).

    Attributes
    ----------
    tokens, tactic : ndarray of int64, shape (n,)
        The candidates, sorted by tokens.
    mean : ndarray of float64, shape (n,)
        Expected log ms.
    covariance : ndarray of float64, shape (n, n)
    timed : ndarray of int64, shape (n,)
        Timings that each candidate has had.
    """

    tokens: Ints
    tactic: Ints
    mean: Floats
    covariance: Floats
    timed: Ints

    def __post_init__(self) -> None:
        changes = self.tokens[1:] != self.tokens[:-1]
        self._starts = np.flatnonzero(np.concatenate([[True], changes]))
        self._bucket = np.concatenate([[0], np.cumsum(changes)]).astype(np.int64)

    @classmethod
    def prior(
        cls, tokens: Ints, tactic: Ints, ms: Floats, choice_sd: Floats, columns: TacticColumns, kernel: Kernel = KERNEL
    ) -> Posterior:
        """Return what is believed before any timing.

        Parameters
        ----------
        tokens, tactic : ndarray of int64, shape (n,)
            Candidates sorted by tokens, see :func:`candidates`; at least one.
        ms : ndarray of float64, shape (n,)
            Predicted times.
        choice_sd : ndarray of float64, shape (n,)
            The trees' disagreement on each candidate's relative time.
        columns : TacticColumns
            The tactics, by id.
        """
        changes = np.concatenate([[True], tokens[1:] != tokens[:-1]])
        mean, behind = expected(np.cumsum(changes) - 1, ms)
        shared = covariance(tokens, tactic, behind, choice_sd, columns, kernel)
        return cls(tokens, tactic, mean, shared, np.zeros(len(tokens), dtype=np.int64))

    def __len__(self) -> int:
        return len(self.tokens)

    def observe(self, row: int, ms: float, repeats: int = 1) -> None:
        """Take in a timing of one candidate, or the mean of some repeats; see :meth:`condition`."""
        one = np.array([row])
        self.condition(Timed(self.tokens[one], self.tactic[one], np.array([ms]), np.array([repeats])))

    def condition(self, timed: Timed) -> None:
        """Take in timings, each cell once; those of no candidate are passed over.

        A timing that is far from what the others and the model say of it moves its own cell and hardly the rest: such
        errors are nearly always the cell's own, and the next pass confirms them. One that no other has come near, far
        too fast and not repeated, is left out. Where the first timings are all slower or faster than predicted by
        far, on a GPU with another power limit for example, the predictions are shifted first.
        """
        row = self.rows(timed.tokens, timed.tactic)
        known = np.flatnonzero(row >= 0)
        if not len(known):
            return
        if not self.timed.any():
            self.mean = self.mean + _shift(timed, self.mean, row)
        row, ms, repeats = row[known], timed.ms[known], timed.repeats[known]
        noise = noise_sd(ms) ** 2 / repeats + timed.extra_sd**2
        error = np.log(ms) - self.mean[row]
        own = _Own.of(self.covariance[np.ix_(row, row)], noise, error)
        alone = (repeats == 1) & (own.left_out < -np.maximum(_TOO_FAST, _SURELY * np.sqrt(own.variance)))
        if alone.any():
            # Timed, if not believed: it isn't asked for again.
            self.timed[row[alone]] += 1
            row, repeats, noise, error = row[~alone], repeats[~alone], noise[~alone], error[~alone]
            if not len(row):
                return
            own = _Own.of(self.covariance[np.ix_(row, row)], noise, error)
        covariance = self.covariance.copy()
        covariance[row, row] += own.extra
        # With C what the timed cells have in common and N their noise: C (C + N)^-1 = 1 - N (C + N)^-1, so that only
        # the cells that weren't timed need a product of matrices.
        rest = np.setdiff1d(np.arange(len(self)), row)
        gain = np.empty((len(row), len(self)))
        gain[:, row] = np.eye(len(row)) - own.inverse * noise
        gain[:, rest] = own.inverse @ covariance[np.ix_(row, rest)]
        self.mean = self.mean + error @ gain
        left = np.empty_like(covariance)
        left[row] = noise[:, None] * gain
        left[np.ix_(rest, row)] = left[np.ix_(row, rest)].T
        left[np.ix_(rest, rest)] = covariance[np.ix_(rest, rest)] - covariance[np.ix_(rest, row)] @ gain[:, rest]
        self.covariance = left
        self.timed[row] += repeats

    def rule_out(self, row: int) -> None:
        """Take a candidate out of the running, since it failed; where nothing else is left it stays."""
        self.mean = self.mean.copy()
        self.mean[row] += _RULED_OUT
        self.timed[row] = _RULED_OUT

    def rows(self, tokens: Ints, tactic: Ints) -> Ints:
        """Return the row of each cell, -1 for what is no candidate."""
        return _rows_of(self.tokens, self.tactic, tokens, tactic)

    def chosen(self) -> Ints:
        """Return the row of the least expected time in each bucket."""
        order = np.lexsort((self.mean, self._bucket))
        return np.asarray(order[self._starts])

    def worth(self, rows: Ints) -> Floats:
        """Return by how much a timing of each row would lower the sum of the log times chosen, in expectation."""
        sd = np.sqrt(np.maximum(self.covariance[rows, rows], 1e-12))
        moves = self.covariance[:, rows] / np.sqrt(sd**2 + noise_sd(np.exp(self.mean[rows])) ** 2)
        now = np.minimum.reduceat(self.mean, self._starts).sum()
        then = sum(
            w * np.minimum.reduceat(self.mean[:, None] + z * moves, self._starts, axis=0).sum(axis=0)
            for z, w in zip(*_quadrature(), strict=True)
        )
        return np.asarray(now - then)

    def open(self) -> Ints:
        """Return the rows that may still matter: not timed and not hopelessly behind."""
        lead = self.mean - least_by(self._bucket, self.mean, len(self._starts))[self._bucket]
        best = self.chosen()[self._bucket]
        c, every = self.covariance, np.arange(len(self))
        sd = np.sqrt(np.maximum(np.diag(c) + c[best, best] - 2.0 * c[every, best], 0.0))
        return np.flatnonzero((self.timed == 0) & (lead <= _HOPELESS * sd + 1e-12))

    def assume(self, row: int) -> None:
        """Take in a timing of `row` as if it gave what is expected: what a batch of timings does to the doubt."""
        column = self.covariance[:, row]
        noise = float(noise_sd(np.exp(self.mean[row]))) ** 2
        self.covariance = self.covariance - np.multiply.outer(column, column) / (column[row] + noise)
        self.timed[row] += 1

    def copy(self) -> Posterior:
        """Return a copy that can be changed."""
        return Posterior(self.tokens, self.tactic, self.mean, self.covariance, self.timed.copy())

    def outlook(self, chosen: Ints | None = None, margins: Sequence[float] = NEAR) -> Outlook:
        """Return how good the choices are believed to be.

        Parameters
        ----------
        chosen : ndarray of int64, shape (buckets,), optional
            Row of each bucket's choice; :meth:`chosen` if not given.
        margins : sequence of float
            Shares behind the best whose probability is wanted.
        """
        rows = self.chosen() if chosen is None else chosen
        members, filled = padded(self._bucket)
        shared = self.covariance[members[:, :, None], members[:, None, :]]
        return outlook(self.mean[members], shared, filled, rows - self._starts, margins)


@functools.cache
def _quadrature() -> tuple[Floats, Floats]:
    """Return nodes and weights that integrate over a standard normal."""
    # Not with the module: who only chooses doesn't need it.
    from numpy.polynomial.hermite_e import hermegauss

    nodes, weights = hermegauss(_NODES)
    return nodes, weights / weights.sum()


def _rows_of(tokens: Ints, tactic: Ints, wanted_tokens: Ints, wanted_tactic: Ints) -> Ints:
    """Return where each wanted cell is among some, -1 for none."""
    key, wanted = tokens * _IDS + tactic, wanted_tokens * _IDS + wanted_tactic
    order = np.argsort(key)
    place = np.minimum(np.searchsorted(key[order], wanted), len(key) - 1)
    return np.asarray(np.where(key[order][place] == wanted, order[place], -1))


class _Own(NamedTuple):
    """How timings stand to what all others say of each, every array of shape (timings,) but the inverse."""

    #: Extra variance of each timed cell: what makes no error larger than ``_SURPRISE`` deviations.
    extra: Floats
    #: Error of each beside what the others predict, and the variance of that.
    left_out: Floats
    variance: Floats
    #: Inverse of the timings' covariance, noise and extra variance included.
    inverse: Floats

    @classmethod
    def of(cls, covariance: Floats, noise: Floats, error: Floats) -> _Own:
        extra = np.zeros(len(error))
        inverse = np.asarray(np.linalg.inv(covariance + np.diag(noise)), dtype=np.float64)
        for _ in range(_ROUNDS_OF_OWN):
            precision = np.diag(inverse)
            left_out = (inverse @ error) / precision
            variance = np.maximum(1.0 / precision - extra, 0.0)
            before, extra = extra, np.maximum(0.0, (left_out / _SURPRISE) ** 2 - variance)
            inverse = _with_more(inverse, extra - before)
        return cls(extra, left_out, variance, inverse)


def _with_more(inverse: Floats, more: Floats) -> Floats:
    """Return the inverse of a matrix whose diagonal has grown, by that of the matrix: few of them have (Woodbury)."""
    at = np.flatnonzero(more)
    part = inverse[:, at]
    less = np.linalg.solve(np.eye(len(at)) + more[at, None] * part[at], more[at, None] * part.T)
    return np.asarray(inverse - part @ less)


def _shift(timed: Timed, log_ms: Floats, row: Ints) -> float:
    """Return by how much timings are slower than predicted, nothing where they are too few or it isn't much.

    In each bucket the timed tactics predicted to be fastest say it. `row` is -1 for those that don't count: predictions
    of slow tactics are no measure.
    """
    known = np.flatnonzero(row >= 0)
    expected = log_ms[row[known]]
    order = np.lexsort((expected, timed.tokens[known]))
    tokens = timed.tokens[known][order]
    rank = np.arange(len(order)) - np.searchsorted(tokens, tokens)
    first = order[rank < _ANCHORS]
    if len(first) < _FEW:
        return 0.0
    shift = float(np.median(np.log(timed.ms[known[first]]) - expected[first]))
    return shift if abs(shift) > 2.0 * KERNEL.level else 0.0
