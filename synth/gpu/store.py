"""FlashInfer's managed store (v2), written by FlashInfer itself, and lookups asked from where a config was installed.

A store's folder is named after a hash of everything that FlashInfer knows of its environment: its version, CUDA,
cuBLAS, cuDNN, the CuTe DSL, and the GPU's name. There are no wildcards, so that a store is found only by a FlashInfer
of exactly the environment in which it was written.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from synth.configs.model import Config
from synth.errors import SynthError
from synth.flashinfer.calls import Dtype
from synth.flashinfer.keys import Key, parse_key
from synth.flashinfer.versions import POLICY, RUNNER
from synth.gpu.asking import arch_for
from synth.gpu.libraries import dtype, installed_flashinfer, load_cache, load_flashinfer, load_torch
from synth.gpu.stub import stubbed_gpu


@dataclass(frozen=True)
class StoreFiles:
    """Files of a managed store.

    Attributes
    ----------
    folder : Path
        The environment's folder, ``<root>/v2/<hash>``.
    files : dict of str to bytes
        By name, relative to `folder`.
    """

    folder: Path
    files: dict[str, bytes]


def default_root() -> Path:
    """Return where the installed FlashInfer keeps its store: by its own variable, or in its cache."""
    return Path(load_cache().get_default_cache_root())


def gpu_here() -> str | None:
    """Return the GPU's name as torch reports it; None without one."""
    installed_flashinfer()
    torch = load_torch()
    try:
        return str(torch.cuda.get_device_name(torch.cuda.current_device()))
    except Exception:
        # No GPU, no driver or a torch without CUDA: another error class with each.
        return None


def environment(config: Config, gpu: str | None = None) -> dict[str, str]:
    """Return what FlashInfer knows of this environment.

    Parameters
    ----------
    gpu : str, optional
        The name of a GPU that isn't here and is to be stood for. By default the one that is.
    """
    installed_flashinfer()
    collect = load_flashinfer("autotuner.autotuner")._collect_metadata
    if gpu is None:
        return dict(collect())
    keys = [entry.key for entry in config.entries if entry.key is not None]
    with stubbed_gpu(gpu, arch_for(keys, gpu)):
        return dict(collect())


def unknown(metadata: Mapping[str, str]) -> list[str]:
    """Return what FlashInfer can't tell of an environment."""
    return [name for name, value in metadata.items() if value in ("unknown", "None", None)]


def differences(config: Config, metadata: Mapping[str, str]) -> dict[str, tuple[object, str]]:
    """Return in what a config is not for an environment, by FlashInfer's own comparison: name → (config's, here)."""
    autotuner = load_flashinfer("autotuner.autotuner")
    hard, soft = autotuner._classify_metadata_mismatches(config.metadata, dict(metadata))
    return {**hard, **soft}


def store_files(config: Config, root: Path, metadata: Mapping[str, str]) -> StoreFiles:
    """Return the store that FlashInfer writes for a config's entries, each read back by FlashInfer's lookup.

    FlashInfer's ``ManagedAutotuneCache.publish`` writes them to a temporary folder; nothing else is touched.

    Parameters
    ----------
    root : Path
        Where the store is to be.
    metadata : mapping
        The environment, see :func:`environment`.

    Raises
    ------
    SynthError
        When FlashInfer writes an entry that it doesn't find again, or a key isn't one that it could write.
    """
    module = load_cache()
    with tempfile.TemporaryDirectory(prefix="synth-store-") as temporary:
        written = module.ManagedAutotuneCache(dict(metadata), temporary)
        for entry in config.entries:
            fields = _key_fields(parse_key(entry.text))
            if str(fields) != entry.text:
                raise SynthError(f"{entry.text!r} is not as FlashInfer writes it, but {str(fields)!r}; see synth check")
            written.publish(
                entry.text, RUNNER, entry.tactic_id, key_fields=fields, profiling_policy=_policy(entry.value)
            )
        # Publishing is best-effort and never raises; a fresh store has nothing in memory.
        reader = module.ManagedAutotuneCache(dict(metadata), temporary)
        _, total, skipped = reader.preload()
        lost = [e.text for e in config.entries if (reader.lookup(e.text) or (None, None))[:2] != (RUNNER, e.tactic_id)]
        if lost or skipped or total != len(config.entries):
            first = f", the first {lost[0]!r}" if lost else ""
            raise SynthError(
                f"FlashInfer's store lost {max(len(lost), skipped)} of {len(config.entries)} entries{first}"
                "; free some space in the folder of temporary files (TMPDIR)"
            )
        folder = Path(written.env_dir)
        files = {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*.json"))}
        place = module.ManagedAutotuneCache(dict(metadata), root)
        return StoreFiles(Path(place.env_dir), files)


def _policy(value: object) -> tuple[object, ...]:
    """Return how an entry was timed; one that doesn't say counts as timed by the operation's own policy."""
    return tuple(value[2]) if isinstance(value, list) and len(value) > 2 else POLICY


def _key_fields(key: Key) -> tuple[Any, ...]:
    """Return a key as FlashInfer has it in memory, with torch's dtypes."""
    try:
        extras = [dtype(value) if isinstance(value, Dtype) else value for value in key.extras or ()]
    except SynthError as e:
        raise SynthError(f"{e}, which {key.text!r} names; see synth check") from None
    head = (key.op, key.runner, key.shapes)
    return head if key.extras is None else (*head, tuple(extras))
