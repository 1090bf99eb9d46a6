"""Weights of a layer's experts: how many bytes, and what is in them."""

from __future__ import annotations

import pytest

from synth.catalog.shapes import MoEShape
from synth.errors import OutOfMemory
from synth.gpu.weights import allocate_weights, pack_fp4, weight_bytes

torch = pytest.importorskip("torch")


@pytest.mark.parametrize(("quant", "block"), [("nvfp4", 16), ("mxfp8_mxfp4", 32)])
def test_fp4_weights_are_the_nearest_values_in_order(quant: str, block: int) -> None:
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    table = torch.cat([levels, -levels])
    values = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    packed = pack_fp4(values, quant)
    assert packed.shape == (8, 32) and packed.dtype == torch.uint8
    decoded = torch.stack([table[(packed & 15).long()], table[(packed >> 4).long()]], dim=2).view(8, 64)
    blocks, decoded = values.view(8, -1, block), decoded.view(8, -1, block)
    largest = blocks.abs().amax(2, keepdim=True)
    scale = largest / 6 if quant == "nvfp4" else torch.exp2(torch.floor(torch.log2(largest)) - 2)
    nearest = table[(blocks.unsqueeze(-1) / scale.unsqueeze(-1) - table).abs().argmin(-1)]
    assert torch.equal(decoded.abs(), nearest.abs())
    assert torch.equal(torch.sign(decoded)[decoded != 0], torch.sign(blocks)[decoded != 0])


def test_weights_that_do_not_fit_are_refused_before_they_are_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (20 * 2**30, 140 * 2**30))
    with pytest.raises(OutOfMemory, match=r"take 21\.0 GiB and 20\.0 GiB .* are free"):
        allocate_weights(MoEShape(7168, 2048, 256, 8), "bf16", torch.device("cuda", 0))


def test_weights_are_those_of_every_expert_and_both_stages() -> None:
    shape = MoEShape(7168, 2048, 32, 8, 8)
    assert weight_bytes(shape, "bf16") == 32 * 7168 * 2048 * 3 * 2
    assert weight_bytes(shape, "fp8") == weight_bytes(shape, "bf16") // 2
    assert weight_bytes(shape, "bf16") // 4 < weight_bytes(shape, "nvfp4") < weight_bytes(shape, "fp8")
