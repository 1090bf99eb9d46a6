"""A fitted forest as a few plain arrays: small files, no pickle, scikit-learn's own traversal.

Trees are stored breadth first, so that the children of a tree's j-th inner node are its nodes ``2j + 1`` and
``2j + 2``: no pointers to store, and none that a damaged file could get wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from synth.errors import SynthError
from synth.performance.geometry import Floats

if TYPE_CHECKING:
    from sklearn.tree import DecisionTreeRegressor

#: Marks a leaf in the array of features.
LEAF = 255
#: Thresholds keep this many bits of a float32's mantissa: they are random draws, and zeros compress.
_DROPPED_BITS = 12
#: Two threads are all that one prediction uses: a forest is small and its users run on laptops.
_THREADS = 2


@dataclass(frozen=True)
class Forest:
    """Regression trees.

    Attributes
    ----------
    sizes : ndarray of int32, shape (trees,)
        Nodes of each tree.
    feature : ndarray of uint8, shape (nodes,)
        Feature that an inner node splits on, 255 for a leaf; trees one after another, each breadth first.
    threshold : ndarray of float32, shape (inner nodes,)
        An inner node sends ``x <= threshold`` to its first child.
    value : ndarray of float16, shape (leaves,)
        What a leaf predicts.
    features : int
        Number of input columns.
    """

    sizes: NDArray[np.int32]
    feature: NDArray[np.uint8]
    threshold: NDArray[np.float32]
    value: NDArray[np.float16]
    features: int

    def __post_init__(self) -> None:
        _check(self)

    @cached_property
    def _trees(self) -> list[Any]:
        return _build(self)

    @classmethod
    def of(cls, estimators: Sequence[DecisionTreeRegressor]) -> Forest:
        """Pack fitted scikit-learn trees."""
        feature, threshold, value, sizes = [], [], [], []
        for estimator in estimators:
            tree = estimator.tree_
            order = _breadth_first(tree.children_left, tree.children_right)
            f = tree.feature[order]
            inner = f >= 0
            feature.append(np.where(inner, f, LEAF).astype(np.uint8))
            threshold.append(_rounded(tree.threshold[order][inner].astype(np.float32)))
            value.append(tree.value[order][~inner, 0, 0].astype(np.float16))
            sizes.append(len(order))
        return cls(
            np.array(sizes, dtype=np.int32),
            np.concatenate(feature),
            np.concatenate(threshold),
            np.concatenate(value),
            int(estimators[0].n_features_in_),
        )

    def predict(self, x: NDArray[np.float32]) -> tuple[Floats, Floats]:
        """Return mean and standard deviation over the trees.

        Parameters
        ----------
        x : ndarray of float32, shape (cells, features)

        Returns
        -------
        mean, sd : ndarray of float64, shape (cells,)
        """
        x = np.ascontiguousarray(x, dtype=np.float32)
        trees = self._trees

        def part(mine: list[Any]) -> tuple[Floats, Floats]:
            total = np.zeros(len(x))
            squares = np.zeros_like(total)
            for tree in mine:
                y = tree.predict(x).ravel()
                total += y
                squares += y * y
            return total, squares

        # The split of the trees is fixed, so that sums don't depend on the number of cores.
        parts = [trees[i::_THREADS] for i in range(min(_THREADS, len(trees)))]
        with ThreadPoolExecutor(_THREADS) as pool:
            sums = list(pool.map(part, parts))
        mean = np.sum([s[0] for s in sums], axis=0) / len(trees)
        variance = np.sum([s[1] for s in sums], axis=0) / len(trees) - mean * mean
        return mean, np.sqrt(np.maximum(variance, 0.0))

    def each(self, x: NDArray[np.float32]) -> Floats:
        """Return what each tree predicts, shape (trees, cells)."""
        x = np.ascontiguousarray(x, dtype=np.float32)
        trees = self._trees
        with ThreadPoolExecutor(_THREADS) as pool:
            return np.array(list(pool.map(lambda tree: tree.predict(x).ravel(), trees)))

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the arrays that a file holds; :meth:`from_arrays` reads them."""
        return {"sizes": self.sizes, "feature": self.feature, "threshold": self.threshold, "value": self.value}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]], features: int) -> Forest:
        """Rebuild a forest.

        Raises
        ------
        SynthError
            When the arrays don't make a forest.
        """
        kinds = {"sizes": np.int32, "feature": np.uint8, "threshold": np.float32, "value": np.float16}
        for name, kind in kinds.items():
            if name not in arrays or arrays[name].dtype != kind or arrays[name].ndim != 1:
                raise SynthError(f"its forest's {name} is missing or of the wrong kind")
        sizes, feature, threshold, value = (np.ascontiguousarray(arrays[name]) for name in kinds)
        return cls(sizes, feature, threshold, value, features)


def _breadth_first(left: NDArray[np.int64], right: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the nodes of one tree level by level."""
    levels = [np.zeros(1, dtype=np.int64)]
    while True:
        parents = levels[-1][left[levels[-1]] >= 0]
        if not len(parents):
            return np.concatenate(levels)
        levels.append(np.column_stack([left[parents], right[parents]]).ravel())


def _rounded(threshold: NDArray[np.float32]) -> NDArray[np.float32]:
    bits = threshold.view(np.uint32)
    half = np.uint32(1 << (_DROPPED_BITS - 1))
    return ((bits + half) & np.uint32(~((1 << _DROPPED_BITS) - 1) & 0xFFFFFFFF)).view(np.float32)


def _check(forest: Forest) -> None:
    """Check every index that scikit-learn's traversal follows; this needs no scikit-learn."""
    sizes, feature, value = forest.sizes.astype(np.int64), forest.feature, forest.value
    inner = feature != LEAF
    if (
        not len(sizes)
        or sizes.min() < 1
        or sizes.sum() != len(feature)
        or inner.sum() != len(forest.threshold)
        or (~inner).sum() != len(value)
        or (inner.any() and feature[inner].max() >= forest.features)
        or not np.isfinite(forest.threshold).all()
        or not np.isfinite(value).all()
    ):
        raise SynthError("its forest's arrays contradict each other")
    for mine, child, _, _ in _split(forest):
        if len(mine) != 2 * int(mine.sum()) + 1 or (child[mine] <= np.flatnonzero(mine)).any():
            raise SynthError("its forest's trees are not trees")


def _split(forest: Forest) -> Iterator[tuple[NDArray[np.bool_], NDArray[np.int64], slice, slice]]:
    """Yield of each tree which nodes are inner ones, their left children, and where its nodes and thresholds are."""
    inner = forest.feature != LEAF
    ends = np.cumsum(forest.sizes.astype(np.int64))
    inner_ends = np.concatenate([[0], np.cumsum(inner)])
    for start, end in zip(ends - forest.sizes, ends, strict=True):
        mine = inner[start:end]
        yield mine, 2 * (np.cumsum(mine) - mine) + 1, slice(start, end), slice(inner_ends[start], inner_ends[end])


def _build(forest: Forest) -> list[Any]:
    """Make scikit-learn trees of checked arrays."""
    from sklearn.tree import DecisionTreeRegressor
    from sklearn.tree._tree import Tree

    # One tiny tree tells how this scikit-learn lays out a node.
    sample = DecisionTreeRegressor().fit(np.zeros((1, forest.features)), np.zeros(1)).tree_
    layout = sample.__getstate__()["nodes"].dtype
    trees = []
    for mine, child, at, inner in _split(forest):
        n = len(mine)
        nodes = np.zeros(n, dtype=layout)
        nodes["left_child"] = np.where(mine, child, -1)
        nodes["right_child"] = np.where(mine, child + 1, -1)
        nodes["feature"] = np.where(mine, forest.feature[at].astype(np.int64), -2)
        nodes["threshold"][mine] = forest.threshold[inner]
        nodes["n_node_samples"] = 1
        nodes["weighted_n_node_samples"] = 1.0
        values = np.zeros((n, 1, 1))
        values[~mine, 0, 0] = forest.value[at.start - inner.start : at.stop - inner.stop]
        tree = Tree(forest.features, np.ones(1, dtype=np.intp), 1)
        tree.__setstate__({"max_depth": int(n), "node_count": int(n), "nodes": nodes, "values": values})
        trees.append(tree)
    return trees
