"""What a pull request to FlashInfer needs: the bundled module, and the proof that it is worth taking.

Only what was timed on the device itself, and whose numbers agree with the fallback's wherever a whole layer can be
compared, is for others. Nothing of that is taken from the config or its sidecar alone: every entry is looked up in the
measurements again.
"""

from __future__ import annotations

import csv
import math
import os
import re
import statistics
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from synth.catalog.devices import Device, get_device
from synth.catalog.schemes import QUANTS, STAGES
from synth.catalog.shapes import MoEShape
from synth.checking.check import check, summary
from synth.choosing.emission import config_name
from synth.configs.formats import ConfigEntry, ConfigFile, dumps_bundled, dumps_json, read
from synth.configs.porting import version_of
from synth.configs.sidecar import Record, Sidecar, sidecar_path
from synth.configs.sidecar import read as read_sidecar
from synth.errors import SynthError
from synth.flashinfer.keys import parse_key
from synth.flashinfer.tactics import Tactic, load_table
from synth.flashinfer.versions import build_metadata
from synth.gpu.replay import replay
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
#: Token counts that the description groups gains by, each up to and including its number.
TOKEN_GROUPS = (16, 128, 1024, 1 << 30)


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
        return config_name(self.device, "bundled")


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
    sidecar = read_sidecar(path)
    if sidecar is None:
        raise SynthError(
            f"{path} has no {sidecar_path(path).name} beside it, so nothing says which entries were measured; "
            "contribute what `synth emit` wrote"
        )
    flashinfer, gpu = version_of(config), config.gpu
    if flashinfer is None or gpu is None:
        raise SynthError(f"{path}: its metadata doesn't name one FlashInfer version and one GPU; emit it anew")
    device = get_device(gpu)
    records = _agreeing(path, config, sidecar, device, flashinfer)
    known: dict[str, _Known] = {}
    kept: dict[str, ConfigEntry] = {}
    refused: Counter[str] = Counter()
    gains: dict[tuple[str, int, int, str], Gain] = {}
    agreements: dict[str, dict[Agreement, None]] = defaultdict(dict)
    pairs = _pairs(sidecar.records)
    for entry in config.entries:
        record = records[entry.key]
        quant = record.quant
        if quant not in known:
            known[quant] = _Known.of(device, quant, flashinfer, folders, problems)
        pair = pairs[_place(record)]
        reason, gain = known[quant].judge(record, pair)
        if reason:
            refused[reason] += 1
            continue
        kept[entry.key] = entry
        if gain is not None:
            gains[quant, record.stage, record.bucket, record.shape] = gain
        agreements[quant].update(dict.fromkeys(known[quant].compared(record, pair)))
    counted = {reason: refused[reason] for reason in REASONS if refused[reason]}
    if not kept or (counted and not only_verified):
        raise RefusedError(counted, len(config.entries))
    written = _only(sidecar, kept)
    own = config.metadata.get("synth") if isinstance(config.metadata, dict) else None
    provenance = {**(own if isinstance(own, dict) else {}), "entries": written.counts()}
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


def _agreeing(path: Path, config: ConfigFile, sidecar: Sidecar, device: Device, flashinfer: str) -> dict[str, Record]:
    """Return the record of every entry.

    Raises
    ------
    SynthError
        When the sidecar doesn't say of an entry what is in the config.
    """
    records = sidecar.written()
    for key, value in config.raw.items():
        record = records.get(key)
        entry = next(iter(ConfigFile(config.kind, raw={key: value}).entries), None)
        if record is None or entry is None:
            raise SynthError(f"{path}: the sidecar knows no entry {key}; contribute what `synth emit` wrote")
        parsed = parse_key(key)
        asked = (str(parsed.shape(flashinfer)), parsed.quant(flashinfer), parsed.stage, parsed.bucket)
        fused = parsed.named(flashinfer)["use_fused_finalize"]
        if (*asked, fused) != (record.shape, record.quant, record.stage, record.bucket, record.fused_finalize):
            raise SynthError(f"{path}: the sidecar says {record.shape} of {key}; contribute what `synth emit` wrote")
        table = load_table(device.tactics_arch, record.quant, flashinfer)
        if not record.fused_finalize:
            table = table.without_fused_finalize()
        if table.id_of(record.stage, Tactic.parse(record.tactic)) != entry.tactic_id:
            raise SynthError(
                f"{path}: the sidecar says {record.tactic} of {key}, and the id {entry.tactic_id} is another tactic; "
                "contribute what `synth emit` wrote"
            )
    return {key: records[key] for key in config.raw}


def _only(sidecar: Sidecar, kept: Mapping[str, object]) -> Sidecar:
    """Return the sidecar of the entries that are kept; the others count as left out."""
    records = []
    for record in sidecar.records:
        those = tuple(key for key in record.keys if key in kept)
        if record.written and those:
            records.append(replace(record, keys=those))
        elif record.written:
            records.append(replace(record, written=False))
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


# ---- whole layers ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerTime:
    """Times in ms of one whole layer at one token count: as ``benchmarks/layer.py`` measures them.

    Attributes
    ----------
    layer, quant : str
    tokens : int
    fallback_ms, ms : float
    autotuned_ms : float or None
    """

    layer: str
    quant: str
    tokens: int
    fallback_ms: float
    autotuned_ms: float | None
    ms: float

    def __str__(self) -> str:
        tuned = f"{self.autotuned_ms:.4f}" if self.autotuned_ms else "–"
        return (
            f"| {self.layer} | {self.quant} | {self.tokens} | {self.fallback_ms:.4f} | {tuned} | {self.ms:.4f} "
            f"| {self.fallback_ms / self.ms:.2f}x |"
        )


def read_layer_times(path: Path) -> list[LayerTime]:
    """Read what ``benchmarks/layer.py --out`` writes.

    Raises
    ------
    SynthError
        When it can't be read, or lacks the fallback or the entries' own time of a layer.
    """
    cells: dict[tuple[str, str, int], dict[str, float]] = {}
    row = 1
    try:
        with path.open(newline="", encoding="utf-8") as f:
            for line in csv.DictReader(f):
                row += 1
                ms = float(line["ms"])
                if not (0 < ms < math.inf and re.fullmatch(r"[\w.+-]{1,80}", line["shape"])):
                    raise ValueError
                cells.setdefault((line["shape"], line["quant"], int(line["tokens"])), {})[line["label"]] = ms
    except OSError as e:
        raise SynthError(f"can't read {path}: {e.strerror or e}") from e
    except (KeyError, TypeError, ValueError, csv.Error):
        raise SynthError(f"{path}, row {row}: not a row of benchmarks/layer.py; write it anew with --out") from None
    found = []
    for (layer, quant, tokens), times in cells.items():
        own = [label for label in times if label not in ("fallback", "autotuned")]
        if len(own) != 1 or "fallback" not in times or quant not in QUANTS:
            raise SynthError(f"{path}: {layer} {quant} at {tokens} tokens needs the fallback's time and one config's")
        found.append(LayerTime(layer, quant, tokens, times["fallback"], times.get("autotuned"), times[own[0]]))
    return found


# ---- writing -----------------------------------------------------------------------------------------------

#: Files of a contribution.
CONFIG, DESCRIPTION, CHECK, REPLAY, REPORT = "config.json", "DESCRIPTION.md", "check.txt", "replay.txt", "report.html"


def write(
    found: Contribution, folder: Path, make_report: Callable[[Path], str], layers: Sequence[LayerTime] = ()
) -> list[Path]:
    """Check, replay and report a contribution, and write all of it to a new folder, or nothing.

    Parameters
    ----------
    found : Contribution
    folder : Path
        Must not exist.
    make_report : callable
        Returns the HTML page of a config.
    layers : sequence of LayerTime
        Times of whole layers for the description.

    Returns
    -------
    list of Path
        The files.

    Raises
    ------
    SynthError
        When FlashInfer isn't installed in the contribution's version, would not use every entry, or the folder is
        there or can't be made.
    """
    if folder.exists():
        raise SynthError(f"{folder} is there already; name a new folder with -o")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".synth-", dir=folder.parent, ignore_cleanup_errors=True) as beside:
            made = Path(beside) / "new"
            made.mkdir()
            module = made / found.module_name
            module.write_bytes(found.module)
            config = made / CONFIG
            config.write_bytes(found.config)
            sidecar_path(config).write_bytes(found.sidecar)
            check_text = _check(module, found)
            replay_text = _replay(module, found)
            (made / CHECK).write_text(check_text, encoding="utf-8")
            (made / REPLAY).write_text(replay_text, encoding="utf-8")
            (made / REPORT).write_text(make_report(config), encoding="utf-8")
            text = describe(found, check_text, replay_text, layers)
            (made / DESCRIPTION).write_text(text, encoding="utf-8")
            os.replace(made, folder)
    except OSError as e:
        raise SynthError(f"can't write {folder}: {e.strerror or e}; name another place or free some space") from e
    return sorted(folder.iterdir())


def _check(module: Path, found: Contribution) -> str:
    findings = check(module, found.flashinfer, device=found.device.name)
    serious = [f for f in findings if f.severity == "error"]
    if serious:
        raise SynthError(f"{found.module_name}: {serious[0].code}: {serious[0].message}; {serious[0].way_out}")
    lines = [f"{found.module_name}: {found.entries} entries, FlashInfer {found.flashinfer}, {found.device.name}"]
    lines += [f"{g.severity}: {g.code} ({g.count}): {g.example.message}" for g in summary(findings)]
    return "\n".join([*lines, "no error found"]) + "\n"


def _replay(module: Path, found: Contribution) -> str:
    done = replay(module, device=found.device.name)
    if done.flashinfer != found.flashinfer:
        raise SynthError(
            f"the entries are for FlashInfer {found.flashinfer}, and {done.flashinfer} is installed; "
            f"pip install flashinfer-python=={found.flashinfer}, or `synth port` them first"
        )
    if not done.ok:
        miss = done.misses[0]
        raise SynthError(f"{found.module_name}: FlashInfer doesn't serve {miss.key}: {miss.reason}")
    return (
        f"FlashInfer {done.flashinfer} on {done.device}, the module beside its own and "
        f"FLASHINFER_AUTOTUNER_LOAD_FROM_FILE=1: {done.keys_hit} of {done.keys} keys and {done.hits} of {done.lookups} "
        "lookups hit\n"
    )


def describe(found: Contribution, check_text: str, replay_text: str, layers: Sequence[LayerTime] = ()) -> str:
    """Return the text of the pull request, in Markdown."""
    quants = ", ".join(found.labels)
    facts = "; ".join(f"{name} {', '.join(values)}" for name, values in found.provenance.items())
    lines = [
        f"# Tuned CUTLASS MoE tactics for {found.device.name}",
        "",
        f"`tuning_configs/{found.module_name}`: {found.entries} entries ({quants}) for FlashInfer {found.flashinfer}. "
        "Every one was timed on this GPU in its own bucket; what was predicted only is not in it. Without an entry "
        "FlashInfer runs its fallback, the first tactic of the list.",
        "",
        "## Measured gain over the fallback",
        "",
        "The fallback's time over that of the tactic, both timed in the same bucket by FlashInfer's own autotuner "
        "(`profile_tactic`, 16 routing samples, hot L2): geometric mean, least and largest of the buckets.",
        "",
        "| quantization | stage | tokens | buckets | mean | least | largest |",
        "|---|---|---|---|---|---|---|",
        *_gain_rows(found.gains),
        "",
    ]
    if layers:
        lines += [
            "## Whole layers, measured",
            "",
            "`cutlass_fused_moe` under CUDA graphs, the variants in turn; ms.",
            "",
            "| layer | quantization | tokens | fallback | FlashInfer's autotuner | these entries | fallback / these |",
            "|---|---|---|---|---|---|---|",
            *(str(row) for row in layers),
            "",
        ]
    lines += ["## Layers", ""]
    lines += [f"- {quant}: {', '.join(labels)}" for quant, labels in found.labels.items()]
    lines += ["", "## How it was measured and checked", "", f"- Timings: {facts}."]
    for quant, agreements in found.agreements.items():
        if agreements:
            worst = max(a.deviation for a in agreements)
            pairs = len({(a.shape, a.tactics) for a in agreements})
            lines.append(
                f"- Numbers, {quant}: {pairs} pairs of tactics in {len(agreements)} comparisons with the fallback's "
                f"output differ by at most {worst:.2%} of the largest output."
            )
        else:
            lines.append(f"- Numbers, {quant}: NOT compared with the fallback's output.")
    lines += [
        f"- Lookup: {replay_text.strip()}.",
        "- Beside: `check.txt`, `replay.txt`, `report.html`, and `config.json`, the same entries in the v1 JSON form.",
        "",
        "A bundled file is read only with `FLASHINFER_AUTOTUNER_LOAD_FROM_FILE=1`, and checked neither for the version "
        f"nor the GPU but by its name: the ids are those of FlashInfer {found.flashinfer}. Where the list of tactics "
        "changes, `synth port` rewrites them by what each tactic is.",
        "",
    ]
    return "\n".join(lines)


def _gain_rows(gains: Iterable[Gain]) -> list[str]:
    groups: dict[tuple[str, int, int], list[float]] = defaultdict(list)
    for gain in gains:
        group = next(i for i, most in enumerate(TOKEN_GROUPS) if gain.bucket <= most)
        groups[gain.quant, gain.stage, group].append(gain.ratio)
    rows = []
    for (quant, stage, group), ratios in sorted(groups.items()):
        least = TOKEN_GROUPS[group - 1] + 1 if group else 1
        tokens = f"{least} to {TOKEN_GROUPS[group]}" if group + 1 < len(TOKEN_GROUPS) else f"{least} and more"
        rows.append(
            f"| {quant} | gemm{stage} | {tokens} | {len(ratios)} | {statistics.geometric_mean(ratios):.2f}x "
            f"| {min(ratios):.2f}x | {max(ratios):.2f}x |"
        )
    return rows
