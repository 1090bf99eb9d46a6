"""Whole MoE layers: what their time says of the GEMMs, where nobody has published those one by one.

A layer is two GEMMs and what an engine does around them: launches, moving each token's row to its experts and back,
reading the experts' offsets. The GEMMs' times are the analytic model's; a *tuned* layer runs the fastest tactic of
each, an untuned one FlashInfer's fallback. So whole layers alone fix the analytic model's constants, as far as the
best tactic and the fallback show them; what they leave open stays where the fit begins.

A benchmark runs the same layer again and again, so that weights that fit into L2 are read from there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from synth.catalog.schemes import STAGES
from synth.catalog.shapes import MoEShape
from synth.flashinfer.tactics import TacticTable
from synth.performance.geometry import Floats, Ints, Sites, sites
from synth.performance.roofline import Hardware, Roofline, Work, modelled_ms, rounded, tactic_columns, work
from synth.performance.routing import Routing

#: Around the GEMMs, by engine, as logarithms: what a layer takes at least (ms), moving rows over what bandwidth
#: allows, and each expert of the rank (ms).
_OVERHEAD = (-4.5, 0.0, -9.5)
#: Of all engines, as logarithms: the share of L2 that keeps weights from one run to the next, and the time of a byte
#: from L2 over that of one from memory.
_RESIDENT = (-1.0, -0.7)
#: How hard the constants are held where the fit begins: the fit of 1,000 layers equals this many deviations of 1.
_PULL = 1.0
#: Evaluations of the fit at most; each is a step of the numeric derivative too.
_STEPS = 60


@dataclass(frozen=True)
class LayerTimes:
    """Times of whole layers on one device in one quantization, measured by one engine.

    Attributes
    ----------
    device : str
        As torch reports it.
    quant : str
    engine : str
        What ran the layers.
    tuned : bool
        The fastest tactics ran, otherwise the fallback.
    routing : Routing
        How tokens were spread over the experts.
    shapes : tuple of MoEShape
        Layers on one rank.
    models : tuple of str
        Each shape's model: what is split in several ways.
    shape, tokens : ndarray of int64, shape (layers,)
        Index into `shapes`, and tokens in the batch.
    ms : ndarray of float64, shape (layers,)
    """

    device: str
    quant: str
    engine: str
    tuned: bool
    routing: Routing
    shapes: tuple[MoEShape, ...]
    models: tuple[str, ...]
    shape: Ints
    tokens: Ints
    ms: Floats

    def __len__(self) -> int:
        return len(self.ms)

    def select(self, rows: NDArray[np.int64] | NDArray[np.bool_]) -> LayerTimes:
        """Return some of the layers."""
        return dataclasses.replace(self, shape=self.shape[rows], tokens=self.tokens[rows], ms=self.ms[rows])


class _Stage(NamedTuple):
    """The cells of one stage of all layers: every tactic of each."""

    work: Work
    tactic: Ints
    tactics: int
    weight_bytes: Floats


class _Layers:
    """Layers with what their cells have to do, computed once."""

    def __init__(self, times: LayerTimes, table: TacticTable, hardware: Hardware) -> None:
        self._hardware, self._columns = hardware, tactic_columns(table, hardware)
        self.count, self.tuned, self.ms = len(times), times.tuned, times.ms
        self._stages = []
        for stage in STAGES:
            found = _of_a_rank_with_rows(
                sites(times.shapes, times.shape, np.full(len(times), stage), times.tokens, times.routing)
            )
            ids = np.array(table.ids(stage), dtype=np.int64)
            tactic = np.tile(ids, len(times))
            w = work(found, np.repeat(np.arange(len(times)), len(ids)), tactic, self._columns, hardware)
            if stage == 1:
                hidden = found.k * (found.tokens * 2.0 + found.rows * hardware.activation_bytes)
                self._moved_ms, self._experts = hidden / hardware.dram, found.experts
            self._stages.append(_Stage(w, tactic, len(ids), w.weight_bytes[:: len(ids)]))
        self._weight_bytes = np.sum([s.weight_bytes for s in self._stages], axis=0)

    def gemms(self, roofline: Floats, resident: Floats) -> tuple[Floats, ...]:
        """Return the times of every tactic of each stage, shape (layers, tactics)."""
        kept, speed = np.exp(resident)
        share = 1.0 / (1.0 + (self._weight_bytes / (kept * self._hardware.l2_bytes)) ** 3)
        found = []
        for s in self._stages:
            from_dram = np.repeat(1.0 - share * (1.0 - speed), s.tactics)
            w = s.work._replace(weight_bytes=s.work.weight_bytes * from_dram)
            ms = modelled_ms(roofline, w, self._columns.select(s.tactic), self._hardware)
            found.append(ms.reshape(self.count, s.tactics))
        return tuple(found)

    def total(self, roofline: Floats, resident: Floats, overhead: Floats, tuned: bool | None = None) -> Floats:
        """Return the times of the layers, shape (layers,)."""
        gemms = self.gemms(roofline, resident)
        fastest = self.tuned if tuned is None else tuned
        # The fallback is each stage's first tactic.
        ms = sum(g.min(axis=1) if fastest else g[:, 0] for g in gemms)
        return np.asarray(self.around(overhead) + ms)

    def around(self, overhead: Floats) -> Floats:
        """Return what is not in the GEMMs, shape (layers,)."""
        launch, moving, expert = np.exp(overhead)
        return np.asarray(launch + moving * self._moved_ms + expert * self._experts)


def _of_a_rank_with_rows(s: Sites) -> Sites:
    """Return the sites of a rank that has rows: benchmarks time no rank without any.

    With few tokens the mean rank of an expert-parallel layer has less than one active expert.
    """
    scale = np.maximum(1.0 / s.active, 1.0)
    return dataclasses.replace(
        s, rows=s.rows * scale, active=s.active * scale, tiles=s.tiles * scale[:, None], tiles_sd=s.tiles_sd
    )


@dataclass(frozen=True)
class LayerModel:
    """The analytic model, and what engines take around it.

    Attributes
    ----------
    roofline : Roofline
    resident : tuple of float
        Logarithms: the share of L2 that keeps weights, and the time of its bytes over that of memory's.
    overheads : dict of str to tuple of float
        By engine, logarithms: ms of a layer, moving rows over the time that bandwidth allows, ms of an expert.
    """

    roofline: Roofline
    resident: tuple[float, ...]
    overheads: dict[str, tuple[float, ...]]

    @classmethod
    def fit(
        cls,
        times: Sequence[LayerTimes],
        table: TacticTable,
        hardware: Hardware,
        start: Roofline,
        *,
        pull: float = _PULL,
    ) -> LayerModel:
        """Fit the constants to whole layers by least squares on log ms with a soft-L1 loss.

        Parameters
        ----------
        times : sequence of LayerTimes
            Of one device and quantization, each of another engine.
        start : Roofline
            Where the constants begin, and where those stay that whole layers don't show.
        pull : float
            How hard they are held there.
        """
        # Not with the module: only fitting takes its time.
        from scipy.optimize import least_squares

        layers = [_Layers(t, table, hardware) for t in times]
        begin = np.concatenate([start.constants, _RESIDENT, *([_OVERHEAD] * len(times))])
        a, b, c = len(start.constants), len(_RESIDENT), len(_OVERHEAD)
        hold = pull * np.sqrt(sum(len(t) for t in times) / 1000.0)

        def parts(x: Floats) -> tuple[Floats, Floats, list[Floats]]:
            return x[:a], x[a : a + b], [x[a + b + c * i : a + b + c * (i + 1)] for i in range(len(times))]

        def residual(x: Floats) -> Floats:
            roofline, resident, overheads = parts(x)
            errors = [
                np.log(one.total(roofline, resident, overhead) / one.ms)
                for one, overhead in zip(layers, overheads, strict=True)
            ]
            return np.concatenate([*errors, hold * (x - begin)])

        # The least of the tactics has kinks, so that steps of the derivative must not be tiny.
        fitted = least_squares(
            residual,
            begin,
            loss="soft_l1",
            f_scale=0.1,
            max_nfev=_STEPS,
            diff_step=np.full(len(begin), 1e-3),
            bounds=(-20.0, 6.0),
        )
        roofline, resident, overheads = parts(fitted.x)
        engines = {t.engine: rounded(o) for t, o in zip(times, overheads, strict=True)}
        return cls(Roofline(rounded(roofline)), rounded(resident), engines)

    def around(self, times: LayerTimes, table: TacticTable, hardware: Hardware) -> Floats:
        """Return what the engine takes around the GEMMs of layers in ms, shape (layers,)."""
        return _Layers(times, table, hardware).around(np.array(self.overheads[times.engine]))

    def predict(
        self, times: LayerTimes, table: TacticTable, hardware: Hardware, *, tuned: bool | None = None
    ) -> Floats:
        """Return the predicted times of layers in ms, shape (layers,).

        Parameters
        ----------
        tuned : bool, optional
            With the fastest tactics or the fallback; as in `times` if not given.
        """
        layers = _Layers(times, table, hardware)
        overhead = np.array(self.overheads[times.engine])
        return layers.total(np.array(self.roofline.constants), np.array(self.resident), overhead, tuned)
