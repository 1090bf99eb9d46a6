"""Rounds decided from real timings, replayed."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from synth.catalog.shapes import MoEShape
from synth.catalog.tactics import load_table
from synth.measurements import Origin, Timings, load
from synth.performance.model import PerformanceModel
from synth.performance.posterior import timed_of
from synth.performance.roofline import NEUTRAL, Roofline
from synth.planning import Layer, make_plan, timing_seconds
from synth.planning.picks import Pick, Seen, Strategy
from synth.planning.rounds import KnownDevice, NewDevice, Together, decide_by_rounds

BUCKETS = (1, 16, 256, 2048)
LABELS = ("olmoe", "qwen3-30b-a3b", "qwen3-235b-tp4", "mixtral-8x7b-tp4")
Times = dict[Pick, float]
#: A device of which nothing is known but its data sheet.
UNFITTED = PerformanceModel.analytic(
    Origin.make("NVIDIA H200", "sm90", "bf16"), load_table("sm90", "bf16", "0.7.4"), Roofline(NEUTRAL)
)


@pytest.fixture(scope="module")
def timings() -> Timings:
    (found,) = load(Path(__file__).parents[2] / "measurements", "NVIDIA H200", "bf16", problems=[])
    wanted = [found.labels.index(x) for x in LABELS]
    return found.select(np.isin(found.shape, wanted) & np.isin(found.tokens, BUCKETS) & (found.pass_ == 1))


@pytest.fixture(scope="module")
def layers(timings: Timings) -> list[Layer]:
    return [Layer.by_hand(timings.shapes[timings.labels.index(x)], "bf16", x) for x in LABELS]


@pytest.fixture(scope="module")
def times(timings: Timings, layers: list[Layer]) -> Times:
    index = {layer.shape: i for i, layer in enumerate(layers)}
    columns = (timings.shape, timings.stage, timings.tokens, timings.tactic, timings.ms)
    return {
        Pick(index[timings.shapes[s]], *rest): ms
        for s, *rest, ms in zip(*(c.tolist() for c in columns), strict=True)
    }  # fmt: skip


@pytest.fixture(scope="module")
def others(timings: Timings) -> PerformanceModel:
    """A model that has seen all layers but olmoe."""
    rest = timings.select(timings.shape != timings.labels.index("olmoe"))
    return PerformanceModel(choice_trees=8, time_trees=4).fit(rest)


def play(strategy: Strategy, times: Times, most: int, seconds: float = math.inf) -> tuple[list[Seen], list[int]]:
    """Return what was timed, and the sizes of the rounds."""
    seen: list[Seen] = []
    rounds = []
    while len(seen) < most and seconds > 0:
        picks = strategy.next(seen, most - len(seen), seconds)
        if not picks:
            break
        rounds.append(len(picks))
        seen += [Seen(p, times[p]) for p in picks]
        seconds -= sum(timing_seconds(times[p]) for p in picks)
    strategy.next(seen, 0, 0.0)
    return seen, rounds


def regret(chosen: list[Pick], times: Times) -> float:
    best: dict[tuple[int, int, int], float] = {}
    for pick, ms in times.items():
        best[pick[:3]] = min(ms, best.get(pick[:3], math.inf))
    return float(np.exp(np.mean([math.log(times[p] / best[p[:3]]) for p in chosen])))


def choices(strategy: KnownDevice, layer: int = 0) -> list[Pick]:
    return [
        Pick(layer, stage, int(p.tokens[row]), int(p.tactic[row]))
        for stage, p in strategy.belief(layer).stages.items()
        for row in p.chosen()
    ]


def test_a_few_timings_of_a_known_device_lower_the_regret(
    others: PerformanceModel, layers: list[Layer], times: Times
) -> None:
    mine = {p: ms for p, ms in times.items() if p.layer == 0}
    strategy = KnownDevice({"bf16": others}, layers[:1], BUCKETS)
    before = regret(choices(strategy), mine)
    seen, rounds = play(strategy, times, 50)
    assert len(seen) <= 50
    assert max(rounds) <= 16
    assert len({s.pick for s in seen}) == len(seen)
    assert regret(choices(strategy), mine) < 1.0 + 0.5 * (before - 1.0)


def test_a_layer_ends_when_little_regret_is_expected(
    others: PerformanceModel, layers: list[Layer], times: Times
) -> None:
    strategy = KnownDevice({"bf16": others}, layers[:1], BUCKETS, enough=0.002)
    seen, _ = play(strategy, times, 10_000)
    assert strategy.belief(0).expected_regret() < 0.002
    assert 0 < len(seen) < 200
    assert not strategy.next(seen, 10_000, math.inf)


def test_what_is_known_already_is_not_timed_again(
    others: PerformanceModel, layers: list[Layer], timings: Timings
) -> None:
    strategy = KnownDevice({"bf16": others}, layers[:1], BUCKETS, timings={"bf16": timings})
    known = timed_of(timings, layers[0].shape)
    assert not strategy.next([], 1000, math.inf)
    assert all((p.timed[p.chosen()] > 0).all() for p in strategy.belief(0).stages.values())
    assert set(known) == {1, 2}


def test_layers_get_equal_shares(others: PerformanceModel, layers: list[Layer], times: Times) -> None:
    for at_once in (1, 2):
        strategy = KnownDevice({"bf16": others}, layers, BUCKETS, enough=0.0, at_once=at_once)
        seen, _ = play(strategy, times, 80)
        assert Counter(s.pick.layer for s in seen) == dict.fromkeys(range(4), 20)


def test_seconds_bound_a_known_device_too(others: PerformanceModel, layers: list[Layer], times: Times) -> None:
    strategy = KnownDevice({"bf16": others}, layers[:2], BUCKETS, enough=0.0)
    seen, rounds = play(strategy, times, 10_000, seconds=0.5)
    spent = sum(timing_seconds(s.ms) for s in seen)
    assert 0.4 < spent < 0.5 + 0.1 * max(rounds)


def test_a_failed_tactic_is_neither_chosen_nor_asked_for_again(
    others: PerformanceModel, layers: list[Layer], times: Times
) -> None:
    strategy = KnownDevice({"bf16": others}, layers[:1], BUCKETS, enough=0.0)
    first = strategy.next([], 100, math.inf)
    seen = [Seen(p, math.nan) for p in first]
    more = strategy.next(seen, 100, math.inf)
    assert not set(first) & set(more)
    assert not set(first) & set(choices(strategy))


@pytest.mark.parametrize("seed", [0, 1])
def test_a_new_device_is_learned_from_nothing(layers: list[Layer], times: Times, seed: int) -> None:
    def run(most: int) -> float:
        strategy = NewDevice({"bf16": UNFITTED}, layers, BUCKETS, seed=seed)
        seen, rounds = play(strategy, times, most)
        assert len({s.pick for s in seen}) == len(seen) <= most
        assert len(rounds) > 1
        return regret(strategy.chosen(seen), times)

    few, many = run(60), run(240)
    assert many < 1.01
    assert many < few


def test_a_new_device_never_chooses_what_failed(layers: list[Layer], times: Times) -> None:
    strategy = NewDevice({"bf16": UNFITTED}, layers[:1], BUCKETS)
    seen: list[Seen] = []
    for _ in range(3):
        seen += [Seen(p, math.nan if p.tactic % 3 == 0 else times[p]) for p in strategy.next(seen, 40, math.inf)]
    failed = {s.pick for s in seen if math.isnan(s.ms)}
    assert failed
    assert not failed & set(strategy.chosen(seen))
    assert not {s.pick for s in seen} & set(strategy.next(seen, 40, math.inf))


def test_the_same_seed_gives_the_same_rounds(layers: list[Layer], times: Times) -> None:
    a, b = (
        play(NewDevice({"bf16": UNFITTED}, layers, BUCKETS, seed=3), times, 60)[0] for _ in range(2)
    )  # fmt: skip
    assert a == b


def test_models_decide_which_strategy_serves_a_layer(others: PerformanceModel, layers: list[Layer]) -> None:
    fp8 = Layer.by_hand(MoEShape(2048, 1024, 64, 8), "fp8")
    both = make_plan([layers[0], fp8], "NVIDIA H200", "sm90", buckets=BUCKETS)
    assert isinstance(decide_by_rounds(both, {}), NewDevice)
    assert isinstance(decide_by_rounds(both, {"bf16": others, "fp8": others}), KnownDevice)
    together = decide_by_rounds(both, {"bf16": others})
    assert isinstance(together, Together)
    asked: set[int] = set()
    seen: list[Seen] = []
    while picks := together.next(seen, 400 - len(seen), math.inf):
        asked |= {p.layer for p in picks}
        seen += [Seen(p, 1.0 + 0.01 * p.tactic) for p in picks]
    assert asked == {0, 1}
    assert len(seen) <= 400
