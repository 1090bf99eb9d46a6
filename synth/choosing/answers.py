"""What a program asks of one layer on one device: how long each tactic takes, which one to choose, and a config.

These are the functions of ``import synth``; the commands do the same through :mod:`~synth.choosing.sources` and
:mod:`~synth.choosing.emission`, with more to say in between.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from synth.catalog.devices import Device, find_devices
from synth.catalog.schemes import STAGES
from synth.catalog.shapes import Deployment
from synth.choosing import choose as choosing
from synth.choosing import emission
from synth.choosing.choose import Choice
from synth.choosing.sources import Source, source_for
from synth.errors import SynthError
from synth.flashinfer.buckets import token_buckets
from synth.flashinfer.calls import ENGINES, SERVER_MAX_TOKENS
from synth.flashinfer.legality import runnable_ids, smem_block_bytes
from synth.flashinfer.tactics import DEFAULT_FLASHINFER, Tactic
from synth.performance.cells import Cells
from synth.timings.table import times_by_bucket

#: Of a normal distribution, the middle 90 % end here.
_NINETY = 1.6448536269514722


@dataclass(frozen=True)
class TacticTime:
    """How long one tactic takes.

    Attributes
    ----------
    stage : int
        1 or 2.
    tactic : Tactic
    tactic_id : int
        In the FlashInfer version that was asked for.
    ms : float
        Time of the GEMM in ms.
    low_ms, high_ms : float
        The ends of the 90 % interval of a predicted time; the time itself where it was measured.
    source : str
        ``"measured"``, ``"predicted"`` or ``"analytical"``.
    """

    stage: int
    tactic: Tactic
    tactic_id: int
    ms: float
    low_ms: float
    high_ms: float
    source: str


def predict(
    layer: Deployment,
    device: str,
    bucket: int,
    *,
    flashinfer: str = DEFAULT_FLASHINFER,
    measurements: Path | None = None,
    models: Path | None = None,
) -> list[TacticTime]:
    """Return the time of every tactic that can run on a layer at one token count, by stage, fastest first.

    Parameters
    ----------
    layer : Deployment
        See :func:`synth.layer`.
    device : str
        One GPU of the catalogue.
    bucket : int
        Token count, from 1.
    flashinfer : str
        FlashInfer version.
    measurements, models : Path, optional
        Folders of one's own, read before the shipped ones.

    Raises
    ------
    SynthError
        When the device isn't known, or nothing is known to predict by.

    Examples
    --------
    >>> import synth
    >>> times = synth.predict(synth.layer("olmoe", quant="bf16"), "NVIDIA H200", 64)
    >>> times[0].stage, times[0].source
    (1, 'measured')
    """
    if bucket < 1:
        raise SynthError(f"a token bucket must be at least 1, not {bucket}")
    source = _source(_device(device).name, layer.quant, flashinfer, measurements, models)
    model, table = source.model, source.model.table
    smem = smem_block_bytes(model.origin_.device, table.arch)
    timed = _timed(source, layer, bucket)
    found: list[TacticTime] = []
    for stage in STAGES:
        ids = np.array(runnable_ids(table, stage, layer.shape, smem, layer.activation), dtype=np.int64)
        ones = np.ones(len(ids), dtype=np.int64)
        said = model.predict(Cells((layer.shape,), 0 * ones, stage * ones, bucket * ones, ids))
        spread = np.exp(_NINETY * said.log_sd)
        kind = "analytical" if model.analytical else "predicted"
        times = [
            TacticTime(stage, table.tactic(i), i, own, own, own, "measured")
            if (own := timed.get((stage, i))) is not None
            else TacticTime(stage, table.tactic(i), i, ms, ms / by, ms * by, kind)
            for i, ms, by in zip(ids.tolist(), said.ms.tolist(), spread.tolist(), strict=True)
        ]
        found += sorted(times, key=lambda t: (t.ms, t.tactic_id))
    return found


def choose(
    layer: Deployment,
    device: str,
    buckets: Sequence[int] | None = None,
    *,
    flashinfer: str = DEFAULT_FLASHINFER,
    measurements: Path | None = None,
    models: Path | None = None,
) -> list[Choice]:
    """Return the tactic to run in each stage and bucket of a layer, with times, runner-up, fallback and doubt.

    Parameters
    ----------
    buckets : sequence of int, optional
        Token counts; FlashInfer's own up to 8192 if not given.

    Other parameters are those of :func:`predict`.

    Raises
    ------
    SynthError
        As :func:`predict`, or when every tactic of a stage is denied.

    Examples
    --------
    >>> import synth
    >>> choice = synth.choose(synth.layer("olmoe", quant="bf16"), "NVIDIA H200", [64])[0]
    >>> choice.source, choice.ms < choice.fallback_ms
    ('measured', True)
    """
    source = _source(_device(device).name, layer.quant, flashinfer, measurements, models)
    return choosing.choose(
        source.model,
        [layer.shape],
        token_buckets(8192, flashinfer) if buckets is None else buckets,
        timings=source.timings,
        denied=frozenset((d.stage, d.tactic) for d in source.denied),
    )


def emit(
    layers: Iterable[Deployment],
    device: str,
    *,
    engines: Sequence[str] = ENGINES,
    max_tokens: Sequence[int] = SERVER_MAX_TOKENS,
    flashinfer: str = DEFAULT_FLASHINFER,
    file_format: str = "json",
    measurements: Path | None = None,
    models: Path | None = None,
) -> emission.Emission:
    """Return the config of some layers on one device, ready to be saved.

    Parameters are those of :func:`predict` and :func:`synth.choosing.emission.emit`.

    Raises
    ------
    SynthError
        As both, and :class:`~synth.choosing.emission.NothingToWriteError` where every entry is left out.

    Examples
    --------
    >>> import synth
    >>> made = synth.emit([synth.layer("olmoe", quant="bf16")], "NVIDIA H200")
    >>> made.entries
    92
    >>> made.save("olmoe.json")  # doctest: +SKIP
    """
    wanted, found = list(layers), _device(device)
    sources = {
        quant: _source(found.name, quant, flashinfer, measurements, models)
        for quant in dict.fromkeys(layer.quant for layer in wanted)
    }
    return emission.emit(
        found,
        wanted,
        sources,
        engines=engines,
        max_tokens=max_tokens,
        flashinfer=flashinfer,
        file_format=file_format,
    )


def _device(name: str) -> Device:
    found = find_devices(name)
    if len(found) > 1:
        raise SynthError(f"{name} means {', '.join(d.name for d in found)}; name one of them")
    return found[0]


@functools.lru_cache(maxsize=8)
def _source(device: str, quant: str, flashinfer: str, measurements: Path | None, models: Path | None) -> Source:
    problems: list[Any] = []
    (one,) = find_devices(device)
    return source_for(one, quant, flashinfer, measurements=measurements, models=models, problems=problems)


def _timed(source: Source, layer: Deployment, bucket: int) -> dict[tuple[int, int], float]:
    """Return the measured times of a layer's tactics at one token count, by stage and id."""
    if source.timings is None or layer.shape not in source.timings.shapes:
        return {}
    shape = source.timings.shapes.index(layer.shape)
    rows = source.timings.select((source.timings.shape == shape) & (source.timings.tokens == bucket))
    places = times_by_bucket(rows.averaged())
    return {(stage, i): ms for (_, stage, _), times in places.items() for i, ms in times.items()}
