"""Puts a config where an engine looks for it, keeps what was there, and asks FlashInfer from there."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from synth.catalog.files import locked
from synth.configs.reading import RANK_FILES
from synth.configs.store import MANIFEST as _MANIFEST
from synth.errors import SynthError
from synth.servers import placing
from synth.servers.installation import FlashInferHere, Installation, Removal, read_installable
from synth.servers.managed_store import STORE_FILE, STORE_FOLDER, STORE_VARIABLE, install_store
from synth.servers.places import candidates, search_root
from synth.servers.placing import KEPT
from synth.servers.rank_files import install_files

ENGINES = ("vllm", "sglang", "flashinfer")


def install(
    path: Path,
    engine: str,
    *,
    folder: Path | None = None,
    device: str | None = None,
    here: FlashInferHere,
    environment: Mapping[str, str] = os.environ,
    dry_run: bool = False,
) -> Installation:
    """Install a config for an engine, and ask FlashInfer for its keys from there.

    For vLLM and SGLang the entries go into every rank's file of one configuration, among those that the server has
    tuned; synth's win. For FlashInfer they are written into its managed store.

    Parameters
    ----------
    path : Path
        A v1 JSON file.
    engine : str
        One of :data:`ENGINES`.
    folder : Path, optional
        For vLLM and SGLang the configuration's folder, by default the only one that is there; for FlashInfer the
        store's root, by default FlashInfer's own.
    device : str, optional
        For FlashInfer, where no GPU is here: the name of the one that this environment will run on.
    environment : mapping
        The server's environment variables.
    dry_run : bool
        Change nothing.

    Raises
    ------
    SynthError
        When the config isn't fit to be served, isn't for this server, or can't be written; nothing has changed then.
    """
    config = read_installable(path)
    if engine == "flashinfer":
        return install_store(config, folder, device, environment, here, dry_run)
    if device is not None:
        raise SynthError("--device is for --engine flashinfer only; a server's file says what it was tuned on")
    return install_files(config, engine, folder, environment, here, dry_run)


def uninstall(
    engine: str,
    *,
    folder: Path | None = None,
    here: FlashInferHere,
    environment: Mapping[str, str] = os.environ,
    dry_run: bool = False,
) -> Removal:
    """Put back what an engine's folder held before the first :func:`install` into it.

    Raises
    ------
    SynthError
        When nothing was installed, there are several such folders, or something can't be put back; nothing has
        changed then.
    """
    where = _installed_folder(engine, folder, environment, here)
    with contextlib.nullcontext() if dry_run else locked(where):
        record = placing.read_record(where, _files(engine))
        if record is None:
            raise SynthError(f"{where}: nothing that `synth install` has put there; name another folder with --folder")
        if engine == "flashinfer" and any(
            p.is_file() and f"entries/{p.name}" not in record.files for p in (where / "entries").glob("*.json")
        ):
            # The store has got entries of its own, and stays one.
            record = replace(record, files={n: f for n, f in record.files.items() if n != _MANIFEST})
        return Removal(where, tuple(placing.undo(where, record, dry_run=dry_run)))


def _files(engine: str) -> re.Pattern[str]:
    return STORE_FILE if engine == "flashinfer" else RANK_FILES[engine]


def _installed_folder(
    engine: str, folder: Path | None, environment: Mapping[str, str], here: FlashInferHere
) -> Path:
    if engine != "flashinfer":
        found = [folder] if folder is not None else candidates(engine, "*", environment, KEPT)
        looked = folder or search_root(engine, environment)[0]
    else:
        looked = folder or Path(environment.get(STORE_VARIABLE) or here.default_root())
        try:
            found = [p for p in sorted((looked / "v2").glob("*")) if STORE_FOLDER.fullmatch(p.name)]
            found = [p for p in found if os.path.lexists(p / KEPT)]
        except OSError as e:
            raise SynthError(f"can't read {looked}: {e.strerror or e}; name a folder with --folder") from e
    if not found or not found[0].is_dir():
        raise SynthError(f"{looked}: nothing that `synth install` has put there; name another folder with --folder")
    if len(found) > 1:
        hint = "" if engine == "flashinfer" else ", name one with --folder"
        raise SynthError(f"synth has installed into {len(found)} folders{hint}: {'; '.join(map(str, found))}")
    return found[0].resolve()


__all__ = ["ENGINES", "Installation", "Removal", "install", "uninstall"]
