"""One tactic for each (shape, stage, bucket): near-ties, the fallback, abstention.

A choice is *measured* where its tactic was timed in this bucket, else *predicted*, or *analytical* where the device
has no timings at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from synth.catalog.shapes import MoEShape
from synth.catalog.tactics import STAGES, Tactic, TacticTable
from synth.measurements import Timings
from synth.performance.geometry import Floats, Ints, least_by
from synth.performance.model import Cells, PerformanceModel

#: Tactics within this share of the best are ties: repeats of one timing differ by more (0.4 % in the median).
TIE = 0.001
#: Chance that the chosen tactic beats the fallback below which an entry is left out, as a standard normal quantile.
_CONFIDENCE = 1.645
#: Measured times that stand behind a measured choice differ by this much between repeats (logarithm).
_REPEAT_SD = 0.01
#: Tactics whose analytic time is more than this many times the bucket's best are not looked at further.
_ANALYTIC_CUT = 2.0
#: In a sampled bucket, timed tactics that shift the predictions: the fastest as predicted.
_ANCHORS = 5
#: In a sampled bucket, the share by which a prediction must be faster than the best timing to replace it.
_PREDICTED_GAIN = 0.02
#: Shapes that are predicted in one go.
_SHAPES_AT_ONCE = 8
#: A bucket counts as swept, and is chosen from its timings alone, when this share of its tactics was timed.
_SWEPT = 0.95


#: A shape, stage and bucket.
_Place = tuple[MoEShape, int, int]


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
        ``"measured"``, ``"predicted"`` or ``"analytical"``.
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
    beats_fallback: bool

    @property
    def margin(self) -> float:
        """How much slower the runner-up is, as a share; negative where a tie was broken by order."""
        return self.runner_up_ms / self.ms - 1.0


def pick(group: Ints, ms: Floats, order: Ints, groups: int) -> Ints:
    """Return the chosen row of each group: the first in `order` among those within ``TIE`` of the least `ms`.

    Parameters
    ----------
    group : ndarray of int64, shape (rows,)
        Group of each row, 0 to `groups` - 1; every group has a row.
    ms : ndarray of float64, shape (rows,)
    order : ndarray of int64, shape (rows,)
        The fixed order that breaks ties.
    """
    tied = np.flatnonzero(ms <= least_by(group, ms, groups)[group] * (1.0 + TIE))
    ranked = tied[np.lexsort((order[tied], group[tied]))]
    first = np.concatenate([[True], group[ranked][1:] != group[ranked][:-1]])
    return np.asarray(ranked[first])


def tie_order(table: TacticTable) -> Ints:
    """Return each tactic's place in the order that breaks ties, by what it is rather than by its id.

    Smaller tiles first, then smaller clusters, unfused before fused: the cheaper kernel wins a tie.
    """
    tactics = [table.tactic(i) for i in range(len(table))]
    ranked = sorted(range(len(tactics)), key=lambda i: tactics[i])
    order = np.empty(len(tactics), dtype=np.int64)
    order[ranked] = np.arange(len(tactics))
    return order


def choose(
    model: PerformanceModel,
    shapes: Sequence[MoEShape],
    buckets: Sequence[int],
    *,
    timings: Timings | None = None,
    fused_finalize: Sequence[bool] = (True,),
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
        Real timings of the model's device and quantization: where a bucket was swept, they decide.
    fused_finalize : sequence of bool
        Choose for servers that let gemm2 fuse the finalize step (True), that don't (False), or for both.
    progress : callable, optional
        Called with the number of shapes done.

    Returns
    -------
    list of Choice
        In the order of shapes, fused finalize, stages and buckets.
    """
    table = model.table
    measured, failed = _measured(timings, set(shapes)) if timings is not None else ({}, {})
    order = tie_order(table)
    unfused = np.array([not table.tactic(i).finalize for i in range(len(table))])
    choices: list[Choice] = []
    for start in range(0, len(shapes), _SHAPES_AT_ONCE):
        batch = shapes[start : start + _SHAPES_AT_ONCE]
        places, cells, site = _grid(table, batch, buckets)
        keep = _plausible(model, cells, site)
        cells, site = cells.select(keep), site[keep]
        prediction = model.predict(cells)
        for fused in fused_finalize:
            rows = np.arange(len(cells)) if fused else np.flatnonzero(unfused[cells.tactic])
            chosen = pick(site[rows], prediction.ms[rows], order[cells.tactic[rows]], len(places))
            bounds = np.searchsorted(site[rows], np.arange(len(places) + 1))
            for j, (shape, stage, bucket) in enumerate(places):
                mine = rows[bounds[j] : bounds[j + 1]]
                options = _Options(
                    cells.tactic[mine],
                    prediction.ms[mine],
                    prediction.log_sd[mine],
                    int(chosen[j] - bounds[j]),
                    "analytical" if model.choice_ is None else "predicted",
                )
                broken = failed.get((shape, stage, bucket), set())
                if broken:
                    options = _without(options, broken, order)
                if times := measured.get((shape, stage, bucket)):
                    allowed = [i for i, t in table.items(stage) if (fused or not t.finalize) and i not in broken]
                    options = _conditioned(options, {i: times[i] for i in allowed if i in times}, allowed, order)
                choice = _choice(table, shape, stage, bucket, fused, options)
                # Where nothing but failed tactics is left there is no entry to write.
                choices.append(replace(choice, beats_fallback=False) if choice.tactic_id in broken else choice)
        if progress is not None:
            progress(start + len(batch))
    return choices


@dataclass(frozen=True)
class _Options:
    """The tactics of one bucket, with their times in ms, the deviations of their logarithms, and the chosen one."""

    tactic: Ints
    ms: Floats
    log_sd: Floats
    best: int
    source: str


def _without(options: _Options, broken: set[int], order: Ints) -> _Options:
    """Return the options but for tactics that failed here; all of them where nothing else is left."""
    keep = np.flatnonzero(~np.isin(options.tactic, sorted(broken)))
    if not len(keep):
        return options
    tactic, ms = options.tactic[keep], options.ms[keep]
    best = int(pick(np.zeros_like(tactic), ms, order[tactic], 1)[0])
    return _Options(tactic, ms, options.log_sd[keep], best, options.source)


def _conditioned(options: _Options, times: dict[int, float], allowed: Sequence[int], order: Ints) -> _Options:
    """Return the options of a bucket in which some of the allowed tactics were timed.

    A swept bucket is decided by its timings alone. In a sampled one predictions are first shifted onto the timings,
    since the two must never be compared raw, and a prediction replaces the best timing only where it is faster by
    more than ``_PREDICTED_GAIN``: the least of many predictions is optimistic.
    """
    if not times:
        return options
    if len(times) >= _SWEPT * len(allowed):
        return _timed(times, order)
    predicted = dict(zip(options.tactic.tolist(), options.ms.tolist(), strict=True))
    both = [i for i in times if i in predicted]
    if not both:
        return options
    close = sorted(both, key=lambda i: predicted[i])[:_ANCHORS]
    shift = math.exp(float(np.median([math.log(times[i] / predicted[i]) for i in close])))
    sd = {i: _REPEAT_SD if i in times else s for i, s in zip(options.tactic.tolist(), options.log_sd, strict=True)}
    sd |= dict.fromkeys(times, _REPEAT_SD)
    ms = {**{i: t * shift for i, t in predicted.items()}, **times}
    least = min(times.values())
    eligible = {i: v for i, v in ms.items() if i in times or v < least / (1.0 + _PREDICTED_GAIN)}
    tactic = np.array(sorted(eligible), dtype=np.int64)
    values = np.array([eligible[i] for i in tactic.tolist()])
    winner = int(tactic[int(pick(np.zeros_like(tactic), values, order[tactic], 1)[0])])
    every = np.array(sorted(ms), dtype=np.int64)
    return _Options(
        every,
        np.array([ms[i] for i in every.tolist()]),
        np.array([sd[i] for i in every.tolist()]),
        int(np.searchsorted(every, winner)),
        "measured" if winner in times else options.source,
    )


def _timed(times: dict[int, float], order: Ints) -> _Options:
    """Return the options of a swept bucket."""
    tactic = np.array(sorted(times), dtype=np.int64)
    ms = np.array([times[i] for i in tactic.tolist()])
    best = int(pick(np.zeros_like(tactic), ms, order[tactic], 1)[0])
    return _Options(tactic, ms, np.full(len(tactic), _REPEAT_SD), best, "measured")


def _choice(table: TacticTable, shape: MoEShape, stage: int, bucket: int, fused: bool, options: _Options) -> Choice:
    ms, best = options.ms, options.best
    others = ms.copy()
    others[best] = np.inf
    second = int(np.argmin(others)) if len(ms) > 1 else best
    fallback = np.flatnonzero(options.tactic == table.fallback_id(stage))
    fallback_ms, beats = float("nan"), False
    if len(fallback):
        f = int(fallback[0])
        fallback_ms = float(ms[f])
        gain = math.log(fallback_ms / ms[best])
        beats = f != best and gain > _CONFIDENCE * math.hypot(options.log_sd[f], options.log_sd[best])
    return Choice(
        shape=shape,
        stage=stage,
        bucket=bucket,
        fused_finalize=fused,
        tactic_id=int(options.tactic[best]),
        tactic=table.tactic(int(options.tactic[best])),
        ms=float(ms[best]),
        runner_up=table.tactic(int(options.tactic[second])),
        runner_up_ms=float(ms[second]),
        fallback_ms=fallback_ms,
        candidates=len(ms),
        source=options.source,
        beats_fallback=beats,
    )


def _grid(table: TacticTable, shapes: Sequence[MoEShape], buckets: Sequence[int]) -> tuple[list[_Place], Cells, Ints]:
    """Return every (shape, stage, bucket), all their cells in that order, and each cell's place in it."""
    places = [(shape, stage, bucket) for shape in shapes for stage in STAGES for bucket in buckets]
    parts = [
        np.array([[i, stage, bucket, tactic, place] for tactic in table.ids(stage)], dtype=np.int64)
        for place, (i, stage, bucket) in enumerate(
            (i, stage, bucket) for i in range(len(shapes)) for stage in STAGES for bucket in buckets
        )
    ]
    shape, stages, tokens, tactics, site = np.concatenate(parts).T
    return places, Cells(shapes, shape, stages, tokens, tactics), site


def _plausible(model: PerformanceModel, cells: Cells, site: Ints) -> NDArray[np.bool_]:
    """Return which cells are worth a full prediction: not far behind analytically, or the fallback."""
    analytic = model.predict_analytic(cells)
    best = least_by(site, analytic, int(site.max()) + 1)
    fallback = np.isin(cells.tactic, [model.table.fallback_id(stage) for stage in STAGES])
    return np.asarray((analytic <= _ANALYTIC_CUT * best[site]) | fallback)


def _measured(timings: Timings, wanted: set[MoEShape]) -> tuple[dict[_Place, dict[int, float]], dict[_Place, set[int]]]:
    """Return the times of each measured bucket of the wanted shapes, and the tactics that ever failed in it."""
    rows = np.isin(timings.shape, [i for i, s in enumerate(timings.shapes) if s in wanted])
    if not rows.any():
        return {}, {}
    part = timings.select(rows)
    broken: dict[_Place, set[int]] = {}
    for (shape, stage, tokens), times in times_by_bucket(part.select(np.isnan(part.ms))).items():
        broken[part.shapes[shape], stage, tokens] = set(times)
    found: dict[_Place, dict[int, float]] = {}
    for (shape, stage, tokens), times in times_by_bucket(part.averaged()).items():
        place = part.shapes[shape], stage, tokens
        failed = broken.get(place, set())
        if good := {tactic: ms for tactic, ms in times.items() if tactic not in failed}:
            found[place] = good
    return found, broken


def times_by_bucket(timings: Timings) -> dict[tuple[int, int, int], dict[int, float]]:
    """Return the time in ms of each tactic by (shape index, stage, tokens); the last row of a cell counts."""
    found: dict[tuple[int, int, int], dict[int, float]] = {}
    columns = (timings.shape, timings.stage, timings.tokens, timings.tactic, timings.ms)
    for shape, stage, tokens, tactic, ms in zip(*(c.tolist() for c in columns), strict=True):
        found.setdefault((shape, stage, tokens), {})[tactic] = ms
    return found
