"""Prove that the installed FlashInfer uses a config: load it, ask, and see which tactics are served.

Nothing about the lookup is re-implemented here. The file is loaded by ``AutoTuner.load_configs`` (JSON), by
FlashInfer's bundled loader (``.py``) or by its managed store, and each key is asked for by calling the public
``flashinfer.fused_moe.cutlass_fused_moe`` with tensors that have shapes and dtypes but no storage. What
stands in for the GPU is all in :func:`synth.gpu.stub.stubbed_gpu`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import types
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeVar

from synth.catalog.untrusted import first_line
from synth.configs.model import Config
from synth.configs.reading import read
from synth.configs.replayed import ReplayReport
from synth.errors import SynthError
from synth.flashinfer.tactics import DEFAULT_FLASHINFER
from synth.flashinfer.versions import ENV_BUNDLED, contract_for
from synth.gpu.asking import Asking, arch_for
from synth.gpu.libraries import installed_flashinfer, load_cache, load_flashinfer
from synth.gpu.store import differences, environment
from synth.gpu.stub import stubbed_gpu

#: Code and reason of a refusal, None where FlashInfer takes the config.
_Refusal = tuple[str, str] | None
T = TypeVar("T")


def replay(path: Path, *, device: str | None = None, arch: str | None = None) -> ReplayReport:
    """Load a config into the installed FlashInfer and ask for every key.

    Each key is asked for at its bucket, one token below it, and one above the bucket before it, under every maximum
    token count that vLLM passes and under the one that SGLang passes; a maximum's own bucket also beyond the maximum.
    A hit is a lookup that hands the file's tactic to the kernel.

    Parameters
    ----------
    path : Path
        A v1 JSON file, a bundled ``.py``, which is parsed, never executed, or the folder of a managed store.
    device : str, optional
        The GPU's name; by default the one in the metadata or in the ``.py``'s file name.
    arch : str, optional
        The GPU's architecture; by default the catalogue's for that name, else one that has kernels for the file.

    Raises
    ------
    MissingDependencyError
        When FlashInfer or torch is not installed.
    SynthError
        When the file can't be read, or the installed FlashInfer is not known.
    """
    config = read(path)
    if config.form == "store":
        # The root, or one environment's folder in it: <root>/v2/<hash>.
        return replay_store(config, path if (path / "v2").is_dir() else path.resolve().parents[1])
    notes: list[str] = []
    name = device or config.gpu
    if name is None:
        name = "any GPU"
        notes.append("the file names no GPU; replayed as one that the metadata accepts")
    is_module = config.form == "bundled"
    served = _module_served(config.raw, path, name, notes) if is_module else _json_served(config, path)
    return _replayed(config, path, served, name, arch, notes)


def replay_file(config: Config, path: Path) -> ReplayReport:
    """Load a server's file into the installed FlashInfer and ask for every key of `config`.

    Parameters
    ----------
    config : Config
        What was installed; other entries of the file are not asked for.
    path : Path
        The server's file.

    Raises
    ------
    SynthError
        As :func:`replay`.
    """
    return _replayed(config, path, _json_served(read(path), path), config.gpu or "any GPU")


def replay_store(config: Config, root: Path) -> ReplayReport:
    """Attach the store at `root` as ``autotune_v2(mode="replay")`` does, and ask for every key of `config`.

    FlashInfer's own ``ReplayCoverage`` has to agree: it must have seen at least as many hits of the store.

    Raises
    ------
    SynthError
        As :func:`replay`, or when FlashInfer's count is another.
    """
    module = load_cache()
    coverage = module.ReplayCoverage(max_records=0)

    @contextlib.contextmanager
    def served() -> Iterator[_Refusal]:
        # A scoped store is preceded by nothing, and followed by bundled configs only, which are not read.
        with (
            _bundled_configs(False),
            module.autotune_v2(mode="replay", cache_root=root, cache_scope="context", replay_report=coverage),
        ):
            yield None

    report = _replayed(config, root, served(), config.gpu or "any GPU")
    if coverage.hits < report.hits:
        raise SynthError(
            f"FlashInfer counts {coverage.hits} hits of the store at {root}, but {report.hits} tactics came from it; "
            "update synth"
        )
    return report


def _replayed(
    config: Config,
    path: Path,
    served: AbstractContextManager[_Refusal],
    device: str,
    arch: str | None = None,
    notes: Sequence[str] = (),
) -> ReplayReport:
    """Ask for every key of a config while `served` lets FlashInfer find the entries; it may add to `notes`."""
    version = installed_flashinfer()
    if contract_for(version).extras != contract_for().extras:
        raise SynthError(f"replay can't drive FlashInfer {version}; install {DEFAULT_FLASHINFER}")
    entries = config.raw
    asking = Asking(config)
    arch = arch or arch_for(asking.keys.values(), device)
    with stubbed_gpu(device, arch) as stub, served as refusal:
        if refusal is not None:
            asking.refuse(*refusal)
        else:
            asking.ask(stub)
    order = {key: i for i, key in enumerate(entries)}
    return ReplayReport(
        path=str(path),
        flashinfer=version,
        device=device,
        arch=arch,
        loaded=refusal is None,
        keys=len(entries),
        keys_hit=len(entries) - len({m.key for m in asking.misses.values()}),
        lookups=asking.lookups,
        hits=asking.hits,
        calls=asking.calls,
        reprofiled=asking.reprofiled,
        misses=tuple(sorted(asking.misses.values(), key=lambda m: (order[m.key], m.code))),
        notes=tuple(notes),
    )


# ---- where FlashInfer finds the entries, for as long as a context is open ----------------------------------


@contextlib.contextmanager
def _json_served(config: Config, path: Path) -> Iterator[_Refusal]:
    """Let FlashInfer load a v1 JSON file, and answer out of nothing else."""
    with _bundled_configs(False):
        yield _load_json(config, path)


def _load_json(config: Config, path: Path) -> _Refusal:
    try:
        if load_flashinfer("autotuner").AutoTuner.get().load_configs(str(path)):
            return None
    except Exception as e:
        return "load-error", f"FlashInfer's load_configs raises {type(e).__name__}: {first_line(e)}; see synth check"
    differing = differences(config, environment(config)).items()
    said = ", ".join(f"{name} is {old!r}, here {new!r}" for name, (old, new) in differing)
    return "metadata", f"FlashInfer ignores the whole file: {said}"


@contextlib.contextmanager
def _module_served(entries: Mapping[str, object], path: Path, device: str, notes: list[str]) -> Iterator[_Refusal]:
    """Put a bundled module where FlashInfer looks for it."""
    name: str = load_flashinfer("autotuner.autotuner").get_config_path(is_module=True)
    stem = name.rpartition("flashinfer.tuning_configs.")[2]
    if "." in stem or "/" in stem:
        yield "not-importable", f"FlashInfer can't import a module named {stem}: '.' or '/' in the GPU's name"
        return
    if path.stem != stem:
        notes.append(f"replayed as {stem}.py, the only name FlashInfer looks for on {device}")
    module = types.ModuleType(name)
    module.best_configs = dict(entries)  # type: ignore[attr-defined]
    with _replaced(sys.modules, name, module), _bundled_configs(True):
        yield None


def _bundled_configs(read_them: bool) -> AbstractContextManager[None]:
    """Say whether FlashInfer reads its bundled configs."""
    return _replaced(os.environ, ENV_BUNDLED, "1" if read_them else "0")


@contextlib.contextmanager
def _replaced(mapping: MutableMapping[str, T], name: str, value: T) -> Iterator[None]:
    before = {name: mapping[name]} if name in mapping else {}
    mapping[name] = value
    try:
        yield
    finally:
        del mapping[name]
        mapping.update(before)
