from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from synth.catalog.devices import get_device
from synth.choosing.evaluating import Result, against_table, held_out, plot, report
from synth.errors import SynthError
from synth.performance.evaluation import Judge
from synth.performance.fitting import save
from synth.performance.model import Cells, PerformanceModel
from synth.reporting.console import study as study_table
from synth.timings.folders import load
from synth.timings.table import Timings

SHIPPED = Path(__file__).parents[2] / "measurements"
H200 = get_device("NVIDIA H200")
COLUMNS = "pass,shape,dtype,hidden,inter,experts,top_k,ep_size,gated,stage,tokens,tactic,ms"
UNSEEN, SEEN = "olmoe", "mixtral-8x7b"


@pytest.fixture(scope="module")
def timings() -> dict[str, Timings]:
    return {t.origin.quant: t for t in load(SHIPPED, "NVIDIA H200", problems=[])}


@pytest.fixture(scope="module")
def models(timings: dict[str, Timings], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Fitted models that have never seen OLMoE."""
    folder = tmp_path_factory.mktemp("models")
    for t in timings.values():
        keep = (t.shape != t.labels.index(UNSEEN)) & np.isin(t.tokens, [1, 16, 128, 1024])
        save(PerformanceModel(choice_trees=8, time_trees=3).fit(t.select(keep)), folder)
    return [folder]


def rows_of(
    t: Timings, labels: Iterable[str], tokens: Iterable[int] = (16, 1024), first_only: bool = False
) -> list[str]:
    """Return a part of the shipped timings as rows of a flat table."""
    wanted = [t.labels.index(label) for label in labels]
    keep = np.isin(t.shape, wanted) & np.isin(t.tokens, list(tokens))
    t = t.select(keep & (t.pass_ == 1) if first_only else keep)
    rows = []
    columns = (t.shape, t.pass_, t.stage, t.tokens, t.tactic, t.ms)
    for index, pass_, stage, m, tactic, ms in zip(*(c.tolist() for c in columns), strict=True):
        s = t.shapes[index]
        rows.append(
            f"{pass_},{t.labels[index]},{t.origin.quant},{s.hidden},{s.inter},{s.experts},{s.top_k},"
            f"{s.ep_size},{int(s.gated)},{stage},{m},{tactic},{ms}"
        )
    return rows


def write(path: Path, rows: list[str], columns: str = COLUMNS) -> Path:
    data = "\n".join([columns, *rows, ""]).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def score(path: Path, models: list[Path], quant: str | None = None) -> list[Result]:
    problems: list[object] = []
    found = against_table(path, H200, quant, "0.7.4", models, problems=problems)
    assert problems == []
    return found


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz"])
def test_unseen_shapes_are_scored_by_the_fitted_model(
    timings: dict[str, Timings], models: list[Path], tmp_path: Path, name: str
) -> None:
    t = timings["bf16"]
    (result,) = score(write(tmp_path / name, rows_of(t, [UNSEEN])), models)
    own, fallback = result.evaluations
    assert result.refused == () and name in result.title
    part = t.select((t.shape == t.labels.index(UNSEEN)) & np.isin(t.tokens, [16, 1024]))
    judge = Judge(part)
    model = PerformanceModel.load(next(models[0].rglob("bf16.zip")))
    expected = judge.evaluate("model", model.predict(Cells.of(judge.timings)).ms)
    np.testing.assert_allclose(own.regrets, expected.regrets)
    assert own.all.count == 4 and set(own.shapes()) == {UNSEEN}
    assert own.second_pass() is not None
    assert fallback.name == "fallback" and fallback.all.geomean > 2 > own.all.geomean


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz"])
def test_shapes_in_the_training_data_are_named_and_not_counted(
    timings: dict[str, Timings], models: list[Path], tmp_path: Path, name: str
) -> None:
    both = rows_of(timings["bf16"], [SEEN, UNSEEN])
    alone = score(write(tmp_path / "alone.csv", rows_of(timings["bf16"], [UNSEEN])), models)
    (result,) = score(write(tmp_path / name, both), models)
    assert result.refused == (SEEN,)
    assert result.evaluations[0].as_dict() == alone[0].evaluations[0].as_dict()
    assert SEEN not in json.dumps({k: v for k, v in report([result]).items() if k not in ("refused", "quants")})
    assert report([result])["refused"] == [SEEN]


def test_another_name_for_a_seen_shape_does_not_make_it_unseen(
    timings: dict[str, Timings], models: list[Path], tmp_path: Path
) -> None:
    renamed = [row.replace(SEEN, "brand-new") for row in rows_of(timings["bf16"], [SEEN])]
    with pytest.raises(SynthError, match=r"brand-new.*training data"):
        score(write(tmp_path / "t.csv", renamed), models)


def test_a_table_of_seen_shapes_alone_is_refused(
    timings: dict[str, Timings], models: list[Path], tmp_path: Path
) -> None:
    path = write(tmp_path / "t.csv", rows_of(timings["bf16"], [SEEN, "glm-4.5-air"]))
    with pytest.raises(SynthError, match=f"glm-4.5-air.*{SEEN}.*nothing to score as unseen") as e:
        score(path, models)
    assert str(path) in str(e.value) and "\n" not in str(e.value)


def test_each_quantization_is_scored_by_its_own_model(
    timings: dict[str, Timings], models: list[Path], tmp_path: Path
) -> None:
    rows = [*rows_of(timings["bf16"], [UNSEEN]), *rows_of(timings["fp8"], [UNSEEN])]
    path = write(tmp_path / "t.csv", rows)
    assert {r.quant for r in score(path, models)} == {"bf16", "fp8"}
    (fp8,) = score(path, models, "fp8")
    assert fp8.quant == "fp8" and fp8.evaluations[0].all.count == 4
    with pytest.raises(SynthError, match="no nvfp4 rows"):
        score(path, models, "nvfp4")


def test_a_quantization_that_was_refused_whole_is_named_too(
    timings: dict[str, Timings], models: list[Path], tmp_path: Path
) -> None:
    rows = [*rows_of(timings["bf16"], [UNSEEN]), *rows_of(timings["fp8"], ["mixtral-8x7b-tp4"])]
    (result,) = score(write(tmp_path / "t.csv", rows), models)
    assert result.quant == "bf16" and result.refused == ("mixtral-8x7b-tp4",)


def test_the_order_of_rows_and_columns_changes_nothing(
    timings: dict[str, Timings], models: list[Path], tmp_path: Path
) -> None:
    rows = rows_of(timings["bf16"], [UNSEEN])
    straight = report(score(write(tmp_path / "t.csv", rows), models))
    mixed = [rows[i] for i in np.random.default_rng(0).permutation(len(rows))]
    turned = [",".join(reversed(row.split(","))) for row in mixed]
    columns = ",".join(reversed(COLUMNS.split(",")))
    other = report(score(write(tmp_path / "t.csv", turned, columns), models))
    assert straight["all"] == pytest.approx(other["all"])


def test_a_bad_row_is_reported_and_the_others_are_scored(
    timings: dict[str, Timings], models: list[Path], tmp_path: Path
) -> None:
    rows = rows_of(timings["bf16"], [UNSEEN], first_only=True)
    path = write(tmp_path / "t.csv", [*rows, rows[0], rows[0].rpartition(",")[0] + ",fast"])
    problems: list[object] = []
    (result,) = against_table(path, H200, None, "0.7.4", models, problems=problems)
    assert result.evaluations[0].all.count == 4
    assert [f"{path}:{len(rows) + 2 + i}" in str(p) for i, p in enumerate(problems)] == [True, True]


def test_without_a_model_nothing_is_scored(timings: dict[str, Timings], tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", rows_of(timings["bf16"], [UNSEEN]))
    with pytest.raises(SynthError, match=r"no bf16 model for NVIDIA H200.*synth fit"):
        score(path, [tmp_path])


def test_a_model_of_another_quantization_in_its_place_is_refused(
    timings: dict[str, Timings], models: list[Path], tmp_path: Path
) -> None:
    path = write(tmp_path / "t.csv", rows_of(timings["bf16"], [UNSEEN]))
    for file in models[0].rglob("fp8.zip"):
        place = tmp_path / "models" / file.relative_to(models[0]).with_name("bf16.zip")
        place.parent.mkdir(parents=True)
        place.write_bytes(file.read_bytes())
    with pytest.raises(SynthError, match="fp8"):
        score(path, [tmp_path / "models"])


@pytest.mark.parametrize("by", ["family", "shape"])
def test_the_report_has_what_was_promised(timings: dict[str, Timings], by: str) -> None:
    t = timings["bf16"]
    wanted = [t.labels.index(x) for x in (UNSEEN, SEEN, "mixtral-8x7b-tp4")]
    steps: list[tuple[int, int]] = []
    part = t.select(np.isin(t.shape, wanted) & np.isin(t.tokens, [16, 1024]))
    result = held_out(part, by, lambda done, total: steps.append((done, total)))
    plain = json.loads(json.dumps(report([result]), allow_nan=False))
    for key in ("all", "gemm1", "gemm2"):
        assert set(plain[key]) == {"geomean", "p95", "p99", "max", "count"}
        assert all(v >= 1 for v in plain[key].values())
    assert set(plain["shapes"]) == {UNSEEN, SEEN, "mixtral-8x7b-tp4"}
    assert set(plain["shapes"][UNSEEN]) == set(plain["all"])
    assert plain["gemm1"]["count"] + plain["gemm2"]["count"] == plain["all"]["count"] == 12
    assert set(plain["baselines"]) == {"fallback", "best single tactic", "nearest shape", "tokens per expert"}
    assert plain["quants"]["bf16"]["all"] == plain["all"]
    assert steps[-1] == ((2, 2) if by == "family" else (3, 3))


def test_bf16_stands_on_top_of_the_report(timings: dict[str, Timings], models: list[Path], tmp_path: Path) -> None:
    rows = [*rows_of(timings["fp8"], [UNSEEN]), *rows_of(timings["bf16"], [UNSEEN])]
    both = score(write(tmp_path / "t.csv", rows), models)
    for results in (both, both[::-1]):
        plain = report(results)
        assert plain["all"] == plain["quants"]["bf16"]["all"]
        assert set(plain["quants"]) == {"bf16", "fp8"}
    (fp8,) = [r for r in both if r.quant == "fp8"]
    assert report([fp8])["all"] == fp8.evaluations[0].all.as_dict()


def test_two_results_of_one_quantization_are_both_reported(timings: dict[str, Timings]) -> None:
    """Timings under two policies are two results."""
    t = timings["bf16"]
    wanted = [t.labels.index(x) for x in (UNSEEN, SEEN, "mixtral-8x7b-tp4")]
    results = []
    for tokens in (16, 1024):
        part = t.select(np.isin(t.shape, wanted) & (t.tokens == tokens))
        results.append(held_out(part, "shape"))
    text = json.dumps(report(results))
    for result in results:
        assert json.dumps(result.evaluations[0].all.as_dict())[1:-1] in text


# --- the study -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def studied(timings: dict[str, Timings]) -> Result:
    """Three shapes of two families in two buckets; all of olmoe was swept twice and more."""
    t = timings["bf16"]
    wanted = [t.labels.index(x) for x in (UNSEEN, SEEN, "nemotron-3-super-tp4")]
    return held_out(t.select(np.isin(t.shape, wanted) & np.isin(t.tokens, [16, 1024])), "family", quick=False, seeds=1)


def test_a_study_has_both_tables_and_both_scopes(studied: Result) -> None:
    study = studied.study
    assert study is not None
    # Two of the three are of the first sweeps.
    assert list(study.known) == list(study.new) == ["all 3 shapes", "the 2 shapes of the first sweeps"]
    ways = {("active", 0), ("stratified", 0), ("random", 0)}
    for points in study.known.values():
        assert {(p.way, p.seed) for p in points if p.mark > 0} == ways
        assert [p.way for p in points if p.mark == 0] == ["active"]
    for points in study.new.values():
        assert {(p.way, p.seed) for p in points} == ways
    first, part = (study.known[name][0] for name in study.known)
    assert first.evaluation.all.count == 12 and part.evaluation.all.count == 8


def test_a_study_is_plain_json(studied: Result) -> None:
    plain = json.loads(json.dumps(report([studied]), allow_nan=False))["study"]
    assert {p["way"] for p in plain["known_device"]["all 3 shapes"]} == {"active", "stratified", "random"}
    assert plain["known_device"]["all 3 shapes"][0]["all"]["count"] == 12
    assert set(plain["reliability"]) == {"0.01", "0.02"} and set(plain["reliability"]["0.01"]) == {
        "stated",
        "corrected",
    }
    assert [c["share"] for c in plain["coverage_90"]] == [0.0, 0.01, 0.05]
    assert len(plain["worst"]) == 10 and plain["worst"][0]["regret"] >= plain["worst"][-1]["regret"] >= 1.0
    assert {"kind", "of_regret", "geomeans"} <= set(plain["kinds"][0])


def test_what_two_passes_choose_is_compared(studied: Result) -> None:
    assert studied.study is not None
    stability = studied.study.stability
    assert stability is not None and stability.count == 4
    assert 0.0 <= stability.equal <= stability.as_good <= 1.0


def test_the_zero_shot_table_is_the_same_without_a_study(studied: Result, timings: dict[str, Timings]) -> None:
    t = timings["bf16"]
    wanted = [t.labels.index(x) for x in (UNSEEN, SEEN, "nemotron-3-super-tp4")]
    quick = held_out(t.select(np.isin(t.shape, wanted) & np.isin(t.tokens, [16, 1024])), "family")
    assert quick.study is None
    for a, b in zip(quick.evaluations, studied.evaluations, strict=True):
        assert a.as_dict() == b.as_dict()


def test_a_study_is_printed_and_drawn(studied: Result, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert studied.study is not None
    study_table("H200", studied.study)
    out = capsys.readouterr().out
    for words in ("timings of an unseen shape", "timings of a new device", "where the regret is", "the worst choices"):
        assert words in out
    names = {p.name for p in plot([studied], tmp_path)}
    assert {"learning-curve-shape-bf16.svg", "learning-curve-device-bf16.png", "reliability-bf16.svg"} <= names
    assert all((tmp_path / name).stat().st_size for name in names)


def test_sampled_shapes_alone_are_not_studied(timings: dict[str, Timings]) -> None:
    t = timings["bf16"]
    wanted = [t.labels.index(x) for x in (UNSEEN, SEEN)]
    part = t.select(np.isin(t.shape, wanted) & (t.tokens == 16) & (t.tactic % 3 == 0))
    assert held_out(part, "family", quick=False).study is None
