"""What FlashInfer looks up: token buckets, file keys, metadata, and the calls that engines make.

Pure Python: neither torch nor FlashInfer is imported. Everything that differs between FlashInfer
versions is a row of :data:`CONTRACTS`; everything that differs between engines is a row of
:data:`SIGNATURES`. The tests compare both with the installed FlashInfer.
"""

from __future__ import annotations

import ast
import functools
import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from synth.catalog.devices import get_device
from synth.catalog.shapes import MoEShape
from synth.catalog.tactics import DEFAULT_FLASHINFER
from synth.errors import SynthError

if TYPE_CHECKING:
    from synth.catalog.shapes import Deployment
    from synth.catalog.tactics import Tactic, TacticTable

#: Engines whose calls are known.
ENGINES = ("vllm", "sglang")
#: With "1" in this variable FlashInfer reads its bundled configs.
ENV_BUNDLED = "FLASHINFER_AUTOTUNER_LOAD_FROM_FILE"
#: The tunable operations of the CUTLASS MoE, by stage.
OPS = {1: "trtllm::fused_moe::gemm1", 2: "trtllm::fused_moe::gemm2"}
#: Class name of the CUTLASS MoE runner, in the key and in the entry.
RUNNER = "MoERunner"
#: The profiling policy of the CUTLASS MoE; an entry with another one is re-profiled while a server warms up.
POLICY = ("cuda_graph_profile_replays", None, "l2_cache_policy", "hot")
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

_EXTRAS_WITH_RANKS = (
    "x_dtype",
    "weight_dtype",
    "output_dtype",
    "top_k",
    "tp_size",
    "tp_rank",
    "ep_size",
    "ep_rank",
    "cluster_size",
    "cluster_rank",
    "enable_alltoall",
    "use_deepseek_fp8_block_scale",
    "use_w4_group_scaling",
    "use_mxfp8_act_scaling",
    "use_wfp4afp8_humming",
    "min_latency_mode",
    "enable_pdl",
    "activation_type",
    "use_packed_weights",
    "use_fused_finalize",
)
_EXTRAS = tuple(name for name in _EXTRAS_WITH_RANKS if not name.endswith("_rank"))
_METADATA_5 = ("flashinfer_version", "cuda_version", "cublas_version", "cudnn_version", "gpu")
_METADATA_6 = (*_METADATA_5[:4], "cudnn_frontend_version", "gpu")
_METADATA_7 = (*_METADATA_6[:5], "cutlass_dsl_version", "gpu")


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
class Contract:
    """What the FlashInfer versions from `first` to `last` look up.

    Attributes
    ----------
    first, last : str
        Versions, both included.
    extras : tuple of str or None
        Names of the key's extras in order; None where the key has no extras field (a 3-tuple).
    hybrid_buckets : bool
        Hybrid grid that rounds up; else powers of two that round down.
    metadata_keys : tuple of str
        The ``_metadata`` keys that must match; empty where there are no JSON files.
    entry_elements : int
        Elements of a JSON entry that are read: runner and tactic, then the profiling policy, then the times. Further
        ones are ignored, so that a longer entry is taken, too. 0 where there are no JSON files.
    managed_store : bool
        There is an ``autotune_v2`` store beside the JSON files.
    finalize_option : bool
        Callers can turn gemm2's fused finalize step off (``use_fused_finalize``), which shortens its range of ids; no
        key says so before 0.6.18.
    misreads_gemm2_ids : bool
        A gemm2 id that is less than gemm2's number of tactics is tuned as what it is, and served as if it were counted
        from gemm2's first tactic: see :func:`served_id`.
    """

    first: str
    last: str
    extras: tuple[str, ...] | None
    hybrid_buckets: bool
    metadata_keys: tuple[str, ...]
    entry_elements: int
    managed_store: bool = False
    finalize_option: bool = True
    misreads_gemm2_ids: bool = False


#: Every known version, oldest first. The installed one is checked by the tests, every other one by a slow test that
#: downloads the wheels.
CONTRACTS = (
    Contract("0.6.4", "0.6.6", None, False, (), 0, finalize_option=False, misreads_gemm2_ids=True),
    Contract("0.6.7", "0.6.9", None, False, _METADATA_5, 2, finalize_option=False, misreads_gemm2_ids=True),
    Contract("0.6.10", "0.6.10", None, True, _METADATA_5, 2, finalize_option=False, misreads_gemm2_ids=True),
    Contract("0.6.11", "0.6.12", None, True, _METADATA_6, 2, finalize_option=False, misreads_gemm2_ids=True),
    Contract("0.6.13", "0.6.14", (), True, _METADATA_6, 2, finalize_option=False, misreads_gemm2_ids=True),
    Contract("0.6.15", "0.6.17", (), True, _METADATA_6, 2),
    Contract("0.6.18", "0.6.18", _EXTRAS_WITH_RANKS, True, _METADATA_6, 2),
    Contract("0.7.0", "0.7.0", _EXTRAS_WITH_RANKS, True, _METADATA_7, 2, managed_store=True),
    Contract("0.7.1", "0.7.1", _EXTRAS_WITH_RANKS, True, _METADATA_7, 3, managed_store=True),
    Contract("0.7.2", "0.7.2", _EXTRAS, True, _METADATA_7, 3, managed_store=True),
    Contract("0.7.4", "0.7.4", _EXTRAS, True, _METADATA_7, 4, managed_store=True),
)
#: The ``_metadata`` keys of the default version.
METADATA_KEYS = CONTRACTS[-1].metadata_keys


def _release(version: str) -> tuple[int, ...]:
    m = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if m is None:
        raise SynthError(f"{version!r} is not a FlashInfer version; expected, for example, {DEFAULT_FLASHINFER}")
    return tuple(int(x) for x in m.groups())


@functools.cache
def contract_for(flashinfer: str = DEFAULT_FLASHINFER) -> Contract:
    """Return the contract of one FlashInfer version; a post-release counts as its release.

    Raises
    ------
    SynthError
        When the version is not known.
    """
    release = _release(flashinfer)
    for contract in CONTRACTS:
        if _release(contract.first) <= release <= _release(contract.last):
            return contract
    raise SynthError(
        f"FlashInfer {flashinfer} is not known; known: the releases from {CONTRACTS[0].first} to {CONTRACTS[-1].last}; "
        "name one of these or update synth"
    )


def served_id(table: TacticTable, stage: int, tactic_id: int) -> int:
    """Return the id of the tactic that FlashInfer runs where an entry says `tactic_id`.

    Up to 0.6.14 the tuner times gemm2's tactics under their ids, but the operation adds gemm1's number of tactics to an
    id that is less than gemm2's. On SM120 with NVFP4, whose gemm2 has twice gemm1's tactics, every tactic without
    swapped operands is thus tuned and the one with them served. Later versions serve what was tuned (FlashInfer pull
    request 3661).
    """
    shifted = contract_for(table.flashinfer).misreads_gemm2_ids and stage == 2 and 0 <= tactic_id < len(table.gemm2)
    return tactic_id + len(table.gemm1) if shifted else tactic_id


def entry_id(table: TacticTable, stage: int, tactic: Tactic) -> int:
    """Return the id that an entry must hold for FlashInfer to run `tactic`: the inverse of :func:`served_id`.

    Raises
    ------
    SynthError
        When there is no such tactic in this stage.
    """
    wanted = table.id_of(stage, tactic)
    return wanted if served_id(table, stage, wanted) == wanted else wanted - len(table.gemm1)


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


# ---- buckets -----------------------------------------------------------------------------------------------


def _hybrid_grid(max_tokens: int) -> tuple[int, ...]:
    grid = [1, 2, 4, 8, 16, 32, 64, 128, 256, *range(512, 2049, 256), *range(2560, 4097, 512)]
    while grid[-1] < max_tokens:
        grid.append(grid[-1] * 2)
    return tuple(b for b in grid if b <= max_tokens)


def token_buckets(max_tokens: int, flashinfer: str = DEFAULT_FLASHINFER) -> tuple[int, ...]:
    """Return the token counts that FlashInfer tunes at, for one ``tune_max_num_tokens``.

    Parameters
    ----------
    max_tokens : int
        At least 1. A maximum off the grid is appended (hybrid grid only).
    flashinfer : str
        FlashInfer version.

    Examples
    --------
    >>> token_buckets(600)
    (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 600)
    """
    if max_tokens < 1:
        raise SynthError(f"the maximum token count must be at least 1, not {max_tokens}")
    if not contract_for(flashinfer).hybrid_buckets:
        return tuple(2**i for i in range(max_tokens.bit_length()))
    grid = _hybrid_grid(max_tokens)
    return grid if grid[-1] == max_tokens else (*grid, max_tokens)


def map_to_bucket(tokens: int, max_tokens: int, flashinfer: str = DEFAULT_FLASHINFER) -> int:
    """Return the bucket that FlashInfer looks up for `tokens`: rounded up and clamped to the maximum.

    Versions before 0.6.10 round down to a power of two. With a maximum that is none, they look a power of two above it
    up in a bucket of the maximum, which they never tune.
    """
    if max_tokens < 1:
        raise SynthError(f"the maximum token count must be at least 1, not {max_tokens}")
    if tokens < 1:
        return 1
    if not contract_for(flashinfer).hybrid_buckets:
        return min(1 << (tokens.bit_length() - 1), max_tokens)
    if tokens >= max_tokens:
        return max_tokens
    if tokens <= 256:
        # Not clamped: with a maximum of 200, FlashInfer looks 150 tokens up in bucket 256, which it never tunes.
        return next_power_of_2(tokens)
    if tokens > 4096:
        return min(next_power_of_2(tokens), max_tokens)
    step = 256 if tokens <= 2048 else 512
    return min(-(-tokens // step) * step, max_tokens)


def next_power_of_2(tokens: int) -> int:
    """Return the smallest power of two that is at least `tokens`: the maximum that SGLang passes."""
    return 1 << max(tokens - 1, 0).bit_length()


def is_grid_bucket(bucket: int, flashinfer: str = DEFAULT_FLASHINFER) -> bool:
    """Tell whether `bucket` is on the grid; another one is looked up only by a server with that very maximum."""
    return bucket >= 1 and map_to_bucket(bucket, 2 * next_power_of_2(bucket), flashinfer) == bucket


# ---- keys --------------------------------------------------------------------------------------------------


def arch_number(arch: str) -> int:
    """Return 90 for ``"sm90"``.

    Raises
    ------
    SynthError
        When `arch` is not of that form.
    """
    m = re.fullmatch(r"sm(\d{2,3})", arch)
    if m is None:
        raise SynthError(f"{arch!r} is not an architecture; expected, for example, sm90 or sm120")
    return int(m[1])


def arch_of(device_name: str | None) -> str | None:
    """Return the architecture whose tactics run on a device of the catalogue, None for a device not in it."""
    if device_name is None:
        return None
    try:
        return get_device(device_name).tactics_arch
    except SynthError:
        return None


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
    values: dict[str, Extra] = {
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
        "activation_type": _activation_number(deployment),
        "use_packed_weights": False,
        "use_fused_finalize": fused_finalize,
    }
    return render_keys(contract_for(flashinfer), OPS[stage], _shapes(deployment, signature, bucket), values)


def _activation_number(deployment: Deployment) -> int:
    try:
        number = ACTIVATIONS[deployment.activation]
    except KeyError:
        known = ", ".join(ACTIVATIONS)
        raise SynthError(f"activation {deployment.activation!r} is not known; known: {known}") from None
    if ACTIVATION_TYPES[number][1] != deployment.shape.gated:
        has = "has a gate" if ACTIVATION_TYPES[number][1] else "has no gate"
        raise SynthError(f"{deployment.activation} {has}, but the shape {deployment.shape} says otherwise")
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
    if contract.extras is None:
        return (str((op, RUNNER, shapes)),)
    tp, ep = (int(values[name]) if "tp_rank" in contract.extras else 1 for name in ("tp_size", "ep_size"))
    return tuple(
        str((op, RUNNER, shapes, tuple({**values, "tp_rank": t, "ep_rank": e}[name] for name in contract.extras)))
        for t, e in itertools.product(range(tp), range(ep))
    )


@dataclass(frozen=True)
class ParsedKey:
    """A file key, taken apart.

    Attributes
    ----------
    text : str
        The key as it is in the file.
    op, runner : str
    shapes : tuple of tuple of int
        x, gemm1 weights, gemm1 bias, gemm2 weights, gemm2 bias.
    extras : tuple or None
        None in the 3-tuple keys of FlashInfer up to 0.6.12.
    """

    text: str
    op: str
    runner: str
    shapes: tuple[tuple[int, ...], ...]
    extras: tuple[Extra, ...] | None

    @property
    def stage(self) -> int | None:
        """1 or 2, None for another operation."""
        return next((stage for stage, op in OPS.items() if op == self.op), None)

    @property
    def bucket(self) -> int:
        """The token bucket."""
        return self.shapes[0][0]

    @property
    def rendered(self) -> str:
        """The key as FlashInfer writes it."""
        head = (self.op, self.runner, self.shapes)
        return str(head if self.extras is None else (*head, self.extras))

    def named(self, flashinfer: str = DEFAULT_FLASHINFER) -> dict[str, Extra]:
        """Return the extras by name.

        Raises
        ------
        SynthError
            When the key has another form than this version's, or this version's keys have no extras.
        """
        names = contract_for(flashinfer).extras
        if not names or self.extras is None or len(names) != len(self.extras):
            raise SynthError(f"{_form_text(self.extras)} has no extras that FlashInfer {flashinfer} knows by name")
        return dict(zip(names, self.extras, strict=True))

    def group(self) -> tuple[tuple[tuple[int, ...], ...], tuple[Extra, ...] | None]:
        """Return what all keys of one layer and call have in common: everything but operation and bucket."""
        return ((self.shapes[0][1:], *self.shapes[1:]), self.extras)

    def quant(self, flashinfer: str = DEFAULT_FLASHINFER) -> str | None:
        """Return the quantization, None for one that synth has no tactics for."""
        e = self.named(flashinfer)
        return quant_of(
            str(e["x_dtype"]),
            str(e["weight_dtype"]),
            mxfp8=e["use_mxfp8_act_scaling"] is True,
            other_scaling=any(
                e[name] is True
                for name in (
                    "use_deepseek_fp8_block_scale",
                    "use_w4_group_scaling",
                    "use_wfp4afp8_humming",
                    "use_packed_weights",
                )
            ),
        )

    def shape(self, flashinfer: str = DEFAULT_FLASHINFER) -> MoEShape:
        """Return the layer on one rank; meaningful only where :func:`unreachable` finds nothing.

        Raises
        ------
        SynthError
            When the key has another form, or the sizes make no layer.
        """
        e = self.named(flashinfer)
        gated = ACTIVATION_TYPES.get(int(e["activation_type"]), ("", True))[1]
        experts, n1, _ = self.shapes[1]
        return MoEShape(
            hidden=self.shapes[3][1],
            inter=n1 // 2 if gated else n1,
            experts=experts,
            top_k=int(e["top_k"]),
            ep_size=int(e["ep_size"]),
            gated=gated,
        )


def quant_of(x_dtype: str, weight_dtype: str, *, mxfp8: bool, other_scaling: bool) -> str | None:
    """Return the quantization of a call by its dtypes and flags, None for one without tactics."""
    if other_scaling:
        return None
    for s in SIGNATURES:
        if (s.x_dtype, s.weight_dtype, s.mxfp8) == (x_dtype, weight_dtype, mxfp8):
            return s.quant
    return None


_MAX_KEY_CHARS = 4096


def parse_file_key(text: str) -> ParsedKey:
    """Take a file key apart. Nothing in it is executed.

    Raises
    ------
    SynthError
        When `text` is not a tuple of operation, runner, shapes and, perhaps, extras.
    """
    if len(text) > _MAX_KEY_CHARS:
        raise SynthError(f"a file key has at most {_MAX_KEY_CHARS} characters, this one {len(text)}")
    try:
        value = _literal(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise SynthError(f"{_short(text)} is not a file key; expected ('trtllm::fused_moe::gemm1', …)") from None
    if not isinstance(value, tuple) or len(value) not in (3, 4):
        raise SynthError(f"{_short(text)} is not a file key: it is not a tuple of 3 or 4 fields")
    op, runner, shapes = value[:3]
    extras = value[3] if len(value) == 4 else None
    if not isinstance(op, str) or not isinstance(runner, str):
        raise SynthError(f"{_short(text)} is not a file key: operation and runner must be text")
    if not _is_shapes(shapes):
        raise SynthError(f"{_short(text)} is not a file key: its third field must hold shapes")
    if extras is not None and not (
        isinstance(extras, tuple) and all(isinstance(v, Dtype) or type(v) in (bool, int) for v in extras)
    ):
        raise SynthError(f"{_short(text)} is not a file key: its extras must be dtypes, numbers and truth values")
    return ParsedKey(text, op, runner, shapes, extras)


def _literal(node: ast.expr) -> object:
    """Turn the few kinds of nodes that a key is made of into values."""
    if isinstance(node, ast.Tuple):
        return tuple(_literal(n) for n in node.elts)
    if isinstance(node, ast.Constant) and isinstance(node.value, (str, int)):
        return node.value
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
        return Dtype(f"torch.{node.attr}")
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _literal(node.operand)
        if type(value) is int:
            return -value
    raise ValueError("not part of a file key")


def _is_shapes(value: object) -> bool:
    return (
        isinstance(value, tuple)
        and len(value) > 0
        and all(isinstance(s, tuple) and len(s) > 0 and all(type(n) is int for n in s) for s in value)
    )


def _short(text: str) -> str:
    return repr(text) if len(text) <= 60 else repr(text[:57] + "…")


# ---- keys that are never looked up -------------------------------------------------------------------------


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


def unreachable(key: ParsedKey, flashinfer: str = DEFAULT_FLASHINFER, arch: str | None = None) -> Unreachable | None:
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
    names = contract_for(flashinfer).extras
    if (names is None) != (key.extras is None) or len(names or ()) != len(key.extras or ()):
        return Unreachable(
            _form_code(key.extras),
            f"{_form_text(key.extras)} {_form_versions(key.extras)}; "
            f"FlashInfer {flashinfer} looks up {_form_text(names)}",
            again,
        )
    if key.rendered != key.text:
        return Unreachable("key-spelling", f"FlashInfer writes this key as {_short(key.rendered)}", again)
    if key.bucket < 1:
        return Unreachable("bucket", f"no token count is rounded to bucket {key.bucket}", again)
    if names:
        return _unreachable_extras(key, flashinfer, arch) or _unreachable_shapes(key, flashinfer)
    return None


_DTYPES = ("x_dtype", "weight_dtype", "output_dtype")
_SIZES = ("top_k", "tp_size", "tp_rank", "ep_size", "ep_rank", "cluster_size", "cluster_rank", "activation_type")


def _unreachable_extras(key: ParsedKey, flashinfer: str, arch: str | None) -> Unreachable | None:
    e = key.named(flashinfer)
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


def _unreachable_shapes(key: ParsedKey, flashinfer: str) -> Unreachable | None:
    e = key.named(flashinfer)
    if [len(s) for s in key.shapes[:2]] != [2, 3] or len(key.shapes) != 5 or len(key.shapes[3]) != 3:
        return Unreachable("shapes", "expected the shapes of x, weights, bias, weights, bias", "correct the key")
    (_, x_cols), (experts, n1, k1), bias1, (experts2, n2, k2), bias2 = key.shapes
    problem = ""
    if min(n for s in (key.shapes[0], key.shapes[1], key.shapes[3]) for n in s) < 1:
        problem = "a size is less than 1"
    elif experts != experts2:
        problem = f"gemm1 has {experts} experts, gemm2 {experts2}"
    elif bias1 not in ((0,), (experts, n1)) or bias2 not in ((0,), (experts, n2)):
        problem = "a bias is neither absent, (0,), nor (experts, columns)"
    elif (quant := key.quant(flashinfer)) is not None:
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


def _form_text(extras: tuple[object, ...] | None) -> str:
    return "a 3-tuple key" if extras is None else f"a 4-tuple key with {len(extras)} extras"


def _form_code(extras: tuple[object, ...] | None) -> str:
    return "key-3-tuple" if extras is None else f"key-{len(extras)}-extras"


def _form_versions(extras: tuple[object, ...] | None) -> str:
    fits = [c for c in CONTRACTS if (c.extras is None) == (extras is None) and len(c.extras or ()) == len(extras or ())]
    return f"fits FlashInfer {fits[0].first} to {fits[-1].last}" if fits else "fits no known FlashInfer"


# ---- metadata ----------------------------------------------------------------------------------------------


def build_metadata(
    device_name: str, flashinfer: str = DEFAULT_FLASHINFER, provenance: Mapping[str, object] | None = None
) -> dict[str, object]:
    """Return a config's ``_metadata``.

    FlashInfer version and GPU are exact: they decide what an id means and how fast it is. The other
    versions are ``"*"``: none of them changes a CUTLASS tactic, which FlashInfer compiles itself.

    Parameters
    ----------
    device_name : str
        Exactly what ``torch.cuda.get_device_name`` gives.
    flashinfer : str
        FlashInfer version.
    provenance : mapping, optional
        Where the entries come from; goes under ``"synth"``, which FlashInfer ignores and keeps.
    """
    keys = contract_for(flashinfer).metadata_keys
    if not keys:
        raise SynthError(f"FlashInfer {flashinfer} reads no JSON configs; they exist since {CONTRACTS[1].first}")
    exact = {"flashinfer_version": flashinfer, "gpu": device_name}
    metadata: dict[str, object] = {key: exact.get(key, "*") for key in keys}
    if provenance:
        metadata["synth"] = dict(provenance)
    return metadata
