"""One tactic for each (shape, stage, bucket): near-ties, the fallback, abstention.

A choice is *measured* where its bucket was swept, *verified* where its tactic was timed in this bucket and is very
likely near the best, else *predicted*, or *analytical* where the device has no timings at all. Timings are of uniform
routing: for another one they are scaled by what the model says of the difference, and nothing is measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from synth.catalog.schemes import STAGES
from synth.catalog.shapes import MoEShape
from synth.errors import SynthError
from synth.flashinfer.legality import illegal_ids, smem_block_bytes
from synth.flashinfer.tactics import Tactic, TacticTable
from synth.performance.analytical import suspects
from synth.performance.calibration import calibrated_probability
from synth.performance.cells import SWEPT, Cells, Prediction
from synth.performance.geometry import Floats, Ints, first_of_each, least_by
from synth.performance.model import PerformanceModel
from synth.performance.posterior import NEAR, Timed, candidates, prior_outlook, update
from synth.performance.routing import UNIFORM, Routing
from synth.performance.ties import pick, tie_order
from synth.timings.table import Timings

#: Chance that the chosen tactic beats the fallback below which an entry is left out, as a standard normal quantile.
_CONFIDENCE = 1.645
#: An analytical choice is written where it is predicted to be faster than the fallback by this share. Carried over from
#: one quantization of the H200 to another, choices foreseen to gain as much over a fixed tactic were faster than it in
#: all of 1,789 buckets (TMA kernels) and in 99.2 % of 967 (multistage): ``synth evaluate --transfer``.
SURE_GAIN = 0.10
#: Measured times that stand behind a measured choice differ by this much between repeats (logarithm).
_REPEAT_SD = 0.01
#: Tactics whose analytic time is more than this many times the bucket's best are not looked at further.
_ANALYTIC_CUT = 2.0
#: A timed choice counts as verified where it is within 1 % of the best with at least this probability.
SURE = 0.9
#: Under another routing a timed tactic gets at least this share of its prediction, however fast it was measured.
_CARRIED = 0.9
#: What carries over is off by this much (logarithm).
_CARRIED_SD = 0.02
#: Shapes that are predicted in one go.
_SHAPES_AT_ONCE = 8

#: More than any bucket.
_TOKENS = 1 << 32
_NONE: Ints = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True)
class Choice:
    """The tactic for one (shape, stage, bucket), and why.

    Attributes
    ----------
    shape : MoEShape
    stage, bucket : int
    fused_finalize : bool
        gemm2 may fuse the finalize step.
    tactic_id, tactic
        The chosen tactic.
    ms : float
        Its time, predicted or measured.
    runner_up : Tactic
        The best of the others.
    runner_up_ms, fallback_ms : float
        Their times.
    candidates : int
        Tactics that were compared.
    source : str
        ``"measured"``, ``"verified"``, ``"predicted"`` or ``"analytical"``.
    regret : float
        Its expected regret, as a share.
    within : tuple of float
        Probability that it is within each share of :data:`synth.performance.posterior.NEAR` of the best.
    beats_fallback : bool
        The choice is faster than the fallback with 95 % confidence; where it isn't, no entry is written.
    """

    shape: MoEShape
    stage: int
    bucket: int
    fused_finalize: bool
    tactic_id: int
    tactic: Tactic
    ms: float
    runner_up: Tactic
    runner_up_ms: float
    fallback_ms: float
    candidates: int
    source: str
    regret: float
    within: tuple[float, ...]
    beats_fallback: bool

    @property
    def margin(self) -> float:
        """How much slower the runner-up is, as a share; negative where a tie was broken by order."""
        return self.runner_up_ms / self.ms - 1.0


def choose(
    model: PerformanceModel,
    shapes: Sequence[MoEShape],
    buckets: Sequence[int],
    *,
    timings: Timings | None = None,
    fused_finalize: Sequence[bool] = (True,),
    routing: Routing = UNIFORM,
    denied: Collection[tuple[int, Tactic]] = (),
    progress: Callable[[int], None] | None = None,
) -> list[Choice]:
    """Choose a tactic for every shape, stage and bucket.

    Parameters
    ----------
    model : PerformanceModel
    shapes : sequence of MoEShape
    buckets : sequence of int
        Token counts.
    timings : Timings, optional
        Real timings of the model's device and quantization. Those of a shape say something about all of its buckets,
        see :mod:`synth.performance.posterior`.
    fused_finalize : sequence of bool
        Choose for servers that let gemm2 fuse the finalize step (True), that don't (False), or for both.
    routing : Routing
        How tokens spread over the experts. Timings are of uniform routing; for another one they are scaled, see
        :func:`carried_over`.
    denied : collection of (int, Tactic)
        Stages and tactics that are never chosen, since their numbers were found wrong. An analytical model never
        chooses :func:`synth.performance.analytical.suspects` either.
    progress : callable, optional
        Called with the number of shapes done.

    Returns
    -------
    list of Choice
        In the order of shapes, fused finalize, stages and buckets.

    Raises
    ------
    SynthError
        When the routing is not one of a shape: counts of another number of experts; or when all tactics are denied.
    """
    table = model.table
    if any(all((stage, t) in denied for _, t in table.items(stage)) for stage in STAGES):
        raise SynthError("every tactic of a stage is denied; look at the numbers that were found wrong")
    every = ~tactic_mask(table, {*denied, *(suspects(table) if model.analytical else ())})
    unfused = every & np.array([not table.tactic(i).finalize for i in range(len(table))])
    counts = sorted(set(buckets))
    asked = [counts.index(b) for b in buckets]
    known = _Known.of(timings, shapes, table)
    chooser = _Chooser(model, tie_order(table))
    smem = smem_block_bytes(model.origin_.device, table.arch)
    choices: list[Choice] = []
    for start in range(0, len(shapes), _SHAPES_AT_ONCE):
        batch = shapes[start : start + _SHAPES_AT_ONCE]
        places = [(i, stage, bucket) for i in range(len(batch)) for stage in STAGES for bucket in counts]
        at = model.analyse(Cells.every(table, batch, places, routing))
        times, repeats, failed = known.look_up(at.cells)
        illegal = np.zeros((len(batch), len(table)), dtype=bool)
        for i, shape in enumerate(batch):
            illegal[i, [t for stage in STAGES for t in illegal_ids(table, stage, shape, smem)]] = True
        broken = failed | illegal[at.cells.shape, at.cells.tactic]
        keep = _plausible(at.cells, at.row, at.ms, table) | ~np.isnan(times)
        in_all = {
            fused: np.bincount(at.row[~broken & may[at.cells.tactic]], minlength=len(places))
            for fused, may in ((True, every), (False, unfused))
        }
        touched = np.bincount(at.row, ~np.isnan(times), minlength=len(places)) > 0
        at, broken = at.select(keep), broken[keep]
        prediction = model.correct(at)
        uniform = None if routing.is_uniform else model.predict(replace(at.cells, routing=UNIFORM)).ms
        options = _Options(
            at.cells, at.row, prediction, times[keep], repeats[keep], uniform, places, in_all[True], touched
        )
        gemm1: dict[int, dict[int, Choice]] = {}
        for fused in fused_finalize:
            allowed = (every if fused else unfused)[at.cells.tactic]
            good = allowed & ~broken
            # Where nothing but tactics that failed or can't run is left there is no entry to write.
            hopeless = ~np.isin(np.arange(len(places)), at.row[good])
            rows = np.flatnonzero(good | (allowed & hopeless[at.row]))
            found = chooser.choose(replace(options.select(rows), in_all=in_all[fused]), hopeless, fused, gemm1)
            choices += [found[i + j] for i in range(0, len(found), len(counts)) for j in asked]
        if progress is not None:
            progress(start + len(batch))
    return choices


def tactic_mask(table: TacticTable, found: Collection[tuple[int, Tactic]]) -> NDArray[np.bool_]:
    """Return which tactics of a table are among some stages and tactics, shape (tactics,), by id."""
    return np.array([(table.stage(i), table.tactic(i)) in found for i in range(len(table))])


def carried_over(ms: Floats, uniform_ms: Floats, predicted_ms: Floats) -> Floats:
    """Return what times measured under uniform routing says of another routing, in ms.

    It is scaled by the ratio of the predictions. But where the model takes a tactic to be much slower under uniform
    routing than it was measured, the ratio says little: the model is least sure of tactics far behind the best, and
    one of those would win by the model's error alone. So no time is less than ``_CARRIED`` of its prediction.

    Parameters
    ----------
    ms : ndarray of float64
        Measured under uniform routing.
    uniform_ms, predicted_ms : ndarray of float64
        Predicted under uniform routing, and under the other one.
    """
    return np.maximum(ms * predicted_ms / uniform_ms, _CARRIED * predicted_ms)


def _plausible(cells: Cells, place: Ints, analytic: Floats, table: TacticTable) -> NDArray[np.bool_]:
    """Return which cells are worth a full prediction: not far behind analytically, or the fallback."""
    best = least_by(place, analytic, int(place.max()) + 1)
    fallback = np.isin(cells.tactic, [table.fallback_id(stage) for stage in STAGES])
    return np.asarray((analytic <= _ANALYTIC_CUT * best[place]) | fallback)


@dataclass(frozen=True)
class _Known:
    """Timings of some shapes by cell: the mean time in ms and its repeats, and the cells that ever failed."""

    number: dict[MoEShape, int]
    tactics: int
    key: Ints
    ms: Floats
    repeats: Ints
    failed: Ints

    @classmethod
    def of(cls, timings: Timings | None, shapes: Sequence[MoEShape], table: TacticTable) -> _Known:
        number = {shape: i for i, shape in enumerate(dict.fromkeys(shapes))}
        none = cls(number, len(table), np.zeros(0, dtype=np.int64), np.zeros(0), np.zeros(0, dtype=np.int64), _NONE)
        if timings is None:
            return none
        part = timings.select(np.isin(timings.shape, [i for i, s in enumerate(timings.shapes) if s in number]))
        if not len(part):
            return none
        failed = none._key(Cells.of(part.select(np.isnan(part.ms))))
        merged, repeats = part.merged()
        key = none._key(Cells.of(merged))
        good = ~np.isin(key, failed)
        order = np.argsort(key[good])
        return replace(
            none, key=key[good][order], ms=merged.ms[good][order], repeats=repeats[good][order], failed=failed
        )

    def look_up(self, cells: Cells) -> tuple[Floats, Ints, NDArray[np.bool_]]:
        """Return the time of each cell, NaN where it wasn't timed, its repeats, and whether it ever failed."""
        key = self._key(cells)
        place = np.searchsorted(self.key, key)
        there = np.append(self.key, -1)[place] == key
        ms = np.where(there, np.append(self.ms, np.nan)[place], np.nan)
        return ms, np.where(there, np.append(self.repeats, 0)[place], 0), np.isin(key, self.failed)

    def _key(self, cells: Cells) -> Ints:
        shape = np.array([self.number.get(shape, -1) for shape in cells.shapes], dtype=np.int64)[cells.shape]
        return np.asarray(((shape * 4 + cells.stage) * _TOKENS + cells.tokens) * self.tactics + cells.tactic)


@dataclass(frozen=True)
class _Options:
    """The cells that may be chosen in some places, sorted by place, and what is known of them.

    Attributes
    ----------
    cells : Cells
    place : ndarray of int64, shape (cells,)
    prediction : Prediction
    times, repeats : ndarray, shape (cells,)
        Times measured under uniform routing in ms, NaN without, and how many there were.
    uniform : ndarray of float64, shape (cells,), or None
        Predictions under uniform routing in ms, where the cells' is another one.
    places : sequence of (int, int, int)
        Index of the shape, stage, bucket.
    in_all : ndarray of int64, shape (places,)
        Tactics that may be chosen in each place, those that are hopelessly slow included.
    touched : ndarray of bool, shape (places,)
        Whether any tactic was timed there.
    """

    cells: Cells
    place: Ints
    prediction: Prediction
    times: Floats
    repeats: Ints
    uniform: Floats | None
    places: Sequence[tuple[int, int, int]]
    in_all: Ints
    touched: NDArray[np.bool_]

    def select(self, rows: NDArray[Any]) -> _Options:
        """Return some of the cells, in the same places."""
        return replace(
            self,
            cells=self.cells.select(rows),
            place=self.place[rows],
            prediction=self.prediction.select(rows),
            times=self.times[rows],
            repeats=self.repeats[rows],
            uniform=None if self.uniform is None else self.uniform[rows],
        )


@dataclass
class _Verdict:
    """What is said of cells (time in ms, deviation of its logarithm) and of places (the rest)."""

    ms: Floats
    log_sd: Floats
    chosen: Ints
    source: list[str]
    regret: Floats
    within: Floats


class _Chooser:
    """Chooses among options by a model."""

    def __init__(self, model: PerformanceModel, order: Ints) -> None:
        self._model, self._order = model, order
        self._tactics = [model.table.tactic(i) for i in range(len(model.table))]
        self._source = "analytical" if model.analytical else "predicted"

    def choose(
        self, o: _Options, hopeless: NDArray[np.bool_], fused: bool, gemm1: dict[int, dict[int, Choice]]
    ) -> list[Choice]:
        """Return the choice of every place, in order.

        gemm1 fuses nothing, so that it is chosen once: `gemm1` keeps its choices by place, and by the most candidates
        of a place, since the draws that say how sure choices are depend on their number.
        """
        ms, count = o.prediction.ms, len(o.places)
        chosen = pick(o.place, ms, self._order[o.cells.tactic], count)
        near = candidates(o.place, ms, np.isin(np.arange(len(ms)), chosen))
        most = int(np.bincount(o.place[near]).max())
        stage = np.array([stage for _, stage, _ in o.places])
        again = gemm1.get(most, {})
        open_ = ~np.isin(np.arange(count), list(again))
        v = _Verdict(
            ms.copy(), o.prediction.log_sd.copy(), chosen, [self._source] * count, np.zeros(count), np.zeros((count, 2))
        )
        # A shape's timings say something of all buckets of their stage.
        layer = np.array([i for i, _, _ in o.places]) * len(STAGES) + stage - 1
        timed = np.isin(layer, layer[o.touched])
        self._from_predictions(o, v, near, open_ & ~timed, most)
        for one in np.unique(layer[open_ & timed]).tolist():
            self._from_timings(o, v, np.flatnonzero(layer == one))
        found = again | self._choices(o, v, np.flatnonzero(open_), hopeless, fused)
        gemm1.setdefault(most, {place: found[place] for place in np.flatnonzero(stage == 1).tolist()})
        return [replace(found[i], fused_finalize=fused) if i in again else found[i] for i in range(count)]

    def _from_predictions(self, o: _Options, v: _Verdict, near: Ints, where: NDArray[np.bool_], most: int) -> None:
        """Say how good the choices of some places are, of which nothing was timed; `near` are all candidates."""
        if not where.any():
            return
        rows = near[where[o.place[near]]]
        number = np.cumsum(where) - 1
        outlook = prior_outlook(
            number[o.place[rows]],
            o.cells.tactic[rows],
            o.prediction.ms[rows],
            o.prediction.choice_sd[rows],
            np.searchsorted(rows, v.chosen[where]),
            self._model.columns,
            most=most,
        )
        v.regret[where], v.within[where] = outlook.regret, self._calibrated(outlook.within)

    def _from_timings(self, o: _Options, v: _Verdict, mine: Ints) -> None:
        """Choose for the places of one (shape, stage) of which something was timed."""
        first, last = np.searchsorted(o.place, [mine[0], mine[-1] + 1]).tolist()
        part = o.select(np.arange(first, last))
        cells, place, ms, times = part.cells, part.place - mine[0], part.prediction.ms, part.times
        at = ~np.isnan(times)
        elsewhere = part.uniform is not None
        if part.uniform is not None:
            times = carried_over(times, part.uniform, ms)
        extra_sd = _CARRIED_SD if elsewhere else 0.0
        timed = Timed(cells.tokens[at], cells.tactic[at], times[at], part.repeats[at], extra_sd)
        posterior = update(cells.tokens, cells.tactic, ms, part.prediction.choice_sd, self._model.columns, timed)
        # What is believed of each cell: candidates by the posterior, the rest shifted as their bucket's candidates are.
        row = posterior.rows(cells.tokens, cells.tactic)
        # A model that reproduces these timings has in its predictions what they say of other cells already.
        reproduced = self._model.residual_ is not None and self._model.knows(cells.shapes[cells.shape[0]])
        believed = np.where(at, times, ms) if reproduced else np.exp(posterior.mean[row])
        seen = np.where(row >= 0, believed, np.nan)
        shift = np.array([np.nanmean(np.log(seen[place == j] / ms[place == j])) for j in range(len(mine))])
        believed = np.where(row >= 0, believed, np.where(at, times, ms * np.exp(shift[place])))
        swept = np.bincount(place, at, minlength=len(mine)) >= SWEPT * o.in_all[mine]
        may = (row >= 0) & (at | ~swept[place])
        chosen = pick(place, np.where(may, believed, np.inf), self._order[cells.tactic], len(mine))
        outlook = posterior.outlook(row[chosen])
        within = self._calibrated(outlook.within)
        for n, j in enumerate(mine.tolist()):
            if at[chosen[n]] and not elsewhere:
                v.source[j] = "measured" if swept[n] else "verified" if within[n, 0] >= SURE else self._source
        v.chosen[mine], v.regret[mine], v.within[mine] = chosen + first, outlook.regret, within
        v.ms[first:last] = np.where(at & (not elsewhere), times, believed)
        v.log_sd[first:last] = np.where(at & (not elsewhere), _REPEAT_SD, part.prediction.log_sd)

    def _calibrated(self, within: Floats) -> Floats:
        """Return probabilities of being near the best, shape (choices, len(NEAR)), corrected by held-out shapes."""
        columns = [calibrated_probability(self._model, within[:, i], margin) for i, margin in enumerate(NEAR)]
        return np.stack(columns, axis=1)

    def _choices(
        self, o: _Options, v: _Verdict, where: Ints, hopeless: NDArray[np.bool_], fused: bool
    ) -> dict[int, Choice]:
        """Return the choices of some places by place."""
        count = len(o.places)
        others = v.ms.copy()
        others[v.chosen] = np.inf
        second = first_of_each(o.place, others)
        fallback = np.full(count, -1)
        at = np.flatnonzero(np.isin(o.cells.tactic, [self._model.table.fallback_id(stage) for stage in STAGES]))
        fallback[o.place[at]] = at
        fallback_ms = np.where(fallback >= 0, v.ms[fallback], np.nan)
        doubt = _CONFIDENCE * np.hypot(v.log_sd[fallback], v.log_sd[v.chosen])
        least = np.where(np.array(v.source) == "analytical", math.log1p(SURE_GAIN), doubt)
        with np.errstate(invalid="ignore"):
            beats = (fallback != v.chosen) & (np.log(fallback_ms / v.ms[v.chosen]) > least) & ~hopeless
        options = np.bincount(o.place, minlength=count)
        found = {}
        for j in where.tolist():
            i, stage, bucket = o.places[j]
            best, next_ = int(o.cells.tactic[v.chosen[j]]), int(o.cells.tactic[second[j]])
            found[j] = Choice(
                shape=o.cells.shapes[i],
                stage=stage,
                bucket=bucket,
                fused_finalize=fused,
                tactic_id=best,
                tactic=self._tactics[best],
                ms=float(v.ms[v.chosen[j]]),
                runner_up=self._tactics[next_],
                runner_up_ms=float(v.ms[second[j]]),
                fallback_ms=float(fallback_ms[j]),
                candidates=int(options[j]),
                source=v.source[j],
                regret=math.expm1(v.regret[j]),
                within=tuple(v.within[j].tolist()),
                beats_fallback=bool(beats[j]),
            )
        return found
