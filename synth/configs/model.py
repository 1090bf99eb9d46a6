"""One config, read once: everything that is in it, as it stands, and what can be told of each entry."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from synth.catalog.shapes import MoEShape
from synth.configs.sidecar import Record, Sidecar
from synth.configs.sidecar import read as read_sidecar
from synth.errors import SynthError
from synth.flashinfer.keys import Key, parse_key
from synth.flashinfer.meaning import tables_of, tactic_of
from synth.flashinfer.tactics import Tactic
from synth.flashinfer.versions import OPS, arch_of

#: The bundled module's name, up to the GPU's.
BUNDLED_PREFIX = "v0_1_trtllm_fused_moe_"
#: Keys of a v1 JSON file that are not entries.
METADATA, GENERATION, RECORDS = "_metadata", "_generation", "_records"

_VERSION = re.compile(r"[0-9]{1,9}\.[0-9]{1,9}\.[0-9]{1,9}(?![0-9])")
#: What stands in metadata for a GPU or a version that isn't one.
_NO_NAMES = ("*", "unknown", "None", "")
#: How a key of any operation begins.
_ANY_KEY = re.compile(r"\('([^']{1,200})', '[^']{1,200}', \(")
#: Names of operations at least this alike (0 to 1) are the same with an error in it: those of FlashInfer's other MoE
#: operations are at most 0.45 from gemm1's.
_ALIKE = 0.6


def module_name(gpu: str) -> str:
    """Return the file name by which FlashInfer finds a GPU's bundled module."""
    return f"{BUNDLED_PREFIX}{gpu.replace(' ', '_')}.py"


@dataclass(frozen=True)
class Meaning:
    """What an entry is about, as far as its key and its id tell under one FlashInfer version.

    Attributes
    ----------
    shape : MoEShape or None
        The layer on one rank.
    quant : str
        ``""`` where it is none that synth has tactics for, or the key doesn't say.
    fused : bool
        Whether gemm2 may fuse the finalize step.
    tactic : Tactic or None
        None where the id has no meaning, or several.
    """

    shape: MoEShape | None
    quant: str
    fused: bool
    tactic: Tactic | None


@dataclass(frozen=True)
class Entry:
    """One key of a config, and what the config says there.

    Attributes
    ----------
    text : str
        FlashInfer's file key, as it stands.
    tactic_id : int or None
        For the FlashInfer version of the metadata; None where the value has no form that holds one.
    time_ms, runner_up_ms : float or None
        Time of the tactic and of the fastest other candidate, in ms.
    margin : float or None
        ``runner_up_ms / time_ms - 1``.
    candidates : int or None
        How many tactics were compared.
    value : object
        What was read, as it stands.
    """

    text: str
    tactic_id: int | None
    time_ms: float | None = None
    runner_up_ms: float | None = None
    margin: float | None = None
    candidates: int | None = None
    value: object = field(default=None, compare=False)

    @cached_property
    def key(self) -> Key | None:
        """The key, taken apart; None where it can't be, see :attr:`problem`."""
        try:
            return parse_key(self.text)
        except SynthError:
            return None

    @property
    def problem(self) -> str:
        """Why the key can't be taken apart; ``""`` where it can."""
        try:
            parse_key(self.text)
        except SynthError as e:
            return str(e)
        return ""

    @property
    def layer_key(self) -> Key | None:
        """The key where it is one of an MoE layer, with five shapes; else None."""
        key = self.key
        return key if key is not None and key.stage is not None and key.call.has_layer_form else None

    @property
    def other_operation(self) -> str | None:
        """The operation of a key that is none of the CUTLASS MoE's, nor one of these misspelt."""
        m = _ANY_KEY.match(self.text)
        return m[1] if m is not None and _is_foreign(m[1]) else None

    def meaning(self, flashinfer: str, arch: str | None) -> Meaning:
        """Return what the entry is about under a FlashInfer version, on a GPU of `arch` or on any."""
        key = self.layer_key
        if key is None:
            return Meaning(None, "", True, None)
        shape, quant, fused = _layer_of(key, flashinfer)
        meant: set[Tactic | None] = {None}
        stage = key.stage or 1
        if self.tactic_id is not None:
            # -1 runs the first tactic of the stage.
            meant = {
                t.tactic(t.fallback_id(stage)) if self.tactic_id == -1 else tactic_of(t, stage, self.tactic_id)
                for t in tables_of(key.call, flashinfer, arch)
            }
        return Meaning(shape, quant, fused, meant.pop() if len(meant) == 1 else None)


@functools.lru_cache(maxsize=1024)
def _is_foreign(operation: str) -> bool:
    alike = difflib.SequenceMatcher(None, operation, OPS[1], autojunk=False).ratio()
    return operation not in OPS.values() and alike < _ALIKE


def _layer_of(key: Key, flashinfer: str) -> tuple[MoEShape | None, str, bool]:
    try:
        named = key.named(flashinfer)
        return key.shape(flashinfer), key.quant(flashinfer) or "", named.get("use_fused_finalize") is not False
    except SynthError:
        return None, "", True


@dataclass(frozen=True)
class Config:
    """A config as read. Nothing in it is changed, and nothing left out.

    Attributes
    ----------
    form : str
        ``"json"`` (v1), ``"bundled"`` (a module), ``"store"`` (v2), or ``"server"`` (a folder with a file a rank).
    entries : tuple of Entry
        Every key that isn't metadata, in the file's order: also those of other operations, and whatever is no key.
    metadata : object
        ``_metadata``, the docstring's metadata of a module, or a store's manifest; usually a dict.
    members : mapping
        Top-level members of a JSON file that are no entries: ``_generation`` and ``_records``.
    duplicates : tuple of str
        Keys that occur more than once in the file, of which the last counts.
    differing : tuple of str
        Those of them whose values differ.
    passed_over : mapping
        Files of a store that FlashInfer doesn't take, and why.
    path : Path or None
        Where it was read.
    sha256 : str
        Of the file's bytes; ``""`` for a folder.
    parts : tuple of Config
        Of a server's folder, the ranks' files; the entries are those of the first one.
    """

    form: str
    entries: tuple[Entry, ...] = ()
    metadata: object = None
    members: Mapping[str, object] = field(default_factory=dict)
    duplicates: tuple[str, ...] = ()
    differing: tuple[str, ...] = ()
    passed_over: Mapping[str, str] = field(default_factory=dict)
    path: Path | None = None
    sha256: str = ""
    parts: tuple[Config, ...] = ()

    @cached_property
    def raw(self) -> Mapping[str, object]:
        """Every entry's value by its key, as they stand."""
        return {entry.text: entry.value for entry in self.entries}

    @cached_property
    def served(self) -> tuple[Entry, ...]:
        """The entries whose values have the form that FlashInfer serves a tactic from, whatever their keys."""
        return tuple(entry for entry in self.entries if entry.tactic_id is not None)

    @property
    def said(self) -> Mapping[str, object]:
        """The metadata as a mapping, empty where it is none."""
        return self.metadata if isinstance(self.metadata, dict) else {}

    @property
    def provenance(self) -> Mapping[str, object]:
        """What ``synth`` wrote into the metadata; empty where it didn't."""
        own = self.said.get("synth")
        return own if isinstance(own, dict) else {}

    def count(self, *names: str) -> int:
        """Return a number of the provenance, 0 where there is none: ``count("entries", "analytical")``."""
        value: object = self.provenance
        for name in names:
            value = value.get(name) if isinstance(value, dict) else None
        return value if type(value) is int else 0

    @property
    def named_gpu(self) -> str | None:
        """The GPU that the metadata names, None for a wildcard, an unknown or none."""
        gpu = self.said.get("gpu")
        return gpu if isinstance(gpu, str) and gpu not in _NO_NAMES else None

    @property
    def gpu(self) -> str | None:
        """The GPU that the config is for: by its metadata, or, for a module, by its name."""
        stem = self.path.stem if self.path is not None and self.form == "bundled" else ""
        if self.named_gpu is not None or not stem.startswith(BUNDLED_PREFIX):
            return self.named_gpu
        return stem.removeprefix(BUNDLED_PREFIX).replace("_", " ")

    @property
    def arch(self) -> str | None:
        """The architecture whose tactics its GPU runs, None for one that isn't in the catalogue."""
        return arch_of(self.gpu)

    @property
    def flashinfer(self) -> str | None:
        """The FlashInfer version that the metadata names, which synth may not know; None where there is none."""
        version = self.said.get("flashinfer_version")
        return version if isinstance(version, str) and _VERSION.match(version) else None

    @cached_property
    def sidecar(self) -> Sidecar | None:
        """What says of every choice where it comes from, read when it is first asked for; None where there is none.

        Raises
        ------
        SynthError
            When it isn't one, or belongs to other contents.
        """
        return read_sidecar(self.path, self.sha256) if self.path is not None and self.sha256 else None

    @cached_property
    def records(self) -> Mapping[str, Record]:
        """What the sidecar says of each key that is in the config; errors as :attr:`sidecar`."""
        return self.sidecar.written() if self.sidecar is not None else {}
