"""What check says, and that FlashInfer does what it says."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from synth.catalog.shapes import Deployment, MoEShape
from synth.checking.check import SEVERITIES, Finding, check, check_files, summary
from synth.cli import main
from synth.configs.model import BUNDLED_PREFIX, Entry
from synth.configs.sidecar import Record, Sidecar, sidecar_path
from synth.configs.store import entry_file, environment_hash
from synth.configs.v1 import dumps_json
from synth.errors import SynthError
from synth.flashinfer.buckets import token_buckets
from synth.flashinfer.keys import file_keys
from synth.flashinfer.tactics import DEFAULT_FLASHINFER, load_table
from synth.flashinfer.versions import METADATA_KEYS, POLICY, build_metadata
from synth.timings.records import Denial

H200 = "NVIDIA H200"
OLMOE = Deployment("olmoe", 1, 1, "bf16", "swiglu", False, MoEShape(2048, 1024, 64, 8))
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
    path.write_bytes(dumps_json(build_metadata(H200), [Entry(k, 1) for k in keys]))
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
    from synth.gpu.stub import stubbed_gpu

    with stubbed_gpu(H200, "sm90") as stub, pytest.raises(Exception) as raised:
        stub.tuner.load_configs(str(path))
    assert type(raised.value).__name__ == error


def test_records_that_are_no_object_crash_the_server(write: Write) -> None:
    path = write(lambda content: content.update(_records=[]))
    assert codes(check(path)) == ["crash"]

    pytest.importorskip("flashinfer.autotuner")
    from synth.gpu.stub import stubbed_gpu

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
    from synth.gpu.replay import replay

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
    from synth.gpu.stub import stubbed_gpu

    with stubbed_gpu("Another GPU", "sm90") as stub:
        assert stub.tuner.load_configs(str(path))


def test_metadata_that_is_no_object_rejects_the_file(write: Write) -> None:
    path = write(lambda content: content.update(_metadata=[1]))
    assert codes(check(path)) == ["metadata-form"]


def test_unknown_metadata_lets_flashinfer_overwrite_the_file(write: Write) -> None:
    path = write(metadata={**build_metadata(H200), "flashinfer_version": "unknown"})
    message = check(path)[0].message

    pytest.importorskip("flashinfer.autotuner")
    from synth.gpu.stub import stubbed_gpu

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


def test_ids_are_judged_by_the_architecture(write: Write) -> None:
    path = write(set_entry(["MoERunner", 20]))
    assert check(path) == []
    assert "id-out-of-range" in codes(check(path, arch="sm120"))
    assert "id-unchecked" in codes(check(path, arch="sm100"))


def test_gemm2_ids_without_fused_finalize_have_their_own_range(tmp_path: Path, olmoe: Deployment) -> None:
    for fused, bad in ((True, False), (False, True)):
        path = tmp_path / "a.json"
        key = file_keys(olmoe, "vllm", 1, 2, "sm90", fused_finalize=fused)[0]
        path.write_bytes(dumps_json(build_metadata(H200), [Entry(key, 120)]))
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
        "from synth.checking.check import check\n"
        f"sys.exit(bool(check(pathlib.Path({str(write())!r}))))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---- what people run into, a kind a test -------------------------------------------------------------------

NVFP4 = Deployment("deepseek-v3", 8, 1, "nvfp4", "swiglu", False, MoEShape(7168, 256, 256, 8))
RTX = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
MANIFEST = {**dict.fromkeys(METADATA_KEYS, "1.2.3"), "flashinfer_version": DEFAULT_FLASHINFER, "gpu": H200}


def config_of(
    path: Path,
    deployment: Deployment,
    device: str,
    *,
    engines: Sequence[str] = ("vllm",),
    buckets: Sequence[int] | None = None,
    flashinfer: str = DEFAULT_FLASHINFER,
    arch: str = "sm90",
    change: Callable[[str], str] = str,
    tactic: Callable[[int], int] | None = None,
) -> Path:
    """Write a config with the first tactic of each stage, its keys changed as asked."""
    table = load_table(arch, deployment.quant, flashinfer)
    keys = {
        change(key): (tactic or (lambda stage: table.ids(stage)[0]))(stage)
        for engine in engines
        for stage in (1, 2)
        for bucket in (token_buckets(8192) if buckets is None else buckets)
        for key in file_keys(deployment, engine, bucket, stage, arch, flashinfer)
    }
    path.write_bytes(dumps_json(build_metadata(device, flashinfer), [Entry(k, i) for k, i in keys.items()]))
    return path


def worst(findings: list[Finding]) -> dict[str, str]:
    """Return the severity of each code."""
    return {g.code: g.severity for g in summary(findings)}


def test_a_shape_without_columns_is_impossible(tmp_path: Path) -> None:
    for flashinfer in ("0.6.12", "0.6.17", "0.7.1", "0.7.4"):
        path = config_of(
            tmp_path / "a.json", OLMOE, H200, flashinfer=flashinfer, buckets=[8],
            change=lambda key: key.replace("((8, 2048)", "((8, 0)"),
        )  # fmt: skip
        findings = check(path, flashinfer)
        assert worst(findings)["shapes"] == "error" and "dead-file" in worst(findings)
        assert any("less than 1" in f.message for f in findings)


@pytest.mark.parametrize("flashinfer", ["0.6.12", "0.6.17", "0.7.1", "0.7.4"])
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(8, 2048), ", ""),
        ("(8, 2048)", "(8,)"),
        ("(8, 2048)", "(8, 2049)"),
        ("(8, 2048)", "(8, 2048, 1)"),
        ("(8, 2048)", "(8589934592, 2048)"),
        ("(64, 2048, 2048)", "(63, 2048, 2048)"),
        ("(64, 2048, 2048)", "(64, 2047, 2048)"),
        ("(64, 2048, 2048)", "(64, 2048, 1023)"),
        ("(64, 2048, 1024)", "(64, 2048, 3000000000)"),
        ("(64, 2048, 1024)", "(64, -2048, 1024)"),
        ("(0,)", "(7,)"),
        ("(0,)", "(64, 77)"),
    ],
)
def test_impossible_shapes_are_named_under_every_version(tmp_path: Path, flashinfer: str, old: str, new: str) -> None:
    path = config_of(
        tmp_path / "a.json", OLMOE, H200, flashinfer=flashinfer, buckets=[8], change=lambda k: k.replace(old, new)
    )
    found = {g.code: g for g in summary(check(path, flashinfer))}
    assert found.keys() & {"shapes", "gating", "bucket"}
    assert found["dead-file"].severity == "error"


def test_a_shape_that_has_no_kernel_names_the_padded_size(tmp_path: Path) -> None:
    deployment = replace(NVFP4, shape=MoEShape(7168, 16 * 17, 256, 8))
    path = config_of(tmp_path / "a.json", deployment, RTX, arch="sm120", buckets=[1, 2, 4])
    message = next(f.message for f in check(path) if f.code == "tactic-cant-run")
    assert "not a multiple of" in message and "pad it to" in message


def test_keys_of_ranks_that_do_not_exist_and_of_ranks_that_are_missing(tmp_path: Path) -> None:
    sharded = replace(OLMOE, tp=4, shape=MoEShape(2048, 256, 64, 8))
    keys = file_keys(sharded, "vllm", 8, 1, "sm90", "0.7.1")
    assert len(keys) == 4
    path = tmp_path / "a.json"
    path.write_bytes(dumps_json(build_metadata(H200, "0.7.1"), [Entry(k, 1) for k in keys]))
    assert not {"missing-ranks", "rank-out-of-range"} & worst(check(path, "0.7.1")).keys()
    path.write_bytes(dumps_json(build_metadata(H200, "0.7.1"), [Entry(k, 1) for k in keys[2:3]]))
    finding = next(f for f in check(path, "0.7.1") if f.code == "missing-ranks")
    assert "1 of 4 ranks (tp/ep 2/0)" in finding.message and finding.severity == "warning"
    moved = keys[3].replace(", 8, 4, 3, 1, 0,", ", 8, 4, 4, 1, 0,")
    assert moved != keys[3]
    path.write_bytes(dumps_json(build_metadata(H200, "0.7.1"), [Entry(moved, 1)]))
    assert worst(check(path, "0.7.1"))["rank-out-of-range"] == "error"


def test_ranks_with_different_tactics_in_one_file(tmp_path: Path) -> None:
    sharded = replace(OLMOE, tp=2, shape=MoEShape(2048, 512, 64, 8))
    keys = file_keys(sharded, "vllm", 8, 1, "sm90", "0.7.1")
    path = tmp_path / "a.json"
    path.write_bytes(dumps_json(build_metadata(H200, "0.7.1"), [Entry(k, i) for i, k in enumerate(keys)]))
    assert worst(check(path, "0.7.1"))["rank-tactics-differ"] == "warning"


def test_files_of_two_ranks_that_differ(write: Write) -> None:
    same = [write(name=f"rank{i}.json") for i in range(2)]
    assert check_files(same) == {same[0]: [], same[1]: []}
    other = write(set_entry(["MoERunner", 30]), name="rank2.json")
    (finding,) = check_files([*same, other])[other]
    assert finding.code == "ranks-differ" and "1 keys have another tactic" in finding.message
    assert "rank0.json" in finding.message
    fewer = write(lambda content: content.pop(first_key(content)), name="rank3.json")
    assert "ranks-differ" in codes(check_files([same[0], fewer])[fewer])
    elsewhere = write(set_entry(["MoERunner", 30]), name="b.json", metadata=build_metadata("NVIDIA H100 80GB HBM3"))
    assert "ranks-differ" not in codes(check_files([same[0], elsewhere])[elsewhere])


def test_modules_for_two_gpus_by_their_names_are_not_ranks(tmp_path: Path, write: Write) -> None:
    modules = [write(name=f"{BUNDLED_PREFIX}NVIDIA_{gpu}.py", metadata={"by": "hand"}) for gpu in ("H200", "GH200")]
    modules[1].write_text(modules[1].read_text().replace("(0, 1)", "(0, 2)"))
    found = check_files(modules)
    assert all("ranks-differ" not in codes(findings) for findings in found.values())


def test_files_of_ranks_whose_keys_hold_the_rank_are_compared_without_it(tmp_path: Path) -> None:
    sharded = replace(OLMOE, tp=2, shape=MoEShape(2048, 512, 64, 8))
    keys = file_keys(sharded, "vllm", 8, 1, "sm90", "0.7.1")
    paths = []
    for rank, (key, tactic) in enumerate(zip((*keys, keys[1]), (1, 1, 2), strict=True)):
        paths.append(tmp_path / f"{rank}.json")
        paths[-1].write_bytes(dumps_json(build_metadata(H200, "0.7.1"), [Entry(key, tactic)]))
    found = check_files(paths, "0.7.1")
    assert ["ranks-differ" in codes(found[path]) for path in paths] == [False, False, True]


def test_an_id_counted_from_the_stages_first_is_recognised(tmp_path: Path) -> None:
    path = config_of(tmp_path / "a.json", NVFP4, RTX, arch="sm120", tactic=lambda stage: 3)
    found = next(f for f in check(path) if f.code == "id-out-of-range")
    assert "gemm2 has no id 3, but 16 to 47 (sm120 nvfp4)" in found.message
    assert "counted from gemm2's first tactic" in found.message


def test_an_id_of_another_version_names_versions_that_have_it(tmp_path: Path) -> None:
    path = config_of(tmp_path / "a.json", NVFP4, RTX, arch="sm120", tactic=lambda stage: 17 if stage == 1 else 57)
    found = [f for f in check(path) if f.code == "id-out-of-range"]
    assert len(found) == 2 * len(token_buckets(8192))
    assert all("; FlashInfer 0.6." in f.message for f in found)


def test_duplicates_that_differ_are_worse_than_equal_ones(write: Write) -> None:
    path = write()
    text = path.read_text().rstrip("}\n")
    key = first_key(json.loads(path.read_text()))
    value = json.loads(path.read_text())[key]
    path.write_text(f"{text}, {json.dumps(key)}: {json.dumps(value)}}}")
    assert worst(check(path)) == {"duplicate-key": "note"}
    path.write_text(f'{text}, {json.dumps(key)}: ["MoERunner", 2]}}')
    assert worst(check(path)) == {"duplicate-differs": "warning"}


def test_the_token_counts_of_a_server_that_a_file_does_not_cover(write: Write) -> None:
    path = write()
    assert worst(check(path, max_tokens=[8192, 512])) == {"clamped-tokens": "note"}
    found = check(path, max_tokens=[16384, 600])
    messages = [f.message for f in found if f.code == "uncovered-tokens"]
    assert len(messages) == 4
    assert "gemm1: a server whose maximum is 600 finds no entry for 513 to 600 tokens" in messages[0]
    assert "a server whose maximum is 16384 finds no entry for 8193 to 16384 tokens" in messages[2]
    notes = [f.message for f in found if f.code == "clamped-tokens"]
    assert notes[0].startswith("a server whose maximum is 600 runs every batch of more tokens with the tactics of")


def test_gaps_on_purpose_are_notes_unless_they_lie_above_the_whole_file(write: Write) -> None:
    path = write()
    content = json.loads(path.read_text())
    content["_metadata"]["synth"] = {"left_out": 1}
    del content[next(k for k in content if "((64, 2048)" in k)]
    path.write_text(json.dumps(content))
    assert worst(check(path, max_tokens=[8192])) == {"uncovered-tokens": "note", "clamped-tokens": "note"}
    assert worst(check(path, max_tokens=[16384])) == {"uncovered-tokens": "warning", "clamped-tokens": "note"}


@pytest.mark.parametrize(
    ("buckets", "found"),
    [
        ([1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192], True),
        ([100, 200, 500, 1000], True),
        ([1, 16, 100, 300, 1000, 4000, 8192], True),
        (token_buckets(8192), False),
        (token_buckets(600), False),
        ((*token_buckets(8192), 500, 600), False),
        ([b for b in token_buckets(8192) if b not in (8, 768)], False),
        ([256, 512], False),
    ],
)
def test_buckets_that_tuning_buckets_overrode(tmp_path: Path, buckets: Sequence[int], found: bool) -> None:
    path = config_of(tmp_path / "a.json", OLMOE, H200, buckets=buckets)
    findings = check(path)
    assert (worst(findings).get("tuning-buckets") == "warning") == found
    if found:
        message = next(f.message for f in findings if f.code == "tuning-buckets")
        assert "tuning_buckets=" in message and str(buckets[1]) in message


def test_the_same_gaps_in_every_layer_are_an_override(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    layers = [OLMOE, replace(OLMOE, shape=MoEShape(1024, 512, 32, 4))]
    keys = [k for d in layers for b in (1, 64, 512) for s in (1, 2) for k in file_keys(d, "vllm", b, s, "sm90")]
    entries = [Entry(k, 0 if "gemm1" in k else 45) for k in keys]
    path.write_bytes(dumps_json(build_metadata(H200), entries))
    assert "tuning-buckets" in worst(check(path))
    path.write_bytes(dumps_json(build_metadata(H200), entries[:-1]))
    assert "tuning-buckets" not in worst(check(path))


@pytest.mark.parametrize("name", ["a.json", f"{BUNDLED_PREFIX}NVIDIA_H200.py"])
def test_files_of_a_newer_flashinfer(write: Write, name: str) -> None:
    path = write(name=name, metadata={**build_metadata(H200), "flashinfer_version": "99.1.0.post1"})
    found = worst(check(path))
    assert found["newer-flashinfer"] == "warning"
    assert found["bundled-version" if name.endswith(".py") else "metadata-mismatch"] == "error"


def test_keys_with_a_number_of_extras_that_no_version_has(tmp_path: Path) -> None:
    path = config_of(tmp_path / "a.json", OLMOE, H200, buckets=[8], change=lambda key: key[:-2] + ", 1, True))")
    found = worst(check(path))
    assert found["key-19-extras"] == "error" and found["dead-file"] == "error"
    assert any("fits no known FlashInfer" in f.message for f in check(path))


def test_a_module_for_another_version_is_an_error(write: Write) -> None:
    path = write(name=f"{BUNDLED_PREFIX}NVIDIA_H200.py")
    assert worst(check(path, "0.7.2"))["bundled-version"] == "error"


def test_entries_of_other_operations_are_counted_and_not_judged(write: Write) -> None:
    key = "('flashinfer::trtllm_fp4_block_scale_moe', 'MoERunner', ((1, 2),), (None, 1.5, 'x'))"
    path = write(lambda content: content.update({key: ["MoERunner", [1, 2]]}))
    (finding,) = check(path)
    assert (finding.code, finding.severity) == ("other-operations", "note")
    assert "flashinfer::trtllm_fp4_block_scale_moe" in finding.message
    path = write(lambda content: content.update({key: {}}))
    assert worst(check(path))["crash"] == "error"
    only = {"_metadata": build_metadata(H200), key: ["MoERunner", [1, 2]]}
    path.write_text(json.dumps(only), encoding="utf-8")
    assert worst(check(path)) == {"other-operations": "warning"}


def test_a_misspelt_operation_is_an_error(tmp_path: Path) -> None:
    path = config_of(tmp_path / "a.json", OLMOE, H200, change=lambda key: key.replace("fused_moe", "fusedmoe"))
    assert worst(check(path))["unknown-op"] == "error"


def test_keys_of_one_engine_only(tmp_path: Path) -> None:
    path = config_of(tmp_path / "a.json", NVFP4, RTX, arch="sm120")
    notes = [f for f in check(path) if f.code == "other-calls"]
    assert len(notes) == 1 and notes[0].severity == "note"
    assert "sglang asks with torch.bfloat16" in notes[0].message
    path = config_of(tmp_path / "a.json", NVFP4, RTX, arch="sm120", engines=("vllm", "sglang"))
    assert "other-calls" not in worst(check(path))


def test_tactics_that_gave_wrong_numbers(write: Write) -> None:
    table = load_table("sm90", "bf16")
    path = write(set_entry(["MoERunner", 5]))
    denial = Denial(1, table.tactic(5), OLMOE.shape, 8, 0.5)
    asked = []

    def denied(device: str, arch: str) -> dict[str, list[Denial]]:
        asked.append((device, arch))
        return {"bf16": [denial]}

    found = [f for f in check(path, denied=denied) if f.code == "denied-tactic"]
    assert asked == [(H200, "sm90")]
    assert first_key(json.loads(path.read_text())) in {f.key for f in found}
    assert all(f.severity == "error" and "off by 50.0%" in f.message for f in found)


def with_times(time_ms: float, runner_up_ms: float) -> list[object]:
    return ["MoERunner", 3, list(POLICY), {"time_ms": time_ms, "runner_up_ms": runner_up_ms}]


def test_near_ties_are_counted(write: Write) -> None:
    (finding,) = check(write(set_entry(with_times(0.1, 0.1005))))
    assert (finding.code, finding.severity) == ("near-ties", "note")
    assert "in 1 of 42 entries" in finding.message


def test_a_choice_that_is_slower_than_its_runner_up(write: Write) -> None:
    assert worst(check(write(set_entry(with_times(0.1, 0.09))))) == {"slower-than-runner-up": "warning"}


def test_a_choice_that_is_slower_than_the_fallback_by_its_sidecar(write: Write) -> None:
    path = write()
    key = first_key(json.loads(path.read_text()))
    record = Record(
        "h2048-i1024-e64-k8", (), "bf16", 1, 1, True, "measured", True, "a", 0.2, "b", 0.3, 0.5, 0.1, 0.0, 1.0, 1.0, 45,
        (key,),
    )  # fmt: skip
    sidecar_path(path).write_bytes(Sidecar({}, (record,)).dumps(path.read_bytes()))
    (finding,) = check(path)
    assert (finding.code, finding.severity, finding.key) == ("slower-than-fallback", "warning", key)
    assert "2.00 times" in finding.message
    path.write_text(path.read_text() + " ")
    assert worst(check(path)) == {"sidecar": "warning"}


# ---- managed stores ----------------------------------------------------------------------------------------


def store_of(root: Path, manifest: dict[str, str], entries: dict[str, list[Any]]) -> Path:
    folder = root / "v2" / environment_hash(manifest)
    (folder / "entries").mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    for key, value in entries.items():
        entry = {"key": key, **dict(zip(("runner", "tactic", "profiling_policy"), value, strict=False))}
        (folder / "entries" / entry_file(key)).write_text(json.dumps(entry), encoding="utf-8")
    return folder


STORE = {**MANIFEST, "cache_schema": "v2"}


def test_stores_are_judged_like_files(tmp_path: Path, entries: list[Entry]) -> None:
    values: dict[str, list[Any]] = {e.text: ["MoERunner", e.tactic_id, list(POLICY)] for e in entries}
    assert check(store_of(tmp_path / "a", STORE, values)) == []
    first, second, third, *_ = values
    spoilt = {**values, first: ["MoERunner", 45, list(POLICY)], second: ["MoERunner", 3], third: ["Other", 3, None]}
    root = tmp_path / "b"
    store_of(root, STORE, spoilt)
    assert worst(check(root)) == {"id-out-of-range": "error", "reprofiled": "warning", "entry-runner": "error"}


def test_what_flashinfer_passes_over_in_a_store_is_named(tmp_path: Path, entries: list[Entry]) -> None:
    folder = store_of(tmp_path, STORE, {e.text: ["MoERunner", e.tactic_id, list(POLICY)] for e in entries})
    files = sorted((folder / "entries").iterdir())
    files[0].write_text("{", encoding="utf-8")
    files[1].rename(files[1].with_name("0" * 24 + ".json"))
    found = check(tmp_path)
    assert worst(found)["store-entry"] == "error"
    assert sum(f.code == "store-entry" for f in found) == 2
    assert "missing-buckets" in worst(found)


def test_stores_of_other_environments_are_not_looked_into(tmp_path: Path, entries: list[Entry]) -> None:
    values: dict[str, list[Any]] = {e.text: ["MoERunner", e.tactic_id, list(POLICY)] for e in entries}
    folder = store_of(tmp_path / "a", STORE, values)
    assert worst(check(folder, environment={"cuda_version": "13.0"})) == {"metadata-mismatch": "error"}
    assert "no-store" in worst(check(folder, "0.6.17"))
    wild = store_of(tmp_path / "b", {**STORE, "flashinfer_version": "*"}, values)
    assert worst(check(wild)) == {"metadata-mismatch": "error"}
    lacking = store_of(tmp_path / "c", {k: v for k, v in STORE.items() if k != "cudnn_version"}, values)
    assert worst(check(lacking)) == {"metadata-mismatch": "error"}
    folder.rename(folder.with_name("0" * 16))
    assert worst(check(tmp_path / "a")) == {"store-folder": "error"}


# ---- what a stranger's file may not do to a terminal --------------------------------------------------------


def test_nothing_from_a_file_reaches_a_terminal_unescaped(write: Write) -> None:
    evil = "\x1b]0;owned\x07\u202e\ud800"

    def spoil(content: dict[str, Any]) -> None:
        keys = [k for k in content if not k.startswith("_")]
        content[evil] = ["MoERunner", 1]
        content[keys[0]] = [evil, 3]
        content[keys[1]] = ["MoERunner", evil]
        content[keys[2]] = ["MoERunner", 3, evil]
        content[f"('{evil}', 'MoERunner', ((1, 2),))"] = ["MoERunner", 3]
        content[keys[3].replace("MoERunner", evil)] = ["MoERunner", 3]

    metadata = {**build_metadata(H200), "cuda_version": evil, "gpu": evil, "flashinfer_version": evil}
    path = write(spoil, metadata=metadata)
    assert len(check(path)) >= 8
    assert all((f.message + f.way_out).isprintable() for f in check(path))
    result = CliRunner().invoke(main, ["check", str(path)], catch_exceptions=False)
    assert result.exit_code == 1 and result.output.count("error:") > 3
    assert all(line.isprintable() for line in result.output.splitlines())
    shown = CliRunner().invoke(main, ["check", str(path), "--json"], catch_exceptions=False)
    assert shown.output.isascii() and evil in {row["key"] for row in json.loads(shown.output)}


def test_the_command_names_each_of_several_files(write: Write) -> None:
    good, bad = write(), write(set_entry({}), name="b.json")
    result = CliRunner().invoke(main, ["check", str(good), str(bad)], catch_exceptions=False)
    assert result.exit_code == 1
    assert result.output.splitlines()[0] == f"{good}: nothing found; FlashInfer 0.7.4 can use every entry"
    assert result.output.splitlines()[1] == f"{bad}:"
    shown = CliRunner().invoke(main, ["check", str(good), str(bad), "--json"], catch_exceptions=False)
    assert {row["file"] for row in json.loads(shown.output)} == {str(bad)}
    assert CliRunner().invoke(main, ["check", str(good)], catch_exceptions=False).exit_code == 0


def test_the_command_takes_maximum_token_counts(write: Write) -> None:
    arguments = [str(write()), "--max-tokens", "512", "--max-tokens", "16384", "--json"]
    result = CliRunner().invoke(main, ["check", *arguments], catch_exceptions=False)
    assert {row["code"] for row in json.loads(result.output)} == {"uncovered-tokens", "clamped-tokens"}
    assert result.exit_code == 1
