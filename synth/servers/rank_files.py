"""Putting a config's entries into the files that vLLM and SGLang keep, one a rank, among those that they have tuned."""

from __future__ import annotations

import contextlib
import json
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from synth.catalog.files import locked
from synth.configs import merging
from synth.configs.model import METADATA, Config
from synth.configs.reading import RANK_FILES, rank_files, read
from synth.configs.v1 import contents as v1_contents
from synth.errors import MissingDependencyError, SynthError
from synth.flashinfer.tactics import DEFAULT_FLASHINFER
from synth.servers import placing
from synth.servers.installation import FlashInferHere, Installable, Installation, can_replay
from synth.servers.places import LAYOUTS, candidates, search_root, variables


def install_files(
    config: Installable,
    engine: str,
    folder: Path | None,
    environment: Mapping[str, str],
    here: FlashInferHere,
    dry_run: bool,
) -> Installation:
    where = _configuration(config, engine, folder, environment)
    with contextlib.nullcontext() if dry_run else locked(where):
        record = placing.read_record(where, RANK_FILES[engine])
        files = rank_files(engine, where)
        if not files:
            raise SynthError(f"{where} has no {LAYOUTS[engine].expected}; {_start_once(config, engine, environment)}")
        last = placing.previous_config(where)
        previous = read(last) if record and last.is_file() else None
        seen = {file.name: placing.digest(file) for file in files}
        before, merged = {}, {}
        for file in files:
            theirs = read(file)
            merging.check_metadata(config.path, config.file, file, theirs)
            before[file.name] = theirs
            if record is not None and file.name in record.files:
                kept = placing.original(where, record, file.name)
                first = read(kept) if kept else None
                if first is not None and record.files[file.name].is_synths(seen[file.name]):
                    theirs = first
                elif previous is not None:
                    theirs = merging.without(theirs, previous, first)
            merged[file.name] = merging.merge(config.file, theirs)
        notes = _compare_ranks(engine, where, before, merged)
        # A file that says the same already is left as it is, byte by byte.
        contents = {
            name: (where / name).read_bytes() if merging.same(v1_contents(before[name]), json.loads(m.data)) else m.data
            for name, m in merged.items()
        }
        if dry_run:
            changes = placing.plan(where, record, contents)
        else:
            changes = placing.place(where, record, contents, config.data, seen=seen)
    done = Installation(
        engine,
        where,
        len(config.file.raw),
        config.analytical,
        tuple(changes),
        merged,
        variables(engine, where, environment),
        tuple(notes),
    )
    return done if dry_run else _replayed_files(config, done, here, [where / name for name in merged])


def _compare_ranks(
    engine: str, folder: Path, before: Mapping[str, Config], merged: Mapping[str, merging.Merged]
) -> list[str]:
    """See that ranks that tune together agree after the install as well, as each server defines it.

    Returns
    -------
    list of str
        What may be amiss but can't be told from here.

    Raises
    ------
    SynthError
        When the server would throw the files away.
    """
    groups: dict[str | None, list[str]] = defaultdict(list)
    for name in merged:
        m = RANK_FILES[engine].fullmatch(name)
        groups[m["peers"] if m else None].append(name)
    notes = []
    for names in groups.values():
        after = {name: json.loads(merged[name].data) for name in names}
        first = names[0]
        if engine == "sglang":
            other = next((n for n in names if not merging.same(after[n], after[first])), None)
            if other is not None:
                raise SynthError(
                    f"{folder}: {first} and {other} hold different entries of SGLang's own, so it would discard all "
                    "ranks' files; remove them and start it once more"
                )
            continue
        alike: dict[tuple[str, int], set[tuple[str, int]]] = defaultdict(set)
        for name in names:
            alike[_fingerprint(v1_contents(before[name]))].add(_fingerprint(after[name]))
        if any(len(found) > 1 for found in alike.values()):
            raise SynthError(
                f"{folder}: the ranks' files would have different numbers of entries afterwards, so vLLM would load "
                "none of them; remove them, start it once more, and install again"
            )
        if len(alike) > 1:
            notes.append(
                f"the files of {len(names)} ranks differ in metadata or number of entries: unless these are stages of "
                "a pipeline, vLLM loads none of them and tunes anew"
            )
    return notes


def _fingerprint(content: Mapping[str, object]) -> tuple[str, int]:
    """Return what vLLM 0.33.0 compares between ranks: the metadata, and how much else there is."""
    return json.dumps(content.get(METADATA), sort_keys=True), len(content.keys() - {METADATA})


def _configuration(config: Installable, engine: str, folder: Path | None, environment: Mapping[str, str]) -> Path:
    """Return the folder of one configuration of the server."""
    if folder is not None:
        if not folder.is_dir():
            raise SynthError(f"{folder}: {'not a' if folder.exists() else 'no such'} folder; name one with --folder")
        return folder.resolve()
    found = candidates(engine, config.version, environment)
    if len(found) == 1:
        return found[0].resolve()
    title = LAYOUTS[engine].title
    if found:
        listed = "; ".join(f"{p} ({_described(engine, p)})" for p in found)
        raise SynthError(f"{title} has {len(found)} configurations here, name one with --folder: {listed}")
    root, pattern = search_root(engine, environment)
    looked = root / pattern.format(version=config.version)
    others = sorted({p.parents[1].name for p in candidates(engine, "*", environment)} - {config.version})
    others = [name for name in others if "{version}" in pattern and re.match(r"[0-9]+\.[0-9]+", name)]
    if others:
        raise SynthError(
            f"{title} has no files at {looked}, but some of FlashInfer {', '.join(others)}, for which "
            f"`synth port {config.path} --to {others[-1]} -o OUT` rewrites the config"
        )
    raise SynthError(f"{title} has no files at {looked}; {_start_once(config, engine, environment)}")


def _described(engine: str, folder: Path) -> str:
    files = rank_files(engine, folder)
    try:
        meta = read(files[0]).metadata
    except (SynthError, IndexError):
        meta = None
    on = f"{meta.get('gpu')}, FlashInfer {meta.get('flashinfer_version')}" if isinstance(meta, dict) else "unreadable"
    return f"{len(files)} file{'s' * (len(files) != 1)}, {on}"


def _start_once(config: Installable, engine: str, environment: Mapping[str, str]) -> str:
    """Say how a server comes to have files to install into."""
    start = f"start {LAYOUTS[engine].title} once as you serve, and take the folder that its log names"
    if engine == "sglang":
        return start
    override = environment.get("VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR")
    folder = f" --folder {override}" if override else ""
    return (
        f"{start}; on one GPU vLLM 0.33.0 has none, but FlashInfer's store: "
        f"synth install {config.path} --engine flashinfer{folder}"
    )


def _replayed_files(
    config: Installable, done: Installation, here: FlashInferHere, files: list[Path]
) -> Installation:
    """Read the files back, and ask FlashInfer for every key from the first one."""
    for file in files:
        there = read(file).raw
        lost = [
            key for key, value in config.file.raw.items() if key not in there or not merging.same(there[key], value)
        ]
        if lost:
            raise SynthError(f"{file} lacks {len(lost)} of the entries by now; stop the server and install again")
    again = "run the same command in the server's environment to ask FlashInfer from there"
    try:
        version = here.installed_flashinfer()
    except MissingDependencyError:
        return replace(done, not_replayed=f"FlashInfer isn't installed here; {again}")
    if version != config.version:
        return replace(done, not_replayed=f"FlashInfer {version} is installed here; {again}")
    if not can_replay(version):
        return replace(done, not_replayed=f"synth replays FlashInfer {DEFAULT_FLASHINFER} only")
    report = here.replay_file(config.file, files[0])
    if not report.loaded and report.misses and report.misses[0].code == "metadata":
        return replace(done, not_replayed=f"this environment isn't the server's: {report.misses[0].reason}; {again}")
    return replace(done, report=report)
