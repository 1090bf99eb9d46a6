"""What a pull request to FlashInfer needs: the bundled module, and the proof that it is worth taking.

Only what was timed on the device itself, and whose numbers agree with the fallback's wherever a whole layer can be
compared, is for others. Nothing of that is taken from the config or its sidecar alone: every entry is looked up in the
measurements again.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from synth.catalog.devices import Device, get_device
from synth.catalog.schemes import STAGES
from synth.catalog.shapes import MoEShape
from synth.configs.matching import check_sidecar
from synth.configs.model import Entry, module_name
from synth.configs.module import dumps_bundled
from synth.configs.reading import read
from synth.configs.sidecar import Record, Sidecar, sidecar_path
from synth.configs.v1 import dumps_json
from synth.errors import SynthError
from synth.flashinfer.tactics import Tactic
from synth.flashinfer.versions import build_metadata
from synth.timings.folders import load
from synth.timings.records import DENIED, TOLERANCE, Agreement, load_agreed
from synth.timings.rows import Problem
from synth.timings.table import Timings, times_by_bucket

#: Why an entry isn't for others, in the order in which they are printed.
REASONS = {
    "analytical": "analytical: nobody has timed them",
    "predicted": "predicted: their tactic was not timed in this bucket, or may not be within 1 % of the best",
    "untimed": "no real timing of their tactic in this bucket is in the measurements",
    "slower": "not faster than the fallback, which was timed in the same bucket",
    "uncompared": "the numbers of their pair of tactics were never compared with the fallback's",
    "denied": "their tactic gave wrong numbers on this device",
}

class RefusedError(SynthError):
    """Some entries aren't for others.

    Attributes
    ----------
    refused : dict of str to int
        Keys by a key of :data:`REASONS`.
    entries : int
        Entries in the config.
    """

    def __init__(self, refused: Mapping[str, int], entries: int) -> None:
        self.refused, self.entries = dict(refused), entries
        why = "; ".join(f"{n} {REASONS[reason]}" for reason, n in self.refused.items())
        super().__init__(
            f"{sum(self.refused.values())} of {entries} entries can't be contributed: {why}; run `synth verify` for "
            "their layers and `synth emit` again, or leave them out with --only-verified"
        )


@dataclass(frozen=True)
class Gain:
    """What one choice is measured to be worth: the fallback's time over the tactic's, both of this bucket."""

    quant: str
    stage: int
    bucket: int
    ratio: float


@dataclass(frozen=True)
class Contribution:
    """What can be contributed.

    Attributes
    ----------
    device : Device
    flashinfer : str
    module, config, sidecar : bytes
        The bundled module, and the same entries as v1 JSON with their sidecar.
    entries : int
    refused : dict of str to int
        Keys that are left out, by a key of :data:`REASONS`.
    gains : tuple of Gain
        One for each choice of a bucket in which the fallback was timed too.
    labels : dict of str to tuple of str
        Deployments that the entries serve, by quantization.
    provenance : dict of str to tuple
        How the timings were taken: driver, CUDA, torch and dates, each with its values.
    agreements : dict of str to tuple of Agreement
        Comparisons of numbers behind the entries, by quantization.
    """

    device: Device
    flashinfer: str
    module: bytes
    config: bytes
    sidecar: bytes
    entries: int
    refused: dict[str, int]
    gains: tuple[Gain, ...]
    labels: dict[str, tuple[str, ...]]
    provenance: dict[str, tuple[str, ...]]
    agreements: dict[str, tuple[Agreement, ...]]

    @property
    def module_name(self) -> str:
        """The file name by which FlashInfer's loader finds the module."""
        return module_name(self.device.name)


def prepare(
    path: Path, folders: Sequence[Path], *, only_verified: bool = False, problems: list[Problem] | None = None
) -> Contribution:
    """Return what of a config can be contributed.

    Parameters
    ----------
    path : Path
        What ``synth emit`` wrote, with its sidecar beside it.
    folders : sequence of Path
        Measurements, denied tactics and compared pairs.
    only_verified : bool
        Leave out what isn't for others, instead of refusing the config.
    problems : list, optional
        Gets the rows of measurements that can't be read.

    Raises
    ------
    RefusedError
        When an entry isn't for others, or with `only_verified` when none is.
    SynthError
        When the config or its sidecar can't be read, or they contradict each other.
    """
    config = read(path)
    if config.sidecar is None:
        raise SynthError(
            f"{path} has no {sidecar_path(path).name} beside it, so nothing says which entries were measured; "
            "contribute what `synth emit` wrote"
        )
    flashinfer, gpu = config.flashinfer, config.named_gpu
    if flashinfer is None or gpu is None:
        raise SynthError(f"{path}: its metadata doesn't name one FlashInfer version and one GPU; emit it anew")
    device = get_device(gpu)
    check_sidecar(config)
    records = config.records
    known: dict[str, _Known] = {}
    kept: dict[str, Entry] = {}
    refused: Counter[str] = Counter()
    gains: dict[tuple[str, int, int, str], Gain] = {}
    agreements: dict[str, dict[Agreement, None]] = defaultdict(dict)
    pairs = _pairs(config.sidecar.records)
    for entry in config.served:
        record = records[entry.text]
        quant = record.quant
        if quant not in known:
            known[quant] = _Known.of(device, quant, flashinfer, folders, problems)
        pair = pairs[_place(record)]
        reason, gain = known[quant].judge(record, pair)
        if reason:
            refused[reason] += 1
            continue
        kept[entry.text] = entry
        if gain is not None:
            gains[quant, record.stage, record.bucket, record.shape] = gain
        agreements[quant].update(dict.fromkeys(known[quant].compared(record, pair)))
    counted = {reason: refused[reason] for reason in REASONS if refused[reason]}
    if not kept or (counted and not only_verified):
        raise RefusedError(counted, len(config.served))
    written = _only(config.sidecar, kept)
    provenance = {**config.provenance, "entries": written.counts()}
    provenance["left_out"] = sum(len(r.keys) for r in written.records if not r.written)
    metadata = build_metadata(device.name, flashinfer, provenance)
    entries = [kept[key] for key in sorted(kept)]
    data = dumps_json(metadata, entries)
    head = {**written.head, **provenance}
    quants = sorted({records[key].quant for key in kept})
    return Contribution(
        device=device,
        flashinfer=flashinfer,
        module=dumps_bundled(metadata, entries),
        config=data,
        sidecar=replace(written, head=head).dumps(data),
        entries=len(entries),
        refused=counted,
        gains=tuple(gains[case] for case in sorted(gains)),
        labels={q: _labels(records[key] for key in kept if records[key].quant == q) for q in quants},
        provenance=_provenance(known, (records[key] for key in kept)),
        agreements={q: tuple(agreements[q]) for q in quants},
    )


# ---- judging -----------------------------------------------------------------------------------------------

#: A place where a pair of tactics runs: shape, quantization, bucket, and whether gemm2 may fuse the finalize step.
_Place = tuple[str, str, int, bool]
_Pair = tuple[Tactic | None, Tactic | None]


@dataclass(frozen=True)
class _Known:
    """What the measurements say of one quantization on the device."""

    timings: Timings | None
    times: Mapping[tuple[int, int, int], Mapping[int, float]]
    index: Mapping[MoEShape, int]
    agreed: Mapping[tuple[MoEShape, _Pair], tuple[Agreement, ...]]
    denied: frozenset[tuple[int, Tactic]]

    @classmethod
    def of(
        cls, device: Device, quant: str, flashinfer: str, folders: Sequence[Path], problems: list[Problem] | None
    ) -> _Known:
        """Read it from some folders; simulated timings don't count."""
        tables = load(folders, device.name, quant, flashinfer, problems=problems)
        timings = next((t for t in tables if not t.origin.simulated), None)
        if timings is None:
            return cls(None, {}, {}, {}, frozenset())
        agreed: dict[tuple[MoEShape, _Pair], list[Agreement]] = defaultdict(list)
        for one in load_agreed(folders, timings.origin):
            agreed[one.shape, one.tactics].append(one)
        return cls(
            timings,
            times_by_bucket(timings.averaged()),
            {shape: i for i, shape in enumerate(timings.shapes)},
            {case: tuple(ones) for case, ones in agreed.items()},
            frozenset((d.stage, d.tactic) for d in DENIED.load(folders, timings.origin)),
        )

    def judge(self, record: Record, pair: _Pair) -> tuple[str, Gain | None]:
        """Return why an entry isn't for others, or "" and what it is measured to be worth."""
        if record.source in ("analytical", "predicted"):
            return record.source, None
        tactic = pair[record.stage - 1]
        if tactic is None or self.timings is None:
            return "untimed", None
        table = self.timings.table
        shape = self.index.get(MoEShape.parse(record.shape), -1)
        times = self.times.get((shape, record.stage, record.bucket), {})
        ms = times.get(table.id_of(record.stage, tactic))
        if ms is None:
            return "untimed", None
        if (record.stage, tactic) in self.denied:
            return "denied", None
        if record.quant in TOLERANCE and not self.compared(record, pair):
            return "uncompared", None
        fallback_ms = times.get(table.fallback_id(record.stage))
        if fallback_ms is None:
            return "", None
        if ms > fallback_ms:
            return "slower", None
        return "", Gain(record.quant, record.stage, record.bucket, fallback_ms / ms)

    def compared(self, record: Record, pair: _Pair) -> tuple[Agreement, ...]:
        """Return the comparisons of a pair's numbers on this layer."""
        if self.timings is None:
            return ()
        table = self.timings.table
        # The fallback's own tactic is compared as the fallback.
        gemm1, gemm2 = (
            None if tactic == table.tactic(table.fallback_id(stage)) else tactic
            for stage, tactic in zip(STAGES, pair, strict=True)
        )
        return self.agreed.get((MoEShape.parse(record.shape), (gemm1, gemm2)), ())


def _place(record: Record) -> _Place:
    return record.shape, record.quant, record.bucket, record.fused_finalize


def _pairs(records: Iterable[Record]) -> dict[_Place, _Pair]:
    """Return the pair that runs in each place; None where a stage has no entry and the fallback runs."""
    found: dict[_Place, dict[int, Tactic]] = defaultdict(dict)
    for record in records:
        stages = found[_place(record)]
        if record.written:
            stages[record.stage] = Tactic.parse(record.tactic)
    return {place: (stages.get(1), stages.get(2)) for place, stages in found.items()}


def _only(sidecar: Sidecar, kept: Mapping[str, object]) -> Sidecar:
    """Return the sidecar of the entries that are kept; the others count as left out."""
    records = []
    for record in sidecar.records:
        those = tuple(key for key in record.keys if key in kept)
        if record.written and those:
            records.append(record._replace(keys=those))
        elif record.written:
            records.append(record._replace(written=False))
        else:
            records.append(record)
    return replace(sidecar, records=tuple(records))


def _labels(records: Iterable[Record]) -> tuple[str, ...]:
    return tuple(sorted({label for record in records for label in record.labels}))


def _provenance(known: Mapping[str, _Known], records: Iterable[Record]) -> dict[str, tuple[str, ...]]:
    """Return driver, CUDA, torch and days of the timings of the layers of some entries."""
    found: dict[str, set[str]] = {"driver": set(), "cuda": set(), "torch": set(), "date": set()}
    for quant, text in {(record.quant, record.shape) for record in records}:
        timings, shape = known[quant].timings, known[quant].index[MoEShape.parse(text)]
        for facts in timings.passes[shape].values() if timings is not None else ():
            for name, values in found.items():
                if isinstance(facts.get(name), str):
                    values.add(facts[name][:10] if name == "date" else facts[name])
    return {name: tuple(sorted(values)) for name, values in found.items() if values}
