"""What the compiler says of each tactic's kernel: registers, shared memory, instructions. Facts that need no GPU.

One file for each FlashInfer version in ``kernels/``, written by ``benchmarks/kernels.py extract``; its head names the
compiler and its flags. Nothing here is a time.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from types import MappingProxyType
from typing import Any

from synth.errors import SynthError
from synth.flashinfer.tactics import DEFAULT_FLASHINFER, Tactic

#: What the driver keeps of a block's shared memory, in bytes (CUDA C++ Programming Guide, compute capability 8.0 on).
RESERVED_SMEM = 1024
#: Registers are given to a warp in units of this many.
_REGISTER_UNIT = 256
#: Warps get registers in units of this many: one of each of an SM's four partitions.
_WARP_UNIT = 4
_SMEM_UNIT = 128


@dataclass(frozen=True)
class SmLimits:
    """What one streaming multiprocessor has (CUDA C++ Programming Guide, technical specifications).

    Attributes
    ----------
    registers : int
        32-bit registers.
    smem_bytes : int
        Shared memory of the SM.
    smem_block_bytes : int
        Shared memory that one block can have, without the part that the driver keeps.
    threads, blocks : int
        Most resident threads and blocks.
    """

    registers: int
    smem_bytes: int
    smem_block_bytes: int
    threads: int
    blocks: int


#: Limits of an SM by architecture.
LIMITS: Mapping[str, SmLimits] = MappingProxyType(
    {
        "sm90": SmLimits(registers=65536, smem_bytes=233472, smem_block_bytes=232448, threads=2048, blocks=32),
        "sm120": SmLimits(registers=65536, smem_bytes=102400, smem_block_bytes=101376, threads=1536, blocks=24),
    }
)


#: A main loop spills where more than this share of its instructions are those of local memory.
SPILLING = 0.05


@dataclass(frozen=True)
class Kernel:
    """The kernel of one tactic, as compiled.

    Attributes
    ----------
    registers : int
        Registers per thread at launch. Warp-specialised kernels move registers between warps later.
    threads : int
        Threads per block.
    static_smem, dynamic_smem : int
        Shared memory per block in bytes, without the :data:`RESERVED_SMEM` of the driver.
    stages : int
        Pipeline stages of the main loop.
    stack_bytes : int
        Local memory per thread in bytes; more than 0 where the compiler spilled registers or kept arrays there.
    instructions : Mapping of str to int
        Instructions of the whole kernel by kind, and ``"total"``.
    main_loop : Mapping of str to int
        Those that a math warp executes in one iteration of the main loop, waits' retries left out; empty where the
        main loop wasn't found.
    main_loop_steps : float
        Steps of tile K that one iteration covers, from the products that its MMAs compute.
    """

    registers: int
    threads: int
    static_smem: int
    dynamic_smem: int
    stages: int
    stack_bytes: int
    instructions: Mapping[str, int] = field(hash=False)
    main_loop: Mapping[str, int] = field(hash=False)
    main_loop_steps: float

    @property
    def smem(self) -> int:
        """Shared memory per block in bytes, without the driver's part."""
        return self.static_smem + self.dynamic_smem

    def per_step(self, kind: str = "total") -> float:
        """Return the instructions of `kind` that a math warp executes for one step of tile K.

        Raises
        ------
        SynthError
            When the main loop wasn't found.
        """
        if not self.main_loop:
            raise SynthError("this kernel's main loop was not found in its machine code; use its whole instructions")
        return self.main_loop.get(kind, 0) / self.main_loop_steps

    @property
    def spills(self) -> bool:
        """Whether the main loop goes through local memory: more than ``SPILLING`` of its instructions do.

        The one such kernel of the H200 (gemm1 of a gated bf16 layer, 128x128x64 with 4 stages) takes 18 times as long
        for a step as the same tile with 3 stages, which doesn't spill.
        """
        return self.main_loop.get("local", 0) > SPILLING * self.main_loop.get("total", 0)

    def blocks_per_sm(self, limits: SmLimits) -> int:
        """Return how many blocks an SM can hold at once; 0 where a block doesn't fit.

        The arithmetic is that of CUDA's occupancy calculator: registers are given to whole warps in units of 256, and
        each block's shared memory has the driver's kilobyte added.
        """
        return min(self._fits(limits).values())

    def limited_by(self, limits: SmLimits) -> str:
        """Return what sets :meth:`blocks_per_sm`: ``"registers"``, ``"shared memory"``, ``"threads"`` or ``"blocks"``.

        Where several do, the first of these.
        """
        fits = self._fits(limits)
        return min(fits, key=fits.__getitem__)

    def _fits(self, limits: SmLimits) -> dict[str, int]:
        """Return how many blocks each resource has room for."""
        warps = -(-self.threads // 32)
        warp_registers = _rounded_up(self.registers * 32, _REGISTER_UNIT)
        resident_warps = limits.registers // warp_registers // _WARP_UNIT * _WARP_UNIT
        by_smem = limits.smem_bytes // _rounded_up(self.smem + RESERVED_SMEM, _SMEM_UNIT)
        return {
            "registers": resident_warps // warps,
            "shared memory": by_smem if self.smem <= limits.smem_block_bytes else 0,
            "threads": limits.threads // (32 * warps),
            "blocks": limits.blocks,
        }


def _rounded_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


@dataclass(frozen=True)
class Compiler:
    """How the kernels of one architecture were compiled.

    Attributes
    ----------
    compiler : str
        What the compiler writes into its output.
    flags : tuple of str
        FlashInfer's flags, include folders left out.
    """

    compiler: str
    flags: tuple[str, ...]


def load_kernels(
    arch: str, quant: str, flashinfer: str = DEFAULT_FLASHINFER, *, gated_gemm1: bool = False
) -> Mapping[Tactic, Kernel]:
    """Return the compiled kernel of every tactic.

    A tactic's kernel is one and the same in both stages, with one exception, `gated_gemm1`.

    Parameters
    ----------
    arch : str
        ``"sm90"`` or ``"sm120"``.
    quant : str
        One of :data:`synth.flashinfer.tactics.QUANTS`.
    flashinfer : str
        FlashInfer version.
    gated_gemm1 : bool
        The kernels that run gemm1 of a layer with a gate. The multistage bf16 ones are others there: they compute gate
        and value in one block, apply the activation, and use a smaller tile for an expert's last rows.

    Raises
    ------
    SynthError
        When there is no such table.
    """
    tables, _ = _load(flashinfer)
    try:
        plain, gated = tables[arch, quant]
    except KeyError:
        known = ", ".join(f"{a} {q}" for a, q in tables)
        raise SynthError(f"no kernels known for {arch} {quant} in FlashInfer {flashinfer}; known: {known}") from None
    return MappingProxyType({**plain, **gated}) if gated_gemm1 else plain


def load_compiler(arch: str, flashinfer: str = DEFAULT_FLASHINFER) -> Compiler:
    """Return how the kernels of `arch` were compiled.

    Raises
    ------
    SynthError
        When there are none.
    """
    _, compilers = _load(flashinfer)
    if arch not in compilers:
        raise SynthError(f"no kernels known for {arch} in FlashInfer {flashinfer}; known: {', '.join(compilers)}")
    return compilers[arch]


_Tables = dict[tuple[str, str], tuple[Mapping[Tactic, Kernel], Mapping[Tactic, Kernel]]]


@functools.cache
def _load(flashinfer: str) -> tuple[_Tables, dict[str, Compiler]]:
    """Return the tables, ordinary kernels and those of a gated gemm1, and the compilers."""
    folder = resources.files("synth.flashinfer") / "kernels"
    try:
        data = json.loads((folder / f"{flashinfer}.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        known = sorted(p.name.removesuffix(".json") for p in folder.iterdir() if p.name.endswith(".json"))
        raise SynthError(f"no kernels of FlashInfer {flashinfer}; known: {', '.join(known)}") from None
    tables: _Tables = {
        (row["arch"], row["quant"]): (_kernels(row["kernels"]), _kernels(row.get("gated_gemm1", ())))
        for row in data["tables"]
    }
    compilers = {arch: Compiler(row["compiler"], tuple(row["flags"])) for arch, row in data["architectures"].items()}
    return tables, compilers


def _kernels(rows: Any) -> Mapping[Tactic, Kernel]:
    return MappingProxyType(
        {
            Tactic.parse(row["tactic"]): Kernel(
                **{k: row[k] for k in ("registers", "threads", "static_smem", "dynamic_smem", "stages", "stack_bytes")},
                instructions=MappingProxyType(row["instructions"]),
                main_loop=MappingProxyType(row["main_loop"]),
                main_loop_steps=row["main_loop_steps"],
            )
            for row in rows
        }
    )
