"""What check says, and that FlashInfer does what it says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from synth.catalog.shapes import Deployment
from synth.errors import SynthError
from synth.flashinfer.checking import SEVERITIES, Finding, check, summary
from synth.flashinfer.contract import build_metadata, file_keys
from synth.flashinfer.formats import BUNDLED_PREFIX, ConfigEntry, dumps_json

H200 = "NVIDIA H200"
Write = Callable[..., Path]


def first_key(content: dict[str, Any]) -> str:
    return next(k for k in content if not k.startswith("_"))


def set_entry(value: object) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        content[first_key(content)] = value

    return change


def codes(findings: list[Finding]) -> list[str]:
    return [f.code for f in findings]


def test_a_good_file_has_no_findings(write: Write) -> None:
    assert check(write()) == []


def test_a_good_module_has_a_note_only(write: Write) -> None:
    findings = check(write(name=f"{BUNDLED_PREFIX}NVIDIA_H200.py"))
    assert [(f.code, f.severity) for f in findings] == [("bundled", "note")]
    assert "FLASHINFER_AUTOTUNER_LOAD_FROM_FILE=1" in findings[0].message


def test_every_finding_is_two_lines_with_a_known_severity(write: Write) -> None:
    def spoil(content: dict[str, Any]) -> None:
        for i, key in enumerate(k for k in list(content) if not k.startswith("_")):
            content[key] = [{}, None, 3, [], ["MoERunner"], "text", ["MoERunner", i, None], ["Other", i]][i % 8]

    findings = check(write(spoil, metadata={"gpu": "unknown"}))
    assert len(findings) > 50
    assert all("\n" not in f.message + f.way_out and f.message and f.way_out for f in findings)
    assert {f.severity for f in findings} <= set(SEVERITIES)


def test_flashinfers_own_b200_file_is_dead_and_says_why() -> None:
    pytest.importorskip("flashinfer.autotuner")
    import flashinfer

    path = Path(flashinfer.__file__).parent / "tuning_configs" / f"{BUNDLED_PREFIX}NVIDIA_B200.py"
    group = summary(check(path))[0]
    assert (group.code, group.severity) == ("key-3-tuple", "error")
    assert group.count > 50
    assert "fits FlashInfer 0.6.4 to 0.6.12" in group.example.message
    assert "key-3-tuple" not in codes(check(path, "0.6.12"))


@pytest.mark.parametrize(
    ("flashinfer", "code", "fits"),
    [
        ("0.6.12", "key-3-tuple", "0.6.4 to 0.6.12"),
        ("0.6.17", "key-0-extras", "0.6.13 to 0.6.17"),
        ("0.7.1", "key-20-extras", "0.6.18 to 0.7.1"),
    ],
)
def test_keys_of_other_versions_are_dead_and_name_theirs(
    tmp_path: Path, olmoe: Deployment, flashinfer: str, code: str, fits: str
) -> None:
    path = tmp_path / "a.json"
    keys = [k for b in (1, 2, 4) for k in file_keys(olmoe, "vllm", b, 1, "sm90", flashinfer)]
    path.write_bytes(dumps_json(build_metadata(H200), [ConfigEntry(k, 1) for k in keys]))
    groups = {g.code: g for g in summary(check(path))}
    assert groups[code].count == 3
    assert fits in groups[code].example.message
    assert code not in {g.code for g in summary(check(path, flashinfer))}


# ---- entries that crash the server: check says it, FlashInfer does it --------------------------------------


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ({"tactic": 3}, "KeyError"),
        ({}, "KeyError"),
        (["MoERunner", 3, None], "TypeError"),
        (["MoERunner", 3, 7], "TypeError"),
        (["MoERunner", 3, False], "TypeError"),
        (["MoERunner"], "IndexError"),
        ([], "IndexError"),
        ("M", "IndexError"),
        (None, "TypeError"),
        (3, "TypeError"),
        (True, "TypeError"),
        ([7, 3], "AttributeError"),
        ([None, 3], "AttributeError"),
        ([["MoERunner"], 3], "AttributeError"),
    ],
)
def test_entries_that_crash_the_server(write: Write, value: object, error: str) -> None:
    path = write(set_entry(value))
    findings = [f for f in check(path) if f.code == "crash"]
    assert len(findings) == 1
    assert error in findings[0].message

    pytest.importorskip("flashinfer.autotuner")
    from synth.flashinfer.replay import stubbed_gpu

    with stubbed_gpu(H200, "sm90") as stub, pytest.raises(Exception) as raised:
        stub.tuner.load_configs(str(path))
    assert type(raised.value).__name__ == error


def test_records_that_are_no_object_crash_the_server(write: Write) -> None:
    path = write(lambda content: content.update(_records=[]))
    assert codes(check(path)) == ["crash"]

    pytest.importorskip("flashinfer.autotuner")
    from synth.flashinfer.replay import stubbed_gpu

    with stubbed_gpu(H200, "sm90") as stub, pytest.raises(ValueError, match="records"):
        stub.tuner.load_configs(str(path))


@pytest.mark.parametrize(
    ("value", "code", "severity"),
    [
        (["MoERunner", True], "tactic-type", "error"),
        (["MoERunner", 3.0], "tactic-type", "error"),
        (["MoERunner", float("nan")], "tactic-type", "error"),
        (["MoERunner", "3"], "tactic-type", "error"),
        (["MoERunner", None], "tactic-type", "error"),
        (["MoERunner", [1, 2]], "tactic-type", "error"),
        (["MoERunner", -2], "id-out-of-range", "error"),
        (["MoERunner", 45], "id-out-of-range", "error"),
        (["MoERunner", 10**30], "id-out-of-range", "error"),
        (["MoERunner", -1], "fallback", "note"),
        (["TrtllmMoERunner", 3], "entry-runner", "error"),
        ("text", "entry-runner", "error"),
        (["MoERunner", 3, []], "reprofiled", "warning"),
        (["MoERunner", 3, "hot"], "reprofiled", "warning"),
        (["MoERunner", 3, ["cuda_graph_profile_replays", 1, "l2_cache_policy", "hot"]], "reprofiled", "warning"),
        (["MoERunner", 3, ["cuda_graph_profile_replays", None, "l2_cache_policy", "cold"]], "reprofiled", "warning"),
        (["MoERunner", 3, ["cuda_graph_profile_replays", None, "l2_cache_policy", "hot"], 1], "extra-elements", "note"),
        (
            ["MoERunner", 3, ["cuda_graph_profile_replays", None, "l2_cache_policy", "hot"], {}, 1],
            "extra-elements",
            "note",
        ),
    ],
)
def test_entries_that_load_but_do_not_do_what_they_should(
    write: Write, value: object, code: str, severity: str
) -> None:
    path = write(set_entry(value))
    assert [(f.code, f.severity) for f in check(path)] == [(code, severity)]

    pytest.importorskip("flashinfer.autotuner")
    from synth.flashinfer.replay import replay

    report = replay(path)
    assert report.loaded
    served = report.keys_hit == report.keys
    assert served == (severity != "error")
    assert report.reprofiled == (code == "reprofiled" or code == "entry-runner")


def test_two_elements_are_as_good_as_the_full_entry(write: Write) -> None:
    assert check(write(set_entry(["MoERunner", 3]))) == []


@pytest.mark.parametrize(
    ("value", "error"), [(5, "TypeError"), ((0,), "IndexError"), ({}, "KeyError"), ((0, True), "whole number")]
)
def test_wrong_values_in_modules(tmp_path: Path, olmoe: Deployment, value: object, error: str) -> None:
    path = tmp_path / f"{BUNDLED_PREFIX}NVIDIA_H200.py"
    path.write_text(f"best_configs = { {file_keys(olmoe, 'vllm', 1, 1, 'sm90')[0]: value}!r}", encoding="utf-8")
    assert error in next(f for f in check(path, device=H200) if f.key and f.severity == "error").message


# ---- metadata ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"flashinfer_version": "0.7.3"}, "metadata-mismatch"),
        ({"cudnn_version": "unknown"}, "metadata-unknown"),
        ({"cudnn_version": None}, "metadata-unknown"),
        ({"cuda_version": "13.0"}, "metadata-pinned"),
        ({"cuda_version": ["13.0"]}, "metadata-pinned"),
        ({"gpu": "*"}, "metadata-wildcard"),
        ({"flashinfer_version": "*"}, "metadata-wildcard"),
    ],
)
def test_metadata_is_judged_field_by_field(write: Write, change: dict[str, Any], code: str) -> None:
    findings = check(write(metadata={**build_metadata(H200), **change}))
    assert codes(findings) == [code]
    assert next(iter(change)) in findings[0].message


def test_metadata_is_compared_with_an_environment(write: Write) -> None:
    path = write(metadata={**build_metadata(H200), "cuda_version": "13.0"})
    assert codes(check(path, environment={"cuda_version": "13.0"})) == []
    assert codes(check(path, environment={"cuda_version": "12.8"})) == ["metadata-mismatch"]
    assert codes(check(write(), device="NVIDIA H100")) == ["metadata-mismatch"]


def test_each_missing_metadata_key_is_named(write: Write) -> None:
    findings = check(write(metadata={"gpu": H200, "flashinfer_version": "0.7.4"}))
    assert codes(findings) == ["metadata-missing"] * 5


def test_no_metadata_is_a_danger(write: Write) -> None:
    path = write(lambda content: content.pop("_metadata"))
    assert codes(check(path)) == ["no-metadata"]

    pytest.importorskip("flashinfer.autotuner")
    from synth.flashinfer.replay import stubbed_gpu

    with stubbed_gpu("Another GPU", "sm90") as stub:
        assert stub.tuner.load_configs(str(path))


def test_metadata_that_is_no_object_rejects_the_file(write: Write) -> None:
    path = write(lambda content: content.update(_metadata=[1]))
    assert codes(check(path)) == ["metadata-form"]


def test_unknown_metadata_lets_flashinfer_overwrite_the_file(write: Write) -> None:
    path = write(metadata={**build_metadata(H200), "flashinfer_version": "unknown"})
    message = check(path)[0].message

    pytest.importorskip("flashinfer.autotuner")
    from synth.flashinfer.replay import stubbed_gpu

    with stubbed_gpu(H200, "sm90") as stub:
        assert not stub.tuner.load_configs(str(path))
        stub.tuner.save_configs(str(path))
    assert "overwrites" in message
    assert set(json.loads(path.read_text())) == {"_metadata", "_generation"}


# ---- keys, buckets, modules --------------------------------------------------------------------------------


def test_missing_buckets_are_named_with_the_token_counts_that_fall_back(write: Write) -> None:
    def drop(content: dict[str, Any]) -> None:
        for key in [k for k in content if "gemm1" in k]:
            if any(f"(({b}, " in key for b in (8, 16, 64, 768)):
                del content[key]

    findings = check(write(drop))
    assert codes(findings) == ["missing-buckets"]
    assert "h2048-i1024-e64-k8 bf16 gemm1" in findings[0].message
    assert "buckets 8, 16, 64, 768; 5 to 16, 33 to 64, 513 to 768 tokens" in findings[0].message


def test_a_missing_stage_is_named(write: Write) -> None:
    def drop(content: dict[str, Any]) -> None:
        for key in [k for k in content if "gemm2" in k]:
            del content[key]

    assert codes(check(write(drop))) == ["missing-stage"]


def test_a_low_top_bucket_is_named(write: Write) -> None:
    def drop(content: dict[str, Any]) -> None:
        for key in [k for k in content if "((8192, " in k or "((4096, " in k]:
            del content[key]

    findings = check(write(drop))
    assert codes(findings) == ["low-top-bucket"]
    assert "3584" in findings[0].message


def test_a_bucket_off_the_grid_is_a_warning(write: Write, olmoe: Deployment) -> None:
    key = file_keys(olmoe, "vllm", 500, 1, "sm90")[0]
    findings = check(write(lambda content: content.update({key: ["MoERunner", 3]})))
    assert [(f.code, f.severity) for f in findings] == [("off-grid-bucket", "warning")]


def test_text_that_is_no_key_is_named(write: Write) -> None:
    findings = check(write(lambda content: content.update({"_comment": ["MoERunner", 3]})))
    assert codes(findings) == ["unreadable-key"]


def test_duplicates_are_named(tmp_path: Path, write: Write) -> None:
    path = write()
    key = first_key(json.loads(path.read_text()))
    path.write_text(path.read_text().rstrip("}\n") + f', {json.dumps(key)}: ["MoERunner", 2]}}')
    assert "duplicate-key" in codes(check(path))


def test_ids_are_judged_by_the_architecture(write: Write) -> None:
    path = write(set_entry(["MoERunner", 20]))
    assert check(path) == []
    assert "id-out-of-range" in codes(check(path, arch="sm120"))
    assert "id-unchecked" in codes(check(path, arch="sm100"))


def test_gemm2_ids_without_fused_finalize_have_their_own_range(tmp_path: Path, olmoe: Deployment) -> None:
    for fused, bad in ((True, False), (False, True)):
        path = tmp_path / "a.json"
        key = file_keys(olmoe, "vllm", 1, 2, "sm90", fused_finalize=fused)[0]
        path.write_bytes(dumps_json(build_metadata(H200), [ConfigEntry(key, 120)]))
        assert ("id-out-of-range" in codes(check(path))) == bad


@pytest.mark.parametrize("device", ["NVIDIA A/B", "NVIDIA 1.5"])
def test_modules_for_names_that_cannot_be_imported(write: Write, device: str) -> None:
    findings = check(write(name="a.py"), device=device, arch="sm90")
    assert codes(findings) == ["bundled", "not-importable"]


def test_modules_with_another_name_are_not_found(write: Write) -> None:
    findings = check(write(name="a.py"))
    assert codes(findings) == ["bundled", "bundled-name"]
    assert f"{BUNDLED_PREFIX}NVIDIA_H200.py" in findings[1].message


def test_an_empty_config_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(dumps_json(build_metadata(H200), []))
    assert codes(check(path)) == ["no-entries"]


def test_versions_without_json_say_so(write: Write) -> None:
    assert "no-json" in codes(check(write(), "0.6.5"))


def test_an_unknown_version_or_an_unreadable_file_is_an_error(write: Write, tmp_path: Path) -> None:
    with pytest.raises(SynthError, match=r"9\.9\.9"):
        check(write(), "9.9.9")
    with pytest.raises(SynthError, match="nothing"):
        check(tmp_path / "nothing.json")


def test_the_summary_has_one_line_a_code_worst_first() -> None:
    findings = [
        Finding("b", "k1", "m", "w", "note"),
        Finding("a", "k2", "m", "w"),
        Finding("c", "k3", "m", "w", "warning"),
        Finding("a", "k4", "m", "w"),
        Finding("d", "k5", "m", "w"),
    ]
    assert [(g.code, g.count, g.example.key) for g in summary(findings)] == [
        ("a", 2, "k2"),
        ("d", 1, "k5"),
        ("c", 1, "k3"),
        ("b", 1, "k1"),
    ]


def test_check_needs_neither_torch_nor_flashinfer(write: Write) -> None:
    import subprocess
    import sys

    code = (
        "import sys, pathlib; sys.modules.update(torch=None, flashinfer=None)\n"
        "from synth.flashinfer.checking import check\n"
        f"sys.exit(bool(check(pathlib.Path({str(write())!r}))))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
