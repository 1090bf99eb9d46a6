"""Does a pair of tactics give the numbers that FlashInfer's fallback gives?

A layer is run with a pair and with the fallback on the same inputs. That happens in a process of its own: a tactic
that reads beyond its memory loses the CUDA context, and one that hangs never returns. Either ends that process and
counts against the pair, not against the command.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from types import TracebackType
from typing import Any, Protocol

from synth.collecting.pools import visible_name
from synth.collecting.runner import make_by_name
from synth.errors import OutOfMemory, SynthError

#: Tactics of gemm1 and gemm2; -1 is FlashInfer's fallback.
Pair = tuple[int, int]
FALLBACK: Pair = (-1, -1)

#: A process that died or hung gets this many tries at the same pair: the reason may have been another one.
_TRIES = 2


class CannotCompare(SynthError):
    """The numbers of this layer can't be compared here, whatever the tactics; the message says why."""


class Comparator(Protocol):
    """Runs one layer. Made and used in one process."""

    def deviation(self, tokens: int, pair: Pair) -> float:
        """Return the largest difference from the fallback's output over the largest output.

        Infinite where a value is not finite.

        Raises
        ------
        SynthError
            When the layer can't be run here at all.
        """


@dataclass(frozen=True)
class ComparatorSpec:
    """How to make a comparator in another process: by name, so that only there its packages are imported.

    Attributes
    ----------
    factory : str
        ``"module:name"`` of something that returns a :class:`Comparator`.
    options : mapping
        Its keyword arguments; they are pickled.
    """

    factory: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def make(self) -> Comparator:
        """Return a new comparator."""
        comparator: Comparator = make_by_name(self.factory, self.options)
        return comparator


@dataclass(frozen=True)
class Compared:
    """What came of comparing a pair at one token count.

    Attributes
    ----------
    tokens : int
    pair : (int, int)
    deviation : float
        Infinite where there was no finite output.
    error : str
        How it ended where there was no output.
    """

    tokens: int
    pair: Pair
    deviation: float
    error: str = ""


@dataclass(frozen=True)
class Patience:
    """Seconds after which a process that says nothing counts as hanging: while it starts, and at one pair."""

    start_s: float = 1800.0
    pair_s: float = 60.0


class Comparison:
    """Compares pairs of one layer in a process of its own; a context manager.

    Parameters
    ----------
    spec : ComparatorSpec
        What runs the layer there.
    gpu : int, optional
        Index of the GPU among those that this process may see; without it the environment stays as it is.
    patience : Patience
        When it counts as hanging.
    """

    def __init__(self, spec: ComparatorSpec, gpu: int | None = None, patience: Patience | None = None) -> None:
        self._spec, self._patience = spec, patience or Patience()
        self._device = None if gpu is None else visible_name(gpu)
        self._context = multiprocessing.get_context("spawn")
        self._child: tuple[SpawnProcess, Connection] | None = None

    def __enter__(self) -> Comparison:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()

    def compare(self, tokens: int, pair: Pair) -> Compared:
        """Compare a pair with the fallback.

        Raises
        ------
        CannotCompare
            When the layer can't be run here, so that nothing is known of the pair.
        """
        error = ""
        for _ in range(_TRIES):
            connection = self._start() if self._child is None else self._child[1]
            with contextlib.suppress(OSError):
                # A process that is gone shows in the answer.
                connection.send((tokens, pair))
            kind, value = self._answer(self._patience.pair_s)
            if kind == "done":
                return Compared(tokens, pair, float(value))
            if kind == "unable":
                raise CannotCompare(str(value))
            error = str(value)
            self._end()
        return Compared(tokens, pair, math.inf, error)

    def _start(self) -> Connection:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(self._spec, self._device, theirs), daemon=True)
        process.start()
        # Only the child may hold this end, or its death would not show as the end of the stream.
        theirs.close()
        self._child = process, ours
        kind, value = self._answer(self._patience.start_s)
        if kind != "ready":
            self._end()
            raise CannotCompare(f"the layer can't be run: {value}" if kind == "failed" else str(value))
        return ours

    def _answer(self, seconds: float) -> tuple[str, float | str]:
        """Return what the process says next, ``("failed", why)`` when it doesn't."""
        assert self._child is not None
        process, connection = self._child
        deadline = time.monotonic() + seconds
        try:
            while not connection.poll(min(seconds, 1.0)):
                if time.monotonic() >= deadline:
                    return "failed", f"no answer for {seconds:.0f} s, so it counts as hanging"
            answer: tuple[str, float | str] = connection.recv()
        except (EOFError, OSError):
            process.join(timeout=10)
            code = process.exitcode
            how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
            return "failed", f"the process ended with {how}"
        return answer

    def _end(self) -> None:
        if self._child is not None:
            process, connection = self._child
            process.kill()
            process.join()
            connection.close()
            self._child = None


def guilty(comparison: Comparison, bad: Compared, tolerance: float) -> dict[int, Compared]:
    """Return which stages' tactics make a pair wrong: stage → what came of that tactic beside the other's fallback.

    Where each alone is right, both are taken as guilty: which one to keep can't be told.

    Parameters
    ----------
    comparison : Comparison
    bad : Compared
        The pair, wrong at its token count.
    tolerance : float
        See :data:`synth.timings.records.TOLERANCE`.
    """
    alone = {1: (bad.pair[0], -1), 2: (-1, bad.pair[1])}
    suspects = {stage: pair for stage, pair in alone.items() if pair != FALLBACK}
    found = {stage: comparison.compare(bad.tokens, pair) for stage, pair in suspects.items()}
    wrong = {stage: c for stage, c in found.items() if not c.deviation <= tolerance}
    return wrong or dict.fromkeys(suspects, bad)


class SimulatedComparator:
    """Stands for a layer on a GPU: every tactic is right but those that it is told of.

    Parameters
    ----------
    wrong : sequence of int
        Ids of tactics whose output is off by half.
    broken : mapping of int to str
        Id → what happens to the process: ``raise``, ``exit`` or ``hang``.
    unable : str
        Why the layer can't be run at all.
    """

    def __init__(self, wrong: Sequence[int] = (), broken: Mapping[int, str] | None = None, unable: str = "") -> None:
        if unable:
            raise OutOfMemory(unable)
        self._wrong, self._broken = frozenset(wrong), dict(broken or {})

    def deviation(self, tokens: int, pair: Pair) -> float:
        """See :class:`Comparator`."""
        for tactic in pair:
            if tactic in self._broken:
                _break(self._broken[tactic])
        return 0.5 if self._wrong & set(pair) else 0.0 if pair == FALLBACK else 0.004


def _break(how: str) -> None:
    if how == "exit":
        os._exit(3)
    while how == "hang":
        time.sleep(3600)
    raise RuntimeError("CUDA error: an illegal memory access was encountered (simulated)")


def _serve(spec: ComparatorSpec, device: str | None, connection: Connection) -> None:
    """Compare what is asked until the other end closes; an error ends the process, since the context may be lost."""
    # Ctrl-C goes to the whole group; the parent alone decides what follows.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if device is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = device
    comparator: Comparator | None = None
    # The other end closes when nothing more is asked.
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionError):
        while True:
            asked = connection.recv() if comparator is not None else None
            try:
                if comparator is None or asked is None:
                    comparator = spec.make()
                    answer: tuple[str, float | str] = "ready", ""
                else:
                    answer = "done", comparator.deviation(*asked)
            except SynthError as e:
                answer = "unable", str(e)
            except Exception as e:
                text = " ".join(str(e).split()) or type(e).__name__
                answer = "failed", f"{type(e).__name__}: {text}"[:300]
            connection.send(answer)
            if answer[0] in ("unable", "failed"):
                return
