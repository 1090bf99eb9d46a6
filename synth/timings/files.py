"""The file of one shape's timings: its head, its rows, and back.

One file holds the timings of one shape on one device, under one FlashInfer version and one quantization::

    <root>/<device slug>/flashinfer-<version>/<quant>/<shape>.csv.gz

Its text is a head, lines that begin with ``# `` and together are JSON, and then a table::

    pass,stage,tokens,tactic,ms,note

A **pass** is one sweep with one provenance (date, driver, machine …), described in the head. ``tactic`` is an id
under the head's FlashInfer version, and the head says what each id is. ``ms`` is empty where the tactic failed;
``note`` is empty, ``throttled``, or ``error: …``. A row is one line; a bad one becomes a
:class:`synth.timings.rows.Problem` and every other row is kept.

A table without notes and without a fault, as all shipped ones are, is parsed at once by numpy: 178,402 rows
in 0.15 s. Python's ``csv`` and conversion cell by cell take 0.55 s for them. As numpy gives up on a whole table for
one bad row, any other table is read line by line (:mod:`synth.timings.text`).
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import re
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from synth.catalog import untrusted
from synth.catalog.files import write_atomically
from synth.catalog.shapes import MoEShape
from synth.errors import SynthError
from synth.timings.origin import Origin, quoted
from synth.timings.rows import COLUMNS, LARGEST, ROW, Accepted, BadRow, Problem, Row, hand_over
from synth.timings.table import Provenance, ShapeTimings
from synth.timings.text import integer, read_text, take_lines, time

#: Version of the file format.
SCHEMA = 1
#: Ending of a file's name.
SUFFIX = ".csv.gz"

_HEADER = ("pass", "stage", "tokens", "tactic", "ms", "note")
_HEADER_LINE = ",".join(_HEADER)
#: What the head says besides its schema, and as what.
_HEAD: dict[str, type] = {
    **dict.fromkeys(("device", "arch", "quant", "shape", "label", "flashinfer"), str),
    **dict.fromkeys(("policy", "passes", "tactics"), dict),
    "simulated": bool,
}
_KINDS = {str: "text", dict: "a JSON object", bool: "true or false"}
_NOTE_LIMIT = 1000
_LABEL_LIMIT = 200
#: Ids without a table are up to the file, and one that is taken for a number of rows would fill the memory.
_LARGEST_ID = 9999
#: A row whose note is empty.
_PLAIN = np.dtype([*((name, ROW[name]) for name in COLUMNS[:5]), ("note", "U1")])


@dataclass(frozen=True)
class Opened:
    """A file of which only the head was parsed; attributes are those of :class:`ShapeTimings`.

    Attributes
    ----------
    text : bytes
        The rows.
    first : int
        Number of their first line.
    cut : bool
        The file is cut short.
    """

    path: Path
    origin: Origin
    shape: MoEShape
    label: str
    passes: dict[int, Provenance]
    tactics: dict[int, str]
    text: bytes
    first: int
    cut: bool

    def timings(self, problems: list[Problem]) -> ShapeTimings:
        """Parse the rows; `problems` gets those that can't be used.

        Raises
        ------
        SynthError
            When the head's tactics contradict the FlashInfer version's table, or are none.
        """
        try:
            accepted = Accepted(self.origin, self.tactics, self.passes)
        except (SynthError, ValueError) as e:
            # A ValueError is a size in a tactic's text with more digits than Python takes.
            why = untrusted.first_line(e)
            raise SynthError(f"{self.path}: {why}; correct the head's tactics or its flashinfer version") from None
        plain = None if self.cut else _plain_rows(self.text)
        rows: Any = plain
        if plain is None or not accepted.would_take(plain):
            width = len(_HEADER)
            take_lines(
                self.path, self.text, self.first, self.cut, width, lambda cells: accepted.add(_row(cells)), problems
            )
            rows = accepted.rows.values()
        head = {name: getattr(self, name) for name in ("origin", "shape", "label", "passes", "path")}
        return ShapeTimings.of_checked(rows, accepted.texts, **head)


def open_file(path: Path | str) -> Opened:
    """Parse a file's head.

    Raises
    ------
    SynthError
        When the file is not a measurements file, its head can't be read, or its gzip data is damaged (other than cut
        short).
    """
    path = Path(path)
    text, cut = read_text(path)
    marker = f"\n{_HEADER_LINE}\n".encode()
    at = text.find(marker)
    ours = text.startswith(b"# ")
    if at < 0 or not ours:
        if cut:
            raise SynthError(f"{path} is cut short before its first row; copy it again or remove it")
        if ours:
            raise SynthError(f"{path} has no line '{_HEADER_LINE}' after its head; restore it or remove the file")
        raise SynthError(
            f"{path} is not a measurements file (it doesn't begin with '# '); add a flat table with "
            "`synth measurements add`, or move the file elsewhere"
        )
    lines = text[:at].split(b"\n")
    return Opened(path, *_parse_head(path, lines), text[at + len(marker) :], len(lines) + 2, cut)


def read(path: Path | str, problems: list[Problem] | None = None) -> ShapeTimings:
    """Read one measurements file.

    Parameters and errors are those of :func:`synth.timings.folders.load`.
    """
    found: list[Problem] = []
    timings = open_file(path).timings(found)
    hand_over(found, problems)
    return timings


def path_of(timings: ShapeTimings, root: Path) -> Path:
    """Return the file under `root` that holds these timings."""
    return timings.origin.folder(root) / f"{timings.shape}{SUFFIX}"


def dumps(timings: ShapeTimings) -> bytes:
    """Return the file of these timings; equal timings give equal bytes."""
    head = {
        "schema": SCHEMA,
        **asdict(timings.origin),
        "policy": json.loads(timings.origin.policy),
        "shape": str(timings.shape),
        "label": timings.label,
        "passes": {str(n): p for n, p in timings.passes.items()},
        "tactics": {str(i): t for i, t in timings.tactics.items()},
    }
    out = io.StringIO(newline="")
    for line in json.dumps(_sorted(head), indent=1).split("\n"):
        out.write(f"# {line}\n")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(_HEADER)
    for row in timings.rows():
        ms = "" if math.isnan(row.ms) else repr(row.ms)
        note = "throttled" if row.throttled else "" if row.error is None else f"error: {_note(row.error)}".strip()
        writer.writerow([*row.cell, ms, note])
    packed = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", compresslevel=9, fileobj=packed, mtime=0) as f:
        f.write(out.getvalue().encode())
    return packed.getvalue()


def write(timings: ShapeTimings, root: Path | str) -> Path:
    """Write timings to their file under `root`, replacing it, and return its path.

    Raises
    ------
    SynthError
        When the file can't be written; the old one, if any, is unchanged.
    """
    path = path_of(timings, Path(root))
    write_atomically(path, dumps(timings))
    return path


def of_real_size(shape: MoEShape) -> MoEShape:
    """Return a shape whose sizes fit a tensor's; raises :class:`SynthError` for another."""
    if max(shape.hidden, shape.inter, shape.experts, shape.top_k, shape.ep_size) > LARGEST:
        raise SynthError(f"shape has a size of more than {LARGEST}")
    return shape


def _parse_head(path: Path, lines: list[bytes]) -> tuple[Origin, MoEShape, str, dict[int, Provenance], dict[int, str]]:
    way_out = "restore the file or remove it"
    if wrong := [i for i, line in enumerate(lines, 1) if not line.startswith(b"# ")]:
        raise SynthError(f"{path}:{wrong[0]}: a line of the head doesn't begin with '# '; {way_out}")
    try:
        data = untrusted.loads(b"\n".join(line[2:] for line in lines), constants=False)
    except (ValueError, RecursionError) as e:
        raise SynthError(f"{path}: its head is not JSON ({e}); {way_out}") from None
    if not isinstance(data, dict) or "schema" not in data:
        raise SynthError(f"{path} is not a measurements file (its head has no schema); move it elsewhere")
    schema = data.pop("schema")
    if schema != SCHEMA or isinstance(schema, bool):
        raise SynthError(
            f"{path} has schema {quoted(schema)}, and this version of synth reads {SCHEMA}; "
            "update synth or remove the file"
        )
    if missing := sorted(_HEAD.keys() - data.keys()):
        raise SynthError(f"{path}: its head lacks {', '.join(missing)}; {way_out}")
    if extra := sorted(data.keys() - _HEAD.keys()):
        raise SynthError(f"{path}: its head has an unknown key {quoted(extra[0])}; {way_out}")
    try:
        for key, kind in _HEAD.items():
            if not isinstance(data[key], kind):
                raise SynthError(f"{key} is not {_KINDS[kind]}")
        if len(data["label"]) > _LABEL_LIMIT or not data["label"].isprintable():
            raise SynthError(f"label {quoted(data['label'])} is not a name")
        passes = _numbered("passes", data["passes"], 1, dict)
        tactics = _numbered("tactics", data["tactics"], 0, str)
        if tactics and max(tactics) > _LARGEST_ID:
            raise SynthError(f"tactics have the id {max(tactics)}, and none is that large")
        names = ("device", "arch", "quant", "flashinfer", "policy", "simulated")
        origin = Origin.make(**{name: data[name] for name in names})
        shape = of_real_size(MoEShape.parse(data["shape"]))
    except (SynthError, ValueError) as e:
        raise SynthError(f"{path}: its head's {untrusted.first_line(e)}; {way_out}") from None
    return origin, shape, data["label"], passes, tactics


def _numbered(key: str, values: dict[str, Any], low: int, kind: type) -> dict[int, Any]:
    for number, value in values.items():
        if not re.fullmatch(r"0|[1-9][0-9]{0,8}", number) or int(number) < low or not isinstance(value, kind):
            raise SynthError(f"{key} has a bad entry {quoted(number)}")
    return {int(n): values[n] for n in sorted(values, key=int)}


def _plain_rows(text: bytes) -> NDArray[np.void] | None:
    """Parse a whole table at once, as :data:`ROW`; ``None`` where a row needs a closer look."""
    if not text.endswith(b"\n") or text.translate(None, b"0123456789.,\n-+e"):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            table = np.loadtxt(io.StringIO(text.decode("ascii")), dtype=_PLAIN, delimiter=",", comments=None, ndmin=1)
    except (ValueError, OverflowError, Warning):
        return None
    if (table["note"] != "").any():
        return None
    rows = np.zeros(len(table), dtype=ROW)
    for name in COLUMNS[:5]:
        rows[name] = table[name]
    return rows


def _row(cells: list[str]) -> Row:
    pass_, stage, tokens, tactic = map(integer, _HEADER, cells[:4])
    ms, note = cells[4:]
    if note.startswith("error:"):
        error = _note(note.removeprefix("error:"))
        return Row(pass_, stage, tokens, tactic, math.nan if ms == "" else time(ms), error=error)
    if note not in ("", "throttled"):
        raise BadRow(f"note {quoted(note)} is not 'throttled' or 'error: …'")
    if ms == "":
        raise BadRow("has neither a time nor an error")
    return Row(pass_, stage, tokens, tactic, time(ms), throttled=note == "throttled")


def _sorted(value: Any) -> Any:
    """Sort the keys of JSON objects, numbers as numbers."""
    if isinstance(value, dict):
        return {k: _sorted(value[k]) for k in sorted(value, key=lambda k: (len(k) if k.isdecimal() else 0, k))}
    return [_sorted(v) for v in value] if isinstance(value, list) else value


def _note(text: str) -> str:
    """Make an error fit on one line of a table."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= _NOTE_LIMIT else line[: _NOTE_LIMIT - 1] + "…"
