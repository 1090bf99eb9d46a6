"""A config for another FlashInfer version."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from synth.commands.options import layer_options, wanted_layers
from synth.errors import SynthError


@click.command(short_help="rewrite a config for another FlashInfer version")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--to", required=True, help="FlashInfer version that is to use it, for example 0.7.2.post1.")
@click.option("-o", "--output", type=click.Path(), required=True, help="File, or a folder for one of the usual name.")
@click.option("--from", "source", help="FlashInfer version it was tuned under.  [default: the file's]")
@click.option("--device", help="GPU it was tuned on.  [default: the file's]")
@click.option(
    "--format",
    "file_format",
    type=click.Choice(["json", "bundled"]),
    help="[default: bundled for a .py, else json]",
)
@layer_options
def port(
    file: Path, to: str, output: str, source: str | None, device: str | None, file_format: str | None, **layer: Any
) -> None:
    """Rewrite FILE (v1 JSON, a bundled .py, or a managed store's folder) for another FlashInfer version.

    Each entry keeps its tactic by what it is; key form, ranks, ids and metadata become those of the other version. What
    doesn't exist there is dropped and counted.

    Keys of FlashInfer up to 0.6.17 name neither dtypes nor sizes. They are read as those of the catalogue's layers that
    have the same shapes; --model, --config or --hidden … and --quant say which layers the file is for.
    """
    from synth.catalog.devices import get_device
    from synth.catalog.schemes import QUANTS
    from synth.choosing.emission import output_paths, write
    from synth.configs.porting import REASONS
    from synth.configs.porting import port as run
    from synth.configs.reading import read
    from synth.flashinfer.versions import contract_for

    contract_for(to)
    config = read(file)
    file_format = file_format or ("bundled" if output.endswith(".py") else "json")
    ported = run(
        config,
        to,
        source=source,
        device=get_device(device).name if device else None,
        layers=wanted_layers(QUANTS, **layer),
        file_format=file_format,
    )
    (path,) = output_paths([get_device(ported.device)], output, file_format)
    if path.exists() and path.samefile(file):
        raise SynthError(f"-o {output} is the file that is read; name another one")
    write([ported], [path])
    click.echo(f"{path}: {ported.entries} entries for FlashInfer {to}, from {len(config.entries)} for {ported.source}")
    for reason, count in ported.dropped.items():
        click.echo(f"dropped {count}: {REASONS[reason]}")
    click.echo(f"next: synth check {path} --flashinfer {to}")
