"""What timings are worth: regret after a share of a sweep was timed, cells chosen in rounds, stratified or at random.

    python benchmarks/learning_curve.py --seeds 3 [--plots FOLDER]

Each model family, or shape, is predicted by a model that has seen none of it, and its sweeps are replayed. Beside it
all sweeps of a quantization are replayed for a device of which nothing is known but its data sheet.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from studies import plotting
from studies.replaying import NEW_SHARES, WAYS, Point, hold_out_and_replay, new_device
from studies.scripts import Script, by_option, plots_option, print_json, quant_option, tables_of, timings_options

from synth.commands.options import json_option
from synth.errors import SynthError
from synth.performance.evaluation import Judge, held_out_groups
from synth.performance.geometry import Ints
from synth.performance.held_out import swept_shapes, workers
from synth.reporting.console import progress, table
from synth.timings.table import Timings

#: Source of the passes that were swept before synth could collect; their shapes are also looked at alone …
_FIRST_SWEEPS = "exhaustive sweep"
#: … and there, as in the study before, at these numbers of timings of a new device.
_STUDIED = {"bf16": (674, 1348, 3370, 6741)}


@dataclass(frozen=True)
class Curves:
    """What timings are worth.

    Attributes
    ----------
    title, quant : str
    known, new : dict of str to tuple of Point
        For shapes that a model hasn't seen, and for a device without a model, by the shapes judged.
    """

    title: str
    quant: str
    known: Mapping[str, tuple[Point, ...]]
    new: Mapping[str, tuple[Point, ...]]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "known_device": {name: [p.as_dict() for p in points] for name, points in self.known.items()},
            "new_device": {name: [p.as_dict() for p in points] for name, points in self.new.items()},
        }


def study(timings: Timings, by: str, seeds: int, progress: Callable[[int, int], None] | None = None) -> Curves:
    """Replay the sweeps of shapes held out, and of all shapes together.

    Parameters
    ----------
    by : str
        ``"family"`` or ``"shape"``.
    seeds : int
        How often ways with chance in them are tried.
    progress : callable, optional
        Called with the steps done and the steps in all.

    Raises
    ------
    SynthError
        When no shape was swept.
    """
    title = f"{timings.origin.device} {timings.origin.quant}, held out by {by}"
    swept = swept_shapes(Judge(timings))
    if not len(swept):
        raise SynthError(f"{title}: no shape was swept, so there is nothing to replay")
    scopes = _scopes(timings, swept)
    tasks = [
        (name, partial(new_device, timings.select(np.isin(timings.shape, shapes)), way, seed, shares))
        for way in WAYS
        for name, (shapes, shares) in scopes.items()
        for seed in range(seeds)
    ]
    steps = len(held_out_groups(timings, by)) + len(tasks)

    def step(done: int, _: int) -> None:
        if progress is not None:
            progress(done, steps)

    with workers() as pool:
        found = hold_out_and_replay(timings, by, seeds=seeds, progress=step, pool=pool)
        later = [pool.submit(task) for _, task in tasks]
        for done, future in enumerate(as_completed(later), start=steps - len(later) + 1):
            future.result()
            step(done, steps)
    new: dict[str, list[Point]] = {name: [] for name in scopes}
    for (name, _), future in zip(tasks, later, strict=True):
        new[name] += future.result()
    return Curves(
        title,
        timings.origin.quant,
        {name: _joined(found.points, shapes) for name, (shapes, _) in scopes.items()},
        {name: tuple(points) for name, points in new.items()},
    )


def _scopes(timings: Timings, swept: Ints) -> dict[str, tuple[Ints, list[float]]]:
    """Return the shapes that are judged together, by name, with the shares at which a new device is looked at."""
    first = [i for i in swept.tolist() if timings.passes[i].get(1, {}).get("source") == _FIRST_SWEEPS]
    scopes = {f"all {len(swept)} shapes": (swept, list(NEW_SHARES))}
    counts = _STUDIED.get(timings.origin.quant, ())
    if counts and 0 < len(first) < len(swept):
        shapes = np.array(first, dtype=np.int64)
        sweep = len(timings.select(np.isin(timings.shape, shapes)).averaged())
        shares = [n / sweep for n in counts if n < sweep] or list(NEW_SHARES)
        scopes[f"the {len(first)} shapes of the first sweeps"] = shapes, shares
    return scopes


def _joined(points: Sequence[Point], shapes: Ints) -> tuple[Point, ...]:
    """Join the points of some shapes by mark, way and seed."""
    groups: dict[tuple[float, int, int], list[Point]] = {}
    for p in points:
        if p.evaluation.keys[0, 0] in shapes:
            groups.setdefault((p.mark, WAYS.index(p.way), p.seed), []).append(p)
    return tuple(Point.joined(members) for _, members in sorted(groups.items(), key=lambda item: item[0]))


def tables(found: Curves) -> None:
    """Print a table for each curve."""
    for name, points in found.known.items():
        _table(f"{found.title}: timings of an unseen shape (mean of a shape), judged over {name}", points, each=True)
    for name, points in found.new.items():
        _table(f"{found.title}: timings of a new device, over {name} together", points)


def _table(title: str, points: Iterable[Point], *, each: bool = False) -> None:
    """Print a table of regrets, a row a share of the sweep and a way to choose it; means over seeds.

    Timings and seconds are those of all shapes together, or of `each` on average.
    """
    groups: dict[tuple[float, str], list[Point]] = {}
    for p in points:
        groups.setdefault((p.mark, p.way), []).append(p)
    rows = []
    for (_, way), seeds in sorted(groups.items(), key=lambda item: item[0][0]):
        count = len(seeds[0].evaluation.shapes()) if each else 1
        regret = [p.evaluation.all for p in seeds]
        second = [s.geomean for p in seeds if (s := p.evaluation.second_pass())]
        overall = [r.geomean for r in regret]
        rows.append(
            [
                f"{_mean(p.timings / p.sweep for p in seeds):.2%}",
                round(_mean(p.timings / count for p in seeds)),
                f"{_mean(p.seconds / count for p in seeds):.1f}",
                f"{_mean(p.seconds / p.sweep_seconds for p in seeds):.2%}",
                way if seeds[0].timings else "any",
                f"{_mean(overall):.4f}",
                f"{min(overall):.4f}–{max(overall):.4f}" if len(seeds) > 1 else "",
                *(f"{_mean(p.evaluation.stage(s).geomean for p in seeds):.4f}" for s in (1, 2)),
                f"{_mean(r.p95 for r in regret):.3f}",
                f"{_mean(r.p99 for r in regret):.3f}",
                f"{max(r.max for r in regret):.3f}",
                f"{_mean(second):.4f}" if second else "",
            ]
        )
    columns = ["timed", "timings", "GPU s", "of s", "cells", "geomean", "seeds", "gemm1", "gemm2"]
    table(title, [*columns, "p95", "p99", "max", "2nd pass"], rows)


def _mean(values: Iterable[float]) -> float:
    every = list(values)
    return sum(every) / len(every)


def plot(found: Curves, folder: Path) -> list[Path]:
    """Draw the curves over timings and over seconds; return the files written."""
    files = []
    for what, curves in (("shape", found.known), ("device", found.new)):
        titled = {f"{found.quant}, new {what}: {name}": points for name, points in curves.items()}
        for suffix, seconds in (("", False), ("-seconds", True)):
            path = folder / f"learning-curve-{what}-{found.quant}{suffix}"
            files += plotting.learning_curves(titled, path, seconds=seconds)
    return files


@click.command(cls=Script, help=__doc__)
@timings_options
@quant_option
@by_option
@click.option(
    "--seeds",
    type=click.IntRange(1),
    default=2,
    show_default=True,
    help="How often ways of choosing cells that have chance in them are tried.",
)
@plots_option
@json_option
def main(
    device: str,
    quant: str | None,
    by: str,
    seeds: int,
    plots: Path | None,
    flashinfer: str,
    own_measurements: Path | None,
    as_json: bool,
) -> None:
    if plots is not None:
        plotting.check()
    results = []
    for timings in tables_of(device, quant, flashinfer, own_measurements):
        with progress(f"replaying {timings.origin.quant}") as step:
            results.append(study(timings, by, seeds, step))
    files = [file for found in results for file in (plot(found, plots) if plots is not None else [])]
    if as_json:
        print_json({found.quant: found.as_dict() for found in results})
        return
    for found in results:
        tables(found)
    for file in files:
        click.echo(f"-> {file}")


if __name__ == "__main__":
    main()
