"""What the timings of a device say of a config, and of themselves: claims found true, passes compared, failures."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from synth.catalog.shapes import MoEShape
from synth.errors import SynthError
from synth.flashinfer.tactics import Tactic, TacticTable
from synth.performance.evaluation import Evaluation, Judge
from synth.performance.geometry import Ints
from synth.performance.model import swept_buckets
from synth.reporting.facts import Choice, Facts
from synth.reporting.texts import foreign
from synth.timings.folders import combine, load_shapes
from synth.timings.records import DENIED, Agreement, Denial, load_agreed
from synth.timings.rows import Problem
from synth.timings.table import ShapeTimings, Timings, times_by_bucket

#: Sources of choices that were timed.
_TIMED = ("measured", "verified")
#: Times of six digits that differ by less are equal.
_EQUAL = 2e-5
#: Bounds of differences between passes that are counted together.
_DRIFTS = (0.001, 0.005, 0.01, 0.02, 0.05)
#: What the shares between them are called, in percent.
DRIFT_NAMES = ("≤0.1", "≤0.5", "≤1", "≤2", "≤5", ">5")
#: Tactics this near their bucket's best are looked at alone: those are chosen from.
NEAR_BEST = 1.1
#: Where the timings of a pass are summarised by their reference, a pass that drifted by more is named.
DRIFTED = 0.01


@dataclass(frozen=True)
class Drift:
    """How a later pass differs from the first, over cells that both timed.

    Attributes
    ----------
    pass_ : int
    cells, near : int
        All cells, and those within 10 % of their bucket's best.
    median, p95, most : float
        Of the differences' size, as shares, over all cells.
    near_p95 : float
        The same of cells near the best; NaN without any.
    shift : float
        Median difference: what made the whole pass slower (positive) or faster.
    counts : ndarray of int
        Cells up to each bound of ``DRIFT_NAMES``, and beyond.
    """

    pass_: int
    cells: int
    near: int
    median: float
    p95: float
    most: float
    near_p95: float
    shift: float
    counts: Ints


@dataclass(frozen=True)
class Conditions:
    """Passes that were taken alike.

    Attributes
    ----------
    software : tuple of str
        Source, driver, CUDA and torch.
    passes, timings : int
    throttled : int
        Passes with a reason to throttle.
    dates : tuple of str
        First and last day.
    spans : dict of str to tuple of float
        Least and most of ``power_limit_w``, ``temperature_c``, ``sm_clock_mhz``, ``sm_clock_max_mhz``, and of the drift
        of the ``reference`` tactic over a pass, as a share; empty where nothing was recorded.
    """

    software: tuple[str, ...]
    passes: int
    timings: int
    throttled: int
    dates: tuple[str, ...]
    spans: Mapping[str, tuple[float, ...]]


@dataclass(frozen=True)
class Numbers:
    """Which of the config's pairs of tactics were run beside the fallback and gave its numbers.

    Attributes
    ----------
    pairs, layers : int
        Distinct (shape, gemm1's tactic, gemm2's tactic) that the config serves, and their shapes.
    agreed, agreed_layers : int
        Of the pairs, those that `synth verify` found right; shapes all of whose pairs are.
    comparisons : int
        At so many token counts together.
    worst : float
        Their largest deviation, as a share of the largest output; NaN without any.
    dates : tuple of str
        First and last day.
    """

    pairs: int
    layers: int
    agreed: int
    agreed_layers: int
    comparisons: int
    worst: float
    dates: tuple[str, ...]


@dataclass(frozen=True)
class Observed:
    """What there is to say of the timings of one device, FlashInfer version and quantization.

    Attributes
    ----------
    quant : str
    timings : Timings
    claimed, claims_found, gains_found : int
        Choices in the config that are called measured or verified; of these, those that were timed in their bucket at
        the time that is stated; of these, those whose fallback was timed there too, at the time that is stated.
    judged : Evaluation or None
        The measured choices in swept buckets, judged by all timings and by later passes alone.
    conditions : tuple of Conditions
    drifts : tuple of Drift
    drifted : tuple of (str, int, float)
        Label, pass and drift where the reference tactic's time moved by more than 1 % within a pass.
    failures : list of (int, str, str, int, int)
        Ways in which timings failed, the commonest first: stage, tactic, error, and how many timings and shapes.
    denials : tuple of Denial
        What `synth verify` has denied.
    numbers : Numbers
    served : set of (int, Tactic)
        The stages and tactics in the config.
    """

    quant: str
    timings: Timings
    claimed: int
    claims_found: int
    gains_found: int
    judged: Evaluation | None
    conditions: tuple[Conditions, ...]
    drifts: tuple[Drift, ...]
    drifted: tuple[tuple[str, int, float], ...]
    failures: Sequence[tuple[int, str, str, int, int]]
    denials: tuple[Denial, ...]
    numbers: Numbers
    served: Set[tuple[int, Tactic | None]]

    @property
    def shapes(self) -> int:
        """Shapes that were timed."""
        return len(np.unique(self.timings.shape))

    @property
    def failed(self) -> int:
        """Timings that failed."""
        return int(np.isnan(self.timings.ms).sum())

    @property
    def throttled(self) -> int:
        """Timings that were taken while the GPU throttled."""
        return int(self.timings.throttled.sum())

    @property
    def drift_shares(self) -> list[float]:
        """Share of the cells up to each bound of ``DRIFT_NAMES``, over all later passes."""
        counts = np.sum([d.counts for d in self.drifts], axis=0)
        return list((counts / counts.sum()).tolist())


def observe(
    facts: Facts, roots: Sequence[Path], problems: list[Problem], policies: Mapping[str, str]
) -> tuple[Facts, dict[str, Observed]]:
    """Return what the timings under some folders say, by quantization, and the facts with the gains they confirm.

    A gain counts as measured only where the timings hold the choice's time and the fallback's, both as stated. Where
    there are none of its quantization, a measured choice's gain counts as measured because its sidecar says so.

    Parameters
    ----------
    facts : Facts
    roots : sequence of Path
        Folders of measurements.
    problems : list
        Gets the rows that can't be read.
    policies : mapping of str to str
        Timing policy of each quantization's model. Without one it is the policy of most timings.
    """
    found: dict[str, Observed] = {}
    if facts.device is None:
        return _confirmed(facts, {}), found
    parts = load_shapes(roots, facts.device.name, None, facts.flashinfer, problems=problems) if roots else []
    real = [p for p in parts if not p.origin.simulated]
    known: dict[str, _Times[str]] = {}
    for quant in facts.quants:
        tables = combine([p for p in real if p.origin.quant == quant])
        policy = policies.get(quant)
        tables = [t for t in tables if t.origin.policy == policy] or tables
        if not tables:
            continue
        timings = max(tables, key=len)
        mine = [p for p in real if p.origin == timings.origin]
        merged = timings.averaged()
        times = times_by_bucket(merged)
        known[quant] = {(str(timings.shapes[i]), stage, n): ms for (i, stage, n), ms in times.items()}
        written = [c for c in facts.written if c.quant == quant]
        looked_up = [_timed(facts, c, known[quant]) for c in written if c.source in _TIMED]
        drifted = [d for p in mine for d in _drifted(p)]
        found[quant] = Observed(
            quant=quant,
            timings=timings,
            claimed=len(looked_up),
            claims_found=sum(own for own, _ in looked_up),
            gains_found=sum(both for _, both in looked_up),
            judged=_judged(facts, written, timings, merged),
            conditions=_conditions(mine),
            drifts=_drifts(timings, times),
            drifted=tuple(sorted(drifted, key=lambda d: (-abs(d[2]), d[0], d[1]))),
            failures=_failures(mine),
            denials=DENIED.load(roots, timings.origin),
            numbers=_numbers(written, load_agreed(roots, timings.origin)),
            served={(c.stage, c.tactic) for c in written},
        )
    return _confirmed(facts, known), found


#: What passes are grouped by.
_SOFTWARE = ("source", "driver", "cuda", "torch")
#: What conditions say the least and the most of.
_SPANS = ("power_limit_w", "temperature_c", "sm_clock_mhz", "sm_clock_max_mhz")
#: Times in ms by tactic id, by shape or its index, stage and bucket.
_S = TypeVar("_S", str, int)
_Times = Mapping[tuple[_S, int, int], Mapping[int, float]]


def _confirmed(facts: Facts, known: Mapping[str, _Times[str]]) -> Facts:
    def is_measured(c: Choice) -> bool:
        if c.quant in known:
            return c.source in _TIMED and _timed(facts, c, known[c.quant])[1]
        return c.source == "measured" and c.gain is not None

    return replace(facts, choices=tuple(replace(c, measured_gain=True) if is_measured(c) else c for c in facts.choices))


def _timed(facts: Facts, choice: Choice, known: _Times[str]) -> tuple[bool, bool]:
    """Return whether a choice's time is that of the timings, and whether the fallback's is as well."""
    table = facts.table(choice.quant)
    times = known.get((choice.shape, choice.stage, choice.bucket), {})
    if table is None or choice.tactic is None or not times:
        return False, False
    own = _equal(times.get(_id(table, choice)), choice.ms)
    return own, own and _equal(times.get(table.fallback_id(choice.stage)), choice.fallback_ms)


def _id(table: TacticTable, choice: Choice) -> int:
    try:
        return table.id_of(choice.stage, choice.tactic) if choice.tactic is not None else -1
    except SynthError:
        return -1


def _equal(timed: float | None, stated: float | None) -> bool:
    return timed is not None and stated is not None and abs(timed / stated - 1.0) <= _EQUAL


def _judged(facts: Facts, written: Sequence[Choice], timings: Timings, merged: Timings) -> Evaluation | None:
    """Judge the measured choices of servers that fuse the finalize step: these may run every tactic of a bucket."""
    table = facts.table(timings.origin.quant)
    if table is None or not len(merged):
        return None
    keys, bucket = merged.buckets()
    swept = {tuple(key) for key in keys[swept_buckets(merged, keys, bucket)].tolist()}
    index = {str(shape): i for i, shape in enumerate(timings.shapes)}
    cells = [
        (index[c.shape], c.stage, c.bucket, _id(table, c))
        for c in written
        if c.source == "measured" and c.fused and c.shape in index
    ]
    cells = sorted({cell for cell in cells if cell[:3] in swept})
    if not cells:
        return None
    judge = Judge(timings)
    rows = judge.rows_of(*(np.array(column, dtype=np.int64) for column in zip(*cells, strict=True)))
    rows = rows[rows >= 0]
    return judge.evaluate_rows("the config", rows) if len(rows) else None


def _numbers(written: Sequence[Choice], agreements: Sequence[Agreement]) -> Numbers:
    """Look the config's pairs up among those that agree with the fallback."""
    stages: dict[tuple[str, int, bool], dict[int, Tactic | None]] = {}
    for c in written:
        stages.setdefault((c.shape, c.bucket, c.fused), {})[c.stage] = c.tactic
    # Where a stage has no entry, the fallback runs.
    pairs = {(shape, found.get(1), found.get(2)) for (shape, _, _), found in stages.items()}
    right: dict[tuple[str, Tactic | None, Tactic | None], list[Agreement]] = {}
    for a in agreements:
        right.setdefault((str(a.shape), *a.tactics), []).append(a)
    agreed = pairs & right.keys()
    mine = [a for pair in agreed for a in right[pair]]
    return Numbers(
        pairs=len(pairs),
        layers=len({shape for shape, _, _ in pairs}),
        agreed=len(agreed),
        agreed_layers=len({shape for shape, _, _ in pairs} - {shape for shape, _, _ in pairs - agreed}),
        comparisons=len(mine),
        worst=max((a.deviation for a in mine), default=math.nan),
        dates=_days(a.date for a in mine),
    )


def _days(dates: Iterable[object]) -> tuple[str, ...]:
    """Return the first and the last day of dates."""
    days = sorted({foreign(date, 40)[:10] for date in dates if date})
    return tuple(dict.fromkeys((days[0], days[-1]))) if days else ()


def _drifts(timings: Timings, times: _Times[int]) -> tuple[Drift, ...]:
    """Compare each later pass with the first, where both timed a cell; `times` are the means over all passes."""
    passes = np.unique(timings.pass_[~np.isnan(timings.ms)]).tolist()
    best = {place: min(ms.values()) for place, ms in times.items()}
    first = _cells(timings, passes[:1])
    found = []
    for number in passes[1:]:
        later = _cells(timings, [number])
        both = sorted(first.keys() & later.keys())
        if not both:
            continue
        change = np.array([later[cell] / first[cell] - 1.0 for cell in both])
        near = np.array([first[cell] <= NEAR_BEST * best[cell[:3]] for cell in both], dtype=bool)
        size = np.abs(change)
        counts = np.bincount(np.searchsorted(_DRIFTS, size, side="left"), minlength=len(DRIFT_NAMES))
        near_p95 = float(np.quantile(size[near], 0.95)) if near.any() else math.nan
        median, p95, most = np.quantile(size, [0.5, 0.95, 1.0]).tolist()
        shift = float(np.median(change))
        found.append(Drift(number, len(both), int(near.sum()), median, p95, most, near_p95, shift, counts))
    return tuple(found)


def _cells(timings: Timings, passes: Sequence[int]) -> dict[tuple[int, int, int, int], float]:
    t = timings.averaged(passes)
    columns = (t.shape.tolist(), t.stage.tolist(), t.tokens.tolist(), t.tactic.tolist())
    return dict(zip(zip(*columns, strict=True), t.ms.tolist(), strict=True))


def _conditions(parts: Sequence[ShapeTimings]) -> tuple[Conditions, ...]:
    """Group the passes by where their timings are from, and with which software; those with the most timings first."""
    groups: dict[tuple[str, ...], list[tuple[Mapping[str, Any], int]]] = {}
    for part in parts:
        rows = Counter(part.pass_.tolist())
        for number, said in part.passes.items():
            software = tuple(foreign(said.get(name, "")) for name in _SOFTWARE)
            groups.setdefault(software, []).append((said, rows.get(number, 0)))
    found = []
    for software, members in groups.items():
        passes = [said for said, _ in members]
        spans = {name: _span(said.get(name) for said in passes) for name in _SPANS}
        found.append(
            Conditions(
                software=software,
                passes=len(members),
                timings=sum(n for _, n in members),
                throttled=sum(bool(said.get("throttle_reasons")) for said in passes),
                dates=_days(said.get("date") for said in passes),
                spans={**spans, "reference": _span(map(_reference, passes))},
            )
        )
    return tuple(sorted(found, key=lambda c: (-c.timings, c.software)))


def _span(values: Iterable[object]) -> tuple[float, ...]:
    """Return the least and the most of the values that are numbers."""
    real = (v for v in values if isinstance(v, (int, float)) and not isinstance(v, bool))
    numbers = [float(v) for v in real if -1e12 < v < 1e12]
    return tuple(dict.fromkeys((min(numbers), max(numbers)))) if numbers else ()


def _reference(said: Mapping[str, Any]) -> float | None:
    reference = said.get("reference")
    drift = _span([reference.get("drift")]) if isinstance(reference, Mapping) else ()
    return drift[0] if drift else None


def _drifted(part: ShapeTimings) -> list[tuple[str, int, float]]:
    moved = ((n, _reference(said)) for n, said in part.passes.items())
    return [(foreign(part.label, 60), n, d) for n, d in moved if d is not None and abs(d) > DRIFTED]


def _failures(parts: Sequence[ShapeTimings]) -> list[tuple[int, str, str, int, int]]:
    groups: dict[tuple[int, str, str], list[MoEShape]] = {}
    for part in parts:
        for row, error in part.errors.items():
            tactic = foreign(part.tactics.get(int(part.tactic[row]), f"id {int(part.tactic[row])}"))
            groups.setdefault((int(part.stage[row]), tactic, foreign(error)), []).append(part.shape)
    found = [(*names, len(shapes), len(set(shapes))) for names, shapes in groups.items()]
    return sorted(found, key=lambda failure: (-failure[3], failure))
