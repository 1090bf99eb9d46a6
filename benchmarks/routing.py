"""Time whole MoE layers under skewed routing: does the pair chosen for uniform routing lose, and does synth see it?

    python benchmarks/routing.py --layer qwen3-30b-a3b --layer glm-4.5-air-tp2 --layer gpt-oss-120b-tp4 \\
        --routing uniform --routing zipf:0.6 --routing zipf:1.2 --routing hot:1 --tokens 64,256,1024,4096 \\
        --out routing.csv

For each layer, routing and token count the candidates are a few tactics of each stage: the one that synth chooses for
uniform routing, the one that it chooses for this routing, and the best of both predictions in turn. Every pair of them
is captured into a CUDA graph through the public ``cutlass_fused_moe``; the calls of a graph go through several draws of
the routing. The graphs take turns, and a row's time is the median over the rounds. The summary gives the regret of
both chosen pairs: their time over that of the best pair timed, which is a little too low for being the least of many.
The same under ``uniform`` is the control. Draws are those of :meth:`synth.performance.routing.Routing.sample`, which
the model's geometry agrees with.

A row says for which routing the pair was chosen, if for any, what synth expects of each stage under this routing and
under uniform routing, and how far the output is from the fallback's. Rows are written as they come; ``--seconds`` stops
in time and keeps them. ``--dry-run`` prints the candidates, without a GPU.

Exit code 0: done; 1: an output is wrong, or too much failed; 2: usage.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import whole_layers
from layer import parse_layer, say, table_writer
from whole_layers import ServedLayer

from synth.catalog.devices import get_device
from synth.catalog.paths import find_model, shipped
from synth.catalog.schemes import STAGES
from synth.catalog.shapes import Deployment, MoEShape
from synth.choosing.choose import carried_over, choose
from synth.errors import SynthError
from synth.flashinfer.buckets import map_to_bucket
from synth.flashinfer.tactics import DEFAULT_FLASHINFER
from synth.performance.model import Cells, PerformanceModel
from synth.performance.routing import UNIFORM, Routing
from synth.timings.folders import load
from synth.timings.records import TOLERANCE
from synth.timings.table import Timings, times_by_bucket

COLUMNS = (
    "layer", "tokens", "routing", "chosen_for", "g1", "g2", "tactic1", "tactic2", "ms", "q25", "q75", "rounds",
    "draws", "expected1_ms", "expected2_ms", "uniform1_ms", "uniform2_ms", "error",
)  # fmt: skip
#: Errors after which the run ends: the next ones would be alike.
MAX_ERRORS = 3
_GRAPH_MS = 2.0
_MAX_CALLS = 20


@dataclass(frozen=True)
class Tactics:
    """The candidates of one stage.

    Attributes
    ----------
    ids : tuple of int
        The tactic chosen for uniform routing, the one chosen for this routing, and others; without repeats.
    uniform, routed : int
        The two chosen ones.
    uniform_ms, expected_ms : dict of int to float
        Time in ms of each candidate under uniform routing, measured or predicted, and as expected under this one.
    """

    ids: tuple[int, ...]
    uniform: int
    routed: int
    uniform_ms: dict[int, float]
    expected_ms: dict[int, float]


@dataclass(frozen=True)
class Row:
    """One pair's time in ms at one layer, token count and routing, see :data:`COLUMNS`."""

    layer: str
    tokens: int
    routing: str
    chosen_for: str
    pair: tuple[int, int]
    tactics: tuple[str, str]
    ms: float
    quartiles: tuple[float, float]
    rounds: int
    draws: int
    expected: tuple[float, float]
    uniform: tuple[float, float]
    error: float
    quant: str

    def cells(self) -> list[object]:
        """Return the row as :data:`COLUMNS` has it."""
        times = (self.ms, *self.quartiles)
        return [
            self.layer, self.tokens, self.routing, self.chosen_for, *self.pair, *self.tactics,
            *(f"{x:.6g}" for x in times), self.rounds, self.draws,
            *(f"{x:.6g}" for x in (*self.expected, *self.uniform)), f"{self.error:.2g}",
        ]  # fmt: skip

    @property
    def right(self) -> bool:
        """The output agrees with the fallback's."""
        return self.error <= TOLERANCE[self.quant]


@dataclass(frozen=True)
class Source:
    """What choices are made from."""

    model: PerformanceModel
    timings: Timings | None

    @classmethod
    def of(cls, device: str, quant: str, models: Path, measurements: Path) -> Source:
        """Load the model and the timings of a device, from the folders alone."""
        path = find_model([models], device, quant, DEFAULT_FLASHINFER)
        if path is None:
            raise SynthError(f"{models}: no model of {device} {quant}; name a folder with --models")
        model = PerformanceModel.load(path, device=device, quant=quant)
        tables = load(measurements, device, quant, DEFAULT_FLASHINFER, problems=[])
        return cls(model, next((t for t in tables if t.origin == model.origin_), None))


def candidates(source: Source, shape: MoEShape, bucket: int, routing: Routing, size: int) -> dict[int, Tactics]:
    """Return the candidates of each stage, at most `size` of them."""
    found = {}
    plain = {c.stage: c.tactic_id for c in choose(source.model, [shape], [bucket], timings=source.timings)}
    skewed = {
        c.stage: c.tactic_id for c in choose(source.model, [shape], [bucket], timings=source.timings, routing=routing)
    }
    for stage in STAGES:
        uniform_ms, expected_ms = times(source, shape, stage, bucket, routing)
        ranked = (sorted(ms, key=lambda i, ms=ms: ms[i]) for ms in (uniform_ms, expected_ms))  # type: ignore[misc]
        order = dict.fromkeys((plain[stage], skewed[stage], *itertools.chain(*zip(*ranked, strict=True))))
        ids = tuple(order)[: max(size, len({plain[stage], skewed[stage]}))]
        found[stage] = Tactics(
            ids,
            plain[stage],
            skewed[stage],
            {i: uniform_ms[i] for i in ids},
            {i: expected_ms[i] for i in ids},
        )
    return found


def times(
    source: Source, shape: MoEShape, stage: int, bucket: int, routing: Routing
) -> tuple[dict[int, float], dict[int, float]]:
    """Return each tactic's time in ms under uniform routing, and under another: what :func:`choose` goes by.

    Where a tactic was timed, its time is the measured one, carried over to the other routing.
    """
    ids = np.array(source.model.table.ids(stage), dtype=np.int64)
    ones = np.ones_like(ids)
    plain, skewed = (
        source.model.predict(Cells([shape], ones * 0, ones * stage, ones * bucket, ids, r)).ms
        for r in (UNIFORM, routing)
    )
    uniform = dict(zip(ids.tolist(), plain.tolist(), strict=True))
    expected = dict(zip(ids.tolist(), skewed.tolist(), strict=True))
    if source.timings is not None and shape in source.timings.shapes:
        place = source.timings.shapes.index(shape)
        timed = times_by_bucket(source.timings.select(source.timings.shape == place).averaged())
        for tactic, ms in timed.get((place, stage, bucket), {}).items():
            expected[tactic] = carried_over(ms, uniform[tactic], expected[tactic])
            uniform[tactic] = ms
    return uniform, expected


def run_cell(
    name: str, layer: ServedLayer, source: Source, tokens: int, routing: Routing, size: int, draws: int, rounds: int
) -> Iterator[Row]:
    """Time every pair of candidates of one layer at one token count under one routing."""
    bucket = map_to_bucket(tokens, layer.max_tokens)
    stages = candidates(source, layer.shape, bucket, routing, size)
    inputs = [layer.inputs(tokens, sample, routing) for sample in range(draws)]
    chosen = (stages[1].uniform, stages[2].uniform), (stages[1].routed, stages[2].routed)
    pairs = list(dict.fromkeys([*chosen, *itertools.product(stages[1].ids, stages[2].ids)]))
    once_ms = whole_layers.eager_ms(lambda: layer.call(inputs[0], pairs[0]))
    cycles = max(1, min(_MAX_CALLS // draws, round(_GRAPH_MS / once_ms / draws)))
    errors, graphs = {}, {}
    for pair in pairs:
        errors[pair] = layer.relative_error(inputs[0], pair)
        graphs[f"{pair[0]},{pair[1]}"] = whole_layers.capture(in_turn(layer, inputs, pair), cycles * draws)
    timed = whole_layers.time_interleaved(graphs, cycles * draws, rounds)
    table = source.model.table
    for pair in pairs:
        ms = timed[f"{pair[0]},{pair[1]}"]
        quartiles = statistics.quantiles(ms, n=4) if len(ms) > 1 else [ms[0]] * 3
        roles = [role for role, own in zip(("uniform", "routing"), chosen, strict=True) if own == pair]
        yield Row(
            name, tokens, str(routing), "+".join(roles), pair, (str(table.tactic(pair[0])), str(table.tactic(pair[1]))),
            statistics.median(ms), (quartiles[0], quartiles[2]), len(ms), draws,
            (stages[1].expected_ms[pair[0]], stages[2].expected_ms[pair[1]]),
            (stages[1].uniform_ms[pair[0]], stages[2].uniform_ms[pair[1]]), errors[pair], layer.quant,
        )  # fmt: skip


def in_turn(layer: ServedLayer, inputs: Sequence[dict[str, Any]], pair: tuple[int, int]) -> Callable[[], object]:
    """Return a function that runs the layer with the next of the inputs at each call."""
    following = itertools.cycle(inputs)
    return lambda: layer.call(next(following), pair)


def run_layer(
    name: str, deployment: Deployment, source: Source, tokens: Sequence[int], routings: Sequence[Routing],
    options: argparse.Namespace, deadline: float, errors: list[str],
) -> Iterator[Row]:  # fmt: skip
    """Time one layer; what fails is kept in `errors`."""
    began, layer = time.monotonic(), None
    with failures(name, errors):
        layer = ServedLayer(deployment, max_tokens=options.max_tokens)
        say(f"{name} {deployment.shape} {deployment.quant}: allocated in {time.monotonic() - began:.1f} s")
    for count, routing in itertools.product(tokens, routings):
        if layer is None or len(errors) >= MAX_ERRORS:
            return
        if time.monotonic() > deadline:
            say(f"{name}: out of time before {count} tokens, {routing}")
            return
        with failures(f"{name} at {count} tokens, {routing}", errors):
            yield from run_cell(name, layer, source, count, routing, options.candidates, options.draws, options.rounds)


@contextmanager
def failures(place: str, errors: list[str]) -> Iterator[None]:
    """Keep what fails in `errors`: torch and FlashInfer raise many kinds, and one bad cell must not lose the others."""
    try:
        yield
    except Exception as e:
        errors.append(f"{place}: {type(e).__name__}: {' '.join(str(e).split())[:300]}")
        say(errors[-1])


def report(rows: Sequence[Row]) -> str:
    """Return the regret of both chosen pairs in every cell, and their geometric means by routing."""
    lines = [f"{'layer':<20} {'tokens':>6} {'routing':<12} {'pair: uniform':>14} {'routing':>9} {'best':>9} "
             f"{'best ms':>9} {'uniform/best':>12} {'routing/best':>12} {'spread':>7}"]  # fmt: skip
    cells: dict[tuple[str, str, int], list[Row]] = {}
    for row in rows:
        if row.right:
            cells.setdefault((row.routing, row.layer, row.tokens), []).append(row)
    regrets: dict[str, list[tuple[float, float, bool]]] = {}
    for (routing, layer, tokens), mine in cells.items():
        best = min(mine, key=lambda r: r.ms)
        chosen = [next((r for r in mine if role in r.chosen_for.split("+")), None) for role in ("uniform", "routing")]
        if chosen[0] is None or chosen[1] is None:
            continue
        ours = [r.ms / best.ms for r in chosen if r is not None]
        regrets.setdefault(routing, []).append((ours[0], ours[1], chosen[0].pair != chosen[1].pair))
        pairs = [f"{r.pair[0]},{r.pair[1]}" for r in (chosen[0], chosen[1], best)]
        spread = (best.quartiles[1] - best.quartiles[0]) / best.ms
        lines.append(f"{layer:<20} {tokens:>6} {routing:<12} {pairs[0]:>14} {pairs[1]:>9} {pairs[2]:>9} "
                     f"{best.ms:>9.5f} {ours[0]:>12.4f} {ours[1]:>12.4f} {spread:>7.1%}")  # fmt: skip
    for routing, values in regrets.items():
        changed = [v for v in values if v[2]]
        mean = [statistics.geometric_mean([v[i] for v in values]) for i in (0, 1)]
        worst = [max(v[i] for v in values) for i in (0, 1)]
        text = (
            f"{routing}: regret of uniform's pairs {mean[0]:.4f} (worst {worst[0]:.4f}), of this routing's "
            f"{mean[1]:.4f} (worst {worst[1]:.4f}); the pair changes in {len(changed)} of {len(values)} cells"
        )
        if changed:
            gain = math.exp(statistics.fmean(math.log(v[0] / v[1]) for v in changed))
            better = sum(v[1] < v[0] for v in changed)
            text += f", for the better in {better}; there uniform's takes {gain:.4f} of its time"
        lines.append(text)
    return "\n".join(lines)


def plan_text(
    name: str, source: Source, shape: MoEShape, tokens: Sequence[int], routings: Sequence[Routing],
    options: argparse.Namespace,
) -> Iterator[str]:  # fmt: skip
    """Describe the candidates, without a GPU."""
    for count, routing in itertools.product(tokens, routings):
        bucket = map_to_bucket(count, options.max_tokens)
        stages = candidates(source, shape, bucket, routing, options.candidates)
        parts = []
        for stage, t in stages.items():
            gain = t.expected_ms[t.uniform] / t.expected_ms[t.routed]
            parts.append(f"gemm{stage} {t.uniform} -> {t.routed} (expected gain {gain:.4f}) of {list(t.ids)}")
        yield f"{name} {count} {routing}: {'; '.join(parts)}"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layer", action="append", required=True, help="glm-5-tp8, or NAME=h2048-i1024-e64-k8")
    parser.add_argument("--routing", action="append", required=True, help="uniform, zipf:1.2, hot:1 or a file")
    parser.add_argument("--quant", choices=("bf16", "fp8"), default="bf16")
    parser.add_argument("--tokens", default="64,256,1024,4096", help="token counts (default: %(default)s)")
    parser.add_argument("--device", default="NVIDIA H200", help="whose model chooses (default: %(default)s)")
    parser.add_argument("--models", type=Path, default=shipped("models"), help="folder of models")
    parser.add_argument("--measurements", type=Path, default=shipped("measurements"), help="folder of timings")
    parser.add_argument("--candidates", type=int, default=4, help="tactics of each stage (default: %(default)s)")
    parser.add_argument("--draws", type=int, default=4, help="draws of the routing (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=11, help="timings of each pair (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=whole_layers.DEFAULT_MAX_TOKENS, help="tune_max_num_tokens")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin nothing new after this long")
    parser.add_argument("--dry-run", action="store_true", help="print what would be timed, without a GPU")
    parser.add_argument("--out", type=Path, help="CSV file to write")
    options = parser.parse_args(arguments)
    deadline = time.monotonic() + options.seconds
    rows: list[Row] = []
    errors: list[str] = []
    try:
        tokens = sorted({int(t) for t in options.tokens.split(",")})
        if not 1 <= tokens[0] <= tokens[-1] <= options.max_tokens:
            raise SynthError("--tokens must be from 1 to --max-tokens")
        if min(options.rounds, options.candidates, options.draws) < 1 or options.draws > _MAX_CALLS:
            raise SynthError(f"--rounds, --candidates and --draws must be at least 1, --draws at most {_MAX_CALLS}")
        routings = [Routing.parse(text) for text in options.routing]
        layers = [parse_layer(text, options.quant) for text in options.layer]
        for _, deployment in layers:
            for routing in routings:
                routing.inclusion(deployment.shape.experts * deployment.shape.ep_size, deployment.shape.top_k)
        source = Source.of(get_device(options.device).name, options.quant, options.models, options.measurements)
        if options.dry_run:
            for name, deployment in layers:
                for line in plan_text(name, source, deployment.shape, tokens, routings, options):
                    print(line)
            return 0
        with table_writer(options.out, COLUMNS) as write:
            for name, deployment in layers:
                if time.monotonic() > deadline or len(errors) >= MAX_ERRORS:
                    break
                for row in run_layer(name, deployment, source, tokens, routings, options, deadline, errors):
                    write(row)
                    rows.append(row)
                    if row.chosen_for:
                        say(f"  {row.tokens} {row.routing} {row.chosen_for} {row.pair}: {row.ms:.5f} ms")
    except (SynthError, ValueError) as e:
        print(f"routing.py: {e}", file=sys.stderr)
        return 2
    print(report(rows))
    for row in rows:
        if not row.right:
            errors.append(f"{row.layer} at {row.tokens} tokens, {row.routing}, {row.pair}: the output is "
                          f"{row.error:.2g} off, more than {TOLERANCE[row.quant]}")  # fmt: skip
    for line in errors:
        print(line, file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
