from __future__ import annotations

import dataclasses
import io
import json
import os
import pickle
import struct
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synth.catalog.models import family_of
from synth.catalog.shapes import MoEShape
from synth.choosing.choose import choose
from synth.errors import SynthError
from synth.flashinfer.tactics import load_table
from synth.performance.model import FEATURES, FORMAT, Cells, PerformanceModel
from synth.performance.routing import UNIFORM, Routing
from synth.timings.origin import Origin
from synth.timings.table import Timings

ROOT = Path(__file__).parent.parent.parent
OLMOE = MoEShape(2048, 1024, 64, 8)


@pytest.fixture(scope="module")
def stored(small_model: PerformanceModel, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("model") / "m.zip"
    small_model.save(path)
    return path.read_bytes()


@pytest.fixture
def load(tmp_path: Path) -> Callable[[bytes], PerformanceModel]:
    def load_bytes(data: bytes) -> PerformanceModel:
        path = tmp_path / "m.zip"
        path.write_bytes(data)
        return PerformanceModel.load(path)

    return load_bytes


def some_cells(timings: Timings) -> Cells:
    return Cells.of(timings.averaged())


def with_files(data: bytes, **files: bytes | None) -> bytes:
    """Return the archive with files replaced, added, or (None) removed."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as new:
        kept = {name: old.read(name) for name in old.namelist()}
        for name, content in {**kept, **files}.items():
            if content is not None:
                new.writestr(name, content)
    return out.getvalue()


def with_meta(data: bytes, **changes: Any) -> bytes:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        meta = json.loads(archive.read("model.json"))
    return with_files(data, **{"model.json": json.dumps({**meta, **changes}).encode()})


def npy(header: str, body: bytes = b"") -> bytes:
    text = header.encode() + b" " * (-(11 + len(header)) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + body


def refusal(load: Callable[[bytes], PerformanceModel], data: bytes) -> str:
    with pytest.raises(SynthError) as e:
        load(data)
    message = str(e.value)
    assert "\n" not in message and "m.zip" in message and "synth fit" in message
    return message


# --- fit and predict -------------------------------------------------------------------------------------------------


def test_a_model_remembers_what_it_was_fitted_on(bf16_model: PerformanceModel, bf16: Timings) -> None:
    assert bf16_model.origin_ == bf16.origin
    assert all(bf16_model.knows(shape) for shape in bf16.shapes)
    assert {label for label, _ in bf16_model.shapes_} == set(bf16.labels)
    assert not bf16_model.knows(dataclasses.replace(OLMOE, inter=1032))
    assert not bf16_model.knows(dataclasses.replace(OLMOE, ep_size=2))


def test_what_was_left_out_is_not_known(bf16: Timings, few: Timings, small_model: PerformanceModel) -> None:
    present = {few.shapes[i] for i in np.unique(few.shape)}
    assert [small_model.knows(s) for s in bf16.shapes] == [s in present for s in bf16.shapes]


def test_fitted_times_are_close_near_the_best(bf16_model: PerformanceModel, bf16: Timings) -> None:
    table = bf16.averaged()
    ms = bf16_model.predict(Cells.of(table)).ms
    keys, bucket = table.buckets()
    best = np.full(len(keys), np.inf)
    np.minimum.at(best, bucket, table.ms)
    near = table.ms < 1.1 * best[bucket]
    assert np.median(np.abs(np.log(ms[near] / table.ms[near]))) < 0.02


def test_predictions_are_positive_with_a_deviation(bf16_model: PerformanceModel) -> None:
    shapes = [MoEShape(1024, 512, 8, 1), MoEShape(7168, 4096, 16, 8, 16), MoEShape(64, 8, 2, 2, gated=False)]
    ids = np.arange(len(bf16_model.table))
    shape, tokens, tactic = (g.ravel() for g in np.meshgrid([0, 1, 2], [1, 300, 65536], ids, indexing="ij"))
    stage = np.array([bf16_model.table.stage(i) for i in tactic.tolist()])
    p = bf16_model.predict(Cells(shapes, shape, stage, tokens, tactic))
    assert np.isfinite(p.ms).all() and (p.ms > 0).all()
    assert np.isfinite(p.log_sd).all() and (p.log_sd > 0).all()


def test_cells_may_come_in_any_order(small_model: PerformanceModel, few: Timings) -> None:
    cells = some_cells(few)
    order = np.random.default_rng(0).permutation(len(cells))
    straight, mixed = small_model.predict(cells), small_model.predict(cells.select(order))
    np.testing.assert_allclose(mixed.ms, straight.ms[order], rtol=1e-12)
    np.testing.assert_allclose(mixed.log_sd, straight.log_sd[order], rtol=1e-9)


def test_no_cells_no_times(small_model: PerformanceModel, few: Timings) -> None:
    assert len(small_model.predict(some_cells(few).select(np.zeros(0, np.int64))).ms) == 0


def test_fitting_twice_gives_the_same_bytes(
    few: Timings, small_model: PerformanceModel, stored: bytes, tmp_path: Path
) -> None:
    order = np.random.default_rng(0).permutation(len(few))
    for i, timings in enumerate((few, few.select(order))):
        path = tmp_path / f"{i}.zip"
        again = PerformanceModel(choice_trees=3, time_trees=2).fit(timings)
        again.save(path)
        assert path.read_bytes() == stored
        assert again.fingerprint() == small_model.fingerprint()


def test_other_timings_or_another_seed_give_another_fingerprint(few: Timings, small_model: PerformanceModel) -> None:
    slower = dataclasses.replace(few, ms=few.ms * 1.01)
    for seed, timings in ((1, few), (0, slower)):
        other = PerformanceModel(choice_trees=3, time_trees=2, seed=seed).fit(timings)
        assert other.fingerprint() != small_model.fingerprint()


def test_nothing_to_fit_is_one_line(few: Timings) -> None:
    for empty in (few.select(np.zeros(0, np.int64)), dataclasses.replace(few, ms=np.full(len(few), np.nan))):
        with pytest.raises(SynthError, match="no timings to fit for NVIDIA H200 bf16"):
            PerformanceModel().fit(empty)


def test_the_analytic_model_knows_nothing_and_is_unsure(tmp_path: Path) -> None:
    name = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
    table = load_table("sm120", "nvfp4")
    model = PerformanceModel.analytic(Origin.make(name, "sm120", "nvfp4"), table)
    assert model.choice_ is None and not model.knows(OLMOE) and model.shapes_ == ()
    model.save(tmp_path / "a.zip")
    again = PerformanceModel.load(tmp_path / "a.zip")
    assert again.choice_ is None and again.table == table and again.origin_ == model.origin_
    ids = np.array(table.ids(1))
    cells = Cells([OLMOE], np.zeros_like(ids), np.ones_like(ids), np.full_like(ids, 64), ids)
    p, q = model.predict(cells), again.predict(cells)
    np.testing.assert_array_equal(p.ms, q.ms)
    np.testing.assert_array_equal(p.ms, model.predict_analytic(cells))
    assert (p.log_sd > 0.1).all()


# --- save and load ---------------------------------------------------------------------------------------------------


def test_a_loaded_model_predicts_the_same_and_saves_the_same_bytes(
    small_model: PerformanceModel,
    stored: bytes,
    few: Timings,
    tmp_path: Path,
    load: Callable[[bytes], PerformanceModel],
) -> None:
    again = load(stored)
    a, b = small_model.predict(some_cells(few)), again.predict(some_cells(few))
    np.testing.assert_array_equal(a.ms, b.ms)
    np.testing.assert_array_equal(a.log_sd, b.log_sd)
    assert (again.origin_, again.shapes_, again.digest_) == (
        small_model.origin_, small_model.shapes_, small_model.digest_,
    )  # fmt: skip
    assert again.fingerprint() == small_model.fingerprint()
    again.save(tmp_path / "again.zip")
    assert (tmp_path / "again.zip").read_bytes() == stored


def test_the_shipped_timings_make_a_file_of_at_most_8_mib(bf16_model: PerformanceModel, tmp_path: Path) -> None:
    bf16_model.save(tmp_path / "m.zip")
    assert (tmp_path / "m.zip").stat().st_size <= 8 << 20


def test_a_missing_file_or_a_folder_is_one_line(tmp_path: Path) -> None:
    for path in (tmp_path / "none.zip", tmp_path):
        with pytest.raises(SynthError, match="synth fit") as e:
            PerformanceModel.load(path)
        assert "\n" not in str(e.value) and str(path) in str(e.value)


def test_a_file_cut_anywhere_is_refused(stored: bytes, load: Callable[[bytes], PerformanceModel]) -> None:
    for end in range(0, len(stored), 1 + len(stored) // 700):
        refusal(load, stored[:end])


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_damaged_bytes_are_refused_or_do_not_matter(
    stored: bytes, load: Callable[[bytes], PerformanceModel], method: int
) -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(stored)) as old, zipfile.ZipFile(out, "w", method) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    data = out.getvalue()
    rng = np.random.default_rng(method)
    refused = 0
    for place in rng.integers(0, len(data), 250).tolist():
        damaged = bytearray(data)
        damaged[place] ^= 1 << int(rng.integers(8))
        try:
            load(bytes(damaged))
        except SynthError as e:
            assert "\n" not in str(e)
            refused += 1
    assert refused > 100


def test_damage_in_the_archives_own_records_is_refused(
    stored: bytes, load: Callable[[bytes], PerformanceModel]
) -> None:
    directory = stored.find(b"PK\x01\x02")
    for place in [*range(46), *range(directory, directory + 60), *range(len(stored) - 22, len(stored))]:
        for value in (0, 1, 255):
            damaged = bytearray(stored)
            damaged[place] = value
            try:
                load(bytes(damaged))
            except SynthError as e:
                assert "\n" not in str(e)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=300), st.booleans())
def test_random_bytes_are_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes, zipped: bool) -> None:
    path = tmp_path_factory.getbasetemp() / "random-m.zip"
    if zipped:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("model.json", data)
            archive.writestr("choice_sizes.npy", data)
    else:
        path.write_bytes(data)
    with pytest.raises(SynthError) as e:
        PerformanceModel.load(path)
    assert "\n" not in str(e.value)


class _Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def test_no_code_in_a_model_file_runs(stored: bytes, load: Callable[[bytes], PerformanceModel], tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    evil = pickle.dumps(_Payload(marker))
    as_object = npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,), }", evil)
    inside_a_field = npy("{'descr': [('a', '|O')], 'fortran_order': False, 'shape': (1,), }", evil)
    called = npy(f"{{'descr': __import__('os').mkdir({str(marker)!r}), 'fortran_order': False, 'shape': (1,), }}")
    for content in (as_object, inside_a_field, called, evil):
        refusal(load, with_files(stored, **{"choice_sizes.npy": content}))
        refusal(load, with_files(stored, **{"model.json": content}))
    refusal(load, evil)
    pickle.loads(evil)
    assert marker.is_dir()
    marker.rmdir()


@pytest.mark.parametrize(
    "content",
    [
        b"", b"null", b"[]", b"{}", b"{", b"\xff\xfe\x00", b'{"format": 1}', b'{"format": 1e999}', b"[" * 100_000,
        b'{"format":' + b"9" * 10_000 + b"}",
    ],
    ids=lambda c: repr(c[:20]),
)  # fmt: skip
def test_a_wrong_description_is_refused(
    stored: bytes, load: Callable[[bytes], PerformanceModel], content: bytes
) -> None:
    refusal(load, with_files(stored, **{"model.json": content}))


_ORIGIN = {"device": "NVIDIA H200", "arch": "sm90", "quant": "bf16", "flashinfer": "0.7.4", "policy": "{}"}
_FORGED: dict[str, dict[str, Any]] = {
    "format 1": {"format": 1},
    "other features": {"features": list(FEATURES[:-1])},
    "origin is a list": {"origin": []},
    "unknown device": {"origin": {**_ORIGIN, "device": "NVIDIA X9"}},
    "unknown quantization": {"origin": {**_ORIGIN, "quant": "int2"}},
    "another quantization": {"origin": {**_ORIGIN, "quant": "fp8"}},
    "no tactics": {"table": {}},
    "two tactics": {"table": {str(i): str(load_table("sm90", "bf16").tactic(i)) for i in (0, 1)}},
    "tiles of nothing": {"table": {str(i): "tma90 0x0x0B cl0x0x0 ml0 epi0 fin0 swap0" for i in range(126)}},
    "table is text": {"table": "x"},
    "no gemm1": {"gemm1": 0},
    "no gemm2": {"gemm1": 126},
    "gemm1 is endless": {"gemm1": float("inf")},
    "gemm1 is negative": {"gemm1": -3},
    "gemm1 is another": {"gemm1": 40},
    "constants missing": {"roofline": {}},
    "spread is NaN": {"spread": float("nan")},
    "spread is endless": {"spread": float("inf")},
    "spread is negative": {"spread": -1.0},
    "spread is text": {"spread": "wide"},
    "shapes are numbers": {"shapes": [1, 2]},
    "shapes are none": {"shapes": [["x", "h0-i1-e1-k1"]]},
    "unknown parameter": {"parameters": {"command": "x"}},
    "held out is text": {"held_out": "x"},
}


@pytest.mark.parametrize("name", _FORGED)
def test_a_forged_description_is_refused(stored: bytes, load: Callable[[bytes], PerformanceModel], name: str) -> None:
    refusal(load, with_meta(stored, **_FORGED[name]))


@pytest.mark.parametrize("value", [float("nan"), 1e308, -1e308, "x", None])
def test_forged_constants_are_refused_or_still_predict(
    stored: bytes, load: Callable[[bytes], PerformanceModel], value: Any
) -> None:
    with zipfile.ZipFile(io.BytesIO(stored)) as archive:
        constants = json.loads(archive.read("model.json"))["roofline"]
    for forged in (dict.fromkeys(constants, value), {**constants, "launch_ms": value}, {**constants, "mma": value}):
        try:
            model = load(with_meta(stored, roofline=forged))
        except SynthError as e:
            assert "\n" not in str(e)
            continue
        assert all(np.isfinite(c.ms) for c in choose(model, [OLMOE], [1, 64]))


@pytest.mark.parametrize(
    "content",
    [
        npy("{'descr': '<i4', 'fortran_order': False, 'shape': (99999999999999,), }"),
        npy("{'descr': '<i4', 'fortran_order': False, 'shape': (9999999999,), }"),
        npy("{'descr': '<i4', 'fortran_order': False, 'shape': (-1,), }"),
        npy("{'descr': '<i4', 'fortran_order': False, 'shape': (0,), }"),
        npy("{'descr': '<f8', 'fortran_order': False, 'shape': (1,), }", b"\0" * 8),
        npy("{'descr': '|V0', 'fortran_order': False, 'shape': (1,), }"),
        npy("{'descr': '''"),
        npy("((((("),
        npy("  x\n y\n"),
        npy("-" * 5000 + "1"),
        npy("(" * 3000),
        npy("{'descr': 3, 'fortran_order': False, 'shape': (1,), }"),
        b"\x93NUMPY",
        b"\x93NUMPY\x09\x09",
        b"",
    ],
    ids=lambda c: repr(c[10:60]),
)
def test_a_hostile_array_is_refused(stored: bytes, load: Callable[[bytes], PerformanceModel], content: bytes) -> None:
    refusal(load, with_files(stored, **{"choice_sizes.npy": content}))


@pytest.mark.parametrize("missing", ["model.json", "choice_sizes.npy", "choice_value.npy", "time_feature.npy"])
def test_a_missing_part_is_refused(stored: bytes, load: Callable[[bytes], PerformanceModel], missing: str) -> None:
    refusal(load, with_files(stored, **{missing: None}))


def test_names_that_point_elsewhere_write_nothing(
    stored: bytes, load: Callable[[bytes], PerformanceModel], tmp_path: Path
) -> None:
    names = {"../escape.npy": b"x", "/escape.npy": b"x", "../escape.txt": b"x", "a/../../escape": b"x"}
    try:
        load(with_files(stored, **names))
    except SynthError as e:
        assert "\n" not in str(e)
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["m.zip"]
    assert not (tmp_path.parent / "escape.npy").exists() and not (tmp_path.parent / "escape.txt").exists()


def test_a_declared_size_beyond_any_model_is_refused(stored: bytes, load: Callable[[bytes], PerformanceModel]) -> None:
    data = bytearray(stored)
    # The first record of the central directory: bytes 24 to 27 are the unpacked size.
    record = data.find(b"PK\x01\x02")
    data[record + 24 : record + 28] = struct.pack("<I", 1 << 30)
    assert "larger than any model" in refusal(load, bytes(data))


def test_an_archive_that_unpacks_to_more_than_it_says_is_refused_in_little_memory(tmp_path: Path) -> None:
    # 256 MiB of deflated zeros that say they are 100 bytes long.
    zeros = zlib.compressobj(1, zlib.DEFLATED, -15)
    packed = b"".join(zeros.compress(bytes(1 << 24)) for _ in range(16)) + zeros.flush()
    path = tmp_path / "m.zip"
    name = b"model.json"
    local = struct.pack("<4sHHHHHIIIHH", b"PK\x03\x04", 20, 0, 8, 0, 33, 0, len(packed), 100, len(name), 0) + name
    central = struct.pack(
        "<4sHHHHHHIIIHHHHHII", b"PK\x01\x02", 20, 20, 0, 8, 0, 33, 0, len(packed), 100, len(name), 0, 0, 0, 0, 0, 0
    )
    body = local + packed
    end = struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, 1, 1, len(central) + len(name), len(body), 0)
    path.write_bytes(body + central + name + end)
    code = (
        "import resource, sys; from pathlib import Path\n"
        "from synth.errors import SynthError\n"
        "from synth.performance.model import PerformanceModel\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try:\n    PerformanceModel.load(Path(sys.argv[1]))\n"
        "except SynthError:\n    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-1000:]
    assert int(done.stdout) < 100_000  # KiB


def test_saving_over_a_model_replaces_it_whole(small_model: PerformanceModel, stored: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "m.zip"
    for _ in range(2):
        small_model.save(path)
    assert path.read_bytes() == stored and [p.name for p in path.parent.iterdir()] == ["m.zip"]


def test_cells_keep_their_routing_and_the_model_uses_it(small_model: PerformanceModel, few: Timings) -> None:
    cells = some_cells(few)
    assert cells.routing is UNIFORM
    skewed = dataclasses.replace(cells, routing=Routing.zipf(1.5))
    rows = np.arange(0, len(cells), 3)
    assert skewed.select(rows).routing == skewed.routing
    (even, row), (site, same_row) = cells.sites(), skewed.sites()
    assert (row == same_row).all() and (site.active <= even.active * (1.0 + 1e-9)).all()
    p, q = small_model.predict(cells), small_model.predict(skewed)
    assert np.isfinite(q.ms).all() and (q.ms > 0).all() and not np.array_equal(p.ms, q.ms)
    again = small_model.predict(dataclasses.replace(cells, routing=Routing.zipf(0.0)))
    np.testing.assert_array_equal(again.ms, p.ms)
    assert not np.array_equal(small_model.predict_analytic(cells), small_model.predict_analytic(skewed))


def test_a_file_of_the_format_before_says_how_to_make_it_anew(
    stored: bytes, load: Callable[[bytes], PerformanceModel]
) -> None:
    message = refusal(load, with_meta(stored, format=FORMAT - 1))
    assert "another version" in message and "fit it again with `synth fit`" in message


# --- a sample of a device ---------------------------------------------------------------------------------------------


def sampled(few: Timings, share: float) -> Timings:
    """Return a random share of some sweeps."""
    return few.select(np.random.default_rng(0).random(len(few)) < share)


def test_a_sample_is_fitted_by_one_forest_that_reproduces_it(few: Timings, tmp_path: Path) -> None:
    part = sampled(few, 0.1)
    model = PerformanceModel().fit(part)
    assert model.choice_ is None
    timed = np.isin(_key(some_cells(few)), _key(some_cells(part)))
    np.testing.assert_allclose(model.predict(some_cells(few)).ms[timed], part.averaged().ms, rtol=0.01)
    model.save(tmp_path / "m.zip")
    again = PerformanceModel.load(tmp_path / "m.zip")
    assert again.choice_ is None
    assert again.predict(some_cells(few)).ms.tolist() == model.predict(some_cells(few)).ms.tolist()
    assert again.fingerprint() == model.fingerprint()
    rest = few.averaged()
    error = np.abs(np.log(model.predict(some_cells(few)).ms / rest.ms))
    assert np.median(error) < 0.15


def test_sampled_shapes_beside_swept_ones_dont_blur_what_is_best(few: Timings) -> None:
    """In a sampled bucket the best timed tactic isn't the best one: the choice forest must not learn from it."""
    whole = few.shape != few.labels.index("olmoe")
    swept = PerformanceModel(choice_trees=3, time_trees=2).fit(few.select(whole))
    slow = ~whole & (few.tactic % 7 == 3)
    mixed = PerformanceModel(choice_trees=3, time_trees=2).fit(few.select(whole | slow))
    assert swept.choice_ is not None
    assert mixed.choice_ is not None
    cells = some_cells(few.select(~whole))
    best = few.select(~whole).averaged()
    keys, bucket = best.buckets()
    for model in (swept, mixed):
        ms = model.predict(cells).ms
        chosen = np.array([np.flatnonzero(bucket == b)[np.argmin(ms[bucket == b])] for b in range(len(keys))])
        least = np.array([best.ms[bucket == b].min() for b in range(len(keys))])
        assert np.exp(np.log(best.ms[chosen] / least).mean()) < 1.08


def test_trees_of_a_sample_disagree_where_nothing_was_timed(few: Timings) -> None:
    part = sampled(few, 0.05)
    model = PerformanceModel().fit(part)
    cells = some_cells(few)
    assert model.residual_ is not None
    draws = model.draws(cells)
    assert draws.shape == (60, len(cells))
    np.testing.assert_allclose(np.exp(draws.mean(axis=0)), model.predict(cells).ms, rtol=1e-9)
    known = np.isin(np.arange(len(cells)), np.flatnonzero(np.isin(_key(cells), _key(some_cells(part)))))
    spread = draws.std(axis=0)
    assert np.quantile(spread[known], 0.95) < 0.01 < np.median(spread[~known])


def _key(cells: Cells) -> np.ndarray:
    return ((cells.shape * 2 + cells.stage) * 10_000 + cells.tokens) * 1_000 + cells.tactic


# --- a borrowed structure ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fp8_few(fp8: Timings) -> Timings:
    """All fp8 shapes in three buckets, first pass."""
    return fp8.select(np.isin(fp8.tokens, [1, 64, 1024]) & (fp8.pass_ == 1))


@pytest.fixture(scope="module")
def judged(fp8_few: Timings) -> np.ndarray:
    """Shapes whose families neither the structure nor the sample has seen."""
    families = sorted({family_of(label) for label in fp8_few.labels})
    mine = set(families[::2])
    return np.array([i for i, label in enumerate(fp8_few.labels) if family_of(label) in mine])


@pytest.fixture(scope="module")
def borrowing(bf16: Timings, fp8_few: Timings, judged: np.ndarray) -> PerformanceModel:
    """What is believed of fp8 with the structure of bf16, both without the families that are judged."""
    families = {family_of(fp8_few.labels[i]) for i in judged.tolist()}
    seen = [i for i, label in enumerate(bf16.labels) if family_of(label) not in families]
    part = bf16.select(np.isin(bf16.shape, seen) & np.isin(bf16.tokens, [1, 16, 64, 256, 1024]) & (bf16.pass_ == 1))
    lender = PerformanceModel(choice_trees=12, time_trees=6).fit(part)
    return PerformanceModel.analytic(fp8_few.origin, fp8_few.table, lender.roofline_, lender)


@pytest.fixture(scope="module")
def sample(fp8_few: Timings, judged: np.ndarray) -> Timings:
    """A tenth of the other shapes' timings."""
    rest = fp8_few.select(~np.isin(fp8_few.shape, judged))
    return sampled(rest, 0.1)


def regret_of(model: PerformanceModel, timings: Timings) -> float:
    table = timings.averaged()
    keys, bucket = table.buckets()
    ms = model.predict(Cells.of(table)).ms
    lost = [
        np.log(table.ms[bucket == b][np.argmin(ms[bucket == b])] / table.ms[bucket == b].min())
        for b in range(len(keys))
    ]
    return float(np.exp(np.mean(lost)))


def test_a_sample_over_a_borrowed_structure_reproduces_its_timings(
    borrowing: PerformanceModel, sample: Timings, fp8_few: Timings, tmp_path: Path
) -> None:
    assert borrowing.analytical and borrowing.borrowed_ == "NVIDIA H200 bf16"
    model = PerformanceModel.of_sample(borrowing, some_cells(sample), sample.averaged().ms)
    assert not model.analytical and model.borrowed_ == borrowing.borrowed_
    assert model.residual_ is not None and model.choice_ is borrowing.choice_ and model.time_ is borrowing.time_
    # Predicted beside all tactics of their buckets, and not beside those of the sample alone.
    cells = some_cells(fp8_few)
    timed = np.isin(_key(cells), _key(some_cells(sample)))
    np.testing.assert_allclose(model.predict(cells).ms[timed], sample.averaged().ms, rtol=0.01)
    model.save(tmp_path / "m.zip")
    again = PerformanceModel.load(tmp_path / "m.zip")
    assert again.borrowed_ == model.borrowed_ and not again.analytical
    np.testing.assert_array_equal(again.predict(cells).ms, model.predict(cells).ms)
    assert again.fingerprint() == model.fingerprint() != borrowing.fingerprint()


def test_a_sample_says_more_of_other_shapes_where_it_corrects_a_structure(
    borrowing: PerformanceModel, fp8_few: Timings, judged: np.ndarray
) -> None:
    plain = PerformanceModel.analytic(fp8_few.origin, fp8_few.table)
    unseen = fp8_few.select(np.isin(fp8_few.shape, judged))
    rest = fp8_few.select(~np.isin(fp8_few.shape, judged))
    assert regret_of(borrowing, unseen) < regret_of(plain, unseen)
    lost: dict[str, list[float]] = {"over": [], "alone": []}
    for seed in range(3):
        rows = np.sort(np.random.default_rng(seed).choice(len(rest), 120, replace=False))
        part = rest.select(rows)
        for name, start in (("over", borrowing), ("alone", plain)):
            model = PerformanceModel.of_sample(start, some_cells(part), part.averaged().ms)
            lost[name].append(np.log(regret_of(model, unseen)))
    # One sample in three may mislead either; the mean doesn't.
    assert np.mean(lost["over"]) < 0.8 * np.mean(lost["alone"])


def test_what_is_borrowed_is_believed_less_than_what_was_fitted(borrowing: PerformanceModel, fp8_few: Timings) -> None:
    own = PerformanceModel(choice_trees=4, time_trees=3).fit(fp8_few)
    cells = some_cells(fp8_few)
    lent, fitted = borrowing.predict(cells), own.predict(cells)
    assert (lent.log_sd >= 0.25).all() and (lent.choice_sd >= 0.03).all()
    assert np.median(fitted.log_sd) < 0.1 < np.median(lent.log_sd)


@pytest.mark.parametrize(("shapes", "whole"), [(7, False), (8, True)])
def test_few_swept_shapes_correct_what_was_believed_and_many_replace_it(
    borrowing: PerformanceModel, fp8_few: Timings, shapes: int, whole: bool
) -> None:
    part = fp8_few.select(fp8_few.shape < shapes)
    model = PerformanceModel(choice_trees=2, time_trees=2, start=borrowing).fit(part)
    assert (model.residual_ is None) == whole
    assert model.borrowed_ == ("" if whole else "NVIDIA H200 bf16")
    assert (model.choice_ is borrowing.choice_) == (not whole)
    assert not model.analytical and all(model.knows(fp8_few.shapes[i]) for i in range(shapes))


def test_without_anything_to_borrow_few_swept_shapes_make_forests_of_their_own(fp8_few: Timings) -> None:
    model = PerformanceModel(choice_trees=2, time_trees=2).fit(fp8_few.select(fp8_few.shape < 7))
    assert model.residual_ is None and model.choice_ is not None and model.borrowed_ == ""


def test_a_sample_of_few_is_fitted_over_what_was_believed_by_fit_too(
    borrowing: PerformanceModel, sample: Timings, fp8_few: Timings
) -> None:
    by_fit = PerformanceModel(start=borrowing).fit(sample)
    by_hand = PerformanceModel.of_sample(borrowing, some_cells(sample), sample.averaged().ms)
    cells = some_cells(fp8_few)
    np.testing.assert_array_equal(by_fit.predict(cells).ms, by_hand.predict(cells).ms)
    assert by_fit.digest_ and not by_hand.digest_
