from __future__ import annotations

import gzip
import random
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_timings import H200, OLMOE, PASSES, garbage, plain_rows, timings_of, values

from synth.errors import SynthError
from synth.timings.files import read, write
from synth.timings.flat import read_flat
from synth.timings.folders import combine, merge
from synth.timings.rows import Problem, Row

FLAT = "pass,shape,dtype,hidden,inter,experts,top_k,ep_size,gated,stage,tokens,tactic,ms"


@pytest.fixture
def strict_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


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
    (timings,) = combine(read_flat(path))
    (expected,) = combine([timings_of(rows)])
    assert (timings.origin, timings.shapes, timings.labels) == (H200, (OLMOE,), ("olmoe",))
    for column in ("pass_", "stage", "tokens", "tactic", "ms"):
        np.testing.assert_array_equal(getattr(timings, column), getattr(expected, column))


def test_flat_columns_may_come_in_any_order_with_others_between(tmp_path: Path) -> None:
    columns = FLAT.split(",")
    random.Random(1).shuffle(columns)
    path = tmp_path / "t.csv"
    path.write_text(flat(plain_rows(20), ",".join([*columns[:5], "clock", *columns[5:]])))
    assert len(read_flat(path)[0]) == 20
    path.write_text(flat(plain_rows(20, 0, 2), FLAT.removeprefix("pass,")))
    assert set(read_flat(path)[0].pass_.tolist()) == {1}


@pytest.mark.parametrize("column", FLAT.split(",")[1:])
def test_a_missing_column_is_named(tmp_path: Path, column: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(flat(plain_rows(3), ",".join(c for c in FLAT.split(",") if c != column)))
    with pytest.raises(SynthError, match=f"t.csv lacks the column {column};"):
        read_flat(path)


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
        read_flat(path)
    assert str(path) in str(e.value) and str(e.value).isprintable()


def test_a_flat_file_that_is_not_there_or_not_gzip_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SynthError, match="can't read"):
        read_flat(tmp_path / "t.csv")
    (tmp_path / "t.csv.gz").write_text(flat(plain_rows(3)))
    with pytest.raises(SynthError, match="is not a gzip file"):
        read_flat(tmp_path / "t.csv.gz")
    (tmp_path / "u.csv").write_text(flat(plain_rows(3)))
    with pytest.raises(SynthError, match=r"no tactic table for FlashInfer 0\.1"):
        read_flat(tmp_path / "u.csv", flashinfer="0.1")


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
        (timings,) = combine(read_flat(path, problems=problems))
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
    (timings,) = combine(read_flat(path, problems=problems))
    assert timings.ms.tolist() == [0.5]
    assert [p.row for p in problems] == [2, 4]
    assert what in problems[0].message and "duplicate" in problems[1].message


def test_importing_a_table_makes_files_that_hold_every_row(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    rows = [*plain_rows(50), *plain_rows(50, 1, 2)]
    path.write_text(flat(rows) + flat(plain_rows(20), dtype="fp8", label="other").split("\n", 1)[1])
    problems: list[Problem] = []
    with pytest.raises(SynthError, match="pass 2 has no provenance"):
        read_flat(path, passes={1: {}}, problems=problems)
    paths = [write(part, tmp_path / "m") for part in read_flat(path, passes=PASSES, problems=problems)]
    assert [p.parent.name for p in paths] == ["bf16", "fp8"]
    path.write_text(flat(plain_rows(50, 2, 3)))
    (more,) = read_flat(path, passes={3: {"machine": "another"}}, problems=problems)
    got = merge([read(paths[0]), more])
    passes = {**PASSES, 3: {"machine": "another"}}
    assert got.passes == passes
    assert values(got) == values(timings_of([*rows, *plain_rows(50, 2, 3)], passes=passes))
