"""Reads a config from any of its forms: v1 JSON, a bundled module, a managed store, a server's folder, a contribution.

Every entry is kept as it is in the file, however wrong, so that :mod:`synth.checking` can say what is wrong with it.
A module is parsed, never executed. Files may come from strangers: what they may cost is limited, see
:mod:`synth.catalog.untrusted`.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace
from pathlib import Path

from synth.catalog import untrusted
from synth.configs import module, v1
from synth.configs.model import Config
from synth.configs.sidecar import sidecar_path
from synth.configs.store import is_store, read_store
from synth.errors import SynthError

#: Files that servers keep, one a rank: of vLLM, and of SGLang. Those of ranks that tune together name the same peers.
RANK_FILES = {
    "vllm": re.compile(r"autotune_configs(?:_(?P<peers>dp[0-9]{1,6})_rank[0-9]{1,6})?\.json"),
    # Files of MegaMoE's ranks have a suffix more, and hold no tactics of the CUTLASS MoE.
    "sglang": re.compile(r"rank_tp[0-9]{1,6}_(?P<peers>pp[0-9]{1,6}_dp[0-9]{1,6})\.json"),
}
#: What a contribution's folder calls the same entries in the v1 form.
CONTRIBUTED = "config.json"


def read(path: Path) -> Config:
    """Read a config.

    Parameters
    ----------
    path : Path
        A v1 JSON file; a bundled module, whose name ends in ``.py``; or a folder: a managed store's root or one of its
        environments, one configuration of a server, or what ``synth contribute`` made.

    Raises
    ------
    SynthError
        When it can't be read, is none of these, or is larger than any.
    """
    if path.is_dir():
        return _read_folder(path)
    is_module = path.suffix == ".py"
    data = untrusted.read_bytes(path, module.MAX_BYTES if is_module else v1.MAX_BYTES, "tuning config")
    if not data.strip():
        raise SynthError(f"{path} is empty; write it anew")
    config = module.loads(path, data) if is_module else v1.loads(path, data)
    return replace(config, path=path, sha256=hashlib.sha256(data).hexdigest())


def _read_folder(path: Path) -> Config:
    if is_store(path):
        return read_store(path)
    for engine in RANK_FILES:
        files = rank_files(engine, path)
        if files:
            parts = tuple(map(read, files))
            return Config("server", parts[0].entries, parts[0].metadata, parts[0].members, path=path, parts=parts)
    contributed = path / CONTRIBUTED
    if contributed.is_file() and sidecar_path(contributed).is_file():
        return read(contributed)
    raise SynthError(f"can't read {path}: Is a directory, and no managed store of FlashInfer; name a config file")


def rank_files(engine: str, folder: Path) -> list[Path]:
    """Return a server's files of one configuration that are there, in the order of their names.

    Raises
    ------
    SynthError
        When the folder can't be read.
    """
    try:
        return sorted((p for p in folder.iterdir() if RANK_FILES[engine].fullmatch(p.name)), key=_natural)
    except OSError as e:
        raise SynthError(f"can't read {folder}: {e.strerror or e}; name a folder with --folder") from e


def _natural(path: Path) -> list[object]:
    # rank10 comes after rank9. Text and numbers alternate, so that equal places compare.
    return [int(part) if part.isdigit() else part for part in re.split(r"([0-9]+)", path.name)]
