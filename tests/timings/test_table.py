from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from made_timings import H200, NEMOTRON, plain_rows, row_lists, timings_of

from synth.errors import SynthError
from synth.timings.folders import combine
from synth.timings.origin import Origin
from synth.timings.rows import Row
from synth.timings.table import digest, times_by_bucket


@pytest.mark.parametrize(
    ("row", "what"),
    [
        (Row(3, 1, 1, 0, 1.0), "there is no pass 3"),
        (Row(1, 3, 1, 0, 1.0), "stage 3 is not 1 or 2"),
        (Row(1, 1, 0, 0, 1.0), "tokens 0 is not from 1"),
        (Row(1, 1, 1, 126, 1.0), "unknown tactic id 126"),
        (Row(1, 1, 1, 45, 1.0), "tactic 45 is one of gemm2, not gemm1"),
        (Row(1, 1, 1, 0, math.nan), "ms nan is not a positive"),
        (Row(1, 1, 1, 0, 1.0, error="x"), "both a time and an error"),
        (Row(1, 1, 1, 1, 2.0), "duplicate of pass 1, stage 1, tokens 1, tactic 1"),
    ],
)
def test_bad_rows_are_refused_when_timings_are_built(row: Row, what: str) -> None:
    with pytest.raises(SynthError, match=what):
        timings_of([Row(1, 1, 1, 1, 2.0), row])


def test_provenance_that_is_not_json_is_refused() -> None:
    with pytest.raises(SynthError, match="provenance"):
        timings_of([], passes={1: {"when": object()}})
    with pytest.raises(SynthError, match="policy"):
        Origin.make("NVIDIA H200", "sm90", "bf16", policy={"l2": math.nan})


def test_averaging_is_the_geometric_mean_of_what_can_be_trusted() -> None:
    passes = {n: {"n": n} for n in (1, 2, 3)}
    rows = [
        Row(1, 1, 1, 0, 2.0), Row(2, 1, 1, 0, 2.02), Row(3, 1, 1, 0, 99.0, throttled=True),
        Row(1, 1, 1, 1, 0.1 + 0.2),
        Row(1, 1, 1, 2, math.nan, error="x"), Row(2, 1, 1, 2, 3.0),
        Row(1, 1, 1, 3, math.nan, error="x"),
        Row(1, 1, 1, 4, 8.0, throttled=True), Row(2, 1, 1, 4, 8.0, throttled=True),
        Row(1, 2, 1, 45, 7.0),
    ]  # fmt: skip
    (timings,) = combine([timings_of(rows, passes=passes)])
    got = timings.averaged()
    assert got.tactic.tolist() == [0, 1, 2, 4, 45]
    assert got.stage.tolist() == [1, 1, 1, 1, 2]
    np.testing.assert_allclose(got.ms, [math.sqrt(2.0 * 2.02), 0.1 + 0.2, 3.0, 8.0, 7.0], rtol=1e-12)
    assert got.ms[1] == 0.1 + 0.2
    assert got.throttled.tolist() == [False, False, False, True, False]
    assert set(got.pass_.tolist()) == {0}
    only = timings.averaged(passes=[2])
    assert dict(zip(only.tactic.tolist(), only.ms.tolist(), strict=True)) == {0: 2.02, 2: 3.0, 4: 8.0}
    assert len(timings.averaged(passes=[9])) == len(timings.averaged(passes=[9]).buckets()[0]) == 0


@pytest.mark.parametrize(
    ("times", "merged", "repeats"),
    [
        ([2.0], 2.0, 1),
        ([2.0, 2.02], math.sqrt(2.0 * 2.02), 2),
        ([2.0, 2.6], 2.0, 1),
        ([2.6, 2.0, 2.02], math.sqrt(2.0 * 2.02), 2),
        ([2.0, 1.2, 2.0, 2.0], 2.0, 3),
    ],
)
def test_a_disturbed_repeat_counts_for_nothing(times: list[float], merged: float, repeats: int) -> None:
    rows = [Row(p, 1, 1, 0, ms) for p, ms in enumerate(times, 1)]
    (timings,) = combine([timings_of(rows, passes={p: {} for p in range(1, len(times) + 1)})])
    got, count = timings.merged()
    assert got.ms[0] == pytest.approx(merged)
    assert count.tolist() == [repeats]


@settings(max_examples=40, deadline=None)
@given(row_lists(), row_lists())
def test_buckets_group_every_row_and_the_last_time_of_a_cell_counts(a: list[Row], b: list[Row]) -> None:
    # Few distinct tokens, so that buckets have several rows.
    def narrowed(rows: list[Row]) -> list[Row]:
        return list({row.cell: row for row in (row._replace(tokens=row.tokens % 3 + 1) for row in rows)}.values())

    (timings,) = combine([timings_of(narrowed(a)), timings_of(narrowed(b), shape=NEMOTRON)])
    expected: dict[tuple[int, ...], dict[int, str]] = {}
    columns = (timings.shape, timings.stage, timings.tokens, timings.tactic, timings.ms)
    for *place, tactic, ms in zip(*(c.tolist() for c in columns), strict=True):
        expected.setdefault(tuple(place), {})[tactic] = repr(ms)
    keys, bucket = timings.buckets()
    assert [tuple(k) for k in keys.tolist()] == sorted(expected)
    np.testing.assert_array_equal(keys[bucket], np.stack([timings.shape, timings.stage, timings.tokens], axis=1))
    found = times_by_bucket(timings)
    assert {place: {t: repr(ms) for t, ms in times.items()} for place, times in found.items()} == expected


def test_digest_is_of_the_content() -> None:
    a, b = timings_of(plain_rows(30)), timings_of(plain_rows(30, 1), shape=NEMOTRON)
    (timings,) = combine([a, b])
    assert digest(timings) == digest(combine([b, a])[0])
    order = np.random.default_rng(0).permutation(len(timings))
    assert digest(timings.select(order)) == digest(timings)
    swapped = dataclasses.replace(
        timings, shapes=timings.shapes[::-1], labels=timings.labels[::-1], shape=1 - timings.shape
    )
    assert digest(swapped) == digest(timings)
    changed = timings.ms.copy()
    changed[3] = np.nextafter(changed[3], 1e9)
    others = [
        timings.select(order[1:]),
        dataclasses.replace(timings, ms=changed),
        dataclasses.replace(timings, shape=1 - timings.shape),
        dataclasses.replace(timings, origin=dataclasses.replace(H200, simulated=True)),
        dataclasses.replace(timings, throttled=~timings.throttled),
    ]
    assert len({digest(t) for t in [timings, *others]}) == 6
