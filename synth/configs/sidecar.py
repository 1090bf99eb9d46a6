"""The file beside a config that says of every choice where it comes from: `CONFIG.provenance.json`."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from synth.catalog import untrusted
from synth.errors import SynthError

#: Where an entry comes from, the surest first.
SOURCES = ("measured", "verified", "predicted", "analytical")
#: The H200's sidecar for the whole catalogue has 19 MiB.
_MAX_BYTES = 128 << 20
_SUFFIX = ".provenance.json"
#: Within so many bytes a sidecar names the digest of its config.
_HEAD_BYTES = 200


class Record(NamedTuple):
    """One choice, as the sidecar has it.

    Attributes
    ----------
    shape : str
        The layer on one rank, as :class:`synth.catalog.shapes.MoEShape` writes it.
    labels : tuple of str
        Deployments that pass this layer, for example ``glm-5-tp8``.
    quant : str
    stage, bucket : int
    fused_finalize : bool
        The server lets gemm2 fuse the finalize step.
    source : str
        One of :data:`SOURCES`.
    written : bool
        The choice is in the config; else it is left out.
    tactic, runner_up : str
        The chosen tactic and the next one, as :class:`synth.flashinfer.tactics.Tactic` writes them.
    ms, runner_up_ms, fallback_ms : float or None
        Times of the two and of the fallback, in ms; measured or predicted as `source` says.
    margin : float or None
        ``runner_up_ms / ms - 1``.
    expected_regret : float or None
        As a share of the best time.
    within_1, within_2 : float or None
        Probability of being within 1 % and 2 % of the best.
    candidates : int or None
        Tactics that were compared.
    keys : tuple of str
        Every key that asks for this choice.
    ported_from : str
        FlashInfer version under which the choice was made, where it is another one; ``""`` else. Its source is then
        never better than predicted.
    """

    shape: str
    labels: tuple[str, ...]
    quant: str
    stage: int
    bucket: int
    fused_finalize: bool
    source: str
    written: bool
    tactic: str
    ms: float | None
    runner_up: str
    runner_up_ms: float | None
    margin: float | None
    fallback_ms: float | None
    expected_regret: float | None
    within_1: float | None
    within_2: float | None
    candidates: int | None
    keys: tuple[str, ...]
    ported_from: str = ""

    @property
    def gain(self) -> float | None:
        """The fallback's time over the choice's, None where one isn't known."""
        return self.fallback_ms / self.ms if self.fallback_ms and self.ms else None


@dataclass(frozen=True)
class Sidecar:
    """What a config came with.

    Attributes
    ----------
    head : mapping
        Device, FlashInfer version, models, counts: everything but the choices and the config's digest.
    records : tuple of Record
        In the file's order.
    """

    head: Mapping[str, Any]
    records: tuple[Record, ...]

    def dumps(self, config: bytes) -> bytes:
        """Return the sidecar of a config as bytes, a choice a line: readable, and quick to write."""
        head = {"config_sha256": hashlib.sha256(config).hexdigest(), **self.head}
        lines = ",\n".join(json.dumps(_as_json(record), allow_nan=False) for record in self.records)
        return f'{json.dumps(head, indent=1, allow_nan=False)[:-2]},\n "choices": [\n{lines}\n]}}\n'.encode()

    def counts(self) -> dict[str, int]:
        """Return the number of keys that are written, by source."""
        found = dict.fromkeys(SOURCES, 0)
        for key_source in self.written().values():
            found[key_source.source] += 1
        return {source: n for source, n in found.items() if n}

    def written(self) -> dict[str, Record]:
        """Return the record of every key that is in the config; a key's first one is the one that counts."""
        found: dict[str, Record] = {}
        for record in self.records:
            if record.written:
                for key in record.keys:
                    found.setdefault(key, record)
        return found

    def renamed(self, keys: Mapping[str, Mapping[str, None]], to: str, source: str) -> Sidecar:
        """Return the sidecar of the config under FlashInfer `to`, where each key has become others, or none.

        A timing under another version doesn't measure this one, so what was measured or verified is predicted.
        """
        records = []
        for record in self.records:
            fresh = tuple(dict.fromkeys(new for key in record.keys for new in keys.get(key, ())))
            if fresh:
                kind = "predicted" if record.source in ("measured", "verified") else record.source
                ported_from = record.ported_from or source
                records.append(record._replace(keys=fresh, source=kind, ported_from=ported_from))
        return Sidecar({**self.head, "flashinfer": to}, tuple(records))


def sidecar_path(config: Path) -> Path:
    """Return where a config's sidecar is: beside it."""
    return config.with_name(config.name + _SUFFIX)


def belongs(config: Path, sha256: str) -> bool:
    """Tell whether there is no sidecar beside a config, or one whose first line names the config's digest.

    So much can be told without reading all of it.
    """
    path = sidecar_path(config)
    if not path.is_file():
        return not os.path.lexists(path)
    with path.open("rb") as f:
        return sha256.encode() in f.read(_HEAD_BYTES)


def read(config: Path, sha256: str) -> Sidecar | None:
    """Read the sidecar beside a config, None where there is none.

    Raises
    ------
    SynthError
        When it can't be read, or is another config's: one of them was changed or moved alone.
    """
    path = sidecar_path(config)
    if not os.path.lexists(path):
        return None
    data = untrusted.read_bytes(path, _MAX_BYTES, "sidecar; move it away to go on without")
    try:
        value = untrusted.loads(data, constants=False)
    except ValueError as e:
        raise SynthError(f"{path} is not JSON ({untrusted.first_line(e)}); move it away to go on without") from e
    if not isinstance(value, dict) or not isinstance(value.get("choices"), list):
        raise SynthError(f"{path} has no list of choices; move it away to go on without")
    if value.pop("config_sha256", None) != sha256:
        raise SynthError(
            f"{path} belongs to other contents than {config.name} has; emit both anew, or move it away to go on without"
        )
    choices = value.pop("choices")
    records = []
    for i, choice in enumerate(choices, 1):
        try:
            records.append(_record(choice))
        except (KeyError, TypeError, ValueError, OverflowError) as e:
            raise SynthError(
                f"{path}, choice {i}: {e.args[0] if e.args else e} is missing or wrong; emit it anew"
            ) from e
    return Sidecar(value, tuple(records))


def _as_json(record: Record) -> dict[str, Any]:
    found = dict(zip(_NAMES, record, strict=True))
    if not record.ported_from:
        del found["ported_from"]
    return found


def _record(choice: object) -> Record:
    """Return a record, or raise with the name of the field that is wrong."""
    if not isinstance(choice, dict):
        raise TypeError("the object")
    choice.setdefault("ported_from", "")
    values = [choice[name] for name in _NAMES]
    for name, good, value in zip(_NAMES, _CHECKS, values, strict=True):
        if not good(value):
            raise ValueError(name)
    return Record._make(tuple(value) if type(value) is list else value for value in values)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_source(value: object) -> bool:
    return isinstance(value, str) and value in SOURCES


def _is_list(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(v, str) for v in value)


def _is_truth(value: object) -> bool:
    return isinstance(value, bool)


def _is_count(value: object) -> bool:
    return type(value) is int and value > 0


def _is_number(value: Any) -> bool:
    return value is None or (type(value) in (int, float) and math.isfinite(value))


#: What each field of a record may be, by its name in Python and in the file.
_KINDS: dict[str, Callable[[object], bool]] = {
    **dict.fromkeys(("shape", "quant", "tactic", "runner_up", "ported_from"), _is_text),
    **dict.fromkeys(("labels", "keys"), _is_list),
    **dict.fromkeys(("fused_finalize", "written"), _is_truth),
    **dict.fromkeys(("stage", "bucket"), _is_count),
    "source": _is_source,
}
#: A record's fields as the file has them, and what each may be.
_NAMES = tuple({"within_1": "within_1%", "within_2": "within_2%"}.get(name, name) for name in Record._fields)
_CHECKS: tuple[Callable[[Any], bool], ...] = tuple(_KINDS.get(name, _is_number) for name in Record._fields)
