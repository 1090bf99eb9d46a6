"""A pool without processes."""

from __future__ import annotations

from collections.abc import Iterator

from synth.collecting.pools import Event
from synth.collecting.runner import RunnerSpec
from synth.collecting.worker import Item, Message, Worker


class InlinePool:
    """One worker in this very process: no fault isolation, no watchdog; see :class:`synth.collecting.pools.Pool`.

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
        self._worker = Worker(self._spec)
        self._stream = self._worker.start()

    def send(self, slot: str, item: Item | None) -> None:
        assert self._worker is not None
        self._stream = self._worker.finish() if item is None else self._worker.run(item)

    def events(self, timeout: float) -> list[tuple[str, Event]]:
        message = next(self._stream, None)
        return [] if message is None else [(self.slots[0], message)]

    def kill(self, slot: str) -> list[Event]:
        self._worker, self._stream = None, iter(())
        return []

    def close(self) -> None:
        self.kill(self.slots[0])
