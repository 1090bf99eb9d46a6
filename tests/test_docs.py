from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from synth.catalog.devices import find_devices, get_device, load_devices
from synth.catalog.shapes import MoEShape
from synth.choosing.emission import config_name
from synth.cli import SECTIONS, main
from synth.configs.sidecar import sidecar_path
from synth.timings.origin import Origin

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
INDEX = ROOT / "docs" / "README.md"
PAGES = sorted([README, *(ROOT / "docs").glob("*.md")])
#: Two pages are called README.md.
IDS = [page.relative_to(ROOT).as_posix() for page in PAGES]
PAGE = ROOT / "docs" / "rtx-pro-6000.md"
SERVER = "NVIDIA RTX PRO 6000 Blackwell Server Edition"


def blocks(page: Path, language: str = "") -> list[str]:
    """Return the fenced blocks of a page in this language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def words(line: str) -> list[str]:
    """Split a command line as a shell does; a bare variable, which stands for several options, is dropped."""
    return shlex.split(re.sub(r"(?<=\s)\$[A-Z]\b", "", line), comments=True)


def commands(page: Path) -> list[tuple[str, list[str]]]:
    """Return each ``synth …`` of a page's blocks and code spans, with its arguments."""
    text = page.read_text()
    lines = [line.removeprefix("$ ") for block in blocks(page) for line in block.splitlines()]
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))
    found = []
    for line in [*lines, *spans]:
        if line == "synth" or line.startswith("synth "):
            found.append((line, words(line)[1:]))
    return found


def parse(arguments: list[str]) -> None:
    """Parse the arguments as the command line does, without running anything."""
    command: click.Command = main
    rest = list(arguments)
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        name = rest.pop(0)
        assert name in command.commands, f"no command {name!r}; there are {', '.join(command.commands)}"
        command = command.commands[name]
    try:
        # A copy, since click takes what it has read out of the list.
        command.make_context(command.name, list(rest))
    except click.exceptions.Exit:
        # --help
        pass
    except (click.MissingParameter, click.exceptions.NoArgsIsHelpError):
        # A command may be mentioned by its name alone.
        assert not rest, f"something is missing from {arguments}"


def emit_line() -> list[str]:
    """Return the arguments of the page's first ``synth emit`` that names a device."""
    return next(found for _, found in commands(PAGE) if found[:1] == ["emit"] and "--device" in found)


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_command_of_a_page_parses(page: Path) -> None:
    found = commands(page)
    # The index says what pages answer, the page of the API what Python is told: neither quotes commands.
    assert len(found) > 5 or (page.name in ("api.md", INDEX.name) and page.parent == INDEX.parent)
    for line, arguments in found:
        try:
            parse(arguments)
        except click.UsageError as e:
            pytest.fail(f"{page.name}: {line}: {e.format_message()}")


@pytest.mark.parametrize(
    "arguments", [["emit", "--devize", "x"], ["collect", "--quant", "fp5"], ["fit", "--device"], ["emit", "--tp", "8"]]
)
def test_a_command_that_does_not_parse_is_found(arguments: list[str]) -> None:
    with pytest.raises((click.UsageError, AssertionError)):
        parse(arguments)


def test_a_command_that_does_not_exist_is_found() -> None:
    with pytest.raises(AssertionError, match="no command 'prot'"):
        parse(["prot", "x.json"])


def test_the_reference_is_what_the_commands_say() -> None:
    spec = importlib.util.spec_from_file_location("make_cli", ROOT / "docs" / "make_cli.py")
    assert spec is not None and spec.loader is not None
    make_cli = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_cli)
    assert make_cli.PAGE.read_text(encoding="utf-8") == make_cli.reference(), "run `make docs`"
    assert {f"## synth {c.name}" for commands in SECTIONS.values() for c in commands} <= set(
        make_cli.reference().splitlines()
    )


def test_the_readme_has_every_command_in_its_table() -> None:
    section = README.read_text().split("\n## Commands\n")[1].split("\n## ")[0]
    rows = [row.strip("| ").split(" | ") for row in section.splitlines() if "`synth " in row and row.startswith("|")]
    named = {title: re.findall(r"`(?:synth )?([a-z]+)`", cells) for title, cells in rows}
    assert named == {title: [str(c.name) for c in commands] for title, commands in SECTIONS.items()}


def test_the_page_of_commands_has_a_section_for_each() -> None:
    titles = re.findall(r"^## (.*)$", (ROOT / "docs" / "commands.md").read_text(), re.MULTILINE)
    named = [name for title in titles for name in re.findall(r"\w+", title.replace(" and ", " "))]
    assert sorted(named) == sorted(str(c.name) for commands in SECTIONS.values() for c in commands)


def test_the_readme_can_be_read_at_one_go() -> None:
    assert len(README.read_text().split()) <= 1500


def test_the_first_screen_of_the_readme_says_whether_what_how_and_how_back() -> None:
    screen = "\n".join(README.read_text().splitlines()[:60])
    marks = (
        "## Do you need it?",
        "## What you get",
        "## Three ways",
        "**Serve now.**",
        "**Tune your own card.**",
        "**Contribute",
        "**Undo.**",
    )
    assert sorted(marks, key=screen.index) == list(marks)
    # Each of the three has three commands.
    assert [block.count("synth ") for block in re.findall(r"^```\n(.*?)^```$", screen, re.M | re.S)] == [3, 3, 3]


def test_every_page_is_listed_in_the_index() -> None:
    listed = re.findall(r"^\| \[(.*?)\]\(\1\) \|", INDEX.read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(page.name for page in PAGES if page.parent == INDEX.parent and page != INDEX)


def anchors(page: Path) -> set[str]:
    """Return the anchors that a page's headings have, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_relative_link_of_a_page_leads_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link}"
        assert target.is_relative_to(ROOT), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link}"


def named_files(page: Path) -> Iterator[str]:
    """Yield what a page names in its blocks and code spans that looks like a file or folder of the checkout."""
    text = page.read_text()
    code = [*blocks(page), *re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S))]
    for piece in code:
        for path in re.findall(r"(?<![\w./~-])(?:synth|tests|docs|\.ci)/[\w./-]*", piece):
            # A name in capitals stands for any.
            if not re.search(r"[A-Z]{3}", path):
                yield path


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_file_that_a_page_names_is_there(page: Path) -> None:
    assert [path for path in named_files(page) if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_script_that_a_page_runs_is_there_and_has_its_options(page: Path) -> None:
    text = page.read_text()
    code = "\n".join([*blocks(page), *re.findall(r"`([^`\n]+)`", text)])
    for script, rest in re.findall(r"(?<![\w/])(benchmarks/\w+\.py)(.*)", code):
        assert (ROOT / script).is_file(), script
        # Those that several scripts share are given to them by a module of theirs.
        source = "\n".join(p.read_text() for p in [ROOT / script, *(ROOT / "benchmarks" / "studies").glob("*.py")])
        options = [word for word in shlex.split(rest, comments=True) if word.startswith("--")]
        assert [option for option in options if f'"{option}"' not in source] == [], script


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_modules_that_a_page_names_by_their_room_are_there(page: Path) -> None:
    rooms = "|".join(p.name for p in (ROOT / "synth").iterdir() if p.is_dir() and p.name.isidentifier())
    named = re.findall(rf"`((?:{rooms})/[\w./]+)`", page.read_text())
    assert [path for path in named if not (ROOT / "synth" / path).exists()] == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_installed_command_completes_as_the_readme_says(shell: str) -> None:
    assert f"_SYNTH_COMPLETE={shell}_source synth" in README.read_text()
    program = shutil.which("synth", path=Path(sys.executable).parent)
    if program is None:
        pytest.skip("synth isn't installed here")

    def run(variables: dict[str, str]) -> str:
        done = subprocess.run([program], capture_output=True, text=True, env=os.environ | variables)
        assert done.returncode == 0, done.stderr
        return done.stdout

    script = run({"_SYNTH_COMPLETE": f"{shell}_source"})
    assert f"_SYNTH_COMPLETE={shell}_complete" in script
    # bash and zsh count the words; fish gives the word that stands there.
    at = "em" if shell == "fish" else "1"
    offered = run({"_SYNTH_COMPLETE": f"{shell}_complete", "COMP_WORDS": "synth em", "COMP_CWORD": at})
    assert re.findall(r"\w+", offered)[:2] == ["plain", "emit"]


def test_help_lists_every_command_under_its_section_in_one_line() -> None:
    text = CliRunner().invoke(main, ["--help"]).output
    at = 0
    for title, group in SECTIONS.items():
        at = text.index(f"{title}:\n", at)
        for command in group:
            assert command.short_help and command is main.commands[str(command.name)]
            at = text.index(f"  {command.name}", at)
            assert text[at:].splitlines()[0].endswith(command.short_help)


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_devices_of_a_page_are_known(page: Path) -> None:
    text = page.read_text()
    named = [a[a.index("--device") + 1] for _, a in commands(page) if "--device" in a]
    for name in [*named, *re.findall(r'^D="([^"]+)"', text, re.MULTILINE)]:
        if not name.startswith(("$", "NAME")):
            found = find_devices(name)
            # The whole name of one, or what several have in common.
            assert len(found) > 1 or found[0].name == name


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_config_names_of_a_page_are_those_that_emit_writes(page: Path) -> None:
    configs = [Path(config_name(device)) for device in load_devices()]
    known = {p.name for config in configs for p in (config, sidecar_path(config))}
    # All but the two that stand for any device.
    named = set(re.findall(r"\bsynth-[\w.-]+\.json\b", page.read_text())) - {"synth-DEVICE.json"}
    assert named <= known


def test_the_page_names_the_files_of_its_own_emit_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("measurements", "models"):
        (tmp_path / kind).mkdir()
        monkeypatch.setenv(f"SYNTH_{kind.upper()}", str(tmp_path / kind))
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, emit_line())
    assert done.exit_code == 0, done.output
    named = set(re.findall(r"^configs/\S+$", PAGE.read_text(), re.MULTILINE))
    assert named == {p.relative_to(tmp_path).as_posix() for p in (tmp_path / "configs").iterdir()}
    assert len(named) == 2


def test_the_command_that_emit_proposes_is_the_one_of_the_page() -> None:
    proposed = re.search(r"To measure, on such a GPU: (.*)$", PAGE.read_text(), re.MULTILINE)
    assert proposed is not None
    assert words(proposed[1])[1:] in [arguments for _, arguments in commands(PAGE)]


def test_the_measurements_file_of_the_page_is_where_timings_go() -> None:
    device = get_device(SERVER)
    origin = Origin(device.name, device.tactics_arch, "nvfp4", "0.7.4", "{}")
    shape = MoEShape(hidden=6144, inter=256, experts=256, top_k=8)
    path = f"measurements/{origin.folder(Path()).as_posix()}/{shape}.csv.gz"
    assert PAGE.read_text().count(path) == 2


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_environment_variables_of_a_page_are_known(page: Path) -> None:
    sources = list((ROOT / "synth").rglob("*.py"))
    if (spec := find_spec("flashinfer")) is not None and spec.origin is not None:
        sources.append(Path(spec.origin).parent / "jit" / "core.py")
    else:
        pytest.skip("FlashInfer isn't installed, so its variables can't be looked up")
    known = "\n".join(source.read_text() for source in sources)
    named = set(re.findall(r"[`$]((?:SYNTH|FLASHINFER|VLLM|SGLANG)_[A-Z0-9_]+)(?=[`=/])", page.read_text()))
    assert named or page != PAGE
    assert [name for name in sorted(named) if not re.search(rf"\b{name}\b", known)] == []


def test_log_lines_of_the_page_are_those_of_the_installed_flashinfer() -> None:
    spec = find_spec("flashinfer")
    if spec is None or spec.origin is None:
        pytest.skip("FlashInfer isn't installed")
    source = (Path(spec.origin).parent / "autotuner" / "autotuner.py").read_text()
    # Adjacent literals make one text.
    source = re.sub(r'"\s*\n\s*f?"', "", source)
    page = PAGE.read_text()
    for pattern in (
        "[Autotuner]: Loaded ",
        "[Autotuner]: Config cache hit for ",
        "source=config file)",
        "was created in a different environment (",
        "Ignoring cached configs.",
        "[AutoTuner]: No tuned config covers ",
        "falling back to runner=",
        "generated key",
    ):
        assert pattern in page
        assert pattern in source
