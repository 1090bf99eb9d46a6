"""The calls of ``cutlass_fused_moe`` that engines make, by quantization."""

from __future__ import annotations

from dataclasses import dataclass

from synth.errors import SynthError

#: Engines whose calls are known.
ENGINES = ("vllm", "sglang")
#: Maximum token counts that vLLM passes: ``max_cudagraph_capture_size`` (512 by default), or FlashInfer's
#: default 8192 where it passes none, up to the largest that servers are started with.
#: SGLang passes the power of two at or above the token count of each call.
SERVER_MAX_TOKENS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
#: FlashInfer's ``ActivationType``: number → (name, has a gate).
ACTIVATION_TYPES = {
    0: ("Gelu", False),
    1: ("Relu", False),
    2: ("Silu", False),
    3: ("Swiglu", True),
    4: ("Geglu", True),
    5: ("SwigluBias", True),
    6: ("Relu2", False),
    7: ("SwigluStep", True),
    8: ("GegluTanh", True),
    9: ("Identity", False),
    10: ("Situ", True),
    12: ("ClampedRelu2", False),
    13: ("PowLU", True),
}
#: A model's activation → FlashInfer's number, as vLLM (``activation_to_flashinfer_type``) and SGLang
#: (``get_activation_type``) map it: both send every gated GELU to Geglu. gpt-oss's swigluoai is Swiglu with alpha,
#: beta and limit tensors. Both know situ, but neither sends it to the CUTLASS kernel yet.
ACTIVATIONS = {
    "swiglu": 3,
    "swigluoai": 3,
    "geglu": 4,
    "geglu_tanh": 4,
    "situ": 10,
    "relu2": 6,
    "silu": 2,
    "gelu": 0,
}


class Dtype(str):
    """A torch dtype by name; ``repr`` is the bare name, as torch prints it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)

BF16 = Dtype("torch.bfloat16")
FP8 = Dtype("torch.float8_e4m3fn")
UINT8 = Dtype("torch.uint8")
INT64 = Dtype("torch.int64")
#: One value of a key's extras.
Extra = Dtype | bool | int


@dataclass(frozen=True)
class CallSignature:
    """How one engine calls ``cutlass_fused_moe`` under one quantization.

    Attributes
    ----------
    engine, quant : str
    x_dtype, weight_dtype : Dtype
    x_pack, weight_pack : int
        Values in one element of the tensor.
    passes_bias : bool
        The engine passes the experts' biases, where the model has them.
    mxfp8 : bool
        ``use_mxfp8_act_scaling``. All other flags are False in both engines' calls, apart from
        ``use_fused_finalize``, which is the server's choice.
    source : str
        The call.
    """

    engine: str
    quant: str
    x_dtype: Dtype
    x_pack: int
    weight_dtype: Dtype
    weight_pack: int
    passes_bias: bool
    mxfp8: bool
    source: str

_VLLM = "vLLM fused_moe/experts/flashinfer_cutlass_moe.py, FlashInferExperts.apply"
_SGLANG = "SGLang moe/moe_runner/flashinfer_cutlass.py, _run_flashinfer_cutlass"
_SGLANG_MXFP4 = "SGLang moe/moe_runner/flashinfer_cutlass.py, _fused_experts_flashinfer_mxfp4_cutlass"
#: Every known call. Both engines pass an output dtype of bfloat16 for a bfloat16 model, cluster_size 1, no
#: enable_pdl (FlashInfer turns it on from SM90), and no biases except for MXFP4 weights. tp_size and ep_size are
#: the MoE layer's: under expert parallelism vLLM has tp_size 1. Not here: SGLang with the ``flashinfer`` all-to-all
#: backend (enable_alltoall), block-scaled FP8, and 4-bit weights with 16-bit activations.
SIGNATURES = (
    CallSignature("vllm", "bf16", BF16, 1, BF16, 1, False, False, f"{_VLLM}: unquantized"),
    CallSignature("vllm", "fp8", FP8, 1, FP8, 1, False, False, f"{_VLLM}: FP8 per tensor"),
    CallSignature("vllm", "nvfp4", UINT8, 2, INT64, 16, False, False, f"{_VLLM}: nvfp4, x quantized before the call"),
    CallSignature("vllm", "mxfp8_mxfp4", FP8, 1, INT64, 16, True, True, f"{_VLLM}: mxfp4 weights, mxfp8 x"),
    CallSignature("sglang", "bf16", BF16, 1, BF16, 1, False, False, f"{_SGLANG}: bf16"),
    CallSignature("sglang", "fp8", FP8, 1, FP8, 1, False, False, f"{_SGLANG}: fp8, after scaled_fp8_quant"),
    CallSignature("sglang", "nvfp4", BF16, 1, INT64, 16, False, False, f"{_SGLANG}: fp4, x not quantized"),
    CallSignature(
        "sglang", "nvfp4", UINT8, 2, INT64, 16, False, False, f"{_SGLANG}: fp4, x quantized before the all-gather"
    ),
    CallSignature("sglang", "mxfp8_mxfp4", FP8, 1, INT64, 16, True, True, f"{_SGLANG_MXFP4}: after mxfp8_quantize"),
)


def signatures(engine: str, quant: str) -> tuple[CallSignature, ...]:
    """Return the calls that `engine` makes under `quant`.

    Raises
    ------
    SynthError
        When the engine or the quantization is not known.
    """
    if engine not in ENGINES:
        raise SynthError(f"engine {engine!r} is not known; known: {', '.join(ENGINES)}")
    found = tuple(s for s in SIGNATURES if s.engine == engine and s.quant == quant)
    if not found:
        known = ", ".join(dict.fromkeys(s.quant for s in SIGNATURES if s.engine == engine))
        raise SynthError(f"quantization {quant!r} is not known for {engine}; known: {known}")
    return found


def quant_of(x_dtype: str, weight_dtype: str, *, mxfp8: bool, other_scaling: bool) -> str | None:
    """Return the quantization of a call by its dtypes and flags, None for one without tactics."""
    if other_scaling:
        return None
    for s in SIGNATURES:
        if (s.x_dtype, s.weight_dtype, s.mxfp8) == (x_dtype, weight_dtype, mxfp8):
            return s.quant
    return None
