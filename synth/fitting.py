"""Fitting every table of measurements into a model file, with the regret measured on shapes held out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from synth.errors import SynthError
from synth.measurements import Timings
from synth.paths import model_file
from synth.performance.evaluation import Calibration, Evaluation, baselines, calibrate, cross_validate
from synth.performance.model import PerformanceModel


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


def fit(timings: Timings, progress: Callable[[int, int], None] | None = None) -> Fitted:
    """Fit one table, measure the regret with each model family held out, and calibrate the uncertainty.

    Parameters
    ----------
    progress : callable, optional
        Called with the fits done and the fits in all.
    """
    model = PerformanceModel().fit(timings)
    try:
        judge, ms, log_sd = cross_validate(timings, "family", _quick_model, progress)
    except SynthError:
        return Fitted(model, (), None)  # a single family: there is nothing to hold out
    calibration = calibrate(judge, ms, log_sd)
    own = judge.evaluate("model", ms)
    model.spread_ = float(f"{calibration.spread:.4g}")
    model.held_out_ = {
        "by": "family",
        "regret": {k: float(f"{v:.6g}") for k, v in own.all.as_dict().items()},
        "coverage_90": float(f"{calibration.coverage:.4g}"),
    }
    return Fitted(model, (own, *baselines(judge)), calibration)


def _quick_model() -> PerformanceModel:
    """Return a model with a third of the trees: fitting stays quick, `synth evaluate` holds out the whole model."""
    return PerformanceModel(choice_trees=20, time_trees=4, jobs=1)


def save(model: PerformanceModel, folder: Path) -> Path:
    """Write `model` where :func:`synth.paths.find_model` looks for it, and return the file."""
    origin = model.origin_
    if origin.simulated:
        folder = folder / "simulated"
    path = folder / model_file(origin.device, origin.quant, origin.flashinfer)
    model.save(path)
    return path
