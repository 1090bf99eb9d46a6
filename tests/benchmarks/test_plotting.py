from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from studies.plotting import check, learning_curves, reliability
from studies.replaying import Point

from synth.errors import MissingDependencyError, SynthError
from synth.performance.calibration import Reliability
from synth.performance.evaluation import Evaluation

KEYS = np.array([[0, 1, 8], [0, 2, 8]])


def point(way: str, seed: int, mark: float, regret: float) -> Point:
    regrets = np.array([regret, regret])
    evaluation = Evaluation("model", KEYS, regrets, regrets, ("aa-1",))
    none, two = np.zeros(0), np.zeros(2, dtype=np.int64)
    return Point(
        way,
        seed,
        mark,
        round(100 * mark),
        100,
        mark,
        1.0,
        evaluation,
        two,
        two,
        regrets,
        np.zeros((2, 2)),
        none,
        two[:0],
    )


POINTS = [
    *(point("active", 0, mark, regret) for mark, regret in ((0.0, 1.02), (0.1, 1.0))),
    *(point("random", seed, 0.1, 1.01 + seed / 1000) for seed in (0, 1)),
]
STATED = Reliability.of(np.array([0.6, 0.95]), np.array([True, True]))


def test_curves_are_written_as_svg_and_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    files = learning_curves({"one": POINTS, "two": POINTS}, tmp_path / "new" / "curve")
    assert [f.name for f in files] == ["curve.svg", "curve.png"]
    assert b"<svg" in files[0].read_bytes() and files[1].read_bytes().startswith(b"\x89PNG")


def test_reliability_is_written_as_svg_and_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    files = reliability({"within 1 %": {"as stated": STATED}}, tmp_path / "r")
    assert [f.suffix for f in files] == [".svg", ".png"] and all(f.stat().st_size > 1000 for f in files)


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "file").write_text("")
    with pytest.raises(SynthError, match=r"file: .*--plots"):
        reliability({"a": {"b": STATED}}, tmp_path / "file" / "r")


def test_without_matplotlib_one_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'flashinfer-synth\[studies\]'"):
        check()
