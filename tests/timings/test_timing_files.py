from __future__ import annotations

import gzip
import math
import random
import tempfile
from pathlib import Path

import numpy as np
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
    read_bytes,
    read_text,
    row_lists,
    text_of,
    timings_of,
    values,
)

from synth.errors import SynthError
from synth.timings import files
from synth.timings.files import dumps, path_of, write
from synth.timings.folders import load, load_shapes
from synth.timings.origin import Origin
from synth.timings.rows import Problem, Row
from synth.timings.table import ShapeTimings


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
    monkeypatch.setattr(files, "_plain_rows", lambda *_: None)
    slow, problems = read_text(text)
    assert problems == []
    assert values(fast) == values(slow)
    assert dumps(fast) == dumps(slow)


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
