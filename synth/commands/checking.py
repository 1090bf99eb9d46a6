"""Will FlashInfer use a config, and how do two of them differ?"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from synth.commands.options import flashinfer_option, folders, json_option

if TYPE_CHECKING:
    from synth.checking.diff import Comparison
    from synth.checking.entries import Denied
    from synth.checking.findings import Finding
    from synth.performance.model import PerformanceModel
    from synth.timings.table import Timings


@click.command(short_help="ask the installed FlashInfer's own lookup")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--device", help="GPU to stand for when the file doesn't name one.")
@click.option("--misses", "shown", type=click.IntRange(0), default=10, show_default=True, help="Misses to print.")
@json_option
def replay(file: Path, device: str | None, shown: int, as_json: bool) -> None:
    """Load FILE into the installed FlashInfer and ask its own lookup for every key. Exit 1 on a miss."""
    from synth.catalog.devices import get_device
    from synth.catalog.untrusted import printable
    from synth.gpu.replay import replay as run

    report = run(file, device=get_device(device).name if device else None)
    if as_json:
        import dataclasses

        click.echo(json.dumps({**dataclasses.asdict(report), "ok": report.ok}, indent=1, default=str))
    else:
        click.echo(
            printable(
                f"{file}: FlashInfer {report.flashinfer} on {report.device}: {report.keys_hit} of {report.keys} keys "
                f"and {report.hits} of {report.lookups} lookups hit"
            )
        )
        for note in report.notes:
            click.echo(printable(f"note: {note}"))
        for miss in report.misses[:shown]:
            click.echo(printable(f"miss: {miss.key}: {miss.reason}"))
        if len(report.misses) > shown:
            click.echo(f"{len(report.misses) - shown} more misses; --misses N shows more")
    sys.exit(0 if report.ok else 1)


@click.command(short_help="what FlashInfer will not use of configs, and why")
@click.argument("files", type=click.Path(path_type=Path), nargs=-1, required=True)
@flashinfer_option
@click.option("--device", help="GPU to check for when the file doesn't name one.")
@click.option(
    "--max-tokens",
    type=click.IntRange(1, 1 << 20),
    multiple=True,
    help="Maximum token count of a server: are its token counts covered? May be repeated.  [default: every bucket]",
)
@click.option(
    "--measurements",
    "own_measurements",
    type=click.Path(path_type=Path),
    envvar="SYNTH_MEASUREMENTS",
    help="Folder of your own timings, beside which synth verify remembers tactics that gave wrong numbers.",
)
@json_option
def check(
    files: tuple[Path, ...],
    flashinfer: str,
    device: str | None,
    max_tokens: tuple[int, ...],
    own_measurements: Path | None,
    as_json: bool,
) -> None:
    """Say what this FlashInfer will not use of FILES, and why. Exit 1 when something is found.

    A file is a JSON config, a bundled .py, or the folder of a managed store. Several files for one GPU and FlashInfer
    version are compared with each other too, as those of the ranks of one server have to be equal.
    """
    import dataclasses

    from synth.catalog.devices import get_device
    from synth.checking.check import check_files

    name = get_device(device).name if device else None
    found = check_files(
        files,
        flashinfer,
        device=name,
        max_tokens=max_tokens,
        denied=lambda gpu, arch: _denied(gpu, arch, flashinfer, own_measurements),
    )
    if as_json:
        rows = [{"file": str(file), **dataclasses.asdict(f)} for file, findings in found.items() for f in findings]
        click.echo(json.dumps(rows, indent=1))
    else:
        for file, findings in found.items():
            _print_findings(file, findings, flashinfer, named=len(found) > 1)
    bad = any(f.severity != "note" for findings in found.values() for f in findings)
    sys.exit(1 if bad else 0)


def _print_findings(file: Path, findings: Sequence[Finding], flashinfer: str, *, named: bool) -> None:
    from synth.catalog.untrusted import printable
    from synth.checking.findings import summary

    if not findings:
        click.echo(f"{file}: nothing found; FlashInfer {flashinfer} can use every entry")
    elif named:
        click.echo(f"{file}:")
    for group in summary(findings):
        more = f" ({group.count} of these)" if group.count > 1 else ""
        where = f" [{printable(group.example.key)}]" if group.example.key else ""
        click.echo(f"{group.severity}: {group.code}{more}: {group.example.message}{where}; {group.example.way_out}")


def _denied(gpu: str, arch: str, flashinfer: str, own_measurements: Path | None) -> Denied:
    """Return the tactics that gave wrong numbers on a device, by quantization."""
    from synth.catalog.paths import readable
    from synth.catalog.schemes import QUANTS
    from synth.timings.origin import Origin
    from synth.timings.records import DENIED

    roots = readable("measurements", own_measurements)
    return {quant: DENIED.load(roots, Origin.make(gpu, arch, quant, flashinfer)) for quant in QUANTS}


@click.command(short_help="which entries of two configs differ, and by how much time")
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@flashinfer_option
@click.option("--device", help="GPU of a file that doesn't name one.")
@click.option("--entries", "shown", type=click.IntRange(0), default=10, show_default=True, help="Entries to print.")
@folders
@json_option
def diff(
    a: Path,
    b: Path,
    flashinfer: str,
    device: str | None,
    shown: int,
    own_measurements: Path | None,
    own_models: Path | None,
    as_json: bool,
) -> None:
    """Say which entries of two configs differ, and by how much time. Exit 1 when some do.

    Files of different FlashInfer versions are compared by what their tactics are. --flashinfer is the version of a
    file that names none. Times are those that the files state, and where there are any, of your timings and models.
    """
    from synth.catalog.devices import get_device
    from synth.checking.diff import compare, record, with_times

    found = compare(a, b, flashinfer=flashinfer, device=get_device(device).name if device else None)
    if found.differing:
        found = with_times(found, *_times(found, own_measurements, own_models))
    if as_json:
        click.echo(json.dumps(record(found), indent=1))
    else:
        _print_comparison(found, shown)
    sys.exit(0 if found.equal else 1)


def _times(
    found: Comparison, own_measurements: Path | None, own_models: Path | None
) -> tuple[dict[str, PerformanceModel], dict[str, Timings]]:
    """Return models and timings of the device that two files are for, by quantization; none for two devices."""
    from synth.catalog.paths import find_model, readable
    from synth.flashinfer.tactics import DEFAULT_FLASHINFER
    from synth.performance.model import PerformanceModel
    from synth.timings.folders import load
    from synth.timings.rows import Problem

    device = found.a.device
    if device is None or found.b.device != device:
        return {}, {}
    model_folders, timing_folders = readable("models", own_models), readable("measurements", own_measurements)
    models: dict[str, PerformanceModel] = {}
    timings: dict[str, Timings] = {}
    problems: list[Problem] = []
    for quant in sorted({pair.quant for pair in found.differing if pair.quant}):
        for version in dict.fromkeys([found.a.flashinfer, found.b.flashinfer, DEFAULT_FLASHINFER]):
            path = find_model(model_folders, device, quant, version)
            if path is not None and quant not in models:
                models[quant] = PerformanceModel.load(path, device=device, quant=quant, flashinfer=version)
            if quant not in timings:
                tables = load(timing_folders, device, quant, version, problems=problems)
                # One timing policy: times of different ones don't compare.
                timings |= {t.origin.quant: t for t in tables[:1] if not t.origin.simulated}
    return models, timings


def _print_comparison(found: Comparison, shown: int) -> None:
    from synth.catalog.untrusted import printable
    from synth.catalog.untrusted import shown as quoted
    from synth.checking.diff import NEAR_TIE, drift, summarize, title
    from synth.reporting.console import table

    for name, side in (("A", found.a), ("B", found.b)):
        how = " by the form of its keys" if side.guessed else ""
        skipped = f", {side.malformed} malformed ones left out" if side.malformed else ""
        version = f"FlashInfer {side.flashinfer}{how}" if side.flashinfer else "an unknown FlashInfer"
        click.echo(printable(f"{name}: {side.path}: {side.entries} entries for {side.device} under {version}{skipped}"))
    for field, first, second in found.metadata:
        click.echo(f"{printable(field)}: {quoted(first, 200)} in A, {quoted(second, 200)} in B")
    same = sum(pair.same is True for pair in found.pairs)
    click.echo(
        f"{same} entries have the same tactic, {len(found.differing)} another one; {len(found.only_a)} are only in A, "
        f"{len(found.only_b)} only in B"
    )
    if found.unknown:
        click.echo(f"{len(found.unknown)} can't be compared: what their ids mean isn't known for both versions")
    rows = [
        [
            s.quant or "?", s.stage or "?", s.source, " / ".join(dict.fromkeys(s.kinds)), s.count, s.near_ties,
            f"{s.geomean:.4f}", f"{s.least:.3f}", f"{s.most:.3f}",
        ]
        for s in summarize(found)
    ]  # fmt: skip
    if rows:
        columns = [
            "quant",
            "stage",
            "times",
            "which are",
            "entries",
            f"within {NEAR_TIE:.0%}",
            "geomean",
            "least",
            "most",
        ]
        table("B's time over A's, where the tactics differ", columns, rows)
    if found.differing and not rows:
        click.echo("no times: neither the files nor timings or models of this GPU know these tactics")
    apart = drift(found)
    if apart is not None and found.differing:
        click.echo(
            f"where both have the same tactic ({apart[0]} entries), the files' own times are {apart[2]:.2%} apart in "
            f"the median, B's {apart[1]:.4f} of A's in the geometric mean"
        )
    worst = sorted(found.differing, key=lambda pair: -max([abs(1.0 - t.ratio) for t in pair.times], default=0.0))
    for pair in worst[:shown]:
        sides = [f"{one.tactic_id} ({one.tactic or 'unknown'})" for one in (pair.a, pair.b)]
        times = ", ".join(f"{t.source} {t.a_ms:.4g} -> {t.b_ms:.4g} ms ({t.ratio:.3f})" for t in pair.times)
        click.echo(f"{title(pair)}: {sides[0]} -> {sides[1]}{f'; {times}' if times else ''}")
    if len(worst) > shown:
        click.echo(f"{len(worst) - shown} more; --entries N shows more")
    for name, keys in (("A", found.only_a), ("B", found.only_b)):
        for key in keys[:shown]:
            click.echo(f"only in {name}: {printable(key)}")
        if len(keys) > shown:
            click.echo(f"only in {name}: {len(keys) - shown} more")
