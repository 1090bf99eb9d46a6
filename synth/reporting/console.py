"""What the commands print: tables and progress bars, on a terminal or not."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

if TYPE_CHECKING:
    from synth.choosing.plan import Layer, PlanSummary
    from synth.choosing.spots import Standing
    from synth.collecting.reporters import CollectSummary
    from synth.collecting.verifying import Verification
    from synth.performance.evaluation import Evaluation, Regret


#: Printed problems of input files, before the rest is only counted.
_MOST_PROBLEMS = 10
#: Width of tables where there is no terminal to ask.
_WIDTH = 132


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table; columns whose values are all numbers are right-aligned."""
    body = [[_text(v) for v in row] for row in rows]
    out = Table(title=escape(title) or None, title_justify="left", title_style="bold")
    for i, name in enumerate(columns):
        numbers = all(_is_number(row[i]) for row in body)
        out.add_column(name, justify="right" if numbers else "left", overflow="fold")
    for row in body:
        out.add_row(*map(escape, row))
    Console(width=None if sys.stdout.isatty() else _WIDTH).print(out)


def regrets(title: str, evaluations: Iterable[Evaluation]) -> None:
    """Print a table of regrets, a row a way to choose."""
    rows = []
    for e in evaluations:
        second = e.second_pass()
        stages = [f"{e.stage(s).geomean:.4f}" if (e.keys[:, 1] == s).any() else "" for s in (1, 2)]
        geomean, *rest = _summary(e.all)
        rows.append([e.name, geomean, *stages, *rest, f"{second.geomean:.4f}" if second else ""])
    table(title, ["choice", "geomean", "gemm1", "gemm2", "p95", "p99", "max", "2nd pass"], rows)


def shape_regrets(title: str, evaluation: Evaluation) -> None:
    """Print a table of regrets, a row a shape, worst first."""
    shapes = sorted(evaluation.shapes().items(), key=lambda item: -item[1].geomean)
    table(title, ["shape", "geomean", "p95", "p99", "max"], [[label, *_summary(r)] for label, r in shapes])


def plan_summary(plan: PlanSummary) -> None:
    """Print what a plan will cost."""
    from synth.collecting.reporters import duration

    table(
        f"{plan.device}, FlashInfer {plan.flashinfer}, pass {', '.join(map(str, plan.passes))}",
        ["layer", "cells", "measuring", "memory GB"],
        [[one.label, one.cells, duration(one.measuring_s), f"{one.memory_bytes / 1e9:.1f}"] for one in plan.layers],
    )
    budget = f", within a budget of {duration(plan.budget_s)} a GPU" if plan.budget_s is not None else ""
    click.echo(
        f"{plan.cells} of {plan.of_cells} cells; predicted {duration(plan.measuring_s)} of measuring and "
        f"{duration(plan.setup_s)} of set-up, {duration(plan.wall_s)} on {plan.gpus} GPU{budget}"
    )


def collect_summary(done: CollectSummary) -> None:
    """Print what a run did."""
    from synth.collecting.reporters import duration

    click.echo(
        f"{done.outcome}: {done.timed} timings in this run ({done.failed} failed, {done.throttled} throttled), "
        f"{done.before} before, {done.missing} missing; {duration(done.measuring_s)} of measuring, "
        f"{duration(done.setup_s)} of set-up, {duration(done.wall_s)} in all"
    )
    for line in done.skipped:
        click.echo(f"skipped: {line}")
    for drift in done.drift:
        click.echo(
            f"drift of {drift.layer}: reference gemm{drift.stage} {drift.tokens} tokens timed {drift.times} times, "
            f"last over first {drift.drift:+.2%}, at most {drift.max_deviation:.2%} from their median"
        )
    for path in done.files:
        click.echo(f"-> {path}")


def standings(layers: Iterable[tuple[Layer | str, Standing]]) -> None:
    """Print how sure the choices of layers are, a row a layer."""
    rows = [
        [
            one,
            *(now.entries.get(s, 0) for s in ("measured", "verified", "predicted")),
            f"{now.regret:.2%}",
            f"{now.near:.1%}",
        ]
        for one, now in layers
    ]
    columns = ["layer", "measured", "verified", "predicted", "expected regret", "within 1 %"]
    table("Choices, a stage and bucket each", columns, rows)


def verification(done: Verification) -> None:
    """Print what spot checks of one layer came to."""
    from synth.collecting.reporters import duration

    standings([(f"{done.layer}, before", done.before), (f"{done.layer}, after", done.after)])
    click.echo(
        f"{done.timings} timings ({done.failed} failed) in {duration(done.measuring_s)} of measuring; {done.stop}"
    )
    for line in done.collected.skipped:
        click.echo(f"skipped: {line}")
    if done.changes:
        table(
            f"{len(done.changes)} choices changed",
            ["stage", "bucket", "before", "after", "gain"],
            [[c.stage, c.bucket, c.old, c.new, "" if math.isnan(c.gain) else f"{c.gain:.1%}"] for c in done.changes],
        )
    numbers = done.numbers
    if numbers.pairs:
        click.echo(f"numbers: {numbers.pairs} pairs agree with the fallback, at most {numbers.worst:.2%} off")
    if numbers.unchecked:
        click.echo(f"numbers: not all were compared: {numbers.unchecked}", err=True)
    for denial in numbers.denials:
        click.echo(f"WRONG NUMBERS, denied from now on: {denial}", err=True)


def problems(found: Sequence[object]) -> None:
    """Print problems of input files to standard error, a line each."""
    for problem in found[:_MOST_PROBLEMS]:
        click.echo(f"warning: {problem}", err=True)
    if len(found) > _MOST_PROBLEMS:
        click.echo(f"warning: {len(found) - _MOST_PROBLEMS} more problems like these", err=True)


@contextlib.contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on standard error; without a terminal, a line at every tenth of the work."""
    if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(what, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)
    else:
        said = -1

        def report(done: int, total: int) -> None:
            nonlocal said
            tenth = 10 * done // max(total, 1)
            if tenth > said:
                said = tenth
                click.echo(f"{what}: {done} of {total}", err=True)

        yield report


def _summary(regret: Regret) -> list[str]:
    return [f"{regret.geomean:.4f}", f"{regret.p95:.3f}", f"{regret.p99:.3f}", f"{regret.max:.3f}"]


def _text(value: object) -> str:
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.4g}"
    return "" if value is None else str(value)


def _is_number(text: str) -> bool:
    try:
        float(text or "0")
    except ValueError:
        return False
    return True
