from __future__ import annotations

import dataclasses

import pytest
from made_timings import H200

from synth.errors import SynthError


@pytest.mark.parametrize(
    ("field", "value"),
    [("device", "…"), ("device", "a\nb"), ("arch", "90"), ("quant", "int4"), ("flashinfer", "../../etc")],
)
def test_an_origin_that_is_none_is_refused(field: str, value: str) -> None:
    with pytest.raises(SynthError, match=field):
        dataclasses.replace(H200, **{field: value})
