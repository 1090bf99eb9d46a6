"""What can be contributed, from real timings and comparisons of the H200."""

from __future__ import annotations

import dataclasses
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

from synth.checking.contribution import REASONS, RefusedError, prepare
from synth.checking.pull_request import describe, read_layer_times
from synth.cli import main
from synth.configs.reading import read
from synth.configs.sidecar import Record, Sidecar, sidecar_path
from synth.errors import SynthError
from synth.flashinfer.tactics import Tactic, load_table
from synth.timings.files import write
from synth.timings.folders import load
from synth.timings.records import AGREED, DENIED, Denial

MEASUREMENTS = Path(__file__).parents[2] / "measurements"
H200 = "NVIDIA H200"
MODULE = "v0_1_trtllm_fused_moe_NVIDIA_H200.py"
UP_TO_8192 = [x for n in (512, 1024, 2048, 4096, 8192) for x in ("--max-tokens", str(n))]


def synth(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


@pytest.fixture(scope="module")
def olmoe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config of a layer that was swept, and whose pairs were compared."""
    folder = tmp_path_factory.mktemp("olmoe")
    (folder / "own").mkdir()
    path = folder / "olmoe.json"
    own = ("--models", folder / "own", "--measurements", folder / "own")
    done = synth("emit", "--device", H200, "--model", "olmoe", *UP_TO_8192, *own, "-o", path)
    assert done.exit_code == 0, done.output
    return path


@pytest.fixture
def copy(olmoe: Path, tmp_path: Path) -> Path:
    for path in (olmoe, sidecar_path(olmoe)):
        shutil.copy(path, tmp_path)
    return tmp_path / olmoe.name


def resealed(path: Path, change: Callable[[Record], Record]) -> Path:
    """Change the sidecar's records, under a digest that fits: what a forger would do."""
    sidecar = read(path).sidecar
    assert sidecar is not None
    forged = Sidecar(sidecar.head, tuple(change(r) for r in sidecar.records))
    sidecar_path(path).write_bytes(forged.dumps(path.read_bytes()))
    return path


def test_everything_that_was_measured_and_compared_is_taken(olmoe: Path) -> None:
    found = prepare(olmoe, [MEASUREMENTS])
    assert found.entries == len(read(olmoe).entries) > 100 and found.refused == {}
    assert found.labels == {"bf16": ("olmoe",), "fp8": ("olmoe",)}
    assert found.module_name == MODULE
    assert {(g.quant, g.stage) for g in found.gains} == {(q, s) for q in ("bf16", "fp8") for s in (1, 2)}
    assert all(a.deviation < 0.05 for q in ("bf16", "fp8") for a in found.agreements[q])


def test_a_gain_is_the_quotient_of_two_timings_of_the_bucket(olmoe: Path) -> None:
    found = prepare(olmoe, [MEASUREMENTS])
    sidecar = read(olmoe).sidecar
    assert sidecar is not None
    gains = {(g.quant, g.stage, g.bucket): g.ratio for g in found.gains}
    checked = 0
    for record in sidecar.records:
        if not record.written or not record.fused_finalize:
            continue
        (timings,) = load([MEASUREMENTS], H200, record.quant, problems=[])
        shape = [str(s) for s in timings.shapes].index(record.shape)
        here = (timings.shape == shape) & (timings.stage == record.stage) & (timings.tokens == record.bucket)
        ids = [load_table("sm90", record.quant).id_of(record.stage, Tactic.parse(record.tactic))]
        ids.append(load_table("sm90", record.quant).fallback_id(record.stage))
        chosen, fallback = (timings.ms[here & (timings.tactic == i)] for i in ids)
        # Passes differ by some percent, and the outliers among them are left out.
        ratio = np.median(fallback) / np.median(chosen)
        assert gains[record.quant, record.stage, record.bucket] == pytest.approx(ratio, rel=0.06)
        checked += 1
    assert checked > 50


def test_what_is_predicted_is_refused_or_left_out(tmp_path: Path) -> None:
    own = ("--models", tmp_path, "--measurements", tmp_path)
    done = synth("emit", "--device", H200, "--model", "olmoe", "--quant", "bf16", *own, "-o", tmp_path / "a.json")
    assert done.exit_code == 0
    with pytest.raises(RefusedError, match=r"8 predicted: .*synth verify.*--only-verified") as e:
        prepare(tmp_path / "a.json", [MEASUREMENTS])
    assert e.value.refused == {"predicted": 8}
    found = prepare(tmp_path / "a.json", [MEASUREMENTS], only_verified=True)
    assert found.refused == {"predicted": 8} and found.entries == e.value.entries - 8
    (tmp_path / "b.json").write_bytes(found.config)
    sidecar_path(tmp_path / "b.json").write_bytes(found.sidecar)
    again = prepare(tmp_path / "b.json", [MEASUREMENTS])
    assert (again.entries, again.config) == (found.entries, found.config)


def test_what_is_analytical_is_refused(tmp_path: Path) -> None:
    own = ("--models", tmp_path, "--measurements", tmp_path)
    server = "RTX PRO 6000 Blackwell Server Edition"
    done = synth("emit", "--device", server, "--model", "glm-5-tp8", *own, "-o", tmp_path / "a.json")
    assert done.exit_code == 0
    for only_verified in (False, True):
        with pytest.raises(RefusedError, match=REASONS["analytical"]):
            prepare(tmp_path / "a.json", [MEASUREMENTS], only_verified=only_verified)


def test_a_sidecar_that_claims_more_than_was_timed_is_found_out(tmp_path: Path) -> None:
    """Nothing is believed of the sidecar: predicted entries that call themselves measured, and another's timings."""
    own = ("--models", tmp_path, "--measurements", tmp_path)
    for label, reason in (("mixtral-8x7b-tp8", "untimed"), ("qwen3-30b-a3b-tp1", "uncompared")):
        path = tmp_path / f"{label}.json"
        emitted = synth("emit", "--device", H200, "--model", label, "--quant", "bf16", *UP_TO_8192, *own, "-o", path)
        assert emitted.exit_code == 0, emitted.output
        resealed(path, lambda r: r._replace(source="measured"))
        with pytest.raises(RefusedError) as e:
            prepare(path, [MEASUREMENTS])
        assert e.value.refused == {reason: e.value.entries}


def test_simulated_timings_do_not_count(copy: Path, tmp_path: Path) -> None:
    root = tmp_path / "simulated"
    for timings in load([MEASUREMENTS], H200, problems=[]):
        origin = dataclasses.replace(timings.origin, simulated=True)
        AGREED.add(AGREED.load([MEASUREMENTS], timings.origin), origin, root)
    from synth.timings.folders import load_shapes

    for part in load_shapes([MEASUREMENTS], H200, problems=[]):
        if part.label == "olmoe":
            write(dataclasses.replace(part, origin=dataclasses.replace(part.origin, simulated=True)), root)
    with pytest.raises(RefusedError) as e:
        prepare(copy, [root])
    assert e.value.refused == {"untimed": e.value.entries}


def test_a_tactic_with_wrong_numbers_is_refused_whatever_was_compared_before(copy: Path, tmp_path: Path) -> None:
    (timings,) = load([MEASUREMENTS], H200, "bf16", problems=[])
    sidecar = read(copy).sidecar
    assert sidecar is not None
    bad = next(r for r in sidecar.records if r.quant == "bf16" and r.stage == 2)
    shape = next(s for s in timings.shapes if str(s) == bad.shape)
    DENIED.add([Denial(2, Tactic.parse(bad.tactic), shape, 64, 0.5)], timings.origin, tmp_path / "own")
    with pytest.raises(RefusedError) as e:
        prepare(copy, [MEASUREMENTS, tmp_path / "own"])
    assert e.value.refused["denied"] >= len(bad.keys)


def test_a_config_and_a_sidecar_that_contradict_each_other_are_refused(olmoe: Path, copy: Path) -> None:
    other = str(load_table("sm90", "bf16").gemm1[3])
    resealed(copy, lambda r: r._replace(tactic=other) if r.stage == 1 and r.quant == "bf16" else r)
    with pytest.raises(SynthError, match="is another tactic; emit both anew"):
        prepare(copy, [MEASUREMENTS])
    # Timings of one bucket don't stand for the key of another, nor those of one layer for another layer's.
    for name, value in (("bucket", 256), ("shape", "h6144-i256-e256-k8"), ("fused_finalize", False)):
        shutil.copy(olmoe, copy)
        shutil.copy(sidecar_path(olmoe), sidecar_path(copy))
        resealed(copy, lambda r, change={name: value}: r._replace(**change))  # type: ignore[misc]
        with pytest.raises(SynthError, match="the sidecar says h"):
            prepare(copy, [MEASUREMENTS])
    copy.write_bytes(copy.read_bytes() + b"\n")
    with pytest.raises(SynthError, match=r"belongs to other contents than olmoe\.json has"):
        prepare(copy, [MEASUREMENTS])
    sidecar_path(copy).unlink()
    with pytest.raises(SynthError, match="so nothing says which entries were measured"):
        prepare(copy, [MEASUREMENTS])


# ---- the command, and what FlashInfer makes of the module ---------------------------------------------------


@pytest.fixture(scope="module")
def contributed(olmoe: Path) -> Path:
    pytest.importorskip("flashinfer.autotuner")
    folder = olmoe.parent / "pr"
    layers = olmoe.parent / "layers.csv"
    layers.write_text(LAYERS)
    own = ("--models", olmoe.parent / "own", "--measurements", olmoe.parent / "own")
    done = synth("contribute", olmoe, "-o", folder, "--layers", layers, *own)
    assert done.exit_code == 0, done.output
    return folder


#: Rows of benchmarks/layer.py on an H200.
LAYERS = """\
shape,tokens,label,g1,g2,ms,quant,spread,error
olmoe,64,fallback,-1,-1,1.3179,bf16,0.001,0
olmoe,64,autotuned,22,88,0.2092,bf16,0.001,0.004
olmoe,64,bundled,22,88,0.2087,bf16,0.001,0.004
"""


def test_the_folder_has_what_a_pull_request_needs(contributed: Path, olmoe: Path) -> None:
    names = {MODULE, "DESCRIPTION.md", "check.txt", "replay.txt", "report.html", "config.json"}
    assert {p.name for p in contributed.iterdir()} == names | {"config.json.provenance.json"}
    entries = len(read(contributed / MODULE).entries)
    text = (contributed / "DESCRIPTION.md").read_text()
    assert f"{entries} entries (bf16, fp8) for FlashInfer 0.7.4" in text
    assert f"{entries} of {entries} keys" in text and "driver 580" in text
    assert "| olmoe | bf16 | 64 | 1.3179 | 0.2092 | 0.2087 | 6.31x |" in text
    assert text.count("| gemm1 |") == text.count("| gemm2 |") == 8
    assert "no error found" in (contributed / "check.txt").read_text()
    assert str(contributed.parent) not in "".join(p.read_text() for p in contributed.iterdir())


#: Asks a copy of the installed package, in a process of its own, through FlashInfer's own loader.
ASK = """
import json, sys, contextlib
import flashinfer
from synth.gpu import replay
from pathlib import Path

@contextlib.contextmanager
def as_it_is(entries, path, device, notes):
    yield None

replay._module_served = as_it_is
report = replay.replay(Path(sys.argv[1]), device="NVIDIA H200")
module = sys.modules["flashinfer.tuning_configs." + Path(sys.argv[1]).stem]
print(json.dumps([report.keys, report.keys_hit, report.lookups, report.hits, module.__file__, flashinfer.__file__]))
"""


@pytest.mark.parametrize("asked", ["1", "0"])
def test_a_copy_of_the_installed_package_with_the_module_in_it_hits_every_lookup(
    contributed: Path, tmp_path: Path, asked: str
) -> None:
    import flashinfer

    installed = Path(flashinfer.__file__).parent
    package = tmp_path / "flashinfer"
    package.mkdir()
    for child in installed.iterdir():
        if child.name not in ("tuning_configs", "__pycache__", "__init__.py"):
            (package / child.name).symlink_to(child)
    shutil.copy(installed / "__init__.py", package)
    shutil.copytree(installed / "tuning_configs", package / "tuning_configs")
    shutil.copy(contributed / MODULE, package / "tuning_configs")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])]),
        "FLASHINFER_AUTOTUNER_LOAD_FROM_FILE": asked,
    }
    done = subprocess.run(
        [sys.executable, "-c", ASK, str(contributed / MODULE)], env=environment, capture_output=True, text=True
    )
    if asked == "0":
        # FlashInfer doesn't even import it.
        assert "KeyError" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    keys, keys_hit, lookups, hits, module, used = json.loads(done.stdout.splitlines()[-1])
    assert keys == keys_hit == len(read(contributed / MODULE).entries)
    assert lookups == hits > 10 * keys
    assert Path(module).parent.parent == Path(used).parent == package


def test_a_refused_contribution_leaves_nothing(tmp_path: Path) -> None:
    own = ("--models", tmp_path, "--measurements", tmp_path)
    synth("emit", "--device", H200, "--model", "olmoe", "--quant", "bf16", *own, "-o", tmp_path / "a.json")
    before = sorted(tmp_path.iterdir())
    done = synth("contribute", tmp_path / "a.json", "-o", tmp_path / "pr", *own)
    assert done.exit_code == 2 and "predicted" in done.stderr and done.stderr.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before


def test_a_folder_that_is_there_is_not_written_to(contributed: Path, olmoe: Path) -> None:
    own = ("--models", olmoe.parent / "own", "--measurements", olmoe.parent / "own")
    done = synth("contribute", olmoe, "-o", contributed, *own)
    assert done.exit_code == 2 and "is there already; name a new folder with -o" in done.stderr


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("shape,tokens,label\nolmoe,1,fallback\n", "row 2: not a row of benchmarks/layer.py"),
        (LAYERS.replace("1.3179", "nan"), "row 2"),
        (LAYERS.replace("olmoe,64,bundled", "<b>,64,bundled"), "row 4"),
        (LAYERS.replace("bundled", "autotuned"), "needs the fallback's time and one config's"),
    ],
    ids=lambda v: v[:20],
)
def test_a_wrong_table_of_layers_is_refused(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "layers.csv").write_text(text)
    with pytest.raises(SynthError, match=says):
        read_layer_times(tmp_path / "layers.csv")


def test_a_quantization_whose_numbers_cannot_be_compared_says_so(olmoe: Path) -> None:
    found = prepare(olmoe, [MEASUREMENTS])
    silent: Any = dataclasses.replace(found, agreements={**found.agreements, "fp8": ()})
    assert "Numbers, fp8: NOT compared" in describe(silent, "")
