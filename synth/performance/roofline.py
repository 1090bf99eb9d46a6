"""The analytic model: what a cell has to move and compute, and how long that takes.

``t = launch + (D^p + C^p)^(1/p) + activation + finalize``, where D is the time to move the operands (the weights of the
active experts, the activations, the output, and what is read again because it doesn't stay in L2), and C the time
of the waves of tiles: main loop steps, prologue and epilogue. Its few constants are fitted per device and
quantization; without timings the defaults below, fitted on an NVIDIA H200, scale with the device's public numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from synth.catalog.devices import Device
from synth.errors import SynthError
from synth.flashinfer.tactics import TacticTable
from synth.performance.geometry import EXTENTS, Floats, Ints, Sites

#: Bytes per element: activations, weights (block scales counted), and the bytes per element that tile K counts in.
_OPERANDS = {
    "bf16": (2.0, 2.0, 2.0),
    "fp8": (1.0, 1.0, 1.0),
    "nvfp4": (0.5625, 0.5625, 0.5),
    "mxfp8_mxfp4": (1.03125, 0.53125, 1.0),
}
_OUTPUT_BYTES = 2.0
#: Waves of fewer tiles than SMs: the smoothed ceiling's extra standard deviation, in waves.
_WAVE_SOFTNESS = 0.02
#: Beyond this many steps the smoothed ceiling is w + 1/2.
_CEIL_STEPS = 12
#: Rows used to fit the constants: the fit doesn't improve beyond.
_FIT_ROWS = 4000


@dataclass(frozen=True)
class Hardware:
    """What the analytic model needs to know of a device under one quantization.

    Attributes
    ----------
    sms : float
        Streaming multiprocessors.
    l2_bytes : float
        L2 cache.
    dram : float
        Memory bandwidth in bytes per ms.
    flops : float
        Dense peak in floating-point operations per ms.
    smem_bytes : float
        Shared memory of one SM, taken as that of one block.
    activation_bytes, weight_bytes, k_bytes : float
        Bytes per element of activations and weights, block scales included, and as tile K counts them.
    """

    sms: float
    l2_bytes: float
    dram: float
    flops: float
    smem_bytes: float
    activation_bytes: float
    weight_bytes: float
    k_bytes: float

    @classmethod
    def of(cls, device: Device, quant: str) -> Hardware:
        """Return the numbers of `device` for `quant`.

        Raises
        ------
        SynthError
            When a number that the model needs is not public.
        """
        peak = device.tflops.get(quant)
        if device.sms is None or device.l2_mb is None or device.dram_gbs is None or peak is None:
            raise SynthError(
                f"no model for {device.name} {quant}: its SMs, L2, bandwidth or {quant} peak are not in devices.toml; "
                "name a quantization with a public peak (`synth devices`) with --quant"
            )
        activation, weight, k = _OPERANDS[quant]
        return cls(
            sms=float(device.sms),
            l2_bytes=device.l2_mb * 1e6,
            dram=device.dram_gbs * 1e6,
            flops=peak * 1e9,
            smem_bytes=float(device.smem_block_bytes),
            activation_bytes=activation,
            weight_bytes=weight,
            k_bytes=k,
        )


class TacticColumns(NamedTuple):
    """A tactic table as arrays, indexed by tactic id; M is along tokens and N along the weight's columns."""

    m: Floats
    n: Floats
    k_bytes: Floats
    cluster_m: Floats
    cluster_n: Floats
    swap: Floats
    finalize: Floats
    sm80: Floats
    stages: Floats
    extent: Ints

    def select(self, tactic: Ints) -> TacticColumns:
        """Return the rows of these tactic ids."""
        return TacticColumns(**{name: column[tactic] for name, column in self._asdict().items()})


def tactic_columns(table: TacticTable, hardware: Hardware) -> TacticColumns:
    """Return `table` as arrays."""
    tactics = [table.tactic(i) for i in range(len(table))]
    cluster = np.array([t.cluster[:2] if not t.swap_ab else t.cluster[1::-1] for t in tactics], dtype=np.float64)
    m = np.array([t.tokens_tile for t in tactics], dtype=np.float64)
    sm80 = np.array([t.family == "sm80" for t in tactics], dtype=np.float64)
    k = np.array([t.tile[2] for t in tactics], dtype=np.float64)
    return TacticColumns(
        m=m,
        n=np.array([t.columns_tile for t in tactics], dtype=np.float64),
        k_bytes=np.where(sm80 > 0, k * hardware.k_bytes, k),
        cluster_m=cluster[:, 0],
        cluster_n=cluster[:, 1],
        swap=np.array([t.swap_ab for t in tactics], dtype=np.float64),
        finalize=np.array([t.finalize for t in tactics], dtype=np.float64),
        sm80=sm80,
        stages=np.array([t.stages for t in tactics], dtype=np.float64),
        extent=np.searchsorted(EXTENTS, m * cluster[:, 0]).astype(np.int64),
    )


class Work(NamedTuple):
    """What each cell has to do; every field is an ndarray of float64, shape (cells,)."""

    tiles_m: Floats  #: tiles along tokens, over all experts
    tiles_n: Floats  #: tiles along the weight's columns
    waves: Floats  #: tiles over what the device runs at once
    waves_ceil: Floats  #: expected whole waves, smoothed by routing's variance
    k_steps: Floats  #: main loop steps
    weight_bytes: Floats  #: weights of the active experts
    activation_bytes: Floats  #: activations, read once
    output_bytes: Floats
    glue_bytes: Floats  #: traffic of the activation (gemm1) and of the finalize step (gemm2) outside the GEMM
    finalize_bytes: Floats
    inner_bytes: Floats  #: per expert, the operand that is swept again for each tile of the other
    sweep_bytes: Floats  #: all that these sweeps read
    panel_bytes: Floats  #: operand bytes that tiles load beyond the first read, from L2
    flops: Floats  #: useful
    padded_flops: Floats  #: with the padding of tiles

    def select(self, rows: Ints) -> Work:
        """Return the work of some of the cells."""
        return Work(*(field[rows] for field in self))

    @property
    def dram_bytes(self) -> Floats:
        """Bytes that must cross DRAM once."""
        return self.weight_bytes + self.activation_bytes + self.output_bytes


def work(sites: Sites, site: Ints, tactic: Ints, columns: TacticColumns, hardware: Hardware) -> Work:
    """Compute the work of cells.

    Parameters
    ----------
    sites : Sites
        Geometry, one row a site.
    site, tactic : ndarray of int64, shape (cells,)
        Each cell's row in `sites` and its tactic id.
    columns : TacticColumns
        The tactics.
    hardware : Hardware
    """
    c = columns.select(tactic)
    n, k, rows, active = sites.n[site], sites.k[site], sites.rows[site], sites.active[site]
    tiles_m = sites.tiles[site, c.extent] * c.cluster_m
    tiles_n = np.ceil(n / (c.n * c.cluster_n)) * c.cluster_n
    tiles = tiles_m * tiles_n
    # Multistage kernels put as many blocks on an SM as their shared memory allows; TMA kernels take it all.
    smem = (c.m + c.n) * c.k_bytes * np.maximum(c.stages, 1.0) + 1024.0
    occupancy = np.where(c.sm80 > 0, np.clip(np.floor(hardware.smem_bytes / smem), 1.0, 3.0), 1.0)
    slots = hardware.sms * occupancy
    waves = tiles / slots
    waves_sd = sites.tiles_sd[site, c.extent] * c.cluster_m * tiles_n / slots

    weights = n * k * hardware.weight_bytes
    activations = rows * k * hardware.activation_bytes
    output = rows * n * _OUTPUT_BYTES
    second = sites.stage[site] == 2
    gate = np.where(sites.gated[site] > 0, 2.0, 1.0)
    reduced = sites.tokens[site] * n * _OUTPUT_BYTES
    inner = np.where(c.swap > 0, activations / active, weights)
    # Tiles that run at once share what they read: an expert's operand is swept once per round of the device.
    outer, along = (tiles_m / active, tiles_n), (tiles_n, tiles_m / active)
    outer_tiles, inner_tiles = (np.where(c.swap > 0, b, a) for a, b in zip(outer, along, strict=True))
    sweeps = np.maximum(outer_tiles / np.maximum(slots / inner_tiles, 1.0) - 1.0, 0.0)
    return Work(
        tiles_m=tiles_m,
        tiles_n=tiles_n,
        waves=waves,
        waves_ceil=_smooth_ceil(waves, np.hypot(waves_sd, _WAVE_SOFTNESS), tiles),
        k_steps=np.ceil(k * hardware.k_bytes / c.k_bytes),
        weight_bytes=active * weights,
        activation_bytes=activations,
        output_bytes=output,
        glue_bytes=np.where(second, 0.0, output + rows * n / gate * hardware.activation_bytes),
        finalize_bytes=np.where(second, reduced + np.where(c.finalize > 0, 0.0, output), 0.0),
        inner_bytes=inner,
        sweep_bytes=active * inner * sweeps,
        panel_bytes=np.maximum(tiles_m - active, 0.0) * weights + (tiles_n - 1.0) * activations,
        flops=2.0 * rows * n * k,
        padded_flops=2.0 * tiles * c.m * c.n * k,
    )


def _smooth_ceil(waves: Floats, sd: Floats, tiles: Floats) -> Floats:
    """Return E[ceil(W)] for a normal W, at least the waves themselves and the chance of having a tile at all."""
    start = np.maximum(np.floor(waves - 4.0 * sd), 0.0)
    from scipy.special import ndtr

    steps = np.ceil(8.0 * sd) + 2.0
    result = start.copy()
    for j in range(_CEIL_STEPS):
        on = steps > j
        if not on.any():
            break
        result[on] += ndtr((waves[on] - (start[on] + j)) / sd[on])
    result = np.where(steps > _CEIL_STEPS, waves + 0.5, result)
    return np.maximum(np.maximum(result, waves), 1.0 - np.exp(-tiles))


#: The constants and where their fit starts: logarithms unless the name says otherwise.
DEFAULTS = {
    "launch_ms": -4.45,
    "dram": -0.05,  # DRAM time over its time at the specified bandwidth
    "panels": -1.7,  # L2 traffic of re-read panels, likewise
    "l2_part": 0.0,  # usable part of L2
    "norm": 0.9,  # p - 1
    "ceil_logit": -0.2,  # weight of whole waves against fractional ones
    "mma": 0.1,  # main loop step over its time at peak
    "step_ms": -9.2,  # a main loop step's fixed time
    "load_ms": -9.1,  # a main loop step's time to load a 128-row panel
    "block_ms": -7.2,  # prologue and epilogue
    "area_ms": -6.8,  # epilogue of a 128x128 tile
    "finalize_ms": -7.5,  # the fused finalize's share of it
    "throttle": -2.5,  # clocks drop under long tensor work
    "glue": -0.1,
    "finalize": 0.3,
    "sm80_step": 0.6,
    "sm80_block": 1.0,
    "sm80_stage": -0.8,  # not a logarithm: per stage above 3
}
_NAMES = tuple(DEFAULTS)
#: Constants where nothing is known but the data sheet: bandwidth and L2 as specified, the rest round numbers.
NEUTRAL = (-4.6, 0.0, -2.0, 0.0, 0.7, 0.0, 0.2, -9.0, -9.0, -7.0, -7.0, -7.0, -3.0, 0.0, 0.0, 0.5, 0.5, -0.3)


@dataclass(frozen=True)
class Roofline:
    """The analytic model with its constants.

    Attributes
    ----------
    constants : tuple of float
        In the order of ``DEFAULTS``, rounded to 6 significant digits so that they don't depend on the machine.
    """

    constants: tuple[float, ...] = tuple(DEFAULTS.values())

    def predict(self, w: Work, tactic: Ints, columns: TacticColumns, hardware: Hardware) -> Floats:
        """Return the predicted time of each cell in ms."""
        return modelled_ms(np.array(self.constants), w, columns.select(tactic), hardware)

    @classmethod
    def fit(
        cls,
        w: Work,
        tactic: Ints,
        columns: TacticColumns,
        hardware: Hardware,
        ms: Floats,
        *,
        seed: int = 0,
        start: Roofline | None = None,
    ) -> Roofline:
        """Fit the constants to timings by least squares on log ms with a soft-L1 loss.

        Parameters
        ----------
        w, tactic, ms
            Cells that are worth predicting well (not many times slower than the best), and their times in ms.
        start : Roofline, optional
            Where to start, and what to keep where the timings say nothing; the defaults if not given.
        """
        # Not with the module: only fitting takes its time.
        from scipy.optimize import least_squares

        rows = np.arange(len(ms))
        if len(rows) > _FIT_ROWS:
            rows = np.sort(np.random.default_rng(seed).choice(rows, _FIT_ROWS, replace=False))
        part = w.select(rows)
        c = columns.select(tactic[rows])
        target = np.log(ms[rows])

        def residual(x: NDArray[np.float64]) -> Floats:
            # A weak pull towards the defaults keeps constants that these timings don't show.
            pull = 0.05 * (x - begin)
            return np.concatenate([np.log(modelled_ms(x, part, c, hardware)) - target, pull])

        begin = np.array((start or cls()).constants)
        fitted = least_squares(residual, begin, loss="soft_l1", f_scale=0.1, max_nfev=60, bounds=(-20.0, 6.0))
        return cls(rounded(fitted.x))


def rounded(constants: Floats) -> tuple[float, ...]:
    """Return constants to 6 significant digits, so that they don't depend on the machine."""
    return tuple(float(f"{x:.6g}") for x in constants)


def modelled_ms(x: Floats, w: Work, c: TacticColumns, hardware: Hardware) -> Floats:
    """Return the time of cells in ms, shape (cells,).

    Parameters
    ----------
    x : ndarray of float64, shape (len(DEFAULTS),)
        The constants, in the order of ``DEFAULTS``.
    w, c
        The cells' work, and the tactic of each.
    """
    from scipy.special import expit

    g = dict(zip(_NAMES, x, strict=True))
    exp = np.exp
    area = c.m * c.n / 16384.0
    missed = 1.0 / (1.0 + (exp(g["l2_part"]) * hardware.l2_bytes / w.inner_bytes) ** 4)
    moved = exp(g["dram"]) * w.dram_bytes + exp(g["panels"]) * w.panel_bytes + missed * w.sweep_bytes
    mma = exp(g["mma"]) * 2.0 * c.m * c.n * (c.k_bytes / hardware.k_bytes) * hardware.sms / hardware.flops
    loads = (c.m / c.cluster_n + c.n / c.cluster_m) / 128.0
    step = np.sqrt(mma**2 + (exp(g["step_ms"]) + exp(g["load_ms"]) * loads) ** 2)
    step = step * np.where(c.sm80 > 0, exp(g["sm80_step"] + g["sm80_stage"] * (c.stages - 3.0)), 1.0)
    block = exp(g["block_ms"]) + (exp(g["area_ms"]) + c.finalize * exp(g["finalize_ms"])) * area
    block = block * np.where(c.sm80 > 0, exp(g["sm80_block"]), 1.0)
    whole = expit(g["ceil_logit"])
    waves = whole * w.waves_ceil + (1.0 - whole) * np.maximum(w.waves, 0.3)
    throttle = (1.0 + 2.0 * w.padded_flops / hardware.flops) ** exp(g["throttle"])
    d = moved / hardware.dram
    compute = waves * (step * w.k_steps * throttle + block)
    larger = np.maximum(d, compute)
    p = 1.0 + exp(g["norm"])
    both = larger * ((d / larger) ** p + (compute / larger) ** p) ** (1.0 / p)
    glue = (exp(g["glue"]) * w.glue_bytes + exp(g["finalize"]) * w.finalize_bytes) / hardware.dram
    return exp(g["launch_ms"]) + both + glue  # type: ignore[no-any-return]
