"""What the driver says of a GPU: versions, clocks, power, temperature, and why it holds its clocks down."""

from __future__ import annotations

import contextlib
import importlib
import subprocess
import time
from typing import Any

from synth.gpu.libraries import load_torch

_CACHE_S = 1.0
#: NVML's clocks event reasons (nvmlClocksEventReason*), without those that say nothing of heat or power.
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
#: Name → NVML's function, its arguments after the handle, and nvidia-smi's field.
_NUMBERS: dict[str, tuple[str, tuple[int, ...], str]] = {
    "sm_clock_mhz": ("nvmlDeviceGetClockInfo", (_NVML_CLOCK_SM,), "clocks.sm"),
    "mem_clock_mhz": ("nvmlDeviceGetClockInfo", (_NVML_CLOCK_MEM,), "clocks.mem"),
    "sm_clock_max_mhz": ("nvmlDeviceGetMaxClockInfo", (_NVML_CLOCK_SM,), "clocks.max.sm"),
    "mem_clock_max_mhz": ("nvmlDeviceGetMaxClockInfo", (_NVML_CLOCK_MEM,), "clocks.max.mem"),
    "power_limit_w": ("nvmlDeviceGetEnforcedPowerLimit", (), "power.limit"),
    "temperature_c": ("nvmlDeviceGetTemperature", (_NVML_TEMPERATURE_GPU,), "temperature.gpu"),
}


class Driver:
    """One GPU as its driver sees it: through NVML, and where that is missing through ``nvidia-smi``.

    The GPU's uuid, by which it is found among the driver's, is never given out.

    Parameters
    ----------
    device : torch.device
    """

    def __init__(self, device: Any) -> None:
        self._uuid = _uuid(device)
        self._nvml = _open_nvml(self._uuid)
        self._sampled: tuple[float, frozenset[str]] | None = None

    def environment(self) -> dict[str, Any]:
        """Return the driver's version, clocks (MHz), power limit (W) and temperature of this moment.

        What can't be found out is left out, or None.
        """
        if self._nvml is None:
            return _read_smi(self._uuid)
        return {**_read_nvml(*self._nvml), "throttle_reasons": sorted(self.throttle_reasons())}

    def throttle_reasons(self) -> frozenset[str]:
        """Return why the GPU holds its clocks down, sampled at most once a second; empty where NVML doesn't say.

        Names are those of NVML: ``sw_power_cap``, ``hw_slowdown``, ``sw_thermal_slowdown``, ``hw_thermal_slowdown``
        and ``hw_power_brake``.
        """
        now = time.monotonic()
        if self._sampled is None or now - self._sampled[0] >= _CACHE_S:
            self._sampled = now, _read_reasons(*self._nvml) if self._nvml is not None else frozenset()
        return self._sampled[1]

    def throttled(self) -> bool:
        """Tell whether the GPU is slowed down by heat or by a power brake.

        The software power cap doesn't count: a heavy GEMM reaches it by itself, and would in a server, so that its
        timing is still its time. It shows as drift of a reference cell.
        """
        return bool(self.throttle_reasons() & _THROTTLING)


def _uuid(device: Any) -> str | None:
    try:
        return str(load_torch().cuda.get_device_properties(device).uuid)
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

    found = {"driver": ask("nvmlSystemGetDriverVersion")}
    found |= {name: ask(function, handle, *args) for name, (function, args, _) in _NUMBERS.items()}
    if found["power_limit_w"] is not None:
        # NVML says mW.
        found["power_limit_w"] /= 1000
    return found


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
    fields = ["driver_version", *(field for _, _, field in _NUMBERS.values())]
    command = ["nvidia-smi", "-i", f"GPU-{uuid}", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    driver, *numbers = (value.strip() for value in answer.strip().split(","))
    if len(numbers) != len(_NUMBERS):
        return {}
    found: dict[str, Any] = {"driver": driver}
    for name, text in zip(_NUMBERS, numbers, strict=True):
        # Where there is none it says "[N/A]".
        with contextlib.suppress(ValueError):
            found[name] = float(text) if name == "power_limit_w" else int(float(text))
    return found
