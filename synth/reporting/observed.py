"""What the timings of a device say of a config, and of themselves: claims found true, passes compared, failures."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from synth.catalog.shapes import MoEShape
from synth.errors import SynthError
from synth.flashinfer.tactics import Tactic, TacticTable
from synth.performance.evaluation import Evaluation, Judge
from synth.performance.geometry import Floats
from synth.performance.model import swept_buckets
from synth.reporting.facts import Choice, Facts
from synth.reporting.markup import foreign
from synth.timings.folders import combine, load_shapes
from synth.timings.records import DENIED, Agreement, Denial, load_agreed
from synth.timings.rows import Problem
from synth.timings.table import ShapeTimings, Timings, times_by_bucket

#: Times of six digits that differ by less are equal.
_EQUAL = 2e-5
#: Bounds of differences between passes that are counted together.
DRIFTS = (0.001, 0.005, 0.01, 0.02, 0.05)
#: Tactics this near their bucket's best are looked at alone: those are chosen from.
NEAR_BEST = 1.1
#: Where the timings of a pass are summarised by their reference, a pass that drifted by more is named.
DRIFTED = 0.01


@dataclass(frozen=True)
class Claims:
    """What came of looking the measured and verified choices of a quantization up in the timings.

    Attributes
    ----------
    choices : int
        Choices that are called measured or verified.
    found : int
        Of these, those whose tactic was timed in their bucket; a measured one's time must be that of the timings.
    gains : int
        Of these, those whose fallback was timed there too, at the time that is stated.
    regrets : Evaluation or None
        The measured choices in swept buckets, judged by all timings and by later passes alone.
    """

    choices: int
    found: int
    gains: int
    regrets: Evaluation | None


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
    shares : tuple of float
        Share of the cells up to each of ``DRIFTS``, and beyond.
    """

    pass_: int
    cells: int
    near: int
    median: float
    p95: float
    most: float
    near_p95: float
    shift: float
    shares: tuple[float, ...]


@dataclass(frozen=True)
class Conditions:
    """Passes that were taken alike.

    Attributes
    ----------
    source, driver, cuda, torch : str
    passes, timings : int
    dates : tuple of str
        First and last day.
    power_w, temperature_c, sm_clock_mhz, sm_clock_max_mhz : tuple of float
        Least and most; empty where nothing was recorded.
    reference : tuple of float
        Least and most drift of the reference tactic over a pass, as shares.
    throttled : int
        Passes with a reason to throttle.
    """

    source: str
    driver: str
    cuda: str
    torch: str
    passes: int
    timings: int
    dates: tuple[str, ...]
    power_w: tuple[float, ...]
    temperature_c: tuple[float, ...]
    sm_clock_mhz: tuple[float, ...]
    sm_clock_max_mhz: tuple[float, ...]
    reference: tuple[float, ...]
    throttled: int


@dataclass(frozen=True)
class Failure:
    """A way in which timings failed.

    Attributes
    ----------
    stage : int
    tactic, error : str
    timings, shapes : int
    """

    stage: int
    tactic: str
    error: str
    timings: int
    shapes: int


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
    claims : Claims
    conditions : tuple of Conditions
    drifts : tuple of Drift
    drifted : tuple of (str, int, float)
        Label, pass and drift where the reference tactic's time moved by more than 1 % within a pass.
    failures : tuple of Failure
        The commonest first.
    failed, throttled : int
        Timings.
    denials : tuple of Denial
        What `synth verify` has denied.
    numbers : Numbers
    """

    quant: str
    timings: Timings
    claims: Claims
    conditions: tuple[Conditions, ...]
    drifts: tuple[Drift, ...]
    drifted: tuple[tuple[str, int, float], ...]
    failures: tuple[Failure, ...]
    failed: int
    throttled: int
    denials: tuple[Denial, ...]
    numbers: Numbers


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
    known: dict[str, dict[tuple[str, int, int], dict[int, float]]] = {}
    for quant in facts.quants:
        tables = combine([p for p in real if p.origin.quant == quant])
        policy = policies.get(quant)
        tables = [t for t in tables if t.origin.policy == policy] or tables
        if not tables:
            continue
        timings = max(tables, key=len)
        mine = [p for p in real if p.origin == timings.origin]
        merged = timings.averaged()
        known[quant] = {
            (str(timings.shapes[shape]), stage, bucket): times
            for (shape, stage, bucket), times in times_by_bucket(merged).items()
        }
        drifted = [d for p in mine for d in _drifted(p)]
        found[quant] = Observed(
            quant=quant,
            timings=timings,
            claims=_claims(facts, quant, timings, merged, known[quant]),
            conditions=_conditions(mine),
            drifts=_drifts(timings, merged),
            drifted=tuple(sorted(drifted, key=lambda d: (-abs(d[2]), d[0], d[1]))),
            failures=_failures(mine),
            failed=int(np.isnan(timings.ms).sum()),
            throttled=int(timings.throttled.sum()),
            denials=DENIED.load(roots, timings.origin),
            numbers=_numbers(facts, quant, load_agreed(roots, timings.origin)),
        )
    return _confirmed(facts, known), found


#: Source, driver, CUDA and torch.
_Software = tuple[str, str, str, str]
_Known = Mapping[str, Mapping[tuple[str, int, int], Mapping[int, float]]]


def _confirmed(facts: Facts, known: _Known) -> Facts:
    choices = []
    for c in facts.choices:
        if c.source not in ("measured", "verified"):
            choices.append(c)
        elif c.quant in known:
            choices.append(replace(c, measured_gain=_timed(facts, c, known[c.quant])[1]))
        else:
            choices.append(replace(c, measured_gain=c.source == "measured" and c.gain is not None))
    return replace(facts, choices=tuple(choices))


def _timed(
    facts: Facts, choice: Choice, known: Mapping[tuple[str, int, int], Mapping[int, float]]
) -> tuple[bool, bool]:
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


def _claims(
    facts: Facts,
    quant: str,
    timings: Timings,
    merged: Timings,
    known: Mapping[tuple[str, int, int], Mapping[int, float]],
) -> Claims:
    mine = [c for c in facts.written if c.quant == quant and c.source in ("measured", "verified")]
    checked = [_timed(facts, c, known) for c in mine]
    return Claims(
        len(mine),
        sum(own for own, _ in checked),
        sum(both for _, both in checked),
        _judged(facts, quant, timings, merged),
    )


def _judged(facts: Facts, quant: str, timings: Timings, merged: Timings) -> Evaluation | None:
    """Judge the measured choices of servers that fuse the finalize step: these may run every tactic of a bucket."""
    table = facts.table(quant)
    if table is None or not len(merged):
        return None
    keys, bucket = merged.buckets()
    swept = {tuple(key) for key in keys[swept_buckets(merged, keys, bucket)].tolist()}
    index = {str(shape): i for i, shape in enumerate(timings.shapes)}
    cells = [
        (index[c.shape], c.stage, c.bucket, _id(table, c))
        for c in facts.written
        if c.quant == quant and c.source == "measured" and c.fused and c.shape in index
    ]
    cells = sorted({cell for cell in cells if cell[:3] in swept})
    if not cells:
        return None
    judge = Judge(timings)
    rows = judge.rows_of(*(np.array(column, dtype=np.int64) for column in zip(*cells, strict=True)))
    rows = rows[rows >= 0]
    return judge.evaluate_rows("the config", rows) if len(rows) else None


def _numbers(facts: Facts, quant: str, agreements: Sequence[Agreement]) -> Numbers:
    """Look the config's pairs up among those that agree with the fallback."""
    stages: dict[tuple[str, int, bool], dict[int, Tactic | None]] = {}
    for c in facts.written:
        if c.quant == quant:
            stages.setdefault((c.shape, c.bucket, c.fused), {})[c.stage] = c.tactic
    # Where a stage has no entry, the fallback runs.
    pairs = {(shape, found.get(1), found.get(2)) for (shape, _, _), found in stages.items()}
    right: dict[tuple[str, Tactic | None, Tactic | None], list[Agreement]] = {}
    for a in agreements:
        right.setdefault((str(a.shape), *a.tactics), []).append(a)
    agreed = pairs & right.keys()
    mine = [a for pair in agreed for a in right[pair]]
    dates = sorted({foreign(a.date, 40)[:10] for a in mine if a.date})
    return Numbers(
        pairs=len(pairs),
        layers=len({shape for shape, _, _ in pairs}),
        agreed=len(agreed),
        agreed_layers=len({shape for shape, _, _ in pairs} - {shape for shape, _, _ in pairs - agreed}),
        comparisons=len(mine),
        worst=max((a.deviation for a in mine), default=math.nan),
        dates=tuple(dict.fromkeys((dates[0], dates[-1]))) if dates else (),
    )


def _drifts(timings: Timings, merged: Timings) -> tuple[Drift, ...]:
    """Compare each later pass with the first, where both timed a cell."""
    passes = np.unique(timings.pass_[~np.isnan(timings.ms)]).tolist()
    best = {key: min(times.values()) for key, times in times_by_bucket(merged).items()}
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
        found.append(
            Drift(
                pass_=number,
                cells=len(both),
                near=int(near.sum()),
                median=float(np.median(size)),
                p95=float(np.quantile(size, 0.95)),
                most=float(size.max()),
                near_p95=float(np.quantile(size[near], 0.95)) if near.any() else math.nan,
                shift=float(np.median(change)),
                shares=_shares(size),
            )
        )
    return tuple(found)


def _cells(timings: Timings, passes: Sequence[int]) -> dict[tuple[int, int, int, int], float]:
    t = timings.averaged(passes)
    columns = (t.shape.tolist(), t.stage.tolist(), t.tokens.tolist(), t.tactic.tolist())
    return dict(zip(zip(*columns, strict=True), t.ms.tolist(), strict=True))


def _shares(size: Floats) -> tuple[float, ...]:
    place = np.searchsorted(DRIFTS, size, side="left")
    return tuple((np.bincount(place, minlength=len(DRIFTS) + 1) / len(size)).tolist())


def _conditions(parts: Sequence[ShapeTimings]) -> tuple[Conditions, ...]:
    """Group the passes by where their timings are from, and with which software."""
    groups: dict[_Software, list[tuple[Mapping[str, Any], int]]] = {}
    for part in parts:
        rows = Counter(part.pass_.tolist())
        for number, said in part.passes.items():
            source, driver, cuda, torch = (foreign(said.get(k, "")) for k in ("source", "driver", "cuda", "torch"))
            groups.setdefault((source, driver, cuda, torch), []).append((said, rows.get(number, 0)))
    found = []
    for (source, driver, cuda, torch), members in sorted(groups.items(), key=_most_timings):
        passes = [passed for passed, _ in members]
        dates = sorted({foreign(p["date"], 40)[:10] for p in passes if p.get("date")})
        found.append(
            Conditions(
                source=source,
                driver=driver,
                cuda=cuda,
                torch=torch,
                passes=len(members),
                timings=sum(n for _, n in members),
                dates=tuple(dict.fromkeys((dates[0], dates[-1]))) if dates else (),
                power_w=_range(p.get("power_limit_w") for p in passes),
                temperature_c=_range(p.get("temperature_c") for p in passes),
                sm_clock_mhz=_range(p.get("sm_clock_mhz") for p in passes),
                sm_clock_max_mhz=_range(p.get("sm_clock_max_mhz") for p in passes),
                reference=_range(_reference(p) for p in passes),
                throttled=sum(bool(p.get("throttle_reasons")) for p in passes),
            )
        )
    return tuple(found)


def _most_timings(group: tuple[_Software, list[tuple[Mapping[str, Any], int]]]) -> tuple[int, _Software]:
    return -sum(n for _, n in group[1]), group[0]


def _range(values: Iterable[object]) -> tuple[float, ...]:
    numbers = [float(v) for v in map(_number, values) if v is not None]
    return tuple(dict.fromkeys((min(numbers), max(numbers)))) if numbers else ()


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if -1e12 < value < 1e12 else None


def _reference(said: Mapping[str, Any]) -> float | None:
    reference = said.get("reference")
    return _number(reference.get("drift")) if isinstance(reference, Mapping) else None


def _drifted(part: ShapeTimings) -> list[tuple[str, int, float]]:
    moved = ((n, _reference(said)) for n, said in part.passes.items())
    return [(foreign(part.label, 60), n, d) for n, d in moved if d is not None and abs(d) > DRIFTED]


def _failures(parts: Sequence[ShapeTimings]) -> tuple[Failure, ...]:
    groups: dict[tuple[int, str, str], list[MoEShape]] = {}
    for part in parts:
        for row, error in part.errors.items():
            tactic = foreign(part.tactics.get(int(part.tactic[row]), f"id {int(part.tactic[row])}"))
            groups.setdefault((int(part.stage[row]), tactic, foreign(error)), []).append(part.shape)
    found = [Failure(*names, timings=len(shapes), shapes=len(set(shapes))) for names, shapes in groups.items()]
    return tuple(sorted(found, key=lambda f: (-f.timings, f.stage, f.tactic, f.error)))
