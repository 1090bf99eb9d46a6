"""What `synth emit` does for devices with and without timings, as its user sees it."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from synth.catalog import paths
from synth.catalog.devices import find_devices, get_device
from synth.catalog.models import find_model
from synth.choosing import choose as choosing
from synth.cli import main
from synth.configs.reading import read
from synth.configs.sidecar import sidecar_path
from synth.flashinfer.tactics import load_table
from synth.performance.fitting import save
from synth.performance.model import Cells, PerformanceModel
from synth.timings.files import write
from synth.timings.folders import load
from synth.timings.origin import Origin
from synth.timings.rows import Row
from synth.timings.table import ShapeTimings

ROOT = Path(__file__).parents[2]
Run = Callable[..., Result]
PRO_6000 = [d.name for d in find_devices("RTX PRO 6000")]
SERVER = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
OLMOE = ("--model", "olmoe", "--max-tokens", "8192")
H200 = ("--device", "NVIDIA H200", "--model", "olmoe", "--quant", "bf16", "--max-tokens", "64")


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a quickly fitted model of the H200, bf16."""
    folder = tmp_path_factory.mktemp("models")
    (timings,) = load(ROOT / "measurements", "NVIDIA H200", "bf16", problems=[])
    part = timings.select(np.isin(timings.tokens, [1, 64, 1024]))
    save(PerformanceModel(choice_trees=2, time_trees=2).fit(part), folder)
    return folder


@pytest.fixture
def run(fitted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command in an empty folder, with models and measurements of its own."""
    (tmp_path / "measurements").mkdir()
    monkeypatch.setenv("SYNTH_MODELS", str(fitted))
    monkeypatch.setenv("SYNTH_MEASUREMENTS", str(tmp_path / "measurements"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return lambda *arguments: CliRunner().invoke(main, [str(a) for a in arguments])


def lines(result: Result, start: str) -> list[str]:
    return [line for line in result.stderr.splitlines() if line.startswith(start)]


def fails(result: Result, code: int, *says: str) -> str:
    """Assert that a command ended with this code and one line that says all of this, and wrote nothing."""
    assert result.exit_code == code, result.output
    (error,) = lines(result, "error: ")
    assert result.stderr.splitlines()[-1] == error
    for text in says:
        assert text in error
    assert [p for p in Path().rglob("*") if p.is_file()] == []
    return error


def configs(folder: str | Path = ".") -> list[Path]:
    return sorted(p for p in Path(folder).iterdir() if not p.name.endswith(".provenance.json"))


def time_layer(tmp_path: Path, device: str, quant: str, *, simulated: bool = False) -> None:
    """Put timings of OLMoE on a device without any in the user's folder: the analytic model's, one in each bucket.

    The numbers mean nothing; that timings are there does.
    """
    known = get_device(device)
    origin = Origin.make(device, known.tactics_arch, quant, simulated=simulated)
    table = load_table(known.tactics_arch, quant)
    layer = find_model("olmoe").deploy(1, 1, quant)
    model = PerformanceModel.analytic(Origin.make(device, known.tactics_arch, quant), table)
    grid = np.array([(s, t, i) for s in (1, 2) for t in (1, 64, 1024) for i in table.ids(s)])
    ms = model.predict_analytic(Cells((layer.shape,), np.zeros(len(grid), dtype=np.int64), *grid.T))
    rows = [Row(1, s, t, i, x) for (s, t, i), x in zip(grid.tolist(), ms.tolist(), strict=True)]
    write(ShapeTimings.from_rows(origin, layer.shape, "olmoe", {1: {}}, rows), tmp_path / "measurements")


# --- where the files go ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("output", ["configs/", "configs", "a/b/", "there", "there/"])
def test_several_devices_get_a_file_each_in_a_folder(run: Run, output: str) -> None:
    Path("there").mkdir()
    result = run("emit", "--device", "RTX PRO 6000", *OLMOE, "--quant", "bf16", "-o", output)
    assert result.exit_code == 0, result.output
    assert [p.name for p in configs(output)] == sorted(f"synth-{get_device(name).slug}.json" for name in PRO_6000)
    for path in configs(output):
        config, sidecar = json.loads(path.read_bytes()), json.loads(sidecar_path(path).read_bytes())
        gpu = config["_metadata"]["gpu"]
        assert path.name == f"synth-{get_device(gpu).slug}.json" and sidecar["device"] == gpu
        assert sidecar["config_sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
        assert config["_metadata"]["flashinfer_version"] == "0.7.4"
        # All else is a wildcard: one file is enough for each device.
        others = set(config["_metadata"]) - {"gpu", "flashinfer_version", "synth"}
        assert {config["_metadata"][key] for key in others} == {"*"}
    assert len(list(Path(output).iterdir())) == 6


def test_without_an_output_the_files_of_several_devices_go_here(run: Run) -> None:
    assert run("emit", "--device", "RTX PRO 6000", *OLMOE, "--quant", "bf16").exit_code == 0
    assert len(configs()) == 3


@pytest.mark.parametrize("output", ["a.json", "x/a.json", "a.py", "file"])
def test_one_file_for_several_devices_is_refused(run: Run, output: str) -> None:
    # Not a config's name, but there and no folder.
    Path("file").symlink_to("/dev/null")
    result = run("emit", "--device", "RTX PRO 6000", *OLMOE, "-o", output)
    fails(result, 2, f"-o {output} is one file", "3 match", *PRO_6000, "name a folder")


def test_one_device_gets_a_file_or_a_file_of_the_usual_name_in_a_folder(run: Run) -> None:
    Path("folder").mkdir()
    for output, path in (
        ("folder", "folder/synth-nvidia-h200.json"),
        ("new/", "new/synth-nvidia-h200.json"),
        ("x/plain", "x/plain"),
    ):
        assert run("emit", *H200, "-o", output).exit_code == 0
        assert Path(path).is_file() and sidecar_path(Path(path)).is_file()
    assert run("emit", *H200, "-o", "new/", "--format", "bundled").exit_code == 0
    assert Path("new/v0_1_trtllm_fused_moe_NVIDIA_H200.py").is_file()


def test_a_folder_that_cannot_be_made_leaves_nothing(run: Run) -> None:
    Path("file").symlink_to("/dev/null")
    fails(run("emit", *H200, "-o", "file/"), 2, "can't write file/synth-nvidia-h200.json", "-o")


# --- without timings -------------------------------------------------------------------------------------------------


def test_analytical_entries_of_all_devices_are_one_loud_line(run: Run) -> None:
    result = run("emit", "--device", "RTX PRO 6000", "--model", "glm-5", "--tp", "8", "--quant", "nvfp4", "-o", "x/")
    assert result.exit_code == 0, result.output
    (warning,) = lines(result, "WARNING")
    sidecars = [json.loads(sidecar_path(p).read_bytes()) for p in configs("x")]
    entries, left_out = (
        sum(n) for n in zip(*((s["entries"]["analytical"], s["left_out"]) for s in sidecars), strict=True)
    )
    assert entries == sum(len(read(p).raw) for p in configs("x"))
    assert f"{entries} entries are ANALYTICAL" in warning
    assert ", ".join(PRO_6000) + " (nvfp4)" in warning
    assert f"{left_out / (left_out + entries):.0%} of all entries are left out" in warning
    written = [(c, len(c["keys"])) for s in sidecars for c in s["choices"] if c["written"]]
    for name, form in (("expected_regret", "{:.1%} slower than the best"), ("within_2%", "probability of {:.0%}")):
        assert form.format(sum(c[name] * n for c, n in written) / entries) in warning
    assert warning.endswith(": synth collect --device-plan --model glm-5 --tp 8 --quant nvfp4")
    # What is left out is counted in every table, after it, and for all devices together.
    for s in sidecars:
        assert f"{s['entries']['analytical']} entries, {s['left_out']} left out" in result.stdout
    assert f"3 configs: {entries} entries in all, {left_out} left out" in result.stdout
    assert result.stdout.count("left out ┃") == 3


@pytest.mark.parametrize(
    ("options", "command"),
    [
        (("--model", "olmoe", "--model", "glm-5", "--quant", "fp8"), "--model olmoe --model glm-5 --quant fp8"),
        (
            (
                "--quant",
                "nvfp4",
                "--top-k",
                "2",
                "--hidden",
                "4096",
                "--inter",
                "1024",
                "--experts",
                "64",
                "--name",
                "a b",
            ),
            "--name 'a b' --hidden 4096 --inter 1024 --experts 64 --top-k 2 --quant nvfp4",
        ),
        (("--model", "olmoe", "--tp", "2", "--measurements", "."), "--model olmoe --tp 2 --measurements ."),
    ],
)
def test_the_command_that_measures_asks_for_the_same_layers(run: Run, options: tuple[str, ...], command: str) -> None:
    result = run("emit", "--device", "RTX 5090", "--max-tokens", "8192", *options)
    # Whether entries are written or all are left out, the last line says how to measure.
    (said,) = lines(result, "WARNING") + lines(result, "error: nothing to write")
    assert said.endswith(f": synth collect --device-plan {command}")
    taken = CliRunner().invoke(main, [*command_words(said), "--device", "RTX 5090", "--dry-run"])
    assert taken.exit_code == 0, taken.output


def command_words(text: str) -> list[str]:
    """Return the arguments of the ``synth`` command that a line ends with."""
    return shlex.split(text[text.rindex("synth collect") :])[1:]


def test_a_quantization_without_public_numbers_is_skipped_and_counted(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Every known card has all peaks or none that are enough; take one away.
    device = get_device("RTX PRO 4500")
    monkeypatch.delitem(device.tflops, "bf16")
    result = run("emit", "--device", "RTX PRO 4500", "--model", "olmoe", "-o", "a.json")
    assert result.exit_code == 0, result.output
    (skipped,) = lines(result, "skipped: ")
    assert f"{device.name} (bf16)" in skipped and "1 deployments" in skipped
    assert {c["quant"] for c in json.loads(sidecar_path(Path("a.json")).read_bytes())["choices"]} == {"fp8"}
    (warning,) = lines(result, "WARNING")
    assert "(fp8)" in warning and warning.endswith("synth collect --device-plan --model olmoe --quant fp8")
    for path in (Path("a.json"), sidecar_path(Path("a.json"))):
        path.unlink()
    named = run("emit", "--device", "RTX PRO 4500", "--model", "olmoe", "--quant", "bf16", "-o", "a.json")
    assert "synth collect" not in fails(named, 2, f"{device.name} (bf16)", "aren't public", "synth devices")


def test_a_device_of_several_for_which_nothing_is_known_does_not_stop_the_others(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    peaks = get_device(SERVER).tflops
    for quant in list(peaks):
        monkeypatch.delitem(peaks, quant)
    result = run("emit", "--device", "RTX PRO 6000", *OLMOE, "-o", "x/")
    assert result.exit_code == 0, result.output
    (skipped,) = lines(result, "skipped: ")
    assert f"{SERVER} (bf16, fp8)" in skipped and "2 deployments" in skipped
    assert {read(p).gpu for p in configs("x")} == set(PRO_6000) - {SERVER}
    (warning,) = lines(result, "WARNING")
    assert SERVER not in warning


def test_a_device_without_public_numbers_or_tactics_is_refused(run: Run) -> None:
    for measured in ((), ("--measured",)):
        fails(run("emit", "--device", "GB10", *OLMOE, *measured), 2, "NVIDIA GB10 (bf16, fp8)", "synth devices")
    fails(run("emit", "--device", "B200", *OLMOE), 2, "NVIDIA B200", "sm100", "synth devices")


def test_where_nothing_beats_the_fallback_nothing_is_written_and_the_way_out_is_named(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So sure is no model.
    monkeypatch.setattr(choosing, "SURE_GAIN", 1e6)
    result = run("emit", "--device", "RTX PRO 6000", "--model", "glm-5", "--quant", "nvfp4", "--max-tokens", "8")
    fails(result, 2, *PRO_6000, "entries are left out", "synth collect --device-plan --model glm-5 --quant nvfp4")


def test_nothing_analytical_is_written_in_the_form_that_is_contributed(run: Run) -> None:
    result = run("emit", "--device", SERVER, *OLMOE, "--format", "bundled")
    fails(result, 2, "are analytical", SERVER, "--measured", "synth collect")
    assert run("emit", *H200, "--format", "bundled").exit_code == 0


def test_a_mig_slice_is_refused_in_one_line(run: Run) -> None:
    fails(run("emit", "--device", f"{SERVER} MIG 2g.48gb", *OLMOE), 2, "MIG slice", f"without MIG: {SERVER}")


# --- only what is measured -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["RTX PRO 6000", SERVER, "NVIDIA H100 80GB HBM3"])
@pytest.mark.parametrize("quant", [(), ("--quant", "bf16")])
def test_measured_without_timings_writes_nothing_and_exits_1(run: Run, device: str, quant: tuple[str, ...]) -> None:
    result = run("emit", "--device", device, *OLMOE, *quant, "--measured", "-o", "x/")
    names = [d.name for d in find_devices(device)]
    fails(
        result, 1, "--measured", "no timings", *names, " ".join(["synth collect --device-plan --model olmoe", *quant])
    )


def test_measured_without_a_fitted_model_does_not_fall_back_to_the_analytic_one(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "shipped", lambda kind: tmp_path / "nothing" / kind)
    monkeypatch.setenv("SYNTH_MODELS", str(tmp_path / "none"))
    fails(
        run("emit", *H200, "--measured", "-o", "a.json"),
        1,
        "NVIDIA H200 (bf16)",
        "synth collect --device-plan --model olmoe",
    )
    time_layer(tmp_path, "NVIDIA H200", "bf16", simulated=True)
    fails(run("emit", *H200, "--measured", "-o", "a.json"), 1, "no timings")


def test_measured_writes_the_quantizations_that_are_and_says_what_is_skipped(run: Run, tmp_path: Path) -> None:
    time_layer(tmp_path, SERVER, "fp8")
    result = run("emit", "--device", "RTX PRO 6000", "--model", "olmoe", "--measured", "-o", "x/")
    assert result.exit_code == 0, result.output
    (path,) = configs("x")
    sidecar = json.loads(sidecar_path(path).read_bytes())
    assert sidecar["device"] == SERVER and {c["quant"] for c in sidecar["choices"]} == {"fp8"}
    written = [c for c in sidecar["choices"] if c["written"]]
    # The timings were fitted, so that they stand behind the other buckets too.
    assert {c["source"] for c in written if c["bucket"] in (1, 64, 1024)} == {"measured"}
    assert written and "analytical" not in sidecar["entries"]
    assert all(c["source"] != "analytical" for c in sidecar["choices"])
    (skipped,) = lines(result, "skipped: ")
    assert f"{SERVER} (bf16)" in skipped and "no timings" in skipped
    assert all(f"{name} (bf16, fp8)" in skipped for name in set(PRO_6000) - {SERVER})
    assert "WARNING" not in result.stderr
    assert any("synth fit" in line for line in lines(result, "note: "))
    bundled = run("emit", "--device", SERVER, "--model", "olmoe", "--measured", "--format", "bundled", "-o", "y/")
    assert bundled.exit_code == 0, bundled.output


def test_measured_with_a_named_quantization_that_is_not_exits_1(run: Run, tmp_path: Path) -> None:
    time_layer(tmp_path, SERVER, "fp8")
    result = run("emit", "--device", SERVER, "--model", "olmoe", "--quant", "bf16", "--measured", "-o", "a.json")
    fails(result, 1, f"{SERVER} (bf16): no timings", "synth collect --device-plan --model olmoe --quant bf16")


def test_measured_with_timings_changes_nothing_where_nothing_is_analytical(run: Run) -> None:
    assert run("emit", *H200, "-o", "a.json").exit_code == 0
    assert run("emit", *H200, "--measured", "-o", "b.json").exit_code == 0
    assert Path("a.json").read_bytes() == Path("b.json").read_bytes()
