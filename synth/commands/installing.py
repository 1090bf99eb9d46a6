"""Putting a config where a server looks for it."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from synth.errors import SynthError

if TYPE_CHECKING:
    from synth.servers.installation import Installation, Removal
    from synth.servers.placing import Change

#: Files that are printed, before the rest is only counted.
_SHOWN = 16


@click.command(short_help="put a config where a server looks, or take it back")
@click.argument("file", type=click.Path(path_type=Path), required=False)
@click.option("--engine", type=click.Choice(["vllm", "sglang", "flashinfer"]), required=True)
@click.option(
    "--folder",
    type=click.Path(path_type=Path),
    help="The folder that the server's log names; of FlashInfer's store, its root.  [default: the only one]",
)
@click.option("--device", help="--engine flashinfer without a GPU: the one that this environment will run on.")
@click.option("--dry-run", is_flag=True, help="Print what would be written and where, and stop.")
@click.option("--undo", is_flag=True, help="Put back what was there before; needs no FILE.")
def install(file: Path | None, engine: str, folder: Path | None, device: str | None, dry_run: bool, undo: bool) -> None:
    """Put FILE where an engine looks for it, and ask FlashInfer for every key from there. Exit 1 on a miss.

    For vLLM and SGLang the entries go into the files that a first start has made, one for each rank, and win over
    those that the server tuned; the server's other entries stay. For FlashInfer they are written into its managed
    store, by the FlashInfer that is installed here. What was there is kept in .synth-install beside it.
    """
    from synth.gpu import here
    from synth.servers import installing

    if undo:
        _print_removal(installing.uninstall(engine, folder=folder, here=here, dry_run=dry_run), dry_run)
        return
    if file is None:
        raise SynthError("name the config to install, or take the last one back with --undo")
    done = installing.install(file, engine, folder=folder, device=device, here=here, dry_run=dry_run)
    _print(done, file, dry_run)
    sys.exit(0 if done.report is None or done.report.ok else 1)


def _print(done: Installation, file: Path, dry_run: bool) -> None:
    from synth.servers.placing import KEPT

    if done.analytical:
        replaced = max((m.replaced for m in done.merged.values()), default=0)
        instead = f", and {replaced} entries take the place of what the server has tuned" if replaced else ""
        click.echo(
            f"WARNING: {done.analytical} of {done.entries} entries are ANALYTICAL: nobody has measured them{instead}. "
            "For your own use only; to measure, on such a GPU: synth collect --device-plan",
            err=True,
        )
    click.echo(f"{file}: {done.entries} entries {'would go' if dry_run else 'are'} in {done.folder}")
    # A store has a file an entry, named after a hash.
    shown = done.changes[:_SHOWN] if done.merged else ()
    for change in shown:
        merged = done.merged.get(change.name)
        what = ""
        if merged is not None and change.kind != "same":
            what = f": {merged.added} added, {merged.replaced} in place of the server's own, {merged.kept} others stay"
        click.echo(f"  {change.name}: {_words(change.kind, dry_run)}{what}")
    if len(done.changes) > len(shown):
        click.echo(f"  {len(done.changes)} files: {_counted(done.changes, dry_run)}")
    _print_copies(done.changes, "since the last install", dry_run)
    if done.is_new:
        click.echo(f"  what was there: {'would be ' if dry_run else ''}kept in {done.folder / KEPT}")
    for note in done.notes:
        click.echo(f"note: {note}")
    if done.variables is None:
        click.echo("environment: no variable makes a server look there; put the folder where it looks")
    else:
        said = [f"{k} unset" if v is None else f"{k}={v}" for k, v in done.variables.items()]
        click.echo(f"environment: {', '.join(said) or 'nothing to set'}")
    if dry_run:
        click.echo("dry run: nothing was changed")
        return
    back = f"synth install --undo --engine {done.engine}"
    place = done.folder.parents[1] if done.engine == "flashinfer" else done.folder
    click.echo(f"to take it back: {back} --folder {place}")
    if done.report is None:
        click.echo(f"not replayed: {done.not_replayed}")
        return
    r = done.report
    others = len(done.merged) - 1
    more = (
        f"; the other {'file holds' if others == 1 else f'{others} files hold'} the same entries" if others > 0 else ""
    )
    click.echo(
        f"replayed from {r.path}: FlashInfer {r.flashinfer} on {r.device}: {r.keys_hit} of {r.keys} keys and {r.hits} "
        f"of {r.lookups} lookups hit{more}"
    )
    if r.reprofiled:
        click.echo(f"note: a server that tunes would time {r.reprofiled} of the keys again")
    for miss in r.misses[:10]:
        click.echo(f"miss: {miss.key}: {miss.reason}")


def _print_removal(done: Removal, dry_run: bool) -> None:
    click.echo(f"{done.folder}: {'would be' if dry_run else 'is'} as it was before synth installed into it")
    many = len(done.changes) > _SHOWN
    for change in () if many else done.changes:
        click.echo(f"  {change.name}: {_words(change.kind, dry_run)}")
    if many:
        click.echo(f"  {len(done.changes)} files: {_counted(done.changes, dry_run)}")
    _print_copies(done.changes, "since", dry_run)
    if dry_run:
        click.echo("dry run: nothing was changed")


def _print_copies(changes: Iterable[Change], when: str, dry_run: bool) -> None:
    for change in changes:
        if change.copy:
            click.echo(
                f"  {change.name}: the server has written it {when}; that {'would be' if dry_run else 'is'} kept as "
                f"{change.copy}"
            )


def _counted(changes: Iterable[Change], dry_run: bool) -> str:
    counts = Counter(change.kind for change in changes)
    return ", ".join(f"{count} {_words(kind, dry_run)}" for kind, count in counts.items())


def _words(kind: str, dry_run: bool) -> str:
    if kind == "same":
        return "as it is already"
    return f"would be {kind}" if dry_run else kind
