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

from synth.catalog.schemes import STAGES
from synth.configs.sidecar import SOURCES
from synth.flashinfer.tactics import Tactic
from synth.reporting.facts import FATES, GAINS, Choice, Facts
from synth.reporting.plots import Axis, Curve, linear, logarithmic
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

_Means = Callable[[Sequence[float]], float]


def sources(facts: Facts) -> Counter[str]:
    """Return how many choices in the config have each source."""
    return Counter(c.source for c in facts.written)


def coverage(facts: Facts) -> dict[str, Any]:
    """Return what the config covers: of each quantization the counts, the deployments, and each bucket's choices."""
    fates = _counts((c.fate for c in facts.choices), FATES)
    groups = []
    for quant in facts.quants:
        mine = [c for c in facts.choices if c.quant == quant]
        buckets = _buckets(mine)
        counts = Counter((c.fate, c.bucket) for c in mine)
        groups.append(
            {
                "quant": quant,
                "choices": len(mine),
                "labels": sorted({label for c in mine for label in c.labels}),
                "shapes": len({c.shape for c in mine}),
                "buckets": buckets,
                "by_source": [sum(counts[source, bucket] for bucket in buckets) for source in SOURCES],
                "left": sum(counts["left", bucket] for bucket in buckets),
                "stacks": {fate: [counts[fate, bucket] for bucket in buckets] for fate in fates},
                "highest": max(Counter(c.bucket for c in mine).values()),
            }
        )
    return {"groups": groups, "fates": fates}


def gain(facts: Facts) -> dict[str, Any]:
    """Return the gains over the fallback: by kind, as curves of each quantization and stage, and as rows of a table."""
    known = [c for c in facts.written if c.gain is not None]
    kinds = _counts((c.gain_kind for c in known), GAINS)
    groups, rows = [], []
    for quant in facts.quants:
        for stage in STAGES:
            mine = [c for c in known if (c.quant, c.stage) == (quant, stage)]
            if mine:
                curves = {kind: _curve([c for c in mine if c.gain_kind == kind], "gain", geomean) for kind in kinds}
                sizes = _counts((c.gain_kind for c in mine), GAINS)
                group = {"quant": quant, "stage": stage, "sizes": sizes, "curves": curves, "buckets": _buckets(mine)}
                groups.append(group)
        places: dict[tuple[int, str], list[Choice]] = {}
        for c in known:
            if c.quant == quant:
                places.setdefault((c.bucket, c.gain_kind), []).append(c)
        for bucket, kind in sorted(places, key=lambda place: (place[0], list(kinds).index(place[1]))):
            mine = places[bucket, kind]
            means = [geomean(_values([c for c in mine if c.stage == stage], "gain")) for stage in STAGES]
            every = _values(mine, "gain")
            rows.append((quant, kind, bucket, len(mine), [*means, min(every), max(every)]))
    # Without the outermost hundredths, which would flatten all others.
    low, high = np.quantile(_values(known, "gain") or [1.0], [0.005, 0.995]).tolist()
    means_of = {kind: geomean(_values([c for c in known if c.gain_kind == kind], "gain")) for kind in kinds}
    return {
        "choices": len(known), "kinds": kinds,
        "measured": [c.quant for c in known if c.measured_gain], "means": means_of, "groups": groups, "rows": rows,
        "y": logarithmic(min(low, 1.0), high, "×"),
    }  # fmt: skip


def sure(facts: Facts) -> dict[str, Any]:
    """Return the stated regrets as curves, and the stated probabilities as bars, of each quantization."""
    stated = [c for c in facts.written if c.regret is not None and c.within is not None]
    kinds = _counts((c.source for c in stated), SOURCES)
    groups = []
    for quant in facts.quants:
        mine = [c for c in stated if c.quant == quant]
        if mine:
            bins = Counter((c.source, bisect.bisect_right(_EDGES, c.within or 0.0)) for c in mine)
            stacks = {kind: [bins[kind, i] / len(mine) for i in range(len(_BINS))] for kind in kinds}
            groups.append(
                {
                    "quant": quant,
                    "choices": len(mine),
                    "buckets": _buckets(mine),
                    "curves": {kind: _curve([c for c in mine if c.source == kind], "regret", mean) for kind in kinds},
                    "stacks": stacks,
                    "highest": max(map(sum, zip(*stacks.values(), strict=True))),
                }
            )
    return {
        "choices": len(stated), "kinds": kinds, "groups": groups, "bins": _BINS,
        "y": _to_highest(groups),
    }  # fmt: skip


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
    called = Counter(c.name for c in names.values())
    uses = Counter((c.tactic, c.stage) for c in cells.values() if c.written and c.tactic is not None)
    used: Counter[Tactic] = Counter()
    for (tactic, _), number in uses.items():
        used[tactic] += number
    ranked = sorted(used, key=lambda tactic: (-used[tactic], tactic))
    return {
        "quant": quant,
        "cells": cells,
        "shapes": len(shapes),
        "shown": sorted((names[shape] for shape in shapes[:most]), key=lambda c: (c.name, c.shape)),
        # Where engines pass a deployment's layer in two shapes, its name says too little.
        "ambiguous": {name for name, number in called.items() if number > 1},
        "buckets": sorted({c.bucket for c in cells.values()}),
        "letters": {tactic: letters(i) for i, tactic in enumerate(ranked)},
        "uses": uses,
    }


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


def reliability(stated: Reliability, others: Reliability) -> dict[str, Curve]:
    """Return how often what is stated with a probability happens, as stated and corrected by other families."""
    even = ((0.0, 0.0, 0.0, 0.0), (1.0, 1.0, 1.0, 1.0))
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


def _curve(choices: Sequence[Choice], name: str, average: _Means) -> Curve:
    """Return the mean over the choices of each bucket, and the middle 80 % of them as the band."""
    by: dict[int, list[float]] = {}
    for c in choices:
        by.setdefault(c.bucket, []).append(getattr(c, name))
    bands = {bucket: np.quantile(values, [0.1, 0.9]).tolist() for bucket, values in by.items()}
    return tuple((float(bucket), average(values), *bands[bucket]) for bucket, values in sorted(by.items()))


def _regrets(e: Evaluation) -> Curve:
    """Return the geometric mean of each bucket's regrets less 1, and a band from the median to the 90th percentile."""
    found = []
    for bucket in np.unique(e.keys[:, 2]).tolist():
        mine = e.regrets[e.keys[:, 2] == bucket]
        low, high = (np.quantile(mine, [0.5, 0.9]) - 1.0).tolist()
        found.append((float(bucket), float(np.expm1(np.log(mine).mean())), low, high))
    return tuple(found)


def _happened(found: Reliability) -> Curve:
    bins = zip(found.stated, found.happened, found.count, strict=True)
    return tuple((stated, happened, happened, happened) for stated, happened, n in bins if n >= LEAST)


def _to_highest(groups: Iterable[dict[str, Any]]) -> Axis:
    """Return an axis of shares, up to the highest band's."""
    return linear(max((high for g in groups for c in g["curves"].values() for *_, high in c), default=1.0), "%", 100.0)
