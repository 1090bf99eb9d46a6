"""Time whole MoE layers under CUDA graphs: FlashInfer's fallback, its own autotuner's pair, and the pairs of configs.

    python benchmarks/layer.py --layer olmoe --layer glm-5-tp8 --quant bf16 --config config.json --out layers.csv

Every variant is captured through the public ``cutlass_fused_moe``: the fallback as what FlashInfer runs without a
config, the others as what it serves with a config loaded by ``autotune(False, cache=...)``. That goes for FlashInfer's
own autotuner too, which first tunes the buckets of ``--tokens`` and saves them. The pair in a row is the one that
FlashInfer's tuner handed to the kernel at that call. Within one layer and token count the variants take turns, and a
row's time is the median over the rounds. Rows are written as they come; ``--seconds`` stops in time and keeps them.

Exit code 0: done; 1: FlashInfer didn't serve an entry of a config, or an output is wrong; 2: usage.
"""

from __future__ import annotations

import argparse
import csv
import math
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import whole_layers
from whole_layers import ServedLayer

from synth.catalog.models import find_model
from synth.catalog.shapes import Deployment, MoEShape
from synth.errors import SynthError
from synth.gpu.layer import FALLBACK as FALLBACK_PAIR
from synth.timings.records import TOLERANCE

COLUMNS = ("shape", "tokens", "label", "g1", "g2", "ms", "quant", "spread", "error")
FALLBACK, AUTOTUNED, BUNDLED = "fallback", "autotuned", "bundled"
_GRAPH_MS = 2.0
_MAX_CALLS = 20


@dataclass(frozen=True)
class Row:
    """One variant's time at one token count: median ms of a call, and the rounds' interquartile range over it."""

    shape: str
    tokens: int
    label: str
    g1: int
    g2: int
    ms: float
    quant: str
    spread: float
    error: float

    def cells(self) -> list[object]:
        """Return the row as :data:`COLUMNS` has it."""
        return [
            self.shape, self.tokens, self.label, self.g1, self.g2,
            f"{self.ms:.6g}", self.quant, f"{self.spread:.2g}", f"{self.error:.2g}",
        ]  # fmt: skip

    @property
    def served(self) -> bool:
        """FlashInfer found both stages' entries."""
        return self.g1 >= 0 and self.g2 >= 0


def parse_layer(text: str, quant: str) -> tuple[str, Deployment]:
    """Read ``olmoe``, ``glm-5-tp8``, ``deepseek-v3-ep8``, or ``NAME=h2048-i1024-e64-k8`` for a shape by hand."""
    name, equals, shape_text = text.partition("=")
    if equals:
        shape = MoEShape.parse(shape_text)
        activation = "swiglu" if shape.gated else "relu2"
        return name, Deployment(name, 1, shape.ep_size, quant, activation, False, shape)
    m = re.fullmatch(r"(.+?)(?:-tp(\d+))?(?:-ep(\d+))?", text)
    if m is None:
        raise SynthError("--layer is empty; give, for example, glm-5-tp8")
    deployment = find_model(m[1]).deploy(int(m[2] or 1), int(m[3] or 1), quant)
    return deployment.label, deployment


def parse_config(text: str) -> tuple[str, Path]:
    """Read ``PATH`` or ``LABEL=PATH``."""
    label, equals, path_text = text.partition("=")
    label, path = (label, Path(path_text)) if equals else ("synth", Path(text))
    if not path.is_file():
        raise SynthError(f"--config {path}: there is no such file")
    if label in (FALLBACK, AUTOTUNED, BUNDLED):
        raise SynthError(f"--config {text}: the label {label} is taken; give another")
    return label, path


def run_layer(
    name: str,
    deployment: Deployment,
    tokens: list[int],
    configs: list[tuple[str, Path]],
    *,
    autotune: bool,
    bundled: bool = False,
    rounds: int,
    max_tokens: int,
    deadline: float,
) -> Iterator[Row]:
    """Time every variant of one layer; stops before the first token count that begins after `deadline`."""
    began = time.monotonic()
    layer = ServedLayer(deployment, max_tokens=max_tokens)
    say(f"{name} {deployment.shape} {deployment.quant}: allocated in {time.monotonic() - began:.1f} s")
    with tempfile.TemporaryDirectory() as folder:
        variants: list[tuple[str, Path | None]] = [*configs, *([(BUNDLED, None)] if bundled else [])]
        if autotune:
            began, tuned = time.monotonic(), Path(folder) / "autotuned.json"
            whole_layers.tune(layer, tokens, tuned)
            say(f"{name}: FlashInfer's autotuner took {time.monotonic() - began:.1f} s for {len(tokens)} token counts")
            variants.insert(0, (AUTOTUNED, tuned))
        for count in tokens:
            if time.monotonic() > deadline:
                say(f"{name}: out of time before {count} tokens")
                return
            yield from run_cell(name, layer, count, variants, rounds)


def run_cell(
    name: str, layer: ServedLayer, tokens: int, variants: list[tuple[str, Path | None]], rounds: int
) -> Iterator[Row]:
    """Time every variant of one layer at one token count."""
    inputs = layer.inputs(tokens)
    # As many as take about 2 ms with the fallback, so that starting a graph is nothing beside them.
    fallback_ms = whole_layers.eager_ms(lambda: layer.call(inputs, FALLBACK_PAIR))
    calls = max(1, min(_MAX_CALLS, round(_GRAPH_MS / fallback_ms)))
    pairs = {FALLBACK: FALLBACK_PAIR}
    errors = {FALLBACK: 0.0}
    graphs = {FALLBACK: whole_layers.capture(lambda: layer.call(inputs, FALLBACK_PAIR), calls)}
    for label, path in variants:
        with whole_layers.serving(path) if path else whole_layers.serving_bundled():
            pairs[label] = whole_layers.served_pair(layer, inputs)
            errors[label] = layer.relative_error(inputs)
            graphs[label] = whole_layers.capture(lambda: layer.call(inputs), calls)
    for label, times in whole_layers.time_interleaved(graphs, calls, rounds).items():
        median = statistics.median(times)
        quartiles = statistics.quantiles(times, n=4) if len(times) > 1 else [median] * 3
        spread = (quartiles[2] - quartiles[0]) / median
        yield Row(name, tokens, label, *pairs[label], median, layer.quant, spread, errors[label])


@contextmanager
def table_writer(path: Path | None, columns: Sequence[str] = COLUMNS) -> Iterator[Callable[[Any], None]]:
    """Yield a function that appends a row to the file at once, or does nothing without one."""
    if path is None:
        yield lambda _row: None
        return
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)

        def write(row: Any) -> None:
            writer.writerow(row.cells())
            file.flush()

        yield write


def report(rows: list[Row]) -> str:
    """Return the table of times and ratios, and the geometric means, by quantization."""
    lines = [f"{'shape':<24} {'quant':<5} {'tokens':>6} {'variant':<10} {'pair':>9} {'ms':>10} "
             f"{'fallback/':>9} {'/autotuned':>10} {'spread':>7} {'error':>8}"]  # fmt: skip
    ratios: dict[tuple[str, str, str], list[float]] = {}
    for cell in dict.fromkeys((r.shape, r.quant, r.tokens) for r in rows):
        ms = {r.label: r for r in rows if (r.shape, r.quant, r.tokens) == cell}
        for label, row in ms.items():
            speedup = ms[FALLBACK].ms / row.ms
            against = row.ms / ms[AUTOTUNED].ms if AUTOTUNED in ms else math.nan
            note = "" if label == FALLBACK or row.served else "  not served"
            lines.append(
                f"{row.shape:<24} {row.quant:<5} {row.tokens:>6} {label:<10} {f'{row.g1},{row.g2}':>9} {row.ms:>10.5f} "
                f"{speedup:>9.2f} {against:>10.4f} {row.spread:>7.1%} {row.error:>8.1e}{note}"
            )
            if label != FALLBACK:
                ratios.setdefault((row.quant, label, "faster than the fallback"), []).append(speedup)
            if label != AUTOTUNED and AUTOTUNED in ms:
                ratios.setdefault((row.quant, label, "time over the autotuner's"), []).append(against)
    for (quant, label, what), values in ratios.items():
        mean = statistics.geometric_mean(values)
        lines.append(f"{quant} {label}: {what} {mean:.4f} (geometric mean of {len(values)}, worst "
                     f"{min(values) if 'faster' in what else max(values):.4f})")  # fmt: skip
    return "\n".join(lines)


def failures(rows: list[Row]) -> list[str]:
    """Return what makes the run a failed one."""
    found = []
    for row in rows:
        place = f"{row.shape} {row.quant} at {row.tokens} tokens, {row.label}"
        if row.label != FALLBACK and not row.served:
            found.append(f"{place}: FlashInfer found no entry and ran its fallback (pair {row.g1},{row.g2})")
        if not row.error <= TOLERANCE[row.quant]:
            found.append(f"{place}: the output is {row.error:.2g} off, more than {TOLERANCE[row.quant]}")
    return found


def say(text: str) -> None:
    """Print progress."""
    print(text, file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layer", action="append", required=True, help="glm-5-tp8, or NAME=h2048-i1024-e64-k8")
    parser.add_argument("--quant", choices=("bf16", "fp8"), default="bf16")
    parser.add_argument("--tokens", default="1,8,64,256,1024,4096", help="token counts (default: %(default)s)")
    parser.add_argument("--config", action="append", default=[], help="[LABEL=]PATH of a v1 JSON config")
    parser.add_argument("--bundled", action="store_true", help="FlashInfer's own module for this GPU, if it has one")
    parser.add_argument("--no-autotune", action="store_true", help="leave FlashInfer's own autotuner out")
    parser.add_argument("--rounds", type=int, default=21, help="timings of each variant (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=whole_layers.DEFAULT_MAX_TOKENS, help="tune_max_num_tokens")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin nothing new after this long")
    parser.add_argument("--out", type=Path, help="CSV file to write")
    options = parser.parse_args(arguments)
    deadline = time.monotonic() + options.seconds
    rows: list[Row] = []
    try:
        tokens = sorted({int(t) for t in options.tokens.split(",")})
        if not 1 <= tokens[0] <= tokens[-1] <= options.max_tokens or options.rounds < 1:
            raise SynthError("--tokens must be from 1 to --max-tokens, and --rounds at least 1")
        configs = [parse_config(c) for c in options.config]
        layers = [parse_layer(text, options.quant) for text in options.layer]
        with table_writer(options.out) as write:
            for name, deployment in layers:
                if time.monotonic() > deadline:
                    say(f"{name}: out of time")
                    break
                for row in run_layer(
                    name, deployment, tokens, configs, autotune=not options.no_autotune,
                    bundled=options.bundled, rounds=options.rounds, max_tokens=options.max_tokens, deadline=deadline,
                ):  # fmt: skip
                    write(row)
                    rows.append(row)
                    say(f"  {row.tokens} {row.label} {row.g1},{row.g2}: {row.ms:.5f} ms")
    except (SynthError, ValueError) as e:
        print(f"layer.py: {e}", file=sys.stderr)
        return 2
    print(report(rows))
    wrong = failures(rows)
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
