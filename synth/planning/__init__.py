"""Which cells to time, in which order, and what that will cost.

:mod:`synth.planning.plan` holds the plan (layers, buckets, candidates, durations); :mod:`synth.planning.rounds`
decides round by round what to time next, from what was timed so far.
"""

from synth.planning.plan import (
    DEFAULT_MAX_TOKENS,
    LAUNCHES,
    OVERHEAD_S,
    SLOW,
    Batch,
    Cell,
    Layer,
    LayerSummary,
    Plan,
    PlanSummary,
    Predict,
    depth_for,
    estimate_memory,
    make_plan,
    rank_costs,
    rough_ms,
    summarize,
    take,
    timing_seconds,
    worth,
)

__all__ = [
    "DEFAULT_MAX_TOKENS",
    "LAUNCHES",
    "OVERHEAD_S",
    "SLOW",
    "Batch",
    "Cell",
    "Layer",
    "LayerSummary",
    "Plan",
    "PlanSummary",
    "Predict",
    "depth_for",
    "estimate_memory",
    "make_plan",
    "rank_costs",
    "rough_ms",
    "summarize",
    "take",
    "timing_seconds",
    "worth",
]
