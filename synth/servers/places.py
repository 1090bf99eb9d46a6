"""Where vLLM and SGLang keep their tuning configs, as their own code says.

==============  =============================================================================================
vLLM 0.33.0     ``vllm/model_executor/warmup/flashinfer_autotune_cache.py`` (``flashinfer_autotune_root``,
                ``flashinfer_autotune_filename``, ``resolve_flashinfer_autotune_file``,
                ``use_flashinfer_autotune_v2``), ``vllm/envs.py``, and
                ``vllm/model_executor/warmup/kernel_warmup.py`` (``_autotune_cache_fingerprint``)
SGLang 0.5.23   ``sglang/srt/model_executor/runner/flashinfer_autotune.py`` (``flashinfer_autotune_cache_path``,
                ``_drop_diverged_autotune_cache``), ``sglang/srt/environ.py``
==============  =============================================================================================

vLLM has one file a rank where several GPUs work together, ``autotune_configs_dp<D>_rank<R>.json``, in a folder named
after a hash of its own configuration; earlier releases had one ``autotune_configs.json`` there. With one GPU it uses
FlashInfer's managed store instead, see :mod:`synth.gpu.store`. SGLang has one file a rank,
``rank_tp<T>_pp<P>_dp<D>.json``, also in a folder named after a hash. Neither hash can be known from outside, so that
the folder is the one that a first start made.

The slow tests run these functions of the two packages and compare.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from synth.configs.reading import rank_files
from synth.errors import SynthError

#: Set to false, SGLang reads no cache: it tunes anew at each start.
_SGLANG_REUSE = "SGLANG_FLASHINFER_AUTOTUNE_CACHE"
_VLLM_OVERRIDE = "VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR"


@dataclass(frozen=True)
class Layout:
    """How one server names its folders and files.

    Attributes
    ----------
    title : str
        The server's name.
    folder : re.Pattern
        Name of a configuration's folder.
    file : re.Pattern
        Names of the files in it. The group ``peers`` is the same for files of ranks that surely tune together; the
        whole name without it stands for all.
    expected : str
        The same in words.
    """

    title: str
    folder: re.Pattern[str]
    expected: str


LAYOUTS = {
    "vllm": Layout(
        "vLLM",
        re.compile(r"[0-9a-f]{64}"),
        "autotune_configs_dp<D>_rank<R>.json, or autotune_configs.json of earlier releases",
    ),
    "sglang": Layout(
        "SGLang",
        re.compile(r"[0-9a-f]{16}"),
        "rank_tp<T>_pp<P>_dp<D>.json",
    ),
}


def search_root(engine: str, environment: Mapping[str, str]) -> tuple[Path, str]:
    """Return below which folder a server looks, and the glob pattern of its configurations' folders.

    Parameters
    ----------
    engine : str
        ``"vllm"`` or ``"sglang"``.
    environment : mapping
        The server's environment variables.

    Returns
    -------
    tuple of Path and str
        In the pattern ``{version}`` stands for FlashInfer's version.
    """
    if engine == "sglang":
        # A ~ in the variable is taken as it is, as SGLang does here.
        return Path(_sglang_root(environment)), "flashinfer/autotune/{version}/*/*"
    override = environment.get(_VLLM_OVERRIDE)
    if override:
        return Path(override).expanduser(), "*"
    return Path(_vllm_root(environment)), "flashinfer_autotune_cache/{version}/*/*"


def _sglang_root(environment: Mapping[str, str]) -> str:
    return environment.get("SGLANG_CACHE_DIR", os.path.expanduser("~/.cache/sglang"))


def _vllm_root(environment: Mapping[str, str]) -> str:
    cache = environment.get("XDG_CACHE_HOME", os.path.join(os.path.expanduser("~"), ".cache"))
    return os.path.expanduser(environment.get("VLLM_CACHE_ROOT", os.path.join(cache, "vllm")))


def candidates(engine: str, version: str, environment: Mapping[str, str], marker: str | None = None) -> list[Path]:
    """Return the configurations' folders that are there, below :func:`search_root`.

    Parameters
    ----------
    version : str
        FlashInfer's version, or ``"*"`` for all.
    marker : str, optional
        Only folders with something of this name; by default those with files of ranks.
    """
    root, pattern = search_root(engine, environment)
    named = LAYOUTS[engine].folder
    try:
        folders = sorted(p for p in root.glob(pattern.format(version=version)) if named.fullmatch(p.name))
        return [p for p in folders if p.is_dir() and (os.path.lexists(p / marker) if marker else rank_files(engine, p))]
    except OSError as e:
        raise SynthError(f"can't read {root}: {e.strerror or e}; name a folder with --folder") from e


def variables(engine: str, folder: Path, environment: Mapping[str, str]) -> dict[str, str | None] | None:
    """Return what must be set, or not be set (None), in a server's environment for it to look in `folder`.

    An empty dict says that nothing need be set; None that no variable makes the server look there.
    """
    parents = folder.parents
    if engine == "sglang":
        found: dict[str, str | None] = {}
        if len(parents) < 5 or (parents[2].name, parents[3].name) != ("autotune", "flashinfer"):
            return None
        if not _same(parents[4], Path(_sglang_root({}))):
            found["SGLANG_CACHE_DIR"] = str(parents[4])
        if environment.get(_SGLANG_REUSE, "1").lower() in ("false", "0", "no", "n"):
            found[_SGLANG_REUSE] = None
        return found
    if len(parents) >= 4 and parents[2].name == "flashinfer_autotune_cache":
        override = environment.get(_VLLM_OVERRIDE)
        if override and _same(Path(override).expanduser(), parents[0]):
            return {_VLLM_OVERRIDE: override}
        found = {} if _same(parents[3], Path(_vllm_root({}))) else {"VLLM_CACHE_ROOT": str(parents[3])}
        return {**found, **({_VLLM_OVERRIDE: None} if override else {})}
    return {_VLLM_OVERRIDE: str(parents[0])}


def _same(a: Path, b: Path) -> bool:
    return os.path.realpath(a) == os.path.realpath(b)
