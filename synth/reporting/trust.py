"""How good the choices are held to be: what a model's file says of shapes held out, or the same computed anew.

"Held out" means that each model family is predicted by a model that has seen none of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

import numpy as np

from synth.catalog.paths import find_model
from synth.performance.calibration import Reliability
from synth.performance.evaluation import Calibration, Evaluation, calibrate
from synth.performance.model import PerformanceModel
from synth.reporting.facts import Facts
from synth.reporting.texts import foreign
from synth.timings.origin import Origin
from synth.timings.table import Timings, digest

#: Choices held out that are listed as the worst.
_WORST = 10


@dataclass(frozen=True)
class Model:
    """What the file of a quantization's model says.

    Attributes
    ----------
    named : bool
        Its fingerprint is the one that the sidecar names.
    origin : Origin
        What the timings that it was fitted on have in common.
    shapes : int
        Shapes of those.
    digest : str
        Of those.
    regret : dict of str to float
        ``geomean``, ``p95``, ``p99``, ``max`` and ``count`` on shapes held out; empty if not measured.
    coverage : float or None
        Share of errors inside 90 % intervals on shapes held out.
    """

    named: bool
    origin: Origin
    shapes: int
    digest: str
    regret: Mapping[str, float]
    coverage: float | None


@dataclass(frozen=True)
class Computed:
    """Held-out figures computed from the timings.

    Attributes
    ----------
    evaluations : tuple of Evaluation
        The model's first, then those of simple ways to choose.
    calibration : Calibration
    reliability : dict of float to (Reliability, Reliability)
        By margin: as stated, and corrected by the other families. Empty where no shape was swept.
    worst : list of (str, int, int, float, str, str)
        The choices that cost most: label of the shape, stage, bucket, regret, chosen and best tactic.
    fitted_on : bool
        The timings are those that the model of the sidecar was fitted on.
    """

    evaluations: tuple[Evaluation, ...]
    calibration: Calibration
    reliability: Mapping[float, tuple[Reliability, Reliability]]
    worst: Sequence[tuple[str, int, int, float, str, str]]
    fitted_on: bool


def models(facts: Facts, folders: Sequence[Path]) -> dict[str, Model]:
    """Return what the models of the config's quantizations say, by quantization, as far as there are any.

    The one whose fingerprint the sidecar names is taken from whichever folder has it, else the first.

    Raises
    ------
    SynthError
        When a model is damaged.
    """
    found: dict[str, Model] = {}
    if facts.device is None or not facts.flashinfer:
        return found
    for quant in facts.quants:
        origin = facts.origins.get(quant)
        for folder in folders:
            path = find_model([folder], facts.device.name, quant, facts.flashinfer)
            if path is None:
                continue
            model = PerformanceModel.load(path, device=facts.device.name, quant=quant, flashinfer=facts.flashinfer)
            named = origin is not None and origin.fingerprint == model.fingerprint()
            if named or quant not in found:
                found[quant] = _model(model, named)
            if named:
                break
    return found


def _model(model: PerformanceModel, named: bool) -> Model:
    said = model.held_out_.get("regret")
    values = {k: float(v) for k, v in said.items() if _is_number(v)} if isinstance(said, dict) else {}
    regret = values if {"geomean", "p95", "p99", "max", "count"} <= values.keys() else {}
    said = model.held_out_.get("coverage_90")
    coverage = float(said) if _is_number(said) else None
    return Model(named, model.origin_, len(model.shapes_), model.digest_, regret, coverage)


def compute(
    timings: Timings,
    model: Model | None,
    progress: Callable[[int, int], None] | None = None,
    pool: Executor | None = None,
) -> Computed:
    """Hold each family out of the timings, as `synth fit` does; about half a minute on two cores.

    Raises
    ------
    SynthError
        When only one family was timed.
    """
    from synth.performance.held_out import hold_out

    found = hold_out(timings, progress, pool)
    judge = found.judge
    evaluations = found.evaluations()
    own = evaluations[0]
    chosen = judge.rows(found.ms)
    best = judge.rows(judge.timings.ms)
    table = judge.timings.table
    worst = []
    for i in np.argsort(-own.regrets, kind="stable")[:_WORST].tolist():
        shape, stage, bucket = own.keys[i].tolist()
        mine, fastest = (str(table.tactic(int(judge.timings.tactic[rows[i]]))) for rows in (chosen, best))
        worst.append((foreign(own.labels[shape], 60), stage, bucket, float(own.regrets[i]), mine, fastest))
    return Computed(
        evaluations,
        calibrate(judge, found.ms, found.log_sd),
        found.reliability(),
        worst,
        model is not None and model.named and model.digest == digest(timings),
    )


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e15
