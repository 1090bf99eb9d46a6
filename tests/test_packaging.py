from __future__ import annotations

import email
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
#: Slow to import, or not there at all: listing what is known needs none of them.
HEAVY = ("flashinfer", "numpy", "ray", "rich", "scipy", "sklearn", "torch")

Run = Callable[..., str]


def build(kind: str, folder: Path) -> Path:
    for needed in ("build", "hatchling"):
        pytest.importorskip(needed, reason=f"{needed} isn't installed (extra 'test')")
    command = [sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = folder.iterdir()
    return made


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel unpacked: what lies in site-packages after an install."""
    folder = tmp_path_factory.mktemp("site-packages")
    with zipfile.ZipFile(wheel) as z:
        z.extractall(folder)
    return folder


@pytest.fixture
def run(installed: Path, tmp_path: Path) -> Run:
    """Run Python with the unpacked wheel, in an empty folder and with an empty home."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SYNTH_", "XDG_"))}
    env |= {"PYTHONPATH": str(installed), "PYTHONDONTWRITEBYTECODE": "1", "HOME": str(tmp_path / "home")}

    def run_python(*arguments: str) -> str:
        done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=tmp_path, env=env)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run_python


def files(folder: Path) -> set[str]:
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("kind", ["models", "measurements"])
def test_the_wheel_carries_every_shipped_file(installed: Path, kind: str) -> None:
    source = files(ROOT / kind)
    assert source
    assert files(installed / "synth" / "shipped" / kind) == source
    for name in source:
        assert (installed / "synth" / "shipped" / kind / name).read_bytes() == (ROOT / kind / name).read_bytes()


def test_no_shipped_model_is_larger_than_8_mib(installed: Path) -> None:
    sizes = {p.name: p.stat().st_size for p in (installed / "synth" / "shipped" / "models").rglob("*.zip")}
    assert sizes
    assert max(sizes.values()) <= 8 << 20, sizes


def test_the_wheel_holds_the_package_and_nothing_else(installed: Path) -> None:
    top = {p.name for p in installed.iterdir()}
    assert {name for name in top if not name.endswith(".dist-info")} == {"synth"}
    source = {f for f in files(ROOT / "synth") if "__pycache__" not in f}
    shipped = {f for f in files(installed / "synth") if not f.startswith("shipped/")}
    assert shipped == source
    (info,) = installed.glob("*.dist-info")
    assert (info / "licenses" / "LICENSE").read_text(encoding="utf-8").lstrip().startswith("Apache License")
    assert (installed / "synth" / "py.typed").is_file()
    assert "synth = synth.cli:main" in (info / "entry_points.txt").read_text(encoding="utf-8")


def test_the_core_needs_neither_torch_nor_flashinfer(installed: Path) -> None:
    (metadata,) = installed.glob("*.dist-info/METADATA")
    needs = email.message_from_string(metadata.read_text(encoding="utf-8")).get_all("Requires-Dist") or []
    core = {n for n in needs if "extra ==" not in n}
    assert any(n.startswith("numpy") for n in core)
    assert not [n for n in core if n.startswith(("torch", "flashinfer", "ray"))]
    assert any(n.startswith("torch") for n in needs)


def test_the_metadata_say_for_whom_it_is_and_for_which_python(installed: Path) -> None:
    (path,) = installed.glob("*.dist-info/METADATA")
    metadata = email.message_from_string(path.read_text(encoding="utf-8"))
    assert metadata["Name"] == "flashinfer-synth"
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata.get_payload() == (ROOT / "README.md").read_text(encoding="utf-8")
    assert {"flashinfer", "ray", "test"} <= set(metadata.get_all("Provides-Extra") or [])
    classifiers = metadata.get_all("Classifier") or []
    versions = {c.rpartition(" ")[2] for c in classifiers if c.startswith("Programming Language :: Python :: 3.")}
    assert versions == {"3.10", "3.11", "3.12", "3.13"}
    assert any(c.startswith("Topic :: ") for c in classifiers)
    known = pytest.importorskip("trove_classifiers", reason="hatchling's trove-classifiers isn't installed")
    assert set(classifiers) <= known.classifiers


def test_the_sdist_carries_the_tests_and_builds_no_other_folder(tmp_path: Path) -> None:
    with tarfile.open(build("sdist", tmp_path)) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames()}
    assert {"tests/test_packaging.py", "tests/support/made_up.py", "pyproject.toml", "Makefile", "LICENSE"} <= names
    assert {f"models/{f}" for f in files(ROOT / "models")} <= names
    allowed = {"synth", "models", "measurements", "tests", "benchmarks", "docs", ".ci"}
    assert {name.split("/")[0] for name in names if "/" in name} == allowed


def test_an_installed_synth_lists_the_devices(run: Run, installed: Path) -> None:
    assert Path(run("-c", "import synth; print(synth.__file__)").strip()).is_relative_to(installed)
    assert "NVIDIA H200" in [d["name"] for d in json.loads(run("-m", "synth", "devices", "--json"))]


def test_an_installed_synth_emits_from_the_shipped_models_and_writes_only_what_it_was_asked_for(
    run: Run, installed: Path, tmp_path: Path
) -> None:
    before = {p: (p.stat().st_size, p.stat().st_mtime_ns) for p in installed.rglob("*")}
    run("-m", "synth", "emit", "--device", "NVIDIA H200", "--model", "olmoe", "-o", "x.json")
    config = json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))
    sidecar = json.loads((tmp_path / "x.json.provenance.json").read_text(encoding="utf-8"))
    assert len([key for key in config if not key.startswith("_")]) > 100
    assert {c["source"] for c in sidecar["choices"]} <= {"measured", "verified", "predicted"}
    assert any(c["source"] == "measured" for c in sidecar["choices"])
    assert {p: (p.stat().st_size, p.stat().st_mtime_ns) for p in installed.rglob("*")} == before
    assert files(tmp_path) == {"x.json", "x.json.provenance.json"}


@pytest.mark.parametrize("arguments", [["--help"], ["emit", "--help"], ["devices", "--json"], ["models", "--json"]])
def test_what_must_be_quick_imports_nothing_heavy(run: Run, arguments: list[str]) -> None:
    code = (
        "import sys; from synth.cli import main\n"
        "main(sys.argv[1:], prog_name='synth', standalone_mode=False)\n"
        "print('\\n' + ' '.join(sorted(m for m in sys.modules if '.' not in m)))"
    )
    loaded = run("-c", code, *arguments).splitlines()[-1].split()
    assert "click" in loaded
    assert not set(HEAVY) & set(loaded)
