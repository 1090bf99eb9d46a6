"""Will FlashInfer use this file? Needs neither torch nor FlashInfer: it judges by the versioned contract."""

from __future__ import annotations

import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from synth.catalog.untrusted import shown
from synth.checking.coverage import missing, name_of
from synth.checking.entries import (
    Denied,
    check_bucket,
    check_tactic,
    check_value,
    crash_of,
    other_operation,
    readable_key,
    served,
    tactic_in,
)
from synth.checking.findings import SEVERITIES, Finding, FindingGroup, summary
from synth.configs import sidecar as sidecars
from synth.configs.formats import BUNDLED_PREFIX, MANIFEST, RECORDS, STORE_SCHEMA, ConfigFile, gpu_of, read
from synth.errors import SynthError
from synth.flashinfer.keys import Key, parse_key
from synth.flashinfer.tactics import DEFAULT_FLASHINFER
from synth.flashinfer.versions import CONTRACTS, arch_of, contract_for

__all__ = ["SEVERITIES", "Finding", "FindingGroup", "check", "check_files", "summary"]

#: Tactics whose times differ by less than this share are as good as equal: repeats of one timing differ by 0.4 %.
NEAR_TIE = 0.01
#: A tuner keeps a tactic that is slower than another by a tolerance that people set to 0.5 % or 1 %; not by this.
_SLOWER = 0.02
_INDETERMINATE = (None, "unknown", "None")


def check(
    path: Path,
    flashinfer: str = DEFAULT_FLASHINFER,
    *,
    device: str | None = None,
    arch: str | None = None,
    environment: Mapping[str, str] | None = None,
    max_tokens: Sequence[int] = (),
    denied: Callable[[str, str], Denied] | None = None,
) -> list[Finding]:
    """Return everything that keeps FlashInfer from using `path` or makes it slow, file-wide findings first.

    Parameters
    ----------
    path : Path
        A v1 JSON file, a bundled ``.py``, or the folder of a managed store.
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
    return _check(read(path), path, flashinfer, device, arch, environment or {}, max_tokens, denied)


def check_files(
    paths: Sequence[Path],
    flashinfer: str = DEFAULT_FLASHINFER,
    *,
    device: str | None = None,
    max_tokens: Sequence[int] = (),
    denied: Callable[[str, str], Denied] | None = None,
) -> dict[Path, list[Finding]]:
    """Check several files, and those for one device and FlashInfer version against each other.

    The ranks of one server that choose different tactics take different times, and can hang where they wait for each
    other. A file that differs from the first one of its device and version has a finding ``ranks-differ``.

    Parameters and errors are those of :func:`check`.
    """
    contract_for(flashinfer)
    found: dict[Path, list[Finding]] = {}
    first: dict[object, tuple[Path, dict[str, str]]] = {}
    for path in dict.fromkeys(paths):
        config = read(path)
        found[path] = _check(config, path, flashinfer, device, None, {}, max_tokens, denied)
        here = {_without_rank(key, flashinfer): served(value) for key, value in config.raw.items()}
        group = (gpu_of(config, path), config.flashinfer)
        if group not in first:
            first[group] = path, here
        else:
            found[path] = [*_check_ranks(here, *first[group]), *found[path]]
    return found


def _check(
    config: ConfigFile,
    path: Path,
    flashinfer: str,
    device: str | None,
    arch: str | None,
    environment: Mapping[str, str],
    max_tokens: Sequence[int],
    denied: Callable[[str, str], Denied] | None,
) -> list[Finding]:
    device = device or gpu_of(config, path)
    arch = arch or arch_of(device)
    expected = {"flashinfer_version": flashinfer, **({"gpu": device} if device else {}), **environment}
    findings = list(_check_file(config, path, flashinfer, expected))
    wrong = denied(device, arch) if denied is not None and device is not None and arch is not None else {}
    live: list[Key] = []
    others: Counter[str] = Counter()
    # What is in a key isn't Python to anyone, so that Python's warnings of it are no help.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for text, value in config.raw.items():
            if (crash := crash_of(config.kind, text, value, flashinfer)) is not None:
                findings.append(crash)
            if (operation := other_operation(text)) is not None:
                others[operation] += 1
                continue
            key, dead = readable_key(text, flashinfer, arch)
            if crash is None:
                findings += check_value(config.kind, text, value, flashinfer)
            if key is None:
                findings += dead
                continue
            live.append(key)
            findings += check_bucket(key, flashinfer)
            findings += check_tactic(key, tactic_in(value), flashinfer, device, arch, wrong)
    findings += missing(live, flashinfer, max_tokens=max_tokens, abstains=_count(config.metadata, "left_out") > 0)
    findings += _check_rank_tactics(live, config.raw, flashinfer)
    findings += _check_times(config, path)
    return [*_check_whole(config, flashinfer, len(live), others), *findings]


# ---- the file ----------------------------------------------------------------------------------------------


def _check_whole(config: ConfigFile, flashinfer: str, live: int, others: Counter[str]) -> Iterator[Finding]:
    """Judge the file by how many of its keys can be looked up."""
    mine = len(config.raw) - sum(others.values())
    if mine and not live:
        yield Finding(
            "dead-file",
            "",
            f"the file is dead: FlashInfer {flashinfer} can look up none of its {mine} keys",
            "write the file anew for this version",
        )
    if others:
        names = ", ".join(f"{n} of {shown(name)}" for name, n in others.most_common(4))
        yield Finding(
            "other-operations",
            "",
            f"{sum(others.values())} entries are of other operations than the CUTLASS MoE, which synth doesn't judge "
            f"({names})",
            "judge them by FlashInfer itself",
            "note" if mine else "warning",
        )


def _check_file(config: ConfigFile, path: Path, flashinfer: str, expected: Mapping[str, str]) -> Iterator[Finding]:
    if not config.raw:
        yield Finding("no-entries", "", "the file has no entries", "write it anew")
    analytical = _count(config.metadata, "entries", "analytical")
    if analytical:
        yield Finding(
            "analytical",
            "",
            f"{analytical} of {len(config.raw)} entries are analytical: nobody has measured them",
            "time some with synth collect; they are not for contributing",
            "note",
        )
    for key in config.duplicates:
        differ = key in config.differing
        yield Finding(
            "duplicate-differs" if differ else "duplicate-key",
            key,
            f"the key occurs more than once{' with different values' if differ else ''}; the last one counts",
            "keep the one that was meant" if differ else "drop all but one",
            "warning" if differ else "note",
        )
    yield from _check_newer(config, expected["flashinfer_version"])
    if config.kind == "bundled":
        yield from _check_bundled(config, path, expected)
    elif config.kind == "store":
        yield from _check_store(config, flashinfer, expected)
    elif not contract_for(flashinfer).metadata_keys:
        yield Finding("no-json", "", f"FlashInfer {flashinfer} reads no JSON configs", "write a bundled .py")
    else:
        if not isinstance(config.special.get(RECORDS, {}), dict):
            yield Finding("crash", "", f"{RECORDS} is not an object: load_configs raises ValueError", f"drop {RECORDS}")
        yield from _check_metadata(config.metadata, flashinfer, expected)


def _check_newer(config: ConfigFile, flashinfer: str) -> Iterator[Finding]:
    version = config.flashinfer
    newest = CONTRACTS[-1].last
    if version is not None and _release(version) > _release(newest):
        yield Finding(
            "newer-flashinfer",
            "",
            f"the file is from FlashInfer {shown(version)}, newer than any that this synth knows ({newest}): what its "
            f"keys and ids mean there isn't judged, only what FlashInfer {flashinfer} makes of them",
            "update synth",
            "warning",
        )


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def _check_store(config: ConfigFile, flashinfer: str, expected: Mapping[str, str]) -> Iterator[Finding]:
    if not contract_for(flashinfer).managed_store:
        yield Finding("no-store", "", f"FlashInfer {flashinfer} has no managed store", "write a JSON config")
        return
    for name, why in config.passed_over.items():
        if name == MANIFEST:
            yield Finding(
                "store-folder", "", f"FlashInfer never looks into this folder: {why}", "let FlashInfer write the store"
            )
        else:
            yield Finding(
                "store-entry",
                "",
                f"{shown(name)}: {why}: FlashInfer passes the file over",
                "publish the entry anew, or remove the file",
            )
    manifest = config.metadata if isinstance(config.metadata, dict) else {}
    for name in (*contract_for(flashinfer).metadata_keys, "cache_schema"):
        saved = manifest.get(name)
        wanted = STORE_SCHEMA if name == "cache_schema" else expected.get(name)
        if name not in manifest or (wanted is not None and saved != wanted):
            has = f"is {shown(saved)}" if name in manifest else "is missing"
            yield Finding(
                "metadata-mismatch",
                "",
                f"{name} {has} in the manifest{f', the environment has {wanted!r}' if wanted is not None else ''}: "
                "FlashInfer looks into another folder, for a store knows no wildcards",
                "write the store inside of the environment that is to use it",
            )


def _check_metadata(metadata: object, flashinfer: str, expected: Mapping[str, str]) -> Iterator[Finding]:
    if metadata is None:
        yield Finding(
            "no-metadata",
            "",
            "no _metadata: FlashInfer takes the file on any GPU and version, where its ids mean other tactics",
            "add the metadata; synth emit writes it",
        )
        return
    if not isinstance(metadata, dict):
        yield Finding(
            "metadata-form",
            "",
            f"_metadata is {type(metadata).__name__}, not an object: FlashInfer rejects and later overwrites the file",
            "add the metadata; synth emit writes it",
        )
        return
    for name in contract_for(flashinfer).metadata_keys:
        saved = metadata.get(name)
        wanted = expected.get(name)
        if name not in metadata:
            yield Finding(
                "metadata-missing",
                "",
                f"_metadata lacks {name}: FlashInfer rejects the whole file and overwrites it at its next save",
                f'add "{name}": "*", or the exact value for flashinfer_version and gpu',
            )
        elif _in(saved, _INDETERMINATE):
            yield Finding(
                "metadata-unknown",
                "",
                f"{name} is {shown(saved)}: FlashInfer rejects the whole file where it knows its {name} "
                "and overwrites it",
                f'set {name} to its value, or to "*" if it changes no tactic',
            )
        elif saved == "*":
            if name in ("flashinfer_version", "gpu"):
                yield Finding(
                    "metadata-wildcard",
                    "",
                    f"{name} is a wildcard: under another one the ids mean other tactics",
                    f"set {name} to its exact value",
                    "warning",
                )
        elif wanted is not None and saved != wanted:
            yield Finding(
                "metadata-mismatch",
                "",
                f"{name} is {shown(saved)}, the environment has {wanted!r}: FlashInfer rejects the whole file",
                "tune or emit for this environment",
            )
        elif wanted is None:
            yield Finding(
                "metadata-pinned",
                "",
                f"{name} is {shown(saved)}: FlashInfer rejects the whole file under any other",
                f'set {name} to "*" if it changes no tactic',
                "note",
            )


def _in(value: object, values: tuple[object, ...]) -> bool:
    return any(value is v or (isinstance(value, str) and value == v) for v in values)


def _check_bundled(config: ConfigFile, path: Path, expected: Mapping[str, str]) -> Iterator[Finding]:
    yield Finding(
        "bundled",
        "",
        "FlashInfer reads bundled files only with FLASHINFER_AUTOTUNER_LOAD_FROM_FILE=1, never while it tunes, and "
        "checks neither version nor GPU but for the file's name",
        "prefer the JSON form",
        "note",
    )
    version = config.flashinfer
    if version is not None and version != expected["flashinfer_version"]:
        yield Finding(
            "bundled-version",
            "",
            f"it was written for FlashInfer {shown(version)}, and FlashInfer {expected['flashinfer_version']} doesn't "
            "compare: under another version its ids mean other tactics",
            "synth port it, or write it anew",
        )
    gpu = expected.get("gpu")
    named = path.stem.startswith(BUNDLED_PREFIX)
    device = gpu if gpu is not None else path.stem.removeprefix(BUNDLED_PREFIX) if named else ""
    if any(c in device for c in "./"):
        yield Finding(
            "not-importable",
            "",
            f"no module can be imported for {shown(device)}: '.' or '/' in the name",
            "use the JSON form",
        )
    elif not named or (gpu is not None and path.stem != BUNDLED_PREFIX + gpu.replace(" ", "_")):
        module = BUNDLED_PREFIX + (gpu.replace(" ", "_") if gpu else "<GPU with _ for spaces>")
        yield Finding(
            "bundled-name",
            "",
            f"FlashInfer looks for {module}.py, not {path.name}",
            f"install it as flashinfer/tuning_configs/{module}.py",
            "warning",
        )


# ---- entries beside each other -----------------------------------------------------------------------------


def _without_rank(text: str, flashinfer: str) -> str:
    """Return a key without its ranks, where this version's keys hold ranks."""
    names = contract_for(flashinfer).extras or ()
    if "tp_rank" not in names:
        return text
    try:
        key = parse_key(text)
    except SynthError:
        return text
    if len(key.extras or ()) != len(names):
        return text
    extras = tuple(v for name, v in zip(names, key.extras or (), strict=True) if not name.endswith("_rank"))
    return replace(key, extras=extras).rendered


def _check_rank_tactics(keys: Iterable[Key], raw: Mapping[str, object], flashinfer: str) -> Iterator[Finding]:
    """Where keys hold ranks: find places in which the ranks have different tactics."""
    if "tp_rank" not in (contract_for(flashinfer).extras or ()):
        return
    places: dict[str, dict[str, Key]] = defaultdict(dict)
    for key in keys:
        places[_without_rank(key.text, flashinfer)].setdefault(served(raw[key.text]), key)
    for found in places.values():
        if len(found) > 1:
            example = next(iter(found.values()))
            yield Finding(
                "rank-tactics-differ",
                example.text,
                f"{name_of(example, flashinfer)} gemm{example.stage} bucket {example.bucket}: the ranks have "
                f"{len(found)} different tactics; ranks that disagree can hang where they wait for each other",
                "write the same tactic for every rank",
                "warning",
            )


def _check_ranks(here: Mapping[str, str], path: Path, there: Mapping[str, str]) -> Iterator[Finding]:
    """Compare a file with the first one of its device and version."""
    other = [key for key in here if key in there and here[key] != there[key]]
    only_here, only_there = [k for k in here if k not in there], [k for k in there if k not in here]
    if other or only_here or only_there:
        yield Finding(
            "ranks-differ",
            (other or only_here or only_there)[0],
            f"beside {path}, {len(other)} keys have another tactic, {len(only_here)} are only here and "
            f"{len(only_there)} only there; ranks of one server that disagree can hang, and vLLM and SGLang tune anew "
            "where their files differ",
            "give every rank the same file; synth diff shows what differs",
            "warning",
        )


# ---- times -------------------------------------------------------------------------------------------------


def _check_times(config: ConfigFile, path: Path) -> Iterator[Finding]:
    """Judge entries by the times that come with them: in the entry itself, and in the sidecar."""
    margins = [(e.key, e.runner_up_ms / e.time_ms - 1.0) for e in config.entries if e.time_ms and e.runner_up_ms]
    ties = sum(abs(margin) < NEAR_TIE for _, margin in margins)
    # What synth wrote it writes again.
    tuned = not (isinstance(config.metadata, dict) and "synth" in config.metadata)
    if ties and tuned:
        yield Finding(
            "near-ties",
            "",
            f"in {ties} of {len(margins)} entries the runner-up is within {NEAR_TIE:.0%}: another tune may choose it",
            "give every rank and restart the same file rather than tuning in each",
            "note",
        )
    for key, margin in margins:
        if margin < -_SLOWER:
            yield Finding(
                "slower-than-runner-up",
                key,
                f"by the entry's own times another tactic is {-margin:.0%} faster",
                "tune or emit the entry anew",
                "warning",
            )
    if config.kind == "store":
        return
    try:
        sidecar = sidecars.read(path)
    except SynthError as e:
        yield Finding("sidecar", "", str(e), "emit both anew, or move the sidecar away", "warning")
        return
    for key, record in sidecar.written().items() if sidecar is not None else ():
        if key in config.raw and record.gain is not None and record.gain < 1.0 - NEAR_TIE:
            yield Finding(
                "slower-than-fallback",
                key,
                f"by its sidecar ({record.source}) the entry takes {1.0 / record.gain:.2f} times the fallback's time",
                "drop the entry",
                "warning",
            )


def _count(metadata: object, *names: str) -> int:
    """Return a number that `synth emit` put below ``_metadata.synth``; 0 where there is none."""
    value: object = metadata
    for name in ("synth", *names):
        value = value.get(name) if isinstance(value, dict) else None
    return value if type(value) is int else 0
