"""The first minute on a GPU without timings: regret of the choices after some seconds of measuring.

    python benchmarks/first_minute.py blind DIR --out blind.json     constants of the H200 from public layers alone
    python benchmarks/first_minute.py h200 --constants blind.json --layer olmoe --quant fp8 --out build/first
    python benchmarks/first_minute.py synthetic --layer glm-5-tp8 --out build/synthetic

``h200`` treats this H200 as a device that nobody has timed: its analytic model has constants fitted to public whole
layers, no structure and no timings. ``collect --device-plan``'s own strategy then times kernels for ``--seconds``; the
shipped sweeps, which it never sees, judge the choices. With ``--simulate`` those sweeps are replayed instead, with
noise. Then the layer is emitted and, with ``--verify``, verified.

``synthetic`` makes an RTX PRO 6000 that doesn't exist: the analytical model with other constants and the structure of
another quantization, with errors of each tactic and cell and noise as the H200 has them. Its sweeps are replayed and
judge the choices. Its numbers are simulated, and no config is made from those.

Writes ``marks.csv`` with a row for each mark after every run; exit code 0, or 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from studies.public import fit_constants, grouped, read_folder

from synth.catalog.devices import get_device
from synth.catalog.models import deployments, find_layer, load_models, select
from synth.catalog.paths import shipped
from synth.catalog.schemes import STAGES
from synth.choosing.anchors import with_anchors
from synth.choosing.choose import choose
from synth.choosing.emission import Source, emit
from synth.choosing.plan import Layer, Plan, make_plan
from synth.choosing.rounds import NewDevice
from synth.collecting.gpus import gpu_name
from synth.collecting.journal import read_journal
from synth.collecting.runner import GPU_RUNNER, RunnerSpec
from synth.collecting.running import collect
from synth.collecting.simulated import simulated_runner
from synth.collecting.verifying import comparator_of, verify
from synth.errors import SynthError
from synth.flashinfer.legality import runnable_ids, smem_block_bytes
from synth.flashinfer.tactics import DEFAULT_FLASHINFER
from synth.performance.analytical import analytical_model, structure
from synth.performance.evaluation import Evaluation, Judge
from synth.performance.model import Cells, PerformanceModel, predictor
from synth.performance.roofline import DEFAULTS, NEUTRAL, Roofline
from synth.timings.files import write
from synth.timings.folders import combine, load
from synth.timings.origin import Origin
from synth.timings.rows import Row
from synth.timings.table import ShapeTimings, Timings

DEVICE = "NVIDIA H200"
SYNTHETIC = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
MARKS = (0.0, 1.0, 5.0, 15.0, 30.0, 60.0, 120.0)
COLUMNS = ("device", "quant", "layer", "seconds", "spent", "timings", "on", "choices", "regret", "p95", "max")
#: The synthetic device: deviations of its constants, of a tactic on a shape, of a cell, and of a timing (logarithms).
#: The last three are those of the H200's models on unseen shapes and of its repeats.
_CONSTANT_SD, _TACTIC_SD, _CELL_SD, _NOISE = 0.3, 0.01, 0.007, 0.004
#: The quantization of the H200 whose structure the synthetic device has.
_TRUTH = "bf16"
#: Other shapes of the synthetic device, which judge what was learned for all models.
_OTHERS = 12


def main() -> int:
    options = _options()
    if options.command == "blind":
        layers, _ = read_folder(options.folder)
        found = {
            quant: fit_constants(times, Roofline(NEUTRAL)).roofline.constants
            for (device, quant), times in grouped(layers).items()
            if device == DEVICE
        }
        options.out.write_text(json.dumps({q: dict(zip(DEFAULTS, c, strict=True)) for q, c in found.items()}, indent=1))
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    (deployment,) = select([find_layer(options.layer)], [options.quant], quant=options.quant, named=True)
    layer = Layer.of(deployment)
    (_synthetic if options.command == "synthetic" else _h200)(layer, options)
    return 0


def _h200(layer: Layer, options: argparse.Namespace) -> None:
    if not options.simulate and gpu_name() != DEVICE:
        raise SynthError(f"the GPU here is {gpu_name()}, and the sweeps that judge are those of {DEVICE}")
    device = get_device(DEVICE)
    (judging,) = load([shipped("measurements")], DEVICE, layer.quant, DEFAULT_FLASHINFER, problems=[])
    constants = json.loads(options.constants.read_text())[layer.quant]
    roofline = Roofline(tuple(constants[name] for name in DEFAULTS))
    origin = Origin.make(DEVICE, device.tactics_arch, layer.quant)
    start = PerformanceModel.analytic(origin, judging.table, roofline)
    runner = simulated_runner([shipped("measurements")], DEVICE) if options.simulate else GPU_RUNNER
    # Anchors that were swept, so that they can be replayed.
    catalogue = [Layer.by_hand(s, layer.quant, n) for s, n in zip(judging.shapes, judging.labels, strict=True)]
    timings, planned = _run(layer, start, catalogue if options.simulate else None, judging, runner, options)
    if options.simulate:
        return
    model = PerformanceModel(start=start).fit(timings)
    wanted = select([find_layer(options.layer)], [layer.quant], quant=layer.quant, named=True)
    made = emit(device, wanted, {layer.quant: Source(model, timings, "first minute")}, max_tokens=(8192,))
    (options.out / "config.json").write_bytes(made.config)
    (options.out / "config.json.provenance.json").write_bytes(made.sidecar)
    print(f"config: {made.tallies}", flush=True)
    if options.verify:
        found = verify(
            layer, model, options.out / "verified", folders=[options.out / "timed"], budget_s=options.verify,
            comparator=comparator_of(layer),
        )  # fmt: skip
        checked = found.collected
        print(f"verify: {checked.timed} timings, {checked.measuring_s:.1f} s, {found.numbers}"[:2000], flush=True)
        tables = load([options.out / "timed", options.out / "verified"], DEVICE, layer.quant, problems=[])
        _report(options, planned, start, tables[0], judging, options.seconds + checked.measuring_s, "after verify")


def _synthetic(layer: Layer, options: argparse.Namespace) -> None:
    device = get_device(SYNTHETIC)
    start = analytical_model(device, layer.quant)
    every = [Layer.of(d) for d in deployments(load_models(), quants=[layer.quant], supported=True)]
    anchors, _ = with_anchors([layer], [layer.quant], options.max_tokens)
    rng = np.random.default_rng(options.seed)
    others = [e for e in {e.shape: e for e in every}.values() if e.shape not in {a.shape for a in anchors}]
    others = [others[i] for i in np.sort(rng.permutation(len(others))[:_OTHERS])]
    folder = options.out / "device"
    for one in [*anchors, *others]:
        write(_made_up(start, one, options.max_tokens, rng, options.seed), folder)
    (judging,) = load([folder], SYNTHETIC, layer.quant, DEFAULT_FLASHINFER, problems=[])
    runner = simulated_runner([folder], SYNTHETIC, noise=_NOISE)
    timings, _ = _run(layer, start, None, judging, runner, options)
    try:
        emit(device, select([find_layer(options.layer)], [layer.quant], quant=layer.quant, named=True),
             {layer.quant: Source(PerformanceModel(start=start).fit(timings), timings)})  # fmt: skip
    except SynthError as e:
        print(f"no config: {e}", flush=True)


def _made_up(
    start: PerformanceModel, layer: Layer, max_tokens: int, rng: np.random.Generator, seed: int
) -> ShapeTimings:
    """Return a sweep of a layer on the synthetic device."""
    made = np.random.default_rng(seed)  # the same device for every layer
    constants = np.array(start.roofline_.constants) + made.normal(0.0, _CONSTANT_SD, len(DEFAULTS))
    truth = PerformanceModel.analytic(start.origin_, start.table, Roofline(tuple(constants)), structure(_TRUTH))
    smem = smem_block_bytes(start.origin_.device, start.table.arch)
    rows = []
    for stage in STAGES:
        ids = np.array(runnable_ids(start.table, stage, layer.shape, smem), dtype=np.int64)
        counts = np.array(sorted({b.tokens for b in _plan([layer], start, max_tokens).batches}))
        tokens, tactic = np.repeat(counts, len(ids)), np.tile(ids, len(counts))
        one = np.ones(len(tokens), dtype=np.int64)
        ms = truth.predict(Cells((layer.shape,), one * 0, one * stage, tokens, tactic)).ms
        error = np.tile(rng.normal(0.0, _TACTIC_SD, len(ids)), len(counts)) + rng.normal(0.0, _CELL_SD, len(tokens))
        rows += [
            Row(1, stage, *cell)
            for cell in zip(tokens.tolist(), tactic.tolist(), (ms * np.exp(error)).tolist(), strict=True)
        ]
    origin = replace(start.origin_, simulated=True)
    return ShapeTimings.from_rows(origin, layer.shape, layer.label, {1: {"source": "made up"}}, rows)


def _plan(layers: Sequence[Layer], start: PerformanceModel, max_tokens: int, budget_s: float | None = None) -> Plan:
    origin = start.origin_
    return make_plan(
        layers, origin.device, origin.arch, origin.flashinfer, max_tokens=max_tokens, budget_s=budget_s,
        predict=predictor({origin.quant: start}),
    )  # fmt: skip


def _run(
    layer: Layer,
    start: PerformanceModel,
    catalogue: Sequence[Layer] | None,
    judging: Timings,
    runner: RunnerSpec,
    options: argparse.Namespace,
) -> tuple[Timings, Sequence[Layer]]:
    """Time for some seconds, print what the choices were worth on the way; return the timings and what was planned."""
    layers, turns = with_anchors([layer], [layer.quant], options.max_tokens, catalogue)
    plan = _plan(layers, start, options.max_tokens, options.seconds)
    strategy = NewDevice({layer.quant: start}, plan.layers, sorted({b.tokens for b in plan.batches}), turns=turns)
    began = time.monotonic()
    journal = options.out / "journal.jsonl"
    done = collect(plan, runner, journal, strategy=strategy, measurements=options.out / "timed")
    print(
        f"{done.timed} timings of {[x.label for x in layers]}: {done.outcome}, {done.failed} failed, "
        f"{done.measuring_s:.1f} s of measuring, {time.monotonic() - began:.1f} s in all; {done.skipped}",
        flush=True,
    )
    content = read_journal(journal)
    spent = np.cumsum([e.seconds for e in content.entries])
    parts: list[Timings] = []
    for mark in sorted({m for m in MARKS if m <= options.seconds} | {options.seconds}):
        entries = [e for e, s in zip(content.entries, spent, strict=True) if s <= mark]
        origin = replace(start.origin_, simulated=content.head.simulated)
        parts = combine(
            [
                ShapeTimings.from_rows(
                    origin, one.shape, one.label, {1: {"source": "journal"}}, [e.row for e in entries if e.layer == i]
                )
                for i, one in enumerate(content.head.layers)
                if any(e.layer == i for e in entries)
            ]
        )
        timings = parts[0] if parts else None
        last = float(spent[len(entries) - 1]) if entries else 0.0
        _report(options, plan.layers, start, timings, judging, mark, f"{last:.1f}")
    return parts[0], plan.layers


def _report(
    options: argparse.Namespace,
    planned: Sequence[Layer],
    start: PerformanceModel,
    timings: Timings | None,
    judging: Timings,
    mark: float,
    spent: str,
) -> None:
    """Append what the choices after some seconds are worth: of the first layer, and of shapes that are never timed."""
    model = PerformanceModel(start=start).fit(timings) if timings is not None else start
    layer, ever = planned[0], {one.shape for one in planned}
    swept = judging.averaged()
    mine = [i for i, s in enumerate(judging.shapes) if s == layer.shape]
    rest = [i for i, s in enumerate(judging.shapes) if s not in ever]
    fresh = not (options.out / "marks.csv").exists()
    with (options.out / "marks.csv").open("a", newline="") as file:
        writer = csv.writer(file)
        if fresh:
            writer.writerow(COLUMNS)
        for on, shapes in (("the layer", mine), ("other shapes", rest)):
            found = _judged(model, timings, swept.select(np.isin(swept.shape, shapes))).all
            row = [start.origin_.device, layer.quant, layer.label, f"{mark:g}", spent, len(timings or ()), on,
                   found.count, f"{found.geomean:.4f}", f"{found.p95:.3f}", f"{found.max:.3f}"]  # fmt: skip
            writer.writerow(row)
            print(*row, sep="  ", flush=True)


def _judged(model: PerformanceModel, timings: Timings | None, swept: Timings) -> Evaluation:
    judge = Judge(swept)
    shapes = [swept.shapes[i] for i in np.unique(swept.shape).tolist()]
    index = {s: i for i, s in enumerate(swept.shapes)}
    tried = choose(model, shapes, np.unique(swept.tokens).tolist(), timings=timings)
    cells = np.array([(index[c.shape], c.stage, c.bucket, c.tactic_id) for c in tried]).T
    rows = judge.rows_of(*cells)
    return judge.evaluate_rows("choices", rows[rows >= 0])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    blind = commands.add_parser("blind", help="constants of the H200 from public layers alone")
    blind.add_argument("folder", type=Path)
    h200 = commands.add_parser("h200", help="an H200 that nobody has timed")
    h200.add_argument("--constants", type=Path, required=True, help="what `blind` wrote")
    h200.add_argument("--simulate", action="store_true", help="replay the shipped sweeps")
    h200.add_argument("--verify", type=float, default=0.0, help="then verify the layer, for this many seconds at most")
    synthetic = commands.add_parser("synthetic", help="an RTX PRO 6000 that doesn't exist")
    synthetic.add_argument("--seed", type=int, default=0, help="which one")
    for command in (h200, synthetic):
        command.add_argument("--layer", required=True, help="label of a deployment")
        command.add_argument("--quant", default="nvfp4" if command is synthetic else "fp8")
        command.add_argument("--seconds", type=float, default=120.0, help="of measuring")
        command.add_argument("--max-tokens", type=int, default=8192)
    for command in (blind, h200, synthetic):
        command.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SynthError as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(2)
