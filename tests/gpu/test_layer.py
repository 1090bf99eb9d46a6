"""A whole layer: its inputs, and its output compared with the fallback's."""

from __future__ import annotations

import math
from typing import Any

import pytest
from fake_kernels import Kernels

from synth.catalog.shapes import MoEShape
from synth.errors import OutOfMemory, SynthError
from synth.gpu import cuda
from synth.gpu.layer import Layer, LayerComparator
from synth.gpu.stub import FakeRunner, StubbedFlashInfer

torch = pytest.importorskip("torch")

SHAPE = MoEShape(256, 128, 4, 2)


def test_a_layers_inputs_are_what_the_binding_checks(h200: StubbedFlashInfer, kernels: Kernels) -> None:
    shape = MoEShape(256, 128, 4, 2, 8)
    layer = Layer(shape, "fp8", tp=2, device="cpu")
    inputs = layer.inputs(16)
    assert inputs["input"].dtype == torch.float8_e4m3fn and inputs["input"].shape == (16, 256)
    ids, weights = inputs["token_selected_experts"], inputs["token_final_scales"]
    assert ids.dtype == torch.int32 and ids.shape == (16, 2) and 4 <= ids.max() < 32
    assert all(len(set(row)) == 2 for row in ids.tolist())
    assert weights.dtype == torch.float32 and torch.allclose(weights.sum(1), torch.ones(16))
    scales = inputs["quant_scales"]
    assert [(s.dtype, tuple(s.shape)) for s in scales] == [(torch.float32, s) for s in ((4,), (), (4,), ())]
    assert float(scales[0][0]) == pytest.approx(10 / 16)
    assert float(scales[1] * scales[2][0]) == pytest.approx(10 / math.sqrt(128))
    assert (inputs["tp_size"], inputs["ep_size"]) == (2, 8)
    layer.call(inputs, (3, 40))
    call = kernels.layer_calls[-1]
    assert call[0] is inputs["output"] and call[8] is scales and [3, 40] in [a for a in call if isinstance(a, list)]
    assert Layer(shape, "bf16", device="cpu").inputs(1)["quant_scales"] == []


def test_a_layer_refuses_formats_that_it_has_no_scales_for(h200: StubbedFlashInfer) -> None:
    with pytest.raises(SynthError, match="not in nvfp4"):
        Layer(SHAPE, "nvfp4", device="cpu")


@pytest.mark.parametrize(
    ("fallback", "other", "error"),
    [(2.0, 2.5, 0.25), (2.0, 2.0, 0.0), (0.0, 0.0, 0.0), (0.0, 1.0, math.inf), (2.0, math.nan, math.inf)],
)
def test_agreement_is_with_the_fallback(
    h200: StubbedFlashInfer, kernels: Kernels, fallback: float, other: float, error: float
) -> None:
    kernels.outputs = {(-1, -1): fallback, (3, 50): other}
    assert LayerComparator(SHAPE, "bf16", device="cpu").deviation(8, (3, 50)) == error


def test_an_output_that_is_not_written_does_not_agree(
    h200: StubbedFlashInfer, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_moe(_self: object, *args: Any) -> None:
        if [-1, -1] in [a for a in args if isinstance(a, list)]:
            args[0].fill_(1.0)

    monkeypatch.setattr(FakeRunner, "run_moe", run_moe)
    assert LayerComparator(SHAPE, "bf16", device="cpu").deviation(8, (3, 50)) == math.inf


def test_one_layer_compares_many_pairs_and_draws_inputs_once_a_token_count(
    h200: StubbedFlashInfer, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels.outputs = {(-1, -1): 2.0, (3, 50): 2.5, (-1, 50): 2.0}
    drawn: list[int] = []
    inputs = Layer.inputs
    monkeypatch.setattr(Layer, "inputs", lambda self, tokens: [drawn.append(tokens), inputs(self, tokens)][1])
    comparator = LayerComparator(SHAPE, "bf16", device="cpu")
    asked = [(8, (3, 50)), (8, (-1, 50)), (4, (3, 50))]
    assert [comparator.deviation(*one) for one in asked] == [0.25, 0.0, 0.25]
    assert drawn == [8, 4]


def test_a_token_count_that_does_not_fit_is_no_verdict_on_a_pair(
    h200: StubbedFlashInfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    comparator = LayerComparator(SHAPE, "bf16", device="cpu")
    monkeypatch.setattr(cuda, "lost_context", lambda: None)

    def refuse(_self: object, *_args: object) -> None:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(FakeRunner, "run_moe", refuse)
    with pytest.raises(OutOfMemory, match="at 8 tokens"):
        comparator.deviation(8, (3, 50))
    monkeypatch.setattr(cuda, "lost_context", lambda: RuntimeError("illegal memory access"))
    with pytest.raises(RuntimeError, match="out of memory"):
        comparator.deviation(8, (3, 50))
