"""Telling a person how a run goes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from synth.choosing.plan import Cell, PlanSummary
from synth.errors import SynthError

if TYPE_CHECKING:
    from types import TracebackType


@dataclass(frozen=True)
class Progress:
    """How far a run is: timings done and to do, failures so far, predicted seconds left."""

    done: int
    total: int
    failures: int
    left_s: float


@dataclass(frozen=True)
class Drift:
    """What the reference cell of a layer says of the clocks.

    Attributes
    ----------
    layer : str
        Label and quantization.
    stage, tokens, tactic : int
        The cell.
    times : int
        How often it was timed.
    first_ms, last_ms : float
        On the worker where the two differ most.
    drift : float
        ``last_ms / first_ms - 1``.
    max_deviation : float
        Largest relative distance of one of its times from their median.
    """

    layer: str
    stage: int
    tokens: int
    tactic: int
    times: int
    first_ms: float
    last_ms: float
    drift: float
    max_deviation: float


@dataclass(frozen=True)
class CollectSummary:
    """What a run did.

    Attributes
    ----------
    outcome : str
        ``finished``; ``budget``: the seconds were up before the plan was; ``interrupted``; ``failed``.
    reason : str
        Why it failed, in one line; empty otherwise.
    timed, failed, throttled : int
        Timings taken in this run, those of them that failed, those taken while throttled.
    before : int
        Timings that the journal held before.
    missing : int
        Timings of the plan that are still to be taken; under a budget, those it was meant to reach.
    skipped : tuple of str
        Lines about what was left out.
    measuring_s, setup_s, wall_s : float
        Seconds of measuring and of set-up, over all GPUs, and of the run.
    drift : tuple of Drift
        One for each layer with a reference.
    journal : Path
        The journal.
    files : tuple of Path
        Measurements files that now hold its timings.
    """

    outcome: Literal["finished", "budget", "interrupted", "failed"]
    reason: str
    timed: int
    failed: int
    throttled: int
    before: int
    missing: int
    skipped: tuple[str, ...]
    measuring_s: float
    setup_s: float
    wall_s: float
    drift: tuple[Drift, ...]
    journal: Path
    files: tuple[Path, ...] = ()

    def raise_if_failed(self, what: str = "") -> None:
        """Raise :class:`SynthError` where the run failed, with `what` before the reason."""
        if self.outcome == "failed":
            raise SynthError(f"{what}{self.reason}; what was timed is in {self.journal}; the same command continues")


class Reporter:
    """Hears of everything that happens in a run, in the main thread; says nothing of it."""

    def on_plan(self, plan: PlanSummary, done: int) -> None:
        """Hear the plan, before the first worker starts; `done` timings of it are in the journal already."""

    def on_timing(self, cell: Cell, ms: float, throttled: bool, progress: Progress) -> None:
        """Hear of a timing that is in the journal now."""

    def on_failure(self, cell: Cell, error: str, progress: Progress) -> None:
        """Hear of a failed tactic that is in the journal now."""

    def on_worker(self, worker: str, text: str) -> None:
        """Hear of a worker that started, died, or skips something."""

    def on_done(self, summary: CollectSummary) -> None:
        """Hear the summary."""


class RichReporter(Reporter):
    """A progress bar on the terminal, lines for what goes wrong; a context manager.

    Parameters
    ----------
    console : rich.console.Console, optional
        Where to draw; standard error if not given.
    """

    def __init__(self, console: Any = None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[failures]} failed"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]} left"),
            console=console or Console(stderr=True),
        )
        self._task = self._bar.add_task("starting", total=None, failures=0, left="?")

    def __enter__(self) -> RichReporter:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()

    def on_plan(self, plan: PlanSummary, done: int) -> None:
        """See :class:`Reporter`."""
        self._bar.update(self._task, total=plan.cells, completed=done, left=duration(plan.wall_s))

    def on_timing(self, cell: Cell, ms: float, throttled: bool, progress: Progress) -> None:
        """See :class:`Reporter`."""
        self._draw(cell, progress)

    def on_failure(self, cell: Cell, error: str, progress: Progress) -> None:
        """See :class:`Reporter`."""
        self._say(f"{cell}: {error}")
        self._draw(cell, progress)

    def on_worker(self, worker: str, text: str) -> None:
        """See :class:`Reporter`."""
        self._say(f"{worker}: {text}")

    def _draw(self, cell: Cell, progress: Progress) -> None:
        self._bar.update(
            self._task,
            description=f"{cell.layer} gemm{cell.stage} {cell.tokens}",
            completed=progress.done,
            total=progress.total,
            failures=progress.failures,
            left=duration(progress.left_s),
        )

    def _say(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False)


def duration(seconds: float) -> str:
    """Return seconds as a person says them, for example ``2 min 05 s``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"
