"""FlashInfer's managed store (v2), written by FlashInfer itself, and lookups asked from where a config was installed.

A store's folder is named after a hash of everything that FlashInfer knows of its environment: its version, CUDA,
cuBLAS, cuDNN, the CuTe DSL, and the GPU's name. There are no wildcards, so that a store is found only by a FlashInfer
of exactly the environment in which it was written.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from synth.errors import SynthError
from synth.flashinfer import replay as replaying
from synth.flashinfer.contract import ENV_BUNDLED, POLICY, RUNNER, Dtype, ParsedKey, arch_of, parse_file_key
from synth.flashinfer.formats import ConfigFile, read
from synth.flashinfer.replay import ReplayReport, StubbedFlashInfer, installed_flashinfer, stubbed_gpu

#: What FlashInfer writes where it can't tell.
_UNKNOWN = ("unknown", "None", None)


@dataclass(frozen=True)
class StoreFiles:
    """Files of a managed store.

    Attributes
    ----------
    root : Path
        The store's root, as FlashInfer is given it.
    folder : Path
        The environment's folder, ``<root>/v2/<hash>``.
    files : dict of str to bytes
        By name, relative to `folder`.
    """

    root: Path
    folder: Path
    files: dict[str, bytes]


def default_root() -> Path:
    """Return where the installed FlashInfer keeps its store: by its own variable, or in its cache."""
    return Path(_cache_module().get_default_cache_root())


def gpu_here() -> str | None:
    """Return the GPU's name as torch reports it; None without one."""
    installed_flashinfer()
    torch = importlib.import_module("torch")
    try:
        return str(torch.cuda.get_device_name(torch.cuda.current_device()))
    except Exception:
        # No GPU, no driver or a torch without CUDA: another error class with each.
        return None


def environment(config: ConfigFile, gpu: str | None = None) -> dict[str, str]:
    """Return what FlashInfer knows of this environment.

    Parameters
    ----------
    gpu : str, optional
        The name of a GPU that isn't here and is to be stood for. By default the one that is.
    """
    installed_flashinfer()
    autotuner = importlib.import_module("flashinfer.autotuner.autotuner")
    if gpu is None:
        return dict(autotuner._collect_metadata())
    with stubbed_gpu(gpu, _arch(config)):
        return dict(autotuner._collect_metadata())


def unknown(metadata: Mapping[str, str]) -> list[str]:
    """Return what FlashInfer can't tell of an environment."""
    return [name for name, value in metadata.items() if value in _UNKNOWN]


def differences(config: ConfigFile, metadata: Mapping[str, str]) -> dict[str, tuple[object, str]]:
    """Return in what a config is not for an environment, by FlashInfer's own comparison: name → (config's, here)."""
    autotuner = importlib.import_module("flashinfer.autotuner.autotuner")
    hard, soft = autotuner._classify_metadata_mismatches(config.metadata, dict(metadata))
    return {**hard, **soft}


def store_files(config: ConfigFile, root: Path, metadata: Mapping[str, str]) -> StoreFiles:
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
    module = _cache_module()
    with tempfile.TemporaryDirectory(prefix="synth-store-") as temporary:
        written = module.ManagedAutotuneCache(dict(metadata), temporary)
        for entry in config.entries:
            key = parse_file_key(entry.key)
            fields = _key_fields(key)
            if str(fields) != entry.key:
                raise SynthError(f"{entry.key!r} is not as FlashInfer writes it, but {str(fields)!r}; see synth check")
            written.publish(
                entry.key, RUNNER, entry.tactic_id, key_fields=fields, profiling_policy=_policy(config.raw[entry.key])
            )
        # Publishing is best-effort and never raises; a fresh store has nothing in memory.
        reader = module.ManagedAutotuneCache(dict(metadata), temporary)
        _, total, skipped = reader.preload()
        lost = [e.key for e in config.entries if (reader.lookup(e.key) or (None, None))[:2] != (RUNNER, e.tactic_id)]
        if lost or skipped or total != len(config.entries):
            first = f", the first {lost[0]!r}" if lost else ""
            raise SynthError(
                f"FlashInfer's store lost {max(len(lost), skipped)} of {len(config.entries)} entries{first}"
                "; free some space in the folder of temporary files (TMPDIR)"
            )
        folder = Path(written.env_dir)
        files = {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*.json"))}
        place = module.ManagedAutotuneCache(dict(metadata), root)
        return StoreFiles(root, Path(place.env_dir), files)


def _cache_module() -> Any:
    installed_flashinfer()
    try:
        module = importlib.import_module("flashinfer.autotune_cache")
        _ = (module.ManagedAutotuneCache, module.ReplayCoverage, module.autotune_v2, module.get_default_cache_root)
    except (ImportError, AttributeError) as e:
        raise SynthError(
            f"FlashInfer {installed_flashinfer()} has no managed store (it has one since 0.7.0); "
            "load the JSON file with AutoTuner.get().load_configs"
        ) from e
    return module


def _policy(value: object) -> tuple[object, ...]:
    """Return how an entry was timed; one that doesn't say counts as timed by the operation's own policy."""
    return tuple(value[2]) if isinstance(value, list) and len(value) > 2 else POLICY


def _key_fields(key: ParsedKey) -> tuple[Any, ...]:
    """Return a key as FlashInfer has it in memory, with torch's dtypes."""
    torch = importlib.import_module("torch")
    extras = []
    for value in key.extras or ():
        dtype = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, Dtype) else value
        if isinstance(value, Dtype) and not isinstance(dtype, torch.dtype):
            raise SynthError(f"torch has no dtype {value}, which {key.text!r} names; see synth check")
        extras.append(dtype)
    head = (key.op, key.runner, key.shapes)
    return head if key.extras is None else (*head, tuple(extras))


# ---- asking from there -------------------------------------------------------------------------------------


def replay_file(config: ConfigFile, path: Path) -> ReplayReport:
    """Load a server's file into the installed FlashInfer and ask for every key of `config`.

    Parameters
    ----------
    config : ConfigFile
        What was installed; other entries of the file are not asked for.
    path : Path
        The server's file.

    Returns
    -------
    ReplayReport
        As :func:`synth.flashinfer.replay.replay` gives it.

    Raises
    ------
    SynthError
        As :func:`synth.flashinfer.replay.replay`.
    """
    theirs = read(path)
    return _replay(config, str(path), lambda stub, gpu: replaying._installed(theirs, path, gpu, stub, []))


def replay_store(config: ConfigFile, root: Path) -> ReplayReport:
    """Attach the store at `root` as ``autotune_v2(mode="replay")`` does, and ask for every key of `config`.

    FlashInfer's own ``ReplayCoverage`` has to agree: it must have seen at least as many hits of the store.

    Raises
    ------
    SynthError
        As :func:`synth.flashinfer.replay.replay`, or when FlashInfer's count is another.
    """
    module = _cache_module()
    coverage = module.ReplayCoverage(max_records=0)

    @contextlib.contextmanager
    def attach(_stub: StubbedFlashInfer, _gpu: str) -> Iterator[tuple[str, str] | None]:
        # A scoped store takes precedence over nothing and is preceded by nothing: no file, no bundled config.
        with module.autotune_v2(mode="replay", cache_root=root, cache_scope="context", replay_report=coverage):
            yield None

    report = _replay(config, str(root), attach)
    if coverage.hits < report.hits:
        raise SynthError(
            f"FlashInfer counts {coverage.hits} hits of the store at {root}, but {report.hits} tactics came from it; "
            "update synth"
        )
    return report


def _replay(
    config: ConfigFile,
    name: str,
    attach: Callable[[StubbedFlashInfer, str], AbstractContextManager[tuple[str, str] | None]],
) -> ReplayReport:
    version = installed_flashinfer()
    gpu = config.gpu or "any GPU"
    keys, unreadable = replaying._parse(config)
    tactics: dict[str, object] = {entry.key: entry.tactic_id for entry in config.entries}
    tally = replaying._Tally(tactics, keys)
    with _no_bundled(), stubbed_gpu(gpu, _arch(config)) as stub, attach(stub, gpu) as refusal:
        if refusal is not None:
            for key in config.raw:
                tally.miss(key, *refusal)
        else:
            for key, reason in unreadable.items():
                tally.miss(key, "unreadable-key", reason)
            replaying._ask(stub, tally, replaying._layers(tally, version), version)
    order = {key: i for i, key in enumerate(config.raw)}
    return ReplayReport(
        path=name,
        flashinfer=version,
        device=gpu,
        arch=_arch(config),
        loaded=refusal is None,
        keys=len(config.raw),
        keys_hit=len(config.raw) - len({m.key for m in tally.misses.values()}),
        lookups=tally.lookups,
        hits=tally.hits,
        calls=tally.calls,
        reprofiled=tally.reprofiled,
        misses=tuple(sorted(tally.misses.values(), key=lambda m: (order[m.key], m.code))),
    )


def _arch(config: ConfigFile) -> str:
    keys, _ = replaying._parse(config)
    return arch_of(config.gpu) or replaying._arch_of_keys(keys.values(), installed_flashinfer())


@contextlib.contextmanager
def _no_bundled() -> Iterator[None]:
    """Keep FlashInfer from answering out of its bundled configs."""
    before = os.environ.get(ENV_BUNDLED)
    os.environ[ENV_BUNDLED] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[ENV_BUNDLED]
        else:
            os.environ[ENV_BUNDLED] = before
