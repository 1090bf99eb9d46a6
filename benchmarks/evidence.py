"""How well the analytical models predict public measurements that they have not seen.

    python benchmarks/evidence.py FOLDER

FOLDER holds the files, none of which is shipped; docs/sm120.md says where they are published.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click
import numpy as np
from scipy.stats import spearmanr

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from studies.public import TacticSweep, fit_constants, grouped, read_folder
from studies.scripts import Script, print_json

from synth.catalog.devices import Device, get_device
from synth.catalog.paths import shipped
from synth.catalog.shapes import MoEShape
from synth.choosing.choose import SURE_GAIN, tactic_mask
from synth.commands.options import json_option
from synth.flashinfer.tactics import DEFAULT_FLASHINFER, TacticTable, load_table
from synth.performance.analytical import analytical_model, constants_for, structure, suspects
from synth.performance.evaluation import Judge
from synth.performance.geometry import Floats
from synth.performance.layers import LayerModel, LayerTimes
from synth.performance.model import Cells, PerformanceModel
from synth.performance.roofline import NEUTRAL, Hardware, Roofline
from synth.performance.routing import Routing
from synth.reporting.console import progress
from synth.reporting.console import table as print_table
from synth.timings.folders import load
from synth.timings.table import Timings

#: Layers of which more than this share is around the GEMMs say nothing of the gain of tactics.
_AROUND = 0.3
#: Halves of the models that are drawn.
SPLITS = 10


@dataclass(frozen=True)
class LayerScore:
    """How well constants that were fitted to half of the models predict the layers of the others.

    Attributes
    ----------
    device, quant, engine : str
    tuned : bool
    layers, models : int
        Judged in all halves together, and how many models there are.
    error : float
        Median over the layers of the error's absolute value, as a share.
    least, most : float
        The same of the best and the worst half.
    p90 : float
        90 % of the layers are off by less.
    unfitted : float
        The median error with the constants where their fit begins.
    """

    device: str
    quant: str
    engine: str
    tuned: bool
    layers: int
    models: int
    error: float
    least: float
    most: float
    p90: float
    unfitted: float


@dataclass(frozen=True)
class GainScore:
    """Whether the gain of the fastest tactics over the fallback is foreseen, for the GEMMs of layers of both engines.

    Attributes
    ----------
    device, quant : str
    layers : int
        Measured by both engines; predicted by constants that have not seen their models.
    measured, predicted : float
        Geometric mean of the fallback's time over the fastest's, both GEMMs together.
    correlation : float
        Spearman's, of predicted and measured gain.
    sure : int
        Layers that are predicted to gain ``SURE_GAIN`` or more.
    sure_right : float
        The share of those that gained.
    """

    device: str
    quant: str
    layers: int
    measured: float
    predicted: float
    correlation: float
    sure: int
    sure_right: float


@dataclass(frozen=True)
class SweepScore:
    """A published sweep of one stage's tactics, and what the model makes of it.

    Attributes
    ----------
    device : str
    stage, tokens, tactics : int
    rank_correlation : float
        Spearman's, of predicted and measured times.
    regret, fallback : float
        Measured layer time of the model's choice, and of FlashInfer's fallback, over that of the fastest.
    """

    device: str
    stage: int
    tokens: int
    tactics: int
    rank_correlation: float
    regret: float
    fallback: float


def score_layers(
    times: Sequence[LayerTimes], start: Roofline, splits: int = SPLITS
) -> tuple[list[LayerScore], GainScore | None]:
    """Fit half of the models, judge the others; again with other halves.

    Halves without a layer of one of the engines are passed over; where all are, there is nothing to return.

    Parameters
    ----------
    times : sequence of LayerTimes
        Of one device and quantization, one table an engine.
    """
    device, quant = get_device(times[0].device), times[0].quant
    table, hardware = load_table(device.tactics_arch, quant, DEFAULT_FLASHINFER), Hardware.of(device, quant)
    models = sorted({name for t in times for name in t.models})
    errors: list[list[Floats]] = [[] for _ in times]
    unfitted: list[list[Floats]] = [[] for _ in times]
    gains: list[tuple[Floats, Floats]] = []
    for seed in range(splits):
        order = np.random.default_rng(seed).permutation(len(models))
        half = {models[i] for i in order[: len(models) // 2]}
        inside = [np.isin(t.shape, [i for i, name in enumerate(t.models) if name in half]) for t in times]
        if any(m.all() or not m.any() for m in inside):
            continue
        fitted = fit_constants([t.select(m) for t, m in zip(times, inside, strict=True)], start, seed)
        begin = LayerModel(start, fitted.resident, fitted.overheads)
        tests = [t.select(~m) for t, m in zip(times, inside, strict=True)]
        for i, test in enumerate(tests):
            errors[i].append(np.abs(fitted.predict(test, table, hardware) / test.ms - 1.0))
            unfitted[i].append(np.abs(begin.predict(test, table, hardware) / test.ms - 1.0))
        gains += list(_gains(fitted, tests, table, hardware))
    if not all(errors):
        return [], None
    scores = [
        LayerScore(
            device.name,
            quant,
            t.engine,
            t.tuned,
            sum(map(len, e)),
            len(models),
            float(np.median(np.concatenate(e))),
            float(min(map(np.median, e))),
            float(max(map(np.median, e))),
            float(np.quantile(np.concatenate(e), 0.9)),
            float(np.median(np.concatenate(u))),
        )
        for t, e, u in zip(times, errors, unfitted, strict=True)
    ]
    return scores, _gain_score(device, quant, gains)


def _gains(
    fitted: LayerModel, tests: Sequence[LayerTimes], table: TacticTable, hardware: Hardware
) -> Iterator[tuple[Floats, Floats]]:
    """Yield measured and predicted time of both GEMMs with the fallback over that with the fastest tactics.

    Measured is a layer less what its engine takes around the GEMMs, as it was fitted.
    """
    tuned, plain = (next((t for t in tests if t.tuned is wanted), None) for wanted in (True, False))
    if tuned is None or plain is None:
        return
    places = [{(t.shapes[s], n): i for i, (s, n) in enumerate(zip(t.shape.tolist(), t.tokens.tolist(), strict=True))}
              for t in (tuned, plain)]  # fmt: skip
    both = [place for place in places[0] if place in places[1]]
    if not both:
        return
    fast, slow = (t.select(np.array([p[place] for place in both])) for t, p in zip((tuned, plain), places, strict=True))
    around = [fitted.around(t, table, hardware) for t in (fast, slow)]
    # Where most of a layer is what the engine takes around the GEMMs, it says nothing of them.
    mostly = (around[0] < _AROUND * fast.ms) & (around[1] < _AROUND * slow.ms)
    gemms = fitted.predict(fast, table, hardware) - around[0]
    untuned = fitted.predict(fast, table, hardware, tuned=False) - around[0]
    measured = (slow.ms - around[1]) / (fast.ms - around[0])
    yield measured[mostly], (untuned / gemms)[mostly]


def _gain_score(device: Device, quant: str, gains: Sequence[tuple[Floats, Floats]]) -> GainScore | None:
    if not gains:
        return None
    measured, predicted = (np.concatenate(column) for column in zip(*gains, strict=True))
    if len(measured) < 2:
        return None
    sure = predicted >= 1.0 + SURE_GAIN
    return GainScore(
        device.name,
        quant,
        len(measured),
        float(np.exp(np.log(measured).mean())),
        float(np.exp(np.log(predicted).mean())),
        float(spearmanr(measured, predicted).statistic),
        int(sure.sum()),
        float((measured[sure] > 1.0).mean()) if sure.any() else math.nan,
    )


def score_sweep(sweep: TacticSweep, model: PerformanceModel) -> list[SweepScore]:
    """Compare a published sweep with what a model says of the GEMM alone.

    Parameters
    ----------
    model : PerformanceModel
        Of the sweep's device and quantization.
    """
    scores = []
    for stage, tokens in sorted(set(zip(sweep.stage.tolist(), sweep.tokens.tolist(), strict=True))):
        mine = np.flatnonzero((sweep.stage == stage) & (sweep.tokens == tokens))
        ids = np.array(model.table.ids(stage), dtype=np.int64)
        one = np.ones(len(ids), dtype=np.int64)
        every = model.predict(Cells((sweep.shape,), one * 0, one * stage, one * tokens, ids)).ms
        predicted = every[np.searchsorted(ids, sweep.tactic[mine])]
        ms = sweep.ms[mine]
        fallback = ms[sweep.tactic[mine] == model.table.fallback_id(stage)]
        scores.append(
            SweepScore(
                sweep.device.name,
                stage,
                tokens,
                len(mine),
                float(spearmanr(predicted, ms).statistic),
                float(ms[np.argmin(predicted)] / ms.min()),
                float(fallback[0] / ms.min()) if len(fallback) else math.nan,
            )
        )
    return scores


@dataclass(frozen=True)
class PublishedLine:
    """A published fit of a stage's time against the experts hit: ``ms = intercept + slope * experts``.

    Attributes
    ----------
    device, quant, source : str
    shape : MoEShape
    stage, tokens : int
    intercept, slope : float
        In ms.
    """

    device: str
    quant: str
    source: str
    shape: MoEShape
    stage: int
    tokens: int
    intercept: float
    slope: float


#: Figures that others published as text.
PUBLISHED = (
    PublishedLine(
        "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
        "nvfp4",
        "aiueo52/flash-next-rtxpro6000, FlashInfer 0.6.17",
        MoEShape(2560, 640, 512, 10),
        1,
        4,
        9.4e-3,
        1.036e-3,
    ),
)


@dataclass(frozen=True)
class LineScore:
    """A published line, and the model's over the same numbers of experts, in ms."""

    line: PublishedLine
    intercept: float
    slope: float
    error: float


def score_line(line: PublishedLine, model: PerformanceModel) -> LineScore:
    """Compare a published line with the model's fastest tactic: from `top_k` experts (all tokens alike) to all apart.

    The number of experts hit changes with the layer's experts: of fewer, the same tokens hit fewer.
    """
    shape, tokens = line.shape, line.tokens
    hit, ms = [], []
    ids = np.array(model.table.ids(line.stage), dtype=np.int64)
    one = np.ones(len(ids), dtype=np.int64)
    for experts in np.unique(np.linspace(shape.top_k, tokens * shape.top_k, 7).astype(int)).tolist():
        layer = replace(shape, experts=experts)
        cells = Cells((layer,), one * 0, one * line.stage, one * tokens, ids, Routing.balanced())
        hit.append(cells.sites()[0].active[0])
        ms.append(model.predict(cells).ms.min())
    x, y = np.array(hit), np.array(ms)
    slope, intercept = np.polyfit(x, y, 1)
    error = float(np.median(np.abs(y / (line.intercept + line.slope * x) - 1.0)))
    return LineScore(line, float(intercept), float(slope), error)


@dataclass(frozen=True)
class BlindScore:
    """Choices by constants that were fitted to public layers alone, judged by timings of the same device.

    Attributes
    ----------
    device, quant : str
    choices : int
    regret, p95 : float
    """

    device: str
    quant: str
    choices: int
    regret: float
    p95: float


def score_blind(times: Sequence[LayerTimes], timings: Timings) -> BlindScore:
    """Fit constants to whole layers, from round numbers, and choose for every shape that was timed."""
    fitted = fit_constants(times, Roofline(NEUTRAL))
    judge = Judge(timings)
    model = PerformanceModel.analytic(timings.origin, timings.table, fitted.roofline)
    never = tactic_mask(timings.table, suspects(timings.table))
    ms = np.where(never[judge.timings.tactic], np.inf, model.predict(Cells.of(judge.timings)).ms)
    found = judge.evaluate("analytic", ms).all
    return BlindScore(timings.origin.device, timings.origin.quant, found.count, found.geomean, found.p95)


@dataclass(frozen=True)
class Evidence:
    """All that public measurements say of the analytical models."""

    layers: tuple[LayerScore, ...]
    gains: tuple[GainScore, ...]
    sweeps: tuple[SweepScore, ...]
    lines: tuple[LineScore, ...]
    blind: tuple[BlindScore, ...]


def evaluate(folder: Path, progress: Callable[[int, int], None] | None = None, splits: int = SPLITS) -> Evidence:
    """Judge the analytical models by a folder of public measurements.

    Parameters
    ----------
    progress : callable, optional
        Called with the tables done and the tables in all.
    splits : int
        Halves of the models that are drawn.

    Raises
    ------
    SynthError
        When the folder or a file of it can't be read.
    """
    tables, sweeps = read_folder(folder)
    groups = grouped(tables)
    layers: list[LayerScore] = []
    gains: list[GainScore] = []
    blind: list[BlindScore] = []
    for done, ((name, quant), times) in enumerate(sorted(groups.items()), start=1):
        device = get_device(name)
        constants = constants_for(device, quant)
        if constants is not None:
            start = structure(constants.structure)
            scores, gain = score_layers(times, start.roofline_ if start else Roofline(NEUTRAL), splits)
            layers += scores
            gains += [gain] if gain is not None else []
        shipped_timings = load([shipped("measurements")], name, quant, DEFAULT_FLASHINFER, problems=[])
        blind += [score_blind(times, t) for t in shipped_timings]
        if progress is not None:
            progress(done, len(groups))
    return Evidence(
        tuple(layers),
        tuple(gains),
        tuple(s for sweep in sweeps for s in score_sweep(sweep, analytical_model(sweep.device, sweep.quant))),
        tuple(score_line(line, analytical_model(get_device(line.device), line.quant)) for line in PUBLISHED),
        tuple(blind),
    )


def tables(found: Evidence) -> None:
    """Print what public measurements say of the analytical models."""
    print_table(
        "Whole layers, constants fitted on half of the models, judged on the other half",
        ["device", "quant", "engine", "tactics", "models", "median error", "by half", "90 % within", "unfitted"],
        [
            [
                x.device, x.quant, x.engine, "fastest" if x.tuned else "fallback", x.models, f"{x.error:.1%}",
                f"{x.least:.1%} to {x.most:.1%}", f"{x.p90:.1%}", f"{x.unfitted:.1%}",
            ]
            for x in found.layers
        ],
    )  # fmt: skip
    print_table(
        "Fallback over fastest, the same halves",
        ["device", "quant", "layers", "measured", "predicted", "rank correlation", "sure of", "of those faster"],
        [
            [
                x.device, x.quant, x.layers, f"{x.measured:.3f}", f"{x.predicted:.3f}", f"{x.correlation:.2f}", x.sure,
                f"{x.sure_right:.1%}",
            ]
            for x in found.gains
        ],
    )  # fmt: skip
    print_table(
        "Published sweeps of one stage's tactics",
        ["device", "stage", "tokens", "tactics", "rank correlation", "our choice", "fallback"],
        [
            [
                x.device,
                x.stage,
                x.tokens,
                x.tactics,
                f"{x.rank_correlation:.2f}",
                f"{x.regret:.3f}",
                f"{x.fallback:.3f}",
            ]
            for x in found.sweeps
        ],
    )
    print_table(
        "Published lines, us",
        ["device", "stage", "tokens", "published", "predicted", "median difference"],
        [
            [
                x.line.device, x.line.stage, x.line.tokens,
                f"{1e3 * x.line.intercept:.1f} + {1e3 * x.line.slope:.3f} D",
                f"{1e3 * x.intercept:.1f} + {1e3 * x.slope:.3f} D", f"{x.error:.1%}",
            ]
            for x in found.lines
        ],
    )  # fmt: skip
    print_table(
        "Constants from public layers alone, judged by timings",
        ["device", "quant", "choices", "regret", "p95"],
        [[x.device, x.quant, x.choices, f"{x.regret:.4f}", f"{x.p95:.3f}"] for x in found.blind],
    )


@click.command(cls=Script, help=__doc__)
@click.argument("folder", type=click.Path(path_type=Path))
@json_option
def main(folder: Path, as_json: bool) -> None:
    with progress("fitting halves") as report:
        found = evaluate(folder, report)
    if as_json:
        print_json(dataclasses.asdict(found))
    else:
        tables(found)


if __name__ == "__main__":
    main()
