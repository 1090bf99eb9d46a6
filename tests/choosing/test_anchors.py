from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synth.catalog.models import deployments, find_model, load_models
from synth.catalog.shapes import MoEShape
from synth.choosing.anchors import ANCHORS, anchors
from synth.choosing.plan import Layer, estimate_memory

MOST_BYTES = 4 * 2**30
CATALOGUE = [Layer.of(d) for d in deployments(load_models(), quants=["nvfp4", "bf16"], supported=True)]
WANTED = [Layer.of(find_model("qwen3-30b-a3b").deploy(1, 1, "nvfp4"))]


def sizes(layer: Layer) -> np.ndarray:
    s = layer.shape
    return np.array([*np.log2([s.hidden, s.inter, s.experts, s.experts * s.ep_size / s.top_k]), float(s.gated)])


def least_distance(some: Sequence[Layer]) -> float:
    return min(float(np.linalg.norm(sizes(a) - sizes(b))) for a, b in itertools.combinations(some, 2))


def test_anchors_are_far_from_the_layers_and_from_each_other() -> None:
    found = anchors(WANTED, CATALOGUE, 8192)
    assert len(found) == ANCHORS
    rng = np.random.default_rng(0)
    same = [c for c in CATALOGUE if c.quant == "nvfp4"]
    drawn = [
        least_distance([*WANTED, *(same[i] for i in rng.choice(len(same), ANCHORS, replace=False))]) for _ in range(200)
    ]
    assert least_distance([*WANTED, *found]) > np.quantile(drawn, 0.95)


def test_the_farthest_comes_first() -> None:
    near, far = (Layer.by_hand(MoEShape(h, i, 64, 8), "nvfp4") for h, i in ((2048, 800), (8192, 128)))
    assert anchors(WANTED, [near, far], 64, 1) == [far]
    assert anchors(WANTED, [near, far], 64, 2) == [far, near]


def test_anchors_are_never_layers_that_are_timed_anyway() -> None:
    wanted = [c for c in CATALOGUE if c.quant == "nvfp4"][::3]
    there = {layer.shape for layer in wanted}
    # Called by another name it is the same layer.
    twins = [Layer.by_hand(layer.shape, "nvfp4", "twin", layer.activation) for layer in wanted]
    found = anchors(wanted, [*twins, *CATALOGUE], 64, 1000)
    assert found and not there & {a.shape for a in found}
    assert len({a.shape for a in found}) == len(found)
    assert anchors(wanted, twins, 64) == []


def test_anchors_are_of_the_quantizations_that_are_timed() -> None:
    assert {a.quant for a in anchors(WANTED, CATALOGUE, 64)} == {"nvfp4"}
    both = [*WANTED, Layer.of(find_model("olmoe").deploy(1, 1, "bf16"))]
    assert {a.quant for a in anchors(both, CATALOGUE, 64, 100)} == {"nvfp4", "bf16"}


@pytest.mark.parametrize("tokens", [8192, 32768])
def test_layers_that_take_long_to_set_up_are_passed_over(tokens: int) -> None:
    found = anchors(WANTED, CATALOGUE, tokens, 1000)
    fit = {
        c.shape
        for c in CATALOGUE
        if c.quant == "nvfp4" and c.shape != WANTED[0].shape and estimate_memory(c.shape, c.quant, tokens) <= MOST_BYTES
    }
    assert {a.shape for a in found} == fit
    assert any(estimate_memory(c.shape, c.quant, tokens) > MOST_BYTES for c in CATALOGUE if c.quant == "nvfp4")


def test_fewer_candidates_than_asked_for_are_all_taken_once() -> None:
    some = [Layer.by_hand(MoEShape(1024 * n, 512, 32, 4), "nvfp4") for n in (1, 2, 3)]
    assert set(anchors(WANTED, [*some, *some], 64, 6)) == set(some)
    assert anchors(WANTED, [], 64) == []
    assert anchors(WANTED, some, 64, 0) == []


def test_layers_of_the_same_distances_are_each_taken_once() -> None:
    # Half as many experts, of which each token goes to half as many: the same sizes as far as distances go.
    some = [Layer.by_hand(s, "nvfp4") for s in (MoEShape(2048, 256, 64, 8, 2), MoEShape(2048, 256, 64, 4))]
    np.testing.assert_array_equal(sizes(some[0]), sizes(some[1]))
    assert len(anchors(WANTED, some, 64)) == 2
    assert set(anchors(WANTED, some, 64)) == set(some)


@settings(max_examples=20)
@given(st.randoms(use_true_random=False), st.integers(1, 12))
def test_the_order_of_the_layers_does_not_matter_and_more_are_added_at_the_end(rng: object, count: int) -> None:
    wanted = [c for c in CATALOGUE if c.quant == "nvfp4"][:4]
    mixed = list(wanted)
    rng.shuffle(mixed)  # type: ignore[attr-defined]
    found = anchors(wanted, CATALOGUE, 8192, count)
    assert anchors(mixed, CATALOGUE, 8192, count) == found
    assert anchors(wanted, CATALOGUE, 8192, count + 1)[:count] == found
