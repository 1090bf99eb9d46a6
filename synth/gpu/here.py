"""The installed FlashInfer, as :class:`synth.servers.installation.FlashInferHere` describes it."""

from __future__ import annotations

from synth.gpu.libraries import installed_flashinfer
from synth.gpu.replay import replay_file, replay_store
from synth.gpu.store import default_root, differences, environment, gpu_here, store_files, unknown

__all__ = [
    "default_root",
    "differences",
    "environment",
    "gpu_here",
    "installed_flashinfer",
    "replay_file",
    "replay_store",
    "store_files",
    "unknown",
]
