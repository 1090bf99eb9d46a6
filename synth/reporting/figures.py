"""Figures that the page's sections show of a config's choices: counts, means, curves, bars, the worst, and the map.

Each public function returns what a section's template shows, by name.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from synth.catalog.schemes import QUANTS, STAGES
from synth.configs.sidecar import SOURCES
from synth.reporting.facts import FATES, GAINS, Choice, Facts
from synth.reporting.plots import Axis, Point, linear, logarithmic
from synth.reporting.texts import letters

if TYPE_CHECKING:
    from synth.performance.calibration import Reliability
    from synth.performance.evaluation import Evaluation
    from synth.reporting.trust import Computed, Model

#: Bounds of stated probabilities that are counted together, and what they are called.
_EDGES = (0.5, 0.7, 0.8, 0.9, 0.95, 0.99)
_BINS = ("<50", "50", "70", "80", "90", "95", "99+")
#: Fewer choices don't show what share happens.
LEAST = 10
#: Entries listed as the worst.
_WORST = 15

#: The order of quantizations and of kinds of gains.
_RANKS = {name: rank for rank, name in enumerate((*QUANTS, "", *GAINS))}


def coverage(facts: Facts) -> dict[str, Any]:
    """Return what the config covers: of each quantization the counts, the deployments, and each bucket's choices."""
    fates = _counts((c.fate for c in facts.choices), FATES)
    groups = []
    for (quant,), mine in _by(facts.choices, "quant"):
        counts = Counter((c.fate, c.bucket) for c in mine)
        stacks = {fate: [counts[fate, bucket] for bucket in _buckets(mine)] for fate in FATES}
        covered = {
            "labels": sorted({label for c in mine for label in c.labels}), "shapes": len({c.shape for c in mine}),
            "by_source": [sum(stacks[source]) for source in SOURCES], "left": sum(stacks["left"]),
        }  # fmt: skip
        groups.append({**_group(quant, mine, {fate: stacks[fate] for fate in fates}), **covered})
    return {"groups": groups, "fates": fates}


def gain(facts: Facts) -> dict[str, Any]:
    """Return the gains over the fallback: by kind, as curves of each quantization and stage, and as rows of a table."""
    known = [c for c in facts.written if c.gain is not None]
    kinds = _counts((c.gain_kind for c in known), GAINS)
    groups, rows = [], []
    for (quant, stage), mine in _by(known, "quant", "stage"):
        sizes = _counts((c.gain_kind for c in mine), GAINS)
        curves = _curves(mine, kinds, "gain_kind", "gain", geomean)
        groups.append({"quant": quant, "stage": stage, "sizes": sizes, "curves": curves, "buckets": _buckets(mine)})
    for (quant, bucket, kind), mine in _by(known, "quant", "bucket", "gain_kind"):
        gains = [_values([c for c in mine if c.stage == stage], "gain") for stage in STAGES]
        every = _values(mine, "gain")
        rows.append((quant, kind, bucket, len(mine), [*map(geomean, gains), min(every), max(every)]))
    # Without the outermost hundredths, which would flatten all others.
    low, high = np.quantile(_values(known, "gain") or [1.0], [0.005, 0.995]).tolist()
    return {
        "choices": len(known), "kinds": kinds, "groups": groups, "rows": rows,
        "means": {kind: geomean(_values(mine, "gain")) for (kind,), mine in _by(known, "gain_kind")},
        "measured": [c.quant for c in known if c.measured_gain],
        "y": logarithmic(min(low, 1.0), high, "×"),
    }  # fmt: skip


def sure(facts: Facts) -> dict[str, Any]:
    """Return the stated regrets as curves, and the stated probabilities as bars, of each quantization."""
    stated = [c for c in facts.written if c.regret is not None and c.within is not None]
    kinds = _counts((c.source for c in stated), SOURCES)
    groups = []
    for (quant,), mine in _by(stated, "quant"):
        bins = Counter((c.source, bisect.bisect_right(_EDGES, c.within or 0.0)) for c in mine)
        stacks = {kind: [bins[kind, i] / len(mine) for i in range(len(_BINS))] for kind in kinds}
        groups.append({**_group(quant, mine, stacks), "curves": _curves(mine, kinds, "source", "regret", mean)})
    return {"choices": len(stated), "kinds": kinds, "groups": groups, "bins": _BINS, "y": _to_highest(groups)}


def worst(facts: Facts) -> dict[str, Any]:
    """Return the choices with the highest stated regret, or else with the least margin, and of how many they are."""
    regrets = sorted((c for c in facts.written if c.regret is not None), key=lambda c: (-(c.regret or 0.0), _place(c)))
    margins = [c for c in facts.written if c.margin is not None] if not regrets else []
    margins.sort(key=lambda c: (c.margin or 0.0, _place(c)))
    # Choices that differ in nothing but whether gemm2 may fuse the finalize step are listed once.
    distinct: dict[object, Choice] = {}
    for c in itertools.takewhile(lambda _: len(distinct) < _WORST, regrets):
        distinct.setdefault((_place(c)[:-1], c.tactic), c)
    return {
        "regrets": len(regrets), "mean": mean(_values(regrets, "regret")), "by_regret": list(distinct.values()),
        "margins": len(margins), "by_margin": margins[:_WORST],
    }  # fmt: skip


def tactics_map(facts: Facts, quant: str, most: int) -> dict[str, Any]:
    """Return the map of a quantization: its choices by shape, stage and bucket, of at most so many shapes.

    Of two choices of one place, that of servers that fuse the finalize step is shown.
    """
    cells: dict[tuple[str, int, int], Choice] = {}
    for c in facts.choices:
        place = c.shape, c.stage, c.bucket
        if c.quant == quant and (place not in cells or (c.fused and not cells[place].fused)):
            cells[place] = c
    # The shapes with the most timings first, then those of the most deployments.
    timed = Counter(c.shape for c in cells.values() if c.source in ("measured", "verified"))
    names = {c.shape: c for c in cells.values()}
    shapes = sorted(names, key=lambda shape: (-timed[shape], -len(names[shape].labels), shape))
    shown = sorted((names[shape] for shape in shapes[:most]), key=lambda c: (c.name, c.shape))
    # Where engines pass a deployment's layer in two shapes, its name says too little.
    ambiguous = {name for name, number in Counter(c.name for c in names.values()).items() if number > 1}
    used = [c for c in cells.values() if c.written and c.tactic is not None]
    ranks = sorted((-n, tactic) for tactic, n in Counter(c.tactic for c in used if c.tactic is not None).items())
    return {
        "cells": cells, "shapes": len(shapes), "shown": shown, "ambiguous": ambiguous,
        "buckets": _buckets(cells.values()), "uses": Counter((c.tactic, c.stage) for c in used),
        "letters": {tactic: letters(i) for i, (_, tactic) in enumerate(ranks)},
    }  # fmt: skip


def unjudged(facts: Facts, models: Mapping[str, Model]) -> dict[str, list[str]]:
    """Return the quantizations without a held-out regret by the reason: "analytical", "alone" or "missing"."""
    found: dict[str, list[str]] = {}
    for quant in facts.quants:
        if quant not in models or not models[quant].regret:
            reason = "analytical" if quant in facts.analytical else "alone" if quant in models else "missing"
            found.setdefault(reason, []).append(quant)
    return found


def held_out(computed: Mapping[str, Computed]) -> dict[str, Any]:
    """Return by quantization the regrets by tokens of the model, and of the best of the simple ways to choose."""
    found = {}
    for quant, one in computed.items():
        own, *others = one.evaluations
        best = min(others, key=lambda e: e.all.geomean)
        curves = {"first": _regrets(own), "second": _regrets(best)}
        found[quant] = {
            "choices": len(own.regrets), "best": best.name, "curves": curves, "y": _to_highest([{"curves": curves}]),
            "buckets": np.unique(own.keys[:, 2]).tolist(),
            "shapes": sorted(own.shapes().items(), key=lambda item: (-item[1].geomean, item[0])),
        }  # fmt: skip
    return found


def reliability(stated: Reliability, others: Reliability) -> dict[str, list[Point]]:
    """Return how often what is stated with a probability happens, as stated and corrected by other families."""
    even = [(0.0, 0.0, 0.0, 0.0), (1.0, 1.0, 1.0, 1.0)]
    return {"even": even, "second": _happened(stated), "first": _happened(others)}


def geomean(values: Sequence[float]) -> float:
    """Return the geometric mean; NaN of nothing."""
    return float(np.exp(np.mean(np.log(values)))) if len(values) else math.nan


def mean(values: Sequence[float]) -> float:
    """Return the mean; NaN of nothing."""
    return float(np.mean(values)) if len(values) else math.nan


def _counts(found: Iterable[str], order: Iterable[str]) -> dict[str, int]:
    """Return how often each name is found, in an order, without those that aren't."""
    counts = Counter(found)
    return {name: counts[name] for name in order if counts[name]}


def _values(choices: Iterable[Choice], name: str) -> list[float]:
    return [value for c in choices if (value := getattr(c, name)) is not None]


def _buckets(choices: Iterable[Choice]) -> list[int]:
    return sorted({c.bucket for c in choices})


def _place(c: Choice) -> tuple[str, str, int, int, bool]:
    return c.quant, c.shape, c.stage, c.bucket, not c.fused


def _by(choices: Iterable[Choice], *names: str) -> list[tuple[tuple[Any, ...], list[Choice]]]:
    """Return choices by the values of some of their attributes, in order."""
    found: dict[tuple[Any, ...], list[Choice]] = {}
    for c in choices:
        found.setdefault(tuple(getattr(c, name) for name in names), []).append(c)
    return sorted(found.items(), key=lambda item: [_RANKS.get(value, value) for value in item[0]])


def _group(quant: str, choices: Sequence[Choice], stacks: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Return what a plot of bars shows of a quantization; stacks are heights by kind."""
    highest = max(map(sum, zip(*stacks.values(), strict=True)))
    return {
        "quant": quant, "choices": len(choices), "buckets": _buckets(choices), "stacks": stacks, "highest": highest,
    }  # fmt: skip


def _curves(
    choices: Iterable[Choice], kinds: Iterable[str], kind: str, value: str, average: Callable[[list[float]], float]
) -> dict[str, list[Point]]:
    """Return by kind the mean over the choices of each bucket, and the middle 80 % of them as the band."""
    curves: dict[str, list[Point]] = {name: [] for name in kinds}
    for (bucket, name), mine in _by(choices, "bucket", kind):
        values = _values(mine, value)
        low, high = np.quantile(values, [0.1, 0.9]).tolist()
        curves[name].append((float(bucket), average(values), low, high))
    return curves


def _regrets(e: Evaluation) -> list[Point]:
    """Return the geometric mean of each bucket's regrets less 1, and a band from the median to the 90th percentile."""
    found = []
    for bucket in np.unique(e.keys[:, 2]).tolist():
        mine = e.regrets[e.keys[:, 2] == bucket]
        low, high = (np.quantile(mine, [0.5, 0.9]) - 1.0).tolist()
        found.append((float(bucket), float(np.expm1(np.log(mine).mean())), low, high))
    return found


def _happened(found: Reliability) -> list[Point]:
    bins = zip(found.stated, found.happened, found.count, strict=True)
    return [(stated, happened, happened, happened) for stated, happened, n in bins if n >= LEAST]


def _to_highest(groups: Iterable[dict[str, Any]]) -> Axis:
    """Return an axis of shares, up to the highest band's."""
    return linear(max((high for g in groups for c in g["curves"].values() for *_, high in c), default=1.0), "%", 100.0)
