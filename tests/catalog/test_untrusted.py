"""Files from strangers: what they cost is limited, nothing in them runs, and nothing in them reaches a terminal."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import re
import resource
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
from hypothesis import given
from hypothesis import strategies as st

from synth.catalog import untrusted
from synth.catalog.paths import find_model, shipped
from synth.catalog.untrusted import loads, printable, shown
from synth.configs.reading import read
from synth.configs.reading import read as read_config
from synth.configs.sidecar import Record, Sidecar, sidecar_path
from synth.errors import SynthError
from synth.flashinfer.tactics import DEFAULT_FLASHINFER
from synth.performance.model import FEATURES, PerformanceModel
from synth.timings.files import dumps
from synth.timings.files import read as read_measurements
from synth.timings.folders import load as load_measurements

# ---- JSON --------------------------------------------------------------------------------------------------

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(value=json_values, indent=st.none() | st.just(1), ascii_only=st.booleans())
def test_json_is_read_as_python_reads_it(value: object, indent: int | None, ascii_only: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    assert repr(loads(text.encode("utf-8", "replace"))) == repr(json.loads(text.encode("utf-8", "replace")))


@given(data=st.binary(max_size=60) | st.text('[]{}",:\\1e-Nta ', max_size=40).map(str.encode))
def test_what_is_no_json_is_a_value_error(data: bytes) -> None:
    try:
        expected = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError):
        with pytest.raises(ValueError):
            loads(data)
    else:
        assert repr(loads(data)) == repr(expected)


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"[" * 65 + b"]" * 65, "nested more than 64"),
        (b'{"a":' * 5_000_000, "more than 3000000 values or 1000000 arrays"),
        (b"[" + b"1," * 3_000_001 + b"1]", "more than 3000000 values"),
        (b"[" + b"[]," * 1_000_001 + b"1]", "1000000 arrays"),
        (b'"\\"' * 20_000_000, "more than 3000000 values"),
        (b"1" * 1001, "1001 digits"),
        (b"9" * 60_000_000, "60000000 digits"),
        (b'{"a": "' + b'\\"' * 20_000_000, "Unterminated string"),
        (b'"' + b"\\\\" * 20_000_000, "Unterminated string"),
    ],
    ids=lambda x: None if isinstance(x, str) else repr(x[:12]),
)
def test_json_beyond_a_limit_is_refused(data: bytes, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        loads(data)


def test_brackets_inside_of_strings_do_not_count() -> None:
    text = "[" * 1000 + '\\"' + "{" * 1000
    assert loads(json.dumps({text: [text, "\\", '"', '\\"[[[[']}).encode()) == {text: [text, "\\", '"', '\\"[[[[']}
    assert loads(b"[" * 64 + b"]" * 64)


def test_limits_leave_room_for_what_synth_writes(tmp_path: Path) -> None:
    deep: dict[str, Any] = {}
    for _ in range(10):
        deep = {"a": deep}
    path = tmp_path / "a.json"
    entry = ["MoERunner", 1, ["cuda_graph_profile_replays", None, "l2_cache_policy", "hot"], {"time_ms": 0.1, "a": 1}]
    path.write_text(json.dumps({"_metadata": deep, **{f"{'k' * 290}{i}": entry for i in range(60_000)}}))
    assert len(read_config(path).entries) == 60_000


@given(text=st.text() | st.text(alphabet="\x00\x1b\x07\x9b\u202e\u2028\ud800\udfff\u200b\r\n\taé€"))
def test_printable_text_is_printable_and_says_what_was_there(text: str) -> None:
    assert printable(text).isprintable()
    if text.isprintable():
        assert printable(text) == text
    assert len(shown(text, 20)) <= 20 and shown(text, 20).isprintable()


@pytest.mark.parametrize("place", ["/dev/zero", "/dev/stdin"])
def test_devices_are_not_read(place: str) -> None:
    with pytest.raises(SynthError, match="no regular file"):
        untrusted.read_bytes(Path(place), 1 << 20, "tuning config")


def test_a_file_that_is_too_large_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    with path.open("wb") as f:
        f.truncate(1 << 40)
    with pytest.raises(SynthError, match="larger than 64 MiB; that is no tuning config"):
        read_config(path)


# ---- commands ----------------------------------------------------------------------------------------------


def limited(*arguments: str, mib: int = 1500) -> subprocess.CompletedProcess[str]:
    """Run synth with little memory."""
    return subprocess.run(
        [sys.executable, "-m", "synth", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (mib << 20, mib << 20)),
    )


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("deep.json", b"[" * 60_000_000),
        ("many.json", b"[" + b"[],[]," * 5_000_000 + b"1]"),
        ("keys.json", b"{" + b"".join(b'"%x":0,' % i for i in range(4_000_000)) + b'"":0}'),
        ("sum.py", b"best_configs = {'a': " + b"1+" * 20_000_000 + b"1}"),
        ("tuple.py", b"best_configs = {'a': (" + b"0," * 20_000_000 + b")}"),
        ("entries.py", b"best_configs = {" + b"".join(b"'%x':0," % i for i in range(4_000_000)) + b"}"),
        ("minus.py", b"best_configs = {'a': " + b"-" * 30_000_000 + b"1}"),
        ("string.py", b"'" + b"\\n" * 25_000_000),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_bomb_is_refused_in_one_line_within_little_memory(tmp_path: Path, name: str, data: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    done = limited("check", str(path))
    assert (done.returncode, done.stdout) == (2, ""), done.stderr[-500:]
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


# ---- models ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model_files() -> dict[str, bytes]:
    path = find_model([shipped("models")], "NVIDIA H200", "fp8", DEFAULT_FLASHINFER)
    assert path is not None
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture
def refusal(tmp_path: Path, model_files: dict[str, bytes]) -> Callable[..., str]:
    """Load a model with some files replaced or added, and return why it is refused."""

    def load(method: int = zipfile.ZIP_DEFLATED, meta: dict[str, Any] | None = None, **files: bytes) -> str:
        path = tmp_path / "m.zip"
        content = {**model_files, **{k.replace("__", "/"): v for k, v in files.items()}}
        if meta is not None:
            content["model.json"] = json.dumps({**json.loads(content["model.json"]), **meta}).encode()
        with zipfile.ZipFile(path, "w", method, compresslevel=1) as archive:
            for name, data in content.items():
                archive.writestr(name, data)
        with pytest.raises(SynthError) as e:
            PerformanceModel.load(path)
        assert str(e.value).count("\n") == 0 and "m.zip" in str(e.value) and "synth fit" in str(e.value)
        return str(e.value)

    return load


def npy(array: np.ndarray[Any, Any]) -> bytes:
    out = io.BytesIO()
    np.lib.format.write_array(out, array, allow_pickle=False)
    return out.getvalue()


def forest(sizes: list[int], feature: np.ndarray[Any, Any], value: float = 0.0) -> dict[str, bytes]:
    inner = int((feature != 255).sum())
    arrays = {
        "sizes": np.array(sizes, dtype=np.int32),
        "feature": feature.astype(np.uint8),
        "threshold": np.zeros(inner, dtype=np.float32),
        "value": np.full(len(feature) - inner, value, dtype=np.float16),
    }
    return {f"choice_{name}.npy": npy(array) for name, array in arrays.items()}


def test_the_shipped_model_loads_from_its_files(tmp_path: Path, model_files: dict[str, bytes]) -> None:
    with zipfile.ZipFile(tmp_path / "m.zip", "w") as archive:
        for name, data in model_files.items():
            archive.writestr(name, data)
    PerformanceModel.load(tmp_path / "m.zip")


@pytest.mark.parametrize(
    "name", ["../evil.npy", "/etc/cron.d/x", "choice_evil.npy", "x.py", "a/../model.json", "C:\\x"]
)
def test_no_name_leads_out_of_a_model(refusal: Callable[..., str], tmp_path: Path, name: str) -> None:
    before = set(tmp_path.parent.rglob("*"))
    assert "which no model has" in refusal(**{name: b"x"})
    assert set(tmp_path.parent.rglob("*")) - before == {tmp_path / "m.zip"}


def test_a_model_that_unpacks_to_more_than_any_is_refused(refusal: Callable[..., str], tmp_path: Path) -> None:
    assert "larger than any model" in refusal(**{"choice_value.npy": b"\0" * (70 << 20)})
    assert (tmp_path / "m.zip").stat().st_size < 3 << 20
    assert "description is larger" in refusal(**{"model.json": b" " * (5 << 20)})


def test_a_model_that_declares_less_than_it_holds_is_refused(tmp_path: Path, model_files: dict[str, bytes]) -> None:
    path = tmp_path / "m.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in {**model_files, "choice_value.npy": b"\0" * (200 << 20)}.items():
            archive.writestr(name, data)
    declared = struct.pack("<I", 200 << 20)
    data = path.read_bytes()
    assert data.count(declared) == 2
    path.write_bytes(data.replace(declared, struct.pack("<I", 1000)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(SynthError):
        PerformanceModel.load(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_model_packed_with_a_large_window_is_refused(refusal: Callable[..., str], method: int) -> None:
    assert "packed in another way" in refusal(method)


def test_a_large_file_is_no_model(tmp_path: Path) -> None:
    with (tmp_path / "m.zip").open("wb") as f:
        f.truncate(1 << 40)
    with pytest.raises(SynthError, match="larger than 32 MiB; that is no model"):
        PerformanceModel.load(tmp_path / "m.zip")


def test_a_tree_that_is_one_long_path_is_refused(refusal: Callable[..., str]) -> None:
    # An inner node and a leaf on each level: every prediction would walk through all of them.
    chain = np.zeros(200_001, dtype=np.uint8)
    chain[2::2] = 255
    chain[-1] = chain[-2] = 255
    assert "levels" in refusal(**forest([len(chain)], chain))


def test_trees_that_are_none_are_refused(refusal: Callable[..., str]) -> None:
    leaf = np.full(5000, 255)
    assert "more than 1024 trees" in refusal(**forest([1] * 5000, leaf))
    for sizes in ([-1, 4], [0, 3], [2**31 - 1], [3, 3], [2, 1]):
        refusal(**forest(sizes, np.array([0, 255, 255])))
    # A node whose children lie before it, or beyond the end.
    for nodes in ([0, 255, 0], [255, 0, 255], [0, 0, 0], [255, 255, 255], [len(FEATURES), 255, 255]):
        refusal(**forest([3], np.array(nodes)))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 60000.0, -25.0])
def test_leaves_that_no_time_has_are_refused(refusal: Callable[..., str], value: float) -> None:
    refusal(**forest([3], np.array([0, 255, 255]), value))


@pytest.mark.parametrize(
    "meta",
    [
        {"parameters": {"start": "x"}},
        {"parameters": {"__class__": 1}},
        {"parameters": {"jobs": "x"}},
        {"borrowed": "\x1b[2J"},
        {"borrowed": 3},
        {"digest": "x" * 1000},
        {"shapes": [["\x1b]0;x\x07", "h2048-i1024-e64-k8"]]},
        {"shapes": [["a", "h" + "9" * 5000 + "-i1-e1-k1"]]},
        {"spread": float("nan")},
        {"calibration": {"a": float("inf")}},
        {"format": float("nan")},
        {"held_out": [[[]]]},
    ],
    ids=str,
)
def test_descriptions_that_could_mislead_are_refused(refusal: Callable[..., str], meta: dict[str, Any]) -> None:
    assert refusal(meta=meta).isprintable()


def test_deep_descriptions_are_refused(refusal: Callable[..., str]) -> None:
    refusal(**{"model.json": b'{"a":' * 100_000})


def test_arrays_with_huge_headers_are_refused(refusal: Callable[..., str]) -> None:
    for shape in ("(99999999999999,)", "(-1,)", "(1e99,)", "(2, 3)", "()", "[1]", "(True,)", "(" * 200 + ")" * 200):
        for descr in ("'<f2'", "'<U0'", "'|V0'", "'|O'", "[('a', '|O')]"):
            header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".encode()
            header += b" " * (-(11 + len(header)) % 64) + b"\n"
            refusal(**{"choice_value.npy": b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header})
    version_2 = b"\x93NUMPY\x02\x00" + struct.pack("<I", 2**31) + b"{"
    refusal(**{"choice_value.npy": version_2})


# ---- measurements ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def table() -> bytes:
    path = min(shipped("measurements").rglob("*.csv.gz"), key=lambda p: p.stat().st_size)
    return gzip.decompress(path.read_bytes())


@pytest.fixture
def refused(tmp_path: Path) -> Callable[[bytes], str]:
    def load(data: bytes) -> str:
        path = tmp_path / "t.csv.gz"
        path.write_bytes(data)
        with pytest.raises(SynthError, match=r"t\.csv\.gz") as e:
            read_measurements(path)
        assert str(e.value).isprintable()
        return str(e.value)

    return load


def test_a_table_that_unpacks_to_more_than_any_is_refused(refused: Callable[[bytes], str], table: bytes) -> None:
    assert "unpacks to more than 128 MiB" in refused(gzip.compress(table + b"1" * (130 << 20), 1))
    pack = zlib.compressobj(1, wbits=31)
    million = b"".join(pack.compress(b"\0" * (1 << 20)) for _ in range(3000)) + pack.flush()
    assert "unpacks to more than 128 MiB" in refused(million)


def test_a_million_gzip_files_in_one_are_refused(refused: Callable[[bytes], str]) -> None:
    assert "more than 1000 gzip files" in refused(gzip.compress(b"") * 1_000_000)


def test_a_large_table_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "t.csv.gz"
    with path.open("wb") as f:
        f.write(b"\x1f\x8b")
        f.truncate(1 << 40)
    with pytest.raises(SynthError, match="larger than 64 MiB"):
        read_measurements(path)


def test_a_pipe_among_measurements_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "t.csv.gz")
    with pytest.raises(SynthError, match="no regular file"):
        read_measurements(tmp_path / "t.csv.gz")
    assert load_measurements(tmp_path) == []


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        (b'"label": "', b'"label": "\\u001b]0;owned\\u0007', "is not a name"),
        (b'"label": "', b'"label": "' + b"x" * 300, "is not a name"),
        (b'"device": "', b'"device": "\\u001b[2J', "not a GPU's name"),
        (b'"flashinfer": "0.7.4"', b'"flashinfer": "0.7.4/../../.."', "not a version"),
        (b'"flashinfer": "0.7.4"', b'"flashinfer": "../0.7.4"', "not a version"),
        (b'"quant": "', b'"quant": "../', "not one of"),
        (b'"shape": "', b'"shape": "../', "not a shape"),
        (b'"shape": "h', b'"shape": "h' + b"9" * 20, "size of more than"),
        (b'"shape": "h', b'"shape": "h' + b"9" * 5000, "its head's"),
        (b'"schema": 1', b'"schema": ' + b"1" * 5000, "5000 digits"),
        (b'"schema": 1', b'"schema": NaN', "NaN is not JSON"),
        (b'"schema": 1', b'"schema": ' + b"[" * 100_000, "nested|cut short|not JSON"),
    ],
)
def test_heads_that_could_mislead_are_refused(
    refused: Callable[[bytes], str], table: bytes, old: bytes, new: bytes, match: str
) -> None:
    assert table.count(old) == 1
    assert re.search(match, refused(gzip.compress(table.replace(old, new))))


def test_an_id_for_which_arrays_would_fill_the_memory_is_refused(refused: Callable[[bytes], str], table: bytes) -> None:
    odd = table.replace(b'"flashinfer": "0.7.4"', b'"flashinfer": "99.0.0"')
    assert odd != table
    at = odd.index(b'"tactics": {') + len(b'"tactics": {')
    huge = b'"999999999": "sm80 16x128x64_w16x32x64 stages2",'
    assert "none is that large" in refused(gzip.compress(odd[:at] + huge + odd[at:]))


def test_a_tactic_whose_size_no_int_holds_is_refused(refused: Callable[[bytes], str], table: bytes) -> None:
    odd = table.replace(b'"flashinfer": "0.7.4"', b'"flashinfer": "99.0.0"')
    at = odd.index(b'"tactics": {') + len(b'"tactics": {')
    huge = b'"1000": "sm80 16x128x64_w16x32x64 stages' + b"2" * 5000 + b'",'
    assert "correct the head's tactics" in refused(gzip.compress(odd[:at] + huge + odd[at:]))


def test_notes_are_kept_as_text_that_may_be_printed_and_is_no_formula(tmp_path: Path, table: bytes) -> None:
    path = tmp_path / "t.csv.gz"
    first = table[table.index(b"note\n") + 5 :].split(b"\n")[0].split(b",")
    row = b",".join([*first[:4], b"", b'"error: =HYPERLINK(""http://x"")\x1b[31m"'])
    path.write_bytes(gzip.compress(table[: table.index(b"note\n") + 5] + row + b"\n"))
    timings = read_measurements(path)
    (error,) = timings.errors.values()
    assert error == '=HYPERLINK("http://x") [31m' and error.isprintable()
    # Written back, a cell never begins with what a spreadsheet takes for a formula.
    written = gzip.decompress(dumps(timings)).decode().splitlines()[-1]
    assert '"error: =' in written


# ---- sidecars ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choices", "match"),
    [
        (b"1" * 2000, "2000 digits"),
        (b'[{"shape": "h1-i1-e1-k1", "ms": NaN}]', "NaN is not JSON"),
        (b"[" * 100, "nested more than 64"),
        (b'"\xff"', "utf-8"),
        (b"{}", "no list of choices"),
        (b"[3]", "choice 1"),
        (b'[{"shape": 3}]', "choice 1"),
    ],
)
def test_hostile_sidecars_are_refused_in_one_line(tmp_path: Path, choices: bytes, match: str) -> None:
    config = tmp_path / "a.json"
    config.write_bytes(b"{}")
    digest = hashlib.sha256(b"{}").hexdigest().encode()
    sidecar_path(config).write_bytes(b'{"config_sha256": "%s", "choices": %s}' % (digest, choices))
    with pytest.raises(SynthError, match=match) as e:
        _ = read(config).sidecar
    assert "\n" not in str(e.value) and "provenance.json" in str(e.value)


def test_a_time_in_a_sidecar_that_no_float_holds_is_refused(tmp_path: Path) -> None:
    config = tmp_path / "a.json"
    config.write_bytes(b"{}")
    record = Record("h1", (), "bf16", 1, 1, True, "measured", True, "a", 0.1, "b", 0.1, 0, 0.1, 0, 1, 1, 1, ("k",))
    text = Sidecar({}, (record,)).dumps(b"{}").replace(b'"ms": 0.1', b'"ms": 1' + b"0" * 400)
    sidecar_path(config).write_bytes(text)
    with pytest.raises(SynthError, match="choice 1"):
        _ = read(config).sidecar


def test_a_pipe_in_a_sidecars_place_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b"{}")
    os.mkfifo(sidecar_path(tmp_path / "a.json"))
    with pytest.raises(SynthError, match="no regular file"):
        _ = read(tmp_path / "a.json").sidecar
