"""Public measurements: reading them, and judging the analytic models by what they have not seen.

Nothing of these files is shipped. Two kinds are read:

- whole layers, as ``ai-dynamo/aiconfigurator`` publishes them: a CSV with the columns of ``LAYER_COLUMNS``. Rows of
  TensorRT-LLM ran the fastest tactics, rows of vLLM FlashInfer's fallback, both under balanced routing;
- one stage's tactics inside a whole layer, the other stage fixed: a CSV ``stage,tokens,tile,swap_ab,layer_us`` whose
  first comment names the device, the quantization and the layer.
"""

from __future__ import annotations

import csv
import gzip
import math
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.stats import spearmanr

from synth.catalog.devices import Device, get_device
from synth.catalog.paths import shipped
from synth.catalog.shapes import MoEShape, load_models, padded_shape
from synth.choosing.choose import SURE_GAIN, tactic_mask
from synth.errors import SynthError
from synth.flashinfer.tactics import DEFAULT_FLASHINFER, TacticTable, load_table
from synth.performance.analytical import analytical_model, constants_for, structure, suspects
from synth.performance.evaluation import Judge
from synth.performance.geometry import Floats
from synth.performance.layers import LayerModel, LayerTimes
from synth.performance.model import Cells, PerformanceModel
from synth.performance.roofline import NEUTRAL, Hardware, Roofline
from synth.performance.routing import Routing
from synth.timings.folders import load
from synth.timings.table import Timings

LAYER_COLUMNS = (
    "framework", "device", "moe_dtype", "num_tokens", "hidden_size", "inter_size", "topk", "num_experts",
    "moe_tp_size", "moe_ep_size", "latency",
)  # fmt: skip
_TACTIC_COLUMNS = ("stage", "tokens", "tile", "swap_ab", "layer_us")
#: Largest file that is read, unpacked, in bytes.
_MAX_BYTES = 64 * 1024 * 1024
_QUANTS = {"bfloat16": "bf16", "fp8": "fp8", "nvfp4": "nvfp4"}
#: Engines whose layers ran the fastest tactics, and FlashInfer's fallback.
_TUNED = {"TRTLLM": True, "VLLM": False}
#: Layers that a fit takes in of one engine at most, drawn at random: it doesn't improve beyond.
_FIT_LAYERS = 1000
#: Layers of which more than this share is around the GEMMs say nothing of the gain of tactics.
_AROUND = 0.3
#: Halves of the models that are drawn.
SPLITS = 10
#: A layer's shape, its model, tokens and ms.
_Row = tuple[MoEShape, str, int, float]


def read_folder(folder: Path) -> tuple[list[LayerTimes], list[TacticSweep]]:
    """Read every ``.csv`` and ``.csv.gz`` of a folder, whole layers and sweeps.

    Raises
    ------
    SynthError
        When there is none, or one can't be read.
    """
    if not folder.is_dir():
        raise SynthError(f"{folder}: no such folder; name one of public measurements with --evidence")
    layers: list[LayerTimes] = []
    sweeps: list[TacticSweep] = []
    for path in sorted(p for p in folder.iterdir() if p.name.endswith((".csv", ".csv.gz"))):
        comments, rows = _read(path)
        columns = set(rows[0]) if rows else set()
        if columns >= set(LAYER_COLUMNS):
            layers += _layers(path, rows)
        elif columns >= set(_TACTIC_COLUMNS):
            sweeps.append(_sweep(path, comments, rows))
        else:
            raise SynthError(
                f"{path}: neither whole layers ({','.join(LAYER_COLUMNS)}) nor a sweep ({','.join(_TACTIC_COLUMNS)}); "
                "take it out of the folder"
            )
    seen = [(t.device, t.quant, t.engine) for t in layers]
    if twice := [key for key in dict.fromkeys(seen) if seen.count(key) > 1]:
        raise SynthError(f"{folder}: layers of {' '.join(twice[0])} are in two files; put them into one")
    if not layers and not sweeps:
        raise SynthError(f"{folder}: no .csv or .csv.gz in it; name a folder of public measurements with --evidence")
    return layers, sweeps


def _read(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Return the comment lines at the top and the rows."""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as f:
            data = f.read(_MAX_BYTES + 1)
        text = data.decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as e:
        raise SynthError(f"{path}: can't be read ({e}); take it out of the folder") from None
    if len(data) > _MAX_BYTES:
        raise SynthError(f"{path}: more than {_MAX_BYTES >> 20} MiB; take it out of the folder")
    lines = text.splitlines()
    comments = [line for line in lines if line.startswith("#")]
    try:
        return comments, list(csv.DictReader(line for line in lines if not line.startswith("#")))
    except csv.Error as e:
        raise SynthError(f"{path}: not a CSV ({e}); take it out of the folder") from None


def _layers(path: Path, rows: Sequence[dict[str, str]]) -> list[LayerTimes]:
    """Return the rows by device, quantization and engine; splits that leave a fraction are passed over."""
    found: dict[tuple[str, str, str], list[_Row]] = {}
    names: dict[str, str] = {}
    ungated = {(m.hidden, m.inter, m.experts) for m in load_models() if m.activation == "relu2"}
    for number, row in enumerate(rows, start=2):
        try:
            tokens, hidden, inter, top_k, experts, tp, ep = (int(row[c]) for c in LAYER_COLUMNS[3:10])
            ms = float(row["latency"])
            quant, engine = _QUANTS[row["moe_dtype"]], row["framework"]
            if min(tp, ep) < 1 or not 0 < tokens < 2**31 or not 0.0 < ms < math.inf or engine not in _TUNED:
                raise ValueError("a value out of range")
            device = names.get(row["device"]) or names.setdefault(row["device"], get_device(row["device"]).name)
            if inter % tp or experts % ep:
                continue
            gated = (hidden, inter, experts) not in ungated
            shape = padded_shape(MoEShape(hidden, inter // tp, experts // ep, top_k, ep, gated), quant)
        except (KeyError, TypeError, ValueError, SynthError) as e:
            raise SynthError(f"{path}: row {number}: {e}; mend the row or take it out") from None
        model = f"h{hidden}-i{inter}-e{experts}-k{top_k}"
        found.setdefault((device, quant, engine), []).append((shape, model, tokens, ms))
    return [_times(device, quant, engine, some) for (device, quant, engine), some in sorted(found.items())]


def _times(device: str, quant: str, engine: str, rows: Sequence[_Row]) -> LayerTimes:
    shapes = list(dict.fromkeys((shape, model) for shape, model, _, _ in rows))
    index = {key: i for i, key in enumerate(shapes)}
    return LayerTimes(
        device=device,
        quant=quant,
        engine=engine,
        tuned=_TUNED[engine],
        routing=Routing.balanced(),
        shapes=tuple(shape for shape, _ in shapes),
        models=tuple(model for _, model in shapes),
        shape=np.array([index[shape, model] for shape, model, _, _ in rows]),
        tokens=np.array([tokens for _, _, tokens, _ in rows]),
        ms=np.array([ms for *_, ms in rows]),
    )


@dataclass(frozen=True)
class TacticSweep:
    """Times of a whole layer while one stage's tactic changes.

    Attributes
    ----------
    device : Device
    quant : str
    shape : MoEShape
    source : str
        The file's first comment.
    stage, tokens, tactic : ndarray of int64, shape (rows,)
        Tactic ids of FlashInfer ``DEFAULT_FLASHINFER``, without the fused finalize.
    ms : ndarray of float64, shape (rows,)
    """

    device: Device
    quant: str
    shape: MoEShape
    source: str
    stage: NDArray[np.int64]
    tokens: NDArray[np.int64]
    tactic: NDArray[np.int64]
    ms: Floats


def _sweep(path: Path, comments: Sequence[str], rows: Sequence[dict[str, str]]) -> TacticSweep:
    head = comments[0] if comments else ""
    name, _, rest = head.lstrip("# ").partition(" (")
    sizes = [re.search(p, rest) for p in (r"hidden (\d+)", r"inter (\d+)", r"(\d+) experts", r"top_k (\d+)")]
    quant = next((q for q in ("nvfp4", "fp8", "bf16") if q in rest.lower()), None)
    if quant is None or not all(sizes):
        raise SynthError(
            f"{path}: its first line must be a comment such as '# NVIDIA GeForce RTX 5090 (SM120), NVFP4, 128 experts, "
            "top_k 8, hidden 2816, inter 704'"
        )
    try:
        hidden, inter, experts, top_k = (int(m[1]) for m in sizes if m is not None)
        shape = MoEShape(hidden, inter, experts, top_k)
        device = get_device(name)
        table = load_table(device.tactics_arch, quant, DEFAULT_FLASHINFER)
    except (ValueError, SynthError) as e:
        raise SynthError(f"{path}: its first line: {e}; mend it or take the file out of the folder") from None
    ids = {
        (stage, "x".join(map(str, t.tile)) + "B", t.swap_ab): i
        for stage in (1, 2)
        for i, t in table.items(stage)
        if not t.finalize
    }
    cells = []
    for number, row in enumerate(rows, start=1):
        try:
            stage, tokens, ms = int(row["stage"]), int(row["tokens"]), float(row["layer_us"]) / 1e3
            if not 0 < tokens < 2**31 or not 0.0 < ms < math.inf:
                raise ValueError("a value out of range")
            cells.append((stage, tokens, ids[stage, row["tile"], row["swap_ab"] == "1"], ms))
        except (KeyError, TypeError, ValueError) as e:
            raise SynthError(f"{path}: row {number}: {e} is no tactic or number; mend it or take it out") from None
    columns = [np.array(c) for c in zip(*cells, strict=True)]
    return TacticSweep(device, quant, shape, head.lstrip("# "), *columns)


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


def fit_constants(times: Sequence[LayerTimes], start: Roofline, seed: int = 0) -> LayerModel:
    """Fit the analytic model's constants to the layers of one device and quantization, one table an engine.

    Parameters
    ----------
    start : Roofline
        Where the fit begins: the constants of the structure that is carried over.
    """
    first = times[0]
    device = get_device(first.device)
    rng = np.random.default_rng(seed)
    some = [_drawn(t, rng) for t in times]
    table = load_table(device.tactics_arch, first.quant, DEFAULT_FLASHINFER)
    return LayerModel.fit(some, table, Hardware.of(device, first.quant), start)


def _drawn(times: LayerTimes, rng: np.random.Generator) -> LayerTimes:
    if len(times) <= _FIT_LAYERS:
        return times
    return times.select(np.sort(rng.choice(len(times), _FIT_LAYERS, replace=False)))


def grouped(layers: Sequence[LayerTimes]) -> dict[tuple[str, str], list[LayerTimes]]:
    """Return tables by device and quantization."""
    found: dict[tuple[str, str], list[LayerTimes]] = {}
    for times in layers:
        found.setdefault((times.device, times.quant), []).append(times)
    return found


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
