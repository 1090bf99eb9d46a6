"""Uncertainty that is true: what is stated is compared with what happened on shapes held out, and corrected.

Two things are stated of a choice: an interval for times, and the probability that it is near the best. Both are
corrected by what the other families say when they are judged, so that no family judges its own correction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from synth.performance.geometry import Floats
from synth.performance.model import PerformanceModel

#: The central share of a normal distribution within 1.645 standard deviations.
INTERVAL = 0.90
INTERVAL_SD = 1.6449
#: Bounds of stated probabilities that are counted together.
_EDGES = (0.0, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99)
#: Probabilities are estimated from some hundred draws: 0 and 1 stand for this far from them.
_LEAST = 0.001


def calibrated_probability(model: PerformanceModel, probability: Floats, margin: float) -> Floats:
    """Return the probability that choices are within `margin` of the best, corrected by what held-out shapes showed.

    Parameters
    ----------
    model : PerformanceModel
        As fitted; one without calibration leaves probabilities as they are.
    probability : ndarray of float64
        As :class:`synth.performance.posterior.Outlook` states it.
    margin : float
        One of :data:`synth.performance.posterior.NEAR`.
    """
    names = _names(margin)
    if not all(name in model.calibration_ for name in names):
        return probability
    return corrected(probability, (model.calibration_[names[0]], model.calibration_[names[1]]))


def learn(within: Floats, regrets: Floats, margins: Sequence[float]) -> dict[str, float]:
    """Return a model's ``calibration_``, from its choices on shapes held out.

    Parameters
    ----------
    within : ndarray of float64, shape (choices, margins)
        Stated probabilities.
    regrets : ndarray of float64, shape (choices,)
        What the choices cost.
    margins : sequence of float
    """
    found: dict[str, float] = {}
    for i, margin in enumerate(margins):
        found.update(zip(_names(margin), correction(within[:, i], regrets <= 1.0 + margin), strict=True))
    return {name: float(f"{value:.4g}") for name, value in found.items()}


def _names(margin: float) -> tuple[str, str]:
    return f"within_{margin:g}_intercept", f"within_{margin:g}_slope"


def interval_factor(error: Floats) -> float:
    """Return the factor for standard deviations that makes 1.645 of them cover 90 % of the errors."""
    return float(np.quantile(np.abs(error), INTERVAL)) / INTERVAL_SD


def covered(error: Floats, family: NDArray[np.str_]) -> float:
    """Return the share of errors inside 90 % intervals when each family's factor comes from the others.

    Parameters
    ----------
    error : ndarray of float64, shape (errors,)
        In stated standard deviations.
    family : ndarray of str, shape (errors,)
    """
    return float((cross_fitted(partial(_scaled, np.abs(error)), family) <= INTERVAL_SD).mean())


def _scaled(error: Floats, rows: NDArray[np.bool_]) -> Callable[[NDArray[np.bool_]], Floats]:
    factor = interval_factor(error[rows])
    return lambda mine: error[mine] / factor


def correction(probability: Floats, hit: NDArray[np.bool_]) -> tuple[float, float]:
    """Return intercept and slope on the logit that suit stated probabilities to what happened (Platt's scaling).

    The slope is not negative. Where there is next to nothing to learn from, no correction is the answer.
    """
    # Not with the module: only fitting takes its time.
    from scipy.optimize import minimize
    from scipy.special import logit

    x = logit(np.clip(probability, _LEAST, 1.0 - _LEAST))
    y = hit.astype(np.float64)

    def loss(v: Floats) -> float:
        z = v[0] + v[1] * x
        # One choice's worth of pull towards no correction.
        return float((np.logaddexp(0.0, z) - y * z).sum() + v[0] ** 2 + (v[1] - 1.0) ** 2)

    found = minimize(loss, np.array([0.0, 1.0]), method="L-BFGS-B", bounds=[(None, None), (0.0, None)]).x
    return float(found[0]), float(found[1])


def corrected(probability: Floats, by: tuple[float, float]) -> Floats:
    """Return probabilities corrected by an intercept and a slope on their logit."""
    from scipy.special import expit, logit

    return np.asarray(expit(by[0] + by[1] * logit(np.clip(probability, _LEAST, 1.0 - _LEAST))))


def cross_fitted(
    learn_from: Callable[[NDArray[np.bool_]], Callable[[NDArray[np.bool_]], Floats]], family: NDArray[np.str_]
) -> Floats:
    """Return a corrected value for each row, each family's by what the others teach.

    Parameters
    ----------
    learn_from : callable
        Called with the rows to learn from; returns what corrects some rows.
    family : ndarray of str, shape (rows,)
    """
    out = np.empty(len(family))
    for name in np.unique(family):
        mine = family == name
        out[mine] = learn_from(~mine if not mine.all() else mine)(mine)
    return out


@dataclass(frozen=True)
class Reliability:
    """How stated probabilities compare with what happened.

    Attributes
    ----------
    stated, happened : tuple of float
        Mean stated probability, and share that happened, of each bin that has choices.
    count : tuple of int
        Choices in each bin.
    brier : float
        Mean squared difference between the probability and what happened (1 or 0).
    error : float
        Expected calibration error: the mean of |stated - happened| over bins, weighted by their counts.
    """

    stated: tuple[float, ...]
    happened: tuple[float, ...]
    count: tuple[int, ...]
    brier: float
    error: float

    @classmethod
    def of(cls, probability: Floats, hit: NDArray[np.bool_]) -> Reliability:
        """Compare probabilities, shape (choices,), with whether it happened; at least one."""
        place = np.searchsorted(_EDGES, probability, side="right")
        bins = [place == i for i in np.unique(place)]
        stated = tuple(float(probability[b].mean()) for b in bins)
        happened = tuple(float(hit[b].mean()) for b in bins)
        count = tuple(int(b.sum()) for b in bins)
        gaps = [abs(s - h) * n for s, h, n in zip(stated, happened, count, strict=True)]
        return cls(stated, happened, count, float(np.mean((probability - hit) ** 2)), sum(gaps) / len(hit))

    def as_dict(self) -> Mapping[str, Any]:
        """Return plain values."""
        bins = zip(self.stated, self.happened, self.count, strict=True)
        return {
            "brier": self.brier,
            "calibration_error": self.error,
            "bins": [{"stated": s, "happened": h, "count": n} for s, h, n in bins],
        }


def reliability(stated: Floats, hit: NDArray[np.bool_], family: NDArray[np.str_]) -> tuple[Reliability, Reliability]:
    """Compare stated probabilities with what happened: as stated, and each family's corrected by the others.

    Parameters
    ----------
    stated : ndarray of float64, shape (choices,)
    hit : ndarray of bool, shape (choices,)
    family : ndarray of str, shape (choices,)
    """
    by_others = cross_fitted(partial(_corrected_by, stated, hit), family)
    return Reliability.of(stated, hit), Reliability.of(by_others, hit)


def _corrected_by(
    stated: Floats, hit: NDArray[np.bool_], rows: NDArray[np.bool_]
) -> Callable[[NDArray[np.bool_]], Floats]:
    learnt = correction(stated[rows], hit[rows])
    return lambda mine: corrected(stated[mine], learnt)
