"""Config files as bytes: FlashInfer's v1 JSON, its bundled ``.py``, and its managed store (v2).

Reading keeps every entry as it is in the file, however wrong, so that :mod:`synth.checking.check`
can say what is wrong with it; :attr:`ConfigFile.entries` holds those that are well formed. A ``.py``
is parsed, never executed. Files may come from strangers: what they may cost is limited, see
:mod:`synth.catalog.untrusted`. Writing is deterministic: the same entries give the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from synth.catalog import untrusted
from synth.configs.modules import read_module
from synth.errors import SynthError
from synth.flashinfer.versions import POLICY, RUNNER

#: Keys of a v1 JSON file that are not entries.
METADATA, GENERATION, RECORDS = "_metadata", "_generation", "_records"
#: The bundled module's name, up to the GPU's.
BUNDLED_PREFIX = "v0_1_trtllm_fused_moe_"

_BUNDLED_TITLE = "FlashInfer MoE tactics, written by synth. Keys map to (0, tactic id)."
#: The H200's config for the whole catalogue, 27,408 entries, has 11 MiB, as a module 6 MiB.
_MAX_BYTES = 64 << 20
#: Most entries of a store.
_MAX_ENTRIES = 500_000
#: An entry of a store has 3 KiB.
_MAX_STORE_FILE = 64 << 10

_VERSION = re.compile(r"[0-9]{1,9}\.[0-9]{1,9}\.[0-9]{1,9}(?![0-9])")

#: The folder of a managed store below its root, the folder of entries in it, and the file that names its environment.
STORE_SCHEMA, _STORE_ENTRIES, MANIFEST = "v2", "entries", "manifest.json"


@dataclass(frozen=True)
class ConfigEntry:
    """One key's tactic.

    Attributes
    ----------
    key : str
        FlashInfer's file key.
    tactic_id : int
        For the FlashInfer version in the metadata.
    time_ms, runner_up_ms : float or None
        Time of the tactic and of the fastest other candidate, in ms.
    margin : float or None
        ``runner_up_ms / time_ms - 1``.
    candidates : int or None
        How many tactics were compared.
    """

    key: str
    tactic_id: int
    time_ms: float | None = None
    runner_up_ms: float | None = None
    margin: float | None = None
    candidates: int | None = None


@dataclass(frozen=True)
class ConfigFile:
    """A config file as read.

    Attributes
    ----------
    kind : str
        ``"json"``, ``"bundled"`` or ``"store"``.
    metadata : object
        The ``_metadata`` value, which should be a dict; None where there is none. Of a store its manifest.
    raw : dict
        Every entry's value by key, in the file's order. Those of a store are in the form of v1 JSON: runner, tactic
        and, where it is recorded, profiling policy.
    special : dict
        Other keys that FlashInfer doesn't take for entries.
    duplicates : tuple of str
        Keys that occur more than once; the last one counts.
    differing : tuple of str
        Those of them whose values differ.
    passed_over : dict
        Of a store: names of files that FlashInfer doesn't serve, and why. Their entries are not in `raw`.
    """

    kind: str
    metadata: object = None
    raw: Mapping[str, object] = field(default_factory=dict)
    special: Mapping[str, object] = field(default_factory=dict)
    duplicates: tuple[str, ...] = ()
    differing: tuple[str, ...] = ()
    passed_over: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def entries(self) -> tuple[ConfigEntry, ...]:
        """The well-formed entries, in the file's order."""
        parse = _entry_of_bundled if self.kind == "bundled" else _entry_of_json
        return tuple(e for key, value in self.raw.items() if (e := parse(key, value)) is not None)

    @property
    def gpu(self) -> str | None:
        """The GPU that the metadata names, None for a wildcard, an unknown or none."""
        gpu = self.metadata.get("gpu") if isinstance(self.metadata, dict) else None
        return gpu if isinstance(gpu, str) and gpu not in ("*", "unknown", "None", "") else None

    @property
    def flashinfer(self) -> str | None:
        """The FlashInfer version that the metadata names, which synth may not know; None where there is none."""
        version = self.metadata.get("flashinfer_version") if isinstance(self.metadata, dict) else None
        return version if isinstance(version, str) and _VERSION.match(version) else None


def gpu_of(config: ConfigFile, path: Path) -> str | None:
    """Return the GPU that a file is for: by its metadata, or, for a module, by its name."""
    if config.gpu is not None or config.kind != "bundled" or not path.stem.startswith(BUNDLED_PREFIX):
        return config.gpu
    return path.stem.removeprefix(BUNDLED_PREFIX).replace("_", " ")


def _entry_of_json(key: str, value: object) -> ConfigEntry | None:
    if not isinstance(value, list) or len(value) < 2 or value[0] != RUNNER or type(value[1]) is not int:
        return None
    if len(value) > 2 and not isinstance(value[2], list):
        return None
    selection = value[3] if len(value) > 3 and isinstance(value[3], dict) else {}
    candidates = selection.get("candidates")
    return ConfigEntry(
        key,
        value[1],
        _number(selection.get("time_ms")),
        _number(selection.get("runner_up_ms")),
        _number(selection.get("margin")),
        candidates if type(candidates) is int else None,
    )


def _entry_of_bundled(key: str, value: object) -> ConfigEntry | None:
    if not isinstance(value, (tuple, list)) or len(value) < 2 or type(value[1]) is not int:
        return None
    return ConfigEntry(key, value[1])


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


# ---- reading -----------------------------------------------------------------------------------------------


def read(path: Path) -> ConfigFile:
    """Read a v1 JSON file, a bundled module if the name ends in ``.py``, or a managed store if it is a folder.

    Parameters
    ----------
    path : Path
        Of a store: its root, or its folder for one environment, the one that holds ``manifest.json``.

    Raises
    ------
    SynthError
        When the file can't be read, is no JSON object, or, for ``.py``, holds anything but a docstring
        and ``best_configs = {…}``; when a root holds no store or those of several environments.
    """
    if path.is_dir():
        return _read_store(path)
    data = untrusted.read_bytes(path, _MAX_BYTES, "tuning config")
    if not data.strip():
        raise SynthError(f"{path} is empty; write it anew")
    if path.suffix != ".py":
        return _read_json(path, data)
    docstring, pairs = read_module(path, data)
    duplicates = _Duplicates()
    raw = duplicates(pairs)
    return ConfigFile("bundled", _metadata_of(docstring), raw, {}, tuple(duplicates.keys), tuple(duplicates.differing))


def _metadata_of(docstring: str | None) -> object:
    """Return the metadata that :func:`dumps_bundled` puts into a module's docstring."""
    try:
        text = docstring.partition("\n\n")[2] if docstring else ""
        return untrusted.loads(text.encode("utf-8", "surrogatepass")) if text else None
    except ValueError:
        return None


def _read_json(path: Path, data: bytes) -> ConfigFile:
    duplicates = _Duplicates()
    value = _object(path, data, duplicates)
    special = {key: value.pop(key) for key in (GENERATION, RECORDS) if key in value}
    return ConfigFile(
        "json", value.pop(METADATA, None), value, special, tuple(duplicates.keys), tuple(duplicates.differing)
    )


class _Duplicates:
    """Keeps the last of equal keys, as ``json.loads`` does, and remembers those of the outermost object."""

    def __init__(self) -> None:
        self.keys: dict[str, None] = {}
        self.differing: dict[str, None] = {}

    def __call__(self, pairs: list[tuple[str, object]]) -> dict[str, object]:
        # The outermost object is built last, so its duplicates are the ones that remain.
        self.keys.clear()
        self.differing.clear()
        seen: dict[str, object] = {}
        for key, value in pairs:
            if key in seen:
                self.keys[key] = None
                # As text, since 1, 1.0 and true are equal, and NaN isn't even equal to itself.
                if repr(seen[key]) != repr(value):
                    self.differing[key] = None
            seen[key] = value
        return seen


def _object(path: Path, data: bytes, pairs: _Duplicates | None = None) -> dict[str, object]:
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


# ---- reading a managed store -------------------------------------------------------------------------------


def environment_hash(manifest: Mapping[str, object]) -> str:
    """Return the name of the folder in which FlashInfer looks for the entries of an environment."""
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def entry_file(key: str) -> str:
    """Return the name of the file in which FlashInfer looks for a key's entry."""
    return f"{hashlib.sha256(key.encode('utf-8', 'surrogatepass')).hexdigest()[:24]}.json"


def _read_store(path: Path) -> ConfigFile:
    folder = _environment_folder(path)
    manifest = _object(folder / MANIFEST, _store_bytes(folder / MANIFEST))
    passed_over: dict[str, str] = {}
    named = environment_hash(manifest)
    if folder.resolve().name != named:
        passed_over[MANIFEST] = f"it describes the environment {named}, and the folder is {folder.resolve().name}"
    raw: dict[str, object] = {}
    for name in _store_files(folder):
        try:
            key, value = _store_entry(folder / _STORE_ENTRIES / name, name)
        except SynthError as e:
            passed_over[name] = str(e)
        else:
            raw[key] = value
    return ConfigFile("store", manifest, raw, passed_over=passed_over)


def _environment_folder(path: Path) -> Path:
    if os.path.lexists(path / MANIFEST):
        return path
    base = path / STORE_SCHEMA if (path / STORE_SCHEMA).is_dir() else path
    # A link could lead anywhere.
    found = sorted(d for d in base.iterdir() if not d.is_symlink() and d.is_dir() and os.path.lexists(d / MANIFEST))
    if not found:
        raise SynthError(f"can't read {path}: Is a directory, and no managed store of FlashInfer; name a config file")
    if len(found) > 1:
        names = ", ".join(d.name for d in found[:8])
        raise SynthError(f"{base} holds the stores of {len(found)} environments; name one of its folders: {names}")
    return found[0]


def _store_files(folder: Path) -> list[str]:
    entries = folder / _STORE_ENTRIES
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


def _store_bytes(path: Path) -> bytes:
    if path.is_symlink():
        raise SynthError(f"{path} is a link, which synth doesn't follow; put the file itself in its place")
    return untrusted.read_bytes(path, _MAX_STORE_FILE, "file of a store")


def _store_entry(path: Path, name: str) -> tuple[str, list[object]]:
    """Return an entry's key and its value in the form of v1 JSON.

    Raises
    ------
    SynthError
        When FlashInfer takes the file for a miss.
    """
    entry = _object(path, _store_bytes(path))
    missing = [field for field in ("key", "runner", "tactic") if field not in entry]
    if missing:
        raise SynthError(f"it has no {' and no '.join(missing)}")
    key = entry["key"]
    if not isinstance(key, str):
        raise SynthError(f"its key is {untrusted.shown(key)}, no text")
    if name != entry_file(key):
        raise SynthError(f"FlashInfer looks its key up in {entry_file(key)}")
    value = [entry["runner"], entry["tactic"]]
    policy = entry.get("profiling_policy")
    return key, [*value, policy] if isinstance(policy, list) else value


# ---- writing -----------------------------------------------------------------------------------------------


def dumps_json(metadata: Mapping[str, object], entries: Iterable[ConfigEntry]) -> bytes:
    """Return a v1 JSON file: metadata first, then one line an entry, sorted by key.

    Times have 6 significant digits; an entry without any has no fourth element.

    Raises
    ------
    SynthError
        When a key occurs twice, an id is no number from 0, or a time is not finite.
    """
    lines = [f"{_json(METADATA)}: {_json(metadata)}"]
    for entry in _sorted(entries):
        value: list[object] = [RUNNER, entry.tactic_id, list(POLICY)]
        selection = {
            "time_ms": _rounded(entry, entry.time_ms),
            "runner_up_ms": _rounded(entry, entry.runner_up_ms),
            "margin": _rounded(entry, entry.margin),
            "candidates": entry.candidates,
        }
        if any(v is not None for v in selection.values()):
            value.append(selection)
        lines.append(f"{_json(entry.key)}: {_json(value)}")
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode("ascii")


def dumps_bundled(metadata: Mapping[str, object], entries: Iterable[ConfigEntry]) -> bytes:
    """Return a bundled module: the metadata as its docstring, one line an entry, sorted by key.

    Raises
    ------
    SynthError
        As :func:`dumps_json`.
    """
    head = json.dumps(metadata, sort_keys=True, indent=1, allow_nan=False)
    head = head.replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
    lines = [f'"""{_BUNDLED_TITLE}\n\n{head}\n"""\n', "best_configs = {"]
    lines += [f"    {entry.key!a}: (0, {entry.tactic_id})," for entry in _sorted(entries)]
    return ("\n".join([*lines, "}"]) + "\n").encode("ascii")


def _sorted(entries: Iterable[ConfigEntry]) -> list[ConfigEntry]:
    found: dict[str, ConfigEntry] = {}
    for entry in entries:
        if entry.key in found or entry.key in (METADATA, GENERATION, RECORDS):
            raise SynthError(f"the key {entry.key!r} occurs twice or is reserved; give each key one entry")
        if type(entry.tactic_id) is not int or entry.tactic_id < 0:
            raise SynthError(f"{entry.key!r}: the tactic id {entry.tactic_id!r} is no number from 0")
        found[entry.key] = entry
    return [found[key] for key in sorted(found)]


def _rounded(entry: ConfigEntry, value: float | None) -> float | None:
    if value is None:
        return None
    if not math.isfinite(value):
        raise SynthError(f"{entry.key!r}: a time or margin is {value}; leave it out")
    return float(f"{value:.6g}")


def _json(value: object) -> str:
    return json.dumps(value, sort_keys=True, allow_nan=False)
