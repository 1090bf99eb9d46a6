"""The GPUs that this process may see: how many, their names, and what CUDA calls them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from synth.errors import SynthError


def visible_name(gpu: int) -> str:
    """Return what CUDA_VISIBLE_DEVICES must be for the `gpu`-th GPU of those that this process may see.

    Raises
    ------
    SynthError
        When CUDA_VISIBLE_DEVICES is set and has no such entry.
    """
    names = _visible()
    if names is None:
        return str(gpu)
    if gpu >= len(names):
        raise SynthError(f"there is no GPU {gpu}: CUDA_VISIBLE_DEVICES is {os.environ['CUDA_VISIBLE_DEVICES']!r}")
    return names[gpu]


def gpu_name() -> str:
    """Return the name of the first GPU that this process may see, as torch reports it.

    Raises
    ------
    SynthError
        When there is none, or it can't be asked.
    """
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    smi = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader", "-i", first]
    torch = [sys.executable, "-c", "import torch; print(torch.cuda.get_device_name(0))"]
    for command in (smi, torch):
        try:
            said = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
        except (OSError, subprocess.SubprocessError):
            continue
        if said.strip():
            return said.strip().splitlines()[-1]
    raise SynthError("there is no GPU here that nvidia-smi or torch can see; --simulate shows a run without one")


def find_gpus(text: str) -> tuple[int, ...]:
    """Read ``--gpus``: numbers such as ``0,2``, or ``all`` for every GPU that this process may see.

    Raises
    ------
    SynthError
        When `text` is neither, or the GPUs can't be counted.
    """
    if text != "all":
        parts = [part.strip() for part in text.split(",")]
        if not all(part.isdecimal() for part in parts) or len(set(parts)) < len(parts):
            raise SynthError(f"--gpus {text!r} is neither 'all' nor numbers such as 0,2")
        return tuple(int(part) for part in parts)
    names = _visible()
    if names is not None:
        count = len(names)
    else:
        tool = shutil.which("nvidia-smi")
        if tool is None:
            raise SynthError("can't count the GPUs without nvidia-smi; name them, for example --gpus 0,1")
        try:
            listed = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=60, check=True).stdout
        except (OSError, subprocess.SubprocessError) as e:
            raise SynthError(f"can't count the GPUs with nvidia-smi ({e}); name them, for example --gpus 0,1") from e
        count = sum(line.startswith("GPU ") for line in listed.splitlines())
    if not count:
        raise SynthError("there is no GPU here; --simulate shows a run without one")
    return tuple(range(count))


def _visible() -> list[str] | None:
    """Return what CUDA_VISIBLE_DEVICES names; None where it isn't set."""
    limited = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if limited is None else [name.strip() for name in limited.split(",") if name.strip()]
