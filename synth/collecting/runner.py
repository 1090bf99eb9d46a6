"""What a worker needs of the thing that times tactics, and how that thing says what went wrong."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from synth.catalog.shapes import MoEShape

Made = TypeVar("Made")


class Runner(Protocol):
    """Times tactics on one GPU. Made, used and released in one worker process."""

    def environment(self) -> dict[str, Any]:
        """Return device, arch, driver, cuda, torch, flashinfer, clocks, power limit …, without the GPU's uuid.

        ``simulated`` is true where the numbers aren't from a GPU. With ``memory_free_bytes`` a layer or bucket that is
        estimated to need more is left out before anything is allocated.
        """

    def counts(self, quant: str) -> tuple[int, int]:
        """Return how many gemm1 and gemm2 tactics the running module has."""

    def prepare(self, shape: MoEShape, quant: str, activation: str) -> None:
        """Allocate the weights of a layer, in place of those before.

        Raises
        ------
        OutOfMemory
            When they don't fit.
        SynthError
            When the layer can't be timed here.
        """

    def prepare_bucket(self, stage: int, tokens: int) -> None:
        """Make one bucket's inputs. May raise :class:`OutOfMemory`."""

    def time(self, stage: int, tokens: int, tactic_id: int) -> float:
        """Return a tactic's time in ms.

        Raises
        ------
        TacticError
            When the tactic failed but the GPU is fine.
        StickyError
            When the CUDA context is lost.
        """

    def throttled(self) -> bool:
        """Say whether the GPU lowered its clocks during the last timing because of heat or power."""

    def release(self) -> None:
        """Give the memory back."""


@dataclass(frozen=True)
class Spec(Generic[Made]):
    """How to make something in another process: by name, so that only there its packages are imported.

    Attributes
    ----------
    factory : str
        ``"module:name"`` of what returns it.
    options : mapping
        The factory's keyword arguments; they are pickled.
    gpus : float
        GPUs that it needs.
    """

    factory: str
    options: Mapping[str, Any] = field(default_factory=dict)
    gpus: float = 1.0

    def make(self) -> Made:
        """Return a new one."""
        module, _, name = self.factory.partition(":")
        made: Made = getattr(importlib.import_module(module), name)(**self.options)
        return made


#: How to make a runner.
RunnerSpec = Spec[Runner]
#: Times tactics on the GPU in front of it.
GPU_RUNNER = RunnerSpec("synth.gpu.timing:GpuRunner")
