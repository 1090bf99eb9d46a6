"""Fitting every table of measurements into a model file, with the regret measured on shapes held out."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

from synth.catalog.paths import model_file
from synth.errors import SynthError
from synth.performance.analytical import start_of
from synth.performance.calibration import learn
from synth.performance.evaluation import Calibration, Evaluation, calibrate
from synth.performance.held_out import TIME_TREES, HeldOut, hold_out
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


def fit(timings: Timings, progress: Callable[[int, int], None] | None = None, pool: Executor | None = None) -> Fitted:
    """Fit one table, measure the regret with each model family held out, and calibrate the uncertainty.

    The models that hold a family out have as many trees as the one that is kept: it is their disagreement that is
    calibrated, and fewer trees disagree more.

    Parameters
    ----------
    progress : callable, optional
        Called with the fits done and the fits in all.
    pool : Executor, optional
        Where families are held out, see :func:`synth.performance.held_out.workers`; two threads if not given.
    """
    model = PerformanceModel(time_trees=TIME_TREES, start=start_of(timings.origin)).fit(timings)
    try:
        held_out = hold_out(timings, progress, pool)
    except SynthError:
        return Fitted(model, (), None)  # a single family: there is nothing to hold out
    calibration = calibrate(held_out.judge, held_out.ms, held_out.log_sd)
    evaluations = held_out.evaluations()
    model.spread_ = float(f"{calibration.spread:.4g}")
    model.calibration_ = _calibrated(held_out)
    model.held_out_ = {
        "by": "family",
        "regret": {k: float(f"{v:.6g}") for k, v in evaluations[0].all.as_dict().items()},
        "coverage_90": float(f"{calibration.coverage:.4g}"),
    }
    return Fitted(model, evaluations, calibration)


def _calibrated(held_out: HeldOut) -> dict[str, float]:
    """Return what choices without timings teach about stated probabilities; nothing if no shape was swept.

    It holds after some timings just as well: the error of calibrated probabilities is then no larger.
    """
    if held_out.stated is None:
        return {}
    return learn(held_out.stated.within, held_out.stated.evaluation.regrets, NEAR)


def save(model: PerformanceModel, folder: Path) -> Path:
    """Write `model` where :func:`synth.catalog.paths.find_model` looks for it, and return the file."""
    origin = model.origin_
    if origin.simulated:
        folder = folder / "simulated"
    path = folder / model_file(origin.device, origin.quant, origin.flashinfer)
    model.save(path)
    return path
