"""The Python API: eight names, lazily; every example of docs/api.md and of a docstring is run."""

from __future__ import annotations

import doctest
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import synth
from synth.errors import SynthError

ROOT = Path(__file__).resolve().parents[1]
NAMES = [name for name in synth.__all__ if not name.startswith("__")]


def test_the_import_brings_nothing_with_it() -> None:
    script = "import sys, synth; print(sorted({m.split('.')[0] for m in sys.modules} & {'numpy', 'click'}), dir(synth))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("[] ") and "'emit'" in done.stdout


@pytest.mark.parametrize("name", ["check", "port", "read_config", "layer", "predict", "choose", "emit"])
def test_no_name_needs_what_only_training_does(name: str) -> None:
    script = (
        f"import sys, synth; synth.{name};"
        "heavy = ('sklearn', 'scipy.stats', 'scipy.optimize', 'torch', 'flashinfer', 'rich');"
        "print([m for m in heavy if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_each_name_is_documented_with_its_errors_and_in_the_page() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert len(NAMES) == 8
    for name in NAMES:
        assert f"| `{name}` |" in page
        assert "Raises" in (getattr(synth, name).__doc__ or "")
    assert set(NAMES) <= set(dir(synth))


def test_a_wrong_name_says_what_there_is() -> None:
    with pytest.raises(AttributeError, match=r"has no attribute 'emitt'; it has .*emit"):
        synth.emitt  # noqa: B018


def test_the_examples_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_home(tmp_path, monkeypatch)
    # A fence is no output.
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8").replace("```", "")
    runner = doctest.DocTestRunner()
    runner.run(doctest.DocTestParser().get_doctest(text, {}, "api.md", "docs/api.md", 0))
    assert runner.tries > 15 and not runner.failures


@pytest.mark.parametrize("module", ["synth.catalog.checkpoints", "synth.choosing.answers", "synth.timings.folders"])
def test_the_examples_of_docstrings_run(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_home(tmp_path, monkeypatch)
    failed, tried = doctest.testmod(importlib.import_module(module))
    assert tried and not failed


def test_a_layer_is_a_models_a_labels_or_a_checkpoints(tmp_path: Path) -> None:
    assert synth.layer("glm-5", tp=8, quant="fp8") == synth.layer("glm-5-tp8", quant="fp8")
    config = tmp_path / "some-moe" / "config.json"
    config.parent.mkdir()
    config.write_text(
        '{"hidden_size": 4096, "moe_intermediate_size": 1024, "num_experts": 96, "num_experts_per_tok": 6}'
    )
    layer = synth.layer(config, tp=2)
    assert (layer.label, layer.quant, str(layer.shape)) == ("some-moe-tp2", "bf16", "h4096-i512-e96-k6")


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: synth.layer("glm-5x"), "unknown model 'glm-5x'; did you mean"),
        (lambda: synth.layer("glm-5", tp=3), "--tp 3 doesn't divide"),
        (lambda: synth.predict(synth.layer("olmoe"), "RTX PRO 6000", 64), "means .*; name one of them"),
        (lambda: synth.predict(synth.layer("olmoe"), "NVIDIA H200", 0), "bucket must be at least 1"),
        (lambda: synth.emit([synth.layer("olmoe")], "NVIDIA B300"), "NVIDIA B300"),
        (lambda: synth.load_timings("NVIDIA H200", "nvfp4"), "no timings of NVIDIA H200 nvfp4"),
        (lambda: synth.read_config(Path("nowhere.json")), "nowhere.json"),
    ],
)
def test_errors_are_one_line(call: object, says: str) -> None:
    with pytest.raises(SynthError, match=says) as e:
        call()  # type: ignore[operator]
    assert "\n" not in str(e.value)


def at_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in an empty folder that is everybody's home, so that nobody's own timings are read."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("XDG_DATA_HOME", str(folder / "data"))
