"""What the driver says of a GPU: versions, clocks, power, temperature, and why it holds its clocks down."""

from __future__ import annotations

import contextlib
import importlib
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
#: Name → NVML's function and its arguments after the handle.
_NUMBERS: dict[str, tuple[str, tuple[int, ...]]] = {
    "sm_clock_mhz": ("nvmlDeviceGetClockInfo", (_NVML_CLOCK_SM,)),
    "mem_clock_mhz": ("nvmlDeviceGetClockInfo", (_NVML_CLOCK_MEM,)),
    "sm_clock_max_mhz": ("nvmlDeviceGetMaxClockInfo", (_NVML_CLOCK_SM,)),
    "mem_clock_max_mhz": ("nvmlDeviceGetMaxClockInfo", (_NVML_CLOCK_MEM,)),
    "power_limit_w": ("nvmlDeviceGetEnforcedPowerLimit", ()),
    "temperature_c": ("nvmlDeviceGetTemperature", (_NVML_TEMPERATURE_GPU,)),
}


class Driver:
    """One GPU as NVML sees it; FlashInfer can't be imported without its bindings.

    The GPU's uuid, by which it is found among the driver's, is never given out.

    Parameters
    ----------
    device : torch.device
    """

    def __init__(self, device: Any) -> None:
        self._nvml = _open_nvml(device)
        self._sampled: tuple[float, frozenset[str]] | None = None

    def environment(self) -> dict[str, Any]:
        """Return the driver's version, clocks (MHz), power limit (W) and temperature of this moment.

        What can't be found out is left out, or None.
        """
        if self._nvml is None:
            return {}
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


def _open_nvml(device: Any) -> tuple[Any, Any] | None:
    """Return pynvml and its handle of the GPU, None where there is no NVML."""
    try:
        uuid = load_torch().cuda.get_device_properties(device).uuid
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:
        # No GPU, no driver library, or a torch that doesn't know uuids: another error class with each.
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
    found |= {name: ask(function, handle, *args) for name, (function, args) in _NUMBERS.items()}
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
