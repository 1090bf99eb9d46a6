"""What a model of one quantization says of another's kernels: the test of the structure that analytical models borrow.

    python benchmarks/transfer.py [--device "NVIDIA H200"]

Each model family of the other quantization is predicted by a model that has seen none of it.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from studies.scripts import Script, print_json, tables_of, timings_options

from synth.catalog.models import family_of
from synth.catalog.schemes import STAGES
from synth.choosing.choose import SURE_GAIN, tactic_mask
from synth.commands.options import json_option
from synth.errors import SynthError
from synth.flashinfer.tactics import Tactic
from synth.performance.analytical import suspects
from synth.performance.evaluation import Judge, held_out_groups
from synth.performance.geometry import Floats, least_by
from synth.performance.held_out import held_out_model
from synth.performance.model import Cells, PerformanceModel
from synth.performance.ties import pick, tie_order
from synth.reporting.console import progress
from synth.reporting.console import table as print_table
from synth.timings.table import Timings

#: The tactics to choose from, and which of them stands for a fallback: SM120's tables hold one kind each.
_KINDS: tuple[tuple[str, Callable[[Tactic], bool]], ...] = (
    ("all", lambda t: True),
    ("TMA", lambda t: t.family != "sm80"),
    ("TMA, cluster 1x1x1", lambda t: t.family != "sm80" and t.cluster == (1, 1, 1)),
    ("multistage", lambda t: t.family == "sm80"),
)
#: Tile that stands for SM120's fallback among TMA tactics: its first one.
_PLAIN = (128, 128)


@dataclass(frozen=True)
class TransferScore:
    """Choices among the tactics of one quantization by what was learned from another.

    Attributes
    ----------
    source, target : str
        Quantizations.
    kind : str
        The tactics that were chosen from.
    carried : str
        ``"constants"``, the analytic model alone, or ``"structure"``, with the forests.
    choices : int
    regret, gemm1, gemm2 : float
        Geometric means.
    p95 : float
    foreseen : int
        Choices foreseen to be faster than a fixed tactic, that of SM120's fallback, by ``SURE_GAIN`` or more.
    came_true : float
        The share of those that were faster; NaN without any.
    """

    source: str
    target: str
    kind: str
    carried: str
    choices: int
    regret: float
    gemm1: float
    gemm2: float
    p95: float
    foreseen: int
    came_true: float


def transfers(tables: Sequence[Timings], progress: Callable[[int, int], None] | None = None) -> list[TransferScore]:
    """Carry each quantization's model over to every other one of the same device.

    Parameters
    ----------
    progress : callable, optional
        Called with the fits done and the fits in all.
    """
    pairs = list(itertools.permutations(tables, 2))
    steps = [len(held_out_groups(target, "family")) for _, target in pairs]
    scores = []
    for i, (source, target) in enumerate(pairs):

        def step(done: int, before: int = sum(steps[:i])) -> None:
            if progress is not None:
                progress(before + done, sum(steps))

        predicted = _predict(source, target, step)
        scores += [score for kind in _KINDS for score in _score(source, target, predicted, *kind)]
    return scores


def _predict(source: Timings, target: Timings, step: Callable[[int], None]) -> dict[str, Floats]:
    """Return what is predicted of each row of the target's judge."""
    judged = Judge(target).timings
    cells = Cells.of(judged)
    found = {"constants": np.empty(len(cells)), "structure": np.empty(len(cells))}
    for done, group in enumerate(held_out_groups(target, "family"), start=1):
        families = {family_of(target.labels[i]) for i in group.tolist()}
        seen = [i for i, label in enumerate(source.labels) if family_of(label) not in families]
        model = held_out_model().fit(source.select(np.isin(source.shape, seen)))
        rows = np.isin(cells.shape, group)
        for name, structure in (("constants", None), ("structure", model)):
            carried = PerformanceModel.analytic(target.origin, target.table, model.roofline_, structure)
            found[name][rows] = carried.predict(cells.select(rows)).ms
        step(done)
    return found


def _score(
    source: Timings, target: Timings, predicted: dict[str, Floats], kind: str, wanted: Callable[[Tactic], bool]
) -> Iterator[TransferScore]:
    table = target.table
    mine = np.array([wanted(table.tactic(i)) for i in range(len(table))])
    judge = Judge(target)
    rows = np.flatnonzero(mine[judge.timings.tactic])
    if not len(rows):
        return
    part = judge.timings.select(rows)
    keys, bucket = part.buckets()
    best = least_by(bucket, part.ms, len(keys))
    order = tie_order(table)
    never = tactic_mask(table, suspects(table))
    plain = np.isin(part.tactic, [_fixed(table.items(stage), wanted) for stage in STAGES])
    fixed = np.full(len(keys), -1)
    fixed[bucket[plain]] = np.flatnonzero(plain)
    there = fixed >= 0
    for carried, every in predicted.items():
        ms: NDArray[np.float64] = np.where(never[part.tactic], np.inf, every[rows])
        chosen = pick(bucket, ms, order[part.tactic], len(keys))
        lost = np.log(part.ms[chosen] / best)
        gain = np.log(ms[fixed[there]] / ms[chosen[there]])
        real = np.log(part.ms[fixed[there]] / part.ms[chosen[there]])
        sure = gain >= np.log1p(SURE_GAIN)
        gemm1, gemm2 = (float(np.exp(lost[keys[:, 1] == stage].mean())) for stage in STAGES)
        yield TransferScore(
            source.origin.quant,
            target.origin.quant,
            kind,
            carried,
            len(keys),
            float(np.exp(lost.mean())),
            gemm1,
            gemm2,
            float(np.exp(np.quantile(lost, 0.95))),
            int(sure.sum()),
            float((real[sure] > 0.0).mean()) if sure.any() else float("nan"),
        )


def _fixed(items: Iterable[tuple[int, Tactic]], wanted: Callable[[Tactic], bool]) -> int:
    """Return the id of the tactic that stands for SM120's fallback: the first plain 128x128 one, else the first."""
    mine = [(i, t) for i, t in items if wanted(t)]
    plain = [i for i, t in mine if t.family != "sm80" and t.tile[:2] == _PLAIN and not t.swap_ab and not t.finalize]
    return plain[0] if plain else mine[0][0]


def tables(scores: Sequence[TransferScore]) -> None:
    """Print what one quantization's model says of another's kernels."""
    print_table(
        "Choices by another quantization's model, each model family unseen",
        ["from", "to", "tactics", "carried over", "choices", "regret", "gemm1", "gemm2", "p95", "sure of", "came true"],
        [
            [
                s.source, s.target, s.kind, s.carried, s.choices, f"{s.regret:.4f}", f"{s.gemm1:.4f}",
                f"{s.gemm2:.4f}", f"{s.p95:.3f}", s.foreseen, f"{s.came_true:.1%}",
            ]
            for s in scores
        ],
    )  # fmt: skip


@click.command(cls=Script, help=__doc__)
@timings_options
@json_option
def main(device: str, flashinfer: str, own_measurements: Path | None, as_json: bool) -> None:
    timings = tables_of(device, None, flashinfer, own_measurements)
    if len(timings) < 2:
        raise SynthError(f"timings of two quantizations are needed, and {device} has those of {len(timings)}")
    with progress("carrying over") as report:
        scores = transfers(timings, report)
    if as_json:
        print_json([dataclasses.asdict(s) for s in scores])
    else:
        tables(scores)


if __name__ == "__main__":
    main()
