"""Config files as bytes: FlashInfer's v1 JSON and its bundled ``.py``.

Reading keeps every entry as it is in the file, however wrong, so that :mod:`synth.flashinfer.checking`
can say what is wrong with it; :attr:`ConfigFile.entries` holds those that are well formed. A ``.py``
is parsed, never executed. Writing is deterministic: the same entries give the same bytes.
"""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from synth.errors import SynthError
from synth.flashinfer.contract import POLICY, RUNNER

#: Keys of a v1 JSON file that are not entries.
METADATA, GENERATION, RECORDS = "_metadata", "_generation", "_records"
#: The bundled module's name, up to the GPU's.
BUNDLED_PREFIX = "v0_1_trtllm_fused_moe_"

_BUNDLED_TITLE = "FlashInfer MoE tactics, written by synth. Keys map to (0, tactic id)."
_MAX_BYTES = 1 << 28
_TOO_WRONG = (ValueError, RecursionError, MemoryError)


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
        ``"json"`` or ``"bundled"``.
    metadata : object
        The ``_metadata`` value, which should be a dict; None where there is none.
    raw : dict
        Every entry's value by key, in the file's order.
    special : dict
        Other keys that FlashInfer doesn't take for entries.
    duplicates : tuple of str
        Keys that occur more than once; the last one counts.
    """

    kind: str
    metadata: object = None
    raw: Mapping[str, object] = field(default_factory=dict)
    special: Mapping[str, object] = field(default_factory=dict)
    duplicates: tuple[str, ...] = ()

    @cached_property
    def entries(self) -> tuple[ConfigEntry, ...]:
        """The well-formed entries, in the file's order."""
        parse = _entry_of_json if self.kind == "json" else _entry_of_bundled
        return tuple(e for key, value in self.raw.items() if (e := parse(key, value)) is not None)

    @property
    def gpu(self) -> str | None:
        """The GPU that the metadata names, None for a wildcard, an unknown or none."""
        gpu = self.metadata.get("gpu") if isinstance(self.metadata, dict) else None
        return gpu if isinstance(gpu, str) and gpu not in ("*", "unknown", "None", "") else None


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
    """Read a v1 JSON file, or a bundled module if the name ends in ``.py``.

    Raises
    ------
    SynthError
        When the file can't be read, is no JSON object, or, for ``.py``, holds anything but a docstring
        and ``best_configs = {…}``.
    """
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise SynthError(f"{path} is larger than {_MAX_BYTES >> 20} MiB; that is no tuning config")
        data = path.read_bytes()
    except OSError as e:
        raise SynthError(f"can't read {path}: {e.strerror or e}; name a config file") from e
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as e:
        raise SynthError(f"{path} is not UTF-8 text (byte {e.start}); name a config file") from e
    if not text.strip():
        raise SynthError(f"{path} is empty; write it anew")
    return _read_bundled(path, text) if path.suffix == ".py" else _read_json(path, text)


def _read_json(path: Path, text: str) -> ConfigFile:
    duplicates: list[str] = []

    def keep_last(pairs: list[tuple[str, object]]) -> dict[str, object]:
        # The outermost object is built last, so its duplicates are the ones that remain.
        seen: dict[str, object] = {}
        duplicates.clear()
        for key, value in pairs:
            if key in seen:
                duplicates.append(key)
            seen[key] = value
        return seen

    try:
        value = json.loads(text, object_pairs_hook=keep_last)
    except json.JSONDecodeError as e:
        raise SynthError(f"{path} is not JSON, line {e.lineno}: {e.msg}; restore the file or write it anew") from e
    except _TOO_WRONG as e:
        raise SynthError(f"{path} can't be read as JSON: {_first_line(e)}; write it anew") from e
    if not isinstance(value, dict):
        raise SynthError(f"{path} holds a JSON {type(value).__name__}, not an object of keys; write it anew")
    special = {key: value.pop(key) for key in (GENERATION, RECORDS) if key in value}
    return ConfigFile("json", value.pop(METADATA, None), value, special, tuple(dict.fromkeys(duplicates)))


def _read_bundled(path: Path, text: str) -> ConfigFile:
    try:
        tree = ast.parse(text)
    except SyntaxError as e:
        raise SynthError(f"{path} is not Python, line {e.lineno}: {e.msg}; restore the file or write it anew") from e
    except _TOO_WRONG as e:
        raise SynthError(f"{path} can't be parsed: {_first_line(e)}; write it anew") from e
    body = list(tree.body)
    docstring = ast.get_docstring(tree, clean=False)
    if docstring is not None:
        body.pop(0)
    if len(body) != 1 or not isinstance(body[0], ast.Assign) or not _assigns_best_configs(body[0]):
        raise SynthError(f"{path} holds code other than 'best_configs = {{…}}'; synth reads only that literal")
    node = body[0].value
    if not isinstance(node, ast.Dict):
        raise SynthError(f"{path}, line {node.lineno}: best_configs is not a dict literal; write it anew")
    raw: dict[str, object] = {}
    duplicates: dict[str, None] = {}
    for k, v in zip(node.keys, node.values, strict=True):
        try:
            key, value = ast.literal_eval(k) if k is not None else None, ast.literal_eval(v)
        except (*_TOO_WRONG, SyntaxError, TypeError) as e:
            raise SynthError(f"{path}, line {v.lineno}: not a literal; write 'key': (0, tactic)") from e
        if not isinstance(key, str):
            raise SynthError(f"{path}, line {v.lineno}: a key is not text; write 'key': (0, tactic)")
        if key in raw:
            duplicates[key] = None
        raw[key] = value
    return ConfigFile("bundled", _bundled_metadata(docstring), raw, {}, tuple(duplicates))


def _assigns_best_configs(node: ast.Assign) -> bool:
    target = node.targets[0]
    return len(node.targets) == 1 and isinstance(target, ast.Name) and target.id == "best_configs"


def _bundled_metadata(docstring: str | None) -> object:
    try:
        return json.loads(docstring.partition("\n\n")[2]) if docstring else None
    except _TOO_WRONG:
        return None


def _first_line(e: BaseException) -> str:
    return (str(e).splitlines() or [type(e).__name__])[0]


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
