from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from inline import InlinePool

from synth.catalog.shapes import MoEShape
from synth.choosing.choose import choose
from synth.choosing.plan import Layer
from synth.choosing.spots import outlook
from synth.cli import main
from synth.collecting import running
from synth.collecting.numbers import ComparatorSpec, Patience
from synth.collecting.simulated import Fault, simulated_runner
from synth.collecting.verifying import Verification, verify
from synth.errors import SynthError
from synth.flashinfer.tactics import Tactic
from synth.performance.fitting import save
from synth.performance.model import PerformanceModel
from synth.timings.folders import load
from synth.timings.origin import Origin
from synth.timings.records import AGREED, DENIED, load_agreed
from synth.timings.table import Timings

SHIPPED = Path(__file__).parents[2] / "measurements"
OLMOE = Layer(MoEShape(2048, 1024, 64, 8), "bf16", "olmoe")
BUCKETS = (16, 256, 2048)
SIMULATED = dataclasses.replace(Origin.make("NVIDIA H200", "sm90", "bf16"), simulated=True)


@pytest.fixture(scope="module")
def swept() -> Timings:
    (found,) = load(SHIPPED, "NVIDIA H200", "bf16", problems=[])
    return found


@pytest.fixture(scope="module")
def model(swept: Timings) -> PerformanceModel:
    """A quickly fitted model that has never seen OLMoE."""
    keep = np.isin(swept.tokens, [1, 64, 1024]) & (swept.shape != swept.labels.index("olmoe"))
    return PerformanceModel(choice_trees=4, time_trees=2).fit(swept.select(keep))


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """OLMoE's sweep, to replay."""
    root = tmp_path_factory.mktemp("table")
    (path,) = (SHIPPED / "nvidia-h200").rglob(f"bf16/{OLMOE.shape}.csv.gz")
    shutil.copy(path, root)
    return root


Check = Callable[..., Verification]


@pytest.fixture
def check(model: PerformanceModel, table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    """Verify OLMoE in three buckets, timing in this process; the command's tests use another one, as everybody does."""
    monkeypatch.setattr(running, "_make_pool", lambda runner, gpus, ray: InlinePool(runner))

    def run(wrong: tuple[int, ...] = (), faults: tuple[Fault, ...] = (), **options: Any) -> Verification:
        settings: dict[str, Any] = {
            "root": tmp_path,
            "buckets": BUCKETS,
            "runner": simulated_runner([table], faults=faults),
            "simulated": True,
            "comparator": ComparatorSpec("synth.collecting.numbers:SimulatedComparator", {"wrong": wrong}),
        }
        return verify(OLMOE, model, **{**settings, **options})

    return run


def regret_of(chosen: dict[tuple[int, int], int], swept: Timings) -> float:
    """Return the mean logarithm of the regret against the sweep."""
    mine = swept.select(swept.shape == swept.labels.index("olmoe")).averaged()
    lost = []
    for (stage, bucket), tactic in chosen.items():
        here = (mine.stage == stage) & (mine.tokens == bucket)
        lost.append(np.log(mine.ms[here & (mine.tactic == tactic)][0] / mine.ms[here].min()))
    return float(np.mean(lost))


def test_spot_checks_end_below_the_threshold_and_are_not_taken_twice(
    check: Check, model: PerformanceModel, swept: Timings, tmp_path: Path
) -> None:
    first = check()
    assert first.done and first.after.regret < 0.001 < first.before.regret
    assert first.stop.startswith("expected remaining regret 0.0") and "is below 0.10%" in first.stop
    assert first.before.entries == {"predicted": 6} and sum(first.after.entries.values()) == 6
    assert first.after.entries.get("verified", 0) >= 4 and first.after.near > 0.9 > first.before.near
    assert 0 < first.timings < 200 and first.failed == 0
    assert regret_of(first.chosen, swept) < min(0.005, regret_of(first.chosen_before, swept) + 1e-9)
    moved = {(c.stage, c.bucket) for c in first.changes}
    assert moved == {place for place, tactic in first.chosen.items() if first.chosen_before[place] != tactic}
    assert all(c.gain > -0.01 for c in first.changes)
    assert first.numbers.pairs >= 3 and first.numbers.denials == () and first.numbers.unchecked == ""
    # The timings are in the measurements, so that choosing knows them.
    (timings,) = load(tmp_path, "NVIDIA H200", "bf16", problems=[])
    assert timings.origin == SIMULATED and len(timings) >= first.timings
    again = choose(model, [OLMOE.shape], BUCKETS, timings=timings)
    assert {(c.stage, c.bucket): c.tactic_id for c in again} == first.chosen

    second = check(comparator=None)
    assert second.timings == 0 and second.done and second.changes == ()
    assert second.before == second.after and second.chosen == first.chosen
    assert second.numbers.unchecked == "it was not asked for"
    # What the measurements say is not timed again either where the journal is lost.
    shutil.rmtree(tmp_path / "journals")
    third = check(comparator=None)
    assert third.timings == 0 and third.done


def test_a_spent_budget_ends_the_checks_and_a_larger_one_goes_on(check: Check) -> None:
    short = check(budget_s=0.1, threshold=1e-6, comparator=None)
    assert not short.done and short.stop.startswith("budget spent, expected remaining regret")
    assert 0 < short.measuring_s <= 0.11
    more = check(budget_s=0.3, threshold=1e-6, comparator=None)
    assert more.timings > 0 and more.measuring_s <= 0.21
    assert more.before.regret == pytest.approx(short.after.regret, rel=0.5)
    spent = check(budget_s=0.1, threshold=1e-6, comparator=None)
    assert spent.timings == 0 and spent.stop.startswith("budget spent")
    assert check(budget_s=0.1, threshold=1e-6, comparator=None, pass_=2).timings > 0
    last = check(budget_s=60.0, threshold=1e-6, comparator=None)
    assert last.stop.startswith("no timing is left that could change a choice")


def test_timings_that_only_the_journal_has_are_known(check: Check, tmp_path: Path) -> None:
    """A run that was killed has not written its measurements."""
    first = check(comparator=None)
    for path in tmp_path.rglob("*.csv.gz"):
        path.unlink()
    again = check(comparator=None)
    assert again.timings == 0 and again.chosen == first.chosen
    assert again.before.regret == pytest.approx(first.after.regret, rel=1e-9)


def test_a_tactic_with_wrong_numbers_is_denied_remembered_and_replaced(
    check: Check, model: PerformanceModel, tmp_path: Path
) -> None:
    right = check()
    guilty = right.chosen[2, 2048]
    found = check(wrong=(guilty,))
    (denial,) = found.numbers.denials
    assert (denial.stage, denial.tactic) == (2, model.table.tactic(guilty))
    assert (denial.shape, denial.deviation) == (OLMOE.shape, 0.5)
    assert guilty not in found.chosen.values() and found.chosen[1, 16] == right.chosen[1, 16]
    assert DENIED.load([tmp_path], SIMULATED) == (denial,)
    assert found.numbers.worst < 0.01
    assert all(model.table.tactic(guilty) not in one.tactics for one in load_agreed([tmp_path], SIMULATED))
    again = check(wrong=(guilty,))
    assert again.numbers.denials == () and again.chosen == found.chosen


def test_pairs_whose_numbers_agree_are_remembered(check: Check, model: PerformanceModel, tmp_path: Path) -> None:
    found = check()
    agreed = AGREED.load([tmp_path], SIMULATED)
    assert set(agreed) == set(found.numbers.agreements)
    pairs = {one.tactics for one in agreed}
    assert len(pairs) == found.numbers.pairs
    for bucket in {bucket for _, bucket in found.chosen}:
        # A tactic that is the fallback's own isn't written.
        wanted = [
            None if i == model.table.fallback_id(stage) else model.table.tactic(i)
            for stage in (1, 2)
            for i in [found.chosen[stage, bucket]]
        ]
        assert wanted == [None, None] or tuple(wanted) in pairs


def test_wrong_numbers_after_wrong_numbers_are_all_found(check: Check, model: PerformanceModel) -> None:
    """Whatever is chosen instead is compared too."""
    chosen = check(comparator=None).chosen
    tried: set[int] = {chosen[1, 256]}
    for _ in range(2):
        found = check(wrong=tuple(tried))
        assert {model.table.id_of(d.stage, d.tactic) for d in found.numbers.denials} <= tried
        assert not tried & set(found.chosen.values())
        tried |= {found.chosen[1, 256]}


def test_a_tactic_that_loses_the_context_is_denied(check: Check) -> None:
    chosen = check(comparator=None).chosen
    broken = ComparatorSpec("synth.collecting.numbers:SimulatedComparator", {"broken": {chosen[1, 16]: "exit"}})
    found = check(comparator=broken, patience=Patience(pair_s=20))
    (denial,) = found.numbers.denials
    assert denial.stage == 1 and "exit code 3" in denial.error and found.chosen[1, 16] != chosen[1, 16]


def test_a_layer_that_cannot_be_run_keeps_its_timings_and_denies_nothing(check: Check) -> None:
    found = check(comparator=ComparatorSpec("synth.collecting.numbers:SimulatedComparator", {"unable": "no memory"}))
    assert found.done and found.numbers.unchecked == "no memory" and found.numbers.denials == ()


def test_a_failed_tactic_is_not_chosen(check: Check, tmp_path: Path) -> None:
    best = check(comparator=None, root=tmp_path / "a").chosen[1, 256]
    found = check(comparator=None, root=tmp_path / "b", faults=(Fault("raise", cell=(1, 256, best)),))
    assert found.failed == 1 and found.chosen[1, 256] != best


def test_a_threshold_that_is_no_share_and_a_simulated_model_are_refused(
    check: Check, model: PerformanceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SynthError, match="--threshold 2"):
        check(threshold=2.0)
    monkeypatch.setattr(model, "origin_", SIMULATED)
    with pytest.raises(SynthError, match="fitted on simulated timings"):
        check(simulated=False)


def test_where_a_layer_stands_is_known_without_a_timing(model: PerformanceModel, tmp_path: Path) -> None:
    now = outlook(OLMOE, model, [tmp_path], BUCKETS)
    assert now.entries == {"predicted": 6} and 0 < now.regret < 0.1
    known = outlook(OLMOE, model, [SHIPPED], BUCKETS)
    assert known.entries == {"measured": 6} and known.regret < now.regret


# --- the command -----------------------------------------------------------------------------------------------------


Run = Callable[..., Result]


@pytest.fixture
def command(model: PerformanceModel, tmp_path: Path, table: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command for two buckets of OLMoE, with folders of its own."""
    save(model, tmp_path / "models")
    (tmp_path / "own").mkdir()
    shipped = {"measurements": table}
    monkeypatch.setattr("synth.catalog.paths.shipped", lambda kind: shipped.get(kind, tmp_path / "none"))
    folders = ("--models", str(tmp_path / "models"), "--measurements", str(tmp_path / "own"))
    layer = ("--model", "olmoe", "--quant", "bf16", "--max-tokens", "2", "--simulate")
    return lambda *options: CliRunner().invoke(main, ["verify", *layer, *folders, *options])


def test_the_command_reports_and_exits_by_the_numbers(command: Run, tmp_path: Path) -> None:
    dry = command("--dry-run")
    assert dry.exit_code == 0 and "olmoe bf16" in dry.stdout and not (tmp_path / "own" / "simulated").exists()
    plain = command()
    assert plain.exit_code == 0, plain.output
    assert "expected remaining regret" in plain.stdout and "agree with the fallback" in plain.stdout
    report = json.loads(command("--json").stdout)[0]
    assert report["timings"] == 0 and report["after"]["entries"]["verified"] >= 2
    assert json.loads(command("--dry-run", "--json").stdout)[0]["entries"] == report["after"]["entries"]
    chosen = choices(tmp_path / "own" / "simulated", tmp_path)
    bad = command("--json", *(a for i in sorted(set(chosen)) for a in ("--wrong", str(i))))
    (found,) = json.loads(bad.stdout)
    assert bad.exit_code == 1 and found["numbers"]["denied"]
    assert all(Tactic.parse(d["tactic"]) for d in found["numbers"]["denied"])


def choices(root: Path, tmp_path: Path) -> list[int]:
    (timings,) = load(root, "NVIDIA H200", "bf16", problems=[])
    (path,) = (tmp_path / "models").rglob("*.zip")
    made = choose(PerformanceModel.load(path), [OLMOE.shape], (1, 2), timings=timings)
    return [c.tactic_id for c in made if c.beats_fallback]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--quant", "fp8"), "NVIDIA H200 fp8: no model for FlashInfer 0.7.4"),
        (("--threshold", "1"), "--threshold"),
        (("--budget", "0"), "--budget"),
        (("--device", "H20"), "H20"),
    ],
    ids=repr,
)
def test_wrong_usage_is_one_line(command: Run, options: tuple[str, ...], says: str) -> None:
    result = command(*options)
    assert result.exit_code == 2 and says in result.stderr and result.stderr.count("error: ") == 1


def test_a_damaged_list_of_denied_tactics_stops_the_command(command: Run, tmp_path: Path) -> None:
    path = DENIED.path(SIMULATED, tmp_path / "own" / "simulated")
    path.parent.mkdir(parents=True)
    path.write_bytes(b"{")
    result = command("--dry-run")
    assert result.exit_code == 2 and str(path) in result.stderr
