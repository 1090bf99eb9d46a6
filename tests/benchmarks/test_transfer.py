"""Choices by what another quantization taught, on parts of the shipped timings."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import transfer
from click.testing import CliRunner
from transfer import TransferScore, main, transfers
from transfer import tables as print_tables

from synth.catalog import paths
from synth.catalog.models import family_of
from synth.performance.evaluation import Judge
from synth.timings.files import read, write
from synth.timings.folders import load
from synth.timings.table import ShapeTimings, Timings

SHIPPED = Path(__file__).parents[2] / "measurements"
#: Layers that were timed in both quantizations, of three families.
SHAPES = ("h2048-i1024-e64-k8", "h4096-i3584-e8-k2", "h2880-i2880-e32-k4")
BUCKETS = (1, 64, 1024)
KINDS = ("all", "TMA", "TMA, cluster 1x1x1", "multistage")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("measurements")
    for quant in ("bf16", "fp8"):
        for name in SHAPES:
            whole = read(SHIPPED / "nvidia-h200" / "flashinfer-0.7.4" / quant / f"{name}.csv.gz")
            rows = [row for row in whole.rows() if row.tokens in BUCKETS]
            write(ShapeTimings.from_rows(whole.origin, whole.shape, whole.label, whole.passes, rows), root)
    return root


@pytest.fixture(scope="module")
def tables(folder: Path) -> list[Timings]:
    return load(folder, "NVIDIA H200", problems=[])


@pytest.fixture(scope="module")
def steps() -> list[tuple[int, int]]:
    return []


@pytest.fixture(scope="module")
def scores(tables: list[Timings], steps: list[tuple[int, int]]) -> list[TransferScore]:
    return transfers(tables, lambda done, total: steps.append((done, total)))


def test_each_quantization_is_carried_to_the_other_in_both_ways(scores: list[TransferScore]) -> None:
    found = [(s.source, s.target, s.kind, s.carried) for s in scores]
    assert len(set(found)) == len(found)
    assert {(s.source, s.target) for s in scores} == {("bf16", "fp8"), ("fp8", "bf16")}
    assert {s.carried for s in scores} == {"constants", "structure"}
    for source, target in (("bf16", "fp8"), ("fp8", "bf16")):
        mine = {s.kind for s in scores if (s.source, s.target) == (source, target)}
        # The multistage kernels are in the table of bf16 alone.
        assert mine == set(KINDS if target == "bf16" else KINDS[:-1])


def test_every_bucket_is_chosen_for_and_no_choice_beats_the_best(
    scores: list[TransferScore], tables: list[Timings]
) -> None:
    for s in scores:
        target = next(t for t in tables if t.origin.quant == s.target)
        if s.kind == "all":
            assert s.choices == len(Judge(target).timings.buckets()[0]) == len(SHAPES) * 2 * len(BUCKETS)
        assert 0 < s.choices <= len(SHAPES) * 2 * len(BUCKETS)
        assert 1.0 <= min(s.gemm1, s.gemm2) <= s.regret <= max(s.gemm1, s.gemm2)
        assert s.regret < 2.0 and s.p95 >= 1.0
        assert 0 <= s.foreseen <= s.choices
        assert math.isnan(s.came_true) if not s.foreseen else 0.0 <= s.came_true <= 1.0


def test_the_regret_is_the_mean_over_both_stages(scores: list[TransferScore]) -> None:
    for s in scores:
        # As many buckets of either stage.
        assert math.log(s.regret) == pytest.approx((math.log(s.gemm1) + math.log(s.gemm2)) / 2.0)


def test_gains_that_are_foreseen_mostly_come_true(scores: list[TransferScore]) -> None:
    foreseen = sum(s.foreseen for s in scores)
    true = sum(s.foreseen * s.came_true for s in scores if s.foreseen)
    assert foreseen > 50 and true / foreseen > 0.95


def test_a_fit_is_reported_for_each_family_held_out(
    scores: list[TransferScore], steps: list[tuple[int, int]], tables: list[Timings]
) -> None:
    families = sum(len({family_of(label) for label in t.labels}) for t in tables)
    assert scores and steps == [(n, families) for n in range(1, families + 1)]


def test_no_family_is_predicted_by_a_model_that_has_seen_it(tables: list[Timings]) -> None:
    """What was timed of a family in the other quantization says nothing of it, and something of the others."""
    source, target = (next(t for t in tables if t.origin.quant == quant) for quant in ("bf16", "fp8"))
    family = family_of(target.labels[0])
    changed = np.isin(source.shape, [i for i, label in enumerate(source.labels) if family_of(label) == family])
    noise = np.exp(np.random.default_rng(0).normal(0.0, 0.3, len(source)))
    other = dataclasses.replace(source, ms=np.where(changed, source.ms * noise, source.ms))
    before, after = (transfer._predict(s, target, lambda done: None) for s in (source, other))
    judged = Judge(target).timings
    mine = np.isin(judged.shape, [i for i, label in enumerate(judged.labels) if family_of(label) == family])
    assert changed.any() and mine.any() and not mine.all()
    for name in ("constants", "structure"):
        np.testing.assert_array_equal(before[name][mine], after[name][mine])
        assert (before[name][~mine] != after[name][~mine]).mean() > 0.5


def test_the_table_has_a_line_for_each_score(scores: list[TransferScore], capsys: pytest.CaptureFixture[str]) -> None:
    print_tables(scores)
    printed = capsys.readouterr().out
    for column in ("from", "to", "tactics", "regret", "gemm1", "gemm2", "p95"):
        assert column in printed
    assert all(f"{s.regret:.4f}" in printed for s in scores)


def test_the_command_prints_the_scores_and_needs_two_quantizations(
    folder: Path, scores: list[TransferScore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own").mkdir()
    monkeypatch.setenv("SYNTH_MEASUREMENTS", str(tmp_path / "own"))
    monkeypatch.setattr(paths, "shipped", lambda kind: folder if kind == "measurements" else tmp_path / "none")
    result = CliRunner().invoke(main, ["--json"])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    assert [(r["source"], r["target"], r["kind"], r["regret"]) for r in rows] == [
        (s.source, s.target, s.kind, s.regret) for s in scores
    ]
    assert "carrying over: 6 of 6" in result.stderr
    fp8 = folder / "nvidia-h200" / "flashinfer-0.7.4" / "fp8"
    monkeypatch.setattr(paths, "shipped", lambda kind: fp8 if kind == "measurements" else tmp_path / "none")
    result = CliRunner().invoke(main, [])
    assert result.exit_code == 2 and "two quantizations" in result.stderr
