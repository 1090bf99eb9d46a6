"""From deployments to a config file: choices, every key an engine asks for, and where each entry comes from."""

from __future__ import annotations

import itertools
import math
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from synth import __version__
from synth.catalog.devices import Device
from synth.catalog.files import write_together
from synth.catalog.schemes import STAGES
from synth.catalog.shapes import Deployment, MoEShape
from synth.choosing.choose import Choice, choose
from synth.choosing.sources import Source
from synth.configs.model import Entry, module_name
from synth.configs.module import dumps_bundled
from synth.configs.sidecar import SOURCES, Record, Sidecar, sidecar_path
from synth.configs.v1 import dumps_json
from synth.errors import SynthError
from synth.flashinfer.buckets import map_to_bucket, token_buckets
from synth.flashinfer.calls import ENGINES, SERVER_MAX_TOKENS
from synth.flashinfer.keys import file_keys
from synth.flashinfer.tactics import DEFAULT_FLASHINFER, load_table
from synth.flashinfer.versions import build_metadata
from synth.performance.posterior import NEAR
from synth.performance.routing import UNIFORM, Routing

__all__ = (
    "FORMATS",
    "Emission",
    "NothingToWriteError",
    "Source",
    "Tally",
    "bucket_union",
    "config_name",
    "emit",
    "output_paths",
    "write",
)

FORMATS = ("json", "bundled")
#: Of the probabilities of a choice, that of being within 2 % of the best.
_TWO_PERCENT = NEAR.index(0.02)


@dataclass(frozen=True)
class Tally:
    """What one quantization came to. An entry is one key; several keys can ask for one choice.

    Attributes
    ----------
    quant : str
    deployments, shapes : int
        Deployments asked for, and their distinct shapes.
    entries : dict of str to int
        Entries that are written, by source: measured, verified, predicted, analytical.
    abstained : dict of str to int
        Entries that are left out, by what they would have been: they may not beat the fallback, or are analytical
        where only measured ones are wanted.
    regret, within : dict of str to float
        By source, means over the entries that are written: the expected regret as a share, and the probability of
        being within 2 % of the best, both as the model states them.
    gain : float
        Geometric mean of the fallback's time over the choice's, over choices that are written; NaN without any.
    """

    quant: str
    deployments: int
    shapes: int
    entries: dict[str, int]
    abstained: dict[str, int]
    regret: dict[str, float]
    within: dict[str, float]
    gain: float

    @property
    def left_out(self) -> int:
        """Number of entries that are left out."""
        return sum(self.abstained.values())


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
    def left_out(self) -> int:
        """Number of entries that are left out."""
        return sum(t.left_out for t in self.tallies)

    @property
    def analytical(self) -> bool:
        """Whether any entry is analytical."""
        return any(t.entries.get("analytical") for t in self.tallies)

    def save(self, path: Path | str) -> Path:
        """Write the config to a path, and its sidecar beside it, both or neither; returns the path.

        Raises
        ------
        SynthError
            When they can't be written.
        """
        target = Path(path)
        write([self], [target])
        return target


class NothingToWriteError(SynthError):
    """Every entry is left out.

    Attributes
    ----------
    tallies : tuple of Tally
        What was left out.
    """

    def __init__(self, message: str, tallies: tuple[Tally, ...]) -> None:
        super().__init__(message)
        self.tallies = tallies


def bucket_union(max_tokens: Sequence[int], flashinfer: str = DEFAULT_FLASHINFER) -> tuple[int, ...]:
    """Return the buckets that servers with any of these maximum token counts look up.

    Below 256 FlashInfer rounds up without clamping: with a maximum of 200 it looks 150 tokens up in bucket 256.
    """
    found = {b for m in max_tokens for b in token_buckets(m, flashinfer)}
    found |= {map_to_bucket(m - 1, m, flashinfer) for m in max_tokens if m > 1}
    return tuple(sorted(found))


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
    measured: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Emission:
    """Choose and render the config of one device.

    One file is all that this device needs under one FlashInfer version: of the metadata that FlashInfer compares, only
    its version and the GPU's name are exact, and the rest are wildcards, see
    :func:`synth.flashinfer.versions.build_metadata`. What differs between engines, maximum token counts and
    quantizations is in the keys. How many entries have which source is in ``_metadata.synth.entries`` and in the
    sidecar, for whoever has to refuse some of them.

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
    measured : bool
        Leave out what is analytical: what no timing of this device stands behind.
    progress : callable, optional
        Called with shapes done and shapes in all.

    Raises
    ------
    NothingToWriteError
        When every entry is left out.
    SynthError
        When a source is simulated, the routing is not one of a deployment, or an entry of a bundled file would be
        analytical: that is the form in which FlashInfer ships configs, and what nobody has measured isn't for others.
    """
    for quant, source in sources.items():
        if source.model.origin_.simulated:
            raise SynthError(f"the {quant} model was fitted on simulated timings; no config is made from those")
    buckets = bucket_union(max_tokens, flashinfer)
    asked = {q: found for q in sources if (found := _asked(deployments, q, engines))}
    total, done = sum(map(len, asked.values())), 0
    config = _Config(device, flashinfer, buckets, measured)
    tallies = []
    for quant, shapes in asked.items():

        def step(n: int, start: int = done) -> None:
            if progress is not None:
                progress(start + n, total)

        source = sources[quant]
        choices = choose(
            source.model,
            list(shapes),
            buckets,
            timings=source.timings,
            fused_finalize=(True, False) if "sglang" in engines else (True,),
            routing=routing,
            denied=frozenset((d.stage, d.tactic) for d in source.denied),
            progress=step,
        )
        done += len(shapes)
        tallies.append(config.add(quant, shapes, choices))
    entries = config.entries
    counts = {source: sum(t.entries.get(source, 0) for t in tallies) for source in SOURCES}
    if not entries:
        raise NothingToWriteError(
            f"nothing to write for {device.name}: all {sum(t.left_out for t in tallies)} entries are left out, since "
            f"{'no timing stands behind them or ' if measured else ''}they may not beat the fallback; time some with "
            "`synth collect`",
            tuple(tallies),
        )
    if file_format == "bundled" and counts["analytical"]:
        raise SynthError(
            f"{counts['analytical']} of {len(entries)} entries for {device.name} are analytical, and a bundled file, "
            "the form that is contributed to FlashInfer, holds none of these; time them with `synth collect`, leave "
            "them out with --measured, or write --format json for your own use"
        )
    provenance: dict[str, Any] = {
        "synth": __version__,
        "sources": {q: _origin_of(s) for q, s in sorted(sources.items())},
        "entries": {source: count for source, count in counts.items() if count},
        "left_out": sum(t.left_out for t in tallies),
        "max_tokens": sorted(max_tokens),
        "engines": sorted(engines),
    }
    if not routing.is_uniform:
        provenance["routing"] = routing.record()
    metadata = build_metadata(device.name, flashinfer, provenance)
    ordered = [entries[key] for key in sorted(entries)]
    data = (dumps_json if file_format == "json" else dumps_bundled)(metadata, ordered)
    sidecar = Sidecar({"device": device.name, "flashinfer": flashinfer, **provenance}, tuple(config.records))
    return Emission(device, data, sidecar.dumps(data), tuple(tallies))


def _origin_of(source: Source) -> dict[str, Any]:
    found: dict[str, Any] = {"from": source.name, "model": source.model.fingerprint()}
    if source.denied:
        found["denied"] = sorted({f"gemm{d.stage} {d.tactic}" for d in source.denied})
    return found


def config_name(device: Device, file_format: str = "json") -> str:
    """Return what a device's config is called: FlashInfer finds a bundled one by its name."""
    if file_format == "bundled":
        return module_name(device.name)
    return f"synth-{device.slug}.json"


def output_paths(devices: Sequence[Device], output: str | None = None, file_format: str = "json") -> list[Path]:
    """Return where the config of each device goes.

    Parameters
    ----------
    output : str, optional
        A file, or a folder for files of the usual names: what ends in a slash, is a folder already, or, for several
        devices, anything that isn't a config file's name. Without it the files go here.

    Raises
    ------
    SynthError
        When one file is named for several devices: FlashInfer uses a config on one GPU only.
    """
    names = [config_name(device, file_format) for device in devices]
    if output is None:
        return [Path(name) for name in names]
    path = Path(output)
    if output.endswith(("/", os.sep)) or os.path.isdir(path):
        return [path / name for name in names]
    if len(devices) == 1:
        return [path]
    if path.suffix in (".json", ".py") or path.exists():
        raise SynthError(
            f"-o {output} is one file, but a config is for one device, and {len(devices)} match: "
            f"{', '.join(d.name for d in devices)}; name a folder with -o, or one of them with --device"
        )
    return [path / name for name in names]


class Writable(Protocol):
    """A config's bytes and those of its sidecar, None without one."""

    @property
    def config(self) -> bytes: ...

    @property
    def sidecar(self) -> bytes | None: ...


def write(emissions: Sequence[Writable], paths: Sequence[Path]) -> None:
    """Write each config to its path and its sidecar beside it: all of them, or none.

    At no time, not even where the process is killed, a config lies beside a sidecar of another one.

    Raises
    ------
    SynthError
        When something can't be written; nothing has changed then.
    """
    write_together(
        [[(path, e.config), (sidecar_path(path), e.sidecar)] for e, path in zip(emissions, paths, strict=True)]
    )


#: Of a shape, the deployments that have it on a rank, each with the engine that asks for it.
_Asked = dict[MoEShape, list[tuple[Deployment, str]]]


def _asked(deployments: Sequence[Deployment], quant: str, engines: Sequence[str]) -> _Asked:
    """Return what engines pass for the deployments of a quantization, by shape."""
    found: _Asked = {}
    for deployment in deployments:
        for engine in engines if deployment.quant == quant else ():
            passed = replace(deployment, shape=deployment.shape_for(engine))
            found.setdefault(passed.shape, []).append((passed, engine))
    return found


@dataclass
class _Config:
    """A config that grows by one quantization after another; with `measured` no entry is analytical."""

    device: Device
    flashinfer: str
    buckets: Sequence[int]
    measured: bool
    entries: dict[str, Entry] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)

    def add(self, quant: str, asked: _Asked, choices: Sequence[Choice]) -> Tally:
        """Add the entries of one quantization and their records."""
        table = load_table(self.device.tactics_arch, quant, self.flashinfer)
        tables = {True: table, False: table.without_fused_finalize()}
        found: dict[MoEShape, dict[tuple[int, int, bool], Choice]] = {shape: {} for shape in asked}
        for choice in choices:
            found[choice.shape][choice.stage, choice.bucket, choice.fused_finalize] = choice
        told = []
        for shape in sorted(asked):
            labels = tuple(dict.fromkeys(d.label for d, _ in asked[shape]))
            for (stage, bucket, fused), keys in self._keys(asked[shape]):
                choice = found[shape][stage, bucket, fused]
                fresh = [key for key in keys if key not in self.entries]
                written = choice.beats_fallback and not (self.measured and choice.source == "analytical")
                if written:
                    tactic = tables[fused].id_of(stage, choice.tactic)
                    for key in fresh:
                        self.entries[key] = Entry(
                            key, tactic, choice.ms, choice.runner_up_ms, choice.margin, choice.candidates
                        )
                self.records.append(_record(choice, quant, labels, keys, written))
                told.append((choice, len(fresh), written))
        return _tally(quant, asked, told)

    def _keys(self, asked: Sequence[tuple[Deployment, str]]) -> Iterator[tuple[tuple[int, int, bool], tuple[str, ...]]]:
        """Yield stage, bucket and whether gemm2 may fuse the finalize step, and all keys that ask for that choice."""
        arch, flashinfer = self.device.tactics_arch, self.flashinfer
        settings = (False, True) if any(engine == "sglang" for _, engine in asked) else (True,)
        for stage, bucket, fused in itertools.product(STAGES, self.buckets, settings):
            keys = (
                file_keys(deployment, engine, bucket, stage, arch, flashinfer, fused_finalize=fused)
                for deployment, engine in asked
                if fused or engine == "sglang"
            )
            yield (stage, bucket, fused), tuple(dict.fromkeys(itertools.chain.from_iterable(keys)))


def _tally(quant: str, asked: _Asked, told: Sequence[tuple[Choice, int, bool]]) -> Tally:
    """Return what choices came to, each with the number of its entries and whether they are written."""
    pairs = Counter(engine for of_shape in asked.values() for _, engine in of_shape)
    entries, abstained = Counter[str](), Counter[str]()
    regret, within = defaultdict[str, float](float), defaultdict[str, float](float)
    for choice, count, written in told:
        (entries if written else abstained)[choice.source] += count
        if written:
            regret[choice.source] += choice.regret * count
            within[choice.source] += choice.within[_TWO_PERCENT] * count
    gains = [math.log(choice.fallback_ms / choice.ms) for choice, _, written in told if written]
    return Tally(
        quant=quant,
        deployments=max(pairs.values()),
        shapes=len(asked),
        entries=dict(entries),
        abstained=dict(abstained),
        regret={source: total / entries[source] for source, total in regret.items() if entries[source]},
        within={source: total / entries[source] for source, total in within.items() if entries[source]},
        gain=math.exp(math.fsum(gains) / len(gains)) if gains else math.nan,
    )


def _record(choice: Choice, quant: str, labels: tuple[str, ...], keys: tuple[str, ...], written: bool) -> Record:
    """Return what the sidecar says of a choice."""
    within_1, within_2 = (_short(p) for p in choice.within)
    return Record(
        shape=str(choice.shape),
        labels=labels,
        quant=quant,
        stage=choice.stage,
        bucket=choice.bucket,
        fused_finalize=choice.fused_finalize,
        source=choice.source,
        written=written,
        tactic=str(choice.tactic),
        ms=_short(choice.ms),
        runner_up=str(choice.runner_up),
        runner_up_ms=_short(choice.runner_up_ms),
        margin=_short(choice.margin),
        fallback_ms=_short(choice.fallback_ms),
        expected_regret=_short(choice.regret),
        within_1=within_1,
        within_2=within_2,
        candidates=choice.candidates,
        keys=keys,
    )


def _short(value: float) -> float | None:
    """Return six significant digits, which any machine computes alike; None for a missing value."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
