"""How good choices become with timings: sweeps are replayed, and judged from mark to mark.

Cells are chosen in three ways. *Active* is what synth does, see :mod:`synth.choosing.rounds`. *Stratified* gives each
(shape, stage, bucket) its share, of the tactics that are analytically plausible. *Random* takes any. What was timed is
used in the same way after each of them, so that only the choice of the cells differs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from synth.catalog.schemes import STAGES
from synth.choosing.picks import Pick, Seen, Strategy
from synth.choosing.plan import Layer, timing_seconds
from synth.choosing.rounds import KnownDevice, NewDevice
from synth.collecting.simulated import SimulatedRunner
from synth.errors import TacticError
from synth.performance.analytical import start_of
from synth.performance.evaluation import Evaluation, Judge, held_out_groups
from synth.performance.geometry import Floats, Ints, least_by
from synth.performance.held_out import assembled, each_held_out, held_out_model, swept_shapes
from synth.performance.model import Cells, PerformanceModel, Prediction
from synth.performance.posterior import NEAR, Posterior, Timed, noise_sd, update
from synth.performance.roofline import NEUTRAL, Roofline
from synth.timings.table import Timings

#: Ways to choose what to time.
WAYS = ("active", "stratified", "random")
#: Shares of a sweep at which choices are judged, for a known and for a new device.
SHARES = (0.0, 0.005, 0.01, 0.02, 0.05, 0.1)
NEW_SHARES = (0.01, 0.02, 0.05, 0.1)
#: Shares of the sweep after which what is stated is compared with what was found, and regret is split by kind.
LOOKED_AT = (0.0, 0.01, 0.05)

#: Stratified choice takes tactics within this factor of the best analytic time before the others.
_PLAUSIBLE = 2.0
#: Errors of tactics within this factor of their bucket's best count for intervals: those are chosen from.
_CLOSE = 1.2


@dataclass(frozen=True)
class Point:
    """What was chosen after some timings, by one way of choosing cells.

    Attributes
    ----------
    way : str
        One of ``WAYS``.
    seed : int
    mark : float
        Share of the sweep that was to be timed.
    timings : int
        How many cells were timed.
    sweep : int
        How many there are.
    seconds, sweep_seconds : float
        GPU time of both.
    evaluation : Evaluation
        The choices, judged.
    tactic, best : ndarray of int64, shape (choices,)
        The chosen and the fastest tactic, in the order of ``evaluation.keys``.
    expected : ndarray of float64, shape (choices,)
        Expected logarithm of each choice's regret; NaN for a new device.
    within : ndarray of float64, shape (choices, margins)
        Stated probability that its regret is within each of ``NEAR``; NaN for a new device.
    error : ndarray of float64, shape (cells,)
        Errors of the times of untimed tactics near the best, in stated standard deviations; empty for a new device.
    error_shape : ndarray of int64, shape (cells,)
        The shapes of those.
    """

    way: str
    seed: int
    mark: float
    timings: int
    sweep: int
    seconds: float
    sweep_seconds: float
    evaluation: Evaluation
    tactic: Ints
    best: Ints
    expected: Floats
    within: Floats
    error: Floats
    error_shape: Ints

    def of(self, way: str, seed: int, mark: float, timings: int, seconds: float) -> Point:
        """Return this point as one of a way of choosing cells."""
        return replace(self, way=way, seed=seed, mark=mark, timings=timings, seconds=seconds)

    def as_dict(self) -> Mapping[str, Any]:
        """Return plain values."""
        counted = ("way", "seed", "mark", "timings", "sweep", "seconds", "sweep_seconds")
        regrets = {k: v for k, v in self.evaluation.as_dict().items() if k != "shapes"}
        return {**{name: getattr(self, name) for name in counted}, **regrets}

    @classmethod
    def joined(cls, points: Sequence[Point]) -> Point:
        """Return the points of several shapes as one; they are of one way, seed and mark."""
        first, of = points[0], [p.evaluation for p in points]
        return cls(
            first.way,
            first.seed,
            first.mark,
            sum(p.timings for p in points),
            sum(p.sweep for p in points),
            sum(p.seconds for p in points),
            sum(p.sweep_seconds for p in points),
            Evaluation(
                first.evaluation.name,
                np.concatenate([e.keys for e in of]),
                np.concatenate([e.regrets for e in of]),
                np.concatenate([e.second for e in of]),
                first.evaluation.labels,
            ),
            np.concatenate([p.tactic for p in points]),
            np.concatenate([p.best for p in points]),
            np.concatenate([p.expected for p in points]),
            np.concatenate([p.within for p in points]),
            np.concatenate([p.error for p in points]),
            np.concatenate([p.error_shape for p in points]),
        )


@dataclass(frozen=True)
class Replayed:
    """What models said of the shapes that they were fitted without, and what was chosen after some timings.

    Attributes
    ----------
    judge : Judge
    ms, log_sd : ndarray of float64, shape (rows of ``judge.timings``,)
        Predictions, nothing timed.
    points : tuple of Point
        One for each shape that was swept, way, seed and share.
    """

    judge: Judge
    ms: Floats
    log_sd: Floats
    points: tuple[Point, ...]

    def at(self, share: float, shapes: Ints | None = None) -> Point:
        """Return the active choices at a share of the sweep, of some shapes or of all, as one."""
        wanted = [p for p in self.points if p.way == "active" and p.mark == share]
        return Point.joined([p for p in wanted if shapes is None or p.evaluation.keys[0, 0] in shapes])


def hold_out_and_replay(
    timings: Timings,
    by: str,
    *,
    make: Callable[[], PerformanceModel] | None = None,
    ways: Sequence[str] = WAYS,
    shares: Sequence[float] = SHARES,
    seeds: int = 1,
    progress: Callable[[int, int], None] | None = None,
    pool: Executor | None = None,
) -> Replayed:
    """Fit a model without each group of shapes; predict the group with it, and replay the group's sweeps.

    Parameters
    ----------
    by : str
        See :func:`synth.performance.evaluation.held_out_groups`.
    ways, shares, seeds
        See :func:`known_device`; without shares nothing is replayed.
    make, progress, pool
        See :func:`synth.performance.held_out.hold_out`.
    """
    judge = Judge(timings)
    cells = Cells.of(judge.timings)
    groups = held_out_groups(timings, by)
    swept = swept_shapes(judge) if shares else np.zeros(0, dtype=np.int64)
    use = partial(_use, timings, cells, swept, ways, shares, seeds)
    make = make or partial(held_out_model, start_of(timings.origin))
    folds = each_held_out(timings, groups, use, make, progress, pool)
    ms, log_sd = assembled(cells, groups, [prediction for prediction, _ in folds])
    return Replayed(judge, ms, log_sd, tuple(point for _, points in folds for point in points))


def _use(
    timings: Timings,
    cells: Cells,
    swept: Ints,
    ways: Sequence[str],
    shares: Sequence[float],
    seeds: int,
    model: PerformanceModel,
    group: Ints,
) -> tuple[Prediction, list[Point]]:
    prediction = model.predict(cells.select(np.isin(cells.shape, group)))
    mine = np.intersect1d(group, swept).tolist()
    replayed = [known_device(timings, i, model, ways=ways, shares=shares, seeds=seeds) for i in mine]
    return prediction, [point for points in replayed for point in points]


def known_device(
    timings: Timings,
    shape: int,
    model: PerformanceModel,
    *,
    ways: Sequence[str] = WAYS,
    shares: Sequence[float] = SHARES,
    seeds: int = 1,
) -> list[Point]:
    """Replay the sweep of one shape for a device that has a model.

    Parameters
    ----------
    timings : Timings
        With all their passes: the first good time of a cell is what timing it gives, their mean is the judge.
    shape : int
        Index of the shape.
    model : PerformanceModel
        Fitted without this shape.
    shares : sequence of float
        Shares of the sweep at which choices are judged, ascending.
    seeds : int
        How often the ways with chance in them are tried; the active one has none.
    """
    replay = _Replay(timings.select(timings.shape == shape))
    believer = _Believer(replay, model)
    buckets = np.unique(replay.judge.timings.tokens).tolist()
    points = []
    for way, seed in ((w, s) for w in ways for s in range(1 if w == "active" else seeds)):
        strategy: Strategy = (
            KnownDevice({timings.origin.quant: model}, replay.layers, buckets, enough=0.0)
            if way == "active"
            else replay.order(way, model.predict_analytic(replay.cells), seed)
        )
        # Without timings the choice of cells makes no difference.
        wanted = [share for share in shares if share > 0 or way == "active"]
        for share, (seen, seconds) in zip(wanted, replay.run(strategy, wanted), strict=True):
            points.append(believer.point(seen).of(way, seed, share, len(seen), seconds))
    return points


def new_device(timings: Timings, way: str, seed: int, shares: Sequence[float]) -> list[Point]:
    """Replay the sweeps of all shapes together, for a device of which nothing is known but its data sheet.

    Parameters
    ----------
    shares : sequence of float
        Shares of the sweeps at which choices are judged, ascending and above 0.
    """
    replay = _Replay(timings)
    unfitted = PerformanceModel.analytic(timings.origin, timings.table, Roofline(NEUTRAL))
    active = NewDevice({timings.origin.quant: unfitted}, replay.layers, np.unique(timings.tokens).tolist(), seed=seed)
    strategy: Strategy = active
    if way != "active":
        strategy = replay.order(way, unfitted.predict_analytic(replay.cells), seed)
    points = []
    for share, (seen, seconds) in zip(shares, replay.run(strategy, shares), strict=True):
        rows = replay.rows(*np.array(active.chosen(seen), dtype=np.int64).T)
        points.append(replay.judged(rows[rows >= 0]).of(way, seed, share, len(seen), seconds))
    return points


class _Replay:
    """The sweeps of some shapes, timed by a simulated runner and judged."""

    def __init__(self, timings: Timings) -> None:
        self.judge = Judge(timings)
        self.cells = Cells.of(self.judge.timings)
        self._shapes = np.unique(self.cells.shape)
        quant = timings.origin.quant
        self.layers = [Layer.by_hand(timings.shapes[i], quant) for i in self._shapes.tolist()]
        self._runner = SimulatedRunner.of(timings)
        order = np.lexsort((self.judge.timings.ms, self.judge.bucket))
        self._fastest = order[np.searchsorted(self.judge.bucket[order], np.arange(len(self.judge.keys)))]
        self._sweep_seconds = float(np.sum(timing_seconds(self.judge.timings.ms)))

    def order(self, way: str, analytic: Floats, seed: int) -> _Order:
        """Return a strategy that knows all its cells beforehand: stratified or random."""
        rng, c = np.random.default_rng(seed), self.cells
        chance = rng.random(len(c))
        rank = np.zeros(len(c), dtype=np.int64)
        if way == "stratified":
            bucket = self.judge.bucket
            behind = analytic > _PLAUSIBLE * least_by(bucket, analytic, len(self.judge.keys))[bucket]
            by_bucket = np.lexsort((chance, behind, bucket))
            rank[by_bucket] = np.arange(len(c)) - np.searchsorted(bucket[by_bucket], bucket[by_bucket])
        rows = np.lexsort((rng.random(len(c)), rank))
        columns = (np.searchsorted(self._shapes, c.shape), c.stage, c.tokens, c.tactic)
        return _Order([Pick(*cell) for cell in zip(*(x[rows].tolist() for x in columns), strict=True)])

    def run(self, strategy: Strategy, shares: Sequence[float]) -> Iterator[tuple[list[Seen], float]]:
        """Time what a strategy asks for; at each share of the sweep yield what was seen, and the seconds it took."""
        marks = [round(share * len(self.cells)) for share in shares]
        seen: list[Seen] = []
        picks: list[Pick] = []
        began = self._runner.clock()
        for mark in marks:
            while len(seen) < mark:
                # A round that reaches beyond the mark is interrupted by it and goes on after it.
                picks = picks or strategy.next(seen, marks[-1] - len(seen), math.inf)
                if not picks:
                    break
                some, picks = picks[: mark - len(seen)], picks[mark - len(seen) :]
                seen += self._time(some)
            yield list(seen), self._runner.clock() - began

    def _time(self, picks: Sequence[Pick]) -> Iterator[Seen]:
        at = -1
        for pick in sorted(picks):
            if pick.layer != at:
                at, layer = pick.layer, self.layers[pick.layer]
                self._runner.prepare(layer.shape, layer.quant, layer.activation)
            try:
                ms = self._runner.time(pick.stage, pick.tokens, pick.tactic)
            except TacticError:
                ms = math.nan
            yield Seen(pick, ms)

    def rows(self, layer: Ints, stage: Ints, tokens: Ints, tactic: Ints) -> Ints:
        """Return the judge's rows of cells, -1 for those that were not timed."""
        return self.judge.rows_of(self._shapes[layer], stage, tokens, tactic)

    def judged(
        self,
        chosen: Ints,
        expected: Floats | None = None,
        within: Floats | None = None,
        error: Floats | None = None,
    ) -> Point:
        """Judge the rows chosen; what isn't given wasn't stated."""
        t, unknown = self.judge.timings, np.full((len(chosen), len(NEAR)), np.nan)
        errors = np.zeros(0) if error is None else error
        return Point(
            "",
            0,
            0.0,
            0,
            len(t),
            0.0,
            self._sweep_seconds,
            self.judge.evaluate_rows("model", chosen),
            t.tactic[chosen],
            t.tactic[self._fastest[self.judge.bucket[chosen]]],
            unknown[:, 0] if expected is None else expected,
            unknown if within is None else within,
            errors,
            np.full(len(errors), self._shapes[0]),
        )


class _Order:
    """A strategy that takes cells in a given order."""

    def __init__(self, picks: Sequence[Pick]) -> None:
        self._picks = picks

    def next(self, seen: Sequence[Seen], most: int, seconds: float) -> list[Pick]:
        """See :class:`synth.choosing.picks.Strategy`."""
        return list(self._picks[len(seen) : len(seen) + most])


class _Believer:
    """Chooses by what a model and timings say of a replay's only shape, among the tactics that its sweep has."""

    def __init__(self, replay: _Replay, model: PerformanceModel) -> None:
        self._replay, self._columns = replay, model.columns
        self._rows = {stage: np.flatnonzero(replay.cells.stage == stage) for stage in STAGES}
        self._predictions = {stage: model.predict(replay.cells.select(rows)) for stage, rows in self._rows.items()}

    def point(self, seen: Sequence[Seen]) -> Point:
        """Choose after the timings seen, and judge it."""
        chosen, expected, within, error = [], [], [], []
        for stage, rows in self._rows.items():
            if not len(rows):
                continue
            posterior = self._posterior(stage, [s for s in seen if s.pick.stage == stage and not math.isnan(s.ms)])
            zero = np.zeros(len(posterior), dtype=np.int64)
            row = self._replay.rows(zero, zero + stage, posterior.tokens, posterior.tactic)
            outlook = posterior.outlook()
            chosen.append(row[posterior.chosen()])
            expected.append(outlook.regret)
            within.append(outlook.within)
            error.append(self._errors(posterior, row))
        return self._replay.judged(
            np.concatenate(chosen), np.concatenate(expected), np.concatenate(within), np.concatenate(error)
        )

    def _posterior(self, stage: int, seen: Sequence[Seen]) -> Posterior:
        cells, prediction = self._replay.cells.select(self._rows[stage]), self._predictions[stage]
        timed = Timed(
            np.array([s.pick.tokens for s in seen], dtype=np.int64),
            np.array([s.pick.tactic for s in seen], dtype=np.int64),
            np.array([s.ms for s in seen]),
            np.ones(len(seen), dtype=np.int64),
        )
        return update(
            cells.tokens, cells.tactic, prediction.ms, prediction.choice_sd, self._columns, timed if seen else None
        )

    def _errors(self, posterior: Posterior, row: Ints) -> Floats:
        """Return how far untimed candidates near the best are from what is believed, in deviations."""
        judge = self._replay.judge
        ms = judge.timings.ms[row]
        count = (posterior.timed == 0) & (ms <= _CLOSE * judge.best[judge.bucket[row]])
        sd = np.sqrt(np.diag(posterior.covariance) + noise_sd(ms) ** 2)
        return np.asarray(((np.log(ms) - posterior.mean) / sd)[count])
