"""What FlashInfer is asked for when kernels are timed; the compiled module is a stub, all else is FlashInfer's own."""

from __future__ import annotations

import csv
import importlib.util
import json
import math
import re
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from synth.catalog.shapes import Deployment, MoEShape
from synth.choosing.choose import choose
from synth.configs.model import Entry
from synth.configs.v1 import dumps_json
from synth.errors import OutOfMemory, StickyError, SynthError, TacticError, UnsupportedShapeError
from synth.flashinfer.keys import file_keys
from synth.flashinfer.versions import build_metadata
from synth.gpu import runtime
from synth.gpu.replay import FakeRunner, StubbedFlashInfer, stubbed_gpu
from synth.gpu.runtime import GpuRunner, Layer, LayerComparator, weight_bytes
from synth.performance.routing import UNIFORM, Routing

torch = pytest.importorskip("torch")
pytest.importorskip("flashinfer.autotuner")

H200 = "NVIDIA H200"
RTX = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
SHAPE = MoEShape(256, 128, 4, 2)


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


# ---- inputs ------------------------------------------------------------------------------------------------


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
            runner._runner,
            runner._tuner._get_input_sizes(inputs),
            runner._config,
            runner._runner.get_cache_key_extras(inputs),
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
    assert runner._weights is not None
    for weights in runner._weights:
        values = weights.float()
        assert abs(values.mean()) < 0.005 and abs(values.std() - 0.1) < 0.005
        assert not torch.equal(values[0], values[1])


@pytest.mark.parametrize(("quant", "block"), [("nvfp4", 16), ("mxfp8_mxfp4", 32)])
def test_fp4_weights_are_the_nearest_values_in_order(quant: str, block: int) -> None:
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    table = torch.cat([levels, -levels])
    values = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    packed = runtime._fp4(torch, values, block, power_of_2=quant != "nvfp4")
    assert packed.shape == (8, 32) and packed.dtype == torch.uint8
    decoded = torch.stack([table[(packed & 15).long()], table[(packed >> 4).long()]], dim=2).view(8, 64)
    blocks, decoded = values.view(8, -1, block), decoded.view(8, -1, block)
    largest = blocks.abs().amax(2, keepdim=True)
    scale = largest / 6 if quant == "nvfp4" else torch.exp2(torch.floor(torch.log2(largest)) - 2)
    nearest = table[(blocks.unsqueeze(-1) / scale.unsqueeze(-1) - table).abs().argmin(-1)]
    assert torch.equal(decoded.abs(), nearest.abs())
    assert torch.equal(torch.sign(decoded)[decoded != 0], torch.sign(blocks)[decoded != 0])


def test_weights_stay_for_the_same_layer_and_go_with_release(runner: GpuRunner) -> None:
    runner.prepare(SHAPE, "bf16", "swiglu")
    weights = runner._weights
    runner.prepare(SHAPE, "bf16", "swiglu")
    assert runner._weights is weights
    moe_runner = type(runner._runner)
    assert moe_runner.runner_dict
    runner.release()
    assert runner._weights is None and not moe_runner.runner_dict
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


# ---- timing ------------------------------------------------------------------------------------------------


def test_a_timing_is_flashinfers_own_over_every_routing_sample(runner: GpuRunner, kernels: Kernels) -> None:
    runner.prepare(SHAPE, "bf16", "swiglu")
    runner.prepare_bucket(2, 8)
    (preparation,) = kernels.profiles
    assert (preparation["gemm_idx"], preparation["tactic"], preparation["do_preparation"]) == (2, -1, True)
    kernels.profiles.clear()
    assert runner.time(2, 8, 77) == pytest.approx(0.077)
    assert len(kernels.profiles) == 16
    assert {(p["gemm_idx"], p["tactic"], p["do_preparation"]) for p in kernels.profiles} == {(2, 77, False)}
    config = runner._profile[1]  # type: ignore[index]
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


def test_weights_that_do_not_fit_are_refused_before_they_are_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (20 * 2**30, 140 * 2**30))
    with pytest.raises(OutOfMemory, match=r"take 21\.0 GiB and 20\.0 GiB .* are free"):
        runtime._allocate_weights(torch, MoEShape(7168, 2048, 256, 8), "bf16", torch.device("cuda", 0))


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


def test_weights_are_those_of_every_expert_and_both_stages() -> None:
    shape = MoEShape(7168, 2048, 32, 8, 8)
    assert weight_bytes(shape, "bf16") == 32 * 7168 * 2048 * 3 * 2
    assert weight_bytes(shape, "fp8") == weight_bytes(shape, "bf16") // 2
    assert weight_bytes(shape, "bf16") // 4 < weight_bytes(shape, "nvfp4") < weight_bytes(shape, "fp8")


# ---- the driver --------------------------------------------------------------------------------------------


class NVMLError(Exception):
    pass


class FakeNvml(types.ModuleType):
    """As much of pynvml as is asked, of a driver that has no old name for the reasons."""

    NVMLError = NVMLError

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.reasons = 0
        self.samples = 0

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != "GPU-1234":
            raise NVMLError("not found")
        return "handle"

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"580.159.03"

    def nvmlDeviceGetClockInfo(self, _handle: str, kind: int) -> int:
        return {1: 1755, 2: 3201}[kind]

    def nvmlDeviceGetMaxClockInfo(self, _handle: str, kind: int) -> int:
        return {1: 1980, 2: 3201}[kind]

    def nvmlDeviceGetEnforcedPowerLimit(self, _handle: str) -> int:
        return 700_000

    def nvmlDeviceGetTemperature(self, _handle: str, _sensor: int) -> int:
        raise NVMLError("not supported")

    def nvmlDeviceGetCurrentClocksEventReasons(self, _handle: str) -> int:
        self.samples += 1
        return self.reasons


@pytest.fixture
def nvml(h200: StubbedFlashInfer, monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    module = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: types.SimpleNamespace(uuid="1234"))
    return module


def test_the_environment_says_all_but_the_uuid(nvml: FakeNvml) -> None:
    nvml.reasons = 0x4
    environment = GpuRunner("cpu").environment()
    assert environment.pop("date").startswith("20")
    assert environment.pop("torch") == torch.__version__
    environment.pop("cuda", None), environment.pop("cutlass_dsl", None)
    assert environment == {
        "device": H200,
        "arch": "sm90",
        "flashinfer": "0.7.4",
        "driver": "580.159.03",
        "sm_clock_mhz": 1755,
        "mem_clock_mhz": 3201,
        "sm_clock_max_mhz": 1980,
        "mem_clock_max_mhz": 3201,
        "power_limit_w": 700.0,
        "throttle_reasons": ["sw_power_cap"],
    }
    assert "1234" not in json.dumps(GpuRunner("cpu").environment())


def test_without_nvml_the_environment_asks_nvidia_smi(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    asked: list[list[str]] = []

    def run(command: list[str], **_options: Any) -> Any:
        asked.append(command)
        return types.SimpleNamespace(stdout="580.159.03, 1755, 3201, 1980, 3201, 700.00, [N/A]\n")

    monkeypatch.setattr(runtime.subprocess, "run", run)
    environment = GpuRunner("cpu").environment()
    assert asked[0][:3] == ["nvidia-smi", "-i", "GPU-1234"]
    assert (environment["driver"], environment["sm_clock_mhz"], environment["power_limit_w"]) == (
        "580.159.03",
        1755,
        700.0,
    )
    assert "temperature_c" not in environment and "1234" not in json.dumps(environment)
    assert not GpuRunner("cpu").throttled()


def test_without_any_driver_tool_the_environment_is_shorter(runner: GpuRunner) -> None:
    environment = runner.environment()
    assert environment["device"] == H200 and "driver" not in environment


@pytest.mark.parametrize(
    ("bits", "throttled"), [(0, False), (0x1, False), (0x4, False), (0x20, True), (0x44, True), (0x88, True)]
)
def test_heat_and_power_brake_throttle_and_the_power_cap_is_only_counted(
    nvml: FakeNvml, bits: int, throttled: bool
) -> None:
    nvml.reasons = bits
    runner = GpuRunner("cpu")
    assert runner.throttled() is throttled
    assert runner.reasons_seen["sw_power_cap"] == bool(bits & 0x4)


def test_the_driver_is_asked_at_most_once_a_second(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(runtime.time, "monotonic", lambda: now[0])
    runner = GpuRunner("cpu")
    for _ in range(5):
        runner.throttled()
    assert nvml.samples == 1
    now[0] += 1.5
    nvml.reasons = 0x40
    assert runner.throttled() and nvml.samples == 2


# ---- a whole layer -----------------------------------------------------------------------------------------


def test_a_layers_inputs_are_what_the_binding_checks(h200: StubbedFlashInfer, kernels: Kernels) -> None:
    shape = MoEShape(256, 128, 4, 2, 8)
    layer = Layer(shape, "fp8", tp=2, device="cpu")
    inputs = layer.inputs(16)
    assert inputs["input"].dtype == torch.float8_e4m3fn and inputs["input"].shape == (16, 256)
    ids, weights = inputs["token_selected_experts"], inputs["token_final_scales"]
    assert ids.dtype == torch.int32 and ids.shape == (16, 2) and 4 <= ids.max() < 32
    assert all(len(set(row)) == 2 for row in ids.tolist())
    assert weights.dtype == torch.float32 and torch.allclose(weights.sum(1), torch.ones(16))
    scales = inputs["quant_scales"]
    assert [(s.dtype, tuple(s.shape)) for s in scales] == [(torch.float32, s) for s in ((4,), (), (4,), ())]
    assert float(scales[0][0]) == pytest.approx(10 / 16)
    assert float(scales[1] * scales[2][0]) == pytest.approx(10 / math.sqrt(128))
    assert kernels.workspaces == [(16, 256, 128, 32, 2)]
    assert (inputs["tp_size"], inputs["ep_size"], inputs["tune_max_num_tokens"]) == (2, 8, 8192)
    layer.call(inputs, (3, 40))
    call = kernels.layer_calls[-1]
    assert call[0] is inputs["output"] and call[8] is scales and [3, 40] in [a for a in call if isinstance(a, list)]
    assert Layer(shape, "bf16", device="cpu").inputs(1)["quant_scales"] == []


def test_a_layers_tokens_follow_the_routing(h200: StubbedFlashInfer) -> None:
    shape = MoEShape(256, 128, 16, 2, 2)
    layer = Layer(shape, "bf16", device="cpu")
    routing = Routing.zipf(1.0)
    drawn = [layer.inputs(4000, routing, sample)["token_selected_experts"] for sample in (0, 0, 1)]
    assert drawn[0].dtype == torch.int32 and drawn[0].shape == (4000, 2)
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    assert (drawn[0][:, 0] != drawn[0][:, 1]).all()
    p = routing.inclusion(32, 2)
    for ids in drawn:
        counts = torch.bincount(ids.flatten(), minlength=32).sort(descending=True).values.numpy()
        assert (abs(counts - 4000 * p) <= 5 * (4000 * p * (1 - p)) ** 0.5 + 1).all()
    even = [layer.inputs(64, UNIFORM, sample)["token_selected_experts"] for sample in (0, 0, 1)]
    assert torch.equal(even[0], layer.inputs(64)["token_selected_experts"]) and torch.equal(even[0], even[1])
    assert not torch.equal(even[0], even[2])
    with pytest.raises(SynthError, match="counts of 2 experts, but a layer has 32"):
        layer.inputs(8, Routing.counts([[2, 1]]))


def test_a_layer_refuses_formats_that_it_has_no_scales_for(h200: StubbedFlashInfer) -> None:
    with pytest.raises(SynthError, match="not in nvfp4"):
        Layer(SHAPE, "nvfp4", device="cpu")


@pytest.mark.parametrize(
    ("fallback", "other", "error"),
    [(2.0, 2.5, 0.25), (2.0, 2.0, 0.0), (0.0, 0.0, 0.0), (0.0, 1.0, math.inf), (2.0, math.nan, math.inf)],
)
def test_agreement_is_with_the_fallback(
    h200: StubbedFlashInfer, kernels: Kernels, fallback: float, other: float, error: float
) -> None:
    kernels.outputs = {(-1, -1): fallback, (3, 50): other}
    assert LayerComparator(SHAPE, "bf16", device="cpu").deviation(8, (3, 50)) == error


def test_an_output_that_is_not_written_does_not_agree(
    h200: StubbedFlashInfer, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_moe(_self: object, *args: Any) -> None:
        if [-1, -1] in [a for a in args if isinstance(a, list)]:
            args[0].fill_(1.0)

    monkeypatch.setattr(FakeRunner, "run_moe", run_moe)
    assert LayerComparator(SHAPE, "bf16", device="cpu").deviation(8, (3, 50)) == math.inf


def test_one_layer_compares_many_pairs_and_draws_inputs_once_a_token_count(
    h200: StubbedFlashInfer, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels.outputs = {(-1, -1): 2.0, (3, 50): 2.5, (-1, 50): 2.0}
    drawn: list[int] = []
    inputs = Layer.inputs
    monkeypatch.setattr(Layer, "inputs", lambda self, tokens: [drawn.append(tokens), inputs(self, tokens)][1])
    comparator = LayerComparator(SHAPE, "bf16", device="cpu")
    asked = [(8, (3, 50)), (8, (-1, 50)), (4, (3, 50))]
    assert [comparator.deviation(*one) for one in asked] == [0.25, 0.0, 0.25]
    assert drawn == [8, 4]


def test_a_token_count_that_does_not_fit_is_no_verdict_on_a_pair(
    h200: StubbedFlashInfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    comparator = LayerComparator(SHAPE, "bf16", device="cpu")
    monkeypatch.setattr(runtime, "_lost_context", lambda _torch: None)

    def refuse(_self: object, *_args: object) -> None:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(FakeRunner, "run_moe", refuse)
    with pytest.raises(OutOfMemory, match="at 8 tokens"):
        comparator.deviation(8, (3, 50))
    monkeypatch.setattr(runtime, "_lost_context", lambda _torch: RuntimeError("illegal memory access"))
    with pytest.raises(RuntimeError, match="out of memory"):
        comparator.deviation(8, (3, 50))


def test_tuning_some_buckets_serves_all_token_counts_below_them(h200: StubbedFlashInfer, tmp_path: Path) -> None:
    layer = Layer(SHAPE, "bf16", device="cpu")
    path = tmp_path / "tuned.json"
    path.write_text("not a config: tuning starts anew")
    runtime.tune(layer, [5, 300], path)
    assert sum(key.startswith("(") for key in json.loads(path.read_text())) == 4
    with runtime.serving(path):
        # The fixture's timer likes the last tactic of gemm1 and the first of gemm2.
        assert runtime.served_pair(layer, layer.inputs(5)) == (44, 45)
        assert runtime.served_pair(layer, layer.inputs(512)) == (44, 45)
        assert runtime.served_pair(layer, layer.inputs(16)) == (-1, -1)


def test_serving_a_config_forgets_what_was_tuned_before(h200: StubbedFlashInfer, tmp_path: Path) -> None:
    layer = Layer(SHAPE, "bf16", tp=2, device="cpu")
    runtime.tune(layer, [8], tmp_path / "tuned.json")
    config = write_config(tmp_path / "config.json", 8, (7, 60))
    with runtime.serving(config):
        assert runtime.served_pair(layer, layer.inputs(8)) == (7, 60)
    tuner = h200.tuner
    assert "choose_one" not in vars(tuner)


def write_config(path: Path, bucket: int, pair: tuple[int, int], **changes: str) -> Path:
    deployment = Deployment("m", 2, 1, "bf16", "swiglu", False, SHAPE)
    entries = {
        key: Entry(key, pair[stage - 1])
        for stage in (1, 2)
        for key in file_keys(deployment, "vllm", bucket, stage, "sm90")
    }
    path.write_bytes(dumps_json({**build_metadata(H200), **changes}, entries.values()))
    return path


# ---- benchmarks/layer.py -----------------------------------------------------------------------------------


@pytest.fixture
def benchmark(h200: StubbedFlashInfer, monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], int]:
    """The script on the CPU: a graph is the pair that was captured, and its time that pair's ids."""
    return load_benchmark("layer", monkeypatch)


@pytest.fixture
def routing_benchmark(
    h200: StubbedFlashInfer, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> Callable[[list[str]], int]:
    """The script for skewed routing on the CPU, likewise; the shipped model and timings are real."""
    main = load_benchmark("routing", monkeypatch)

    def capture(call: Callable[[], object], calls: int) -> tuple[int, int]:
        # A pair that is given is never asked of the tuner.
        for _ in range(calls):
            call()
        return next((a[0], a[1]) for a in kernels.layer_calls[-1] if isinstance(a, list) and len(a) == 2)

    monkeypatch.setattr(runtime, "capture", capture)
    return main


def load_benchmark(name: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], int]:
    path = Path(__file__).resolve().parents[2] / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"{name}_benchmark", path)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, f"{name}_benchmark", script)
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec.loader.exec_module(script)
    monkeypatch.setattr(runtime, "_device", lambda _torch, _name: torch.device("cpu"))

    def capture(call: Callable[[], object], calls: int) -> tuple[int, int]:
        with runtime.served_tactics() as served:
            call()
        return served.get(1, -1), served.get(2, -1)

    def time_interleaved(graphs: dict[str, tuple[int, int]], calls: int, rounds: int) -> dict[str, list[float]]:
        ms = {label: 10.0 if pair == (-1, -1) else float(sum(pair)) / 50 for label, pair in graphs.items()}
        return {label: [ms[label]] * rounds for label in graphs}

    monkeypatch.setattr(runtime, "capture", capture)
    monkeypatch.setattr(runtime, "time_interleaved", time_interleaved)
    monkeypatch.setattr(runtime, "eager_ms", lambda call: (call(), 0.5)[1])
    main: Callable[[list[str]], int] = script.main
    return main


def test_the_benchmark_times_the_fallback_the_autotuner_and_a_config(
    benchmark: Callable[[list[str]], int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path / "config.json", 8, (7, 60))
    out = tmp_path / "rows.csv"
    # By hand a layer has no tensor parallelism, and this config's keys are for 2 ranks.
    assert benchmark(["--layer", f"tiny={SHAPE}", "--tokens", "8", "--config", str(config), "--out", str(out)]) == 1
    assert "tiny bf16 at 8 tokens, synth: FlashInfer found no entry" in capsys.readouterr().err
    text = config.read_text().replace("torch.bfloat16, 2, 2, 1", "torch.bfloat16, 2, 1, 1")
    config.write_text(text)
    assert benchmark(["--layer", f"tiny={SHAPE}", "--tokens", "8", "--config", str(config), "--out", str(out)]) == 0
    rows = list(csv.DictReader(out.open()))
    assert [tuple(r[c] for c in ("shape", "tokens", "label", "g1", "g2", "ms")) for r in rows] == [
        ("tiny", "8", "fallback", "-1", "-1", "10"),
        ("tiny", "8", "autotuned", "44", "45", "1.78"),
        ("tiny", "8", "synth", "7", "60", "1.34"),
    ]
    printed = capsys.readouterr().out
    assert "bf16 synth: time over the autotuner's 0.7528 (geometric mean of 1" in printed
    assert "bf16 synth: faster than the fallback 7.4627" in printed


def test_the_benchmark_fails_on_a_wrong_output(
    benchmark: Callable[[list[str]], int], kernels: Kernels, capsys: pytest.CaptureFixture[str]
) -> None:
    kernels.outputs[44, 45] = 1.5
    assert benchmark(["--layer", f"tiny={SHAPE}", "--tokens", "8"]) == 1
    assert "autotuned: the output is 0.5 off" in capsys.readouterr().err


def test_the_benchmark_stops_in_time_and_keeps_its_rows(
    benchmark: Callable[[list[str]], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(sys.modules["layer_benchmark"].time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(runtime, "eager_ms", lambda call: clock.__setitem__(0, clock[0] + 40) or 0.5)
    out = tmp_path / "rows.csv"
    arguments = ["--layer", f"a={SHAPE}", "--layer", f"b={SHAPE}", "--tokens", "1,8,64,256", "--seconds", "60"]
    assert benchmark([*arguments, "--out", str(out)]) == 0
    rows = list(csv.DictReader(out.open()))
    assert [(r["shape"], r["tokens"], r["label"]) for r in rows] == [
        ("a", t, label) for t in ("1", "8") for label in ("fallback", "autotuned")
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--layer", "no-such-model"],
        ["--layer", "tiny=h1"],
        ["--layer", f"tiny={SHAPE}", "--tokens", "0"],
        ["--layer", f"tiny={SHAPE}", "--tokens", "9000"],
        ["--layer", f"tiny={SHAPE}", "--tokens", "many"],
        ["--layer", f"tiny={SHAPE}", "--config", "no-such-file.json"],
    ],
)
def test_the_benchmark_explains_wrong_arguments(
    benchmark: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert benchmark(arguments) == 2
    assert capsys.readouterr().err.startswith("layer.py: ")


def test_layers_are_named_as_the_catalogue_names_deployments(benchmark: object) -> None:
    script = sys.modules["layer_benchmark"]
    name, deployment = script.parse_layer("deepseek-v3-tp2-ep8", "fp8")
    assert (name, deployment.tp, deployment.ep, deployment.quant) == ("deepseek-v3-tp2-ep8", 2, 8, "fp8")
    name, deployment = script.parse_layer("tiny=h256-i128-e4-k2-ep4-ungated", "bf16")
    assert (name, deployment.ep, deployment.activation) == ("tiny", 4, "relu2")


# ---- benchmarks/routing.py ---------------------------------------------------------------------------------


TINY = ["--layer", f"tiny={SHAPE}"]


def test_the_routing_benchmark_times_every_pair_of_candidates(
    routing_benchmark: Callable[[list[str]], int],
    kernels: Kernels,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "rows.csv"
    routings = ["uniform", "zipf:1.2", "hot:1"]
    options = [f"--routing={r}" for r in routings] + ["--tokens", "8,64", "--rounds", "5", "--out", str(out)]
    assert routing_benchmark([*TINY, *options]) == 0
    rows = list(csv.DictReader(out.open()))
    cells: dict[tuple[str, str], list[dict[str, str]]] = {}
    for row in rows:
        cells.setdefault((row["tokens"], row["routing"]), []).append(row)
    assert set(cells) == {(t, r) for t in ("8", "64") for r in routings}
    for (_, routing), mine in cells.items():
        assert len({(r["g1"], r["g2"]) for r in mine}) == len(mine) == 16
        roles = [role for r in mine for role in r["chosen_for"].split("+") if role]
        assert sorted(roles) == ["routing", "uniform"]
        for r in mine:
            assert float(r["ms"]) == float(r["q25"]) == float(r["q75"]) == (int(r["g1"]) + int(r["g2"])) / 50
            assert (r["rounds"], r["draws"], r["error"]) == ("5", "4", "0")
            assert r["tactic1"].startswith(("tma90", "sm80")) and float(r["expected1_ms"]) > 0
            if routing == "uniform":
                assert (r["expected1_ms"], r["expected2_ms"]) == (r["uniform1_ms"], r["uniform2_ms"])
    printed = capsys.readouterr().out
    assert "uniform: regret of uniform's pairs" in printed and "in 0 of 2 cells" in printed
    assert "zipf:1.2: regret" in printed and "hot:1: regret" in printed


def test_a_captured_graph_goes_through_all_draws(
    routing_benchmark: Callable[[list[str]], int], kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs: list[list[int]] = []
    capture = runtime.capture

    def spy(call: Callable[[], object], calls: int) -> Any:
        before = len(kernels.layer_calls)
        graph = capture(call, calls)
        # The output of each draw is a tensor of its own.
        graphs.append([id(args[0]) for args in kernels.layer_calls[before:]])
        return graph

    monkeypatch.setattr(runtime, "capture", spy)
    assert routing_benchmark([*TINY, "--routing", "zipf:1", "--tokens", "8", "--draws", "3"]) == 0
    assert len(graphs) == 16
    for outputs in graphs:
        assert len(outputs) % 3 == 0
        assert {outputs.count(i) for i in outputs} == {len(outputs) // 3} and len(set(outputs)) == 3


def test_the_routing_benchmark_stops_after_a_few_errors(
    routing_benchmark: Callable[[list[str]], int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cells = [0]

    def capture(call: Callable[[], object], calls: int) -> tuple[int, int]:
        cells[0] += 1
        raise RuntimeError("CUDA error: misaligned address\nCompile with TORCH_USE_CUDA_DSA")

    monkeypatch.setattr(runtime, "capture", capture)
    out = tmp_path / "rows.csv"
    assert routing_benchmark([*TINY, "--routing", "zipf:1", "--tokens", "1,2,4,8,16", "--out", str(out)]) == 1
    assert cells == [3] and out.read_text().startswith("layer,tokens,routing,") and out.read_text().count("\n") == 1
    assert "tiny at 4 tokens, zipf:1: RuntimeError: CUDA error: misaligned address Compile" in capsys.readouterr().err


def test_a_wrong_output_is_told_and_is_never_the_best(
    routing_benchmark: Callable[[list[str]], int],
    kernels: Kernels,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "rows.csv"
    arguments = [*TINY, "--routing", "zipf:1", "--tokens", "64", "--out", str(out)]
    assert routing_benchmark(arguments) == 0
    pair = min(((int(r["g1"]), int(r["g2"])) for r in csv.DictReader(out.open())), key=sum)
    assert f"{pair[0]},{pair[1]}" in capsys.readouterr().out
    kernels.outputs[pair] = 1.5
    assert routing_benchmark(arguments) == 1
    found = capsys.readouterr()
    assert f"{pair}: the output is 0.5 off" in found.err and f" {pair[0]},{pair[1]} " not in found.out


def test_the_routing_benchmark_stops_in_time_and_keeps_its_rows(
    routing_benchmark: Callable[[list[str]], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(sys.modules["routing_benchmark"].time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(runtime, "eager_ms", lambda call: clock.__setitem__(0, clock[0] + 40) or 0.5)
    out = tmp_path / "rows.csv"
    arguments = [*TINY, "--layer", f"b={SHAPE}", "--routing", "uniform", "--tokens", "1,8,64", "--candidates", "1"]
    assert routing_benchmark([*arguments, "--seconds", "60", "--out", str(out)]) == 0
    assert [(r["layer"], r["tokens"]) for r in csv.DictReader(out.open())] == [("tiny", "1"), ("tiny", "8")]


def test_candidates_are_the_chosen_tactics_and_the_best_of_both_predictions(routing_benchmark: object) -> None:
    script = sys.modules["routing_benchmark"]
    root = Path(__file__).resolve().parents[2]
    source = script.Source.of(H200, "bf16", root / "models", root / "measurements")
    shape, routing = MoEShape(2048, 768, 128, 8), Routing.zipf(1.2)
    found = script.candidates(source, shape, 256, routing, 4)
    for stage, tactics in found.items():
        for made, role, ms in (
            (choose(source.model, [shape], [256], timings=source.timings), tactics.uniform, tactics.uniform_ms),
            (
                choose(source.model, [shape], [256], timings=source.timings, routing=routing),
                tactics.routed,
                tactics.expected_ms,
            ),
        ):
            (choice,) = [c for c in made if c.stage == stage]
            # What the script expects of a tactic is what it was chosen by.
            assert role == choice.tactic_id and ms[role] == pytest.approx(choice.ms, rel=0.02)
            assert ms[role] <= min(ms.values()) * 1.0011
        assert len(tactics.ids) == len(set(tactics.ids)) == 4


def test_a_dry_run_needs_no_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    main = load_benchmark("routing", monkeypatch)
    assert main(["--layer", "olmoe", "--routing", "hot:1", "--tokens", "64", "--dry-run"]) == 0
    assert re.fullmatch(r"olmoe 64 hot:1: gemm1 \d+ -> \d+ .*; gemm2 \d+ -> \d+ .*\n", capsys.readouterr().out)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--layer", "no-such-model", "--routing", "uniform"],
        [*TINY, "--routing", "no-such-file"],
        [*TINY, "--routing", "hot:3"],
        [*TINY, "--routing", "uniform", "--tokens", "0"],
        [*TINY, "--routing", "uniform", "--draws", "0"],
        [*TINY, "--routing", "uniform", "--device", "NVIDIA B200"],
        [*TINY, "--routing", "uniform", "--models", "no-such-folder"],
    ],
)
def test_the_routing_benchmark_explains_wrong_arguments(
    routing_benchmark: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert routing_benchmark(arguments) == 2
    assert capsys.readouterr().err.startswith("routing.py: ")


class FakeGraph:
    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def replay(self) -> None:
        self.log.append(self.name)


def test_graphs_take_turns_and_begin_each_round_with_another(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            log.append("event")

        def elapsed_time(self, _end: Event) -> float:
            return 3.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("sync"))
    graphs = {name: FakeGraph(log, name) for name in "abc"}
    measured = runtime.time_interleaved(graphs, calls=3, rounds=2)
    assert measured == {name: [1.0, 1.0] for name in "abc"}
    turn = [[name, "event", name, "event"] for name in ("a", "b", "c", "b", "c", "a")]
    assert log == [*turn[0], *turn[1], *turn[2], "sync", *turn[3], *turn[4], *turn[5], "sync"]
