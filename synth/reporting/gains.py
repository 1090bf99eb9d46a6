"""Section: how much faster than the fallback, by tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from synth.catalog.schemes import STAGES
from synth.reporting import svg
from synth.reporting.behind import GAINS, Behind, curve, figure, geomean, kind_of, loud, tokens_axis
from synth.reporting.facts import Choice
from synth.reporting.markup import Child, Markup, count, counted, el, join, p, table, times

_NOT_TUNING = (
    "The fallback is what FlashInfer runs without a config and without tuning. A gain over it is not a gain over "
    "FlashInfer's own tuning: to a server that tunes, a config saves the tuning and makes every start choose alike. "
    "Times are of the isolated GEMM, as FlashInfer's profiler takes them."
)


def gain(b: Behind) -> Markup:
    """Return the section."""
    known = [c for c in b.facts.written if c.gain is not None]
    if not known:
        return p("Not known: the fallback's times are not in these files.")
    parts = [p(_NOT_TUNING)]
    unchecked = sum(c.measured_gain for c in known if c.quant not in b.observed)
    if unchecked:
        parts.append(
            p(
                f"{counted(unchecked, 'gain')} are called measured because the sidecar says so; no timings were given "
                "to look them up in.",
                class_="note",
            )
        )
    kinds = [kind for kind in GAINS if any(kind_of(c) == kind for c in known)]
    parts += [_by_tokens(b, known, kinds), _as_table(b, known, kinds)]
    return join(parts)


def _by_tokens(b: Behind, known: Sequence[Choice], kinds: Sequence[str]) -> Markup:
    # Without the outermost hundredths, which would flatten all others.
    low, high = np.quantile([c.gain for c in known if c.gain is not None], [0.005, 0.995]).tolist()
    y = svg.logarithmic(min(low, 1.0), high, "×")
    plots = []
    for quant in b.facts.quants:
        for stage in STAGES:
            mine = [c for c in known if (c.quant, c.stage) == (quant, stage)]
            if not mine:
                continue
            by = {kind: [c for c in mine if kind_of(c) == kind] for kind in kinds}
            sizes = ", ".join(f"{loud(kind)} {count(len(some))}" for kind, some in by.items() if some)
            plots.append(
                svg.lines(
                    f"{quant} gemm{stage} ({sizes})",
                    f"Gain over the fallback by tokens, {quant} gemm{stage}; {sizes} choices.",
                    tokens_axis(mine),
                    y,
                    "tokens (bucket)",
                    "fallback's time / choice's",
                    [svg.Line(kind, curve(some, lambda c: c.gain, geomean)) for kind, some in by.items()],
                )
            )
    return figure(
        "Gain over the fallback by tokens",
        f"Geometric mean over {counted(len(known), 'choice')} in the config; the band holds the middle 80 %. Where an "
        "entry is predicted, so is its gain.",
        svg.legend([(kind, GAINS[kind]) for kind in kinds], line=True),
        plots,
    )


def _as_table(b: Behind, known: Sequence[Choice], kinds: Sequence[str]) -> Markup:
    groups: dict[tuple[str, int, str], list[Choice]] = {}
    for c in known:
        groups.setdefault((c.quant, c.bucket, kind_of(c)), []).append(c)
    order = sorted(groups, key=lambda g: (b.facts.quants.index(g[0]), g[1], kinds.index(g[2])))
    inner = table(
        ("quantization", "kind", "tokens", "choices", "gemm1", "gemm2", "least", "most"),
        [_row(group, groups[group]) for group in order],
        caption="The fallback's time over the choice's: geometric mean of each GEMM, least and most of both",
        texts=(0, 1),
    )
    return el("details", el("summary", "Gain over the fallback as a table"), inner)


def _row(group: tuple[str, int, str], choices: Sequence[Choice]) -> list[Child]:
    quant, bucket, kind = group
    gains = {stage: [c.gain for c in choices if c.stage == stage and c.gain is not None] for stage in STAGES}
    every = [g for found in gains.values() for g in found]
    means = [times(geomean(found)) for found in gains.values()]
    return [quant, loud(kind), count(bucket), count(len(choices)), *means, times(min(every)), times(max(every))]
