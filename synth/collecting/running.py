"""Running a plan from beginning to end: pool, journal, signals, and measurements files whatever happens."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from synth.choosing.picks import Strategy
from synth.choosing.plan import Plan
from synth.collecting.journal import Journal, JournalError, Write
from synth.collecting.pools import Pool, ProcessPool
from synth.collecting.reporters import CollectSummary, Reporter
from synth.collecting.run import Run
from synth.collecting.runner import RunnerSpec
from synth.collecting.slots import Limits


def collect(
    plan: Plan,
    runner: RunnerSpec,
    journal: Path,
    *,
    strategy: Strategy | None = None,
    gpus: Sequence[int] = (0,),
    ray: str | None = None,
    pool: Pool | None = None,
    reporter: Reporter | None = None,
    measurements: Path | None = None,
    limits: Limits | None = None,
    write: Write = os.write,
) -> CollectSummary:
    """Time what `plan` says and `journal` doesn't hold yet.

    Ctrl-C and SIGTERM end the run after the line being written; the same call goes on later. A second Ctrl-C ends
    it at once, which loses nothing either.

    Parameters
    ----------
    plan : Plan
        What to time.
    runner : RunnerSpec
        What times it.
    journal : Path
        Where each timing goes; usually ``plan.journal_path(root)``.
    strategy : Strategy, optional
        Decides round by round which cells of the plan are timed, as many in all as the plan and its budget allow;
        without it the first candidates of every bucket are.
    gpus : sequence of int
        One worker process is started on each.
    ray : str, optional
        Address of a Ray cluster (``"auto"``, ``"local"``, ``"ray://…"``), whose every GPU gets a worker instead.
    pool : Pool, optional
        Workers of another kind instead; closed at the end.
    reporter : Reporter, optional
        Hears of everything that happens.
    measurements : Path, optional
        Root of the measurements files that get the timings at the end, whatever the end is.
    limits : Limits, optional
        When a worker counts as hanging.
    write : callable
        ``os.write``, or what a test puts in its place.

    Returns
    -------
    CollectSummary
        What was done; its `outcome` says how it ended.

    Raises
    ------
    SynthError
        When the run can't begin: the journal is another plan's, in use, or can't be written.
    """
    if pool is None:
        pool = _make_pool(runner, gpus, ray)
    try:
        opened = Journal(journal, write)
    except BaseException:
        pool.close()
        raise
    run: Run | None = None
    try:
        run = Run(plan, pool, opened, reporter or Reporter(), limits or Limits(), strategy)
        with _signals(run):
            run.go()
    finally:
        pool.close()
        try:
            opened.close()
        except JournalError as e:
            if run is None:
                raise
            run.fail(str(e))
    summary = run.summary(measurements)
    run.reporter.on_done(summary)
    return summary


def _make_pool(runner: RunnerSpec, gpus: Sequence[int], ray: str | None) -> Pool:
    if ray is None:
        return ProcessPool(runner, gpus)
    from synth.collecting.ray_pool import RayPool

    return RayPool(runner, ray)


@contextlib.contextmanager
def _signals(run: Run) -> Iterator[None]:
    """Make Ctrl-C and SIGTERM end the run between two lines."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        if run.interrupted:
            raise KeyboardInterrupt
        run.interrupted = True

    before = {s: signal.signal(s, stop) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
