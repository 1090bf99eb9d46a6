"""Two small layers and plans for them."""

from __future__ import annotations

from synth.catalog.shapes import MoEShape
from synth.choosing.plan import Layer, Plan, make_plan

DEVICE = "NVIDIA H200"
BUCKETS = (1, 64, 512)
SMALL = Layer.by_hand(MoEShape(512, 256, 8, 2), "bf16", "small")
LARGE = Layer.by_hand(MoEShape(1024, 512, 16, 4), "bf16", "large")
#: A cell whose timing failed when the table was taken.
FAILING = (2, 64, 77)


def small_plan(layers: tuple[Layer, ...] = (SMALL,), buckets: tuple[int, ...] = (1, 64), **options: object) -> Plan:
    return make_plan(layers, DEVICE, "sm90", buckets=buckets, **options)  # type: ignore[arg-type]
