"""Studies of replayed sweeps, on three shapes of two families in two buckets; all of olmoe was swept twice and more."""

from __future__ import annotations

import json
import re
from pathlib import Path

import doubt
import evidence
import learning_curve
import numpy as np
import pytest
import transfer
import weak_spots
from click.testing import CliRunner
from doubt import Doubt
from learning_curve import Curves
from weak_spots import WeakSpots

from synth.catalog import paths
from synth.errors import SynthError
from synth.timings.files import read, write
from synth.timings.folders import load
from synth.timings.table import ShapeTimings, Timings

SHIPPED = Path(__file__).parents[2] / "measurements"
SHAPES = ("olmoe", "mixtral-8x7b", "nemotron-3-super-tp4")


@pytest.fixture(scope="module")
def part() -> Timings:
    (t,) = load(SHIPPED, "NVIDIA H200", "bf16", problems=[])
    return t.select(np.isin(t.shape, [t.labels.index(x) for x in SHAPES]) & np.isin(t.tokens, [16, 1024]))


@pytest.fixture(scope="module")
def steps() -> list[tuple[int, int]]:
    return []


@pytest.fixture(scope="module")
def curves(part: Timings, steps: list[tuple[int, int]]) -> Curves:
    return learning_curve.study(part, "family", 1, lambda done, total: steps.append((done, total)))


@pytest.fixture(scope="module")
def doubted(part: Timings) -> Doubt:
    return doubt.study(part, "family")


@pytest.fixture(scope="module")
def spots(part: Timings) -> WeakSpots:
    return weak_spots.study(part, "family")


def test_curves_are_of_both_devices_and_both_scopes(curves: Curves, steps: list[tuple[int, int]]) -> None:
    # Two of the three are of the first sweeps.
    assert list(curves.known) == list(curves.new) == ["all 3 shapes", "the 2 shapes of the first sweeps"]
    ways = {("active", 0), ("stratified", 0), ("random", 0)}
    for points in curves.known.values():
        assert {(p.way, p.seed) for p in points if p.mark > 0} == ways
        assert [p.way for p in points if p.mark == 0] == ["active"]
    for points in curves.new.values():
        assert {(p.way, p.seed) for p in points} == ways
    first, part = (curves.known[name][0] for name in curves.known)
    assert first.evaluation.all.count == 12 and part.evaluation.all.count == 8
    # Three families held out; three ways for two scopes.
    assert steps == [(n, 9) for n in range(1, 10)]


def test_curves_are_plain_json(curves: Curves) -> None:
    plain = json.loads(json.dumps(curves.as_dict(), allow_nan=False))
    assert {p["way"] for p in plain["known_device"]["all 3 shapes"]} == {"active", "stratified", "random"}
    assert plain["known_device"]["all 3 shapes"][0]["all"]["count"] == 12


def test_curves_are_printed_and_drawn(curves: Curves, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    learning_curve.tables(curves)
    out = capsys.readouterr().out
    assert "timings of an unseen shape" in out and "timings of a new device" in out
    names = {p.name for p in learning_curve.plot(curves, tmp_path)}
    assert {"learning-curve-shape-bf16.svg", "learning-curve-device-bf16-seconds.png"} <= names
    assert all((tmp_path / name).stat().st_size for name in names)


def test_doubt_is_plain_json(doubted: Doubt) -> None:
    plain = json.loads(json.dumps(doubted.as_dict(), allow_nan=False))
    assert set(plain["reliability"]) == {"0.01", "0.02"}
    assert set(plain["reliability"]["0.01"]) == {"stated", "corrected"}
    assert [c["share"] for c in plain["coverage_90"]] == [0.0, 0.01, 0.05]
    # 12 choices at each of the three.
    assert sum(b["count"] for b in plain["reliability"]["0.01"]["stated"]["bins"]) == 36


def test_what_two_passes_choose_is_compared(doubted: Doubt) -> None:
    stability = doubted.stability
    assert stability is not None and stability.count == 4
    assert 0.0 <= stability.equal <= stability.as_good <= 1.0


def test_doubt_is_printed_and_drawn(doubted: Doubt, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    doubt.tables(doubted)
    out = capsys.readouterr().out
    for words in ("in 90 % intervals", "Brier score", "choices from two independent passes, 4 of each"):
        assert words in out
    assert [p.name for p in doubt.plot(doubted, tmp_path)] == ["reliability-bf16.svg", "reliability-bf16.png"]


def test_weak_spots_are_plain_json(spots: WeakSpots) -> None:
    plain = json.loads(json.dumps(spots.as_dict(), allow_nan=False))
    assert len(plain["worst"]) == 10 and plain["worst"][0]["regret"] >= plain["worst"][-1]["regret"] >= 1.0
    assert {"kind", "of_regret", "geomeans"} <= set(plain["kinds"][0])
    assert list(plain["kinds"][0]["geomeans"]) == ["0.0", "0.01", "0.05"]


def test_weak_spots_are_printed(spots: WeakSpots, capsys: pytest.CaptureFixture[str]) -> None:
    weak_spots.tables(spots)
    out = capsys.readouterr().out
    assert "where the regret is" in out and "the worst choices" in out and spots.worst[0].label in out


def test_the_studies_start_from_the_same_choices(curves: Curves, spots: WeakSpots) -> None:
    first = curves.known["all 3 shapes"][0]
    assert spots.worst[0].regret == first.evaluation.regrets.max()


def test_sampled_shapes_alone_are_not_studied(part: Timings) -> None:
    sampled = part.select((part.tokens == 16) & (part.tactic % 3 == 0))
    for study in (doubt.study, weak_spots.study, lambda timings, by: learning_curve.study(timings, by, 1)):
        with pytest.raises(SynthError, match="no shape was swept"):
            study(sampled, "family")


def test_a_script_prints_what_its_study_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("h2048-i1024-e64-k8", "h4096-i3584-e8-k2"):
        whole = read(SHIPPED / "nvidia-h200" / "flashinfer-0.7.4" / "fp8" / f"{name}.csv.gz")
        rows = [row for row in whole.rows() if row.tokens == 16]
        write(ShapeTimings.from_rows(whole.origin, whole.shape, whole.label, whole.passes, rows), tmp_path / "m")
    (tmp_path / "own").mkdir()
    monkeypatch.setattr(paths, "shipped", lambda kind: tmp_path / ("m" if kind == "measurements" else "none"))
    monkeypatch.setenv("SYNTH_MEASUREMENTS", str(tmp_path / "own"))
    result = CliRunner().invoke(weak_spots.main, ["--quant", "fp8", "--json"])
    assert result.exit_code == 0, result.output
    assert "replaying fp8: 2 of 2" in result.stderr
    assert {w["label"] for w in json.loads(result.stdout)["fp8"]["worst"]} <= {"olmoe", "mixtral-8x7b-tp4"}
    for main in (weak_spots.main, doubt.main, learning_curve.main):
        result = CliRunner().invoke(main, ["--quant", "nvfp4"])
        assert result.exit_code == 2 and result.stderr.count("\n") == 1 and "no timings of" in result.stderr


def test_the_pages_name_scripts_and_options_that_are_there() -> None:
    scripts = {"doubt": doubt, "evidence": evidence, "learning_curve": learning_curve, "transfer": transfer,
               "weak_spots": weak_spots}  # fmt: skip
    found = [
        words
        for page in (SHIPPED.parent / "README.md", *(SHIPPED.parent / "docs").glob("*.md"))
        for words in re.findall(r"python benchmarks/(\w+)\.py([^`|#\n]*)", page.read_text(encoding="utf-8"))
        if words[0] in scripts
    ]
    assert {name for name, _ in found} == set(scripts)
    for name, options in found:
        scripts[name].main.make_context(name, options.split())
