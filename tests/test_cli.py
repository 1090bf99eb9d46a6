from __future__ import annotations

import dataclasses
import gzip
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from synth import __version__
from synth.catalog import paths
from synth.catalog.devices import get_device
from synth.catalog.models import deployments, load_models
from synth.catalog.shapes import MoEShape
from synth.choosing.anchors import ANCHORS
from synth.cli import main
from synth.flashinfer.buckets import token_buckets
from synth.performance.analytical import analytical_model, structure
from synth.performance.fitting import save
from synth.performance.model import Cells, PerformanceModel
from synth.performance.roofline import Roofline
from synth.timings.files import read, write
from synth.timings.folders import load
from synth.timings.rows import Row
from synth.timings.table import ShapeTimings

ROOT = Path(__file__).parent.parent
MEASUREMENTS = ROOT / "measurements"
Run = Callable[..., Result]
OLMOE = ("--device", "NVIDIA H200", "--model", "olmoe", "--quant", "bf16", "--max-tokens", "64")
BY_HAND = ("--hidden", "2048", "--inter", "896", "--experts", "64", "--top-k", "8")


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of quickly fitted models that have never seen OLMoE."""
    folder = tmp_path_factory.mktemp("models")
    for t in load(MEASUREMENTS, "NVIDIA H200", problems=[]):
        keep = np.isin(t.tokens, [1, 64, 1024]) & (t.shape != t.labels.index("olmoe"))
        save(PerformanceModel(choice_trees=4, time_trees=2).fit(t.select(keep)), folder)
    return folder


@pytest.fixture
def run(fitted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command in an empty folder, with models and measurements of its own."""
    for kind in ("models", "measurements"):
        (tmp_path / kind).mkdir()
        monkeypatch.setenv(f"SYNTH_{kind.upper()}", str(tmp_path / kind))
    shutil.copytree(fitted, tmp_path / "models", dirs_exist_ok=True)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return lambda *arguments: CliRunner().invoke(main, [str(a) for a in arguments])


def fails(result: Result, *says: str) -> str:
    """Assert that a command failed with one line that says all of this, and left no file."""
    assert result.exit_code == 2, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    errors = [line for line in result.stderr.splitlines() if line.lower().startswith("error:")]
    assert len(errors) == 1, result.stderr
    assert result.stderr.splitlines()[-1] == errors[0]
    assert "Traceback" not in result.output
    for text in says:
        assert text in errors[0]
    assert [p.name for p in Path().rglob("*") if p.suffix in (".tmp",) or "provenance" in p.name] == []
    return errors[0]


def process(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "cli.py"), *map(str, arguments)],
        env={**os.environ, **environment}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


# --- what is known ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["devices", "models", "tactics"])
def test_lists_are_json_or_tables(run: Run, command: str) -> None:
    rows = json.loads(run(command, "--json").stdout)
    assert len(rows) > 10
    plain = run(command)
    assert plain.exit_code == 0
    if command != "tactics":
        assert all(row["name"][:10] in plain.stdout for row in rows)


def test_tactics_can_be_narrowed(run: Run) -> None:
    rows = json.loads(run("tactics", "--arch", "sm90", "--quant", "bf16", "--json").stdout)
    assert len(rows) == 45 + 81 and {(r["arch"], r["quant"]) for r in rows} == {("sm90", "bf16")}
    fails(run("tactics", "--arch", "sm1"), "sm1")
    fails(run("tactics", "--flashinfer", "9.9.9"), "9.9.9", "0.7.4")


def test_help_imports_nothing_heavy_and_is_quick() -> None:
    code = (
        "import sys; from synth.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "print([m for m in ('numpy', 'scipy', 'sklearn', 'rich', 'torch', 'flashinfer', 'ray') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
    assert process("--help").returncode == 0


@pytest.mark.parametrize("name", sorted(main.commands))
def test_every_command_has_help(run: Run, name: str) -> None:
    # A command that was called by itself before, as programs may do, keeps both flags.
    assert CliRunner().invoke(main.commands[name], ["--help"]).exit_code == 0
    for flag in ("-h", "--help"):
        result = run(name, flag)
        assert result.exit_code == 0 and result.stdout.startswith("Usage:")
        assert len(main.commands[name].get_short_help_str()) > 20


def test_the_version_is_printed(run: Run) -> None:
    assert __version__ in run("--version").stdout


# --- emit ------------------------------------------------------------------------------------------------------------


def test_emit_writes_a_config_and_where_it_comes_from(run: Run) -> None:
    result = run("emit", *OLMOE, "-o", "a.json")
    assert result.exit_code == 0, result.output
    assert sorted(p.name for p in Path().iterdir()) == ["a.json", "a.json.provenance.json"]
    config = json.loads(Path("a.json").read_bytes())
    sidecar = json.loads(Path("a.json.provenance.json").read_bytes())
    entries = [k for k in config if not k.startswith("_")]
    assert f"{len(entries)} entries" in result.stdout and "left out" in result.stdout
    assert {r["source"] for r in sidecar["choices"]} == {"measured"}
    assert "WARNING" not in result.stderr


def test_emit_names_the_file_after_the_device(run: Run) -> None:
    assert run("emit", *OLMOE).exit_code == 0
    assert run("emit", *OLMOE, "--format", "bundled").exit_code == 0
    assert {p.name for p in Path().iterdir()} >= {"synth-nvidia-h200.json", "v0_1_trtllm_fused_moe_NVIDIA_H200.py"}


def test_emit_takes_a_layer_by_hand_and_from_a_config(run: Run) -> None:
    config = {
        "hidden_size": 2048, "moe_intermediate_size": 896, "num_experts": 64, "num_experts_per_tok": 8,
        "hidden_act": "silu",
    }  # fmt: skip
    Path("config.json").write_text(json.dumps(config), encoding="utf-8")
    options = ("--device", "H200", "--quant", "bf16", "--max-tokens", "64", "-o")
    assert run("emit", *BY_HAND, *options, "hand.json").exit_code == 0
    assert run("emit", "--config", "config.json", *options, "file.json").exit_code == 0
    entries = [json.loads(Path(n).read_bytes()) for n in ("hand.json", "file.json")]
    assert entries[0] == entries[1]
    assert run("emit", *BY_HAND, "--tp", "2", *options, "tp.json").exit_code == 0
    assert "(64, 896, 2048)" in Path("tp.json").read_text(encoding="utf-8")


def test_emit_for_a_skewed_routing_is_loud_and_recorded(run: Run) -> None:
    Path("counts.csv").write_text("expert_id,count\n" + "".join(f"{i},{64 - i}\n" for i in range(64)), encoding="utf-8")
    for routing in ("zipf:1.2", "counts.csv"):
        result = run("emit", *OLMOE, "--routing", routing, "-o", "a.json")
        assert result.exit_code == 0, result.output
        assert result.stderr.count("WARNING") == 1
        assert f"--routing {routing}: no entry is measured" in result.stderr
        sidecar = json.loads(Path("a.json.provenance.json").read_bytes())
        assert sidecar["routing"]["text"] == routing
        assert {r["source"] for r in sidecar["choices"]} == {"predicted"}
        # 64 tokens are few for a server; nothing else is found.
        assert {f["code"] for f in json.loads(run("check", "a.json", "--json").stdout)} == {"low-top-bucket"}
    assert run("emit", *OLMOE, "--routing", "uniform", "-o", "b.json").exit_code == 0
    assert run("emit", *OLMOE, "-o", "c.json").exit_code == 0
    assert Path("b.json").read_bytes() == Path("c.json").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--device", "H200", "--model", "olmo"), ("olmo", "did you mean olmoe")),
        (("--device", "H200", "--model", "olmoe", "--routing", "zipf"), ("--routing zipf", "zipf:1.2")),
        (("--device", "H200", "--model", "olmoe", "--routing", "zipf:-1"), ("zipf:-1", "from 0 to 10")),
        (("--device", "H200", "--model", "phi-3.5-moe", "--routing", "hot:3"), ("hot:3", "2 experts only")),
        (("--device", "H20", "--model", "olmoe"), ("H20", "did you mean NVIDIA H200")),
        (("--device", "Tesla", "--model", "olmoe"), ("Tesla", "known: NVIDIA H200")),
        (("--device", "B200", "--model", "olmoe"), ("NVIDIA B200", "sm100")),
        (("--device", "H200", "--model", "olmoe", "--tp", "7"), ("--tp 7", "1024")),
        (("--device", "H200", "--model", "olmoe", "--ep", "7"), ("--ep 7", "64 experts")),
        (("--device", "H200", "--model", "olmoe", *BY_HAND), ("one way",)),
        (("--device", "H200", "--model", "olmoe", "--config", "x.json"), ("one way",)),
        (("--device", "H200", "--config", "x.json", *BY_HAND), ("one way",)),
        (("--device", "H200", "--hidden", "64"), ("--inter", "--experts", "--top-k")),
        (("--device", "H200", "--name", "x"), ("--name", "--hidden")),
        (("--device", "H200", "--activation", "relu2"), ("--activation", "--hidden")),
        (("--device", "H200", "--model", "olmoe", "--quant", "nvfp4"), ("nvfp4", "bf16")),
        (("--device", "H200", "--model", "olmoe", "--flashinfer", "9.9.9"), ("9.9.9", "0.7.4")),
        (("--device", "H200", "--model", "olmoe", "--flashinfer", "../x"), ("../x",)),
        (
            (
                "--device",
                "H200",
                "--hidden",
                "100",
                "--inter",
                "64",
                "--experts",
                "8",
                "--top-k",
                "2",
                "--quant",
                "fp8",
            ),
            ("100", "pad it to 112"),
        ),
        (("--device", "H200", "--hidden", "64", "--inter", "64", "--experts", "2", "--top-k", "3"), ("top_k 3",)),
    ],
    ids=lambda x: " ".join(x[2:]) if len(x) > 2 else None,
)
def test_emit_refuses_what_it_cannot_do_in_one_line(
    run: Run, arguments: tuple[str, ...], says: tuple[str, ...]
) -> None:
    fails(run("emit", *arguments), *says)
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ("emit",), ("emit", "--device", "H200", "--tp", "0"), ("emit", "--device", "H200", "--quant", "int3"),
        ("emit", "--device", "H200", "--engine", "x"), ("emit", "--device", "H200", "--nonsense"),
        ("emit", "--device", "H200", "--max-tokens", "-5"), ("nonsense",), ("check",), ("replay",),
        ("evaluate", "--by", "x"), ("evaluate", "--learning-curve"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_wrong_options_are_one_error(run: Run, arguments: tuple[str, ...]) -> None:
    fails(run(*arguments))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'{"hidden_size": 1', ("not JSON",)),
        (b"", ("not JSON",)),
        (b"\xff\xfe", ("not JSON",)),
        (b"[]", ("object",)),
        (b"[" * 100_000, ("not JSON",)),
        (b'{"hidden_size": 64, "intermediate_size": 64}', ("dense",)),
        (b'{"hidden_size": "x", "moe_intermediate_size": 8, "num_experts": 8, "moe_k": 2}', ("hidden_size",)),
        (b'{"hidden_size": 64, "moe_intermediate_size": 64, "num_experts": 8}', ("experts per token",)),
        (None, ("No such file",)),
    ],
    ids=lambda c: repr(c[:30]) if isinstance(c, bytes) else None,
)
def test_a_config_that_says_too_little_is_one_line(run: Run, content: bytes | None, says: tuple[str, ...]) -> None:
    if content is not None:
        Path("config.json").write_bytes(content)
    fails(run("emit", "--device", "H200", "--config", "config.json"), "config.json", "--hidden", *says)


def test_a_folder_for_a_config_is_one_line(run: Run) -> None:
    Path("model").mkdir()
    fails(run("emit", "--device", "H200", "--config", "model"), "folder")


def test_an_output_that_cannot_be_written_is_one_line(run: Run) -> None:
    Path("file").write_bytes(b"kept")
    fails(run("emit", *OLMOE, "-o", "file/below.json"), "file/below.json")
    fails(run("emit", *OLMOE, "-o", "x" * 300), "can't write")
    Path("a.json.provenance.json").mkdir()
    result = run("emit", *OLMOE, "-o", "a.json")
    assert result.exit_code == 2 and "a.json.provenance.json" in result.stderr
    assert sorted(p.name for p in Path().rglob("*")) == ["a.json.provenance.json", "file"]
    assert Path("file").read_bytes() == b"kept"


@pytest.mark.parametrize("name", ["[/a].json", "[bold]x.json", "a b.json"])
def test_any_file_name_will_do(run: Run, name: str) -> None:
    result = run("emit", *OLMOE, "-o", name)
    assert result.exit_code == 0, result.output
    assert Path(name).is_file()
    assert name in " ".join(result.stdout.split())


def test_two_processes_write_equal_files(run: Run, tmp_path: Path) -> None:
    folders = {f"SYNTH_{k.upper()}": str(tmp_path / k) for k in ("models", "measurements")}
    for name, seed in (("a.json", "1"), ("b.json", "2")):
        done = process("emit", *OLMOE, "-o", tmp_path / name, **folders, PYTHONHASHSEED=seed)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    sidecars = [(tmp_path / f"{n}.json.provenance.json").read_bytes() for n in "ab"]
    assert sidecars[0] == sidecars[1]


# --- models and measurements of one's own ----------------------------------------------------------------------------


def model_path(tmp_path: Path, quant: str = "bf16") -> Path:
    return tmp_path / "models" / "nvidia-h200" / "flashinfer-0.7.4" / f"{quant}.zip"


@pytest.mark.parametrize("damage", ["cut", "zeros", "text", "empty", "flipped"])
def test_a_damaged_model_is_one_line(run: Run, tmp_path: Path, damage: str) -> None:
    path = model_path(tmp_path)
    data = path.read_bytes()
    middle = len(data) // 2
    path.write_bytes(
        {
            "cut": data[:middle],
            "zeros": data[:middle] + bytes(200) + data[middle + 200 :],
            "text": b"not a model",
            "empty": b"",
            "flipped": data[:60] + bytes(255 - b for b in data[60:90]) + data[90:],
        }[damage]
    )
    fails(run("emit", *OLMOE, "-o", "a.json"), str(path), "synth fit")


def test_a_model_of_another_quantization_in_its_place_is_one_line(run: Run, tmp_path: Path) -> None:
    shutil.copy(model_path(tmp_path, "fp8"), model_path(tmp_path))
    fails(run("emit", *OLMOE, "-o", "a.json"), str(model_path(tmp_path)), "fp8")


@pytest.mark.parametrize("option", ["--models", "--measurements"])
def test_a_folder_that_is_a_file_is_one_line(run: Run, option: str) -> None:
    Path("file").write_bytes(b"")
    fails(run("emit", *OLMOE, option, "file", "-o", "a.json"), "file", option)


def test_a_folder_of_measurements_that_does_not_exist_is_one_line(run: Run) -> None:
    fails(run("emit", *OLMOE, "--measurements", "nowhere", "-o", "a.json"), "nowhere", "--measurements")


def own_measurements(tmp_path: Path, extra: bytes, cut: int | None = None) -> Path:
    """Copy a shipped file into the user's folder, with rows added."""
    below = Path("nvidia-h200/flashinfer-0.7.4/bf16/h2048-i1024-e64-k8.csv.gz")
    path = tmp_path / "measurements" / below
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(gzip.decompress((MEASUREMENTS / below).read_bytes()) + extra)[:cut])
    return path


def test_a_bad_row_is_a_warning_that_names_file_and_row(run: Run, tmp_path: Path) -> None:
    path = own_measurements(tmp_path, b"1,1,16,3,fast,\n1,1,16,999,0.5,\n")
    lines = gzip.decompress(path.read_bytes()).count(b"\n")
    result = run("emit", *OLMOE, "-o", "a.json")
    assert result.exit_code == 0, result.output
    warnings = [line for line in result.stderr.splitlines() if line.startswith("warning:")]
    assert [f"{path}:{lines - 1 + i}:" in line for i, line in enumerate(warnings)] == [True, True]
    assert Path("a.json").is_file()


def test_many_bad_rows_are_counted(run: Run, tmp_path: Path) -> None:
    own_measurements(tmp_path, b"1,1,16,3,fast,\n" * 50)
    result = run("emit", *OLMOE, "-o", "a.json")
    assert result.exit_code == 0
    warnings = [line for line in result.stderr.splitlines() if line.startswith("warning:")]
    assert len(warnings) < 15 and "40 more" in warnings[-1]


def test_a_file_that_is_no_measurements_file_is_one_line(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "measurements" / "nvidia-h200" / "flashinfer-0.7.4" / "bf16" / "x.csv.gz"
    path.parent.mkdir(parents=True)
    path.write_bytes(gzip.compress(b"hello\n"))
    fails(run("emit", *OLMOE, "-o", "a.json"), str(path))


def test_a_simulated_model_is_refused(run: Run, tmp_path: Path) -> None:
    model = PerformanceModel.load(model_path(tmp_path))
    model.origin_ = dataclasses.replace(model.origin_, simulated=True)
    model.save(model_path(tmp_path))
    fails(run("emit", *OLMOE, "-o", "a.json"), "simulated")


# --- fit and evaluate ------------------------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three buckets of two shapes of two families stand for everything that is shipped."""
    for name in ("h2048-i1024-e64-k8", "h4096-i3584-e8-k2"):
        whole = read(MEASUREMENTS / "nvidia-h200" / "flashinfer-0.7.4" / "fp8" / f"{name}.csv.gz")
        rows = [row for row in whole.rows() if row.tokens in (1, 64, 1024)]
        write(ShapeTimings.from_rows(whole.origin, whole.shape, whole.label, whole.passes, rows), tmp_path / "small")
    monkeypatch.setattr(paths, "shipped", lambda kind: tmp_path / ("small" if kind == "measurements" else "none"))
    return tmp_path / "small"


def test_fit_writes_models_of_ones_own_and_prints_the_regret(run: Run, small: Path, tmp_path: Path) -> None:
    before = model_path(tmp_path, "fp8").read_bytes()
    result = run("fit")
    assert result.exit_code == 0, result.output
    for name in ("model", "fallback", "best single tactic", "nearest shape", "tokens per expert", "p95", "geomean"):
        assert name in result.stdout
    assert "fitting NVIDIA H200 fp8: 2 of 2" in result.stderr
    again = model_path(tmp_path, "fp8").read_bytes()
    assert again != before
    fitted_on = {label for label, _ in PerformanceModel.load(model_path(tmp_path, "fp8")).shapes_}
    assert fitted_on == {"olmoe", "mixtral-8x7b-tp4"}
    assert run("fit").exit_code == 0 and model_path(tmp_path, "fp8").read_bytes() == again
    assert not list(small.rglob("*.zip"))


def test_fit_of_one_family_says_that_nothing_was_held_out(run: Run, small: Path, tmp_path: Path) -> None:
    next(small.rglob("h4096-*")).unlink()
    result = run("fit")
    assert result.exit_code == 0 and "one model family only" in result.stdout


def test_timings_of_an_unknown_device_do_not_keep_others_from_being_fitted(
    run: Run, small: Path, tmp_path: Path
) -> None:
    known = read(next(small.rglob("h2048-*")))
    origin = dataclasses.replace(known.origin, device="NVIDIA A1 Made Up")
    write(ShapeTimings.from_rows(origin, known.shape, "x", known.passes, known.rows()), tmp_path / "measurements")
    before = model_path(tmp_path, "fp8").read_bytes()
    result = run("fit")
    assert "NVIDIA A1 Made Up" in result.stderr and "Traceback" not in result.output and result.exit_code in (0, 2)
    assert model_path(tmp_path, "fp8").read_bytes() != before


def test_fit_without_timings_or_room_is_one_line(run: Run, small: Path) -> None:
    fails(run("fit", "--device", "B200"), "B200", "synth collect")
    fails(run("fit", "--quant", "nvfp4"), "nvfp4")
    fails(run("fit", "--device", "RTX PRO 6000"), "3 devices")
    Path("file").write_bytes(b"")
    fails(run("fit", "--models", "file"), "file")


@pytest.mark.parametrize("by", ["family", "shape"])
def test_evaluate_prints_json_and_tables(run: Run, small: Path, by: str) -> None:
    plain = json.loads(run("evaluate", "--by", by, "--json").stdout)
    for key in ("all", "gemm1", "gemm2"):
        assert {"geomean", "p95", "p99", "max"} <= set(plain[key])
    assert set(plain["shapes"]) == {"olmoe", "mixtral-8x7b-tp4"}
    if by == "family":
        table = run("evaluate")
        assert table.exit_code == 0 and "olmoe" in table.stdout
        assert f"{plain['all']['geomean']:.4f}" in table.stdout


def flat(path: Path, label: str, name: str | None = None, quant: str = "bf16") -> Path:
    (t,) = load(MEASUREMENTS, "NVIDIA H200", quant, problems=[])
    i = t.labels.index(label)
    t = t.select((t.shape == i) & np.isin(t.tokens, [16, 1024]))
    s = t.shapes[i]
    head = f"{name or label},{quant},{s.hidden},{s.inter},{s.experts},{s.top_k},{s.ep_size},{int(s.gated)}"
    columns = (t.pass_, t.stage, t.tokens, t.tactic, t.ms)
    rows = [f"{p},{head},{g},{m},{i},{ms}" for p, g, m, i, ms in zip(*(c.tolist() for c in columns), strict=True)]
    text = "\n".join(["pass,shape,dtype,hidden,inter,experts,top_k,ep_size,gated,stage,tokens,tactic,ms", *rows, ""])
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz"])
def test_unseen_shapes_are_scored_and_seen_ones_refused(run: Run, name: str) -> None:
    result = run("evaluate", "--against", flat(Path(name), "olmoe"), "--json")
    plain = json.loads(result.stdout)
    assert result.exit_code == 0 and plain["all"]["count"] == 4 and set(plain["shapes"]) == {"olmoe"}
    assert 1 <= plain["all"]["geomean"] < plain["baselines"]["fallback"]["all"]["geomean"]
    fails(run("evaluate", "--against", flat(Path(name), "mixtral-8x7b")), name, "mixtral-8x7b", "training data")


def test_a_label_is_printed_as_it_is(run: Run) -> None:
    result = run("evaluate", "--against", flat(Path("t.csv"), "olmoe", name="a[/b] [bold]"))
    assert result.exit_code == 0, result.output
    assert "a[/b] [bold]" in result.stdout


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "t.csv"),
        (b"", "empty"),
        (b"a,b\n1,2\n", "lacks the columns"),
        (b"\xff\xfe\x00", "UTF-8"),
        (b"\x1f\x8b", "t.csv"),
    ],
    ids=repr,
)
def test_a_table_that_cannot_be_scored_is_one_line(run: Run, content: bytes | None, says: str) -> None:
    if content is not None:
        Path("t.csv").write_bytes(content)
    fails(run("evaluate", "--against", "t.csv"), "t.csv", says)


def test_evaluating_what_is_not_there_is_one_line(run: Run) -> None:
    path = flat(Path("t.csv"), "olmoe")
    fails(run("evaluate", "--against", path, "--quant", "fp8"), "no fp8 rows")
    fails(run("evaluate", "--against", path, "--device", "RTX PRO 6000"), "3 devices")
    fails(run("evaluate", "--against", path, "--flashinfer", "0.7.3"), "0.7.3")
    fails(run("evaluate", "--against", "."), ".")
    fails(run("evaluate", "--device", "B200"), "NVIDIA B200")


# --- check and replay ------------------------------------------------------------------------------------------------


def test_a_config_passes_its_own_check(run: Run) -> None:
    # Up to 8192 tokens: a file that ends earlier leaves buckets out.
    assert run("emit", "--device", "H200", "--model", "olmoe", "--quant", "bf16", "-o", "a.json").exit_code == 0
    assert json.loads(run("check", "a.json", "--json").stdout) == []
    plain = run("check", "a.json")
    assert plain.exit_code == 0 and "nothing found" in plain.stdout
    content: dict[str, Any] = json.loads(Path("a.json").read_bytes())
    key = next(k for k in content if k != "_metadata")
    content[key][1] = 5000
    Path("b.json").write_text(json.dumps(content), encoding="utf-8")
    bad = run("check", "b.json", "--json")
    assert bad.exit_code == 1 and any(f["key"] == key for f in json.loads(bad.stdout))
    assert run("check", "b.json").exit_code == 1


@pytest.mark.parametrize("command", ["check", "replay"])
@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b"\xff", "folder"], ids=repr)
def test_a_file_that_is_no_config_is_one_line(run: Run, command: str, content: bytes | str | None) -> None:
    if command == "replay":
        pytest.importorskip("flashinfer.autotuner")
    if content == "folder":
        Path("a.json").mkdir()
    elif isinstance(content, bytes):
        Path("a.json").write_bytes(content)
    fails(run(command, "a.json"), "a.json")


def test_checking_for_an_unknown_version_or_device_is_one_line(run: Run) -> None:
    assert run("emit", *OLMOE, "-o", "a.json").exit_code == 0
    Path("a.json.provenance.json").unlink()
    fails(run("check", "a.json", "--flashinfer", "zzz"), "zzz")
    fails(run("check", "a.json", "--device", "nope"), "nope")


def test_flashinfers_own_b200_file_is_dead(run: Run) -> None:
    autotuner = pytest.importorskip("flashinfer.autotuner")
    (path,) = (Path(autotuner.__file__).parent.parent / "tuning_configs").glob("*NVIDIA_B200.py")
    result = run("check", path)
    assert result.exit_code == 1
    assert "3-tuple" in result.stdout and "dead" in result.stdout
    assert {f["code"] for f in json.loads(run("check", path, "--json").stdout) if f["severity"] != "note"}


def test_every_written_key_is_hit_in_the_installed_flashinfer(run: Run) -> None:
    pytest.importorskip("flashinfer.autotuner")
    assert run("emit", *OLMOE, "-o", "a.json").exit_code == 0
    result = run("replay", "a.json", "--json")
    report = json.loads(result.stdout[result.stdout.index("{") :])
    assert result.exit_code == 0 and report["ok"]
    written = len(json.loads(Path("a.json").read_bytes())) - 1
    assert report["keys"] == report["keys_hit"] == written
    assert "keys" in run("replay", "a.json").stdout


def test_without_flashinfer_replay_says_how_to_get_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("emit", *OLMOE, "-o", "a.json").exit_code == 0
    Path("a.json.provenance.json").unlink()
    for name in [m for m in sys.modules if m.split(".")[0] == "flashinfer"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    fails(run("replay", "a.json"), "flashinfer")


# --- as a process ----------------------------------------------------------------------------------------------------


def test_errors_of_a_real_process_are_one_line(tmp_path: Path) -> None:
    folders = {f"SYNTH_{k}": str(tmp_path) for k in ("MODELS", "MEASUREMENTS")}
    done = process("emit", "--device", "H20", **folders)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_a_reader_that_leaves_early_is_not_an_error_message() -> None:
    done = subprocess.run(
        f'"{sys.executable}" "{ROOT / "cli.py"}" tactics --json | head -n 1',
        shell=True, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.startswith("[") and "Traceback" not in done.stderr


# --- collect ---------------------------------------------------------------------------------------------------------


def test_collect_decides_by_rounds_unless_told_otherwise(run: Run, tmp_path: Path) -> None:
    command = ("collect", "--simulate", "--model", "olmoe", "--quant", "bf16", "--buckets", "1,64,1024")
    cells = []
    for name, options in (("rounds", ()), ("plain", ("--no-rounds",))):
        own = tmp_path / name
        own.mkdir()
        done = run(*command, "--fraction", "0.1", *options, "--measurements", own, "--json")
        assert done.exit_code == 0, done.output
        (part,) = load(own, "NVIDIA H200", "bf16", problems=[])
        assert part.origin.simulated
        cells.append(set(zip(part.stage.tolist(), part.tokens.tolist(), part.tactic.tolist(), strict=True)))
    rounds, plain = cells
    # Without rounds each bucket gets as many; with them, those whose choice is in doubt get more.
    assert 0 < len(rounds) <= len(plain) == 3 * (5 + 9)
    assert rounds != plain


# --- the first minute on a GPU without timings -----------------------------------------------------------------------

CARD = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
FIRST = ("collect", "--device-plan", "--simulate", "--device", CARD, "--quant", "nvfp4", "--max-tokens", "16")
WANTED = ("--hidden", "2048", "--inter", "768", "--experts", "64", "--top-k", "8")


@pytest.fixture(scope="module")
def made_up(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Timings of a card that is much like what is believed of it, as a simulation replays them.

    Its constants are others, and each of its tactics is off by an amount of its own.
    """
    folder = tmp_path_factory.mktemp("card")
    believed = analytical_model(get_device(CARD), "nvfp4")
    constants = np.array(believed.roofline_.constants)
    constants[[0, 1, 6]] += (0.2, -0.15, 0.25)
    model = PerformanceModel.analytic(
        believed.origin_, believed.table, Roofline(tuple(constants.tolist())), structure("fp8")
    )
    off = np.exp(np.random.default_rng(0).normal(0.0, 0.08, len(model.table)))
    wanted = deployments(load_models(), quants=["nvfp4"], supported=True)
    shapes = {MoEShape(2048, 768, 64, 8): "wanted", **{d.shape: d.label for d in wanted}}
    origin = dataclasses.replace(believed.origin_, simulated=True)
    for shape, label in shapes.items():
        cells = [
            (stage, tokens, tactic)
            for stage in (1, 2)
            for tokens in token_buckets(16)
            for tactic in model.table.ids(stage)
        ]
        stage, tokens, tactic = np.array(cells, dtype=np.int64).T
        ms = model.predict(Cells((shape,), stage * 0, stage, tokens, tactic)).ms * off[tactic]
        rows = [Row(1, *cell, time, False, None) for cell, time in zip(cells, ms.tolist(), strict=True)]
        write(ShapeTimings.from_rows(origin, shape, label, {1: {"source": "computed"}}, rows), folder)
    return folder


def test_the_first_minute_settles_the_layers_named_and_then_learns_from_others(
    run: Run, made_up: Path, tmp_path: Path
) -> None:
    done = run(*FIRST, *WANTED, "--measurements", shutil.copytree(made_up, tmp_path / "card"), "--json", "--budget", 2)
    assert done.exit_code == 0, done.output
    own = tmp_path / "card" / "simulated"
    (timings,) = load(own, CARD, "nvfp4", problems=[])
    assert timings.origin.simulated
    counts = {str(timings.shapes[i]): int((timings.shape == i).sum()) for i in np.unique(timings.shape)}
    asked = "h2048-i768-e64-k8"
    # One layer that was named, and some others that were not, each with fewer timings than it on average.
    assert 3 <= len(counts) <= 1 + ANCHORS
    assert counts[asked] > 3 * np.median(list(counts.values()))
    assert set(np.unique(timings.tokens[timings.shape == timings.shapes.index(MoEShape.parse(asked))]).tolist()) == set(
        token_buckets(16)
    )
    # What a simulation timed is fitted apart, and no config is made of it.
    result = run("fit", "--measurements", own, "--device", CARD)
    assert result.exit_code == 0, result.output
    made = tmp_path / "models" / "simulated"
    assert [p.name for p in made.rglob("*.zip")] == ["nvfp4.zip"]
    model = PerformanceModel.load(next(made.rglob("*.zip")))
    assert model.origin_.simulated and model.borrowed_ == "NVIDIA H200 fp8" and not model.analytical
    fails(run("emit", "--device", CARD, *WANTED, "--quant", "nvfp4", "--models", made, "-o", "a.json"), "simulated")
    # The same model decides what to check on the simulated card.
    result = run(
        "verify", "--simulate", "--device", CARD, *WANTED, "--quant", "nvfp4", "--max-tokens", "16", "--budget", "1",
        "--models", made, "--measurements", tmp_path / "card", "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output


def test_a_device_plan_is_printed_before_anything_is_timed(run: Run, tmp_path: Path) -> None:
    options = ("--device", CARD, "--quant", "nvfp4", "--buckets", "64")
    result = run("collect", "--device-plan", "--dry-run", *options, *WANTED, "--json")
    assert result.exit_code == 0, result.output
    plan = json.loads(result.stdout)
    labels = [layer["label"] for layer in plan["layers"]]
    assert len(labels) == 1 + ANCHORS and "by-hand" in labels[0]
    assert not list((tmp_path / "measurements").rglob("*"))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ((), ("--device-plan", "name some")),
        (("--quant", "nvfp4"), ("--device-plan", "name some")),
        ((*WANTED, "--full"), ("--device-plan", "--full")),
        ((*WANTED, "--fraction", "0.1"), ("--device-plan", "--fraction")),
        ((*WANTED, "--no-rounds"), ("--device-plan", "--no-rounds")),
        ((*WANTED, "--pass", "1", "--pass", "2"), ("--device-plan",)),
        ((*WANTED, "--full", "--budget", "5"), ("one of", "--budget")),
    ],
    ids=lambda x: " ".join(map(str, x))[:60],
)
def test_a_device_plan_that_cannot_be_is_one_line(run: Run, options: tuple[str, ...], says: tuple[str, ...]) -> None:
    fails(run("collect", "--device-plan", "--dry-run", "--device", CARD, *options), *says)
