from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from synth.catalog.devices import get_device
from synth.errors import SynthError
from synth.performance.evaluation import Judge
from synth.performance.fitting import save
from synth.performance.held_out import Result, against_itself, against_table, hold_out, report
from synth.performance.model import Cells, PerformanceModel
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
    found = against_table(path, H200, quant, "0.7.4", models, problems)
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
    (result,) = against_table(path, H200, None, "0.7.4", models, problems)
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
    result = against_itself(part, by, lambda done, total: steps.append((done, total)))
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
        results.append(against_itself(part, "shape"))
    text = json.dumps(report(results))
    for result in results:
        assert json.dumps(result.evaluations[0].all.as_dict())[1:-1] in text


# --- what is stated of choices ---------------------------------------------------------------------------------------


def small() -> PerformanceModel:
    return PerformanceModel(choice_trees=6, time_trees=3, jobs=1)


def test_a_probability_is_stated_of_every_choice_of_a_swept_shape(few: Timings) -> None:
    first = few.shape[0]
    # One shape is a sample: nothing is stated of it, and it is predicted all the same.
    part = few.select((few.shape != first) | (np.arange(len(few)) % 3 == 0))
    found = hold_out(part, make=small)
    assert found.stated is not None and len(found.ms) == len(found.judge.timings)
    keys = found.judge.keys[found.judge.keys[:, 0] != first]
    assert sorted(map(tuple, found.stated.evaluation.keys.tolist())) == list(map(tuple, keys.tolist()))
    within = found.stated.within
    assert within.shape == (len(keys), 2) and (within[:, 1] >= within[:, 0]).all()
    assert ((within >= 0.0) & (within <= 1.0)).all()
    assert 1.0 < found.stated.evaluation.all.geomean < found.judge.evaluate("worst", 1.0 / found.ms).all.geomean


def test_probabilities_are_compared_with_what_happened(few: Timings) -> None:
    found = hold_out(few, make=small)
    reliability = found.reliability()
    assert found.stated is not None and list(reliability) == [0.01, 0.02]
    for margin, (stated, corrected) in reliability.items():
        hits = int((found.stated.evaluation.regrets <= 1.0 + margin).sum())
        for one in (stated, corrected):
            assert sum(one.count) == len(found.stated.within)
            assert sum(h * n for h, n in zip(one.happened, one.count, strict=True)) == pytest.approx(hits)


def test_nothing_is_stated_where_it_is_not_asked_for_or_nothing_was_swept(few: Timings) -> None:
    sampled = few.select(np.arange(len(few)) % 3 == 0)
    for found in (hold_out(few, make=small, stated=False), hold_out(sampled, make=small)):
        assert found.stated is None and found.reliability() == {}
