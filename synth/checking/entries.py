"""One entry of a config: can its key be looked up, does its value do what it should, can its tactic run?"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from synth.catalog.untrusted import shown
from synth.checking.findings import Finding
from synth.errors import SynthError
from synth.flashinfer.buckets import is_grid_bucket, token_buckets
from synth.flashinfer.calls import ACTIVATION_TYPES
from synth.flashinfer.keys import Key, parse_key
from synth.flashinfer.legality import smem_block_bytes, why_not
from synth.flashinfer.meaning import packing, tables_of, tactic_of
from synth.flashinfer.reachability import unreachable
from synth.flashinfer.tactics import TacticTable, known_versions, load_table
from synth.flashinfer.versions import OPS, POLICY, RUNNER, contract_for, served_id

if TYPE_CHECKING:
    from synth.timings.records import Denial

#: Denied tactics of a device and FlashInfer version, by quantization.
Denied = Mapping[str, Sequence["Denial"]]

#: Larger numbers fit no tensor's size.
_LARGEST = 2**31 - 1
#: Names of operations at least this alike (0 to 1) are the same with an error in it: those of FlashInfer's other MoE
#: operations are at most 0.45 from gemm1's.
_ALIKE = 0.6


# ---- one entry: its key ------------------------------------------------------------------------------------

#: How a key of any operation begins.
_ANY_KEY = re.compile(r"\('([^']{1,200})', '[^']{1,200}', \(")


@functools.lru_cache(maxsize=1024)
def _is_foreign(operation: str) -> bool:
    alike = difflib.SequenceMatcher(None, operation, OPS[1], autojunk=False).ratio()
    return operation not in OPS.values() and alike < _ALIKE


def other_operation(text: str) -> str | None:
    """Return the operation of a key that is none of the CUTLASS MoE's, nor one of these misspelt."""
    m = _ANY_KEY.match(text)
    return m[1] if m is not None and _is_foreign(m[1]) else None


def readable_key(text: str, flashinfer: str, arch: str | None) -> tuple[Key | None, list[Finding]]:
    """Return the key of an entry that can be looked up, or why it can't be."""
    try:
        key = parse_key(text)
    except SynthError as e:
        return None, [Finding("unreadable-key", text, str(e), "drop the entry")]
    dead = unreachable(key, flashinfer, arch)
    if dead is not None:
        return None, [Finding(dead.code, text, dead.message, dead.way_out)]
    if problem := _impossible_shapes(key):
        return None, [Finding("shapes", text, problem, "correct the key")]
    if problem := _impossible_rank(key, flashinfer):
        return None, [Finding("rank-out-of-range", text, problem, "write the keys of every rank; synth emit does")]
    return key, []


def _impossible_shapes(key: Key) -> str:
    """Say why no call has a key's shapes, whatever its version; ``""`` if one may."""
    numbers = [n for s in key.shapes for n in s] + [n for n in key.extras or () if type(n) is int]
    if max(numbers) > _LARGEST:
        return f"a number is larger than {_LARGEST}"
    if [len(s) for s in key.shapes[:2]] != [2, 3] or len(key.shapes) != 5 or len(key.shapes[3]) != 3:
        return "expected the shapes of x, weights, bias, weights, bias"
    (_, x_columns), (experts, n1, k1), bias1, (experts2, hidden, k2), bias2 = key.shapes
    if min(n for i in (0, 1, 3) for n in key.shapes[i]) < 1:
        return "a size is less than 1"
    if experts != experts2:
        return f"gemm1 has {experts} experts, gemm2 {experts2}"
    if bias1 not in ((0,), (experts, n1)) or bias2 not in ((0,), (experts, hidden)):
        return "a bias is neither absent, (0,), nor (experts, columns)"
    x_pack, weight_pack = packing(key)
    # Without extras the dtypes aren't known; with those of a quantization that synth doesn't know, neither is packing.
    if key.extras or not x_pack or not weight_pack:
        return "" if key.extras else f"hidden is {hidden} in gemm2, which x ({x_columns}) or gemm1 ({k1}) don't fit"
    if n1 not in (weight_pack * k2, 2 * weight_pack * k2):
        return f"gemm1 has {n1} columns, which is neither once nor twice gemm2's {weight_pack * k2}"
    return ""


def _impossible_rank(key: Key, flashinfer: str) -> str:
    """Say why there is no such rank, where this version's keys hold ranks; ``""`` if there is."""
    if "tp_rank" not in (contract_for(flashinfer).extras or ()):
        return ""
    values = key.named(flashinfer)
    for kind in ("tp", "ep", "cluster"):
        rank, size = values[f"{kind}_rank"], values[f"{kind}_size"]
        if int(rank) >= int(size):
            return f"{kind}_rank is {rank} of {size}: no rank has this number"
    return ""


def check_bucket(key: Key, flashinfer: str) -> Iterator[Finding]:
    if not is_grid_bucket(key.bucket, flashinfer):
        yield Finding(
            "off-grid-bucket",
            key.text,
            f"only a server whose maximum token count is exactly {key.bucket} looks this bucket up",
            f"write the buckets {token_buckets(key.bucket, flashinfer)[-2:]} or keep it for that server",
            "warning",
        )


# ---- one entry: its value ----------------------------------------------------------------------------------


def crash_of(kind: str, key: str, value: object, flashinfer: str) -> Finding | None:
    """Return a finding where this value raises an exception inside FlashInfer; a store never does."""
    why = "" if kind == "store" else _exception(value, kind == "bundled", contract_for(flashinfer).entry_elements)
    if not why:
        return None
    where = "a lookup" if kind == "bundled" else "load_configs"
    example = "(0, tactic)" if kind == "bundled" else f'["{RUNNER}", tactic, {list(POLICY)}]'
    return Finding("crash", key, f"{why}: {where} raises in the server", f"write it as {example}")


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


def check_value(kind: str, key: str, value: object, flashinfer: str) -> Iterator[Finding]:
    if kind != "bundled" and isinstance(value, (list, str)):
        if value[0] != RUNNER:
            yield Finding(
                "entry-runner",
                key,
                f"the entry is for the runner {shown(value[0])}, so the lookup passes it over",
                f"write {RUNNER!r} as its first element",
            )
            return
        yield from _check_policy(kind, key, value, contract_for(flashinfer).entry_elements)
    tactic = tactic_in(value)
    if type(tactic) is not int:
        yield Finding(
            "tactic-type",
            key,
            f"the tactic is {shown(tactic)}, not a whole number: it is served and the kernel refuses it",
            "write the tactic's id",
        )
    elif tactic == -1:
        yield Finding("fallback", key, "the tactic is -1, the fallback that runs anyway", "drop the entry", "note")
    elif tactic < -1:
        yield Finding(
            "id-out-of-range", key, f"no tactic has the id {shown(tactic)}; the kernel raises", "write the id anew"
        )


def _check_policy(kind: str, key: str, value: Sequence[object], elements: int) -> Iterator[Finding]:
    policy = value[2] if len(value) > 2 else None
    # In a JSON file an entry without a policy has the usual one; in a store nobody knows.
    if (elements > 2 and len(value) > 2 and not _is_policy(policy)) or (kind == "store" and len(value) < 3):
        yield Finding(
            "reprofiled",
            key,
            f"its policy {shown(policy) if len(value) > 2 else 'is not recorded, which'} is not this operation's: a "
            "server's warm-up times the key anew",
            f"write the policy as {list(POLICY)!r}",
            "warning",
        )
    if len(value) > 4 or (len(value) > 3 and not isinstance(value[3], dict)):
        yield Finding("extra-elements", key, "FlashInfer drops what follows the policy", "drop it too", "note")


def _is_policy(value: object) -> bool:
    return (
        isinstance(value, list)
        and len(value) == len(POLICY)
        and all(a is b or (isinstance(a, str) and a == b) for a, b in zip(value, POLICY, strict=True))
    )


def tactic_in(value: object) -> object:
    return value[1] if isinstance(value, (list, tuple)) and len(value) > 1 else None


def served(value: object) -> str:
    """Return runner and tactic of an entry as text, so that equal texts are served alike."""
    runner = value[0] if isinstance(value, list) and value else RUNNER
    return repr((runner, tactic_in(value)))


# ---- one entry: its tactic ---------------------------------------------------------------------------------


def check_tactic(
    key: Key, tactic: object, flashinfer: str, device: str | None, arch: str | None, denied: Denied
) -> Iterator[Finding]:
    if type(tactic) is not int or tactic < 0 or key.stage is None:
        return
    tables = tables_of(key, flashinfer, arch)
    if not tables:
        yield Finding(
            "id-unchecked",
            key.text,
            f"synth knows no tactics of this quantization for {arch or 'any GPU'} in FlashInfer {flashinfer}",
            "check the ids on the GPU",
            "note",
        )
        return
    fits = [t for t in tables if served_id(t, key.stage, tactic) in t.ids(key.stage)]
    if not fits:
        ids = " or ".join(f"{t.ids(key.stage)[0]} to {t.ids(key.stage)[-1]} ({t.arch} {t.quant})" for t in tables)
        yield Finding(
            "id-out-of-range",
            key.text,
            f"gemm{key.stage} has no id {shown(tactic)}, but {ids}: it is served and the kernel raises"
            f"{_where_from(tables[0], key.stage, tactic)}",
            "emit the file anew, or synth port it from the version that it was tuned under",
        )
        return
    yield from _check_legal(key, tactic, fits, flashinfer, device)
    yield from _check_denied(key, tactic, fits, denied)


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


def _check_legal(
    key: Key, tactic: int, tables: Collection[TacticTable], flashinfer: str, device: str | None
) -> Iterator[Finding]:
    """Yield a finding where the entry's tactic can't run on the key's layer, on any GPU that may be meant."""
    stage = key.stage or 1
    try:
        shape, number = key.shape(flashinfer), key.named(flashinfer)["activation_type"]
    except SynthError:
        return
    # Only Situ's gate is never fused.
    activation = "situ" if ACTIVATION_TYPES.get(int(number), ("",))[0] == "Situ" else None
    reasons = []
    for t in tables:
        meant = tactic_of(t, stage, tactic)
        smem = smem_block_bytes(device, t.arch)
        if meant is not None:
            reasons.append(
                why_not(shape, t.quant, meant, stage, t.arch, smem, activation=activation, flashinfer=flashinfer)
            )
    if reasons and all(reasons):
        yield Finding(
            "tactic-cant-run", key.text, f"id {tactic}: {reasons[0]}: it is served and the kernel raises", "emit anew"
        )


def _check_denied(key: Key, tactic: int, tables: Iterable[TacticTable], denied: Denied) -> Iterator[Finding]:
    for table in tables:
        meant = tactic_of(table, key.stage or 1, tactic)
        found = next((d for d in denied.get(table.quant, ()) if (d.stage, d.tactic) == (key.stage, meant)), None)
        if found is not None:
            yield Finding(
                "denied-tactic",
                key.text,
                f"id {tactic} gave wrong numbers when synth verify compared them: {found}",
                "emit anew, which leaves it out, or drop the entry",
            )
            return
