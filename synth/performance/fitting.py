"""Fitting every table of measurements into a model file, with the regret measured on shapes held out."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from synth.catalog.paths import model_file
from synth.choosing.learning import HeldOut, hold_out_and_replay
from synth.errors import SynthError
from synth.performance.analytical import start_of
from synth.performance.calibration import learn
from synth.performance.evaluation import TIME_TREES, Calibration, Evaluation, baselines, calibrate, held_out_model
from synth.performance.model import PerformanceModel
from synth.performance.posterior import NEAR
from synth.timings.table import Timings


@dataclass(frozen=True)
class Fitted:
    """One fitted model.

    Attributes
    ----------
    model : PerformanceModel
    evaluations : tuple of Evaluation
        The model and the baselines, held out by family; empty when only one family was timed.
    calibration : Calibration or None
    """

    model: PerformanceModel
    evaluations: tuple[Evaluation, ...]
    calibration: Calibration | None


def hold_out(
    timings: Timings, progress: Callable[[int, int], None] | None = None, pool: Executor | None = None
) -> HeldOut:
    """Predict each model family by a model that has seen none of it; parameters are those of :func:`fit`.

    Raises
    ------
    SynthError
        When only one family was timed.
    """
    return hold_out_and_replay(
        timings,
        "family",
        make=partial(held_out_model, start_of(timings.origin)),
        ways=("active",),
        shares=(0.0,),
        progress=progress,
        pool=pool,
    )


def fit(timings: Timings, progress: Callable[[int, int], None] | None = None, pool: Executor | None = None) -> Fitted:
    """Fit one table, measure the regret with each model family held out, and calibrate the uncertainty.

    The models that hold a family out have as many trees as the one that is kept: it is their disagreement that is
    calibrated, and fewer trees disagree more.

    Parameters
    ----------
    progress : callable, optional
        Called with the fits done and the fits in all.
    pool : Executor, optional
        Where families are held out, see :func:`synth.choosing.learning.workers`; two threads if not given.
    """
    model = PerformanceModel(time_trees=TIME_TREES, start=start_of(timings.origin)).fit(timings)
    try:
        held_out = hold_out(timings, progress, pool)
    except SynthError:
        return Fitted(model, (), None)  # a single family: there is nothing to hold out
    calibration = calibrate(held_out.judge, held_out.ms, held_out.log_sd)
    own = held_out.judge.evaluate("model", held_out.ms)
    model.spread_ = float(f"{calibration.spread:.4g}")
    model.calibration_ = _calibrated(held_out)
    model.held_out_ = {
        "by": "family",
        "regret": {k: float(f"{v:.6g}") for k, v in own.all.as_dict().items()},
        "coverage_90": float(f"{calibration.coverage:.4g}"),
    }
    return Fitted(model, (own, *baselines(held_out.judge)), calibration)


def _calibrated(held_out: HeldOut) -> dict[str, float]:
    """Return what choices without timings teach about stated probabilities; nothing if no shape was swept.

    It holds after some timings just as well: the error of calibrated probabilities is then no larger.
    """
    if not held_out.points:
        return {}
    point = held_out.at(0.0)
    return learn(point.within, point.evaluation.regrets, NEAR)


def save(model: PerformanceModel, folder: Path) -> Path:
    """Write `model` where :func:`synth.catalog.paths.find_model` looks for it, and return the file."""
    origin = model.origin_
    if origin.simulated:
        folder = folder / "simulated"
    path = folder / model_file(origin.device, origin.quant, origin.flashinfer)
    model.save(path)
    return path
