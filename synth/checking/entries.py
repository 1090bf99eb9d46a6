"""One entry of a config: can its key be looked up, does its value do what it should, can its tactic run?"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from synth.catalog.untrusted import shown
from synth.checking.findings import Finding, finding
from synth.configs.model import Entry
from synth.errors import SynthError
from synth.flashinfer.buckets import is_grid_bucket, token_buckets
from synth.flashinfer.calls import ACTIVATION_TYPES
from synth.flashinfer.keys import Call, Key
from synth.flashinfer.legality import smem_block_bytes, why_not
from synth.flashinfer.meaning import packing, tables_of, tactic_of
from synth.flashinfer.reachability import impossible_sizes, unreachable
from synth.flashinfer.tactics import TacticTable, known_versions, load_table
from synth.flashinfer.versions import POLICY, RUNNER, contract_for, served_id

if TYPE_CHECKING:
    from synth.timings.records import Denial

#: Denied tactics of a device and FlashInfer version, by quantization.
Denied = Mapping[str, Sequence["Denial"]]
#: Larger numbers fit no tensor's size.
_LARGEST = 2**31 - 1


# ---- its key -----------------------------------------------------------------------------------------------


def check_key(entry: Entry, flashinfer: str, arch: str | None) -> Finding | None:
    """Return why an entry's key can't be looked up, None where it can."""
    key = entry.key
    if key is None:
        return finding("unreadable-key", entry.text, problem=entry.problem)
    dead = unreachable(key, flashinfer, arch)
    if dead is not None:
        return Finding(dead.code, key.text, dead.message, dead.way_out)
    if key.bucket > _LARGEST:
        return finding("shapes", key.text, problem=f"a number is larger than {_LARGEST}")
    if problem := _impossible_shapes(key.call):
        return finding("shapes", key.text, problem=problem)
    if rank := _impossible_rank(key.call, flashinfer):
        kind, number, size = rank
        return finding("rank-out-of-range", key.text, kind=kind, rank=number, size=size)
    return None


@functools.lru_cache(maxsize=4096)
def _impossible_shapes(call: Call) -> str:
    """Say why no call has a key's shapes, whatever its version; ``""`` if one may."""
    if max(n for s in (*call.shapes, call.extras or ()) for n in s if type(n) is int) > _LARGEST:
        return f"a number is larger than {_LARGEST}"
    if problem := impossible_sizes(call):
        return problem
    (x_columns,), (_, n1, k1), _, (_, hidden, k2), _ = call.shapes
    x_pack, weight_pack = packing(call)
    # Without extras the dtypes aren't known; with those of a quantization that synth doesn't know, neither is packing.
    if call.extras or not x_pack or not weight_pack:
        return "" if call.extras else f"hidden is {hidden} in gemm2, which x ({x_columns}) or gemm1 ({k1}) don't fit"
    if n1 not in (weight_pack * k2, 2 * weight_pack * k2):
        return f"gemm1 has {n1} columns, which is neither once nor twice gemm2's {weight_pack * k2}"
    return ""


def _impossible_rank(call: Call, flashinfer: str) -> tuple[str, int, int] | None:
    """Return kind, number and count of ranks where this version's keys hold ranks and there is none of this number."""
    if "tp_rank" not in (contract_for(flashinfer).extras or ()):
        return None
    values = call.named(flashinfer)
    ranks = ((kind, int(values[f"{kind}_rank"]), int(values[f"{kind}_size"])) for kind in ("tp", "ep", "cluster"))
    return next((one for one in ranks if one[1] >= one[2]), None)


def check_bucket(key: Key, flashinfer: str) -> Iterator[Finding]:
    """Find a bucket that hardly any server looks up."""
    if not is_grid_bucket(key.bucket, flashinfer):
        near = token_buckets(key.bucket, flashinfer)[-2:]
        yield finding("off-grid-bucket", key.text, bucket=key.bucket, near=near)


# ---- its value ---------------------------------------------------------------------------------------------


def crash_of(form: str, entry: Entry, flashinfer: str) -> Finding | None:
    """Return a finding where this value raises an exception inside FlashInfer; a store never does."""
    bundled = form == "bundled"
    why = "" if form == "store" else _exception(entry.value, bundled, contract_for(flashinfer).entry_elements)
    if not why:
        return None
    where = "a lookup" if bundled else "load_configs"
    example = "(0, tactic)" if bundled else f'["{RUNNER}", tactic, {list(POLICY)}]'
    return finding("crash", entry.text, why=why, where=where, example=example)


def _exception(value: object, bundled: bool, elements: int) -> str:
    if isinstance(value, dict):
        return "a dict: KeyError"
    if not isinstance(value, (list, tuple, str)):
        return f"{shown(value)} is no list: TypeError"
    if len(value) < 2:
        return f"{len(value)} element{'s' * (len(value) != 1)}, at least 2 expected: IndexError"
    if bundled:
        return ""
    if not isinstance(value[0], str):
        return f"the runner {shown(value[0])} is no text: AttributeError"
    if elements > 2 and len(value) > 2 and (value[2] is None or isinstance(value[2], (bool, int, float))):
        return f"the policy {shown(value[2])} is no list: TypeError"
    return ""


def check_value(form: str, entry: Entry, flashinfer: str) -> Iterator[Finding]:
    """Find what an entry's value doesn't do as it should; one that raises is :func:`crash_of`'s."""
    value = entry.value
    if form != "bundled" and isinstance(value, (list, str)):
        if value[0] != RUNNER:
            yield finding("entry-runner", entry.text, runner=shown(value[0]), expected=RUNNER)
            return
        yield from _check_policy(form, entry.text, value, contract_for(flashinfer).entry_elements)
    tactic = tactic_in(value)
    if type(tactic) is not int:
        yield finding("tactic-type", entry.text, tactic=shown(tactic))
    elif tactic == -1:
        yield finding("fallback", entry.text)
    elif tactic < -1:
        yield finding("id-out-of-range/negative", entry.text, tactic=shown(tactic))


def _check_policy(form: str, key: str, value: Sequence[object], elements: int) -> Iterator[Finding]:
    policy = value[2] if len(value) > 2 else None
    # In a JSON file an entry without a policy has the usual one; in a store nobody knows.
    if (elements > 2 and len(value) > 2 and not _is_policy(policy)) or (form == "store" and len(value) < 3):
        said = f"{shown(policy)} is" if len(value) > 2 else "is not recorded, which is"
        yield finding("reprofiled", key, policy=said, expected=list(POLICY))
    if len(value) > 4 or (len(value) > 3 and not isinstance(value[3], dict)):
        yield finding("extra-elements", key)


def _is_policy(value: object) -> bool:
    return (
        isinstance(value, list)
        and len(value) == len(POLICY)
        and all(a is b or (isinstance(a, str) and a == b) for a, b in zip(value, POLICY, strict=True))
    )


def tactic_in(value: object) -> object:
    """Return what stands in the tactic's place of an entry's value."""
    return value[1] if isinstance(value, (list, tuple)) and len(value) > 1 else None


def served(value: object) -> str:
    """Return runner and tactic of an entry as text, so that equal texts are served alike."""
    runner = value[0] if isinstance(value, list) and value else RUNNER
    return repr((runner, tactic_in(value)))


# ---- its tactic --------------------------------------------------------------------------------------------


def check_tactic(
    key: Key, tactic: object, flashinfer: str, device: str | None, arch: str | None, denied: Denied
) -> Iterator[Finding]:
    """Find a tactic that there isn't, that can't run on the key's layer, or that gave wrong numbers."""
    if type(tactic) is not int or tactic < 0 or key.stage is None:
        return
    tables = tables_of(key.call, flashinfer, arch)
    if not tables:
        yield finding("id-unchecked", key.text, arch=arch or "any GPU", flashinfer=flashinfer)
        return
    fits = tuple(t for t in tables if served_id(t, key.stage, tactic) in t.ids(key.stage))
    if not fits:
        ids = " or ".join(f"{t.ids(key.stage)[0]} to {t.ids(key.stage)[-1]} ({t.arch} {t.quant})" for t in tables)
        maybe = _where_from(tables[0], key.stage, tactic)
        yield finding("id-out-of-range", key.text, stage=key.stage, tactic=shown(tactic), ids=ids, maybe=maybe)
        return
    if reason := _why_not(key.call, key.stage, tactic, flashinfer, device, arch):
        yield finding("tactic-cant-run", key.text, tactic=tactic, reason=reason)
    for table in fits:
        meant = tactic_of(table, key.stage, tactic)
        found = next((d for d in denied.get(table.quant, ()) if (d.stage, d.tactic) == (key.stage, meant)), None)
        if found is not None:
            yield finding("denied-tactic", key.text, tactic=tactic, denial=found)
            return


def _where_from(table: TacticTable, stage: int, tactic: int) -> str:
    """Say what an id that is out of range may be."""
    if stage == 2 and tactic < len(table.gemm2):
        return "; it may have been counted from gemm2's first tactic, and ids follow on from gemm1's"
    versions = _versions_with(table.arch, table.quant, stage, tactic)
    return f"; FlashInfer {', '.join(versions)} has it" if versions else ""


@functools.lru_cache(maxsize=1024)
def _versions_with(arch: str, quant: str, stage: int, tactic: int) -> tuple[str, ...]:
    found = []
    for version in known_versions():
        try:
            table = load_table(arch, quant, version)
        except SynthError:
            continue
        if tactic in table.ids(stage):
            found.append(version)
    return (found[0], "…", found[-1]) if len(found) > 2 else tuple(found)


@functools.lru_cache(maxsize=1 << 16)
def _why_not(call: Call, stage: int, tactic: int, flashinfer: str, device: str | None, arch: str | None) -> str:
    """Say why an id's tactic can't run on a call's layer on any GPU that may be meant; ``""`` if it may."""
    try:
        shape, number = call.shape(flashinfer), call.named(flashinfer)["activation_type"]
    except SynthError:
        return ""
    # Only Situ's gate is never fused.
    activation = "situ" if ACTIVATION_TYPES.get(int(number), ("",))[0] == "Situ" else None
    reasons = []
    for t in tables_of(call, flashinfer, arch):
        meant = tactic_of(t, stage, tactic)
        if meant is not None:
            smem = smem_block_bytes(device, t.arch)
            reasons.append(
                why_not(shape, t.quant, meant, stage, t.arch, smem, activation=activation, flashinfer=flashinfer)
            )
    return (reasons[0] or "") if reasons and all(reasons) else ""
