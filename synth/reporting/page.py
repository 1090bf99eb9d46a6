"""The page: warnings, the figures that come first, and the sections."""

from __future__ import annotations

from collections.abc import Callable

from synth import __version__
from synth.reporting import svg
from synth.reporting.behind import GAINS, Behind, geomean, kind_of, loud, mean
from synth.reporting.chosen import chosen
from synth.reporting.gains import gain
from synth.reporting.markup import Child, Markup, count, counted, el, join, p, pairs, percent, prose, regret, times
from synth.reporting.provenance import coverage, provenance
from synth.reporting.regrets import held_out, sure
from synth.reporting.style import CSS
from synth.reporting.trouble import drift, verification, worst

#: Nothing is loaded and nothing runs, whatever a text of a stranger might become.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def render(b: Behind) -> str:
    """Return the page."""
    sections: tuple[tuple[str, str, Callable[[Behind], Markup]], ...] = (
        ("provenance", "Device and provenance", provenance),
        ("coverage", "Coverage", coverage),
        ("gain", "Gain over the fallback", gain),
        ("held-out", "Regret held out", held_out),
        ("sure", "Intervals and probabilities", sure),
        ("worst", "Worst entries", worst),
        ("drift", "Drift and failures", drift),
        ("map", "Map of chosen tactics", chosen),
        ("verification", "Verification", verification),
        ("about", "About this page", _about),
    )
    title = f"MoE tactics for {b.facts.gpu or 'an unnamed GPU'}"
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", http_equiv="Content-Security-Policy", content=POLICY),
        el("meta", name="referrer", content="no-referrer"),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("title", f"{title}: {b.facts.name}"),
        el("style", Markup(CSS)),
    )
    version = f"FlashInfer {b.facts.flashinfer}" if b.facts.flashinfer else "FlashInfer"
    body = el(
        "main",
        svg.patterns(),
        el("h1", title),
        p(
            f"A tuning config for {version}'s CUTLASS MoE kernels, `{b.facts.name}`: what it holds, and what stands "
            "behind it.",
            class_="lead",
        ),
        [el("p", el("strong", f"{word}. "), prose(text), class_="loud", role="note") for word, text in _warnings(b)],
        pairs(_figures(b), "cards"),
        el("nav", [el("a", name, href=f"#{anchor}") for anchor, name, _ in sections], aria_label="Sections"),
        [el("section", el("h2", name), make(b), id=anchor) for anchor, name, make in sections],
    )
    return f"<!DOCTYPE html>\n{el('html', head, el('body', body), lang='en')}\n"


def _warnings(b: Behind) -> list[tuple[str, str]]:
    """Return what must be said first: a word, and the text after it."""
    f = b.facts
    found = []
    analytical = sum(c.source == "analytical" for c in f.written)
    if analytical:
        found.append(
            (
                "ANALYTICAL",
                f"{count(analytical)} of {counted(len(f.written), 'choice')} in the config are computed from public "
                "numbers of the GPU; no kernel was ever timed on one. Each of their figures on this page is a "
                "calculation, none a measurement, and they are not for others. To measure, on such a GPU: "
                "`synth collect`.",
            )
        )
    if any(m.simulated for m in b.models.values()):
        found.append(("SIMULATED", "A model given was fitted on simulated timings: its figures are not real."))
    if f.routing:
        found.append(
            (
                "ROUTING",
                f"The choices are for tokens that spread over the experts as {f.routing}. All timings are of uniform "
                "routing, so that no choice is measured, and a server that routes otherwise should not use the file.",
            )
        )
    if f.ported_from:
        found.append(
            (
                "PORTED",
                f"Choices were made under FlashInfer {', '.join(f.ported_from)} and carried over to {f.flashinfer} by "
                "what the tactics are. Their times are those of the other version, so that none is measured.",
            )
        )
    if not f.sidecar:
        found.append(
            (
                "NO SIDECAR",
                f"Beside the config there is no `{f.name}.provenance.json`, which says of each choice where it comes "
                "from. Missing for that reason: sources, deployments, what was left out, the fallback's times and so "
                "every gain, expected regrets and probabilities. What the config itself says is shown.",
            )
        )
    if not f.entries:
        found.append(("EMPTY", "The config holds no entry."))
    return found


def _figures(b: Behind) -> list[tuple[str, Child]]:
    """Return the figures that come first: a name, and the number with what it is."""
    f = b.facts
    found: list[tuple[str, Child]] = []

    def add(name: str, value: Child, about: str) -> None:
        found.append((name, join([value, el("small", about)])))

    left = f"; {count(len(f.choices) - len(f.written))} left out" if f.sidecar else ""
    add("entries", count(f.entries), f"{counted(len(f.written), 'choice')}{left}")
    if f.counts:
        timed = sum(f.counts.get(source, 0) for source in ("measured", "verified"))
        by = ", ".join(f"{count(n)} {loud(source)}" for source, n in f.counts.items())
        add("entries that were timed", percent(timed / sum(f.counts.values())), by)
    for kind in GAINS:
        gains = [c.gain for c in f.written if c.gain is not None and kind_of(c) == kind]
        if gains:
            about = f"geometric mean of {counted(len(gains), 'choice')}"
            add(f"gain over the fallback, {loud(kind)}", times(geomean(gains)), about)
    stated = [c.regret for c in f.written if c.regret is not None]
    if stated:
        add(
            "expected regret",
            percent(mean(stated), 2),
            f"stated, not measured: mean of {counted(len(stated), 'choice')}",
        )
    held = [f"{regret(m.regret['geomean'])} {quant}" for quant, m in b.models.items() if m.named and m.regret]
    if held:
        lines = join(el("span", text, el("br")) for text in held)
        add("regret held out", lines, "measured, on shapes that the model had not seen")
    if f.written:
        numbers = [o.numbers for o in b.observed.values()]
        pairs_served = sum(n.pairs for n in numbers)
        about = (
            f"of {counted(pairs_served, 'pair')} of tactics" if numbers else "no measurements of this GPU were given"
        )
        add("outputs compared", count(sum(n.agreed for n in numbers)), about)
    return found


def _about(b: Behind) -> Markup:
    name = b.facts.name
    return join(
        [
            p(
                "Measured: a timing of this GPU and FlashInfer version. Predicted: the fitted model's, wrong by about "
                "as much as the regret held out says. Analytical: computed from public numbers alone. Whether "
                f"FlashInfer uses the file: `synth check {name}` and `synth replay {name}`."
            ),
            p(
                f"Written by synth {__version__}, `synth report {name}`. The page holds no script and loads nothing; "
                "equal files give equal pages.",
                class_="note",
            ),
        ]
    )
