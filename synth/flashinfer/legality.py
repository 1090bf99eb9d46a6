"""For every (shape, quantization, tactic): can it run, and if not, why?

Rules of FlashInfer 0.7.4, each read in the package; paths below are under its ``data/csrc``. Three questions are kept
apart:

- What FlashInfer offers to its autotuner: :func:`valid_ids`, which is ``MoERunner.get_valid_tactics``
  (``fused_moe/core.py``) with ``get_tactic_occupancy`` and ``get_valid_tactics_for_shape`` of the C++ binding.
- Whether a tactic runs on a shape: :func:`why_not`. It knows two cases that FlashInfer offers and that always fail,
  for its filter asks neither for the fused finalize step nor for the fused gate of SM80-style kernels.
- What is left: :func:`runnable_ids`, and its complement :func:`illegal_ids`.

Nothing is refused on a guess: where a rule has no number, such as the shared memory of a tactic of another FlashInfer
version, the tactic counts as runnable, and a recorded failure decides.
"""

from __future__ import annotations

from synth.catalog.data import read_toml
from synth.catalog.devices import load_devices
from synth.catalog.shapes import MoEShape, why_unsupported
from synth.flashinfer.tactics import Tactic, TacticTable

#: The FlashInfer version whose sources the rules were read in.
READ_IN = "0.7.4"

_RULES = read_toml("synth.flashinfer", "legality.toml")
#: Bits of an activation and of a weight.
_BITS: dict[str, list[int]] = _RULES["bits"]
#: Activations whose gate the SM80-style bf16 kernels of gemm1 fuse. Engines send every gated GELU to ``Geglu``; of
#: gpt-oss's swiglu the fused kernel is only profiled, since a call with alpha, beta or limit becomes ``SwigluBias``
#: after the tuner chose (``flashinfer_cutlass_fused_moe_binding.cu``, runMoe).
_FUSED_GATES = ("swiglu", "swigluoai", "geglu", "geglu_tanh")



def _tiles(rows: list[list[int]]) -> frozenset[tuple[int, ...]]:
    return frozenset(map(tuple, rows))


_SM80_TILES = {
    quant: frozenset((tuple(tile), tuple(warp)) for tile, warp in _RULES["sm80"][quant]) for quant in ("bf16", "fp8")
}
_TMA_TILES = {family: _tiles(_RULES[family]["tiles"]) for family in ("tma90", "tma120")}
_SM120_TILES = _tiles(_RULES["tma120"]["instances"])


def smem_block_bytes(device: str | None, arch: str) -> int | None:
    """Return the shared memory in bytes that one block can have.

    Parameters
    ----------
    device : str or None
        What torch reports. A device that isn't in the catalogue has what the others of its architecture have.
    arch : str
        For example ``"sm90"``.

    Returns
    -------
    int or None
        None where nothing is known of the architecture.
    """
    devices = load_devices()
    named = next((d for d in devices if d.name == device), None)
    if named is not None:
        return named.smem_block_bytes
    return next((d.smem_block_bytes for d in devices if arch in (d.arch, d.tactics_arch)), None)


def fuses_gate(shape: MoEShape, quant: str, stage: int, tactic: Tactic, activation: str | None = None) -> bool:
    """Return whether a gemm1 tactic runs the kernel that computes gate and up together.

    Only SM80-style bf16 kernels do, where hidden and inter are multiples of 64
    (``moe_gemm/moe_gemm_template_dispatch.h``, isFusedGatedActivation and supportsFusedGatedActivation).

    Parameters
    ----------
    activation : str, optional
        A key of :data:`synth.catalog.shapes.ACTIVATIONS`; without it, any that a gated shape may have.
    """
    return (
        (stage, quant, tactic.family) == (1, "bf16", "sm80")
        and shape.gated
        and (activation is None or activation in _FUSED_GATES)
        and shape.hidden % 64 == 0
        and shape.inter % 64 == 0
    )


def shared_bytes(tactic: Tactic, quant: str, flashinfer: str = READ_IN, *, fused_gate: bool = False) -> int | None:
    """Return the shared memory in bytes that one block of a tactic's kernel needs.

    Of an SM80-style kernel: `stages` tiles of both operands, which its epilogue reuses
    (``cutlass_extensions/gemm/kernel/moe_cutlass_kernel.h``, SharedStorage); one that fuses the gate keeps a tile of
    half as many columns for its output besides (``fused_moe_kernel_traits.cuh``, SharedStorageGate).

    Returns
    -------
    int or None
        None where it isn't known: TMA kernels of another version than 0.7.4, and those of SM90, which CUTLASS builds
        with as many stages as its 227 KiB hold (215,040 to 228,352 bytes).
    """
    m, n, k = tactic.tile
    if tactic.family == "sm80":
        bits = _BITS[quant][0]
        return (tactic.stages * (m + n) * k + (m * n // 2 if fused_gate else 0)) * bits // 8
    by_tile = _RULES["bytes"].get(tactic.family, {}).get(quant, {})
    known: list[int] | None = by_tile.get(f"{m}x{n}x{k}") if flashinfer == READ_IN else None
    return None if known is None else known[2 * tactic.finalize + tactic.swap_ab]


def dispatches(tactic: Tactic, arch: str, quant: str) -> bool:
    """Return whether FlashInfer has an instance of a tactic's kernel, whatever the shape.

    Parameters
    ----------
    arch : str
        ``"sm90"`` or ``"sm120"``, as in :class:`synth.flashinfer.tactics.TacticTable`.
    """
    if tactic.family == "sm80":
        # Equal 8-bit types have SM89 kernels, which only SM120 is sent to (dispatchToArch).
        known = quant == "bf16" or (quant == "fp8" and arch == "sm120")
        return known and (tactic.tile, tactic.warp) in _SM80_TILES[quant] and tactic.stages in _RULES["sm80"]["stages"]
    if tactic.family != f"tma{arch.removeprefix('sm')}" or quant not in _RULES[tactic.family]["quants"]:
        return False
    if tactic.tile not in _TMA_TILES[tactic.family]:
        return False
    m, n, k = tactic.tile
    if tactic.family == "tma120":
        return tactic.cluster == (1, 1, 1) and (m, n, k * 8 // _BITS[quant][0]) in _SM120_TILES
    # moe_gemm_template_dispatch_tma_ws.h, are_tile_shapes_supported.
    allowed = [(1, 1, 1)] + [(2, 1, 1)] * (m >= 128) + [(1, 2, 1)] * (n >= 128) + [(2, 2, 1)] * (m >= 128 <= n)
    return tactic.cluster in allowed


def fits_w4_profile(tactic: Tactic, gemm_n: int, gemm_k: int, *, bf16_activations: bool = False) -> bool:
    """Return whether FlashInfer offers a tactic for a GEMM with 4-bit weights scaled in groups.

    ``isProfileShapeSupported`` of ``fused_moe/cutlass_backend/flashinfer_cutlass_fused_moe_binding.cu``, which
    ``getValidTacticsForShape`` asks only under ``use_w4_group_scaling``. K of the tile is taken as it is written, in
    bytes. Schedules of one warp group are not in any table here and not covered.

    Parameters
    ----------
    gemm_n, gemm_k : int
        N and K as ``core.py`` passes them.
    bf16_activations : bool
        MXFP4 weights with 16-bit activations on SM90 (isWFP4A16Quant).
    """
    if tactic.family == "sm80":  # it has no TMA tile, and the C++ refuses sizes of 0
        return False
    m, n, k = tactic.tile
    if gemm_n <= 0 or gemm_k < k or gemm_k % k or gemm_n < n or gemm_n % m:
        return False
    return not (bf16_activations and ((k == 256 and (m, n) in ((128, 256), (256, 128))) or (k == 512 and n >= 128)))


def occupied_ids(table: TacticTable, stage: int, smem: int | None) -> tuple[int, ...]:
    """Return the ids of a stage whose ``get_tactic_occupancy`` is above 0.

    ``moe_gemm/moe_gemm_template_dispatch.h``, queryOccupancyForConfig: a TMA kernel only has to be dispatched, and is
    asked for without fused finalize; an SM80-style one also has to fit the shared memory, and is asked for without
    fused gate.

    Parameters
    ----------
    smem : int or None
        Shared memory in bytes that one block can have; None leaves it unchecked.
    """
    return tuple(
        i
        for i, t in table.items(stage)
        if dispatches(t, table.arch, table.quant)
        and (t.family != "sm80" or _fits(shared_bytes(t, table.quant, table.flashinfer), smem))
    )


def valid_ids(
    table: TacticTable,
    stage: int,
    shape: MoEShape,
    smem: int | None,
    *,
    w4_group_scaling: bool = False,
    bf16_activations: bool = False,
) -> tuple[int, ...]:
    """Return the ids that FlashInfer offers to its autotuner for a stage, in its order.

    ``MoERunner.get_valid_tactics`` (``fused_moe/core.py``): those with occupancy, or all where none has; of these the
    ones that suit the shape, or all where none does. Without `w4_group_scaling`, so for every quantization of
    :data:`synth.flashinfer.tactics.QUANTS`, ``get_valid_tactics_for_shape`` leaves nothing out. ClampedRelu2's own rule
    is for SM100 only.

    Parameters
    ----------
    smem : int or None
        Shared memory in bytes that one block can have.
    w4_group_scaling, bf16_activations : bool
        As in :func:`fits_w4_profile`.
    """
    offered = occupied_ids(table, stage, smem) or tuple(table.ids(stage))
    if not w4_group_scaling:
        return offered
    n, k = shape.gemm_nk(stage)
    fitting = tuple(i for i in offered if fits_w4_profile(table.tactic(i), n, k, bf16_activations=bf16_activations))
    return fitting or offered


def why_not(
    shape: MoEShape,
    quant: str,
    tactic: Tactic,
    stage: int,
    arch: str,
    smem: int | None,
    *,
    activation: str | None = None,
    flashinfer: str = READ_IN,
) -> str | None:
    """Return why a tactic can't run on a shape, None where it can.

    Parameters
    ----------
    shape : MoEShape
    quant : str
    tactic : Tactic
    stage : int
        1 or 2.
    arch : str
        Architecture whose tactics run on the device.
    smem : int or None
        Shared memory in bytes that one block can have, see :func:`smem_block_bytes`; None leaves it unchecked.
    activation : str, optional
        As in :func:`fuses_gate`. Without it a tactic that some activation of such a shape can't run counts as one
        that can't.
    flashinfer : str
        FlashInfer version.
    """
    unsupported = why_unsupported(shape, quant)
    if unsupported is not None:
        return f"FlashInfer has no {quant} MoE kernel for {shape}: {unsupported}"
    if not dispatches(tactic, arch, quant):
        return f"FlashInfer has no instance of '{tactic}' for {arch} {quant}: it raises when it is dispatched"
    if tactic.finalize and stage == 1:
        return f"'{tactic}' fuses the finalize step, which only gemm2 has"
    fused_gate = fuses_gate(shape, quant, stage, tactic, activation)
    needed = shared_bytes(tactic, quant, flashinfer, fused_gate=fused_gate)
    if not _fits(needed, smem):
        how = " with the gate fused into gemm1" if fused_gate else ""
        return f"'{tactic}' needs {needed} bytes of shared memory{how}, and a block of this GPU has {smem}"
    return None


def runnable_ids(
    table: TacticTable, stage: int, shape: MoEShape, smem: int | None, activation: str | None = None
) -> tuple[int, ...]:
    """Return the ids of a stage that can run on a shape, in FlashInfer's order; see :func:`why_not`."""
    return tuple(
        i
        for i, t in table.items(stage)
        if why_not(shape, table.quant, t, stage, table.arch, smem, activation=activation, flashinfer=table.flashinfer)
        is None
    )


def illegal_ids(
    table: TacticTable, stage: int, shape: MoEShape, smem: int | None, activation: str | None = None
) -> frozenset[int]:
    """Return the ids of a stage that can't run on a shape: all but :func:`runnable_ids`."""
    return frozenset(table.ids(stage)) - frozenset(runnable_ids(table, stage, shape, smem, activation))


def _fits(needed: int | None, smem: int | None) -> bool:
    return needed is None or smem is None or needed <= smem
