"""The CUDA device of this process: which it is, what runs there, and what its errors mean."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from synth.errors import OutOfMemory, SynthError
from synth.gpu.libraries import load_core, load_torch


def select_device(name: str) -> Any:
    """Return a torch device, with its index, as the process's current one.

    Raises
    ------
    SynthError
        When there is no such GPU.
    """
    torch = load_torch()
    device = torch.device(name)
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        raise SynthError("torch sees no CUDA GPU; run this on a machine that has one")
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if device.index >= torch.cuda.device_count():
        raise SynthError(f"there is no GPU {device.index}; torch sees {torch.cuda.device_count()}")
    torch.cuda.set_device(device)
    return device


def architecture(device: Any) -> tuple[str, str]:
    """Return the architecture whose tactics run on `device`, and FlashInfer's name of the module for it."""
    major, minor = load_core().get_compute_capability(device)
    backend = f"{major * 10 + minor}"
    # FlashInfer builds the same module for both.
    return ("sm120" if backend == "121" else f"sm{backend}"), backend


def lost_context() -> Exception | None:
    """Return the error that every later CUDA call will raise, None where the context is fine.

    The first synchronization may only report what has failed; a lost context fails the second one too.
    """
    torch, error = load_torch(), None
    for _ in range(2 if torch.cuda.is_initialized() else 0):
        try:
            torch.cuda.synchronize()
            error = None
        except Exception as e:
            error = e
    return error


def is_out_of_memory(error: Exception) -> bool:
    """Tell whether an error of torch or FlashInfer says that the GPU's memory is full."""
    # FlashInfer's C++ allocates through torch too, but its error arrives as another class.
    return isinstance(error, load_torch().cuda.OutOfMemoryError) or "out of memory" in str(error).lower()


@contextlib.contextmanager
def must_fit(message: str) -> Iterator[None]:
    """Say `message` where the GPU's memory is full; all other errors stay as they are.

    Raises
    ------
    OutOfMemory
        When the memory is full and the context fine: a lost one often reports itself as out of memory.
    """
    try:
        yield
    except Exception as e:
        if isinstance(e, SynthError) or lost_context() is not None or not is_out_of_memory(e):
            raise
        raise OutOfMemory(message) from e
