"""How a study is run as a script: its options, its timings, and errors as one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from synth.catalog.devices import get_device
from synth.catalog.schemes import QUANTS
from synth.commands.options import flashinfer_option, load_timings
from synth.errors import SynthError
from synth.timings.table import Timings

F = TypeVar("F", bound=Callable[..., Any])


class _Refused(click.ClickException):
    exit_code = 2


class Script(click.Command):
    """A command whose :class:`SynthError` is one line on standard error, and exit code 2, as `synth` has it."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run it."""
        try:
            return super().invoke(ctx)
        except SynthError as e:
            raise _Refused(" ".join(str(e).split())) from None


def timings_options(command: F) -> F:
    """Add the options that say whose timings are looked at; see :func:`tables_of`."""
    command = click.option(
        "--measurements",
        "own_measurements",
        type=click.Path(path_type=Path),
        envvar="SYNTH_MEASUREMENTS",
        help="Folder of your own timings, read beside the shipped ones.",
    )(command)
    command = flashinfer_option(command)
    return click.option("--device", default="NVIDIA H200", show_default=True)(command)


quant_option = click.option("--quant", type=click.Choice(QUANTS), help="Only this quantization.")
by_option = click.option(
    "--by", type=click.Choice(["family", "shape"]), default="family", show_default=True, help="Hold out by."
)
plots_option = click.option(
    "--plots", type=click.Path(path_type=Path), help="Also draw, as SVG and PNG in this folder (needs matplotlib)."
)


def tables_of(device: str, quant: str | None, flashinfer: str, own_measurements: Path | None) -> list[Timings]:
    """Return the timings that the options ask for, a table a quantization."""
    return load_timings(own_measurements, get_device(device).name, quant, flashinfer)


def print_json(value: object) -> None:
    """Print plain values."""
    click.echo(json.dumps(value, indent=1))
