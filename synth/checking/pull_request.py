"""The folder that a pull request to FlashInfer is made from: module, proof, and a description with the gains."""

from __future__ import annotations

import csv
import math
import os
import re
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from synth.catalog.schemes import QUANTS
from synth.checking.check import check, summary
from synth.checking.contribution import Contribution, Gain
from synth.configs.reading import CONTRIBUTED
from synth.configs.replayed import ReplayReport
from synth.configs.sidecar import sidecar_path
from synth.errors import SynthError


@dataclass(frozen=True)
class LayerTime:
    """Times in ms of one whole layer at one token count: as ``benchmarks/layer.py`` measures them.

    Attributes
    ----------
    layer, quant : str
    tokens : int
    fallback_ms, ms : float
    autotuned_ms : float or None
    """

    layer: str
    quant: str
    tokens: int
    fallback_ms: float
    autotuned_ms: float | None
    ms: float


def read_layer_times(path: Path) -> list[LayerTime]:
    """Read what ``benchmarks/layer.py --out`` writes.

    Raises
    ------
    SynthError
        When it can't be read, or lacks the fallback or the entries' own time of a layer.
    """
    cells: dict[tuple[str, str, int], dict[str, float]] = {}
    row = 1
    try:
        with path.open(newline="", encoding="utf-8") as f:
            for line in csv.DictReader(f):
                row += 1
                ms = float(line["ms"])
                if not (0 < ms < math.inf and re.fullmatch(r"[\w.+-]{1,80}", line["shape"])):
                    raise ValueError
                cells.setdefault((line["shape"], line["quant"], int(line["tokens"])), {})[line["label"]] = ms
    except OSError as e:
        raise SynthError(f"can't read {path}: {e.strerror or e}") from e
    except (KeyError, TypeError, ValueError, csv.Error):
        raise SynthError(f"{path}, row {row}: not a row of benchmarks/layer.py; write it anew with --out") from None
    found = []
    for (layer, quant, tokens), times in cells.items():
        own = [label for label in times if label not in ("fallback", "autotuned")]
        if len(own) != 1 or "fallback" not in times or quant not in QUANTS:
            raise SynthError(f"{path}: {layer} {quant} at {tokens} tokens needs the fallback's time and one config's")
        found.append(LayerTime(layer, quant, tokens, times["fallback"], times.get("autotuned"), times[own[0]]))
    return found


# ---- writing -----------------------------------------------------------------------------------------------

#: Token counts that the description groups gains by, each up to and including its number.
TOKEN_GROUPS = (16, 128, 1024, 1 << 30)
#: Files of a contribution, beside the module and the config.
DESCRIPTION, CHECK, REPLAY, REPORT = "DESCRIPTION.md", "check.txt", "replay.txt", "report.html"


def write(
    found: Contribution,
    folder: Path,
    replay: Callable[[Path], ReplayReport],
    make_report: Callable[[Path], str],
    layers: Sequence[LayerTime] = (),
) -> list[Path]:
    """Check, replay and report a contribution, and write all of it to a new folder, or nothing.

    Parameters
    ----------
    found : Contribution
    folder : Path
        Must not exist.
    replay : callable
        Asks the installed FlashInfer for every key of a module, as one for the contribution's device.
    make_report : callable
        Returns the HTML page of a config.
    layers : sequence of LayerTime
        Times of whole layers for the description.

    Returns
    -------
    list of Path
        The files.

    Raises
    ------
    SynthError
        When FlashInfer isn't installed in the contribution's version, would not use every entry, or the folder is
        there or can't be made.
    """
    if folder.exists():
        raise SynthError(f"{folder} is there already; name a new folder with -o")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".synth-", dir=folder.parent, ignore_cleanup_errors=True) as beside:
            made = Path(beside) / "new"
            made.mkdir()
            module = made / found.module_name
            module.write_bytes(found.module)
            config = made / CONTRIBUTED
            config.write_bytes(found.config)
            sidecar_path(config).write_bytes(found.sidecar)
            replay_text = _replayed(replay(module), found)
            (made / CHECK).write_text(_check(module, found), encoding="utf-8")
            (made / REPLAY).write_text(replay_text, encoding="utf-8")
            (made / REPORT).write_text(make_report(config), encoding="utf-8")
            (made / DESCRIPTION).write_text(describe(found, replay_text, layers), encoding="utf-8")
            os.replace(made, folder)
    except OSError as e:
        raise SynthError(f"can't write {folder}: {e.strerror or e}; name another place or free some space") from e
    return sorted(folder.iterdir())


def _check(module: Path, found: Contribution) -> str:
    findings = check(module, found.flashinfer, device=found.device.name)
    serious = [f for f in findings if f.severity == "error"]
    if serious:
        raise SynthError(f"{found.module_name}: {serious[0].code}: {serious[0].message}; {serious[0].way_out}")
    lines = [f"{found.module_name}: {found.entries} entries, FlashInfer {found.flashinfer}, {found.device.name}"]
    lines += [f"{g.severity}: {g.code} ({g.count}): {g.example.message}" for g in summary(findings)]
    return "\n".join([*lines, "no error found"]) + "\n"


def _replayed(done: ReplayReport, found: Contribution) -> str:
    if done.flashinfer != found.flashinfer:
        raise SynthError(
            f"the entries are for FlashInfer {found.flashinfer}, and {done.flashinfer} is installed; "
            f"pip install flashinfer-python=={found.flashinfer}, or `synth port` them first"
        )
    if not done.ok:
        miss = done.misses[0]
        raise SynthError(f"{found.module_name}: FlashInfer doesn't serve {miss.key}: {miss.reason}")
    return (
        f"FlashInfer {done.flashinfer} on {done.device}, the module beside its own and "
        f"FLASHINFER_AUTOTUNER_LOAD_FROM_FILE=1: {done.keys_hit} of {done.keys} keys and {done.hits} of {done.lookups} "
        "lookups hit\n"
    )


def describe(found: Contribution, replay_text: str, layers: Sequence[LayerTime] = ()) -> str:
    """Return the text of the pull request, in Markdown, from ``DESCRIPTION.md.j2``."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("synth", "checking"),
        autoescape=False,  # it is no HTML
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["pairs"] = lambda agreements: len({(a.shape, a.tactics) for a in agreements})
    template = environment.get_template("DESCRIPTION.md.j2")
    return template.render(found=found, gains=_gain_rows(found.gains), layers=layers, replay_text=replay_text)


@dataclass(frozen=True)
class _GainRow:
    """Gains of one quantization and stage over a range of token counts."""

    quant: str
    stage: int
    tokens: str
    ratios: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.geometric_mean(self.ratios)


def _gain_rows(gains: Iterable[Gain]) -> list[_GainRow]:
    groups: dict[tuple[str, int, int], list[float]] = defaultdict(list)
    for gain in gains:
        group = next(i for i, most in enumerate(TOKEN_GROUPS) if gain.bucket <= most)
        groups[gain.quant, gain.stage, group].append(gain.ratio)
    rows = []
    for (quant, stage, group), ratios in sorted(groups.items()):
        least = TOKEN_GROUPS[group - 1] + 1 if group else 1
        tokens = f"{least} to {TOKEN_GROUPS[group]}" if group + 1 < len(TOKEN_GROUPS) else f"{least} and more"
        rows.append(_GainRow(quant, stage, tokens, tuple(ratios)))
    return rows
