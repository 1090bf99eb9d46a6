"""One tactic for each (shape, stage, bucket): near-ties, the fallback, abstention.

A choice is *measured* where its bucket was swept, *verified* where its tactic was timed in this bucket and is very
likely near the best, else *predicted*, or *analytical* where the device has no timings at all. Timings are of uniform
routing: for another one they are scaled by what the model says of the difference, and nothing is measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from synth.catalog.schemes import STAGES
from synth.catalog.shapes import MoEShape
from synth.errors import SynthError
from synth.flashinfer.legality import illegal_ids, smem_block_bytes
from synth.flashinfer.tactics import Tactic, TacticTable
from synth.performance.analytical import suspects
from synth.performance.calibration import calibrated_probability
from synth.performance.geometry import Floats, Ints, least_by
from synth.performance.model import SWEPT, Cells, PerformanceModel, Prediction
from synth.performance.posterior import NEAR, Timed, candidates, prior_outlook, update
from synth.performance.routing import UNIFORM, Routing
from synth.performance.ties import pick, tie_order
from synth.timings.table import Timings, times_by_bucket

#: Chance that the chosen tactic beats the fallback below which an entry is left out, as a standard normal quantile.
_CONFIDENCE = 1.645
#: An analytical choice is written where it is predicted to be faster than the fallback by this share. Carried over from
#: one quantization of the H200 to another, choices foreseen to gain as much over a fixed tactic were faster than it in
#: all of 1,789 buckets (TMA kernels) and in 99.2 % of 967 (multistage): ``benchmarks/transfer.py``.
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
    measured, failed = _measured(timings, set(shapes)) if timings is not None else ({}, {})
    order = tie_order(table)
    every = ~tactic_mask(table, {*denied, *(suspects(table) if model.analytical else ())})
    unfused = every & np.array([not table.tactic(i).finalize for i in range(len(table))])
    counts = sorted(set(buckets))
    asked = [counts.index(b) for b in buckets]
    smem = smem_block_bytes(model.origin_.device, table.arch)
    choices: list[Choice] = []
    for start in range(0, len(shapes), _SHAPES_AT_ONCE):
        batch = shapes[start : start + _SHAPES_AT_ONCE]
        places, cells, site = _grid(table, batch, counts, routing)
        illegal = {(shape, stage): illegal_ids(table, stage, shape, smem) for shape in batch for stage in STAGES}
        never = {place: illegal[place[:2]] | failed.get(place, set()) for place in places}
        broken = _among(cells, site, places, never)
        keep = _plausible(model, cells, site) | _among(cells, site, places, measured)
        every_site, every_tactic = site[~broken], cells.tactic[~broken]
        cells, site, broken = cells.select(keep), site[keep], broken[keep]
        prediction = model.predict(cells)
        carried = None if routing.is_uniform else model.predict(replace(cells, routing=UNIFORM)).ms
        for fused in fused_finalize:
            allowed = (every if fused else unfused)[cells.tactic]
            good = allowed & ~broken
            total = np.bincount(every_site[(every if fused else unfused)[every_tactic]], minlength=len(places))
            # Where nothing but tactics that failed or can't run is left there is no entry to write.
            hopeless = ~np.isin(np.arange(len(places)), site[good])
            rows = np.flatnonzero(good | (allowed & hopeless[site]))
            bound = _Bound(table, order, places, total, cells.select(rows), site[rows], _pick_rows(prediction, rows))
            scale = None if carried is None else carried[rows]
            found = _choose_all(bound, model, measured, fused, scale)
            found = [replace(c, beats_fallback=False) if h else c for c, h in zip(found, hopeless, strict=True)]
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


@dataclass(frozen=True)
class _Bound:
    """The cells that may be chosen in some places, sorted by place, and what is predicted of them.

    `total` is the number of tactics that may be chosen in each place, those that are hopelessly slow included.
    """

    table: TacticTable
    order: Ints
    places: Sequence[_Place]
    total: Ints
    cells: Cells
    site: Ints
    prediction: Prediction


def _pick_rows(prediction: Prediction, rows: Ints) -> Prediction:
    return Prediction(prediction.ms[rows], prediction.log_sd[rows], prediction.choice_sd[rows])


def _choose_all(
    bound: _Bound,
    model: PerformanceModel,
    measured: Mapping[_Place, Mapping[int, _Repeated]],
    fused: bool,
    carried: Floats | None,
) -> list[Choice]:
    """Return the choice of every place, in order.

    Parameters
    ----------
    measured : mapping
        Timings by place and tactic id.
    carried : ndarray of float64, shape (cells,), or None
        Predictions under uniform routing, where the cells' is another one.
    """
    count = len(bound.places)
    starts = np.searchsorted(bound.site, np.arange(count + 1))
    cells, ms = bound.cells, bound.prediction.ms
    chosen = pick(bound.site, ms, bound.order[cells.tactic], count)
    near = candidates(bound.site, ms, np.isin(np.arange(len(ms)), chosen))
    outlook = prior_outlook(
        bound.site[near],
        cells.tactic[near],
        ms[near],
        bound.prediction.choice_sd[near],
        np.searchsorted(near, chosen),
        model.columns,
    )
    within = _calibrated(model, outlook.within)
    source = "analytical" if model.analytical else "predicted"
    choices: list[Choice] = []
    timed = [measured.get(place, {}) for place in bound.places]
    for first, last in _stages(bound.places):
        mine = range(first, last)
        if not any(timed[j] for j in mine):
            for j in mine:
                some = slice(starts[j], starts[j + 1])
                at = _At(cells.tactic[some], ms[some], bound.prediction.log_sd[some], int(chosen[j] - starts[j]))
                choices.append(_choice(bound, j, fused, at, source, outlook.regret[j], within[j]))
            continue
        choices += _from_timings(bound, model, starts, mine, timed, fused, carried, source)
    return choices


def _from_timings(
    bound: _Bound,
    model: PerformanceModel,
    starts: Ints,
    mine: range,
    timed: Sequence[Mapping[int, _Repeated]],
    fused: bool,
    carried: Floats | None,
    source: str,
) -> list[Choice]:
    """Return the choices of one (shape, stage) of which something was timed."""
    rows = slice(starts[mine[0]], starts[mine[-1] + 1])
    cells, prediction, site = bound.cells.select(np.arange(rows.start, rows.stop)), bound.prediction, bound.site[rows]
    known = [timed[j].get(i) for j, i in zip(site.tolist(), cells.tactic.tolist(), strict=True)]
    at = np.array([k is not None for k in known])
    times = np.array([k.ms if k is not None else np.nan for k in known])
    repeats = np.array([k.repeats if k is not None else 0 for k in known], dtype=np.int64)
    ms, log_sd = prediction.ms[rows], prediction.log_sd[rows]
    if carried is not None:
        times = carried_over(times, carried[rows], ms)
    posterior = update(
        cells.tokens,
        cells.tactic,
        ms,
        prediction.choice_sd[rows],
        model.columns,
        Timed(cells.tokens[at], cells.tactic[at], times[at], repeats[at], 0.0 if carried is None else _CARRIED_SD),
    )
    # What is believed of each cell: candidates by the posterior, the rest shifted as their bucket's candidates are.
    row = posterior.rows(cells.tokens, cells.tactic)
    # A model that reproduces these timings has in its predictions what they say of other cells already.
    reproduced = model.residual_ is not None and model.knows(bound.places[mine[0]][0])
    candidate_ms = np.where(at, times, ms) if reproduced else np.exp(posterior.mean[row])
    believed = np.where(row >= 0, candidate_ms, np.nan)
    shift = np.array([np.nanmean(np.log(believed[site == j] / ms[site == j])) for j in mine])
    believed = np.where(row >= 0, believed, np.where(at, times, ms * np.exp(shift[site - mine[0]])))
    fast_only = np.where(row >= 0, believed, np.inf)
    swept = np.array([at[site == j].sum() >= SWEPT * bound.total[j] for j in mine])[site - mine[0]]
    fast_only = np.where(swept & ~at, np.inf, fast_only)
    chosen = pick(site - mine[0], fast_only, bound.order[cells.tactic], len(mine))
    outlook = posterior.outlook(row[chosen])
    within = _calibrated(model, outlook.within)
    shown = np.where(at & (carried is None), times, believed)
    sd = np.where(at & (carried is None), _REPEAT_SD, log_sd)
    choices = []
    for n, j in enumerate(mine):
        some = np.flatnonzero(site == j)
        pickd = int(np.searchsorted(some, chosen[n]))
        if carried is not None or not at[chosen[n]]:
            said = source
        elif swept[chosen[n]]:
            said = "measured"
        else:
            said = "verified" if within[n, 0] >= SURE else source
        options = _At(cells.tactic[some], shown[some], sd[some], pickd)
        choices.append(_choice(bound, j, fused, options, said, outlook.regret[n], within[n]))
    return choices


def _calibrated(model: PerformanceModel, within: Floats) -> Floats:
    """Return probabilities of being near the best, shape (choices, shares of `NEAR`), corrected by held-out shapes."""
    columns = [calibrated_probability(model, within[:, i], margin) for i, margin in enumerate(NEAR)]
    return np.stack(columns, axis=1)


@dataclass(frozen=True)
class _At:
    """The tactics of one place: times in ms, deviations of their logarithms, and the index of the chosen one."""

    tactic: Ints
    ms: Floats
    log_sd: Floats
    best: int


def _choice(bound: _Bound, place: int, fused: bool, options: _At, source: str, regret: float, within: Floats) -> Choice:
    shape, stage, bucket = bound.places[place]
    ms, best = options.ms, options.best
    others = ms.copy()
    others[best] = np.inf
    second = int(np.argmin(others)) if len(ms) > 1 else best
    fallback = np.flatnonzero(options.tactic == bound.table.fallback_id(stage))
    fallback_ms, beats = float("nan"), False
    if len(fallback):
        f = int(fallback[0])
        fallback_ms = float(ms[f])
        gain = math.log(fallback_ms / ms[best])
        doubt = _CONFIDENCE * math.hypot(options.log_sd[f], options.log_sd[best])
        beats = f != best and gain > (math.log1p(SURE_GAIN) if source == "analytical" else doubt)
    return Choice(
        shape=shape,
        stage=stage,
        bucket=bucket,
        fused_finalize=fused,
        tactic_id=int(options.tactic[best]),
        tactic=bound.table.tactic(int(options.tactic[best])),
        ms=float(ms[best]),
        runner_up=bound.table.tactic(int(options.tactic[second])),
        runner_up_ms=float(ms[second]),
        fallback_ms=fallback_ms,
        candidates=len(ms),
        source=source,
        regret=math.expm1(regret),
        within=tuple(within.tolist()),
        beats_fallback=beats,
    )


def _stages(places: Sequence[_Place]) -> list[tuple[int, int]]:
    """Return where each (shape, stage) begins and ends."""
    starts = [i for i in range(len(places)) if i == 0 or places[i][:2] != places[i - 1][:2]]
    return list(zip(starts, [*starts[1:], len(places)], strict=True))


def _among(
    cells: Cells, site: Ints, places: Sequence[_Place], found: Mapping[_Place, Collection[int]]
) -> NDArray[np.bool_]:
    """Return which cells are among those found in their place."""
    some = [found.get(place, ()) for place in places]
    if not any(some):
        return np.zeros(len(site), dtype=bool)
    return np.array([i in some[j] for i, j in zip(cells.tactic.tolist(), site.tolist(), strict=True)])


def _grid(
    table: TacticTable, shapes: Sequence[MoEShape], buckets: Sequence[int], routing: Routing
) -> tuple[list[_Place], Cells, Ints]:
    """Return every (shape, stage, bucket), all their cells in that order, and each cell's place in it."""
    places = [(shape, stage, bucket) for shape in shapes for stage in STAGES for bucket in buckets]
    parts = [
        np.array([[i, stage, bucket, tactic, place] for tactic in table.ids(stage)], dtype=np.int64)
        for place, (i, stage, bucket) in enumerate(
            (i, stage, bucket) for i in range(len(shapes)) for stage in STAGES for bucket in buckets
        )
    ]
    shape, stages, tokens, tactics, site = np.concatenate(parts).T
    return places, Cells(shapes, shape, stages, tokens, tactics, routing), site


def _plausible(model: PerformanceModel, cells: Cells, site: Ints) -> NDArray[np.bool_]:
    """Return which cells are worth a full prediction: not far behind analytically, or the fallback."""
    analytic = model.predict_analytic(cells)
    best = least_by(site, analytic, int(site.max()) + 1)
    fallback = np.isin(cells.tactic, [model.table.fallback_id(stage) for stage in STAGES])
    return np.asarray((analytic <= _ANALYTIC_CUT * best[site]) | fallback)


class _Repeated(NamedTuple):
    """The time of a cell in ms, and how many timings it is the mean of."""

    ms: float
    repeats: int


def _measured(
    timings: Timings, wanted: set[MoEShape]
) -> tuple[dict[_Place, dict[int, _Repeated]], dict[_Place, set[int]]]:
    """Return the timings of each bucket of the wanted shapes, and the tactics that ever failed in it."""
    rows = np.isin(timings.shape, [i for i, s in enumerate(timings.shapes) if s in wanted])
    if not rows.any():
        return {}, {}
    part = timings.select(rows)
    broken: dict[_Place, set[int]] = {}
    for (shape, stage, tokens), times in times_by_bucket(part.select(np.isnan(part.ms))).items():
        broken[part.shapes[shape], stage, tokens] = set(times)
    found: dict[_Place, dict[int, _Repeated]] = {}
    merged, repeats = part.merged()
    columns = (merged.shape, merged.stage, merged.tokens, merged.tactic, merged.ms, repeats)
    for shape, stage, tokens, tactic, ms, count in zip(*(c.tolist() for c in columns), strict=True):
        place = part.shapes[shape], stage, tokens
        if tactic not in broken.get(place, ()):
            found.setdefault(place, {})[tactic] = _Repeated(ms, count)
    return found, broken
