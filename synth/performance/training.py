"""Fitting a performance model: the constants first, then the forests on what they leave over.

The best of a bucket is only known where it was swept, so that the choice forest is fitted on swept buckets. Where there
are hardly any, a *residual* forest takes the place of both: it is fitted on all timings and reproduces them. It
corrects what is believed without timings: the analytic model, or one with the structure of another device.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from sklearn.ensemble import ExtraTreesRegressor

from synth.catalog.schemes import STAGES
from synth.errors import SynthError
from synth.performance.cells import Cells, swept_buckets
from synth.performance.features import REACH, expected, features
from synth.performance.forest import Forest
from synth.performance.geometry import Floats, Ints, least_by
from synth.performance.roofline import Roofline
from synth.timings.table import Timings, digest

if TYPE_CHECKING:
    from synth.performance.model import Analysis, PerformanceModel

#: Fewer swept buckets than this don't make a choice forest.
_LEAST_SWEPT = 24
#: … and neither do fewer shapes than this, where there is a structure to borrow: it knows more of other shapes.
_LEAST_SHAPES = 8
#: The residual forest of a device of which only a sample was timed: its trees reproduce every timing.
_SPARSE_TREES = 60
_SPARSE_FEATURES = 0.9


def fit(model: PerformanceModel, timings: Timings) -> None:
    """Fit a model to all rows of `timings`; see :meth:`synth.performance.model.PerformanceModel.fit`."""
    table = timings.averaged()
    if not len(table):
        raise SynthError(f"no timings to fit for {timings.origin.device} {timings.origin.quant}")
    model.bind(timings.origin, timings.table)
    fitted = np.unique(table.shape).tolist()
    model.shapes_ = tuple((timings.labels[i], str(timings.shapes[i])) for i in fitted)
    model.digest_ = digest(timings)
    cells = Cells.of(table)
    keys, bucket = table.buckets()
    swept = swept_buckets(table, keys, bucket)
    few_shapes = model.start is not None and len(np.unique(keys[swept, 0])) < _LEAST_SHAPES
    if swept.sum() < _LEAST_SWEPT or few_shapes:
        fit_sample(model, cells, table.ms, model.start or type(model).analytic(model.origin_, model.table))
        return
    swept_row = swept[bucket]
    relative_ms = np.log(table.ms / least_by(bucket, table.ms, len(keys))[bucket])
    lost = np.where(swept_row, np.minimum(relative_ms, REACH), 0.0)
    rng = np.random.default_rng(model.seed)
    fallback = np.isin(table.tactic, [model.table.fallback_id(stage) for stage in STAGES])
    keep = np.flatnonzero((lost < model.near) | fallback | (rng.random(len(table)) < model.far))
    # Slower timings don't shape the analytic constants.
    near = np.flatnonzero(lost < REACH)
    at = model.analyse(cells)
    model.roofline_ = Roofline.fit(
        at.work.select(near), cells.tactic[near], model.columns, model.hardware, table.ms[near], seed=model.seed
    )
    at = replace(at, ms=model.analytic_ms(at))
    relative = at.relative() if swept.all() else at.ms / _least_of_all(model, cells)[at.row]
    x = _inputs(model, at.select(keep), relative[keep])
    known = swept_row[keep]
    target = lost[keep][known] - expected(relative[keep][known])
    weight = np.exp(-5.0 * lost[keep][known])
    model.choice_ = _grow(model, x[known], target, weight, model.choice_trees, model.seed)
    model.time_ = _grow(model, x, np.log(table.ms[keep] / at.ms[keep]), None, model.time_trees, model.seed + 1)


def fit_sample(model: PerformanceModel, cells: Cells, ms: Floats, start: PerformanceModel) -> None:
    """Fit a bound model to timings spread over a device's cells, each timed once."""
    model.roofline_, model.borrowed_ = start.roofline_, start.borrowed_
    model.choice_, model.time_ = start.choice_, start.time_
    at = model.analyse(cells)
    if model.time_ is None:
        model.roofline_ = Roofline.fit(
            at.work, cells.tactic, model.columns, model.hardware, ms, seed=model.seed, start=start.roofline_
        )
        at = replace(at, ms=model.analytic_ms(at))
    x = _inputs(model, at, at.ms / _least_of_all(model, cells)[at.row])
    before = at.ms if model.time_ is None else _structural_ms(model, cells, at.row)
    forest = ExtraTreesRegressor(
        _SPARSE_TREES, max_features=_SPARSE_FEATURES, n_jobs=model.jobs, random_state=model.seed
    )
    model.residual_ = Forest.of(forest.fit(x, np.log(ms / before)).estimators_)


def _grow(
    model: PerformanceModel, x: NDArray[np.float32], y: Floats, weight: Floats | None, trees: int, seed: int
) -> Forest:
    forest = ExtraTreesRegressor(
        trees, min_samples_leaf=model.leaf, max_features=model.features, n_jobs=model.jobs, random_state=seed
    )
    return Forest.of(forest.fit(x, y, sample_weight=weight).estimators_)


def _inputs(model: PerformanceModel, at: Analysis, relative: Floats) -> NDArray[np.float32]:
    return features(at.sites, at.row, at.cells.tactic, at.work, relative, model.columns, model.hardware)


def _least_of_all(model: PerformanceModel, cells: Cells) -> Floats:
    """Return the least analytic time of all tactics at each of the cells' sites, shape (sites,)."""
    every = model.analyse(cells.beside_all(model.table))
    return least_by(every.row, every.ms, len(every.sites))


def _structural_ms(model: PerformanceModel, cells: Cells, row: Ints) -> Floats:
    """Return what the structure says of cells, asked beside all the other tactics of their sites."""
    every = model.analyse(cells.beside_all(model.table))
    ms, count = model.before_timings(every).ms, len(model.table)
    place = np.searchsorted(every.row * count + every.cells.tactic, row * count + cells.tactic)
    return np.asarray(ms[place])
