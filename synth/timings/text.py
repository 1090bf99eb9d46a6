"""A table's file as text: unpacked within limits, cut into lines and cells, and each line that can't be used told.

Lines are read one by one, so that a bad one, be it bytes that aren't text or a quote that is never closed, costs no
other; the readers of libraries go on to the next quote, or give up.
"""

from __future__ import annotations

import csv
import functools
import math
import re
import zlib
from collections.abc import Callable
from pathlib import Path

from synth.catalog import untrusted
from synth.errors import SynthError
from synth.timings.origin import quoted
from synth.timings.rows import BadRow, Problem

#: The largest shipped file has 71 kB, and 228 kB unpacked; a flat table of all of them has 12 MB.
_PACKED_LIMIT = 64 << 20
_UNPACKED_LIMIT = 128 << 20
#: Files joined end to end; each costs a copy of what follows it.
_MEMBER_LIMIT = 1000
_GZIP = b"\x1f\x8b"


def read_text(path: Path, *, may_be_plain: bool = False) -> tuple[bytes, bool]:
    """Return a gzip file's content up to where it is cut short, lines ended by ``\\n``, and whether it is cut.

    Parameters
    ----------
    may_be_plain : bool
        The file may also be plain text, unless it is named ``.gz``.

    Raises
    ------
    SynthError
        When it can't be read, is not a gzip file, is damaged other than cut short, or is larger than any table.
    """
    raw = untrusted.read_bytes(path, _PACKED_LIMIT, "table of measurements")
    if may_be_plain and not raw.startswith(_GZIP) and not path.name.endswith(".gz"):
        text, cut = raw, False
    else:
        text, cut = _unpack(path, raw)
    return text.replace(b"\r\n", b"\n"), cut


def _unpack(path: Path, raw: bytes) -> tuple[bytes, bool]:
    if not raw.startswith(_GZIP):
        what = "is not a gzip file" if raw else "is empty"
        raise SynthError(f"{path} {what}; copy it again, or gzip it if it is plain text")
    parts: list[bytes] = []
    room = _UNPACKED_LIMIT
    cut = False
    while raw and not cut:
        if len(parts) == _MEMBER_LIMIT:
            raise SynthError(f"{path} is more than {_MEMBER_LIMIT} gzip files in one; no table is that")
        member = zlib.decompressobj(wbits=31)
        try:
            parts.append(member.decompress(raw, room))
        except zlib.error as e:
            # Past a wrong bit every digit may be wrong, and nothing says where that bit is.
            raise SynthError(f"{path}: its gzip data is damaged ({e}); copy it again or remove it") from e
        room -= len(parts[-1])
        if room <= 0:
            raise SynthError(f"{path} unpacks to more than {_UNPACKED_LIMIT >> 20} MiB; no table is that large")
        cut = not member.eof
        raw = member.unused_data.lstrip(b"\0")
    return b"".join(parts), cut


def take_lines(
    path: Path,
    text: bytes,
    first: int,
    cut: bool,
    width: int,
    take: Callable[[list[str]], None],
    problems: list[Problem],
) -> None:
    """Hand over the cells of each line that isn't empty.

    Parameters
    ----------
    first : int
        Number of the text's first line in its file.
    cut : bool
        The file is cut short where the text ends.
    width : int
        Cells of a line.
    take : callable
        Gets the cells; raises :class:`BadRow` with what is wrong with them.
    problems : list
        Gets the lines that can't be used; the last one, too, where it doesn't end or where the file is cut short.
    """
    *lines, torn = text.split(b"\n")
    for number, line in enumerate(lines, first):
        try:
            if line:
                take(_cells_of(line, width))
        except BadRow as e:
            problems.append(Problem(path, number, str(e)))
    if cut:
        end = "the gzip file is cut short here and what followed is lost"
    elif torn:
        end = "the last line has no line end, so it may be torn"
    else:
        return
    problems.append(Problem(path, first + len(lines), end))


def _cells_of(line: bytes, width: int) -> list[str]:
    try:
        text = line.decode()
        cells = next(csv.reader([text], strict=True)) if '"' in text else text.split(",")
    except UnicodeDecodeError:
        raise BadRow("is not UTF-8 text") from None
    except csv.Error:
        raise BadRow("its quotes are not closed") from None
    if len(cells) != width:
        raise BadRow(f"has {len(cells)} column{'s' if len(cells) != 1 else ''}, not {width}")
    return cells


@functools.lru_cache(maxsize=4096)
def integer(name: str, text: str) -> int:
    """Return a cell's whole number; raises :class:`BadRow`."""
    if not re.fullmatch(r"-?[0-9]{1,18}", text):
        raise BadRow(f"{name} {quoted(text)} is not a whole number")
    return int(text)


def time(text: str) -> float:
    """Return a cell's time in ms; raises :class:`BadRow`."""
    if not re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|[+-]?inf|nan", text):
        raise BadRow(f"ms {quoted(text)} is not a number")
    ms = float(text)
    if not 0 < ms < math.inf:
        raise BadRow(f"ms {quoted(text)} is not a positive, finite time")
    return ms
