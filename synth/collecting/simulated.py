"""A runner without a GPU: it replays timings with their noise, and breaks where it is told to."""

from __future__ import annotations

import math
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from synth.catalog.paths import user_folder
from synth.catalog.shapes import MoEShape
from synth.choosing.plan import estimate_memory, timing_seconds
from synth.collecting.runner import GPU_RUNNER, RunnerSpec
from synth.errors import OutOfMemory, StickyError, SynthError, TacticError
from synth.flashinfer.tactics import DEFAULT_FLASHINFER, load_table
from synth.timings.folders import load_shapes
from synth.timings.rows import COLUMNS
from synth.timings.table import ShapeTimings, Timings

#: Standard deviation of a timing's logarithm; the repeats of the shipped sweeps differ by this much in the median.
NOISE = 0.004


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong at one moment.

    Attributes
    ----------
    kind : str
        ``raise`` the tactic fails; ``sticky`` the context is lost; ``hang`` the call never returns; ``die`` the
        process is killed; ``crash`` it ends by itself; ``throttle`` the timing is a throttled one.
    at : int
        At the how many-th timing of the process, from 1; 0 for any.
    cell : (int, int, int) or None
        At this (stage, tokens, tactic) only.
    once : str
        A file that is made when it happens; while it exists it doesn't happen again.
    """

    kind: Literal["raise", "sticky", "hang", "die", "crash", "throttle"]
    at: int = 0
    cell: tuple[int, int, int] | None = None
    once: str = ""


class SimulatedRunner:
    """Replays measurements; implements :class:`synth.collecting.runner.Runner`.

    Parameters
    ----------
    measurements : sequence of str or ShapeTimings
        Folders or files of one device, or its timings themselves.
    device : str, optional
        Which device of those.
    flashinfer : str
        FlashInfer version.
    noise : float
        Standard deviation of a timing's logarithm.
    seed : int
        Seed of the noise.
    speed : float
        Simulated seconds that pass in a real one; infinite: no waiting.
    memory_bytes : float
        GPU memory.
    faults : sequence of Fault
        What goes wrong.

    Raises
    ------
    SynthError
        When there is nothing to replay.
    """

    def __init__(
        self,
        measurements: Sequence[str | ShapeTimings],
        device: str | None = None,
        flashinfer: str = DEFAULT_FLASHINFER,
        noise: float = NOISE,
        seed: int = 0,
        speed: float = math.inf,
        memory_bytes: float = math.inf,
        faults: Sequence[Fault] = (),
    ) -> None:
        parts = [part for part in measurements if isinstance(part, ShapeTimings)]
        folders = [one for one in measurements if isinstance(one, str)]
        if folders:
            parts += load_shapes(list(map(Path, folders)), device, flashinfer=flashinfer, problems=[])
        if not parts:
            raise SynthError(f"no timings of {device or 'any device'} in {', '.join(folders)} to replay")
        if others := {p.origin.device for p in parts} - {parts[0].origin.device}:
            raise SynthError(f"timings of {parts[0].origin.device} and {others.pop()}; say which --device to simulate")
        self._origin = parts[0].origin
        self._parts = {(p.shape, p.origin.quant): p for p in parts if p.origin.policy == self._origin.policy}
        self._noise, self._seed, self._speed, self._memory = noise, seed, speed, memory_bytes
        self._faults = tuple(faults)
        self._now = 0.0
        self._timings = 0
        self._throttled = False
        self._repeats: Counter[tuple[object, ...]] = Counter()
        self._layer: tuple[MoEShape, str] | None = None
        self._outcomes: dict[tuple[int, int, int], float | str] = {}
        # Layers are prepared again and again where cells are chosen in rounds.
        self._replays: dict[tuple[MoEShape, str], dict[tuple[int, int, int], float | str]] = {}

    @classmethod
    def of(cls, timings: Timings, *, noise: float = 0.0, seed: int = 0) -> SimulatedRunner:
        """Return a runner that replays timings at hand: of a cell timed several times, the first good time."""
        return cls(_parts(timings), noise=noise, seed=seed)

    def clock(self) -> float:
        """Return simulated seconds."""
        return self._now

    def environment(self) -> dict[str, Any]:
        """See :class:`synth.collecting.runner.Runner`."""
        return {
            "device": self._origin.device,
            "arch": self._origin.arch,
            "flashinfer": self._origin.flashinfer,
            "driver": "simulated",
            "simulated": True,
        }

    def counts(self, quant: str) -> tuple[int, int]:
        """See :class:`synth.collecting.runner.Runner`."""
        table = load_table(self._origin.arch, quant, self._origin.flashinfer)
        return len(table.gemm1), len(table.gemm2)

    def prepare(self, shape: MoEShape, quant: str, activation: str) -> None:
        """See :class:`synth.collecting.runner.Runner`."""
        part = self._parts.get((shape, quant))
        if part is None:
            raise SynthError(f"{shape} {quant}: no timings to replay")
        self._check_memory(shape, quant, 1)
        self._layer = shape, quant
        if (shape, quant) not in self._replays:
            self._replays[shape, quant] = _outcomes(part)
        self._outcomes = self._replays[shape, quant]

    def prepare_bucket(self, stage: int, tokens: int) -> None:
        """See :class:`synth.collecting.runner.Runner`."""
        assert self._layer is not None
        self._check_memory(*self._layer, tokens)

    def time(self, stage: int, tokens: int, tactic_id: int) -> float:
        """See :class:`synth.collecting.runner.Runner`."""
        self._timings += 1
        self._throttled = False
        for fault in self._faults:
            self._apply(fault, (stage, tokens, tactic_id))
        outcome = self._outcomes.get((stage, tokens, tactic_id), "no timing to replay")
        if isinstance(outcome, str):
            self._pass(timing_seconds(0.0))
            raise TacticError(outcome)
        cell = (self._layer, stage, tokens, tactic_id)
        self._repeats[cell] += 1
        draw = random.Random(f"{self._seed}/{self._layer}/{cell}/{self._repeats[cell]}")
        ms = outcome * math.exp(draw.gauss(0.0, self._noise))
        self._pass(timing_seconds(ms))
        return ms

    def throttled(self) -> bool:
        """See :class:`synth.collecting.runner.Runner`."""
        return self._throttled

    def release(self) -> None:
        """See :class:`synth.collecting.runner.Runner`."""
        self._layer = None

    def _check_memory(self, shape: MoEShape, quant: str, tokens: int) -> None:
        needed = estimate_memory(shape, quant, tokens)
        if needed > self._memory:
            raise OutOfMemory(
                f"{shape} {quant} with {tokens} tokens needs {needed / 2**30:.1f} GiB and the GPU has "
                f"{self._memory / 2**30:.1f} GiB"
            )

    def _pass(self, seconds: float) -> None:
        self._now += seconds
        if self._speed < math.inf:
            time.sleep(seconds / self._speed)

    def _apply(self, fault: Fault, cell: tuple[int, int, int]) -> None:
        if (fault.at and fault.at != self._timings) or (fault.cell is not None and fault.cell != cell):
            return
        if fault.once:
            try:
                os.close(os.open(fault.once, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return
        if fault.kind == "raise":
            self._pass(timing_seconds(0.0))
            raise TacticError("simulated failure")
        if fault.kind == "sticky":
            raise StickyError("CUDA error: an illegal memory access was encountered (simulated)")
        if fault.kind == "hang":
            while True:
                time.sleep(3600)
        if fault.kind == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.kind == "crash":
            os._exit(3)
        self._throttled = True


def simulated_runner(
    measurements: Sequence[Path | str], device: str | None = None, *, speed: float = math.inf, **options: Any
) -> RunnerSpec:
    """Return how to make a :class:`SimulatedRunner`; the options are its own."""
    return RunnerSpec(
        "synth.collecting.simulated:SimulatedRunner",
        {"measurements": [str(m) for m in measurements], "device": device, "speed": speed, **options},
        gpus=0.0,
    )


def timing_place(own: Path | None, folders: Sequence[Path], device: str, simulate: bool) -> tuple[Path, RunnerSpec]:
    """Return the measurements folder that gets timings, and what takes them; simulated ones have a folder of their own.

    Parameters
    ----------
    own : Path or None
        The user's measurements folder, if it is not the usual one.
    folders : sequence of Path
        What a simulation replays.
    """
    root = own or user_folder("measurements")
    return (root / "simulated", simulated_runner(folders, device)) if simulate else (root, GPU_RUNNER)


def _parts(timings: Timings) -> list[ShapeTimings]:
    """Return the timings of each shape, in order of their passes."""
    tactics = {i: str(timings.table.tactic(i)) for i in range(len(timings.table))}
    parts = []
    for shape in np.unique(timings.shape).tolist():
        t = timings.select(timings.shape == shape)
        t = t.select(np.lexsort((t.tactic, t.tokens, t.stage, t.pass_)))
        errors = dict.fromkeys(np.flatnonzero(np.isnan(t.ms)).tolist(), "failed when it was timed")
        parts.append(
            ShapeTimings(
                origin=t.origin,
                shape=t.shapes[shape],
                label=t.labels[shape],
                passes=t.passes[shape],
                tactics=tactics,
                errors=errors,
                **{name: getattr(t, name) for name in COLUMNS},
            )
        )
    return parts


def _outcomes(part: ShapeTimings) -> dict[tuple[int, int, int], float | str]:
    """Return time or error of every cell; of several passes, the first good time."""
    found: dict[tuple[int, int, int], float | str] = {}
    for row in part.rows():
        key = row.cell[1:]
        if row.error is not None:
            found.setdefault(key, row.error)
        elif isinstance(found.get(key, ""), str):
            found[key] = row.ms
    return found
