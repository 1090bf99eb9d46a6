"""Sections: which device and where everything comes from, and what the config covers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from synth.catalog.devices import Device
from synth.configs.sidecar import SOURCES
from synth.reporting import svg
from synth.reporting.behind import ORIGINS, Behind, figure, no_timings
from synth.reporting.facts import Choice, Facts, Origin
from synth.reporting.markup import NBSP, Child, Markup, count, counted, el, foreign, join, p, pairs, table, whole
from synth.reporting.observed import Conditions, Observed

_CONDITIONS = (
    "source of the timings", "driver", "CUDA", "torch", "date",
    "passes", "timings", "power limit", "SM clock", "temperature", "throttled",
)  # fmt: skip


def provenance(b: Behind) -> Markup:
    """Return the section on the device, the files and the timings' conditions."""
    f = b.facts
    form = "v1 JSON" if f.kind == "json" else "bundled module"
    items: list[tuple[str, Child]] = [
        ("GPU", f.gpu or "not named: FlashInfer takes the file on any"),
        ("what is public of it", _about_device(f.device)),
        ("FlashInfer", f"{f.flashinfer or 'not named'}; a server with another version or GPU ignores the file"),
        ("config", [el("code", f.name), f", {form}, SHA-256 ", el("code", f.sha256)]),
        ("sidecar", "matches the config, entry by entry" if f.sidecar else "missing"),
        ("written by", f"synth {f.synth}" if f.synth else "not said"),
    ]
    for quant, origin in f.origins.items():
        items.append((f"{quant} chosen by", _chosen_by(b, quant, origin)))
        if origin.denied:
            items.append((f"{quant} kept out", "; ".join(origin.denied)))
    if f.routing:
        items.append(("routing", f.routing))
    tables = [_conditions(quant, o) for quant, o in b.observed.items()]
    return join([pairs(items), tables or no_timings(b)])


def _chosen_by(b: Behind, quant: str, origin: Origin) -> list[Child]:
    said: list[Child] = [origin.name or "not named"]
    if origin.fingerprint:
        said += [", model ", el("code", origin.fingerprint[:16])]
    if quant in b.models and b.models[quant].named:
        said.append(", which is among the models given")
    elif any(c.source == "analytical" for c in b.facts.choices if c.quant == quant):
        said.append(", computed from public numbers")
    else:
        said.append(", which is not among the models given")
    return said


def _conditions(quant: str, o: Observed) -> Markup:
    shapes = len(np.unique(o.timings.shape))
    return table(
        _CONDITIONS,
        [_condition(c) for c in o.conditions],
        caption=f"{quant}: conditions of all {count(len(o.timings))} timings of this GPU and FlashInfer version that "
        f"were given, of {counted(shapes, 'shape')}; timing policy `{foreign(o.timings.origin.policy, 400)}`",
        texts=range(5),
    )


def _condition(c: Conditions) -> list[Child]:
    clock = _span(c.sm_clock_mhz, "MHz")
    if c.sm_clock_mhz and c.sm_clock_max_mhz:
        clock += f" of {max(c.sm_clock_max_mhz):g}"
    return [
        c.source or "not said", c.driver or "–", c.cuda or "–", c.torch or "–", whole(" to ".join(c.dates) or "–"),
        count(c.passes), count(c.timings), _span(c.power_w, "W"), clock, _span(c.temperature_c, "°C"),
        count(c.throttled),
    ]  # fmt: skip


def coverage(b: Behind) -> Markup:
    """Return the section on what the config covers and where each choice comes from."""
    f = b.facts
    about = [
        "A choice is one tactic for one shape, GEMM and token bucket; an entry is a key under which it is looked up."
    ]
    if f.engines:
        about.append(f"Engines: {', '.join(f.engines)}.")
    if f.max_tokens:
        about.append(f"Maximum token counts of the servers: {', '.join(map(str, f.max_tokens))}.")
    parts = [
        p(" ".join(about)),
        table(
            ("quantization", "deployments", "shapes", "buckets", *map(_column, SOURCES), "left out"),
            [_covered(f, quant) for quant in f.quants],
            caption=f"{counted(len(f.written), 'choice')} in the config by source, and choices left out",
        ),
    ]
    if not f.sidecar:
        parts.append(p(f"{counted(f.unreadable, 'entry', 'entries')} could not be read as an entry of this operation."))
    if f.choices:
        parts.append(_by_tokens(f))
    parts += [_deployments(f, quant) for quant in f.quants if f.sidecar]
    return join(parts)


def _column(source: str) -> str:
    return source.upper() if source == "analytical" else source


def _covered(f: Facts, quant: str) -> list[Child]:
    mine = [c for c in f.choices if c.quant == quant]
    by = Counter(c.source for c in mine if c.written)
    unknown = [by[source] if f.sidecar else None for source in SOURCES]
    return [
        quant or "not readable",
        count(len({label for c in mine for label in c.labels})) if f.sidecar else "–",
        count(len({c.shape for c in mine})),
        count(len({c.bucket for c in mine})),
        *("–" if n is None else count(n) for n in unknown),
        count(sum(not c.written for c in mine)) if f.sidecar else "–",
    ]


def _by_tokens(f: Facts) -> Markup:
    kinds = [kind for kind in ORIGINS if any(_fate(c) == kind for c in f.choices)]
    plots = []
    for quant in f.quants:
        mine = [c for c in f.choices if c.quant == quant]
        buckets = sorted({c.bucket for c in mine})
        counts = Counter((c.bucket, _fate(c)) for c in mine)
        stacks = [(kind, [float(counts[bucket, kind]) for bucket in buckets]) for kind in kinds]
        most = max(Counter(c.bucket for c in mine).values())
        plots.append(
            svg.bars(
                f"{quant or 'not readable'}: {counted(len(mine), 'choice')}",
                "; ".join(f"{ORIGINS[kind]}: {count(int(sum(heights)))}" for kind, heights in stacks),
                [str(bucket) for bucket in buckets],
                stacks,
                svg.linear(most),
                "tokens (bucket)",
                "choices",
            )
        )
    return figure(
        "Where each choice comes from, by tokens",
        f"All {counted(len(f.choices), 'choice')}, gemm1 and gemm2 together.",
        svg.legend([(kind, ORIGINS[kind]) for kind in kinds], line=False),
        plots,
    )


def _fate(c: Choice) -> str:
    return c.source if c.written else "left"


def _deployments(f: Facts, quant: str) -> Markup:
    labels = sorted({label for c in f.choices if c.quant == quant for label in c.labels})
    names = el("ul", [el("li", label) for label in labels], class_="labels")
    return el("details", el("summary", f"{quant}: {counted(len(labels), 'deployment')}"), names)


def _about_device(device: Device | None) -> str:
    if device is None:
        return "nothing: it is not in the catalogue of devices"
    parts = [device.arch]
    if device.sms:
        parts.append(f"{device.sms} SMs")
    if device.l2_mb:
        parts.append(f"{device.l2_mb:g}{NBSP}MB L2")
    if device.dram_gbs:
        parts.append(f"{count(round(device.dram_gbs))}{NBSP}GB/s")
    if device.tflops:
        parts.append("dense peak in TFLOPS: " + ", ".join(f"{quant} {v:g}" for quant, v in device.tflops.items()))
    return "; ".join(parts)


def _span(values: Sequence[float], unit: str) -> str:
    return f"{' to '.join(f'{v:g}' for v in values)}{NBSP}{unit}" if values else "–"
