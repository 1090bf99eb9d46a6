"""Where the regret is: the choices that cost most, by kinds that geometry tells apart."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from synth.catalog.devices import get_device
from synth.performance.evaluation import Evaluation, Judge
from synth.performance.geometry import Floats, Ints, sites
from synth.performance.roofline import Hardware, tactic_columns, work

#: Up to this many tokens are decode, above ``_PREFILL`` they are prefill.
_DECODE, _PREFILL = 16, 2048
#: Few and large experts: at most so many, of at least so many weights in this stage.
_FEW, _LARGE = 16, 2**24
#: Many experts, and narrow weights: columns of one rank.
_MANY, _NARROW = 256, 1024
#: A whole number of waves this near (in waves), up to so many waves: beyond, a wave more or less is little.
_STEP, _WAVES = 0.15, 4.0
#: Share of the last tile's columns, of all, that are padding.
_PADDING = 0.1
#: Sweeps beyond the first read so much more than this share of what must be read once.
_AGAIN = 0.25
#: Runners-up within this share of the best are ties in truth.
_TIE = 0.005
#: A fix takes away at least this share of the regret.
_GONE = 0.6


def kinds(judge: Judge, keys: Ints) -> dict[str, NDArray[np.bool_]]:
    """Say of which kinds choices are; a choice can be of several.

    Parameters
    ----------
    judge : Judge
        What was timed.
    keys : ndarray of int64, shape (choices, 3)
        Shape index, stage and bucket of each; all of them are the judge's.

    Returns
    -------
    dict of str to ndarray of bool, shape (choices,)
        By kind.
    """
    t = judge.timings
    hardware = Hardware.of(get_device(t.origin.device), t.origin.quant)
    order = np.lexsort((t.ms, judge.bucket))
    starts = np.searchsorted(judge.bucket[order], np.arange(len(judge.keys)))
    bucket = np.array([_index(judge.keys)[tuple(key)] for key in keys.tolist()], dtype=np.int64)
    best = order[starts[bucket]]
    timed = np.bincount(judge.bucket, minlength=len(judge.keys))[bucket]
    second = np.where(timed > 1, t.ms[order[np.minimum(starts[bucket] + 1, len(order) - 1)]], np.inf)
    s = sites(t.shapes, keys[:, 0], keys[:, 1], keys[:, 2])
    columns = tactic_columns(t.table, hardware)
    w = work(s, np.arange(len(keys)), t.tactic[best], columns, hardware)
    width = w.tiles_n * columns.n[t.tactic[best]]
    experts = s.experts * s.ep_size
    return {
        "decode (up to 16 tokens)": s.tokens <= _DECODE,
        "between (up to 2,048 tokens)": (s.tokens > _DECODE) & (s.tokens <= _PREFILL),
        "prefill (more tokens)": s.tokens > _PREFILL,
        "one expert a token": s.top_k == 1,
        "few large experts": (experts <= _FEW) & (s.n * s.k >= _LARGE),
        "many experts": experts >= _MANY,
        "narrow weights": s.n <= _NARROW,
        "no gate (gemm1)": (s.gated == 0) & (s.stage == 1),
        "padded columns": width > (1.0 + _PADDING) * s.n,
        "near a wave step": (np.abs(w.waves - np.round(w.waves)) < _STEP) & (w.waves > 0.5) & (w.waves < _WAVES),
        "an operand swept again": w.sweep_bytes > _AGAIN * w.dram_bytes,
        "near tie in truth": second <= (1.0 + _TIE) * t.ms[best],
    }


@dataclass(frozen=True)
class Kind:
    """How much of the regret one kind of choices holds.

    Attributes
    ----------
    name : str
    count : int
        Choices of this kind.
    share : float
        Their share of all choices.
    of_regret : float
        Their share of all regret (sum of logarithms).
    shares, geomeans : tuple of float
        Geometric mean of their regret after these shares of the sweep were timed.
    """

    name: str
    count: int
    share: float
    of_regret: float
    shares: tuple[float, ...]
    geomeans: tuple[float, ...]

    def fix(self) -> str:
        """Say in one sentence what would mend it: what timing does to it, the least that takes most of it away."""
        before = math.log(self.geomeans[0])
        gone = [1.0 - math.log(after) / before if before > 0 else 0.0 for after in self.geomeans]
        enough = [i for i, part in enumerate(gone) if part >= _GONE]
        at = enough[0] if enough else -1
        what = f"{100 * self.shares[at]:.0f} % of the sweep timed takes {100 * max(gone[at], 0.0):.0f} % of it away"
        return what if enough else f"a feature or repeats: {what}"

    def as_dict(self) -> Mapping[str, Any]:
        """Return plain values."""
        return {
            "kind": self.name, "count": self.count, "share": self.share, "of_regret": self.of_regret,
            "geomeans": dict(zip(map(str, self.shares), self.geomeans, strict=True)),
        }  # fmt: skip


def by_kind(judge: Judge, evaluations: Mapping[float, Evaluation]) -> list[Kind]:
    """Split the regret of the first evaluation by kind, the most regret for a choice first.

    Parameters
    ----------
    evaluations : mapping of float to Evaluation
        By the share of the sweep that was timed, none first.
    """
    first = next(iter(evaluations.values()))
    total = float(np.log(first.regrets).sum()) or 1.0
    found = []
    members = [kinds(judge, e.keys) for e in evaluations.values()]
    for name, mine in members[0].items():
        if mine.any():
            lost = np.log(first.regrets[mine])
            geomeans = tuple(_geomean(e.regrets[m[name]]) for e, m in zip(evaluations.values(), members, strict=True))
            found.append(
                Kind(name, int(mine.sum()), float(mine.mean()), float(lost.sum()) / total, tuple(evaluations), geomeans)
            )
    return sorted(found, key=lambda k: -k.of_regret / k.share)


def _geomean(regrets: Floats) -> float:
    return float(np.exp(np.log(regrets).mean())) if len(regrets) else 1.0


def _index(keys: Ints) -> dict[tuple[int, ...], int]:
    return {tuple(key): i for i, key in enumerate(keys.tolist())}
