"""What is known: devices, models, tactics."""

from __future__ import annotations

import json

import click

from synth.catalog.schemes import QUANTS
from synth.commands.options import flashinfer_option, json_option
from synth.errors import SynthError


@click.command(short_help="GPUs, under the names that torch reports")
@json_option
def devices(as_json: bool) -> None:
    """List the known GPUs, under the names that torch reports."""
    from synth.catalog.devices import load_devices

    rows = [
        {"name": d.name, "arch": d.arch, "sms": d.sms, "l2_mb": d.l2_mb, "dram_gbs": d.dram_gbs, "tflops": d.tflops}
        for d in load_devices()
    ]
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return
    from synth.reporting.console import table

    columns = ["name", "arch", "SMs", "L2 MB", "GB/s", "dense TFLOPS"]
    peaks = [" ".join(f"{q} {v:g}" for q, v in d.tflops.items()) for d in load_devices()]
    table("Devices", columns, [[*list(r.values())[:5], peak] for r, peak in zip(rows, peaks, strict=True)])


@click.command(short_help="public MoE models of the catalogue")
@json_option
def models(as_json: bool) -> None:
    """List the public MoE models of the catalogue."""
    import dataclasses

    from synth.catalog.models import load_models

    if as_json:
        click.echo(json.dumps([dataclasses.asdict(m) for m in load_models()], indent=1))
        return
    from synth.reporting.console import table

    table(
        "Models",
        ["name", "hidden", "inter", "experts", "top_k", "activation", "quantizations", "tp x ep"],
        [
            [
                m.name, m.hidden, m.inter, m.experts, m.top_k, m.activation, " ".join(m.quants),
                " ".join(f"{tp}x{ep}" for tp, ep in m.deployments),
            ]
            for m in load_models()
        ],
    )  # fmt: skip


@click.command(short_help="FlashInfer's tactics: what each id is")
@flashinfer_option
@click.option("--arch", help="For example sm90.")
@click.option("--quant", type=click.Choice(QUANTS))
@json_option
def tactics(flashinfer: str, arch: str | None, quant: str | None, as_json: bool) -> None:
    """List FlashInfer's tactics: what each id is."""
    from synth.catalog.schemes import STAGES
    from synth.flashinfer.tactics import load_tables

    tables = [t for t in load_tables(flashinfer) if arch in (None, t.arch) and quant in (None, t.quant)]
    if not tables:
        raise SynthError(f"no tactics known for --arch {arch} --quant {quant}; leave one out to see what there is")
    rows = [
        {"arch": t.arch, "quant": t.quant, "stage": stage, "id": i, "tactic": str(tactic)}
        for t in tables
        for stage in STAGES
        for i, tactic in t.items(stage)
    ]
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return
    from synth.reporting.console import table

    table(f"Tactics of FlashInfer {flashinfer}", list(rows[0]), [list(r.values()) for r in rows])
