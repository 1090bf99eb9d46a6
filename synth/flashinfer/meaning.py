"""What a key and a tactic id mean under one FlashInfer version, as far as the key tells."""

from __future__ import annotations

import functools

from synth.errors import SynthError
from synth.flashinfer.calls import SIGNATURES
from synth.flashinfer.keys import Call
from synth.flashinfer.tactics import Tactic, TacticTable, load_tables
from synth.flashinfer.versions import served_id

#: Values in one element of x and of the weights → quantizations that pack them so.
_PACKED = {
    pack: tuple(dict.fromkeys(s.quant for s in SIGNATURES if (s.x_pack, s.weight_pack) == pack))
    for pack in {(s.x_pack, s.weight_pack) for s in SIGNATURES}
}


def packing(call: Call) -> tuple[int, int]:
    """Return how many values one element of x and one of the weights hold, by the shapes; 0 where they don't fit."""
    (x_columns,), (_, _, k1), _, (_, hidden, _), _ = call.shapes
    x, weights = (hidden // n if n > 0 and hidden % n == 0 else 0 for n in (x_columns, k1))
    return x, weights


@functools.lru_cache(maxsize=4096)
def quants_of(call: Call, flashinfer: str) -> tuple[str, ...]:
    """Return the quantizations that a call may be of; keys without extras tell no more than how values are packed."""
    try:
        quant = call.quant(flashinfer)
    except SynthError:
        return _PACKED.get(packing(call), ())
    return (quant,) if quant is not None else ()


@functools.lru_cache(maxsize=4096)
def tables_of(call: Call, flashinfer: str, arch: str | None) -> tuple[TacticTable, ...]:
    """Return the tables that a call's ids may be of, under an architecture or under any; none where none is known."""
    fused = True
    if call.extras:
        try:
            fused = call.named(flashinfer).get("use_fused_finalize") is not False
        except SynthError:
            return ()
    return _tables(quants_of(call, flashinfer), flashinfer, arch, fused)


@functools.lru_cache(maxsize=256)
def _tables(quants: tuple[str, ...], flashinfer: str, arch: str | None, fused: bool) -> tuple[TacticTable, ...]:
    try:
        tables = tuple(t for t in load_tables(flashinfer) if t.quant in quants and arch in (None, t.arch))
    except SynthError:
        return ()
    return tables if fused else tuple(t.without_fused_finalize() for t in tables)


def tactic_of(table: TacticTable, stage: int, tactic_id: int) -> Tactic | None:
    """Return the tactic that an entry of this table's version makes FlashInfer run, None where there is none."""
    served = served_id(table, stage, tactic_id)
    return table.tactic(served) if served in table.ids(stage) else None
