"""Run FlashInfer's CUTLASS MoE on a GPU: time one tactic, or a whole layer.

Two things are here. :class:`GpuRunner` times single tactics of one GEMM through FlashInfer's own autotuner;
``synth collect`` drives it. :class:`Layer` is a whole MoE layer with real inputs, called through the public
``flashinfer.fused_moe.cutlass_fused_moe``; ``benchmarks/layer.py`` times it, and ``synth verify`` compares its output
through :class:`LayerComparator`.

torch and FlashInfer are imported when something is made, never with this module. FlashInfer's tuner is one per
process, and so is the CUDA device of a :class:`GpuRunner`: use one process per GPU.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import importlib.metadata
import math
import os
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from synth.catalog.schemes import STAGES
from synth.catalog.shapes import MoEShape, check_supported
from synth.errors import MissingDependencyError, OutOfMemory, StickyError, SynthError, TacticError
from synth.flashinfer.buckets import map_to_bucket
from synth.flashinfer.calls import ACTIVATION_TYPES, ACTIVATIONS, CallSignature, signatures
from synth.flashinfer.tactics import load_table
from synth.flashinfer.versions import ENV_BUNDLED, OPS
from synth.performance.routing import UNIFORM, Routing

#: FlashInfer's profiler cycles through this many fixed routing samples, one per launch.
ROUTING_SAMPLES = 16
#: The pair of tactics that FlashInfer runs without a config: the first of each stage.
FALLBACK = (-1, -1)
#: The ``tune_max_num_tokens`` that FlashInfer's operation has unless another is passed.
DEFAULT_MAX_TOKENS = 8192

# Standard deviation of weights and unquantized inputs.
_STD = 0.1
# Bytes of one value, and of the block scales that belong to one value.
_VALUE_BYTES = {"bf16": (2.0, 0.0), "fp8": (1.0, 0.0), "nvfp4": (0.5, 1 / 16), "mxfp8_mxfp4": (0.5, 1 / 32)}
_THROTTLE_CACHE_S = 1.0
# NVML's clocks event reasons (nvmlClocksEventReason*), without those that say nothing of heat or power.
_REASONS = {
    0x04: "sw_power_cap",
    0x08: "hw_slowdown",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake",
}
# A power cap is not among them: the heaviest tactics reach it by themselves, in a server too.
_THROTTLING = frozenset(_REASONS.values()) - {"sw_power_cap"}
_NVML_CLOCK_SM, _NVML_CLOCK_MEM, _NVML_TEMPERATURE_GPU = 1, 2, 0
_SMI_FIELDS = {
    "driver": "driver_version",
    "sm_clock_mhz": "clocks.sm",
    "mem_clock_mhz": "clocks.mem",
    "sm_clock_max_mhz": "clocks.max.sm",
    "mem_clock_max_mhz": "clocks.max.mem",
    "power_limit_w": "power.limit",
    "temperature_c": "temperature.gpu",
}


# ---- memory ------------------------------------------------------------------------------------------------


def weight_bytes(shape: MoEShape, quant: str) -> int:
    """Return the bytes of the experts' weights on this rank, block scales included."""
    value, scale = _VALUE_BYTES[quant]
    values = shape.experts * sum(n * k for n, k in map(shape.gemm_nk, STAGES))
    return math.ceil(values * (value + scale))


# ---- one tactic --------------------------------------------------------------------------------------------


class GpuRunner:
    """Times tactics on one GPU, as :class:`synth.collecting.runner.Runner` asks.

    The timing is FlashInfer's own: ``AutoTuner.profile_tactic`` on its ``MoERunner``, without CUDA graph, with a hot
    L2 cache, the mean of 16 launches behind a delay kernel after 3 warm-ups. Each launch takes the next of the
    profiler's 16 routing samples, so each tactic sees all of them.

    Parameters
    ----------
    device : str
        Where everything lives, for example ``"cuda"`` or ``"cuda:1"``; becomes the process's current device.

    Raises
    ------
    MissingDependencyError
        When FlashInfer or torch is not installed.
    SynthError
        When there is no such GPU, or FlashInfer has no tuned tactics for it.

    Attributes
    ----------
    device : torch.device
    arch : str
        Architecture whose tactics run here, for example ``"sm90"``.
    reasons_seen : Counter of str
        How many samples of :meth:`throttle_reasons` had each reason, the power cap included.
    """

    def __init__(self, device: str = "cuda") -> None:
        self._torch, self._core = _import_flashinfer()
        self._flashinfer: str = importlib.import_module("flashinfer").__version__
        self.device = _device(self._torch, device)
        self.arch, self._backend = _arch(self._core, self.device)
        autotuner = importlib.import_module("flashinfer.autotuner")
        self._initializer: Callable[..., Any] = autotuner.autotuner_initializer_rand_scaled
        self._tuner = autotuner.AutoTuner.get()
        self._config = autotuner.TuningConfig(profiling_repeat=ROUTING_SAMPLES)
        self.reasons_seen: Counter[str] = Counter()
        self._nvml = _open_nvml(_uuid(self._torch, self.device))
        self._reasons: tuple[float, frozenset[str]] | None = None
        self._layer: tuple[MoEShape, str, str] | None = None
        self._weights: tuple[Any, Any] | None = None
        self._runner: Any = None
        self._stages: dict[int, range] = {}
        self._bucket: tuple[int, int] | None = None
        # What prepare_tactic_profile gave for the bucket: inputs, config, batches.
        self._profile: tuple[Any, Any, Any] | None = None

    def environment(self) -> dict[str, Any]:
        """Return what the timings depend on. What can't be found out is left out; the GPU's uuid always is.

        Clocks (MHz) and temperature are those of this moment: right after a timing they are those under load.
        """
        torch = self._torch
        found: dict[str, Any] = {
            "device": torch.cuda.get_device_name(self.device),
            "arch": self.arch,
            "cuda": torch.version.cuda,
            "torch": str(torch.__version__),
            "flashinfer": self._flashinfer,
            "cutlass_dsl": _version("nvidia-cutlass-dsl"),
            "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        if self._nvml is not None:
            found |= _read_nvml(*self._nvml)
            found["throttle_reasons"] = sorted(self.throttle_reasons())
        else:
            found |= _read_smi(_uuid(torch, self.device))
        return {k: v for k, v in found.items() if v is not None}

    def counts(self, quant: str) -> tuple[int, int]:
        """Return how many gemm1 and gemm2 tactics the running module has.

        Raises
        ------
        SynthError
            When there are no tactics for `quant` on this architecture: the module is not asked then, since asking it
            for a kernel that it wasn't built with ends the process.
        """
        load_table(self.arch, quant, self._flashinfer)
        return _counts(self._moe_runner(quant, top_k=1, ep_size=1, activation=ACTIVATIONS["swiglu"]))

    def prepare(self, shape: MoEShape, quant: str, activation: str) -> None:
        """Allocate the weights of a layer, in place of those before; nothing happens for the same layer again.

        Parameters
        ----------
        shape : MoEShape
            The layer on one rank. The runner is that of rank 0 of ``shape.ep_size``.
        quant : str
            One of :data:`synth.flashinfer.tactics.QUANTS`.
        activation : str
            A key of :data:`synth.flashinfer.calls.ACTIVATIONS`.

        Raises
        ------
        OutOfMemory
            When the weights don't fit.
        StickyError
            When the CUDA context is lost.
        SynthError
            When FlashInfer has no kernel for the layer, or its tactics are not those of the table.
        """
        if self._layer == (shape, quant, activation):
            return
        number = _activation(shape, activation)
        check_supported(shape, quant)
        table = load_table(self.arch, quant, self._flashinfer)
        self.release()
        runner = self._moe_runner(quant, shape.top_k, shape.ep_size, number)
        known, running = (len(table.gemm1), len(table.gemm2)), _counts(runner)
        if running != known:
            raise SynthError(
                f"the running FlashInfer {self._flashinfer} has {running} gemm1 and gemm2 tactics for {self.arch} "
                f"{quant} and the table has {known}; install the FlashInfer that the table is for"
            )
        with self._failures(f"allocating the {quant} weights of {shape}", SynthError):
            self._weights = _allocate_weights(self._torch, shape, quant, self.device)
        self._runner = runner
        self._stages = {stage: table.ids(stage) for stage in STAGES}
        self._layer = (shape, quant, activation)

    def prepare_bucket(self, stage: int, tokens: int) -> None:
        """Make the inputs of one bucket of the prepared layer, and let FlashInfer draw its routing samples.

        Raises
        ------
        OutOfMemory
            When they don't fit.
        StickyError
            When the CUDA context is lost.
        SynthError
            When FlashInfer can't prepare the bucket, or no layer is prepared.
        """
        if self._layer is None or self._weights is None:
            raise SynthError("no layer is prepared; call prepare first")
        self._bucket = self._profile = None
        shape, quant, _ = self._layer
        signature = _signature(quant)
        with self._failures(f"preparing gemm{stage} of {shape} {quant} at {tokens} tokens", SynthError):
            # The profiler reads only the number of tokens: its activations are its own, as the routing is.
            x = self._initializer(
                (tokens, shape.hidden // signature.x_pack), _dtype(self._torch, signature.x_dtype), self.device
            )
            inputs = [x, self._weights[0], None, self._weights[1], None]
            self._runner.gemm_idx_for_tuning = stage
            self._runner(inputs, tactic=-1, do_preparation=True, gemm_idx=stage)
            config, batches = self._tuner.prepare_tactic_profile(inputs, self._config)
            self._synchronize()
        self._profile = inputs, config, batches
        self._bucket = stage, tokens

    def time(self, stage: int, tokens: int, tactic_id: int) -> float:
        """Return a tactic's time in ms: the mean over the 16 routing samples.

        The bucket is prepared first where another one is: FlashInfer's profiler holds one.

        Raises
        ------
        TacticError
            When the tactic failed and the GPU is fine.
        OutOfMemory
            When there is no memory for it.
        StickyError
            When the CUDA context is lost.
        SynthError
            When the stage has no such tactic.
        """
        if tactic_id not in self._stages.get(stage, ()):
            # FlashInfer would run the other stage's tactic, or its fallback, without a word.
            raise SynthError(f"gemm{stage} of the prepared layer has no tactic {tactic_id}")
        if self._bucket != (stage, tokens):
            self.prepare_bucket(stage, tokens)
        assert self._profile is not None
        inputs, config, batches = self._profile
        with self._failures(f"gemm{stage} tactic {tactic_id} at {tokens} tokens", TacticError):
            ms = float(self._tuner.profile_tactic(self._runner, inputs, tactic_id, config, batches, gemm_idx=stage))
        if not (math.isfinite(ms) and ms > 0):
            raise TacticError(f"gemm{stage} tactic {tactic_id} at {tokens} tokens: the timer gave {ms}")
        return ms

    def throttle_reasons(self) -> frozenset[str]:
        """Return why the GPU holds its clocks down, sampled at most once a second; empty where NVML doesn't say.

        Names are those of NVML: ``sw_power_cap``, ``hw_slowdown``, ``sw_thermal_slowdown``, ``hw_thermal_slowdown``
        and ``hw_power_brake``.
        """
        now = time.monotonic()
        if self._reasons is None or now - self._reasons[0] >= _THROTTLE_CACHE_S:
            reasons = _read_reasons(*self._nvml) if self._nvml is not None else frozenset()
            self.reasons_seen.update(reasons)
            self._reasons = now, reasons
        return self._reasons[1]

    def throttled(self) -> bool:
        """Tell whether the GPU is slowed down by heat or by a power brake.

        The software power cap doesn't count: a heavy GEMM reaches it by itself, and would in a server, so that its
        timing is still its time. It is counted in :attr:`reasons_seen`, and shows as drift of a reference cell.
        """
        return bool(self.throttle_reasons() & _THROTTLING)

    def release(self) -> None:
        """Give the memory back: the layer's weights, its inputs, and the workspace that FlashInfer keeps."""
        held = self._runner is not None
        self._layer = self._weights = self._bucket = self._profile = None
        if held:
            # The profiler's workspace belongs to the compiled runner, which only this dictionary holds.
            type(self._runner).runner_dict.clear()
        self._runner = None
        self._stages = {}
        if held and self.device.type == "cuda":
            self._torch.cuda.empty_cache()

    def _moe_runner(self, quant: str, top_k: int, ep_size: int, activation: int) -> Any:
        """Make FlashInfer's runner as its operation does, for rank 0; tp_size is 1 since it only changes the key."""
        torch, core = self._torch, self._core
        signature = _signature(quant)
        with _on_device(torch, self.device):
            return core.get_cutlass_fused_moe_module(self._backend).MoERunner(
                x_dtype=_dtype(torch, signature.x_dtype),
                weight_dtype=_dtype(torch, signature.weight_dtype),
                output_dtype=torch.bfloat16,
                top_k=top_k,
                tp_size=1,
                tp_rank=0,
                ep_size=ep_size,
                ep_rank=0,
                cluster_size=1,
                cluster_rank=0,
                enable_alltoall=False,
                use_deepseek_fp8_block_scale=False,
                use_w4_group_scaling=False,
                use_mxfp8_act_scaling=signature.mxfp8,
                min_latency_mode=False,
                enable_pdl=core.device_support_pdl(self.device),
                activation_type=core.ActivationType(activation),
                use_packed_weights=False,
                use_fused_finalize=True,
                use_wfp4afp8_humming=False,
            )

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            self._torch.cuda.synchronize()

    @contextlib.contextmanager
    def _failures(self, what: str, otherwise: type[Exception]) -> Iterator[None]:
        """Turn whatever FlashInfer or CUDA raise into what callers can act on."""
        try:
            yield
        except (OutOfMemory, StickyError, TacticError, SynthError):
            raise
        except Exception as e:
            self._bucket = self._profile = None
            # A lost context often reports itself as out of memory later on, so that it is asked about first.
            lost = _lost_context(self._torch)
            if lost is not None:
                raise StickyError(f"{what}: the CUDA context is lost ({_one_line(lost)})") from e
            if _is_out_of_memory(self._torch, e):
                with contextlib.suppress(Exception):
                    self._torch.cuda.empty_cache()
                raise OutOfMemory(f"{what}: out of GPU memory; take fewer tokens or a smaller layer") from e
            raise otherwise(f"{what}: {_one_line(e)}") from e


# ---- a whole layer -----------------------------------------------------------------------------------------


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
    max_tokens : int
        The ``tune_max_num_tokens`` of every call.
    device : str
        Where everything lives; becomes the process's current device.
    seed : int
        Of inputs and routing.

    Raises
    ------
    MissingDependencyError
        When FlashInfer or torch is not installed.
    SynthError
        When the layer has no kernel here, or its weights don't fit.
    """

    def __init__(
        self,
        shape: MoEShape,
        quant: str,
        activation: str = "swiglu",
        *,
        tp: int = 1,
        max_tokens: int = DEFAULT_MAX_TOKENS,
        device: str = "cuda",
        seed: int = 0,
    ) -> None:
        if quant not in ("bf16", "fp8"):
            raise SynthError(f"a whole layer can be run in bf16 and fp8, not in {quant}; time its tactics instead")
        self._torch, self._core = _import_flashinfer()
        self._activation = self._core.ActivationType(_activation(shape, activation))
        check_supported(shape, quant)
        self.shape, self.quant, self.tp, self.max_tokens, self.seed = shape, quant, tp, max_tokens, seed
        self.device = _device(self._torch, device)
        arch, _ = _arch(self._core, self.device)
        load_table(arch, quant, importlib.import_module("flashinfer").__version__)
        try:
            self._weights = _allocate_weights(self._torch, shape, quant, self.device)
        except Exception as e:
            if isinstance(e, SynthError) or not _is_out_of_memory(self._torch, e):
                raise
            raise OutOfMemory(f"the {quant} weights of {shape} don't fit into the GPU's memory") from e
        self._scales = self._quant_scales()

    def inputs(self, tokens: int, routing: Routing = UNIFORM, sample: int = 0) -> dict[str, Any]:
        """Return the arguments of one call of ``cutlass_fused_moe``.

        Tokens go to all ranks' experts, without repeats within a token, the weights of a token summing to 1. Output
        and workspace are allocated here, so that a captured call allocates next to nothing.

        Parameters
        ----------
        tokens : int
            At least 1.
        routing : Routing
            How tokens spread over the experts, see :meth:`synth.performance.routing.Routing.sample`.
        sample : int
            Which of many draws; each has its own input and, unless uniform, its own popular experts.

        Raises
        ------
        SynthError
            When the routing is not one of this layer: counts of another number of experts.
        """
        torch, shape = self._torch, self.shape
        signature = _signature(self.quant)
        x_dtype, weight_dtype = _dtype(torch, signature.x_dtype), _dtype(torch, signature.weight_dtype)
        experts = shape.experts * shape.ep_size
        generator = torch.Generator(device=self.device)
        generator.manual_seed(self.seed + tokens + 1_000_003 * sample)
        # A quantized input has unit scale: quantization would bring it there.
        std = _STD if self.quant == "bf16" else 1.0
        x = torch.empty((tokens, shape.hidden), dtype=torch.bfloat16, device=self.device)
        x.normal_(0, std, generator=generator)
        if routing.is_uniform:
            utils = importlib.import_module("flashinfer.fused_moe.utils")
            ids = utils.make_random_topk_ids(experts, tokens, shape.top_k, self.device, generator)
        else:
            rng = np.random.default_rng([self.seed, tokens, sample])
            drawn = routing.sample(experts, shape.top_k, tokens, rng).astype(np.int32)
            ids = torch.from_numpy(drawn).to(self.device)
        scores = torch.rand((tokens, shape.top_k), dtype=torch.float32, device=self.device, generator=generator)
        scores += 0.1
        workspace = self._core.cutlass_fused_moe_workspace_size(
            tokens,
            shape.hidden,
            shape.inter,
            experts,
            shape.top_k,
            x_dtype=x_dtype,
            weight_dtype=weight_dtype,
            output_dtype=torch.bfloat16,
            activation_type=self._activation,
            tp_size=self.tp,
            ep_size=shape.ep_size,
            device=self.device,
        )
        return {
            "input": x.to(x_dtype),
            "token_selected_experts": ids,
            "token_final_scales": scores / scores.sum(dim=1, keepdim=True),
            "fc1_expert_weights": self._weights[0],
            "fc2_expert_weights": self._weights[1],
            "output_dtype": torch.bfloat16,
            "quant_scales": self._scales,
            "output": torch.empty((tokens, shape.hidden), dtype=torch.bfloat16, device=self.device),
            "workspace_buffer": torch.empty(workspace, dtype=torch.uint8, device=self.device),
            "tp_size": self.tp,
            "ep_size": shape.ep_size,
            "activation_type": self._activation,
            "tune_max_num_tokens": self.max_tokens,
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
        torch, shape = self._torch, self.shape

        def full(size: tuple[int, ...], value: float) -> Any:
            return torch.full(size, value, dtype=torch.float32, device=self.device)

        quantize = 16.0  # Up to 28 standard deviations of the activation's output fit into e4m3's 448.
        return [
            full((shape.experts,), 1 / (_STD * math.sqrt(shape.hidden))),
            full((), quantize),
            full((shape.experts,), 1 / (quantize * _STD * math.sqrt(shape.inter))),
            full((), 1.0),
        ]


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
        try:
            if self._inputs is None or self._inputs[0] != tokens:
                self._inputs = None
                self._inputs = tokens, self._layer.inputs(tokens)
            return self._layer.relative_error(self._inputs[1], pair)
        except Exception as e:
            torch = self._layer._torch
            if isinstance(e, SynthError) or _lost_context(torch) is not None or not _is_out_of_memory(torch, e):
                raise
            raise OutOfMemory(f"{self._layer.shape} at {tokens} tokens doesn't fit into the GPU's memory") from e


def tune(layer: Layer, tokens: Sequence[int], path: Path) -> None:
    """Let FlashInfer's own autotuner choose tactics at the buckets of some token counts, and save them.

    A full tuning times every bucket up to ``tune_max_num_tokens``, about 30 s a layer. ``autotune`` times the given
    buckets instead, each exactly as it would within the whole grid: the same synthesised input, the same candidates,
    a new preparation per bucket and stage. So the tactics are those of a full tuning, up to timing noise. The file's
    keys hold the buckets themselves, so that a later lookup with FlashInfer's own grid finds them.

    Parameters
    ----------
    layer : Layer
    tokens : sequence of int
        Each is rounded up to its bucket.
    path : Path
        A v1 JSON file; one that is there is replaced.
    """
    autotuner = importlib.import_module("flashinfer.autotuner")
    buckets = tuple(sorted({map_to_bucket(t, layer.max_tokens) for t in tokens}))
    path.unlink(missing_ok=True)
    autotuner.AutoTuner.get().clear_cache()
    inputs = layer.inputs(buckets[0])
    # Buckets given by hand are floored unless asked otherwise; FlashInfer's grid rounds up.
    with autotuner.autotune(True, cache=str(path), tuning_buckets=buckets, round_up=True):
        layer.call(inputs)
    if not path.is_file():
        raise SynthError(f"FlashInfer's autotuner saved no tactics for {layer.shape} {layer.quant}; see its log")


@contextlib.contextmanager
def serving(path: Path) -> Iterator[None]:
    """Let FlashInfer serve from a config and from nothing else, as a server does that loads it.

    Tactics that this process tuned come before any file, so that they are forgotten first.
    """
    autotuner = importlib.import_module("flashinfer.autotuner")
    autotuner.AutoTuner.get().clear_cache()
    with autotuner.autotune(False, cache=str(path)):
        yield


@contextlib.contextmanager
def serving_bundled() -> Iterator[None]:
    """Let FlashInfer serve from the module for this GPU in its own ``tuning_configs``, and from nothing else.

    Raises
    ------
    SynthError
        When FlashInfer isn't told to read it, or has none for this GPU.
    """
    autotuner = importlib.import_module("flashinfer.autotuner.autotuner")
    if os.environ.get(ENV_BUNDLED) != "1":
        raise SynthError(f"FlashInfer reads bundled configs only with {ENV_BUNDLED}=1; set it")
    module = autotuner.get_config_path(is_module=True)
    try:
        importlib.import_module(module)
    except ImportError as e:
        raise SynthError(f"the installed FlashInfer has no {module}; put the module there") from e
    autotuner.AutoTuner.get().clear_cache()
    yield


@contextlib.contextmanager
def served_tactics() -> Iterator[dict[int, int]]:
    """Record what FlashInfer's tuner hands to the MoE: stage → tactic, -1 for its fallback."""
    tuner = importlib.import_module("flashinfer.autotuner").AutoTuner.get()
    choose = tuner.choose_one
    stages = {op: stage for stage, op in OPS.items()}
    served: dict[int, int] = {}

    def choose_and_record(custom_op: str, *args: Any, **kwargs: Any) -> Any:
        runner, tactic = choose(custom_op, *args, **kwargs)
        if custom_op in stages:
            served[stages[custom_op]] = tactic
        return runner, tactic

    tuner.choose_one = choose_and_record
    try:
        yield served
    finally:
        del tuner.choose_one


def served_pair(layer: Layer, inputs: Mapping[str, Any]) -> tuple[int, int]:
    """Run the layer and return the pair that FlashInfer's tuner served; -1 where it found nothing."""
    with served_tactics() as served:
        layer.call(inputs)
    return served.get(1, -1), served.get(2, -1)


def capture(call: Callable[[], object], calls: int) -> Any:
    """Return a CUDA graph of `calls` calls, after three calls outside of it.

    What the tuner serves at capture stays in the graph.
    """
    torch = importlib.import_module("torch")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    return graph


def eager_ms(call: Callable[[], object]) -> float:
    """Return roughly how long a call takes, in ms, its launch included."""
    torch = importlib.import_module("torch")
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call()
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))


def time_interleaved(graphs: Mapping[str, Any], calls: int, rounds: int) -> dict[str, list[float]]:
    """Time several CUDA graphs in turn, so that drifting clocks favour none of them.

    Parameters
    ----------
    graphs : mapping of str to torch.cuda.CUDAGraph
        Each of `calls` calls.
    calls : int
        Calls in one graph.
    rounds : int
        Timings of each graph. Every round starts with another graph.

    Returns
    -------
    dict of str to list of float
        ms of one call, by round.
    """
    torch = importlib.import_module("torch")
    labels = list(graphs)
    times: dict[str, list[float]] = {label: [] for label in labels}
    for i in range(rounds):
        shift = i % len(labels)
        events = {}
        for label in labels[shift:] + labels[:shift]:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            # While this one runs, the timed replay is already on its way: its launch costs nothing.
            graphs[label].replay()
            start.record()
            graphs[label].replay()
            end.record()
            events[label] = start, end
        torch.cuda.synchronize()
        for label, (start, end) in events.items():
            times[label].append(start.elapsed_time(end) / calls)
    return times


# ---- torch and FlashInfer ----------------------------------------------------------------------------------


def _import_flashinfer() -> tuple[ModuleType, ModuleType]:
    """Return torch and FlashInfer's ``fused_moe.core``."""
    try:
        return importlib.import_module("torch"), importlib.import_module("flashinfer.fused_moe.core")
    except ImportError as e:
        raise MissingDependencyError(
            f"running kernels needs FlashInfer and torch ({_one_line(e)}): pip install 'flashinfer-synth[flashinfer]'"
        ) from e


def _device(torch: ModuleType, name: str) -> Any:
    """Return the torch device, with its index, as the process's current one."""
    device = torch.device(name)
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        raise SynthError("torch sees no CUDA GPU; run this on a machine that has one")
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if device.index >= torch.cuda.device_count():
        raise SynthError(f"there is no GPU {device.index}; torch sees {torch.cuda.device_count()}")
    torch.cuda.set_device(device)
    return device


def _on_device(torch: ModuleType, device: Any) -> contextlib.AbstractContextManager[Any]:
    manager: contextlib.AbstractContextManager[Any] = (
        torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    )
    return manager


def _arch(core: ModuleType, device: Any) -> tuple[str, str]:
    """Return the architecture whose tactics run on `device`, and FlashInfer's name of the module for it."""
    major, minor = core.get_compute_capability(device)
    backend = f"{major * 10 + minor}"
    # FlashInfer builds the same module for both.
    return ("sm120" if backend == "121" else f"sm{backend}"), backend


def _signature(quant: str) -> CallSignature:
    """Return the dtypes of a quantization's call; of NVFP4's two, the one with quantized input."""
    return signatures("vllm", quant)[0]


def _dtype(torch: ModuleType, name: str) -> Any:
    return getattr(torch, name.removeprefix("torch."))


def _activation(shape: MoEShape, activation: str) -> int:
    number = ACTIVATIONS.get(activation)
    if number is None:
        raise SynthError(f"activation {activation!r} is not known; known: {', '.join(ACTIVATIONS)}")
    gated = ACTIVATION_TYPES[number][1]
    if gated != shape.gated:
        raise SynthError(f"{activation} has {'a' if gated else 'no'} gate, but the shape {shape} says otherwise")
    return number


def _counts(runner: Any) -> tuple[int, int]:
    module = runner.fused_moe_runner
    return int(module.get_gemm1_tactic_count()), int(module.get_gemm2_tactic_count())


def _lost_context(torch: ModuleType) -> Exception | None:
    """Return the error that every later CUDA call will raise, None where the context is fine.

    The first synchronization may only report what has failed; a lost context fails the second one too.
    """
    if not torch.cuda.is_initialized():
        return None
    with contextlib.suppress(Exception):
        torch.cuda.synchronize()
    try:
        torch.cuda.synchronize()
    except Exception as e:
        return e
    return None


def _is_out_of_memory(torch: ModuleType, error: Exception) -> bool:
    # FlashInfer's C++ allocates through torch too, but its error arrives as another class.
    return isinstance(error, torch.cuda.OutOfMemoryError) or "out of memory" in str(error).lower()


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:299] + "…"


# ---- weights -----------------------------------------------------------------------------------------------


def _allocate_weights(torch: ModuleType, shape: MoEShape, quant: str, device: Any) -> tuple[Any, Any]:
    """Return gemm1's and gemm2's weights [experts, N, K], with K packed where the format packs it.

    The values are normal(0, 0.1), drawn with a fixed seed, one expert after the other so that little else is
    allocated meanwhile.
    """
    needed = weight_bytes(shape, quant)
    if device.type == "cuda":
        # What torch keeps for later would count as taken.
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(device)
        if needed > free:
            raise OutOfMemory(
                f"the {quant} weights of {shape} take {needed / 2**30:.1f} GiB and {free / 2**30:.1f} GiB of the "
                "GPU's memory are free; take fewer experts (--ep) or a smaller slice (--tp)"
            )
    signature = _signature(quant)
    generator = torch.Generator(device=device)
    generator.manual_seed(0)
    made = []
    for stage in STAGES:
        n, k = shape.gemm_nk(stage)
        weights = torch.empty(
            (shape.experts, n, k // signature.weight_pack), dtype=_dtype(torch, signature.weight_dtype), device=device
        )
        for expert in weights:
            _fill(torch, expert, quant, k, generator)
        made.append(weights)
    return made[0], made[1]


def _fill(torch: ModuleType, expert: Any, quant: str, k: int, generator: Any) -> None:
    if quant == "bf16":
        expert.normal_(0, _STD, generator=generator)
        return
    values = torch.empty((expert.shape[0], k), dtype=torch.bfloat16, device=expert.device)
    values.normal_(0, _STD, generator=generator)
    if quant == "fp8":
        expert.copy_(values)
    else:
        packed = _fp4(torch, values.float(), 16 if quant == "nvfp4" else 32, power_of_2=quant != "nvfp4")
        expert.view(torch.uint8).copy_(packed)


def _fp4(torch: ModuleType, values: Any, block: int, *, power_of_2: bool) -> Any:
    """Round to e2m1 with one scale per `block` values, two to a byte, the first in the low half.

    The scale itself is not kept: FlashInfer's profiler has its own.
    """
    rows, columns = values.shape
    blocks = values.view(rows, columns // block, block)
    largest = blocks.abs().amax(dim=2, keepdim=True).clamp_min(1e-30)
    # OCP MX: 2^(floor(log2(max)) - 2), 2 being e2m1's largest exponent; NVFP4: the largest becomes 6.
    scale = torch.exp2(torch.floor(torch.log2(largest)) - 2) if power_of_2 else largest / 6
    scaled = (blocks / scale).view(rows, columns)
    midpoints = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device=values.device)
    codes = torch.bucketize(scaled.abs(), midpoints, out_int32=True).to(torch.uint8)
    codes |= (scaled < 0).to(torch.uint8) << 3
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


# ---- what the driver says ----------------------------------------------------------------------------------


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _uuid(torch: ModuleType, device: Any) -> str | None:
    """Return the GPU's uuid, to find it again among the driver's GPUs; it is never written down."""
    try:
        return str(torch.cuda.get_device_properties(device).uuid)
    except (AttributeError, AssertionError, RuntimeError, ValueError):
        return None


def _open_nvml(uuid: str | None) -> tuple[Any, Any] | None:
    """Return pynvml and its handle of the GPU, None where there is no NVML."""
    if uuid is None:
        return None
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:
        # Not installed, or no driver library: another error class with each of its versions.
        return None
    for name in (f"GPU-{uuid}", f"MIG-{uuid}"):
        with contextlib.suppress(nvml.NVMLError):
            return nvml, nvml.nvmlDeviceGetHandleByUUID(name)
    with contextlib.suppress(nvml.NVMLError):
        if nvml.nvmlDeviceGetCount() == 1:
            return nvml, nvml.nvmlDeviceGetHandleByIndex(0)
    return None


def _read_nvml(nvml: Any, handle: Any) -> dict[str, Any]:
    def ask(name: str, *args: Any) -> Any:
        try:
            value = getattr(nvml, name)(*args)
        except (AttributeError, nvml.NVMLError):
            return None
        return value.decode() if isinstance(value, bytes) else value

    power = ask("nvmlDeviceGetEnforcedPowerLimit", handle)
    return {
        "driver": ask("nvmlSystemGetDriverVersion"),
        "sm_clock_mhz": ask("nvmlDeviceGetClockInfo", handle, _NVML_CLOCK_SM),
        "mem_clock_mhz": ask("nvmlDeviceGetClockInfo", handle, _NVML_CLOCK_MEM),
        "sm_clock_max_mhz": ask("nvmlDeviceGetMaxClockInfo", handle, _NVML_CLOCK_SM),
        "mem_clock_max_mhz": ask("nvmlDeviceGetMaxClockInfo", handle, _NVML_CLOCK_MEM),
        "power_limit_w": power / 1000 if power is not None else None,
        "temperature_c": ask("nvmlDeviceGetTemperature", handle, _NVML_TEMPERATURE_GPU),
    }


def _read_reasons(nvml: Any, handle: Any) -> frozenset[str]:
    # The second is the first's name before driver 535.
    for name in ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"):
        try:
            bits = int(getattr(nvml, name)(handle))
        except (AttributeError, nvml.NVMLError):
            continue
        return frozenset(reason for bit, reason in _REASONS.items() if bits & bit)
    return frozenset()


def _read_smi(uuid: str | None) -> dict[str, Any]:
    """Ask ``nvidia-smi`` what :func:`_read_nvml` asks NVML."""
    if uuid is None:
        return {}
    query = f"--query-gpu={','.join(_SMI_FIELDS.values())}"
    command = ["nvidia-smi", "-i", f"GPU-{uuid}", query, "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    values = [value.strip() for value in answer.strip().split(",")]
    if len(values) != len(_SMI_FIELDS):
        return {}
    found: dict[str, Any] = dict(zip(_SMI_FIELDS, values, strict=True))
    for name in found.keys() - {"driver"}:
        try:
            number = float(found[name])
        except ValueError:
            # "[N/A]"
            found[name] = None
        else:
            found[name] = number if name == "power_limit_w" else int(number)
    return found
