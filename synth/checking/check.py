"""Will FlashInfer use this config? Needs neither torch nor FlashInfer: it judges by the versioned contract."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from synth.catalog.untrusted import shown
from synth.checking.coverage import missing, name_of
from synth.checking.entries import (
    Denied,
    check_bucket,
    check_key,
    check_tactic,
    check_value,
    crash_of,
    served,
    tactic_in,
)
from synth.checking.findings import SEVERITIES, Finding, FindingGroup, finding, summary
from synth.checking.metadata import check_form
from synth.configs.model import Config
from synth.configs.reading import read
from synth.errors import SynthError
from synth.flashinfer.keys import Key, parse_key
from synth.flashinfer.tactics import DEFAULT_FLASHINFER
from synth.flashinfer.versions import arch_of, contract_for

__all__ = ["SEVERITIES", "Finding", "FindingGroup", "check", "check_files", "summary"]

#: Tactics whose times differ by less than this share are as good as equal: repeats of one timing differ by 0.4 %.
NEAR_TIE = 0.01
#: A tuner keeps a tactic that is slower than another by a tolerance that people set to 0.5 % or 1 %; not by this.
_SLOWER = 0.02


def check(
    config: Config | Path,
    flashinfer: str = DEFAULT_FLASHINFER,
    *,
    device: str | None = None,
    arch: str | None = None,
    environment: Mapping[str, str] | None = None,
    max_tokens: Sequence[int] = (),
    denied: Callable[[str, str], Denied] | None = None,
) -> list[Finding]:
    """Return everything that keeps FlashInfer from using a config or makes it slow, file-wide findings first.

    Parameters
    ----------
    config : Config or Path
        In any form; of a server's folder, the first rank's file, see :func:`check_files`.
    flashinfer : str
        The version that is to use the file.
    device : str, optional
        The GPU's name; by default the one in the metadata, or in a module's file name.
    arch : str, optional
        The GPU's architecture; by default the catalogue's for `device`. Where it is not known, an id is out of
        range only if it is for every architecture.
    environment : mapping, optional
        What a running FlashInfer has for the metadata keys, to compare field by field. Keys that it lacks are
        not compared; `flashinfer` and `device` stand for theirs.
    max_tokens : sequence of int
        Maximum token counts of the servers: which of their runtime token counts are covered? Without them every
        bucket up to a layer's largest is expected.
    denied : callable, optional
        Returns the tactics whose numbers were found wrong, for a device's name and architecture.

    Raises
    ------
    SynthError
        When the file can't be read at all, or the version is not known.
    """
    contract_for(flashinfer)
    config = read(config) if isinstance(config, Path) else config
    device = device or config.gpu
    arch = arch or arch_of(device)
    expected = {"flashinfer_version": flashinfer, **({"gpu": device} if device else {}), **(environment or {})}
    findings = [*_check_contents(config), *check_form(config, flashinfer, expected)]
    wrong = denied(device, arch) if denied is not None and device is not None and arch is not None else {}
    live: list[Key] = []
    others: Counter[str] = Counter()
    for entry in config.entries:
        crash = crash_of(config.form, entry, flashinfer)
        if crash is not None:
            findings.append(crash)
        if (operation := entry.other_operation) is not None:
            others[operation] += 1
            continue
        dead = check_key(entry, flashinfer, arch)
        if crash is None:
            findings += check_value(config.form, entry, flashinfer)
        key = entry.key
        if dead is not None or key is None:
            findings += [dead] if dead is not None else []
            continue
        live.append(key)
        findings += check_bucket(key, flashinfer)
        findings += check_tactic(key, tactic_in(entry.value), flashinfer, device, arch, wrong)
    findings += missing(live, flashinfer, max_tokens=max_tokens, abstains=config.count("left_out") > 0)
    findings += _check_rank_tactics(live, config, flashinfer)
    findings += _check_times(config)
    return [*_check_whole(config, flashinfer, len(live), others), *findings]


def check_files(
    paths: Sequence[Path],
    flashinfer: str = DEFAULT_FLASHINFER,
    *,
    device: str | None = None,
    max_tokens: Sequence[int] = (),
    denied: Callable[[str, str], Denied] | None = None,
) -> dict[Path, list[Finding]]:
    """Check several configs, and those for one device and FlashInfer version against each other.

    A server's folder stands for its ranks' files. The ranks of one server that choose different tactics take different
    times, and can hang where they wait for each other. A file that differs from the first one of its device and version
    has a finding ``ranks-differ``.

    Parameters and errors are those of :func:`check`.
    """
    contract_for(flashinfer)
    found: dict[Path, list[Finding]] = {}
    first: dict[object, tuple[Path, dict[str, str]]] = {}
    for named in dict.fromkeys(paths):
        config = read(named)
        for part in config.parts or (config,):
            path = part.path if config.parts and part.path is not None else named
            found[path] = check(part, flashinfer, device=device, max_tokens=max_tokens, denied=denied)
            here = {_without_rank(entry.text, flashinfer): served(entry.value) for entry in part.entries}
            group = (part.gpu, part.flashinfer)
            if group not in first:
                first[group] = path, here
            else:
                found[path] = [*_check_ranks(here, *first[group]), *found[path]]
    return found


# ---- the whole file ----------------------------------------------------------------------------------------


def _check_whole(config: Config, flashinfer: str, live: int, others: Counter[str]) -> Iterator[Finding]:
    """Judge the file by how many of its keys can be looked up."""
    mine = len(config.entries) - sum(others.values())
    if mine and not live:
        yield finding("dead-file", flashinfer=flashinfer, keys=mine)
    if others:
        names = ", ".join(f"{n} of {shown(name)}" for name, n in others.most_common(4))
        severity = "note" if mine else "warning"
        yield finding("other-operations", severity=severity, count=sum(others.values()), names=names)


def _check_contents(config: Config) -> Iterator[Finding]:
    if not config.entries:
        yield finding("no-entries")
    if analytical := config.count("entries", "analytical"):
        yield finding("analytical", count=analytical, of=len(config.entries))
    for key in config.duplicates:
        yield finding("duplicate-differs" if key in config.differing else "duplicate-key", key)


# ---- entries beside each other -----------------------------------------------------------------------------


def _without_rank(text: str, flashinfer: str) -> str:
    """Return a key without its ranks, where this version's keys hold ranks."""
    contract = contract_for(flashinfer)
    if "tp_rank" not in (contract.extras or ()):
        return text
    try:
        key = parse_key(text)
    except SynthError:
        return text
    if not key.call.fits(contract):
        return text
    named = zip(contract.extras or (), key.extras or (), strict=True)
    call = replace(key.call, extras=tuple(v for name, v in named if not name.endswith("_rank")))
    return replace(key, call=call).rendered


def _check_rank_tactics(keys: Iterable[Key], config: Config, flashinfer: str) -> Iterator[Finding]:
    """Where keys hold ranks: find places in which the ranks have different tactics."""
    if "tp_rank" not in (contract_for(flashinfer).extras or ()):
        return
    places: dict[str, dict[str, Key]] = defaultdict(dict)
    for key in keys:
        places[_without_rank(key.text, flashinfer)].setdefault(served(config.raw[key.text]), key)
    for found in places.values():
        if len(found) > 1:
            example = next(iter(found.values()))
            yield finding(
                "rank-tactics-differ",
                example.text,
                layer=name_of(example, flashinfer),
                stage=example.stage,
                bucket=example.bucket,
                count=len(found),
            )


def _check_ranks(here: Mapping[str, str], path: Path, there: Mapping[str, str]) -> Iterator[Finding]:
    """Compare a file with the first one of its device and version."""
    other = [key for key in here if key in there and here[key] != there[key]]
    only_here, only_there = [k for k in here if k not in there], [k for k in there if k not in here]
    if other or only_here or only_there:
        key = (other or only_here or only_there)[0]
        yield finding(
            "ranks-differ", key, first=path, other=len(other), here=len(only_here), there=len(only_there)
        )


# ---- times -------------------------------------------------------------------------------------------------


def _check_times(config: Config) -> Iterator[Finding]:
    """Judge entries by the times that come with them: in the entry itself, and in the sidecar."""
    margins = [(e.text, e.runner_up_ms / e.time_ms - 1.0) for e in config.served if e.time_ms and e.runner_up_ms]
    ties = sum(abs(margin) < NEAR_TIE for _, margin in margins)
    # What synth wrote it writes again.
    if ties and "synth" not in config.said:
        yield finding("near-ties", ties=ties, of=len(margins), near=NEAR_TIE)
    for key, margin in margins:
        if margin < -_SLOWER:
            yield finding("slower-than-runner-up", key, faster=-margin)
    try:
        records = config.records
    except SynthError as e:
        yield finding("sidecar", problem=e)
        return
    for key, record in records.items():
        if key in config.raw and record.gain is not None and record.gain < 1.0 - NEAR_TIE:
            yield finding("slower-than-fallback", key, source=record.source, times=1.0 / record.gain)
