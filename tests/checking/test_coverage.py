"""Which token counts a server's maximum leads to which bucket."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synth.checking.coverage import lookups
from synth.flashinfer.buckets import map_to_bucket
from synth.flashinfer.versions import CONTRACTS


@given(
    most=st.integers(1, 9000) | st.sampled_from([200, 255, 256, 257, 300, 4095, 4097, 8191]),
    flashinfer=st.sampled_from([contract.last for contract in CONTRACTS]),
)
def test_lookups_are_those_of_every_token_count(most: int, flashinfer: str) -> None:
    found = lookups(most, flashinfer)
    assert [n for _, first, last in found for n in range(first, last + 1)] == list(range(1, most + 1))
    for bucket, first, last in found:
        counts = {first, (first + last) // 2, last}
        assert {map_to_bucket(n, most, flashinfer) for n in counts} == {bucket}
    assert all(a[0] != b[0] for a, b in itertools.pairwise(found))


@pytest.mark.parametrize("most", [1, 6, 200, 300, 512, 600, 5000])
def test_lookups_agree_with_a_count_of_all(most: int) -> None:
    for contract in CONTRACTS:
        each = [map_to_bucket(n, most, contract.last) for n in range(1, most + 1)]
        found = [bucket for bucket, first, last in lookups(most, contract.last) for _ in range(first, last + 1)]
        assert found == each


def test_a_maximum_of_a_million_is_quick() -> None:
    assert len(lookups(1 << 20, "0.7.4")) < 40
