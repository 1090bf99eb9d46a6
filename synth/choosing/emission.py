"""From deployments to a config file: choices, every key an engine asks for, and where each entry comes from."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from synth import __version__
from synth.catalog.devices import Device
from synth.catalog.shapes import Deployment, MoEShape
from synth.choosing.choose import Choice, choose
from synth.configs.model import BUNDLED_PREFIX, Entry
from synth.configs.module import dumps_bundled
from synth.configs.sidecar import SOURCES, Record, Sidecar, sidecar_path
from synth.configs.v1 import dumps_json
from synth.errors import SynthError
from synth.flashinfer.buckets import map_to_bucket, token_buckets
from synth.flashinfer.calls import ENGINES, SERVER_MAX_TOKENS
from synth.flashinfer.keys import file_keys
from synth.flashinfer.tactics import DEFAULT_FLASHINFER, load_table
from synth.flashinfer.versions import build_metadata
from synth.performance.analytical import analytical_model
from synth.performance.model import PerformanceModel
from synth.performance.posterior import NEAR
from synth.performance.routing import UNIFORM, Routing
from synth.timings.records import Denial
from synth.timings.table import Timings

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
    model = analytical_model(device, quant, flashinfer)
    borrowed = f", with the structure of {model.borrowed_}" if model.borrowed_ else ""
    return Source(model, name=f"analytic model{borrowed}")


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
    by_quant = {q: [d for d in deployments if d.quant == q] for q in sources}
    total = sum(len({d.shape_for(engine) for d in ds for engine in engines}) for ds in by_quant.values())
    done = 0
    entries: dict[str, Entry] = {}
    records: list[Record] = []
    tallies = []
    for quant, wanted in by_quant.items():
        if not wanted:
            continue
        source = sources[quant]
        shapes = list(dict.fromkeys(d.shape_for(engine) for d in wanted for engine in engines))

        def step(n: int, start: int = done) -> None:
            if progress is not None:
                progress(start + n, total)

        choices = _choose(source, shapes, buckets, "sglang" in engines, routing, step)
        done += len(shapes)
        tallies.append(
            _render(quant, wanted, shapes, buckets, engines, device, flashinfer, choices, measured, entries, records)
        )
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
    config = (dumps_json if file_format == "json" else dumps_bundled)(metadata, ordered)
    sidecar = Sidecar({"device": device.name, "flashinfer": flashinfer, **provenance}, tuple(records))
    return Emission(device, config, sidecar.dumps(config), tuple(tallies))


def _origin_of(source: Source) -> dict[str, Any]:
    found: dict[str, Any] = {"from": source.name, "model": source.model.fingerprint()}
    if source.denied:
        found["denied"] = sorted({f"gemm{d.stage} {d.tactic}" for d in source.denied})
    return found


def config_name(device: Device, file_format: str = "json") -> str:
    """Return what a device's config is called: FlashInfer finds a bundled one by its name."""
    if file_format == "bundled":
        return f"{BUNDLED_PREFIX}{device.name.replace(' ', '_')}.py"
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

    Everything is first written in full to a temporary folder beside its place. Then the old config is moved away, the
    sidecars are exchanged, and the new config comes last, so that at no time, not even where the process is killed,
    a config lies beside a sidecar of another one. An error puts everything back as it was.

    Raises
    ------
    SynthError
        When something can't be written; nothing has changed then.
    """
    done: list[tuple[Path, Path]] = []
    current = paths[0]
    try:
        with contextlib.ExitStack() as stack:
            try:
                moves = []
                for emission, current in zip(emissions, paths, strict=True):
                    current.parent.mkdir(parents=True, exist_ok=True)
                    beside = tempfile.TemporaryDirectory(
                        prefix=".synth-", dir=current.parent, ignore_cleanup_errors=True
                    )
                    moves.append((current, _stage(Path(stack.enter_context(beside)), current, emission)))
                for path, pairs in moves:
                    current = path
                    for old, new in pairs:
                        os.replace(old, new)
                        done.append((old, new))
            except BaseException:
                for old, new in reversed(done):
                    os.replace(new, old)
                raise
    except OSError as e:
        raise SynthError(
            f"can't write {current}: {e.strerror or e}; name another place with -o or free some space"
        ) from e


def _stage(folder: Path, path: Path, emission: Writable) -> list[tuple[Path, Path]]:
    """Write a config and its sidecar to a temporary folder; return the renames that put them in place, in order."""
    pairs = []
    for target, data in ((sidecar_path(path), emission.sidecar), (path, emission.config)):
        if target.is_dir():
            raise SynthError(f"can't write {target}: a folder is in its place; move it or name another place with -o")
        if data is None:
            continue
        fresh = folder / f"new-{'sidecar' if target != path else 'config'}"
        with open(fresh, "xb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        pairs.append((fresh, target))
    # `lexists`: a dangling link is replaced like a file.
    aside = [
        (target, folder / f"old-{kind}")
        for kind, target in (("config", path), ("sidecar", sidecar_path(path)))
        if os.path.lexists(target)
    ]
    return [*aside, *pairs]


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
    measured: bool,
    entries: dict[str, Entry],
    records: list[Record],
) -> Tally:
    """Add the entries of one quantization and their records; with `measured` none that are analytical."""
    table = load_table(device.tactics_arch, quant, flashinfer)
    unfused = table.without_fused_finalize()
    keys: dict[_Place, dict[str, None]] = {}
    labels: dict[MoEShape, dict[str, None]] = {}
    for d in wanted:
        for engine in engines:
            passed = replace(d, shape=d.shape_for(engine))
            labels.setdefault(passed.shape, {})[d.label] = None
            for fused in (True, False) if engine == "sglang" else (True,):
                for stage in (1, 2):
                    for bucket in buckets:
                        found = file_keys(
                            passed, engine, bucket, stage, device.tactics_arch, flashinfer, fused_finalize=fused
                        )
                        keys.setdefault((passed.shape, stage, bucket, fused), {}).update(dict.fromkeys(found))
    by_source: dict[str, int] = {}
    abstained: dict[str, int] = {}
    regret: dict[str, float] = {}
    within: dict[str, float] = {}
    gains = []
    for cell in sorted(keys):
        choice = choices[cell]
        shape, stage, bucket, fused = cell
        fresh = [key for key in keys[cell] if key not in entries]
        source = choice.source
        written = choice.beats_fallback and not (measured and source == "analytical")
        if not written:
            abstained[source] = abstained.get(source, 0) + len(fresh)
        else:
            tactic_id = (table if fused else unfused).id_of(stage, choice.tactic)
            for key in fresh:
                entries[key] = Entry(
                    key, tactic_id, choice.ms, choice.runner_up_ms, choice.margin, choice.candidates
                )
            by_source[source] = by_source.get(source, 0) + len(fresh)
            regret[source] = regret.get(source, 0.0) + choice.regret * len(fresh)
            within[source] = within.get(source, 0.0) + choice.within[_TWO_PERCENT] * len(fresh)
            gains.append(np.log(choice.fallback_ms / choice.ms))
        within_1, within_2 = (_short(p) for p in choice.within)
        records.append(
            Record(
                shape=str(shape),
                labels=tuple(labels[shape]),
                quant=quant,
                stage=stage,
                bucket=bucket,
                fused_finalize=fused,
                source=source,
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
                keys=tuple(keys[cell]),
            )
        )
    gain = float(np.exp(np.mean(gains))) if gains else float("nan")
    return Tally(
        quant, len(wanted), len(shapes), by_source, abstained, _per(regret, by_source), _per(within, by_source), gain
    )


def _per(sums: Mapping[str, float], counts: Mapping[str, int]) -> dict[str, float]:
    return {source: total / counts[source] for source, total in sums.items() if counts[source]}


def _short(value: float) -> float | None:
    """Return six significant digits, which any machine computes alike; None for a missing value."""
    return float(f"{value:.6g}") if np.isfinite(value) else None
