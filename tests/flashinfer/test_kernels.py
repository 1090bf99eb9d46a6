from __future__ import annotations

import importlib.util
import json
import sys
from importlib import resources
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synth.catalog.devices import load_devices
from synth.errors import SynthError
from synth.flashinfer.kernels import LIMITS, RESERVED_SMEM, Kernel, SmLimits, load_compiler, load_kernels
from synth.flashinfer.tactics import DEFAULT_FLASHINFER, Tactic, TacticTable, load_table, load_tables

TABLES = [pytest.param(t, id=f"{t.arch}-{t.quant}") for t in load_tables()]

#: Tactics whose block needs more shared memory than an SM120 block can have: stage 1 of a gated layer, then stage 2.
TOO_LARGE = {
    "nvfp4": ([], [26, 27]),
    "mxfp8_mxfp4": ([], []),
    "fp8": ([19, 20], [40, 41]),
    "bf16": ([5, 7, 8], [17]),
}


def kernel(*, registers: int = 64, threads: int = 128, smem: int = 0) -> Kernel:
    return Kernel(registers, threads, 0, smem, 2, 0, {"total": 10}, {"total": 8, "mma": 4}, 2.0)


class TestTables:
    @pytest.mark.parametrize("table", TABLES)
    @pytest.mark.parametrize("gated", [False, True])
    def test_every_tactic_has_a_kernel(self, table: TacticTable, gated: bool) -> None:
        kernels = load_kernels(table.arch, table.quant, gated_gemm1=gated)
        assert set(kernels) == set(table.gemm1) | set(table.gemm2)

    @pytest.mark.parametrize("table", TABLES)
    def test_numbers_are_possible(self, table: TacticTable) -> None:
        for gated in (False, True):
            for k in load_kernels(table.arch, table.quant, gated_gemm1=gated).values():
                assert 16 <= k.registers <= 255
                assert k.registers * k.threads <= LIMITS[table.arch].registers
                assert k.threads in (128, 256, 384)
                assert k.stages >= 2
                assert k.smem > 0

    @pytest.mark.parametrize("table", TABLES)
    def test_the_parts_of_a_count_add_up(self, table: TacticTable) -> None:
        for k in load_kernels(table.arch, table.quant, gated_gemm1=True).values():
            for counts in (k.instructions, k.main_loop):
                assert counts["total"] == sum(v for kind, v in counts.items() if kind != "total")
            assert k.main_loop["total"] < k.instructions["total"]

    @pytest.mark.parametrize("table", TABLES)
    def test_the_main_loops_mmas_are_whole_steps_of_the_tile(self, table: TacticTable) -> None:
        for gated in (False, True):
            for k in load_kernels(table.arch, table.quant, gated_gemm1=gated).values():
                assert k.main_loop_steps >= 1
                assert k.main_loop_steps == int(k.main_loop_steps)

    @pytest.mark.parametrize("table", TABLES)
    def test_a_multistage_kernel_has_the_stages_of_its_tactic(self, table: TacticTable) -> None:
        for gated in (False, True):
            for tactic, k in load_kernels(table.arch, table.quant, gated_gemm1=gated).items():
                assert tactic.stages in (0, k.stages)

    @pytest.mark.parametrize("table", TABLES)
    def test_stages_of_tiles_fit_in_shared_memory(self, table: TacticTable) -> None:
        bits = {"bf16": (16, 16), "fp8": (8, 8), "nvfp4": (4, 4), "mxfp8_mxfp4": (8, 4)}[table.quant]
        for tactic, k in load_kernels(table.arch, table.quant).items():
            a, b = bits[::-1] if tactic.swap_ab else bits
            m, n, k_tile = tactic.tile
            elements = k_tile if tactic.family == "sm80" else k_tile * 8 // max(bits)
            assert k.smem >= k.stages * (m * a + n * b) * elements // 8

    @pytest.mark.parametrize("quant", TOO_LARGE)
    def test_what_cannot_run_on_sm120(self, quant: str) -> None:
        table = load_table("sm120", quant)
        for stage, expected in zip((1, 2), TOO_LARGE[quant], strict=True):
            kernels = load_kernels("sm120", quant, gated_gemm1=stage == 1)
            assert [i for i, t in table.items(stage) if not kernels[t].blocks_per_sm(LIMITS["sm120"])] == expected

    def test_every_kernel_runs_on_sm90(self) -> None:
        for quant in ("bf16", "fp8"):
            for gated in (False, True):
                kernels = load_kernels("sm90", quant, gated_gemm1=gated)
                assert all(k.blocks_per_sm(LIMITS["sm90"]) >= 1 for k in kernels.values())

    def test_only_multistage_bf16_has_other_kernels_for_a_gate(self) -> None:
        for table in load_tables():
            plain = load_kernels(table.arch, table.quant)
            gated = load_kernels(table.arch, table.quant, gated_gemm1=True)
            others = {t for t in plain if plain[t] != gated[t]}
            assert others == {t for t in plain if t.family == "sm80" and table.quant == "bf16"}

    def test_the_h200s_slowest_kernel_is_the_one_that_spills_in_its_main_loop(self) -> None:
        # gemm1's id 44 is 10 to 20 times slower than its neighbours once an expert has more than 64 rows.
        kernels = load_kernels("sm90", "bf16", gated_gemm1=True)
        spilling = [t for t, k in kernels.items() if k.main_loop.get("local")]
        assert spilling == [load_table("sm90", "bf16").tactic(44)]

    def test_the_head_names_compiler_and_flags(self) -> None:
        for arch in ("sm90", "sm120"):
            compiled = load_compiler(arch)
            assert compiled.compiler.startswith("Cuda compilation tools, release ")
            assert any(f"sm_{arch[2:]}a" in flag for flag in compiled.flags)
            assert not any("/" in flag for flag in compiled.flags)

    def test_the_limits_are_those_of_the_devices(self) -> None:
        for device in load_devices():
            if device.tactics_arch in LIMITS:
                assert LIMITS[device.tactics_arch].smem_block_bytes == device.smem_block_bytes
        for limits in LIMITS.values():
            assert limits.smem_bytes == limits.smem_block_bytes + RESERVED_SMEM

    def test_an_unknown_table_architecture_or_version_is_refused(self) -> None:
        with pytest.raises(SynthError, match=r"no kernels known for sm90 nvfp4 .*known: .*sm90 bf16"):
            load_kernels("sm90", "nvfp4")
        with pytest.raises(SynthError, match=r"no kernels known for sm100 .*known: .*sm120"):
            load_compiler("sm100")
        with pytest.raises(SynthError, match=rf"no kernels of FlashInfer 0\.0\.1; known: {DEFAULT_FLASHINFER}"):
            load_kernels("sm90", "bf16", "0.0.1")

    def test_a_table_can_not_be_changed(self) -> None:
        kernels = load_kernels("sm90", "bf16")
        with pytest.raises(TypeError):
            kernels[Tactic("sm80", (1, 1, 1))] = kernel()  # type: ignore[index]


class TestResidentBlocks:
    # Of CUDA's occupancy calculator, compute capability 9.0 with 227 KB and 12.0 with 99 KB of shared memory.
    @pytest.mark.parametrize(
        "arch, registers, threads, smem, blocks, limit",
        [
            ("sm90", 32, 128, 0, 16, "registers"),
            ("sm90", 128, 128, 0, 4, "registers"),
            ("sm90", 168, 384, 215040, 1, "registers"),
            ("sm90", 32, 128, 65536, 3, "shared memory"),
            ("sm90", 32, 128, 232448, 1, "shared memory"),
            ("sm90", 16, 32, 0, 32, "blocks"),
            ("sm120", 32, 256, 0, 6, "threads"),
            ("sm120", 32, 128, 49152, 2, "shared memory"),
            ("sm120", 32, 128, 50304, 1, "shared memory"),
            ("sm120", 32, 128, 101376, 1, "shared memory"),
            ("sm120", 32, 128, 101504, 0, "shared memory"),
        ],
    )
    def test_known_cases(self, arch: str, registers: int, threads: int, smem: int, blocks: int, limit: str) -> None:
        k = kernel(registers=registers, threads=threads, smem=smem)
        assert (k.blocks_per_sm(LIMITS[arch]), k.limited_by(LIMITS[arch])) == (blocks, limit)

    @given(
        limits=st.sampled_from(list(LIMITS.values())),
        registers=st.integers(16, 255),
        warps=st.integers(1, 32),
        smem=st.integers(0, 232448),
    )
    def test_what_is_resident_fits(self, limits: SmLimits, registers: int, warps: int, smem: int) -> None:
        k = kernel(registers=registers, threads=32 * warps, smem=smem)
        blocks = k.blocks_per_sm(limits)
        assert blocks * k.registers * k.threads <= limits.registers
        assert blocks * (k.smem + RESERVED_SMEM) <= limits.smem_bytes
        assert blocks * k.threads <= limits.threads
        assert kernel(registers=registers, threads=32 * warps, smem=smem + 128).blocks_per_sm(limits) <= blocks


class TestKernel:
    def test_counts_of_a_step(self) -> None:
        assert (kernel().per_step(), kernel().per_step("mma"), kernel().per_step("ldsm")) == (4, 2, 0)

    def test_without_a_main_loop_there_is_no_step(self) -> None:
        with pytest.raises(SynthError, match="main loop was not found"):
            Kernel(64, 128, 0, 0, 2, 0, {"total": 10}, {}, 0.0).per_step()


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The script that wrote the tables: its parts that read symbols and machine code."""
    path = Path(__file__).resolve().parents[2] / "benchmarks" / "kernels.py"
    spec = importlib.util.spec_from_file_location("benchmark_kernels", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


#: As ``cuobjdump -sass`` prints it: a wait in a loop with two MMAs, in a loop without one; then another MMA.
SASS = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;                /* 0x00000a0000017a02 */
                                                                         /* 0x000fe40000000f00 */
        /*0010*/                   LDSM.16.M88.4 R4, [R0] ;              /* 0x0 */
        /*0020*/                   HMMA.16816.F32.BF16 R8, R4, R6, R8 ;  /* 0x0 */
        /*0030*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R2 ;  /* 0x0 */
        /*0040*/              @!P0 BRA 0x30 ;                            /* 0x0 */
        /*0050*/                   HMMA.16816.F32.BF16 R8, R4, R6, R8 ;  /* 0x0 */
        /*0060*/               @P1 BRA 0x10 ;                            /* 0x0 */
        /*0070*/               @P2 BRA 0x0 ;                             /* 0x0 */
        /*0080*/                   HMMA.16816.F32.BF16 R8, R4, R6, R8 ;  /* 0x0 */
        /*0090*/                   EXIT ;                                /* 0x0 */
"""


class TestMachineCode:
    def test_instructions_are_read_and_counted_by_kind(self, script: ModuleType) -> None:
        code = script.parse_sass(SASS)
        assert [i.address for i in code] == list(range(0, 0xA0, 0x10))
        assert [i.guarded for i in code] == [False] * 4 + [True, False, True, True, False, False]
        assert script.count(code) == {"total": 10, "mma": 3, "ldsm": 1, "barrier": 1, "branch": 4, "other": 1}

    def test_the_main_loop_is_the_innermost_one_with_mmas_without_its_waits(self, script: ModuleType) -> None:
        (body,) = script.loops(script.parse_sass(SASS))
        assert [i.address for i in body] == [0x10, 0x20, 0x50, 0x60]

    def test_code_without_a_loop_has_none(self, script: ModuleType) -> None:
        assert script.loops([i for i in script.parse_sass(SASS) if not i.opcode.startswith("BRA")]) == []

    @pytest.mark.parametrize(
        "opcode, volume",
        [
            ("HMMA.16816.F32.BF16", 16 * 8 * 16),
            ("QMMA.16832.F32.E4M3.E4M3", 16 * 8 * 32),
            ("QMMA.SF.16832.F32.E4M3.E2M1.E8", 16 * 8 * 32),
            ("OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X", 16 * 8 * 64),
            ("HGMMA.64x128x16.F32.BF16", 64 * 128 * 16),
            ("QGMMA.64x256x32.F32.E4M3.E4M3", 64 * 256 * 32),
            ("FFMA", 0),
        ],
    )
    def test_products_of_an_mma(self, script: ModuleType, opcode: str, volume: int) -> None:
        assert script.Instruction(0, opcode, "", False).mma_volume == volume

    def test_the_compiler_is_asked_for_every_sm120_tactic(self, script: ModuleType) -> None:
        for quant in script.QUANTS["sm120"]:
            table = load_table("sm120", quant)
            text = "\n".join(script.sources(table).values())
            made = text.count("INSTANTIATE_TMA") + text.count("template struct genericMoeGemmKernelLauncher")
            assert made == len(table.gemm2)


def test_the_file_has_one_kernel_a_line() -> None:
    text = (resources.files("synth.flashinfer") / "kernels" / f"{DEFAULT_FLASHINFER}.json").read_text(encoding="utf-8")
    kernels = sum(len(t["kernels"]) + len(t.get("gated_gemm1", ())) for t in json.loads(text)["tables"])
    assert sum('"tactic"' in line and '"main_loop_steps"' in line for line in text.splitlines()) == kernels
