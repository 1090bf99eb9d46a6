"""FlashInfer's tuner and operation without a GPU: the compiled module is a stub, all else is FlashInfer's own."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest

from synth.gpu.stub import FakeRunner, StubbedFlashInfer, stubbed_gpu

H200 = "NVIDIA H200"


class Kernels:
    """Stands in for the compiled kernels: keeps each call, fails where told, and fills the output."""

    def __init__(self) -> None:
        self.profiles: list[dict[str, Any]] = []
        self.errors: dict[int, Exception] = {}
        self.outputs: dict[tuple[int, int], float] = {}
        self.workspaces: list[tuple[Any, ...]] = []
        self.layer_calls: list[tuple[Any, ...]] = []

    def run_gemm_profile(self, *args: Any) -> None:
        names = (
            "x", "fc1", "fc1_bias", "fc2", "fc2_bias", "top_k", "tp_size", "tp_rank", "ep_size", "ep_rank",
            "cluster_size", "cluster_rank", "alltoall", "min_latency", "gemm_idx", "tactic", "do_preparation", "pdl",
            "activation",
        )  # fmt: skip
        self.profiles.append(dict(zip(names, args, strict=True)))
        if (error := self.errors.get(args[15])) is not None:
            raise error

    def run_moe(self, *args: Any) -> None:
        pair = next(tuple(a) for a in reversed(args) if isinstance(a, list))
        self.layer_calls.append(args)
        args[0].fill_(self.outputs.get(pair, 1.0))


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """FlashInfer's tuner with a timer that needs no GPU: a tactic takes as many µs as its id says."""
    kernels = Kernels()
    monkeypatch.setattr(FakeRunner, "run_gemm_profile", lambda self, *a: kernels.run_gemm_profile(*a), raising=False)
    monkeypatch.setattr(FakeRunner, "run_moe", lambda self, *a: kernels.run_moe(*a))
    autotuner = importlib.import_module("flashinfer.autotuner.autotuner")
    torch = pytest.importorskip("torch")
    pytest.importorskip("flashinfer.autotuner")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def profile(self: Any, runner: Any, inputs: Any, tactic: int, config: Any, **kwargs: Any) -> float:
        batches = kwargs.pop("input_tensor_batches")
        for i in range(self._get_profiling_repeat(config)):
            runner(batches[i % len(batches)], tactic=tactic, **kwargs)
        return 1e-3 * (100 - tactic if tactic < 45 else tactic)

    monkeypatch.setattr(autotuner.AutoTuner, "_profile_single_kernel", profile)
    core = importlib.import_module("flashinfer.fused_moe.core")

    def workspace(*args: Any, **kwargs: Any) -> int:
        kernels.workspaces.append(args)
        return 256

    monkeypatch.setattr(core, "cutlass_fused_moe_workspace_size", workspace)
    return kernels


@pytest.fixture
def h200(kernels: Kernels) -> Iterator[StubbedFlashInfer]:
    with stubbed_gpu(H200, "sm90") as stub:
        yield stub
