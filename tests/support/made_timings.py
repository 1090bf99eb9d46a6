"""Timings as the tests of their files make them up, and their bytes read back."""

from __future__ import annotations

import gzip
import math
import random
import tempfile
from pathlib import Path

from hypothesis import strategies as st

from synth.catalog.shapes import MoEShape
from synth.flashinfer.tactics import load_table
from synth.timings.files import dumps, read
from synth.timings.origin import Origin
from synth.timings.rows import Problem, Row
from synth.timings.table import ShapeTimings

H200 = Origin.make("NVIDIA H200", "sm90", "bf16")
OLMOE = MoEShape(2048, 1024, 64, 8)
NEMOTRON = MoEShape(2688, 1856, 128, 6, 2, False)
PASSES = {1: {"date": "2026-12-01", "driver": "580"}, 2: {"date": "2026-12-02", "driver": "580"}}
TABLE = load_table("sm90", "bf16")
HEADER = b"pass,stage,tokens,tactic,ms,note\n"
times = st.floats(min_value=1e-6, max_value=1e6)
garbage = (
    st.binary(min_size=1, max_size=30)
    .map(lambda b: b.replace(b"\n", b"?"))
    .filter(lambda b: b.strip(b"\r"))
    .map(lambda b: b"!" + b)
) | st.sampled_from(
    [b"# {", b",,,,,", b'"', b'1,1,1,0,1.5,"', b"\xff", b"1,1,1,0,", b"\0", b"1,1,1,0,1,,", HEADER.strip()]
)


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
