"""FlashInfer's managed store (v2) as read: one environment's folder, with a file an entry."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from synth.catalog import untrusted
from synth.configs.model import Config, Entry
from synth.configs.v1 import json_entry, json_object
from synth.errors import SynthError

#: The folder of a managed store below its root, the folder of entries in it, and the file that names its environment.
STORE_SCHEMA, ENTRIES, MANIFEST = "v2", "entries", "manifest.json"

#: Most entries of a store.
_MAX_ENTRIES = 500_000
#: An entry of a store has 3 KiB.
_MAX_FILE = 64 << 10


def environment_hash(manifest: Mapping[str, object]) -> str:
    """Return the name of the folder in which FlashInfer looks for the entries of an environment."""
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def entry_file(key: str) -> str:
    """Return the name of the file in which FlashInfer looks for a key's entry."""
    return f"{hashlib.sha256(key.encode('utf-8', 'surrogatepass')).hexdigest()[:24]}.json"


def is_store(path: Path) -> bool:
    """Tell whether a folder is a store's root or one of its environments."""
    return os.path.lexists(path / MANIFEST) or bool(_environments(_base(path)))


def read_store(path: Path) -> Config:
    """Read one environment of a store.

    Raises
    ------
    SynthError
        When there are several, or the manifest can't be read.
    """
    folder = path if os.path.lexists(path / MANIFEST) else _only(_base(path))
    manifest = json_object(folder / MANIFEST, _bytes(folder / MANIFEST))
    passed_over: dict[str, str] = {}
    named = environment_hash(manifest)
    if folder.resolve().name != named:
        passed_over[MANIFEST] = f"it describes the environment {named}, and the folder is {folder.resolve().name}"
    # As a mapping, for two files can hold one key.
    entries: dict[str, Entry] = {}
    for name in _files(folder):
        try:
            entry = _entry(folder / ENTRIES / name, name)
        except SynthError as e:
            passed_over[name] = str(e)
        else:
            entries[entry.text] = entry
    return Config("store", tuple(entries.values()), manifest, passed_over=passed_over, path=path)


def _base(path: Path) -> Path:
    return path / STORE_SCHEMA if (path / STORE_SCHEMA).is_dir() else path


def _environments(base: Path) -> list[Path]:
    # A link could lead anywhere.
    try:
        return sorted(d for d in base.iterdir() if not d.is_symlink() and d.is_dir() and os.path.lexists(d / MANIFEST))
    except OSError as e:
        raise SynthError(f"can't read {base}: {e.strerror or e}; name a config file") from e


def _only(base: Path) -> Path:
    found = _environments(base)
    if len(found) > 1:
        names = ", ".join(d.name for d in found[:8])
        raise SynthError(f"{base} holds the stores of {len(found)} environments; name one of its folders: {names}")
    return found[0]


def _files(folder: Path) -> list[str]:
    entries = folder / ENTRIES
    if entries.is_symlink():
        raise SynthError(f"{entries} is a link, which synth doesn't follow; name the folder that it leads to")
    names: list[str] = []
    try:
        with os.scandir(entries) as found:
            for item in found:
                # Others, such as the temporary files of a writer, are no entries to FlashInfer either.
                if item.name.endswith(".json"):
                    names.append(item.name)
                if len(names) > _MAX_ENTRIES:
                    raise SynthError(f"{entries} holds more than {_MAX_ENTRIES} files; that is no tuning store")
    except FileNotFoundError:
        return []
    except OSError as e:
        raise SynthError(f"can't read {entries}: {e.strerror or e}; restore the folder") from e
    return sorted(names)


def _bytes(path: Path) -> bytes:
    if path.is_symlink():
        raise SynthError(f"{path} is a link, which synth doesn't follow; put the file itself in its place")
    return untrusted.read_bytes(path, _MAX_FILE, "file of a store")


def _entry(path: Path, name: str) -> Entry:
    """Return an entry in the form of v1 JSON; raises SynthError, without the file's name, where it is none."""
    content = json_object(path, _bytes(path))
    missing = [field for field in ("key", "runner", "tactic") if field not in content]
    if missing:
        raise SynthError(f"it has no {' and no '.join(missing)}")
    key = content["key"]
    if not isinstance(key, str):
        raise SynthError(f"its key is {untrusted.shown(key)}, no text")
    if name != entry_file(key):
        raise SynthError(f"FlashInfer looks its key up in {entry_file(key)}")
    value = [content["runner"], content["tactic"]]
    policy = content.get("profiling_policy")
    return json_entry(key, [*value, policy] if isinstance(policy, list) else value)
