"""The installed FlashInfer loads the files and serves them."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from synth.catalog.shapes import Deployment, MoEShape
from synth.checking.check import check
from synth.configs.model import BUNDLED_PREFIX, Entry
from synth.configs.module import dumps_bundled
from synth.configs.v1 import dumps_json
from synth.errors import MissingDependencyError, SynthError
from synth.flashinfer.buckets import token_buckets
from synth.flashinfer.calls import ENGINES
from synth.flashinfer.keys import file_keys
from synth.flashinfer.tactics import load_table
from synth.flashinfer.versions import build_metadata
from synth.gpu.replay import replay
from synth.gpu.stub import stubbed_gpu

pytest.importorskip("flashinfer.autotuner")

H200 = "NVIDIA H200"
RTX = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
Write = Callable[..., Path]


def first_key(content: dict[str, Any]) -> str:
    return next(k for k in content if not k.startswith("_"))


def test_every_key_of_a_good_file_is_served(write: Write, entries: list[Entry]) -> None:
    report = replay(write())
    assert report.ok and report.loaded
    assert report.keys == report.keys_hit == len(entries)
    assert report.hits == report.lookups > 10 * len(entries)
    assert (report.misses, report.notes, report.reprofiled) == ((), (), 0)
    assert (report.flashinfer, report.device, report.arch) == ("0.7.4", H200, "sm90")


@pytest.mark.parametrize(
    ("quant", "arch", "device"),
    [("fp8", "sm90", H200), ("nvfp4", "sm120", RTX), ("mxfp8_mxfp4", "sm120", RTX), ("fp8", "sm120", RTX)],
)
@pytest.mark.parametrize("fused", [True, False])
def test_every_quantization_is_served(tmp_path: Path, quant: str, arch: str, device: str, fused: bool) -> None:
    gated = quant != "fp8"
    d = Deployment("m", 2, 4, quant, "swiglu" if gated else "relu2", True, MoEShape(512, 256, 8, 4, 4, gated))
    table = load_table(arch, quant)
    table = table if fused else table.without_fused_finalize()
    entries = {
        key: Entry(key, table.ids(stage)[-1])
        for engine in ENGINES
        for stage in (1, 2)
        for bucket in token_buckets(32768)
        for key in file_keys(d, engine, bucket, stage, arch, fused_finalize=fused)
    }
    json_path, module = tmp_path / "a.json", tmp_path / f"{BUNDLED_PREFIX}{device.replace(' ', '_')}.py"
    json_path.write_bytes(dumps_json(build_metadata(device), entries.values()))
    module.write_bytes(dumps_bundled(build_metadata(device), entries.values()))
    for path in (json_path, module):
        report = replay(path)
        assert report.ok, report.misses[:2]
        assert report.hits == report.lookups
        assert report.arch == arch
    # Bundled files are not read while a server tunes, so all of it is timed again.
    assert report.reprofiled == report.keys


def test_the_bundled_loader_serves_and_names_the_file_it_looks_for(write: Write) -> None:
    report = replay(write(name="mine.py"))
    assert report.ok
    assert report.notes == (
        f"replayed as {BUNDLED_PREFIX}NVIDIA_H200.py, the only name FlashInfer looks for on {H200}",
    )


def test_the_gpu_of_a_module_without_metadata_is_in_its_name(tmp_path: Path, entries: list[Entry]) -> None:
    path = tmp_path / f"{BUNDLED_PREFIX}NVIDIA_H200.py"
    path.write_text(f"best_configs = { {e.text: (0, e.tactic_id) for e in entries}!r}", encoding="utf-8")
    report = replay(path)
    assert report.ok and report.device == H200


@pytest.mark.parametrize("device", ["NVIDIA RTX 4.5", "NVIDIA A/B"])
def test_a_module_that_python_cannot_import_is_a_miss(write: Write, tmp_path: Path, device: str) -> None:
    report = replay(write(name="a.py"), device=device, arch="sm90")
    assert {m.code for m in report.misses} == {"not-importable"}
    assert report.keys_hit == 0
    # Python itself can't, even with the file in place.
    name = BUNDLED_PREFIX + device.replace(" ", "_")
    package = tmp_path / "package"
    (package / name).parent.mkdir(parents=True)
    (package / f"{name}.py").write_text("best_configs = {}")
    sys.path.insert(0, str(tmp_path))
    try:
        with pytest.raises(ImportError):
            importlib.import_module(f"package.{name}")
    finally:
        sys.path.remove(str(tmp_path))


def test_flashinfers_own_b200_file_is_dead() -> None:
    flashinfer = importlib.import_module("flashinfer")
    path = Path(flashinfer.__file__).parent / "tuning_configs" / f"{BUNDLED_PREFIX}NVIDIA_B200.py"
    report = replay(path, arch="sm100")
    assert report.keys_hit == report.hits == 0
    assert {m.code for m in report.misses} == {"key-3-tuple"}
    assert len(report.misses) == report.keys > 50
    # And FlashInfer agrees: its loader has the file, but not the key that it forms.
    d = Deployment("deepseek-v3", 8, 1, "nvfp4", "swiglu", False, MoEShape(7168, 256, 256, 8))
    os.environ["FLASHINFER_AUTOTUNER_LOAD_FROM_FILE"] = "1"
    try:
        with stubbed_gpu("NVIDIA B200", "sm100"):
            load = importlib.import_module("flashinfer.autotuner.autotuner").load_from_file
            assert not load(file_keys(d, "vllm", 128, 1, "sm100")[0])[0]
            assert load(file_keys(d, "vllm", 128, 1, "sm100", "0.6.12")[0])[0]
    finally:
        del os.environ["FLASHINFER_AUTOTUNER_LOAD_FROM_FILE"]


@pytest.mark.parametrize(
    ("field", "value"), [("flashinfer_version", "0.7.3"), ("cuda_version", "1.0"), ("gpu", "NVIDIA H100")]
)
def test_a_metadata_mismatch_names_the_field(write: Write, field: str, value: str) -> None:
    report = replay(write(metadata={**build_metadata(H200), field: value}), device=H200)
    assert not report.loaded and report.keys_hit == report.lookups == 0
    assert {m.code for m in report.misses} == {"metadata"}
    assert f"{field} is '{value}'" in report.misses[0].reason


def test_a_missing_metadata_key_rejects_the_file(write: Write) -> None:
    metadata = build_metadata(H200)
    del metadata["cudnn_version"]
    report = replay(write(metadata=metadata))
    assert not report.loaded
    assert "cudnn_version is None" in report.misses[0].reason


def test_a_crashing_entry_is_reported_as_the_exception(write: Write) -> None:
    def crash(content: dict[str, Any]) -> None:
        content[first_key(content)] = {"tactic": 3}

    report = replay(write(crash))
    assert not report.loaded
    assert report.misses[0].code == "load-error" and "KeyError" in report.misses[0].reason


def test_each_wrong_entry_is_missed_alone_and_says_why(write: Write, entries: list[Entry]) -> None:
    expected: dict[str, str] = {}

    def spoil(content: dict[str, Any]) -> None:
        keys = [k for k in content if k.startswith("('trtllm::fused_moe::gemm2'")]

        def rename(key: str, new: str, code: str) -> None:
            content[new] = content.pop(key)
            expected[new] = code

        rename(keys[0], keys[0].replace("True, 3", "False, 3"), "not-found")
        rename(keys[1], keys[1].replace(", 3,", ",3,"), "not-found")
        rename(keys[2], keys[2].replace("MoERunner", "Other"), "not-found")
        rename(keys[3], keys[3].rpartition(", (torch")[0] + ")", "key-3-tuple")
        rename(keys[4], "nonsense", "unreadable-key")
        rename(keys[5], keys[5].replace("gemm2", "gemm9"), "unknown-op")
        rename(keys[6], keys[6].replace("8, 1, 1, 1", "8, 1, True, 1"), "extras-type")
        content[keys[7]][0] = "OtherRunner"
        content[keys[8]][1] = 126
        content[keys[9]][1] = 44
        content[keys[10]][1] = 1.5
        content[keys[11]][1] = [1, 2]
        expected.update({keys[7]: "not-found", keys[8]: "id-out-of-range", keys[9]: "id-out-of-range"})
        expected.update({keys[10]: "tactic-type", keys[11]: "tactic-type"})

    path = write(spoil)
    report = replay(path)
    assert report.loaded
    assert {f.key for f in check(path) if f.severity == "error"} == set(expected)
    assert {m.key: m.code for m in report.misses} == expected
    assert report.keys_hit == len(entries) - len(expected)
    reasons = {m.key: m.reason for m in report.misses}
    assert any("enable_pdl is False, FlashInfer asks for True" in r for r in reasons.values())
    assert any("the entry is for the runner 'OtherRunner'" in r for r in reasons.values())
    assert any("gemm2 has ids 45 to 125, not 126" in r for r in reasons.values())


values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 130) | st.floats(0, 2) | st.sampled_from(["MoERunner", "", "hot"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=6,
)
entry_values = values | st.lists(values, max_size=3).map(lambda rest: ["MoERunner", *rest])


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.dictionaries(st.integers(0, 79), entry_values, max_size=3))
def test_check_and_replay_agree_on_any_entry(write: Write, changes: dict[int, object]) -> None:
    def spoil(content: dict[str, Any]) -> None:
        keys = [k for k in content if not k.startswith("_")]
        for i, value in changes.items():
            content[keys[i % len(keys)]] = value

    path = write(spoil)
    findings, report = check(path), replay(path)
    assert report.loaded == (not any(f.code == "crash" for f in findings))
    if report.loaded:
        assert {m.key for m in report.misses} == {f.key for f in findings if f.severity == "error"}


def test_two_spellings_of_one_key_count_as_two(write: Write) -> None:
    def spell_twice(content: dict[str, Any]) -> None:
        key = first_key(content)
        content[key.replace("(0,)", "( 0,)", 1)] = content[key]

    report = replay(write(spell_twice))
    assert report.keys_hit == report.keys - 1
    assert [m.code for m in report.misses] == ["key-spelling"]


def test_a_policy_of_another_kind_is_timed_again(write: Write) -> None:
    def cold(content: dict[str, Any]) -> None:
        content[first_key(content)][2] = ["cuda_graph_profile_replays", None, "l2_cache_policy", "cold"]

    report = replay(write(cold))
    assert report.ok
    assert report.reprofiled == 1


def test_a_bucket_off_the_grid_is_served_at_its_own_maximum(write: Write, olmoe: Deployment) -> None:
    key = file_keys(olmoe, "vllm", 500, 1, "sm90")[0]

    def add(content: dict[str, Any]) -> None:
        content[key] = ["MoERunner", 7]

    report = replay(write(add))
    assert report.ok


def test_calls_that_flashinfer_refuses_are_misses(write: Write) -> None:
    def huge(content: dict[str, Any]) -> None:
        for key in [k for k in content if not k.startswith("_")]:
            content[key.replace("(64, ", f"({2**59}, ")] = content.pop(key)

    report = replay(write(huge))
    assert report.keys_hit == 0
    assert {m.code for m in report.misses} == {"call-refused"}


def test_a_file_without_entries_is_not_ok(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"_metadata": build_metadata(H200)}), encoding="utf-8")
    report = replay(path)
    assert (report.keys, report.ok) == (0, False)


def test_a_file_for_any_gpu_says_so(write: Write) -> None:
    report = replay(write(metadata={**build_metadata(H200), "gpu": "*"}))
    assert report.ok and report.arch == "sm90"
    assert report.notes == ("the file names no GPU; replayed as one that the metadata accepts",)


def test_everything_is_put_back(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from flashinfer.autotuner import AutoTuner
    from flashinfer.fused_moe import core

    monkeypatch.setenv("FLASHINFER_AUTOTUNER_LOAD_FROM_FILE", "mine")
    tuner = AutoTuner.get()
    names = ("get_compute_capability", "device_support_pdl", "get_cutlass_fused_moe_module")

    def state() -> list[object]:
        return [getattr(core, n) for n in names] + [
            torch.cuda.get_device_name,
            torch.cuda.current_device,
            torch.cuda.device,
            AutoTuner.get(),
        ]

    before, modules = state(), set(sys.modules)
    replay(write())
    replay(write(name="a.py"))
    assert state() == before
    assert not tuner._file_configs
    assert os.environ["FLASHINFER_AUTOTUNER_LOAD_FROM_FILE"] == "mine"
    assert not {m for m in set(sys.modules) - modules if "tuning_configs" in m}


def test_flashinfer_keeps_the_last_new_maximum_until_it_restarts() -> None:
    """Why each maximum gets a restart: without one, FlashInfer mixes them up."""
    import torch

    with stubbed_gpu(H200, "sm90") as stub:

        def top_bucket(maximum: int) -> int:
            x = torch.empty((1, 64), dtype=torch.bfloat16, device="meta")
            w = torch.empty((2, 64, 64), dtype=torch.bfloat16, device="meta")
            ids = torch.empty((1, 1), dtype=torch.int32, device="meta")
            stub.cutlass_fused_moe(
                x, ids, ids.float(), w.expand(2, 64, 64), w, torch.bfloat16, [], tune_max_num_tokens=maximum
            )
            spec = stub.runner_class.tuning_config.dynamic_tensor_specs[0]
            return int(max(spec.gen_tuning_buckets))

        assert [top_bucket(m) for m in (8192, 4096, 8192)] == [8192, 4096, 4096]
        stub.restart()
        assert top_bucket(8192) == 8192


def test_without_flashinfer_one_line_says_what_to_install(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write()
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(MissingDependencyError, match=r"-m pip install flashinfer-python torch$") as e:
        replay(path)
    assert "\n" not in str(e.value)


def test_an_unknown_flashinfer_is_refused(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write()
    for version in ("0.7.1", "9.0.0"):
        monkeypatch.setattr("flashinfer.__version__", version)
        with pytest.raises(SynthError, match=version):
            replay(path)
