"""Replacing files of a folder all at once, with a way back.

What is replaced is first copied to ``.synth-install`` in the folder, with a record of every file: its hash before, and
the hashes of what synth put there. The record is written before the first file, so that whatever happens in between,
:func:`undo` finds each file's original. Only names that the caller allows are ever read from a record.

Links: the folder itself may be one, whoever named it meant what it points to. A file in it that is a link is refused,
whether or not it leads out of the folder: servers replace such files by a rename, which would cut the link as well.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from synth import __version__
from synth.catalog import untrusted
from synth.catalog.files import write_atomically
from synth.errors import SynthError

#: The folder of originals, beside the files.
KEPT = ".synth-install"
_RECORD, _BEFORE, _CONFIG = "record.json", "before", "config.json"
_TEMPORARY = ".synth-temporary-"
_MAX_RECORD_BYTES = 1 << 26
#: From so many files on, one flush of everything is quicker than one of each.
_MANY = 64
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Placed:
    """What synth did with one file.

    Attributes
    ----------
    before : str or None
        SHA-256 of the original, None where there was no file.
    after : tuple of str
        SHA-256 of what synth put there, the newest last.
    """

    before: str | None
    after: tuple[str, ...]

    def is_synths(self, found: str | None) -> bool:
        """Whether the content is the original or synth's, so that nobody else has written it."""
        return found == self.before or found in self.after


@dataclass(frozen=True)
class Record:
    """What synth put into a folder.

    Attributes
    ----------
    files : dict of str to Placed
        By name, relative to the folder, with ``/``.
    made : tuple of str
        Folders that were made for it, relative to the folder, the innermost first.
    """

    files: dict[str, Placed] = field(default_factory=dict)
    made: tuple[str, ...] = ()


@dataclass(frozen=True)
class Change:
    """What happens, or would happen, to one file.

    Attributes
    ----------
    name : str
        Relative to the folder.
    kind : str
        ``"made"``, ``"replaced"``, ``"removed"``, ``"restored"``, or ``"same"`` where nothing happens.
    copy : str or None
        Where a content that isn't synth's is kept.
    """

    name: str
    kind: str
    copy: str | None = None


def read_record(folder: Path, allowed: re.Pattern[str]) -> Record | None:
    """Return what was installed into a folder; None where nothing was.

    Raises
    ------
    SynthError
        When the record is damaged, or names a file that `allowed` says no to.
    """
    path = folder / KEPT / _RECORD
    if not os.path.lexists(folder / KEPT):
        return None
    bad = f"{path} is not a record of `synth install`"
    way_out = f"restore the files by hand from {folder / KEPT / _BEFORE} and remove {folder / KEPT}"
    linked = [p for p in (folder / KEPT, path, folder / KEPT / _BEFORE, folder / KEPT / _CONFIG) if p.is_symlink()]
    if linked:
        raise SynthError(f"{linked[0]} is a link, which synth never makes; remove it")
    try:
        if path.stat().st_size > _MAX_RECORD_BYTES:
            raise ValueError("it is too large")
        content = untrusted.loads(path.read_bytes())
        files = {
            name: Placed(_sha(f["before"], none=True), tuple(str(_sha(a)) for a in f["after"]))
            for name, f in content["files"].items()
        }
        made = tuple(content["made"])
    except FileNotFoundError:
        # A crash before anything was changed.
        return None
    except OSError as e:
        raise SynthError(f"can't read {path}: {e.strerror or e}; {way_out}") from e
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise SynthError(f"{bad} ({type(e).__name__}: {e}); {way_out}") from e
    wrong = [name for name in files if not allowed.fullmatch(name)] + [m for m in made if m not in _MADE]
    if wrong:
        raise SynthError(f"{bad}: it names {wrong[0]!r}; {way_out}")
    return Record(files, made)


#: Folders that an install may make, the innermost first: the store's entries, its environment, its schema, its root.
_MADE = ("entries", ".", "..", "../..")


def _sha(value: object, *, none: bool = False) -> str | None:
    if value is None and none:
        return None
    if not isinstance(value, str) or not _SHA256.fullmatch(value):
        raise ValueError(f"{value!r} is no SHA-256")
    return value


def original(folder: Path, record: Record | None, name: str) -> Path | None:
    """Return where a file's original is kept; None where there was none.

    Raises
    ------
    SynthError
        When the copy isn't what was copied.
    """
    if record is None or name not in record.files or record.files[name].before is None:
        return None
    path = folder / KEPT / _BEFORE / name
    if digest(path) != record.files[name].before:
        raise SynthError(
            f"{path} has changed or is gone, so that the original can't be restored; put it back, or remove "
            f"{folder / KEPT} to keep what is installed"
        )
    return path


def previous_config(folder: Path) -> Path:
    """Return where the config that was installed last is kept."""
    return folder / KEPT / _CONFIG


def digest(path: Path) -> str | None:
    """Return a file's SHA-256; None where there is no file.

    Raises
    ------
    SynthError
        When it is a link, no regular file, or can't be read.
    """
    try:
        mode = os.lstat(path).st_mode
        if stat.S_ISLNK(mode):
            raise SynthError(f"{path} is a link; synth replaces only files, so install where it points to")
        if not stat.S_ISREG(mode):
            raise SynthError(f"{path} is no regular file; move it away")
        return _sha256(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as e:
        raise SynthError(f"can't read {path}: {e.strerror or e}") from e


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# ---- installing --------------------------------------------------------------------------------------------


def plan(folder: Path, record: Record | None, contents: Mapping[str, bytes]) -> list[Change]:
    """Return what :func:`place` would do with these contents, and nothing else.

    Files of an earlier install that the contents lack go back to what they were.
    """
    changes = []
    for parent in sorted({parent for name in contents for parent in (folder / name).parents if parent != folder}):
        if folder in parent.parents and parent.is_symlink():
            raise SynthError(f"{parent} is a link; synth replaces only files of {folder}, so remove it")
    for name, data in contents.items():
        found = digest(folder / name)
        kind = "same" if found == _sha256(data) else "made" if found is None else "replaced"
        changes.append(Change(name, kind, _copy_name(folder, record, name, found, kind)))
    for name, placed in (record.files if record else {}).items():
        if name not in contents and (found := digest(folder / name)) in placed.after and found != placed.before:
            changes.append(Change(name, "removed" if placed.before is None else "restored"))
    return changes


def _copy_name(folder: Path, record: Record | None, name: str, found: str | None, kind: str) -> str | None:
    """Return where to keep what somebody else wrote since synth's earlier install; the original has its place."""
    if kind != "replaced" or record is None or name not in record.files or record.files[name].is_synths(found):
        return None
    return free_name(folder, name)


def free_name(folder: Path, name: str) -> str:
    """Return a name beside `name` that is not taken, and that no server reads."""
    numbers = ("", *(f"-{n}" for n in range(2, 10_000)))
    return next(c for n in numbers if not os.path.lexists(folder / (c := f"{name}.synth-kept{n}")))


def place(
    folder: Path,
    record: Record | None,
    contents: Mapping[str, bytes],
    config: bytes,
    *,
    made: Sequence[str] = (),
    seen: Mapping[str, str | None] | None = None,
) -> list[Change]:
    """Put files into a folder: all of them, or none; keep what they replace.

    Parameters
    ----------
    folder : Path
        Is made where it is missing.
    record : Record or None
        Of :func:`read_record`: the originals of an earlier install stay the originals.
    contents : mapping of str to bytes
        By name, relative to the folder.
    config : bytes
        The config that they come from, for the next install.
    made : sequence of str
        Folders that were missing, see :class:`Record`.
    seen : mapping, optional
        SHA-256 of the files that the contents were made from, by name; by default those of now.

    Raises
    ------
    SynthError
        When something can't be written, or is written by somebody else at the same time; nothing has changed then.
    """
    changes = {c.name: c for c in plan(folder, record, contents)}
    seen = {**{name: digest(folder / name) for name in changes}, **(seen or {})}
    old = record or Record(made=tuple(made))
    files = dict(old.files)
    targets: dict[str, bytes | Path | None] = {}
    for name, change in changes.items():
        if name not in contents:
            targets[name] = original(folder, record, name)
            del files[name]
            continue
        placed = files.get(name, Placed(seen[name], ()))
        files[name] = replace(placed, after=tuple(dict.fromkeys((*placed.after, _sha256(contents[name])))))
        if change.kind != "same":
            targets[name] = contents[name]
    if not targets:
        return list(changes.values())
    kept = folder / KEPT
    back: list[Callable[[], object]] = []
    try:
        if record is None:
            back += [partial(_remove_made, folder, old.made), partial(shutil.rmtree, kept, ignore_errors=True)]
        else:
            for path in (kept / _RECORD, kept / _CONFIG):
                there = path.is_file()
                back.append(
                    partial(write_atomically, path, path.read_bytes())
                    if there
                    else partial(path.unlink, missing_ok=True)
                )
        for name, change in changes.items():
            if name not in old.files and seen[name] is not None:
                back.append(partial((kept / _BEFORE / name).unlink, missing_ok=True))
                _copy(folder / name, kept / _BEFORE / name)
            if change.copy is not None:
                back.append(partial((folder / change.copy).unlink, missing_ok=True))
                _copy(folder / name, folder / change.copy)
        # What goes back to its original leaves the record only once it has.
        write_atomically(kept / _RECORD, _dumps(Record({**old.files, **files}, old.made)))
        write_atomically(kept / _CONFIG, config)
        replace_all(folder, targets, seen)
    except BaseException as e:
        for step in reversed(back):
            with contextlib.suppress(OSError, SynthError):
                step()
        if isinstance(e, OSError):
            raise SynthError(
                f"can't write to {folder}: {e.strerror or e}; free some space or name another folder"
            ) from e
        raise
    restored = old.files.keys() - files.keys()
    if restored:
        # A record that still names them does no harm.
        with contextlib.suppress(SynthError, OSError):
            write_atomically(kept / _RECORD, _dumps(Record(files, old.made)))
            for name in restored:
                (kept / _BEFORE / name).unlink(missing_ok=True)
    return list(changes.values())


def _remove_made(folder: Path, made: Iterable[str]) -> None:
    """Remove folders that were made, where nothing else came into them."""
    for name in made:
        with contextlib.suppress(OSError):
            os.rmdir(os.path.normpath(folder / name))


def _dumps(record: Record) -> bytes:
    files = {name: {"before": f.before, "after": list(f.after)} for name, f in record.files.items()}
    return json.dumps({"synth": __version__, "made": list(record.made), "files": files}, indent=1).encode()


def _copy(source: Path, target: Path) -> None:
    """Copy a file with its mode and times, and see that it is on the disk."""
    target.parent.mkdir(parents=True, exist_ok=True)
    # Whatever lies there is in nobody's record; were it a link, the copy would go where it points to.
    target.unlink(missing_ok=True)
    shutil.copy2(source, target)
    _flush(target)


def _flush(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as e:
        # Some file systems can't flush folders.
        if e.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(fd)


def replace_all(folder: Path, targets: Mapping[str, bytes | Path | None], seen: Mapping[str, str | None]) -> None:
    """Replace files of a folder: all of them, or none.

    Everything is first written in full to a temporary folder beside the files, then renamed, file by file; an error
    puts everything back. A reader sees an old file or a new one, never a part.

    Parameters
    ----------
    targets : mapping
        By name: a content, which takes the mode and owner of the file that it replaces; a file to be copied with its
        mode and times; None to remove.
    seen : mapping
        SHA-256 by name when `targets` were made, None for no file.

    Raises
    ------
    SynthError
        When a file isn't what was seen: somebody else has written it since.
    OSError
        When something can't be written.
    """
    done: list[tuple[Path, Path | None]] = []
    for left in folder.glob(f"{_TEMPORARY}*"):
        # Of an install that was killed.
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_TEMPORARY, dir=folder, ignore_cleanup_errors=True) as temporary:
        beside = Path(temporary)
        staged = []
        for i, (name, content) in enumerate(targets.items()):
            fresh = _stage(beside / f"new-{i}", folder / name, content, flush=len(targets) <= _MANY)
            staged.append((name, folder / name, fresh, beside / f"old-{i}"))
        if len(targets) > _MANY:
            os.sync()
        try:
            for name, target, fresh, aside in staged:
                if digest(target) != seen[name]:
                    raise SynthError(f"{target} was written by somebody else meanwhile; stop the server and repeat")
                if seen[name] is None:
                    if fresh is not None:
                        target.parent.mkdir(parents=True, exist_ok=True)
                        os.replace(fresh, target)
                        done.append((target, None))
                    continue
                if fresh is None:
                    os.replace(target, aside)
                    done.append((target, aside))
                    continue
                try:
                    os.link(target, aside)
                except OSError:
                    shutil.copy2(target, aside)
                os.replace(fresh, target)
                done.append((target, aside))
        except BaseException:
            for target, aside_or_none in reversed(done):
                if aside_or_none is None:
                    target.unlink(missing_ok=True)
                else:
                    os.replace(aside_or_none, target)
            raise
        for parent in {target.parent for _, target, _, _ in staged}:
            if parent.is_dir():
                _flush(parent)


def _stage(fresh: Path, target: Path, content: bytes | Path | None, *, flush: bool) -> Path | None:
    if content is None:
        return None
    if isinstance(content, Path):
        shutil.copy2(content, fresh)
    else:
        fresh.write_bytes(content)
    with contextlib.suppress(FileNotFoundError):
        there = target.stat()
        if not isinstance(content, Path):
            os.chmod(fresh, stat.S_IMODE(there.st_mode))
        # A server of another user has to read it still; only root can see to that.
        with contextlib.suppress(OSError):
            os.chown(fresh, there.st_uid, there.st_gid)
    if flush:
        _flush(fresh)
    return fresh


# ---- and back ----------------------------------------------------------------------------------------------


def undo(folder: Path, record: Record, *, dry_run: bool = False) -> list[Change]:
    """Put back what :func:`place` replaced, and remove what it made: all of it, or nothing.

    A file that somebody else has written since, a server that saved its own tuning for example, is kept beside its
    place under another name.

    Raises
    ------
    SynthError
        When an original is damaged or something can't be written; nothing has changed then.
    """
    changes = []
    targets: dict[str, bytes | Path | None] = {}
    seen: dict[str, str | None] = {}
    for name, placed in record.files.items():
        found = digest(folder / name)
        if found == placed.before:
            changes.append(Change(name, "same"))
            continue
        back = original(folder, record, name)
        # Somebody's removal of a file that wasn't there before needs no undoing; that case is above.
        copy = None if placed.is_synths(found) or found is None else free_name(folder, name)
        changes.append(Change(name, "removed" if back is None else "restored", copy))
        targets[name], seen[name] = back, found
    if dry_run:
        return changes
    copies = []
    try:
        for change in changes:
            if change.copy is not None:
                copies.append(folder / change.copy)
                _copy(folder / change.name, folder / change.copy)
        replace_all(folder, targets, seen)
    except BaseException as e:
        for path in copies:
            path.unlink(missing_ok=True)
        if isinstance(e, OSError):
            raise SynthError(f"can't write to {folder}: {e.strerror or e}; free some space") from e
        raise
    try:
        shutil.rmtree(folder / KEPT)
    except OSError as e:
        raise SynthError(f"everything is as it was, but {e.filename} can't be removed: {e.strerror or e}") from e
    _remove_made(folder, record.made)
    return changes


def missing_folders(folder: Path, wanted: Iterable[str] = _MADE) -> tuple[str, ...]:
    """Return which of the folders that an install may make are missing, the innermost first."""
    return tuple(name for name in wanted if not os.path.isdir(os.path.normpath(folder / name)))
