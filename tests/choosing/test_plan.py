from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synth.catalog.models import find_model
from synth.catalog.shapes import MoEShape
from synth.choosing.plan import (
    SLOW,
    Batch,
    Layer,
    Plan,
    depth_for,
    estimate_memory,
    make_plan,
    rank_costs,
    summarize,
    take,
    timing_seconds,
    worth,
)
from synth.errors import SynthError, UnsupportedShapeError
from synth.flashinfer.tactics import load_table

OLMOE = Layer.of(find_model("olmoe").deploy(1, 1, "bf16"))
TINY = Layer.by_hand(MoEShape(512, 256, 8, 2), "fp8")


def plan(layers: tuple[Layer, ...] = (OLMOE,), **options: object) -> Plan:
    options.setdefault("buckets", (1, 16, 256))
    return make_plan(layers, "NVIDIA H200", "sm90", **options)  # type: ignore[arg-type]


def by_id(shape: MoEShape, quant: str, stage: int, tokens: int, ids: list[int]) -> list[float]:
    """Predict that the higher the id, the faster the tactic."""
    return [1.0 / (1 + i) for i in ids]


def test_a_full_sweep_has_every_tactic_of_every_bucket_once() -> None:
    cells = list(plan((OLMOE, TINY)).cells())
    for layer in (OLMOE, TINY):
        table = load_table("sm90", layer.quant)
        expected = {(stage, m, i) for stage in (1, 2) for m in (1, 16, 256) for i in table.ids(stage)}
        assert Counter((c.stage, c.tokens, c.tactic) for c in cells if c.layer == layer) == Counter(expected)


def test_buckets_are_flashinfers_up_to_8192_by_default() -> None:
    counts = {b.tokens for b in plan(buckets=None).batches}
    assert len(counts) == 21 and max(counts) == 8192
    assert max(b.tokens for b in plan(buckets=None, max_tokens=512).batches) == 512


def test_a_fraction_takes_the_predicted_fastest_of_every_bucket() -> None:
    made = plan(fraction=0.1, predict=by_id)
    got = {(b.stage, b.tokens): b.tactics[: b.limit] for b in made.batches}
    for tokens in (1, 16, 256):
        assert got[1, tokens] == (44, 43, 42, 41, 40)
        assert got[2, tokens] == (125, 124, 123, 122, 121, 120, 119, 118, 117)


def test_without_a_prediction_a_fraction_visits_every_tactic() -> None:
    made = plan(fraction=0.1, buckets=None)
    for stage in (1, 2):
        seen = {c.tactic for c in made.cells() if c.stage == stage}
        assert seen == set(load_table("sm90", "bf16").ids(stage))


def test_a_prediction_of_none_is_no_prediction() -> None:
    def nothing(*_: object) -> None:
        return None

    assert list(plan(fraction=0.1, predict=nothing).cells()) == list(plan(fraction=0.1).cells())


def test_a_layer_named_twice_is_timed_once_under_its_first_name() -> None:
    twin = Layer.by_hand(OLMOE.shape, "bf16", "twin")
    assert plan((OLMOE, TINY, twin)).layers == (OLMOE, TINY)


def test_passes_repeat_everything() -> None:
    cells = Counter(c.pass_ for c in plan(passes=(2, 3)).cells())
    assert cells[2] == cells[3] == len(plan())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": ()}, "nothing to time"),
        ({"fraction": 0.0}, "--fraction 0"),
        ({"fraction": 1.5}, "--fraction 1.5"),
        ({"fraction": math.nan}, "--fraction nan"),
        ({"budget_s": 0.0}, "--budget 0"),
        ({"budget_s": math.inf}, "--budget inf"),
        ({"passes": ()}, "passes"),
        ({"passes": (1, 1)}, "passes 1, 1"),
        ({"passes": (0,)}, "passes 0"),
        ({"buckets": ()}, "--buckets"),
        ({"buckets": (0, 4)}, "--buckets"),
        ({"max_tokens": 0, "buckets": None}, "maximum token count"),
    ],
)
def test_bad_requests_are_refused_in_words(options: dict[str, object], message: str) -> None:
    with pytest.raises(SynthError, match=message):
        plan(**options)  # type: ignore[arg-type]


def test_a_shape_without_a_kernel_is_refused() -> None:
    with pytest.raises(UnsupportedShapeError, match="pad it to"):
        plan((Layer.by_hand(MoEShape(2048, 100, 8, 2), "fp8"),))


def test_an_activation_must_fit_the_shape() -> None:
    with pytest.raises(SynthError, match="has no gate"):
        Layer(MoEShape(512, 256, 8, 2), "bf16", "x", "relu2")
    assert Layer.by_hand(MoEShape(512, 256, 8, 2, gated=False), "bf16").activation == "relu2"


def test_plans_share_a_journal_however_much_of_them_is_timed() -> None:
    same = [plan(), plan(fraction=0.2), plan(budget_s=9), plan(fraction=0.5, predict=by_id), plan(seed=3)]
    assert len({p.journal_path(Path("m")) for p in same}) == 1
    others = [plan(passes=(2,)), plan(buckets=(1,)), plan((TINY,)), plan((OLMOE, TINY)), plan(policy={"x": 1})]
    assert len({p.identity for p in [plan(), *others]}) == 6
    assert plan().journal_path(Path("m")).name.startswith("nvidia-h200-olmoe-bf16-")


def test_the_order_of_timing_is_shuffled_and_always_the_same() -> None:
    made = plan()
    first, second = made.batches[:2]
    order = made.order(first, first.tactics)
    assert sorted(order) == sorted(first.tactics)
    assert order != sorted(order)
    assert order == made.order(first, tuple(reversed(first.tactics)))
    assert order != made.order(second, second.tactics)


def test_the_reference_is_a_cell_of_the_middle_bucket() -> None:
    made = plan(predict=by_id)
    assert made.reference(0) == (1, 16, 44)


@given(st.lists(st.lists(st.floats(0.001, 5), max_size=12), max_size=12), st.floats(0, 100))
def test_what_a_depth_takes_fits(costs: list[list[float]], seconds: float) -> None:
    depth = depth_for(seconds, rank_costs(costs))
    total = sum(map(sum, costs))
    if math.isinf(depth):
        assert total <= seconds * (1 + 1e-9) + 1e-9
        return
    whole = sum(sum(c[: int(depth)]) for c in costs)
    more = sum(sum(c[: int(depth) + 1]) for c in costs)
    assert whole <= seconds * (1 + 1e-9) + 1e-9
    assert more >= seconds * (1 - 1e-9) - 1e-9


def test_a_depth_between_two_gives_some_batches_one_more() -> None:
    batches = [Batch(0, 1, 1, m, tuple(range(9)), (1.0,) * 9, 9) for m in range(1, 2001)]
    taken = [take(b, 3.25) for b in batches]
    assert set(taken) == {3, 4}
    assert 0.2 < taken.count(4) / len(taken) < 0.3
    assert taken == [take(b, 3.25) for b in batches]
    assert all(take(b, 3.9) >= n for b, n in zip(batches, taken, strict=True))


def test_under_a_budget_hopeless_candidates_are_left_out() -> None:
    batch = Batch(0, 1, 1, 4, (5, 6, 7), (1.0, SLOW, SLOW * 1.01), 3)
    assert worth(batch, budget=True) == 2
    assert worth(batch, budget=False) == 3


def test_a_summary_stays_within_its_budget() -> None:
    summary = summarize(plan((OLMOE, TINY), buckets=None, budget_s=10.0), gpus=2)
    assert 18 < summary.measuring_s <= 20.5
    assert 0 < summary.cells < summary.of_cells
    assert summary.cells == sum(layer.cells for layer in summary.layers)


def test_a_summary_of_everything() -> None:
    made = plan((OLMOE, TINY))
    summary = summarize(made)
    assert summary.cells == summary.of_cells == len(made)
    assert summary.measuring_s == pytest.approx(sum(timing_seconds(ms) for b in made.batches for ms in b.ms))
    assert summary.wall_s == summary.measuring_s + summary.setup_s
    assert summary.as_dict()["layers"][0]["label"] == "olmoe"


def test_shipped_sweeps_were_as_long_as_predicted() -> None:
    from synth.timings.folders import load

    root = Path(__file__).parents[2] / "measurements"
    checked = 0
    for timings in load(root, device="NVIDIA H200", problems=[]):
        for i, shape in enumerate(timings.shapes):
            rows = timings.select((timings.shape == i) & (timings.pass_ == 1)).averaged()
            layer = Layer.by_hand(shape, timings.origin.quant)
            counts = sorted(set(rows.tokens.tolist()))
            if len(counts) < 10:
                continue
            made = make_plan([layer], "NVIDIA H200", "sm90", buckets=counts)
            cells = {(c.stage, c.tokens, c.tactic) for c in made.cells()}
            known = set(zip(rows.stage.tolist(), rows.tokens.tolist(), rows.tactic.tolist(), strict=True))
            if cells != known:
                continue
            true = sum(timing_seconds(ms) for ms in rows.ms.tolist())
            assert 0.5 < summarize(made).measuring_s / true < 2, str(shape)
            checked += 1
    assert checked >= 20


def test_memory_is_weights_and_what_grows_with_tokens() -> None:
    shape = MoEShape(4096, 1536, 128, 8)
    weights = 128 * (3072 * 4096 + 4096 * 1536) * 2
    assert weights < estimate_memory(shape, "bf16", 1) < weights * 1.001
    growth = estimate_memory(shape, "bf16", 8192) - weights
    assert 2 * 8192 * 8 * (4096 + 3072) * 2 < growth < 4 * 8192 * 8 * (4096 + 3072) * 2
    assert estimate_memory(shape, "fp8", 1) * 1.9 < estimate_memory(shape, "bf16", 1)
    assert estimate_memory(shape, "nvfp4", 1) * 3.5 < estimate_memory(shape, "bf16", 1)
