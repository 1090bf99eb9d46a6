"""Cells whose times are wanted, and what is said of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from synth.catalog.schemes import STAGES
from synth.catalog.shapes import MoEShape
from synth.flashinfer.legality import runnable_ids, smem_block_bytes
from synth.flashinfer.tactics import TacticTable
from synth.performance.geometry import Floats, Ints, Sites, sites
from synth.performance.routing import UNIFORM, Routing
from synth.timings.table import Timings

#: A bucket was swept when this share of its tactics was timed.
SWEPT = 0.95


@dataclass(frozen=True)
class Cells:
    """Cells to predict.

    Attributes
    ----------
    shapes : sequence of MoEShape
    shape : ndarray of int64, shape (cells,)
        Index into `shapes`.
    stage, tokens, tactic : ndarray of int64, shape (cells,)
        Stage 1 or 2, tokens in the batch, tactic id.
    routing : Routing
        How tokens spread over the experts, for all cells; that of every timing unless given.
    """

    shapes: Sequence[MoEShape]
    shape: Ints
    stage: Ints
    tokens: Ints
    tactic: Ints
    routing: Routing = UNIFORM

    def __len__(self) -> int:
        return len(self.shape)

    @classmethod
    def of(cls, timings: Timings) -> Cells:
        """Return the cells of a table of timings, row by row."""
        columns = (timings.shape, timings.stage, timings.tokens, timings.tactic)
        shape, stage, tokens, tactic = (c.astype(np.int64) for c in columns)
        return cls(timings.shapes, shape, stage, tokens, tactic)

    @classmethod
    def every(
        cls,
        table: TacticTable,
        shapes: Sequence[MoEShape],
        places: Sequence[tuple[int, int, int]],
        routing: Routing = UNIFORM,
    ) -> Cells:
        """Return all tactics of a table at each (index of the shape, stage, tokens), place by place."""
        ids = {stage: np.array(table.ids(stage), dtype=np.int64) for stage in STAGES}
        some = [ids[stage] for _, stage, _ in places]
        shape, stage, tokens = np.repeat(np.array(places, dtype=np.int64), [len(i) for i in some], axis=0).T
        return cls(shapes, shape, stage, tokens, np.concatenate(some), routing)

    def select(self, rows: NDArray[Any]) -> Cells:
        """Return some of the cells."""
        part = (self.shape[rows], self.stage[rows], self.tokens[rows], self.tactic[rows])
        return Cells(self.shapes, *part, self.routing)

    def sites(self) -> tuple[Sites, Ints]:
        """Return the geometry of each distinct (shape, stage, tokens), sorted, and each cell's row in it."""
        first, row = self._sites()
        found = sites(self.shapes, self.shape[first], self.stage[first], self.tokens[first], self.routing)
        return found, row

    def beside_all(self, table: TacticTable) -> Cells:
        """Return all tactics at each of these cells' sites, in the order of :meth:`sites`."""
        first, _ = self._sites()
        places = np.column_stack([self.shape[first], self.stage[first], self.tokens[first]]).tolist()
        return Cells.every(table, self.shapes, places, self.routing)

    def _sites(self) -> tuple[Ints, Ints]:
        key = (self.shape * 2 + (self.stage - 1)) * (int(self.tokens.max(initial=0)) + 1) + self.tokens
        _, first, row = np.unique(key, return_index=True, return_inverse=True)
        return first, row.astype(np.int64)


@dataclass(frozen=True)
class Prediction:
    """How long cells take.

    Attributes
    ----------
    ms : ndarray of float64, shape (cells,)
        Predicted time. Within a site the order of close tactics is the choice forest's.
    log_sd : ndarray of float64, shape (cells,)
        Standard deviation of the logarithm of `ms`.
    choice_sd : ndarray of float64, shape (cells,)
        How far the trees disagree on the logarithm of a cell's time beside the others of its bucket; not calibrated.
    """

    ms: Floats
    log_sd: Floats
    choice_sd: Floats

    def select(self, rows: NDArray[Any]) -> Prediction:
        """Return the prediction of some of the cells."""
        return Prediction(self.ms[rows], self.log_sd[rows], self.choice_sd[rows])


def swept_buckets(timings: Timings, keys: Ints, bucket: Ints) -> NDArray[np.bool_]:
    """Return which of the buckets of :meth:`synth.timings.measurements.Timings.buckets` were swept, shape (buckets,).

    A bucket is swept where nearly all tactics that can run on its shape were timed.
    """
    table = timings.table
    smem = smem_block_bytes(timings.origin.device, table.arch)
    kinds = {(i, stage) for i, stage, _ in keys.tolist()}
    runnable = {(i, stage): len(runnable_ids(table, stage, timings.shapes[i], smem)) for i, stage in kinds}
    tactics = np.array([runnable[i, stage] for i, stage, _ in keys.tolist()])
    return np.asarray(np.bincount(bucket, minlength=len(keys)) >= SWEPT * tactics)
