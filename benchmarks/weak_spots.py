"""Where the regret is: the choices that cost most, by kinds that geometry tells apart, and one by one.

    python benchmarks/weak_spots.py [--quant bf16]

Each model family, or shape, is predicted by a model that has seen none of it; its regret is looked at without timings,
and after 1 % and 5 % of its sweep was timed in rounds (replayed).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from studies.replaying import LOOKED_AT, Point, hold_out_and_replay
from studies.scripts import Script, by_option, print_json, quant_option, tables_of, timings_options

from synth.catalog.devices import get_device
from synth.commands.options import json_option
from synth.errors import SynthError
from synth.performance.evaluation import Evaluation, Judge
from synth.performance.geometry import Floats, Ints, sites
from synth.performance.held_out import swept_shapes, workers
from synth.performance.roofline import Hardware, tactic_columns, work
from synth.reporting.console import progress, table
from synth.timings.table import Timings

#: Up to this many tokens are decode, above ``_PREFILL`` they are prefill.
_DECODE, _PREFILL = 16, 2048
#: Few and large experts: at most so many, of at least so many weights in this stage.
_FEW, _LARGE = 16, 2**24
#: Many experts, and narrow weights: columns of one rank.
_MANY, _NARROW = 256, 1024
#: A whole number of waves this near (in waves), up to so many waves: beyond, a wave more or less is little.
_STEP, _WAVES = 0.15, 4.0
#: Share of the last tile's columns, of all, that are padding.
_PADDING = 0.1
#: Sweeps beyond the first read so much more than this share of what must be read once.
_AGAIN = 0.25
#: Runners-up within this share of the best are ties in truth.
_TIE = 0.005
#: A fix takes away at least this share of the regret.
_GONE = 0.6
#: Choices listed as the worst.
_WORST = 10


def kinds(judge: Judge, keys: Ints) -> dict[str, NDArray[np.bool_]]:
    """Say of which kinds choices are; a choice can be of several.

    Parameters
    ----------
    judge : Judge
        What was timed.
    keys : ndarray of int64, shape (choices, 3)
        Shape index, stage and bucket of each; all of them are the judge's.

    Returns
    -------
    dict of str to ndarray of bool, shape (choices,)
        By kind.
    """
    t = judge.timings
    hardware = Hardware.of(get_device(t.origin.device), t.origin.quant)
    order = np.lexsort((t.ms, judge.bucket))
    starts = np.searchsorted(judge.bucket[order], np.arange(len(judge.keys)))
    bucket = np.array([_index(judge.keys)[tuple(key)] for key in keys.tolist()], dtype=np.int64)
    best = order[starts[bucket]]
    timed = np.bincount(judge.bucket, minlength=len(judge.keys))[bucket]
    second = np.where(timed > 1, t.ms[order[np.minimum(starts[bucket] + 1, len(order) - 1)]], np.inf)
    s = sites(t.shapes, keys[:, 0], keys[:, 1], keys[:, 2])
    columns = tactic_columns(t.table, hardware)
    w = work(s, np.arange(len(keys)), t.tactic[best], columns, hardware)
    width = w.tiles_n * columns.n[t.tactic[best]]
    experts = s.experts * s.ep_size
    return {
        "decode (up to 16 tokens)": s.tokens <= _DECODE,
        "between (up to 2,048 tokens)": (s.tokens > _DECODE) & (s.tokens <= _PREFILL),
        "prefill (more tokens)": s.tokens > _PREFILL,
        "one expert a token": s.top_k == 1,
        "few large experts": (experts <= _FEW) & (s.n * s.k >= _LARGE),
        "many experts": experts >= _MANY,
        "narrow weights": s.n <= _NARROW,
        "no gate (gemm1)": (s.gated == 0) & (s.stage == 1),
        "padded columns": width > (1.0 + _PADDING) * s.n,
        "near a wave step": (np.abs(w.waves - np.round(w.waves)) < _STEP) & (w.waves > 0.5) & (w.waves < _WAVES),
        "an operand swept again": w.sweep_bytes > _AGAIN * w.dram_bytes,
        "near tie in truth": second <= (1.0 + _TIE) * t.ms[best],
    }


@dataclass(frozen=True)
class Kind:
    """How much of the regret one kind of choices holds.

    Attributes
    ----------
    name : str
    count : int
        Choices of this kind.
    share : float
        Their share of all choices.
    of_regret : float
        Their share of all regret (sum of logarithms).
    shares, geomeans : tuple of float
        Geometric mean of their regret after these shares of the sweep were timed.
    """

    name: str
    count: int
    share: float
    of_regret: float
    shares: tuple[float, ...]
    geomeans: tuple[float, ...]

    def fix(self) -> str:
        """Say in one sentence what would mend it: what timing does to it, the least that takes most of it away."""
        before = math.log(self.geomeans[0])
        gone = [1.0 - math.log(after) / before if before > 0 else 0.0 for after in self.geomeans]
        enough = [i for i, part in enumerate(gone) if part >= _GONE]
        at = enough[0] if enough else -1
        what = f"{100 * self.shares[at]:.0f} % of the sweep timed takes {100 * max(gone[at], 0.0):.0f} % of it away"
        return what if enough else f"a feature or repeats: {what}"

    def as_dict(self) -> Mapping[str, Any]:
        """Return plain values."""
        return {
            "kind": self.name, "count": self.count, "share": self.share, "of_regret": self.of_regret,
            "geomeans": dict(zip(map(str, self.shares), self.geomeans, strict=True)),
        }  # fmt: skip


def by_kind(judge: Judge, evaluations: Mapping[float, Evaluation]) -> list[Kind]:
    """Split the regret of the first evaluation by kind, the most regret for a choice first.

    Parameters
    ----------
    evaluations : mapping of float to Evaluation
        By the share of the sweep that was timed, none first.
    """
    first = next(iter(evaluations.values()))
    total = float(np.log(first.regrets).sum()) or 1.0
    found = []
    members = [kinds(judge, e.keys) for e in evaluations.values()]
    for name, mine in members[0].items():
        if mine.any():
            lost = np.log(first.regrets[mine])
            geomeans = tuple(_geomean(e.regrets[m[name]]) for e, m in zip(evaluations.values(), members, strict=True))
            found.append(
                Kind(name, int(mine.sum()), float(mine.mean()), float(lost.sum()) / total, tuple(evaluations), geomeans)
            )
    return sorted(found, key=lambda k: -k.of_regret / k.share)


def _geomean(regrets: Floats) -> float:
    return float(np.exp(np.log(regrets).mean())) if len(regrets) else 1.0


def _index(keys: Ints) -> dict[tuple[int, ...], int]:
    return {tuple(key): i for i, key in enumerate(keys.tolist())}


@dataclass(frozen=True)
class Worst:
    """A choice that costs much.

    Attributes
    ----------
    label : str
    stage, bucket : int
    regret : float
    chosen, best : str
        The two tactics.
    later : float
        Regret after 5 % of the sweep was timed.
    """

    label: str
    stage: int
    bucket: int
    regret: float
    chosen: str
    best: str
    later: float


def worst(judge: Judge, points: Mapping[float, Point]) -> Iterator[Worst]:
    """Yield the choices with the highest regret when nothing is timed."""
    first, last = points[LOOKED_AT[0]], points[LOOKED_AT[-1]]
    e, table = first.evaluation, judge.timings.table
    after = {tuple(k): r for k, r in zip(last.evaluation.keys.tolist(), last.evaluation.regrets.tolist(), strict=True)}
    for i in np.argsort(-e.regrets, kind="stable")[:_WORST].tolist():
        shape, stage, bucket = e.keys[i].tolist()
        yield Worst(
            e.labels[shape],
            stage,
            bucket,
            float(e.regrets[i]),
            str(table.tactic(int(first.tactic[i]))),
            str(table.tactic(int(first.best[i]))),
            after.get((shape, stage, bucket), float("nan")),
        )


@dataclass(frozen=True)
class WeakSpots:
    """Where the regret of shapes held out is.

    Attributes
    ----------
    title, quant : str
    kinds : tuple of Kind
    worst : tuple of Worst
    """

    title: str
    quant: str
    kinds: tuple[Kind, ...]
    worst: tuple[Worst, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {"kinds": [k.as_dict() for k in self.kinds], "worst": [asdict(w) for w in self.worst]}


def study(timings: Timings, by: str, progress: Callable[[int, int], None] | None = None) -> WeakSpots:
    """Look at the regret of each family, or each shape, held out.

    Parameters
    ----------
    by : str
        ``"family"`` or ``"shape"``.
    progress : callable, optional
        Called with the fits done and the fits in all.

    Raises
    ------
    SynthError
        When no shape was swept.
    """
    title = f"{timings.origin.device} {timings.origin.quant}, held out by {by}"
    if not len(swept_shapes(Judge(timings))):
        raise SynthError(f"{title}: no shape was swept, so there is nothing to replay")
    with workers() as pool:
        found = hold_out_and_replay(timings, by, ways=("active",), progress=progress, pool=pool)
    points = {share: found.at(share) for share in LOOKED_AT}
    split = by_kind(found.judge, {share: point.evaluation for share, point in points.items()})
    return WeakSpots(title, timings.origin.quant, tuple(split), tuple(worst(found.judge, points)))


def tables(found: WeakSpots) -> None:
    """Print the regret by kind, and the worst choices."""
    title = found.title
    table(
        f"{title}: where the regret is (kinds overlap)",
        ["kind", "choices", "of all", "of the regret", "regret", "1 % timed", "5 % timed", "what would mend it"],
        [
            [k.name, k.count, f"{k.share:.0%}", f"{k.of_regret:.0%}", *(f"{g:.4f}" for g in k.geomeans), k.fix()]
            for k in found.kinds
        ],
    )
    table(
        f"{title}: the worst choices without timings",
        ["shape", "stage", "bucket", "regret", "5 % timed", "chosen", "best"],
        [[w.label, w.stage, w.bucket, f"{w.regret:.3f}", f"{w.later:.3f}", w.chosen, w.best] for w in found.worst],
    )


@click.command(cls=Script, help=__doc__)
@timings_options
@quant_option
@by_option
@json_option
def main(
    device: str, quant: str | None, by: str, flashinfer: str, own_measurements: Path | None, as_json: bool
) -> None:
    results = []
    for timings in tables_of(device, quant, flashinfer, own_measurements):
        with progress(f"replaying {timings.origin.quant}") as step:
            results.append(study(timings, by, step))
    if as_json:
        print_json({found.quant: found.as_dict() for found in results})
        return
    for found in results:
        tables(found)


if __name__ == "__main__":
    main()
