"""The command line: what `synth` alone prints, its errors, and the order of the commands."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NoReturn

import click

from synth import __version__
from synth.catalog.untrusted import printable
from synth.commands import (
    catalogue,
    checking,
    contributing,
    emitting,
    installing,
    measuring,
    modelling,
    porting,
    reporting,
)
from synth.errors import SynthError

#: Every command, in the order in which people use them.
SECTIONS: dict[str, tuple[click.Command, ...]] = {
    "What is known": (catalogue.devices, catalogue.models, catalogue.tactics),
    "Time kernels, on a GPU": (measuring.collect, measuring.measurements),
    "Learn from timings": (modelling.fit, modelling.evaluate),
    "Write a config": (emitting.emit, porting.port),
    "Trust it": (checking.check, checking.replay, measuring.verify, checking.diff, reporting.report),
    "Use it, and share it": (installing.install, contributing.contribute),
}


class _Group(click.Group):
    """Lists the commands by section; prints a :class:`SynthError`, or wrong usage, as one line and exits with 2."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [str(command.name) for commands in SECTIONS.values() for command in commands]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        room = formatter.width - 6 - max(map(len, self.list_commands(ctx)))
        for title, commands in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(str(c.name), c.get_short_help_str(room)) for c in commands])

    def main(self, *args: Any, **extra: Any) -> Any:
        run: Callable[..., Any] = super().main
        if not extra.pop("standalone_mode", True):
            return run(*args, standalone_mode=False, **extra)
        try:
            code = run(*args, standalone_mode=False, **extra)
        except click.exceptions.NoArgsIsHelpError as e:
            e.show()
            sys.exit(2)
        except click.UsageError as e:
            command = e.ctx.command_path if e.ctx is not None else "synth"
            _fail(f"{e.format_message().rstrip('.')}; `{command} --help` lists what there is")
        except click.ClickException as e:
            _fail(e.format_message())
        except click.Abort:
            click.echo("interrupted", err=True)
            sys.exit(130)
        sys.exit(code if isinstance(code, int) else 0)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except SynthError as e:
            _fail(str(e))
        except BrokenPipeError:
            sys.stderr.close()
            sys.exit(1)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            sys.exit(130)


def _fail(message: str) -> NoReturn:
    click.echo(f"error: {printable(' '.join(message.split()))}", err=True)
    sys.exit(2)


_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


@click.group(cls=_Group, context_settings=_SETTINGS)
@click.version_option(__version__, prog_name="synth")
def main() -> None:
    """Tuning configs for FlashInfer's MoE kernels, from a few real timings.

    \b
    synth fit                           fit the shipped timings (and your own) into models
    synth emit --device "NVIDIA H200"   write the config that FlashInfer loads
    """


for _commands in SECTIONS.values():
    for _command in _commands:
        # Not by inheritance alone: click keeps the help option of the first call, which may be one without `main`.
        _command.context_settings = _SETTINGS
        main.add_command(_command)
