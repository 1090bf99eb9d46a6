"""What FlashInfer is asked for when a tactic is timed; the compiled module is a stub, all else is FlashInfer's own."""

from __future__ import annotations

import math
from typing import Any

import pytest
from fake_kernels import H200, Kernels

from synth.catalog.shapes import Deployment, MoEShape
from synth.errors import OutOfMemory, StickyError, SynthError, TacticError, UnsupportedShapeError
from synth.flashinfer.keys import file_keys
from synth.gpu.stub import FakeRunner, StubbedFlashInfer, stubbed_gpu
from synth.gpu.timing import GpuRunner

torch = pytest.importorskip("torch")

RTX = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
SHAPE = MoEShape(256, 128, 4, 2)


@pytest.fixture
def runner(h200: StubbedFlashInfer) -> GpuRunner:
    return GpuRunner("cpu")


def lose_context(monkeypatch: pytest.MonkeyPatch, *, times: int = 10**6) -> None:
    """Let `times` synchronizations fail."""
    left = [times]

    def synchronize() -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with TORCH_USE_CUDA_DSA")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)


@pytest.mark.parametrize(
    ("device", "arch", "quant", "x", "fc1", "fc2"),
    [
        (H200, "sm90", "bf16", (torch.bfloat16, 256), (torch.bfloat16, 256), (torch.bfloat16, 128)),
        (H200, "sm90", "fp8", (torch.float8_e4m3fn, 256), (torch.float8_e4m3fn, 256), (torch.float8_e4m3fn, 128)),
        (RTX, "sm120", "nvfp4", (torch.uint8, 128), (torch.int64, 16), (torch.int64, 8)),
        (RTX, "sm120", "mxfp8_mxfp4", (torch.float8_e4m3fn, 256), (torch.int64, 16), (torch.int64, 8)),
    ],
)
@pytest.mark.parametrize("gated", [True, False])
def test_inputs_are_those_that_the_key_names(
    kernels: Kernels, device: str, arch: str, quant: str, x: Any, fc1: Any, fc2: Any, gated: bool
) -> None:
    activation = "swiglu" if gated else "relu2"
    shape = MoEShape(256, 128, 4, 2, 8, gated)
    with stubbed_gpu(device, arch):
        runner = GpuRunner("cpu")
        runner.prepare(shape, quant, activation)
        runner.prepare_bucket(2, 64)
        call = kernels.profiles[-1]
        inputs = [call[name] for name in ("x", "fc1", "fc1_bias", "fc2", "fc2_bias")]
        key = runner._tuner._get_cache_key(
            "trtllm::fused_moe::gemm2",
            runner._layer.runner,
            runner._tuner._get_input_sizes(inputs),
            runner._config,
            runner._layer.runner.get_cache_key_extras(inputs),
        )
    assert (call["x"].dtype, call["fc1"].dtype, call["fc2"].dtype) == (x[0], fc1[0], fc2[0])
    assert call["x"].shape == (64, x[1])
    assert call["fc1"].shape == (4, 256 if gated else 128, fc1[1])
    assert call["fc2"].shape == (4, 256, fc2[1])
    assert (call["fc1_bias"], call["fc2_bias"]) == (None, None)
    assert (call["top_k"], call["ep_size"], call["ep_rank"], call["tp_size"], call["pdl"]) == (2, 8, 0, 1, True)
    assert int(call["activation"]) == (3 if gated else 6)
    deployment = Deployment("m", 1, 8, quant, activation, False, shape)
    assert key.file_key in file_keys(deployment, "vllm", 64, 2, arch)


@pytest.mark.parametrize("quant", ["bf16", "fp8"])
def test_weights_are_normal(runner: GpuRunner, quant: str) -> None:
    runner.prepare(SHAPE, quant, "swiglu")
    assert runner._layer is not None
    for weights in runner._layer.weights:
        values = weights.float()
        assert abs(values.mean()) < 0.005 and abs(values.std() - 0.1) < 0.005
        assert not torch.equal(values[0], values[1])


def test_weights_stay_for_the_same_layer_and_go_with_release(runner: GpuRunner) -> None:
    runner.prepare(SHAPE, "bf16", "swiglu")
    weights = runner._layer.weights  # type: ignore[union-attr]
    runner.prepare(SHAPE, "bf16", "swiglu")
    assert runner._layer.weights is weights  # type: ignore[union-attr]
    moe_runner = type(runner._layer.runner)
    assert moe_runner.runner_dict
    runner.release()
    assert runner._layer is None and not moe_runner.runner_dict
    with pytest.raises(SynthError, match="no layer is prepared"):
        runner.prepare_bucket(1, 8)
    runner.release()


@pytest.mark.parametrize(
    ("shape", "quant", "activation", "error", "message"),
    [
        (MoEShape(250, 128, 4, 2), "bf16", "swiglu", UnsupportedShapeError, "multiple of 8"),
        (SHAPE, "nvfp4", "swiglu", SynthError, "no tactics known for sm90 nvfp4"),
        (SHAPE, "bf16", "relu2", SynthError, "no gate"),
        (SHAPE, "bf16", "tanh", SynthError, "not known"),
    ],
)
def test_a_layer_without_kernels_is_refused_before_any_call(
    runner: GpuRunner, h200: StubbedFlashInfer, shape: MoEShape, quant: str, activation: str, error: Any, message: str
) -> None:
    with pytest.raises(error, match=message):
        runner.prepare(shape, quant, activation)
    assert h200.runners == []


def test_counts_are_the_modules_and_other_dtypes_are_never_asked(runner: GpuRunner, h200: StubbedFlashInfer) -> None:
    assert runner.counts("bf16") == (45, 81)
    assert runner.counts("fp8") == (36, 72)
    asked = len(h200.runners)
    with pytest.raises(SynthError, match="no tactics known for sm90 mxfp8_mxfp4"):
        runner.counts("mxfp8_mxfp4")
    assert len(h200.runners) == asked


def test_tactics_that_differ_from_the_table_are_refused(runner: GpuRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeRunner, "get_gemm2_tactic_count", lambda self: 80)
    with pytest.raises(SynthError, match=r"\(45, 80\).*\(45, 81\)"):
        runner.prepare(SHAPE, "bf16", "swiglu")


def test_a_timing_is_flashinfers_own_over_every_routing_sample(runner: GpuRunner, kernels: Kernels) -> None:
    runner.prepare(SHAPE, "bf16", "swiglu")
    runner.prepare_bucket(2, 8)
    (preparation,) = kernels.profiles
    assert (preparation["gemm_idx"], preparation["tactic"], preparation["do_preparation"]) == (2, -1, True)
    kernels.profiles.clear()
    assert runner.time(2, 8, 77) == pytest.approx(0.077)
    assert len(kernels.profiles) == 16
    assert {(p["gemm_idx"], p["tactic"], p["do_preparation"]) for p in kernels.profiles} == {(2, 77, False)}
    config = runner._bucket.config  # type: ignore[union-attr]
    assert (config.profiling_repeat, config.use_cuda_graph, config.use_cold_l2_cache) == (16, False, False)
    assert runner._tuner.profiling_cache == {}


def test_another_bucket_is_prepared_before_it_is_timed(runner: GpuRunner, kernels: Kernels) -> None:
    runner.prepare(SHAPE, "bf16", "swiglu")
    runner.time(1, 8, 3)
    runner.time(1, 8, 4)
    runner.time(2, 8, 50)
    runner.time(1, 16, 4)
    prepared = [(p["gemm_idx"], p["x"].shape[0]) for p in kernels.profiles if p["do_preparation"]]
    assert prepared == [(1, 8), (2, 8), (1, 16)]


@pytest.mark.parametrize(("stage", "tactic"), [(1, -1), (1, 45), (2, 44), (2, 126)])
def test_the_other_stages_tactics_are_refused(runner: GpuRunner, stage: int, tactic: int) -> None:
    runner.prepare(SHAPE, "bf16", "swiglu")
    with pytest.raises(SynthError, match=f"no tactic {tactic}"):
        runner.time(stage, 8, tactic)


def test_a_failing_tactic_is_told_from_a_lost_context(
    runner: GpuRunner, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner.prepare(SHAPE, "bf16", "swiglu")
    runner.prepare_bucket(1, 8)
    kernels.errors[5] = RuntimeError("Failed to initialize cutlass TMA WS grouped gemm.\nError: Error Internal")
    with pytest.raises(TacticError) as failed:
        runner.time(1, 8, 5)
    assert str(failed.value) == (
        "gemm1 tactic 5 at 8 tokens: Failed to initialize cutlass TMA WS grouped gemm. Error: Error Internal"
    )
    # The first synchronization may only report the tactic's own error.
    with monkeypatch.context() as m:
        lose_context(m, times=1)
        with pytest.raises(TacticError):
            runner.time(1, 8, 5)
    assert runner.time(1, 8, 6) > 0
    lose_context(monkeypatch)
    with pytest.raises(StickyError, match=r"context is lost .*illegal memory access"):
        runner.time(1, 8, 5)


def test_out_of_memory_is_its_own_error_wherever_it_happens(runner: GpuRunner, kernels: Kernels) -> None:
    runner.prepare(SHAPE, "bf16", "swiglu")
    kernels.errors[-1] = RuntimeError("CUDA out of memory. Tried to allocate 3.00 GiB.")
    with pytest.raises(OutOfMemory, match="preparing gemm1 of h256-i128-e4-k2 bf16 at 8 tokens"):
        runner.prepare_bucket(1, 8)
    kernels.errors = {7: torch.cuda.OutOfMemoryError("no room")}
    with pytest.raises(OutOfMemory, match="gemm1 tactic 7"):
        runner.time(1, 8, 7)


def test_a_bucket_that_cannot_be_prepared_leaves_none_behind(runner: GpuRunner, kernels: Kernels) -> None:
    runner.prepare(SHAPE, "bf16", "swiglu")
    runner.prepare_bucket(1, 8)
    kernels.errors[-1] = RuntimeError("no kernel image")
    with pytest.raises(SynthError, match=r"preparing gemm2 .* no kernel image"):
        runner.prepare_bucket(2, 8)
    kernels.errors.clear()
    kernels.profiles.clear()
    runner.time(1, 8, 0)
    assert kernels.profiles[0]["do_preparation"]


@pytest.mark.parametrize("ms", [math.inf, math.nan, 0.0])
def test_no_time_is_no_timing(runner: GpuRunner, monkeypatch: pytest.MonkeyPatch, ms: float) -> None:
    runner.prepare(SHAPE, "bf16", "swiglu")
    monkeypatch.setattr(type(runner._tuner), "_profile_single_kernel", lambda *a, **k: ms)
    with pytest.raises(TacticError, match="the timer gave"):
        runner.time(1, 8, 0)


def test_ctrl_c_is_not_a_tactics_failure(runner: GpuRunner, kernels: Kernels) -> None:
    runner.prepare(SHAPE, "bf16", "swiglu")
    runner.prepare_bucket(1, 8)
    kernels.errors[5] = KeyboardInterrupt()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        runner.time(1, 8, 5)
