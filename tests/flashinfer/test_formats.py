"""Config files: bytes out, entries in, and no surprises from hostile files."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from synth.errors import SynthError
from synth.flashinfer.contract import build_metadata
from synth.flashinfer.formats import ConfigEntry, dumps_bundled, dumps_json, read

METADATA = build_metadata("NVIDIA H200", provenance={"note": 'a """ and a \\ and é'})
times = st.none() | st.floats(1e-6, 1e6).map(lambda x: float(f"{x:.6g}"))
entry_lists = st.lists(
    st.builds(ConfigEntry, st.text(min_size=1, max_size=30), st.integers(0, 200), times, times, times, st.integers(1)),
    max_size=8,
    unique_by=lambda e: e.key,
).filter(lambda entries: not {e.key for e in entries} & {"_metadata", "_generation", "_records"})


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(entries=entry_lists)
def test_json_reads_back(tmp_path: Path, entries: list[ConfigEntry]) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(dumps_json(METADATA, entries))
    config = read(path)
    assert config.metadata == METADATA
    assert set(config.entries) == set(entries)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(entries=entry_lists)
def test_bundled_reads_back_and_python_agrees(tmp_path: Path, entries: list[ConfigEntry]) -> None:
    data = dumps_bundled(METADATA, entries)
    path = tmp_path / "a.py"
    path.write_bytes(data)
    config = read(path)
    assert config.metadata == METADATA
    assert {(e.key, e.tactic_id) for e in config.entries} == {(e.key, e.tactic_id) for e in entries}
    executed: dict[str, Any] = {}
    exec(data, executed)
    assert executed["best_configs"] == {e.key: (0, e.tactic_id) for e in entries}


@given(entries=entry_lists)
def test_the_order_of_entries_changes_no_byte(entries: list[ConfigEntry]) -> None:
    turned = list(reversed(entries))
    assert dumps_json(METADATA, entries) == dumps_json(dict(reversed(METADATA.items())), turned)
    assert dumps_bundled(METADATA, entries) == dumps_bundled(dict(reversed(METADATA.items())), turned)


def test_json_is_what_flashinfer_writes() -> None:
    data = dumps_json(METADATA, [ConfigEntry("k", 27, 0.0412345678, 0.05, 0.212576, 32), ConfigEntry("j", 3)])
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
        [ConfigEntry("k", 1), ConfigEntry("k", 2)],
        [ConfigEntry("_metadata", 1)],
        [ConfigEntry("k", -1)],
        [ConfigEntry("k", True)],
        [ConfigEntry("k", 1, math.nan)],
        [ConfigEntry("k", 1, 0.1, math.inf)],
    ],
)
def test_what_flashinfer_could_not_use_is_not_written(entries: list[ConfigEntry]) -> None:
    with pytest.raises(SynthError):
        dumps_json(METADATA, entries)


@pytest.mark.parametrize("entries", [[ConfigEntry("k", 1), ConfigEntry("k", 2)], [ConfigEntry("k", -1)]])
def test_nor_as_a_module(entries: list[ConfigEntry]) -> None:
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
        ("a.json", b"[" * 200_000, "can't be read"),
        ("a.json", b'{"k": ' + b"1" * 10_000 + b"}", "can't be read"),
        ("a.py", b"best_configs = {", "not Python"),
        ("a.py", b"import os\nbest_configs = {}", "other than"),
        ("a.py", b"best_configs = {}\nopen('x', 'w')", "other than"),
        ("a.py", b"best_configs = dict()", "not a dict literal"),
        ("a.py", b"best_configs = {'k': print()}", "line 1: not a literal"),
        ("a.py", b"best_configs = {3: (0, 1)}", "a key is not text"),
        ("a.py", b"best_configs = {**x}", "not a literal"),
        ("a.py", b"x = best_configs = {}", "other than"),
        ("a.py", b"'only a docstring'", "other than"),
        ("a.py", b"best_configs = " + b"(" * 5000, "parsed|not Python"),
        ("a.py", b"best_configs = {'k': " + b"-" * 100_000 + b"1}", "parsed|not Python|not a literal"),
        ("a.py", b"best_configs = {}\0", "parsed|not Python"),
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
    assert config.special == {"_generation": "x", "_records": {}}
    assert config.metadata is None
    assert [e.key for e in config.entries] == ["huge", "good"]
    assert config.entries[0].time_ms is None and config.entries[0].candidates is None


def test_nan_is_kept_and_duplicates_are_known(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"k": ["MoERunner", NaN], "k": ["MoERunner", 2], "j": {"a": 1, "a": 2}}', encoding="utf-8")
    config = read(path)
    assert config.duplicates == ("k",)
    assert config.entries == (ConfigEntry("k", 2),)
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
