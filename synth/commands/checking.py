"""Will FlashInfer use a config?"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from synth.commands.options import flashinfer_option, json_option


@click.command(short_help="ask the installed FlashInfer's own lookup")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--device", help="GPU to stand for when the file doesn't name one.")
@click.option("--misses", "shown", type=click.IntRange(0), default=10, show_default=True, help="Misses to print.")
@json_option
def replay(file: Path, device: str | None, shown: int, as_json: bool) -> None:
    """Load FILE into the installed FlashInfer and ask its own lookup for every key. Exit 1 on a miss."""
    from synth.catalog.devices import get_device
    from synth.flashinfer.replay import replay as run

    report = run(file, device=get_device(device).name if device else None)
    if as_json:
        import dataclasses

        click.echo(json.dumps({**dataclasses.asdict(report), "ok": report.ok}, indent=1, default=str))
    else:
        click.echo(
            f"{file}: FlashInfer {report.flashinfer} on {report.device}: {report.keys_hit} of {report.keys} keys and "
            f"{report.hits} of {report.lookups} lookups hit"
        )
        for note in report.notes:
            click.echo(f"note: {note}")
        for miss in report.misses[:shown]:
            click.echo(f"miss: {miss.key}: {miss.reason}")
        if len(report.misses) > shown:
            click.echo(f"{len(report.misses) - shown} more misses; --misses N shows more")
    sys.exit(0 if report.ok else 1)


@click.command(short_help="what FlashInfer will not use of a config, and why")
@click.argument("file", type=click.Path(path_type=Path))
@flashinfer_option
@click.option("--device", help="GPU to check for when the file doesn't name one.")
@json_option
def check(file: Path, flashinfer: str, device: str | None, as_json: bool) -> None:
    """Say what this FlashInfer will not use of FILE, and why. Exit 1 when something is found."""
    import dataclasses

    from synth.catalog.devices import get_device
    from synth.flashinfer.checking import check as run
    from synth.flashinfer.checking import summary

    findings = run(file, flashinfer, device=get_device(device).name if device else None)
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(f) for f in findings], indent=1))
    elif not findings:
        click.echo(f"{file}: nothing found; FlashInfer {flashinfer} can use every entry")
    else:
        for group in summary(findings):
            more = f" ({group.count} of these)" if group.count > 1 else ""
            where = f" [{group.example.key}]" if group.example.key else ""
            click.echo(f"{group.severity}: {group.code}{more}: {group.example.message}{where}; {group.example.way_out}")
    sys.exit(1 if any(f.severity != "note" for f in findings) else 0)
