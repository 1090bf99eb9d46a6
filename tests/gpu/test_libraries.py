"""What is said where torch or FlashInfer can't be imported."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from synth.errors import MissingDependencyError, SynthError, pip_install
from synth.gpu import libraries
from synth.gpu.layer import Layer
from synth.gpu.timing import GpuRunner


def test_the_command_installs_for_the_python_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/a place/bin/python3")
    for on_path, python in (("/a place/bin/python", "python"), ("/usr/bin/python", "'/a place/bin/python3'")):
        monkeypatch.setattr(shutil, "which", lambda _name, path=on_path: path)
        assert pip_install("one", "two") == f"{python} -m pip install one two"
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    assert pip_install("one") == "'/a place/bin/python3' -m pip install one"


@pytest.mark.parametrize("missing", ["torch", "flashinfer"])
def test_whatever_needs_flashinfer_says_what_to_install(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    for ask in (libraries.installed_flashinfer, libraries.load_cache, GpuRunner, lambda: Layer(None, "bf16")):  # type: ignore[arg-type]
        with pytest.raises(MissingDependencyError, match=rf"{missing}.*-m pip install flashinfer-python torch$"):
            ask()


def test_a_flashinfer_that_fails_to_import_is_to_be_reinstalled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_torch.py").write_text("raise OSError('libcudart.so: no such file\\nand more')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SynthError, match=r"can't be imported: libcudart\.so: no such file; reinstall it$"):
        libraries._load("broken_torch")
