"""What spot checks are worth: the regret of the choices before and after ``synth verify``, against a full sweep.

    python benchmarks/verify.py --model qwen3.5-122b-a10b-tp2 --model glm-4.5-air-tp2 --out build/verify

For each layer, one that the model has never seen: its choices as the model alone makes them; ``verify`` with its
budget and stop rule, the numbers of every chosen pair included; then every tactic of every bucket, timed into another
folder, which decides the regret of both. So the timings that judge are not those that chose. Results are written after
each layer: ``layers.jsonl`` with a layer a line, ``cells.csv`` with a choice a line. ``--seconds`` leaves out the
layers that no longer fit. ``--simulate`` replays the measurements instead, of layers that are in them.

Exit code 0: done; 1: a layer was left out or its numbers were wrong; 2: usage.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from synth.catalog.devices import get_device
from synth.catalog.models import find_layer, select
from synth.catalog.paths import find_model, readable
from synth.choosing.plan import Layer, Plan, make_plan, summarize
from synth.choosing.spots import THRESHOLD
from synth.collecting.gpus import gpu_name
from synth.collecting.runner import GPU_RUNNER, RunnerSpec
from synth.collecting.running import collect
from synth.collecting.simulated import simulated_runner
from synth.collecting.verifying import BUDGET_S, Verification, comparator_of, report, verify
from synth.commands.printing import verification
from synth.errors import SynthError
from synth.flashinfer.tactics import DEFAULT_FLASHINFER
from synth.performance.model import PerformanceModel, predictor
from synth.reporting.console import table
from synth.timings.folders import load

#: Seconds of starting processes and choosing that a layer takes beside its sweep and its spot checks.
_OVERHEAD_S = 45.0
CELLS = ("layer", "stage", "bucket", "before", "before_ms", "after", "after_ms", "best", "best_ms")


def main() -> int:
    options = _options()
    began = time.monotonic()
    device = get_device("NVIDIA H200" if options.simulate else gpu_name())
    folder = readable("models", options.models)
    path = find_model(folder, device.name, options.quant, DEFAULT_FLASHINFER)
    if path is None:
        raise SynthError(f"{device.name} {options.quant}: no model in {', '.join(map(str, folder))}")
    model = PerformanceModel.load(path, device=device.name, quant=options.quant, flashinfer=DEFAULT_FLASHINFER)
    named = [find_layer(name) for name in options.model]
    layers = [Layer.of(d) for d in select(named, [options.quant], quant=options.quant, tp=None, ep=None, named=True)]
    if known := [str(layer) for layer in layers if model.knows(layer.shape) and not options.simulate]:
        raise SynthError(f"the model was fitted on {', '.join(known)}; name layers that it has never seen")
    runner = simulated_runner(readable("measurements", None), device.name) if options.simulate else GPU_RUNNER
    options.out.mkdir(parents=True, exist_ok=True)
    rows: list[list[object]] = []
    left_out, wrong = [], False
    for layer in layers:
        sweep = make_plan(
            [layer], device.name, device.tactics_arch, DEFAULT_FLASHINFER, max_tokens=options.max_tokens,
            predict=predictor({layer.quant: model}),
        )  # fmt: skip
        expected = summarize(sweep).measuring_s + _OVERHEAD_S
        left = options.seconds - (time.monotonic() - began)
        if expected > left:
            print(f"{layer}: left out, it takes about {expected:.0f} s and {left:.0f} s are left", flush=True)
            left_out.append(layer)
            continue
        try:
            found, seconds = _verify(layer, model, runner, options)
            swept_s = _sweep(sweep, runner, options.out / "sweep")
        except SynthError as e:
            print(f"{layer}: left out, {e}", flush=True)
            left_out.append(layer)
            continue
        cells = _judge(found, options)
        result = _result(found, cells, seconds, swept_s)
        _write(options.out, found, cells, result)
        rows += _rows(layer, result)
        wrong |= bool(found.numbers.denials)
        table("Regret against the full sweep", ["layer", "choices", "all", "gemm1", "gemm2", "p95", "max"], rows)
        print(f"{time.monotonic() - began:.0f} s so far", flush=True)
    return 1 if left_out or wrong else 0


def _verify(
    layer: Layer, model: PerformanceModel, runner: RunnerSpec, options: argparse.Namespace
) -> tuple[Verification, float]:
    """Spot-check a layer; returns the seconds that it took in all, too."""
    began = time.monotonic()
    found = verify(
        layer, model, options.out / "verified", budget_s=options.budget, threshold=options.threshold,
        max_tokens=options.max_tokens, runner=runner, simulated=options.simulate,
        comparator=comparator_of(layer, options.simulate),
    )  # fmt: skip
    if found.collected.outcome == "failed":
        raise SynthError(f"{layer}: {found.collected.reason}")
    verification(found)
    return found, time.monotonic() - began


def _sweep(plan: Plan, runner: RunnerSpec, root: Path) -> float:
    """Time everything; returns the seconds of measuring."""
    done = collect(plan, runner, plan.journal_path(root), measurements=root)
    if done.outcome != "finished" or done.missing:
        raise SynthError(f"{plan.layers[0]}: the sweep ended as {done.outcome}: {done.reason} {done.skipped}")
    return done.measuring_s


def _judge(found: Verification, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return each choice, before and after, with its time and the best one of the sweep."""
    (timings,) = load(options.out / "sweep", quant=found.layer.quant, problems=[])
    mine = timings.select(timings.shape == timings.shapes.index(found.layer.shape)).averaged()
    cells = []
    for (stage, bucket), after in found.chosen.items():
        here = mine.select((mine.stage == stage) & (mine.tokens == bucket))
        ms = dict(zip(here.tactic.tolist(), here.ms.tolist(), strict=True))
        best = min(ms, key=ms.__getitem__)
        before = found.chosen_before[stage, bucket]
        values = (before, ms.get(before, math.nan), after, ms.get(after, math.nan), best, ms[best])
        cells.append(dict(zip(CELLS, (found.layer.label, stage, bucket, *values), strict=True)))
    return cells


def _result(found: Verification, cells: Sequence[dict[str, Any]], seconds: float, swept_s: float) -> dict[str, Any]:
    """Return what a layer came to, as plain values."""
    regrets: dict[str, Any] = {}
    for when in ("before", "after"):
        lost = np.array([cell[f"{when}_ms"] / cell["best_ms"] for cell in cells])
        stage = np.array([cell["stage"] for cell in cells])
        regrets[when] = {
            "geomean": _geomean(lost),
            "gemm1": _geomean(lost[stage == 1]),
            "gemm2": _geomean(lost[stage == 2]),
            "p95": float(np.quantile(lost, 0.95)),
            "max": float(lost.max()),
        }
    return {
        **report(found.layer, found), "regret": regrets, "verify_s": round(seconds, 2), "sweep_s": round(swept_s, 2),
    }  # fmt: skip


def _geomean(values: np.ndarray[Any, Any]) -> float:
    return float(np.exp(np.log(values).mean()))


def _rows(layer: Layer, result: dict[str, Any]) -> list[list[object]]:
    rows: list[list[object]] = []
    for when, name in (("before", "of the model"), ("after", f"verified, {result['timings']} timings")):
        r = result["regret"][when]
        rows.append([layer, name, *(f"{r[k]:.4f}" for k in ("geomean", "gemm1", "gemm2", "p95", "max"))])
    return rows


def _write(out: Path, found: Verification, cells: Sequence[dict[str, Any]], result: dict[str, Any]) -> None:
    """Append a layer's results, and the timings' own comparisons of numbers."""
    compared = [dataclasses.asdict(c) for c in found.numbers.compared if math.isfinite(c.deviation)]
    with (out / "layers.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({**result, "compared": compared}) + "\n")
    path = out / "cells.csv"
    fresh = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, CELLS)
        if fresh:
            writer.writeheader()
        writer.writerows(cells)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", action="append", required=True, help="a label such as glm-4.5-air-tp2; repeatable")
    parser.add_argument("--quant", default="bf16", choices=("bf16", "fp8"))
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds of spot checks for each layer")
    parser.add_argument("--threshold", type=float, default=THRESHOLD, help="see synth verify --help")
    parser.add_argument("--max-tokens", type=int, default=8192)
    parser.add_argument("--seconds", type=float, default=math.inf, help="leave out layers that no longer fit")
    parser.add_argument("--models", type=Path, help="folder of models")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results; a new one")
    parser.add_argument("--simulate", action="store_true")
    options = parser.parse_args()
    if options.out.exists() and any(options.out.iterdir()):
        parser.error(f"--out {options.out} isn't empty: timings in it would be taken as known")
    return options


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SynthError as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(2)
