"""A whole MoE layer on rank 0 with real inputs, called through the public ``flashinfer.fused_moe.cutlass_fused_moe``.

``synth verify`` compares its output through :class:`LayerComparator`; ``benchmarks/layer.py`` times it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from synth.catalog.shapes import MoEShape, check_supported
from synth.errors import SynthError
from synth.flashinfer.keys import activation_number
from synth.flashinfer.tactics import load_table
from synth.gpu.cuda import architecture, must_fit, select_device
from synth.gpu.libraries import dtype, installed_flashinfer, load_core, load_flashinfer, load_torch
from synth.gpu.weights import STD, allocate_weights, call_signature

#: The pair of tactics that FlashInfer runs without a config: the first of each stage.
FALLBACK = (-1, -1)


class Layer:
    """One whole MoE layer on rank 0, with real inputs, called as engines call it.

    Parameters
    ----------
    shape : MoEShape
        The layer on one rank.
    quant : str
        ``"bf16"``, or ``"fp8"`` with one scale per tensor.
    activation : str
        A key of :data:`synth.flashinfer.calls.ACTIVATIONS`.
    tp : int
        Tensor-parallel size. `shape` is already split; this is part of the key that FlashInfer looks up.
    device : str
        Where everything lives; becomes the process's current device.

    Raises
    ------
    MissingDependencyError
        When FlashInfer or torch is not installed.
    SynthError
        When the layer has no kernel here, or its weights don't fit.
    """

    def __init__(
        self, shape: MoEShape, quant: str, activation: str = "swiglu", *, tp: int = 1, device: str = "cuda"
    ) -> None:
        if quant not in ("bf16", "fp8"):
            raise SynthError(f"a whole layer can be run in bf16 and fp8, not in {quant}; time its tactics instead")
        flashinfer = installed_flashinfer()
        self._torch, self._core = load_torch(), load_core()
        self._activation = self._core.ActivationType(activation_number(activation, shape))
        check_supported(shape, quant)
        self.shape, self.quant, self.tp = shape, quant, tp
        self.device = select_device(device)
        load_table(architecture(self.device)[0], quant, flashinfer)
        with must_fit(f"the {quant} weights of {shape} don't fit into the GPU's memory"):
            self._weights = allocate_weights(shape, quant, self.device)
        self._scales = self._quant_scales()

    def inputs(self, tokens: int, sample: int = 0) -> dict[str, Any]:
        """Return the arguments of one call of ``cutlass_fused_moe``.

        Tokens go to all ranks' experts alike, without repeats within a token, the weights of a token summing to 1.
        The output is allocated here.

        Parameters
        ----------
        tokens : int
            At least 1.
        sample : int
            Which of many draws.
        """
        torch, shape = self._torch, self.shape
        signature = call_signature(self.quant)
        experts = shape.experts * shape.ep_size
        generator = torch.Generator(device=self.device)
        generator.manual_seed(tokens + 1_000_003 * sample)
        # A quantized input has unit scale: quantization would bring it there.
        std = STD if self.quant == "bf16" else 1.0
        x = torch.empty((tokens, shape.hidden), dtype=torch.bfloat16, device=self.device)
        x.normal_(0, std, generator=generator)
        draw_ids = load_flashinfer("fused_moe.utils").make_random_topk_ids
        ids = draw_ids(experts, tokens, shape.top_k, self.device, generator)
        scores = torch.rand((tokens, shape.top_k), dtype=torch.float32, device=self.device, generator=generator)
        scores += 0.1
        return {
            "input": x.to(dtype(signature.x_dtype)),
            "token_selected_experts": ids,
            "token_final_scales": scores / scores.sum(dim=1, keepdim=True),
            "fc1_expert_weights": self._weights[0],
            "fc2_expert_weights": self._weights[1],
            "output_dtype": torch.bfloat16,
            "quant_scales": self._scales,
            "output": torch.empty((tokens, shape.hidden), dtype=torch.bfloat16, device=self.device),
            "tp_size": self.tp,
            "ep_size": shape.ep_size,
            "activation_type": self._activation,
        }

    def call(self, inputs: Mapping[str, Any], pair: tuple[int, int] | None = None) -> Any:
        """Run the layer and return its output of [tokens, hidden]; the next call overwrites it.

        Parameters
        ----------
        inputs : mapping
            From :meth:`inputs`.
        pair : (int, int), optional
            Tactics of gemm1 and gemm2; by default what FlashInfer's tuner serves.
        """
        self._core.cutlass_fused_moe(**inputs, profile_ids=None if pair is None else list(pair))
        return inputs["output"]

    def relative_error(self, inputs: Mapping[str, Any], pair: tuple[int, int] | None = None) -> float:
        """Return how far the output is from the fallback's: the largest difference over the largest output.

        Infinite where a value is not finite.

        Parameters
        ----------
        inputs : mapping
            From :meth:`inputs`.
        pair : (int, int), optional
            Tactics of gemm1 and gemm2; by default what FlashInfer's tuner serves.
        """
        reference = self.call(inputs, FALLBACK).float()
        # What a call doesn't write must not look right.
        inputs["output"].fill_(math.nan)
        output = self.call(inputs, pair).float()
        difference = float((output - reference).abs().max())
        largest = float(reference.abs().max())
        if not (math.isfinite(difference) and math.isfinite(largest)):
            return math.inf
        if largest == 0:
            # No token went to this rank's experts.
            return 0.0 if difference == 0 else math.inf
        return difference / largest

    def _quant_scales(self) -> list[Any]:
        """Return fp8's four scales, in the order of FlashInfer's ``getQuantParams``.

        gemm1's dequantization per expert, the quantization of gemm2's input, gemm2's dequantization per expert, and
        the input's dequantization. They bring both GEMMs' outputs to about unit scale.
        """
        if self.quant == "bf16":
            return []
        shape = self.shape
        quantize = 16.0  # Up to 28 standard deviations of the activation's output fit into e4m3's 448.
        scales: list[tuple[tuple[int, ...], float]] = [
            ((shape.experts,), 1 / (STD * math.sqrt(shape.hidden))),
            ((), quantize),
            ((shape.experts,), 1 / (quantize * STD * math.sqrt(shape.inter))),
            ((), 1.0),
        ]
        return [self._torch.full(size, x, dtype=self._torch.float32, device=self.device) for size, x in scales]


class LayerComparator:
    """Compares pairs of tactics of one layer with the fallback; see :class:`synth.collecting.numbers.Comparator`.

    Parameters
    ----------
    shape : MoEShape
        The layer on one rank.
    quant : str
        ``"bf16"`` or ``"fp8"``.
    activation : str
        A key of :data:`synth.flashinfer.calls.ACTIVATIONS`.
    device : str
        Where everything lives.

    Raises
    ------
    MissingDependencyError
        When FlashInfer or torch is not installed.
    SynthError
        When the layer has no kernel here, its weights don't fit, or its quantization has no scales here.
    """

    def __init__(self, shape: MoEShape, quant: str, activation: str = "swiglu", *, device: str = "cuda") -> None:
        self._layer = Layer(shape, quant, activation, device=device)
        self._inputs: tuple[int, dict[str, Any]] | None = None

    def deviation(self, tokens: int, pair: tuple[int, int]) -> float:
        """Return the largest difference from the fallback's output over the largest output.

        Raises
        ------
        OutOfMemory
            When the token count doesn't fit into the GPU's memory.
        """
        with must_fit(f"{self._layer.shape} at {tokens} tokens doesn't fit into the GPU's memory"):
            if self._inputs is None or self._inputs[0] != tokens:
                self._inputs = None
                self._inputs = tokens, self._layer.inputs(tokens)
            return self._layer.relative_error(self._inputs[1], pair)
