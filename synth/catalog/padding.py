"""Which engine pads what to what, when it loads a model's weights for FlashInfer's CUTLASS MoE.

FlashInfer looks a layer up under the sizes that it is given, so an engine that pads its weights asks for the padded
layer: an entry for the unpadded one is never found.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Padding:
    """What one engine rounds a layer up to in one quantization.

    Attributes
    ----------
    engine : str
        ``"vllm"`` or ``"sglang"``.
    quant : str
        Quantization of both GEMMs.
    gated : bool or None
        Only layers whose activation has a gate (True) or none (False); None: both.
    hidden, inter : int
        The hidden size, and the intermediate size on a rank, become multiples of these.
    source : str
        Where the engine does it.
    """

    engine: str
    quant: str
    gated: bool | None
    hidden: int
    inter: int
    source: str

    def apply(self, hidden: int, inter: int) -> tuple[int, int]:
        """Return both sizes as this engine passes them."""
        return round_up(hidden, self.hidden), round_up(inter, self.inter)


#: How engines are spelled in messages.
ENGINE_NAMES = {"vllm": "vLLM", "sglang": "SGLang"}

#: What was read in the engines' sources; a case that isn't listed is not padded, or was not found. vLLM pads bf16
#: layers only for the TRT-LLM kernels (``fused_moe/oracle/unquantized.py``), and refuses a gated NVFP4 layer that isn't
#: a multiple of 64 (``prepare_nvfp4_moe_layer_for_fi_or_cutlass``; a pull request, vllm#57351, would pad it).
PADDINGS = (
    Padding(
        "vllm",
        "mxfp8_mxfp4",
        None,
        128,
        128,
        "vllm/model_executor/layers/fused_moe/oracle/mxfp4.py, mxfp4_round_up_hidden_size_and_intermediate_size",
    ),
    Padding(
        "vllm",
        "nvfp4",
        False,
        1,
        128,
        "vllm/model_executor/layers/quantization/utils/flashinfer_fp4_moe.py, "
        "prepare_nvfp4_moe_layer_for_fi_or_cutlass",
    ),
    Padding("vllm", "fp8", True, 1, 16, "vllm/utils/flashinfer.py, prepare_fp8_moe_layer_for_fi"),
    Padding("vllm", "fp8", False, 1, 128, "vllm/utils/flashinfer.py, prepare_fp8_moe_layer_for_fi"),
    Padding(
        "sglang",
        "fp8",
        None,
        1,
        16,
        "python/sglang/srt/layers/quantization/modelopt_quant.py, ModelOptFp8MoEMethod.process_weights_after_loading "
        "(sglang#22627)",
    ),
)


def find_padding(engine: str, quant: str, gated: bool) -> Padding | None:
    """Return what `engine` rounds such a layer up to, None where it pads nothing that is known."""
    return next(
        (p for p in PADDINGS if (p.engine, p.quant) == (engine, quant) and p.gated in (None, gated)),
        None,
    )


def engines_that_pad(quant: str, gated: bool, size: tuple[int, int], target: tuple[int, int]) -> tuple[str, ...]:
    """Return the engines that pad a layer of one size, (hidden, inter), to exactly another by themselves."""
    return tuple(
        p.engine for p in PADDINGS if p.quant == quant and p.gated in (None, gated) and p.apply(*size) == target != size
    )


def round_up(value: int, multiple: int) -> int:
    """Return the least multiple that is at least `value`."""
    return -(-value // multiple) * multiple
