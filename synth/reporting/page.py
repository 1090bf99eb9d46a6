"""The page: the templates under ``templates/``, filled with facts and figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from synth import __version__
from synth.catalog.schemes import STAGES
from synth.configs.sidecar import SOURCES
from synth.reporting import figures, observed, plots, texts
from synth.reporting.facts import Facts
from synth.reporting.trust import Computed, Model
from synth.timings.records import TOLERANCE

#: Where the templates and the style sheet lie.
TEMPLATES = Path(__file__).parent / "templates"
#: Nothing is loaded and nothing runs, whatever a text of a stranger might become.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
#: Sizes of a kernel's tile along tokens that have a colour in the style sheet.
_TILES = (8, 16, 32, 64, 128, 256)
_FILTERS = (
    texts.count, texts.counted, texts.foreign, texts.loud, texts.milliseconds, texts.percent, texts.regret,
    texts.span, texts.summary, texts.times, plots.tenths,
)  # fmt: skip
_FIGURES = (figures.coverage, figures.gain, figures.sure, figures.worst)
_NAMES = {
    "DRIFTED": observed.DRIFTED, "DRIFT_NAMES": observed.DRIFT_NAMES, "LEAST": figures.LEAST, "NBSP": texts.NBSP,
    "POLICY": POLICY, "SOURCES": SOURCES, "STAGES": STAGES, "TILES": _TILES, "TOLERANCE": TOLERANCE, "plots": plots,
    "reliability": figures.reliability, "tactics_map": figures.tactics_map, "version": __version__,
}  # fmt: skip


def templates() -> Environment:
    """Return the templates; they escape whatever they are given, and know no name that they aren't given."""
    loader = FileSystemLoader(TEMPLATES)
    found = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    # `count` is a number of things as `texts` writes it; Jinja's own filter of that name is called `length` as well.
    found.filters.update({function.__name__: function for function in _FILTERS})
    found.globals.update(_NAMES)
    return found


def render(facts: Facts, models: Mapping[str, Model], computed: Mapping[str, Computed], **more: object) -> str:
    """Return the page.

    Parameters
    ----------
    facts : Facts
    models : mapping of str to Model
        By quantization, like those that follow.
    computed : mapping of str to Computed
        Empty unless it was asked for.
    **more : object
        What else the templates show: `observed` (mapping of str to Observed), `refused` (mapping of str to str: why
        something that was asked for couldn't be computed), `problems` (rows of measurements that can't be read) and
        `map_shapes` (shapes of each quantization in the map).
    """
    shown = {function.__name__: function(facts) for function in _FIGURES}
    judged = {"unjudged": figures.unjudged(facts, models), "held_out": figures.held_out(computed)}
    written = facts.written
    sources = Counter(c.source for c in written)
    given = {"f": facts, "written": written, "sources": sources, "models": models, "computed": computed}
    return templates().get_template("page.html.j2").render(given, **shown, **judged, **more)
