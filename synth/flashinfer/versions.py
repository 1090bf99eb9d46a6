"""What each FlashInfer version looks up: the form of keys, buckets, metadata and entries."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from synth.catalog.data import read_toml
from synth.catalog.devices import get_device
from synth.errors import SynthError
from synth.flashinfer.tactics import DEFAULT_FLASHINFER

if TYPE_CHECKING:
    from synth.flashinfer.tactics import Tactic, TacticTable

#: With "1" in this variable FlashInfer reads its bundled configs.
ENV_BUNDLED = "FLASHINFER_AUTOTUNER_LOAD_FROM_FILE"
#: The tunable operations of the CUTLASS MoE, by stage.
OPS = {1: "trtllm::fused_moe::gemm1", 2: "trtllm::fused_moe::gemm2"}
#: Class name of the CUTLASS MoE runner, in the key and in the entry.
RUNNER = "MoERunner"
#: The profiling policy of the CUTLASS MoE; an entry with another one is re-profiled while a server warms up.
POLICY = ("cuda_graph_profile_replays", None, "l2_cache_policy", "hot")


@dataclass(frozen=True)
class Contract:
    """What the FlashInfer versions from `first` to `last` look up.

    Attributes
    ----------
    first, last : str
        Versions, both included.
    extras : tuple of str or None
        Names of the key's extras in order; None where the key has no extras field (a 3-tuple).
    hybrid_buckets : bool
        Hybrid grid that rounds up; else powers of two that round down.
    metadata_keys : tuple of str
        The ``_metadata`` keys that must match; empty where there are no JSON files.
    entry_elements : int
        Elements of a JSON entry that are read: runner and tactic, then the profiling policy, then the times. Further
        ones are ignored, so that a longer entry is taken, too. 0 where there are no JSON files.
    managed_store : bool
        There is an ``autotune_v2`` store beside the JSON files.
    finalize_option : bool
        Callers can turn gemm2's fused finalize step off (``use_fused_finalize``), which shortens its range of ids; no
        key says so before 0.6.18.
    misreads_gemm2_ids : bool
        A gemm2 id that is less than gemm2's number of tactics is tuned as what it is, and served as if it were counted
        from gemm2's first tactic: see :func:`served_id`.
    """

    first: str
    last: str
    extras: tuple[str, ...] | None
    hybrid_buckets: bool
    metadata_keys: tuple[str, ...]
    entry_elements: int
    managed_store: bool = False
    finalize_option: bool = True
    misreads_gemm2_ids: bool = False


def _contracts() -> tuple[Contract, ...]:
    table = read_toml("synth.flashinfer", "contracts.toml")
    lists = {name: tuple(values) for name, values in table["lists"].items()}
    rows = []
    for row in table["contract"]:
        extras, metadata = row.pop("extras", None), row.pop("metadata")
        rows.append(Contract(extras=lists.get(extras), metadata_keys=lists[metadata], **row))
    return tuple(rows)


#: Every known version, oldest first.
CONTRACTS = _contracts()
#: The ``_metadata`` keys of the default version.
METADATA_KEYS = CONTRACTS[-1].metadata_keys


def _release(version: str) -> tuple[int, ...]:
    m = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if m is None:
        raise SynthError(f"{version!r} is not a FlashInfer version; expected, for example, {DEFAULT_FLASHINFER}")
    return tuple(int(x) for x in m.groups())


@functools.cache
def contract_for(flashinfer: str = DEFAULT_FLASHINFER) -> Contract:
    """Return the contract of one FlashInfer version; a post-release counts as its release.

    Raises
    ------
    SynthError
        When the version is not known.
    """
    release = _release(flashinfer)
    for contract in CONTRACTS:
        if _release(contract.first) <= release <= _release(contract.last):
            return contract
    raise SynthError(
        f"FlashInfer {flashinfer} is not known; known: the releases from {CONTRACTS[0].first} to {CONTRACTS[-1].last}; "
        "name one of these or update synth"
    )


def served_id(table: TacticTable, stage: int, tactic_id: int) -> int:
    """Return the id of the tactic that FlashInfer runs where an entry says `tactic_id`.

    Up to 0.6.14 the tuner times gemm2's tactics under their ids, but the operation adds gemm1's number of tactics to an
    id that is less than gemm2's. On SM120 with NVFP4, whose gemm2 has twice gemm1's tactics, every tactic without
    swapped operands is thus tuned and the one with them served. Later versions serve what was tuned (FlashInfer pull
    request 3661).
    """
    shifted = contract_for(table.flashinfer).misreads_gemm2_ids and stage == 2 and 0 <= tactic_id < len(table.gemm2)
    return tactic_id + len(table.gemm1) if shifted else tactic_id


def entry_id(table: TacticTable, stage: int, tactic: Tactic) -> int:
    """Return the id that an entry must hold for FlashInfer to run `tactic`: the inverse of :func:`served_id`.

    Raises
    ------
    SynthError
        When there is no such tactic in this stage.
    """
    wanted = table.id_of(stage, tactic)
    return wanted if served_id(table, stage, wanted) == wanted else wanted - len(table.gemm1)


def arch_number(arch: str) -> int:
    """Return 90 for ``"sm90"``.

    Raises
    ------
    SynthError
        When `arch` is not of that form.
    """
    m = re.fullmatch(r"sm(\d{2,3})", arch)
    if m is None:
        raise SynthError(f"{arch!r} is not an architecture; expected, for example, sm90 or sm120")
    return int(m[1])


def arch_of(device_name: str | None) -> str | None:
    """Return the architecture whose tactics run on a device of the catalogue, None for a device not in it."""
    if device_name is None:
        return None
    try:
        return get_device(device_name).tactics_arch
    except SynthError:
        return None


def build_metadata(
    device_name: str, flashinfer: str = DEFAULT_FLASHINFER, provenance: Mapping[str, object] | None = None
) -> dict[str, object]:
    """Return a config's ``_metadata``.

    FlashInfer version and GPU are exact: they decide what an id means and how fast it is. The other
    versions are ``"*"``: none of them changes a CUTLASS tactic, which FlashInfer compiles itself.

    Parameters
    ----------
    device_name : str
        Exactly what ``torch.cuda.get_device_name`` gives.
    flashinfer : str
        FlashInfer version.
    provenance : mapping, optional
        Where the entries come from; goes under ``"synth"``, which FlashInfer ignores and keeps.
    """
    keys = contract_for(flashinfer).metadata_keys
    if not keys:
        raise SynthError(f"FlashInfer {flashinfer} reads no JSON configs; they exist since {CONTRACTS[1].first}")
    exact = {"flashinfer_version": flashinfer, "gpu": device_name}
    metadata: dict[str, object] = {key: exact.get(key, "*") for key in keys}
    if provenance:
        metadata["synth"] = dict(provenance)
    return metadata
