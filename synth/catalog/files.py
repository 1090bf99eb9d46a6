"""Writing files whole or not at all, and by one process at a time."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
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
