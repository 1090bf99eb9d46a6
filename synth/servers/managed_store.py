"""Putting a config into FlashInfer's managed store, which is found only in the environment that it was written in."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from synth.catalog.files import locked
from synth.errors import SynthError
from synth.flashinfer.tactics import DEFAULT_FLASHINFER
from synth.servers import placing
from synth.servers.installation import FlashInferHere, Installable, Installation, can_replay

STORE_VARIABLE = "FLASHINFER_AUTOTUNE_CACHE_DIR"
#: Files that an install writes, and the names of environments' folders.
STORE_FILE = re.compile(r"manifest\.json|entries/[0-9a-f]{24}\.json")
STORE_FOLDER = re.compile(r"[0-9a-f]{16}")
_MANIFEST = "manifest.json"


def install_store(
    config: Installable,
    root: Path | None,
    device: str | None,
    environment: Mapping[str, str],
    here: FlashInferHere,
    dry_run: bool,
) -> Installation:
    gpu, notes = here.gpu_here(), []
    if gpu is None:
        if device is None or root is None:
            raise SynthError(
                "no GPU is here, and a store is found only in the very environment that it was written in; run this "
                "where the server runs, or, to prepare that environment without its GPU, name the GPU with --device "
                "and the store's root with --folder"
            )
        metadata = here.environment(config.file, device)
        blind = here.unknown(metadata)
        if "cuda_version" in blind:
            raise SynthError("torch is built without CUDA here, so that no server with a GPU runs in this environment")
        notes.append(
            f"written for {device}, which isn't here: FlashInfer finds it only where all versions are the same"
        )
        if blind:
            notes.append(f"FlashInfer can't tell {', '.join(blind)} here; where it can, it looks in another folder")
    else:
        if device is not None and device != gpu:
            raise SynthError(f"--device names {device}, but {gpu} is here; leave the option out")
        metadata = here.environment(config.file)
    differing = here.differences(config.file, metadata)
    if differing:
        said = ", ".join(f"{name} is {old!r}, here {new!r}" for name, (old, new) in differing.items())
        way_out = (
            f"`synth port {config.path} --to {metadata['flashinfer_version']} -o OUT` rewrites it"
            if "flashinfer_version" in differing and "gpu" not in differing
            else "emit a config for this GPU, or run this in the server's environment"
        )
        raise SynthError(f"{config.path}: {said}; {way_out}")
    default = here.default_root()
    where = Path(os.path.abspath(root if root is not None else environment.get(STORE_VARIABLE) or default))
    if where.exists() and not where.is_dir():
        raise SynthError(f"{where} is not a folder; name the store's root with --folder")
    made = here.store_files(config.file, where.resolve(), metadata)
    folder = made.folder
    for part in (folder.parent, folder):
        if part.is_symlink():
            raise SynthError(f"{part} is a link out of the store; name the store's root with --folder, where it points")
    missing = placing.missing_folders(folder)
    with contextlib.nullcontext() if dry_run else locked(folder):
        record = placing.read_record(folder, STORE_FILE)
        contents = dict(made.files)
        if (folder / _MANIFEST).exists() and not (record and _MANIFEST in record.files):
            # Of the same environment, by the folder's name; FlashInfer itself leaves it alone.
            del contents[_MANIFEST]
        if dry_run:
            changes = placing.plan(folder, record, contents)
        else:
            changes = placing.place(folder, record, contents, config.data, made=missing)
    needed: dict[str, str | None] = {}
    if where.resolve() != _own_default(default, environment).resolve():
        needed[STORE_VARIABLE] = str(where)
    done = Installation(
        "flashinfer", folder, len(config.file.raw), config.analytical, tuple(changes), {}, needed, tuple(notes)
    )
    if dry_run:
        return done
    if not can_replay(here.installed_flashinfer()):
        return replace(done, not_replayed=f"synth replays FlashInfer {DEFAULT_FLASHINFER} only")
    return replace(done, report=here.replay_store(config.file, where.resolve()))


def _own_default(default: Path, environment: Mapping[str, str]) -> Path:
    """Return where FlashInfer looks without the variable."""
    if not environment.get(STORE_VARIABLE):
        return default
    base = environment.get("FLASHINFER_WORKSPACE_BASE", str(Path.home()))
    return Path(base) / ".cache" / "flashinfer" / "autotune"
