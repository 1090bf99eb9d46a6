"""What strangers' files may not do: fill the memory, hang the parser, or write to a terminal.

Limits stand before any parser: a JSON text whose nesting or number of values no file of ours comes near is refused by
counting its brackets and commas, not by waiting for what the parser does with it.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from synth.errors import SynthError

#: Deeper than any file of FlashInfer or synth, whose metadata nests six levels deep.
MAX_DEPTH = 64
#: Most commas; what lies between them costs some 100 bytes once parsed. The H200's config for the whole catalogue,
#: 27,408 entries in 11 MiB, has 274,100, and its sidecar 512,180.
MAX_VALUES = 3_000_000
#: Most objects and arrays; the same config has 82,232, and its sidecar 80,599.
MAX_CONTAINERS = 1_000_000
#: Most digits of a number. Python takes a time that grows with their square.
MAX_DIGITS = 1000

_BRACKETS = b"[]{}"
_NOT_STRUCTURE = bytes(set(range(256)) - set(_BRACKETS + b","))
_STRING = re.compile(rb'"[^"]*"?')


def read_bytes(path: Path, limit: int, what: str) -> bytes:
    """Return a regular file's content.

    Parameters
    ----------
    limit : int
        Most bytes.
    what : str
        What the file should be, for the message: ``"tuning config"``.

    Raises
    ------
    SynthError
        When it can't be read, is larger, or is a pipe or a device, which might never end.
    """
    try:
        # Without O_NONBLOCK, opening a pipe waits for a writer.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as f:
            mode = os.fstat(fd).st_mode
            if stat.S_ISDIR(mode):
                raise SynthError(f"can't read {path}: Is a directory; name a {what}")
            if not stat.S_ISREG(mode):
                raise SynthError(f"can't read {path}: it is no regular file; name a {what}")
            data = f.read(limit + 1)
    except (OSError, ValueError) as e:
        raise SynthError(f"can't read {path}: {getattr(e, 'strerror', None) or e}; name a {what}") from e
    if len(data) > limit:
        raise SynthError(f"{path} is larger than {limit >> 20} MiB; that is no {what}")
    return data


def loads(
    data: bytes,
    *,
    pairs: Callable[[list[tuple[str, Any]]], Any] | None = None,
    constants: bool = True,
    depth: int = MAX_DEPTH,
    values: int = MAX_VALUES,
    containers: int = MAX_CONTAINERS,
) -> Any:
    """Parse JSON as ``json.loads`` does, within limits.

    Parameters
    ----------
    pairs : callable, optional
        ``object_pairs_hook`` of ``json.loads``.
    constants : bool
        Take ``NaN`` and ``Infinity``, too, which JSON doesn't know.
    depth, values, containers : int
        Most levels, commas, and objects and arrays.

    Raises
    ------
    ValueError
        When it isn't UTF-8 or JSON (:class:`json.JSONDecodeError`), or beyond a limit; the message is one line.
    """
    text = data.decode("utf-8")
    _check_structure(data, depth, values, containers)
    try:
        hooks: dict[str, Any] = {} if constants else {"parse_constant": _no_constant}
        return json.loads(text, object_pairs_hook=pairs, parse_int=_int, **hooks)
    except (RecursionError, MemoryError) as e:
        raise ValueError(first_line(e)) from None


def _check_structure(data: bytes, depth: int, values: int, containers: int) -> None:
    # An escaped quote doesn't end a string; pairs of backslashes go first, so that what is left escapes a quote.
    escaped = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    too_many = f"it holds more than {values} values or {containers} arrays and objects"
    # A value is at most two strings, its name and itself.
    if escaped.count(b'"') > 4 * (values + 1):
        raise ValueError(too_many)
    bare = _STRING.sub(b"", escaped).translate(None, _NOT_STRUCTURE)
    if bare.count(b",") > values or bare.count(b"[") + bare.count(b"{") > containers:
        raise ValueError(too_many)
    level = 0
    for byte in bare.replace(b",", b""):
        level += 1 if byte in b"[{" else -1
        if level > depth:
            raise ValueError(f"it is nested more than {depth} levels deep")


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _int(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number has {len(text)} digits")
    return int(text)


def printable(text: str) -> str:
    """Return `text` with everything that isn't printable as Python escapes it, so that no terminal obeys it.

    Examples
    --------
    >>> printable("a\\x1b[31mb")
    'a\\\\x1b[31mb'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def shown(value: object, limit: int = 80) -> str:
    """Return ``repr(value)``, printable and cut to `limit` characters."""
    text = printable(repr(value))
    return text if len(text) <= limit else text[: limit - 1] + "…"


def first_line(e: BaseException) -> str:
    """Return the first line of an exception's message, its name where it has none."""
    return (str(e).splitlines() or [""])[0] or type(e).__name__
