"""Offline synthesizer of FlashInfer MoE tuning configs.

What notebooks and other tools need is here, and is imported when it is first used: see docs/api.md.
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"

__all__ = ["__version__", "check", "choose", "emit", "layer", "load_timings", "port", "predict", "read_config"]

#: Where each name of the API comes from.
_HOMES = {
    "layer": ("synth.catalog.checkpoints", "layer"),
    "load_timings": ("synth.timings.folders", "load_timings"),
    "read_config": ("synth.configs.reading", "read"),
    "predict": ("synth.choosing.answers", "predict"),
    "choose": ("synth.choosing.answers", "choose"),
    "emit": ("synth.choosing.answers", "emit"),
    "check": ("synth.checking.check", "check"),
    "port": ("synth.configs.porting", "port"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'synth' has no attribute {name!r}; it has {', '.join(_HOMES)}")
    import importlib

    module, attribute = _HOMES[name]
    value = getattr(importlib.import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
