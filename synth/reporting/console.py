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
