"""Two configs beside each other: which entries differ, and by how much time.

Configs of different FlashInfer versions are compared by what their keys and tactics mean: keys without the fields that
only one version has, and tactics by tile, cluster, swap and fusion instead of by id.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from synth.catalog.shapes import MoEShape
from synth.catalog.untrusted import printable
from synth.configs.model import Config, Entry, Meaning
from synth.configs.reading import read
from synth.configs.sidecar import Record, belongs
from synth.errors import SynthError
from synth.flashinfer.keys import Call, Key
from synth.flashinfer.tactics import DEFAULT_FLASHINFER, Tactic
from synth.flashinfer.versions import CONTRACTS, Contract, arch_of, contract_for

if TYPE_CHECKING:
    from synth.performance.model import PerformanceModel
    from synth.timings.table import Timings

#: Tactics whose times differ by less than this share are as good as equal: repeats of one timing differ by 0.4 %.
NEAR_TIE = 0.01
#: Where times come from, in the order in which they are shown. ``stated``: each file's own entry; ``sidecar``: what was
#: written beside the files; ``timed``: both tactics in one table of measurements; ``predicted``: both by one model.
TIME_SOURCES = ("stated", "sidecar", "timed", "predicted")
#: Times in ms that a kernel can take. Files state what they like.
_LEAST_MS, _MOST_MS = 1e-6, 1e7
#: Sites that are predicted in one go.
_SITES_AT_ONCE = 512


@dataclass(frozen=True)
class Times:
    """The times of two tactics in one place.

    Attributes
    ----------
    source : str
        One of :data:`TIME_SOURCES`.
    kinds : tuple of str
        What each time is: ``"measured"``, ``"verified"``, ``"predicted"`` or ``"analytical"``; ``"tuned"`` where
        FlashInfer's tuner wrote it, ``"unknown"`` where synth wrote it and its sidecar is gone.
    a_ms, b_ms : float
    """

    source: str
    kinds: tuple[str, str]
    a_ms: float
    b_ms: float

    @property
    def ratio(self) -> float:
        """B's time over A's."""
        return self.b_ms / self.a_ms

    @property
    def near_tie(self) -> bool:
        """The times are as good as equal."""
        return abs(math.log(self.ratio)) < math.log1p(NEAR_TIE)


@dataclass(frozen=True)
class Pick:
    """What one file says in one place.

    Attributes
    ----------
    key : str
    tactic_id : int
    tactic : Tactic or None
        What the id means; None where it isn't known, or where there is no such tactic.
    ms : float or None
        The entry's own time.
    """

    key: str
    tactic_id: int
    tactic: Tactic | None
    ms: float | None


@dataclass(frozen=True)
class Pair:
    """An entry of each file for the same calls.

    Attributes
    ----------
    a, b : Pick
    shape : MoEShape or None
        None where the keys don't tell.
    quant : str
        ``""`` where the keys don't tell.
    stage, bucket : int
    same : bool or None
        Both run the same tactic; None where the ids are of different versions and what they mean isn't known.
    times : tuple of Times
        At most one from each source.
    """

    a: Pick
    b: Pick
    shape: MoEShape | None
    quant: str
    stage: int
    bucket: int
    same: bool | None
    times: tuple[Times, ...] = ()

    def time(self, source: str) -> Times | None:
        """Return the times from one source."""
        return next((t for t in self.times if t.source == source), None)


@dataclass(frozen=True)
class Side:
    """One of the two files.

    Attributes
    ----------
    path : Path
    flashinfer : str
        Its FlashInfer version, which synth may not know; ``""`` where neither its metadata nor its keys tell.
    guessed : bool
        The metadata doesn't name the version: it is that of its keys' form.
    device : str or None
    entries : int
        Well-formed entries.
    malformed : int
        Others, which aren't compared.
    """

    path: Path
    flashinfer: str
    guessed: bool
    device: str | None
    entries: int
    malformed: int


@dataclass(frozen=True)
class Comparison:
    """What differs between two configs.

    Attributes
    ----------
    a, b : Side
    pairs : tuple of Pair
        Entries for the same calls, in A's order.
    only_a, only_b : tuple of str
        Keys that the other file has no counterpart of.
    metadata : tuple of (str, object, object)
        Metadata that differ: name, A's and B's value, None for a missing one.
    """

    a: Side
    b: Side
    pairs: tuple[Pair, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    metadata: tuple[tuple[str, object, object], ...]

    @property
    def differing(self) -> tuple[Pair, ...]:
        """Pairs with different tactics."""
        return tuple(p for p in self.pairs if p.same is False)

    @property
    def unknown(self) -> tuple[Pair, ...]:
        """Pairs that can't be compared: ids of different versions, of which one has no table of tactics."""
        return tuple(p for p in self.pairs if p.same is None)

    @property
    def equal(self) -> bool:
        """Every entry has a counterpart with the same tactic."""
        return not (
            self.differing or self.unknown or self.only_a or self.only_b or self.a.malformed or self.b.malformed
        )


@dataclass(frozen=True)
class Summary:
    """Times of the pairs with different tactics, of one quantization and stage, from one source.

    Attributes
    ----------
    quant : str
    stage : int
    source : str
    kinds : tuple of str
        See :class:`Times`.
    count, near_ties : int
        Pairs, and those of them whose times are as good as equal.
    geomean, least, most : float
        B's time over A's.
    worst : Pair
        The one whose times differ most.
    """

    quant: str
    stage: int
    source: str
    kinds: tuple[str, str]
    count: int
    near_ties: int
    geomean: float
    least: float
    most: float
    worst: Pair


# ---- comparing ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _File:
    """A config as it is compared; `version` is the contract of its keys, None where they are compared as text."""

    side: Side
    config: Config
    contract: Contract | None
    arch: str | None

    def key(self, entry: Entry) -> Key | None:
        """Return an entry's key where what it means can be told."""
        key = entry.layer_key
        return key if key is not None and self.contract is not None and key.call.fits(self.contract) else None

    def meaning(self, entry: Entry) -> Meaning | None:
        """Return what an entry is about, None where its key doesn't tell."""
        return entry.meaning(self.side.flashinfer, self.arch) if self.key(entry) is not None else None


def compare(
    a: Path | Config, b: Path | Config, *, flashinfer: str = DEFAULT_FLASHINFER, device: str | None = None
) -> Comparison:
    """Compare two configs of any form.

    Parameters
    ----------
    a, b : Path or Config
    flashinfer : str
        The version of a file that names none, if its keys have that version's form.
    device : str, optional
        The GPU of a file that names none.

    Raises
    ------
    SynthError
        When a file can't be read, or `flashinfer` isn't known.
    """
    contract_for(flashinfer)
    first, second = _load(a, flashinfer, device), _load(b, flashinfer, device)
    pairs: list[Pair] = []
    matched: dict[str, None] = {}
    only_a = []
    counterparts = _Counterparts(first, second)
    for entry in first.config.served:
        found = counterparts(entry)
        matched.update(dict.fromkeys(other.text for other in found))
        pairs += [_pair(entry, other, first, second) for other in found]
        if not found:
            only_a.append(entry.text)
    only_b = [entry.text for entry in second.config.served if entry.text not in matched]
    return Comparison(
        first.side, second.side, tuple(pairs), tuple(only_a), tuple(only_b), _metadata(first.config, second.config)
    )


def _load(file: Path | Config, flashinfer: str, device: str | None) -> _File:
    config = read(file) if isinstance(file, Path) else file
    if config.path is not None and config.sha256 and not belongs(config.path, config.sha256):
        # Reading it says what is wrong; one that belongs is read only where tactics differ.
        _ = config.sidecar
    version, guessed = _version(config, flashinfer)
    contract = None
    with contextlib.suppress(SynthError):
        contract = contract_for(version)
    malformed = len(config.entries) - len(config.served)
    path = config.path if config.path is not None else Path("config")
    side = Side(path, version, guessed, config.gpu or device, len(config.served), malformed)
    return _File(side, config, contract, arch_of(side.device))


def _version(config: Config, flashinfer: str) -> tuple[str, bool]:
    """Return a file's FlashInfer version, and whether that is a guess by the form of its keys."""
    if config.flashinfer is not None:
        return config.flashinfer, False
    first = next((key.call for entry in config.served if (key := entry.layer_key) is not None), None)
    if first is None or first.fits(contract_for(flashinfer)):
        return flashinfer, True
    fits = [contract.last for contract in CONTRACTS if first.fits(contract)]
    return (fits[-1] if fits else ""), True


class _Counterparts:
    """Finds an entry's counterparts in another file."""

    def __init__(self, a: _File, b: _File) -> None:
        self._a, self._b = a, b
        # The fields that both versions' keys have; None where keys are compared as they are.
        self._names: tuple[str, ...] | None = None
        if a.contract is not None and b.contract is not None and a.contract.extras != b.contract.extras:
            self._names = tuple(sorted(set(a.contract.extras or ()) & set(b.contract.extras or ())))
        self._places: dict[object, list[Entry]] = defaultdict(list)
        for entry in b.config.served:
            self._places[self._place(entry, b)].append(entry)

    def __call__(self, entry: Entry) -> list[Entry]:
        return self._places.get(self._place(entry, self._a), [])

    def _place(self, entry: Entry, file: _File) -> object:
        key = file.key(entry) if self._names is not None else None
        if key is None or file.contract is None or self._names is None:
            return entry.text
        return key.op, key.runner, key.bucket, _shared(key.call, file.contract, self._names)


@functools.lru_cache(maxsize=4096)
def _shared(call: Call, contract: Contract, names: tuple[str, ...]) -> object:
    """Return what is compared of a call whose version has other extras."""
    values = dict(zip(contract.extras or (), call.extras or (), strict=True))
    return call.shapes, tuple(values[name] for name in names)


def _pair(a: Entry, b: Entry, first: _File, second: _File) -> Pair:
    meant_a, meant_b = first.meaning(a), second.meaning(b)
    tactic_a, tactic_b = (m.tactic if m is not None else None for m in (meant_a, meant_b))
    if first.side.flashinfer == second.side.flashinfer and first.side.flashinfer:
        same: bool | None = a.tactic_id == b.tactic_id
    elif tactic_a is None or tactic_b is None:
        same = None
    else:
        same = tactic_a == tactic_b
    known = next((m for m in (meant_a, meant_b) if m is not None and m.shape is not None), None)
    key = a.layer_key
    pair = Pair(
        Pick(a.text, a.tactic_id or 0, tactic_a, _plausible(a.time_ms)),
        Pick(b.text, b.tactic_id or 0, tactic_b, _plausible(b.time_ms)),
        known.shape if known is not None else None,
        known.quant if known is not None else "",
        (key.stage or 0) if key else 0,
        key.bucket if key else 0,
        same,
    )
    times = tuple(_stated(pair, first, second))
    return replace(pair, times=times) if times else pair


def _metadata(a: Config, b: Config) -> tuple[tuple[str, object, object], ...]:
    first, second = (c.said if isinstance(c.metadata, dict) else {"_metadata": c.metadata} for c in (a, b))
    names = dict.fromkeys([*first, *second])
    return tuple(
        (name, first.get(name), second.get(name)) for name in names if repr(first.get(name)) != repr(second.get(name))
    )


# ---- times -------------------------------------------------------------------------------------------------


def _stated(pair: Pair, first: _File, second: _File) -> Iterator[Times]:
    """Yield the times that the files and their sidecars state; of one tactic, what the entries themselves say."""
    if pair.same:
        if pair.a.ms is not None and pair.b.ms is not None:
            yield Times("stated", ("", ""), pair.a.ms, pair.b.ms)
        return
    record_a, record_b = first.config.records.get(pair.a.key), second.config.records.get(pair.b.key)
    if pair.a.ms is not None and pair.b.ms is not None:
        yield Times("stated", (_kind(record_a, first), _kind(record_b, second)), pair.a.ms, pair.b.ms)
    for record in (record_a, record_b):
        # One sidecar that knows both tactics compares like with like.
        times = _times_of(record)
        if pair.a.tactic != pair.b.tactic and str(pair.a.tactic) in times and str(pair.b.tactic) in times:
            kind = record.source if record is not None else ""
            yield Times("sidecar", (kind, kind), times[str(pair.a.tactic)], times[str(pair.b.tactic)])
            return
    if record_a is not None and record_b is not None:
        a_ms, b_ms = _plausible(record_a.ms), _plausible(record_b.ms)
        if a_ms is not None and b_ms is not None:
            yield Times("sidecar", (record_a.source, record_b.source), a_ms, b_ms)


def _plausible(ms: float | None) -> float | None:
    return ms if ms is not None and _LEAST_MS <= ms <= _MOST_MS else None


def _kind(record: Record | None, file: _File) -> str:
    if record is not None:
        return record.source
    return "unknown" if "synth" in file.config.said else "tuned"


def _times_of(record: Record | None) -> dict[str, float]:
    if record is None:
        return {}
    found = {record.runner_up: record.runner_up_ms, record.tactic: record.ms}
    return {tactic: ms for tactic, ms in found.items() if ms is not None and _plausible(ms) is not None}


def with_times(
    comparison: Comparison,
    models: Mapping[str, PerformanceModel] | None = None,
    timings: Mapping[str, Timings] | None = None,
) -> Comparison:
    """Add times of the pairs with different tactics: from measurements, and from models.

    Parameters
    ----------
    models, timings : mapping
        By quantization, of the device that the files are for. A model or a table of another FlashInfer version than
        the files' knows those of their tactics that it has, too.
    """
    measured = _measured(comparison.differing, timings or {})
    predicted = _predicted(comparison.differing, models or {})
    pairs = []
    for pair in comparison.pairs:
        extra = [found[pair] for found in (measured, predicted) if pair in found]
        pairs.append(replace(pair, times=(*pair.times, *extra)) if extra else pair)
    return replace(comparison, pairs=tuple(pairs))


def _measured(pairs: Sequence[Pair], timings: Mapping[str, Timings]) -> dict[Pair, Times]:
    found: dict[Pair, Times] = {}
    for quant, table in timings.items():
        from synth.timings.table import times_by_bucket

        averaged = table.averaged()
        times = times_by_bucket(averaged)
        index = {shape: i for i, shape in enumerate(averaged.shapes)}
        for pair in pairs:
            if pair.quant != quant or pair.shape is None:
                continue
            here = times.get((index.get(pair.shape, -1), pair.stage, pair.bucket), {})
            ids = _ids(pair, table.table)
            if ids is not None and ids[0] in here and ids[1] in here:
                found[pair] = Times("timed", ("measured", "measured"), here[ids[0]], here[ids[1]])
    return found


def _predicted(pairs: Sequence[Pair], models: Mapping[str, PerformanceModel]) -> dict[Pair, Times]:
    found: dict[Pair, Times] = {}
    for quant, model in models.items():
        kind = "analytical" if model.analytical else "predicted"
        wanted: dict[tuple[MoEShape, int, int], list[tuple[Pair, tuple[int, int]]]] = defaultdict(list)
        for pair in pairs:
            ids = _ids(pair, model.table) if pair.quant == quant and pair.shape is not None else None
            if ids is not None and pair.shape is not None:
                wanted[pair.shape, pair.stage, pair.bucket].append((pair, ids))
        sites = list(wanted)
        for start in range(0, len(sites), _SITES_AT_ONCE):
            batch = sites[start : start + _SITES_AT_ONCE]
            for site, times in zip(batch, _predict(model, batch), strict=True):
                first = model.table.ids(site[1])[0]
                for pair, (a, b) in wanted[site]:
                    a_ms, b_ms = _plausible(times[a - first]), _plausible(times[b - first])
                    if a_ms is not None and b_ms is not None:
                        found[pair] = Times("predicted", (kind, kind), a_ms, b_ms)
    return found


def _predict(model: PerformanceModel, sites: Sequence[tuple[MoEShape, int, int]]) -> list[list[float]]:
    """Return the predicted times in ms of every tactic at each site: close ones are told apart beside the others."""
    import numpy as np

    from synth.performance.model import Cells

    shapes = list(dict.fromkeys(shape for shape, _, _ in sites))
    index = {shape: i for i, shape in enumerate(shapes)}
    rows = [
        (index[shape], stage, tokens, tactic) for shape, stage, tokens in sites for tactic in model.table.ids(stage)
    ]
    columns = np.array(rows, dtype=np.int64).T
    ms = iter(model.predict(Cells(shapes, *columns)).ms.tolist())
    return [[next(ms) for _ in model.table.ids(stage)] for _, stage, _ in sites]


def _ids(pair: Pair, table: Any) -> tuple[int, int] | None:
    """Return the ids of a pair's tactics in a table, None where one isn't known there."""
    if pair.a.tactic is None or pair.b.tactic is None or pair.stage not in (1, 2):
        return None
    try:
        return table.id_of(pair.stage, pair.a.tactic), table.id_of(pair.stage, pair.b.tactic)
    except SynthError:
        return None


def summarize(comparison: Comparison) -> list[Summary]:
    """Summarise the times of the pairs with different tactics by quantization, stage and source."""
    groups: dict[tuple[str, int, int, tuple[str, str]], list[tuple[Pair, Times]]] = defaultdict(list)
    for pair in comparison.differing:
        for times in pair.times:
            groups[pair.quant, pair.stage, TIME_SOURCES.index(times.source), times.kinds].append((pair, times))
    found = []
    for (quant, stage, source, kinds), those in sorted(groups.items(), key=lambda g: g[0]):
        ratios = [times.ratio for _, times in those]
        worst, _ = max(those, key=lambda one: abs(math.log(one[1].ratio)))
        found.append(
            Summary(
                quant, stage, TIME_SOURCES[source], kinds, len(those), sum(t.near_tie for _, t in those),
                math.exp(sum(map(math.log, ratios)) / len(ratios)), min(ratios), max(ratios), worst,
            )
        )  # fmt: skip
    return found


def drift(comparison: Comparison) -> tuple[int, float, float] | None:
    """Return how far the files' own times of the same tactics lie apart: what of a difference is no difference.

    Returns
    -------
    (int, float, float) or None
        Pairs with the same tactic and stated times, the geometric mean of B's time over A's, and the median of how
        far they are apart, as a share; None without any.
    """
    stated = [times for pair in comparison.pairs if pair.same and (times := pair.time("stated")) is not None]
    if not stated:
        return None
    logs = sorted(math.log(times.ratio) for times in stated)
    apart = sorted(abs(x) for x in logs)
    return len(logs), math.exp(sum(logs) / len(logs)), math.expm1(apart[len(apart) // 2])


def record(comparison: Comparison) -> dict[str, Any]:
    """Return the comparison as JSON."""

    def pick(one: Pick) -> dict[str, Any]:
        meaning = str(one.tactic) if one.tactic is not None else None
        return {"key": one.key, "id": one.tactic_id, "tactic": meaning, "ms": one.ms}

    def entry(pair: Pair) -> dict[str, Any]:
        return {
            "shape": str(pair.shape) if pair.shape else None, "quant": pair.quant or None, "stage": pair.stage,
            "bucket": pair.bucket, "a": pick(pair.a), "b": pick(pair.b),
            "times": [
                {"source": t.source, "kinds": list(t.kinds), "a_ms": t.a_ms, "b_ms": t.b_ms, "ratio": t.ratio}
                for t in pair.times
            ],
        }  # fmt: skip

    def side(one: Side) -> dict[str, Any]:
        return {
            "file": str(one.path), "flashinfer": one.flashinfer or None, "guessed": one.guessed, "device": one.device,
            "entries": one.entries, "malformed": one.malformed,
        }  # fmt: skip

    apart = drift(comparison)
    return {
        "a": side(comparison.a),
        "b": side(comparison.b),
        "equal": comparison.equal,
        "same": sum(pair.same is True for pair in comparison.pairs),
        "only_a": list(comparison.only_a),
        "only_b": list(comparison.only_b),
        "differing": [entry(pair) for pair in comparison.differing],
        "unknown": [entry(pair) for pair in comparison.unknown],
        "metadata": {name: {"a": a, "b": b} for name, a, b in comparison.metadata},
        "same_tactics_apart": None if apart is None else {"count": apart[0], "geomean": apart[1], "median": apart[2]},
        "summary": [
            {
                "quant": s.quant or None, "stage": s.stage, "source": s.source, "kinds": list(s.kinds),
                "count": s.count, "near_ties": s.near_ties, "geomean": s.geomean, "least": s.least, "most": s.most,
                "worst": s.worst.a.key,
            }
            for s in summarize(comparison)
        ],
    }  # fmt: skip


def title(pair: Pair) -> str:
    """Return what a person calls a pair's place."""
    where = f"{pair.shape or 'layer'} {pair.quant or '?'} gemm{pair.stage} bucket {pair.bucket}"
    return where if pair.stage else printable(pair.a.key)
