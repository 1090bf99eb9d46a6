"""Section: the map of chosen tactics, shapes and GEMMs down, token buckets across."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from synth.catalog.schemes import STAGES
from synth.flashinfer.tactics import Tactic
from synth.reporting.behind import Behind, kind_of, label, loud
from synth.reporting.facts import Choice, Facts
from synth.reporting.markup import Child, Markup, boxed, count, counted, el, join, milliseconds, p, table, times
from synth.reporting.style import TILES

#: How a choice's source shows in its cell.
_MARKS = {"measured": "m", "verified": "m", "analytical": "a"}

_Cells = Mapping[tuple[str, int, int], Choice]


def chosen(b: Behind) -> Markup:
    """Return the section: a map for each quantization."""
    if not b.facts.choices:
        return p("The config holds no entry that can be read.")
    about = (
        "A letter is a tactic, A the one that is chosen most; its colour is the kernel's tile along tokens, dark for a "
        "large one. A cell's title says the rest. Where some servers let gemm2 fuse the finalize step and others "
        "don't, the map shows the choice for those that do."
    )
    return join([p(about), _key(b.facts), [_map(b.facts, quant, b.map_shapes) for quant in b.facts.quants]])


def _key(facts: Facts) -> Markup:
    there = {c.source for c in facts.choices if c.written}
    marks: list[Child] = []
    if there & {"measured", "verified"}:
        marks.append([el("b", "A", class_="m"), "measured or verified"])
    if there & {"predicted", "unknown"}:
        marks.append([el("b", "A"), "predicted" if facts.sidecar else "source unknown"])
    if "analytical" in there:
        marks.append([el("b", "A", class_="a"), "ANALYTICAL: computed, never timed"])
    if not all(c.written for c in facts.choices):
        marks.append([el("b", "–"), "left out"])
    tiles = [[el("b", tile, class_=f"t{tile}"), " "] for tile in TILES]
    return el("p", "Tile along tokens: ", tiles, [el("span", mark) for mark in marks], class_="note key")


def _map(facts: Facts, quant: str, most: int) -> Markup:
    cells = _cells(c for c in facts.choices if c.quant == quant)
    shapes = _shapes(list(cells.values()))
    called = {c.shape: label(c) for c in cells.values()}
    shown = sorted(shapes[:most], key=lambda s: (called[s], s))
    buckets = sorted({c.bucket for c in cells.values()})
    used = Counter(c.tactic for c in cells.values() if c.written and c.tactic is not None)
    ranked = sorted(used, key=lambda t: (-used[t], t))
    letters = {tactic: _letters(i) for i, tactic in enumerate(ranked)}
    head = el(
        "tr",
        el("th", "layer", scope="col", class_="who"),
        el("th", "GEMM", scope="col"),
        [el("th", bucket, scope="col") for bucket in buckets],
    )
    rows = []
    for shape in shown:
        who = el("th", _name(shape, called), scope="rowgroup", rowspan=len(STAGES), class_="who", title=shape)
        for stage in STAGES:
            row = [_cell(cells.get((shape, stage, bucket)), letters) for bucket in buckets]
            rows.append(el("tr", who if stage == STAGES[0] else None, el("th", f"gemm{stage}", scope="row"), row))
    name = quant or "not readable"
    rest = len(shapes) - len(shown)
    caption = f"{name}: chosen tactics by layer and tokens (bucket)"
    if rest:
        caption += (
            f"; the {len(shown)} shapes with the most timings and deployments, {count(rest)} more are not shown: "
            f"`--map-shapes {len(shapes)}` shows all"
        )
    table_ = el("table", el("thead", head), el("tbody", rows), class_="map")
    legend = table(
        ("letter", "tactic", "tile along tokens", "gemm1 choices", "gemm2 choices"),
        [[letters[t], el("code", t), count(t.tokens_tile), *_uses(cells, t)] for t in ranked],
        caption=f"{name}: tactics by how often they are chosen, over all {counted(len(shapes), 'shape')}",
        texts=(0, 1),
    )
    meaning = el("details", el("summary", f"{name}: what the {counted(len(ranked), 'letter')} mean"), legend)
    return join([el("h3", name), boxed(table_, caption), meaning])


def _cells(choices: Iterable[Choice]) -> _Cells:
    """Return one choice of each place; of two, that of servers that fuse the finalize step."""
    found: dict[tuple[str, int, int], Choice] = {}
    for c in choices:
        place = c.shape, c.stage, c.bucket
        if place not in found or (c.fused and not found[place].fused):
            found[place] = c
    return found


def _shapes(choices: Sequence[Choice]) -> list[str]:
    """Return the shapes, those with the most timings first, then those of the most deployments."""
    timed = Counter(c.shape for c in choices if c.source in ("measured", "verified"))
    labels = {c.shape: len(c.labels) for c in choices}
    return sorted(labels, key=lambda s: (-timed[s], -labels[s], s))


def _name(shape: str, called: Mapping[str, str]) -> Child:
    """Return a shape's name; with itself where engines pass a deployment's layer in two shapes."""
    name = called[shape]
    alone = sum(other == name for other in called.values()) == 1
    return name if alone or name == shape else [name, el("br"), el("small", shape)]


def _uses(cells: _Cells, tactic: Tactic) -> list[str]:
    by = Counter(c.stage for c in cells.values() if c.written and c.tactic == tactic)
    return [count(by[stage]) for stage in STAGES]


def _cell(c: Choice | None, letters: Mapping[Tactic, str]) -> Markup:
    if c is None:
        return el("td")
    where = f"gemm{c.stage} at {c.bucket}: "
    if not c.written:
        return el("td", "–", class_="o", title=f"{where}left out, it may not beat the fallback")
    if c.tactic is None:
        return el("td", "?", class_="tx", title=f"{where}a tactic without a name")
    said = [str(c.tactic), loud(c.source)]
    if c.ms is not None:
        said.append(f"{milliseconds(c.ms)} ms")
    if c.gain is not None:
        said.append(f"{times(c.gain)} the fallback's speed, {loud(kind_of(c))}")
    tile = c.tactic.tokens_tile
    classes = (f"t{tile}" if tile in TILES else "tx", _MARKS.get(c.source))
    return el("td", letters[c.tactic], class_=" ".join(filter(None, classes)), title=where + "; ".join(said))


def _letters(number: int) -> str:
    """Return A to Z, then AA to AZ and so on."""
    text = ""
    number += 1
    while number:
        number, digit = divmod(number - 1, 26)
        text = chr(ord("A") + digit) + text
    return text
