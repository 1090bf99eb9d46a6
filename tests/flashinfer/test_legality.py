from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from synth.catalog.devices import Device, load_devices
from synth.catalog.models import find_layer
from synth.catalog.schemes import STAGES
from synth.catalog.shapes import MoEShape, check_supported, why_unsupported
from synth.errors import UnsupportedShapeError
from synth.flashinfer.legality import (
    READ_IN,
    dispatches,
    fits_w4_profile,
    fuses_gate,
    illegal_ids,
    runnable_ids,
    shared_bytes,
    smem_block_bytes,
    valid_ids,
    why_not,
)
from synth.flashinfer.tactics import Tactic, TacticTable, load_table, load_tables
from synth.timings.folders import load_shapes

SM90, SM120 = 232448, 101376
TABLES = load_tables(READ_IN)
SHAPES = st.builds(
    MoEShape,
    hidden=st.integers(1, 512).map(lambda x: 16 * x),
    inter=st.integers(1, 512).map(lambda x: 8 * x),
    experts=st.just(64),
    top_k=st.just(8),
    gated=st.booleans(),
)


def layer(label: str, quant: str) -> MoEShape:
    model = find_layer(label)
    ((tp, ep),) = model.deployments if label != model.name else ((1, 1),)
    return model.deploy(tp, ep, quant).shape


def ids(*parts: int | range) -> tuple[int, ...]:
    return tuple(i for p in parts for i in (p if isinstance(p, range) else (p,)))


class TestRealLayers:
    """Worked out by hand from FlashInfer's C++: what it offers for tuning, and what of that can run."""

    @pytest.mark.parametrize(
        ("label", "arch", "quant", "smem", "stage", "offered", "runs"),
        [
            # An SM90 block has 227 KiB: everything fits.
            ("glm-5-tp8", "sm90", "bf16", SM90, 1, ids(range(45)), ids(range(45))),
            ("glm-5-tp8", "sm90", "bf16", SM90, 2, ids(range(45, 126)), ids(range(45, 126))),
            ("deepseek-v3-tp16", "sm90", "fp8", SM90, 1, ids(range(36)), ids(range(36))),
            ("deepseek-v3-tp16", "sm90", "fp8", SM90, 2, ids(range(36, 108)), ids(range(36, 108))),
            ("qwen3-30b-a3b-tp8", "sm90", "bf16", SM90, 1, ids(range(45)), ids(range(45))),
            ("nemotron-3-nano", "sm90", "bf16", SM90, 1, ids(range(45)), ids(range(45))),
            ("gpt-oss-20b", "sm90", "bf16", SM90, 2, ids(range(45, 126)), ids(range(45, 126))),
            # An SM120 block has 99 KiB. SM80-style bf16: 128x128x64 with 4 stages takes 128 KiB. With the gate fused
            # 128x128x64 with 3 stages takes 112 KiB and 64x128x64 with 4 takes 104 KiB, which FlashInfer doesn't ask.
            ("glm-5-tp8", "sm120", "bf16", SM120, 1, ids(range(8)), ids(range(5), 6)),
            ("glm-5-tp8", "sm120", "bf16", SM120, 2, ids(range(9, 17)), ids(range(9, 17))),
            ("gemma-4-26b-a4b", "sm120", "bf16", SM120, 1, ids(range(8)), ids(range(5), 6)),
            ("qwen3-30b-a3b-tp4", "sm120", "bf16", SM120, 1, ids(range(8)), ids(range(5), 6)),
            ("qwen3-30b-a3b-tp8", "sm120", "bf16", SM120, 1, ids(range(8)), ids(range(8))),  # inter 96: not fused
            ("nemotron-3-nano", "sm120", "bf16", SM120, 1, ids(range(8)), ids(range(8))),  # no gate
            # SM89 kernels: 16x256x128 takes 102 KiB with 3 stages and 136 KiB with 4.
            ("glm-5-tp8", "sm120", "fp8", SM120, 1, ids(range(19)), ids(range(19))),
            ("glm-5-tp8", "sm120", "fp8", SM120, 2, ids(range(21, 40)), ids(range(21, 40))),
            ("nemotron-3-nano", "sm120", "fp8", SM120, 1, ids(range(19)), ids(range(19))),
            # Unswapped 256x128x64B and 128x256x64B with fused finalize take 100 KiB.
            ("glm-5-tp8", "sm120", "nvfp4", SM120, 1, ids(range(16)), ids(range(16))),
            ("glm-5-tp8", "sm120", "nvfp4", SM120, 2, ids(range(16, 48)), ids(range(16, 26), range(28, 48))),
            ("deepseek-v3-tp8", "sm120", "nvfp4", SM120, 2, ids(range(16, 48)), ids(range(16, 26), range(28, 48))),
            ("deepseek-v3-tp16", "sm120", "nvfp4", SM120, 1, ids(range(16)), ids(range(16))),
            ("qwen3-30b-a3b-tp4", "sm120", "nvfp4", SM120, 1, ids(range(16)), ids(range(16))),
            ("gemma-4-26b-a4b", "sm120", "nvfp4", SM120, 2, ids(range(16, 48)), ids(range(16, 26), range(28, 48))),
            ("nemotron-3-nano", "sm120", "nvfp4", SM120, 1, ids(range(16)), ids(range(16))),  # padded to 1920
            ("gpt-oss-20b", "sm120", "mxfp8_mxfp4", SM120, 1, ids(range(6)), ids(range(6))),  # padded to 2944
            ("gpt-oss-20b", "sm120", "mxfp8_mxfp4", SM120, 2, ids(range(6, 18)), ids(range(6, 18))),
            ("deepseek-v3-tp16", "sm120", "mxfp8_mxfp4", SM120, 1, ids(range(6)), ids(range(6))),
        ],
    )
    def test_offered_and_runnable(
        self,
        label: str,
        arch: str,
        quant: str,
        smem: int,
        stage: int,
        offered: tuple[int, ...],
        runs: tuple[int, ...],
    ) -> None:
        table, shape = load_table(arch, quant, READ_IN), layer(label, quant)
        assert valid_ids(table, stage, shape, smem) == offered
        assert runnable_ids(table, stage, shape, smem) == runs

    @pytest.mark.parametrize(
        ("shape", "quant", "arch"),
        [
            ("h2880-i2880-e32-k4", "mxfp8_mxfp4", "sm120"),  # gpt-oss as published
            ("h2048-i96-e128-k8", "nvfp4", "sm120"),  # qwen3-30b-a3b, TP 8
            ("h2048-i192-e128-k8", "mxfp8_mxfp4", "sm120"),
            ("h2816-i352-e128-k8", "nvfp4", "sm120"),  # gemma-4, TP 2
            ("h2688-i1856-e128-k6-ungated", "nvfp4", "sm120"),
            ("h2688-i228-e128-k6", "fp8", "sm90"),
        ],
    )
    def test_a_shape_without_a_kernel_runs_nothing(self, shape: str, quant: str, arch: str) -> None:
        table, parsed = load_table(arch, quant, READ_IN), MoEShape.parse(shape)
        with pytest.raises(UnsupportedShapeError):
            check_supported(parsed, quant)
        assert [runnable_ids(table, stage, parsed, None) for stage in STAGES] == [(), ()]

    def test_situ_has_no_fused_kernel(self) -> None:
        table, shape = load_table("sm120", "bf16", READ_IN), layer("glm-5-tp8", "bf16")
        assert runnable_ids(table, 1, shape, SM120, "situ") == tuple(range(8))
        assert runnable_ids(table, 1, shape, SM120, "geglu_tanh") == (0, 1, 2, 3, 4, 6)


class TestReasons:
    SHAPE = MoEShape(6144, 256, 256, 8)

    @pytest.mark.parametrize(
        ("tactic", "quant", "stage", "arch", "reason"),
        [
            ("sm80 128x128x64_w64x32x64 stages4", "bf16", 2, "sm120", "needs 131072 bytes .* a block .* has 101376"),
            ("sm80 64x128x64_w32x64x64 stages4", "bf16", 1, "sm120", "106496 bytes .* with the gate fused into gemm1"),
            ("tma120 256x128x64B cl1x1x1 ml0 epi0 fin1 swap0", "nvfp4", 2, "sm120", "needs 102400 bytes"),
            ("tma120 128x128x256B cl1x1x1 ml0 epi0 fin0 swap0", "nvfp4", 1, "sm120", "no instance .*dispatched"),
            ("tma120 128x128x64B cl1x1x1 ml0 epi0 fin0 swap0", "mxfp8_mxfp4", 1, "sm120", "no instance"),
            ("tma120 128x128x64B cl2x1x1 ml0 epi0 fin0 swap0", "nvfp4", 1, "sm120", "no instance"),
            ("tma90 128x64x128B cl1x2x1 ml0 epi0 fin0 swap0", "bf16", 1, "sm90", "no instance"),
            ("tma90 128x64x128B cl1x1x1 ml0 epi0 fin0 swap0", "bf16", 1, "sm120", "no instance .* sm120 bf16"),
            ("sm80 32x128x64_w32x32x64 stages2", "fp8", 1, "sm90", "no instance"),
            ("sm80 32x128x64_w32x32x64 stages5", "bf16", 1, "sm120", "no instance"),
            ("tma90 128x64x128B cl1x1x1 ml0 epi0 fin1 swap0", "bf16", 1, "sm90", "only gemm2"),
        ],
    )
    def test_why_not(self, tactic: str, quant: str, stage: int, arch: str, reason: str) -> None:
        smem = SM120 if arch == "sm120" else SM90
        why = why_not(self.SHAPE, quant, Tactic.parse(tactic), stage, arch, smem)
        assert why is not None and re.search(reason, why)

    def test_the_shape_comes_first(self) -> None:
        tactic = load_table("sm120", "nvfp4", READ_IN).tactic(0)
        why = why_not(MoEShape(2816, 352, 128, 8), "nvfp4", tactic, 1, "sm120", SM120)
        assert why is not None and "352 is not a multiple of 64 (pad it to 384)" in why

    def test_nothing_is_refused_on_a_guess(self) -> None:
        tight = Tactic.parse("tma120 256x128x64B cl1x1x1 ml0 epi0 fin1 swap0")
        assert why_not(self.SHAPE, "nvfp4", tight, 2, "sm120", None) is None
        assert why_not(self.SHAPE, "nvfp4", tight, 2, "sm120", SM120, flashinfer="0.6.12") is None


@given(SHAPES, st.sampled_from(TABLES), st.sampled_from(STAGES), st.sampled_from([None, 49152, SM120, SM90]))
def test_what_runs_is_offered_and_in_order(shape: MoEShape, table: TacticTable, stage: int, smem: int | None) -> None:
    offered, runs = valid_ids(table, stage, shape, smem), runnable_ids(table, stage, shape, smem)
    assert list(offered) == sorted(offered) and list(runs) == sorted(runs)
    assert set(runs) <= set(table.ids(stage)) and set(offered) <= set(table.ids(stage))
    if runs:
        assert set(runs) <= set(offered)
        assert why_unsupported(shape, table.quant) is None
    assert illegal_ids(table, stage, shape, smem) == set(table.ids(stage)) - set(runs)
    if smem is None:
        assert runs == (tuple(table.ids(stage)) if why_unsupported(shape, table.quant) is None else ())


@pytest.mark.parametrize("device", load_devices(), ids=lambda d: d.slug)
def test_the_fallback_runs_on_every_device(device: Device) -> None:
    for table in TABLES:
        if table.arch == device.tactics_arch:
            for stage in STAGES:
                runs = runnable_ids(table, stage, MoEShape(4096, 1024, 64, 8), device.smem_block_bytes)
                assert table.fallback_id(stage) in runs


def test_nothing_that_was_timed_is_refused() -> None:
    parts = load_shapes(Path(__file__).parents[2] / "measurements")
    assert parts
    for part in parts:
        table = load_table(part.origin.arch, part.origin.quant, part.origin.flashinfer)
        smem = smem_block_bytes(part.origin.device, part.origin.arch)
        ran = ~np.isnan(part.ms)
        for stage in STAGES:
            timed = set(part.tactic[ran & (part.stage == stage)].tolist())
            assert not timed & illegal_ids(table, stage, part.shape, smem), part.label


def test_shared_memory_of_a_device() -> None:
    assert smem_block_bytes("NVIDIA H200", "sm90") == SM90
    assert smem_block_bytes("NVIDIA GB10", "sm120") == smem_block_bytes("NVIDIA RTX 9999", "sm120") == SM120
    assert smem_block_bytes(None, "sm42") is None


def test_the_gate_is_fused_where_hidden_and_inter_are_whole_tiles() -> None:
    tactic = Tactic.parse("sm80 32x128x64_w32x32x64 stages2")
    assert fuses_gate(MoEShape(2048, 768, 128, 8), "bf16", 1, tactic)
    assert not fuses_gate(MoEShape(2048, 96, 128, 8), "bf16", 1, tactic)
    assert not fuses_gate(MoEShape(2080, 768, 128, 8), "bf16", 1, tactic)
    assert not fuses_gate(MoEShape(2048, 768, 128, 8, gated=False), "bf16", 1, tactic)
    assert not fuses_gate(MoEShape(2048, 768, 128, 8), "bf16", 2, tactic)
    assert not fuses_gate(MoEShape(2048, 768, 128, 8), "fp8", 1, tactic)


@pytest.fixture(scope="module")
def sources() -> Path:
    """The sources that the installed FlashInfer compiles its kernels from."""
    flashinfer = pytest.importorskip("flashinfer", reason="flashinfer is not installed")
    if flashinfer.__version__ != READ_IN:
        pytest.skip(f"the rules were read in FlashInfer {READ_IN}, not {flashinfer.__version__}")
    return Path(flashinfer.__file__).parent / "data"


@pytest.fixture(scope="module")
def moe_gemm(sources: Path) -> Path:
    return sources / "csrc/nv_internal/tensorrt_llm/kernels/cutlass_kernels/moe_gemm"


def block(text: str, start: str) -> str:
    """Return a definition from `start` to the brace that closes it."""
    begin = text.index(start)
    depth = 0
    for at in range(text.index("{", begin), len(text)):
        depth += (text[at] == "{") - (text[at] == "}")
        if not depth:
            return text[begin : at + 1]
    raise AssertionError(f"{start!r} is never closed")


def run(sources: Path, folder: Path, code: str, arch: str, *options: str, stdin: str = "") -> list[list[str]]:
    """Compile host code against FlashInfer's headers and return the words of each line that it prints."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc is not installed")
    # FlashInfer's own header asks for cuBLAS, of which nothing is needed here.
    stub = folder / "tensorrt_llm/common/cudaUtils.h"
    stub.parent.mkdir(parents=True)
    stub.write_text("#pragma once\n")
    (folder / "code.cu").write_text(code)
    internal = sources / "csrc/nv_internal"
    include = [
        folder,
        sources / "cutlass/include",
        internal / "tensorrt_llm/cutlass_extensions/include",
        internal / "include",
        internal,
        internal / "tensorrt_llm/kernels/cutlass_kernels/moe_gemm/launchers",
        sources / "include",
    ]
    defines = ("-DENABLE_BF16", "-DENABLE_FP8", "-DENABLE_FP4", "-DUSING_OSS_CUTLASS_MOE_GEMM")
    command = [nvcc, "-std=c++17", "-w", f"-arch={arch}", "--expt-relaxed-constexpr", *defines, *options]
    command += [*(f"-I{path}" for path in include), "code.cu", "-o", "program"]
    compiled = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert compiled.returncode == 0, compiled.stderr[-4000:]
    ran = subprocess.run([folder / "program"], input=stdin, capture_output=True, text=True, check=True)
    return [line.split() for line in ran.stdout.splitlines()]


class TestTilesThatAreDispatched:
    """Every tile with a case in the C++ is dispatched here, and no other."""

    @pytest.mark.parametrize(("family", "quant"), [("tma90", "bf16"), ("tma120", "nvfp4")])
    def test_tma(self, moe_gemm: Path, family: str, quant: str) -> None:
        text = (moe_gemm / "moe_gemm_template_dispatch_tma_ws.h").read_text()
        number = family.removeprefix("tma")
        cases = {
            tuple(map(int, found))
            for found in re.findall(rf"^\s*SHAPE_CASE\({number}, (\d+), (\d+), (\d+)\)", text, re.MULTILINE)
        }
        assert cases
        for m in (64, 128, 256):
            for n in (8, 16, 32, 64, 128, 256):
                for k in (32, 64, 128, 256, 512):
                    expected = (m, n, k) in cases
                    assert dispatches(Tactic(family, (m, n, k)), f"sm{number}", quant) == expected, (m, n, k)

    @pytest.mark.parametrize(
        ("quant", "marker"),
        [
            ("bf16", "// This overload is only enabled when T == WeightType."),
            ("fp8", "// This overload is only enabled when T == WeightType and T == __nv_fp8_e4m3 or __nv_fp8_e5m2"),
        ],
    )
    def test_sm80(self, moe_gemm: Path, quant: str, marker: str) -> None:
        text = (moe_gemm / "moe_gemm_template_dispatch.h").read_text()
        body = block(text[text.index(marker + "\n") :], "switch (inputs.gemm_config.tile_config_sm80)")
        name = r"CtaShape(\d+)x(\d+)x(\d+)_WarpShape(\d+)x(\d+)x(\d+)"
        cases = {tuple(map(int, found)) for found in re.findall(f"case [^;]*?{name}:", body)}
        every = {tuple(map(int, found)) for found in re.findall(name, text)}
        assert cases and every > cases
        for m, n, k, a, b, c in every:
            tactic = Tactic("sm80", (m, n, k), warp=(a, b, c), stages=2)
            assert dispatches(tactic, "sm120", quant) == ((m, n, k, a, b, c) in cases)

    def test_conditions_are_as_read(self, sources: Path, moe_gemm: Path) -> None:
        dispatch = re.sub(r"\s+", " ", (moe_gemm / "moe_gemm_template_dispatch.h").read_text())
        assert "TmaWarpSpecializedGroupedGemmInput::EpilogueFusion::NONE>( probe_num_experts, config" in dispatch
        assert "(gemm_k % 64 == 0) && (gemm_n % 64 == 0)" in dispatch
        assert "activation_type == ActivationType::Swiglu || activation_type == ActivationType::Geglu" in dispatch
        assert "!gemm_config.is_tma_warp_specialized" in dispatch
        core = (sources.parent / "fused_moe/core.py").read_text()
        assert "valid_tactics = valid_tactics if valid_tactics else all_tactics" in core
        assert "if not self.use_w4_group_scaling:\n                return valid_tactics" in core
        assert "return filtered_tactics if filtered_tactics else valid_tactics" in core


def profile(tactic: Tactic) -> str:
    """Return what the C++ harness reads of a tactic: SM, tile, cluster as the enum numbers it."""
    sm = 80 if tactic.family == "sm80" else int(tactic.family.removeprefix("tma"))
    return f"{sm} {' '.join(map(str, tactic.tile))}"


W4_TILES = [
    Tactic("tma90", (m, n, k), swap_ab=True)
    for m in (64, 128, 256)
    for n in (16, 32, 64, 128, 256)
    for k in (128, 256, 512)
]
GEMMS = [(n, k) for n in (64, 96, 128, 192, 352, 704, 1408, 1536, 2880, 2944, 5760, 7168) for k in (96, 128, 704, 2944)]


@pytest.fixture(scope="module")
def shape_rules(sources: Path, moe_gemm: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[str]]]:
    """What the package's own getValidTacticsForShape and are_tile_shapes_supported answer."""
    binding = (sources / "csrc/fused_moe/cutlass_backend/flashinfer_cutlass_fused_moe_binding.cu").read_text()
    dispatch = (moe_gemm / "moe_gemm_template_dispatch_tma_ws.h").read_text()
    sm120 = block(
        dispatch,
        "template <typename CtaShape, typename ClusterShape, typename DataType>\n"
        "constexpr bool are_tile_shapes_supported_sm120()",
    )
    general = block(
        dispatch,
        "template <typename Arch, typename CTAShape, typename ClusterShape, typename DataType,\n"
        "          typename WeightType, bool IsMXFPX>\nconstexpr bool are_tile_shapes_supported()",
    )
    tiles = [(128, n, k) for n in (8, 16, 32, 64, 128, 256) for k in (64, 128, 256, 512)]
    tiles += [(256, 128, k) for k in (64, 128, 256)] + [(64, 128, 128)]
    clusters = [(1, 1), (2, 1), (1, 2), (2, 2)]
    asked = "\n".join(
        f'std::printf("{arch} {m} {n} {k} {a} {b} %d\\n", int(are_tile_shapes_supported<cutlass::arch::Sm{arch}, '
        f"cute::Shape<_{m}, _{n}, _{k}>, cute::Shape<_{a}, _{b}, _1>, float, float, false>()));"
        for arch in (90, 120)
        for m, n, k in tiles
        for a, b in clusters
    )
    code = f"""
    #include <cstdio>
    #include <iostream>
    #include <vector>
    #include "cute/tensor.hpp"
    #include "cutlass/arch/arch.h"
    #include "cutlass_extensions/gemm_configs.h"
    template <class T> using Array = std::vector<T>;
    struct Runner {{
      using Profile = tensorrt_llm::cutlass_extensions::CutlassGemmConfig;
      std::vector<Profile> mAllProfiles;
      int64_t mGemm1TacticCount{{0}}, mGemm2TacticCount{{0}};
      bool mUseW4GroupScaling = false, mUseWfp4Afp8Humming = false, bf16 = false;
      bool isWFP4A16Quant() const {{ return mUseW4GroupScaling && bf16; }}
      {block(binding, "bool isProfileShapeSupported(")}
      {block(binding, "Array<int64_t> getValidTacticsForShape(")}
    }};
    using namespace cute;
    template <class A, class C, class K, class D, class W, bool X>
    constexpr bool are_tile_shapes_supported_sm100() {{ return false; }}
    {sm120}
    {general}
    int main() {{
      using namespace tensorrt_llm::cutlass_extensions;
      {asked}
      int w4, bf16, first, count, n, k;
      while (std::cin >> w4 >> bf16 >> first >> count >> n >> k) {{
        Runner r;
        r.mUseW4GroupScaling = w4; r.bf16 = bf16;
        r.mGemm1TacticCount = first; r.mGemm2TacticCount = count - first;
        for (int i = 0; i < count; ++i) {{
          int sm, a, b, c;
          std::cin >> sm >> a >> b >> c;
          CutlassGemmConfig p;
          p.sm_version = sm;
          int tile = a * 1000000 + b * 1000 + c;
          if (sm == 90) p.tile_config_sm90 = static_cast<CutlassTileConfigSM90>(tile);
          if (sm == 120) p.tile_config_sm120 = static_cast<CutlassTileConfigSM120>(tile);
          r.mAllProfiles.push_back(p);
        }}
        for (int stage : {{1, 2}}) {{
          std::printf("valid");
          for (auto id : r.getValidTacticsForShape(stage, n, k)) std::printf(" %d", int(id));
          std::printf("\\n");
        }}
      }}
    }}
    """
    lines = [
        f"{int(w4)} {int(bf16)} {first} {len(tactics)} {n} {k} " + " ".join(map(profile, tactics))
        for w4, bf16, first, tactics, n, k in questions()
    ]
    found = run(sources, tmp_path_factory.mktemp("rules"), code, "sm_89", stdin="\n".join(lines))
    return {
        "tiles": [words for words in found if words[0] != "valid"],
        "valid": [words[1:] for words in found if words[0] == "valid"],
    }


def questions() -> Iterator[tuple[bool, bool, int, Sequence[Tactic], int, int]]:
    """Yield group scaling, 16-bit activations, gemm1 tactics, all tactics, N and K."""
    for table in TABLES:
        every = (*table.gemm1, *table.gemm2)
        for n, k in GEMMS:
            yield False, False, len(table.gemm1), every, n, k
            yield True, False, len(table.gemm1), every, n, k
    for n, k in GEMMS:
        for bf16 in (False, True):
            yield True, bf16, len(W4_TILES), (*W4_TILES, *W4_TILES), n, k


class TestAgainstCompiledCode:
    """The rules say what the package's own code says, compiled for the host from its sources."""

    def test_valid_tactics_for_shape(self, shape_rules: dict[str, list[list[str]]]) -> None:
        answers = iter(shape_rules["valid"])
        refused = 0
        for w4, bf16, first, tactics, n, k in questions():
            for stage in STAGES:
                mine = range(first) if stage == 1 else range(first, len(tactics))
                expected = [i for i in mine if not w4 or fits_w4_profile(tactics[i], n, k, bf16_activations=bf16)]
                assert [int(i) for i in next(answers)] == expected, (w4, bf16, stage, n, k)
                refused += len(mine) - len(expected)
        assert next(answers, None) is None and refused > 1000

    def test_tiles_and_clusters(self, shape_rules: dict[str, list[list[str]]]) -> None:
        answers = [tuple(map(int, words)) for words in shape_rules["tiles"]]
        assert {said for *_, said in answers} == {0, 1}
        for arch, m, n, k, a, b, said in answers:
            # The C++ counts K in elements of the activation, the table in bytes.
            for quant, size in (("bf16", 2.0), ("fp8", 1.0)) if arch == 90 else (("nvfp4", 0.5), ("mxfp8_mxfp4", 1.0)):
                tactic = Tactic(f"tma{arch}", (m, n, int(k * size)), cluster=(a, b, 1))
                cased = dispatches(Tactic(f"tma{arch}", (m, n, int(k * size))), f"sm{arch}", quant)
                if cased:
                    assert dispatches(tactic, f"sm{arch}", quant) == bool(said), (tactic, quant)
                elif arch == 120 and a == b == 1 and said:
                    # Instantiated, but without a case of its own in bytes.
                    assert int(k * size) not in (64, 128) or (m, n) in ((128, 256), (256, 128)), (tactic, quant)

    def test_shared_memory_of_sm80_kernels(self, sources: Path, tmp_path: Path) -> None:
        tactics = [(t.quant, i) for t in TABLES for stage in STAGES for _, i in t.items(stage) if i.family == "sm80"]
        unique = sorted(set(tactics))
        calls = []
        for quant, t in unique:
            (m, n, k), (a, b, c) = t.tile, t.warp
            element, arch = ("cutlass::bfloat16_t", "Sm80") if quant == "bf16" else ("cutlass::float_e4m3_t", "Sm89")
            shapes = f"cutlass::gemm::GemmShape<{m}, {n}, {k}>, cutlass::gemm::GemmShape<{a}, {b}, {c}>"
            calls.append(f'std::printf("%d\\n", bytes<{element}, cutlass::arch::{arch}, {shapes}, {t.stages}>());')
        fused = [t for quant, t in unique if quant == "bf16"]
        calls += [f'std::printf("%d\\n", fused<{t.tile[0]}, {t.tile[1]}, {t.tile[2]}, {t.stages}>());' for t in fused]
        found = run(sources, tmp_path, SM80_CODE.replace("CALLS", "\n".join(calls)), "sm_89")
        expected = [shared_bytes(t, quant) for quant, t in unique] + [
            shared_bytes(t, "bf16", fused_gate=True) for t in fused
        ]
        assert [int(words[0]) for words in found] == expected

    def test_shared_memory_of_tma_kernels(self, sources: Path, moe_gemm: Path, tmp_path: Path) -> None:
        tables = [t for t in TABLES if t.arch == "sm120"]
        # gemm1's are among gemm2's.
        tactics = [(t.quant, i) for t in tables for _, i in t.items(2) if i.family != "sm80"]
        code = tma_code((moe_gemm / "launchers/moe_gemm_tma_ws_launcher.inl").read_text(), tactics)
        define = "-DCOMPILE_BLACKWELL_SM120_TMA_GROUPED_GEMMS"
        found = [int(words[0]) for words in run(sources, tmp_path, code, "sm_120a", define)]
        assert len(found) == len(tactics)
        assert found == [shared_bytes(t, quant) for quant, t in tactics]
        assert {(quant, str(t)) for (quant, t), size in zip(tactics, found, strict=True) if size > SM120} == {
            ("nvfp4", f"tma120 {tile}B cl1x1x1 ml0 epi0 fin1 swap0") for tile in ("256x128x64", "128x256x64")
        }


SM80_CODE = """
#include <cstdio>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/thread/linear_combination.h"
#include "cutlass/gemm/device/gemm_grouped.h"
#include "cutlass/gemm/kernel/default_gemm_grouped.h"
#include "cutlass_extensions/epilogue_helpers.h"
#include "cutlass_extensions/gemm/kernel/default_fpA_intB_traits.h"
#include "cutlass_extensions/gemm/kernel/fused_moe_kernel.cuh"
#include "cutlass_extensions/gemm/kernel/moe_cutlass_kernel.h"
#include "cutlass_extensions/gemm/threadblock/default_mma.h"
#include "cutlass_extensions/weight_only_quant_op.h"
namespace ext = tensorrt_llm::cutlass_extensions;
// The types of genericMoeGemmKernelLauncher in moe_gemm_template_dispatch.h, for a bf16 output.
template <class Element, class Arch, class Tile, class Warp, int Stages>
int bytes() {
  using Traits = cutlass::gemm::kernel::MixedGemmArchTraits<Element, Element, Arch>;
  using Epilogue = typename ext::Epilogue<cutlass::bfloat16_t, Traits::ElementsPerAccessC, typename Traits::AccType,
                                          ext::EpilogueOpDefault>::Op;
  using Operator = typename cutlass::arch::TagOperator<typename Traits::Operator,
                                                       cutlass::WeightOnlyQuantOp::UNDEFINED>::TaggedOperator;
  using Base = typename cutlass::gemm::kernel::DefaultGemmGrouped<
      Element, cutlass::layout::RowMajor, cutlass::ComplexTransform::kNone, Traits::ElementsPerAccessA, Element,
      typename Traits::LayoutB, cutlass::ComplexTransform::kNone, Traits::ElementsPerAccessB, cutlass::bfloat16_t,
      cutlass::layout::RowMajor, typename Traits::AccType, typename Traits::OperatorClass, Arch, Tile, Warp,
      typename Traits::InstructionShape, Epilogue, cutlass::gemm::threadblock::GemmBatchedIdentityThreadblockSwizzle,
      Stages, cutlass::gemm::kernel::GroupScheduleMode::kDeviceOnly, Operator>::GemmKernel;
  using Kernel = cutlass::gemm::kernel::MoeFCGemm<typename Base::Mma, typename Base::Epilogue,
                                                  typename Base::ThreadblockSwizzle, Arch, Base::kGroupScheduleMode>;
  return static_cast<int>(sizeof(typename Kernel::SharedStorage));
}
template <int M, int N, int K, int Stages>
int fused() {
  constexpr auto activation = fused_moe::EpilogueRouting<ext::EpilogueOpDefaultSilu>(true);
  using B = cutlass::bfloat16_t;
  return fused_moe::Fused_Moe_Kernel_sm80<B, B, B, M, N, K, Stages, activation>::kSmemSize;
}
int main() {
CALLS
}
"""


def tma_code(launcher: str, tactics: Sequence[tuple[str, Tactic]]) -> str:
    """Return a program that prints the shared memory of TMA kernels, of the types that the launcher's macro defines."""
    head = launcher[: launcher.index("// TODO Revert this back")]
    macro = launcher[launcher.index("#define INSTANTIATE_TMA_WARP_SPECIALIZED_MOE_GEMM") :]
    macro = "\n".join(line.rstrip().rstrip("\\").rstrip() for line in macro.splitlines())
    types = macro[macro.index("using ArchTag = ") : macro.index("if constexpr (!COMPILE_HOPPER")]
    types += "using namespace cute;\n"
    types += macro[macro.index("/* Helper class for defining") : macro.index("using GemmGrouped =")]
    # The macro's arguments become those of a template.
    for argument in ("cutlass::arch::ArchTag_", "EpilogueFusion::FUSION_"):
        types = types.replace(argument, argument.rsplit("::", 1)[1])
    types = types.replace("EpilogueTag_;", "EpilogueOpDefault;").replace("constexpr static", "constexpr")
    elements = {
        "bf16": ("__nv_bfloat16", "__nv_bfloat16", 2.0),
        "fp8": ("__nv_fp8_e4m3", "__nv_fp8_e4m3", 1.0),
        "nvfp4": ("oss::Fp4Type", "oss::Fp4Type", 0.5),
        "mxfp8_mxfp4": ("__nv_fp8_e4m3", "oss::Fp4Type", 1.0),
    }
    calls = []
    for quant, t in tactics:
        (m, n, k), (a, b, c), (act, weight, size) = t.tile, t.cluster, elements[quant]
        arch = f"cutlass::arch::Sm{t.family.removeprefix('tma')}"
        fusion = f"oss::EpilogueFusion::{'FINALIZE' if t.finalize else 'NONE'}"
        flags = f"{str(quant == 'mxfp8_mxfp4').lower()}, false, {str(t.swap_ab).lower()}"
        numbers = f"{m}, {n}, {int(k / size)}, {a}, {b}, {c}"
        arguments = f"{arch}, {act}, {weight}, __nv_bfloat16, void, {fusion}, {numbers}, {flags}"
        calls.append(f'std::printf("%d\\n", oss::shared_bytes<{arguments}>());')
    return f"""
    {head}
    template <class ArchTag_, class DataType_, class WeightType_, class OutputType_, class EpilogueSchedule_,
              EpilogueFusion FUSION_, int CTA_M_, int CTA_N_, int CTA_K_, int CGA_M_, int CGA_N_, int CGA_K_,
              bool MXFPX_, bool DYNAMIC_CGA_, bool SWAP_AB_>
    int shared_bytes() {{
      {types}
      return static_cast<int>(sizeof(typename GemmKernel::SharedStorage));
    }}
    }}  // namespace cutlass_kernels_oss
    }}  // namespace kernels
    }}  // namespace tensorrt_llm
    #include <cstdio>
    namespace oss = tensorrt_llm::kernels::cutlass_kernels_oss;
    int main() {{
      {chr(10).join(calls)}
    }}
    """
