"""From deployments to a config file: choices, every key an engine asks for, and where each entry comes from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from synth import __version__
from synth.catalog.devices import Device
from synth.catalog.shapes import Deployment, MoEShape
from synth.catalog.tactics import DEFAULT_FLASHINFER, load_table
from synth.choosing import Choice, choose
from synth.denied import Denial
from synth.errors import SynthError
from synth.flashinfer.contract import (
    ENGINES,
    SERVER_MAX_TOKENS,
    build_metadata,
    file_keys,
    map_to_bucket,
    token_buckets,
)
from synth.flashinfer.formats import ConfigEntry, dumps_bundled, dumps_json
from synth.measurements import DEFAULT_POLICY, Origin, Timings
from synth.performance.model import PerformanceModel
from synth.performance.posterior import NEAR
from synth.performance.routing import UNIFORM, Routing

FORMATS = ("json", "bundled")


@dataclass(frozen=True)
class Tally:
    """What one quantization came to.

    Attributes
    ----------
    quant : str
    deployments, shapes : int
        Deployments asked for, and their distinct shapes.
    entries : dict of str to int
        Entries by source: measured, verified, predicted, analytical.
    left_out : int
        Entries that may not beat the fallback.
    gain : float
        Geometric mean of the fallback's time over the choice's, over choices that are written; NaN without any.
    """

    quant: str
    deployments: int
    shapes: int
    entries: dict[str, int]
    left_out: int
    gain: float


@dataclass(frozen=True)
class Emission:
    """A config for one device, ready to be written.

    Attributes
    ----------
    device : Device
    config : bytes
    sidecar : bytes
        JSON: per choice its source, times, margin and keys.
    tallies : tuple of Tally
    """

    device: Device
    config: bytes
    sidecar: bytes
    tallies: tuple[Tally, ...]

    @property
    def entries(self) -> int:
        """Number of entries."""
        return sum(sum(t.entries.values()) for t in self.tallies)

    @property
    def analytical(self) -> bool:
        """Whether any entry is analytical."""
        return any(t.entries.get("analytical") for t in self.tallies)


@dataclass(frozen=True)
class Source:
    """What the choices of one quantization are made from; tactics in `denied` are never chosen."""

    model: PerformanceModel
    timings: Timings | None = None
    name: str = ""
    denied: tuple[Denial, ...] = ()


#: A choice's place: shape, stage, bucket, and whether gemm2 may fuse the finalize step.
_Place = tuple[MoEShape, int, int, bool]


def bucket_union(max_tokens: Sequence[int], flashinfer: str = DEFAULT_FLASHINFER) -> tuple[int, ...]:
    """Return the buckets that servers with any of these maximum token counts look up.

    Below 256 FlashInfer rounds up without clamping: with a maximum of 200 it looks 150 tokens up in bucket 256.
    """
    found = {b for m in max_tokens for b in token_buckets(m, flashinfer)}
    found |= {map_to_bucket(m - 1, m, flashinfer) for m in max_tokens if m > 1}
    return tuple(sorted(found))


def analytical_source(device: Device, quant: str, flashinfer: str = DEFAULT_FLASHINFER) -> Source:
    """Return the source of a device without timings: the analytic model.

    Raises
    ------
    SynthError
        When no tactics are known for the device, or a number that the model needs is not public.
    """
    origin = Origin.make(device.name, device.tactics_arch, quant, flashinfer, DEFAULT_POLICY)
    table = load_table(device.tactics_arch, quant, flashinfer)
    return Source(PerformanceModel.analytic(origin, table), name="analytic model")


def emit(
    device: Device,
    deployments: Sequence[Deployment],
    sources: dict[str, Source],
    *,
    engines: Sequence[str] = ENGINES,
    max_tokens: Sequence[int] = SERVER_MAX_TOKENS,
    flashinfer: str = DEFAULT_FLASHINFER,
    file_format: str = "json",
    routing: Routing = UNIFORM,
    progress: Callable[[int, int], None] | None = None,
) -> Emission:
    """Choose and render the config of one device.

    Parameters
    ----------
    deployments : sequence of Deployment
        Layers to cover; each one's quantization must be in `sources`.
    sources : dict of str to Source
        By quantization.
    engines : sequence of str
        Whose call signatures get keys.
    max_tokens : sequence of int
        Maximum token counts of the servers.
    file_format : str
        One of ``FORMATS``.
    routing : Routing
        How the servers' tokens spread over the experts. Unless uniform, it is recorded in the sidecar and in the
        config's metadata, and no entry is measured.
    progress : callable, optional
        Called with shapes done and shapes in all.

    Raises
    ------
    SynthError
        When a source is simulated, the routing is not one of a deployment, or nothing is left to write.
    """
    for quant, source in sources.items():
        if source.model.origin_.simulated:
            raise SynthError(f"the {quant} model was fitted on simulated timings; no config is made from those")
    buckets = bucket_union(max_tokens, flashinfer)
    by_quant = {q: [d for d in deployments if d.quant == q] for q in sources}
    total = sum(len({d.shape for d in ds}) for ds in by_quant.values())
    done = 0
    entries: dict[str, ConfigEntry] = {}
    records: list[dict[str, Any]] = []
    tallies = []
    for quant, wanted in by_quant.items():
        if not wanted:
            continue
        source = sources[quant]
        shapes = list(dict.fromkeys(d.shape for d in wanted))

        def step(n: int, start: int = done) -> None:
            if progress is not None:
                progress(start + n, total)

        choices = _choose(source, shapes, buckets, "sglang" in engines, routing, step)
        done += len(shapes)
        tallies.append(_render(quant, wanted, shapes, buckets, engines, device, flashinfer, choices, entries, records))
    if not entries:
        raise SynthError("nothing to write: no entry is sure to beat the fallback; time some with `synth collect`")
    provenance: dict[str, Any] = {
        "synth": __version__,
        "sources": {q: _origin_of(s) for q, s in sorted(sources.items())},
        "max_tokens": sorted(max_tokens),
        "engines": sorted(engines),
    }
    if not routing.is_uniform:
        provenance["routing"] = routing.record()
    metadata = build_metadata(device.name, flashinfer, provenance)
    ordered = [entries[key] for key in sorted(entries)]
    config = (dumps_json if file_format == "json" else dumps_bundled)(metadata, ordered)
    head = {
        "config_sha256": hashlib.sha256(config).hexdigest(),
        "device": device.name,
        "flashinfer": flashinfer,
        **provenance,
    }
    # A choice a line: readable, and quick to write.
    lines = ",\n".join(json.dumps(record) for record in records)
    sidecar = f'{json.dumps(head, indent=1)[:-2]},\n "choices": [\n{lines}\n]}}\n'
    return Emission(device, config, sidecar.encode(), tuple(tallies))


def _origin_of(source: Source) -> dict[str, Any]:
    found: dict[str, Any] = {"from": source.name, "model": source.model.fingerprint()}
    if source.denied:
        found["denied"] = sorted({f"gemm{d.stage} {d.tactic}" for d in source.denied})
    return found


def sidecar_path(path: Path) -> Path:
    """Return where a config's sidecar goes: beside it."""
    return path.with_name(path.name + ".provenance.json")


def _choose(
    source: Source,
    shapes: list[MoEShape],
    buckets: Sequence[int],
    unfused_too: bool,
    routing: Routing,
    step: Callable[[int], None],
) -> dict[_Place, Choice]:
    """Return every choice; with `unfused_too`, also those of servers that don't fuse the finalize step."""
    made = choose(
        source.model,
        shapes,
        buckets,
        timings=source.timings,
        fused_finalize=(True, False) if unfused_too else (True,),
        routing=routing,
        denied=frozenset((d.stage, d.tactic) for d in source.denied),
        progress=step,
    )
    return {(c.shape, c.stage, c.bucket, c.fused_finalize): c for c in made}


def _render(
    quant: str,
    wanted: Sequence[Deployment],
    shapes: Sequence[MoEShape],
    buckets: Sequence[int],
    engines: Sequence[str],
    device: Device,
    flashinfer: str,
    choices: dict[_Place, Choice],
    entries: dict[str, ConfigEntry],
    records: list[dict[str, Any]],
) -> Tally:
    """Add the entries of one quantization and their records."""
    table = load_table(device.tactics_arch, quant, flashinfer)
    unfused = table.without_fused_finalize()
    keys: dict[_Place, dict[str, None]] = {}
    labels: dict[MoEShape, dict[str, None]] = {}
    for d in wanted:
        labels.setdefault(d.shape, {})[d.label] = None
        for engine in engines:
            for fused in (True, False) if engine == "sglang" else (True,):
                for stage in (1, 2):
                    for bucket in buckets:
                        found = file_keys(
                            d, engine, bucket, stage, device.tactics_arch, flashinfer, fused_finalize=fused
                        )
                        keys.setdefault((d.shape, stage, bucket, fused), {}).update(dict.fromkeys(found))
    by_source: dict[str, int] = {}
    left_out = 0
    gains = []
    for cell in sorted(keys):
        choice = choices[cell]
        shape, stage, bucket, fused = cell
        fresh = [key for key in keys[cell] if key not in entries]
        if not choice.beats_fallback:
            left_out += len(fresh)
        else:
            tactic_id = (table if fused else unfused).id_of(stage, choice.tactic)
            for key in fresh:
                entries[key] = ConfigEntry(
                    key, tactic_id, choice.ms, choice.runner_up_ms, choice.margin, choice.candidates
                )
            by_source[choice.source] = by_source.get(choice.source, 0) + len(fresh)
            gains.append(np.log(choice.fallback_ms / choice.ms))
        records.append(
            {
                "shape": str(shape),
                "labels": list(labels[shape]),
                "quant": quant,
                "stage": stage,
                "bucket": bucket,
                "fused_finalize": fused,
                "source": choice.source,
                "written": choice.beats_fallback,
                "tactic": str(choice.tactic),
                "ms": _short(choice.ms),
                "runner_up": str(choice.runner_up),
                "runner_up_ms": _short(choice.runner_up_ms),
                "margin": _short(choice.margin),
                "fallback_ms": _short(choice.fallback_ms),
                "expected_regret": _short(choice.regret),
                **{f"within_{m:.0%}": _short(p) for m, p in zip(NEAR, choice.within, strict=True)},
                "candidates": choice.candidates,
                "keys": list(keys[cell]),
            }
        )
    gain = float(np.exp(np.mean(gains))) if gains else float("nan")
    return Tally(quant, len(wanted), len(shapes), by_source, left_out, gain)


def _short(value: float) -> float | None:
    """Return six significant digits, which any machine computes alike; None for a missing value."""
    return float(f"{value:.6g}") if np.isfinite(value) else None
