"""Where workers run: in this process (tests, small simulations) or in one process per GPU."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Protocol

from synth.collecting.runner import RunnerSpec
from synth.collecting.worker import Item, Message, Worker
from synth.errors import SynthError


@dataclass(frozen=True)
class Died:
    """A worker is gone. `fault` is false where it was ended from outside, by a signal or with its machine."""

    reason: str
    fault: bool


Event = Message | Died


class Pool(Protocol):
    """Starts workers in slots, one a GPU, hands them items and passes on what they say.

    A slot is known by its name. After :class:`Died` or :meth:`kill` nothing more comes from a slot until it is
    started again.
    """

    @property
    def slots(self) -> Sequence[str]:
        """Return the names of the slots."""

    def start(self, slot: str) -> None:
        """Start a worker in a free slot."""

    def send(self, slot: str, item: Item | None) -> None:
        """Give a waiting worker its next item; None ends it."""

    def events(self, timeout: float) -> list[tuple[str, Event]]:
        """Return what the workers said since the last call, waiting at most `timeout` seconds for the first."""

    def kill(self, slot: str) -> list[Event]:
        """End a worker at once and return what it had said before."""

    def close(self) -> None:
        """End every worker."""


class InlinePool:
    """One worker in this very process: no fault isolation, no watchdog.

    Parameters
    ----------
    spec : RunnerSpec
        How to make its runner.
    """

    slots = ("inline",)

    def __init__(self, spec: RunnerSpec) -> None:
        self._spec = spec
        self._worker: Worker | None = None
        self._stream: Iterator[Message] = iter(())

    def start(self, slot: str) -> None:
        """See :class:`Pool`."""
        self._worker = Worker(self._spec)
        self._stream = self._worker.start()

    def send(self, slot: str, item: Item | None) -> None:
        """See :class:`Pool`."""
        assert self._worker is not None
        self._stream = self._worker.finish() if item is None else self._worker.run(item)

    def events(self, timeout: float) -> list[tuple[str, Event]]:
        """See :class:`Pool`."""
        message = next(self._stream, None)
        return [] if message is None else [(self.slots[0], message)]

    def kill(self, slot: str) -> list[Event]:
        """See :class:`Pool`."""
        self._worker, self._stream = None, iter(())
        return []

    def close(self) -> None:
        """See :class:`Pool`."""
        self.kill(self.slots[0])


@dataclass
class _Process:
    process: SpawnProcess
    connection: Connection


class ProcessPool:
    """One process for each GPU.

    Parameters
    ----------
    spec : RunnerSpec
        How to make their runners.
    gpus : sequence of int
        Indices of the GPUs among those that this process may see.
    """

    def __init__(self, spec: RunnerSpec, gpus: Sequence[int] = (0,)) -> None:
        if not gpus or len(set(gpus)) < len(gpus) or min(gpus) < 0:
            raise SynthError(f"GPUs {','.join(map(str, gpus)) or '(none)'} are not different numbers from 0")
        self._spec = spec
        self._devices = {f"gpu{gpu}": visible_name(gpu) for gpu in gpus}
        self._processes: dict[str, _Process] = {}
        self._context = multiprocessing.get_context("spawn")

    @property
    def slots(self) -> Sequence[str]:
        """See :class:`Pool`."""
        return tuple(self._devices)

    def start(self, slot: str) -> None:
        """See :class:`Pool`."""
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=_serve, args=(self._spec, self._devices[slot], theirs), name=slot, daemon=True
        )
        process.start()
        # Only the child may hold this end, or its death would not show as the end of the stream.
        theirs.close()
        self._processes[slot] = _Process(process, ours)

    def send(self, slot: str, item: Item | None) -> None:
        """See :class:`Pool`."""
        # A worker that died meanwhile shows in the next events.
        with contextlib.suppress(OSError):
            self._processes[slot].connection.send(item)

    def events(self, timeout: float) -> list[tuple[str, Event]]:
        """See :class:`Pool`."""
        by_connection = {p.connection: slot for slot, p in self._processes.items()}
        if not by_connection:
            time.sleep(min(timeout, 0.01))
            return []
        found: list[tuple[str, Event]] = []
        for connection in multiprocessing.connection.wait(list(by_connection), timeout):
            slot = by_connection[connection]  # type: ignore[index]
            messages, ended = _drain(self._processes[slot].connection)
            found += [(slot, message) for message in messages]
            if ended:
                found.append((slot, self._bury(slot)))
        return found

    def kill(self, slot: str) -> list[Event]:
        """See :class:`Pool`."""
        entry = self._processes.pop(slot, None)
        if entry is None:
            return []
        entry.process.kill()
        entry.process.join()
        messages = _drain(entry.connection)[0]
        entry.connection.close()
        return list(messages)

    def close(self) -> None:
        """See :class:`Pool`."""
        for slot in list(self._processes):
            self.kill(slot)

    def _bury(self, slot: str) -> Died:
        entry = self._processes.pop(slot)
        entry.process.join(timeout=10)
        if entry.process.is_alive():
            entry.process.kill()
            entry.process.join()
        entry.connection.close()
        code = entry.process.exitcode or 0
        if code < 0:
            name = signal.Signals(-code).name if -code in list(signal.Signals) else f"signal {-code}"
            return Died(f"the worker process was ended by {name}", fault=name not in ("SIGKILL", "SIGTERM", "SIGHUP"))
        return Died(f"the worker process ended with exit code {code}", fault=True)


def _drain(connection: Connection) -> tuple[list[Message], bool]:
    """Return every message that is there, and whether the stream is at its end."""
    messages: list[Message] = []
    try:
        while connection.poll():
            messages.append(connection.recv())
    except (EOFError, OSError):
        return messages, True
    return messages, False


def _serve(spec: RunnerSpec, device: str | None, connection: Connection) -> None:
    """Run a worker in its own process until the other end closes or says None."""
    # Ctrl-C goes to the whole group; the parent alone decides what follows.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if device is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = device
    worker = Worker(spec)
    try:
        for message in worker.start():
            connection.send(message)
        while True:
            item = connection.recv()
            for message in worker.finish() if item is None else worker.run(item):
                connection.send(message)
            if item is None:
                return
    except (EOFError, OSError):
        # The parent is gone, and with it the journal.
        return


def visible_name(gpu: int) -> str:
    """Return what CUDA_VISIBLE_DEVICES must be for the `gpu`-th GPU of those that this process may see.

    Raises
    ------
    SynthError
        When CUDA_VISIBLE_DEVICES is set and has no such entry.
    """
    limited = os.environ.get("CUDA_VISIBLE_DEVICES")
    if limited is None:
        return str(gpu)
    names = [name.strip() for name in limited.split(",") if name.strip()]
    if gpu >= len(names):
        raise SynthError(f"there is no GPU {gpu}: CUDA_VISIBLE_DEVICES is {limited!r}")
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
    limited = os.environ.get("CUDA_VISIBLE_DEVICES")
    if limited is not None:
        count = len([name for name in limited.split(",") if name.strip()])
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
