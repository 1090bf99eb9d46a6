"""Processes of our own, each for one GPU, that answer what they are asked: with timings, or with outputs compared.

What may lose its CUDA context, hang or crash runs in one of these; its end is seen here and ends nothing else.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, Protocol


class Answering(Protocol):
    """What lives in such a process; each method yields its answers one by one."""

    def start(self) -> Iterator[Any]:
        """Begin."""

    def run(self, item: Any) -> Iterator[Any]:
        """Do what is asked."""

    def finish(self) -> Iterator[Any]:
        """Come to an end."""


class Child:
    """A process that starts at once, and the pipe to it.

    Parameters
    ----------
    answering : callable
        Makes of `spec`, in the process, what answers there. Both are pickled.
    spec : object
    device : str or None
        CUDA_VISIBLE_DEVICES there; None leaves it as it is.
    name : str, optional
        Of the process.

    Attributes
    ----------
    connection : Connection
        Can be read from where there is an answer, or where the process has ended.
    """

    def __init__(
        self, answering: Callable[[Any], Answering], spec: Any, device: str | None, name: str | None = None
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(answering, spec, device, theirs), name=name, daemon=True)
        self._process.start()
        # Only the child may hold this end, or its death would not show as the end of the stream.
        theirs.close()

    def send(self, item: Any) -> None:
        """Ask for something; None ends the process. One that is gone shows in what it says next."""
        with contextlib.suppress(OSError):
            self.connection.send(item)

    def said(self) -> tuple[list[Any], bool]:
        """Return every answer that is there, and whether the stream is at its end."""
        answers = []
        try:
            while self.connection.poll():
                answers.append(self.connection.recv())
        except (EOFError, OSError):
            return answers, True
        return answers, False

    def join(self) -> int:
        """Return the exit code of a process at the end of its stream, negative for a signal."""
        self._process.join(timeout=10)
        self.kill()
        return self._process.exitcode or 0

    def kill(self) -> list[Any]:
        """End the process at once and return what it had said before."""
        self._process.kill()
        self._process.join()
        answers, _ = self.said()
        self.connection.close()
        return answers


def _serve(answering: Callable[[Any], Answering], spec: Any, device: str | None, connection: Connection) -> None:
    """Answer in a process of its own until the other end closes or says None."""
    # Ctrl-C goes to the whole group; the parent alone decides what follows.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if device is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = device
    one = answering(spec)
    # Where the parent is gone, so is whatever the answers are for.
    with contextlib.suppress(EOFError, OSError):
        answers = one.start()
        while True:
            for answer in answers:
                connection.send(answer)
            item = connection.recv()
            if item is None:
                break
            answers = one.run(item)
        for answer in one.finish():
            connection.send(answer)
