"""Sections: the worst entries, drift and failures, and what was verified."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from synth.reporting import svg
from synth.reporting.behind import SUMMARY, Behind, figure, kind_of, layer, loud, no_timings, summary
from synth.reporting.facts import Choice
from synth.reporting.markup import (
    Child,
    Markup,
    count,
    counted,
    el,
    foreign,
    join,
    milliseconds,
    p,
    percent,
    table,
    times,
    whole,
)
from synth.reporting.observed import DRIFTED, DRIFTS, Observed
from synth.timings.records import TOLERANCE, Denial

#: Entries listed as the worst; failures and drifted passes that are named.
_WORST = 15
_MOST = 10


def worst(b: Behind) -> Markup:
    """Return the section on the entries that may lose most."""
    written = b.facts.written
    stated = sorted((c for c in written if c.regret is not None), key=lambda c: (-(c.regret or 0.0), _place(c)))
    near = sorted((c for c in written if c.margin is not None), key=lambda c: (c.margin or 0.0, _place(c)))
    if stated:
        parts = [_by_regret(stated)]
    elif near:
        parts = [_by_margin(near)]
    else:
        parts = [p("Neither expected regrets nor times are in these files.")]
    if rows := [row for quant, o in b.observed.items() for row in _judged(quant, o)]:
        parts.append(
            table(
                ("quantization", "judged by", *SUMMARY),
                rows,
                caption="Measured regret of the measured entries against the sweep of their own bucket. The same "
                "timings made the choices: this shows how near-ties fell, and is no forecast",
                texts=(0, 1),
            )
        )
    for quant, o in b.observed.items():
        if (c := o.claims).choices:
            parts.append(
                p(
                    f"{quant}: of {counted(c.choices, 'choice')} that the sidecar calls measured or verified, "
                    f"{count(c.found)} were found in the timings with the stated time, and {count(c.gains)} with the "
                    "fallback's as well."
                )
            )
    return join(parts)


def _by_regret(stated: Sequence[Choice]) -> Markup:
    # Choices that differ in nothing but whether gemm2 may fuse the finalize step are listed once.
    distinct = {(c.quant, c.shape, c.stage, c.bucket, c.tactic): c for c in reversed(stated)}
    shown = [c for c in stated if distinct[c.quant, c.shape, c.stage, c.bucket, c.tactic] is c][:_WORST]
    return table(
        (
            "layer", "GEMM", "tokens", "source", "expected regret", "within 2 %", "gain", "gain is",
            "tactic, runner-up", "margin",
        ),
        [
            [
                layer(c), f"{c.quant} gemm{c.stage}", count(c.bucket), loud(c.source), percent(c.regret),
                percent(c.within, 0), times(c.gain), loud(kind_of(c)), _two(c), percent(c.margin),
            ]
            for c in shown
        ],
        caption=f"The {len(shown)} entries with the highest expected regret, of {counted(len(stated), 'choice')}; not "
        "measured unless their source says so. The margin is the runner-up's; `synth verify` times what is unsure",
        texts=(0, 1, 3, 7, 8),
    )  # fmt: skip


def _two(c: Choice) -> Markup:
    return join([el("code", c.tactic, class_="w"), el("br"), el("code", c.runner_up, class_="w")])


def _by_margin(near: Sequence[Choice]) -> Markup:
    shown = near[:_WORST]
    return table(
        ("layer", "quant", "GEMM", "tokens", "time in ms", "margin", "tactic"),
        [
            [
                layer(c), c.quant or "–", f"gemm{c.stage}", count(c.bucket), milliseconds(c.ms), percent(c.margin),
                el("code", c.tactic or "unknown"),
            ]
            for c in shown
        ],
        caption=f"The {len(shown)} entries with the least margin to the runner-up, of {counted(len(near), 'choice')}, "
        "as the config has them; whether its times are measured isn't said there",
        texts=(0, 1, 2, 6),
    )  # fmt: skip


def _judged(quant: str, o: Observed) -> Iterable[list[Child]]:
    if (e := o.claims.regrets) is not None:
        yield [quant, "all passes", *summary(e.all.as_dict())]
        if (second := e.second_pass()) is not None:
            yield [quant, "later passes alone", *summary(second.as_dict())]


def _place(c: Choice) -> tuple[str, str, int, int, bool]:
    return c.quant, c.shape, c.stage, c.bucket, not c.fused


def drift(b: Behind) -> Markup:
    """Return the section on passes that differ, failures, and rows that can't be read."""
    if not b.observed:
        return join([no_timings(b), _unread(b)])
    parts: list[Markup | None] = []
    if any(o.drifts for o in b.observed.values()):
        parts += [_passes(b), _differences(b)]
    else:
        parts.append(p("No cell was timed in two passes, so that the drift between passes is unknown."))
    for quant, o in b.observed.items():
        parts += [_within_passes(quant, o), _failed(quant, o), _failures(quant, o)]
    return join([*parts, _unread(b)])


def _passes(b: Behind) -> Markup:
    return table(
        ("quantization", "pass", "cells in both", "median", "p95", "max", "shift", "near the best", "p95 of those"),
        [
            [
                quant, str(d.pass_), count(d.cells), percent(d.median, 2), percent(d.p95), percent(d.most),
                percent(d.shift, 2), count(d.near), percent(d.near_p95),
            ]
            for quant, o in b.observed.items()
            for d in o.drifts
        ],
        caption="How far the same cell's time differs between a later pass and the first, measured; the shift is the "
        "median with its sign. Near the best: within 10 % of the bucket's fastest, where choices are made",
    )  # fmt: skip


def _differences(b: Behind) -> Markup:
    names = [*(f"≤{100 * bound:g}" for bound in DRIFTS), f">{100 * DRIFTS[-1]:g}"]
    plots = []
    for quant, o in b.observed.items():
        cells = sum(d.cells for d in o.drifts)
        if not cells:
            continue
        shares = [sum(d.shares[i] * d.cells for d in o.drifts) / cells for i in range(len(names))]
        plots.append(
            svg.bars(
                f"{quant}: {counted(cells, 'cell')} timed again",
                "; ".join(f"{name} %: {percent(share)}" for name, share in zip(names, shares, strict=True)),
                names,
                [("measured", shares)],
                svg.linear(max(shares), "%", 100.0),
                "difference from the first pass (%)",
                "share of cells",
            )
        )
    return figure(
        "How far the same cell differs between passes",
        "Measured, every cell that a later pass timed again, slow tactics included.",
        svg.legend([("measured", "measured: share of the cells")], line=False),
        plots,
    )


def _within_passes(quant: str, o: Observed) -> Markup | None:
    spans = [value for c in o.conditions for value in c.reference]
    if not spans:
        return None
    said = (
        f"{quant}: a reference tactic's time moved by {percent(min(spans), 2)} to {percent(max(spans), 2)} from the "
        "first to the last time that it was taken in a pass"
    )
    if o.drifted:
        named = ", ".join(f"{label} ({percent(moved)})" for label, _, moved in o.drifted[:_MOST])
        rest = f" and {len(o.drifted) - _MOST} more" if len(o.drifted) > _MOST else ""
        said += f", by more than {percent(DRIFTED, 0)} in {counted(len(o.drifted), 'pass', 'passes')}: {named}{rest}"
    return p(f"{said}.")


def _failed(quant: str, o: Observed) -> Markup:
    failed = f"{count(o.failed)} of {counted(len(o.timings), 'timing')} failed"
    return p(f"{quant}: {failed}; {count(o.throttled)} were taken while the GPU throttled.")


def _failures(quant: str, o: Observed) -> Markup | None:
    if not o.failures:
        return None
    shown = o.failures[:_MOST]
    kinds = counted(len(o.failures), "kind of failure", "kinds of failures")
    return table(
        ("GEMM", "tactic", "error", "timings", "shapes"),
        [[f"gemm{x.stage}", el("code", x.tactic), x.error, count(x.timings), count(x.shapes)] for x in shown],
        caption=f"{quant}: the {len(shown)} commonest of {kinds}; a tactic is never chosen in a bucket where it failed",
        texts=(0, 1, 2),
    )


def _unread(b: Behind) -> Markup | None:
    if not b.problems:
        return None
    return p(f"{counted(b.problems, 'row')} of the measurements could not be read and count as not there.")


def verification(b: Behind) -> Markup:
    """Return the section on what was timed and compared on a GPU."""
    f = b.facts
    parts: list[Markup] = []
    if f.sidecar:
        by = Counter(c.source for c in f.written)
        parts.append(
            p(
                f"Of {counted(len(f.written), 'choice')} in the config, {count(by['measured'])} are measured (the "
                f"bucket was swept) and {count(by['verified'])} verified: the tactic was timed in this bucket and is "
                "within 1 % of the best with a probability of 0.9 or more."
            )
        )
    if b.observed:
        parts.append(
            table(
                (
                    "quantization", "pairs served", "agree", "whole layers", "comparisons", "largest deviation",
                    "tolerance", "date", "denied",
                ),
                [_compared(quant, o) for quant, o in b.observed.items()],
                caption="Outputs of whole layers run with a pair of tactics and with FlashInfer's fallback on the same "
                "inputs, as `synth verify` recorded them beside the measurements; a deviation is a share of the "
                "largest output",
                texts=(0, 7),
            )
        )  # fmt: skip
    numbers = [o.numbers for o in b.observed.values()]
    if not any(n.agreed for n in numbers):
        parts.append(
            p(
                el("strong", "NOT VERIFIED: no output of this config's tactics was compared with the fallback's"),
                ", as far as the folders given tell. On such a GPU: `synth verify`.",
                class_="loud",
            )
        )
    elif any(n.agreed < n.pairs for n in numbers) or len(b.observed) < len(f.quants):
        parts.append(p("The other pairs were not compared, as far as the folders given tell.", class_="note"))
    parts += [_denied(b, quant, o.denials) for quant, o in b.observed.items() if o.denials]
    return join(parts)


def _compared(quant: str, o: Observed) -> list[Child]:
    n = o.numbers
    return [
        quant, count(n.pairs), count(n.agreed), f"{count(n.agreed_layers)} of {count(n.layers)}", count(n.comparisons),
        percent(n.worst, 2), percent(TOLERANCE.get(quant), 0), whole(" to ".join(n.dates) or "–"),
        count(len(o.denials)),
    ]  # fmt: skip


def _denied(b: Behind, quant: str, denials: Sequence[Denial]) -> Markup:
    served = {(c.stage, c.tactic) for c in b.facts.written if c.quant == quant}
    return table(
        ("GEMM", "tactic", "layer", "tokens", "how", "found", "in this config"),
        [
            [
                f"gemm{d.stage}", el("code", d.tactic), str(d.shape), count(d.tokens), _how(d),
                whole(foreign(d.date, 40) or "–"), el("strong", "YES") if (d.stage, d.tactic) in served else "no",
            ]
            for d in denials
        ],
        caption=f"{quant}: tactics whose numbers were found wrong on this GPU and FlashInfer version; none is chosen "
        "since",
        texts=(0, 1, 2, 4, 5, 6),
    )  # fmt: skip


def _how(d: Denial) -> str:
    if d.error:
        return foreign(d.error)
    return f"off by {percent(d.deviation)}" if math.isfinite(d.deviation) else "not finite"
