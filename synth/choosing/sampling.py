"""What to time on a device: the models to decide by, or what is believed without any, the plan, and the strategy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from synth.catalog.devices import Device
from synth.catalog.paths import find_model, readable
from synth.choosing.anchors import with_anchors
from synth.choosing.picks import Strategy
from synth.choosing.plan import Layer, Plan, make_plan
from synth.choosing.rounds import decide_by_rounds
from synth.errors import SynthError
from synth.performance.analytical import analytical_model
from synth.performance.model import PerformanceModel, predictor
from synth.timings.folders import load


@dataclass(frozen=True)
class Sample:
    """A plan, and what its order is decided by.

    Attributes
    ----------
    plan : Plan
    models, starts : mapping of str to PerformanceModel
        By quantization: fitted models, and what is believed where there is none; see :func:`decide_by_rounds`.
    turns : sequence of sequences of int
        See :class:`synth.choosing.rounds.NewDevice`.
    """

    plan: Plan
    models: Mapping[str, PerformanceModel]
    starts: Mapping[str, PerformanceModel]
    turns: Sequence[Sequence[int]]

    def strategy(self, folders: Sequence[Path], at_once: int = 1) -> Strategy | None:
        """Return what decides round by round; None where the rounds have nothing to begin with, or there are passes.

        Parameters
        ----------
        folders : sequence of Path
            Measurements that hold what was timed before.
        at_once : int
            GPUs that share the work.
        """
        plan = self.plan
        if len(plan.passes) > 1 or not {one.quant for one in plan.layers} <= {*self.models, *self.starts}:
            return None
        earlier = load(folders, plan.device, None, plan.flashinfer, problems=[]) if folders else []
        return decide_by_rounds(plan, self.models, earlier, starts=self.starts, turns=self.turns, at_once=at_once)


def make_sample(
    device: Device,
    layers: Sequence[Layer],
    flashinfer: str,
    own_models: Path | None,
    *,
    max_tokens: int,
    anchored: bool = False,
    **options: Any,
) -> Sample:
    """Plan what to time of some layers, by the models that there are.

    Parameters
    ----------
    own_models : Path or None
        The user's folder of models.
    max_tokens : int
        Largest bucket.
    anchored : bool
        Add layers that teach what others are like, in the quantizations that have no model.
    **options
        As for :func:`synth.choosing.plan.make_plan`.
    """
    quants = [one.quant for one in layers]
    models = known_models(device.name, quants, flashinfer, own_models)
    starts = {}
    for quant in dict.fromkeys(q for q in quants if q not in models):
        # Too little may be public of the device.
        with contextlib.suppress(SynthError):
            starts[quant] = analytical_model(device, quant, flashinfer)
    turns: list[list[int]] = []
    if anchored:
        layers, turns = with_anchors(layers, list(starts), max_tokens)
    predict = predictor({**starts, **models})
    plan = make_plan(
        layers, device.name, device.tactics_arch, flashinfer, max_tokens=max_tokens, predict=predict, **options
    )
    return Sample(plan, models, starts, turns)


def known_models(device: str, quants: Iterable[str], flashinfer: str, own: Path | None) -> dict[str, PerformanceModel]:
    """Return the fitted models of a device, by quantization, from the user's folder or the shipped one."""
    folders = readable("models", own)
    paths = {quant: find_model(folders, device, quant, flashinfer) for quant in dict.fromkeys(quants)}
    return {
        quant: PerformanceModel.load(path, device=device, quant=quant, flashinfer=flashinfer)
        for quant, path in paths.items()
        if path is not None
    }
