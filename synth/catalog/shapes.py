"""MoE layers: the shape on one rank, and what FlashInfer's CUTLASS MoE asks of it."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace

from synth.catalog.padding import ENGINE_NAMES, engines_that_pad, find_padding, round_up
from synth.catalog.schemes import QUANTS
from synth.errors import SynthError, UnsupportedShapeError


@dataclass(frozen=True, order=True)
class MoEShape:
    """An MoE layer on one rank.

    Attributes
    ----------
    hidden : int
        Hidden size: gemm1's K and gemm2's N.
    inter : int
        Intermediate size on this rank, after the tensor-parallel split: gemm2's K.
    experts : int
        Experts on this rank, after the expert-parallel split.
    top_k : int
        Experts that each token is routed to, over all ranks.
    ep_size : int
        Expert-parallel ranks; the layer has ``experts * ep_size`` experts in all.
    gated : bool
        The activation has a gate, so gemm1's N is ``2 * inter``.
    """

    hidden: int
    inter: int
    experts: int
    top_k: int
    ep_size: int = 1
    gated: bool = True

    def __post_init__(self) -> None:
        for name in ("hidden", "inter", "experts", "top_k", "ep_size"):
            if getattr(self, name) < 1:
                raise SynthError(f"a shape's {name} must be at least 1, not {getattr(self, name)}")
        if self.top_k > self.experts * self.ep_size:
            raise SynthError(f"top_k {self.top_k} is more than the layer's {self.experts * self.ep_size} experts")

    def __str__(self) -> str:
        text = f"h{self.hidden}-i{self.inter}-e{self.experts}-k{self.top_k}"
        if self.ep_size > 1:
            text += f"-ep{self.ep_size}"
        return text if self.gated else text + "-ungated"

    @classmethod
    def parse(cls, text: str) -> MoEShape:
        """Read the text form that ``str`` writes, for example ``h2048-i1024-e64-k8``.

        Raises
        ------
        SynthError
            When `text` is not a shape's text form.
        """
        m = re.fullmatch(r"h(\d+)-i(\d+)-e(\d+)-k(\d+)(?:-ep(\d+))?(-ungated)?", text)
        if m is None:
            raise SynthError(f"{text!r} is not a shape; expected, for example, h2048-i1024-e64-k8 or …-ep8-ungated")
        h, i, e, k, ep = (int(x) if x else 1 for x in m.groups()[:5])
        return cls(h, i, e, k, ep, m[6] is None)

    def gemm_nk(self, stage: int) -> tuple[int, int]:
        """Return N (weight columns) and K of one stage's GEMM."""
        if stage == 1:
            return (2 if self.gated else 1) * self.inter, self.hidden
        return self.hidden, self.inter

    @property
    def expert_probability(self) -> float:
        """Probability that a token goes to one given expert, under uniform random routing."""
        return self.top_k / (self.experts * self.ep_size)


#: Activations between the two GEMMs, and whether they have a gate.
ACTIVATIONS = {"swiglu": True, "geglu": True, "geglu_tanh": True, "situ": True, "relu2": False}


@dataclass(frozen=True)
class Deployment:
    """A model's MoE layer on one rank, in one quantization.

    Attributes
    ----------
    model : str
        The model's name.
    tp, ep : int
        Tensor-parallel and expert-parallel size.
    quant : str
        Quantization of both GEMMs.
    activation : str
        A key of :data:`ACTIVATIONS`.
    bias : bool
        The experts have biases.
    shape : MoEShape
        The layer on one rank, after the split, and after padding that the kernels need.
    """

    model: str
    tp: int
    ep: int
    quant: str
    activation: str
    bias: bool
    shape: MoEShape

    @property
    def label(self) -> str:
        """Short name, for example ``glm-5-tp8`` or ``deepseek-v3-ep8``."""
        return self.model + (f"-tp{self.tp}" if self.tp > 1 else "") + (f"-ep{self.ep}" if self.ep > 1 else "")

    def shape_for(self, engine: str) -> MoEShape:
        """Return the layer as `engine` passes it to FlashInfer: some pad more than the kernels need."""
        return engine_shape(self.shape, self.quant, engine)


# What FlashInfer 0.7.4 asks of hidden and inter, read in data/csrc/fused_moe/cutlass_backend of the package:
# - binding = flashinfer_cutlass_fused_moe_binding.cu, runMoe (424-438): 128 for MXFP4 weights, else 16 bytes of
#   the narrower operand; kernels = cutlass_fused_moe_kernels.cuh, runMoe (4201-4245): 128 bits of the weights, and
#   expandInputRows (1833) and doActivation (2679): rows of 16 bytes.
# - NVFP4's block scales of gemm1 lie in tiles of 128 rows per expert (kernels, getOffsetWeightSF, 1020), but the
#   binding wants them for inter rounded up to 64, times 2 with a gate (getQuantParams, 1494-1528). Without a gate
#   only a multiple of 128 satisfies both. With one, vLLM refuses what isn't a multiple of 64 when it loads the
#   weights: padding would come between gate and up.
_FP4_SCALES = "the block scales of gemm1 come in tiles of 128 rows"
_MULTIPLES = {
    "bf16": (8, 8, 8, "rows must be multiples of 16 bytes"),
    "fp8": (16, 16, 16, "rows must be multiples of 16 bytes"),
    "nvfp4": (32, 64, 128, _FP4_SCALES + " and rows must be multiples of 16 bytes"),
    "mxfp8_mxfp4": (128, 128, 128, "MXFP4 weights are aligned to 128"),
}


def padded_shape(shape: MoEShape, quant: str) -> MoEShape:
    """Return `shape` with hidden and inter rounded up to what FlashInfer's CUTLASS MoE asks for."""
    check_quant(quant)
    hidden, gated, ungated, _ = _MULTIPLES[quant]
    return replace(
        shape,
        hidden=round_up(shape.hidden, hidden),
        inter=round_up(shape.inter, gated if shape.gated else ungated),
    )


def engine_shape(shape: MoEShape, quant: str, engine: str) -> MoEShape:
    """Return `shape` as `engine` passes it to FlashInfer, see :mod:`synth.catalog.padding`."""
    padding = find_padding(engine, quant, shape.gated)
    if padding is None:
        return shape
    hidden, inter = padding.apply(shape.hidden, shape.inter)
    return replace(shape, hidden=hidden, inter=inter)


@functools.lru_cache(maxsize=4096)
def why_unsupported(shape: MoEShape, quant: str) -> str | None:
    """Return why FlashInfer's CUTLASS MoE has no kernel for a shape, and the padded size; None where it has one."""
    padded = padded_shape(shape, quant)
    hidden, gated, ungated, reason = _MULTIPLES[quant]
    wrong = [
        f"{what} {size} is not a multiple of {multiple} (pad it to {target})"
        for what, size, multiple, target in (
            ("hidden", shape.hidden, hidden, padded.hidden),
            ("inter on a rank", shape.inter, gated if shape.gated else ungated, padded.inter),
        )
        if size != target
    ]
    if not wrong:
        return None
    size, target = (shape.hidden, shape.inter), (padded.hidden, padded.inter)
    engines = [ENGINE_NAMES[e] for e in engines_that_pad(quant, shape.gated, size, target)]
    if len(engines) > 1:
        who = f"{' and '.join(engines)} pad it by themselves"
    else:
        who = f"{engines[0]} pads it by itself" if engines else "no engine is known to pad it by itself"
    return f"{' and '.join(wrong)}; {reason}; {who}"


def check_supported(shape: MoEShape, quant: str) -> None:
    """Refuse a shape that FlashInfer's CUTLASS MoE has no kernel for.

    Raises
    ------
    UnsupportedShapeError
        When hidden or inter isn't a multiple of what the quantization needs; names the reason, the padded size, and
        the engines that pad to it by themselves.
    """
    why = why_unsupported(shape, quant)
    if why is not None:
        raise UnsupportedShapeError(f"{shape}: FlashInfer has no {quant} MoE kernel: {why}")


def check_quant(quant: str) -> None:
    if quant not in QUANTS:
        raise SynthError(f"unknown quantization {quant!r}; known: {', '.join(QUANTS)}")
