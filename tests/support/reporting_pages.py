"""Configs to report on: real ones, of the shipped models and timings and of an analytical device."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from synth.catalog.devices import get_device
from synth.catalog.models import find_layer, select
from synth.choosing.emission import emit, write
from synth.choosing.sources import Source, analytical_source
from synth.configs.sidecar import sidecar_path
from synth.performance.model import PerformanceModel
from synth.performance.routing import UNIFORM, Routing
from synth.timings.folders import load

ROOT = Path(__file__).parents[2]
MEASUREMENTS, MODELS = ROOT / "measurements", ROOT / "models"
H200 = get_device("NVIDIA H200")
PRO_6000 = get_device("NVIDIA RTX PRO 6000 Blackwell Workstation Edition")
#: Three layers that were swept, and one of which nothing is known.
LAYERS = ("olmoe", "glm-5-tp8", "mixtral-8x7b-tp4", "kimi-k2-ep8")
#: What strangers may call things.
HOSTILE = (
    "<script>document.title='owned'</script>",
    '"><img src=x onerror="document.title=\'owned\'">',
    "</title></style><style>body{display:none}</style>",
    "=cmd|'/c calc'!A1",
    "javascript:alert(1)",
    "]]><svg onload=document.title='owned'>",
    "\u202egnp.exe \x00\x1b[31m \ud800 `code`",
    "a" * 5000,
)


def h200(
    path: Path,
    quants: Sequence[str] = ("bf16",),
    file_format: str = "json",
    routing: Routing = UNIFORM,
    layers: Sequence[str] = LAYERS,
) -> Path:
    """Write a config of the H200 by the shipped models and timings."""
    models = {q: PerformanceModel.load(MODELS / f"nvidia-h200/flashinfer-0.7.4/{q}.zip") for q in quants}
    timings = {t.origin.quant: t for t in load(MEASUREMENTS, problems=[])}
    sources = {q: Source(m, timings[q], f"model fitted on {len(m.shapes_)} shapes") for q, m in models.items()}
    wanted = [
        d
        for name in layers
        for q in quants
        for d in select([find_layer(name)], [q], quant=q, tp=None, ep=None, named=True)
    ]
    made = emit(H200, wanted, sources, max_tokens=(8192,), file_format=file_format, routing=routing)
    write([made], [path])
    return path


def pro_6000(path: Path) -> Path:
    """Write an analytical config."""
    quants = ("bf16", "nvfp4")
    layers = [
        d
        for name in ("olmoe", "qwen3-30b-a3b")
        for q in quants
        for d in select([find_layer(name)], [q], quant=q, tp=None, ep=None, named=True)
    ]
    wanted = {d.quant for d in layers}
    write([emit(PRO_6000, layers, {q: analytical_source(PRO_6000, q) for q in wanted})], [path])
    return path


def copied(config: Path, folder: Path, sidecar: bool = True) -> Path:
    """Copy a config, and its sidecar, to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    if sidecar:
        shutil.copy(sidecar_path(config), folder)
    return Path(shutil.copy(config, folder))


def edited(config: Path, folder: Path, edit: Callable[[dict[str, Any]], None], whole: bool = True) -> Path:
    """Copy a config and change its sidecar; with `whole`, so that it still is this config's."""
    path = copied(config, folder)
    side = sidecar_path(path)
    value = json.loads(side.read_bytes())
    edit(value)
    if whole:
        value["config_sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    side.write_text(json.dumps(value))
    return path


def hostile(config: Path, folder: Path) -> Path:
    """Copy a config under the work of a stranger: every free text of its sidecar, and its name, is hostile."""

    def edit(value: dict[str, Any]) -> None:
        value["synth"] = HOSTILE[0]
        value["engines"] = list(HOSTILE)
        value["routing"] = {"text": HOSTILE[1]}
        for origin in value["sources"].values():
            origin.update({"from": HOSTILE[2], "model": HOSTILE[3], "denied": list(HOSTILE)})
        for i, choice in enumerate(value["choices"]):
            choice["labels"] = [HOSTILE[i % len(HOSTILE)], *HOSTILE]
            choice["ported_from"] = HOSTILE[i % len(HOSTILE)]

    path = edited(config, folder, edit)
    name = "<img src=x onerror=alert(1)>=1+1.json"
    sidecar_path(path).rename(folder / f"{name}.provenance.json")
    return path.rename(folder / name)
