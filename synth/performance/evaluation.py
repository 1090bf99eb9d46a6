"""Regret of a way to choose tactics, on shapes that it has not seen, beside simple baselines.

Regret is the time of the chosen tactic over the time of the best, one value for each (shape, stage, bucket).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Executor, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from synth.catalog.shapes import family_of
from synth.errors import SynthError
from synth.performance.geometry import Floats, Ints, least_by
from synth.performance.model import Cells, PerformanceModel, Prediction
from synth.performance.ties import pick, tie_order
from synth.timings.table import Timings, times_by_bucket

T = TypeVar("T")

#: Fits that run at once.
_THREADS = 2
#: Trees for times, in the shipped models and while something is held out alike: fewer of them disagree more, and what
#: is learnt about their disagreement holds for no other number.
TIME_TREES = 8
#: The central share of a normal distribution within 1.645 standard deviations.
INTERVAL = 0.90
_INTERVAL_SD = 1.6449


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
        return {
            "geomean": self.geomean, "p95": self.p95, "p99": self.p99, "max": self.max, "count": self.count,
        }  # fmt: skip


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
        self._second = times_by_bucket(timings.averaged(_later_passes(timings)))
        self._order = tie_order(self.timings.table)[self.timings.tactic]
        self._row: dict[tuple[int, int, int, int], int] | None = None

    def rows(self, score: Floats) -> Ints:
        """Return the row chosen in each bucket by the least `score`, shape (rows,), with ties broken as ever."""
        return pick(self.bucket, score, self._order, len(self.keys))

    def evaluate(self, name: str, score: Floats) -> Evaluation:
        """Judge the choice of the least `score` in each bucket; `score` is in ms, one value a row of `timings`."""
        return self.evaluate_rows(name, self.rows(score))

    def evaluate_rows(self, name: str, chosen: Ints) -> Evaluation:
        """Judge a choice of rows of `timings`, shape (n,), at most one of each bucket."""
        t, bucket = self.timings, self.bucket[chosen]
        keys = self.keys[bucket]
        second = np.full(len(chosen), np.nan)
        for i, (key, tactic) in enumerate(zip(map(tuple, keys.tolist()), t.tactic[chosen].tolist(), strict=True)):
            times = self._second.get(key, {})
            if tactic in times:
                second[i] = times[tactic] / min(times.values())
        return Evaluation(name, keys, t.ms[chosen] / self.best[bucket], second, t.labels)

    def rows_of(self, shape: Ints, stage: Ints, tokens: Ints, tactic: Ints) -> Ints:
        """Return the row of each cell, -1 for what was not timed; all arrays have shape (cells,)."""
        if self._row is None:
            t = self.timings
            columns = (c.tolist() for c in (t.shape, t.stage, t.tokens, t.tactic))
            self._row = {cell: row for row, cell in enumerate(zip(*columns, strict=True))}
        wanted = zip(shape.tolist(), stage.tolist(), tokens.tolist(), tactic.tolist(), strict=True)
        return np.array([self._row.get(cell, -1) for cell in wanted], dtype=np.int64)


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


def held_out_model(start: PerformanceModel | None = None) -> PerformanceModel:
    """Return the model that is fitted when something is held out: the shipped one, in one of two threads.

    Parameters
    ----------
    start : PerformanceModel, optional
        See :class:`PerformanceModel`.
    """
    return PerformanceModel(time_trees=TIME_TREES, jobs=1, start=start)


def hold_out(
    timings: Timings,
    groups: list[Ints],
    use: Callable[[PerformanceModel, Ints], T],
    make: Callable[[], PerformanceModel] = held_out_model,
    progress: Callable[[int, int], None] | None = None,
    pool: Executor | None = None,
) -> list[T]:
    """Fit a model without each group of shapes, and use it on that group.

    Parameters
    ----------
    groups : list of ndarray of int64
        See :func:`held_out_groups`.
    use : callable
        Called with the model and the group; what it returns is returned, by group.
    make : callable
        Returns a model to fit.
    progress : callable, optional
        Called with the groups done and the groups in all.
    pool : Executor, optional
        Where the fits run; two threads if not given. For one of processes the callables must be picklable.
    """
    if pool is None:
        with ThreadPoolExecutor(_THREADS) as threads:
            return hold_out(timings, groups, use, make, progress, threads)
    futures = [pool.submit(_fit_and_use, timings, group, use, make) for group in groups]
    for done, future in enumerate(as_completed(futures), start=1):
        future.result()
        if progress is not None:
            progress(done, len(groups))
    return [future.result() for future in futures]


def _fit_and_use(
    timings: Timings, group: Ints, use: Callable[[PerformanceModel, Ints], T], make: Callable[[], PerformanceModel]
) -> T:
    return use(make().fit(timings.select(~np.isin(timings.shape, group))), group)


def cross_validate(
    timings: Timings,
    by: str = "family",
    make: Callable[[], PerformanceModel] = held_out_model,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Judge, Floats, Floats]:
    """Predict every timed cell by a model fitted without its group; see :func:`held_out_groups`.

    Returns
    -------
    judge : Judge
    ms, log_sd : ndarray of float64, shape (rows of ``judge.timings``,)
    """
    judge = Judge(timings)
    cells = Cells.of(judge.timings)
    groups = held_out_groups(timings, by)

    def predict(model: PerformanceModel, group: Ints) -> Prediction:
        return model.predict(cells.select(np.isin(cells.shape, group)))

    return judge, *assembled(cells, groups, hold_out(timings, groups, predict, make, progress))


def assembled(cells: Cells, groups: list[Ints], predictions: list[Prediction]) -> tuple[Floats, Floats]:
    """Put predictions of groups of shapes together: ms and log_sd, shape (cells,)."""
    ms, log_sd = np.empty(len(cells)), np.empty(len(cells))
    for group, found in zip(groups, predictions, strict=True):
        out = np.isin(cells.shape, group)
        ms[out], log_sd[out] = found.ms, found.log_sd
    return ms, log_sd


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
    ratio = error / (_INTERVAL_SD * log_sd[near])
    names = [family_of(label) for label in judge.timings.labels]
    family = np.array([names[i] for i in judge.timings.shape[near].tolist()])
    inside = np.empty(len(ratio), dtype=bool)
    for name in np.unique(family).tolist():
        out = family == name
        inside[out] = ratio[out] <= np.quantile(ratio[~out] if (~out).any() else ratio, INTERVAL)
    return Calibration(float(np.quantile(ratio, INTERVAL)), float(inside.mean()), float(np.expm1(np.median(error))))


def baselines(judge: Judge, by: str = "family") -> Iterable[Evaluation]:
    """Evaluate simple ways to choose, each held out like the model.

    FlashInfer's fallback; the best single tactic of each stage; the choice of the nearest shape at the same token
    count; and the best tactic at the nearest number of tokens per expert over the other shapes.
    """
    t = judge.timings
    fallback = np.array([t.table.fallback_id(stage) for stage in (1, 2)])[t.stage - 1]
    yield judge.evaluate("fallback", np.where(t.tactic == fallback, 1.0, 2.0))
    relative = np.log(t.ms / judge.best[judge.bucket])
    scores = {name: np.empty(len(t)) for name in ("best single tactic", "nearest shape", "tokens per expert")}
    for group in held_out_groups(t, by):
        out = np.isin(t.shape, group)
        mean = _mean_by(t.tactic[~out], relative[~out], len(t.table))
        scores["best single tactic"][out] = np.exp(mean[t.tactic[out]])
        table = _RelativeTimes(judge, relative, group)
        for b in np.unique(judge.bucket[out]).tolist():
            rows = np.flatnonzero(judge.bucket == b)
            scores["nearest shape"][rows] = np.exp(table.of_nearest_shape(b)[t.tactic[rows]])
            scores["tokens per expert"][rows] = np.exp(table.at_tokens_per_expert(b)[t.tactic[rows]])
    for name, score in scores.items():
        yield judge.evaluate(name, score)


class _RelativeTimes:
    """Log relative times of the buckets that are not held out, one row a bucket and one column a tactic."""

    #: Buckets whose relative times are averaged.
    _NEIGHBOURS = 8
    #: Relative time of a tactic that was not timed.
    _UNKNOWN = 3.0

    def __init__(self, judge: Judge, relative: Floats, held_out: Ints) -> None:
        t = judge.timings
        self._times = np.full((len(judge.keys), len(t.table)), self._UNKNOWN)
        self._times[judge.bucket, t.tactic] = relative
        shape, self._stage, self._tokens = judge.keys.T
        self._train = ~np.isin(shape, held_out)
        self._size = np.array(
            [
                [*np.log(s.gemm_nk(stage)), np.log(s.experts * s.ep_size), np.log(s.top_k), np.log(s.experts)]
                for s, stage in ((t.shapes[i], stage) for i, stage, _ in judge.keys.tolist())
            ]
        )
        probability = np.array([t.shapes[i].expert_probability for i in shape.tolist()])
        self._load = np.log(self._tokens * probability)

    def of_nearest_shape(self, bucket: int) -> Floats:
        return self._nearest(bucket, np.abs(self._size - self._size[bucket]).sum(axis=1), 1, same_tokens=True)

    def at_tokens_per_expert(self, bucket: int) -> Floats:
        return self._nearest(bucket, np.abs(self._load - self._load[bucket]), self._NEIGHBOURS, same_tokens=False)

    def _nearest(self, bucket: int, distance: Floats, count: int, *, same_tokens: bool) -> Floats:
        usable = self._train & (self._stage == self._stage[bucket])
        if same_tokens and (usable & (self._tokens == self._tokens[bucket])).any():
            usable = usable & (self._tokens == self._tokens[bucket])
        rows = np.flatnonzero(usable)
        near = rows[np.argsort(distance[rows], kind="stable")[:count]]
        return np.asarray(self._times[near].mean(axis=0))


def _mean_by(group: Ints, values: Floats, groups: int) -> Floats:
    count = np.bincount(group, minlength=groups)
    total = np.bincount(group, weights=values, minlength=groups)
    return np.asarray(np.where(count > 0, total / np.maximum(count, 1), np.inf))


def _later_passes(timings: Timings) -> list[int]:
    """Return the passes after each table's first."""
    numbers: list[int] = np.unique(timings.pass_).tolist()
    return numbers[1:]
