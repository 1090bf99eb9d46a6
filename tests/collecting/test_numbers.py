from __future__ import annotations

import math

import pytest

from synth.collecting.numbers import FALLBACK, CannotCompare, ComparatorSpec, Comparison, Patience, guilty
from synth.errors import SynthError


def simulated(**options: object) -> ComparatorSpec:
    return ComparatorSpec("synth.collecting.numbers:SimulatedComparator", options)


def test_the_guilty_stage_is_the_one_that_is_wrong_alone() -> None:
    with Comparison(simulated(wrong=[3, 50])) as comparison:
        assert comparison.compare(8, FALLBACK).deviation == 0
        assert comparison.compare(8, (4, 60)).deviation < 0.01
        for pair, stages in {(3, 60): {1}, (4, 50): {2}, (3, 50): {1, 2}, (-1, 50): {2}}.items():
            bad = comparison.compare(8, pair)
            assert bad.deviation == 0.5
            found = guilty(comparison, bad, 0.02)
            assert found.keys() == stages
            assert all(c.tokens == 8 and c.deviation == 0.5 for c in found.values())


def test_a_pair_that_is_wrong_only_together_takes_both_down() -> None:
    with Comparison(simulated()) as comparison:
        good = comparison.compare(8, (3, 50))
        assert guilty(comparison, good, 0.02) == {1: good, 2: good}


def test_a_pair_that_ends_its_process_or_hangs_counts_as_wrong_and_the_next_one_is_compared() -> None:
    broken = {1: "raise", 2: "exit", 3: "hang"}
    with Comparison(simulated(broken=broken), patience=Patience(pair_s=0.5)) as comparison:
        for tactic, says in {1: "illegal memory access", 2: "exit code 3", 3: "counts as hanging"}.items():
            bad = comparison.compare(8, (tactic, 50))
            assert bad.deviation == math.inf and says in bad.error
        assert comparison.compare(8, (4, 50)).error == ""


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (simulated(unable="it doesn't fit"), "it doesn't fit"),
        (ComparatorSpec("synth.collecting.numbers:Nothing"), "can't be run: AttributeError"),
        (ComparatorSpec("os:listdir", {"path": "/nowhere"}), "can't be run: FileNotFoundError"),
        (ComparatorSpec("os:_exit", {"status": 4}), "exit code 4"),
    ],
    ids=["unable", "no such", "no file", "died"],
)
def test_a_layer_that_cannot_be_run_says_nothing_of_its_tactics(spec: ComparatorSpec, says: str) -> None:
    with Comparison(spec) as comparison, pytest.raises(CannotCompare, match=says) as caught:
        comparison.compare(8, (3, 50))
    assert isinstance(caught.value, SynthError)
