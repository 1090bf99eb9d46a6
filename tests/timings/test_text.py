from __future__ import annotations

import gzip
import math
import random
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_timings import HEADER, garbage, plain_rows, read_bytes, read_text, row_lists, text_of, timings_of, values

from synth.errors import SynthError
from synth.timings.files import dumps, read
from synth.timings.rows import Problem, Row


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
