"""Regret of a way to choose tactics, on shapes that it has not seen, beside simple baselines.

Regret is the time of the chosen tactic over the time of the best, one value for each (shape, stage, bucket).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from synth.catalog.models import family_of
from synth.catalog.schemes import STAGES
from synth.errors import SynthError
from synth.performance.calibration import covered, interval_factor
from synth.performance.geometry import Floats, Ints, least_by
from synth.performance.ties import pick, tie_order
from synth.timings.table import Timings

#: Buckets whose relative times are averaged as those of as many tokens per expert.
_NEIGHBOURS = 8
#: More than a batch has tokens.
_TOKENS = 2**31
#: Logarithm of the relative time of a tactic that was not timed.
_UNKNOWN = 3.0


@dataclass(frozen=True)
class Regret:
    """A summary of regrets.

    Attributes
    ----------
    geomean, p95, p99, max : float
        Geometric mean, quantiles and maximum.
    count : int
        Number of (shape, stage, bucket).
    """

    geomean: float
    p95: float
    p99: float
    max: float
    count: int

    @classmethod
    def of(cls, regrets: Floats) -> Regret:
        """Summarise regrets, shape (buckets,); at least one."""
        q95, q99 = np.quantile(regrets, [0.95, 0.99])
        return cls(float(np.exp(np.log(regrets).mean())), float(q95), float(q99), float(regrets.max()), len(regrets))

    def as_dict(self) -> dict[str, float]:
        """Return the summary as plain values."""
        return asdict(self)


@dataclass(frozen=True)
class Evaluation:
    """Regrets of one way to choose.

    Attributes
    ----------
    name : str
        The way to choose.
    keys : ndarray of int64, shape (buckets, 3)
        Shape index, stage, bucket.
    regrets : ndarray of float64, shape (buckets,)
    second : ndarray of float64, shape (buckets,)
        The same choices judged by a later pass alone; NaN where there is none.
    labels : tuple of str
        Labels of the shapes.
    """

    name: str
    keys: Ints
    regrets: Floats
    second: Floats
    labels: tuple[str, ...]

    @property
    def all(self) -> Regret:
        """Summary over everything."""
        return Regret.of(self.regrets)

    def stage(self, stage: int) -> Regret:
        """Summary over one stage."""
        return Regret.of(self.regrets[self.keys[:, 1] == stage])

    def shapes(self) -> dict[str, Regret]:
        """Summary of each shape, by label."""
        return {
            self.labels[i]: Regret.of(self.regrets[self.keys[:, 0] == i]) for i in np.unique(self.keys[:, 0]).tolist()
        }

    def families(self) -> NDArray[np.str_]:
        """Model family of each choice, shape (buckets,)."""
        return np.array([family_of(self.labels[i]) for i in self.keys[:, 0].tolist()])

    def second_pass(self) -> Regret | None:
        """Summary of the buckets that a later pass timed, judged by that pass; None where there is none."""
        judged = self.second[~np.isnan(self.second)]
        return Regret.of(judged) if len(judged) else None

    def as_dict(self) -> dict[str, Any]:
        """Return all summaries as plain values."""
        second = self.second_pass()
        stages = {f"gemm{s}": self.stage(s).as_dict() for s in (1, 2) if (self.keys[:, 1] == s).any()}
        return {
            "all": self.all.as_dict(),
            **stages,
            "second_pass": second.as_dict() if second else None,
            "shapes": {label: r.as_dict() for label, r in self.shapes().items()},
        }


class Judge:
    """Timings that choices are judged by: their mean over passes, and a later pass alone.

    Buckets in which only a few tactics were timed say little about the best; they are judged by what was timed.
    """

    def __init__(self, timings: Timings) -> None:
        self.timings = timings.averaged()
        if not len(self.timings):
            raise SynthError("no timings to judge by")
        self.keys, self.bucket = self.timings.buckets()
        self.best = least_by(self.bucket, self.timings.ms, len(self.keys))
        self._order = tie_order(self.timings.table)[self.timings.tactic]
        later = timings.averaged(np.unique(timings.pass_)[1:].tolist())
        row = self.rows_of(later.shape, later.stage, later.tokens, later.tactic)
        self._later = np.full(len(self.timings), np.nan)
        self._later[row] = later.ms
        self._best_later = least_by(self.bucket[row], later.ms, len(self.keys))

    def rows(self, score: Floats) -> Ints:
        """Return the row chosen in each bucket by the least `score`, shape (rows,), with ties broken as ever."""
        return pick(self.bucket, score, self._order, len(self.keys))

    def evaluate(self, name: str, score: Floats) -> Evaluation:
        """Judge the choice of the least `score` in each bucket; `score` is in ms, one value a row of `timings`."""
        return self.evaluate_rows(name, self.rows(score))

    def evaluate_rows(self, name: str, chosen: Ints) -> Evaluation:
        """Judge a choice of rows of `timings`, shape (n,), at most one of each bucket."""
        bucket = self.bucket[chosen]
        regrets = self.timings.ms[chosen] / self.best[bucket]
        second = self._later[chosen] / self._best_later[bucket]
        return Evaluation(name, self.keys[bucket], regrets, second, self.timings.labels)

    def rows_of(self, shape: Ints, stage: Ints, tokens: Ints, tactic: Ints) -> Ints:
        """Return the row of each cell, -1 for what was not timed; all arrays have shape (cells,)."""
        t = self.timings
        known, wanted = self._packed(t.shape, t.stage, t.tokens, t.tactic), self._packed(shape, stage, tokens, tactic)
        row = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
        return np.asarray(np.where(known[row] == wanted, row, -1))

    def _packed(self, shape: Ints, stage: Ints, tokens: Ints, tactic: Ints) -> Ints:
        """Return a number for each cell, as they are sorted; tactic -1 is one that nothing has."""
        layer = shape.astype(np.int64) * 2 + stage
        return np.asarray((layer * _TOKENS + tokens) * (len(self.timings.table) + 1) + tactic + 1)


def held_out_groups(timings: Timings, by: str) -> list[Ints]:
    """Return the shape indices that are held out together.

    Parameters
    ----------
    by : str
        ``"family"``: shapes of one model family; ``"shape"``: one shape at a time.
    """
    groups: dict[str, list[int]] = {}
    for i in np.unique(timings.shape).tolist():
        name = family_of(timings.labels[i]) if by == "family" else str(timings.shapes[i])
        groups.setdefault(name, []).append(i)
    if len(groups) < 2:
        raise SynthError(f"only one {by} was timed: nothing is left to fit when it is held out")
    return [np.array(members) for _, members in sorted(groups.items())]


@dataclass(frozen=True)
class Calibration:
    """How far predictions are off on shapes held out.

    Attributes
    ----------
    spread : float
        Factor that makes 1.645 standard deviations cover 90 % of the errors.
    coverage : float
        Share of the errors inside the 90 % interval when each family's factor comes from the other families.
    error : float
        Median absolute error of the predicted time of chosen and near-best tactics, as a share.
    """

    spread: float
    coverage: float
    error: float


def calibrate(judge: Judge, ms: Floats, log_sd: Floats) -> Calibration:
    """Compare predictions of held-out cells with their timings.

    Only cells within 20 % of their bucket's best count: those are the ones chosen from.
    """
    near = judge.timings.ms <= 1.2 * judge.best[judge.bucket]
    error = np.abs(np.log(ms[near] / judge.timings.ms[near]))
    family = np.array([family_of(label) for label in judge.timings.labels])[judge.timings.shape[near]]
    off = error / log_sd[near]
    return Calibration(interval_factor(off), covered(off, family), float(np.expm1(np.median(error))))


def baselines(judge: Judge, by: str = "family") -> Iterable[Evaluation]:
    """Evaluate simple ways to choose, each held out like the model.

    FlashInfer's fallback; the best single tactic of each stage; the choice of the nearest shape at the same token
    count; and the best tactic at the nearest number of tokens per expert over the other shapes.
    """
    t, (shape, stage, tokens) = judge.timings, judge.keys.T
    fallback = np.array([t.table.fallback_id(stage) for stage in STAGES])[t.stage - 1]
    yield judge.evaluate("fallback", np.where(t.tactic == fallback, 1.0, 2.0))
    lost = np.log(t.ms / judge.best[judge.bucket])
    # One row a bucket and one column a tactic, as all that follows.
    relative = np.full((len(judge.keys), len(t.table)), _UNKNOWN)
    relative[judge.bucket, t.tactic] = lost
    size, load = _sizes(judge)
    scores = {name: np.empty_like(relative) for name in ("best single tactic", "nearest shape", "tokens per expert")}
    for group in held_out_groups(t, by):
        others = ~np.isin(shape, group)
        scores["best single tactic"][~others] = _mean_by(t.tactic, lost, others[judge.bucket], len(t.table))
        for b in np.flatnonzero(~others).tolist():
            usable = others & (stage == stage[b])
            same = usable & (tokens == tokens[b])
            apart = np.abs(size - size[b]).sum(axis=1)
            scores["nearest shape"][b] = _nearest(relative, apart, same if same.any() else usable, 1)
            scores["tokens per expert"][b] = _nearest(relative, np.abs(load - load[b]), usable, _NEIGHBOURS)
    for name, score in scores.items():
        yield judge.evaluate(name, np.exp(score[judge.bucket, t.tactic]))


def _sizes(judge: Judge) -> tuple[Floats, Floats]:
    """Return what tells the layers of buckets apart, shape (buckets, sizes), and their tokens per expert, as logs."""
    layers = [(judge.timings.shapes[i], stage) for i, stage, _ in judge.keys.tolist()]
    size = [[*s.gemm_nk(stage), s.experts * s.ep_size, s.top_k, s.experts] for s, stage in layers]
    return np.log(size), np.log(judge.keys[:, 2] * np.array([s.expert_probability for s, _ in layers]))


def _nearest(relative: Floats, distance: Floats, usable: NDArray[np.bool_], count: int) -> Floats:
    """Return the mean of the rows that are usable and nearest."""
    rows = np.flatnonzero(usable)
    return np.asarray(relative[rows[np.argsort(distance[rows], kind="stable")[:count]]].mean(axis=0))


def _mean_by(group: Ints, values: Floats, wanted: NDArray[np.bool_], groups: int) -> Floats:
    """Return the mean of each group over the rows that are wanted; infinite where it has none."""
    count = np.bincount(group[wanted], minlength=groups)
    total = np.bincount(group[wanted], weights=values[wanted], minlength=groups)
    return np.asarray(np.where(count > 0, total / np.maximum(count, 1), np.inf))
