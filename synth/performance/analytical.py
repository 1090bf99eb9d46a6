"""What is believed of a device without timings: constants of its own, and the structure of a device with timings.

The constants of the analytic model are fitted to public whole-layer measurements (``analytical.toml``; made by
``benchmarks/constants.py``). The structure, what the forests of the shipped NVIDIA H200 models learned of tiles, waves
and fills, has no units and is carried over: from the quantization whose kernels are of the same kind.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources

from synth.catalog.devices import Device, get_device
from synth.catalog.paths import find_model, shipped
from synth.catalog.schemes import STAGES
from synth.errors import SynthError
from synth.flashinfer.kernels import Kernel, load_kernels
from synth.flashinfer.legality import smem_block_bytes
from synth.flashinfer.tactics import DEFAULT_FLASHINFER, Tactic, TacticTable, load_table
from synth.performance.model import PerformanceModel
from synth.performance.roofline import DEFAULTS, Roofline
from synth.timings.origin import Origin

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

#: The device whose structure is carried over.
STRUCTURE = "NVIDIA H200"


@dataclass(frozen=True)
class Constants:
    """The analytic model's constants for the kernels of one architecture under one quantization.

    Attributes
    ----------
    arch, quant : str
    structure : str
        Quantization of ``STRUCTURE`` whose forests correct it: those of the same kind of kernel.
    roofline : Roofline
    device : str
        On which the layers were measured.
    source : str
        Of what they were fitted to.
    """

    arch: str
    quant: str
    structure: str
    roofline: Roofline
    device: str
    source: str


@functools.cache
def load_constants() -> tuple[Constants, ...]:
    """Return the constants of ``analytical.toml``."""
    text = (resources.files("synth.performance") / "analytical.toml").read_text(encoding="utf-8")
    return tuple(
        Constants(
            row["arch"],
            row["quant"],
            row["structure"],
            Roofline(tuple(float(row["roofline"][name]) for name in DEFAULTS)),
            row["device"],
            row["source"],
        )
        for row in tomllib.loads(text)["constants"]
    )


def constants_for(device: Device, quant: str) -> Constants | None:
    """Return the constants of a device's architecture under a quantization."""
    return next((c for c in load_constants() if (c.arch, c.quant) == (device.tactics_arch, quant)), None)


def analytical_model(device: Device, quant: str, flashinfer: str = DEFAULT_FLASHINFER) -> PerformanceModel:
    """Return what is believed of a device without timings.

    Constants are those of its architecture and quantization. Without any, a device takes over the whole model of
    ``STRUCTURE`` where that has the same architecture, and else the analytic model with its defaults.

    Raises
    ------
    SynthError
        When no tactics are known for the device, or a number that the model needs is not public.
    """
    table = load_table(device.tactics_arch, quant, flashinfer)
    origin = Origin.make(device.name, device.tactics_arch, quant, flashinfer)
    found = constants_for(device, quant)
    if found is not None:
        return PerformanceModel.analytic(origin, table, found.roofline, structure(found.structure))
    if device.tactics_arch == get_device(STRUCTURE).tactics_arch and (same := structure(quant)) is not None:
        return PerformanceModel.analytic(origin, table, same.roofline_, same)
    return PerformanceModel.analytic(origin, table)


def suspects(table: TacticTable) -> frozenset[tuple[int, Tactic]]:
    """Return stages and tactics that an analytical model must not choose: those whose compiled kernel spills.

    The analytic model doesn't know that registers ran out, and one such kernel was measured to be 18 times too slow,
    see :attr:`synth.flashinfer.kernels.Kernel.spills`. A timing decides where there is one.

    Of a FlashInfer version that wasn't compiled the same tactics are suspected as of the default one, and those that
    need more shared memory there than a block can have, which :mod:`synth.flashinfer.legality` doesn't know of it.
    """
    found = set()
    smem = smem_block_bytes(None, table.arch)
    for stage in STAGES:
        kernels, borrowed = _kernels(table, gated_gemm1=stage == 1)
        for _, t in table.items(stage):
            kernel = kernels.get(t)
            if kernel is not None and (kernel.spills or (borrowed and smem is not None and kernel.smem > smem)):
                found.add((stage, t))
    return frozenset(found)


def _kernels(table: TacticTable, *, gated_gemm1: bool) -> tuple[Mapping[Tactic, Kernel], bool]:
    """Return the compiled kernels of a table's version, or of the default one where it wasn't compiled, and which."""
    for version in dict.fromkeys([table.flashinfer, DEFAULT_FLASHINFER]):
        with contextlib.suppress(SynthError):
            return load_kernels(table.arch, table.quant, version, gated_gemm1=gated_gemm1), version != table.flashinfer
    return {}, True


def start_of(origin: Origin) -> PerformanceModel | None:
    """Return what timings of an origin correct; None for those of ``STRUCTURE``, and where too little is public."""
    if origin.device == STRUCTURE:
        return None
    try:
        return analytical_model(get_device(origin.device), origin.quant, origin.flashinfer)
    except SynthError:
        return None


@functools.cache
def structure(quant: str) -> PerformanceModel | None:
    """Return the shipped model of ``STRUCTURE`` under a quantization; None where there is none."""
    path = find_model([shipped("models")], STRUCTURE, quant, DEFAULT_FLASHINFER)
    return PerformanceModel.load(path) if path else None
