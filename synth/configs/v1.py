"""FlashInfer's v1 JSON: metadata, and an entry a key. The same entries give the same bytes."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

from synth.catalog import untrusted
from synth.configs.model import GENERATION, METADATA, RECORDS, Config, Entry
from synth.errors import SynthError
from synth.flashinfer.versions import POLICY, RUNNER

#: The H200's config for the whole catalogue, 27,592 entries, has 11 MiB.
MAX_BYTES = 64 << 20


def loads(path: Path, data: bytes) -> Config:
    """Return what a v1 file holds; `path` is only named in errors.

    Raises
    ------
    SynthError
        When it isn't a JSON object.
    """
    duplicates = Duplicates()
    raw = json_object(path, data, duplicates)
    members = {name: raw.pop(name) for name in (GENERATION, RECORDS) if name in raw}
    metadata = raw.pop(METADATA, None)
    entries = tuple(json_entry(key, value) for key, value in raw.items())
    return Config("json", entries, metadata, members, tuple(duplicates.keys), tuple(duplicates.differing))


class Duplicates:
    """Keeps the last of equal keys, as ``json.loads`` does, and remembers those of the outermost object."""

    def __init__(self) -> None:
        self.keys: dict[str, None] = {}
        self.differing: dict[str, None] = {}

    def __call__(self, pairs: list[tuple[str, object]]) -> dict[str, object]:
        # The outermost object is built last, so its duplicates are the ones that remain.
        self.keys.clear()
        self.differing.clear()
        seen = dict(pairs)
        if len(seen) == len(pairs):
            return seen
        seen.clear()
        for key, value in pairs:
            if key in seen:
                self.keys[key] = None
                # As text, since 1, 1.0 and true are equal, and NaN isn't even equal to itself.
                if repr(seen[key]) != repr(value):
                    self.differing[key] = None
            seen[key] = value
        return seen


def json_object(path: Path, data: bytes, pairs: Duplicates | None = None) -> dict[str, object]:
    """Return the object that a JSON file holds; raises SynthError where it holds another thing."""
    try:
        value = untrusted.loads(data, pairs=pairs)
    except UnicodeDecodeError as e:
        raise SynthError(f"{path} is not UTF-8 text (byte {e.start}); name a config file") from e
    except json.JSONDecodeError as e:
        raise SynthError(f"{path} is not JSON, line {e.lineno}: {e.msg}; restore the file or write it anew") from e
    except ValueError as e:
        raise SynthError(f"{path} can't be read as JSON: {untrusted.first_line(e)}; write it anew") from e
    if not isinstance(value, dict):
        raise SynthError(f"{path} holds a JSON {type(value).__name__}, not an object of keys; write it anew")
    return value


# ---- one entry ---------------------------------------------------------------------------------------------


def json_entry(key: str, value: object) -> Entry:
    """Return an entry of the v1 form: ``[runner, tactic id, policy, selection]``, of which the last two may lack."""
    if not isinstance(value, list) or len(value) < 2 or value[0] != RUNNER or type(value[1]) is not int:
        return Entry(key, None, value=value)
    if len(value) > 2 and not isinstance(value[2], list):
        return Entry(key, None, value=value)
    selection = value[3] if len(value) > 3 and isinstance(value[3], dict) else {}
    candidates = selection.get("candidates")
    return Entry(
        key,
        value[1],
        _number(selection.get("time_ms")),
        _number(selection.get("runner_up_ms")),
        _number(selection.get("margin")),
        candidates if type(candidates) is int else None,
        value,
    )


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


# ---- writing -----------------------------------------------------------------------------------------------


def dumps_json(metadata: Mapping[str, object], entries: Iterable[Entry]) -> bytes:
    """Return a v1 JSON file: metadata first, then one line an entry, sorted by key.

    Raises
    ------
    SynthError
        When a key occurs twice or is reserved, an id is no number from 0, or a time isn't finite.
    """
    lines = [f"{_json(METADATA)}: {_json(metadata)}"]
    for entry in in_order(entries):
        value: list[object] = [RUNNER, entry.tactic_id, list(POLICY)]
        selection = {
            "time_ms": _rounded(entry, entry.time_ms),
            "runner_up_ms": _rounded(entry, entry.runner_up_ms),
            "margin": _rounded(entry, entry.margin),
            "candidates": entry.candidates,
        }
        if any(v is not None for v in selection.values()):
            value.append(selection)
        lines.append(f"{_json(entry.text)}: {_json(value)}")
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode("ascii")


def in_order(entries: Iterable[Entry]) -> list[Entry]:
    """Return entries that are to be written, sorted by key; raises SynthError where one can't be."""
    found: dict[str, Entry] = {}
    for entry in entries:
        if entry.text in found or entry.text in (METADATA, GENERATION, RECORDS):
            raise SynthError(f"the key {entry.text!r} occurs twice or is reserved; give each key one entry")
        if type(entry.tactic_id) is not int or entry.tactic_id < 0:
            raise SynthError(f"{entry.text!r}: the tactic id {entry.tactic_id!r} is no number from 0")
        found[entry.text] = entry
    return [found[key] for key in sorted(found)]


def _rounded(entry: Entry, value: float | None) -> float | None:
    if value is None:
        return None
    if not math.isfinite(value):
        raise SynthError(f"{entry.text!r}: a time or margin is {value}; leave it out")
    return float(f"{value:.6g}")


_json = json.JSONEncoder(sort_keys=True, allow_nan=False).encode


def contents(config: Config) -> dict[str, object]:
    """Return everything that a v1 file holds, as it stands there."""
    head: dict[str, object] = {} if config.metadata is None else {METADATA: config.metadata}
    return {**head, **config.members, **config.raw}


def dumps_as_served(config: Config) -> bytes:
    """Return a config, every value as it stands, as FlashInfer 0.7.4's ``AutoTuner.save_configs`` writes it."""
    content: dict[str, object] = {}
    if config.metadata is not None:
        content[METADATA] = config.metadata
    if RECORDS in config.members:
        content[RECORDS] = config.members[RECORDS]
    content.update(sorted(config.raw.items()))
    if GENERATION in config.members:
        # vLLM counts it among the entries when it compares ranks, so that it may not come or go.
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
        content[GENERATION] = hashlib.sha256(canonical.encode()).hexdigest()
    return json.dumps(content, indent=2).encode()
