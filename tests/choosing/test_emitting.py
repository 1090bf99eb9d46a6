from __future__ import annotations

import ast
import dataclasses
import hashlib
import json
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from synth import __version__
from synth.catalog.devices import get_device
from synth.catalog.models import find_model
from synth.catalog.shapes import Deployment, MoEShape
from synth.choosing.emission import (
    FORMATS,
    Emission,
    NothingToWriteError,
    Source,
    bucket_union,
    emit,
    sidecar_path,
    write,
)
from synth.choosing.sources import analytical_source
from synth.errors import SynthError
from synth.flashinfer.buckets import map_to_bucket, token_buckets
from synth.flashinfer.calls import ENGINES, SERVER_MAX_TOKENS
from synth.flashinfer.keys import file_keys, parse_key
from synth.flashinfer.tactics import Tactic, load_table
from synth.performance.fitting import save
from synth.performance.model import Cells, PerformanceModel
from synth.performance.routing import Routing
from synth.timings.folders import load
from synth.timings.records import Denial
from synth.timings.table import Timings

ROOT = Path(__file__).parents[2]
H200 = get_device("NVIDIA H200")
TABLE = load_table("sm90", "bf16")
OLMOE = find_model("olmoe").deploy(1, 1, "bf16")
LAYERS = [
    OLMOE,
    find_model("gpt-oss-120b").deploy(4, 1, "bf16"),
    find_model("deepseek-v3").deploy(8, 1, "bf16"),
    Deployment("new", 1, 2, "bf16", "relu2", False, MoEShape(1024, 512, 16, 4, 2, gated=False)),
]
MAX_TOKENS = (512,)


@pytest.fixture(scope="module")
def timings() -> dict[str, Timings]:
    return {t.origin.quant: t for t in load(ROOT / "measurements", "NVIDIA H200", problems=[])}


def fitted(t: Timings) -> PerformanceModel:
    return PerformanceModel(choice_trees=4, time_trees=3).fit(t.select(np.isin(t.tokens, [1, 16, 128, 1024])))


@pytest.fixture(scope="module")
def sources(timings: dict[str, Timings]) -> dict[str, Source]:
    return {quant: Source(fitted(t), t, f"{quant} model") for quant, t in timings.items()}


def make(sources: dict[str, Source], layers: Sequence[Deployment] = LAYERS, **options: Any) -> Emission:
    options.setdefault("max_tokens", MAX_TOKENS)
    wanted = {d.quant for d in layers}
    return emit(H200, layers, {q: s for q, s in sources.items() if q in wanted}, **options)


def entries_of(emission: Emission) -> dict[str, Any]:
    return {k: v for k, v in json.loads(emission.config).items() if not k.startswith("_")}


def all_keys(layers: Sequence[Deployment], engines: Sequence[str] = ENGINES) -> set[str]:
    return {
        key
        for d in layers
        for engine in engines
        for fused in ((True, False) if engine == "sglang" else (True,))
        for stage in (1, 2)
        for bucket in token_buckets(512)
        for key in file_keys(d, engine, bucket, stage, "sm90", fused_finalize=fused)
    }


# --- the config ------------------------------------------------------------------------------------------------------


def test_every_key_that_an_engine_asks_for_is_written_or_counted(sources: dict[str, Source]) -> None:
    made = make(sources)
    written = set(entries_of(made))
    wanted = all_keys(LAYERS)
    assert written <= wanted
    (tally,) = made.tallies
    assert len(written) == made.entries == sum(tally.entries.values())
    assert len(written) + tally.left_out == len(wanted)
    assert (tally.deployments, tally.shapes) == (4, 4)
    assert tally.gain > 1
    assert len(written) > 0.8 * len(wanted)


@pytest.mark.parametrize("engines", [("vllm",), ("sglang",), ENGINES])
def test_only_the_engines_keys_are_written(sources: dict[str, Source], engines: tuple[str, ...]) -> None:
    assert set(entries_of(make(sources, [OLMOE], engines=engines))) == all_keys([OLMOE], engines)


def test_both_engines_keys_are_the_union_without_repeats(sources: dict[str, Source]) -> None:
    layers = [find_model("olmoe").deploy(1, 1, "fp8")]
    both = Counter(k for k, _ in json.loads(make(sources, layers).config, object_pairs_hook=list))
    one = [set(entries_of(make(sources, layers, engines=(e,)))) for e in ENGINES]
    assert set(both) - {"_metadata"} == one[0] | one[1]
    assert set(both.values()) == {1}


def test_deployments_with_equal_keys_get_one_entry(sources: dict[str, Source]) -> None:
    twin = dataclasses.replace(OLMOE, model="twin")
    alone, both = make(sources, [OLMOE]), make(sources, [OLMOE, twin])
    assert entries_of(alone) == entries_of(both)
    assert both.entries == alone.entries
    records = json.loads(both.sidecar)["choices"]
    assert {tuple(r["labels"]) for r in records} == {("olmoe", "twin")}


def test_ids_without_the_fused_finalize_are_of_the_shorter_table(sources: dict[str, Source]) -> None:
    made = make(sources)
    shorter = TABLE.without_fused_finalize()
    different = 0
    chosen = {key: r for r in json.loads(made.sidecar)["choices"] if r["written"] for key in r["keys"]}
    for key, value in entries_of(made).items():
        parsed = parse_key(key)
        stage, fused = parsed.stage, parsed.named()["use_fused_finalize"]
        table = TABLE if fused else shorter
        assert value[1] in table.ids(stage)
        assert str(table.tactic(value[1])) == chosen[key]["tactic"]
        different += stage == 2 and not fused and TABLE.tactic(value[1]) != shorter.tactic(value[1])
    assert different > 5


def test_entries_hold_times_and_metadata_the_device(sources: dict[str, Source]) -> None:
    made = json.loads(make(sources, [OLMOE]).config)
    metadata = made.pop("_metadata")
    assert metadata["gpu"] == "NVIDIA H200" and metadata["flashinfer_version"] == "0.7.4"
    assert metadata["synth"]["synth"] == __version__
    for runner, tactic, policy, times in made.values():
        assert runner == "MoERunner" and isinstance(tactic, int)
        assert policy == ["cuda_graph_profile_replays", None, "l2_cache_policy", "hot"]
        assert 0 < times["time_ms"] <= times["runner_up_ms"] * 1.001
        assert times["margin"] == pytest.approx(times["runner_up_ms"] / times["time_ms"] - 1, abs=1e-4)
        assert times["candidates"] >= 2


def test_the_bundled_form_has_the_same_keys_and_ids(sources: dict[str, Source]) -> None:
    as_json, bundled = make(sources), make(sources, file_format="bundled")
    tree = ast.parse(bundled.config.decode())
    assert isinstance(tree.body[1], ast.Assign)
    table = ast.literal_eval(tree.body[1].value)
    assert table == {k: (0, v[1]) for k, v in entries_of(as_json).items()}
    head, sidecar = json.loads(as_json.sidecar), json.loads(bundled.sidecar)
    assert sidecar["choices"] == head["choices"]
    assert sidecar["config_sha256"] != head["config_sha256"]


# --- the sidecar -----------------------------------------------------------------------------------------------------


def test_the_sidecar_names_the_config_and_every_key(sources: dict[str, Source]) -> None:
    made = make(sources)
    sidecar = json.loads(made.sidecar)
    assert sidecar["config_sha256"] == hashlib.sha256(made.config).hexdigest()
    assert (sidecar["device"], sidecar["flashinfer"]) == ("NVIDIA H200", "0.7.4")
    assert sidecar["sources"]["bf16"]["model"] == sources["bf16"].model.fingerprint()
    by_key: dict[str, dict[str, Any]] = {}
    for record in sidecar["choices"]:
        for key in record["keys"]:
            assert key not in by_key
            by_key[key] = record
    entries = entries_of(made)
    assert set(entries) == {k for k, r in by_key.items() if r["written"]}
    for key, value in entries.items():
        record, parsed = by_key[key], parse_key(key)
        assert record["source"] in ("measured", "predicted")
        assert (record["stage"], record["bucket"]) == (parsed.stage, parsed.bucket)
        assert record["shape"] == str(parsed.shape())
        assert record["ms"] == value[3]["time_ms"] and record["margin"] == value[3]["margin"]
        assert record["runner_up_ms"] == value[3]["runner_up_ms"]
        assert record["fallback_ms"] > record["ms"] > 0
        assert record["runner_up"] != record["tactic"]


def test_the_tally_counts_entries_by_source(sources: dict[str, Source]) -> None:
    made = make(sources)
    entries = entries_of(made)
    records = json.loads(made.sidecar)["choices"]
    counted = Counter(r["source"] for r in records for key in r["keys"] if key in entries)
    assert dict(counted) == made.tallies[0].entries
    assert counted["measured"] > 0 and counted["predicted"] > 0
    assert not made.analytical


def test_config_and_sidecar_count_entries_by_source(sources: dict[str, Source]) -> None:
    made = make(sources)
    written = json.loads(made.config)["_metadata"]["synth"]
    sidecar = json.loads(made.sidecar)
    for head in (written, sidecar):
        assert head["entries"] == made.tallies[0].entries
        assert sum(head["entries"].values()) == made.entries == len(entries_of(made))
        assert head["left_out"] == made.left_out == made.tallies[0].left_out


def test_the_tally_means_what_the_sidecar_says_of_each_entry(sources: dict[str, Source]) -> None:
    made = make(sources)
    (tally,) = made.tallies
    records = json.loads(made.sidecar)["choices"]
    for source, count in tally.entries.items():
        mine = [(r, len(r["keys"])) for r in records if r["written"] and r["source"] == source]
        assert tally.regret[source] == pytest.approx(sum(r["expected_regret"] * n for r, n in mine) / count, rel=1e-4)
        assert tally.within[source] == pytest.approx(sum(r["within_2%"] * n for r, n in mine) / count, rel=1e-4)


def test_the_sidecar_lies_beside_the_config() -> None:
    assert sidecar_path(Path("a/b.json")) == Path("a/b.json.provenance.json")


# --- files -----------------------------------------------------------------------------------------------------------


def check_files(folder: Path, names: Sequence[str]) -> None:
    """Assert that each config lies beside its own sidecar."""
    for name in names:
        config = folder / name
        if config.exists():
            sidecar = json.loads(sidecar_path(config).read_bytes())
            assert sidecar["config_sha256"] == hashlib.sha256(config.read_bytes()).hexdigest()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def two(sources: dict[str, Source]) -> list[Emission]:
    """Two emissions that differ."""
    return [make(sources, [layer], max_tokens=(8,)) for layer in LAYERS[:2]]


def test_configs_are_written_with_their_sidecars(two: list[Emission], tmp_path: Path) -> None:
    for first, second in ((0, 1), (1, 0), (1, 0)):
        write([two[first], two[second]], [tmp_path / "x" / "a.json", tmp_path / "y" / "b.json"])
        check_files(tmp_path, ["x/a.json", "y/b.json"])
        assert (tmp_path / "x" / "a.json").read_bytes() == two[first].config
        assert len(contents(tmp_path)) == 4
        assert sorted(p.name for p in (tmp_path / "x").iterdir()) == ["a.json", "a.json.provenance.json"]


NAMES = ["a.json", "b.json"]


@pytest.mark.parametrize("old", [True, False])
def test_an_error_while_files_are_put_in_place_changes_nothing(
    two: list[Emission], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: bool
) -> None:
    targets = [tmp_path / name for name in NAMES]
    if old:
        write(two, targets)
    before, rename, failed = contents(tmp_path), os.replace, 0
    for n in range(20):
        calls = iter(range(100))

        def replace(a: Path, b: Path, calls: Iterator[int] = calls, n: int = n) -> None:
            check_files(tmp_path, NAMES)
            if next(calls) == n:
                raise OSError(28, "No space left on device")
            rename(a, b)

        with monkeypatch.context() as m:
            m.setattr(os, "replace", replace)
            try:
                write(two[::-1], targets)
            except SynthError as e:
                assert "No space left on device" in str(e) and str(tmp_path) in str(e) and "\n" not in str(e)
                assert contents(tmp_path) == before
                failed += 1
            else:
                break
    assert failed == (8 if old else 4)
    check_files(tmp_path, NAMES)
    assert targets[0].read_bytes() == two[1].config


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_that_is_killed_leaves_no_config_beside_a_sidecar_of_another(
    two: list[Emission], tmp_path: Path
) -> None:
    rename = os.replace
    for n in range(8):
        folder = tmp_path / str(n)
        targets = [folder / name for name in NAMES]
        write(two, targets)
        child = os.fork()
        if child == 0:
            calls = iter(range(100))

            def replace(a: Path, b: Path, calls: Iterator[int] = calls, n: int = n) -> None:
                if next(calls) == n:
                    os._exit(9)
                rename(a, b)

            os.replace = replace
            write(two[::-1], targets)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
        check_files(folder, NAMES)
        write(two, targets)
        check_files(folder, NAMES)


def test_a_folder_in_the_place_of_any_file_changes_nothing(two: list[Emission], tmp_path: Path) -> None:
    targets = [tmp_path / name for name in NAMES]
    write(two, targets)
    sidecar_path(targets[1]).unlink()
    sidecar_path(targets[1]).mkdir()
    before = contents(tmp_path)
    with pytest.raises(SynthError, match=r"can't write .*b\.json\.provenance\.json: a folder"):
        write(two[::-1], targets)
    assert contents(tmp_path) == before


# --- the same bytes --------------------------------------------------------------------------------------------------


def test_two_runs_give_equal_bytes_whatever_the_order(sources: dict[str, Source]) -> None:
    first, again = make(sources), make(sources)
    assert (first.config, first.sidecar) == (again.config, again.sidecar)
    turned = make(sources, LAYERS[::-1], max_tokens=(512, 128), engines=ENGINES[::-1])
    straight = make(sources, LAYERS, max_tokens=(128, 512))
    assert turned.config == straight.config


_EMIT = """
import hashlib, sys
from pathlib import Path
from synth.catalog.devices import get_device
from synth.catalog.models import find_model
from synth.choosing.emission import Source, emit
from synth.timings.folders import load
from synth.performance.model import PerformanceModel
model = PerformanceModel.load(Path(sys.argv[1]))
(timings,) = load("measurements", "NVIDIA H200", "bf16", problems=[])
layers = [find_model(n).deploy(1, 1, "bf16") for n in ("olmoe", "qwen3-30b-a3b", "mixtral-8x7b")]
made = emit(get_device("NVIDIA H200"), layers, {"bf16": Source(model, timings, "x")}, max_tokens=(64,))
print(hashlib.sha256(made.config + made.sidecar).hexdigest())
"""


def test_other_processes_give_the_same_bytes(sources: dict[str, Source], tmp_path: Path) -> None:
    path = save(sources["bf16"].model, tmp_path)
    found = set()
    for seed, threads in (("0", "1"), ("12345", "2")):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": threads}
        done = subprocess.run(
            [sys.executable, "-c", _EMIT, str(path)],
            cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-1000:]
        found.add(done.stdout)
    assert len(found) == 1


# --- buckets ---------------------------------------------------------------------------------------------------------


def test_the_default_buckets_are_those_of_every_server() -> None:
    buckets = bucket_union(SERVER_MAX_TOKENS)
    assert len(buckets) == 23 and buckets[0] == 1 and buckets[-1] == 32768
    assert bucket_union([512, 512]) == bucket_union([512]) == token_buckets(512)


def test_a_maximum_off_the_grid_gets_its_own_bucket(sources: dict[str, Source]) -> None:
    assert 500 in bucket_union([500]) and 512 not in bucket_union([500])
    assert {200, 500} <= set(bucket_union([200, 500]))
    made = make(sources, [OLMOE], max_tokens=(500,))
    assert {parse_key(k).bucket for k in entries_of(made)} == set(bucket_union([500]))


@pytest.mark.parametrize("max_tokens", [1, 24, 40, 128, 200, 256, 300, 500, 512, 700, 3000, 5000, 8192, 40000])
def test_every_batch_of_a_server_finds_its_bucket(max_tokens: int) -> None:
    asked = {map_to_bucket(tokens, max_tokens) for tokens in range(1, max_tokens + 300)}
    assert asked <= set(bucket_union([max_tokens]))


# --- what is refused -------------------------------------------------------------------------------------------------


def test_simulated_timings_never_reach_a_config(timings: dict[str, Timings], sources: dict[str, Source]) -> None:
    t = timings["bf16"]
    simulated = dataclasses.replace(t, origin=dataclasses.replace(t.origin, simulated=True))
    model = PerformanceModel(choice_trees=2, time_trees=2).fit(simulated.select(simulated.tokens == 16))
    with pytest.raises(SynthError, match="simulated") as e:
        emit(H200, [OLMOE], {"bf16": Source(model, simulated)}, max_tokens=MAX_TOKENS)
    assert "\n" not in str(e.value)


def test_where_nothing_beats_the_fallback_nothing_is_written(sources: dict[str, Source]) -> None:
    unsure = fitted(load(ROOT / "measurements", "NVIDIA H200", "bf16", problems=[])[0])
    unsure.spread_ = 1e6
    with pytest.raises(NothingToWriteError, match=r"nothing to write for NVIDIA H200: all .* left out") as e:
        emit(H200, [OLMOE], {"bf16": Source(unsure)}, max_tokens=MAX_TOKENS)
    assert sum(t.left_out for t in e.value.tallies) == len(all_keys([OLMOE]))


def test_entries_that_may_not_win_are_left_out_and_counted(sources: dict[str, Source]) -> None:
    unsure = fitted(load(ROOT / "measurements", "NVIDIA H200", "bf16", problems=[])[0])
    gains = sorted(
        math.log(r["fallback_ms"] / r["ms"]) for r in json.loads(make(sources, [LAYERS[3]]).sidecar)["choices"]
    )
    # So wide that the middle of the gains isn't sure, whatever the trees say of each cell.
    cells = Cells((LAYERS[3].shape,), *(np.array([x]) for x in (0, 1, 16, 0)))
    unsure.spread_ *= gains[len(gains) // 2] / (1.645 * math.sqrt(2) * float(unsure.predict(cells).log_sd[0]))
    sure, made = make(sources, [LAYERS[3]]), emit(H200, [LAYERS[3]], {"bf16": Source(unsure)}, max_tokens=MAX_TOKENS)
    assert made.tallies[0].left_out > 0 and made.entries < sure.entries
    assert made.entries + made.tallies[0].left_out == len(all_keys([LAYERS[3]]))
    for record in json.loads(made.sidecar)["choices"]:
        if not record["written"]:
            assert not set(record["keys"]) & set(entries_of(made))


# --- without timings -------------------------------------------------------------------------------------------------


def test_an_analytical_config_says_so() -> None:
    device = get_device("NVIDIA RTX PRO 6000 Blackwell Server Edition")
    layers = [find_model("olmoe").deploy(1, 1, "bf16")]
    made = emit(device, layers, {"bf16": analytical_source(device, "bf16")}, max_tokens=(8192,))
    assert made.analytical and set(made.tallies[0].entries) == {"analytical"}
    assert made.tallies[0].left_out > 0
    assert {r["source"] for r in json.loads(made.sidecar)["choices"]} == {"analytical"}
    metadata = json.loads(made.config)["_metadata"]
    assert metadata["gpu"] == device.name and metadata["synth"]["entries"] == {"analytical": made.entries}


def test_analytical_entries_are_never_bundled_nor_among_the_measured() -> None:
    device = get_device("NVIDIA RTX PRO 6000 Blackwell Server Edition")
    layers = [find_model("olmoe").deploy(1, 1, "bf16")]
    source = {"bf16": analytical_source(device, "bf16")}
    with pytest.raises(SynthError, match="are analytical, and a bundled file, the form that is contributed"):
        emit(device, layers, source, max_tokens=(8192,), file_format="bundled")
    for file_format in FORMATS:
        with pytest.raises(NothingToWriteError, match="no timing stands behind them"):
            emit(device, layers, source, max_tokens=(8192,), file_format=file_format, measured=True)


def test_a_device_without_public_numbers_has_no_analytical_source() -> None:
    with pytest.raises(SynthError, match="NVIDIA GB10"):
        analytical_source(get_device("GB10"), "bf16")


def test_a_device_without_tactics_has_no_source() -> None:
    with pytest.raises(SynthError, match="sm100"):
        analytical_source(get_device("NVIDIA B200"), "bf16")


def test_progress_counts_shapes(sources: dict[str, Source]) -> None:
    seen: list[tuple[int, int]] = []
    layers = [*LAYERS, find_model("olmoe").deploy(1, 1, "fp8")]
    made = make(sources, layers, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (5, 5) and seen == sorted(seen)
    assert {t.quant for t in made.tallies} == {"bf16", "fp8"}


# --- denied tactics --------------------------------------------------------------------------------------------------


def test_a_denied_tactic_is_written_nowhere_and_named_in_the_sidecar(sources: dict[str, Source]) -> None:
    plain = json.loads(make(sources, [OLMOE]).sidecar)
    assert "denied" not in plain["sources"]["bf16"]
    worst, _ = Counter(r["tactic"] for r in plain["choices"] if r["stage"] == 2).most_common(1)[0]
    denial = Denial(2, Tactic.parse(worst), OLMOE.shape, 64)
    made = make({"bf16": dataclasses.replace(sources["bf16"], denied=(denial,))}, [OLMOE])
    sidecar = json.loads(made.sidecar)
    assert sidecar["sources"]["bf16"]["denied"] == [f"gemm2 {worst}"]
    assert worst not in {r["tactic"] for r in sidecar["choices"]}
    assert len(entries_of(made)) == len(entries_of(make(sources, [OLMOE])))


# --- skewed routing --------------------------------------------------------------------------------------------------


def test_a_skewed_routing_is_recorded_and_nothing_is_measured(sources: dict[str, Source]) -> None:
    plain = make(sources, [OLMOE])
    made = make(sources, [OLMOE], routing=Routing.counts([[float(i * i) for i in range(64)]], "counts.csv"))
    config, sidecar = json.loads(made.config), json.loads(made.sidecar)
    (tally,) = made.tallies
    assert set(tally.entries) == {"predicted"} and {r["source"] for r in sidecar["choices"]} == {"predicted"}
    assert sidecar["routing"]["text"] == "counts.csv" and sidecar["routing"]["counted"]["experts"] == 64
    before = json.loads(plain.config)["_metadata"]
    after = config["_metadata"]
    assert after["synth"].pop("routing") == sidecar["routing"]
    assert after["synth"].pop("entries") == {"predicted": made.entries}
    assert before["synth"].pop("entries").get("measured")
    assert after["synth"].pop("left_out") >= before["synth"].pop("left_out")
    assert after == before
    assert "routing" not in json.loads(plain.sidecar)


def test_uniform_routing_changes_no_byte(sources: dict[str, Source]) -> None:
    plain, even = make(sources), make(sources, routing=Routing.zipf(0.0))
    assert (plain.config, plain.sidecar) == (even.config, even.sidecar)


def test_counts_of_another_model_are_refused(sources: dict[str, Source]) -> None:
    with pytest.raises(SynthError, match=r"counts of 64 experts, but a layer has 128 .* --model"):
        make(sources, routing=Routing.counts([[1.0] * 64]))
