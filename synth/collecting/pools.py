"""Where workers run: in one process per GPU."""

from __future__ import annotations

import multiprocessing.connection
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from synth.collecting.children import Child
from synth.collecting.gpus import visible_name
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
        self._children: dict[str, Child] = {}

    @property
    def slots(self) -> Sequence[str]:
        """See :class:`Pool`."""
        return tuple(self._devices)

    def start(self, slot: str) -> None:
        """See :class:`Pool`."""
        self._children[slot] = Child(Worker, self._spec, self._devices[slot], slot)

    def send(self, slot: str, item: Item | None) -> None:
        """See :class:`Pool`."""
        self._children[slot].send(item)

    def events(self, timeout: float) -> list[tuple[str, Event]]:
        """See :class:`Pool`."""
        by_connection = {child.connection: slot for slot, child in self._children.items()}
        if not by_connection:
            time.sleep(min(timeout, 0.01))
            return []
        found: list[tuple[str, Event]] = []
        for connection in multiprocessing.connection.wait(list(by_connection), timeout):
            slot = by_connection[connection]  # type: ignore[index]
            messages, ended = self._children[slot].said()
            found += [(slot, message) for message in messages]
            if ended:
                found.append((slot, _death(self._children.pop(slot).join())))
        return found

    def kill(self, slot: str) -> list[Event]:
        """See :class:`Pool`."""
        child = self._children.pop(slot, None)
        return [] if child is None else child.kill()

    def close(self) -> None:
        """See :class:`Pool`."""
        for slot in list(self._children):
            self.kill(slot)


def _death(code: int) -> Died:
    if code < 0:
        name = signal.Signals(-code).name if -code in list(signal.Signals) else f"signal {-code}"
        return Died(f"the worker process was ended by {name}", fault=name not in ("SIGKILL", "SIGTERM", "SIGHUP"))
    return Died(f"the worker process ended with exit code {code}", fault=True)
