"""Tactics that can't run are never planned, believed, chosen or passed by `check`."""

from __future__ import annotations

from pathlib import Path

from synth.catalog.devices import get_device
from synth.catalog.models import find_model
from synth.catalog.schemes import STAGES
from synth.checking.check import check
from synth.choosing.choose import choose
from synth.choosing.plan import Layer, make_plan
from synth.choosing.sources import analytical_source
from synth.configs.model import Entry
from synth.configs.v1 import dumps_json
from synth.flashinfer.keys import file_keys
from synth.flashinfer.legality import illegal_ids
from synth.flashinfer.tactics import load_table
from synth.flashinfer.versions import build_metadata
from synth.performance.posterior import believe

DEVICE = get_device("NVIDIA RTX PRO 6000 Blackwell Server Edition")
DEPLOYMENT = find_model("glm-5").deploy(8, 1, "nvfp4")
TABLE = load_table("sm120", "nvfp4")
ILLEGAL = illegal_ids(TABLE, 2, DEPLOYMENT.shape, DEVICE.smem_block_bytes)


def test_not_planned() -> None:
    plan = make_plan([Layer.by_hand(DEPLOYMENT.shape, "nvfp4")], DEVICE.name, "sm120")
    assert sorted(ILLEGAL) == [26, 27]
    assert {t for b in plan.batches for t in b.tactics} == set(range(48)) - ILLEGAL


def test_not_believed_and_not_chosen() -> None:
    model = analytical_source(DEVICE, "nvfp4").model
    assert not ILLEGAL & set(believe(model, DEPLOYMENT.shape, 2, [64, 1024]).tactic.tolist())
    for c in choose(model, [DEPLOYMENT.shape], [1, 64, 1024, 8192]):
        assert c.tactic_id not in ILLEGAL
        assert c.candidates <= len(TABLE.ids(c.stage)) - len(ILLEGAL) * (c.stage == 2)


def test_check_finds_an_entry_that_cannot_run(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    entries = []
    for stage in STAGES:
        for bucket, tactic in ((64, 26), (128, 24)):
            (key, *_) = file_keys(DEPLOYMENT, "vllm", bucket, stage, "sm120")
            entries.append(Entry(key, tactic - 20 * (stage == 1), 1.0, 1.1, 0.1, 2))
    path.write_bytes(dumps_json(build_metadata(DEVICE.name, "0.7.4", {}), entries))
    found = [f for f in check(path) if f.code == "tactic-cant-run"]
    assert len(found) == 1 and "needs 102400 bytes" in found[0].message and "(64," in found[0].key
