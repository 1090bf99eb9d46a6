"""What one worker does, as a stream of messages; the same code in a process, in a Ray actor and in tests."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from synth.choosing.plan import Layer
from synth.collecting.runner import Runner, RunnerSpec
from synth.errors import OutOfMemory, StickyError, SynthError, TacticError

#: Seconds of measuring after which the reference cell is timed again.
REFERENCE_EVERY_S = 15.0

Phase = Literal["start", "shape", "bucket", "timing", "reference"]

Result = TypeVar("Result")


@dataclass(frozen=True)
class Item:
    """A piece of work: tactics of one (layer, pass, stage, bucket), in the order of timing.

    Attributes
    ----------
    index : int
        Of the layer in the plan.
    layer : Layer
    stage, tokens : int
        Of the batch.
    tactics : tuple of int
        Ids in the order of timing.
    seconds : tuple of float
        What each will take, for the deadline and the watchdog.
    counts : (int, int)
        How many gemm1 and gemm2 tactics the running module must have.
    reference : (int, int, int) or None
        Stage, tokens and tactic of the layer's reference cell.
    seconds_left : float
        Seconds of measuring that this worker may still spend.
    """

    index: int
    layer: Layer
    stage: int
    tokens: int
    tactics: tuple[int, ...]
    seconds: tuple[float, ...]
    counts: tuple[int, int]
    reference: tuple[int, int, int] | None
    seconds_left: float


@dataclass(frozen=True)
class Started:
    """The worker is ready."""

    environment: dict[str, Any]


@dataclass(frozen=True)
class Begin:
    """What the worker turns to now, for the watchdog; `tactic` of a timing, `expected_s` if known."""

    phase: Phase
    tactic: int = -1
    expected_s: float = 0.0


@dataclass(frozen=True)
class Timed:
    """A timing of the current item, or with `reference` of the reference cell of `layer`.

    `ms` is None where the tactic failed; `error` says how. `seconds` is what it cost.
    """

    tactic: int
    ms: float | None
    error: str | None
    throttled: bool
    seconds: float
    reference: tuple[int, int, int, int] | None = None


@dataclass(frozen=True)
class SetUp:
    """Seconds that were not measuring."""

    phase: Phase
    seconds: float


@dataclass(frozen=True)
class Refused:
    """Something can't be done and the worker is fine: the whole run, this layer, or this bucket of it."""

    scope: Literal["run", "shape", "bucket"]
    error: str


@dataclass(frozen=True)
class Broken:
    """The worker is of no more use and ends."""

    error: str


@dataclass(frozen=True)
class Finished:
    """The item is done, or with `out_of_time` as much of it as the budget allows."""

    out_of_time: bool = False


Message = Started | Begin | Timed | SetUp | Refused | Broken | Finished


class Worker:
    """Runs items one after the other on one runner.

    Parameters
    ----------
    spec : RunnerSpec
        How to make the runner.
    """

    def __init__(self, spec: RunnerSpec) -> None:
        self._spec = spec
        self._runner: Runner
        self._clock: Callable[[], float] = time.perf_counter
        self._asserted: set[str] = set()
        # The layer whose weights are allocated, and the bucket whose inputs are there.
        self._layer: int | None = None
        self._bucket: tuple[int, int] | None = None
        self._reference: tuple[int, int, int] | None = None
        self._since_reference = 0.0

    def start(self) -> Iterator[Message]:
        """Make the runner."""
        try:
            environment = yield from self._set_up("start", self._make)
        except SynthError as e:
            yield Refused("run", str(e))
        except Exception as e:
            yield Broken(describe(e))
        else:
            yield Started(environment)

    def run(self, item: Item) -> Iterator[Message]:
        """Time an item's tactics."""
        try:
            yield from self._run(item)
        except OutOfMemory as e:
            # Without its bucket the layer can still go on with smaller ones.
            yield Refused("shape" if self._layer is None else "bucket", str(e))
        except SynthError as e:
            yield Refused("shape", str(e))
        except Exception as e:
            yield Broken(describe(e))

    def finish(self) -> Iterator[Message]:
        """Time the last reference and give the memory back."""
        try:
            yield from self._leave_layer()
            self._runner.release()
        except Exception as e:
            yield Broken(describe(e))
            return
        yield Finished()

    def _make(self) -> dict[str, Any]:
        self._runner = self._spec.make()
        # A simulated runner brings its own time.
        self._clock = getattr(self._runner, "clock", time.perf_counter)
        return self._runner.environment()

    def _set_up(self, phase: Phase, what: Callable[[], Result]) -> Generator[Message, None, Result]:
        """Do something that is not measuring, and say what it cost."""
        yield Begin(phase)
        clock = self._clock
        began = clock()
        result = what()
        yield SetUp(phase, clock() - began)
        return result

    def _run(self, item: Item) -> Iterator[Message]:
        layer = item.layer
        if layer.quant not in self._asserted:
            # The first question builds or loads the module.
            running = yield from self._set_up("start", lambda: tuple(self._runner.counts(layer.quant)))
            if running != item.counts:
                yield Refused(
                    "run",
                    "the running FlashInfer has {} gemm1 and {} gemm2 tactics for {}, and the table has {} and {}; "
                    "use the FlashInfer version that the plan names".format(*running, layer.quant, *item.counts),
                )
                return
            self._asserted.add(layer.quant)
        spent = 0.0
        if self._layer != item.index:
            yield from self._leave_layer()
            self._layer = self._bucket = self._reference = None
            yield from self._set_up("shape", lambda: self._runner.prepare(layer.shape, layer.quant, layer.activation))
            self._layer, self._reference = item.index, item.reference
            spent += yield from self._time_reference()
        yield from self._prepare_bucket(item.stage, item.tokens)
        for tactic, expected in zip(item.tactics, item.seconds, strict=True):
            if spent + expected > item.seconds_left:
                yield Finished(out_of_time=True)
                return
            yield Begin("timing", tactic, expected)
            timed = self._time(item.stage, item.tokens, tactic)
            yield timed
            spent += timed.seconds
            self._since_reference += timed.seconds
            if self._since_reference >= REFERENCE_EVERY_S:
                spent += yield from self._time_reference()
                yield from self._prepare_bucket(item.stage, item.tokens)
        yield Finished()

    def _leave_layer(self) -> Iterator[Message]:
        if self._layer is not None and self._since_reference > 0:
            yield from self._time_reference()

    def _time_reference(self) -> Generator[Message, None, float]:
        """Time the reference cell; returns the seconds that it took."""
        self._since_reference = 0.0
        if self._reference is None or self._layer is None:
            return 0.0
        stage, tokens, tactic = self._reference
        try:
            yield from self._prepare_bucket(stage, tokens)
        except OutOfMemory:
            self._reference = None
            return 0.0
        yield Begin("reference", tactic)
        timed = self._time(stage, tokens, tactic)
        if timed.error is not None:
            # Its own item will say so.
            self._reference = None
            return timed.seconds
        yield replace(timed, reference=(self._layer, stage, tokens, tactic))
        return timed.seconds

    def _prepare_bucket(self, stage: int, tokens: int) -> Iterator[Message]:
        if self._bucket == (stage, tokens):
            return
        self._bucket = None
        yield from self._set_up("bucket", lambda: self._runner.prepare_bucket(stage, tokens))
        self._bucket = (stage, tokens)

    def _time(self, stage: int, tokens: int, tactic: int) -> Timed:
        began = self._clock()
        ms: float | None = None
        error: str | None = None
        throttled = False
        try:
            ms = float(self._runner.time(stage, tokens, tactic))
            throttled = self._runner.throttled()
        except TacticError as e:
            error = describe(e)
        if ms is not None and not 0 < ms < float("inf"):
            ms, error = None, f"the timer returned {ms}"
        return Timed(tactic, ms, error, throttled and error is None, self._clock() - began)


def describe(error: Exception) -> str:
    """Return an error in one line, with its type where that isn't one of ours."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if isinstance(error, (TacticError, StickyError, SynthError)) else f"{type(error).__name__}: {text}"
