"""Puts a config where an engine looks for it, keeps what was there, and asks FlashInfer from there."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from synth.catalog.files import locked
from synth.checking.check import check
from synth.configs import merging
from synth.configs.formats import METADATA, ConfigFile, read
from synth.errors import MissingDependencyError, SynthError
from synth.flashinfer.tactics import DEFAULT_FLASHINFER
from synth.flashinfer.versions import contract_for
from synth.gpu.libraries import installed_flashinfer
from synth.gpu.replay import ReplayReport, replay_store
from synth.servers import placing
from synth.servers.places import LAYOUTS, candidates, rank_files, search_root, variables
from synth.servers.placing import KEPT, Change

ENGINES = ("vllm", "sglang", "flashinfer")
_STORE_VARIABLE = "FLASHINFER_AUTOTUNE_CACHE_DIR"
_STORE_FOLDER = re.compile(r"[0-9a-f]{16}")
_STORE_FILE = re.compile(r"manifest\.json|entries/[0-9a-f]{24}\.json")
_MANIFEST = "manifest.json"


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
class _Config:
    """A config that may be installed."""

    path: Path
    file: ConfigFile
    data: bytes
    version: str
    gpu: str
    analytical: int


def install(
    path: Path,
    engine: str,
    *,
    folder: Path | None = None,
    device: str | None = None,
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
    config = _read_config(path)
    if engine == "flashinfer":
        return _install_store(config, folder, device, environment, dry_run)
    if device is not None:
        raise SynthError("--device is for --engine flashinfer only; a server's file says what it was tuned on")
    return _install_files(config, engine, folder, environment, dry_run)


def uninstall(
    engine: str, *, folder: Path | None = None, environment: Mapping[str, str] = os.environ, dry_run: bool = False
) -> Removal:
    """Put back what an engine's folder held before the first :func:`install` into it.

    Raises
    ------
    SynthError
        When nothing was installed, there are several such folders, or something can't be put back; nothing has
        changed then.
    """
    where = _installed_folder(engine, folder, environment)
    with contextlib.nullcontext() if dry_run else locked(where):
        record = placing.read_record(where, _allowed(engine))
        if record is None:
            raise SynthError(f"{where}: nothing that `synth install` has put there; name another folder with --folder")
        if engine == "flashinfer" and any(
            p.is_file() and f"entries/{p.name}" not in record.files for p in (where / "entries").glob("*.json")
        ):
            # The store has got entries of its own, and stays one.
            record = replace(record, files={n: f for n, f in record.files.items() if n != _MANIFEST})
        return Removal(where, tuple(placing.undo(where, record, dry_run=dry_run)))


# ---- the config --------------------------------------------------------------------------------------------


def _read_config(path: Path) -> _Config:
    config = read(path)
    if config.kind != "json":
        raise SynthError(f"{path} is not FlashInfer's v1 JSON, the form that is installed; synth emit --format json")
    meta = config.metadata
    exact = {name: meta.get(name) if isinstance(meta, dict) else None for name in ("flashinfer_version", "gpu")}
    wrong = [name for name, v in exact.items() if not isinstance(v, str) or v in ("*", "unknown", "None", "")]
    if wrong:
        raise SynthError(
            f"{path}: its _metadata says {exact[wrong[0]]!r} for {wrong[0]}, but what is installed has to name both "
            "FlashInfer's version and the GPU; synth emit does"
        )
    version, gpu = str(exact["flashinfer_version"]), str(exact["gpu"])
    if not contract_for(version).metadata_keys:
        raise SynthError(f"{path}: FlashInfer {version} reads no JSON configs; synth port {path} --to VERSION -o OUT")
    said = meta.get("synth") if isinstance(meta, dict) else None
    if _says_simulated(said):
        raise SynthError(f"{path} rests on simulated timings, which are never served; emit from real ones")
    errors = [f for f in check(path, version) if f.severity == "error"]
    if errors:
        raise SynthError(
            f"{path} isn't fit to be served: {len(errors)} errors, the first: {errors[0].message}; "
            f"`synth check {path} --flashinfer {version}` says all"
        )
    if len(config.entries) != len(config.raw):
        odd = next(key for key in config.raw if key not in {e.key for e in config.entries})
        raise SynthError(f"{path}: the entry of {odd!r} has an odd form; drop it or emit the file anew")
    counts = said.get("entries") if isinstance(said, dict) else None
    analytical = counts.get("analytical", 0) if isinstance(counts, dict) else 0
    try:
        data = path.read_bytes()
    except OSError as e:
        raise SynthError(f"can't read {path}: {e.strerror or e}; name a config file") from e
    return _Config(path, config, data, version, gpu, analytical if type(analytical) is int else 0)


def _says_simulated(value: object) -> bool:
    """Tell whether anything in a config's provenance is marked as simulated."""
    if isinstance(value, dict):
        return any((k == "simulated" and bool(v)) or _says_simulated(v) for k, v in value.items())
    if isinstance(value, list):
        return any(map(_says_simulated, value))
    return isinstance(value, str) and "simulated" in value.lower()


def _allowed(engine: str) -> Callable[[str], bool]:
    """Return whether a name is one of the files that an install of this engine writes."""
    pattern = _STORE_FILE if engine == "flashinfer" else LAYOUTS[engine].file
    return lambda name: pattern.fullmatch(name) is not None


# ---- vLLM's and SGLang's files -----------------------------------------------------------------------------


def _install_files(
    config: _Config, engine: str, folder: Path | None, environment: Mapping[str, str], dry_run: bool
) -> Installation:
    where = _configuration(config, engine, folder, environment)
    with contextlib.nullcontext() if dry_run else locked(where):
        record = placing.read_record(where, _allowed(engine))
        files = rank_files(engine, where)
        if not files:
            raise SynthError(f"{where} has no {LAYOUTS[engine].expected}; {_start_once(config, engine, environment)}")
        last = placing.previous_config(where)
        previous = read(last) if record and last.is_file() else None
        seen = {file.name: placing.digest(file) for file in files}
        before, merged = {}, {}
        for file in files:
            theirs = read(file)
            merging.check_metadata(config.path, config.file, file, theirs)
            before[file.name] = theirs
            if record is not None and file.name in record.files:
                kept = placing.original(where, record, file.name)
                first = read(kept) if kept else None
                if first is not None and record.files[file.name].is_synths(seen[file.name]):
                    theirs = first
                elif previous is not None:
                    theirs = merging.without(theirs, previous, first)
            merged[file.name] = merging.merge(config.file, theirs)
        notes = _compare_ranks(engine, where, before, merged)
        # A file that says the same already is left as it is, byte by byte.
        contents = {
            name: (where / name).read_bytes() if merging.same(_says(before[name]), json.loads(m.data)) else m.data
            for name, m in merged.items()
        }
        if dry_run:
            changes = placing.plan(where, record, contents)
        else:
            changes = placing.place(where, record, contents, config.data, seen=seen)
    done = Installation(
        engine,
        where,
        len(config.file.raw),
        config.analytical,
        tuple(changes),
        merged,
        variables(engine, where, environment),
        tuple(notes),
    )
    return done if dry_run else _replayed_files(config, done, [where / name for name in merged])


def _says(file: ConfigFile) -> dict[str, object]:
    """Return everything that a file holds."""
    content: dict[str, object] = {} if file.metadata is None else {METADATA: file.metadata}
    return {**content, **file.special, **file.raw}


def _compare_ranks(
    engine: str, folder: Path, before: Mapping[str, ConfigFile], merged: Mapping[str, merging.Merged]
) -> list[str]:
    """See that ranks that tune together agree after the install as well, as each server defines it.

    Returns
    -------
    list of str
        What may be amiss but can't be told from here.

    Raises
    ------
    SynthError
        When the server would throw the files away.
    """
    groups: dict[str | None, list[str]] = defaultdict(list)
    for name in merged:
        m = LAYOUTS[engine].file.fullmatch(name)
        groups[m["peers"] if m else None].append(name)
    notes = []
    for names in groups.values():
        after = {name: json.loads(merged[name].data) for name in names}
        first = names[0]
        if engine == "sglang":
            other = next((n for n in names if not merging.same(after[n], after[first])), None)
            if other is not None:
                raise SynthError(
                    f"{folder}: {first} and {other} hold different entries of SGLang's own, so it would discard all "
                    "ranks' files; remove them and start it once more"
                )
            continue
        alike: dict[tuple[str, int], set[tuple[str, int]]] = defaultdict(set)
        for name in names:
            alike[_fingerprint(_says(before[name]))].add(_fingerprint(after[name]))
        if any(len(found) > 1 for found in alike.values()):
            raise SynthError(
                f"{folder}: the ranks' files would have different numbers of entries afterwards, so vLLM would load "
                "none of them; remove them, start it once more, and install again"
            )
        if len(alike) > 1:
            notes.append(
                f"the files of {len(names)} ranks differ in metadata or number of entries: unless these are stages of "
                "a pipeline, vLLM loads none of them and tunes anew"
            )
    return notes


def _fingerprint(content: Mapping[str, object]) -> tuple[str, int]:
    """Return what vLLM 0.33.0 compares between ranks: the metadata, and how much else there is."""
    return json.dumps(content.get(METADATA), sort_keys=True), len(content.keys() - {METADATA})


def _configuration(config: _Config, engine: str, folder: Path | None, environment: Mapping[str, str]) -> Path:
    """Return the folder of one configuration of the server."""
    if folder is not None:
        if not folder.is_dir():
            raise SynthError(f"{folder}: {'not a' if folder.exists() else 'no such'} folder; name one with --folder")
        return folder.resolve()
    found = candidates(engine, config.version, environment)
    if len(found) == 1:
        return found[0].resolve()
    title = LAYOUTS[engine].title
    if found:
        listed = "; ".join(f"{p} ({_described(engine, p)})" for p in found)
        raise SynthError(f"{title} has {len(found)} configurations here, name one with --folder: {listed}")
    root, pattern = search_root(engine, environment)
    looked = root / pattern.format(version=config.version)
    others = sorted({p.parents[1].name for p in candidates(engine, "*", environment)} - {config.version})
    others = [name for name in others if "{version}" in pattern and re.match(r"[0-9]+\.[0-9]+", name)]
    if others:
        raise SynthError(
            f"{title} has no files at {looked}, but some of FlashInfer {', '.join(others)}, for which "
            f"`synth port {config.path} --to {others[-1]} -o OUT` rewrites the config"
        )
    raise SynthError(f"{title} has no files at {looked}; {_start_once(config, engine, environment)}")


def _described(engine: str, folder: Path) -> str:
    files = rank_files(engine, folder)
    try:
        meta = read(files[0]).metadata
    except (SynthError, IndexError):
        meta = None
    on = f"{meta.get('gpu')}, FlashInfer {meta.get('flashinfer_version')}" if isinstance(meta, dict) else "unreadable"
    return f"{len(files)} file{'s' * (len(files) != 1)}, {on}"


def _start_once(config: _Config, engine: str, environment: Mapping[str, str]) -> str:
    """Say how a server comes to have files to install into."""
    start = f"start {LAYOUTS[engine].title} once as you serve, and take the folder that its log names"
    if engine == "sglang":
        return start
    override = environment.get("VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR")
    folder = f" --folder {override}" if override else ""
    return (
        f"{start}; on one GPU vLLM 0.33.0 has none, but FlashInfer's store: "
        f"synth install {config.path} --engine flashinfer{folder}"
    )


def _replayed_files(config: _Config, done: Installation, files: list[Path]) -> Installation:
    """Read the files back, and ask FlashInfer for every key from the first one."""
    from synth.gpu.replay import replay_file

    for file in files:
        there = read(file).raw
        lost = [
            key for key, value in config.file.raw.items() if key not in there or not merging.same(there[key], value)
        ]
        if lost:
            raise SynthError(f"{file} lacks {len(lost)} of the entries by now; stop the server and install again")
    again = "run the same command in the server's environment to ask FlashInfer from there"
    try:
        version = installed_flashinfer()
    except MissingDependencyError:
        return replace(done, not_replayed=f"FlashInfer isn't installed here; {again}")
    if version != config.version:
        return replace(done, not_replayed=f"FlashInfer {version} is installed here; {again}")
    if not _can_replay(version):
        return replace(done, not_replayed=f"synth replays FlashInfer {DEFAULT_FLASHINFER} only")
    report = replay_file(config.file, files[0])
    if not report.loaded and report.misses and report.misses[0].code == "metadata":
        return replace(done, not_replayed=f"this environment isn't the server's: {report.misses[0].reason}; {again}")
    return replace(done, report=report)


def _can_replay(version: str) -> bool:
    return contract_for(version).extras == contract_for().extras


# ---- FlashInfer's managed store ----------------------------------------------------------------------------


def _install_store(
    config: _Config, root: Path | None, device: str | None, environment: Mapping[str, str], dry_run: bool
) -> Installation:
    from synth.gpu import store

    gpu, notes = store.gpu_here(), []
    if gpu is None:
        if device is None or root is None:
            raise SynthError(
                "no GPU is here, and a store is found only in the very environment that it was written in; run this "
                "where the server runs, or, to prepare that environment without its GPU, name the GPU with --device "
                "and the store's root with --folder"
            )
        metadata = store.environment(config.file, device)
        blind = store.unknown(metadata)
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
        metadata = store.environment(config.file)
    differing = store.differences(config.file, metadata)
    if differing:
        said = ", ".join(f"{name} is {old!r}, here {new!r}" for name, (old, new) in differing.items())
        way_out = (
            f"`synth port {config.path} --to {metadata['flashinfer_version']} -o OUT` rewrites it"
            if "flashinfer_version" in differing and "gpu" not in differing
            else "emit a config for this GPU, or run this in the server's environment"
        )
        raise SynthError(f"{config.path}: {said}; {way_out}")
    default = store.default_root()
    where = Path(os.path.abspath(root if root is not None else environment.get(_STORE_VARIABLE) or default))
    if where.exists() and not where.is_dir():
        raise SynthError(f"{where} is not a folder; name the store's root with --folder")
    made = store.store_files(config.file, where.resolve(), metadata)
    folder = made.folder
    for part in (folder.parent, folder):
        if part.is_symlink():
            raise SynthError(f"{part} is a link out of the store; name the store's root with --folder, where it points")
    missing = placing.missing_folders(folder)
    with contextlib.nullcontext() if dry_run else locked(folder):
        record = placing.read_record(folder, _allowed("flashinfer"))
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
        needed[_STORE_VARIABLE] = str(where)
    done = Installation(
        "flashinfer", folder, len(config.file.raw), config.analytical, tuple(changes), {}, needed, tuple(notes)
    )
    if dry_run:
        return done
    if not _can_replay(installed_flashinfer()):
        return replace(done, not_replayed=f"synth replays FlashInfer {DEFAULT_FLASHINFER} only")
    return replace(done, report=replay_store(config.file, where.resolve()))


def _own_default(default: Path, environment: Mapping[str, str]) -> Path:
    """Return where FlashInfer looks without the variable."""
    if not environment.get(_STORE_VARIABLE):
        return default
    base = environment.get("FLASHINFER_WORKSPACE_BASE", str(Path.home()))
    return Path(base) / ".cache" / "flashinfer" / "autotune"


# ---- undoing -----------------------------------------------------------------------------------------------


def _installed_folder(engine: str, folder: Path | None, environment: Mapping[str, str]) -> Path:
    if engine != "flashinfer":
        found = [folder] if folder is not None else candidates(engine, "*", environment, KEPT)
        looked = folder or search_root(engine, environment)[0]
    else:
        from synth.gpu.store import default_root

        looked = folder or Path(environment.get(_STORE_VARIABLE) or default_root())
        try:
            found = [p for p in sorted((looked / "v2").glob("*")) if _STORE_FOLDER.fullmatch(p.name)]
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
