"""Time single tactics of one GEMM through FlashInfer's own autotuner; ``synth collect`` drives it.

FlashInfer's tuner is one per process, and so is the current CUDA device: use one process per GPU.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from synth.catalog.schemes import STAGES
from synth.catalog.shapes import Deployment, MoEShape, check_supported
from synth.errors import OutOfMemory, StickyError, SynthError, TacticError
from synth.flashinfer.keys import activation_number, call_extras
from synth.flashinfer.tactics import load_table
from synth.gpu.cuda import architecture, is_out_of_memory, lost_context, select_device
from synth.gpu.driver import Driver
from synth.gpu.libraries import dtype, installed_flashinfer, load_core, load_flashinfer, load_torch, moe_runner
from synth.gpu.weights import allocate_weights, call_signature

#: FlashInfer's profiler cycles through this many fixed routing samples, one per launch.
ROUTING_SAMPLES = 16
# How many tactics there are doesn't depend on the layer.
_ANY_LAYER = MoEShape(128, 128, 1, 1)


class _Layer(NamedTuple):
    """A layer whose weights are allocated, FlashInfer's runner of it, and the tactic ids of its stages."""

    shape: MoEShape
    quant: str
    activation: str
    weights: tuple[Any, Any]
    runner: Any
    ids: dict[int, range]


class _Bucket(NamedTuple):
    """A stage and token count, and what FlashInfer's ``prepare_tactic_profile`` gave for it."""

    stage: int
    tokens: int
    inputs: list[Any]
    config: Any
    batches: Any


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
    """

    def __init__(self, device: str = "cuda") -> None:
        self._flashinfer = installed_flashinfer()
        self._torch, self._core = load_torch(), load_core()
        self.device = select_device(device)
        self.arch, self._backend = architecture(self.device)
        autotuner = load_flashinfer("autotuner")
        self._draw: Callable[..., Any] = autotuner.autotuner_initializer_rand_scaled
        self._tuner = autotuner.AutoTuner.get()
        self._config = autotuner.TuningConfig(profiling_repeat=ROUTING_SAMPLES)
        self._driver = Driver(self.device)
        self._layer: _Layer | None = None
        self._bucket: _Bucket | None = None

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
        }
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found["cutlass_dsl"] = importlib.metadata.version("nvidia-cutlass-dsl")
        found["date"] = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        found |= self._driver.environment()
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
        return _counts(self._moe_runner(_ANY_LAYER, quant, "swiglu"))

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
        if self._layer is not None and self._layer[:3] == (shape, quant, activation):
            return
        activation_number(activation, shape)
        check_supported(shape, quant)
        table = load_table(self.arch, quant, self._flashinfer)
        self.release()
        runner = self._moe_runner(shape, quant, activation)
        known, running = (len(table.gemm1), len(table.gemm2)), _counts(runner)
        if running != known:
            raise SynthError(
                f"the running FlashInfer {self._flashinfer} has {running} gemm1 and gemm2 tactics for {self.arch} "
                f"{quant} and the table has {known}; install the FlashInfer that the table is for"
            )
        with self._failures(f"allocating the {quant} weights of {shape}", SynthError):
            weights = allocate_weights(shape, quant, self.device)
            ids = {stage: table.ids(stage) for stage in STAGES}
            self._layer = _Layer(shape, quant, activation, weights, runner, ids)

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
        self._bucket = None
        if self._layer is None:
            raise SynthError("no layer is prepared; call prepare first")
        shape, quant, _, weights, runner, _ = self._layer
        signature = call_signature(quant)
        with self._failures(f"preparing gemm{stage} of {shape} {quant} at {tokens} tokens", SynthError):
            # The profiler reads only the number of tokens: its activations are its own, as the routing is.
            x = self._draw((tokens, shape.hidden // signature.x_pack), dtype(signature.x_dtype), self.device)
            inputs = [x, weights[0], None, weights[1], None]
            runner.gemm_idx_for_tuning = stage
            runner(inputs, tactic=-1, do_preparation=True, gemm_idx=stage)
            config, batches = self._tuner.prepare_tactic_profile(inputs, self._config)
            if self.device.type == "cuda":
                self._torch.cuda.synchronize()
            self._bucket = _Bucket(stage, tokens, inputs, config, batches)

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
        if self._layer is None or tactic_id not in self._layer.ids.get(stage, ()):
            # FlashInfer would run the other stage's tactic, or its fallback, without a word.
            raise SynthError(f"gemm{stage} of the prepared layer has no tactic {tactic_id}")
        if self._bucket is None or self._bucket[:2] != (stage, tokens):
            self.prepare_bucket(stage, tokens)
        assert self._bucket is not None
        _, _, inputs, config, batches = self._bucket
        with self._failures(f"gemm{stage} tactic {tactic_id} at {tokens} tokens", TacticError):
            ms = self._tuner.profile_tactic(self._layer.runner, inputs, tactic_id, config, batches, gemm_idx=stage)
        if not (math.isfinite(ms) and ms > 0):
            raise TacticError(f"gemm{stage} tactic {tactic_id} at {tokens} tokens: the timer gave {ms}")
        return float(ms)

    def throttled(self) -> bool:
        """Tell whether the GPU is slowed down by heat or by a power brake, see :meth:`Driver.throttled`."""
        return self._driver.throttled()

    def release(self) -> None:
        """Give the memory back: the layer's weights, its inputs, and the workspace that FlashInfer keeps."""
        if self._layer is None:
            return
        # The profiler's workspace belongs to the compiled runner, which only this dictionary and the layer hold.
        type(self._layer.runner).runner_dict.clear()
        self._layer = self._bucket = None
        if self.device.type == "cuda":
            self._torch.cuda.empty_cache()

    def _moe_runner(self, shape: MoEShape, quant: str, activation: str) -> Any:
        """Make FlashInfer's runner as its operation does, for rank 0; tp_size is 1 since it only changes the key."""
        deployment = Deployment("", 1, shape.ep_size, quant, activation, False, shape)
        extras = call_extras(deployment, call_signature(quant), self.arch)
        on_device = self._torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()
        with on_device:
            return moe_runner(self._core.get_cutlass_fused_moe_module(self._backend).MoERunner, extras, self.device)

    @contextlib.contextmanager
    def _failures(self, what: str, otherwise: type[Exception]) -> Iterator[None]:
        """Turn whatever FlashInfer or CUDA raise into what callers can act on."""
        try:
            yield
        except (StickyError, TacticError, SynthError):
            raise
        except Exception as e:
            self._bucket = None
            # A lost context often reports itself as out of memory later on, so that it is asked about first.
            lost = lost_context()
            if lost is not None:
                raise StickyError(f"{what}: the CUDA context is lost ({_one_line(lost)})") from e
            if is_out_of_memory(e):
                with contextlib.suppress(Exception):
                    self._torch.cuda.empty_cache()
                raise OutOfMemory(f"{what}: out of GPU memory; take fewer tokens or a smaller layer") from e
            raise otherwise(f"{what}: {_one_line(e)}") from e


def _counts(runner: Any) -> tuple[int, int]:
    module = runner.fused_moe_runner
    return int(module.get_gemm1_tactic_count()), int(module.get_gemm2_tactic_count())


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:299] + "…"
