"""Config files: bytes out, entries in, and no surprises from hostile files."""

from __future__ import annotations

import ast
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from synth.configs.model import Entry
from synth.configs.module import dumps_bundled
from synth.configs.reading import read
from synth.configs.store import entry_file, environment_hash
from synth.configs.v1 import dumps_json
from synth.errors import SynthError
from synth.flashinfer.versions import POLICY, build_metadata

METADATA = build_metadata("NVIDIA H200", provenance={"note": 'a """ and a \\ and é'})
times = st.none() | st.floats(1e-6, 1e6).map(lambda x: float(f"{x:.6g}"))
entry_lists = st.lists(
    st.builds(Entry, st.text(min_size=1, max_size=30), st.integers(0, 200), times, times, times, st.integers(1)),
    max_size=8,
    unique_by=lambda e: e.text,
).filter(lambda entries: not {e.text for e in entries} & {"_metadata", "_generation", "_records"})


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(entries=entry_lists)
def test_json_reads_back(tmp_path: Path, entries: list[Entry]) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(dumps_json(METADATA, entries))
    config = read(path)
    assert config.metadata == METADATA
    assert set(config.entries) == set(entries)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(entries=entry_lists)
def test_bundled_reads_back_and_python_agrees(tmp_path: Path, entries: list[Entry]) -> None:
    data = dumps_bundled(METADATA, entries)
    path = tmp_path / "a.py"
    path.write_bytes(data)
    config = read(path)
    assert config.metadata == METADATA
    assert {(e.text, e.tactic_id) for e in config.entries} == {(e.text, e.tactic_id) for e in entries}
    executed: dict[str, Any] = {}
    exec(data, executed)
    assert executed["best_configs"] == {e.text: (0, e.tactic_id) for e in entries}


@given(entries=entry_lists)
def test_the_order_of_entries_changes_no_byte(entries: list[Entry]) -> None:
    turned = list(reversed(entries))
    assert dumps_json(METADATA, entries) == dumps_json(dict(reversed(METADATA.items())), turned)
    assert dumps_bundled(METADATA, entries) == dumps_bundled(dict(reversed(METADATA.items())), turned)


def test_json_is_what_flashinfer_writes() -> None:
    data = dumps_json(METADATA, [Entry("k", 27, 0.0412345678, 0.05, 0.212576, 32), Entry("j", 3)])
    assert data.endswith(b"}\n")
    written = json.loads(data)
    assert written["k"] == [
        "MoERunner",
        27,
        ["cuda_graph_profile_replays", None, "l2_cache_policy", "hot"],
        {"time_ms": 0.0412346, "runner_up_ms": 0.05, "margin": 0.212576, "candidates": 32},
    ]
    assert len(written["j"]) == 3
    assert list(written) == ["_metadata", "j", "k"]


@pytest.mark.parametrize(
    "entries",
    [
        [Entry("k", 1), Entry("k", 2)],
        [Entry("_metadata", 1)],
        [Entry("k", -1)],
        [Entry("k", True)],
        [Entry("k", 1, math.nan)],
        [Entry("k", 1, 0.1, math.inf)],
    ],
)
def test_what_flashinfer_could_not_use_is_not_written(entries: list[Entry]) -> None:
    with pytest.raises(SynthError):
        dumps_json(METADATA, entries)


@pytest.mark.parametrize("entries", [[Entry("k", 1), Entry("k", 2)], [Entry("k", -1)]])
def test_nor_as_a_module(entries: list[Entry]) -> None:
    with pytest.raises(SynthError):
        dumps_bundled(METADATA, entries)


@pytest.mark.parametrize(
    ("name", "data", "match"),
    [
        ("a.json", b"", "empty"),
        ("a.json", b" \n", "empty"),
        ("a.json", b'{"k": ["MoERunner", 1', "line 1"),
        ("a.json", b"\xff\xfe{}", "UTF-8"),
        ("a.json", b"\xef\xbb\xbf{}", "BOM"),
        ("a.json", b"[1, 2]", "list"),
        ("a.json", b'"text"', "str"),
        ("a.json", b"[" * 200_000, "nested more than 64 levels"),
        ("a.json", b'{"k": ' + b"1" * 10_000 + b"}", "10000 digits"),
        ("a.py", b"best_configs = {", "never closed"),
        ("a.py", b"import os\nbest_configs = {}", "other than"),
        ("a.py", b"best_configs = {}\nopen('x', 'w')", "other than"),
        ("a.py", b"best_configs = dict()", "other than"),
        ("a.py", b"best_configs = {'k': print()}", "line 1: not a literal"),
        ("a.py", b"best_configs = {3: (0, 1)}", "a key is not text"),
        ("a.py", b"best_configs = {**x}", "not a literal"),
        ("a.py", b"x = best_configs = {}", "other than"),
        ("a.py", b"'only a docstring'", "other than"),
        ("a.py", b"best_configs = " + b"(" * 5000, "too many nested"),
        ("a.py", b"best_configs = {'k': " + b"(" * 5000, "not a literal"),
        ("a.py", b"best_configs = {'k': " + b"1+" * 100_000 + b"1}", "not a literal"),
        ("a.py", b"best_configs = {'k': " + b"-" * 100_000 + b"1}", "not a literal"),
        ("a.py", b"best_configs = {}\0", "zero byte"),
    ],
)
def test_a_hostile_file_is_refused_in_one_line_that_names_it(
    tmp_path: Path, name: str, data: bytes, match: str
) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(SynthError, match=match) as e:
        read(path)
    assert str(path) in str(e.value)
    assert "\n" not in str(e.value)


def test_missing_files_and_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(SynthError, match="nowhere"):
        read(tmp_path / "nowhere.json")
    with pytest.raises(SynthError, match="directory"):
        read(tmp_path)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.json")
    with pytest.raises(SynthError, match="no regular file"):
        read(tmp_path / "a.json")


def test_wrong_entries_are_kept_as_they_are(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "dict": {"tactic": 1},
        "null": None,
        "policy": ["MoERunner", 1, None],
        "bool": ["MoERunner", True],
        "float": ["MoERunner", 1.5],
        "huge": ["MoERunner", 10**400, ["x"], {"time_ms": 10**400, "candidates": True}],
        "other": ["OtherRunner", 1],
        "good": ["MoERunner", 1],
    }
    path = tmp_path / "a.json"
    path.write_text(json.dumps({**values, "_generation": "x", "_records": {}}), encoding="utf-8")
    config = read(path)
    assert config.raw == values
    assert config.members == {"_generation": "x", "_records": {}}
    assert config.metadata is None
    assert [e.text for e in config.served] == ["huge", "good"]
    assert config.served[0].time_ms is None and config.served[0].candidates is None


def test_nan_is_kept_and_duplicates_are_known(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"k": ["MoERunner", NaN], "k": ["MoERunner", 2], "j": {"a": 1, "a": 2}}', encoding="utf-8")
    config = read(path)
    assert config.duplicates == ("k",)
    assert config.served == (Entry("k", 2),)
    module = tmp_path / "a.py"
    module.write_text("best_configs = {'k': (0, 1), 'k': (0, 2)}", encoding="utf-8")
    assert read(module).duplicates == ("k",)
    assert read(module).metadata is None


def test_a_module_is_never_executed(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text(f"best_configs = {{'k': open({str(tmp_path / 'ran')!r}, 'w')}}", encoding="utf-8")
    with pytest.raises(SynthError):
        read(path)
    assert not (tmp_path / "ran").exists()


def test_the_gpu_is_none_for_wildcards_and_unknowns(write: Callable[..., Path]) -> None:
    assert read(write()).gpu == "NVIDIA H200"
    for gpu in ("*", "unknown", None, 3):
        assert read(write(metadata={**METADATA, "gpu": gpu})).gpu is None


def test_equal_and_different_duplicates_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"k": [1, 1], "k": [1, 1], "j": [1, 1], "j": [1, true], "n": NaN, "n": NaN}', encoding="utf-8")
    assert (read(path).duplicates, read(path).differing) == (("k", "j", "n"), ("j",))
    module = tmp_path / "a.py"
    module.write_text("best_configs = {'k': (0, 1), 'j': 1, 'k': (0, 1), 'j': 1.0}", encoding="utf-8")
    assert (read(module).duplicates, read(module).differing) == (("k", "j"), ("j",))


def test_the_gpu_of_a_module_is_in_its_name(tmp_path: Path) -> None:
    path = tmp_path / "v0_1_trtllm_fused_moe_NVIDIA_B200.py"
    path.write_bytes(b"best_configs = {}")
    assert read(path).gpu == "NVIDIA B200"
    path.write_bytes(dumps_bundled(METADATA, []))
    assert read(path).gpu == "NVIDIA H200"


# ---- modules: what is read is what Python reads ------------------------------------------------------------


def as_python_reads(data: bytes) -> dict[object, object] | None:
    """Return the dict of a module by Python's own parser, None where it isn't one of literals."""
    try:
        body = ast.parse(data).body
        node = body[-1]
        assert isinstance(node, ast.Assign)
        return dict(ast.literal_eval(node.value))
    except (SyntaxError, ValueError, TypeError, AssertionError, IndexError):
        return None


literals = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.dictionaries(st.text(max_size=12), literals, max_size=4))
def test_every_dict_of_literals_is_read_as_python_reads_it(tmp_path: Path, content: dict[str, Any]) -> None:
    path = tmp_path / "a.py"
    data = f"best_configs = {content!r}\n".encode()
    path.write_bytes(data)
    assert repr(dict(read(path).raw)) == repr(as_python_reads(data)) == repr(content)


_PIECES = (
    "'k'", '"j"', "'''l\nm'''", "(0, 1)", "(0, 1,)", "(0)", "()", "[]", "[1,]", "{}", "{1: 2}", "-1", "+1.5", "1_0",
    "0x1f", "1j", "007", "1e5", ".5", "True", "None", "nan", "r'x'", "'a' 'b'", "'\\n\\x41'", "'\\", "'\\d'", ",", ",",
    ":", ":", "(", ")", "{", "}", "\n", "\n ", "\r", " ", "#c\n", "\\\n", ";", "=", "best_configs", "best_configs = {",
    "}", "-", "*", "if", "'k': (0, 3),", "'j': 4,",
)  # fmt: skip


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=1000)
@given(pieces=st.lists(st.sampled_from(_PIECES), max_size=12), wrapped=st.booleans())
@pytest.mark.filterwarnings("ignore::SyntaxWarning", "ignore::DeprecationWarning")
def test_what_is_read_of_a_module_is_what_python_reads(tmp_path: Path, pieces: list[str], wrapped: bool) -> None:
    text = "".join(pieces)
    data = (f"best_configs = {{{text}}}" if wrapped else text).encode()
    path = tmp_path / "a.py"
    path.write_bytes(data)
    try:
        config = read(path)
    except SynthError:
        return
    assert repr(dict(config.raw)) == repr(as_python_reads(data))


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"# coding: latin-1\nbest_configs = {}", "latin-1"),
        (b"#!/usr/bin/python\n# -*- coding: utf-7 -*-\nbest_configs = {}", "utf-7"),
        (b" best_configs = {}", "unexpected indent"),
        (b"best_configs = {}\n  # fine\n x", "other than"),
        (b"best_configs\n= {}", "line 2: .*invalid syntax"),
        (b"best_configs = {}; x", "other than"),
        (b"'a'\n'b'\nbest_configs = {}", "other than"),
        (b"best_configs = {'a", "not a literal"),
        (b"best_configs = {'a\n': 1}", "not a literal"),
        (b"best_configs = {f'a': 1}", "line 1: not a literal"),
        (b"best_configs = {'a': 1 + 1}", "not a literal"),
        (b"best_configs = {'a': {[]: 2}}", "not a literal"),
        (b"best_configs = {'a': (1, 2]}", "not a literal"),
        (b"best_configs = {\n'a': 1\n'b': 2}", "line 2: not a literal.*forgot a comma"),
        (b"best_configs = {'a': " + b"9" * 2000 + b"}", "not a literal"),
    ],
)
def test_what_python_might_read_otherwise_is_refused(tmp_path: Path, data: bytes, match: str) -> None:
    path = tmp_path / "a.py"
    path.write_bytes(data)
    with pytest.raises(SynthError, match=match) as e:
        read(path)
    assert "\n" not in str(e.value)


# ---- managed stores ----------------------------------------------------------------------------------------

MANIFEST = {**dict.fromkeys(METADATA, "1.2.3"), "gpu": "NVIDIA H200", "cache_schema": "v2"}


def store(root: Path, *entries: tuple[str, object], manifest: dict[str, str] = MANIFEST) -> Path:
    """Write a store in FlashInfer's layout and return its folder for the environment."""
    folder = root / "v2" / environment_hash(manifest)
    (folder / "entries").mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    for key, entry in entries:
        (folder / "entries" / entry_file(key)).write_text(json.dumps(entry), encoding="utf-8")
    return folder


def flashinfers_store(root: Path) -> Any:
    environment = {k: v for k, v in MANIFEST.items() if k != "cache_schema"}
    return pytest.importorskip("flashinfer.autotune_cache").ManagedAutotuneCache(environment, root)


def test_a_store_that_flashinfer_wrote_is_read(tmp_path: Path) -> None:
    cache = flashinfers_store(tmp_path)
    cache.publish("k", "MoERunner", 7, key_fields=("k",), profiling_policy=POLICY)
    cache.publish("j", "MoERunner", [1, 2])
    for path in (tmp_path, tmp_path / "v2", cache.env_dir):
        config = read(path)
        assert (config.form, config.metadata, config.passed_over) == ("store", MANIFEST, {})
        assert config.raw == {"k": ["MoERunner", 7, list(POLICY)], "j": ["MoERunner", [1, 2]]}
        assert config.gpu == "NVIDIA H200"
        assert config.served == (Entry("k", 7),)


def test_what_flashinfer_passes_over_in_a_store_is_no_entry(tmp_path: Path) -> None:
    good = {"key": "k", "runner": "MoERunner", "tactic": 7}
    folder = store(tmp_path, ("k", good), ("j", good), ("a", []), ("b", {"key": "b"}), ("c", {**good, "key": 3}))
    entries = folder / "entries"
    (entries / entry_file("d")).write_text("{", encoding="utf-8")
    (entries / entry_file("e")).mkdir()
    (entries / ".autotune_x.tmp").write_text("{", encoding="utf-8")
    config = read(tmp_path)
    assert list(config.raw) == ["k"]
    assert config.passed_over.keys() == {entry_file(name) for name in "jabcde"}
    assert entry_file("k") in config.passed_over[entry_file("j")]
    assert "no runner and no tactic" in config.passed_over[entry_file("b")]

    cache = flashinfers_store(tmp_path)
    assert cache.env_dir == folder
    assert [name for name in "kjabcde" if cache.lookup(name) is not None] == ["k"]


def test_a_pipe_in_a_store_is_passed_over_and_not_waited_for(tmp_path: Path) -> None:
    folder = store(tmp_path)
    os.mkfifo(folder / "entries" / entry_file("f"))
    assert "no regular file" in read(folder).passed_over[entry_file("f")]


def test_a_store_in_a_folder_of_another_name_is_known_to_be_lost(tmp_path: Path) -> None:
    folder = store(tmp_path)
    folder.rename(folder.with_name("0" * 16))
    assert environment_hash(MANIFEST) in read(tmp_path).passed_over["manifest.json"]


def test_a_root_with_several_environments_asks_for_one(tmp_path: Path) -> None:
    first = store(tmp_path)
    second = store(tmp_path, manifest={**MANIFEST, "gpu": "NVIDIA B200"})
    with pytest.raises(SynthError, match="2 environments") as e:
        read(tmp_path)
    assert first.name in str(e.value) and second.name in str(e.value)
    assert read(second).gpu == "NVIDIA B200"


def test_no_link_in_a_store_is_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    secret = {"key": "k", "runner": "MoERunner", "tactic": 7}
    (outside / entry_file("k")).write_text(json.dumps(secret), encoding="utf-8")
    folder = store(tmp_path / "a")
    (folder / "entries" / entry_file("k")).symlink_to(outside / entry_file("k"))
    config = read(folder)
    assert not config.raw and "link" in config.passed_over[entry_file("k")]
    folder = store(tmp_path / "b")
    (folder / "entries").rmdir()
    (folder / "entries").symlink_to(outside)
    with pytest.raises(SynthError, match="link"):
        read(folder)
    folder = store(tmp_path / "c")
    (folder / "manifest.json").rename(outside / "manifest.json")
    (folder / "manifest.json").symlink_to(outside / "manifest.json")
    with pytest.raises(SynthError, match="link"):
        read(folder)
    (tmp_path / "d" / "v2").mkdir(parents=True)
    (tmp_path / "d" / "v2" / "x").symlink_to(store(tmp_path / "e"))
    with pytest.raises(SynthError, match="no managed store"):
        read(tmp_path / "d")


def test_a_large_file_in_a_store_is_passed_over(tmp_path: Path) -> None:
    folder = store(tmp_path, ("k", {"key": "k", "runner": "MoERunner", "tactic": "x" * 100_000}))
    assert list(read(folder).passed_over) == [entry_file("k")]
