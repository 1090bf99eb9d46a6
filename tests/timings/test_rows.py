from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_timings import HEADER, plain_rows, read_text, text_of, timings_of, values

from synth.timings.folders import load
from synth.timings.rows import MeasurementWarning, Row


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


def test_problems_are_warnings_where_nobody_collects_them(tmp_path: Path) -> None:
    path = tmp_path / "x.csv.gz"
    path.write_bytes(gzip.compress(text_of(timings_of(plain_rows(3))) + b"1,1\n"))
    with pytest.warns(MeasurementWarning, match="has 2 columns, not 6; the row is left out"):
        (timings,) = load(path)
    assert len(timings) == 3
