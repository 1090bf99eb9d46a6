"""Timings: taken on a GPU, spot-checked, brought in."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from synth.commands.options import device_here, flashinfer_option, folders, json_option, layer_options, wanted_layers
from synth.errors import SynthError

if TYPE_CHECKING:
    from synth.catalog.devices import Device
    from synth.choosing.plan import Layer

#: Seconds of measuring of a device plan.
_FIRST_MINUTE_S = 60.0


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

    from synth.catalog.paths import readable
    from synth.choosing.plan import summarize
    from synth.choosing.sampling import make_sample
    from synth.collecting.gpus import find_gpus
    from synth.collecting.reporters import RichReporter
    from synth.collecting.running import collect as run
    from synth.collecting.simulated import timing_place
    from synth.commands.printing import collect_summary, plan_summary

    if full + (budget is not None) + (fraction is not None) > 1:
        raise SynthError("give one of --budget, --fraction and --full")
    if device_plan and (full or fraction is not None or no_rounds or len(passes) > 1):
        raise SynthError("--device-plan decides by rounds within --budget; leave out --full, --fraction, --no-rounds")
    if device_plan and not (layer["model_names"] or layer["config_file"] or layer["hidden"]):
        raise SynthError("--device-plan settles the layers that are named; name some, such as --model glm-5 --tp 8")
    found, layers = _wanted(device, simulate or (dry_run and device is not None), flashinfer, layer)
    if device_plan:
        budget = budget or _FIRST_MINUTE_S
    sample = make_sample(
        found,
        layers,
        flashinfer,
        own_models,
        max_tokens=max_tokens,
        anchored=device_plan,
        fraction=None if full or budget is not None else fraction or 0.05,
        buckets=_numbers(buckets) if buckets else None,
        passes=passes or (1,),
        budget_s=budget,
    )
    there = readable("measurements", own_measurements if own_measurements and own_measurements.is_dir() else None)
    root, runner = timing_place(own_measurements, there, found.name, simulate)
    cards = (0,) if dry_run or (simulate and gpus == "all") else find_gpus(gpus)
    planned = summarize(sample.plan, len(cards))
    if not as_json:
        plan_summary(planned)
    elif dry_run:
        click.echo(json.dumps(planned.as_dict(), indent=1))
    if dry_run:
        return
    # What a simulation replays must not be known to it.
    strategy = None if full or no_rounds else sample.strategy([] if simulate else there, len(cards))
    with RichReporter() as reporter:
        done = run(
            sample.plan,
            runner,
            journal or sample.plan.journal_path(root),
            strategy=strategy,
            gpus=cards,
            ray=ray_address,
            reporter=reporter,
            measurements=root,
        )
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(done), indent=1, default=str))
    else:
        collect_summary(done)
    done.raise_if_failed()
    if done.outcome == "interrupted":
        sys.exit(130)
    if not as_json:
        click.echo(f"next: synth fit --measurements {root}" if simulate or own_measurements else "next: synth fit")


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
    from synth.catalog.paths import readable, shipped
    from synth.choosing.sampling import known_models
    from synth.choosing.spots import outlook
    from synth.collecting.gpus import find_gpus
    from synth.collecting.reporters import Reporter, RichReporter, duration
    from synth.collecting.simulated import timing_place
    from synth.collecting.verifying import comparator_of, report
    from synth.collecting.verifying import verify as run
    from synth.commands.printing import standings, verification
    from synth.flashinfer.buckets import token_buckets
    from synth.reporting.console import problems

    if wrong and not simulate:
        raise SynthError("--wrong goes with --simulate")
    found, layers = _wanted(device, simulate or (dry_run and device is not None), flashinfer, layer)
    # Several deployments may be one layer on a rank.
    layers = list({(one.shape, one.quant): one for one in reversed(layers)}.values())[::-1]
    models = known_models(found.name, [one.quant for one in layers], flashinfer, own_models)
    if missing := [one.quant for one in layers if one.quant not in models]:
        raise SynthError(
            f"{found.name} {missing[0]}: no model for FlashInfer {flashinfer} whose choices could be verified; time "
            "some kernels with `synth collect` and run `synth fit`"
        )
    fresh = own_measurements is not None and not own_measurements.exists()
    there = [shipped("measurements")] if fresh else readable("measurements", own_measurements)
    root, runner = timing_place(own_measurements, there, found.name, simulate)
    # Real timings must not decide what replays them.
    folders = [] if simulate else there
    if dry_run:
        buckets = token_buckets(max_tokens, flashinfer)
        standing = [
            (one, outlook(one, models[one.quant], [root, *folders], buckets, simulated=simulate)) for one in layers
        ]
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
        result = run(
            one,
            models[one.quant],
            root,
            folders=folders,
            budget_s=budget,
            threshold=threshold,
            max_tokens=max_tokens,
            pass_=pass_,
            runner=runner,
            simulated=simulate,
            comparator=None if no_numbers else comparator_of(one, simulate, wrong),
            gpus=cards,
            reporter=Reporter if as_json else RichReporter,
            problems=bad,
        )
        done.append(result)
        if not as_json:
            verification(result)
        result.collected.raise_if_failed(f"{one}: ")
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
    from synth.timings.files import read, write
    from synth.timings.folders import merge

    bad: list[Any] = []
    merged = merge([read(file, bad) for file in files])
    problems(bad)
    click.echo(f"{len(merged)} timings -> {write(merged, output)}")


def _numbers(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise SynthError(f"--buckets {text!r}: give token counts such as 1,64,1024")
    return [int(part) for part in parts]


def _wanted(
    device: str | None, elsewhere: bool, flashinfer: str, options: dict[str, Any]
) -> tuple[Device, list[Layer]]:
    """Return the GPU, and the layers that the options ask for in the quantizations that have tactics on it."""
    from synth.choosing.plan import Layer
    from synth.flashinfer.tactics import load_tables

    found = device_here(device, elsewhere)
    quants = [t.quant for t in load_tables(flashinfer) if t.arch == found.tactics_arch]
    return found, [Layer.of(d) for d in wanted_layers(list(dict.fromkeys(quants)), **options)]
