"""What a config and its sidecar say, read as the work of a stranger: checked, cleaned, and never more than it says."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from synth.catalog.devices import Device, get_device
from synth.catalog.schemes import QUANTS, STAGES
from synth.catalog.shapes import MoEShape
from synth.configs import sidecar as sidecars
from synth.configs.matching import check_sidecar
from synth.configs.model import Config
from synth.configs.reading import read
from synth.configs.sidecar import SOURCES
from synth.errors import SynthError
from synth.flashinfer.tactics import Tactic, TacticTable, load_table
from synth.flashinfer.versions import contract_for
from synth.reporting.texts import foreign

#: Kinds of gains: both times are timings, or at least one is the model's, or nothing was ever timed.
GAINS = ("measured", "predicted", "analytical")
#: What a choice may be: its source where it is in the config, unknown without a sidecar, or left out.
FATES = (*SOURCES, "unknown", "left")
#: Longest text of a shape or a tactic that is parsed.
_LONGEST = 200
#: Bounds of a time in ms and of a token count; what lies beyond was not measured on a GPU.
_TIMES = (1e-6, 1e7)
_MOST_TOKENS = 2**31 - 1
#: Texts of a list that are shown; more are counted.
_MOST_TEXTS = 50


@dataclass(frozen=True)
class Choice:
    """A tactic for one (shape, stage, bucket), as far as the files tell.

    Attributes
    ----------
    quant, shape : str
        ``""`` where the key doesn't tell.
    stage, bucket : int
    fused : bool
        For servers that let gemm2 fuse the finalize step.
    tactic, runner_up : Tactic or None
        None where they are unknown.
    labels : tuple of str
        Deployments that pass this layer; empty without a sidecar.
    source : str
        One of :data:`synth.configs.sidecar.SOURCES`; ``"unknown"`` without a sidecar.
    written : bool
        It is in the config; else it is left out.
    ms, runner_up_ms, fallback_ms : float or None
        In ms; measured or predicted as `source` says.
    regret : float or None
        Expected, as a share.
    within : float or None
        Probability of being within 2 % of the best.
    measured_gain : bool
        Both the choice's time and the fallback's are timings.
    """

    quant: str
    shape: str
    stage: int
    bucket: int
    fused: bool
    tactic: Tactic | None
    labels: tuple[str, ...] = ()
    source: str = "unknown"
    written: bool = True
    runner_up: Tactic | None = None
    ms: float | None = None
    runner_up_ms: float | None = None
    fallback_ms: float | None = None
    regret: float | None = None
    within: float | None = None
    measured_gain: bool = False

    @property
    def gain(self) -> float | None:
        """The fallback's time over the choice's."""
        return self.fallback_ms / self.ms if self.ms is not None and self.fallback_ms is not None else None

    @property
    def gain_kind(self) -> str:
        """What the gain is, one of ``GAINS``."""
        if self.measured_gain:
            return "measured"
        return "analytical" if self.source == "analytical" else "predicted"

    @property
    def fate(self) -> str:
        """The source, or that it is left out: one of ``FATES``."""
        return self.source if self.written else "left"

    @property
    def name(self) -> str:
        """What the layer is called: a deployment that has it, and how many more do; else the shape."""
        more = f" +{len(self.labels) - 1}" if len(self.labels) > 1 else ""
        return f"{self.labels[0]}{more}" if self.labels else self.shape or "not readable"

    @property
    def margin(self) -> float | None:
        """How much slower the runner-up is, as a share."""
        return self.runner_up_ms / self.ms - 1.0 if self.ms is not None and self.runner_up_ms is not None else None


@dataclass(frozen=True)
class Origin:
    """What the choices of one quantization were made from, as the files say.

    Attributes
    ----------
    name : str
        For example ``"model fitted on 40 shapes"``.
    fingerprint : str
        The model's; ``""`` if not given.
    denied : tuple of str
        Stages and tactics that were kept out.
    """

    name: str
    fingerprint: str
    denied: tuple[str, ...]


@dataclass(frozen=True)
class Facts:
    """What a config and its sidecar say.

    Attributes
    ----------
    name : str
        The config's file name.
    kind : str
        ``"json"`` or ``"bundled"``.
    sha256 : str
        Of the config.
    gpu, flashinfer, synth : str
        As the files say; ``""`` where they don't.
    device : Device or None
        None for a GPU that isn't in the catalogue.
    entries : int
        Keys of the config.
    unreadable : int
        Of these, keys or values that mean nothing; only counted without a sidecar.
    sidecar : bool
    counts : dict of str to int
        Entries by source, the surest first; empty without a sidecar.
    choices : tuple of Choice
    origins : dict of str to Origin
        By quantization.
    engines : tuple of str
    max_tokens : tuple of int
    routing : str
        ``""`` for the uniform routing of every timing.
    ported_from : tuple of str
        FlashInfer versions under which choices were made that are another's now.
    """

    name: str
    kind: str
    sha256: str
    gpu: str
    flashinfer: str
    synth: str
    device: Device | None
    entries: int
    unreadable: int
    sidecar: bool
    counts: Mapping[str, int]
    choices: tuple[Choice, ...]
    origins: Mapping[str, Origin]
    engines: tuple[str, ...]
    max_tokens: tuple[int, ...]
    routing: str
    ported_from: tuple[str, ...]

    @property
    def written(self) -> tuple[Choice, ...]:
        """The choices that are in the config."""
        return tuple(c for c in self.choices if c.written)

    @property
    def quants(self) -> tuple[str, ...]:
        """The quantizations of the choices."""
        there = {c.quant for c in self.choices}
        return tuple(q for q in (*QUANTS, "") if q in there)

    @property
    def analytical(self) -> frozenset[str]:
        """The quantizations with a choice that nothing was timed for."""
        return frozenset(c.quant for c in self.choices if c.source == "analytical")

    def table(self, quant: str) -> TacticTable | None:
        """Return the tactics of a quantization; None where they are unknown."""
        return _table(self.device.tactics_arch, quant, self.flashinfer) if self.device is not None else None


def load(path: Path) -> Facts:
    """Read a config and its sidecar.

    Raises
    ------
    SynthError
        When one can't be read, the sidecar is another config's, or it says of the config what isn't so.
    """
    config = read(path)
    sidecar = config.sidecar
    said = _object(sidecar.head if sidecar else config.provenance)
    gpu = config.named_gpu or (_text(said.get("device")) if sidecar else "")
    flashinfer = _text(config.said.get("flashinfer_version")) or (_text(said.get("flashinfer")) if sidecar else "")
    device = _device(gpu)
    arch = device.tactics_arch if device is not None else ""
    if sidecar is not None:
        choices = tuple(_choice(path, i, record) for i, record in enumerate(sidecar.records, 1))
        check_sidecar(config)
        unreadable = 0
    else:
        choices, unreadable = _choices_of_keys(config, arch, flashinfer)
    routing = said.get("routing")
    ported = sorted({r.ported_from for r in sidecar.records if r.ported_from}) if sidecar else []
    return Facts(
        name=foreign(path.name),
        kind=config.form,
        sha256=config.sha256,
        gpu=foreign(gpu),
        flashinfer=foreign(flashinfer, 40),
        synth=foreign(_text(said.get("synth")), 40),
        device=device,
        entries=len(config.entries),
        unreadable=unreadable,
        sidecar=sidecar is not None,
        counts=sidecar.counts() if sidecar else {},
        choices=choices,
        origins=_origins(said.get("sources")),
        engines=_texts(said.get("engines")),
        max_tokens=tuple(sorted(n for n in _list(said.get("max_tokens")) if type(n) is int and 0 < n <= _MOST_TOKENS)),
        routing=foreign(_text(_object(routing).get("text")) or "unnamed") if routing is not None else "",
        ported_from=tuple(foreign(v, 40) for v in ported),
    )


def _choice(path: Path, number: int, record: sidecars.Record) -> Choice:
    """Return a record of the sidecar as a choice; its texts are parsed, its numbers are possible ones."""
    try:
        if record.quant not in QUANTS:
            raise SynthError(f"quant {foreign(record.quant)!r} is not one of {', '.join(QUANTS)}")
        if record.stage not in STAGES or record.bucket > _MOST_TOKENS:
            raise SynthError("its stage or its bucket is not valid")
        return Choice(
            quant=record.quant,
            shape=_shape(record.shape),
            stage=record.stage,
            bucket=record.bucket,
            fused=record.fused_finalize,
            tactic=_tactic(record.tactic),
            labels=tuple(map(_label, record.labels)),
            source=record.source,
            written=record.written,
            runner_up=_tactic(record.runner_up),
            ms=_within(record.ms, "ms", *_TIMES),
            runner_up_ms=_within(record.runner_up_ms, "runner_up_ms", *_TIMES),
            fallback_ms=_within(record.fallback_ms, "fallback_ms", *_TIMES),
            regret=_within(record.expected_regret, "expected_regret", 0.0, 1e3),
            within=_within(record.within_2, "within_2%", 0.0, 1.0),
        )
    except SynthError as e:
        side = sidecars.sidecar_path(path)
        raise SynthError(f"{side}, choice {number}: {e}; emit it anew, or move it away to go on without") from e


def _choices_of_keys(config: Config, arch: str, flashinfer: str) -> tuple[tuple[Choice, ...], int]:
    """Return what the config's own keys and times tell, and how many entries tell nothing."""
    found = []
    for entry in config.served:
        key = entry.key
        if key is None or key.stage is None or not 0 < key.bucket <= _MOST_TOKENS:
            continue
        meaning = entry.meaning(flashinfer, arch or None)
        place = meaning.quant, str(meaning.shape or ""), key.stage, key.bucket, meaning.fused
        ms, runner_up_ms = _possible(entry.time_ms), _possible(entry.runner_up_ms)
        found.append(Choice(*place, meaning.tactic, ms=ms, runner_up_ms=runner_up_ms))
    found.sort(key=lambda c: (c.quant, c.shape, c.stage, c.bucket, not c.fused))
    return tuple(found), len(config.entries) - len(found)


@functools.lru_cache(maxsize=64)
def _table(arch: str, quant: str, flashinfer: str, fused: bool = True) -> TacticTable | None:
    try:
        contract_for(flashinfer)
        table = load_table(arch, quant, flashinfer)
    except (SynthError, OSError, ValueError):
        return None
    return table if fused else table.without_fused_finalize()


@functools.lru_cache(maxsize=4096)
def _tactic(text: str) -> Tactic:
    return Tactic.parse(_short(text, "tactic"))


@functools.lru_cache(maxsize=4096)
def _shape(text: str) -> str:
    return str(MoEShape.parse(_short(text, "shape")))


def _short(text: str, name: str) -> str:
    if len(text) > _LONGEST:
        raise SynthError(f"its {name} is longer than any")
    return text


@functools.lru_cache(maxsize=4096)
def _label(text: str) -> str:
    return foreign(text, 60)


def _device(gpu: str) -> Device | None:
    try:
        return get_device(gpu) if gpu else None
    except SynthError:
        return None


def _within(value: float | None, name: str, low: float, high: float) -> float | None:
    if value is None:
        return None
    if not low <= value <= high:
        raise SynthError(f"{name} is {value:.6g}, which is not from {low:g} to {high:g}")
    return float(value)


def _possible(ms: float | None) -> float | None:
    return ms if ms is not None and math.isfinite(ms) and _TIMES[0] <= ms <= _TIMES[1] else None


def _origins(value: object) -> dict[str, Origin]:
    found = {}
    for quant, origin in sorted(_object(value).items(), key=lambda item: str(item[0])):
        if quant in QUANTS:
            said = _object(origin)
            fingerprint = foreign(_text(said.get("model")), 64)
            found[quant] = Origin(foreign(_text(said.get("from"))), fingerprint, _texts(said.get("denied")))
    return found


def _object(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _texts(value: object) -> tuple[str, ...]:
    texts = [foreign(v, 80) for v in _list(value) if isinstance(v, str)]
    more = len(texts) - _MOST_TEXTS
    return (*texts[:_MOST_TEXTS], f"and {more} more") if more > 0 else tuple(texts)
