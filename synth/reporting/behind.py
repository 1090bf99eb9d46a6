"""Everything that a page shows, and what its sections share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from synth.reporting import svg
from synth.reporting.facts import Choice, Facts
from synth.reporting.markup import Markup, count, el, join, p, prose, regret, whole
from synth.reporting.observed import Observed
from synth.reporting.trust import Computed, Model

#: Kinds of gains, with what they rest on.
GAINS = {
    "measured": "measured: both times are timings",
    "predicted": "predicted: at least one of the two times is the model's",
    "analytical": "ANALYTICAL: both times are computed, nothing was ever timed",
}
#: Sources of choices, and what became of those that are not in the config.
ORIGINS = {
    "measured": "measured: the bucket was swept",
    "verified": "verified: the tactic was timed here and is very likely within 1 % of the best",
    "predicted": "predicted by the model",
    "analytical": "ANALYTICAL: computed, never timed",
    "unknown": "source unknown: no sidecar",
    "left": "left out: it may not beat the fallback",
}

#: A value at a token count, and the ends of the band around it.
Curve = tuple[tuple[float, float, float, float], ...]


@dataclass(frozen=True)
class Behind:
    """Everything that a page shows.

    Attributes
    ----------
    facts : Facts
    observed : dict of str to Observed
        By quantization, like those that follow.
    models : dict of str to Model
    computed : dict of str to Computed
        Empty unless it was asked for.
    refused : dict of str to str
        Why something that was asked for couldn't be computed.
    problems : int
        Rows of measurements that can't be read.
    map_shapes : int
        Shapes of each quantization in the map.
    """

    facts: Facts
    observed: Mapping[str, Observed]
    models: Mapping[str, Model]
    computed: Mapping[str, Computed]
    refused: Mapping[str, str]
    problems: int
    map_shapes: int


def kind_of(choice: Choice) -> str:
    """Return what a choice's gain is, one of ``GAINS``."""
    if choice.measured_gain:
        return "measured"
    return "analytical" if choice.source == "analytical" else "predicted"


def loud(kind: str) -> str:
    """Return a kind or source as it is written: what nobody has measured isn't said in passing."""
    return kind.upper() if kind == "analytical" else kind


def layer(choice: Choice) -> Markup:
    """Return a choice's layer: a deployment that has it, how many more do, and under it the shape."""
    if not choice.labels:
        return whole(choice.shape or "not readable")
    return join([whole(label(choice)), el("br"), el("small", choice.shape, class_="w")])


def label(choice: Choice) -> str:
    """Return what a choice's shape is called: a deployment that has it, and how many more do; else the shape."""
    if not choice.labels:
        return choice.shape or "not readable"
    return choice.labels[0] + (f" +{len(choice.labels) - 1}" if len(choice.labels) > 1 else "")


def figure(title: str, about: str, legend: Markup, plots: Sequence[Markup]) -> Markup:
    """Return plots under their title, what the numbers are, and one legend."""
    caption = el("figcaption", el("b", title), prose(about))
    return el("figure", caption, legend, el("div", plots, class_="plots"))


def curve(
    choices: Sequence[Choice], value: Callable[[Choice], float | None], mean: Callable[[Sequence[float]], float]
) -> Curve:
    """Return the mean over the choices of each bucket, and the middle 80 % of them as the band."""
    by: dict[int, list[float]] = {}
    for choice in choices:
        v = value(choice)
        if v is not None:
            by.setdefault(choice.bucket, []).append(v)
    ends = {bucket: np.quantile(found, [0.1, 0.9]).tolist() for bucket, found in by.items()}
    return tuple((float(bucket), mean(found), ends[bucket][0], ends[bucket][1]) for bucket, found in sorted(by.items()))


def tokens_axis(choices: Sequence[Choice]) -> svg.Axis:
    """Return the axis of the choices' buckets."""
    return svg.of_tokens(sorted({c.bucket for c in choices}))


def geomean(values: Sequence[float]) -> float:
    """Return the geometric mean; NaN of nothing."""
    return float(np.exp(np.mean(np.log(values)))) if len(values) else math.nan


def mean(values: Sequence[float]) -> float:
    """Return the mean; NaN of nothing."""
    return float(np.mean(values)) if len(values) else math.nan


def summary(found: Mapping[str, float]) -> list[str]:
    """Return the columns of a table of regrets: choices, geometric mean, quantiles, maximum."""
    return [count(int(found["count"])), *(regret(found[name]) for name in ("geomean", "p95", "p99", "max"))]


#: The names of those columns.
SUMMARY = ("choices judged", "geometric mean", "p95", "p99", "max")


def no_timings(b: Behind) -> Markup:
    """Return why nothing can be said of timings."""
    if not b.facts.gpu:
        return p("The config names no GPU whose timings could be looked for.", class_="note")
    return p(
        f"No timings of {b.facts.gpu} under FlashInfer {b.facts.flashinfer} are in the folders of measurements that "
        "this report was given.",
        class_="note",
    )
