"""Writing files whole or not at all, and by one process at a time."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from synth.errors import SynthError


def write_atomically(path: Path, data: bytes) -> None:
    """Write `data` to `path` through a temporary file in the same folder and a rename.

    Missing parent folders are made. A reader sees the old file or the new one, never a part.

    Raises
    ------
    SynthError
        When the folder or the file can't be written; the old file, if any, is unchanged.
    """
    temporary: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        with os.fdopen(fd, "wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
    except OSError as e:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)
        raise SynthError(f"can't write {path}: {e.strerror or e}; name another place or free some space") from e


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold off other processes that change files in `folder`, which is made where it is missing.

    Raises
    ------
    SynthError
        When the folder can't be made or opened.
    """
    # Not with the module: config files are also written where there is no such thing.
    import fcntl

    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(folder, os.O_RDONLY)
    except OSError as e:
        raise SynthError(f"can't write to {folder}: {e.strerror or e}; name another place or free some space") from e
    try:
        # A file system without locks must not keep anyone from their timings.
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def write_together(groups: Sequence[Sequence[tuple[Path, bytes | None]]]) -> None:
    """Write groups of files that belong together: all of them, or none. None leaves no file there.

    Everything is first written in full to a temporary folder beside its place. Then, group by group, the old files are
    moved away in their order, and the new ones come in the opposite one. So the first file of a group, whenever it is
    there, lies beside the others that belong to it, even where the process is killed. An error puts everything back.

    Raises
    ------
    SynthError
        When something can't be written; nothing has changed then.
    """
    done: list[tuple[Path, Path]] = []
    current = Path()
    try:
        with contextlib.ExitStack() as stack:
            moves = []
            for group in groups:
                current = group[0][0]
                current.parent.mkdir(parents=True, exist_ok=True)
                beside = tempfile.TemporaryDirectory(prefix=".synth-", dir=current.parent, ignore_cleanup_errors=True)
                moves.append((current, _stage(Path(stack.enter_context(beside)), group)))
            try:
                for path, pairs in moves:
                    current = path
                    for old, new in pairs:
                        os.replace(old, new)
                        done.append((old, new))
            except BaseException:
                for old, new in reversed(done):
                    os.replace(new, old)
                raise
    except OSError as e:
        raise SynthError(
            f"can't write {current}: {e.strerror or e}; name another place with -o or free some space"
        ) from e


def _stage(folder: Path, group: Sequence[tuple[Path, bytes | None]]) -> list[tuple[Path, Path]]:
    """Write a group's files to a temporary folder; return the renames that put them in place, in order."""
    away, there = [], []
    for number, (target, data) in enumerate(group):
        if target.is_dir():
            raise SynthError(f"can't write {target}: a folder is in its place; move it or name another place with -o")
        # `lexists`: a dangling link is replaced like a file.
        if os.path.lexists(target):
            away.append((target, folder / f"old-{number}"))
        if data is not None:
            fresh = folder / f"new-{number}"
            with open(fresh, "xb") as f:
                f.write(data)
                f.flush()
                os.fsync(f.fileno())
            there.append((fresh, target))
    return [*away, *reversed(there)]
