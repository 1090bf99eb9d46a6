from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from configs import config_of
from hypothesis import given, settings
from hypothesis import strategies as st

from synth.catalog.devices import get_device
from synth.catalog.models import deployments, find_layer, load_models
from synth.catalog.shapes import Deployment
from synth.checking.check import check
from synth.cli import main
from synth.configs import module
from synth.configs.model import Config, Entry
from synth.configs.porting import REASONS, port
from synth.configs.reading import read
from synth.configs.sidecar import Record, Sidecar, sidecar_path
from synth.configs.v1 import dumps_json
from synth.errors import SynthError
from synth.flashinfer.buckets import token_buckets
from synth.flashinfer.keys import file_keys, parse_key
from synth.flashinfer.tactics import known_versions, load_table, load_tables
from synth.flashinfer.versions import build_metadata, contract_for, entry_id, served_id
from synth.gpu.stub import stubbed_gpu

SERVER = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
GLM = next(iter(deployments([find_layer("glm-5-tp8")], quants=["nvfp4"])))
MIXTRAL = [d for d in deployments([find_layer("mixtral-8x7b-tp2")]) if d.quant in ("bf16", "fp8")]
HYBRID = ["0.6.10", "0.6.13", "0.6.18", "0.7.1", "0.7.2.post1", "0.7.4"]


#: NVFP4 tactics that are dropped wherever they are: two tiles without a grouped kernel, and two that fuse the finalize
#: step and need more shared memory than a block can have.
NEVER_RUN = re.compile("128x128x256B|256x128x128B|(256x128|128x256)x64B .* fin1 swap0")


def key_of(
    layer: Deployment, stage: int, bucket: int, version: str, engine: str = "vllm", *, fused: bool = True, rank: int = 0
) -> str:
    return file_keys(layer, engine, bucket, stage, "sm120", version, fused_finalize=fused)[rank]


def config(entries: dict[str, int], version: str, device: str = SERVER) -> Config:
    metadata = {"flashinfer_version": version, "gpu": device}
    return config_of(metadata, {key: ["MoERunner", tactic, []] for key, tactic in entries.items()})


def ported(entries: dict[str, int], source: str, to: str, **options: object) -> tuple[dict[str, int], dict[str, int]]:
    """Return the entries under the other version, and what was dropped."""
    layers = options.pop("layers", [GLM])
    found = port(config(entries, source), to, layers=layers, **options)  # type: ignore[arg-type]
    raw = json.loads(found.config)
    return {key: value[1] for key, value in raw.items() if not key.startswith("_")}, found.dropped


def only(entries: dict[str, int], source: str, to: str, **options: object) -> int:
    after, dropped = ported(entries, source, to, **options)
    assert dropped == {} and len(set(after.values())) == 1
    return next(iter(after.values()))


def test_the_ids_of_the_public_renumbering() -> None:
    """flashinfer-ai/flashinfer#4008: two tiles went away, and the ids after them moved."""
    for source in ("0.6.17", "0.6.18", "0.7.0"):
        for stage, before, after in ((1, 16, 12), (1, 17, 13), (2, 57, 45)):
            assert only({key_of(GLM, stage, 64, source): before}, source, "0.7.4") == after
            assert only({key_of(GLM, stage, 64, "0.7.4"): after}, "0.7.4", source) == before


def test_an_unfused_range_has_its_own_ids() -> None:
    old, new = (load_table("sm120", "nvfp4", v).without_fused_finalize() for v in ("0.7.0", "0.7.4"))
    for before, tactic in old.items(2):
        if tactic in dict((t, i) for i, t in new.items(2)):
            key = key_of(GLM, 2, 64, "0.7.0", "sglang", fused=False)
            assert only({key: before}, "0.7.0", "0.7.4") == new.id_of(2, tactic)


def test_every_tactic_of_every_release_becomes_itself_or_is_dropped() -> None:
    """Over all pairs of tables that differ, all quantizations, both stages and every id."""
    tables: dict[tuple[str, ...], str] = {}
    for version in known_versions():
        tables.setdefault(tuple(map(str, [(t.arch, t.quant, t.gemm1, t.gemm2) for t in load_tables(version)])), version)
    layers = {q: next(iter(deployments([m], quants=[q]))) for q, m in
              (("nvfp4", find_layer("glm-5-tp8")), ("mxfp8_mxfp4", find_layer("gpt-oss-120b")),
               ("fp8", find_layer("mixtral-8x7b-tp2")), ("bf16", find_layer("mixtral-8x7b-tp2")))}  # fmt: skip
    seen = 0
    for source, to in itertools.permutations(tables.values(), 2):
        for table in load_tables(source):
            layer, device = layers[table.quant], SERVER if table.arch == "sm120" else "NVIDIA H200"
            other = {(s, t) for s in (1, 2) for _, t in load_table(table.arch, table.quant, to).items(s)}
            for stage in (1, 2):
                for i, tactic in table.items(stage):
                    keys = file_keys(layer, "vllm", 64, stage, table.arch, source)
                    try:
                        found = port(config({keys[0]: i}, source, device), to, layers=[layer], file_format="bundled")
                    except SynthError as e:
                        assert (stage, tactic) not in other or "can't run" in str(e)
                        assert (stage, tactic) in other or "doesn't exist" in str(e)
                        continue
                    (entry,) = {e.tactic_id for e in module.loads(Path("a.py"), found.config).entries}
                    after = load_table(table.arch, table.quant, to)
                    assert after.tactic(served_id(after, stage, entry)) == tactic
                    seen += 1
    assert seen > 500


@pytest.mark.parametrize("version", known_versions())
def test_what_is_written_is_what_that_release_looks_up(version: str, tmp_path: Path) -> None:
    bundled = not contract_for(version).metadata_keys
    entries = {key_of(GLM, s, b, "0.7.4"): load_table("sm120", "nvfp4").ids(s)[0] for s in (1, 2) for b in (1, 64, 768)}
    found = port(config(entries, "0.7.4"), version, layers=[GLM], file_format="bundled" if bundled else "json")
    path = tmp_path / (f"v0_1_trtllm_fused_moe_{SERVER.replace(' ', '_')}.py" if bundled else "config.json")
    path.write_bytes(found.config)
    asked = {key for s in (1, 2) for b in (1, 64, 768) for key in file_keys(GLM, "vllm", b, s, "sm120", version)}
    floors = not contract_for(version).hybrid_buckets
    assert found.dropped == ({"bucket": 2} if floors else {})
    assert set(read(path).raw) == {k for k in asked if not (floors and parse_key(k).bucket == 768)}
    assert {f.code for f in check(path, version, device=SERVER) if f.severity == "error"} == set()


@settings(max_examples=60, deadline=None)
@given(data=st.data(), source=st.sampled_from(HYBRID), to=st.sampled_from(HYBRID))
def test_there_and_back_gives_every_entry_that_both_know(data: st.DataObject, source: str, to: str) -> None:
    table = load_table("sm120", "nvfp4", source)
    both = {t for t in load_table("sm120", "nvfp4", to)._index}
    buckets = data.draw(st.lists(st.sampled_from(token_buckets(8192, source)), min_size=1, max_size=4, unique=True))
    entries = {}
    for stage, bucket in itertools.product((1, 2), buckets):
        ids = [i for i, t in table.items(stage) if (stage, t) in both and not NEVER_RUN.search(str(t))]
        tactic = entry_id(table, stage, table.tactic(data.draw(st.sampled_from(ids))))
        entries |= dict.fromkeys(file_keys(GLM, "vllm", bucket, stage, "sm120", source), tactic)
    there, dropped = ported(entries, source, to)
    assert dropped == {}
    back, dropped = ported(there, to, source)
    assert dropped == {} and back == entries


def test_ranks_that_disagree_are_dropped_and_those_that_agree_become_one() -> None:
    keys = file_keys(GLM, "vllm", 64, 1, "sm120", "0.7.0")
    assert len(keys) == 8
    assert only(dict.fromkeys(keys, 17), "0.7.0", "0.7.4") == 13
    with pytest.raises(SynthError, match="8: entries that fall on one key there have different tactics"):
        ported({**dict.fromkeys(keys, 17), keys[3]: 16}, "0.7.0", "0.7.4")


def test_one_key_becomes_that_of_every_rank() -> None:
    after, _ = ported({key_of(GLM, 1, 64, "0.7.4"): 13}, "0.7.4", "0.7.0")
    assert set(after) == set(file_keys(GLM, "vllm", 64, 1, "sm120", "0.7.0")) and set(after.values()) == {17}


def test_a_key_without_dtypes_stands_for_every_known_layer_with_these_shapes() -> None:
    key = key_of(GLM, 1, 64, "0.6.12")
    layers = list(deployments(load_models(), quants=["nvfp4"], supported=True))
    after, dropped = ported({key: 17}, "0.6.12", "0.7.4", layers=layers)
    assert dropped == {} and set(after.values()) == {13}
    assert set(after) == {k for d in layers for e in ("vllm", "sglang") for k in _asked(d, e, key)}
    with pytest.raises(SynthError, match="no known layer has these shapes"):
        ported({key: 17}, "0.6.12", "0.7.4", layers=MIXTRAL)


def _asked(layer: Deployment, engine: str, old: str) -> list[str]:
    passed = dataclasses.replace(layer, shape=layer.shape_for(engine))
    fits = old in file_keys(passed, engine, 64, 1, "sm120", "0.6.12")
    # The other call of SGLang, with an input in bf16, has other shapes.
    return [k for k in file_keys(passed, engine, 64, 1, "sm120", "0.7.4") if fits and "((64, 3072)" in k]


def test_the_old_releases_that_misread_gemm2_ids_get_ids_that_they_read_right() -> None:
    """Up to 0.6.14 a gemm2 id below gemm2's number of tactics was tuned as itself and served as another tactic."""
    tuned = {key_of(GLM, 2, 64, "0.6.12"): 37}
    table = load_table("sm120", "nvfp4", "0.6.12")
    tactic = table.tactic(37)
    assert served_id(table, 2, 37) == 57
    # What was timed is what is meant.
    (key, new_id), *_ = ported(tuned, "0.6.12", "0.7.4")[0].items()
    assert load_table("sm120", "nvfp4").tactic(new_id) == tactic
    # What is written runs it, and is read again as what runs.
    (old_id,) = set(ported({key: new_id}, "0.7.4", "0.6.12")[0].values())
    assert old_id == 17 and served_id(table, 2, old_id) == 37
    assert set(ported({key_of(GLM, 2, 64, "0.6.12"): old_id}, "0.6.12", "0.7.4")[0].values()) == {new_id}


def test_an_id_that_means_other_tactics_in_each_quantization_is_not_guessed() -> None:
    key = key_of(MIXTRAL[0], 1, 64, "0.6.12")
    assert key == key_of(MIXTRAL[1], 1, 64, "0.6.12")
    with pytest.raises(SynthError, match="means another tactic in each quantization"):
        ported({key: 1}, "0.6.12", "0.7.4", layers=MIXTRAL)
    after, _ = ported({key: 1}, "0.6.12", "0.7.4", layers=[d for d in MIXTRAL if d.quant == "bf16"])
    assert all("torch.bfloat16, torch.bfloat16" in k for k in after)
    # bf16 has nine tactics, so that the tenth can only be one of fp8's.
    after, _ = ported({key: 9}, "0.6.12", "0.7.4", layers=MIXTRAL)
    assert all("float8" in k for k in after)


def test_an_unfused_entry_never_becomes_the_id_of_a_fused_server() -> None:
    unfused = {key_of(GLM, 2, 64, "0.7.4", "sglang", fused=False): 24}
    fused = {key_of(GLM, 2, 64, "0.7.4", "sglang"): 45}
    after, dropped = ported({**unfused, **fused}, "0.7.4", "0.6.12")
    assert dropped == {"unfused": 1} and set(after.values()) == {57}


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ({"what": 1}, "malformed"),
        ({key_of(GLM, 1, 64, "0.6.12"): 1}, "dead-key"),
        ({key_of(GLM, 1, 64, "0.7.0"): 99}, "no-such-id"),
        ({key_of(GLM, 1, 64, "0.7.0"): 4}, "gone"),
        ({key_of(GLM, 1, 64, "0.7.0"): -1}, "fallback"),
        ({key_of(GLM, 1, 64, "0.7.0").replace("torch.uint8", "torch.float16"): 1}, "unknown-quant"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_what_cannot_be_taken_over_is_counted_by_why(entries: dict[str, int], reason: str) -> None:
    good = {key_of(GLM, 1, 64, "0.7.0", rank=r): 17 for r in range(8)}
    good |= {key_of(GLM, 2, 64, "0.7.0", rank=r): 57 for r in range(8)}
    if next(iter(entries)) in good:
        del good[next(iter(entries))]
    after, dropped = ported({**good, **entries}, "0.7.0", "0.7.4")
    assert dropped == {reason: 1} and set(after.values()) == {13, 45}
    assert reason in REASONS


def test_times_are_kept_where_the_release_keeps_them() -> None:
    entry = {"time_ms": 0.5, "runner_up_ms": 0.6, "margin": 0.2, "candidates": 9}
    # A tile that every release has.
    raw = {key_of(GLM, 1, 64, "0.7.4"): ["MoERunner", 0, [], entry]}
    source = config_of(config({}, "0.7.4").metadata, raw)
    for version in known_versions():
        if contract_for(version).metadata_keys:
            (value, *_) = [v for k, v in json.loads(port(source, version, layers=[GLM]).config).items() if k[0] != "_"]
            assert (value[3:] == [entry]) is (contract_for(version).entry_elements >= 4)


def test_a_sidecar_follows_and_nothing_counts_as_measured_any_more(tmp_path: Path) -> None:
    keys = tuple(key_of(GLM, s, 64, "0.7.4") for s in (1, 2))
    table = load_table("sm120", "nvfp4")

    def record(stage: int, source: str, tactic_id: int) -> Record:
        return Record(
            str(GLM.shape), (GLM.label,), "nvfp4", stage, 64, True, source, True, str(table.tactic(tactic_id)), 0.1,
            str(table.tactic(table.ids(stage)[0])), 0.2, 1.0, 0.3, 0.0, 1.0, 1.0, 9, (keys[stage - 1],),
        )  # fmt: skip

    before = Sidecar(
        {"device": SERVER, "flashinfer": "0.7.4"}, (record(1, "measured", 13), record(2, "analytical", 45))
    )
    source, path = config({keys[0]: 13, keys[1]: 45}, "0.7.4"), tmp_path / "a.json"
    path.write_bytes(dumps_json(source.said, source.served))
    sidecar_path(path).write_bytes(before.dumps(path.read_bytes()))
    found = port(read(path), "0.7.1", layers=[GLM])
    assert found.sidecar is not None
    after = json.loads(found.sidecar)
    assert (after["flashinfer"], after["entries"]) == ("0.7.1", {"predicted": 8, "analytical": 8})
    assert [(c["source"], c["ported_from"], len(c["keys"])) for c in after["choices"]] == [
        ("predicted", "0.7.4", 8),
        ("analytical", "0.7.4", 8),
    ]
    metadata = json.loads(found.config)["_metadata"]
    assert metadata["synth"]["entries"] == {"predicted": 8, "analytical": 8}
    assert metadata["synth"]["ported"] == {"from": "0.7.4", "dropped": {}}


# ---- the command -------------------------------------------------------------------------------------------


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.chdir(tmp_path)
    entries = [Entry(key_of(GLM, 1, b, "0.7.4"), 13) for b in (1, 64)]
    (tmp_path / "a.json").write_bytes(dumps_json(build_metadata(SERVER), entries))
    return lambda *arguments: CliRunner().invoke(main, ["port", *map(str, arguments)])


def test_the_command_writes_a_file_that_check_accepts(command: Callable[..., Result], tmp_path: Path) -> None:
    result = command("a.json", "--to", "0.7.2.post1", "-o", "b.json")
    assert result.exit_code == 0, result.output
    assert "b.json: 2 entries for FlashInfer 0.7.2.post1, from 2 for 0.7.4" in result.output
    assert json.loads((tmp_path / "b.json").read_text())["_metadata"]["flashinfer_version"] == "0.7.2.post1"
    assert not sidecar_path(tmp_path / "b.json").exists() and read(tmp_path / "b.json").sidecar is None


def test_a_bundled_file_is_read_by_its_name_and_the_version_that_is_said(
    command: Callable[..., Result], tmp_path: Path
) -> None:
    path = tmp_path / f"v0_1_trtllm_fused_moe_{SERVER.replace(' ', '_')}.py"
    path.write_text(f"best_configs = {{{key_of(GLM, 1, 64, '0.6.12')!r}: (0, 17)}}\n")
    result = command(path, "--to", "0.7.4", "--model", "glm-5", "--tp", 8, "--quant", "nvfp4", "-o", "b.json")
    assert result.exit_code == 2 and "say so with --from VERSION" in result.output
    result = command(
        path, "--from", "0.6.12", "--to", "0.7.4", "--model", "glm-5", "--tp", 8, "--quant", "nvfp4", "-o", "out/"
    )
    assert result.exit_code == 0, result.output
    (entry, *_) = read(tmp_path / "out" / "synth-nvidia-rtx-pro-6000-blackwell-server-edition.json").entries
    assert entry.tactic_id == 13


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("a.json", "--to", "9.9.9", "-o", "b.json"), "FlashInfer 9.9.9 is not known"),
        (("a.json", "--to", "0.6.5", "-o", "b.json"), "reads no JSON configs"),
        (("a.json", "--to", "0.7.1", "-o", "a.json"), "the file that is read"),
        (("a.json", "--to", "0.7.1", "--from", "0.7.0", "-o", "b.json"), "it was tuned under FlashInfer 0.7.4"),
        (("a.json", "--to", "0.7.1", "--device", "H200", "-o", "b.json"), "the file is for"),
        (("none.json", "--to", "0.7.1", "-o", "b.json"), "can't read none.json"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_wrong_usage_is_one_line_and_writes_nothing(
    command: Callable[..., Result], tmp_path: Path, options: tuple[str, ...], says: str
) -> None:
    before = (tmp_path / "a.json").read_bytes()
    result = command(*options)
    assert result.exit_code == 2 and says in result.stderr and result.stderr.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"] and (tmp_path / "a.json").read_bytes() == before


def test_a_bundled_config_of_a_gpu_without_tables_is_refused() -> None:
    with pytest.raises(SynthError, match="1: no tactics are known of this quantization"):
        port(config({key_of(GLM, 1, 64, "0.7.4"): 1}, "0.7.4", get_device("B200").name), "0.7.2")
    with pytest.raises(SynthError, match="no tactics are known of NVIDIA Z100"):
        port(config({key_of(GLM, 1, 64, "0.7.4"): 1}, "0.7.4", "NVIDIA Z100"), "0.7.2")


@pytest.mark.parametrize("environments_folder", [False, True])
def test_a_managed_store_is_read_by_its_folder(
    command: Callable[..., Result], tmp_path: Path, environments_folder: bool
) -> None:
    """Entries that FlashInfer itself has put into its store."""
    pytest.importorskip("flashinfer.autotune_cache")
    from installs import install

    entries = [Entry(key_of(GLM, 2, b, "0.7.4"), 45) for b in (1, 64, 512)]
    (tmp_path / "c.json").write_bytes(dumps_json(build_metadata(SERVER), entries))
    with stubbed_gpu(SERVER, "sm120"):
        done = install(tmp_path / "c.json", "flashinfer", folder=tmp_path / "store")
    result = command(done.folder if environments_folder else tmp_path / "store", "--to", "0.7.0", "-o", "d.json")
    assert result.exit_code == 0, result.output
    after = read(tmp_path / "d.json")
    assert {e.text: e.tactic_id for e in after.entries} == {
        k: 57 for b in (1, 64, 512) for k in file_keys(GLM, "vllm", b, 2, "sm120", "0.7.0")
    }
    assert isinstance(after.metadata, dict) and after.metadata["gpu"] == SERVER
