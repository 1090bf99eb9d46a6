"""Write docs/cli.md, the reference of the command line, from the commands themselves.

    python docs/make_cli.py

The tests fail where the file isn't what this writes.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from synth.cli import SECTIONS, main

PAGE = Path(__file__).resolve().with_name("cli.md")


def reference() -> str:
    """Return the page."""
    lines = [
        "# Command-line reference",
        "",
        "Written by `docs/make_cli.py` from the commands themselves. Each command prints the same with `--help`.",
        "",
        "Exit codes: 0 done; 1 the check failed, or nothing was to be written; 2 bad input, in one line that says what "
        "to do; 130 interrupted.",
        "",
        "| | |",
        "|---|---|",
    ]
    for title, commands in SECTIONS.items():
        lines.append(f"| **{title}** | |")
        lines += [f"| [`synth {c.name}`](#synth-{c.name}) | {_cell(c.get_short_help_str(200))} |" for c in commands]
    root = click.Context(main, info_name="synth", **main.context_settings)
    for commands in SECTIONS.values():
        for command in commands:
            lines += _section(command, click.Context(command, parent=root, info_name=command.name))
    return "\n".join(lines) + "\n"


def _section(command: click.Command, context: click.Context) -> Iterator[str]:
    yield from ("", f"## {context.command_path}", "")
    yield from ("```", " ".join(["usage:", context.command_path, *command.collect_usage_pieces(context)]), "```", "")
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(command.help or "")):
        yield from (" ".join(paragraph.split()), "")
    options = [p for p in command.params if isinstance(p, click.Option) and not p.hidden]
    if options:
        yield from ("| option | |", "|---|---|")
        for option in options:
            names, text = option.get_help_record(context) or ("", "")
            yield f"| `{names}` | {_cell(text)} |"
        yield ""
    if isinstance(command, click.Group):
        for child in command.commands.values():
            yield from _section(child, click.Context(child, parent=context, info_name=child.name))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(reference(), encoding="utf-8")
    print(PAGE)
