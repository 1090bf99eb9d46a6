"""Timings: taken on a GPU, spot-checked, brought in."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from synth.commands.options import device_here, flashinfer_option, folders, json_option, layer_options, wanted_layers
from synth.errors import SynthError

if TYPE_CHECKING:
    from synth.catalog.devices import Device
    from synth.performance.model import PerformanceModel


@click.command(short_help="time a planned sample of tactics on this GPU")
@click.option("--device", help="GPU.  [default: the one that is here]")
@click.option("--budget", type=click.FloatRange(min=0, min_open=True), help="Seconds of measuring on each GPU.")
@click.option("--fraction", type=click.FloatRange(0, 1, min_open=True), help="Share of the sweep.  [default: 0.05]")
@click.option("--full", is_flag=True, help="Every tactic of every bucket.")
@click.option(
    "--device-plan",
    is_flag=True,
    help="The first minute on a GPU without timings: settle the layers that are named, then time a few that are far "
    "from them, for all other models.  [--budget: 60]",
)
@click.option(
    "--no-rounds",
    is_flag=True,
    help="Time the tactics predicted fastest in each bucket; otherwise what to time is decided round by round, from "
    "what was timed so far.",
)
@click.option("--buckets", help="Token counts, for example 1,64,1024.  [default: FlashInfer's up to --max-tokens]")
@click.option("--max-tokens", type=click.IntRange(1), default=8192, show_default=True, help="Largest bucket.")
@click.option("--pass", "passes", type=click.IntRange(1), multiple=True, help="Pass number; may be repeated.")
@click.option("--gpus", default="0", show_default=True, help="all, or numbers such as 0,2.")
@click.option(
    "--ray", "ray_address", is_flag=False, flag_value="auto", help="Run on a Ray cluster, one actor for each GPU."
)
@click.option("--simulate", is_flag=True, help="Replay the measurements with noise instead of timing kernels.")
@click.option("--dry-run", is_flag=True, help="Print the plan and stop.")
@click.option("--journal", type=click.Path(path_type=Path), help="Journal.  [default: in your measurements folder]")
@flashinfer_option
@json_option
@layer_options
@folders
def collect(
    device: str | None,
    budget: float | None,
    fraction: float | None,
    full: bool,
    device_plan: bool,
    no_rounds: bool,
    buckets: str | None,
    max_tokens: int,
    passes: tuple[int, ...],
    gpus: str,
    ray_address: str | None,
    simulate: bool,
    dry_run: bool,
    journal: Path | None,
    flashinfer: str,
    as_json: bool,
    own_measurements: Path | None,
    own_models: Path | None,
    **layer: Any,
) -> None:
    """Time a planned sample of tactics on this GPU through FlashInfer's own autotuner.

    Every timing is in the journal before the next one starts; the same command continues where it stopped.
    """
    import dataclasses

    from synth.catalog.paths import find_model, readable, user_folder
    from synth.choosing.anchors import with_anchors
    from synth.choosing.plan import Layer, make_plan, summarize
    from synth.choosing.rounds import decide_by_rounds
    from synth.collecting.gpus import find_gpus
    from synth.collecting.reporters import RichReporter
    from synth.collecting.runner import GPU_RUNNER
    from synth.collecting.running import collect as run
    from synth.collecting.simulated import simulated_runner
    from synth.flashinfer.tactics import load_tables
    from synth.performance.model import PerformanceModel, predictor
    from synth.reporting.console import plan_summary
    from synth.timings.measurements import load

    if full + (budget is not None) + (fraction is not None) > 1:
        raise SynthError("give one of --budget, --fraction and --full")
    if device_plan and (full or fraction is not None or no_rounds or len(passes) > 1):
        raise SynthError("--device-plan decides by rounds within --budget; leave out --full, --fraction, --no-rounds")
    if device_plan and not (layer["model_names"] or layer["config_file"] or layer["hidden"]):
        raise SynthError("--device-plan settles the layers that are named; name some, such as --model glm-5 --tp 8")
    found = device_here(device, simulate or (dry_run and device is not None))
    tables = {t.quant: t for t in load_tables(flashinfer) if t.arch == found.tactics_arch}
    layers = [Layer.of(d) for d in wanted_layers(list(tables), **layer)]
    trained = {
        q: PerformanceModel.load(path)
        for q in dict.fromkeys(one.quant for one in layers)
        if (path := find_model(readable("models", own_models), found.name, q, flashinfer))
    }
    starts = _starts(found, [one.quant for one in layers if one.quant not in trained], flashinfer)
    turns: list[list[int]] = []
    if device_plan:
        budget = budget or _FIRST_MINUTE_S
        layers, turns = with_anchors(layers, list(starts), max_tokens)
    plan = make_plan(
        layers,
        found.name,
        found.tactics_arch,
        flashinfer,
        fraction=None if full or budget is not None else fraction or 0.05,
        buckets=_numbers(buckets) if buckets else None,
        max_tokens=max_tokens,
        passes=passes or (1,),
        budget_s=budget,
        predict=predictor({**starts, **trained}),
    )
    root = own_measurements or user_folder("measurements")
    if simulate:
        root = root / "simulated"
        own = own_measurements if own_measurements and own_measurements.is_dir() else None
        spec = simulated_runner(readable("measurements", own), found.name)
    else:
        spec = GPU_RUNNER
    cards = (0,) if simulate and gpus == "all" else find_gpus(gpus) if not dry_run else (0,)
    planned = summarize(plan, len(cards))
    if dry_run:
        if as_json:
            click.echo(json.dumps(planned.as_dict(), indent=1))
        else:
            plan_summary(planned)
        return
    if not as_json:
        plan_summary(planned)
    strategy = None
    # Rounds need something to begin with, and too little may be public of the device.
    guided = all(one.quant in trained or one.quant in starts for one in plan.layers)
    if guided and not full and not no_rounds and len(plan.passes) == 1:
        there = own_measurements if own_measurements and own_measurements.is_dir() else None
        # What a simulation replays must not be known to it.
        earlier = [] if simulate else load(readable("measurements", there), found.name, None, flashinfer, problems=[])
        strategy = decide_by_rounds(plan, trained, earlier, starts=starts, turns=turns, at_once=len(cards))
    with RichReporter() as reporter:
        done = run(
            plan,
            spec,
            journal or plan.journal_path(root),
            strategy=strategy,
            gpus=cards,
            ray=ray_address,
            reporter=reporter,
            measurements=root,
        )
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(done), indent=1, default=str))
    else:
        from synth.reporting.console import collect_summary

        collect_summary(done)
    if done.outcome == "failed":
        raise SynthError(f"{done.reason}; what was timed is in {done.journal}; the same command continues")
    if done.outcome == "interrupted":
        sys.exit(130)
    if not as_json:
        click.echo(f"next: synth fit --measurements {root}" if simulate or own_measurements else "next: synth fit")


#: Seconds of measuring of a device plan.
_FIRST_MINUTE_S = 60.0


def _starts(device: Device, quants: Iterable[str], flashinfer: str) -> dict[str, PerformanceModel]:
    """Return what is believed of a device without timings, by quantization; nothing where too little is public."""
    from contextlib import suppress

    from synth.performance.analytical import analytical_model

    found = {}
    for quant in dict.fromkeys(quants):
        with suppress(SynthError):
            found[quant] = analytical_model(device, quant, flashinfer)
    return found


@click.command(short_help="on this GPU: spot-check choices, and their numbers")
@click.option("--device", help="GPU.  [default: the one that is here]")
@click.option(
    "--budget",
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    show_default=True,
    help="Seconds of measuring for each layer, on each GPU; those of earlier calls with this --pass count.",
)
@click.option(
    "--threshold",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    default=0.001,
    show_default=True,
    help="A layer is done where its expected remaining regret is below this share.",
)
@click.option("--max-tokens", type=click.IntRange(1), default=8192, show_default=True, help="Largest bucket.")
@click.option("--pass", "pass_", type=click.IntRange(1), default=1, show_default=True, help="Pass number.")
@click.option("--no-numbers", is_flag=True, help="Don't compare outputs with the fallback's.")
@click.option("--gpus", default="0", show_default=True, help="all, or numbers such as 0,2.")
@click.option("--simulate", is_flag=True, help="Replay the measurements with noise instead of timing kernels.")
@click.option("--wrong", type=int, multiple=True, hidden=True, help="With --simulate: a tactic with wrong numbers.")
@click.option("--dry-run", is_flag=True, help="Print where each layer stands and stop.")
@flashinfer_option
@json_option
@layer_options
@folders
def verify(
    device: str | None,
    budget: float,
    threshold: float,
    max_tokens: int,
    pass_: int,
    no_numbers: bool,
    gpus: str,
    simulate: bool,
    wrong: tuple[int, ...],
    dry_run: bool,
    flashinfer: str,
    as_json: bool,
    own_measurements: Path | None,
    own_models: Path | None,
    **layer: Any,
) -> None:
    """Spot-check the choices of layers on this GPU, and compare their numbers with the fallback's.

    For each layer: time what its choices are least sure of until the expected remaining regret is below --threshold
    or --budget is spent; then run every chosen pair of tactics beside FlashInfer's fallback. A tactic whose output is
    wrong is denied on this device and FlashInfer version, and the layer is chosen anew. `synth emit` uses the timings
    and the denied tactics at once. Exit 1 when a chosen tactic's numbers were wrong.
    """
    from synth.catalog.paths import find_model, readable, shipped, user_folder
    from synth.choosing.plan import Layer
    from synth.choosing.spots import outlook
    from synth.collecting.gpus import find_gpus
    from synth.collecting.numbers import ComparatorSpec
    from synth.collecting.reporters import Reporter, RichReporter, duration
    from synth.collecting.runner import GPU_RUNNER
    from synth.collecting.simulated import simulated_runner
    from synth.collecting.verifying import gpu_comparator, report
    from synth.collecting.verifying import verify as run
    from synth.flashinfer.buckets import token_buckets
    from synth.flashinfer.tactics import load_tables
    from synth.performance.model import PerformanceModel
    from synth.reporting.console import problems, standings, verification

    if wrong and not simulate:
        raise SynthError("--wrong goes with --simulate")
    found = device_here(device, simulate or (dry_run and device is not None))
    tables = {t.quant: t for t in load_tables(flashinfer) if t.arch == found.tactics_arch}
    named: dict[object, Layer] = {}
    for d in wanted_layers(list(tables), **layer):
        # Several deployments may be one layer on a rank.
        named.setdefault((d.shape, d.quant), Layer.of(d))
    layers = list(named.values())
    loaded = {}
    for q in dict.fromkeys(one.quant for one in layers):
        path = find_model(readable("models", own_models), found.name, q, flashinfer)
        if path is None:
            raise SynthError(
                f"{found.name} {q}: no model for FlashInfer {flashinfer} whose choices could be verified; time some "
                "kernels with `synth collect` and run `synth fit`"
            )
        loaded[q] = PerformanceModel.load(path, device=found.name, quant=q, flashinfer=flashinfer)
    fresh = own_measurements is not None and not own_measurements.exists()
    folders = [shipped("measurements")] if fresh else readable("measurements", own_measurements)
    root = own_measurements or user_folder("measurements")
    spec = GPU_RUNNER
    if simulate:
        # Real timings must not decide what replays them.
        root, spec, folders = root / "simulated", simulated_runner(folders, found.name), []
    if dry_run:
        there = [root, *folders]
        buckets = token_buckets(max_tokens, flashinfer)
        standing = [(one, outlook(one, loaded[one.quant], there, buckets, simulated=simulate)) for one in layers]
        if as_json:
            click.echo(json.dumps([report(one, now) for one, now in standing], indent=1))
        else:
            standings(standing)
        return
    cards = (0,) if simulate and gpus == "all" else find_gpus(gpus)
    if len(layers) > 1 and not as_json:
        click.echo(f"{len(layers)} layers, at most {duration(budget * len(layers))} of measuring on each GPU")
    done = []
    bad: list[Any] = []
    for one in layers:
        simulated = ComparatorSpec("synth.collecting.numbers:SimulatedComparator", {"wrong": wrong})
        result = run(
            one,
            loaded[one.quant],
            root,
            folders=folders,
            budget_s=budget,
            threshold=threshold,
            max_tokens=max_tokens,
            pass_=pass_,
            runner=spec,
            simulated=simulate,
            comparator=None if no_numbers else simulated if simulate else gpu_comparator(one),
            gpus=cards,
            reporter=Reporter if as_json else RichReporter,
            problems=bad,
        )
        done.append(result)
        if not as_json:
            verification(result)
        if result.collected.outcome == "failed":
            raise SynthError(
                f"{one}: {result.collected.reason}; what was timed is in {result.collected.journal}; the same command "
                "continues"
            )
        if result.collected.outcome == "interrupted":
            break
    problems(list(dict.fromkeys(map(str, bad))))
    if as_json:
        click.echo(json.dumps([report(r.layer, r) for r in done], indent=1))
    if done and done[-1].collected.outcome == "interrupted":
        sys.exit(130)
    if not as_json and not simulate:
        click.echo("next: synth emit uses these timings for their layers; synth fit learns from them for others")
    sys.exit(1 if any(r.numbers.denials for r in done) else 0)


@click.group(short_help="add and merge files of timings")
def measurements() -> None:
    """Add and merge files of timings."""


@measurements.command("add")
@click.argument("files", type=click.Path(path_type=Path), nargs=-1, required=True)
@click.option("--device", default="NVIDIA H200", show_default=True, help="What a flat table doesn't say.")
@flashinfer_option
@folders
def measurements_add(
    files: tuple[Path, ...], device: str, flashinfer: str, own_measurements: Path | None, own_models: Path | None
) -> None:
    """Add FILES to your measurements: a collect journal, a measurements file, or a flat table (csv, csv.gz)."""
    from synth.catalog.devices import get_device
    from synth.catalog.paths import user_folder
    from synth.collecting.results import add_file
    from synth.reporting.console import problems

    found = get_device(device)
    root = own_measurements or user_folder("measurements")
    for file in files:
        bad: list[Any] = []
        written = add_file(file, root, device=found.name, arch=found.tactics_arch, flashinfer=flashinfer, problems=bad)
        problems(bad)
        for path in written:
            click.echo(f"{file} -> {path}")


@measurements.command("merge")
@click.argument("files", type=click.Path(path_type=Path), nargs=-1, required=True)
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="Folder for the merged file.")
def measurements_merge(files: tuple[Path, ...], output: Path) -> None:
    """Merge measurements FILES of one shape; refuses mixed devices, versions, quantizations and timing policies."""
    from synth.reporting.console import problems
    from synth.timings.measurements import merge, read, write

    bad: list[Any] = []
    merged = merge([read(file, bad) for file in files])
    problems(bad)
    click.echo(f"{len(merged)} timings -> {write(merged, output)}")


def _numbers(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise SynthError(f"--buckets {text!r}: give token counts such as 1,64,1024")
    return [int(part) for part in parts]
