"""Near-ties: one tactic of several that are as fast, always the same one.

What is evaluated picks as what is emitted does.
"""

from __future__ import annotations

import numpy as np

from synth.flashinfer.tactics import TacticTable
from synth.performance.geometry import Floats, Ints, least_by

#: Tactics within this share of the best are ties: repeats of one timing differ by more (0.4 % in the median).
TIE = 0.001


def pick(group: Ints, ms: Floats, order: Ints, groups: int) -> Ints:
    """Return the chosen row of each group: the first in `order` among those within ``TIE`` of the least `ms`.

    Parameters
    ----------
    group : ndarray of int64, shape (rows,)
        Group of each row, 0 to `groups` - 1; every group has a row.
    ms : ndarray of float64, shape (rows,)
    order : ndarray of int64, shape (rows,)
        The fixed order that breaks ties.
    """
    tied = np.flatnonzero(ms <= least_by(group, ms, groups)[group] * (1.0 + TIE))
    ranked = tied[np.lexsort((order[tied], group[tied]))]
    first = np.concatenate([[True], group[ranked][1:] != group[ranked][:-1]])
    return np.asarray(ranked[first])


def tie_order(table: TacticTable) -> Ints:
    """Return each tactic's place in the order that breaks ties, by what it is rather than by its id.

    Smaller tiles first, then smaller clusters, unfused before fused: the cheaper kernel wins a tie.
    """
    tactics = [table.tactic(i) for i in range(len(table))]
    ranked = sorted(range(len(tactics)), key=lambda i: tactics[i])
    order = np.empty(len(tactics), dtype=np.int64)
    order[ranked] = np.arange(len(tactics))
    return order
