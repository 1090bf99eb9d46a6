"""Axes, lines and bars of the page's plots; ``templates/plots.html.j2`` draws them as inline SVG.

No plotting library draws them, since none that is light enough gives what the page promises: the same bytes each time,
no script, no id that two plots of a page share, colours of the page's style sheet (so that the plots follow it into
the dark and into print), a logarithmic axis of tokens beside a linear one, bands and stacked bars. Of those tried,
pygal 3.1 writes a script and the day into every plot and has logarithms on both axes or on none,
leather 0.4 has neither logarithms nor bands nor stacks, ziaplot 0.9 numbers clips and markers anew in each plot so that
they clash on one page, and toyplot 2.1 brings Pillow, ReportLab and 40 MB.

Plots are drawn at the size in which they are shown, so that their text is readable at any width. Each kind of number
has a colour, a dash and a marker of its own, so that nothing rests on colour alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

#: Size of a plot in CSS pixels: it fits a window of 400.
WIDTH, HEIGHT = 352, 232
LEFT, RIGHT, TOP, BOTTOM = 56, 18, 26, 40
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

#: A point of a curve, and the ends of the band around it: x, y, low, high.
Point = tuple[float, float, float, float]


@dataclass(frozen=True)
class Axis:
    """An axis: its ends, its ticks with their labels, and whether it is logarithmic."""

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    log: bool = False

    def at(self, value: float) -> float:
        """Return where a value lies, from 0 at the low end to 1 at the high end."""
        low, high, value = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        return min(max((value - low) / (high - low), 0.0), 1.0)

    def across(self, value: float) -> float:
        """Return where a value lies from the left, in pixels."""
        return LEFT + self.at(value) * (WIDTH - LEFT - RIGHT)

    def down(self, value: float) -> float:
        """Return where a value lies from the top, in pixels."""
        return HEIGHT - BOTTOM - self.at(value) * (HEIGHT - TOP - BOTTOM)


def tenths(value: float) -> str:
    """Return a coordinate: a tenth of a pixel, alike on every machine."""
    return f"{value:.1f}"


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
    axis = Axis(min(buckets) / 1.2, max(buckets) * 1.2, (), log=True)
    # Powers of four are what a reader expects; the others only where nothing of theirs is in the way.
    wanted = sorted(buckets, key=lambda b: (b.bit_count() > 1 or b.bit_length() % 2 == 0, b))
    kept = _apart((axis.across(b), str(b)) for b in wanted)
    ticks = tuple((float(b), str(b) if str(b) in kept else "") for b in buckets)
    return Axis(axis.low, axis.high, ticks, log=True)


def of_names(names: Sequence[object]) -> Axis:
    """Return an axis of places side by side, from 0; each has a tick, and as many labels as there is room for."""
    axis = Axis(-0.5, len(names) - 0.5, ())
    step = 1
    while len(_apart((axis.across(i), str(names[i])) for i in range(0, len(names), step))) < len(names[::step]):
        step += 1
    return Axis(axis.low, axis.high, tuple((i, "" if i % step else str(name)) for i, name in enumerate(names)))


def _apart(labels: Iterable[tuple[float, str]]) -> set[str]:
    """Return which labels fit beside each other and inside the plot, taken in order; each is a place and a text."""
    kept: dict[str, tuple[float, float]] = {}
    for place, text in labels:
        half = len(text) * _CHARACTER / 2
        low, high = place - half, place + half
        if high <= WIDTH and all(high + _GAP <= a or b + _GAP <= low for a, b in kept.values()):
            kept[text] = low, high
    return set(kept)


def stacked(stacks: Mapping[str, Sequence[float]]) -> Iterator[tuple[str, int, float, float]]:
    """Yield the bars of stacks, by kind: kind, place, bottom, top; none where there is nothing."""
    base: dict[int, float] = {}
    for kind, heights in stacks.items():
        for place, height in enumerate(heights):
            bottom = base.get(place, 0.0)
            base[place] = bottom + height
            if height > 0:
                yield kind, place, bottom, base[place]
