from __future__ import annotations

from pathlib import Path

import platformdirs
import pytest

from synth.catalog.devices import load_devices
from synth.catalog.paths import find_model, model_file, readable, shipped, user_folder
from synth.errors import SynthError


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(platformdirs, "user_data_path", lambda *_, **__: tmp_path / "home")
    return tmp_path / "home"


def test_shipped_measurements_are_there() -> None:
    assert list(shipped("measurements").rglob("*.csv.gz"))


def test_the_users_folder_is_outside_the_package(home: Path) -> None:
    assert user_folder("models") == home / "models"
    assert not (home / "models").exists()


def test_the_users_own_come_first(home: Path, tmp_path: Path) -> None:
    assert readable("measurements", None) == [shipped("measurements")]
    (home / "measurements").mkdir(parents=True)
    assert readable("measurements", None) == [home / "measurements", shipped("measurements")]
    named = tmp_path / "named"
    named.mkdir()
    assert readable("measurements", named) == [named, shipped("measurements")]
    assert readable("measurements", shipped("measurements")) == [shipped("measurements")]


def test_a_file_is_not_a_folder_of_models(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(SynthError, match="--models") as e:
        readable("models", tmp_path / "file")
    assert str(tmp_path / "file") in str(e.value)


def test_every_model_has_its_own_file() -> None:
    files = {model_file(d.name, quant, "0.7.4") for d in load_devices() for quant in ("bf16", "fp8")}
    assert len(files) == 2 * len(load_devices())
    assert model_file("NVIDIA H200", "bf16", "0.7.4") == Path("nvidia-h200/flashinfer-0.7.4/bf16.zip")


def test_the_first_folder_that_has_a_model_wins(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("none", "one", "two")]
    wanted = model_file("NVIDIA H200", "bf16", "0.7.4")
    assert find_model(folders, "NVIDIA H200", "bf16", "0.7.4") is None
    for folder in reversed(folders[1:]):
        (folder / wanted).parent.mkdir(parents=True)
        (folder / wanted).write_bytes(b"")
        assert find_model(folders, "NVIDIA H200", "bf16", "0.7.4") == folder / wanted
    assert find_model(folders, "NVIDIA H200", "fp8", "0.7.4") is None
    assert find_model(folders, "NVIDIA H200", "bf16", "0.7.3") is None
    assert find_model(folders, "NVIDIA H100 80GB HBM3", "bf16", "0.7.4") is None
