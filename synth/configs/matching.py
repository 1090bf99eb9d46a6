"""Is a sidecar true to its config? It could say anything of entries that aren't there."""

from __future__ import annotations

import functools

from synth.catalog.untrusted import shown
from synth.configs.model import Config, Entry
from synth.configs.sidecar import Record, sidecar_path
from synth.errors import SynthError
from synth.flashinfer.tactics import Tactic, TacticTable, load_table
from synth.flashinfer.versions import arch_of


def check_sidecar(config: Config) -> None:
    """See that a config's sidecar speaks of its device and version, of every key, and of the tactics that are there.

    Raises
    ------
    SynthError
        When they contradict each other; names the first contradiction.
    """
    if config.sidecar is None:
        return
    head = config.sidecar.head
    for name, mine in (("device", config.named_gpu), ("flashinfer", config.said.get("flashinfer_version"))):
        other = head.get(name)
        if isinstance(mine, str) and isinstance(other, str) and mine and other and mine != other:
            raise _contradiction(config, f"its {name} is {other}, the config's {mine}")
    records = config.records
    if config.raw.keys() != records.keys():
        lacking, more = len(records.keys() - config.raw.keys()), len(config.raw.keys() - records.keys())
        what = f"{lacking} of its keys are not in the config, and {more} of the config's not in it"
        raise _contradiction(config, what)
    flashinfer, arch = config.flashinfer or "", arch_of(config.gpu)
    for entry in config.entries:
        record = records[entry.text]
        if _differs(entry, record, flashinfer):
            raise _contradiction(config, f"the sidecar says {record.shape} of {shown(entry.text, 300)}")
        table = _table(arch, record.quant, flashinfer, record.fused_finalize) if arch else None
        if table is not None and entry.tactic_id != table.id_of(record.stage, _tactic(record.tactic)):
            what = f"{record.tactic} of {shown(entry.text, 300)}, and the id {shown(entry.tactic_id)}"
            raise _contradiction(config, f"the sidecar says {what} is another tactic")


def _differs(entry: Entry, record: Record, flashinfer: str) -> bool:
    """Tell whether a record is of another layer, stage, bucket or call than an entry's key, as far as the key tells."""
    key = entry.layer_key
    if key is None:
        return False
    if (key.stage, key.bucket) != (record.stage, record.bucket):
        return True
    try:
        fused = key.named(flashinfer)["use_fused_finalize"]
        asked = (str(key.shape(flashinfer)), key.quant(flashinfer), fused)
    except SynthError:
        return False
    return asked != (record.shape, record.quant, record.fused_finalize)


_tactic = functools.lru_cache(maxsize=4096)(Tactic.parse)


@functools.lru_cache(maxsize=64)
def _table(arch: str, quant: str, flashinfer: str, fused: bool) -> TacticTable | None:
    try:
        table = load_table(arch, quant, flashinfer)
    except SynthError:
        return None
    return table if fused else table.without_fused_finalize()


def _contradiction(config: Config, what: str) -> SynthError:
    path = config.path
    assert path is not None  # a config without one has no sidecar
    return SynthError(
        f"{sidecar_path(path)} contradicts {path.name}: {what}; emit both anew, or move it away to go on without"
    )
