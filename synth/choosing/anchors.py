"""Layers that teach what the others of a device are like: far from each other, and quick to set up."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from synth.catalog.models import deployments, load_models
from synth.catalog.shapes import MoEShape
from synth.choosing.plan import Layer, estimate_memory

#: How many layers are enough: with more, each gets too few timings in a minute.
ANCHORS = 12
#: Larger layers are passed over: allocating and filling their weights takes longer than timing them.
_MOST_BYTES = 4 * 2**30


def with_anchors(
    layers: Sequence[Layer], quants: Sequence[str], tokens: int, candidates: Sequence[Layer] | None = None
) -> tuple[list[Layer], list[list[int]]]:
    """Return layers with anchors for some quantizations, and the turns in which to time them: the layers come first.

    Parameters
    ----------
    quants : sequence of str
        Quantizations that get anchors: those without a model.
    tokens : int
        Largest bucket.
    candidates : sequence of Layer, optional
        The catalogue's usual deployments if not given.
    """
    if candidates is None:
        candidates = [Layer.of(d) for d in deployments(load_models(), quants=quants, supported=True)]
    unique = list({(one.shape, one.quant): one for one in layers}.values())
    more = [
        one
        for quant in quants
        for one in anchors([layer for layer in unique if layer.quant == quant], candidates, tokens)
    ]
    return [*unique, *more], [list(range(len(unique))), *([len(unique) + i] for i in range(len(more)))]


def anchors(layers: Sequence[Layer], candidates: Sequence[Layer], tokens: int, count: int = ANCHORS) -> list[Layer]:
    """Return up to `count` of the candidates, each as far as can be from the layers and those before it.

    Distances are those of a layer's sizes as logarithms, each in units of its spread over the candidates.

    Parameters
    ----------
    layers : sequence of Layer
        What is timed anyway; candidates of other quantizations are passed over.
    candidates : sequence of Layer
    tokens : int
        Largest bucket.
    """
    quants = {layer.quant for layer in layers}
    there = {(layer.shape, layer.quant) for layer in layers}
    some = list(
        {
            (c.shape, c.quant): c
            for c in candidates
            if c.quant in quants
            and (c.shape, c.quant) not in there
            and estimate_memory(c.shape, c.quant, tokens) <= _MOST_BYTES
        }.values()
    )
    if not some:
        return []
    points = np.array([_sizes(c.shape) for c in some])
    scale = np.maximum(points.std(axis=0), 0.1)
    begin = np.array([_sizes(layer.shape) for layer in layers])
    distance = np.linalg.norm((points[:, None] - begin[None]) / scale, axis=2).min(axis=1)
    found = []
    for _ in range(min(count, len(some))):
        far = int(np.argmax(distance))
        found.append(some[far])
        distance = np.minimum(distance, np.linalg.norm((points - points[far]) / scale, axis=1))
        # Not once more, even where all that are left are as large as one that was found.
        distance[far] = -1.0
    return found


def _sizes(shape: MoEShape) -> list[float]:
    sizes = (shape.hidden, shape.inter, shape.experts, shape.experts * shape.ep_size / shape.top_k)
    return [*np.log2(sizes).tolist(), float(shape.gated)]
