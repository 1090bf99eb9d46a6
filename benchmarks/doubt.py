"""How true the stated doubt is: intervals of times, probabilities of choices, and what two independent passes choose.

    python benchmarks/doubt.py [--plots FOLDER]

Each model family, or shape, is predicted by a model that has seen none of it; what is stated of it then, and after 1 %
and 5 % of its sweep was timed in rounds (replayed), is compared with its sweep. Corrections are learnt from the others.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from studies import plotting
from studies.replaying import LOOKED_AT, Point, hold_out_and_replay
from studies.scripts import Script, by_option, plots_option, print_json, quant_option, tables_of, timings_options

from synth.catalog.models import family_of
from synth.choosing.choose import choose
from synth.commands.options import json_option
from synth.errors import SynthError
from synth.performance.analytical import start_of
from synth.performance.calibration import INTERVAL_SD, Reliability, covered, reliability
from synth.performance.evaluation import Calibration, Judge, calibrate, held_out_groups
from synth.performance.geometry import Ints
from synth.performance.held_out import held_out_model, swept_shapes, workers
from synth.performance.posterior import NEAR
from synth.reporting.console import progress, table
from synth.timings.table import Timings

#: Two choices this near by their mean time are as good as equal.
_AS_GOOD = 0.005


@dataclass(frozen=True)
class Coverage:
    """How many errors of expected times lie inside 90 % intervals.

    Attributes
    ----------
    share : float
        Of the sweep that was timed.
    stated, corrected : float
        Share inside, as stated and when each family's factor comes from the others.
    expected, actual : float
        Mean expected regret of the choices, and what it was (logarithms).
    """

    share: float
    stated: float
    corrected: float
    expected: float
    actual: float


@dataclass(frozen=True)
class Stability:
    """How equal choices from two independent passes are.

    Attributes
    ----------
    count : int
        (shape, stage, bucket) that both passes timed.
    equal, as_good : float
        Share that are equal; share that are, or within 0.5 % by the mean of both.
    """

    count: int
    equal: float
    as_good: float


@dataclass(frozen=True)
class Doubt:
    """How true what is stated of shapes held out is.

    Attributes
    ----------
    title, quant : str
    calibration : Calibration
        Of predicted times, nothing timed.
    coverage : tuple of Coverage
    reliability : dict of float to (Reliability, Reliability)
        By margin: as stated, and when each family is corrected by the others.
    stability : Stability or None
        None where nothing was swept twice.
    """

    title: str
    quant: str
    calibration: Calibration
    coverage: tuple[Coverage, ...]
    reliability: Mapping[float, tuple[Reliability, Reliability]]
    stability: Stability | None

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "prediction_coverage_90": self.calibration.coverage,
            "coverage_90": [asdict(c) for c in self.coverage],
            "reliability": {
                f"{margin:g}": {"stated": stated.as_dict(), "corrected": by_others.as_dict()}
                for margin, (stated, by_others) in self.reliability.items()
            },
            "stability": asdict(self.stability) if self.stability else None,
        }


def study(timings: Timings, by: str, progress: Callable[[int, int], None] | None = None) -> Doubt:
    """Compare what is stated of shapes held out with their sweeps.

    Parameters
    ----------
    by : str
        ``"family"`` or ``"shape"``.
    progress : callable, optional
        Called with the steps done and the steps in all.

    Raises
    ------
    SynthError
        When no shape was swept.
    """
    title = f"{timings.origin.device} {timings.origin.quant}, held out by {by}"
    if not len(swept_shapes(Judge(timings))):
        raise SynthError(f"{title}: no shape was swept, so there is nothing to replay")
    twice = _timed_twice(timings)
    halves = _two_passes(timings, twice) if len(twice) else []
    steps = len(held_out_groups(timings, by)) + len(halves)

    def step(done: int, _: int) -> None:
        if progress is not None:
            progress(done, steps)

    with workers() as pool:
        found = hold_out_and_replay(timings, by, ways=("active",), progress=step, pool=pool)
        later = [pool.submit(_choices, rows, twice) for rows in halves]
        for done, future in enumerate(as_completed(later), start=steps - len(later) + 1):
            future.result()
            step(done, steps)
    points = [found.at(share) for share in LOOKED_AT]
    return Doubt(
        title,
        timings.origin.quant,
        calibrate(found.judge, found.ms, found.log_sd),
        tuple(map(_coverage, points)),
        {margin: _reliability(points, i) for i, margin in enumerate(NEAR)},
        _stability(found.judge, twice, *(future.result() for future in later)) if later else None,
    )


def _coverage(point: Point) -> Coverage:
    """Count the errors inside 90 % intervals."""
    error = np.abs(point.error)
    family = np.array([family_of(point.evaluation.labels[i]) for i in point.error_shape.tolist()])
    return Coverage(
        point.mark,
        float((error <= INTERVAL_SD).mean()),
        covered(error, family),
        float(point.expected.mean()),
        float(np.log(point.evaluation.regrets).mean()),
    )


def _reliability(points: Sequence[Point], margin: int) -> tuple[Reliability, Reliability]:
    """Compare the stated probabilities of choices with what happened, as stated and corrected by other families."""
    stated = np.concatenate([p.within[:, margin] for p in points])
    hit = np.concatenate([p.evaluation.regrets <= 1.0 + NEAR[margin] for p in points])
    return reliability(stated, hit, np.concatenate([p.evaluation.families() for p in points]))


def _timed_twice(timings: Timings) -> Ints:
    """Return the (shape, stage, bucket) in which the first pass and a later one timed all that there is."""
    passes = np.unique(timings.pass_)
    whole = []
    for some in (passes[:1], passes[1:]):
        keys, bucket = timings.averaged(some.tolist()).buckets()
        tactics = np.array([len(timings.table.ids(stage)) for stage in (1, 2)])[keys[:, 1] - 1]
        whole.append({tuple(key) for key in keys[np.bincount(bucket, minlength=len(keys)) == tactics].tolist()})
    return np.array(sorted(whole[0] & whole[1]), dtype=np.int64).reshape(-1, 3)


def _two_passes(timings: Timings, twice: Ints) -> list[Timings]:
    """Return all timings but the later passes, and but the first pass, of what was timed twice."""
    again = set(map(tuple, twice.tolist()))
    columns = (timings.shape.tolist(), timings.stage.tolist(), timings.tokens.tolist())
    mine = np.array([key in again for key in zip(*columns, strict=True)], dtype=bool)
    first = timings.pass_ == timings.pass_.min()
    return [timings.select(~mine | first), timings.select(~mine | ~first)]


def _choices(timings: Timings, keys: Ints) -> list[int]:
    """Fit the timings and choose from them; return the tactic of each (shape, stage, bucket)."""
    model = held_out_model(start_of(timings.origin)).fit(timings)
    shapes = [timings.shapes[i] for i in np.unique(keys[:, 0]).tolist()]
    found = choose(model, shapes, np.unique(keys[:, 2]).tolist(), timings=timings)
    tactic = {(c.shape, c.stage, c.bucket): c.tactic_id for c in found}
    return [tactic[timings.shapes[i], stage, bucket] for i, stage, bucket in keys.tolist()]


def _stability(judge: Judge, keys: Ints, first: Sequence[int], later: Sequence[int]) -> Stability:
    """Compare the choices of two passes by the mean of both."""
    a, b = (
        judge.timings.ms[judge.rows_of(keys[:, 0], keys[:, 1], keys[:, 2], np.array(x, dtype=np.int64))]
        for x in (first, later)
    )
    equal = np.array(first) == np.array(later)
    return Stability(len(keys), float(equal.mean()), float((equal | (np.abs(np.log(a / b)) <= _AS_GOOD)).mean()))


def tables(found: Doubt) -> None:
    """Print what is stated beside what happened."""
    title = found.title
    table(
        f"{title}: what is stated of unseen shapes, beside what was found",
        ["share timed", "in 90 % intervals", "corrected", "expected regret", "actual"],
        [
            [f"{c.share:.1%}", f"{c.stated:.1%}", f"{c.corrected:.1%}", f"{c.expected:.2%}", f"{c.actual:.2%}"]
            for c in found.coverage
        ],
    )
    click.echo(f"90 % intervals of predicted times, corrected by the other families: {found.calibration.coverage:.1%}")
    for margin, (stated, corrected) in found.reliability.items():
        for name, one in (("as stated", stated), ("corrected by the other families", corrected)):
            click.echo(
                f"{title}: probability of being within {margin:.0%} of the best, {name}: "
                f"Brier score {one.brier:.4f}, calibration error {one.error:.3f}"
            )
            bins = zip(one.stated, one.happened, one.count, strict=True)
            table("", ["stated", "happened", "choices"], [[f"{s:.1%}", f"{h:.1%}", n] for s, h, n in bins])
    if found.stability is not None:
        s = found.stability
        click.echo(
            f"{title}: choices from two independent passes, {s.count} of each: {s.equal:.1%} equal, "
            f"{s.as_good:.1%} equal or within 0.5 %"
        )


def plot(found: Doubt, folder: Path) -> list[Path]:
    """Draw how often what was stated happened; return the files written."""
    lines = {
        f"{found.quant}: within {margin:.0%} of the best": {"as stated": pair[0], "corrected": pair[1]}
        for margin, pair in found.reliability.items()
    }
    return plotting.reliability(lines, folder / f"reliability-{found.quant}")


@click.command(cls=Script, help=__doc__)
@timings_options
@quant_option
@by_option
@plots_option
@json_option
def main(
    device: str,
    quant: str | None,
    by: str,
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
            results.append(study(timings, by, step))
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
