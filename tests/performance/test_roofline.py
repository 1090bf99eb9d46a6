from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synth.catalog.devices import Device, get_device, load_devices
from synth.catalog.models import deployments, load_models
from synth.catalog.schemes import QUANTS, STAGES
from synth.catalog.shapes import MoEShape
from synth.choosing.emission import bucket_union
from synth.choosing.sources import analytical_source
from synth.errors import SynthError
from synth.flashinfer.tactics import load_table, load_tables
from synth.performance.geometry import sites
from synth.performance.model import Cells
from synth.performance.roofline import (
    DEFAULTS,
    Hardware,
    Roofline,
    TacticColumns,
    Work,
    _smooth_ceil,
    tactic_columns,
    work,
)
from synth.timings.table import Timings

H200 = Hardware.of(get_device("NVIDIA H200"), "bf16")
TABLE = load_table("sm90", "bf16")
COLUMNS = tactic_columns(TABLE, H200)
MODELLED = [(d, t) for d in load_devices() for t in load_tables() if t.arch == d.tactics_arch]


def known(device: Device, quant: str) -> bool:
    return None not in (device.sms, device.l2_mb, device.dram_gbs) and quant in device.tflops


def work_of(shape: MoEShape, stage: int, tokens: list[int], tactic: int) -> tuple[Work, np.ndarray]:
    n = len(tokens)
    place = sites([shape], np.zeros(n, np.int64), np.full(n, stage), np.array(tokens))
    ids = np.full(n, tactic)
    return work(place, np.arange(n), ids, COLUMNS, H200), ids


def near_best(timings: Timings, reach: float = 0.2) -> Timings:
    table = timings.averaged()
    keys, bucket = table.buckets()
    best = np.full(len(keys), np.inf)
    np.minimum.at(best, bucket, table.ms)
    return table.select(table.ms <= (1.0 + reach) * best[bucket])


def work_of_timings(t: Timings, hardware: Hardware, columns: TacticColumns) -> tuple[Work, np.ndarray]:
    cells = Cells.of(t)
    place, row = cells.sites()
    return work(place, row, cells.tactic, columns, hardware), cells.tactic


def test_work_of_a_dense_layer_by_hand() -> None:
    # One expert that every token goes to: a plain GEMM of 256 x 4096 x 2048 (gemm1, gated) and 256 x 2048 x 2048.
    shape = MoEShape(2048, 2048, 1, 1)
    tactic = next(i for i, t in TABLE.items(1) if t.tile[:2] == (128, 128) and t.cluster == (1, 1, 1) and not t.swap_ab)
    w, _ = work_of(shape, 1, [256], tactic)
    assert (w.tiles_m[0], w.tiles_n[0]) == (2, 32)
    assert w.weight_bytes[0] == 4096 * 2048 * 2
    assert w.activation_bytes[0] == 256 * 2048 * 2
    assert w.output_bytes[0] == 256 * 4096 * 2
    assert w.flops[0] == w.padded_flops[0] == 2 * 256 * 4096 * 2048
    assert w.waves[0] == pytest.approx(64 / 132)
    assert w.k_steps[0] == 2048 * 2 / TABLE.tactic(tactic).tile[2]
    assert w.glue_bytes[0] == 256 * 4096 * 2 + 256 * 2048 * 2 and w.finalize_bytes[0] == 0
    assert w.dram_bytes[0] == w.weight_bytes[0] + w.activation_bytes[0] + w.output_bytes[0]
    second, _ = work_of(shape, 2, [256], TABLE.fallback_id(2))
    assert second.weight_bytes[0] == 2048 * 2048 * 2
    assert second.finalize_bytes[0] == 2 * 256 * 2048 * 2 and second.glue_bytes[0] == 0


def test_a_fused_finalize_saves_writing_the_output_twice() -> None:
    shape = MoEShape(2048, 2048, 8, 2)
    by_fusion = {t.finalize: i for i, t in TABLE.items(2) if t.tile[:2] == (128, 128) and not t.swap_ab}
    fused, plain = (work_of(shape, 2, [64], by_fusion[f])[0] for f in (True, False))
    assert plain.finalize_bytes[0] - fused.finalize_bytes[0] == plain.output_bytes[0]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    "shape", [MoEShape(2048, 1024, 64, 8), MoEShape(7168, 2048, 32, 8, 8), MoEShape(4096, 14336, 8, 2)]
)
def test_more_tokens_take_longer(shape: MoEShape, stage: int) -> None:
    tokens = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768]
    for tactic in TABLE.ids(stage):
        w, ids = work_of(shape, stage, tokens, tactic)
        ms = Roofline().predict(w, ids, COLUMNS, H200)
        # The smoothed ceiling's spread falls as routing evens out, so a dip of 2 % is possible.
        assert (np.diff(ms) >= -0.03 * ms[:-1]).all(), str(TABLE.tactic(tactic))
        assert ms[-1] > 20 * ms[0]


@settings(max_examples=100, deadline=None)
@given(st.floats(0.1, 60.0), st.floats(0.02, 1.5))
def test_the_smoothed_ceiling_is_the_mean_of_ceilings(waves: float, sd: float) -> None:
    sd = min(sd, waves / 4.0)
    draws = np.ceil(np.maximum(np.random.default_rng(0).normal(waves, sd, 20000), 0.0))
    found = float(_smooth_ceil(np.array([waves]), np.array([sd]), np.array([1000.0]))[0])
    assert waves <= found <= waves + 1.0 + sd
    floor = max(waves, 1.0 - math.exp(-1000.0))
    assert found == pytest.approx(max(draws.mean(), floor), abs=0.05 + 4.0 * sd / math.sqrt(20000))


def test_constants_round_trip_and_six_digits_are_enough() -> None:
    fitted = Roofline(tuple(float(f"{x * 1.1:.6g}") for x in DEFAULTS.values()))
    assert tuple(json.loads(json.dumps(fitted.constants))) == fitted.constants
    w, ids = work_of(MoEShape(2048, 1024, 64, 8), 1, [1, 64, 4096], 3)
    exact = Roofline(tuple(x * 1.1 for x in DEFAULTS.values()))
    np.testing.assert_allclose(fitted.predict(w, ids, COLUMNS, H200), exact.predict(w, ids, COLUMNS, H200), rtol=1e-4)


def test_a_fit_recovers_times_that_the_formula_made(few: Timings) -> None:
    w, tactic = work_of_timings(few, H200, COLUMNS)
    rng = np.random.default_rng(1)
    true = Roofline(tuple(x + rng.normal(0, 0.15) for x in DEFAULTS.values()))
    ms = true.predict(w, tactic, COLUMNS, H200)
    fitted = Roofline.fit(w, tactic, COLUMNS, H200, ms * np.exp(rng.normal(0, 0.01, len(ms))))
    error = np.abs(np.log(fitted.predict(w, tactic, COLUMNS, H200) / ms))
    untouched = np.abs(np.log(Roofline().predict(w, tactic, COLUMNS, H200) / ms))
    assert np.median(error) < 0.01 < np.median(untouched)
    assert all(x == float(f"{x:.6g}") for x in fitted.constants)


@pytest.mark.parametrize("quant", ["bf16", "fp8"])
def test_a_fit_of_real_timings_is_close_near_the_best(request: pytest.FixtureRequest, quant: str) -> None:
    timings: Timings = request.getfixturevalue(quant)
    hardware = Hardware.of(get_device("NVIDIA H200"), quant)
    columns = tactic_columns(timings.table, hardware)
    near = near_best(timings)
    w, tactic = work_of_timings(near, hardware, columns)
    fitted = Roofline.fit(w, tactic, columns, hardware, near.ms)
    error = np.abs(np.log(fitted.predict(w, tactic, columns, hardware) / near.ms))
    assert np.median(error) < 0.06
    assert np.quantile(error, 0.95) < 0.25


def test_fitting_twice_gives_the_same_constants(few: Timings) -> None:
    near = near_best(few)
    w, tactic = work_of_timings(near, H200, COLUMNS)
    assert Roofline.fit(w, tactic, COLUMNS, H200, near.ms) == Roofline.fit(w, tactic, COLUMNS, H200, near.ms)


@pytest.mark.parametrize(
    ("device", "table"),
    [(d, t) for d, t in MODELLED if known(d, t.quant)],
    ids=lambda x: x.slug if isinstance(x, Device) else x.quant,
)
def test_every_public_model_is_predicted_on_every_device_with_public_numbers(device: Device, table: object) -> None:
    model = analytical_source(device, table.quant).model  # type: ignore[attr-defined]
    layers = sorted({d.shape for d in deployments(load_models(), quants=QUANTS, supported=False)})
    sizes = np.array(bucket_union([32768]))
    for stage in STAGES:
        ids = np.array(model.table.ids(stage))
        for start in range(0, len(layers), 32):
            part = layers[start : start + 32]
            grid = np.meshgrid(np.arange(len(part)), sizes, ids, indexing="ij")
            shape, tokens, tactic = (g.ravel() for g in grid)
            with np.errstate(divide="raise", invalid="raise", over="raise"):
                ms = model.predict_analytic(Cells(part, shape, np.full_like(shape, stage), tokens, tactic))
            assert np.isfinite(ms).all() and (ms > 1e-4).all()


@pytest.mark.parametrize(
    ("device", "table"),
    [(d, t) for d, t in MODELLED if not known(d, t.quant)],
    ids=lambda x: x.slug if isinstance(x, Device) else x.quant,
)
def test_a_missing_public_number_is_one_line(device: Device, table: object) -> None:
    with pytest.raises(SynthError, match=f"{device.name} {table.quant}") as e:  # type: ignore[attr-defined]
        Hardware.of(device, table.quant)  # type: ignore[attr-defined]
    assert "\n" not in str(e.value)


def test_some_devices_have_all_numbers_and_some_do_not() -> None:
    quants = {d.name: {t.quant for e, t in MODELLED if e == d and known(d, t.quant)} for d, _ in MODELLED}
    assert quants["NVIDIA H200"] == {"bf16", "fp8"}
    assert quants["NVIDIA RTX PRO 6000 Blackwell Server Edition"] == set(QUANTS)
    assert any(len(q) < 4 for q in quants.values())
