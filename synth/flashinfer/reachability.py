"""Why FlashInfer can never look a key up."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from synth.flashinfer.calls import ACTIVATION_TYPES, INT64, UINT8, Dtype
from synth.flashinfer.keys import Call, Key, form_text, short
from synth.flashinfer.tactics import DEFAULT_FLASHINFER
from synth.flashinfer.versions import CONTRACTS, OPS, RUNNER, arch_number, contract_for


@dataclass(frozen=True)
class Unreachable:
    """Why FlashInfer can never look up a key.

    Attributes
    ----------
    code : str
        Stable name of the reason.
    message, way_out : str
        One line each.
    """

    code: str
    message: str
    way_out: str


def unreachable(key: Key, flashinfer: str = DEFAULT_FLASHINFER, arch: str | None = None) -> Unreachable | None:
    """Return the first reason why FlashInfer `flashinfer` can never look `key` up, None if it can.

    Parameters
    ----------
    arch : str, optional
        The GPU's architecture; without it, what depends on it is not judged.
    """
    again = "write the file anew for this version"
    if key.stage is None:
        return Unreachable("unknown-op", f"no MoE operation is named {key.op!r}", f"use {OPS[1]} or {OPS[2]}")
    if key.runner != RUNNER:
        return Unreachable("key-runner", f"the key names the runner {key.runner!r}, not {RUNNER}", again)
    contract = contract_for(flashinfer)
    if not key.call.fits(contract):
        return Unreachable(
            _form_code(key.extras),
            f"{form_text(key.extras)} {_form_versions(key.call)}; "
            f"FlashInfer {flashinfer} looks up {form_text(contract.extras)}",
            again,
        )
    if key.rendered != key.text:
        return Unreachable("key-spelling", f"FlashInfer writes this key as {short(key.rendered)}", again)
    if key.bucket < 1:
        return Unreachable("bucket", f"no token count is rounded to bucket {key.bucket}", again)
    return _unreachable_call(key.call, flashinfer, arch) if contract.extras else None


@functools.lru_cache(maxsize=4096)
def _unreachable_call(call: Call, flashinfer: str, arch: str | None) -> Unreachable | None:
    """Return why no bucket of a layer and call is ever looked up."""
    return _unreachable_extras(call, flashinfer, arch) or _unreachable_shapes(call, flashinfer)


_DTYPES = ("x_dtype", "weight_dtype", "output_dtype")
_SIZES = ("top_k", "tp_size", "tp_rank", "ep_size", "ep_rank", "cluster_size", "cluster_rank", "activation_type")


def _unreachable_extras(call: Call, flashinfer: str, arch: str | None) -> Unreachable | None:
    e = call.named(flashinfer)
    for name, value in e.items():
        kind: type = Dtype if name in _DTYPES else int if name in _SIZES else bool
        if type(value) is not kind:
            return Unreachable(
                "extras-type", f"{name} is {value!r}, which is no {kind.__name__.lower()}", "correct the key"
            )
        least = 0 if name.endswith("_rank") or name == "activation_type" else 1
        if kind is int and int(value) < least:
            return Unreachable("extras-value", f"{name} is {value}, less than {least}", "correct the key")
    if e["activation_type"] not in ACTIVATION_TYPES:
        return Unreachable("activation", f"no activation has the number {e['activation_type']}", "correct the key")
    if e["min_latency_mode"]:
        return Unreachable("min-latency", "FlashInfer refuses calls with min_latency_mode", "drop the entry")
    for name in ("use_deepseek_fp8_block_scale", "use_wfp4afp8_humming"):
        if e.get(name) and arch not in (None, "sm90"):
            return Unreachable("sm90-only", f"FlashInfer refuses {name} on {arch}", "drop the entry")
    if arch is not None and e["enable_pdl"] is not (arch_number(arch) >= 90):
        return Unreachable(
            "enable-pdl",
            f"enable_pdl is {e['enable_pdl']}; on {arch} FlashInfer asks with {not e['enable_pdl']} "
            "unless the caller passes it, and engines don't",
            "correct the key",
        )
    return None


def _unreachable_shapes(call: Call, flashinfer: str) -> Unreachable | None:
    e = call.named(flashinfer)
    problem = impossible_sizes(call)
    if not call.has_layer_form:
        return Unreachable("shapes", problem, "correct the key")
    (x_cols,), (experts, n1, k1), _, (_, n2, k2), _ = call.shapes
    if not problem and (quant := call.quant(flashinfer)) is not None:
        weight_pack = 16 if e["weight_dtype"] == INT64 else 1
        x_pack = 2 if e["x_dtype"] == UINT8 else 1
        gated = ACTIVATION_TYPES[int(e["activation_type"])][1]
        if x_cols * x_pack != n2 or k1 * weight_pack != n2:
            problem = f"hidden is {x_cols * x_pack} in x, {k1 * weight_pack} in gemm1, {n2} in gemm2 for {quant}"
        elif n1 != (2 if gated else 1) * k2 * weight_pack:
            name = ACTIVATION_TYPES[int(e["activation_type"])][0]
            problem = (
                f"{name} {'has' if gated else 'has no'} gate, so gemm1 must have "
                f"{(2 if gated else 1) * k2 * weight_pack} columns, not {n1}"
            )
            return Unreachable("gating", problem, "correct the activation or the shapes")
    if not problem and int(e["top_k"]) > experts * int(e["ep_size"]):
        problem = f"top_k {e['top_k']} is more than the layer's {experts * int(e['ep_size'])} experts"
    return Unreachable("shapes", problem, "correct the key") if problem else None


def impossible_sizes(call: Call) -> str:
    """Say why the sizes of a key's shapes are no layer's, whatever version and dtypes; ``""`` if they may be."""
    if not call.has_layer_form:
        return "expected the shapes of x, weights, bias, weights, bias"
    x, (experts, n1, k1), bias1, (experts2, hidden, k2), bias2 = call.shapes
    if min(*x, experts, n1, k1, experts2, hidden, k2) < 1:
        return "a size is less than 1"
    if experts != experts2:
        return f"gemm1 has {experts} experts, gemm2 {experts2}"
    if bias1 not in ((0,), (experts, n1)) or bias2 not in ((0,), (experts, hidden)):
        return "a bias is neither absent, (0,), nor (experts, columns)"
    return ""


def _form_code(extras: tuple[object, ...] | None) -> str:
    return "key-3-tuple" if extras is None else f"key-{len(extras)}-extras"


def _form_versions(call: Call) -> str:
    fits = [c for c in CONTRACTS if call.fits(c)]
    return f"fits FlashInfer {fits[0].first} to {fits[-1].last}" if fits else "fits no known FlashInfer"
