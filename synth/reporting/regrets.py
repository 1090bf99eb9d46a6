"""Sections: regret on shapes held out, and how true intervals and probabilities are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from synth.configs.sidecar import SOURCES
from synth.performance.calibration import Reliability
from synth.performance.evaluation import Evaluation
from synth.reporting import svg
from synth.reporting.behind import ORIGINS, SUMMARY, Behind, Curve, curve, figure, mean, summary, tokens_axis
from synth.reporting.facts import Choice
from synth.reporting.markup import Markup, count, counted, el, foreign, join, p, percent, regret, table, whole
from synth.reporting.trust import Computed

#: Bounds of stated probabilities that are counted together, and what they are called.
_EDGES = (0.5, 0.7, 0.8, 0.9, 0.95, 0.99)
_BINS = ("<50", "50", "70", "80", "90", "95", "99+")
#: Fewer choices don't show what share happens.
_LEAST = 10


def held_out(b: Behind) -> Markup:
    """Return the section on regret."""
    parts: list[Markup] = [
        p(
            "Regret is the time of the chosen tactic over that of the best: 1.01 is 1 % lost. Here each model family "
            "is predicted by a model that has seen none of it, and judged by its timings. It says how good predicted "
            "entries are for a model that was never timed; its shapes are those of the timings, not those of this "
            "config."
        )
    ]
    rows = [
        [quant, "this config's" if m.named else "ANOTHER than this config's", count(m.shapes), *summary(m.regret)]
        for quant, m in b.models.items()
        if m.regret
    ]
    if rows:
        parts.append(
            table(
                ("quantization", "model", "shapes", *SUMMARY),
                rows,
                caption="Regret held out by model family, measured when the model was fitted (`synth fit`)",
                texts=(0, 1),
            )
        )
    for why, quants in _without(b).items():
        parts.append(p(f"{', '.join(quants)}: {why}"))
    if b.computed:
        parts += [_ways(quant, found) for quant, found in b.computed.items()]
        parts.append(_by_tokens(b))
        parts += [_in_detail(quant, found) for quant, found in b.computed.items()]
    parts += [p(f"{quant}: not computed, {foreign(why, 200)}.") for quant, why in b.refused.items()]
    if b.observed and not b.computed:
        parts.append(
            p(
                "Regret by tokens and by shape, simple ways to choose beside it, whether probabilities come true, and "
                f"the worst choices held out take half a minute a quantization: `synth report {b.facts.name} "
                "--held-out`. What timings of a new shape or device are worth: `synth evaluate`.",
                class_="note",
            )
        )
    return join(parts)


def _without(b: Behind) -> dict[str, list[str]]:
    """Return the quantizations without a held-out regret, by the reason."""
    found: dict[str, list[str]] = {}
    for quant in b.facts.quants:
        model = b.models.get(quant)
        if model is not None and model.regret:
            continue
        if any(c.source == "analytical" for c in b.facts.choices if c.quant == quant):
            why = "no held-out regret exists, since nothing of this GPU was timed."
        elif model is not None:
            why = "the model's file has no held-out regret, since only one model family was timed."
        else:
            why = "no model was found in the folders given; name theirs with `--models`, or run `synth fit`."
        found.setdefault(why, []).append(quant or "not readable")
    return found


def _ways(quant: str, found: Computed) -> Markup:
    whose = "that this config's model was fitted on" if found.fitted_on else "given, NOT those of this config's model"
    seconds = [e.second_pass() for e in found.evaluations]
    return table(
        ("choice", *SUMMARY, "mean by later passes"),
        [
            [e.name, *summary(e.all.as_dict()), regret(second.geomean) if second else "–"]
            for e, second in zip(found.evaluations, seconds, strict=True)
        ],
        caption=f"{quant}: measured regret of the model and of simple ways to choose, held out by family, from the "
        f"timings {whose}",
    )


def _in_detail(quant: str, found: Computed) -> Markup:
    shapes = sorted(found.evaluations[0].shapes().items(), key=lambda item: (-item[1].geomean, item[0]))
    return el(
        "details",
        el("summary", f"{quant}: regret by shape, and the worst choices held out"),
        table(
            ("shape", *SUMMARY),
            [[foreign(label, 60), *summary(r.as_dict())] for label, r in shapes],
            caption=f"{quant}: measured regret of each shape, held out with its family",
        ),
        table(
            ("shape", "GEMM", "tokens", "regret", "chosen", "best"),
            [
                [whole(w.label), f"gemm{w.stage}", count(w.bucket), regret(w.regret), *map(_code, (w.chosen, w.best))]
                for w in found.worst
            ],
            caption=f"{quant}: the {len(found.worst)} choices held out that lose most, measured",
            texts=(0, 1, 4, 5),
        ),
    )


def _code(text: str) -> Markup:
    return el("code", text)


def _by_tokens(b: Behind) -> Markup:
    plots = []
    for quant, found in b.computed.items():
        own, *others = found.evaluations
        best = min(others, key=lambda e: e.all.geomean)
        drawn = [svg.Line("first", _curve(own)), svg.Line("second", _curve(best))]
        plots.append(
            svg.lines(
                f"{quant}, {counted(len(own.regrets), 'choice')}; beside {best.name}",
                f"Measured regret by tokens of the model and of {best.name}, {quant}.",
                svg.of_tokens(np.unique(own.keys[:, 2]).tolist()),
                svg.linear(max(high for line in drawn for *_, high in line.points), "%", 100.0),
                "tokens (bucket)",
                "regret - 1",
                drawn,
            )
        )
    return figure(
        "Regret held out by tokens",
        "Measured: geometric mean over shapes and GEMMs, with a band from the median to the 90th percentile.",
        svg.legend([("first", "the model"), ("second", "the best of the simple ways to choose")], line=True),
        plots,
    )


def _curve(e: Evaluation) -> Curve:
    found = []
    for bucket in np.unique(e.keys[:, 2]).tolist():
        mine = e.regrets[e.keys[:, 2] == bucket]
        low, high = (np.quantile(mine, [0.5, 0.9]) - 1.0).tolist()
        found.append((float(bucket), float(np.expm1(np.log(mine).mean())), low, high))
    return tuple(found)


def sure(b: Behind) -> Markup:
    """Return the section on intervals and probabilities."""
    parts = [
        p(
            f"{quant}: 90 % intervals of predicted times hold {percent(m.coverage)} of the measured ones, of tactics "
            "within 20 % of the best, held out by "
            f"family{'' if m.named else '; of ANOTHER model than this config has'}."
        )
        for quant, m in b.models.items()
        if m.coverage is not None
    ]
    if not parts:
        parts.append(p("How true intervals of predicted times are was not measured, or no such model was given."))
    stated = [c for c in b.facts.written if c.regret is not None and c.within is not None]
    if stated:
        kinds = [source for source in SOURCES if any(c.source == source for c in stated)]
        parts += [_expected(b, stated, kinds), _probabilities(b, stated, kinds)]
    else:
        parts.append(p("Expected regrets and probabilities are not in these files."))
    parts += _reliability(b.computed)
    return join(parts)


def _expected(b: Behind, stated: Sequence[Choice], kinds: Sequence[str]) -> Markup:
    curves = {
        quant: [
            svg.Line(kind, curve([c for c in stated if (c.quant, c.source) == (quant, kind)], lambda c: c.regret, mean))
            for kind in kinds
        ]
        for quant in b.facts.quants
    }
    y = svg.linear(max(high for drawn in curves.values() for line in drawn for *_, high in line.points), "%", 100.0)
    plots = []
    for quant, drawn in curves.items():
        mine = [c for c in stated if c.quant == quant]
        if mine:
            title = f"{quant}: {counted(len(mine), 'choice')}"
            about = f"Expected regret by tokens, {quant}."
            plots.append(svg.lines(title, about, tokens_axis(mine), y, "tokens (bucket)", "expected regret", drawn))
    return figure(
        "Expected regret by tokens",
        f"As the sidecar states it of {counted(len(stated), 'choice')} in the config, not measured: mean, and the "
        "middle 80 % as the band.",
        svg.legend([(kind, ORIGINS[kind]) for kind in kinds], line=True),
        plots,
    )


def _probabilities(b: Behind, stated: Sequence[Choice], kinds: Sequence[str]) -> Markup:
    plots = []
    for quant in b.facts.quants:
        mine = [c for c in stated if c.quant == quant]
        if not mine:
            continue
        bins = Counter((int(np.searchsorted(_EDGES, c.within or 0.0, side="right")), c.source) for c in mine)
        shares = [(kind, [bins[i, kind] / len(mine) for i in range(len(_BINS))]) for kind in kinds]
        most = max(map(sum, zip(*(heights for _, heights in shares), strict=True)))
        plots.append(
            svg.bars(
                f"{quant}: {counted(len(mine), 'choice')}",
                f"Share of choices by the stated probability of being within 2 % of the best, {quant}.",
                _BINS,
                shares,
                svg.linear(most, "%", 100.0),
                "probability of being within 2 %, from (%)",
                "share of choices",
            )
        )
    return figure(
        "How sure each choice is",
        "Probability of being within 2 % of the best, as the sidecar states it of "
        f"{counted(len(stated), 'choice')} in the config; not measured.",
        svg.legend([(kind, ORIGINS[kind]) for kind in kinds], line=False),
        plots,
    )


def _reliability(computed: Mapping[str, Computed]) -> list[Markup]:
    parts, plots = [], []
    unit = svg.linear(1.0, "%", 100.0)
    for quant, found in computed.items():
        parts.append(
            p(
                f"{quant}, computed anew: 90 % intervals of predicted times hold {percent(found.calibration.coverage)} "
                f"of the measured ones; predicted times are off by {percent(found.calibration.error)} in the median. "
                f"{'' if found.reliability else 'No shape was swept, so that probabilities can not be judged.'}"
            )
        )
        for margin, (stated, others) in found.reliability.items():
            drawn = [svg.Line("even", ((0.0, 0.0, 0.0, 0.0), (1.0, 1.0, 1.0, 1.0)))]
            drawn += [svg.Line("second", _happened(stated)), svg.Line("first", _happened(others))]
            plots.append(
                svg.lines(
                    f"{quant}: within {percent(margin, 0)} of the best, {counted(sum(stated.count), 'choice')}",
                    "Share that happened, by stated probability.",
                    unit,
                    unit,
                    "stated probability",
                    "share that happened",
                    drawn,
                )
            )
    if not plots:
        return parts
    names = [
        ("even", "what a true probability would show"),
        ("first", "corrected by the other families, as in the sidecar"),
        ("second", "uncorrected"),
    ]
    about = f"Measured, held out by family; groups of fewer than {_LEAST} choices are left out."
    return [*parts, figure("Whether stated probabilities come true", about, svg.legend(names, line=True), plots)]


def _happened(found: Reliability) -> Curve:
    bins = zip(found.stated, found.happened, found.count, strict=True)
    return tuple((stated, happened, happened, happened) for stated, happened, n in bins if n >= _LEAST)
