"""What is believed of devices without timings."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from synth.catalog.devices import Device, get_device, load_devices
from synth.catalog.models import deployments, load_models
from synth.catalog.schemes import QUANTS, STAGES
from synth.catalog.shapes import MoEShape
from synth.choosing.choose import SURE_GAIN
from synth.choosing.emission import Emission, emit
from synth.choosing.sources import analytical_source
from synth.errors import SynthError
from synth.flashinfer.kernels import load_kernels
from synth.flashinfer.legality import illegal_ids, smem_block_bytes
from synth.flashinfer.tactics import TacticTable, load_table, load_tables
from synth.performance.analytical import (
    STRUCTURE,
    Constants,
    analytical_model,
    constants_for,
    load_constants,
    start_of,
    structure,
    suspects,
)
from synth.performance.model import Cells, PerformanceModel
from synth.performance.roofline import DEFAULTS
from synth.timings.origin import Origin

CARD = get_device("NVIDIA RTX PRO 6000 Blackwell Server Edition")
SHAPES = (
    MoEShape(2048, 768, 128, 8), MoEShape(7168, 2048, 8, 8, 32), MoEShape(4096, 3584, 8, 2),
    MoEShape(2048, 128, 512, 10), MoEShape(5120, 8192, 16, 1, 8), MoEShape(2688, 1856, 128, 6, gated=False),
)  # fmt: skip
TOKENS = (1, 16, 512, 8192)


def known(device: Device, quant: str) -> bool:
    """Whether all the numbers that the model needs are public."""
    numbers = (device.sms, device.l2_mb, device.dram_gbs, device.tflops.get(quant))
    return all(x is not None for x in numbers)


SM120 = [(d, q) for d in load_devices() if d.tactics_arch == "sm120" for q in QUANTS if known(d, q)]


def every_cell(table: TacticTable, shapes: tuple[MoEShape, ...] = SHAPES) -> Cells:
    rows = [
        (i, stage, tokens, tactic)
        for i in range(len(shapes))
        for stage in STAGES
        for tokens in TOKENS
        for tactic in table.ids(stage)
    ]
    return Cells(shapes, *np.array(rows, dtype=np.int64).T)


# --- constants -------------------------------------------------------------------------------------------------------


def test_every_quantization_of_sm120_has_constants_of_its_own_once() -> None:
    found = load_constants()
    assert {(c.arch, c.quant) for c in found} == {("sm120", t.quant) for t in load_tables("0.7.4") if t.arch == "sm120"}
    assert len({(c.arch, c.quant) for c in found}) == len(found)


@pytest.mark.parametrize("c", load_constants(), ids=lambda c: f"{c.arch} {c.quant}")
def test_constants_are_in_range_and_say_where_they_are_from(c: Constants) -> None:
    assert len(c.roofline.constants) == len(DEFAULTS)
    assert all(-20.0 < x < 6.0 for x in c.roofline.constants)
    assert get_device(c.device).tactics_arch == c.arch and c.source
    assert structure(c.structure) is not None
    # Only kernels of the same kind lend their structure.
    kinds, lent = (
        {tactic.family == "sm80" for stage in STAGES for _, tactic in table.items(stage)}
        for table in (load_table(c.arch, c.quant), load_table("sm90", c.structure))
    )
    assert kinds <= lent


def test_constants_that_are_not_there_are_none() -> None:
    assert constants_for(get_device(STRUCTURE), "bf16") is None
    assert constants_for(CARD, "int3") is None
    found = constants_for(CARD, "nvfp4")
    assert found is not None and (found.arch, found.quant, found.structure) == ("sm120", "nvfp4", "fp8")


# --- models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("device", "quant"), SM120, ids=lambda x: getattr(x, "slug", x))
def test_every_card_of_sm120_gets_a_model_of_constants_and_structure(device: Device, quant: str) -> None:
    model = analytical_model(device, quant)
    constants = constants_for(device, quant)
    assert constants is not None and model.roofline_ == constants.roofline
    assert model.analytical and not model.shapes_
    assert model.borrowed_ == f"{STRUCTURE} {constants.structure}"
    assert (model.origin_.device, model.origin_.quant) == (device.name, quant)
    cells = every_cell(model.table)
    found = model.predict(cells)
    assert np.isfinite(found.ms).all() and (found.ms > 0.0).all()
    # Nothing of it was measured, and it says so.
    assert (found.log_sd >= 0.25).all()


@pytest.mark.parametrize("quant", QUANTS)
def test_a_model_without_timings_is_saved_with_what_it_borrowed(quant: str, tmp_path: Path) -> None:
    model = analytical_model(CARD, quant)
    model.save(tmp_path / "m.zip")
    again = PerformanceModel.load(tmp_path / "m.zip", device=CARD.name, quant=quant)
    assert again.borrowed_ == model.borrowed_ and again.analytical
    assert again.fingerprint() == model.fingerprint()
    cells = every_cell(model.table)
    np.testing.assert_array_equal(again.predict(cells).ms, model.predict(cells).ms)


def test_predictions_are_finite_for_the_whole_catalogue() -> None:
    for quant in QUANTS:
        model = analytical_model(CARD, quant)
        shapes = tuple(dict.fromkeys(d.shape for d in deployments(load_models(), quants=[quant], supported=True)))
        assert len(shapes) > 10
        ms = model.predict(every_cell(model.table, shapes)).ms
        assert np.isfinite(ms).all() and (ms > 0.0).all() and ms.max() < 1e4


def test_a_card_with_more_of_everything_is_faster_where_there_is_work_for_it() -> None:
    slow, fast = (analytical_model(get_device(n), "nvfp4") for n in ("NVIDIA RTX PRO 4500 Blackwell", CARD.name))
    cells = every_cell(slow.table)
    ratio = fast.predict_analytic(cells) / slow.predict_analytic(cells)
    # A single tile takes as long on an SM of either.
    assert (ratio < 1.01).all() and (ratio[cells.tokens == max(TOKENS)] < 0.7).all()


@pytest.mark.parametrize("quant", ["bf16", "fp8"])
def test_a_device_of_the_same_architecture_takes_over_the_model(quant: str) -> None:
    model, own = analytical_model(get_device("NVIDIA H100 80GB HBM3"), quant), structure(quant)
    assert own is not None and own.choice_ is not None
    assert model.roofline_ == own.roofline_
    assert model.borrowed_ == f"{STRUCTURE} {quant}" and model.analytical
    assert model.choice_ is own.choice_ and model.time_ is own.time_ and model.spread_ == own.spread_
    # Less bandwidth, as many SMs.
    cells = every_cell(model.table)
    assert (model.predict_analytic(cells) >= own.predict_analytic(cells) * (1.0 - 1e-12)).all()


@pytest.mark.parametrize(("device", "quant"), [("NVIDIA GB10", "nvfp4"), ("NVIDIA B200", "bf16"), (STRUCTURE, "nvfp4")])
def test_where_too_little_is_public_there_is_no_model(device: str, quant: str) -> None:
    with pytest.raises(SynthError) as e:
        analytical_model(get_device(device), quant)
    assert "\n" not in str(e.value) and quant in str(e.value)


def test_timings_begin_with_what_is_believed_of_their_device() -> None:
    begin = start_of(Origin.make(CARD.name, "sm120", "nvfp4"))
    assert begin is not None and begin.fingerprint() == analytical_model(CARD, "nvfp4").fingerprint()
    assert start_of(Origin.make(STRUCTURE, "sm90", "bf16")) is None
    assert start_of(Origin.make("NVIDIA GB10", "sm120", "nvfp4")) is None


def test_quantizations_without_a_shipped_model_lend_no_structure() -> None:
    assert structure("nvfp4") is None
    assert structure("bf16") is structure("bf16")


# --- what is never chosen --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", load_tables("0.7.4"), ids=lambda t: f"{t.arch}-{t.quant}")
def test_suspects_are_the_tactics_whose_kernel_spills(table: TacticTable) -> None:
    found = suspects(table)
    for stage in STAGES:
        kernels = load_kernels(table.arch, table.quant, table.flashinfer, gated_gemm1=stage == 1)
        spilled = {t for t, kernel in kernels.items() if kernel.spills}
        assert {t for s, t in found if s == stage} == spilled & {t for _, t in table.items(stage)}
    # Something is left to choose, the fallback among it.
    for stage in STAGES:
        assert (stage, table.tactic(table.fallback_id(stage))) not in found
        assert any((stage, t) not in found for _, t in table.items(stage))


@pytest.mark.parametrize("quant", ["nvfp4", "bf16", "fp8"])
def test_of_a_version_that_was_not_compiled_the_same_is_suspected_and_what_cannot_run(quant: str) -> None:
    compiled, older = load_table("sm120", quant), load_table("sm120", quant, "0.7.2")
    kernels = load_kernels("sm120", quant, gated_gemm1=True), load_kernels("sm120", quant)
    smem = smem_block_bytes(None, "sm120")
    assert smem is not None
    too_large = {(s, t) for s in STAGES for _, t in older.items(s) if kernels[s - 1][t].smem > smem}
    assert too_large
    assert suspects(older) == suspects(compiled) | too_large


@pytest.fixture(scope="module", params=["nvfp4", "bf16", "fp8"])
def emitted(request: pytest.FixtureRequest) -> tuple[str, Emission]:
    """The config of a quantization's whole catalogue, without timings."""
    quant = request.param
    wanted = list(deployments(load_models(), quants=[quant], supported=True))
    source = analytical_source(CARD, quant)
    return quant, emit(CARD, wanted, {quant: source}, engines=("vllm",), max_tokens=(512,))


def test_suspects_and_what_cannot_run_are_never_chosen(emitted: tuple[str, Emission]) -> None:
    quant, emission = emitted
    table = load_table("sm120", quant)
    suspected = {(stage, str(t)) for stage, t in suspects(table)}
    smem = smem_block_bytes(CARD.name, "sm120")
    illegal: dict[tuple[str, int], set[str]] = {}
    choices = json.loads(emission.sidecar)["choices"]
    for one in choices:
        key = one["shape"], one["stage"]
        if key not in illegal:
            ids = illegal_ids(table, one["stage"], MoEShape.parse(one["shape"]), smem)
            illegal[key] = {str(table.tactic(i)) for i in ids}
        if one["written"]:
            assert one["tactic"] not in illegal[key]
            assert (one["stage"], one["tactic"]) not in suspected
    assert any(one["written"] for one in choices) and len(illegal) > 40


def test_entries_are_written_only_where_a_sure_gain_is_foreseen(emitted: tuple[str, Emission]) -> None:
    _, emission = emitted
    written = {True: 0, False: 0}
    for one in json.loads(emission.sidecar)["choices"]:
        assert one["source"] == "analytical"
        gain = one["fallback_ms"] / one["ms"] - 1.0 if one["fallback_ms"] is not None else math.nan
        if one["written"]:
            # Times are written to six digits.
            assert gain >= SURE_GAIN - 1e-4
        elif not math.isnan(gain):
            assert gain <= SURE_GAIN + 1e-4
        written[one["written"]] += 1
    assert min(written.values()) > 0
    (tally,) = emission.tallies
    assert emission.analytical and set(tally.entries) == {"analytical"}
