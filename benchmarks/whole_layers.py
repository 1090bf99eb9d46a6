"""What benchmarks of whole layers share: FlashInfer tunes a layer, serves it from a config, and is timed as a graph.

FlashInfer's tuner is one per process, and so is the current CUDA device.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from synth.catalog.shapes import Deployment
from synth.errors import SynthError
from synth.flashinfer.buckets import map_to_bucket
from synth.flashinfer.versions import ENV_BUNDLED, OPS
from synth.gpu.layer import Layer
from synth.gpu.libraries import dtype
from synth.gpu.weights import call_signature
from synth.performance.routing import UNIFORM, Routing

#: The ``tune_max_num_tokens`` that FlashInfer's operation has unless another is passed.
DEFAULT_MAX_TOKENS = 8192


class ServedLayer(Layer):
    """A layer that looks its tactics up as a server does, and whose tokens may prefer some experts.

    Parameters
    ----------
    deployment : Deployment
        The layer on one rank.
    max_tokens : int
        The ``tune_max_num_tokens`` of every call.
    device : str
        Where everything lives; becomes the process's current device.

    Raises
    ------
    MissingDependencyError
        When FlashInfer or torch is not installed.
    SynthError
        When the layer has no kernel here, or its weights don't fit.
    """

    def __init__(self, deployment: Deployment, *, max_tokens: int = DEFAULT_MAX_TOKENS, device: str = "cuda") -> None:
        super().__init__(deployment.shape, deployment.quant, deployment.activation, tp=deployment.tp, device=device)
        self.max_tokens = max_tokens

    def inputs(self, tokens: int, sample: int = 0, routing: Routing = UNIFORM) -> dict[str, Any]:
        """Return the arguments of one call, see :meth:`Layer.inputs`.

        The workspace is allocated here, too, so that a captured call allocates next to nothing.

        Parameters
        ----------
        tokens : int
            At least 1.
        sample : int
            Which of many draws; each has its own input and, unless uniform, its own popular experts.
        routing : Routing
            How tokens spread over the experts, see :meth:`synth.performance.routing.Routing.sample`.

        Raises
        ------
        SynthError
            When the routing is not one of this layer: counts of another number of experts.
        """
        shape, signature = self.shape, call_signature(self.quant)
        experts = shape.experts * shape.ep_size
        inputs = {**super().inputs(tokens, sample), "tune_max_num_tokens": self.max_tokens}
        same = {name: inputs[name] for name in ("output_dtype", "activation_type", "tp_size", "ep_size")}
        workspace = self._core.cutlass_fused_moe_workspace_size(
            tokens,
            shape.hidden,
            shape.inter,
            experts,
            shape.top_k,
            x_dtype=dtype(signature.x_dtype),
            weight_dtype=dtype(signature.weight_dtype),
            device=self.device,
            **same,
        )
        inputs["workspace_buffer"] = self._torch.empty(workspace, dtype=self._torch.uint8, device=self.device)
        if not routing.is_uniform:
            rng = np.random.default_rng([0, tokens, sample])
            drawn = routing.sample(experts, shape.top_k, tokens, rng).astype(np.int32)
            inputs["token_selected_experts"] = self._torch.from_numpy(drawn).to(self.device)
        return inputs


def tune(layer: ServedLayer, tokens: Sequence[int], path: Path) -> None:
    """Let FlashInfer's own autotuner choose tactics at the buckets of some token counts, and save them.

    A full tuning times every bucket up to ``tune_max_num_tokens``, about 30 s a layer. ``autotune`` times the given
    buckets instead, each exactly as it would within the whole grid: the same synthesised input, the same candidates,
    a new preparation per bucket and stage. So the tactics are those of a full tuning, up to timing noise. The file's
    keys hold the buckets themselves, so that a later lookup with FlashInfer's own grid finds them.

    Parameters
    ----------
    layer : ServedLayer
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


def served_pair(layer: ServedLayer, inputs: Mapping[str, Any]) -> tuple[int, int]:
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
