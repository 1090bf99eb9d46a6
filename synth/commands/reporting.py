"""What a config holds and what stands behind it, as one page."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from synth.commands.options import folders


@click.command(short_help="write one HTML page about a config")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="HTML file.  [default: FILE.html]")
@click.option("--held-out", is_flag=True, help="Compute the held-out figures anew: half a minute a quantization.")
@click.option(
    "--map-shapes",
    type=click.IntRange(1),
    default=24,
    show_default=True,
    help="Shapes of each quantization in the map of tactics; the rest are counted.",
)
@folders
def report(
    file: Path,
    output: Path | None,
    held_out: bool,
    map_shapes: int,
    own_measurements: Path | None,
    own_models: Path | None,
) -> None:
    """Write one HTML page about FILE, a config that `synth emit` wrote, with its sidecar beside it.

    The page needs no network and runs no script. It says where the entries come from, how much faster than the
    fallback they are, what the model's choices lost on shapes that it had not seen, how passes of timings differ, which
    tactic was chosen where, and which outputs were compared; and of each figure from how many entries it is, and
    whether it was measured.
    """
    from synth.catalog.files import write_atomically
    from synth.catalog.paths import readable
    from synth.errors import SynthError
    from synth.reporting import report as make
    from synth.reporting.console import problems, progress

    path = output or file.with_name(f"{file.name}.html")
    if path.is_dir():
        raise SynthError(f"can't write {path}: a folder is in its place; name a file with -o")
    if path.exists() and path.samefile(file):
        raise SynthError(f"-o {path} is the config itself; name another file")
    bad: list[Any] = []
    with ExitStack() as stack:
        held: dict[str, Any] = {}
        if held_out:
            from synth.performance.held_out import workers

            held = {
                "held_out": True,
                "progress": stack.enter_context(progress("holding families out")),
                "pool": stack.enter_context(workers()),
            }
        page = make(
            file,
            model_folders=readable("models", own_models),
            measurements=readable("measurements", own_measurements),
            map_shapes=map_shapes,
            problems=bad,
            **held,
        ).encode()
    problems(bad)
    write_atomically(path, page)
    click.echo(f"{file} -> {path}, {len(page) / 1024:.0f} KiB")
    click.echo(f"next: open {path} in a browser; it needs no network")
