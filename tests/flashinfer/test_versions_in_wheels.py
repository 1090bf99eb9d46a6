"""Tactic tables and contracts of every release against its wheel. Slow, for it downloads them all: ``pytest -m slow``.

Run as a program it prints the table of a release that has none yet, to be checked and put into
``synth/catalog/tactics``: ``python tests/catalog/test_versions_in_wheels.py 0.8.0``.
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from synth.catalog.schemes import STAGES
from synth.catalog.shapes import Deployment, MoEShape
from synth.configs.model import BUNDLED_PREFIX, Entry
from synth.configs.module import dumps_bundled
from synth.configs.v1 import dumps_json
from synth.flashinfer.buckets import map_to_bucket, token_buckets
from synth.flashinfer.keys import file_keys, parse_key
from synth.flashinfer.tactics import known_versions, load_table, load_tables
from synth.flashinfer.versions import POLICY, build_metadata, contract_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

GPU = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
PROBE = Path(__file__).parent / "probe_flashinfer.py"
#: What FlashInfer's C++ calls the activations and weights of a quantization.
TYPES = {
    "bf16": ("__nv_bfloat16", "__nv_bfloat16"),
    "fp8": ("__nv_fp8_e4m3", "__nv_fp8_e4m3"),
    "nvfp4": ("FP4", "FP4"),
    "mxfp8_mxfp4": ("__nv_fp8_e4m3", "FP4"),
}
#: The sources that decide which tactics there are, below ``nv_internal/tensorrt_llm``.
KERNELS = "kernels/cutlass_kernels"
DECISIVE = (
    f"{KERNELS}/cutlass_heuristic.cpp",
    f"{KERNELS}/include/moe_gemm_kernels.h",
    f"{KERNELS}/moe_gemm/moe_gemm_template_dispatch.h",
    f"{KERNELS}/moe_gemm/moe_tma_warp_specialized_traits.h",
    "cutlass_extensions/include/cutlass_extensions/gemm_configs.h",
)
#: Headers and sources that a program needs to call FlashInfer's own enumeration.
NEEDED = re.compile(
    r"flashinfer/data/(csrc/(nv_internal|fused_moe)/|include/|cutlass/(include|tools/util/include)/|spdlog/include/)"
)
#: All of cuBLAS that FlashInfer's headers name.
CUBLAS = "SUCCESS NOT_INITIALIZED ALLOC_FAILED INVALID_VALUE ARCH_MISMATCH MAPPING_ERROR EXECUTION_FAILED"
CUBLAS += " INTERNAL_ERROR NOT_SUPPORTED LICENSE_ERROR"

Enumeration = dict[tuple[str, str], dict[str, list[str]]]


def pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    if importlib.util.find_spec("pip") is None:
        pytest.skip("pip is not installed")
    return subprocess.run([sys.executable, "-m", "pip", *arguments], capture_output=True, text=True)


def unpack(version: str, folder: Path) -> Path:
    """Download a release's wheel; return the folder that holds its Python, and what its C++ needs to be compiled."""
    done = pip(
        "download", "--quiet", "--no-deps", "--only-binary=:all:", "-d", str(folder), f"flashinfer-python=={version}"
    )
    if done.returncode:
        pytest.skip(f"pip can't download FlashInfer {version}: {(done.stderr.splitlines() or ['?'])[-1]}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as z:
        for name in z.namelist():
            # Some modules read a JSON file beside them when they are imported.
            if NEEDED.match(name) or (name.endswith((".py", ".json")) and not name.startswith("flashinfer/data/")):
                z.extract(name, folder)
    wheel.unlink()
    return folder


@pytest.fixture(scope="module", params=known_versions())
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def release(version: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = unpack(version, tmp_path_factory.mktemp("wheel"))
    yield folder
    shutil.rmtree(folder)  # 35 releases take 4 GB


# ---- tactics -----------------------------------------------------------------------------------------------

PROGRAM = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp4.h>
#include <cuda_fp8.h>
#include <cstdio>
#include <map>
#include <string>
#include "moe_gemm_template_dispatch.h"
namespace e = tensorrt_llm::cutlass_extensions;
namespace k = tensorrt_llm::kernels::cutlass_kernels;
NAMES
static std::string text(e::CutlassGemmConfig const& c) {
  if (c.enableCudaKernel) return "a CUDA kernel";
  if (!c.is_tma_warp_specialized) {
    if (c.split_k_style != e::SplitKStyle::NO_SPLIT_K || c.split_k_factor != 1) return "split K";
    return "sm80 " + CutlassTileConfig.at(c.tile_config_sm80) + " stages" + std::to_string(c.stages);
  }
  if (c.dynamic_cluster_shape != e::ClusterShape::Undefined) return "a dynamic cluster";
  auto const& tile = c.sm_version == 90 ? CutlassTileConfigSM90.at(c.tile_config_sm90)
                                        : CutlassTileConfigSM120.at(c.tile_config_sm120);
  return "tma" + std::to_string(c.sm_version) + " " + tile + " cl" + ClusterShape.at(c.cluster_shape)
      + " ml" + std::to_string(int(c.mainloop_schedule)) + " epi" + std::to_string(int(c.epilogue_schedule))
      + " fin" + std::to_string(int(c.epilogue_fusion_type)) + " swap" + std::to_string(int(c.swap_ab));
}
template <typename T, typename W> void show(char const* quant, int sm) {
  for (bool finalize : {false, true})
    for (auto const& c : k::MoeGemmRunner<T, W, __nv_bfloat16, __nv_bfloat16>::getConfigs(sm, finalize))
      std::printf("sm%d %s %s %s\n", sm, quant, finalize ? "gemm2" : "gemm1", text(c).c_str());
}
int main() {
CALLS
}
"""


def names(header: str, enum: str) -> str:
    """Return a C++ map from the members of `enum` to how a tactic's text names them."""
    body = re.search(rf"enum class {enum}\b[^{{]*\{{(.*?)\}}", header, re.DOTALL)
    assert body, f"gemm_configs.h has no enum {enum}"
    members = []
    for member in re.findall(r"\b((?:Cta|Cluster)Shape\w*?\d\w*)", body[1]):
        shape = member.removeprefix("CtaShape").removeprefix("ClusterShape_").replace("_WarpShape", "_w")
        members.append(f'{{e::{enum}::{member}, "{shape}"}}')
    return f"static std::map<e::{enum}, std::string> const {enum}{{{', '.join(members)}}};"


def enumerated(release: Path, folder: Path) -> Enumeration:
    """Compile a release's own enumeration; return, by architecture and quantization, its tactics in order."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc is not installed")
    data = release / "flashinfer/data"
    internal = data / "csrc/nv_internal"
    header = (internal / "tensorrt_llm" / DECISIVE[-1]).read_text()
    enums = ("CutlassTileConfig", "CutlassTileConfigSM90", "CutlassTileConfigSM120", "ClusterShape")
    calls = [
        f'  show<{a}, {w}>("{quant}", {sm});'
        for sm, quants in ((90, ("bf16", "fp8")), (120, tuple(TYPES)), (121, tuple(TYPES)))
        for quant, (a, w) in ((quant, TYPES[quant]) for quant in quants)
    ]
    # A type of FlashInfer's own since 0.6.16.
    own = any(internal.rglob("fp4_compat.h"))
    code = PROGRAM.replace("NAMES", "\n".join(names(header, e) for e in enums)).replace("CALLS", "\n".join(calls))
    (folder / "program.cu").write_text(code.replace("FP4", "k::Fp4Type" if own else "__nv_fp4_e2m1"))
    members = ", ".join(f"CUBLAS_STATUS_{name}" for name in CUBLAS.split())
    for name in ("cublasLt.h", "cublas_v2.h"):
        (folder / name).write_text(f"#pragma once\nenum cublasStatus_t {{{members}}};\n")
    include = [
        folder,
        data / "cutlass/include",
        data / "cutlass/tools/util/include",
        internal / "tensorrt_llm/cutlass_extensions/include",
        internal / "include",
        internal,
        internal / "tensorrt_llm" / KERNELS / "include",
        internal / "tensorrt_llm" / KERNELS / "moe_gemm",
        data / "csrc",
        data / "include",
        data / "spdlog/include",
    ]
    sources = ["program.cu", internal / "tensorrt_llm" / DECISIVE[0]]
    sources += [internal / "cpp/common" / f"{name}.cpp" for name in ("logger", "stringUtils", "tllmException")]
    defines = ("ENABLE_BF16", "ENABLE_FP8", "ENABLE_FP4", "USING_OSS_CUTLASS_MOE_GEMM")
    command = [nvcc, "-std=c++17", "-w", "-arch=sm_120a", "--expt-relaxed-constexpr", "-include", "cmath"]
    command += [*(f"-D{name}" for name in defines), *(f"-I{path}" for path in include), *map(str, sources)]
    command += ["-o", "program"]
    compiled = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert compiled.returncode == 0, compiled.stderr[-4000:]
    ran = subprocess.run([folder / "program"], capture_output=True, text=True, check=True)
    found: Enumeration = {}
    for line in ran.stdout.splitlines():
        arch, quant, gemm, tactic = line.split(" ", 3)
        found.setdefault((arch, quant), {"gemm1": [], "gemm2": []})[gemm].append(tactic)
    return found


@pytest.fixture(scope="module")
def enumerations() -> dict[str, Enumeration]:
    """What was compiled, by a digest of the sources that decide: many releases share them."""
    return {}


def test_tactics_are_those_that_the_wheels_cpp_enumerates(
    version: str, release: Path, enumerations: dict[str, Enumeration], tmp_path: Path
) -> None:
    root = release / "flashinfer/data/csrc/nv_internal/tensorrt_llm"
    digest = hashlib.sha256(b"".join((root / name).read_bytes() for name in DECISIVE)).hexdigest()
    if digest not in enumerations:
        enumerations[digest] = enumerated(release, tmp_path)
    found = enumerations[digest]
    tables = {(t.arch, t.quant): t for t in load_tables(version)}
    assert set(tables) == {key for key in found if key[0] != "sm121"}
    for (arch, quant), lists in found.items():
        table = tables["sm120" if arch == "sm121" else arch, quant]
        assert list(map(str, table.gemm1)) == lists["gemm1"], (arch, quant)
        assert list(map(str, table.gemm2)) == lists["gemm2"], (arch, quant)
        # Without fused finalize gemm2 is enumerated like gemm1.
        assert list(map(str, table.without_fused_finalize().gemm2)) == lists["gemm1"], (arch, quant)


def test_gemm2s_ids_follow_gemm1s_and_are_served_as_the_contract_says(version: str, release: Path) -> None:
    csrc = release / "flashinfer/data/csrc"
    binding = (csrc / "fused_moe/cutlass_backend/flashinfer_cutlass_fused_moe_binding.cu").read_text()
    words = " ".join(binding.split())
    assert "gemm1_tactics = mKernelRunner->getTactics(kernels::MoeGemmId::GEMM_1);" in words
    assert "gemm2_tactics = mKernelRunner->getTactics(kernels::MoeGemmId::GEMM_2);" in words
    assert (
        "mAllProfiles = gemm1_tactics; "
        "mAllProfiles.insert(mAllProfiles.end(), gemm2_tactics.begin(), gemm2_tactics.end());" in words
    )
    # Tuned under the id in the joint list …
    assert re.search(r"profile_id == -1 \? mAllProfiles\.front\(\) : mAllProfiles\[profile_id\]", words)
    # … and served so, too, but for ids that up to 0.6.14 are taken for those of gemm2's own list.
    shifts = re.search(
        r"if \(id2 >= 0 && id2 < mGemm2TacticCount\) \{ absolute_id2 = mGemm1TacticCount \+ id2; \}", words
    )
    assert (shifts is not None) == contract_for(version).misreads_gemm2_ids
    assert ("mAllProfiles.at(id2)" in words) == (shifts is None)
    runner = " ".join((csrc / f"nv_internal/tensorrt_llm/{KERNELS}/include/moe_kernels.h").read_text().split())
    assert "getConfigs(gemm_id == MoeGemmId::GEMM_2 && mayHaveFinalizeFused())" in runner
    assert "bool use_fused_finalize_ = true;" in runner


# ---- keys, buckets, metadata, entries ----------------------------------------------------------------------

LAYER = Deployment("any", 4, 2, "nvfp4", "swiglu", False, MoEShape(7168, 256, 128, 8, 2))
#: Columns and dtype of x, packed by the caller or not.
X = {LAYER.shape.hidden // 2: "uint8", LAYER.shape.hidden: "bfloat16"}
MAXIMA = (512, 5000)
TOKENS = (1, 2, 3, 5, 100, 255, 256, 257, 300, 511, 513, 700, 1500, 2049, 2600, 4095, 4096, 4097, 5000, 9000)


@dataclass
class Question:
    """A config for one release, and the calls that look it up."""

    version: str
    entries: list[Entry]
    calls: list[dict[str, Any]]
    expected: list[list[int]]


def question(version: str) -> Question:
    """Write entries for every bucket, and say which pair of tactics each call must be served with."""
    table, s = load_table("sm120", "nvfp4", version), LAYER.shape
    # Whether finalize is fused is in the key since 0.6.18; before that, only the default is asked for.
    fusings = (True, False) if contract_for(version).extras else (True,)
    tactics: dict[tuple[bool, int, int, int], int] = {}
    entries = []
    for bucket in sorted({b for maximum in MAXIMA for b in token_buckets(maximum, version)}):
        for stage, fused in itertools.product(STAGES, fusings):
            ids = (table if fused else table.without_fused_finalize()).ids(stage)
            for key in file_keys(LAYER, "sglang", bucket, stage, "sm120", version, fused_finalize=fused):
                # SGLang passes x in two forms; the keys of all ranks hold the same tactic.
                columns = parse_key(key).shapes[0][1]
                tactic = tactics.setdefault((fused, bucket, stage, columns), ids[len(tactics) % len(ids)])
                entries.append(Entry(key, tactic, 0.1, 0.2, 1.0, 9))
    asked = Question(version, entries, [], [])
    for maximum, columns, fused, tokens in itertools.product(MAXIMA, X, fusings, TOKENS):
        asked.calls.append(
            {
                "x": (tokens, columns),
                "x_dtype": X[columns],
                "w1": (s.experts, 2 * s.inter, s.hidden // 16),
                "w2": (s.experts, s.hidden, s.inter // 16),
                "top_k": s.top_k,
                "tp": LAYER.tp,
                "ep": LAYER.ep,
                "maximum": maximum,
                "options": {} if fused else {"use_fused_finalize": False},
            }
        )
        bucket = map_to_bucket(tokens, maximum, version)
        asked.expected.append([tactics.get((fused, bucket, stage, columns), -1) for stage in STAGES])
    return asked


def answered(asked: Question, release: Path, folder: Path) -> dict[str, Any]:
    """Return what the release's own lookup served, and what it says of itself."""
    table = load_table("sm120", "nvfp4", asked.version)
    bundled, config, request = not contract_for(asked.version).metadata_keys, folder / "c.json", folder / "r.json"
    if bundled:
        module = f"{BUNDLED_PREFIX}{GPU.replace(' ', '_')}.py"
        (release / "flashinfer/tuning_configs" / module).write_bytes(dumps_bundled({}, asked.entries))
    else:
        config.write_bytes(dumps_json(build_metadata(GPU, asked.version), asked.entries))
    said = {"gpu": GPU, "capability": (12, 0), "bundled": bundled, "config": str(config), "calls": asked.calls}
    request.write_text(json.dumps({**said, "counts": (len(table.gemm1), len(table.gemm2))}))
    done = subprocess.run([sys.executable, PROBE, release, request], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_flashinfer_serves_what_is_written_for_it(version: str, release: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("flashinfer", reason="its dependencies are needed")
    contract, asked = contract_for(version), question(version)
    answer = answered(asked, release, tmp_path)
    assert answer["version"] == version
    assert answer["served"] == asked.expected
    # Missed is only a bucket of the maximum itself, before 0.6.10, where the maximum is no power of two.
    assert sum(-1 in pair for pair in asked.expected) == (0 if contract.hybrid_buckets else len(X))
    assert tuple(answer.get("metadata", ())) == contract.metadata_keys
    assert answer.get("loaded", True) is True
    assert answer.get("elements", 0) == contract.entry_elements
    assert answer["managed_store"] == contract.managed_store
    assert answer["finalize_option"] == contract.finalize_option
    assert tuple(answer.get("policy", ())) == (POLICY if contract.managed_store else ())


def test_every_release_in_the_range_is_known() -> None:
    done = pip("index", "versions", "flashinfer-python")
    listed = re.search(r"^Available versions: (.*)$", done.stdout, re.MULTILINE)
    if listed is None:
        pytest.skip("pip can't list FlashInfer's versions")
    offered = [v for v in listed[1].split(", ") if re.fullmatch(r"\d+\.\d+\.\d+(\.post\d+)?", v)]
    newest, oldest = offered.index(known_versions()[-1]), offered.index(known_versions()[0])
    assert offered[newest : oldest + 1] == list(reversed(known_versions()))


def main(version: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "wheel").mkdir()
        found = enumerated(unpack(version, folder / "wheel"), folder)
    tables = [{"arch": arch, "quant": quant, **lists} for (arch, quant), lists in found.items() if arch != "sm121"]
    print(
        json.dumps(
            {"versions": [version], "source": "compiled from the wheel's own sources", "tables": tables}, indent=1
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
