"""What a row must be to be kept, wherever it comes from, and what is said of one that is left out."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from synth.catalog.schemes import STAGES
from synth.errors import SynthError
from synth.flashinfer.tactics import Tactic, TacticTable, load_table
from synth.timings.origin import Origin, quoted

#: Largest number of tokens, and largest size of a shape: products of larger ones overflow.
LARGEST = 2**31 - 1


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


#: Columns of rows as arrays; the cell's come first.
COLUMNS = Row._fields[:-1]
#: A row as numpy has it, without its error.
ROW = np.dtype(list(zip(COLUMNS, (np.int64, np.int64, np.int64, np.int64, np.float64, np.bool_), strict=True)))


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


def hand_over(found: list[Problem], problems: list[Problem] | None) -> None:
    """Add what was found to the caller's list, or warn of each where there is none."""
    if problems is not None:
        problems += found
        return
    for problem in found:
        warnings.warn(str(problem), MeasurementWarning, stacklevel=3)


class BadRow(Exception):
    """What is wrong with a row."""


@functools.cache
def tactic_table(origin: Origin) -> TacticTable | None:
    """Return the tactics of an origin's FlashInfer version, ``None`` where it has no table."""
    try:
        return load_table(origin.arch, origin.quant, origin.flashinfer)
    except SynthError:
        return None


@functools.cache
def _texts(origin: Origin) -> Mapping[int, str]:
    table = tactic_table(origin)
    return {} if table is None else {i: str(table.tactic(i)) for i in range(len(table))}


class Accepted:
    """Rows that passed every check.

    Parameters
    ----------
    origin : Origin
        Whose tactic ids they use.
    tactics : mapping
        Id → tactic text. They say what ids there are where the FlashInfer version has no table, and must not
        contradict the table where it has.
    passes : iterable of int, optional
        Passes that they may be of; any if not given.

    Attributes
    ----------
    rows : dict
        By cell.
    texts : mapping
        Id → tactic text of every id that a row may use.

    Raises
    ------
    SynthError
        When `tactics` contradict the table, or one is no tactic.
    """

    def __init__(self, origin: Origin, tactics: Mapping[int, str], passes: Iterable[int] | None = None) -> None:
        self.rows: dict[tuple[int, int, int, int], Row] = {}
        self._passes = None if passes is None else frozenset(passes)
        self._table = table = tactic_table(origin)
        self.texts = dict(tactics) if table is None else _texts(origin)
        # Without a table the first use of an id says which stage it is of.
        self._stages = {} if table is None else {i: stage for stage in STAGES for i in table.ids(stage)}
        for i, text in tactics.items():
            if table is None:
                Tactic.parse(text)
            elif self.texts.get(i) != text:
                raise SynthError(
                    f"tactic id {i} is given as {quoted(text)}, but FlashInfer {origin.flashinfer} has "
                    f"{quoted(self.texts[i]) if i in self.texts else 'no such id'} for {origin.arch} {origin.quant}"
                )

    def add(self, row: Row) -> None:
        """Add a row, or raise :class:`BadRow` with the first thing that is wrong with it."""
        if row.error is None and not 0 < row.ms < math.inf:
            raise BadRow(f"ms {row.ms} is not a positive, finite time")
        if row.error is not None and not math.isnan(row.ms):
            raise BadRow("has both a time and an error")
        if row.pass_ < 1 or (self._passes is not None and row.pass_ not in self._passes):
            raise BadRow(f"there is no pass {row.pass_}")
        if row.stage not in STAGES:
            raise BadRow(f"stage {row.stage} is not 1 or 2")
        if not 1 <= row.tokens <= LARGEST:
            raise BadRow(f"tokens {row.tokens} is not from 1 to {LARGEST}")
        if row.tactic not in self.texts:
            raise BadRow(f"unknown tactic id {row.tactic}")
        stage = self._stages.setdefault(row.tactic, row.stage)
        if stage != row.stage:
            raise BadRow(f"tactic {row.tactic} is one of gemm{stage}, not gemm{row.stage}")
        if row.cell in self.rows:
            raise BadRow("duplicate of pass {}, stage {}, tokens {}, tactic {}".format(*row.cell))
        self.rows[row.cell] = row

    def would_take(self, rows: NDArray[np.void]) -> bool:
        """Tell whether :meth:`add` would take all of these rows (:data:`ROW`, without errors) and they are sorted.

        It may say no of rows that would be taken: those of a version without a table.
        """
        if self._table is None:
            return False
        pass_, stage, tokens, tactic, ms = (rows[name] for name in COLUMNS[:5])
        good = (
            np.isin(pass_, list(self._passes or ()))
            & (stage == np.where(tactic < len(self._table.gemm1), 1, 2))
            & (tokens >= 1)
            & (tokens <= LARGEST)
            & (tactic >= 0)
            & (tactic < len(self._table))
            & (ms > 0)
            & np.isfinite(ms)
        )
        # Sorted, each cell once: where a cell differs from the one before, the first different number is larger.
        step = np.diff(np.stack([pass_, stage, tokens, tactic]))
        rising = np.take_along_axis(step, (step != 0).argmax(axis=0)[np.newaxis], axis=0) > 0
        return bool(good.all() and rising.all())
