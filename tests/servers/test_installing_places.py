"""Where vLLM 0.33.0 and SGLang 0.5.23 look; tests/test_installing_engines.py compares with their own code."""

from __future__ import annotations

from pathlib import Path

import pytest

from synth.errors import SynthError
from synth.servers.places import LAYOUTS, candidates, rank_files, search_root, variables

VLLM_HASH, SGLANG_HASH = "0123456789abcdef" * 4, "0123456789abcdef"
RANK = {"vllm": "autotune_configs_dp0_rank0.json", "sglang": "rank_tp0_pp0_dp0.json"}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def make(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_text("{}")
    return folder


@pytest.mark.parametrize(
    ("engine", "environment", "folder"),
    [
        ("vllm", {}, "HOME/.cache/vllm/flashinfer_autotune_cache/0.7.4/90a/HASH"),
        ("vllm", {"XDG_CACHE_HOME": "HOME/x"}, "HOME/x/vllm/flashinfer_autotune_cache/0.7.4/90a/HASH"),
        ("vllm", {"VLLM_CACHE_ROOT": "HOME/v"}, "HOME/v/flashinfer_autotune_cache/0.7.4/90a/HASH"),
        ("vllm", {"VLLM_CACHE_ROOT": "~/v"}, "HOME/v/flashinfer_autotune_cache/0.7.4/90a/HASH"),
        (
            "vllm",
            {"VLLM_CACHE_ROOT": "HOME/v", "XDG_CACHE_HOME": "HOME/x"},
            "HOME/v/flashinfer_autotune_cache/0.7.4/90a/HASH",
        ),
        ("vllm", {"VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR": "HOME/a"}, "HOME/a/HASH"),
        ("vllm", {"VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR": "~/a", "VLLM_CACHE_ROOT": "HOME/v"}, "HOME/a/HASH"),
        (
            "vllm",
            {"VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR": ""},
            "HOME/.cache/vllm/flashinfer_autotune_cache/0.7.4/90a/HASH",
        ),
        ("sglang", {}, "HOME/.cache/sglang/flashinfer/autotune/0.7.4/sm90/HASH"),
        ("sglang", {"SGLANG_CACHE_DIR": "HOME/s"}, "HOME/s/flashinfer/autotune/0.7.4/sm90/HASH"),
    ],
)
def test_the_folder_is_found_where_the_server_looks_and_the_variables_lead_there(
    home: Path, engine: str, environment: dict[str, str], folder: str
) -> None:
    environment = {name: value.replace("HOME", str(home)) for name, value in environment.items()}
    name = VLLM_HASH if engine == "vllm" else SGLANG_HASH
    place = make(Path(folder.replace("HOME", str(home)).replace("HASH", name)), RANK[engine])
    assert candidates(engine, "0.7.4", environment) == [place]

    # Whoever sets no more than these, and unsets what is to be unset, is led to the same folder.
    said = variables(engine, place, environment)
    assert said is not None
    assert candidates(engine, "0.7.4", {k: v for k, v in said.items() if v is not None}) == [place]
    kept = {k: v for k, v in environment.items() if said.get(k, v) is not None}
    assert candidates(engine, "0.7.4", {**kept, **{k: v for k, v in said.items() if v is not None}}) == [place]


@pytest.mark.parametrize("engine", LAYOUTS)
def test_a_default_place_needs_no_variable(home: Path, engine: str) -> None:
    root, pattern = search_root(engine, {})
    name = VLLM_HASH if engine == "vllm" else SGLANG_HASH
    folder = root / pattern.format(version="0.7.4").replace("*/*", f"sm90/{name}")
    assert variables(engine, folder, {}) == {}


def test_what_would_lead_elsewhere_is_to_be_unset(home: Path) -> None:
    folder = home / ".cache/vllm/flashinfer_autotune_cache/0.7.4/90a" / VLLM_HASH
    assert variables("vllm", folder, {"VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR": "/elsewhere"}) == {
        "VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR": None
    }
    folder = home / ".cache/sglang/flashinfer/autotune/0.7.4/sm90" / SGLANG_HASH
    assert variables("sglang", folder, {"SGLANG_FLASHINFER_AUTOTUNE_CACHE": "False"}) == {
        "SGLANG_FLASHINFER_AUTOTUNE_CACHE": None
    }


def test_no_variable_leads_sglang_to_a_folder_of_another_form(home: Path) -> None:
    assert variables("sglang", home / SGLANG_HASH, {}) is None
    assert variables("sglang", Path("/"), {}) is None
    assert variables("vllm", home / VLLM_HASH, {}) == {"VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR": str(home)}


@pytest.mark.parametrize(
    ("engine", "name", "taken"),
    [
        ("vllm", "autotune_configs_dp0_rank0.json", True),
        ("vllm", "autotune_configs_dp12_rank345.json", True),
        ("vllm", "autotune_configs.json", True),
        ("vllm", ".autotune_configs_dp0_rank0.json.x.tmp", False),
        ("vllm", "autotune_configs_dp0_rank0.json.synth-kept", False),
        ("vllm", "autotune_configs_dp0_rank٣.json", False),
        ("vllm", "rank_tp0_pp0_dp0.json", False),
        ("sglang", "rank_tp0_pp0_dp0.json", True),
        ("sglang", "rank_tp10_pp3_dp2.json", True),
        ("sglang", "rank_tp0_pp0_dp0_gpuGPU-8f3a.json", False),
        ("sglang", "rank_tp0_pp0_dp0.20260101_000000.0.json", False),
        ("sglang", "runs", False),
    ],
)
def test_only_files_of_ranks_are_taken(tmp_path: Path, engine: str, name: str, taken: bool) -> None:
    make(tmp_path / "c", name)
    assert [p.name for p in rank_files(engine, tmp_path / "c")] == [name] * taken


def test_ranks_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    names = [f"rank_tp{n}_pp0_dp0.json" for n in (0, 1, 2, 10, 11)]
    make(tmp_path / "c", *reversed(names))
    assert [p.name for p in rank_files("sglang", tmp_path / "c")] == names


def test_folders_without_files_of_other_versions_and_of_other_names_are_no_candidates(home: Path) -> None:
    root = home / ".cache/vllm/flashinfer_autotune_cache"
    wanted = make(root / "0.7.4/90a" / VLLM_HASH, RANK["vllm"])
    make(root / "0.7.4/90a" / ("f" * 64))
    make(root / "0.7.4/90a/backup", RANK["vllm"])
    other = make(root / "0.7.2/90a" / VLLM_HASH, RANK["vllm"])
    assert candidates("vllm", "0.7.4", {}) == [wanted]
    assert candidates("vllm", "*", {}) == [other, wanted]


def test_a_folder_that_is_not_there_is_an_error_of_one_line(tmp_path: Path) -> None:
    with pytest.raises(SynthError, match="--folder") as e:
        rank_files("vllm", tmp_path / "none")
    assert "\n" not in str(e.value)
