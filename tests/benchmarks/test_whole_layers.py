"""The benchmarks of whole layers on a CPU: what is served, drawn and timed, and what the scripts print."""

from __future__ import annotations

import csv
import importlib.util
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_kernels import H200, Kernels

from synth.catalog.shapes import Deployment, MoEShape
from synth.choosing.choose import choose
from synth.configs.model import Entry
from synth.configs.v1 import dumps_json
from synth.errors import SynthError
from synth.flashinfer.keys import file_keys
from synth.flashinfer.versions import build_metadata
from synth.gpu import layer as gpu_layer
from synth.gpu.stub import StubbedFlashInfer
from synth.performance.routing import UNIFORM, Routing

torch = pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import whole_layers  # noqa: E402
from whole_layers import ServedLayer  # noqa: E402

SHAPE = MoEShape(256, 128, 4, 2)


def served_layer(shape: MoEShape = SHAPE, tp: int = 1) -> ServedLayer:
    return ServedLayer(Deployment("m", tp, shape.ep_size, "bf16", "swiglu", False, shape), device="cpu")


def test_a_layers_tokens_follow_the_routing(h200: StubbedFlashInfer) -> None:
    shape = MoEShape(256, 128, 16, 2, 2)
    layer = served_layer(shape)
    routing = Routing.zipf(1.0)
    drawn = [layer.inputs(4000, sample, routing)["token_selected_experts"] for sample in (0, 0, 1)]
    assert drawn[0].dtype == torch.int32 and drawn[0].shape == (4000, 2)
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    assert (drawn[0][:, 0] != drawn[0][:, 1]).all()
    p = routing.inclusion(32, 2)
    for ids in drawn:
        counts = torch.bincount(ids.flatten(), minlength=32).sort(descending=True).values.numpy()
        assert (abs(counts - 4000 * p) <= 5 * (4000 * p * (1 - p)) ** 0.5 + 1).all()
    even = [layer.inputs(64, sample, UNIFORM)["token_selected_experts"] for sample in (0, 0, 1)]
    assert torch.equal(even[0], layer.inputs(64)["token_selected_experts"]) and torch.equal(even[0], even[1])
    assert not torch.equal(even[0], even[2])
    with pytest.raises(SynthError, match="counts of 2 experts, but a layer has 32"):
        layer.inputs(8, routing=Routing.counts([[2, 1]]))


def test_a_served_layer_has_its_workspace_and_says_its_maximum(h200: StubbedFlashInfer, kernels: Kernels) -> None:
    layer = served_layer(MoEShape(256, 128, 4, 2, 8), tp=2)
    inputs = layer.inputs(16)
    assert kernels.workspaces == [(16, 256, 128, 32, 2)]
    assert inputs["workspace_buffer"].shape == (256,)
    assert (inputs["tp_size"], inputs["ep_size"], inputs["tune_max_num_tokens"]) == (2, 8, 8192)


def test_tuning_some_buckets_serves_all_token_counts_below_them(h200: StubbedFlashInfer, tmp_path: Path) -> None:
    layer = served_layer()
    path = tmp_path / "tuned.json"
    path.write_text("not a config: tuning starts anew")
    whole_layers.tune(layer, [5, 300], path)
    assert sum(key.startswith("(") for key in json.loads(path.read_text())) == 4
    with whole_layers.serving(path):
        # The fixture's timer likes the last tactic of gemm1 and the first of gemm2.
        assert whole_layers.served_pair(layer, layer.inputs(5)) == (44, 45)
        assert whole_layers.served_pair(layer, layer.inputs(512)) == (44, 45)
        assert whole_layers.served_pair(layer, layer.inputs(16)) == (-1, -1)


def test_serving_a_config_forgets_what_was_tuned_before(h200: StubbedFlashInfer, tmp_path: Path) -> None:
    layer = served_layer(tp=2)
    whole_layers.tune(layer, [8], tmp_path / "tuned.json")
    config = write_config(tmp_path / "config.json", 8, (7, 60))
    with whole_layers.serving(config):
        assert whole_layers.served_pair(layer, layer.inputs(8)) == (7, 60)
    tuner = h200.tuner
    assert "choose_one" not in vars(tuner)


def write_config(path: Path, bucket: int, pair: tuple[int, int], **changes: str) -> Path:
    deployment = Deployment("m", 2, 1, "bf16", "swiglu", False, SHAPE)
    entries = {
        key: Entry(key, pair[stage - 1])
        for stage in (1, 2)
        for key in file_keys(deployment, "vllm", bucket, stage, "sm90")
    }
    path.write_bytes(dumps_json({**build_metadata(H200), **changes}, entries.values()))
    return path


# ---- benchmarks/layer.py -----------------------------------------------------------------------------------


@pytest.fixture
def benchmark(h200: StubbedFlashInfer, monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], int]:
    """The script on the CPU: a graph is the pair that was captured, and its time that pair's ids."""
    return load_benchmark("layer", monkeypatch)


@pytest.fixture
def routing_benchmark(
    h200: StubbedFlashInfer, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> Callable[[list[str]], int]:
    """The script for skewed routing on the CPU, likewise; the shipped model and timings are real."""
    main = load_benchmark("routing", monkeypatch)

    def capture(call: Callable[[], object], calls: int) -> tuple[int, int]:
        # A pair that is given is never asked of the tuner.
        for _ in range(calls):
            call()
        return next((a[0], a[1]) for a in kernels.layer_calls[-1] if isinstance(a, list) and len(a) == 2)

    monkeypatch.setattr(whole_layers, "capture", capture)
    return main


def load_benchmark(name: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], int]:
    path = Path(__file__).resolve().parents[2] / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"{name}_benchmark", path)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, f"{name}_benchmark", script)
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec.loader.exec_module(script)
    monkeypatch.setattr(gpu_layer, "select_device", lambda _name: torch.device("cpu"))

    def capture(call: Callable[[], object], calls: int) -> tuple[int, int]:
        with whole_layers.served_tactics() as served:
            call()
        return served.get(1, -1), served.get(2, -1)

    def time_interleaved(graphs: dict[str, tuple[int, int]], calls: int, rounds: int) -> dict[str, list[float]]:
        ms = {label: 10.0 if pair == (-1, -1) else float(sum(pair)) / 50 for label, pair in graphs.items()}
        return {label: [ms[label]] * rounds for label in graphs}

    monkeypatch.setattr(whole_layers, "capture", capture)
    monkeypatch.setattr(whole_layers, "time_interleaved", time_interleaved)
    monkeypatch.setattr(whole_layers, "eager_ms", lambda call: (call(), 0.5)[1])
    main: Callable[[list[str]], int] = script.main
    return main


def test_the_benchmark_times_the_fallback_the_autotuner_and_a_config(
    benchmark: Callable[[list[str]], int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path / "config.json", 8, (7, 60))
    out = tmp_path / "rows.csv"
    # By hand a layer has no tensor parallelism, and this config's keys are for 2 ranks.
    assert benchmark(["--layer", f"tiny={SHAPE}", "--tokens", "8", "--config", str(config), "--out", str(out)]) == 1
    assert "tiny bf16 at 8 tokens, synth: FlashInfer found no entry" in capsys.readouterr().err
    text = config.read_text().replace("torch.bfloat16, 2, 2, 1", "torch.bfloat16, 2, 1, 1")
    config.write_text(text)
    assert benchmark(["--layer", f"tiny={SHAPE}", "--tokens", "8", "--config", str(config), "--out", str(out)]) == 0
    rows = list(csv.DictReader(out.open()))
    assert [tuple(r[c] for c in ("shape", "tokens", "label", "g1", "g2", "ms")) for r in rows] == [
        ("tiny", "8", "fallback", "-1", "-1", "10"),
        ("tiny", "8", "autotuned", "44", "45", "1.78"),
        ("tiny", "8", "synth", "7", "60", "1.34"),
    ]
    printed = capsys.readouterr().out
    assert "bf16 synth: time over the autotuner's 0.7528 (geometric mean of 1" in printed
    assert "bf16 synth: faster than the fallback 7.4627" in printed


def test_the_benchmark_fails_on_a_wrong_output(
    benchmark: Callable[[list[str]], int], kernels: Kernels, capsys: pytest.CaptureFixture[str]
) -> None:
    kernels.outputs[44, 45] = 1.5
    assert benchmark(["--layer", f"tiny={SHAPE}", "--tokens", "8"]) == 1
    assert "autotuned: the output is 0.5 off" in capsys.readouterr().err


def test_the_benchmark_stops_in_time_and_keeps_its_rows(
    benchmark: Callable[[list[str]], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(sys.modules["layer_benchmark"].time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(whole_layers, "eager_ms", lambda call: clock.__setitem__(0, clock[0] + 40) or 0.5)
    out = tmp_path / "rows.csv"
    arguments = ["--layer", f"a={SHAPE}", "--layer", f"b={SHAPE}", "--tokens", "1,8,64,256", "--seconds", "60"]
    assert benchmark([*arguments, "--out", str(out)]) == 0
    rows = list(csv.DictReader(out.open()))
    assert [(r["shape"], r["tokens"], r["label"]) for r in rows] == [
        ("a", t, label) for t in ("1", "8") for label in ("fallback", "autotuned")
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--layer", "no-such-model"],
        ["--layer", "tiny=h1"],
        ["--layer", f"tiny={SHAPE}", "--tokens", "0"],
        ["--layer", f"tiny={SHAPE}", "--tokens", "9000"],
        ["--layer", f"tiny={SHAPE}", "--tokens", "many"],
        ["--layer", f"tiny={SHAPE}", "--config", "no-such-file.json"],
    ],
)
def test_the_benchmark_explains_wrong_arguments(
    benchmark: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert benchmark(arguments) == 2
    assert capsys.readouterr().err.startswith("layer.py: ")


def test_layers_are_named_as_the_catalogue_names_deployments(benchmark: object) -> None:
    script = sys.modules["layer_benchmark"]
    name, deployment = script.parse_layer("deepseek-v3-tp2-ep8", "fp8")
    assert (name, deployment.tp, deployment.ep, deployment.quant) == ("deepseek-v3-tp2-ep8", 2, 8, "fp8")
    name, deployment = script.parse_layer("tiny=h256-i128-e4-k2-ep4-ungated", "bf16")
    assert (name, deployment.ep, deployment.activation) == ("tiny", 4, "relu2")


# ---- benchmarks/routing.py ---------------------------------------------------------------------------------


TINY = ["--layer", f"tiny={SHAPE}"]


def test_the_routing_benchmark_times_every_pair_of_candidates(
    routing_benchmark: Callable[[list[str]], int],
    kernels: Kernels,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "rows.csv"
    routings = ["uniform", "zipf:1.2", "hot:1"]
    options = [f"--routing={r}" for r in routings] + ["--tokens", "8,64", "--rounds", "5", "--out", str(out)]
    assert routing_benchmark([*TINY, *options]) == 0
    rows = list(csv.DictReader(out.open()))
    cells: dict[tuple[str, str], list[dict[str, str]]] = {}
    for row in rows:
        cells.setdefault((row["tokens"], row["routing"]), []).append(row)
    assert set(cells) == {(t, r) for t in ("8", "64") for r in routings}
    for (_, routing), mine in cells.items():
        assert len({(r["g1"], r["g2"]) for r in mine}) == len(mine) == 16
        roles = [role for r in mine for role in r["chosen_for"].split("+") if role]
        assert sorted(roles) == ["routing", "uniform"]
        for r in mine:
            assert float(r["ms"]) == float(r["q25"]) == float(r["q75"]) == (int(r["g1"]) + int(r["g2"])) / 50
            assert (r["rounds"], r["draws"], r["error"]) == ("5", "4", "0")
            assert r["tactic1"].startswith(("tma90", "sm80")) and float(r["expected1_ms"]) > 0
            if routing == "uniform":
                assert (r["expected1_ms"], r["expected2_ms"]) == (r["uniform1_ms"], r["uniform2_ms"])
    printed = capsys.readouterr().out
    assert "uniform: regret of uniform's pairs" in printed and "in 0 of 2 cells" in printed
    assert "zipf:1.2: regret" in printed and "hot:1: regret" in printed


def test_a_captured_graph_goes_through_all_draws(
    routing_benchmark: Callable[[list[str]], int], kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs: list[list[int]] = []
    capture = whole_layers.capture

    def spy(call: Callable[[], object], calls: int) -> Any:
        before = len(kernels.layer_calls)
        graph = capture(call, calls)
        # The output of each draw is a tensor of its own.
        graphs.append([id(args[0]) for args in kernels.layer_calls[before:]])
        return graph

    monkeypatch.setattr(whole_layers, "capture", spy)
    assert routing_benchmark([*TINY, "--routing", "zipf:1", "--tokens", "8", "--draws", "3"]) == 0
    assert len(graphs) == 16
    for outputs in graphs:
        assert len(outputs) % 3 == 0
        assert {outputs.count(i) for i in outputs} == {len(outputs) // 3} and len(set(outputs)) == 3


def test_the_routing_benchmark_stops_after_a_few_errors(
    routing_benchmark: Callable[[list[str]], int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cells = [0]

    def capture(call: Callable[[], object], calls: int) -> tuple[int, int]:
        cells[0] += 1
        raise RuntimeError("CUDA error: misaligned address\nCompile with TORCH_USE_CUDA_DSA")

    monkeypatch.setattr(whole_layers, "capture", capture)
    out = tmp_path / "rows.csv"
    assert routing_benchmark([*TINY, "--routing", "zipf:1", "--tokens", "1,2,4,8,16", "--out", str(out)]) == 1
    assert cells == [3] and out.read_text().startswith("layer,tokens,routing,") and out.read_text().count("\n") == 1
    assert "tiny at 4 tokens, zipf:1: RuntimeError: CUDA error: misaligned address Compile" in capsys.readouterr().err


def test_a_wrong_output_is_told_and_is_never_the_best(
    routing_benchmark: Callable[[list[str]], int],
    kernels: Kernels,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "rows.csv"
    arguments = [*TINY, "--routing", "zipf:1", "--tokens", "64", "--out", str(out)]
    assert routing_benchmark(arguments) == 0
    pair = min(((int(r["g1"]), int(r["g2"])) for r in csv.DictReader(out.open())), key=sum)
    assert f"{pair[0]},{pair[1]}" in capsys.readouterr().out
    kernels.outputs[pair] = 1.5
    assert routing_benchmark(arguments) == 1
    found = capsys.readouterr()
    assert f"{pair}: the output is 0.5 off" in found.err and f" {pair[0]},{pair[1]} " not in found.out


def test_the_routing_benchmark_stops_in_time_and_keeps_its_rows(
    routing_benchmark: Callable[[list[str]], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(sys.modules["routing_benchmark"].time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(whole_layers, "eager_ms", lambda call: clock.__setitem__(0, clock[0] + 40) or 0.5)
    out = tmp_path / "rows.csv"
    arguments = [*TINY, "--layer", f"b={SHAPE}", "--routing", "uniform", "--tokens", "1,8,64", "--candidates", "1"]
    assert routing_benchmark([*arguments, "--seconds", "60", "--out", str(out)]) == 0
    assert [(r["layer"], r["tokens"]) for r in csv.DictReader(out.open())] == [("tiny", "1"), ("tiny", "8")]


def test_candidates_are_the_chosen_tactics_and_the_best_of_both_predictions(routing_benchmark: object) -> None:
    script = sys.modules["routing_benchmark"]
    root = Path(__file__).resolve().parents[2]
    source = script.Source.of(H200, "bf16", root / "models", root / "measurements")
    shape, routing = MoEShape(2048, 768, 128, 8), Routing.zipf(1.2)
    found = script.candidates(source, shape, 256, routing, 4)
    for stage, tactics in found.items():
        for made, role, ms in (
            (choose(source.model, [shape], [256], timings=source.timings), tactics.uniform, tactics.uniform_ms),
            (
                choose(source.model, [shape], [256], timings=source.timings, routing=routing),
                tactics.routed,
                tactics.expected_ms,
            ),
        ):
            (choice,) = [c for c in made if c.stage == stage]
            # What the script expects of a tactic is what it was chosen by.
            assert role == choice.tactic_id and ms[role] == pytest.approx(choice.ms, rel=0.02)
            assert ms[role] <= min(ms.values()) * 1.0011
        assert len(tactics.ids) == len(set(tactics.ids)) == 4


def test_a_dry_run_needs_no_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    main = load_benchmark("routing", monkeypatch)
    assert main(["--layer", "olmoe", "--routing", "hot:1", "--tokens", "64", "--dry-run"]) == 0
    assert re.fullmatch(r"olmoe 64 hot:1: gemm1 \d+ -> \d+ .*; gemm2 \d+ -> \d+ .*\n", capsys.readouterr().out)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--layer", "no-such-model", "--routing", "uniform"],
        [*TINY, "--routing", "no-such-file"],
        [*TINY, "--routing", "hot:3"],
        [*TINY, "--routing", "uniform", "--tokens", "0"],
        [*TINY, "--routing", "uniform", "--draws", "0"],
        [*TINY, "--routing", "uniform", "--device", "NVIDIA B200"],
        [*TINY, "--routing", "uniform", "--models", "no-such-folder"],
    ],
)
def test_the_routing_benchmark_explains_wrong_arguments(
    routing_benchmark: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert routing_benchmark(arguments) == 2
    assert capsys.readouterr().err.startswith("routing.py: ")


class FakeGraph:
    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def replay(self) -> None:
        self.log.append(self.name)


def test_graphs_take_turns_and_begin_each_round_with_another(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            log.append("event")

        def elapsed_time(self, _end: Event) -> float:
            return 3.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("sync"))
    graphs = {name: FakeGraph(log, name) for name in "abc"}
    measured = whole_layers.time_interleaved(graphs, calls=3, rounds=2)
    assert measured == {name: [1.0, 1.0] for name in "abc"}
    turn = [[name, "event", name, "event"] for name in ("a", "b", "c", "b", "c", "a")]
    assert log == [*turn[0], *turn[1], *turn[2], "sync", *turn[3], *turn[4], *turn[5], "sync"]
