"""File keys: the text under which FlashInfer looks an entry up, written and taken apart."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from synth.catalog.shapes import Deployment, MoEShape
from synth.errors import SynthError
from synth.flashinfer.calls import (
    ACTIVATION_TYPES,
    ACTIVATIONS,
    BF16,
    CallSignature,
    Dtype,
    Extra,
    quant_of,
    signatures,
)
from synth.flashinfer.tactics import DEFAULT_FLASHINFER
from synth.flashinfer.versions import OPS, RUNNER, Contract, arch_number, contract_for


def file_keys(
    deployment: Deployment,
    engine: str,
    bucket: int,
    stage: int,
    arch: str,
    flashinfer: str = DEFAULT_FLASHINFER,
    *,
    fused_finalize: bool = True,
) -> tuple[str, ...]:
    """Return every key that an engine may ask FlashInfer for.

    Parameters
    ----------
    deployment : Deployment
        The model on its ranks. Where an engine pads the layer, `deployment.shape` is the padded one.
    engine : str
        One of :data:`ENGINES`.
    bucket : int
        Token bucket.
    stage : int
        1 or 2.
    arch : str
        For example ``"sm90"``.
    flashinfer : str
        FlashInfer version. For 0.6.18 to 0.7.1, whose keys hold ranks, the keys of every rank.
    fused_finalize : bool
        The server lets gemm2 fuse the finalize step: vLLM does, SGLang does or not by version
        (``SGLANG_FLASHINFER_MOE_FUSED_FINALIZE``). Without it, gemm2's ids are those of
        :meth:`TacticTable.without_fused_finalize`, so the two kinds of keys need their own ids.

    Returns
    -------
    tuple of str
        Byte for byte what ``ProfilingCacheKey.file_key`` gives, without duplicates, in a fixed order.

    Raises
    ------
    SynthError
        When the engine, quantization, activation or stage is not known, or the layer can't be packed.
    """
    found = (
        signature_keys(deployment, signature, bucket, stage, arch, flashinfer, fused_finalize=fused_finalize)
        for signature in signatures(engine, deployment.quant)
    )
    return tuple(dict.fromkeys(itertools.chain.from_iterable(found)))


def signature_keys(
    deployment: Deployment,
    signature: CallSignature,
    bucket: int,
    stage: int,
    arch: str,
    flashinfer: str = DEFAULT_FLASHINFER,
    *,
    fused_finalize: bool = True,
) -> tuple[str, ...]:
    """Return the keys of one call signature; parameters and errors are those of :func:`file_keys`."""
    if stage not in OPS:
        raise SynthError(f"stage must be 1 or 2, not {stage}")
    if bucket < 1:
        raise SynthError(f"a token bucket must be at least 1, not {bucket}")
    values = call_extras(deployment, signature, arch, fused_finalize=fused_finalize)
    return render_keys(contract_for(flashinfer), OPS[stage], _shapes(deployment, signature, bucket), values)


def call_extras(
    deployment: Deployment, signature: CallSignature, arch: str, *, fused_finalize: bool = True
) -> dict[str, Extra]:
    """Return the extras of a call's keys by name, those that no engine sets included.

    Raises
    ------
    SynthError
        As :func:`activation_number`.
    """
    return {
        "x_dtype": signature.x_dtype,
        "weight_dtype": signature.weight_dtype,
        "output_dtype": BF16,
        "top_k": deployment.shape.top_k,
        "tp_size": deployment.tp,
        "ep_size": deployment.ep,
        "cluster_size": 1,
        "cluster_rank": 0,
        "enable_alltoall": False,
        "use_deepseek_fp8_block_scale": False,
        "use_w4_group_scaling": False,
        "use_mxfp8_act_scaling": signature.mxfp8,
        "use_wfp4afp8_humming": False,
        "min_latency_mode": False,
        "enable_pdl": arch_number(arch) >= 90,
        "activation_type": activation_number(deployment.activation, deployment.shape),
        "use_packed_weights": False,
        "use_fused_finalize": fused_finalize,
    }


def activation_number(activation: str, shape: MoEShape) -> int:
    """Return FlashInfer's number of an activation.

    Raises
    ------
    SynthError
        When the activation is not known, or has a gate where the shape has none, or the other way round.
    """
    number = ACTIVATIONS.get(activation)
    if number is None:
        raise SynthError(f"activation {activation!r} is not known; known: {', '.join(ACTIVATIONS)}")
    gated = ACTIVATION_TYPES[number][1]
    if gated != shape.gated:
        raise SynthError(f"{activation} has {'a' if gated else 'no'} gate, but the shape {shape} says otherwise")
    return number


def _shapes(deployment: Deployment, signature: CallSignature, bucket: int) -> tuple[tuple[int, ...], ...]:
    shape = deployment.shape
    for name, size, pack in (
        ("hidden", shape.hidden, max(signature.x_pack, signature.weight_pack)),
        ("inter", shape.inter, signature.weight_pack),
    ):
        if size % pack:
            raise SynthError(
                f"{shape} can't be packed for {signature.quant}: {name} {size} is not a multiple of {pack}; "
                f"pad it to {-(-size // pack) * pack}"
            )
    (n1, k1), (n2, k2) = shape.gemm_nk(1), shape.gemm_nk(2)
    biased = deployment.bias and signature.passes_bias
    return (
        (bucket, shape.hidden // signature.x_pack),
        (shape.experts, n1, k1 // signature.weight_pack),
        (shape.experts, n1) if biased else (0,),
        (shape.experts, n2, k2 // signature.weight_pack),
        (shape.experts, n2) if biased else (0,),
    )


def render_keys(
    contract: Contract, op: str, shapes: tuple[tuple[int, ...], ...], values: Mapping[str, Extra]
) -> tuple[str, ...]:
    """Return one call's key as FlashInfer writes it: one, or where the contract's keys hold ranks, that of every rank.

    Parameters
    ----------
    contract : Contract
    op : str
        One of :data:`OPS`.
    shapes : tuple of tuple of int
        Of x, gemm1's weights and bias, gemm2's weights and bias.
    values : mapping
        Extras by name; those that the contract doesn't have are left out, ranks are filled in.
    """
    return tuple(str((op, RUNNER, shapes, *extras)) for extras in extras_of(contract, values))


def extras_of(contract: Contract, values: Mapping[str, Extra]) -> tuple[tuple[object, ...], ...]:
    """Return what follows the shapes in one call's keys: nothing, its extras, or those of every rank.

    Parameters are those of :func:`render_keys`.
    """
    if contract.extras is None:
        return ((),)
    tp, ep = (int(values[name]) if "tp_rank" in contract.extras else 1 for name in ("tp_size", "ep_size"))
    ranks = ({**values, "tp_rank": t, "ep_rank": e} for t, e in itertools.product(range(tp), range(ep)))
    return tuple((tuple([ranked[name] for name in contract.extras]),) for ranked in ranks)


#: Flags of a call under which weights are packed or scaled in ways that no tactics are known for.
_OTHER_SCALINGS = (
    "use_deepseek_fp8_block_scale",
    "use_w4_group_scaling",
    "use_wfp4afp8_humming",
    "use_packed_weights",
)


@dataclass(frozen=True)
class Call:
    """What all keys of one layer and call have in common: everything but operation, runner and bucket.

    Attributes
    ----------
    text : str
        What is common to the texts of the keys. It alone is compared: to Python, 1 and True are equal.
    shapes : tuple of tuple of int
        Of x without its tokens, gemm1's weights and bias, gemm2's weights and bias.
    extras : tuple or None
        None in the 3-tuple keys of FlashInfer up to 0.6.12.
    """

    text: str
    shapes: tuple[tuple[int, ...], ...] = field(compare=False)
    extras: tuple[Extra, ...] | None = field(compare=False)

    @functools.cached_property
    def has_layer_form(self) -> bool:
        """Whether there are five shapes, each with as many sizes as an MoE layer's."""
        return [len(s) for s in self.shapes[:2]] == [1, 3] and len(self.shapes) == 5 and len(self.shapes[3]) == 3

    def fits(self, contract: Contract) -> bool:
        """Tell whether keys of this contract have as many extras."""
        return (contract.extras is None) == (self.extras is None) and len(contract.extras or ()) == len(
            self.extras or ()
        )

    def named(self, flashinfer: str = DEFAULT_FLASHINFER) -> Mapping[str, Extra]:
        """Return the extras by name.

        Raises
        ------
        SynthError
            When the key has another form than this version's, or this version's keys have no extras.
        """
        return _named(self, flashinfer)

    def quant(self, flashinfer: str = DEFAULT_FLASHINFER) -> str | None:
        """Return the quantization, None for one that synth has no tactics for; errors as :meth:`named`."""
        return _quant(self, flashinfer)

    def shape(self, flashinfer: str = DEFAULT_FLASHINFER) -> MoEShape:
        """Return the layer on one rank; meaningful only where nothing keeps the key from being looked up.

        Raises
        ------
        SynthError
            When the key has another form, or the sizes make no layer.
        """
        return _layer(self, flashinfer)


@functools.lru_cache(maxsize=4096)
def _named(call: Call, flashinfer: str) -> Mapping[str, Extra]:
    contract = contract_for(flashinfer)
    if not contract.extras or call.extras is None or not call.fits(contract):
        raise SynthError(f"{form_text(call.extras)} has no extras that FlashInfer {flashinfer} knows by name")
    return MappingProxyType(dict(zip(contract.extras, call.extras, strict=True)))


@functools.lru_cache(maxsize=4096)
def _quant(call: Call, flashinfer: str) -> str | None:
    e = call.named(flashinfer)
    return quant_of(
        str(e["x_dtype"]),
        str(e["weight_dtype"]),
        mxfp8=e["use_mxfp8_act_scaling"] is True,
        other_scaling=any(e[name] is True for name in _OTHER_SCALINGS),
    )


@functools.lru_cache(maxsize=4096)
def _layer(call: Call, flashinfer: str) -> MoEShape:
    e = call.named(flashinfer)
    gated = ACTIVATION_TYPES.get(int(e["activation_type"]), ("", True))[1]
    experts, n1, _ = call.shapes[1]
    return MoEShape(
        hidden=call.shapes[3][1],
        inter=n1 // 2 if gated else n1,
        experts=experts,
        top_k=int(e["top_k"]),
        ep_size=int(e["ep_size"]),
        gated=gated,
    )


@dataclass(frozen=True)
class Key:
    """A file key, taken apart.

    Attributes
    ----------
    text : str
        The key as it is in the file.
    op, runner : str
    bucket : int
        The token bucket.
    call : Call
        What it has in common with the other keys of its layer and call.
    """

    text: str
    op: str
    runner: str
    bucket: int
    call: Call

    @property
    def stage(self) -> int | None:
        """1 or 2, None for another operation."""
        return _STAGES.get(self.op)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """x, gemm1 weights, gemm1 bias, gemm2 weights, gemm2 bias."""
        x, *others = self.call.shapes
        return (self.bucket, *x), *others

    @property
    def extras(self) -> tuple[Extra, ...] | None:
        """None in the 3-tuple keys of FlashInfer up to 0.6.12."""
        return self.call.extras

    @property
    def rendered(self) -> str:
        """The key as FlashInfer writes it."""
        head = (self.op, self.runner, self.shapes)
        return str(head if self.extras is None else (*head, self.extras))

    def named(self, flashinfer: str = DEFAULT_FLASHINFER) -> Mapping[str, Extra]:
        """See :meth:`Call.named`."""
        return self.call.named(flashinfer)

    def quant(self, flashinfer: str = DEFAULT_FLASHINFER) -> str | None:
        """See :meth:`Call.quant`."""
        return self.call.quant(flashinfer)

    def shape(self, flashinfer: str = DEFAULT_FLASHINFER) -> MoEShape:
        """See :meth:`Call.shape`."""
        return self.call.shape(flashinfer)


_STAGES = {op: stage for stage, op in OPS.items()}
#: The longest key that is taken apart; FlashInfer's have 300 characters.
_MAX_CHARS = 4096
#: Deepest nesting: a key, its shapes, one shape, and one pair of parentheses more than needed.
_MAX_DEPTH = 4
#: A mark, a number, a text without escapes, a truth value or a dtype, and the blanks before it.
_WORD = re.compile(
    r"""[ \t\n]*([(),]|-?(?:0|[1-9][0-9]{0,63})(?![\w.])|'[^'\\\n]*'|"[^"\\\n]*"|True|False|torch\.[A-Za-z_]\w*)"""
)
#: What the keys of one layer and call don't share: operation, runner and bucket.
_HEAD = re.compile(r"\('([^'\\\n]*)', '([^'\\\n]*)', \(\(([1-9][0-9]{0,63}|0), (?=[0-9])")


def parse_key(text: str) -> Key:
    """Take a file key apart. It is read word by word; nothing in it is executed or compiled.

    Raises
    ------
    SynthError
        When `text` is not a tuple of operation, runner, shapes and, perhaps, extras.
    """
    if len(text) > _MAX_CHARS:
        raise SynthError(f"a file key has at most {_MAX_CHARS} characters, this one {len(text)}")
    if (head := _HEAD.match(text)) is not None:
        # What follows the bucket is read once for all keys of a layer and call; errors are of the whole text, below.
        with contextlib.suppress(SynthError):
            return Key(text, head[1], head[2], int(head[3]), _call(text[head.end() :]))
    op, runner, shapes, *extras = _read(text)
    return Key(text, op, runner, shapes[0][0], _as_call(text, shapes, extras))


@functools.lru_cache(maxsize=4096)
def _call(text: str) -> Call:
    _, _, shapes, *extras = _read(f"('', '', ((0, {text}")
    return _as_call(text, shapes, extras)


def _as_call(text: str, shapes: tuple[tuple[int, ...], ...], extras: list[tuple[Extra, ...]]) -> Call:
    return Call(text, (shapes[0][1:], *shapes[1:]), extras[0] if extras else None)


def _read(text: str) -> tuple[Any, ...]:
    """Return the fields of a key: operation, runner, shapes and, perhaps, extras."""
    words = []
    at, end = 0, len(text.rstrip())
    while at < end:
        word = _WORD.match(text, at)
        if word is None:
            raise SynthError(f"{short(text)} is not a file key; expected ('trtllm::fused_moe::gemm1', …)")
        words.append(word[1])
        at = word.end()
    try:
        value, stop = _value([*words, ""], 0, 1)
    except ValueError:
        stop = -1
    if stop != len(words):
        raise SynthError(f"{short(text)} is not a file key; expected ('trtllm::fused_moe::gemm1', …)")
    if not isinstance(value, tuple) or len(value) not in (3, 4):
        raise SynthError(f"{short(text)} is not a file key: it is not a tuple of 3 or 4 fields")
    if type(value[0]) is not str or type(value[1]) is not str:
        raise SynthError(f"{short(text)} is not a file key: operation and runner must be text")
    if not _is_shapes(value[2]):
        raise SynthError(f"{short(text)} is not a file key: its third field must hold shapes")
    if not isinstance(value[-1], tuple) or not all(isinstance(v, (Dtype, int)) for v in value[3:] and value[3]):
        raise SynthError(f"{short(text)} is not a file key: its extras must be dtypes, numbers and truth values")
    return value


def _value(words: Sequence[str], at: int, depth: int) -> tuple[object, int]:
    """Return the value that begins at a word, as Python writes it, and the place behind it."""
    word = words[at]
    if word == "(" and depth <= _MAX_DEPTH:
        items: list[object] = []
        may_follow = True
        at += 1
        while words[at] != ")":
            if not may_follow:
                raise ValueError
            item, at = _value(words, at, depth + 1)
            items.append(item)
            may_follow = words[at] == ","
            at += may_follow
        return (items[0] if len(items) == 1 and not may_follow else tuple(items)), at + 1
    if word[:1] in ("'", '"') and word:
        return word[1:-1], at + 1
    if word in ("True", "False"):
        return word == "True", at + 1
    # Whatever else is no dtype is a number, or raises ValueError.
    return Dtype(word) if word.startswith("torch.") else int(word), at + 1


def _is_shapes(value: object) -> bool:
    return (
        isinstance(value, tuple)
        and len(value) > 0
        and all(isinstance(s, tuple) and len(s) > 0 and all(type(n) is int for n in s) for s in value)
    )


def short(text: str) -> str:
    return repr(text) if len(text) <= 60 else repr(text[:57] + "…")


def form_text(extras: tuple[object, ...] | None) -> str:
    return "a 3-tuple key" if extras is None else f"a 4-tuple key with {len(extras)} extras"
