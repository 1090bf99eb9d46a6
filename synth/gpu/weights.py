"""Weights of a layer's experts, in every format that FlashInfer's kernels take."""

from __future__ import annotations

import math
from typing import Any

from synth.catalog.schemes import STAGES
from synth.catalog.shapes import MoEShape
from synth.errors import OutOfMemory
from synth.flashinfer.calls import CallSignature, signatures
from synth.gpu.libraries import dtype, load_torch

#: Standard deviation of weights and unquantized inputs.
STD = 0.1
# Bytes of one value, and of the block scales that belong to one value.
_VALUE_BYTES = {"bf16": (2.0, 0.0), "fp8": (1.0, 0.0), "nvfp4": (0.5, 1 / 16), "mxfp8_mxfp4": (0.5, 1 / 32)}


def call_signature(quant: str) -> CallSignature:
    """Return the dtypes of a quantization's call; of NVFP4's two, the one with quantized input."""
    return signatures("vllm", quant)[0]


def weight_bytes(shape: MoEShape, quant: str) -> int:
    """Return the bytes of the experts' weights on this rank, block scales included."""
    value, scale = _VALUE_BYTES[quant]
    values = shape.experts * sum(n * k for n, k in map(shape.gemm_nk, STAGES))
    return math.ceil(values * (value + scale))


def allocate_weights(shape: MoEShape, quant: str, device: Any) -> tuple[Any, Any]:
    """Return gemm1's and gemm2's weights [experts, N, K], with K packed where the format packs it.

    The values are normal(0, 0.1), drawn with a fixed seed, one expert after the other so that little else is
    allocated meanwhile.

    Raises
    ------
    OutOfMemory
        When less memory is free than they take.
    """
    torch = load_torch()
    if device.type == "cuda":
        # What torch keeps for later would count as taken.
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(device)
        needed = weight_bytes(shape, quant)
        if needed > free:
            raise OutOfMemory(
                f"the {quant} weights of {shape} take {needed / 2**30:.1f} GiB and {free / 2**30:.1f} GiB of the "
                "GPU's memory are free; take fewer experts (--ep) or a smaller slice (--tp)"
            )
    signature = call_signature(quant)
    generator = torch.Generator(device=device)
    generator.manual_seed(0)
    made = []
    for stage in STAGES:
        n, k = shape.gemm_nk(stage)
        weights = torch.empty(
            (shape.experts, n, k // signature.weight_pack), dtype=dtype(signature.weight_dtype), device=device
        )
        for expert in weights:
            values = torch.empty((n, k), dtype=torch.bfloat16, device=device).normal_(0, STD, generator=generator)
            if quant in ("bf16", "fp8"):
                expert.copy_(values)
            else:
                expert.view(torch.uint8).copy_(pack_fp4(values.float(), quant))
        made.append(weights)
    return made[0], made[1]


def pack_fp4(values: Any, quant: str) -> Any:
    """Round [rows, columns] to e2m1 with one scale per block, two values to a byte, the first in the low half.

    The scale itself is not kept: FlashInfer's profiler has its own.
    """
    torch = load_torch()
    rows, columns = values.shape
    blocks = values.view(rows, -1, 16 if quant == "nvfp4" else 32)
    largest = blocks.abs().amax(dim=2, keepdim=True).clamp_min(1e-30)
    # NVFP4: the largest becomes 6; OCP MX: 2^(floor(log2(max)) - 2), 2 being e2m1's largest exponent.
    scale = largest / 6 if quant == "nvfp4" else torch.exp2(torch.floor(torch.log2(largest)) - 2)
    scaled = (blocks / scale).view(rows, columns)
    midpoints = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device=values.device)
    codes = torch.bucketize(scaled.abs(), midpoints, out_int32=True).to(torch.uint8)
    codes |= (scaled < 0).to(torch.uint8) << 3
    return codes[:, 0::2] | (codes[:, 1::2] << 4)
