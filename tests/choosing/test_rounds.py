"""Rounds decided from real timings, replayed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from synth.catalog.shapes import MoEShape
from synth.choosing.picks import Pick, Seen, Strategy
from synth.choosing.plan import Layer, make_plan, timing_seconds
from synth.choosing.rounds import KnownDevice, NewDevice, Together, decide_by_rounds
from synth.flashinfer.tactics import load_table
from synth.performance.model import Cells, PerformanceModel
from synth.performance.posterior import timed_of
from synth.performance.roofline import NEUTRAL, Roofline
from synth.timings.folders import load
from synth.timings.origin import Origin
from synth.timings.table import Timings

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


# --- turns -----------------------------------------------------------------------------------------------------------

TURNS = ([0, 1], [2], [3])


def in_turn(seen: list[Seen], turns: Sequence[Sequence[int]]) -> list[int]:
    """Return the turn of each timing."""
    return [n for s in seen for n, turn in enumerate(turns) if s.pick.layer in turn]


def test_each_turn_ends_at_its_part_of_the_budget_and_none_comes_again(layers: list[Layer], times: Times) -> None:
    strategy = NewDevice({"bf16": UNFITTED}, layers, BUCKETS, turns=TURNS)
    seen, _ = play(strategy, times, 120)
    order = in_turn(seen, TURNS)
    # A layer that has been left isn't set up again.
    assert order == sorted(order)
    assert Counter(order) == {0: 60, 1: 30, 2: 30}
    # Each layer was timed in every stage and bucket.
    assert {s.pick[:3] for s in seen} == {p[:3] for p in times}


def test_seconds_are_divided_among_turns_as_timings_are(layers: list[Layer], times: Times) -> None:
    budget = 0.8
    strategy = NewDevice({"bf16": UNFITTED}, layers, BUCKETS, turns=TURNS)
    seen, rounds = play(strategy, times, 10_000, seconds=budget)
    order = in_turn(seen, TURNS)
    assert order == sorted(order)
    spent = np.cumsum(np.bincount(order, [timing_seconds(s.ms) for s in seen], minlength=3))
    longest = max(rounds) * max(timing_seconds(s.ms) for s in seen)
    # A round is begun as long as there is time left.
    assert (np.abs(spent - budget * np.array([0.5, 0.75, 1.0])) < longest).all()
    assert spent[0] < 0.7 * budget


def test_what_one_turn_does_not_need_is_left_to_the_next(layers: list[Layer], times: Times) -> None:
    turns = ([0], [1, 2, 3])
    most = 200
    strategy = NewDevice({"bf16": UNFITTED}, layers, BUCKETS, turns=turns)
    seen, _ = play(strategy, times, most)
    counts = Counter(in_turn(seen, turns))
    assert counts[0] < most / 2 < counts[1]
    # All that is left is spent, since there was something worth timing.
    assert sum(counts.values()) == most
    assert regret(strategy.chosen(seen), times) < 1.02


def test_turns_end_where_nothing_is_worth_timing(layers: list[Layer], times: Times) -> None:
    counts = (1, 256)
    mine = {p: ms for p, ms in times.items() if p.layer < 2 and p.tokens in counts}
    strategy = NewDevice({"bf16": UNFITTED}, layers[:2], counts, turns=([0], [1]))
    seen, _ = play(strategy, mine, len(mine))
    assert len(seen) < len(mine) / 2
    assert not strategy.next(seen, len(mine), math.inf)
    assert regret(strategy.chosen(seen), mine) < 1.02


def test_layers_that_are_there_to_teach_get_no_more_than_it_takes(
    layers: list[Layer], times: Times, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("synth.choosing.rounds._LATER", 12)
    strategy = NewDevice({"bf16": UNFITTED}, layers, BUCKETS, turns=TURNS)
    seen, _ = play(strategy, times, 120)
    assert Counter(in_turn(seen, TURNS)) == {0: 60, 1: 12, 2: 12}


def test_layers_in_no_turn_are_not_timed(layers: list[Layer], times: Times) -> None:
    strategy = NewDevice({"bf16": UNFITTED}, layers, BUCKETS, turns=([1], [3]))
    seen, _ = play(strategy, times, 60)
    assert {s.pick.layer for s in seen} == {1, 3}


def test_turns_of_another_quantization_take_nothing(layers: list[Layer], times: Times) -> None:
    """Turns number the layers of all quantizations."""
    fp8 = [Layer.by_hand(layer.shape, "fp8") for layer in layers[:2]]
    strategy = NewDevice({"bf16": UNFITTED}, [*layers, *fp8], BUCKETS, turns=([0], [4], [5], [1]))
    seen, _ = play(strategy, times, 60)
    counts = Counter(s.pick.layer for s in seen)
    assert counts == {0: 30, 1: 30}


def test_a_quantization_without_need_leaves_its_share_to_the_others(layers: list[Layer], times: Times) -> None:
    (found,) = load(Path(__file__).parents[2] / "measurements", "NVIDIA H200", "fp8", problems=[])
    olmoe = found.shapes[found.labels.index("olmoe")]
    mine = found.select(
        (found.shape == found.labels.index("olmoe")) & np.isin(found.tokens, BUCKETS) & (found.pass_ == 1)
    )
    starts = {
        "bf16": UNFITTED,
        "fp8": PerformanceModel.analytic(Origin.make("NVIDIA H200", "sm90", "fp8"), load_table("sm90", "fp8", "0.7.4")),
    }
    both = [*layers, Layer.by_hand(olmoe, "fp8")]
    columns = (mine.stage, mine.tokens, mine.tactic, mine.ms)
    real = {Pick(4, *rest): ms for *rest, ms in zip(*(c.tolist() for c in columns), strict=True)}
    # What is timed of bf16 is what was believed of it: nothing is left to learn there.
    cells = Cells(
        [layer.shape for layer in layers],
        *np.array([[p.layer, p.stage, p.tokens, p.tactic] for p in times], dtype=np.int64).T,
    )
    believed = dict(zip(times, UNFITTED.predict(cells).ms.tolist(), strict=True))
    most = 160
    seen, _ = play(NewDevice(starts, both, BUCKETS), {**believed, **real}, most)
    counts = Counter(both[s.pick.layer].quant for s in seen)
    # Of five layers as large one is of fp8.
    assert counts["fp8"] > 1.5 * most / 5
