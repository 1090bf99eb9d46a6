"""How a layer's activations and weights are quantized, and the two GEMMs of which it is made."""

from __future__ import annotations

#: Quantizations: activations and weights of both GEMMs.
QUANTS = ("bf16", "fp8", "nvfp4", "mxfp8_mxfp4")
#: The two GEMMs of an MoE layer.
STAGES = (1, 2)
