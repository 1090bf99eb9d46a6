"""The calls of ``cutlass_fused_moe`` that engines make, by quantization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from synth.catalog.data import read_toml
from synth.errors import SynthError

#: Engines whose calls are known.
ENGINES = ("vllm", "sglang")
#: Maximum token counts that vLLM passes: ``max_cudagraph_capture_size`` (512 by default), or FlashInfer's
#: default 8192 where it passes none, up to the largest that servers are started with.
#: SGLang passes the power of two at or above the token count of each call.
SERVER_MAX_TOKENS = (512, 1024, 2048, 4096, 8192, 16384, 32768)

_TABLE = read_toml("synth.flashinfer", "calls.toml")
#: FlashInfer's ``ActivationType``: number → (name, has a gate).
ACTIVATION_TYPES: dict[int, tuple[str, bool]] = {
    int(number): (name, gated) for number, (name, gated) in _TABLE["activation_types"].items()
}
#: A model's activation → FlashInfer's number.
ACTIVATIONS: dict[str, int] = _TABLE["activations"]


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
    source: str
    passes_bias: bool = False
    mxfp8: bool = False


def _signature(row: dict[str, Any]) -> CallSignature:
    (x_dtype, x_pack), (weight_dtype, weight_pack) = row.pop("x"), row.pop("weights")
    return CallSignature(
        x_dtype=Dtype(f"torch.{x_dtype}"),
        x_pack=x_pack,
        weight_dtype=Dtype(f"torch.{weight_dtype}"),
        weight_pack=weight_pack,
        **row,
    )


#: Every known call.
SIGNATURES = tuple(map(_signature, _TABLE["call"]))


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
