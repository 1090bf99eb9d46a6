"""Regret on shapes that a model has not seen: groups of the timed shapes held out in turn, or a table of other shapes.

What `synth fit` states of a model, what `synth evaluate` prints and what `synth report --held-out` shows is from here.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from threadpoolctl import threadpool_limits

from synth.catalog.devices import Device
from synth.catalog.paths import find_model
from synth.catalog.schemes import STAGES
from synth.errors import SynthError
from synth.performance.analytical import start_of
from synth.performance.calibration import Reliability, reliability
from synth.performance.evaluation import Evaluation, Judge, baselines, held_out_groups
from synth.performance.geometry import Floats, Ints
from synth.performance.model import Cells, PerformanceModel, Prediction, swept_buckets
from synth.performance.posterior import NEAR, update
from synth.timings.flat import read_flat
from synth.timings.folders import combine
from synth.timings.table import Timings

T = TypeVar("T")

#: Trees for times, in the shipped models and while something is held out alike: fewer of them disagree more, and what
#: is learnt about their disagreement holds for no other number.
TIME_TREES = 8
#: Fits that run at once in threads.
_THREADS = 2
#: Most processes at once.
_PROCESSES = 8
#: The quantization whose figures stand at the top of the JSON when there are several.
_REFERENCE = "bf16"


# --- fitting without a group -----------------------------------------------------------------------------------------


def held_out_model(start: PerformanceModel | None = None) -> PerformanceModel:
    """Return the model that is fitted when something is held out: the shipped one, in one of two threads.

    Parameters
    ----------
    start : PerformanceModel, optional
        See :class:`PerformanceModel`.
    """
    return PerformanceModel(time_trees=TIME_TREES, jobs=1, start=start)


@contextmanager
def workers() -> Iterator[Executor]:
    """Start a process for each core, of one thread each: fitting has threads, but much of the rest is Python's work."""
    count = min(os.cpu_count() or 1, _PROCESSES)
    pool = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), threadpool_limits, (1,))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def each_held_out(
    timings: Timings,
    groups: Sequence[Ints],
    use: Callable[[PerformanceModel, Ints], T],
    make: Callable[[], PerformanceModel],
    progress: Callable[[int, int], None] | None = None,
    pool: Executor | None = None,
) -> list[T]:
    """Fit a model without each group of shapes, and use it on that group.

    Parameters
    ----------
    groups : sequence of ndarray of int64
        See :func:`synth.performance.evaluation.held_out_groups`.
    use : callable
        Called with the model and the group; what it returns is returned, by group.
    make : callable
        Returns a model to fit.
    progress : callable, optional
        Called with the groups done and the groups in all.
    pool : Executor, optional
        Where the fits run; two threads if not given. For one of processes the callables must be picklable.
    """
    with nullcontext(pool) if pool is not None else ThreadPoolExecutor(_THREADS) as executor:
        futures = [executor.submit(_fit_and_use, timings, group, use, make) for group in groups]
        for done, future in enumerate(as_completed(futures), start=1):
            future.result()
            if progress is not None:
                progress(done, len(groups))
    return [future.result() for future in futures]


def _fit_and_use(
    timings: Timings, group: Ints, use: Callable[[PerformanceModel, Ints], T], make: Callable[[], PerformanceModel]
) -> T:
    return use(make().fit(timings.select(~np.isin(timings.shape, group))), group)


# --- what models say of what they have not seen ----------------------------------------------------------------------


@dataclass(frozen=True)
class Stated:
    """Choices of shapes held out, as `synth emit` makes them without timings, judged.

    Attributes
    ----------
    evaluation : Evaluation
    within : ndarray of float64, shape (choices, margins)
        Stated probability that a choice's regret is within each of ``NEAR``, uncorrected.
    """

    evaluation: Evaluation
    within: Floats


@dataclass(frozen=True)
class HeldOut:
    """What models said of the shapes that they were fitted without.

    Attributes
    ----------
    judge : Judge
    ms, log_sd : ndarray of float64, shape (rows of ``judge.timings``,)
        Predictions.
    stated : Stated or None
        Of the shapes that were swept; None where it wasn't asked for, or none was.
    """

    judge: Judge
    ms: Floats
    log_sd: Floats
    stated: Stated | None = None

    def evaluations(self, by: str = "family") -> tuple[Evaluation, ...]:
        """Judge the choices of the least predicted time, and those of the baselines."""
        return self.judge.evaluate("model", self.ms), *baselines(self.judge, by)

    def reliability(self) -> dict[float, tuple[Reliability, Reliability]]:
        """Return how true stated probabilities are, by margin: as stated, and each family corrected by the others."""
        if self.stated is None:
            return {}
        judged, families = self.stated.evaluation, self.stated.evaluation.families()
        return {
            margin: reliability(self.stated.within[:, i], judged.regrets <= 1.0 + margin, families)
            for i, margin in enumerate(NEAR)
        }


def hold_out(
    timings: Timings,
    progress: Callable[[int, int], None] | None = None,
    pool: Executor | None = None,
    *,
    by: str = "family",
    make: Callable[[], PerformanceModel] | None = None,
    stated: bool = True,
) -> HeldOut:
    """Predict each group of shapes by a model that has seen none of it.

    Parameters
    ----------
    progress, pool
        See :func:`each_held_out`.
    by : str
        ``"family"`` or ``"shape"``, see :func:`synth.performance.evaluation.held_out_groups`.
    make : callable, optional
        Returns a model to fit; the one that `synth fit` keeps if not given.
    stated : bool
        Also choose for the swept shapes as `synth emit` does, with probabilities.

    Raises
    ------
    SynthError
        When there is one group only.
    """
    judge = Judge(timings)
    groups = held_out_groups(timings, by)
    cells = Cells.of(judge.timings)
    swept = swept_shapes(judge) if stated else np.zeros(0, dtype=np.int64)
    make = make or partial(held_out_model, start_of(timings.origin))
    folds = each_held_out(timings, groups, partial(_predict_and_choose, cells, swept), make, progress, pool)
    ms, log_sd = assembled(cells, groups, [prediction for prediction, _, _ in folds])
    chosen = [cell for _, cells, _ in folds for cell in cells]
    if not chosen:
        return HeldOut(judge, ms, log_sd)
    rows = judge.rows_of(*np.array(chosen, dtype=np.int64).T)
    within = np.concatenate([probability for *_, found in folds for probability in found])
    return HeldOut(judge, ms, log_sd, Stated(judge.evaluate_rows("model", rows), within))


def _predict_and_choose(
    cells: Cells, swept: Ints, model: PerformanceModel, group: Ints
) -> tuple[Prediction, list[tuple[int, int, int, int]], list[Floats]]:
    """Predict a group; of its swept shapes return the cells chosen as well, and how sure they are."""
    cells = cells.select(np.isin(cells.shape, group))
    prediction = model.predict(cells)
    chosen, within = [], []
    for shape, stage in itertools.product(np.intersect1d(group, swept).tolist(), STAGES):
        at = np.flatnonzero((cells.shape == shape) & (cells.stage == stage))
        if len(at):
            columns = (cells.tokens[at], cells.tactic[at], prediction.ms[at], prediction.choice_sd[at])
            posterior = update(*columns, model.columns, None)
            rows = posterior.chosen()
            of = zip(posterior.tokens[rows].tolist(), posterior.tactic[rows].tolist(), strict=True)
            chosen += [(shape, stage, tokens, tactic) for tokens, tactic in of]
            within.append(posterior.outlook(rows).within)
    return prediction, chosen, within


def assembled(cells: Cells, groups: Sequence[Ints], predictions: Sequence[Prediction]) -> tuple[Floats, Floats]:
    """Put predictions of groups of shapes together: ms and log_sd, shape (cells,)."""
    ms, log_sd = np.empty(len(cells)), np.empty(len(cells))
    for group, found in zip(groups, predictions, strict=True):
        out = np.isin(cells.shape, group)
        ms[out], log_sd[out] = found.ms, found.log_sd
    return ms, log_sd


def swept_shapes(judge: Judge) -> Ints:
    """Return the shapes whose sweep is whole: nearly every tactic was timed in each of their buckets."""
    partly = judge.keys[~swept_buckets(judge.timings, judge.keys, judge.bucket), 0]
    return np.setdiff1d(judge.keys[:, 0], partly)


# --- what `synth evaluate` prints ------------------------------------------------------------------------------------


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
    """

    title: str
    quant: str
    evaluations: tuple[Evaluation, ...]
    refused: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""
        own, *others = self.evaluations
        return {
            **own.as_dict(),
            "refused": list(self.refused),
            "baselines": {e.name: {k: v for k, v in e.as_dict().items() if k != "shapes"} for e in others},
        }


def against_itself(timings: Timings, by: str, progress: Callable[[int, int], None] | None = None) -> Result:
    """Judge the model and the baselines on each family, or each shape, held out; parameters as :func:`hold_out`'s."""
    found = hold_out(timings, progress, by=by, stated=False)
    origin = timings.origin
    return Result(f"{origin.device} {origin.quant}, held out by {by}", origin.quant, found.evaluations(by))


def against_table(
    path: Path, device: Device, quant: str | None, flashinfer: str, models: list[Path], problems: list[Any]
) -> list[Result]:
    """Score fitted models on a table of shapes that they have never seen.

    Raises
    ------
    SynthError
        When the table can't be read, there is no model for it, or every shape is in the training data.
    """
    tables = combine(read_flat(path, device.name, device.tactics_arch, flashinfer, problems=problems))
    results = [_against_model(t, models, path.name) for t in tables if quant in (None, t.origin.quant)]
    scored = [r for r in results if r.evaluations]
    # Shapes of a quantization that was refused whole are named with the first result.
    refused = tuple(label for r in results if not r.evaluations for label in r.refused)
    if scored:
        return [replace(scored[0], refused=(*scored[0].refused, *refused)), *scored[1:]]
    known = f"every shape ({', '.join(refused)}) is in the models' training data"
    what = known if refused else f"no {quant} rows" if quant else "no rows"
    raise SynthError(f"{path}: {what}; nothing to score as unseen")


def _against_model(timings: Timings, models: list[Path], name: str) -> Result:
    """Score the model of some timings on those of their shapes that it hasn't seen; without any there is no score."""
    device, quant, flashinfer = timings.origin.device, timings.origin.quant, timings.origin.flashinfer
    file = find_model(models, device, quant, flashinfer)
    if file is None:
        raise SynthError(f"no {quant} model for {device}, FlashInfer {flashinfer}; run `synth fit`")
    model = PerformanceModel.load(file, device=device, quant=quant, flashinfer=flashinfer)
    known = np.array([model.knows(s) for s in timings.shapes], dtype=bool)
    refused = tuple(timings.labels[i] for i in np.unique(timings.shape).tolist() if known[i])
    unseen = timings.select(~known[timings.shape])
    evaluations: tuple[Evaluation, ...] = ()
    if len(unseen):
        judge = Judge(unseen)
        own = judge.evaluate("model", model.predict(Cells.of(judge.timings)).ms)
        evaluations = own, next(iter(baselines(judge)))
    return Result(f"{device} {quant}, unseen shapes of {name}", quant, evaluations, refused)


def report(results: Sequence[Result]) -> dict[str, Any]:
    """Return results as plain values: bf16's on top (or the only quantization's), all of them under ``quants``."""
    quants: dict[str, Any] = {}
    for r in results:
        quants[r.quant if r.quant not in quants else r.title] = r.as_dict()
    top = quants.get(_REFERENCE) or next(iter(quants.values()))
    return {**top, "quants": quants}
