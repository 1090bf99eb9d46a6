"""The table of timings as arrays: those of one shape, and those of every shape of one origin."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from synth.catalog.shapes import MoEShape
from synth.errors import SynthError
from synth.flashinfer.tactics import TacticTable
from synth.timings.origin import Origin
from synth.timings.rows import COLUMNS, LARGEST, ROW, Accepted, BadRow, Row

#: Repeats further than this from their median (logarithm) were disturbed; near the best, one in a hundred is.
OUTLIER = 0.03

Provenance = dict[str, Any]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, eq=False, kw_only=True)
class _Columns:
    """Timings of one origin, column by column.

    Attributes
    ----------
    origin : Origin
        What the timings share with those they may be fitted with.
    pass_, stage, tokens, tactic : int64 array, shape (rows,)
        The cell.
    ms : float64 array, shape (rows,)
        Milliseconds; NaN where the tactic failed.
    throttled : bool array, shape (rows,)
        The GPU was throttling.
    """

    origin: Origin
    pass_: Ints
    stage: Ints
    tokens: Ints
    tactic: Ints
    ms: Floats
    throttled: Bools

    def __len__(self) -> int:
        return len(self.ms)


@dataclass(frozen=True, eq=False, kw_only=True)
class ShapeTimings(_Columns):
    """The timings of one file: one shape, one origin. Rows are sorted by pass, stage, tokens, tactic.

    Attributes
    ----------
    origin, pass_, stage, tokens, tactic, ms, throttled
        As in :class:`Timings`.
    shape : MoEShape
        The layer on one rank.
    label : str
        What a person calls the shape, for example ``"glm-5-tp8"``.
    passes : dict
        Provenance of each pass.
    tactics : dict
        Id → tactic text for every id used.
    errors : dict
        Row index → error text, one for each NaN.
    path : Path or None
        The file, if it was read from or written to one.
    """

    shape: MoEShape
    label: str
    passes: dict[int, Provenance]
    tactics: dict[int, str]
    errors: dict[int, str] = field(default_factory=dict)
    path: Path | None = None

    def rows(self) -> Iterator[Row]:
        """Yield the rows in order."""
        columns = (getattr(self, name).tolist() for name in COLUMNS)
        for i, values in enumerate(zip(*columns, strict=True)):
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
        accepted = Accepted(origin, tactics or {}, passes)
        try:
            for row in rows:
                accepted.add(row)
        except BadRow as e:
            raise SynthError(f"timings of {shape} ({label}): {e}; correct or drop the row") from None
        described = as_json(passes)
        return cls.of_checked(
            accepted.rows.values(), accepted.texts, origin=origin, shape=shape, label=label, passes=described
        )

    @classmethod
    def of_checked(
        cls, rows: Iterable[Row] | NDArray[np.void], tactics: Mapping[int, str], **others: Any
    ) -> ShapeTimings:
        """Build timings from rows that are known to be good: any order, or sorted as an array of :data:`ROW`.

        Parameters
        ----------
        tactics : mapping
            Id → tactic text, of more ids than are used, too.
        **others
            Attributes besides the columns.
        """
        if not isinstance(rows, np.ndarray):
            in_order = sorted(rows)
            others["errors"] = {i: row.error for i, row in enumerate(in_order) if row.error is not None}
            rows = np.array([row[:-1] for row in in_order], dtype=ROW)
        others |= {name: np.ascontiguousarray(rows[name]) for name in COLUMNS}
        return cls(tactics={i: tactics[i] for i in np.unique(rows["tactic"]).tolist()}, **others)


@dataclass(frozen=True, eq=False, kw_only=True)
class Timings(_Columns):
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

    table: TacticTable
    shapes: tuple[MoEShape, ...]
    labels: tuple[str, ...]
    passes: tuple[dict[int, Provenance], ...]
    shape: Ints

    def select(self, rows: Bools | Ints) -> Timings:
        """Return the rows of a mask or an index array; `shapes` stays whole, so that indices keep their meaning."""
        return replace(self, **{name: getattr(self, name)[rows] for name in ("shape", *COLUMNS)})

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
        packed = (self.shape * 2 + self.stage - 1) * (LARGEST + 1) + self.tokens
        unique, inverse = np.unique(packed, return_inverse=True)
        layer, tokens = np.divmod(unique, LARGEST + 1)
        keys = np.stack([layer // 2, layer % 2 + 1, tokens], axis=1)
        return keys.astype(np.int64), inverse.reshape(-1).astype(np.int64)


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


def as_json(passes: Mapping[int, Mapping[str, Any]]) -> dict[int, Provenance]:
    """Return passes as they will be read back from a file.

    Raises
    ------
    SynthError
        When a pass's provenance can't be written as JSON.
    """
    try:
        return {n: json.loads(json.dumps(dict(passes[n]), allow_nan=False)) for n in sorted(passes)}
    except (TypeError, ValueError, RecursionError) as e:
        raise SynthError(f"a pass's provenance can't be written as JSON ({e}); use text and numbers") from e
