from __future__ import annotations

import numpy as np
import pytest
from weak_spots import Kind, by_kind, kinds

from synth.performance.evaluation import Evaluation, Judge
from synth.timings.table import Timings


@pytest.fixture(scope="module")
def judge(few: Timings) -> Judge:
    return Judge(few)


def test_kinds_say_what_a_choice_is(judge: Judge) -> None:
    found = kinds(judge, judge.keys)
    labels = np.array([judge.timings.labels[i] for i in judge.keys[:, 0]])
    tokens = judge.keys[:, 2]
    assert (found["decode (up to 16 tokens)"] == (tokens <= 16)).all()
    assert (found["between (up to 2,048 tokens)"] == (tokens > 16)).all()
    assert set(labels[found["few large experts"]]) == {"mixtral-8x7b-tp4"}
    assert not found["one expert a token"].any() and not found["no gate (gemm1)"].any()
    # On one of four ranks gemm1 of qwen3-235b has 2 * 384 columns; all the others have more than 1,024.
    assert set(labels[found["narrow weights"]]) == {"qwen3-235b-tp4"}


def test_the_order_of_choices_does_not_matter(judge: Judge) -> None:
    turned = kinds(judge, judge.keys[::-1])
    for name, mine in kinds(judge, judge.keys).items():
        np.testing.assert_array_equal(turned[name][::-1], mine)


def test_near_ties_are_those_of_the_timings(judge: Judge) -> None:
    mine = kinds(judge, judge.keys)["near tie in truth"]
    for i in range(len(judge.keys)):
        best, second = np.sort(judge.timings.ms[judge.bucket == i])[:2]
        assert mine[i] == (second <= 1.005 * best)


def evaluation(judge: Judge, regrets: np.ndarray) -> Evaluation:
    return Evaluation("model", judge.keys, regrets, regrets, judge.timings.labels)


def test_regret_is_split_by_kind(judge: Judge) -> None:
    decode = judge.keys[:, 2] <= 16
    before = evaluation(judge, np.where(decode, 1.1, 1.0))
    after = evaluation(judge, np.where(decode, 1.01, 1.0))
    found = {k.name: k for k in by_kind(judge, {0.0: before, 0.05: after})}
    mine = found["decode (up to 16 tokens)"]
    assert mine.of_regret == pytest.approx(1.0) and mine.share == pytest.approx(decode.mean())
    assert mine.geomeans == pytest.approx((1.1, 1.01)) and mine.count == decode.sum()
    assert found["between (up to 2,048 tokens)"].of_regret == 0.0
    assert mine.fix() == "5 % of the sweep timed takes 90 % of it away"
    assert "geomeans" in mine.as_dict()


def test_what_timings_do_not_mend_is_said(judge: Judge) -> None:
    kind = Kind("k", 3, 0.1, 0.2, (0.0, 0.01, 0.05), (1.02, 1.02, 1.018))
    assert kind.fix() == "a feature or repeats: 5 % of the sweep timed takes 10 % of it away"
