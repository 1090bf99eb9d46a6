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
    from synth.choosing.learning import workers
    from synth.performance.fitting import fit as fit_one
    from synth.performance.fitting import save
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
@click.option(
    "--evidence",
    type=click.Path(path_type=Path),
    help="Judge the analytical models by a folder of public measurements that they have not seen.",
)
@click.option("--transfer", is_flag=True, help="What one quantization's model says of the other's kernels.")
@click.option("--quick", is_flag=True, help="Without timings only: no sweeps are replayed.")
@click.option(
    "--seeds",
    type=click.IntRange(1),
    default=2,
    show_default=True,
    help="How often ways of choosing cells that have chance in them are tried.",
)
@click.option("--learning-curve", is_flag=True, help="Plot what timings are worth and how true probabilities are.")
@click.option(
    "--plots",
    type=click.Path(path_type=Path),
    default="synth-plots",
    show_default=True,
    help="Folder for the plots of --learning-curve.",
)
@flashinfer_option
@json_option
@folders
def evaluate(
    device: str,
    quant: str | None,
    by: str,
    against: Path | None,
    evidence: Path | None,
    transfer: bool,
    quick: bool,
    seeds: int,
    learning_curve: bool,
    plots: Path,
    flashinfer: str,
    as_json: bool,
    own_measurements: Path | None,
    own_models: Path | None,
) -> None:
    """Measure on shapes held out: the regret of the choices, what timings are worth, how true the doubt is."""
    from synth.catalog.devices import get_device
    from synth.catalog.paths import readable
    from synth.choosing.evaluating import against_table, held_out, plot, report
    from synth.reporting.console import problems, progress, regrets, shape_regrets, study

    if (against is not None) + (evidence is not None) + transfer > 1:
        raise SynthError("give one of --against, --evidence and --transfer")
    if evidence is not None or transfer:
        _evaluate_analytical(evidence, device, flashinfer, as_json, own_measurements)
        return
    if learning_curve and (quick or against is not None):
        raise SynthError("--learning-curve needs the sweeps replayed; leave out --quick and --against")
    if learning_curve:
        from synth.choosing.plotting import check

        check()
    results = []
    if against is not None:
        found: list[object] = []
        results = against_table(
            against, get_device(device), quant, flashinfer, readable("models", own_models), problems=found
        )
        problems(found)
    else:
        for timings in load_timings(own_measurements, get_device(device).name, quant, flashinfer):
            with progress(f"evaluating {timings.origin.quant}") as step:
                results.append(held_out(timings, by, step, quick=quick, seeds=seeds))
    files = plot(results, plots) if learning_curve else []
    if as_json:
        click.echo(json.dumps(report(results), indent=1))
        return
    for result in results:
        regrets(f"{result.title}: regret", result.evaluations)
        shape_regrets(f"{result.title}: the model, by shape", result.evaluations[0])
        for label in result.refused:
            click.echo(f"refused: {label} is in the model's training data, so it isn't scored as unseen")
        if result.study is not None:
            study(result.title, result.study)
        elif not quick and against is None:
            click.echo(f"{result.title}: no shape was swept, so there is nothing to replay")
    for file in files:
        click.echo(f"-> {file}")


def _evaluate_analytical(
    evidence: Path | None, device: str, flashinfer: str, as_json: bool, own_measurements: Path | None
) -> None:
    """Print how good analytical models are: by public measurements, or carried over between quantizations."""
    import dataclasses

    from synth.catalog.devices import get_device
    from synth.reporting.console import evidence_tables, progress, transfer_tables

    if evidence is not None:
        from synth.choosing.evidence import evaluate as judge

        with progress("fitting halves") as report:
            found = judge(evidence, report)
        if as_json:
            click.echo(json.dumps(dataclasses.asdict(found), indent=1))
        else:
            evidence_tables(found)
        return
    from synth.choosing.transferring import transfers

    tables = load_timings(own_measurements, get_device(device).name, None, flashinfer)
    if len(tables) < 2:
        raise SynthError(f"--transfer needs timings of two quantizations, and {device} has those of {len(tables)}")
    with progress("carrying over") as report:
        scores = transfers(tables, report)
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(s) for s in scores], indent=1))
    else:
        transfer_tables(scores)
