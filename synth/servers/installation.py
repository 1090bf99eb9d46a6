"""What an installation is: the config that may be installed, what became of it, and the FlashInfer that is asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from synth.checking.check import check
from synth.configs import merging
from synth.configs.model import Config
from synth.configs.reading import read
from synth.configs.replayed import ReplayReport
from synth.errors import SynthError
from synth.flashinfer.versions import contract_for
from synth.servers.placing import Change


class StoreFiles(Protocol):
    """Files of a managed store: in which folder, and each file's content by its name there."""

    @property
    def folder(self) -> Path: ...
    @property
    def files(self) -> dict[str, bytes]: ...


class FlashInferHere(Protocol):
    """The installed FlashInfer, as :mod:`synth.gpu.here` asks it: passed in, so that only ``gpu`` imports it."""

    def installed_flashinfer(self) -> str: ...
    def replay_file(self, config: Config, path: Path) -> ReplayReport: ...
    def replay_store(self, config: Config, root: Path) -> ReplayReport: ...
    def default_root(self) -> Path: ...
    def gpu_here(self) -> str | None: ...
    def environment(self, config: Config, gpu: str | None = None) -> dict[str, str]: ...
    def unknown(self, metadata: Mapping[str, str]) -> list[str]: ...
    def differences(self, config: Config, metadata: Mapping[str, str]) -> dict[str, tuple[object, str]]: ...
    def store_files(self, config: Config, root: Path, metadata: Mapping[str, str]) -> StoreFiles: ...


@dataclass(frozen=True)
class Installation:
    """What was installed, or, in a dry run, would be.

    Attributes
    ----------
    engine : str
    folder : Path
        Where the files are.
    entries, analytical : int
        Entries of the config, and how many of them are analytical.
    changes : tuple of Change
        What happened to each file.
    merged : dict of str to synth.configs.merging.Merged
        By file, what became of its entries; empty for the managed store, which has a file an entry.
    variables : dict of str to (str or None), or None
        What the server's environment must say, or must not say (None), for it to look there; None where no variable
        makes it look there.
    notes : tuple of str
        What to know of it, one line each.
    report : ReplayReport or None
        What FlashInfer serves from there.
    not_replayed : str
        Why it wasn't asked; ``""`` where it was, and in a dry run.
    """

    engine: str
    folder: Path
    entries: int
    analytical: int
    changes: tuple[Change, ...]
    merged: Mapping[str, merging.Merged]
    variables: Mapping[str, str | None] | None
    notes: tuple[str, ...] = ()
    report: ReplayReport | None = None
    not_replayed: str = ""

    @property
    def is_new(self) -> bool:
        """Whether anything was changed."""
        return any(c.kind != "same" for c in self.changes)


@dataclass(frozen=True)
class Removal:
    """What was put back, or, in a dry run, would be."""

    folder: Path
    changes: tuple[Change, ...]


@dataclass(frozen=True)
class Installable:
    """A config that may be installed."""

    path: Path
    file: Config
    data: bytes
    version: str
    gpu: str
    analytical: int


def read_installable(path: Path) -> Installable:
    """Read a config that is to be installed.

    Raises
    ------
    SynthError
        When it isn't v1 JSON, doesn't name its version and GPU, rests on simulated timings, or ``synth check`` finds
        errors.
    """
    config = read(path)
    if config.form != "json":
        raise SynthError(f"{path} is not FlashInfer's v1 JSON, the form that is installed; synth emit --format json")
    version, gpu = config.flashinfer, config.named_gpu
    if version is None or gpu is None:
        name = "flashinfer_version" if version is None else "gpu"
        raise SynthError(
            f"{path}: its _metadata says {config.said.get(name)!r} for {name}, but what is installed has to name both "
            "FlashInfer's version and the GPU; synth emit does"
        )
    if not contract_for(version).metadata_keys:
        raise SynthError(f"{path}: FlashInfer {version} reads no JSON configs; synth port {path} --to VERSION -o OUT")
    if _says_simulated(config.provenance):
        raise SynthError(f"{path} rests on simulated timings, which are never served; emit from real ones")
    errors = [f for f in check(config, version) if f.severity == "error"]
    if errors:
        raise SynthError(
            f"{path} isn't fit to be served: {len(errors)} errors, the first: {errors[0].message}; "
            f"`synth check {path} --flashinfer {version}` says all"
        )
    odd = next((entry.text for entry in config.entries if entry.tactic_id is None), None)
    if odd is not None:
        raise SynthError(f"{path}: the entry of {odd!r} has an odd form; drop it or emit the file anew")
    try:
        data = path.read_bytes()
    except OSError as e:
        raise SynthError(f"can't read {path}: {e.strerror or e}; name a config file") from e
    return Installable(path, config, data, version, gpu, config.count("entries", "analytical"))


def _says_simulated(value: object) -> bool:
    """Tell whether anything in a config's provenance is marked as simulated."""
    if isinstance(value, dict):
        return any((k == "simulated" and bool(v)) or _says_simulated(v) for k, v in value.items())
    if isinstance(value, list):
        return any(map(_says_simulated, value))
    return isinstance(value, str) and "simulated" in value.lower()


def can_replay(version: str) -> bool:
    """Tell whether synth can ask this FlashInfer version for every key."""
    return contract_for(version).extras == contract_for().extras
