from __future__ import annotations

import dataclasses
import gzip
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_timings import (
    H200,
    NEMOTRON,
    OLMOE,
    PASSES,
    TABLE,
    plain_rows,
    row_lists,
    text_of,
    timings_of,
    values,
)

from synth.errors import SynthError
from synth.timings.files import path_of, read, write
from synth.timings.folders import load, load_shapes, merge
from synth.timings.rows import Problem, Row
from synth.timings.table import ShapeTimings

SHIPPED = Path(__file__).parents[2] / "measurements"


def test_a_path_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SynthError, match="does not exist"):
        load(tmp_path / "nowhere")


def test_other_files_in_a_folder_are_not_read(tmp_path: Path) -> None:
    write(timings_of(plain_rows(3)), tmp_path)
    (tmp_path / "README.md").write_text("x")
    (tmp_path / ".half.csv.gz").write_bytes(b"x")
    assert [len(t) for t in load(tmp_path)] == [3]


def test_a_version_without_a_table_is_loaded_by_meaning(tmp_path: Path) -> None:
    origin = dataclasses.replace(H200, flashinfer="99.0.0")
    texts = {3: str(TABLE.tactic(0)), 7: str(TABLE.tactic(45)), 2: str(TABLE.tactic(1))}
    rows = [Row(1, 1, 1, 3, 1.0), Row(1, 2, 1, 7, 2.0), Row(1, 1, 4, 2, 3.0)]
    made = ShapeTimings.from_rows(origin, OLMOE, "olmoe", PASSES, rows, texts)
    path = write(made, tmp_path)
    (timings,) = load(tmp_path)
    meaning = [(str(timings.table.tactic(i)), ms) for i, ms in zip(timings.tactic, timings.ms, strict=True)]
    assert sorted(meaning) == sorted((texts[row.tactic], row.ms) for row in rows)
    assert [timings.table.stage(i) for i in timings.tactic] == timings.stage.tolist()
    problems: list[Problem] = []
    path.write_bytes(gzip.compress(text_of(made) + b"1,2,9,3,1.5,\n1,1,9,8,1.5,\n"))
    assert len(read(path, problems)) == 3
    assert [p.message for p in problems] == ["tactic 3 is one of gemm1, not gemm2", "unknown tactic id 8"]


def test_origins_are_kept_apart_and_can_be_picked(tmp_path: Path) -> None:
    fp8 = dataclasses.replace(H200, quant="fp8")
    other = dataclasses.replace(H200, device="NVIDIA H100")
    for origin in (H200, fp8, other):
        write(timings_of([Row(1, 1, 1, 0, 1.5)], origin), tmp_path)
    write(timings_of([Row(1, 1, 1, 0, 1.5)], H200, NEMOTRON), tmp_path)
    assert [t.origin for t in load(tmp_path)] == [other, H200, fp8]
    assert [t.origin for t in load(tmp_path, "NVIDIA H200")] == [H200, fp8]
    assert [t.origin for t in load(tmp_path, quant="bf16")] == [other, H200]
    assert load(tmp_path, flashinfer="0.7.3") == []
    (timings,) = load(tmp_path, "NVIDIA H200", "bf16")
    assert timings.shapes == (OLMOE, NEMOTRON)
    assert timings.shape.tolist() == [0, 1]


def test_the_same_file_twice_counts_once(tmp_path: Path) -> None:
    timings = timings_of([*plain_rows(30), *plain_rows(30, 1, 2)])
    one, two = write(timings, tmp_path / "a"), write(timings, tmp_path / "b")
    for roots in ([tmp_path], [one, two], [one, one], [tmp_path / "a", tmp_path / "b", tmp_path]):
        problems: list[Problem] = []
        (got,) = load_shapes(roots, problems=problems)
        assert values(got) == values(timings) and problems == []
        assert got.passes == PASSES


def test_a_pass_of_other_provenance_is_renumbered(tmp_path: Path) -> None:
    write(timings_of(plain_rows(30)), tmp_path / "a")
    write(timings_of(plain_rows(30, 1), passes={1: {"date": "2027"}}), tmp_path / "b")
    problems: list[Problem] = []
    (got,) = load_shapes([tmp_path / "a", tmp_path / "b"], problems=problems)
    assert problems == []
    assert got.passes == {**PASSES, 3: {"date": "2027"}}
    assert values(got) == values(timings_of([*plain_rows(30), *plain_rows(30, 1, 3)], passes=got.passes))
    # What was merged under a new number is recognised under its old one.
    again = merge([got, timings_of(plain_rows(30, 1), passes={1: {"date": "2027"}})])
    assert values(again) == values(got)


def test_two_runs_that_say_the_same_of_themselves_lose_nothing() -> None:
    rows = [Row(1, 1, 1, 0, 1.5), Row(1, 1, 1, 1, 2.5)]
    slower = [row._replace(ms=row.ms * 2) for row in rows]
    got = merge([timings_of(rows), timings_of(slower)])
    assert sorted(got.ms) == [1.5, 2.5, 3.0, 5.0]
    rest = merge([timings_of(rows[:1], passes={1: {}}), timings_of(rows[1:], passes={1: {}})])
    assert rest.passes == {1: {}} and len(rest) == 2
    apart = merge([timings_of(rows[:1], passes={1: {}}), timings_of([Row(2, 1, 1, 1, 2.5)], passes={2: {}})])
    assert apart.passes == {1: {}, 2: {}}


@settings(max_examples=40, deadline=None)
@given(row_lists(), row_lists(), st.booleans())
def test_merging_loses_nothing_and_is_done_once(a: list[Row], b: list[Row], same: bool) -> None:
    one, two = timings_of(a), timings_of(b, passes=PASSES if same else {1: {"x": 1}, 2: {"x": 2}})
    got = merge([one, two])
    outcomes = {(*v[1:],) for v in values(got)}
    assert outcomes == {(*v[1:],) for v in values(one) + values(two)}
    for again in (merge([got, one]), merge([got, two])):
        assert (values(again), again.passes) == (values(got), got.passes)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("device", "NVIDIA H100"),
        ("flashinfer", "0.7.3"),
        ("quant", "fp8"),
        ("policy", "{}"),
        ("simulated", True),
    ],
)
def test_merging_refuses_mixed_origins(tmp_path: Path, field: str, value: object) -> None:
    a = read(write(timings_of([]), tmp_path / "a"))
    b = read(write(timings_of([], dataclasses.replace(H200, **{field: value})), tmp_path / "b"))
    with pytest.raises(SynthError, match=f"{field} is .* in the first and .* in the second") as e:
        merge([a, b])
    assert str(a.path) in str(e.value) and str(b.path) in str(e.value) and "\n" not in str(e.value)


def test_merging_refuses_mixed_shapes_and_nothing() -> None:
    with pytest.raises(SynthError, match="shape is h2048-i1024-e64-k8 in the first"):
        merge([timings_of([]), timings_of([], shape=NEMOTRON)])
    with pytest.raises(SynthError, match="nothing to merge"):
        merge([])


def test_shipped_measurements_are_whole() -> None:
    problems: list[Problem] = []
    loaded = load(SHIPPED, "NVIDIA H200", flashinfer="0.7.4", problems=problems)
    assert problems == []
    by_quant = {timings.origin.quant: timings for timings in loaded}
    bf16, fp8 = by_quant["bf16"], by_quant["fp8"]
    assert bf16.origin == H200 and not fp8.origin.simulated
    assert len(bf16.shapes) >= 22 and len(fp8.shapes) >= 8
    assert len(bf16) >= 76608 and len(fp8) >= 18144
    for label, passes, rows in [
        ("olmoe", [1, 2, 3, 4], 9198),
        ("glm-5-tp8", [1, 2], 2646),
        ("mixtral-8x7b", [1], 2646),
        ("dbrx-tp8", [1, 2], 5292),
    ]:
        mine = bf16.select(bf16.shape == bf16.labels.index(label))
        assert sorted(set(mine.pass_.tolist())) == passes
        assert len(mine) == rows
    assert fp8.averaged().ms.min() > 0.001


def test_shipped_files_lie_where_their_heads_say_and_tell_their_origin() -> None:
    for timings in load_shapes(SHIPPED):
        assert timings.path == path_of(timings, SHIPPED)
        for provenance in timings.passes.values():
            assert {"date", "cuda", "torch", "driver", "source"} <= provenance.keys()
        assert not timings.origin.simulated
        assert gzip.decompress(timings.path.read_bytes()) == text_of(timings)
