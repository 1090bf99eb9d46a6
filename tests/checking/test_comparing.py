"""Two configs beside each other: by key, by what keys and tactics mean, and by time."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from synth.catalog.paths import find_model, shipped
from synth.catalog.shapes import Deployment, MoEShape
from synth.checking.diff import Comparison, compare, drift, record, summarize, title, with_times
from synth.cli import main
from synth.configs.model import BUNDLED_PREFIX, Entry
from synth.configs.module import dumps_bundled
from synth.configs.sidecar import Record, Sidecar, sidecar_path
from synth.configs.store import entry_file, environment_hash
from synth.configs.v1 import dumps_json
from synth.errors import SynthError
from synth.flashinfer.buckets import token_buckets
from synth.flashinfer.keys import file_keys
from synth.flashinfer.tactics import DEFAULT_FLASHINFER, Tactic, load_table
from synth.flashinfer.versions import POLICY, build_metadata, entry_id
from synth.performance.model import PerformanceModel
from synth.timings.folders import load
from synth.timings.table import times_by_bucket

H200 = "NVIDIA H200"
RTX = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
OLMOE = Deployment("olmoe", 1, 1, "bf16", "swiglu", False, MoEShape(2048, 1024, 64, 8))
NVFP4 = Deployment("deepseek-v3", 8, 1, "nvfp4", "swiglu", False, MoEShape(7168, 256, 256, 8))
BUCKETS = token_buckets(512)
Tactics = Callable[[int, int], int]


def first(stage: int, bucket: int) -> int:
    return 0 if stage == 1 else 45


def config(
    path: Path,
    tactic: Tactics = first,
    *,
    deployment: Deployment = OLMOE,
    device: str = H200,
    flashinfer: str = DEFAULT_FLASHINFER,
    buckets: Sequence[int] = BUCKETS,
    ms: Callable[[int, int], float | None] | None = None,
    metadata: dict[str, object] | None = None,
) -> Path:
    arch = "sm90" if device == H200 else "sm120"
    entries = [
        Entry(key, tactic(stage, bucket), ms(stage, bucket) if ms else None)
        for stage in (1, 2)
        for bucket in buckets
        for key in file_keys(deployment, "vllm", bucket, stage, arch, flashinfer)
    ]
    metadata = {} if path.suffix == ".py" and metadata is None else metadata
    metadata = build_metadata(device, flashinfer) if metadata is None else metadata
    path.write_bytes((dumps_bundled if path.suffix == ".py" else dumps_json)(metadata, entries))
    return path


def changed(stage: int, bucket: int) -> int:
    return first(stage, bucket) + (bucket in (8, 256)) * stage


def test_equal_files_are_equal(tmp_path: Path) -> None:
    a, b = config(tmp_path / "a.json"), config(tmp_path / "b.json")
    found = compare(a, b)
    assert found.equal and not found.metadata
    assert [p.same for p in found.pairs] == [True] * 2 * len(BUCKETS)
    result = CliRunner().invoke(main, ["diff", str(a), str(b)], catch_exceptions=False)
    assert result.exit_code == 0 and "20 entries have the same tactic, 0 another one" in result.output


def test_entries_that_differ_and_those_that_only_one_file_has(tmp_path: Path) -> None:
    a = config(tmp_path / "a.json", buckets=(1, 2, 4, 8))
    b = config(tmp_path / "b.json", changed, buckets=(4, 8, 16))
    found = compare(a, b)
    assert not found.equal
    assert [(p.stage, p.bucket, p.a.tactic_id, p.b.tactic_id) for p in found.differing] == [
        (1, 8, 0, 1),
        (2, 8, 45, 47),
    ]
    assert len(found.only_a) == 4 and len(found.only_b) == 2
    assert all("((16, " in key for key in found.only_b)
    assert title(found.differing[0]) == "h2048-i1024-e64-k8 bf16 gemm1 bucket 8"
    swapped = compare(b, a)
    assert (len(swapped.only_a), len(swapped.only_b), len(swapped.differing)) == (2, 4, 2)
    assert CliRunner().invoke(main, ["diff", str(a), str(b)], catch_exceptions=False).exit_code == 1


def test_a_json_file_a_module_and_a_store_are_compared_alike(tmp_path: Path) -> None:
    a = config(tmp_path / "a.json")
    module = config(tmp_path / f"{BUNDLED_PREFIX}NVIDIA_H200.py", changed)
    manifest = {"gpu": H200, "flashinfer_version": DEFAULT_FLASHINFER}
    entries = tmp_path / "store" / "v2" / environment_hash(manifest) / "entries"
    entries.mkdir(parents=True)
    (entries.parent / "manifest.json").write_text(json.dumps(manifest))
    for key, value in json.loads(a.read_text()).items():
        if key != "_metadata":
            entry = {"key": key, "runner": value[0], "tactic": value[1], "profiling_policy": list(POLICY)}
            (entries / entry_file(key)).write_text(json.dumps(entry))
    assert len(compare(a, module).differing) == 4
    assert compare(a, tmp_path / "store").equal
    assert len(compare(module, tmp_path / "store").differing) == 4
    assert compare(a, module).b.device == H200
    assert compare(a, module).b.guessed and not compare(a, module).a.guessed


def test_metadata_that_differ_are_listed(tmp_path: Path) -> None:
    a = config(tmp_path / "a.json")
    b = config(tmp_path / "b.json", metadata={**build_metadata(H200), "cuda_version": "13.0", "more": 1})
    found = compare(a, b)
    assert found.equal
    assert found.metadata == (("cuda_version", "*", "13.0"), ("more", None, 1))


# ---- versions ----------------------------------------------------------------------------------------------


def meaning(version: str, deployment: Deployment = NVFP4) -> Tactics:
    """Return the ids that one version has for tactics chosen by what they are."""
    new, table = load_table("sm120", deployment.quant), load_table("sm120", deployment.quant, version)

    def tactic(stage: int, bucket: int) -> int:
        ids = new.ids(stage)
        return entry_id(table, stage, new.tactic(ids[bucket.bit_length() % len(ids)]))

    return tactic


@pytest.mark.parametrize("version", ["0.6.17", "0.7.0", "0.7.1"])
def test_files_of_two_versions_are_compared_by_what_the_tactics_are(tmp_path: Path, version: str) -> None:
    a = config(tmp_path / "a.json", meaning(version), deployment=NVFP4, device=RTX, flashinfer=version)
    b = config(tmp_path / "b.json", meaning("0.7.4"), deployment=NVFP4, device=RTX)
    assert a.read_bytes() != b.read_bytes()
    for found in (compare(a, b), compare(b, a)):
        assert found.equal
        assert len(found.pairs) == 2 * len(BUCKETS) * (1 if version == "0.6.17" else 8)
        assert "flashinfer_version" in {name for name, _, _ in found.metadata}

    def other(stage: int, bucket: int) -> int:
        return meaning("0.7.4")(stage, 1 if bucket == 256 else bucket)

    found = compare(a, config(tmp_path / "c.json", other, deployment=NVFP4, device=RTX))
    assert {(p.stage, p.bucket) for p in found.differing} == {(1, 256), (2, 256)}
    assert isinstance(found.differing[0].a.tactic, Tactic)


def test_equal_ids_of_two_versions_are_not_equal_tactics(tmp_path: Path) -> None:
    ids = {1: 17, 2: 45}
    tactic: Tactics = lambda stage, bucket: 9 if stage == 1 else ids[stage]  # noqa: E731
    a = config(tmp_path / "a.json", tactic, deployment=NVFP4, device=RTX, flashinfer="0.6.17")
    b = config(tmp_path / "b.json", tactic, deployment=NVFP4, device=RTX)
    assert len(compare(a, b).differing) == 2 * len(BUCKETS)


def test_a_version_without_tables_can_only_be_compared_with_itself(tmp_path: Path) -> None:
    newer = {**build_metadata(H200), "flashinfer_version": "99.0.0"}
    a, b = config(tmp_path / "a.json", metadata=newer), config(tmp_path / "b.json", changed, metadata=newer)
    assert len(compare(a, b).differing) == 4
    found = compare(a, config(tmp_path / "c.json"))
    assert len(found.unknown) == 2 * len(BUCKETS) and not found.equal
    result = CliRunner().invoke(main, ["diff", str(a), str(tmp_path / "c.json")], catch_exceptions=False)
    assert result.exit_code == 1 and "20 can't be compared" in result.output


def test_flashinfers_own_modules_are_compared_as_what_their_keys_say() -> None:
    pytest.importorskip("flashinfer")
    import flashinfer

    folder = Path(flashinfer.__file__).parent / "tuning_configs"
    a, b = (folder / f"{BUNDLED_PREFIX}NVIDIA_{gpu}.py" for gpu in ("B200", "GB200"))
    found = compare(a, b)
    assert found.a.guessed and found.a.flashinfer == "0.6.12"
    assert (found.a.device, found.b.device) == ("NVIDIA B200", "NVIDIA GB200")
    assert len(found.pairs) + len(found.only_a) == found.a.entries == 58
    assert compare(a, a).equal


def test_the_fallback_is_the_first_tactic(tmp_path: Path) -> None:
    a = config(
        tmp_path / "a.json", deployment=NVFP4, device=RTX, flashinfer="0.7.1", tactic=lambda s, b: 0 if s == 1 else 16
    )
    content = json.loads(config(tmp_path / "b.json", deployment=NVFP4, device=RTX, tactic=lambda s, b: 3).read_text())
    (tmp_path / "b.json").write_text(json.dumps({k: v if k[0] == "_" else [v[0], -1] for k, v in content.items()}))
    assert compare(a, tmp_path / "b.json").equal


# ---- times -------------------------------------------------------------------------------------------------


def test_stated_times_are_compared_and_near_ties_counted(tmp_path: Path) -> None:
    a = config(tmp_path / "a.json", ms=lambda stage, bucket: 0.1)
    b = config(tmp_path / "b.json", changed, ms=lambda s, bucket: 0.1005 if bucket == 8 else 0.11)
    found = compare(a, b)
    rows = summarize(found)
    assert [(r.quant, r.stage, r.source, r.kinds, r.count, r.near_ties) for r in rows] == [
        ("bf16", 1, "stated", ("tuned", "tuned"), 2, 1),
        ("bf16", 2, "stated", ("tuned", "tuned"), 2, 1),
    ]
    assert rows[0].geomean == pytest.approx(math.sqrt(1.1 * 1.005))
    assert (rows[0].least, rows[0].most) == (pytest.approx(1.005), pytest.approx(1.1))
    assert rows[0].worst.bucket == 256
    count, geomean, median = drift(found) or (0, 0.0, 0.0)
    assert (count, geomean, median) == (16, pytest.approx(1.1), pytest.approx(0.1))


def records(path: Path, source: str, tactic: str, ms: float, runner_up: str, runner_up_ms: float) -> None:
    keys = tuple(k for k in json.loads(path.read_text()) if k[0] != "_" and "gemm1" in k and "((8, " in k)
    one = Record(
        str(OLMOE.shape), (), "bf16", 1, 8, True, source, True, tactic, ms, runner_up, runner_up_ms, 0.1, 1.0, 0.0, 1.0,
        1.0, 45, keys,
    )  # fmt: skip
    sidecar_path(path).write_bytes(Sidecar({}, (one,)).dumps(path.read_bytes()))


def test_sidecars_give_times_and_say_what_they_are(tmp_path: Path) -> None:
    a, b = config(tmp_path / "a.json"), config(tmp_path / "b.json", changed)
    records(a, "measured", "x", 0.1, "y", 0.2)
    records(b, "predicted", "z", 0.3, "y", 0.4)
    (row,) = summarize(compare(a, b))
    assert (row.source, row.kinds, row.count, row.geomean) == (
        "sidecar",
        ("measured", "predicted"),
        1,
        pytest.approx(3),
    )
    table = load_table("sm90", "bf16")
    records(a, "measured", str(table.tactic(0)), 0.1, str(table.tactic(1)), 0.2)
    (row,) = summarize(compare(a, b))
    assert (row.kinds, row.geomean) == (("measured", "measured"), pytest.approx(2))


def test_a_sidecar_of_another_file_is_refused(tmp_path: Path) -> None:
    a = config(tmp_path / "a.json")
    records(a, "measured", "x", 0.1, "y", 0.2)
    a.write_text(a.read_text() + "\n")
    with pytest.raises(SynthError, match="belongs to other contents"):
        compare(a, a)


@pytest.fixture(scope="module")
def timed(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """Compare two files of a shipped layer by the shipped timings and model."""
    folder = tmp_path_factory.mktemp("timed")
    a, b = config(folder / "a.json", buckets=(8, 256)), config(folder / "b.json", changed, buckets=(8, 256))
    path = find_model([shipped("models")], H200, "bf16", DEFAULT_FLASHINFER)
    assert path is not None
    (timings,) = load(shipped("measurements"), H200, "bf16", DEFAULT_FLASHINFER)
    return with_times(compare(a, b), {"bf16": PerformanceModel.load(path)}, {"bf16": timings})


def test_times_of_the_shipped_timings_and_model(timed: Comparison) -> None:
    assert {(r.source, r.kinds[0]) for r in summarize(timed)} == {("timed", "measured"), ("predicted", "predicted")}
    (timings,) = load(shipped("measurements"), H200, "bf16", DEFAULT_FLASHINFER)
    averaged = timings.averaged()
    times = times_by_bucket(averaged)
    index = averaged.shapes.index(OLMOE.shape)
    for pair in timed.differing:
        here = times[index, pair.stage, pair.bucket]
        found = {t.source: t for t in pair.times}
        assert (found["timed"].a_ms, found["timed"].b_ms) == (here[pair.a.tactic_id], here[pair.b.tactic_id])
        # The model has seen these timings: close enough to show that it predicted these very tactics.
        assert found["predicted"].a_ms == pytest.approx(found["timed"].a_ms, rel=0.35)


def test_tactics_of_another_version_are_timed_by_what_they_are(tmp_path: Path, timed: Comparison) -> None:
    model = PerformanceModel.load(find_model([shipped("models")], H200, "bf16", DEFAULT_FLASHINFER) or Path())
    table = load_table("sm90", "bf16", "0.7.1")

    def old(tactic: Tactics) -> Tactics:
        new = load_table("sm90", "bf16")
        return lambda stage, bucket: entry_id(table, stage, new.tactic(tactic(stage, bucket)))

    a = config(tmp_path / "a.json", old(first), flashinfer="0.7.1", buckets=(8, 256))
    b = config(tmp_path / "b.json", old(changed), flashinfer="0.7.1", buckets=(8, 256))
    found = with_times(compare(a, b), {"bf16": model})
    ratios = [pair.time("predicted").ratio for pair in found.differing]  # type: ignore[union-attr]
    assert ratios == pytest.approx([p.time("predicted").ratio for p in timed.differing])  # type: ignore[union-attr]


def test_the_command_uses_what_is_shipped_and_prints_json(tmp_path: Path) -> None:
    a, b = config(tmp_path / "a.json"), config(tmp_path / "b.json", changed)
    own = ["--models", str(tmp_path), "--measurements", str(tmp_path)]
    result = CliRunner().invoke(main, ["diff", str(a), str(b), "--json", *own], catch_exceptions=False)
    found: dict[str, Any] = json.loads(result.output)
    assert result.exit_code == 1 and not found["equal"] and found["same"] == 16
    assert {t["source"] for e in found["differing"] for t in e["times"]} == {"timed", "predicted"}
    assert found["differing"][0]["b"]["tactic"] == str(load_table("sm90", "bf16").tactic(1))
    text = CliRunner().invoke(main, ["diff", str(a), str(b), "--entries", "1", *own], catch_exceptions=False).output
    assert "3 more; --entries N shows more" in text and "measured" in text and "predicted" in text


def test_files_for_two_devices_have_no_common_times(tmp_path: Path) -> None:
    a = config(tmp_path / "a.json")
    b = config(tmp_path / "b.json", changed, metadata=build_metadata("NVIDIA H100 80GB HBM3"))
    result = CliRunner().invoke(main, ["diff", str(a), str(b)], catch_exceptions=False)
    assert result.exit_code == 1 and "no times" in result.output


# ---- files of strangers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("time_ms", ["5e-324", "1e308", "NaN", "Infinity", "-1", "0", "true", '"x"', "1" * 400])
def test_times_that_no_kernel_takes_are_left_out(tmp_path: Path, time_ms: str) -> None:
    a = config(tmp_path / "a.json", ms=lambda stage, bucket: 0.1)
    b = config(tmp_path / "b.json", changed, ms=lambda stage, bucket: 0.25)
    b.write_text(b.read_text().replace("0.25", time_ms))
    found = compare(a, b)
    assert len(found.differing) == 4 and not summarize(found) and drift(found) is None
    json.dumps(record(found), allow_nan=False)


def test_nothing_from_a_file_reaches_a_terminal_unescaped(tmp_path: Path) -> None:
    evil = "\x1b]0;owned\x07\ud800"
    a = config(tmp_path / "a.json")
    content = json.loads(a.read_text())
    content["_metadata"] |= {"gpu": evil, evil: evil, "flashinfer_version": f"0.7.4{evil}"}
    key = next(k for k in content if k[0] != "_")
    content[evil] = content[key]
    content[key.replace("torch.bfloat16", "torch.ä")] = content.pop(key)
    b = tmp_path / "b.json"
    b.write_text(json.dumps(content))
    for arguments in ([str(a), str(b)], [str(b), str(a)]):
        result = CliRunner().invoke(main, ["diff", *arguments], catch_exceptions=False)
        assert result.exit_code == 1 and "only in" in result.output
        assert all(line.isprintable() for line in result.output.splitlines())


def test_malformed_entries_make_files_unequal(tmp_path: Path) -> None:
    a = config(tmp_path / "a.json")
    content = json.loads(a.read_text())
    content[next(k for k in content if k[0] != "_")] = {}
    b = tmp_path / "b.json"
    b.write_text(json.dumps(content))
    found = compare(a, b)
    assert found.b.malformed == 1 and len(found.only_a) == 1 and not found.equal
    assert not compare(b, b).equal


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(SynthError, match=r"nothing\.json"):
        compare(config(tmp_path / "a.json"), tmp_path / "nothing.json")


def test_ranks_of_one_place_are_compared_each(tmp_path: Path) -> None:
    sharded = replace(OLMOE, tp=2, shape=MoEShape(2048, 512, 64, 8))
    a = config(tmp_path / "a.json", deployment=sharded, flashinfer="0.7.1")
    b = config(tmp_path / "b.json", deployment=sharded)
    found = compare(a, b)
    assert len(found.pairs) == 4 * len(BUCKETS) and not found.only_a and not found.only_b
