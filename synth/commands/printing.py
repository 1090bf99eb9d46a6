"""What collect and verify print: plans, runs, and what became of them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

from synth.reporting.console import table

if TYPE_CHECKING:
    from synth.choosing.plan import Layer, PlanSummary
    from synth.choosing.spots import Standing
    from synth.collecting.reporters import CollectSummary
    from synth.collecting.verifying import Verification


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
