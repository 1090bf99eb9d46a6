"""Public measurements: reading them, and fitting the analytic model's constants to them.

Nothing of these files is shipped. Two kinds are read:

- whole layers, as ``ai-dynamo/aiconfigurator`` publishes them: a CSV with the columns of ``LAYER_COLUMNS``. Rows of
  TensorRT-LLM ran the fastest tactics, rows of vLLM FlashInfer's fallback, both under balanced routing;
- one stage's tactics inside a whole layer, the other stage fixed: a CSV ``stage,tokens,tile,swap_ab,layer_us`` whose
  first comment names the device, the quantization and the layer.
"""

from __future__ import annotations

import csv
import gzip
import math
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from synth.catalog.devices import Device, get_device
from synth.catalog.models import load_models
from synth.catalog.shapes import MoEShape, padded_shape
from synth.errors import SynthError
from synth.flashinfer.tactics import DEFAULT_FLASHINFER, load_table
from synth.performance.geometry import Floats
from synth.performance.layers import LayerModel, LayerTimes
from synth.performance.roofline import Hardware, Roofline
from synth.performance.routing import Routing

LAYER_COLUMNS = (
    "framework", "device", "moe_dtype", "num_tokens", "hidden_size", "inter_size", "topk", "num_experts",
    "moe_tp_size", "moe_ep_size", "latency",
)  # fmt: skip
_TACTIC_COLUMNS = ("stage", "tokens", "tile", "swap_ab", "layer_us")
#: Largest file that is read, unpacked, in bytes.
_MAX_BYTES = 64 * 1024 * 1024
_QUANTS = {"bfloat16": "bf16", "fp8": "fp8", "nvfp4": "nvfp4"}
#: Engines whose layers ran the fastest tactics, and FlashInfer's fallback.
_TUNED = {"TRTLLM": True, "VLLM": False}
#: Layers that a fit takes in of one engine at most, drawn at random: it doesn't improve beyond.
_FIT_LAYERS = 1000
#: A layer's shape, its model, tokens and ms.
_Row = tuple[MoEShape, str, int, float]


def read_folder(folder: Path) -> tuple[list[LayerTimes], list[TacticSweep]]:
    """Read every ``.csv`` and ``.csv.gz`` of a folder, whole layers and sweeps.

    Raises
    ------
    SynthError
        When there is none, or one can't be read.
    """
    if not folder.is_dir():
        raise SynthError(f"{folder}: no such folder; name one of public measurements")
    layers: list[LayerTimes] = []
    sweeps: list[TacticSweep] = []
    for path in sorted(p for p in folder.iterdir() if p.name.endswith((".csv", ".csv.gz"))):
        comments, rows = _read(path)
        columns = set(rows[0]) if rows else set()
        if columns >= set(LAYER_COLUMNS):
            layers += _layers(path, rows)
        elif columns >= set(_TACTIC_COLUMNS):
            sweeps.append(_sweep(path, comments, rows))
        else:
            raise SynthError(
                f"{path}: neither whole layers ({','.join(LAYER_COLUMNS)}) nor a sweep ({','.join(_TACTIC_COLUMNS)}); "
                "take it out of the folder"
            )
    seen = [(t.device, t.quant, t.engine) for t in layers]
    if twice := [key for key in dict.fromkeys(seen) if seen.count(key) > 1]:
        raise SynthError(f"{folder}: layers of {' '.join(twice[0])} are in two files; put them into one")
    if not layers and not sweeps:
        raise SynthError(f"{folder}: no .csv or .csv.gz in it; name a folder of public measurements")
    return layers, sweeps


def _read(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Return the comment lines at the top and the rows."""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as f:
            data = f.read(_MAX_BYTES + 1)
        text = data.decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as e:
        raise SynthError(f"{path}: can't be read ({e}); take it out of the folder") from None
    if len(data) > _MAX_BYTES:
        raise SynthError(f"{path}: more than {_MAX_BYTES >> 20} MiB; take it out of the folder")
    lines = text.splitlines()
    comments = [line for line in lines if line.startswith("#")]
    try:
        return comments, list(csv.DictReader(line for line in lines if not line.startswith("#")))
    except csv.Error as e:
        raise SynthError(f"{path}: not a CSV ({e}); take it out of the folder") from None


def _layers(path: Path, rows: Sequence[dict[str, str]]) -> list[LayerTimes]:
    """Return the rows by device, quantization and engine; splits that leave a fraction are passed over."""
    found: dict[tuple[str, str, str], list[_Row]] = {}
    names: dict[str, str] = {}
    ungated = {(m.hidden, m.inter, m.experts) for m in load_models() if m.activation == "relu2"}
    for number, row in enumerate(rows, start=2):
        try:
            tokens, hidden, inter, top_k, experts, tp, ep = (int(row[c]) for c in LAYER_COLUMNS[3:10])
            ms = float(row["latency"])
            quant, engine = _QUANTS[row["moe_dtype"]], row["framework"]
            if min(tp, ep) < 1 or not 0 < tokens < 2**31 or not 0.0 < ms < math.inf or engine not in _TUNED:
                raise ValueError("a value out of range")
            device = names.get(row["device"]) or names.setdefault(row["device"], get_device(row["device"]).name)
            if inter % tp or experts % ep:
                continue
            gated = (hidden, inter, experts) not in ungated
            shape = padded_shape(MoEShape(hidden, inter // tp, experts // ep, top_k, ep, gated), quant)
        except (KeyError, TypeError, ValueError, SynthError) as e:
            raise SynthError(f"{path}: row {number}: {e}; mend the row or take it out") from None
        model = f"h{hidden}-i{inter}-e{experts}-k{top_k}"
        found.setdefault((device, quant, engine), []).append((shape, model, tokens, ms))
    return [_times(device, quant, engine, some) for (device, quant, engine), some in sorted(found.items())]


def _times(device: str, quant: str, engine: str, rows: Sequence[_Row]) -> LayerTimes:
    shapes = list(dict.fromkeys((shape, model) for shape, model, _, _ in rows))
    index = {key: i for i, key in enumerate(shapes)}
    return LayerTimes(
        device=device,
        quant=quant,
        engine=engine,
        tuned=_TUNED[engine],
        routing=Routing.balanced(),
        shapes=tuple(shape for shape, _ in shapes),
        models=tuple(model for _, model in shapes),
        shape=np.array([index[shape, model] for shape, model, _, _ in rows]),
        tokens=np.array([tokens for _, _, tokens, _ in rows]),
        ms=np.array([ms for *_, ms in rows]),
    )


@dataclass(frozen=True)
class TacticSweep:
    """Times of a whole layer while one stage's tactic changes.

    Attributes
    ----------
    device : Device
    quant : str
    shape : MoEShape
    source : str
        The file's first comment.
    stage, tokens, tactic : ndarray of int64, shape (rows,)
        Tactic ids of FlashInfer ``DEFAULT_FLASHINFER``, without the fused finalize.
    ms : ndarray of float64, shape (rows,)
    """

    device: Device
    quant: str
    shape: MoEShape
    source: str
    stage: NDArray[np.int64]
    tokens: NDArray[np.int64]
    tactic: NDArray[np.int64]
    ms: Floats


def _sweep(path: Path, comments: Sequence[str], rows: Sequence[dict[str, str]]) -> TacticSweep:
    head = comments[0] if comments else ""
    name, _, rest = head.lstrip("# ").partition(" (")
    sizes = [re.search(p, rest) for p in (r"hidden (\d+)", r"inter (\d+)", r"(\d+) experts", r"top_k (\d+)")]
    quant = next((q for q in ("nvfp4", "fp8", "bf16") if q in rest.lower()), None)
    if quant is None or not all(sizes):
        raise SynthError(
            f"{path}: its first line must be a comment such as '# NVIDIA GeForce RTX 5090 (SM120), NVFP4, 128 experts, "
            "top_k 8, hidden 2816, inter 704'"
        )
    try:
        hidden, inter, experts, top_k = (int(m[1]) for m in sizes if m is not None)
        shape = MoEShape(hidden, inter, experts, top_k)
        device = get_device(name)
        table = load_table(device.tactics_arch, quant, DEFAULT_FLASHINFER)
    except (ValueError, SynthError) as e:
        raise SynthError(f"{path}: its first line: {e}; mend it or take the file out of the folder") from None
    ids = {
        (stage, "x".join(map(str, t.tile)) + "B", t.swap_ab): i
        for stage in (1, 2)
        for i, t in table.items(stage)
        if not t.finalize
    }
    cells = []
    for number, row in enumerate(rows, start=1):
        try:
            stage, tokens, ms = int(row["stage"]), int(row["tokens"]), float(row["layer_us"]) / 1e3
            if not 0 < tokens < 2**31 or not 0.0 < ms < math.inf:
                raise ValueError("a value out of range")
            cells.append((stage, tokens, ids[stage, row["tile"], row["swap_ab"] == "1"], ms))
        except (KeyError, TypeError, ValueError) as e:
            raise SynthError(f"{path}: row {number}: {e} is no tactic or number; mend it or take it out") from None
    columns = [np.array(c) for c in zip(*cells, strict=True)]
    return TacticSweep(device, quant, shape, head.lstrip("# "), *columns)


def fit_constants(times: Sequence[LayerTimes], start: Roofline, seed: int = 0) -> LayerModel:
    """Fit the analytic model's constants to the layers of one device and quantization, one table an engine.

    Parameters
    ----------
    start : Roofline
        Where the fit begins: the constants of the structure that is carried over.
    """
    first = times[0]
    device = get_device(first.device)
    rng = np.random.default_rng(seed)
    some = [_drawn(t, rng) for t in times]
    table = load_table(device.tactics_arch, first.quant, DEFAULT_FLASHINFER)
    return LayerModel.fit(some, table, Hardware.of(device, first.quant), start)


def _drawn(times: LayerTimes, rng: np.random.Generator) -> LayerTimes:
    if len(times) <= _FIT_LAYERS:
        return times
    return times.select(np.sort(rng.choice(len(times), _FIT_LAYERS, replace=False)))


def grouped(layers: Sequence[LayerTimes]) -> dict[tuple[str, str], list[LayerTimes]]:
    """Return tables by device and quantization."""
    found: dict[tuple[str, str], list[LayerTimes]] = {}
    for times in layers:
        found.setdefault((times.device, times.quant), []).append(times)
    return found
