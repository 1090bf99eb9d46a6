"""``synth report``: what a config holds and what stands behind it, as one HTML page that needs nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from pathlib import Path

from synth.errors import SynthError
from synth.reporting import trust
from synth.reporting.facts import load
from synth.reporting.observed import observe
from synth.reporting.page import render
from synth.timings.rows import Problem

#: Shapes of each quantization in the map of tactics.
MAP_SHAPES = 24


def report(
    config: Path,
    *,
    model_folders: Sequence[Path] = (),
    measurements: Sequence[Path] = (),
    held_out: bool = False,
    map_shapes: int = MAP_SHAPES,
    problems: list[Problem] | None = None,
    progress: Callable[[int, int], None] | None = None,
    pool: Executor | None = None,
) -> str:
    """Return the page of a config.

    Equal files give equal pages: nothing of the clock, the machine or the folders is in it.

    Parameters
    ----------
    config : Path
        What `synth emit` wrote, v1 JSON or a bundled module; its sidecar is looked for beside it. Without one the page
        says which parts are missing.
    model_folders : sequence of Path
        Folders of models, for what they say of shapes held out.
    measurements : sequence of Path
        Folders of timings, and of what `synth verify` found right and wrong.
    held_out : bool
        Compute the held-out figures anew from the timings: half a minute a quantization, on two cores.
    map_shapes : int
        Shapes of each quantization in the map; the rest are counted.
    problems : list, optional
        Gets the rows of measurements that can't be read; the page has their number.
    progress : callable, optional
        Called with the steps done and the steps in all, once a quantization from the start, while figures are computed.
    pool : Executor, optional
        Where families are held out, see :func:`synth.choosing.choose.learning.workers`; two threads if not given.

    Raises
    ------
    SynthError
        When a file can't be read, or the sidecar is another config's or contradicts it.
    """
    bad: list[Problem] = []
    facts = load(config)
    found = trust.models(facts, model_folders)
    facts, observed = observe(facts, measurements, bad, {quant: m.origin.policy for quant, m in found.items()})
    computed: dict[str, trust.Computed] = {}
    refused: dict[str, str] = {}
    for quant, one in observed.items() if held_out else ():
        try:
            computed[quant] = trust.compute(one.timings, found.get(quant), progress, pool)
        except SynthError as e:
            refused[quant] = str(e)
    if problems is not None:
        problems += bad
    return render(facts, found, computed, observed=observed, refused=refused, problems=len(bad), map_shapes=map_shapes)
