"""Putting synth's entries among those that a server has tuned, in the file that it keeps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from synth.configs.model import Config, Entry
from synth.configs.v1 import dumps_as_served
from synth.errors import SynthError
from synth.flashinfer.versions import contract_for


@dataclass(frozen=True)
class Merged:
    """A server's file with a config's entries in it.

    Attributes
    ----------
    data : bytes
        The file.
    added, replaced, same, kept : int
        Entries of the config that were not there, that take the place of others, and that were there already; and
        entries that are not the config's.
    """

    data: bytes
    added: int
    replaced: int
    same: int
    kept: int


def merge(ours: Config, theirs: Config) -> Merged:
    """Return `theirs` with the entries of `ours`, which win for the same key.

    Metadata and all other entries stay as they are. The file is written in the form of FlashInfer's ``save_configs``:
    metadata, then records of other producers, then the entries by key, then, where there was one, the hash of all
    that.
    """
    entries = {e.text: e for e in (*theirs.entries, *ours.entries)}
    data = dumps_as_served(replace(theirs, entries=tuple(entries.values())))
    there = [key for key in ours.raw if key in theirs.raw]
    equal = sum(same(theirs.raw[key], ours.raw[key]) for key in there)
    return Merged(data, len(ours.raw) - len(there), len(there) - equal, equal, len(entries) - len(ours.raw))


def without(current: Config, previous: Config, original: Config | None) -> Config:
    """Return `current` as if `previous` had never been merged into `original`.

    An entry that the server has written since stays.
    """
    before = {e.text: e for e in original.entries} if original is not None else {}
    entries: list[Entry] = []
    for entry in current.entries:
        if entry.text not in previous.raw or not same(entry.value, previous.raw[entry.text]):
            entries.append(entry)
        elif entry.text in before:
            entries.append(before[entry.text])
    return replace(current, entries=tuple(entries))


def check_metadata(path: Path, ours: Config, theirs_path: Path, theirs: Config) -> None:
    """See that a config may go into a server's file: both are for the same environment.

    A wildcard on either side fits everything, as in FlashInfer.

    Raises
    ------
    SynthError
        When they differ, or FlashInfer wouldn't read the server's file at all.
    """
    assert isinstance(ours.metadata, dict)
    again = "start the server once more so that it writes a new one"
    if not isinstance(theirs.metadata, dict):
        raise SynthError(f"{theirs_path} has no _metadata that says what it was tuned on; {again}")
    version = ours.metadata["flashinfer_version"]
    keys = contract_for(version).metadata_keys
    missing = [key for key in keys if key not in theirs.metadata]
    if missing:
        raise SynthError(f"{theirs_path}: its _metadata lacks {', '.join(missing)}, so FlashInfer ignores it; {again}")
    differing = [
        key for key in keys if ours.metadata.get(key) != theirs.metadata[key] and theirs.metadata[key] != "*"
        and ours.metadata.get(key) != "*"
    ]  # fmt: skip
    if differing:
        said = ", ".join(
            f"{key} is {theirs.metadata[key]!r}, in {path} {ours.metadata.get(key)!r}" for key in differing
        )
        raise SynthError(f"{theirs_path}: {said}; {_way_out(path, differing, theirs.metadata)}")


def _way_out(path: Path, differing: list[str], theirs: Mapping[str, object]) -> str:
    if "gpu" in differing:
        return f"tactics of one GPU aren't another's: synth emit --device \"{theirs['gpu']}\""
    if "flashinfer_version" in differing:
        return f"`synth port {path} --to {theirs['flashinfer_version']} -o OUT` rewrites it"
    return "install in an environment with the same versions"


def same(a: object, b: object) -> bool:
    """Whether two values are the same JSON; 1, 1.0 and true are not, and as tactics they differ."""
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)
