from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from sklearn.ensemble import ExtraTreesRegressor
from sklearn.tree import DecisionTreeRegressor

from synth.errors import SynthError
from synth.performance.forest import Forest

ROOT = Path(__file__).parent.parent.parent
KINDS = {"sizes": np.int32, "feature": np.uint8, "threshold": np.float32, "value": np.float16}
LEAF = 255


def data(rows: int = 800, columns: int = 6, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, columns)).astype(np.float32)
    return x, np.sin(3 * x[:, 0]) + x[:, 1] * x[:, 2] + 0.1 * rng.normal(size=rows)


def arrays(**changes: Any) -> dict[str, np.ndarray]:
    """A stump (x[1] <= 0.5: 1, else 2) and a single leaf (10), with changes."""
    plain = {"sizes": [3, 1], "feature": [1, LEAF, LEAF, LEAF], "threshold": [0.5], "value": [1.0, 2.0, 10.0]}
    return {name: np.array(value, dtype=KINDS[name]) for name, value in {**plain, **changes}.items()}


def walk(trees: Mapping[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    """Predict row by row from the definition alone: the j-th inner node's children are nodes 2j + 1 and 2j + 2."""
    out = np.empty((len(trees["sizes"]), len(x)))
    node = inner = leaf = 0
    for t, size in enumerate(trees["sizes"].tolist()):
        feature = trees["feature"][node : node + size].tolist()
        place = {j: k for k, j in enumerate(j for j in range(size) if feature[j] != LEAF)}
        values = {j: k for k, j in enumerate(j for j in range(size) if feature[j] == LEAF)}
        for i, row in enumerate(x):
            j = 0
            while feature[j] != LEAF:
                first = row[feature[j]] <= trees["threshold"][inner + place[j]]
                j = 2 * place[j] + (1 if first else 2)
            out[t, i] = trees["value"][leaf + values[j]]
        node, inner, leaf = node + size, inner + len(place), leaf + len(values)
    return out


def test_a_forest_by_hand() -> None:
    x = np.array([[0.0, 0.5], [9.0, 0.75]], dtype=np.float32)
    mean, sd = Forest.from_arrays(arrays(), 2).predict(x)
    assert mean.tolist() == [5.5, 6.0]
    assert sd.tolist() == [4.5, 4.0]


def test_packing_exact_thresholds_changes_only_the_values_precision() -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 40, size=(600, 5)).astype(np.float32)
    y = x[:, 0] / 7 - (x[:, 1] > 20) + rng.normal(size=600) / 5
    trees = [DecisionTreeRegressor(max_leaf_nodes=60, random_state=i).fit(x, y) for i in range(3)]
    mean, sd = Forest.of(trees).predict(x)
    each = np.array([tree.predict(x) for tree in trees])
    np.testing.assert_allclose(mean, each.mean(axis=0), atol=2e-3)
    np.testing.assert_allclose(sd, each.std(axis=0), atol=4e-3)


def test_packing_random_thresholds_changes_few_predictions() -> None:
    x, y = data(3000)
    fitted = ExtraTreesRegressor(8, min_samples_leaf=3, random_state=0).fit(x, y)
    mean, _ = Forest.of(fitted.estimators_).predict(x)
    assert np.quantile(np.abs(mean - fitted.predict(x)), 0.95) < 2e-3


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(2, 120))
def test_nodes_are_breadth_first(seed: int, trees: int, leaves: int) -> None:
    x, y = data(200, seed=seed)
    fitted = ExtraTreesRegressor(trees, max_leaf_nodes=leaves, random_state=seed).fit(x, y)
    forest = Forest.of(fitted.estimators_)
    expected = walk(forest.arrays(), x[:40])
    mean, sd = forest.predict(x[:40])
    np.testing.assert_allclose(mean, expected.mean(axis=0), atol=1e-12)
    np.testing.assert_allclose(sd, expected.std(axis=0), atol=1e-6)


def test_arrays_round_trip() -> None:
    x, y = data()
    forest = Forest.of(ExtraTreesRegressor(4, random_state=0).fit(x, y).estimators_)
    stored = forest.arrays()
    assert {name: a.dtype for name, a in stored.items()} == {name: np.dtype(kind) for name, kind in KINDS.items()}
    again = Forest.from_arrays(stored, 6)
    for a, b in zip(forest.predict(x), again.predict(x), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_constant_target_and_no_rows_are_fine() -> None:
    x, _ = data()
    forest = Forest.of(ExtraTreesRegressor(2, random_state=0).fit(x, np.ones(len(x))).estimators_)
    mean, sd = forest.predict(x)
    assert (mean == 1.0).all() and not sd.any()


@pytest.mark.parametrize("name", KINDS)
def test_a_missing_array_or_another_kind_is_refused(name: str) -> None:
    good = arrays()
    rest = {k: v for k, v in good.items() if k != name}
    wrong = np.float64 if name != "value" else np.float32
    for other in (None, good[name].astype(wrong), good[name][None], np.array(good[name][0])):
        bad = rest if other is None else {**rest, name: other}
        with pytest.raises(SynthError, match=name):
            Forest.from_arrays(bad, 2)


@pytest.mark.parametrize(
    "changes",
    [
        {"sizes": []},
        {"sizes": [4]},
        {"sizes": [3, 0]},
        {"sizes": [3, 2]},
        {"sizes": [5, -1]},
        {"sizes": [2, 2]},
        {"sizes": [1, 3]},
        {"sizes": [2**31 - 1, 1]},
        {"feature": [2, LEAF, LEAF, LEAF]},
        {"feature": [254, LEAF, LEAF, LEAF]},
        {"feature": [LEAF, 1, LEAF, LEAF]},
        {"feature": [LEAF, LEAF, LEAF, 1]},
        {"feature": [LEAF, LEAF, LEAF, LEAF]},
        {"feature": [], "sizes": [], "threshold": [], "value": []},
        {"threshold": []},
        {"threshold": [0.5, 0.5]},
        {"threshold": [np.nan]},
        {"threshold": [np.inf]},
        {"value": [1.0, 2.0]},
        {"value": [1.0, 2.0, np.nan]},
        {"value": [1.0, 2.0, -np.inf]},
    ],
    ids=str,
)
def test_arrays_that_contradict_each_other_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(SynthError) as e:
        Forest.from_arrays(arrays(**changes), 2)
    assert "\n" not in str(e.value)


# Traversal is compiled code without bounds checks: what passes the checks is predicted in a process of its own.
_HOSTILE = """
import numpy as np
from synth.errors import SynthError
from synth.performance.forest import Forest

rng = np.random.default_rng(0)
x = rng.normal(size=(16, 4)).astype(np.float32)
good = refused = 0
for i in range(3000):
    sizes = rng.choice([1, 1, 3, 5, 7, 9], size=rng.integers(1, 4)).astype(np.int32)
    if rng.random() < 0.1:
        sizes[rng.integers(len(sizes))] = rng.integers(-(2**31), 2**31)
    n = int(np.clip(sizes.astype(np.int64), 0, 40).sum())
    feature = np.where(rng.random(n) < 0.45, rng.integers(0, 4, n), 255).astype(np.uint8)
    if rng.random() < 0.5:
        at = 0
        for s in np.clip(sizes, 0, 40).tolist():  # as many inner nodes as a tree has, anywhere
            part = np.r_[np.zeros(s // 2), np.full(s - s // 2, 255)]
            rng.shuffle(part[1:])
            feature[at : at + s] = part
            at += s
    if rng.random() < 0.1 and n:
        feature[rng.integers(n)] = rng.integers(0, 256)
    inner = int((feature != 255).sum()) + int(rng.random() < 0.05)
    arrays = {
        "sizes": sizes,
        "feature": feature,
        "threshold": rng.normal(size=inner).astype(np.float32),
        "value": rng.normal(size=n - inner if n > inner else 0).astype(np.float16),
    }
    try:
        forest = Forest.from_arrays(arrays, 4)
    except SynthError:
        refused += 1
        continue
    good += 1
    mean, sd = forest.predict(x)
    assert np.isfinite(mean).all() and np.isfinite(sd).all()
    assert np.abs(mean).max() <= np.abs(arrays["value"].astype(float)).max() + 1e-9
print(good, refused)
"""


def test_random_arrays_are_refused_or_predict_within_their_values() -> None:
    done = subprocess.run([sys.executable, "-c", _HOSTILE], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    good, refused = map(int, done.stdout.split())
    assert good > 100 and refused > 100


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_arrays_of_the_right_kinds_are_checked(draw: st.DataObject) -> None:
    lengths = st.integers(0, 9)
    made = {name: draw.draw(npst.arrays(kind, lengths)) for name, kind in KINDS.items()}
    try:
        forest = Forest.from_arrays(made, 4)
    except SynthError as e:
        assert "\n" not in str(e)
        return
    assert forest.sizes.sum() == len(forest.feature)
