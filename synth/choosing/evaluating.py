"""What ``synth evaluate`` does: held-out regret of the shipped timings, or of a table that the models never saw."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from synth.catalog.devices import Device
from synth.catalog.paths import find_model
from synth.catalog.shapes import family_of
from synth.choosing.choose import choose
from synth.choosing.learning import (
    NEW_SHARES,
    SHARES,
    WAYS,
    Point,
    hold_out_and_replay,
    new_device,
    swept_shapes,
    workers,
)
from synth.choosing.weak_spots import Kind, by_kind
from synth.errors import SynthError
from synth.performance.analytical import start_of
from synth.performance.calibration import (
    INTERVAL_SD,
    Reliability,
    corrected,
    correction,
    cross_fitted,
    interval_factor,
)
from synth.performance.evaluation import (
    Calibration,
    Evaluation,
    Judge,
    baselines,
    calibrate,
    held_out_groups,
    held_out_model,
)
from synth.performance.geometry import Floats, Ints
from synth.performance.model import Cells, PerformanceModel
from synth.performance.posterior import NEAR
from synth.timings.flat import read_flat
from synth.timings.folders import combine
from synth.timings.table import Timings

#: The quantization whose figures stand at the top of the JSON when there are several.
_REFERENCE = "bf16"
#: How often ways with chance in them are tried.
SEEDS = 2
#: Source of the passes that were swept before synth could collect; their shapes are also looked at alone …
_FIRST_SWEEPS = "exhaustive sweep"
#: … and there, as in the study before, at these numbers of timings of a new device.
_STUDIED = {"bf16": (674, 1348, 3370, 6741)}
#: Shares of the sweep after which intervals are compared with what was found, and regret is split by kind.
_LOOKED_AT = (0.0, 0.01, 0.05)
#: Choices listed as the worst.
_WORST = 10
#: Two choices this near by their mean time are as good as equal.
_AS_GOOD = 0.005


@dataclass(frozen=True)
class Coverage:
    """How many errors of expected times lie inside 90 % intervals.

    Attributes
    ----------
    share : float
        Of the sweep that was timed.
    stated, corrected : float
        Share inside, as stated and when each family's factor comes from the others.
    expected, actual : float
        Mean expected regret of the choices, and what it was (logarithms).
    """

    share: float
    stated: float
    corrected: float
    expected: float
    actual: float


@dataclass(frozen=True)
class Worst:
    """A choice that costs much.

    Attributes
    ----------
    label : str
    stage, bucket : int
    regret : float
    chosen, best : str
        The two tactics.
    later : float
        Regret after 5 % of the sweep was timed.
    """

    label: str
    stage: int
    bucket: int
    regret: float
    chosen: str
    best: str
    later: float


@dataclass(frozen=True)
class Stability:
    """How equal choices from two independent passes are.

    Attributes
    ----------
    count : int
        (shape, stage, bucket) that both passes timed.
    equal, as_good : float
        Share that are equal; share that are, or within 0.5 % by the mean of both.
    """

    count: int
    equal: float
    as_good: float


@dataclass(frozen=True)
class Study:
    """What timings are worth, how true the stated uncertainty is, and where the regret is.

    Attributes
    ----------
    known, new : dict of str to tuple of Point
        For shapes that a model hasn't seen, and for a device without a model, by the shapes judged.
    calibration : Calibration
        Of predicted times, nothing timed.
    coverage : tuple of Coverage
    reliability : dict of float to (Reliability, Reliability)
        By margin: as stated, and when each family is corrected by the others.
    kinds : tuple of Kind
    worst : tuple of Worst
    stability : Stability or None
        None where nothing was swept twice.
    """

    known: Mapping[str, tuple[Point, ...]]
    new: Mapping[str, tuple[Point, ...]]
    calibration: Calibration
    coverage: tuple[Coverage, ...]
    reliability: Mapping[float, tuple[Reliability, Reliability]]
    kinds: tuple[Kind, ...]
    worst: tuple[Worst, ...]
    stability: Stability | None


@dataclass(frozen=True)
class Result:
    """Regrets for one device and quantization.

    Attributes
    ----------
    title, quant : str
    evaluations : tuple of Evaluation
        The model's first, then the baselines'.
    refused : tuple of str
        Labels of shapes that are in the training data and so aren't scored as unseen.
    study : Study or None
        Where it was asked for, and there are sweeps to replay.
    """

    title: str
    quant: str
    evaluations: tuple[Evaluation, ...]
    refused: tuple[str, ...] = ()
    study: Study | None = None


def held_out(
    timings: Timings,
    by: str,
    progress: Callable[[int, int], None] | None = None,
    *,
    quick: bool = True,
    seeds: int = SEEDS,
) -> Result:
    """Evaluate the model and the baselines on each family, or each shape, held out.

    Parameters
    ----------
    by : str
        ``"family"`` or ``"shape"``.
    progress : callable, optional
        Called with the steps done and the steps in all.
    quick : bool
        Without the study: no sweeps are replayed.
    seeds : int
        How often ways with chance in them are tried.
    """
    swept = swept_shapes(timings)
    scopes = {} if quick or not len(swept) else _scopes(timings, swept)
    tasks: list[tuple[str, Callable[[], Any]]] = [
        (name, partial(new_device, timings.select(np.isin(timings.shape, shapes)), way, seed, shares))
        for way in WAYS
        for name, (shapes, shares) in scopes.items()
        for seed in range(seeds)
    ]
    twice = _timed_twice(timings) if scopes else np.zeros((0, 3), dtype=np.int64)
    halves: list[Callable[[], Any]] = (
        [partial(_choices, rows, twice) for rows in _two_passes(timings, twice)] if len(twice) else []
    )
    steps = len(held_out_groups(timings, by)) + len(tasks) + len(halves)

    def step(done: int, _: int) -> None:
        if progress is not None:
            progress(done, steps)

    # Fits alone are as quick in threads.
    with workers() if scopes else nullcontext() as pool:
        found = hold_out_and_replay(
            timings,
            by,
            make=partial(held_out_model, start_of(timings.origin)),
            shares=SHARES if scopes else (),
            seeds=seeds,
            progress=step,
            pool=pool,
        )
        later = [pool.submit(task) for task in (*halves, *(task for _, task in tasks))] if pool else []
        for done, future in enumerate(as_completed(later), start=steps - len(later) + 1):
            future.result()
            step(done, steps)
    judge = found.judge
    title = f"{timings.origin.device} {timings.origin.quant}, held out by {by}"
    result = Result(title, timings.origin.quant, (judge.evaluate("model", found.ms), *baselines(judge, by)))
    if not scopes:
        return result
    results = [future.result() for future in later]
    new: dict[str, list[Point]] = {name: [] for name in scopes}
    for (name, _), points in zip(tasks, results[len(halves) :], strict=True):
        new[name] += points
    active = {share: found.at(share) for share in SHARES}
    study = Study(
        {name: _joined(found.points, shapes) for name, (shapes, _) in scopes.items()},
        {name: tuple(points) for name, points in new.items()},
        calibrate(judge, found.ms, found.log_sd),
        tuple(_coverage(active[share]) for share in _LOOKED_AT),
        {margin: _reliability([active[share] for share in _LOOKED_AT], i) for i, margin in enumerate(NEAR)},
        tuple(by_kind(judge, {share: active[share].evaluation for share in _LOOKED_AT})),
        tuple(_worst(judge, active)),
        _stability(judge, twice, *results[: len(halves)]) if halves else None,
    )
    return replace(result, study=study)


def _scopes(timings: Timings, swept: Ints) -> dict[str, tuple[Ints, list[float]]]:
    """Return the shapes that are judged together, by name, with the shares at which a new device is looked at."""
    first = [i for i in swept.tolist() if timings.passes[i].get(1, {}).get("source") == _FIRST_SWEEPS]
    scopes = {f"all {len(swept)} shapes": (swept, list(NEW_SHARES))}
    counts = _STUDIED.get(timings.origin.quant, ())
    if counts and 0 < len(first) < len(swept):
        shapes = np.array(first, dtype=np.int64)
        sweep = len(timings.select(np.isin(timings.shape, shapes)).averaged())
        shares = [n / sweep for n in counts if n < sweep] or list(NEW_SHARES)
        scopes[f"the {len(first)} shapes of the first sweeps"] = shapes, shares
    return scopes


def _joined(points: Sequence[Point], shapes: Ints) -> tuple[Point, ...]:
    """Join the points of some shapes by mark, way and seed."""
    groups: dict[tuple[float, int, int], list[Point]] = {}
    for p in points:
        if p.evaluation.keys[0, 0] in shapes:
            groups.setdefault((p.mark, WAYS.index(p.way), p.seed), []).append(p)
    return tuple(Point.joined(members) for _, members in sorted(groups.items(), key=lambda item: item[0]))


def _families(point: Point, shape: Ints) -> Any:
    return np.array([family_of(point.evaluation.labels[i]) for i in shape.tolist()])


def _coverage(point: Point) -> Coverage:
    """Count the errors inside 90 % intervals."""
    error = np.abs(point.error)
    by_others = cross_fitted(partial(_scaled, error), _families(point, point.error_shape))
    return Coverage(
        point.mark,
        float((error <= INTERVAL_SD).mean()),
        float((by_others <= INTERVAL_SD).mean()),
        float(point.expected.mean()),
        float(np.log(point.evaluation.regrets).mean()),
    )


def _scaled(error: Floats, rows: Any) -> Callable[[Any], Floats]:
    factor = interval_factor(error[rows])
    return lambda mine: error[mine] / factor


def _reliability(points: Sequence[Point], margin: int) -> tuple[Reliability, Reliability]:
    """Compare the stated probabilities of choices with what happened, as stated and corrected by other families."""
    stated = np.concatenate([p.within[:, margin] for p in points])
    hit = np.concatenate([p.evaluation.regrets <= 1.0 + NEAR[margin] for p in points])
    family = np.concatenate([_families(p, p.evaluation.keys[:, 0]) for p in points])

    def others(rows: Any) -> Callable[[Any], Floats]:
        found = correction(stated[rows], hit[rows])
        return lambda mine: corrected(stated[mine], found)

    return Reliability.of(stated, hit), Reliability.of(cross_fitted(others, family), hit)


def _worst(judge: Judge, points: Mapping[float, Point]) -> Iterator[Worst]:
    """Yield the choices with the highest regret when nothing is timed."""
    first, last = points[_LOOKED_AT[0]], points[_LOOKED_AT[-1]]
    e, table = first.evaluation, judge.timings.table
    after = {tuple(k): r for k, r in zip(last.evaluation.keys.tolist(), last.evaluation.regrets.tolist(), strict=True)}
    for i in np.argsort(-e.regrets, kind="stable")[:_WORST].tolist():
        shape, stage, bucket = e.keys[i].tolist()
        yield Worst(
            e.labels[shape],
            stage,
            bucket,
            float(e.regrets[i]),
            str(table.tactic(int(first.tactic[i]))),
            str(table.tactic(int(first.best[i]))),
            after.get((shape, stage, bucket), float("nan")),
        )


def _timed_twice(timings: Timings) -> Ints:
    """Return the (shape, stage, bucket) in which the first pass and a later one timed all that there is."""
    passes = np.unique(timings.pass_)
    whole = []
    for some in (passes[:1], passes[1:]):
        keys, bucket = timings.averaged(some.tolist()).buckets()
        tactics = np.array([len(timings.table.ids(stage)) for stage in (1, 2)])[keys[:, 1] - 1]
        whole.append({tuple(key) for key in keys[np.bincount(bucket, minlength=len(keys)) == tactics].tolist()})
    return np.array(sorted(whole[0] & whole[1]), dtype=np.int64).reshape(-1, 3)


def _two_passes(timings: Timings, twice: Ints) -> list[Timings]:
    """Return all timings but the later passes, and but the first pass, of what was timed twice."""
    again = set(map(tuple, twice.tolist()))
    columns = (timings.shape.tolist(), timings.stage.tolist(), timings.tokens.tolist())
    mine = np.array([key in again for key in zip(*columns, strict=True)], dtype=bool)
    first = timings.pass_ == timings.pass_.min()
    return [timings.select(~mine | first), timings.select(~mine | ~first)]


def _choices(timings: Timings, keys: Ints) -> list[int]:
    """Fit the timings and choose from them; return the tactic of each (shape, stage, bucket)."""
    model = held_out_model(start_of(timings.origin)).fit(timings)
    shapes = [timings.shapes[i] for i in np.unique(keys[:, 0]).tolist()]
    found = choose(model, shapes, np.unique(keys[:, 2]).tolist(), timings=timings)
    tactic = {(c.shape, c.stage, c.bucket): c.tactic_id for c in found}
    return [tactic[timings.shapes[i], stage, bucket] for i, stage, bucket in keys.tolist()]


def _stability(judge: Judge, keys: Ints, first: Sequence[int], later: Sequence[int]) -> Stability:
    """Compare the choices of two passes by the mean of both."""
    a, b = (
        judge.timings.ms[judge.rows_of(keys[:, 0], keys[:, 1], keys[:, 2], np.array(x, dtype=np.int64))]
        for x in (first, later)
    )
    equal = np.array(first) == np.array(later)
    return Stability(len(keys), float(equal.mean()), float((equal | (np.abs(np.log(a / b)) <= _AS_GOOD)).mean()))


def against_table(
    path: Path,
    device: Device,
    quant: str | None,
    flashinfer: str,
    models: list[Path],
    *,
    problems: list[Any],
) -> list[Result]:
    """Score fitted models on a table of shapes that they have never seen.

    Raises
    ------
    SynthError
        When the table can't be read, there is no model for it, or every shape is in the training data.
    """
    results = []
    refused_all: list[str] = []
    for timings in combine(read_flat(path, device.name, device.tactics_arch, flashinfer, problems=problems)):
        origin = timings.origin
        if quant not in (None, origin.quant):
            continue
        file = find_model(models, origin.device, origin.quant, flashinfer)
        if file is None:
            raise SynthError(f"no {origin.quant} model for {origin.device}, FlashInfer {flashinfer}; run `synth fit`")
        model = PerformanceModel.load(file, device=origin.device, quant=origin.quant, flashinfer=flashinfer)
        known = np.array([model.knows(s) for s in timings.shapes], dtype=bool)
        present = np.unique(timings.shape).tolist()
        refused = tuple(timings.labels[i] for i in present if known[i])
        unseen = timings.select(~known[timings.shape])
        if not len(unseen):
            refused_all.extend(refused)
            continue
        judge = Judge(unseen)
        own = judge.evaluate("model", model.predict(Cells.of(judge.timings)).ms)
        fallback = next(iter(baselines(judge)))
        title = f"{origin.device} {origin.quant}, unseen shapes of {path.name}"
        results.append(Result(title, origin.quant, (own, fallback), refused))
    if not results:
        what = (
            f"every shape ({', '.join(refused_all)}) is in the models' training data"
            if refused_all
            else (f"no {quant} rows" if quant else "no rows")
        )
        raise SynthError(f"{path}: {what}; nothing to score as unseen")
    # Shapes of a quantization that was refused whole are named with the first result.
    return [replace(results[0], refused=(*results[0].refused, *refused_all)), *results[1:]]


def report(results: list[Result]) -> dict[str, Any]:
    """Return results as plain values: bf16's on top (or the only quantization's), all of them under ``quants``."""
    quants: dict[str, Any] = {}
    for r in results:
        quants[r.quant if r.quant not in quants else r.title] = _plain(r)
    top = quants.get(_REFERENCE) or next(iter(quants.values()))
    return {**top, "quants": quants}


def plot(results: Sequence[Result], folder: Path) -> list[Path]:
    """Draw the learning curves and the reliability of results that have a study; return the files written.

    Raises
    ------
    MissingDependencyError
        Without matplotlib.
    """
    from synth.choosing.plotting import learning_curves, reliability

    files = []
    for result in results:
        if (study := result.study) is None:
            continue
        for what, curves in (("shape", study.known), ("device", study.new)):
            titled = {f"{result.quant}, new {what}: {name}": points for name, points in curves.items()}
            for suffix, seconds in (("", False), ("-seconds", True)):
                path = folder / f"learning-curve-{what}-{result.quant}{suffix}"
                files += learning_curves(titled, path, seconds=seconds)
        lines = {
            f"{result.quant}: within {margin:.0%} of the best": {"as stated": pair[0], "corrected": pair[1]}
            for margin, pair in study.reliability.items()
        }
        files += reliability(lines, folder / f"reliability-{result.quant}")
    return files


def _plain(result: Result) -> dict[str, Any]:
    own, *others = result.evaluations
    plain = {
        **own.as_dict(),
        "refused": list(result.refused),
        "baselines": {e.name: {k: v for k, v in e.as_dict().items() if k != "shapes"} for e in others},
    }
    return {**plain, "study": _plain_study(result.study)} if result.study else plain


def _plain_study(study: Study) -> dict[str, Any]:
    return {
        "known_device": {name: [_plain_point(p) for p in points] for name, points in study.known.items()},
        "new_device": {name: [_plain_point(p) for p in points] for name, points in study.new.items()},
        "prediction_coverage_90": study.calibration.coverage,
        "coverage_90": [asdict(c) for c in study.coverage],
        "reliability": {
            f"{margin:g}": {"stated": stated.as_dict(), "corrected": by_others.as_dict()}
            for margin, (stated, by_others) in study.reliability.items()
        },
        "kinds": [k.as_dict() for k in study.kinds],
        "worst": [asdict(w) for w in study.worst],
        "stability": asdict(study.stability) if study.stability else None,
    }


def _plain_point(point: Point) -> dict[str, Any]:
    counted = ("way", "seed", "mark", "timings", "sweep", "seconds", "sweep_seconds")
    regrets = {k: v for k, v in point.evaluation.as_dict().items() if k != "shapes"}
    return {**{name: getattr(point, name) for name in counted}, **regrets}
