from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synth.flashinfer.tactics import load_tables
from synth.performance.ties import TIE, pick, tie_order


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_the_first_in_order_among_ties_is_picked(data: st.DataObject) -> None:
    groups = data.draw(st.integers(1, 4))
    near = st.sampled_from([1.0, 1.0005, 1.0009, 1.0011, 1.5]) | st.floats(0.5, 4.0)
    rows = [(g, data.draw(near)) for g in range(groups) for _ in range(data.draw(st.integers(1, 6)))]
    data.draw(st.randoms(use_true_random=False)).shuffle(rows)
    order = data.draw(st.permutations(range(len(rows))))
    group, ms = np.array([g for g, _ in rows]), np.array([t for _, t in rows])
    picked = pick(group, ms, np.array(order), groups)
    assert group[picked].tolist() == list(range(groups))
    for g, row in enumerate(picked.tolist()):
        mine = np.flatnonzero(group == g)
        tied = [i for i in mine.tolist() if ms[i] <= ms[mine].min() * (1 + TIE)]
        assert row == min(tied, key=lambda i: order[i])


@pytest.mark.parametrize("table", load_tables(), ids=lambda t: f"{t.arch}-{t.quant}")
def test_ties_are_broken_by_what_a_tactic_is(table: object) -> None:
    order = tie_order(table)  # type: ignore[arg-type]
    tactics = [table.tactic(i) for i in range(len(table))]  # type: ignore[attr-defined,arg-type]
    assert sorted(order.tolist()) == list(range(len(tactics)))
    for i, j in zip(np.argsort(order)[:-1].tolist(), np.argsort(order)[1:].tolist(), strict=True):
        assert tactics[i] <= tactics[j]
    # An unfused tactic comes before the same one with the finalize step fused.
    for i, tactic in enumerate(tactics):
        if tactic.finalize:
            plain = dataclasses.replace(tactic, finalize=False)
            assert all(order[j] < order[i] for j in range(len(tactics)) if tactics[j] == plain)
