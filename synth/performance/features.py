"""What the forests see of a cell: ratios and logarithms without units, so that they mean the same on every device."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from synth.performance.geometry import EXTENTS, Floats, Ints, Sites
from synth.performance.roofline import Hardware, TacticColumns, Work

#: Relative times are clipped at this logarithm.
REACH = 0.5
#: The forest's inputs, in order; all but the tactic's own are ratios or logarithms.
FEATURES = (
    "tokens", "rows", "k_steps", "tiles_n", "active", "waves", "dram_time", "flops_time", "tiles_m_per_expert",
    "activation_size", "n", "k", "experts", "rows_per_expert", "waves_ceil", "waves_ceil_ratio", "panels", "sweeps",
    "swept_size", "expert_size", "inner_size", "flops_over_dram", "output_share", "activation_share", "finalize_share",
    "n_padding", "m_padding", "fill", "large",
    *(f"tiles_{e}" for e in EXTENTS[:-1]), *(f"fill_{e}" for e in EXTENTS[:-1]),
    "m_tile", "n_tile", "cluster_m", "cluster_n", "sm80", "finalize", "swap", "stages", "top_k", "gated", "stage",
    "analytic_relative",
)  # fmt: skip


def features(
    s: Sites, site: Ints, tactic: Ints, w: Work, relative: Floats, columns: TacticColumns, hardware: Hardware
) -> NDArray[np.float32]:
    """Return the forests' input, shape (cells, len(FEATURES)).

    `relative` is a cell's analytic time over the best of its bucket. What depends on the site alone is computed once
    a site.
    """
    log = np.log
    l2 = hardware.l2_bytes
    rows_per_expert = s.rows / s.active
    per_site = {
        "tokens": log(s.tokens),
        "rows": log(s.rows),
        "active": log(s.active),
        "activation_size": log(s.rows * s.k * hardware.activation_bytes / l2),
        "n": log(s.n),
        "k": log(s.k),
        "experts": log(s.experts),
        "rows_per_expert": log(rows_per_expert),
        "expert_size": log(s.n * s.k * hardware.weight_bytes / l2),
        "large": s.large,
        "top_k": s.top_k,
        "gated": s.gated,
        "stage": s.stage,
        **{f"tiles_{e}": s.tiles[:, i] / s.active for i, e in enumerate(EXTENTS[:-1])},
        **{f"fill_{e}": s.rows / (s.tiles[:, i] * e) for i, e in enumerate(EXTENTS[:-1])},
    }
    per_tactic = {
        "m_tile": columns.m,
        "n_tile": columns.n,
        "cluster_m": columns.cluster_m,
        "cluster_n": columns.cluster_n,
        "sm80": columns.sm80,
        "finalize": columns.finalize,
        "swap": columns.swap,
        "stages": columns.stages,
    }
    dram = w.dram_bytes
    per_cell = {
        "k_steps": log(w.k_steps),
        "tiles_n": log(w.tiles_n),
        "waves": log(w.waves),
        "dram_time": log(dram / hardware.dram),
        "flops_time": log(w.padded_flops / hardware.flops),
        "tiles_m_per_expert": log(w.tiles_m / s.active[site]),
        "waves_ceil": log(w.waves_ceil),
        "waves_ceil_ratio": np.clip(log(w.waves_ceil / np.maximum(w.waves, 1e-3)), -1.0, 8.0),
        "panels": np.log1p(w.panel_bytes / dram),
        "sweeps": np.log1p(w.sweep_bytes / (1.0 + (l2 / w.inner_bytes) ** 4) / dram),
        "swept_size": np.log1p(w.sweep_bytes / dram),
        "inner_size": log(w.inner_bytes / l2),
        "flops_over_dram": log(w.padded_flops / hardware.flops / (dram / hardware.dram)),
        "output_share": w.output_bytes / dram,
        "activation_share": w.activation_bytes / dram,
        "finalize_share": np.log1p(w.finalize_bytes / dram),
        "n_padding": w.tiles_n * columns.n[tactic] / s.n[site],
        "m_padding": w.tiles_m * columns.m[tactic] / s.rows[site],
        "fill": log(w.flops / w.padded_flops),
        "analytic_relative": np.minimum(log(relative), 1.5),
    }
    # Feature by feature in memory, as they are written here and read in a forest.
    x = np.empty((len(FEATURES), len(site)), dtype=np.float32)
    for values, name in zip(x, FEATURES, strict=True):
        if name in per_cell:
            values[:] = per_cell[name]
        elif name in per_site:
            values[:] = per_site[name].astype(np.float32)[site]
        else:
            values[:] = per_tactic[name].astype(np.float32)[tactic]
    return x.T


def expected(relative: Floats) -> Floats:
    """Return what the choice forest corrects: half of the clipped logarithm of the analytic relative time.

    All of it would pass on the analytic model's errors, none of it would leave what it knows of shapes far from any
    fitted one to the forest, which can't extrapolate.
    """
    return np.asarray(0.5 * np.minimum(np.log(relative), REACH))
