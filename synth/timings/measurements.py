"""Timings as files: one schema, one loader, nothing lost and nothing mixed.

One file holds the timings of one shape on one device, under one FlashInfer version and one quantization::

    <root>/<device slug>/flashinfer-<version>/<quant>/<shape>.csv.gz

Its text is a head, lines that begin with ``# `` and together are JSON, and then a table::

    pass,stage,tokens,tactic,ms,note

A **pass** is one sweep with one provenance (date, driver, machine …), described in the head. ``tactic`` is an id
under the head's FlashInfer version, and the head says what each id is. ``ms`` is empty where the tactic failed;
``note`` is empty, ``throttled``, or ``error: …``. A row is one line; a bad one becomes a :class:`Problem` and every
other row is kept.

Rows may be fitted as one only where their :class:`Origin` is equal, so :func:`load` returns one :class:`Timings` for
each origin.
"""

from __future__ import annotations

import csv
import functools
import gzip
import hashlib
import io
import json
import math
import re
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from synth.catalog import untrusted
from synth.catalog.files import write_atomically
from synth.catalog.schemes import QUANTS, STAGES
from synth.catalog.shapes import MoEShape
from synth.errors import SynthError
from synth.flashinfer.tactics import DEFAULT_FLASHINFER, Tactic, TacticTable, load_table

#: Version of the file format.
SCHEMA = 1
#: Columns of a measurements file.
COLUMNS = ("pass", "stage", "tokens", "tactic", "ms", "note")
#: Columns that a flat table must have; ``pass`` may be missing and means 1.
TABLE_COLUMNS = (
    "shape", "dtype", "hidden", "inter", "experts", "top_k", "ep_size", "gated", "stage", "tokens", "tactic", "ms",
)  # fmt: skip
#: The timing policy of the shipped measurements: FlashInfer's own timer, each tactic on all 16 routing samples.
DEFAULT_POLICY: Mapping[str, Any] = {
    "timer": "AutoTuner.profile_tactic",
    "profiling_repeat": 16,
    "l2": "hot",
    "cuda_graph": False,
    "pdl": True,
    "data": "normal(0, 0.1)",
    "routing": "uniform random",
}

#: Repeats further than this from their median (logarithm) were disturbed; near the best, one in a hundred is.
OUTLIER = 0.03

Provenance = dict[str, Any]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

_SUFFIX = ".csv.gz"
_HEADER = ",".join(COLUMNS)
_HEAD_KEYS = frozenset(
    ("schema", "device", "arch", "quant", "shape", "label", "flashinfer", "policy", "simulated", "passes", "tactics")
)
_LARGEST = 2**31 - 1
#: The largest shipped file has 71 kB, and 228 kB unpacked; a flat table of all of them has 12 MB.
_PACKED_LIMIT = 64 << 20
_UNPACKED_LIMIT = 128 << 20
#: Files joined end to end; each costs a copy of what follows it.
_MEMBER_LIMIT = 1000
_NOTE_LIMIT = 1000
_LABEL_LIMIT = 200
#: Ids without a table are up to the file; arrays are as long as the largest.
_LARGEST_ID = 9999


@dataclass(frozen=True)
class Problem:
    """A row that was left out, and why.

    Attributes
    ----------
    path : Path
        The file.
    row : int
        Line of the file's (unpacked) text, counted from 1, the head included.
    message : str
        What is wrong.
    """

    path: Path
    row: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.row}: {self.message}; the row is left out"


class MeasurementWarning(UserWarning):
    """A row was left out and the caller gave no list to collect problems in."""


@dataclass(frozen=True, order=True)
class Origin:
    """What must be equal for timings to be fitted as one.

    Attributes
    ----------
    device : str
        The GPU's name, exactly as torch reports it.
    arch : str
        For example ``"sm90"``.
    quant : str
        One of :data:`synth.flashinfer.tactics.QUANTS`.
    flashinfer : str
        FlashInfer version; tactic ids are those of this version.
    policy : str
        The timing policy, as JSON with sorted keys.
    simulated : bool
        The numbers come from a simulated device.
    """

    device: str
    arch: str
    quant: str
    flashinfer: str
    policy: str
    simulated: bool = False

    def __post_init__(self) -> None:
        if not self.device.isprintable() or not re.search("[a-z0-9]", self.device.lower()):
            raise SynthError(f"device {_quoted(self.device)} is not a GPU's name")
        if not re.fullmatch(r"sm[0-9]+[a-z]?", self.arch):
            raise SynthError(f"arch {_quoted(self.arch)} is not an architecture such as sm90")
        if self.quant not in QUANTS:
            raise SynthError(f"quant {_quoted(self.quant)} is not one of {', '.join(QUANTS)}")
        # The version becomes a folder's name.
        if not re.fullmatch(r"[0-9][0-9A-Za-z.+_-]*", self.flashinfer):
            raise SynthError(f"flashinfer {_quoted(self.flashinfer)} is not a version such as {DEFAULT_FLASHINFER}")

    @classmethod
    def make(
        cls,
        device: str,
        arch: str,
        quant: str,
        flashinfer: str = DEFAULT_FLASHINFER,
        policy: Mapping[str, Any] = DEFAULT_POLICY,
        simulated: bool = False,
    ) -> Origin:
        """Return the origin with `policy` in its canonical text form.

        Raises
        ------
        SynthError
            When a field is not valid or `policy` can't be written as JSON.
        """
        try:
            text = json.dumps(dict(policy), sort_keys=True, allow_nan=False)
        except (TypeError, ValueError) as e:
            raise SynthError(f"the timing policy can't be written as JSON: {e}") from e
        return cls(device, arch, quant, flashinfer, text, simulated)

    @property
    def slug(self) -> str:
        """The device's folder name: lower case, everything but letters and digits turned into ``-``."""
        return re.sub(r"[^a-z0-9]+", "-", self.device.lower()).strip("-")

    def folder(self, root: Path) -> Path:
        """Return the folder of this origin's files under `root`."""
        return root / self.slug / f"flashinfer-{self.flashinfer}" / self.quant


class Row(NamedTuple):
    """One timing: `ms` where the tactic ran (NaN where it failed, with `error` saying how)."""

    pass_: int
    stage: int
    tokens: int
    tactic: int
    ms: float
    throttled: bool = False
    error: str | None = None

    @property
    def cell(self) -> tuple[int, int, int, int]:
        """What a file may hold only once."""
        return self.pass_, self.stage, self.tokens, self.tactic


@dataclass(frozen=True, eq=False)
class ShapeTimings:
    """The timings of one file: one shape, one origin. Rows are sorted by pass, stage, tokens, tactic.

    Attributes
    ----------
    origin : Origin
        What the timings share with those they may be fitted with.
    shape : MoEShape
        The layer on one rank.
    label : str
        What a person calls the shape, for example ``"glm-5-tp8"``.
    passes : dict
        Provenance of each pass.
    tactics : dict
        Id → tactic text for every id used.
    pass_, stage, tokens, tactic : int64 array, shape (rows,)
        The cell.
    ms : float64 array, shape (rows,)
        Milliseconds; NaN where the tactic failed.
    throttled : bool array, shape (rows,)
        The GPU was throttling.
    errors : dict
        Row index → error text, one for each NaN.
    path : Path or None
        The file, if it was read from or written to one.
    """

    origin: Origin
    shape: MoEShape
    label: str
    passes: dict[int, Provenance]
    tactics: dict[int, str]
    pass_: Ints
    stage: Ints
    tokens: Ints
    tactic: Ints
    ms: Floats
    throttled: Bools
    errors: dict[int, str] = field(default_factory=dict)
    path: Path | None = None

    def __len__(self) -> int:
        return len(self.ms)

    def rows(self) -> Iterator[Row]:
        """Yield the rows in order."""
        columns = (self.pass_, self.stage, self.tokens, self.tactic, self.ms, self.throttled)
        for i, values in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
            yield Row._make((*values, self.errors.get(i)))

    @classmethod
    def from_rows(
        cls,
        origin: Origin,
        shape: MoEShape,
        label: str,
        passes: Mapping[int, Mapping[str, Any]],
        rows: Iterable[Row],
        tactics: Mapping[int, str] | None = None,
    ) -> ShapeTimings:
        """Build timings from rows in any order.

        Parameters
        ----------
        tactics : mapping, optional
            Id → tactic text. Needed only for a FlashInfer version without a tactic table.

        Raises
        ------
        SynthError
            When a row is not valid, is there twice, or is of a pass that `passes` does not describe.
        """
        known = _KnownTactics.of(origin, tactics or {})
        accepted = _Rows(passes, known)
        try:
            for row in rows:
                _check_outcome(row)
                accepted.add(row)
        except _BadRow as e:
            raise SynthError(f"timings of {shape} ({label}): {e}; correct or drop the row") from None
        return _from_rows(origin, shape, label, _as_json(passes), known.texts, accepted.rows.values(), None)


@dataclass(frozen=True, eq=False)
class Timings:
    """Every timing of one origin.

    Attributes
    ----------
    origin : Origin
        Where they come from.
    table : TacticTable
        What the ids in `tactic` are. For a FlashInfer version without a table of its own it holds just the
        tactics that were timed, renumbered without gaps.
    shapes : tuple of MoEShape
        The shapes, sorted.
    labels : tuple of str
        Their labels.
    passes : tuple of dict
        Their passes' provenance.
    shape : int64 array, shape (rows,)
        Index into `shapes`.
    pass_, stage, tokens, tactic : int64 array, shape (rows,)
        The rest of the cell.
    ms : float64 array, shape (rows,)
        Milliseconds; NaN where the tactic failed.
    throttled : bool array, shape (rows,)
        The GPU was throttling.
    """

    origin: Origin
    table: TacticTable
    shapes: tuple[MoEShape, ...]
    labels: tuple[str, ...]
    passes: tuple[dict[int, Provenance], ...]
    shape: Ints
    pass_: Ints
    stage: Ints
    tokens: Ints
    tactic: Ints
    ms: Floats
    throttled: Bools

    def __len__(self) -> int:
        return len(self.ms)

    def select(self, rows: Bools | Ints) -> Timings:
        """Return the rows of a mask or an index array; `shapes` stays whole, so that indices keep their meaning."""
        return replace(
            self,
            shape=self.shape[rows],
            pass_=self.pass_[rows],
            stage=self.stage[rows],
            tokens=self.tokens[rows],
            tactic=self.tactic[rows],
            ms=self.ms[rows],
            throttled=self.throttled[rows],
        )

    def with_pass(self, number: int) -> Timings:
        """Return the rows of one pass; none where no shape has it."""
        return self.select(self.pass_ == number)

    def averaged(self, passes: Iterable[int] | None = None) -> Timings:
        """Merge the repeats of a cell into one row, sorted by cell; see :meth:`merged`."""
        return self.merged(passes)[0]

    def merged(self, passes: Iterable[int] | None = None) -> tuple[Timings, Ints]:
        """Merge the repeats of a cell into one row by their geometric mean, sorted by cell.

        Failed timings are left out, throttled ones where the cell has another, and those that differ from the cell's
        median by more than ``OUTLIER``. The median of two is the faster: what disturbs a timing makes it longer.
        `pass_` becomes 0.

        Parameters
        ----------
        passes : iterable of int, optional
            Only these passes.

        Returns
        -------
        timings : Timings
            One row a cell.
        repeats : int64 array, shape (cells,)
            Timings behind each row.
        """
        keep = ~np.isnan(self.ms)
        if passes is not None:
            keep &= np.isin(self.pass_, list(passes))
        rows = self.select(keep)
        rows = rows.select(np.lexsort((rows.ms, rows.throttled, rows.tactic, rows.tokens, rows.stage, rows.shape)))
        cells = np.stack([rows.shape, rows.stage, rows.tokens, rows.tactic])
        new = np.ones(len(rows), dtype=np.bool_)
        new[1:] = (cells[:, 1:] != cells[:, :-1]).any(axis=0)
        first = np.flatnonzero(new)
        cell = np.cumsum(new) - 1
        # A cell's first row is unthrottled if any is, so rows that differ from it are the throttled ones to skip.
        used = rows.throttled == rows.throttled[first][cell]
        median = rows.ms[first + (np.bincount(cell[used], minlength=len(first)) - 1) // 2]
        used &= np.abs(np.log(rows.ms / median[cell])) <= OUTLIER
        count = np.bincount(cell[used], minlength=len(first)).astype(np.int64)
        total = np.bincount(cell[used], weights=np.log(rows.ms[used]), minlength=len(first))
        # One timing alone stays as it was measured, to the last bit.
        ms = np.where(count == 1, median, np.exp(total / np.maximum(count, 1)))
        return replace(rows.select(first), ms=ms, pass_=np.zeros(len(first), dtype=np.int64)), count

    def buckets(self) -> tuple[Ints, Ints]:
        """Group the rows by (shape, stage, tokens): the places where one tactic has to be chosen.

        Returns
        -------
        keys : int64 array, shape (buckets, 3)
            Shape index, stage and tokens, sorted.
        row_bucket : int64 array, shape (rows,)
            Index into `keys` for each row.
        """
        packed = (self.shape * 2 + self.stage - 1) * (_LARGEST + 1) + self.tokens
        unique, inverse = np.unique(packed, return_inverse=True)
        layer, tokens = np.divmod(unique, _LARGEST + 1)
        keys = np.stack([layer // 2, layer % 2 + 1, tokens], axis=1)
        return keys.astype(np.int64), inverse.reshape(-1).astype(np.int64)

    def best_per_bucket(self) -> tuple[Ints, Ints, Floats]:
        """Return the fastest tactic of every (shape, stage, tokens).

        Returns
        -------
        keys : int64 array, shape (buckets, 3)
            Shape index, stage and tokens, as :meth:`buckets` gives them; those without one good timing are left out.
        tactic : int64 array, shape (buckets,)
            The lowest id where several are equally fast.
        ms : float64 array, shape (buckets,)
            Its time.
        """
        rows = self.select(~np.isnan(self.ms))
        keys, bucket = rows.buckets()
        order = np.lexsort((rows.tactic, rows.ms, bucket))
        first = order[np.searchsorted(bucket[order], np.arange(len(keys)))]
        return keys, rows.tactic[first], rows.ms[first]


def load(
    roots: Path | str | Iterable[Path | str],
    device: str | None = None,
    quant: str | None = None,
    flashinfer: str | None = None,
    *,
    problems: list[Problem] | None = None,
) -> list[Timings]:
    """Load measurements from folders (searched for ``*.csv.gz``) and files, one :class:`Timings` for each origin.

    The rows of one shape and origin may come from several files: see :func:`merge`.

    Parameters
    ----------
    roots : path or iterable of paths
        Folders and files.
    device, quant, flashinfer : str, optional
        Only these.
    problems : list, optional
        Gets one :class:`Problem` for each row left out. Without it each is a :class:`MeasurementWarning`.

    Returns
    -------
    list of Timings
        Sorted by origin, shapes sorted within each, rows by pass, stage, tokens and tactic within those.

    Raises
    ------
    SynthError
        When a path doesn't exist, a file is not a measurements file, its head can't be read, its gzip data is
        damaged (other than cut short), or its tactics contradict this FlashInfer version's table.
    """
    return combine(load_shapes(roots, device, quant, flashinfer, problems=problems))


def load_shapes(
    roots: Path | str | Iterable[Path | str],
    device: str | None = None,
    quant: str | None = None,
    flashinfer: str | None = None,
    *,
    problems: list[Problem] | None = None,
) -> list[ShapeTimings]:
    """Load as :func:`load` does, but one :class:`ShapeTimings` for each origin and shape."""
    wanted = {"device": device, "quant": quant, "flashinfer": flashinfer}
    found: list[Problem] = []
    parts = [read(path, found) for path in _files(roots) if _matches(path, wanted)]
    _hand_over(found, problems)
    return _merge_equal(parts)


def combine(parts: Sequence[ShapeTimings]) -> list[Timings]:
    """Concatenate timings into one :class:`Timings` for each origin, sorted."""
    by_origin: dict[Origin, list[ShapeTimings]] = {}
    for part in _merge_equal(parts):
        by_origin.setdefault(part.origin, []).append(part)
    return [_concatenate(origin, by_origin[origin]) for origin in sorted(by_origin)]


def read(path: Path | str, problems: list[Problem] | None = None) -> ShapeTimings:
    """Read one measurements file.

    Parameters and errors are those of :func:`load`.
    """
    path = Path(path)
    found: list[Problem] = []
    text, cut = _unpack(path, _bytes_of(path))
    head, body, first_row = _split(path, text, cut)
    origin, shape, label, passes, tactics = _read_head(path, head)
    try:
        known = _KnownTactics.of(origin, tactics)
    except (SynthError, ValueError) as e:
        # A ValueError is a size in a tactic's text with more digits than Python takes.
        why = untrusted.first_line(e)
        raise SynthError(f"{path}: {why}; correct the head's tactics or its flashinfer version") from None
    body, torn = _whole_lines(body)
    columns = _plain_columns(body, passes, known)
    if columns is not None:
        unthrottled = np.zeros(len(columns[0]), dtype=np.bool_)
        timings = _from_columns(origin, shape, label, passes, known.texts, columns, unthrottled, path)
    else:
        rows = _parse_rows(path, body, first_row, passes, known, found)
        timings = _from_rows(origin, shape, label, passes, known.texts, rows, path)
    _report_end(path, first_row + body.count(b"\n"), torn, cut, found)
    _hand_over(found, problems)
    return timings


def path_of(timings: ShapeTimings, root: Path) -> Path:
    """Return the file under `root` that holds these timings."""
    return timings.origin.folder(root) / f"{timings.shape}{_SUFFIX}"


def dumps(timings: ShapeTimings) -> bytes:
    """Return the file of these timings; equal timings give equal bytes."""
    origin = timings.origin
    head = {
        "schema": SCHEMA,
        "device": origin.device,
        "arch": origin.arch,
        "quant": origin.quant,
        "shape": str(timings.shape),
        "label": timings.label,
        "flashinfer": origin.flashinfer,
        "policy": json.loads(origin.policy),
        "simulated": origin.simulated,
        "passes": {str(n): p for n, p in timings.passes.items()},
        "tactics": {str(i): t for i, t in timings.tactics.items()},
    }
    out = io.StringIO(newline="")
    for line in json.dumps(_sorted(head), indent=1).split("\n"):
        out.write(f"# {line}\n")
    out.write(_HEADER + "\n")
    writer = csv.writer(out, lineterminator="\n")
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


def append(timings: ShapeTimings, root: Path | str, problems: list[Problem] | None = None) -> Path:
    """Merge timings into their file under `root`, made if there is none, and return its path.

    Parameters
    ----------
    problems : list, optional
        Gets the rows of the present file that can't be read, which the new one will not have.

    Raises
    ------
    SynthError
        When the file there is of another device or timing policy, can't be read, or can't be written.
    """
    path = path_of(timings, Path(root))
    if path.exists():
        timings = merge([read(path, problems), timings])
    return write(timings, root)


def merge(parts: Sequence[ShapeTimings]) -> ShapeTimings:
    """Merge the timings of one shape and origin.

    A pass of a later part is a pass that is already there when number and provenance are equal and no cell has two
    different outcomes, or when it repeats one under another number. Any other pass keeps its number where that is
    free and gets the next free one where not. So equal files count once, and no timing is dropped as a duplicate
    of a different one.

    Raises
    ------
    SynthError
        When the parts are of different shapes or origins, or disagree on what a tactic id is; the line names both
        files and the field.
    """
    if not parts:
        raise SynthError("nothing to merge; name at least one measurements file")
    merged = parts[0]
    for part in parts[1:]:
        merged = _merge_two(merged, part)
    return merged


def read_table(
    path: Path | str,
    device: str = "NVIDIA H200",
    arch: str = "sm90",
    flashinfer: str = DEFAULT_FLASHINFER,
    policy: Mapping[str, Any] = DEFAULT_POLICY,
    *,
    problems: list[Problem] | None = None,
) -> list[Timings]:
    """Read a flat table: a CSV file, gzipped or not, with the columns :data:`TABLE_COLUMNS` and maybe ``pass``.

    Columns may come in any order and others are ignored; lines may end in CRLF.

    Parameters
    ----------
    device, arch, flashinfer, policy
        What the table doesn't say: see :class:`Origin`.
    problems : list, optional
        Gets one :class:`Problem` for each row left out. Without it each is a :class:`MeasurementWarning`.

    Returns
    -------
    list of Timings
        One for each quantization in the table.

    Raises
    ------
    SynthError
        When the file can't be read, lacks a column, is not UTF-8 text, or has no good row.
    """
    return combine(read_table_shapes(path, device, arch, flashinfer, policy, problems=problems))


def read_table_shapes(
    path: Path | str,
    device: str = "NVIDIA H200",
    arch: str = "sm90",
    flashinfer: str = DEFAULT_FLASHINFER,
    policy: Mapping[str, Any] = DEFAULT_POLICY,
    passes: Mapping[int, Mapping[str, Any]] | None = None,
    *,
    problems: list[Problem] | None = None,
) -> list[ShapeTimings]:
    """Read a flat table as :func:`read_table` does, but one :class:`ShapeTimings` for each quantization and shape.

    Parameters
    ----------
    passes : mapping, optional
        Provenance of each pass in the table; the file's name alone if not given.

    Raises
    ------
    SynthError
        As :func:`read_table`, and when the table has a pass that `passes` doesn't describe.
    """
    path = Path(path)
    found: list[Problem] = []
    layers = _read_flat(path, functools.partial(Origin.make, device, arch, flashinfer=flashinfer, policy=policy), found)
    if not layers:
        why = f" (row {found[0].row}: {found[0].message})" if found else ""
        raise SynthError(f"{path} has no row that can be used{why}; expected the columns {','.join(TABLE_COLUMNS)}")
    parts = []
    for layer in layers:
        rows = layer.accepted.rows.values()
        numbers = {row.pass_ for row in rows}
        if passes is None:
            described = {n: {"source": path.name} for n in sorted(numbers)}
        elif missing := sorted(numbers - passes.keys()):
            raise SynthError(f"{path}: pass {missing[0]} has no provenance; describe it or leave its rows out")
        else:
            described = _as_json({n: passes[n] for n in numbers})
        parts.append(_from_rows(layer.origin, layer.shape, layer.label, described, layer.known.texts, rows, path))
    _hand_over(found, problems)
    return sorted(parts, key=lambda p: (p.origin, p.shape))


def import_table(
    path: Path | str,
    root: Path | str,
    passes: Mapping[int, Mapping[str, Any]],
    device: str = "NVIDIA H200",
    arch: str = "sm90",
    flashinfer: str = DEFAULT_FLASHINFER,
    policy: Mapping[str, Any] = DEFAULT_POLICY,
    *,
    problems: list[Problem] | None = None,
) -> list[Path]:
    """Append a flat table's rows to the measurements files under `root` and return the files' paths.

    Parameters and errors are those of :func:`read_table_shapes` and :func:`append`.
    """
    parts = read_table_shapes(path, device, arch, flashinfer, policy, passes, problems=problems)
    return [append(part, root, problems) for part in parts]


def times_by_bucket(timings: Timings) -> dict[tuple[int, int, int], dict[int, float]]:
    """Return the time in ms of each tactic by (shape index, stage, tokens); the last row of a cell counts."""
    found: dict[tuple[int, int, int], dict[int, float]] = {}
    columns = (timings.shape, timings.stage, timings.tokens, timings.tactic, timings.ms)
    for shape, stage, tokens, tactic, ms in zip(*(c.tolist() for c in columns), strict=True):
        found.setdefault((shape, stage, tokens), {})[tactic] = ms
    return found


def digest(timings: Timings) -> str:
    """Return the SHA-256 of the timings: equal for equal content, whatever the order of rows and shapes."""
    hasher = hashlib.sha256()
    order = sorted(range(len(timings.shapes)), key=lambda i: timings.shapes[i])
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    o = timings.origin
    head = [
        [o.device, o.arch, o.quant, o.flashinfer, o.policy, o.simulated],
        [[str(timings.shapes[i]), timings.labels[i]] for i in order],
        [[str(t) for t in stage] for stage in (timings.table.gemm1, timings.table.gemm2)],
    ]
    hasher.update(json.dumps(head).encode())
    shape = rank[timings.shape]
    ints = (shape, timings.pass_, timings.stage, timings.tokens, timings.tactic, timings.throttled.astype(np.int64))
    rows = np.lexsort((timings.ms, *reversed(ints)))
    for column in ints:
        hasher.update(column[rows].astype("<i8").tobytes())
    hasher.update(timings.ms[rows].astype("<f8").tobytes())
    return hasher.hexdigest()


# --- what a tactic id is ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _KnownTactics:
    """The ids that rows may use: id → text, and id → stage (0: a version without a table, so either)."""

    texts: Mapping[int, str]
    stages: Mapping[int, int]

    @classmethod
    def of(cls, origin: Origin, tactics: Mapping[int, str]) -> _KnownTactics:
        known = _known_tactics(origin.arch, origin.quant, origin.flashinfer)
        if known is None:
            for text in tactics.values():
                Tactic.parse(text)
            return cls(dict(tactics), dict.fromkeys(tactics, 0))
        for i, text in tactics.items():
            if known.texts.get(i) != text:
                raise SynthError(
                    f"tactic id {i} is given as {_quoted(text)}, but FlashInfer {origin.flashinfer} has "
                    f"{_quoted(known.texts[i]) if i in known.texts else 'no such id'} for {origin.arch} {origin.quant}"
                )
        return known

    @functools.cached_property
    def stage_of_id(self) -> Ints:
        """Stage by id, -1 where there is no such id."""
        stages = np.full(max(self.stages, default=-1) + 2, -1, dtype=np.int64)
        stages[list(self.stages)] = list(self.stages.values())
        return stages


@functools.cache
def _table(arch: str, quant: str, flashinfer: str) -> TacticTable | None:
    try:
        return load_table(arch, quant, flashinfer)
    except SynthError:
        return None


@functools.cache
def _known_tactics(arch: str, quant: str, flashinfer: str) -> _KnownTactics | None:
    table = _table(arch, quant, flashinfer)
    if table is None:
        return None
    items = [(i, stage, str(t)) for stage in STAGES for i, t in table.items(stage)]
    return _KnownTactics({i: text for i, _, text in items}, {i: stage for i, stage, _ in items})


# --- rows ------------------------------------------------------------------------------------------------------------


class _BadRow(Exception):
    """What is wrong with a row."""


class _Rows:
    """Rows that passed every check, by cell."""

    def __init__(self, passes: Iterable[int] | None, known: _KnownTactics) -> None:
        self.rows: dict[tuple[int, int, int, int], Row] = {}
        self._passes = None if passes is None else frozenset(passes)
        # Without a table the first use of an id says which stage it is of.
        self._stages = dict(known.stages)

    def add(self, row: Row) -> None:
        """Add `row`, whose outcome is known to be good, or raise `_BadRow`."""
        if row.pass_ < 1 or (self._passes is not None and row.pass_ not in self._passes):
            raise _BadRow(f"there is no pass {row.pass_}")
        if row.stage not in STAGES:
            raise _BadRow(f"stage {row.stage} is not 1 or 2")
        if not 1 <= row.tokens <= _LARGEST:
            raise _BadRow(f"tokens {row.tokens} is not from 1 to {_LARGEST}")
        stage = self._stages.get(row.tactic)
        if stage is None:
            raise _BadRow(f"unknown tactic id {row.tactic}")
        if stage not in (0, row.stage):
            raise _BadRow(f"tactic {row.tactic} is one of gemm{stage}, not gemm{row.stage}")
        if row.cell in self.rows:
            raise _BadRow("duplicate of pass {}, stage {}, tokens {}, tactic {}".format(*row.cell))
        self._stages[row.tactic] = row.stage
        self.rows[row.cell] = row


def _check_outcome(row: Row) -> None:
    if row.error is None:
        if not 0 < row.ms < math.inf:
            raise _BadRow(f"ms {row.ms} is not a positive, finite time")
    elif not math.isnan(row.ms):
        raise _BadRow("has both a time and an error")


def _parse_rows(
    path: Path,
    body: bytes,
    first_row: int,
    passes: Mapping[int, object],
    known: _KnownTactics,
    problems: list[Problem],
) -> list[Row]:
    """Parse a table line by line; the way for files with anything out of the ordinary."""
    accepted = _Rows(passes, known)
    for number, line in _numbered_lines(body, first_row):
        try:
            accepted.add(_parse_row(_cells_of(line, len(COLUMNS))))
        except _BadRow as e:
            problems.append(Problem(path, number, str(e)))
    return list(accepted.rows.values())


def _numbered_lines(body: bytes, first: int) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that aren't empty, each of which ends in a line end."""
    return ((n, line) for n, line in enumerate(body.split(b"\n")[:-1], first) if line)


def _parse_row(cells: list[str]) -> Row:
    pass_, stage, tokens, tactic = map(_integer, COLUMNS, cells[:4])
    ms, note = cells[4:]
    if note.startswith("error:"):
        error = _note(note.removeprefix("error:"))
        row = Row(pass_, stage, tokens, tactic, math.nan if ms == "" else _time(ms), error=error)
        _check_outcome(row)
        return row
    if note not in ("", "throttled"):
        raise _BadRow(f"note {_quoted(note)} is not 'throttled' or 'error: …'")
    if ms == "":
        raise _BadRow("has neither a time nor an error")
    return Row(pass_, stage, tokens, tactic, _time(ms), throttled=note == "throttled")


def _cells_of(line: bytes, count: int) -> list[str]:
    try:
        text = line.decode()
        cells = next(csv.reader([text], strict=True)) if '"' in text else text.split(",")
    except UnicodeDecodeError:
        raise _BadRow("is not UTF-8 text") from None
    except csv.Error:
        raise _BadRow("its quotes are not closed") from None
    if len(cells) != count:
        raise _BadRow(f"has {len(cells)} column{'s' if len(cells) != 1 else ''}, not {count}")
    return cells


@functools.lru_cache(maxsize=4096)
def _integer(name: str, text: str) -> int:
    if not re.fullmatch(r"-?[0-9]{1,18}", text):
        raise _BadRow(f"{name} {_quoted(text)} is not a whole number")
    return int(text)


def _time(text: str) -> float:
    if not re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|[+-]?inf|nan", text):
        raise _BadRow(f"ms {_quoted(text)} is not a number")
    ms = float(text)
    if not 0 < ms < math.inf:
        raise _BadRow(f"ms {_quoted(text)} is not a positive, finite time")
    return ms


_Columns = tuple[Ints, Ints, Ints, Ints, Floats]
_PLAIN = np.dtype([*((name, np.int64) for name in COLUMNS[:4]), ("ms", np.float64), ("note", "U1")])


def _plain_columns(body: bytes, passes: Mapping[int, object], known: _KnownTactics) -> _Columns | None:
    """Parse a whole table at once; None where any row needs a closer look."""
    if body.translate(None, b"0123456789.,\n-+e"):
        return None
    if not body.strip(b"\n"):
        empty = np.empty(0, dtype=np.int64)
        return empty, empty, empty, empty, np.empty(0, dtype=np.float64)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            table = np.loadtxt(io.StringIO(body.decode("ascii")), dtype=_PLAIN, delimiter=",", comments=None, ndmin=1)
    except (ValueError, OverflowError, Warning):
        return None
    pass_, stage, tokens, tactic = (np.ascontiguousarray(table[name]) for name in COLUMNS[:4])
    ms = np.ascontiguousarray(table["ms"])
    stage_of_id = known.stage_of_id
    id_stage = stage_of_id[np.clip(tactic, -1, len(stage_of_id) - 1)]
    good = (
        (table["note"] == "")
        & np.isin(pass_, list(passes))
        & ((stage == 1) | (stage == 2))
        & (tokens >= 1)
        & (tokens <= _LARGEST)
        # Versions without a table (stage 0) go row by row, which finds the stage of each id.
        & (id_stage == stage)
        & (ms > 0)
        & np.isfinite(ms)
    )
    if not good.all():
        return None
    order = np.lexsort((tactic, tokens, stage, pass_))
    columns = (pass_[order], stage[order], tokens[order], tactic[order], ms[order])
    cells = np.stack(columns[:4])
    if (cells[:, 1:] == cells[:, :-1]).all(axis=0).any():
        return None
    return columns


def _from_rows(
    origin: Origin,
    shape: MoEShape,
    label: str,
    passes: dict[int, Provenance],
    texts: Mapping[int, str],
    unsorted: Iterable[Row],
    path: Path | None,
) -> ShapeTimings:
    rows = sorted(unsorted, key=lambda row: row.cell)
    cells = np.array([row.cell for row in rows], dtype=np.int64).reshape(-1, 4)
    columns = (*(np.ascontiguousarray(c) for c in cells.T), np.array([row.ms for row in rows], dtype=np.float64))
    throttled = np.array([row.throttled for row in rows], dtype=np.bool_)
    errors = {i: row.error for i, row in enumerate(rows) if row.error is not None}
    timings = _from_columns(origin, shape, label, passes, texts, columns, throttled, path)  # type: ignore[arg-type]
    return replace(timings, errors=errors)


def _from_columns(
    origin: Origin,
    shape: MoEShape,
    label: str,
    passes: dict[int, Provenance],
    texts: Mapping[int, str],
    columns: _Columns,
    throttled: Bools,
    path: Path | None,
) -> ShapeTimings:
    used = {i: texts[i] for i in np.unique(columns[3]).tolist()}
    return ShapeTimings(origin, shape, label, passes, used, *columns, throttled, path=path)


# --- files -----------------------------------------------------------------------------------------------------------


def _files(roots: Path | str | Iterable[Path | str]) -> list[Path]:
    """Return the measurements files of `roots`, each once, those of a folder sorted."""
    files: dict[Path, Path] = {}
    for root in [roots] if isinstance(roots, (str, Path)) else roots:
        path = Path(root)
        if path.is_dir():
            inside = sorted(p for p in path.rglob(f"*{_SUFFIX}") if not p.name.startswith(".") and p.is_file())
        elif path.exists():
            inside = [path]
        else:
            raise SynthError(f"{path} does not exist; name a folder of measurements or a measurements file")
        for p in inside:
            files.setdefault(p.resolve(), p)
    return list(files.values())


def _matches(path: Path, wanted: Mapping[str, str | None]) -> bool:
    if not any(wanted.values()):
        return True
    text, cut = _unpack(path, _bytes_of(path))
    origin = _read_head(path, _split(path, text, cut)[0])[0]
    return all(value is None or getattr(origin, name) == value for name, value in wanted.items())


def _bytes_of(path: Path) -> bytes:
    return untrusted.read_bytes(path, _PACKED_LIMIT, "table of measurements")


def _unpack(path: Path, raw: bytes) -> tuple[bytes, bool]:
    """Return a gzip file's content up to where it is cut short, and whether it is."""
    if not raw.startswith(b"\x1f\x8b"):
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
    return b"".join(parts).replace(b"\r\n", b"\n"), cut


def _split(path: Path, text: bytes, cut: bool) -> tuple[bytes, bytes, int]:
    """Split a file's text into head and rows, and return the line number of the first row too."""
    marker = f"\n{_HEADER}\n".encode()
    at = text.find(marker)
    if at < 0 or not text.startswith(b"# "):
        if cut:
            raise SynthError(f"{path} is cut short before its first row; copy it again or remove it")
        if text.startswith(b"# "):
            raise SynthError(f"{path} has no line '{_HEADER}' after its head; restore it or remove the file")
        raise SynthError(
            f"{path} is not a measurements file (it doesn't begin with '# '); add a flat table with "
            "`synth measurements add`, or move the file elsewhere"
        )
    head = text[: at + 1]
    return head, text[at + len(marker) :], head.count(b"\n") + 2


def _whole_lines(body: bytes) -> tuple[bytes, bytes]:
    """Split off what follows the last line end."""
    end = body.rfind(b"\n") + 1
    return body[:end], body[end:]


def _report_end(path: Path, row: int, torn: bytes, cut: bool, problems: list[Problem]) -> None:
    if cut:
        problems.append(Problem(path, row, "the gzip file is cut short here and what followed is lost"))
    elif torn:
        problems.append(Problem(path, row, "the last line has no line end, so it may be torn"))


def _read_head(path: Path, head: bytes) -> tuple[Origin, MoEShape, str, dict[int, Provenance], dict[int, str]]:
    way_out = "restore the file or remove it"
    lines = head.split(b"\n")[:-1]
    if wrong := [i for i, line in enumerate(lines, 1) if not line.startswith(b"# ")]:
        raise SynthError(f"{path}:{wrong[0]}: a line of the head doesn't begin with '# '; {way_out}")
    try:
        data = untrusted.loads(b"\n".join(line[2:] for line in lines), constants=False)
    except (ValueError, RecursionError) as e:
        raise SynthError(f"{path}: its head is not JSON ({e}); {way_out}") from None
    if not isinstance(data, dict) or "schema" not in data:
        raise SynthError(f"{path} is not a measurements file (its head has no schema); move it elsewhere")
    if data["schema"] != SCHEMA or isinstance(data["schema"], bool):
        raise SynthError(
            f"{path} has schema {_quoted(data['schema'])}, and this version of synth reads {SCHEMA}; "
            "update synth or remove the file"
        )
    if missing := sorted(_HEAD_KEYS - data.keys()):
        raise SynthError(f"{path}: its head lacks {', '.join(missing)}; {way_out}")
    if extra := sorted(data.keys() - _HEAD_KEYS):
        raise SynthError(f"{path}: its head has an unknown key {_quoted(extra[0])}; {way_out}")
    for key in ("device", "arch", "quant", "shape", "label", "flashinfer"):
        if not isinstance(data[key], str):
            raise SynthError(f"{path}: its head's {key} is not text; {way_out}")
    for key in ("policy", "passes", "tactics"):
        if not isinstance(data[key], dict):
            raise SynthError(f"{path}: its head's {key} is not a JSON object; {way_out}")
    if not isinstance(data["simulated"], bool):
        raise SynthError(f"{path}: its head's simulated is not true or false; {way_out}")
    if len(data["label"]) > _LABEL_LIMIT or not data["label"].isprintable():
        raise SynthError(f"{path}: its head's label {_quoted(data['label'])} is not a name; {way_out}")
    passes = _numbered(path, "passes", data["passes"], 1, dict, way_out)
    tactics = _numbered(path, "tactics", data["tactics"], 0, str, way_out)
    if tactics and max(tactics) > _LARGEST_ID:
        raise SynthError(f"{path}: its head's tactics have the id {max(tactics)}, and none is that large; {way_out}")
    try:
        origin = Origin.make(
            data["device"], data["arch"], data["quant"], data["flashinfer"], data["policy"], data["simulated"]
        )
        shape = _of_real_size(MoEShape.parse(data["shape"]))
    except (SynthError, ValueError) as e:
        raise SynthError(f"{path}: its head's {untrusted.first_line(e)}; {way_out}") from None
    return origin, shape, data["label"], passes, tactics


def _of_real_size(shape: MoEShape) -> MoEShape:
    """Return a shape whose sizes fit a tensor's: products of larger ones overflow."""
    if max(shape.hidden, shape.inter, shape.experts, shape.top_k, shape.ep_size) > _LARGEST:
        raise SynthError(f"shape has a size of more than {_LARGEST}")
    return shape


def _numbered(path: Path, key: str, values: dict[str, Any], low: int, kind: type, way_out: str) -> dict[int, Any]:
    for number, value in values.items():
        if not re.fullmatch(r"0|[1-9][0-9]{0,8}", number) or int(number) < low or not isinstance(value, kind):
            raise SynthError(f"{path}: its head's {key} has a bad entry {_quoted(number)}; {way_out}")
    return {int(n): values[n] for n in sorted(values, key=int)}


@dataclass
class _Layer:
    """The rows of one quantization and shape in a flat table."""

    origin: Origin
    shape: MoEShape
    known: _KnownTactics
    accepted: _Rows
    label: str = ""


def _read_flat(path: Path, origin_of: Callable[..., Origin], problems: list[Problem]) -> list[_Layer]:
    names, body, cut = _flat_text(path)
    at = {name: names.index(name) for name in names}
    layer_at = [at[name] for name in ("dtype", "hidden", "inter", "experts", "top_k", "ep_size", "gated")]
    # Different texts (a size of 64 and of 064) may be one layer.
    by_text: dict[tuple[str, ...], _Layer] = {}
    layers: dict[tuple[Origin, MoEShape], _Layer] = {}
    body, torn = _whole_lines(body)
    for number, line in _numbered_lines(body, 2):
        try:
            cells = [cell.strip() for cell in _cells_of(line, len(names))]
            text = tuple(cells[i] for i in layer_at)
            layer = by_text.get(text)
            if layer is None:
                layer = _flat_layer(text, origin_of)
                layer = by_text[text] = layers.setdefault((layer.origin, layer.shape), layer)
            pass_ = _integer("pass", cells[at["pass"]]) if "pass" in at else 1
            stage, tokens, tactic = (_integer(name, cells[at[name]]) for name in ("stage", "tokens", "tactic"))
            if not (label := cells[at["shape"]]):
                raise _BadRow("shape is empty")
            layer.accepted.add(Row(pass_, stage, tokens, tactic, _time(cells[at["ms"]])))
            layer.label = layer.label or label
        except _BadRow as e:
            problems.append(Problem(path, number, str(e)))
    _report_end(path, 2 + body.count(b"\n"), torn, cut, problems)
    return [layer for layer in layers.values() if layer.accepted.rows]


def _flat_text(path: Path) -> tuple[list[str], bytes, bool]:
    """Return a flat table's column names, its rows as text, and whether its gzip file is cut short."""
    raw = _bytes_of(path)
    if path.name.endswith(".gz") or raw.startswith(b"\x1f\x8b"):
        text, cut = _unpack(path, raw)
    else:
        text, cut = raw.replace(b"\r\n", b"\n"), False
    expected = f"expected the columns {','.join(TABLE_COLUMNS)}"
    text = text.removeprefix(b"\xef\xbb\xbf")
    if not text.strip():
        raise SynthError(f"{path} is empty; {expected}")
    header, _, body = text.partition(b"\n")
    try:
        names = [cell.strip() for cell in next(csv.reader([header.decode()]))]
    except (UnicodeDecodeError, csv.Error):
        names = ["\0"]
    # UTF-16 shows as zero bytes.
    if any("\0" in name for name in names):
        raise SynthError(f"{path} is not UTF-8 text; save it as UTF-8 ({expected})")
    if missing := [name for name in TABLE_COLUMNS if name not in names]:
        raise SynthError(f"{path} lacks the column{'s' * (len(missing) > 1)} {', '.join(missing)}; {expected}")
    if twice := [name for name in (*TABLE_COLUMNS, "pass") if names.count(name) > 1]:
        raise SynthError(f"{path} has the column {twice[0]} twice; remove one")
    return names, body, cut


def _flat_layer(text: tuple[str, ...], origin_of: Callable[..., Origin]) -> _Layer:
    quant, *sizes, gated = text
    if quant not in QUANTS:
        raise _BadRow(f"dtype {_quoted(quant)} is not one of {', '.join(QUANTS)}")
    if gated not in ("0", "1"):
        raise _BadRow(f"gated {_quoted(gated)} is not 0 or 1")
    hidden, inter, experts, top_k, ep_size = map(_integer, ("hidden", "inter", "experts", "top_k", "ep_size"), sizes)
    origin = origin_of(quant=quant)
    try:
        shape = _of_real_size(MoEShape(hidden, inter, experts, top_k, ep_size, gated == "1"))
        # Without a table the ids of a flat file mean nothing.
        load_table(origin.arch, quant, origin.flashinfer)
    except SynthError as e:
        raise _BadRow(str(e)) from None
    known = _KnownTactics.of(origin, {})
    return _Layer(origin, shape, known, _Rows(None, known))


# --- merging and joining ---------------------------------------------------------------------------------------------


def _merge_equal(parts: Iterable[ShapeTimings]) -> list[ShapeTimings]:
    groups: dict[tuple[Origin, MoEShape], list[ShapeTimings]] = {}
    for part in parts:
        groups.setdefault((part.origin, part.shape), []).append(part)
    return [merge(groups[key]) for key in sorted(groups)]


_Outcome = tuple[float | None, bool, str | None]


def _outcomes(timings: ShapeTimings) -> dict[int, dict[tuple[int, int, int], _Outcome]]:
    found: dict[int, dict[tuple[int, int, int], _Outcome]] = {n: {} for n in timings.passes}
    for row in timings.rows():
        outcome = (None if math.isnan(row.ms) else row.ms, row.throttled, row.error)
        found[row.pass_][row.cell[1:]] = outcome
    return found


def _merge_two(a: ShapeTimings, b: ShapeTimings) -> ShapeTimings:
    _check_mergeable(a, b)
    ours, theirs = _outcomes(a), _outcomes(b)
    number: dict[int, int] = {}
    for n, cells in theirs.items():
        same = [
            m
            for m in [n, *ours]
            if m in ours
            and m not in number.values()
            and a.passes[m] == b.passes[n]
            and all(ours[m].get(c, o) == o for c, o in cells.items())
            # Under another number it is the same pass only where it repeats timings.
            and (m == n or not cells or any(c in ours[m] for c in cells))
        ]
        if same:
            number[n] = same[0]
    for n in theirs:
        taken = {*ours, *number.values()}
        if n not in number:
            number[n] = n if n not in taken else max(taken | theirs.keys()) + 1
    rows = {row.cell: row for row in a.rows()}
    for row in b.rows():
        moved = row._replace(pass_=number[row.pass_])
        rows.setdefault(moved.cell, moved)
    passes = {**a.passes, **{number[n]: p for n, p in b.passes.items()}}
    return _from_rows(
        a.origin,
        a.shape,
        a.label,
        {n: passes[n] for n in sorted(passes)},
        {**a.tactics, **b.tactics},
        rows.values(),
        a.path or b.path,
    )


def _check_mergeable(a: ShapeTimings, b: ShapeTimings) -> None:
    fields: list[tuple[str, object, object]] = [
        (name, getattr(a.origin, name), getattr(b.origin, name))
        for name in ("device", "arch", "flashinfer", "quant", "policy", "simulated")
    ]
    fields.append(("shape", a.shape, b.shape))
    fields += [(f"tactic {i}", a.tactics[i], b.tactics[i]) for i in a.tactics if i in b.tactics]
    for name, ours, theirs in fields:
        if ours != theirs:
            raise SynthError(
                f"can't merge {_name(a)} and {_name(b)}: {name} is {ours} in the first and {theirs} in the second; "
                "keep them in separate folders"
            )


def _name(timings: ShapeTimings) -> str:
    return str(timings.path) if timings.path is not None else f"the new timings of {timings.shape} ({timings.label})"


def _concatenate(origin: Origin, parts: list[ShapeTimings]) -> Timings:
    table = _table(origin.arch, origin.quant, origin.flashinfer)
    if table is None:
        table, ids = _table_of(origin, parts)
    else:
        ids = [part.tactic for part in parts]
    lengths = [len(part) for part in parts]
    return Timings(
        origin=origin,
        table=table,
        shapes=tuple(part.shape for part in parts),
        labels=tuple(part.label for part in parts),
        passes=tuple(part.passes for part in parts),
        shape=np.repeat(np.arange(len(parts), dtype=np.int64), lengths),
        pass_=np.concatenate([part.pass_ for part in parts]),
        stage=np.concatenate([part.stage for part in parts]),
        tokens=np.concatenate([part.tokens for part in parts]),
        tactic=np.concatenate(ids),
        ms=np.concatenate([part.ms for part in parts]),
        throttled=np.concatenate([part.throttled for part in parts]),
    )


def _table_of(origin: Origin, parts: list[ShapeTimings]) -> tuple[TacticTable, list[Ints]]:
    """Make a table of the tactics that were timed, in the order of their ids, and the ids under it."""
    first_id: dict[tuple[int, str], int] = {}
    for part in parts:
        for stage, i in sorted(set(zip(part.stage.tolist(), part.tactic.tolist(), strict=True))):
            key = stage, part.tactics[i]
            first_id[key] = min(i, first_id.get(key, i))
    order = sorted(first_id, key=lambda key: (key[0], first_id[key], key[1]))
    new_id = {key: i for i, key in enumerate(order)}
    gemm1, gemm2 = (tuple(Tactic.parse(text) for s, text in order if s == stage) for stage in STAGES)
    table = TacticTable(origin.flashinfer, origin.arch, origin.quant, gemm1, gemm2)
    ids = [
        np.array(
            [new_id[s, part.tactics[i]] for s, i in zip(part.stage.tolist(), part.tactic.tolist(), strict=True)],
            dtype=np.int64,
        )
        for part in parts
    ]
    return table, ids


# --- small helpers ---------------------------------------------------------------------------------------------------


def _hand_over(found: list[Problem], problems: list[Problem] | None) -> None:
    if problems is not None:
        problems += found
        return
    for problem in found:
        warnings.warn(str(problem), MeasurementWarning, stacklevel=3)


def _as_json(passes: Mapping[int, Mapping[str, Any]]) -> dict[int, Provenance]:
    """Return passes as they will be read back from a file."""
    try:
        return {n: json.loads(json.dumps(dict(passes[n]), allow_nan=False)) for n in sorted(passes)}
    except (TypeError, ValueError, RecursionError) as e:
        raise SynthError(f"a pass's provenance can't be written as JSON ({e}); use text and numbers") from e


def _sorted(value: Any) -> Any:
    """Sort the keys of JSON objects, numbers as numbers."""
    if isinstance(value, dict):
        return {k: _sorted(value[k]) for k in sorted(value, key=lambda k: (len(k) if k.isdecimal() else 0, k))}
    return [_sorted(v) for v in value] if isinstance(value, list) else value


def _note(text: str) -> str:
    """Make an error fit on one line of a table."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= _NOTE_LIMIT else line[: _NOTE_LIMIT - 1] + "…"


def _quoted(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…" + text[0]
