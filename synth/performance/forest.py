"""A fitted forest as a few plain arrays: small files, no pickle, and predictions without scikit-learn.

Trees are stored breadth first, so that the children of a tree's j-th inner node are its nodes ``2j + 1`` and
``2j + 2``: no pointers to store, and none that a damaged file could get wrong.

All rows walk down a tree together, one level at a time. A node is one integer that holds its threshold, its first child
and its feature, so that a step is two look-ups and a few operations on whole arrays.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from synth.errors import SynthError
from synth.performance.geometry import Floats, Ints

if TYPE_CHECKING:
    from sklearn.tree import DecisionTreeRegressor

#: Marks a leaf in the array of features.
LEAF = 255
#: Thresholds keep this many bits of a float32's mantissa: they are random draws, and zeros compress.
_DROPPED_BITS = 12
#: Bits of a node's integer: feature, first child, and above them the threshold.
_FEATURE_BITS, _CHILD_BITS = 8, 24
#: Rows that walk together: enough to hide the overhead of a step, few enough for the processor's cache.
_AT_ONCE = 1 << 15
#: Rows that have arrived are set aside after every so many levels, and not before this one.
_EVERY, _NOT_BEFORE = 3, 9
_KINDS = {"sizes": np.int32, "feature": np.uint8, "threshold": np.float32, "value": np.float16}


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
        object.__setattr__(self, "_trees", _trees(self))

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
        # Summed in halves: shipped models and configs are made of these very sums.
        total, squares = np.zeros((2, len(x))), np.zeros((2, len(x)))
        for tree, rows, y in self._walks(x):
            total[tree % 2, rows] += y
            squares[tree % 2, rows] += y * y
        mean = total.sum(axis=0) / len(self.sizes)
        variance = squares.sum(axis=0) / len(self.sizes) - mean * mean
        return mean, np.sqrt(np.maximum(variance, 0.0))

    def each(self, x: NDArray[np.float32]) -> Floats:
        """Return what each tree predicts, shape (trees, cells)."""
        found = np.empty((len(self.sizes), len(x)))
        for tree, rows, y in self._walks(x):
            found[tree, rows] = y
        return found

    def _walks(self, x: NDArray[np.float32]) -> Iterator[tuple[int, slice, Floats]]:
        """Yield the number of a tree, some rows, and what it predicts of them."""
        trees: list[tuple[Ints, Floats]] = self._trees  # type: ignore[attr-defined]
        for start in range(0, len(x), _AT_ONCE):
            rows = slice(start, start + _AT_ONCE)
            codes = _codes(x[rows].T)
            for tree, (nodes, value) in enumerate(trees):
                yield tree, rows, value[_leaves(nodes, codes.ravel(), codes.shape[1])]

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the arrays that a file holds; :meth:`from_arrays` reads them."""
        return {name: getattr(self, name) for name in _KINDS}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]], features: int) -> Forest:
        """Rebuild a forest.

        Raises
        ------
        SynthError
            When the arrays don't make a forest.
        """
        for name, kind in _KINDS.items():
            if name not in arrays or arrays[name].dtype != kind or arrays[name].ndim != 1:
                raise SynthError(f"its forest's {name} is missing or of the wrong kind")
        sizes, feature, threshold, value = (np.ascontiguousarray(arrays[name]) for name in _KINDS)
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


def _trees(forest: Forest) -> list[tuple[Ints, Floats]]:
    """Return each tree's nodes as integers, and their values, having checked every index that a walk follows."""
    sizes, feature, value = forest.sizes.astype(np.int64), forest.feature, forest.value
    inner = feature != LEAF
    if (
        not len(sizes)
        or sizes.min() < 1
        or sizes.max() >= 1 << _CHILD_BITS
        or sizes.sum() != len(feature)
        or inner.sum() != len(forest.threshold)
        or (~inner).sum() != len(value)
        or (inner.any() and feature[inner].max() >= forest.features)
        or not np.isfinite(forest.threshold).all()
        or not np.isfinite(value).all()
    ):
        raise SynthError("its forest's arrays contradict each other")
    ends = np.cumsum(sizes)
    starts = ends - sizes
    before = np.concatenate([[0], np.cumsum(inner)])
    place = np.arange(len(inner)) - np.repeat(starts, sizes)
    child = 2 * (before[:-1] - np.repeat(before[starts], sizes)) + 1
    if (sizes != 2 * (before[ends] - before[starts]) + 1).any() or (child <= place)[inner].any():
        raise SynthError("its forest's trees are not trees")
    # Nothing exceeds a leaf's threshold, so that whoever arrives there stays.
    threshold = np.full(len(inner), np.iinfo(np.int32).max, dtype=np.int64)
    threshold[inner] = _codes(forest.threshold)
    nodes = threshold << (_FEATURE_BITS + _CHILD_BITS)
    nodes |= np.where(inner, child, place) << _FEATURE_BITS
    nodes |= np.where(inner, feature, 0)
    values = np.zeros(len(inner))
    values[~inner] = value
    return [(nodes[a:b], values[a:b]) for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]


def _codes(x: NDArray[np.float32]) -> NDArray[np.int32]:
    """Return integers in the order of some numbers."""
    # Adding zero makes one zero of two.
    bits = (np.ascontiguousarray(x, dtype=np.float32) + np.float32(0.0)).view(np.int32)
    return bits ^ ((bits >> 31) & np.int32(np.iinfo(np.int32).max))


def _leaves(nodes: Ints, codes: NDArray[np.int32], rows: int) -> Ints:
    """Return the leaf of a tree where each row arrives, shape (rows,).

    Parameters
    ----------
    nodes : ndarray of int64, shape (nodes,)
    codes : ndarray of int32, shape (features * rows,)
        The rows' features, one after another.
    """
    found = np.empty(rows, dtype=np.int64)
    row, at = np.arange(rows), np.zeros(rows, dtype=np.int64)
    for level in itertools.count(1):
        node = nodes.take(at, mode="clip")
        place = node & ((1 << _FEATURE_BITS) - 1)
        place *= rows
        place += row
        # -1 where the row's number exceeds the threshold, so that it goes to the second child.
        beyond = node >> (_FEATURE_BITS + _CHILD_BITS)
        beyond -= codes.take(place, mode="clip")
        beyond >>= 63
        node >>= _FEATURE_BITS
        node &= (1 << _CHILD_BITS) - 1
        node -= beyond
        if level >= _NOT_BEFORE and level % _EVERY == 0:
            moving = np.flatnonzero(node != at)
            found[row] = node
            if not len(moving):
                break
            row, node = row[moving], node[moving]
        at = node
    return found
