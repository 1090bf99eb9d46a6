"""What a pull request to FlashInfer needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from synth.commands.options import folders


@click.command(short_help="make what a pull request to FlashInfer needs")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="New folder for it.")
@click.option("--only-verified", is_flag=True, help="Leave out what can't be contributed instead of refusing it all.")
@click.option(
    "--layers",
    "layer_times",
    type=click.Path(path_type=Path),
    help="Whole-layer times for the description: what benchmarks/layer.py --out writes.",
)
@folders
def contribute(
    file: Path,
    output: Path,
    only_verified: bool,
    layer_times: Path | None,
    own_measurements: Path | None,
    own_models: Path | None,
) -> None:
    """Make what a pull request to FlashInfer needs of FILE, a config that `synth emit` wrote.

    That is the bundled module, named as FlashInfer's loader expects it, what check, replay and report say of it, and a
    description with the measured gains. Entries that are analytical, simulated, predicted or whose numbers were not
    compared are refused: each one is looked up in the measurements again.
    """
    from synth.catalog.paths import readable
    from synth.checking.contribution import REASONS, prepare
    from synth.checking.pull_request import read_layer_times, write
    from synth.gpu.replay import replay
    from synth.reporting import report
    from synth.reporting.console import problems

    measurements, models = readable("measurements", own_measurements), readable("models", own_models)
    bad: list[Any] = []
    layers = read_layer_times(layer_times) if layer_times else []
    found = prepare(file, measurements, only_verified=only_verified, problems=bad)
    problems(bad)
    files = write(
        found,
        output,
        lambda module: replay(module, device=found.device.name),
        lambda config: report(config, model_folders=models, measurements=measurements),
        layers,
    )
    for path in files:
        click.echo(f"-> {path}")
    click.echo(f"{found.entries} entries; {sum(found.refused.values())} left out")
    for reason, count in found.refused.items():
        click.echo(f"left out {count}: {REASONS[reason]}")
    click.echo(
        f"next: copy {found.module_name} to flashinfer/tuning_configs/ of a clone of FlashInfer {found.flashinfer}; "
        "DESCRIPTION.md is the text of the pull request"
    )
