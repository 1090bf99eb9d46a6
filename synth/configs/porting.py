"""A config that was tuned under one FlashInfer version, for another one: by what each tactic is, never by its id."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from synth.catalog.schemes import STAGES
from synth.catalog.shapes import Deployment, MoEShape
from synth.configs.model import Config, Entry
from synth.configs.module import dumps_bundled
from synth.configs.sidecar import Sidecar
from synth.configs.v1 import dumps_json
from synth.errors import SynthError
from synth.flashinfer.buckets import is_grid_bucket
from synth.flashinfer.calls import ENGINES, signatures
from synth.flashinfer.keys import Call, extras_of, signature_keys
from synth.flashinfer.legality import smem_block_bytes, why_not
from synth.flashinfer.reachability import unreachable
from synth.flashinfer.tactics import Tactic, TacticTable, load_tables
from synth.flashinfer.versions import RUNNER, arch_of, build_metadata, contract_for, entry_id, served_id

#: Why an entry is not taken over, in the order in which they are printed.
REASONS = {
    "gone": "the tactic doesn't exist there",
    "cannot-run": "the tactic can't run on this layer",
    "fallback": "the fallback, which runs without an entry",
    "bucket": "no server looks this bucket up there",
    "unfused": "keys don't say there whether the server fuses the finalize step; those of servers that do are kept",
    "conflict": "entries that fall on one key there have different tactics",
    "unknown-layer": "the key names neither dtypes nor sizes, and no known layer has these shapes",
    "ambiguous": "the key names no dtypes, and its id means another tactic in each quantization that fits",
    "unknown-quant": "no tactics are known of this quantization",
    "no-such-id": "there was no such tactic",
    "dead-key": "the version that it was tuned under couldn't look it up",
    "malformed": "neither key nor entry can be read",
}


@dataclass(frozen=True)
class Ported:
    """A config for another FlashInfer version, ready to be written.

    Attributes
    ----------
    config : bytes
    sidecar : bytes or None
        The sidecar of the config that was ported, rewritten; None where there was none.
    device, source : str
        The GPU, and the FlashInfer version that the config was tuned under.
    entries : int
        Entries that are written. Where keys hold ranks, one entry may have become several, or several one.
    dropped : dict of str to int
        Entries of the file that was ported and are not taken over, by a key of :data:`REASONS`.
    """

    config: bytes
    sidecar: bytes | None
    device: str
    source: str
    entries: int
    dropped: dict[str, int]


@dataclass(frozen=True)
class _Meaning:
    """What an entry says under the new version.

    Attributes
    ----------
    tactic : Tactic
    tactic_id : int
    keys : tuple of str
    """

    tactic: Tactic
    tactic_id: int
    keys: tuple[str, ...]


class _DroppedError(Exception):
    """An entry has no counterpart; the message is a key of :data:`REASONS`."""


#: What keys without extras may stand for: old key → the calls that looked it up, as (shape, quantization, new keys).
_Calls = dict[str, list[tuple[MoEShape, str, tuple[str, ...]]]]


def port(
    config: Config,
    to: str,
    *,
    source: str | None = None,
    device: str | None = None,
    layers: Sequence[Deployment] = (),
    file_format: str = "json",
) -> Ported:
    """Rewrite a config for another FlashInfer version.

    An entry keeps its meaning: the layer, the stage, the number of tokens that it was tuned at, and the tactic. Key
    form, extras, ranks, ids and metadata become those of `to`. What has no counterpart there is dropped and counted.
    Where a version rounds token counts down and the other one up, an entry stays with the number of tokens that it was
    tuned at.

    Parameters
    ----------
    config : Config
    to : str
        FlashInfer version.
    source : str, optional
        Version that the config was tuned under, where its metadata doesn't say.
    device : str, optional
        The GPU, where the metadata doesn't say.
    layers : sequence of Deployment
        Layers to look for behind keys without extras (FlashInfer 0.6.4 to 0.6.17). Such a key was looked up for every
        call with these shapes, so it becomes the key of every layer that has them, with FlashInfer's default of a
        fused finalize step.
    file_format : str
        ``"json"`` or ``"bundled"``.

    Raises
    ------
    SynthError
        When version or GPU aren't known, or no entry is left.
    """
    source = _version(config, source)
    device = _gpu(config, device)
    arch = arch_of(device)
    if arch is None:
        raise SynthError(f"no tactics are known of {device}, so its ids can't be told apart; see `synth devices`")
    after = contract_for(to)
    if file_format == "json" and not after.metadata_keys:
        raise SynthError(f"FlashInfer {to} reads no JSON configs; write a bundled one: -o FOLDER/ --format bundled")
    calls = {} if contract_for(source).extras else _calls(config.served, layers, arch, source, to)
    dropped = Counter(malformed=len(config.entries) - len(config.served))
    found: dict[str, list[tuple[Entry, _Meaning]]] = {}
    for entry in config.served:
        try:
            meanings = _meanings(entry, source, to, device, arch, calls)
        except _DroppedError as e:
            dropped[str(e)] += 1
            continue
        for meaning in meanings:
            for key in meaning.keys:
                found.setdefault(key, []).append((entry, meaning))
    entries = []
    renamed: dict[str, dict[str, None]] = {}
    contradicted: dict[str, None] = {}
    for key, those in found.items():
        if len({meaning.tactic for _, meaning in those}) > 1:
            contradicted.update(dict.fromkeys(entry.text for entry, _ in those))
            continue
        entry, meaning = those[0]
        times = (entry.time_ms, entry.runner_up_ms, entry.margin, entry.candidates)
        entries.append(Entry(key, meaning.tactic_id, *(times if after.entry_elements >= 4 else ())))
        for old, _ in those:
            renamed.setdefault(old.text, {})[key] = None
    dropped["conflict"] = len(contradicted.keys() - renamed.keys())
    counts = {reason: dropped[reason] for reason in REASONS if dropped[reason]}
    if not entries:
        why = "; ".join(f"{n}: {REASONS[reason]}" for reason, n in counts.items()) or "the file has none"
        raise SynthError(f"no entry can be taken over from FlashInfer {source} to {to}: {why}")
    rewritten = config.sidecar.renamed(renamed, to, source) if config.sidecar else None
    provenance = _provenance(config, source, counts, len(entries), rewritten)
    if rewritten is not None:
        rewritten = replace(rewritten, head={**rewritten.head, **provenance})
    # A bundled file's metadata is for people, so that it has some where FlashInfer knows none.
    metadata = (
        build_metadata(device, to, provenance)
        if after.metadata_keys
        else {"flashinfer_version": to, "gpu": device, "synth": provenance}
    )
    data = dumps_json(metadata, entries) if file_format == "json" else dumps_bundled(metadata, entries)
    return Ported(data, rewritten.dumps(data) if rewritten else None, device, source, len(entries), counts)


def _version(config: Config, said: str | None) -> str:
    named = config.flashinfer
    if named and said and named != said:
        raise SynthError(f"--from {said}: the file says that it was tuned under FlashInfer {named}")
    if not (named or said):
        raise SynthError("the file doesn't say under which FlashInfer it was tuned; say so with --from VERSION")
    return str(named or said)


def _gpu(config: Config, said: str | None) -> str:
    if config.gpu and said and config.gpu != said:
        raise SynthError(f"--device {said}: the file is for {config.gpu}")
    if not (config.gpu or said):
        raise SynthError("the file doesn't say which GPU it is for; say so with --device NAME")
    return str(config.gpu or said)


def _calls(entries: Iterable[Entry], layers: Sequence[Deployment], arch: str, source: str, to: str) -> _Calls:
    """Return which calls of `layers` look a key without extras up, and their keys under FlashInfer `to`."""
    wanted: dict[int, set[str]] = {}
    for entry in entries:
        if entry.key is not None:
            wanted.setdefault(entry.key.bucket, set()).add(entry.text)
    found: _Calls = {}
    for layer, engine in itertools.product(layers, ENGINES):
        if _tables(arch, layer.quant, source, to, True) is None:
            continue
        passed = replace(layer, shape=layer.shape_for(engine))
        for (bucket, keys), stage, signature in itertools.product(
            wanted.items(), STAGES, signatures(engine, layer.quant)
        ):
            old = (
                keys.intersection(signature_keys(passed, signature, bucket, stage, arch, source)) if bucket > 0 else ()
            )
            for key in old:
                fresh = signature_keys(passed, signature, bucket, stage, arch, to)
                found.setdefault(key, []).append((passed.shape, layer.quant, fresh))
    return found


def _meanings(entry: Entry, source: str, to: str, device: str, arch: str, calls: _Calls) -> list[_Meaning]:
    """Return what an entry becomes.

    Raises
    ------
    _DroppedError
        When it has no counterpart.
    """
    key, tactic_id = entry.key, entry.tactic_id
    if key is None or tactic_id is None:
        raise _DroppedError("malformed")
    if unreachable(key, source, arch) or not _has_bucket(key.bucket, source):
        raise _DroppedError("dead-key")
    stage = key.stage or 1
    if contract_for(source).extras:
        quant = key.quant(source)
        fused = key.named(source)["use_fused_finalize"] is True
        if quant is None:
            raise _DroppedError("unknown-quant")
        keys = tuple(str((key.op, RUNNER, key.shapes, *extras)) for extras in _extras_there(key.call, source, to))
        fits = [(key.shape(source), quant, keys)]
    else:
        fits, fused = calls.get(entry.text, []), True
        if not fits:
            raise _DroppedError("unknown-layer")
    if not fused and not contract_for(to).extras:
        raise _DroppedError("unfused")
    if not _has_bucket(key.bucket, to):
        raise _DroppedError("bucket")
    if tactic_id == -1:
        raise _DroppedError("fallback")
    tactics: dict[str, Tactic] = {}
    after: dict[str, TacticTable] = {}
    for quant in dict.fromkeys(quant for _, quant, _ in fits):
        tables = _tables(arch, quant, source, to, fused)
        if tables is None:
            raise _DroppedError("unknown-quant")
        before, after[quant] = tables
        # Where a gemm2 id can be misread, one from gemm1's range can only be meant as it is served; another one is
        # what the tuner timed, whatever was served for it.
        meant = tactic_id if tactic_id in before.ids(stage) else served_id(before, stage, tactic_id)
        if meant in before.ids(stage):
            tactics[quant] = before.tactic(meant)
    if not tactics:
        raise _DroppedError("no-such-id")
    if len(tactics) > 1:
        raise _DroppedError("ambiguous")
    ((quant, tactic),) = tactics.items()
    try:
        new_id = entry_id(after[quant], stage, tactic)
    except SynthError:
        raise _DroppedError("gone") from None
    smem = smem_block_bytes(device, arch)
    meanings = [
        _Meaning(tactic, new_id, keys)
        for shape, its_quant, keys in fits
        if its_quant == quant and _can_run(shape, quant, tactic, stage, arch, smem, to)
    ]
    if not meanings:
        raise _DroppedError("cannot-run")
    return meanings


@functools.lru_cache(maxsize=4096)
def _extras_there(call: Call, source: str, to: str) -> tuple[tuple[object, ...], ...]:
    """Return what follows the shapes in a call's keys under another version: of one key, or of every rank's."""
    return extras_of(contract_for(to), {"cluster_rank": 0, **call.named(source)})


@functools.lru_cache(maxsize=1 << 16)
def _can_run(shape: MoEShape, quant: str, tactic: Tactic, stage: int, arch: str, smem: int | None, to: str) -> bool:
    return why_not(shape, quant, tactic, stage, arch, smem, flashinfer=to) is None


def _has_bucket(bucket: int, flashinfer: str) -> bool:
    # Where buckets are rounded up, a server's maximum is one, too.
    return is_grid_bucket(bucket, flashinfer) or (bucket > 0 and contract_for(flashinfer).hybrid_buckets)


@functools.cache
def _tables(arch: str, quant: str, source: str, to: str, fused: bool) -> tuple[TacticTable, TacticTable] | None:
    """Return the tactics of both versions, None where one of them has none of this quantization."""
    found = [next((t for t in load_tables(v) if (t.arch, t.quant) == (arch, quant)), None) for v in (source, to)]
    before, after = found if fused else [t and t.without_fused_finalize() for t in found]
    return (before, after) if before and after else None


def _provenance(
    config: Config, source: str, dropped: Mapping[str, int], entries: int, sidecar: Sidecar | None
) -> dict[str, Any]:
    """Return what the new metadata says of where it comes from; no entry counts as measured under the new version."""
    own = config.provenance
    if sidecar is not None:
        counts = sidecar.counts()
    else:
        # Which ones are left can't be told without the sidecar: rather too many than too few.
        analytical = max(min(config.count("entries", "analytical"), entries), 0)
        counts = {"predicted": entries - analytical, "analytical": analytical}
    return {
        **own,
        "entries": {name: n for name, n in counts.items() if n},
        "ported": {"from": source, "dropped": dict(dropped)},
    }
