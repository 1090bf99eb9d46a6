"""What the driver says of a GPU."""

from __future__ import annotations

import json
import sys
import types

import pytest
from fake_kernels import H200

from synth.gpu import driver
from synth.gpu.stub import StubbedFlashInfer
from synth.gpu.timing import GpuRunner

torch = pytest.importorskip("torch")


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


def test_without_a_driver_library_the_environment_is_shorter(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise NVMLError("no driver library")

    monkeypatch.setattr(nvml, "nvmlInit", fail)
    environment = GpuRunner("cpu").environment()
    assert environment["device"] == H200 and not {"driver", "sm_clock_mhz", "throttle_reasons"} & set(environment)
    assert "1234" not in json.dumps(environment)
    assert not GpuRunner("cpu").throttled()


def test_a_device_that_no_driver_has_is_no_error(h200: StubbedFlashInfer) -> None:
    environment = GpuRunner("cpu").environment()
    assert environment["device"] == H200 and "driver" not in environment


@pytest.mark.parametrize(
    ("bits", "throttled"), [(0, False), (0x1, False), (0x4, False), (0x20, True), (0x44, True), (0x88, True)]
)
def test_heat_and_power_brake_throttle_and_the_power_cap_is_only_reported(
    nvml: FakeNvml, bits: int, throttled: bool
) -> None:
    nvml.reasons = bits
    runner = GpuRunner("cpu")
    assert runner.throttled() is throttled
    assert ("sw_power_cap" in runner.environment()["throttle_reasons"]) is bool(bits & 0x4)


def test_the_driver_is_asked_at_most_once_a_second(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(driver.time, "monotonic", lambda: now[0])
    runner = GpuRunner("cpu")
    for _ in range(5):
        runner.throttled()
    assert nvml.samples == 1
    now[0] += 1.5
    nvml.reasons = 0x40
    assert runner.throttled() and nvml.samples == 2
