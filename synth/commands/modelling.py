"""Fit timings into models, and measure how good these are."""

from __future__ import annotations

import json
from pathlib import Path

import click

from synth.catalog.schemes import QUANTS
from synth.commands.options import flashinfer_option, folders, json_option, load_timings
from synth.errors import SynthError


@click.command(short_help="fit timings into models")
@click.option("--device", help="Only this device.")
@click.option("--quant", type=click.Choice(QUANTS), help="Only this quantization.")
@folders
def fit(device: str | None, quant: str | None, own_measurements: Path | None, own_models: Path | None) -> None:
    """Fit every device and quantization in the measurements into a model, and print its held-out regret."""
    from synth.catalog.paths import user_folder
    from synth.performance.fitting import fit as fit_one
    from synth.performance.fitting import save
    from synth.performance.held_out import workers
    from synth.reporting.console import progress, regrets

    folder = own_models or user_folder("models")
    tables = load_timings(own_measurements, device, quant)
    refused: SynthError | None = None
    for timings in tables:
        origin = timings.origin
        name = f"{origin.device} {origin.quant}" + (" (simulated)" if origin.simulated else "")
        try:
            with progress(f"fitting {name}") as report, workers() as pool:
                fitted = fit_one(timings, report, pool)
        except SynthError as e:
            # One table that can't be fitted, of a device that isn't known for example, doesn't stop the others.
            if len(tables) > 1:
                click.echo(f"warning: {name} is not fitted: {e}", err=True)
            refused = e
            continue
        path = save(fitted.model, folder)
        if fitted.evaluations and fitted.calibration:
            regrets(f"{name}: regret, each model family held out", fitted.evaluations)
            click.echo(
                f"90 % intervals cover {100 * fitted.calibration.coverage:.1f} %; times are off by "
                f"{100 * fitted.calibration.error:.1f} % in the median (held out)"
            )
        else:
            click.echo(f"{name}: one model family only, so no held-out regret")
        click.echo(f"{len(fitted.model.shapes_)} shapes, {len(timings)} timings -> {path}\n")
    if refused is not None:
        raise refused
    click.echo('next: synth emit --device "NAME"')


@click.command(short_help="how good the choices are, on shapes held out")
@click.option("--device", default="NVIDIA H200", show_default=True)
@click.option("--quant", type=click.Choice(QUANTS), help="Only this quantization.")
@click.option("--by", type=click.Choice(["family", "shape"]), default="family", show_default=True, help="Hold out by.")
@click.option(
    "--against",
    type=click.Path(path_type=Path),
    help="Score the fitted models on this table (csv or csv.gz) of shapes that they have never seen.",
)
@flashinfer_option
@json_option
@folders
def evaluate(
    device: str,
    quant: str | None,
    by: str,
    against: Path | None,
    flashinfer: str,
    as_json: bool,
    own_measurements: Path | None,
    own_models: Path | None,
) -> None:
    """Measure the regret of the choices on shapes held out, beside simple ways to choose."""
    from synth.catalog.devices import get_device
    from synth.catalog.paths import readable
    from synth.performance.held_out import against_itself, against_table, report
    from synth.reporting.console import problems, progress, regrets, shape_regrets

    results = []
    if against is not None:
        found: list[object] = []
        folders = readable("models", own_models)
        results = against_table(against, get_device(device), quant, flashinfer, folders, found)
        problems(found)
    else:
        for timings in load_timings(own_measurements, get_device(device).name, quant, flashinfer):
            with progress(f"evaluating {timings.origin.quant}") as step:
                results.append(against_itself(timings, by, step))
    if as_json:
        click.echo(json.dumps(report(results), indent=1))
        return
    for result in results:
        regrets(f"{result.title}: regret", result.evaluations)
        shape_regrets(f"{result.title}: the model, by shape", result.evaluations[0])
        for label in result.refused:
            click.echo(f"refused: {label} is in the model's training data, so it isn't scored as unseen")
