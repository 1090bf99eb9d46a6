"""torch and FlashInfer, imported when they are first asked for, and what every module here needs of them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from synth.catalog.untrusted import first_line
from synth.errors import MissingDependencyError, SynthError, pip_install
from synth.flashinfer.calls import Dtype, Extra


def load_torch() -> Any:
    """Return torch; errors are those of :func:`installed_flashinfer`."""
    return _load("torch")


def load_flashinfer(module: str) -> Any:
    """Return a module of FlashInfer, such as ``autotuner``; errors are those of :func:`installed_flashinfer`."""
    return _load(f"flashinfer.{module}")


def load_core() -> Any:
    """Return FlashInfer's ``fused_moe.core``; errors are those of :func:`installed_flashinfer`."""
    return load_flashinfer("fused_moe.core")


def load_cache() -> Any:
    """Return FlashInfer's ``autotune_cache``, the managed store.

    Raises
    ------
    MissingDependencyError
        When FlashInfer or torch is not installed.
    SynthError
        When this FlashInfer has no managed store.
    """
    version = installed_flashinfer()
    try:
        module = importlib.import_module("flashinfer.autotune_cache")
        _ = (module.ManagedAutotuneCache, module.ReplayCoverage, module.autotune_v2, module.get_default_cache_root)
    except (ImportError, AttributeError) as e:
        raise SynthError(
            f"FlashInfer {version} has no managed store (it has one since 0.7.0); "
            "load the JSON file with AutoTuner.get().load_configs"
        ) from e
    return module


def installed_flashinfer() -> str:
    """Return the version of the installed FlashInfer.

    Raises
    ------
    MissingDependencyError
        When FlashInfer or torch is not installed.
    SynthError
        When they are, and can't be imported.
    """
    load_torch()
    load_core()
    version: str = _load("flashinfer").__version__
    return version


def dtype(name: object) -> Any:
    """Return a torch dtype by name, with or without ``torch.``.

    Raises
    ------
    SynthError
        When torch has no such dtype.
    """
    torch = load_torch()
    value = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(value, torch.dtype):
        raise SynthError(f"torch has no dtype {name}")
    return value


def moe_runner(runner_class: Any, extras: Mapping[str, Extra], device: Any) -> Any:
    """Make FlashInfer's runner as its operation does, on rank 0.

    Parameters
    ----------
    runner_class : type
        FlashInfer's ``MoERunner``.
    extras : mapping
        Extras of the call's keys, by name.
    device : torch.device
        Whose answer decides about programmatic dependent launch (PDL), whatever the extras say.
    """
    core = load_core()
    arguments = {name: dtype(value) if isinstance(value, Dtype) else value for name, value in extras.items()}
    arguments |= {"tp_rank": 0, "ep_rank": 0, "cluster_rank": 0}
    arguments["enable_pdl"] = core.device_support_pdl(device)
    arguments["activation_type"] = core.ActivationType(extras["activation_type"])
    return runner_class(**arguments)


def _load(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as e:
        raise MissingDependencyError(
            f"this needs FlashInfer and torch ({first_line(e)}): {pip_install('flashinfer-python', 'torch')}"
        ) from e
    except Exception as e:
        raise SynthError(f"the installed FlashInfer can't be imported: {first_line(e)}; reinstall it") from e
