from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synth.catalog.padding import ENGINE_NAMES, PADDINGS, Padding, engines_that_pad, find_padding, round_up
from synth.catalog.schemes import QUANTS
from synth.catalog.shapes import MoEShape, engine_shape, padded_shape, why_unsupported
from synth.flashinfer.calls import ENGINES

SIZES = st.integers(1, 20000)


def test_every_case_is_of_a_known_engine_and_quantization_and_says_where_it_was_read() -> None:
    for p in PADDINGS:
        assert p.engine in ENGINES and p.engine in ENGINE_NAMES and p.quant in QUANTS and p.source
    cases = [(p.engine, p.quant, gated) for p in PADDINGS for gated in (True, False) if p.gated in (None, gated)]
    assert len(cases) == len(set(cases))


@pytest.mark.parametrize(
    ("engine", "quant", "gated", "size", "expected"),
    [
        ("vllm", "mxfp8_mxfp4", True, (2880, 2880), (2944, 2944)),
        ("vllm", "mxfp8_mxfp4", True, (2880, 720), (2944, 768)),
        ("vllm", "nvfp4", False, (2688, 1856), (2688, 1920)),
        ("vllm", "fp8", False, (2688, 1856), (2688, 1920)),
        ("vllm", "fp8", True, (4096, 1032), (4096, 1040)),
        ("sglang", "fp8", False, (2688, 961), (2688, 976)),
    ],
)
def test_what_an_engine_pads(
    engine: str, quant: str, gated: bool, size: tuple[int, int], expected: tuple[int, int]
) -> None:
    padding = find_padding(engine, quant, gated)
    assert padding is not None and padding.apply(*size) == expected


@pytest.mark.parametrize(("engine", "quant", "gated"), [("vllm", "nvfp4", True), ("vllm", "bf16", False)])
def test_what_an_engine_passes_as_it_is(engine: str, quant: str, gated: bool) -> None:
    assert find_padding(engine, quant, gated) is None
    shape = MoEShape(2880, 700, 32, 4, gated=gated)
    assert engine_shape(shape, quant, engine) == shape


@given(st.sampled_from(PADDINGS), SIZES, SIZES)
def test_padding_reaches_the_least_multiples_and_stays(padding: Padding, hidden: int, inter: int) -> None:
    padded = padding.apply(hidden, inter)
    assert padding.apply(*padded) == padded
    for size, target, multiple in zip((hidden, inter), padded, (padding.hidden, padding.inter), strict=True):
        assert target % multiple == 0 and 0 <= target - size < multiple
        assert target == round_up(size, multiple)


@given(st.sampled_from(PADDINGS), SIZES, SIZES, st.booleans())
def test_what_an_engine_pads_has_a_kernel_where_its_hidden_size_has(
    padding: Padding, hidden: int, inter: int, gated: bool
) -> None:
    if padding.gated not in (None, gated):
        return
    shape = MoEShape(hidden, inter, 32, 4, gated=gated)
    passed = engine_shape(shape, padding.quant, padding.engine)
    needed = padded_shape(passed, padding.quant)
    assert passed.inter == needed.inter
    assert (why_unsupported(passed, padding.quant) is None) == (passed.hidden == needed.hidden)


def test_engines_are_named_only_for_exactly_the_size_that_they_reach() -> None:
    assert engines_that_pad("fp8", True, (4096, 1032), (4096, 1040)) == ("vllm", "sglang")
    assert engines_that_pad("fp8", False, (4096, 1032), (4096, 1040)) == ("sglang",)
    assert engines_that_pad("fp8", True, (4096, 1040), (4096, 1040)) == ()
    assert engines_that_pad("nvfp4", True, (4096, 352), (4096, 384)) == ()
