"""Small plots as inline SVG, drawn at the size in which they are shown so that their text is readable at any width.

Colours and patterns are classes of the page's style sheet: one for each kind of number, with a dash and a marker of
its own, so that nothing rests on colour alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from synth.reporting.markup import Markup, el

#: Size of a plot in CSS pixels: it fits a window of 400.
WIDTH, HEIGHT = 352, 232
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 18, 26, 40
_PLOT_W, _PLOT_H = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM
#: Width of a character of a tick's label, and the least gap between two labels, in pixels.
_CHARACTER, _GAP = 6.6, 7.0
#: Steps of a logarithmic axis in each decade, by how many decades it spans at least.
_LOG_STEPS: tuple[tuple[float, tuple[float, ...]], ...] = (
    (2.0, (1,)),
    (1.0, (1, 3)),
    (0.6, (1, 2, 5)),
    (0.25, (1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 7)),
    (0.12, (1, 1.2, 1.5, 1.7, 2, 2.5, 3, 4, 5, 6, 7, 8, 9)),
    (0.0, (*(1 + i / 10 for i in range(10)), *(2 + i / 5 for i in range(40)))),
)


@dataclass(frozen=True)
class Line:
    """A line of a plot.

    Attributes
    ----------
    kind : str
        Class of the style sheet, for example ``"measured"``.
    points : tuple of (float, float, float, float)
        x, y, and the ends of the band around y.
    """

    kind: str
    points: tuple[tuple[float, float, float, float], ...]


@dataclass(frozen=True)
class Axis:
    """An axis: its ends, whether it is logarithmic, and its ticks with their labels."""

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    log: bool = False

    def at(self, value: float) -> float:
        """Return where a value lies, from 0 at the low end to 1 at the high end."""
        low, high, value = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        return min(max((value - low) / (high - low), 0.0), 1.0)


def linear(highest: float, unit: str = "", scale: float = 1.0) -> Axis:
    """Return an axis from zero; labels are values times `scale` with a unit."""
    top = highest * scale if highest > 0 and math.isfinite(highest) else 1.0
    raw = top / 4
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(s * power for s in (1, 2, 2.5, 5, 10) if s * power >= raw * 0.999)
    number = math.ceil(top / step - 1e-9)
    return Axis(0.0, number * step / scale, tuple((i * step / scale, f"{i * step:g}{unit}") for i in range(number + 1)))


def logarithmic(lowest: float, highest: float, unit: str = "") -> Axis:
    """Return a logarithmic axis whose ends are ticks."""
    lowest, highest = min(lowest, highest), max(highest, lowest * 1.05)
    decades = math.log10(highest / lowest)
    steps = next(steps for least, steps in _LOG_STEPS if decades >= least)
    powers = range(math.floor(math.log10(lowest)) - 1, math.ceil(math.log10(highest)) + 2)
    every = [s * 10.0**p for p in powers for s in steps]
    low = max(v for v in every if v <= lowest * (1 + 1e-9))
    high = min(v for v in every if v >= highest * (1 - 1e-9))
    return Axis(low, high, tuple((v, f"{v:g}{unit}") for v in every if low <= v <= high), log=True)


def of_tokens(buckets: Sequence[int]) -> Axis:
    """Return a logarithmic axis of token counts; it has a tick at each bucket, and labels where there is room."""
    low, high = min(buckets), max(buckets)
    axis = Axis(low / 1.2, high * 1.2, (), log=True)
    places = [_LEFT + axis.at(b) * _PLOT_W for b in buckets]
    texts = [str(b) for b in buckets]
    # Powers of four are what a reader expects; the others only where nothing of theirs is in the way.
    wanted = sorted(range(len(buckets)), key=lambda i: (not _power_of_4(buckets[i]), buckets[i]))
    kept = _without_overlap(places, texts, wanted)
    return Axis(axis.low, axis.high, tuple((b, texts[i] if i in kept else "") for i, b in enumerate(buckets)), log=True)


def lines(title: str, about: str, x: Axis, y: Axis, x_name: str, y_name: str, found: Sequence[Line]) -> Markup:
    """Return a plot of lines with bands.

    Parameters
    ----------
    title, about : str
        What it shows, and the same in a sentence for who can't see it.
    x, y : Axis
    x_name, y_name : str
        Names of the axes, with units.
    found : sequence of Line
    """
    marks = []
    for line in found:
        spots = [(_x(x, px), _y(y, py), _y(y, lo), _y(y, hi)) for px, py, lo, hi in line.points]
        if len(spots) > 1:
            edge = [(px, hi) for px, _, _, hi in spots] + [(px, lo) for px, _, lo, _ in reversed(spots)]
            marks.append(el("polygon", points=_joined(edge), class_=f"band {line.kind}"))
            marks.append(el("polyline", points=_joined([s[:2] for s in spots]), class_=f"line {line.kind}"))
        marks += [_marker(line.kind, px, py) for px, py, _, _ in spots]
    return _frame(title, about, x, y, x_name, y_name, marks)


def bars(
    title: str,
    about: str,
    names: Sequence[str],
    stacks: Sequence[tuple[str, Sequence[float]]],
    y: Axis,
    x_name: str,
    y_name: str,
) -> Markup:
    """Return a plot of stacked bars, one for each of `names`; a stack is a class of the style sheet and its heights."""
    width = _PLOT_W / len(names)
    places = [_LEFT + (i + 0.5) * width for i in range(len(names))]
    base = [0.0] * len(names)
    marks = []
    for kind, heights in stacks:
        for i, height in enumerate(heights):
            if height <= 0:
                continue
            top, bottom = _y(y, base[i] + height), _y(y, base[i])
            size = {"width": _n(width - 2), "height": _n(bottom - top)}
            marks.append(el("rect", x=_n(places[i] - width / 2 + 1), y=_n(top), class_=f"bar {kind}", **size))
            base[i] += height
    step = next(
        s for s in range(1, len(names) + 1) if len(_without_overlap(places[::s], names[::s])) == len(names[::s])
    )
    ticks = tuple(((i + 0.5) / len(names), n if i % step == 0 else "") for i, n in enumerate(names))
    return _frame(title, about, Axis(0.0, 1.0, ticks), y, x_name, y_name, marks)


def swatch(kind: str, *, line: bool) -> Markup:
    """Return what stands for a kind in a legend."""
    inside = (
        [el("line", x1="1", y1="7", x2="27", y2="7", class_=f"line {kind}"), _marker(kind, 14, 7)]
        if line
        else [el("rect", x="1", y="1", width="26", height="12", class_=f"bar {kind}")]
    )
    return el("svg", inside, width="28", height="14", viewBox="0 0 28 14", aria_hidden="true")


def legend(items: Sequence[tuple[str, str]], *, line: bool) -> Markup:
    """Return a legend of kinds and what they are called."""
    return el("ul", [el("li", swatch(kind, line=line), el("span", name)) for kind, name in items], class_="legend")


def patterns() -> Markup:
    """Return the fills that tell kinds of numbers apart in grey; a page has them once."""
    stripe = el("path", d="M-1,1 l2,-2 M0,6 l6,-6 M5,7 l2,-2", class_="hatch")
    dots = [el("circle", cx=at, cy=at, r="0.9", class_="dot") for at in ("1.5", "4.5")]
    made = [
        el(
            "pattern", el("rect", width="6", height="6", class_=f"ground {kind}"), mark,
            id=f"fill-{kind}", width="6", height="6", patternUnits="userSpaceOnUse",
        )
        for kind, mark in (("predicted", stripe), ("analytical", dots))
    ]  # fmt: skip
    return el("svg", el("defs", made), width="0", height="0", class_="defs", aria_hidden="true")


def _frame(title: str, about: str, x: Axis, y: Axis, x_name: str, y_name: str, marks: Sequence[Markup]) -> Markup:
    bottom = HEIGHT - _BOTTOM
    grid: list[Markup] = []
    for value, text in y.ticks:
        at = _n(_y(y, value))
        grid.append(el("line", x1=str(_LEFT), x2=str(WIDTH - _RIGHT), y1=at, y2=at, class_="grid"))
        grid.append(el("text", text, x=str(_LEFT - 5), y=at, dy="0.35em", class_="tick end"))
    for value, text in x.ticks:
        at = _n(_x(x, value))
        grid.append(el("line", x1=at, x2=at, y1=str(bottom), y2=str(bottom + (4 if text else 2)), class_="axis"))
        if text:
            grid.append(el("text", text, x=at, y=str(bottom + 16), class_="tick middle"))
    grid.append(el("line", x1=str(_LEFT), x2=str(WIDTH - _RIGHT), y1=str(bottom), y2=str(bottom), class_="axis"))
    middle = _TOP + _PLOT_H / 2
    names = [
        el("text", title, x=str(WIDTH // 2), y="15", class_="head middle"),
        el("text", x_name, x=_n(_LEFT + _PLOT_W / 2), y=str(HEIGHT - 6), class_="name middle"),
        el("text", y_name, x="0", y="0", transform=f"translate(11 {_n(middle)}) rotate(-90)", class_="name middle"),
    ]
    return el(
        "svg", el("title", title), el("desc", about), grid, marks, names,
        viewBox=f"0 0 {WIDTH} {HEIGHT}", width=str(WIDTH), height=str(HEIGHT), role="img", class_="plot",
    )  # fmt: skip


def _without_overlap(places: Sequence[float], texts: Sequence[str], order: Sequence[int] | None = None) -> set[int]:
    """Return which labels fit beside each other and inside the plot, taken in order."""
    kept: list[tuple[float, float]] = []
    found = set()
    for i in range(len(texts)) if order is None else order:
        half = len(texts[i]) * _CHARACTER / 2
        low, high = places[i] - half, places[i] + half
        if high <= WIDTH and all(high + _GAP <= a or b + _GAP <= low for a, b in kept):
            kept.append((low, high))
            found.add(i)
    return found


def _power_of_4(value: int) -> bool:
    return value & (value - 1) == 0 and value.bit_length() % 2 == 1


def _marker(kind: str, x: float, y: float) -> Markup:
    class_ = f"mark {kind}"
    if kind in ("predicted", "second"):
        return el("rect", x=_n(x - 2.6), y=_n(y - 2.6), width="5.2", height="5.2", class_=class_)
    if kind in ("analytical", "third"):
        return el("polygon", points=_joined([(x, y - 3.4), (x - 3.2, y + 2.4), (x + 3.2, y + 2.4)]), class_=class_)
    return el("circle", cx=_n(x), cy=_n(y), r="2.8", class_=class_)


def _x(axis: Axis, value: float) -> float:
    return _LEFT + axis.at(value) * _PLOT_W


def _y(axis: Axis, value: float) -> float:
    return _TOP + (1 - axis.at(value)) * _PLOT_H


def _joined(spots: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{_n(x)},{_n(y)}" for x, y in spots)


def _n(value: float) -> str:
    """Return a coordinate: a tenth of a pixel, alike on every machine."""
    return f"{value:.1f}"
