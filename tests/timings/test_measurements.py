from __future__ import annotations

import dataclasses
import gzip
import math
import random
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synth.catalog.shapes import MoEShape
from synth.errors import SynthError
from synth.flashinfer.tactics import load_table
from synth.timings import measurements
from synth.timings.measurements import (
    DEFAULT_POLICY,
    MeasurementWarning,
    Origin,
    Problem,
    Row,
    ShapeTimings,
    append,
    combine,
    digest,
    dumps,
    import_table,
    load,
    load_shapes,
    merge,
    path_of,
    read,
    read_table,
    write,
)

SHIPPED = Path(__file__).parents[2] / "measurements"
H200 = Origin.make("NVIDIA H200", "sm90", "bf16")
OLMOE = MoEShape(2048, 1024, 64, 8)
NEMOTRON = MoEShape(2688, 1856, 128, 6, 2, False)
PASSES = {1: {"date": "2026-12-01", "driver": "580"}, 2: {"date": "2026-12-02", "driver": "580"}}
TABLE = load_table("sm90", "bf16")
HEADER = b"pass,stage,tokens,tactic,ms,note\n"
FLAT = "pass,shape,dtype,hidden,inter,experts,top_k,ep_size,gated,stage,tokens,tactic,ms"

times = st.floats(min_value=1e-6, max_value=1e6)


@st.composite
def row_lists(draw: st.DrawFn) -> list[Row]:
    cells = draw(
        st.lists(
            st.tuples(st.sampled_from([1, 2]), st.integers(1, 2**31 - 1), st.integers(0, len(TABLE) - 1)),
            unique=True,
            max_size=12,
        )
    )
    rows = []
    for pass_, tokens, tactic in cells:
        error = draw(st.none() | st.text(max_size=20))
        ms = draw(times) if error is None else math.nan
        throttled = error is None and draw(st.booleans())
        rows.append(Row(pass_, TABLE.stage(tactic), tokens, tactic, ms, throttled, error))
    return rows


def timings_of(
    rows: list[Row], origin: Origin = H200, shape: MoEShape = OLMOE, passes: dict[int, dict[str, object]] | None = None
) -> ShapeTimings:
    return ShapeTimings.from_rows(origin, shape, "olmoe", PASSES if passes is None else passes, rows)


def plain_rows(count: int, seed: int = 0, pass_: int = 1) -> list[Row]:
    rng = random.Random(seed)
    cells = rng.sample([(tokens, tactic) for tokens in (1, 2, 4, 512) for tactic in range(len(TABLE))], count)
    return [Row(pass_, TABLE.stage(t), tokens, t, round(rng.uniform(0.01, 2), 6)) for tokens, t in cells]


def values(timings: ShapeTimings) -> list[tuple[object, ...]]:
    return [(*row.cell, repr(row.ms), row.throttled, row.error) for row in timings.rows()]


def text_of(timings: ShapeTimings) -> bytes:
    return gzip.decompress(dumps(timings))


def read_bytes(data: bytes) -> tuple[ShapeTimings, list[Problem]]:
    """Read a file of these bytes."""
    problems: list[Problem] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.csv.gz"
        path.write_bytes(data)
        return read(path, problems), problems


def read_text(text: bytes) -> tuple[ShapeTimings, list[Problem]]:
    return read_bytes(gzip.compress(text, 1))


@pytest.fixture
def strict_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


# --- round trips -----------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(row_lists(), st.randoms(use_true_random=False))
def test_round_trip_keeps_every_row_and_the_bytes_ignore_row_order(rows: list[Row], rng: random.Random) -> None:
    timings = timings_of(rows)
    shuffled = rows[:]
    rng.shuffle(shuffled)
    data = dumps(timings)
    assert data == dumps(timings_of(shuffled))
    with tempfile.TemporaryDirectory() as folder:
        path = write(timings, folder)
        problems: list[Problem] = []
        (again,) = load_shapes(folder, problems=problems)
        assert path == path_of(timings, Path(folder)) == again.path
        assert path.read_bytes() == data == dumps(again)
    assert problems == []
    assert (again.origin, again.shape, again.label, again.passes) == (H200, OLMOE, "olmoe", PASSES)
    assert again.tactics == {row.tactic: str(TABLE.tactic(row.tactic)) for row in rows}
    expected = [row._replace(error=None if row.error is None else one_line(row.error)) for row in rows]
    assert values(again) == values(timings_of(expected))


def one_line(text: str) -> str:
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def test_file_is_where_the_schema_says(tmp_path: Path) -> None:
    origin = Origin.make("NVIDIA RTX PRO 6000 (Blackwell)", "sm120", "nvfp4")
    path = write(ShapeTimings.from_rows(origin, NEMOTRON, "nano", {}, []), tmp_path)
    expected = "nvidia-rtx-pro-6000-blackwell/flashinfer-0.7.4/nvfp4/h2688-i1856-e128-k6-ep2-ungated.csv.gz"
    assert str(path.relative_to(tmp_path)) == expected


def test_long_errors_are_shortened_and_read_back() -> None:
    timings = timings_of([Row(1, 1, 1, 0, math.nan, error='CUDA "error",\n' * 20000)])
    again, problems = read_bytes(dumps(timings))
    assert problems == []
    assert len(again.errors[0]) == 1000
    assert again.errors[0].startswith('CUDA "error", CUDA "error",')
    assert np.isnan(again.ms).all()


def test_gzip_head_holds_no_time_and_no_name() -> None:
    # Flags 0: no name; then four bytes of time.
    assert dumps(timings_of([]))[3:8] == b"\0\0\0\0\0"


def test_whole_table_and_row_by_row_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    text = text_of(timings_of(plain_rows(300)))
    fast, _ = read_text(text)
    monkeypatch.setattr(measurements, "_plain_columns", lambda *_: None)
    slow, problems = read_text(text)
    assert problems == []
    assert values(fast) == values(slow)
    assert dumps(fast) == dumps(slow)


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


@pytest.mark.parametrize(
    ("field", "value"),
    [("device", "…"), ("device", "a\nb"), ("arch", "90"), ("quant", "int4"), ("flashinfer", "../../etc")],
)
def test_an_origin_that_is_none_is_refused(field: str, value: str) -> None:
    with pytest.raises(SynthError, match=field):
        dataclasses.replace(H200, **{field: value})


def test_provenance_that_is_not_json_is_refused() -> None:
    with pytest.raises(SynthError, match="provenance"):
        timings_of([], passes={1: {"when": object()}})
    with pytest.raises(SynthError, match="policy"):
        Origin.make("NVIDIA H200", "sm90", "bf16", policy={"l2": math.nan})


# --- damage ----------------------------------------------------------------------------------------------------------


def test_gzip_cut_at_any_byte_keeps_every_row_before_the_cut(tmp_path: Path) -> None:
    timings = timings_of([*plain_rows(40), Row(2, 1, 1, 0, math.nan, error="out of, memory")])
    data, whole = dumps(timings), text_of(timings)
    first = whole.index(HEADER) + len(HEADER)
    path = tmp_path / "x.csv.gz"
    refused = kept = 0
    for cut in range(len(data)):
        path.write_bytes(data[:cut])
        problems: list[Problem] = []
        try:
            got = read(path, problems)
        except SynthError as e:
            assert str(path) in str(e) and "\n" not in str(e)
            refused += 1
            continue
        text = partly_unpacked(data[:cut])
        lines = text[first:].count(b"\n")
        assert len(text) >= first
        assert values(got) == values(timings)[:lines]
        assert [p.row for p in problems] == [text.count(b"\n") + 1]
        assert "cut short" in str(problems[0])
        kept += 1
    assert refused > 100 and kept > 100
    assert partly_unpacked(data) == whole


def partly_unpacked(data: bytes) -> bytes:
    out = bytearray()
    with tempfile.TemporaryFile() as raw:
        raw.write(data)
        raw.seek(0)
        with gzip.GzipFile(fileobj=raw) as f:
            try:
                while piece := f.read1(1):
                    out += piece
            except EOFError:
                pass
    return bytes(out)


@settings(max_examples=60, deadline=None)
@given(row_lists(), st.floats(0, 1))
def test_text_cut_anywhere_loses_only_the_torn_line(rows: list[Row], where: float) -> None:
    timings = timings_of(rows)
    text = text_of(timings)
    first = text.index(HEADER) + len(HEADER)
    cut = first + round(where * (len(text) - first))
    got, problems = read_text(text[:cut])
    whole_lines = text[first:cut].count(b"\n")
    expected = [v for v, _ in zip(values(read_text(text)[0]), range(whole_lines), strict=False)]
    assert values(got) == expected
    torn = not text[:cut].endswith(b"\n")
    assert [p.row for p in problems] == [text[:cut].count(b"\n") + 1] * torn


garbage = (
    st.binary(min_size=1, max_size=30)
    .map(lambda b: b.replace(b"\n", b"?"))
    .filter(lambda b: b.strip(b"\r"))
    .map(lambda b: b"!" + b)
) | st.sampled_from(
    [b"# {", b",,,,,", b'"', b'1,1,1,0,1.5,"', b"\xff", b"1,1,1,0,", b"\0", b"1,1,1,0,1,,", HEADER.strip()]
)


@settings(max_examples=80, deadline=None)
@given(row_lists(), st.lists(garbage, min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_garbage_lines_cost_no_good_row(rows: list[Row], junk: list[bytes], rng: random.Random) -> None:
    timings = timings_of(rows)
    head, body = text_of(timings).split(HEADER)
    lines = [(line, False) for line in body.split(b"\n")[:-1]]
    for line in junk:
        lines.insert(rng.randint(0, len(lines)), (line, True))
    got, problems = read_text(head + HEADER + b"".join(line + b"\n" for line, _ in lines))
    assert values(got) == values(read_text(head + HEADER + body)[0])
    first_row = head.count(b"\n") + 2
    assert [p.row for p in problems] == [n for n, (_, bad) in enumerate(lines, first_row) if bad]
    for problem in problems:
        line = str(problem)
        assert line.startswith(f"{problem.path}:{problem.row}: ") and line.endswith("; the row is left out")
        assert line.isprintable() and len(line) < 300


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 19), st.integers(0, 4), st.integers(0, 3))
def test_a_row_with_swapped_columns_is_left_out(index: int, ms_or_note: int, number: int) -> None:
    timings = timings_of([row._replace(ms=row.ms + 0.5) for row in plain_rows(20)])
    head, body = text_of(timings).split(HEADER)
    lines = [line.split(b",") for line in body.split(b"\n")[:-1]]
    other = 5 if ms_or_note == 4 else 4
    lines[index][number], lines[index][other] = lines[index][other], lines[index][number]
    got, problems = read_text(head + HEADER + b"".join(b",".join(line) + b"\n" for line in lines))
    assert [p.row for p in problems] == [head.count(b"\n") + 2 + index]
    assert values(got) == values(timings)[:index] + values(timings)[index + 1 :]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("1,1,8,0,x,", "ms 'x' is not a number"),
        ("1,1,8,0,0,", "not a positive, finite time"),
        ("1,1,8,0,-1.5,", "not a positive, finite time"),
        ("1,1,8,0,inf,", "not a positive, finite time"),
        ("1,1,8,0,1e999,", "not a positive, finite time"),
        ("1,1,8,0,nan,", "not a positive, finite time"),
        ("1,1,8,0,1_0,", "is not a number"),
        ("1,1,8,0,,", "neither a time nor an error"),
        ("1,1,8,0,1.5,error: x", "both a time and an error"),
        ("1,1,8,0,1.5,hot", "note 'hot' is not"),
        ("1,1,8,0,1.5,1", "note '1' is not"),
        ("1,1,8,0,1.5", "has 5 columns, not 6"),
        ("1,1,8,0,1.5,,", "has 7 columns, not 6"),
        ("1,3,8,0,1.5,", "stage 3 is not 1 or 2"),
        ("1,0,8,0,1.5,", "stage 0 is not 1 or 2"),
        ("1,1,0,0,1.5,", "tokens 0 is not from 1"),
        ("1,1,-8,0,1.5,", "tokens -8 is not from 1"),
        ("1,1,8.0,0,1.5,", "tokens '8.0' is not a whole number"),
        ("1,1,99999999999999999999,0,1.5,", "is not a whole number"),
        ("1,1,9999999999,0,1.5,", "tokens 9999999999 is not from 1"),
        ("1,1,8,126,1.5,", "unknown tactic id 126"),
        ("1,1,8,-1,1.5,", "unknown tactic id -1"),
        ("1,2,8,44,1.5,", "tactic 44 is one of gemm1, not gemm2"),
        ("1,1,8,45,1.5,", "tactic 45 is one of gemm2, not gemm1"),
        ("3,1,8,0,1.5,", "there is no pass 3"),
        ("1,1,1,0,1.5,", "duplicate of pass 1, stage 1, tokens 1, tactic 0"),
    ],
)
def test_each_kind_of_bad_row_says_what_is_wrong(line: str, what: str) -> None:
    good = timings_of([Row(1, 1, 1, 0, 1.25), Row(1, 2, 1, 45, 2.5)])
    got, problems = read_text(text_of(good) + line.encode() + b"\n")
    assert values(got) == values(good)
    assert len(problems) == 1 and what in problems[0].message


def test_gzip_files_joined_end_to_end_are_read_whole() -> None:
    text = text_of(timings_of(plain_rows(20)))
    got, problems = read_bytes(gzip.compress(text[:-50]) + gzip.compress(text[-50:]) + b"\0" * 8)
    assert len(got) == 20 and problems == []


def test_a_line_from_another_system_and_empty_lines_are_no_problem() -> None:
    good = timings_of(plain_rows(5))
    got, problems = read_text(text_of(good).replace(b"\n", b"\r\n") + b"\r\n\r\n")
    assert values(got) == values(good) and problems == []


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_damaged_bytes_never_crash(data: st.DataObject) -> None:
    raw = bytearray(dumps(timings_of(plain_rows(20))))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        got, _ = read_bytes(bytes(raw))
    except SynthError as e:
        assert "x.csv.gz" in str(e) and str(e).isprintable()
    else:
        assert len(got) <= 20


def test_a_wrong_digit_in_the_gzip_data_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "x.csv.gz"
    data = bytearray(dumps(timings_of(plain_rows(20))))
    data[-6] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(SynthError, match=r"x\.csv\.gz: its gzip data is damaged .*; copy it again or remove it"):
        read(path)


def test_problems_are_warnings_where_nobody_collects_them(tmp_path: Path) -> None:
    path = tmp_path / "x.csv.gz"
    path.write_bytes(gzip.compress(text_of(timings_of(plain_rows(3))) + b"1,1\n"))
    with pytest.warns(MeasurementWarning, match="has 2 columns, not 6; the row is left out"):
        (timings,) = load(path)
    assert len(timings) == 3


# --- heads -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ('"schema": 1', '"schema": 2', "has schema 2.*update synth"),
        ('"schema": 1', '"version": 1', "no schema"),
        ('"label": "olmoe"', '"name": "olmoe"', "lacks label"),
        ('"label": "olmoe"', '"label": 1', "label is not text"),
        ('"simulated": false', '"simulated": 0', "simulated is not true or false"),
        ('"simulated": false', '"simulated": false, "x": 1', "unknown key 'x'"),
        ('"quant": "bf16"', '"quant": "int4"', "quant 'int4'"),
        ('"shape": "h2048', '"shape": "H2048', "is not a shape"),
        ('"flashinfer": "0.7.4"', '"flashinfer": "../0.7.4"', "flashinfer"),
        ('"date": "2026-12-01"', '"date": NaN', "not JSON"),
        ('"1": {', '"01": {', "passes has a bad entry '01'"),
        ('"0": "tma90', '"0": "tma91', "tactic id 0 is given as .tma91.* but FlashInfer 0.7.4 has .tma90"),
        ('"0": "tma90', '"999": "tma90', "tactic id 999 .* no such id"),
        ("# {", "{", "is not a measurements file"),
        ('#  "arch"', ' "arch"', ":2: a line of the head"),
        ("pass,stage", "stage,pass", "has no line 'pass,stage,tokens,tactic,ms,note'"),
        ('"passes": {', '"passes": ' + "[" * 20000, "not JSON"),
    ],
)
def test_a_bad_head_names_the_file_and_the_way_out(tmp_path: Path, old: str, new: str, what: str) -> None:
    text = text_of(timings_of([Row(1, 1, 1, 0, 1.5)])).decode()
    assert old in text
    path = tmp_path / "x.csv.gz"
    path.write_bytes(gzip.compress(text.replace(old, new, 1).encode()))
    with pytest.raises(SynthError, match=what) as e:
        load(tmp_path)
    assert str(path) in str(e.value) and str(e.value).isprintable()


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "is empty"),
        (b"pass,stage\n", "is not a gzip file"),
        (gzip.compress(b"a,b\n", mtime=0), "is not a measurements file"),
    ],
)
def test_a_file_that_is_not_ours_is_refused(tmp_path: Path, content: bytes, what: str) -> None:
    (tmp_path / "x.csv.gz").write_bytes(content)
    with pytest.raises(SynthError, match=what):
        load(tmp_path)


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


# --- several files ---------------------------------------------------------------------------------------------------


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


def test_appending_adds_to_the_file_and_keeps_it_when_refused(tmp_path: Path) -> None:
    path = append(timings_of([Row(1, 1, 1, 0, 1.5)]), tmp_path)
    assert append(timings_of([Row(1, 1, 2, 0, 1.5)]), tmp_path) == path
    assert len(read(path)) == 2
    before = path.read_bytes()
    cold = Origin.make("NVIDIA H200", "sm90", "bf16", policy={**DEFAULT_POLICY, "l2": "cold"})
    for other in (cold, dataclasses.replace(H200, simulated=True)):
        with pytest.raises(SynthError, match="keep them in separate folders"):
            append(timings_of([Row(1, 1, 4, 0, 1.5)], other), tmp_path)
        assert path.read_bytes() == before
    problems: list[Problem] = []
    path.write_bytes(gzip.compress(gzip.decompress(before) + b"junk\n"))
    append(timings_of([Row(1, 1, 4, 0, 1.5)]), tmp_path, problems)
    assert len(read(path)) == 3 and len(problems) == 1


# --- working with timings --------------------------------------------------------------------------------------------


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
    assert timings.with_pass(2).ms.tolist() == [2.02, 3.0, 8.0]
    assert len(timings.with_pass(9)) == len(timings.with_pass(9).averaged()) == 0
    assert len(timings.with_pass(9).best_per_bucket()[0]) == 0


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
def test_best_per_bucket_is_the_fastest_row(a: list[Row], b: list[Row]) -> None:
    # Few distinct times and tokens, so that buckets have several rows and there are ties.
    def narrowed(rows: list[Row]) -> list[Row]:
        few = [row._replace(tokens=row.tokens % 3 + 1, ms=row.ms // 1 % 3 + 1) for row in rows]
        return list({row.cell: row for row in few}.values())

    (timings,) = combine([timings_of(narrowed(a)), timings_of(narrowed(b), shape=NEMOTRON)])
    best: dict[tuple[int, int, int], tuple[float, int]] = {}
    columns = (timings.shape, timings.stage, timings.tokens, timings.ms, timings.tactic)
    for shape, stage, tokens, ms, tactic in zip(*(c.tolist() for c in columns), strict=True):
        if not math.isnan(ms):
            best[shape, stage, tokens] = min(best.get((shape, stage, tokens), (math.inf, 0)), (ms, tactic))
    keys, tactics, ms = timings.best_per_bucket()
    assert [tuple(k) for k in keys.tolist()] == sorted(best)
    assert list(zip(ms.tolist(), tactics.tolist(), strict=True)) == [best[k] for k in sorted(best)]
    keys, bucket = timings.buckets()
    np.testing.assert_array_equal(keys[bucket], np.stack([timings.shape, timings.stage, timings.tokens], axis=1))


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


# --- flat tables -----------------------------------------------------------------------------------------------------


def flat(rows: list[Row], columns: str = FLAT, label: str = "olmoe", dtype: str = "bf16") -> str:
    lines = [columns]
    for row in rows:
        cells: dict[str, object] = {
            "shape": label, "dtype": dtype, "hidden": 2048, "inter": 1024, "experts": 64, "top_k": 8, "ep_size": 1,
            "gated": 1, "pass": row.pass_, "stage": row.stage, "tokens": row.tokens, "tactic": row.tactic,
            "ms": repr(row.ms),
        }  # fmt: skip
        lines.append(",".join(str(cells.get(name, "?")) for name in columns.split(",")))
    return "\n".join(lines) + "\n"


@pytest.mark.usefixtures("strict_warnings")
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("t.csv", str.encode),
        ("t.csv.gz", lambda t: gzip.compress(t.encode())),
        ("t.csv", lambda t: gzip.compress(t.encode())),
        ("t.csv", lambda t: t.replace("\n", "\r\n").encode()),
        ("t.csv", lambda t: b"\xef\xbb\xbf" + t.encode()),
        ("t.csv", lambda t: t.replace(",", ", ").encode()),
        ("t.csv", lambda t: t.replace("olmoe", '"olmoe"').encode()),
    ],
)
def test_flat_tables_are_read_in_every_usual_form(tmp_path: Path, name: str, change: Callable[[str], bytes]) -> None:
    rows = [*plain_rows(50), *plain_rows(50, 1, 2)]
    path = tmp_path / name
    path.write_bytes(change(flat(rows)))
    (timings,) = read_table(path)
    (expected,) = combine([timings_of(rows)])
    assert (timings.origin, timings.shapes, timings.labels) == (H200, (OLMOE,), ("olmoe",))
    for column in ("pass_", "stage", "tokens", "tactic", "ms"):
        np.testing.assert_array_equal(getattr(timings, column), getattr(expected, column))


def test_flat_columns_may_come_in_any_order_with_others_between(tmp_path: Path) -> None:
    columns = FLAT.split(",")
    random.Random(1).shuffle(columns)
    path = tmp_path / "t.csv"
    path.write_text(flat(plain_rows(20), ",".join([*columns[:5], "clock", *columns[5:]])))
    assert len(read_table(path)[0]) == 20
    path.write_text(flat(plain_rows(20, 0, 2), FLAT.removeprefix("pass,")))
    assert set(read_table(path)[0].pass_.tolist()) == {1}


@pytest.mark.parametrize("column", FLAT.split(",")[1:])
def test_a_missing_column_is_named(tmp_path: Path, column: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(flat(plain_rows(3), ",".join(c for c in FLAT.split(",") if c != column)))
    with pytest.raises(SynthError, match=f"t.csv lacks the column {column};"):
        read_table(path)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "is empty"),
        (b"\n\r\n", "is empty"),
        (FLAT.encode() + b"\n", "has no row"),
        (FLAT.encode() + b",ms\n", "has the column ms twice"),
        (flat(plain_rows(3)).encode("utf-16"), "is not UTF-8 text"),
        (flat(plain_rows(3), FLAT + ",größe").encode("latin-1"), "is not UTF-8 text"),
        (flat(plain_rows(3), dtype="int4").encode(), "dtype 'int4' is not one of bf16"),
        (flat(plain_rows(3), dtype="nvfp4").encode(), "no tactics known for sm90 nvfp4"),
        (flat(plain_rows(3)).replace(",", ";").encode(), "lacks the columns shape, dtype"),
    ],
)
def test_a_flat_table_that_cannot_be_used_says_why(tmp_path: Path, content: bytes, what: str) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(content)
    with pytest.raises(SynthError, match=what) as e:
        read_table(path)
    assert str(path) in str(e.value) and str(e.value).isprintable()


def test_a_flat_file_that_is_not_there_or_not_gzip_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SynthError, match="can't read"):
        read_table(tmp_path / "t.csv")
    (tmp_path / "t.csv.gz").write_text(flat(plain_rows(3)))
    with pytest.raises(SynthError, match="is not a gzip file"):
        read_table(tmp_path / "t.csv.gz")
    (tmp_path / "u.csv").write_text(flat(plain_rows(3)))
    with pytest.raises(SynthError, match=r"no tactic table for FlashInfer 0\.1"):
        read_table(tmp_path / "u.csv", flashinfer="0.1")


@settings(max_examples=50, deadline=None)
@given(st.lists(garbage, max_size=5), st.sampled_from(["whole", "torn", "cut"]), st.randoms(use_true_random=False))
def test_damage_to_a_flat_table_costs_no_good_row(junk: list[bytes], end: str, rng: random.Random) -> None:
    rows = plain_rows(30)
    header, *lines = flat(rows).encode().split(b"\n")[:-1]
    marked = [(line, False) for line in lines]
    for line in junk:
        marked.insert(rng.randint(0, len(marked)), (line, True))
    data = b"".join(line + b"\n" for line in [header, *(line for line, _ in marked)])
    bad = [n for n, (_, is_bad) in enumerate(marked, 2) if is_bad]
    if end == "torn":
        data += b"1,olmoe,bf16"
    data = gzip.compress(data)
    if end == "cut":
        data = data[:-4]
    if end != "whole":
        bad.append(len(marked) + 2)
    problems: list[Problem] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.csv.gz"
        path.write_bytes(data)
        (timings,) = read_table(path, problems=problems)
    assert [p.row for p in problems] == bad
    np.testing.assert_array_equal(timings.ms, combine([timings_of(rows)])[0].ms)


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("1,olmoe", "0,olmoe", "there is no pass 0"),
        ("olmoe", "", "shape is empty"),
        ("bf16", "int4", "dtype 'int4'"),
        ("2048", "0", "hidden must be at least 1"),
        ("64", "4", "top_k 8 is more than the layer's 4 experts"),
        (",8,1,1,1,", ",8,1,2,1,", "gated '2'"),
        ("0.25", "", "ms '' is not a number"),
        ("1024", "1e3", "inter '1e3' is not a whole number"),
    ],
)
def test_each_kind_of_bad_flat_row_says_what_is_wrong(tmp_path: Path, old: str, new: str, what: str) -> None:
    header, good, bad = flat([Row(1, 1, 1, 0, 0.5), Row(1, 1, 2, 0, 0.25)]).splitlines()
    assert old in bad
    path = tmp_path / "t.csv"
    path.write_text("\n".join([header, bad.replace(old, new, 1), good, good, ""]))
    problems: list[Problem] = []
    (timings,) = read_table(path, problems=problems)
    assert timings.ms.tolist() == [0.5]
    assert [p.row for p in problems] == [2, 4]
    assert what in problems[0].message and "duplicate" in problems[1].message


def test_importing_a_table_makes_files_that_hold_every_row(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    rows = [*plain_rows(50), *plain_rows(50, 1, 2)]
    path.write_text(flat(rows) + flat(plain_rows(20), dtype="fp8", label="other").split("\n", 1)[1])
    problems: list[Problem] = []
    with pytest.raises(SynthError, match="pass 2 has no provenance"):
        import_table(path, tmp_path / "m", {1: {}}, problems=problems)
    paths = import_table(path, tmp_path / "m", PASSES, problems=problems)
    assert [p.parent.name for p in paths] == ["bf16", "fp8"]
    path.write_text(flat(plain_rows(50, 2, 3)))
    import_table(path, tmp_path / "m", {3: {"machine": "another"}}, problems=problems)
    got = read(paths[0])
    passes = {**PASSES, 3: {"machine": "another"}}
    assert got.passes == passes
    assert values(got) == values(timings_of([*rows, *plain_rows(50, 2, 3)], passes=passes))


# --- what is shipped -------------------------------------------------------------------------------------------------


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
