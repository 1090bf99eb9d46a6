"""What the choices of one quantization are made from: a model, timings, and what is denied."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from synth.catalog.devices import Device
from synth.catalog.paths import find_model, readable
from synth.errors import SynthError
from synth.flashinfer.tactics import DEFAULT_FLASHINFER
from synth.performance.analytical import analytical_model
from synth.performance.model import PerformanceModel
from synth.timings.folders import load
from synth.timings.records import DENIED, Denial
from synth.timings.table import Timings


@dataclass(frozen=True)
class Source:
    """What the choices of one quantization are made from.

    Attributes
    ----------
    model : PerformanceModel
    timings : Timings or None
        Of the model's device and quantization.
    name : str
        What the sidecar calls it.
    denied : tuple of Denial
        Tactics that are never chosen.
    fitted_here : bool
        The model was fitted for this purpose and is kept nowhere.
    """

    model: PerformanceModel
    timings: Timings | None = None
    name: str = ""
    denied: tuple[Denial, ...] = ()
    fitted_here: bool = False


class NoSourceError(SynthError):
    """Nothing is known to choose by.

    Attributes
    ----------
    can_be_timed : bool
        Timings would help: the device's numbers are public.
    """

    def __init__(self, message: str, *, can_be_timed: bool) -> None:
        super().__init__(message)
        self.can_be_timed = can_be_timed


def source_for(
    device: Device,
    quant: str,
    flashinfer: str = DEFAULT_FLASHINFER,
    *,
    measured: bool = False,
    measurements: Path | None = None,
    models: Path | None = None,
    problems: list[Any],
) -> Source:
    """Return what to choose by: the fitted model or else the analytic one, corrected by what timings there are.

    Parameters
    ----------
    measured : bool
        Only where there are timings, or a model that was fitted to some.
    measurements, models : Path, optional
        Folders that are read beside the shipped ones.
    problems : list
        Gets what is wrong with files of timings, see :func:`synth.timings.measurements.load`.

    Raises
    ------
    NoSourceError
        When there is nothing.
    SynthError
        When a model file can't be read.
    """
    folders = readable("measurements", measurements)
    tables = load(folders, device.name, quant, flashinfer, problems=problems)
    path = find_model(readable("models", models), device.name, quant, flashinfer)
    if path is not None:
        model = PerformanceModel.load(path, device=device.name, quant=quant, flashinfer=flashinfer)
        name = f"model fitted on {len(model.shapes_)} shapes"
    else:
        try:
            analytical = analytical_source(device, quant, flashinfer)
        except SynthError:
            # There are tactics, or nobody would have asked; and without these numbers no model can be fitted either.
            what = "its SMs, L2, memory bandwidth or peak aren't public"
            raise NoSourceError(what, can_be_timed=False) from None
        model, name = analytical.model, analytical.name
    timings = next((t for t in tables if t.origin == model.origin_), None)
    if path is None and measured and timings is None:
        raise NoSourceError(f"no timings for FlashInfer {flashinfer}", can_be_timed=True)
    fitted_here = path is None and timings is not None
    if path is None and timings is not None:
        model, name = PerformanceModel(start=model).fit(timings), f"{name}, and {len(timings)} timings"
    return Source(model, timings, name, DENIED.load(folders, model.origin_), fitted_here)


def analytical_source(device: Device, quant: str, flashinfer: str = DEFAULT_FLASHINFER) -> Source:
    """Return the source of a device without timings: the analytic model.

    Raises
    ------
    SynthError
        When no tactics are known for the device, or a number that the model needs is not public.
    """
    model = analytical_model(device, quant, flashinfer)
    borrowed = f", with the structure of {model.borrowed_}" if model.borrowed_ else ""
    return Source(model, name=f"analytic model{borrowed}")
