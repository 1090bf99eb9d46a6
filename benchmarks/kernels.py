"""What the compiler says of FlashInfer's MoE kernels, tactic by tactic, and how far that predicts their times.

No GPU is needed. ``compile`` turns the kernels of every SM120 tactic into cubins, through the launchers that the
installed FlashInfer's own generated files instantiate and with its own flags, one output type and one activation each.
``extract`` reads registers, shared memory and the machine code of every tactic's kernel from such cubins, or from a
whole compiled module such as ``fused_moe_90.so``, and writes the table of :mod:`synth.flashinfer.kernels`. ``worth``
compares that table with the shipped timings of the NVIDIA H200.

    pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm
    python benchmarks/kernels.py compile --work build/kernels --quant nvfp4 --include build/kernels/include
    python benchmarks/kernels.py extract --work build/kernels --arch sm120 --out kernels.json
    python benchmarks/kernels.py extract --work build/kernels --arch sm90 --module fused_moe_90.so --out kernels.json
    python benchmarks/kernels.py worth

``--include`` names a folder with ``cublasLt.h``, ``nvrtc.h`` and ``curand_kernel.h``, where the CUDA toolkit lacks
them: they are in the wheels nvidia-cublas, nvidia-cuda-nvrtc and nvidia-curand.

Dynamic shared memory and threads aren't in a cubin. They are constants of the kernel's C++ type, and the type is the
kernel symbol's template argument: ``extract`` compiles a file with ``sizeof`` of each, and reads its PTX.

Exit code 0: done; 1: a tactic's kernel was not found; 2: bad input.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import spearmanr

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from synth.catalog.devices import get_device
from synth.catalog.files import write_atomically
from synth.catalog.paths import shipped
from synth.catalog.schemes import STAGES
from synth.errors import SynthError
from synth.flashinfer.kernels import LIMITS, RESERVED_SMEM, Kernel, load_kernels
from synth.flashinfer.tactics import DEFAULT_FLASHINFER, Tactic, TacticTable, load_table
from synth.performance.geometry import sites
from synth.performance.roofline import Hardware, tactic_columns, work
from synth.timings.folders import load

QUANTS = {"sm90": ("bf16", "fp8"), "sm120": ("nvfp4", "bf16", "fp8", "mxfp8_mxfp4")}
_CUTLASS_ARCH = {"sm90": "9.0a", "sm120": "12.0a"}
_LAUNCHERS = "tensorrt_llm/kernels/cutlass_kernels/moe_gemm/launchers"
_NAMESPACE = "namespace tensorrt_llm { namespace kernels { namespace cutlass_kernels_oss {\n"
#: Elements of K in a byte of a TMA tile's K.
_PER_BYTE = {"bf16": 0.5, "fp8": 1, "nvfp4": 2, "mxfp8_mxfp4": 1}


# The package's build: its flags and its launchers.


def nvcc_flags(arch: str, cuda: Path, work: Path) -> list[str]:
    """Return the flags with which the installed FlashInfer compiles its fused-MoE module of `arch`.

    They are read from the ninja file that FlashInfer writes; `work` becomes its workspace.

    Raises
    ------
    SynthError
        When FlashInfer is not installed or is not the version of the tactic tables.
    """
    os.environ.update(
        CUDA_HOME=str(cuda),
        FLASHINFER_CUDA_ARCH_LIST=_CUTLASS_ARCH[arch],
        FLASHINFER_WORKSPACE_BASE=str(work.resolve()),
    )
    try:
        import flashinfer
        from flashinfer.jit import env, fused_moe
    except ImportError as e:
        raise SynthError(
            f"FlashInfer can't be imported ({e}); pip install 'flashinfer-python=={DEFAULT_FLASHINFER}'"
        ) from e
    if flashinfer.__version__ != DEFAULT_FLASHINFER:
        raise SynthError(
            f"FlashInfer {flashinfer.__version__} is installed and the tactics are those of {DEFAULT_FLASHINFER}; "
            f"pip install 'flashinfer-python=={DEFAULT_FLASHINFER}'"
        )
    spec = getattr(fused_moe, f"gen_cutlass_fused_moe_{arch}_module")(False)
    spec.write_ninja()
    text = (env.FLASHINFER_JIT_DIR / spec.name / "build.ninja").read_text().replace("$\n", " ")
    known: dict[str, str] = {}
    for name, value in re.findall(r"^(\w+) =(.*)$", text, re.MULTILINE):
        known[name] = re.sub(r"\$\{?(\w+)\}?", lambda m: known.get(m[1], m[0]), value.strip())
    return known["cuda_cflags"].split()


def sources(table: TacticTable) -> dict[str, str]:
    """Return CUDA sources, by name, that instantiate the kernels of every tactic of an SM120 table; one tile each."""
    by_tile: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Tactic]] = defaultdict(list)
    for _, tactic in table.items(2):  # gemm1's are among gemm2's
        by_tile[tactic.tile, tactic.warp].append(tactic)
    write = _sm80_source if table.gemm2[0].family == "sm80" else _tma_source
    return {f"{table.quant}-{'x'.join(map(str, tile))}": write(table.quant, own) for (tile, _), own in by_tile.items()}


def _tma_source(quant: str, tactics: Sequence[Tactic]) -> str:
    """Instantiate TMA kernels as FlashInfer's generated files do, for bf16 output."""
    activations, scales = ("SafeFP4", "false") if quant == "nvfp4" else ("__nv_fp8_e4m3", "true")
    lines = [f'#include "{_LAUNCHERS}/moe_gemm_tma_ws_launcher.inl"', _NAMESPACE]
    for t in tactics:
        m, n, k = t.tile[0], t.tile[1], int(t.tile[2] * _PER_BYTE[quant])
        fusion = "FINALIZE" if t.finalize else "NONE"
        lines.append(
            f"INSTANTIATE_TMA_WARP_SPECIALIZED_MOE_GEMM(Sm120, {activations}, SafeFP4, __nv_bfloat16, void, "
            f"EpilogueOpDefault, {fusion}, {m}, {n}, {k}, {', '.join(map(str, t.cluster))}, {scales}, false, false, "
            f"{str(t.swap_ab).lower()});"
        )
    return "\n".join([*lines, "}}}\n"])


def _sm80_source(quant: str, tactics: Sequence[Tactic]) -> str:
    """Instantiate multistage kernels; for bf16 also the one that computes both halves of a gated gemm1."""
    element, arch = ("__nv_bfloat16", "Sm80") if quant == "bf16" else ("__nv_fp8_e4m3", "Sm89")
    lines = [
        f'#include "{_LAUNCHERS}/../moe_gemm_template_dispatch.h"',
        f'#include "{_LAUNCHERS}/fused_moe_gemm_launcher_sm80.inl"',
        _NAMESPACE,
    ]
    for t in tactics:
        tile, warp = (", ".join(map(str, size)) for size in (t.tile, t.warp))
        lines.append(
            f"template struct genericMoeGemmKernelLauncher<{element}, {element}, __nv_bfloat16, cutlass::arch::{arch}, "
            "cutlass::WeightOnlyQuantOp::UNDEFINED, cutlass_extensions::EpilogueOpDefault, "
            f"cutlass::gemm::GemmShape<{tile}>, cutlass::gemm::GemmShape<{warp}>, {t.stages}>;"
        )
        if quant == "bf16":
            b = "cutlass::bfloat16_t"
            lines.append(
                f"template void sm80_generic_fused_moe_gemm_kernelLauncher<{b}, {b}, {tile}, {t.stages}, "
                f"cutlass_extensions::EpilogueOpDefaultSilu>({b} const*, {b} const*, {b} const*, bool, {b}*, "
                "int64_t const*, int64_t, int64_t, int64_t, int, int, cudaStream_t, int*);"
            )
    return "\n".join([*lines, "}}}\n"])


def compile_cubins(options: argparse.Namespace) -> int:
    """Compile every source that has no cubin yet; returns 1 where one failed."""
    flags = nvcc_flags("sm120", options.cuda, options.work)
    folder = options.work / "sm120"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "flags.txt").write_text(" ".join(portable(flags)) + "\n")
    texts = {
        name: text
        for quant in options.quant or QUANTS["sm120"]
        for name, text in sources(load_table("sm120", quant)).items()
    }

    def build(name: str) -> bool:
        source, cubin = folder / f"{name}.cu", folder / f"{name}.cubin"
        if cubin.exists() and source.exists() and source.read_text() == texts[name]:
            return True
        source.write_text(texts[name])
        began = time.monotonic()
        partial = cubin.with_suffix(".partial")
        command = [_nvcc(options.cuda), *flags, *_includes(options.include), "-cubin", "-o", partial, source]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
        if done.returncode:
            print(f"{name}: nvcc failed\n{done.stderr[-4000:]}", file=sys.stderr, flush=True)
            return False
        partial.replace(cubin)
        print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
        return True

    with ThreadPoolExecutor(options.jobs) as pool:
        return 0 if all(list(pool.map(build, texts))) else 1


def portable(flags: Iterable[str]) -> list[str]:
    """Return `flags` without include folders, each once: what a reader needs to compile alike."""
    kept = [f for f in flags if re.match(r"-(D(?!Py_|_GLIB)|O|std|gencode|use_fast|-expt)", f)]
    return list(dict.fromkeys(kept))


def _nvcc(cuda: Path) -> Path:
    nvcc = cuda / "bin" / "nvcc"
    if not nvcc.exists():
        raise SynthError(f"--cuda {cuda}: there is no bin/nvcc; name the folder of a CUDA 13 toolkit")
    return nvcc


def _includes(folder: Path | None) -> list[str]:
    return ["-isystem", str(folder)] if folder else []


# Symbols: which tactic a kernel is.


@dataclass(frozen=True)
class Symbol:
    """A kernel of the module, by its name.

    Attributes
    ----------
    mangled : str
    kind : str
        ``"tma"``, ``"sm80"`` (multistage) or ``"sm80-gated"`` (multistage, both halves of a gated gemm1 and the
        activation).
    type : str
        The C++ type that is the kernel's template argument.
    quant : str
    tactic : Tactic
    stages : int
        Pipeline stages.
    """

    mangled: str
    kind: str
    type: str
    quant: str
    tactic: Tactic
    stages: int


_INT = r"cute::C<(\d+)>"
_TRIPLE = rf"cute::tuple<{_INT}, {_INT}, {_INT} >"
_TMA = re.compile(
    rf"CollectiveMma<cutlass::gemm::MainloopSm(?P<sm>\d+)Array\w+<(?P<stages>\d+), (?:\d+, )?{_TRIPLE}, "
    rf"cutlass::gemm::Kernel\w+(?:<\d+> )?>, {_TRIPLE}, "
    r"(?P<a>cutlass::\w+|cute::tuple<cutlass::\w+, cutlass::\w+>), "
)
_EPILOGUE = re.compile(
    rf"CollectiveEpilogue<cutlass::epilogue::\w+<[^<>]*>, {_TRIPLE}, cute::tuple<{_INT}, {_INT} >, "
    r"(?:void|cutlass::\w+), cute::tuple<(?P<stride>long, cute::C<1>|cute::C<1>, long), "
)
_OUTPUT = re.compile(
    r"(?:LinearCombination<|(?P<scatter>ScaledAccPer\w+Scatter)<cutlass::layout::\w+, |"
    r"ScaledAcc<|LinCombPtrArray\w*<)cutlass::bfloat16_t"
)
_GEMM_SHAPE = r"cutlass::gemm::GemmShape<(\d+), (\d+), (\d+)>"
_MULTISTAGE = re.compile(rf"MoeFCGemm<cutlass::gemm::threadblock::Mma(?P<how>Multistage|Pipelined)<{_GEMM_SHAPE}, ")
_GATED = re.compile(
    r"Fused_Moe_Kernel_sm80<cutlass::bfloat16_t, cutlass::bfloat16_t, cutlass::bfloat16_t, "
    r"(\d+), (\d+), (\d+), (\d+), \(fused_moe::Activation_Type\)3>"
)
_TMA_QUANTS = {
    "cutlass::bfloat16_t": "bf16",
    "cutlass::float_e4m3_t": "fp8",
    "cute::tuple<cutlass::float_e2m1_t, cutlass::float_ue4m3_t>": "nvfp4",
    "cute::tuple<cutlass::float_e2m1_t, cutlass::float_ue8m0_t>": "mxfp8_mxfp4",
    "cute::tuple<cutlass::float_e4m3_t, cutlass::float_ue8m0_t>": "mxfp8_mxfp4",
}


def parse_symbol(mangled: str, demangled: str) -> Symbol | None:
    """Return what kernel a symbol is, ``None`` when it isn't a tactic's with bf16 output."""
    type_ = template_argument(demangled)
    if type_ is None:
        return None
    if (m := _TMA.search(type_)) and (e := _EPILOGUE.search(type_)) and (o := _OUTPUT.search(type_)):
        quant = _TMA_QUANTS.get(m["a"])
        if quant is None:
            return None
        cluster, tile = (tuple(map(int, m.groups()[i : i + 3])) for i in (2, 5))
        k_bytes = int(tile[2] / _PER_BYTE[quant])
        tactic = Tactic(
            family=f"tma{m['sm']}", tile=(tile[0], tile[1], k_bytes), cluster=(cluster[0], cluster[1], cluster[2]),
            swap_ab=e["stride"].startswith("cute"), finalize=o["scatter"] is not None,
        )  # fmt: skip
        return Symbol(mangled, "tma", type_, quant, tactic, int(m["stages"]))
    if m := _MULTISTAGE.search(type_):
        return _multistage(mangled, type_, m)
    if m := _GATED.search(type_):
        a, b, c, stages = map(int, m.groups())
        return Symbol(mangled, "sm80-gated", type_, "bf16", Tactic("sm80", (a, b, c), stages=stages), stages)
    return None


def _multistage(mangled: str, type_: str, m: re.Match[str]) -> Symbol | None:
    """Return a multistage kernel without a fused activation."""
    element = re.search(r"cutlass::(bfloat16_t|float_e4m3_t)\b", type_[m.end() :])
    warp = re.search(rf"MmaTensorOp<{_GEMM_SHAPE}", type_)
    stages = (
        re.search(r", (\d+), \(cutlass::gemm::SharedMemoryClearOption\)", type_) if m["how"] == "Multistage" else None
    )
    plain = re.search(r"epilogue::thread::LinearCombination<cutlass::bfloat16_t, \d+, float, float, ", type_)
    # The module also holds copies for Turing, which no tactic of these tables runs.
    arch = re.search(r"cutlass::arch::Sm(80|89), \(cutlass::gemm::kernel::GroupScheduleMode\)\d+>$", type_)
    if not (element and warp and plain and arch) or "cutlass::half_t" in type_:
        return None
    count = int(stages[1]) if stages else 2
    a, b, c = (tuple(map(int, g)) for g in zip(m.groups()[1:], warp.groups(), ("0",) * 3, strict=True))
    tactic = Tactic("sm80", tile=(a[0], b[0], c[0]), warp=(a[1], b[1], c[1]), stages=count)
    return Symbol(mangled, "sm80", type_, {"bfloat16_t": "bf16"}.get(element[1], "fp8"), tactic, count)


def template_argument(demangled: str) -> str | None:
    """Return the type that one of CUTLASS's kernel functions is instantiated with."""
    m = re.match(r"void (?:cutlass::device_kernel|cutlass::Kernel|fused_moe::run_global)<", demangled)
    if m is None:
        return None
    depth, start = 1, m.end()
    for i in range(start, len(demangled)):
        depth += (demangled[i] == "<") - (demangled[i] == ">")
        if depth == 0:
            return demangled[start:i].strip()
    return None


def demangle(names: Sequence[str]) -> list[str]:
    """Return C++ names; ``c++filt`` without its limit on nesting."""
    out = subprocess.run(["c++filt", "-r"], input="\n".join(names), capture_output=True, text=True, check=True).stdout
    return out.splitlines()


# Sizes: constants of the kernels' types.

_SIZE_EXPRESSIONS = {
    "tma": ("K::SharedStorageSize", "K::MaxThreadsPerBlock"),
    "sm80": ("sizeof(typename K::SharedStorage)", "K::kThreadCount"),
    "sm80-gated": ("K::kSmemSize", "K::kThreadCount"),
}


def sizes(symbols: Sequence[Symbol], arch: str, options: argparse.Namespace) -> dict[str, tuple[int, int]]:
    """Return dynamic shared memory in bytes and threads of a block, by mangled name.

    The compiler is asked: PTX of a file that holds them as constants.
    """
    lines = [
        f'#include "{_LAUNCHERS}/../moe_gemm_template_dispatch.h"',
        f'#include "{_LAUNCHERS}/moe_gemm_tma_ws_launcher.inl"',
        f'#include "{_LAUNCHERS}/fused_moe_gemm_launcher_sm80.inl"',
        "template <class K> struct Type { using type = K; };",
    ]
    for i, symbol in enumerate(symbols):
        smem, threads = (e.replace("K::", f"K{i}::") for e in _SIZE_EXPRESSIONS[symbol.kind])
        smem = smem.replace("typename ", "")
        lines.append(
            f"using K{i} = {symbol.type};\n__device__ int smem_{i} = {smem};\n__device__ int threads_{i} = {threads};"
        )
    source, ptx = (options.work / f"sizes-{arch}.{suffix}" for suffix in ("cu", "ptx"))
    source.parent.mkdir(parents=True, exist_ok=True)
    source.write_text("\n".join(lines) + "\n")
    every = nvcc_flags(arch, options.cuda, options.work)
    flags = [f for f in every if f.startswith(("-D", "-I", "-std", "--expt"))]
    flags += [x for pair in itertools.pairwise(every) if pair[0] == "-isystem" for x in pair]
    flags += [*_includes(options.include), f"-arch=compute_{arch[2:]}a", "-ptx"]
    command = [_nvcc(options.cuda), *flags, "-o", ptx, source]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if done.returncode:
        raise SynthError(f"{source}: nvcc failed: {_first_error(done.stderr)}")
    found = {name: int(value) for name, value in re.findall(r"\b((?:smem|threads)_\d+) = (\d+);", ptx.read_text())}
    if len(found) != 2 * len(symbols):
        raise SynthError(f"{ptx}: {len(found)} sizes of {len(symbols)} kernels; look at {source}")
    return {s.mangled: (found[f"smem_{i}"], found[f"threads_{i}"]) for i, s in enumerate(symbols)}


def _first_error(text: str) -> str:
    return next((line for line in text.splitlines() if "error" in line), text[-300:])


# Machine code: what a kernel and its main loop consist of.

#: Kinds of instructions, by the start of the opcode; the first that fits counts. What fits none is "other".
KINDS: tuple[tuple[str, str], ...] = (
    ("mma", r"(HGMMA|QGMMA|HMMA|QMMA|OMMA)\b"),
    ("ldsm", r"LDSM\b"),
    ("async_copy", r"(LDGSTS|UTMALDG|UTMASTG|UBLKCP)\b"),
    ("barrier", r"(BAR|SYNCS|LDGDEPBAR|DEPBAR|WARPGROUP|WARPSYNC|UCGABAR_\w+|MEMBAR|FENCE)\b"),
    ("local", r"(LDL|STL)\b"),
    ("shared", r"(LDS|STS|STSM)\b"),
    ("global", r"(LD|LDG|ST|STG|RED|REDG|ATOM|ATOMG)\b"),
    ("branch", r"(BRA|BRX|JMP|CALL|RET|EXIT|BSSY|BSYNC|BREAK|NOP|NANOSLEEP|YIELD|WARPSYNC)\b"),
    ("float", r"(FADD|FMUL|FFMA|FADD2|FMUL2|FFMA2|F2FP|F2F|HADD2|HMUL2|HFMA2|MUFU|FSEL|FSETP|FMNMX)\b"),
)
_KIND_PATTERNS = tuple((name, re.compile(pattern)) for name, pattern in KINDS)
_SASS_LINE = re.compile(
    r"^\s+/\*(?P<address>[0-9a-f]{4,})\*/\s+(?P<guard>@!?U?P\w+\s+)?(?P<opcode>[A-Z][\w.]*)\s*(?P<operands>[^;\n]*);",
    re.MULTILINE,
)
_MMA_SHAPE = {
    # K elements are those of the operand type: 16816 for bf16, 16832 for 8 bits, 16864 for 4 bits.
    "HMMA": re.compile(r"HMMA\.(16)(8)(16|8)\b"),
    "QMMA": re.compile(r"QMMA(?:\.SF)?\.(16)(8)(32)\b"),
    "OMMA": re.compile(r"OMMA(?:\.SF)?\.(16)(8)(64)\b"),
    "HGMMA": re.compile(r"HGMMA\.(64)x(\d+)x(16)\b"),
    "QGMMA": re.compile(r"QGMMA\.(64)x(\d+)x(32)\b"),
}


@dataclass(frozen=True)
class Instruction:
    """One instruction: address in bytes, opcode with modifiers, operands, and whether a predicate guards it."""

    address: int
    opcode: str
    operands: str
    guarded: bool

    @property
    def kind(self) -> str:
        """Its kind, see :data:`KINDS`."""
        return _kind(self.opcode)

    @property
    def mma_volume(self) -> int:
        """Products that one warp (a warp group of 4 for HGMMA and QGMMA) computes, 0 for others."""
        pattern = _MMA_SHAPE.get(self.opcode.split(".")[0])
        m = pattern.search(self.opcode) if pattern else None
        return int(np.prod([int(x) for x in m.groups()])) if m else 0


@functools.lru_cache(maxsize=4096)
def _kind(opcode: str) -> str:
    return next((name for name, pattern in _KIND_PATTERNS if pattern.match(opcode)), "other")


def parse_sass(text: str) -> list[Instruction]:
    """Read the instructions of one function as ``cuobjdump -sass`` prints them."""
    return [
        Instruction(int(m["address"], 16), m["opcode"], m["operands"].strip(), m["guard"] is not None)
        for m in _SASS_LINE.finditer(text)
    ]


def loops(code: Sequence[Instruction]) -> list[list[Instruction]]:
    """Return the bodies of the innermost natural loops that hold an MMA, inner loops without one (waits) left out.

    A natural loop is what reaches a backward edge to its header without passing it, in the graph of basic blocks.
    """
    starts, successors = _blocks(code)
    body_of = {b: code[starts[b] : starts[b + 1]] for b in range(len(starts) - 1)}
    natural = _natural_loops(successors)
    with_mma = {h: body for h, body in natural.items() if any(i.kind == "mma" for b in body for i in body_of[b])}
    innermost = [
        body for h, body in with_mma.items() if not any(o != h and other < body for o, other in with_mma.items())
    ]
    bodies = []
    for body in innermost:
        waits = set().union(*(o for h, o in natural.items() if h not in with_mma and o < body)) if natural else set()
        bodies.append([i for b in sorted(body - waits) for i in body_of[b]])
    return bodies


def _blocks(code: Sequence[Instruction]) -> tuple[list[int], list[list[int]]]:
    """Return each basic block's first index (and the end), and its successors."""
    at = {i.address: n for n, i in enumerate(code)}
    jumps: dict[int, list[int]] = {}
    converge: dict[str, list[int]] = defaultdict(list)
    for i in code:
        if i.opcode.startswith("BSSY"):
            barrier, target = (part.strip() for part in i.operands.split(","))
            converge[barrier].append(int(target, 16))
    for n, i in enumerate(code):
        root = i.opcode.split(".")[0]
        if root == "BRA" and (m := re.search(r"0x([0-9a-f]+)$", i.operands)) and int(m[1], 16) in at:
            always = not i.guarded and not re.match(r"!?U?P\w+,", i.operands)
            jumps[n] = [at[int(m[1], 16)], *([] if always else [n + 1])]
        elif root == "BSYNC":
            # Where the barrier's region ends right here, control falls through; else it goes to the region's end.
            ends = [at[t] for t in converge.get(i.operands, ()) if t in at]
            if not any(n <= e <= n + 1 for e in ends):
                jumps[n] = [*ends, *([n + 1] if i.guarded else [])]
        elif root in ("EXIT", "RET", "BRX", "JMX"):
            jumps[n] = [n + 1] if i.guarded else []
    cuts = {0, *(t for ts in jumps.values() for t in ts), *(n + 1 for n in jumps)}
    starts = [*sorted(c for c in cuts if c < len(code)), len(code)]
    block = {s: b for b, s in enumerate(starts)}
    successors = []
    for b in range(len(starts) - 1):
        last = starts[b + 1] - 1
        targets = jumps.get(last, [last + 1])
        successors.append([block[t] for t in targets if t < len(code)])
    return starts, successors


def _natural_loops(successors: Sequence[Sequence[int]]) -> dict[int, set[int]]:
    """Return the blocks of each natural loop, by header; loops with one header are one."""
    predecessors: dict[int, list[int]] = defaultdict(list)
    for b, targets in enumerate(successors):
        for t in targets:
            predecessors[t].append(b)
    order, state, stack = [], {0}, [(0, iter(successors[0]))]
    while stack:
        b, rest = stack[-1]
        nxt = next((t for t in rest if t not in state), None)
        if nxt is None:
            order.append(b)
            stack.pop()
        else:
            state.add(nxt)
            stack.append((nxt, iter(successors[nxt])))
    position = {b: len(order) - 1 - n for n, b in enumerate(order)}
    parent = {0: 0}
    changed = True
    while changed:  # Cooper, Harvey, Kennedy: A Simple, Fast Dominance Algorithm
        changed = False
        for b in reversed(order[:-1]):
            done = [p for p in predecessors[b] if p in parent]
            new = done[0]
            for p in done[1:]:
                while new != p:
                    while position[p] > position[new]:
                        p = parent[p]
                    while position[new] > position[p]:
                        new = parent[new]
            if parent.get(b) != new:
                parent[b], changed = new, True

    def dominates(a: int, b: int) -> bool:
        while position[b] > position[a]:
            b = parent[b]
        return a == b

    found: dict[int, set[int]] = {}
    for b in order:
        for header in successors[b]:
            if dominates(header, b):
                body, todo = found.setdefault(header, {header}), [b]
                while todo:
                    x = todo.pop()
                    if x not in body:
                        body.add(x)
                        todo += [p for p in predecessors[x] if p in position]
    return found


def count(code: Iterable[Instruction]) -> dict[str, int]:
    """Return how many instructions of each kind there are, and in all; kinds without one are left out."""
    kinds = Counter(i.kind for i in code)
    return {"total": sum(kinds.values()), **{k: kinds[k] for k in (*(n for n, _ in KINDS), "other") if kinds[k]}}


# Tables.


@dataclass(frozen=True)
class Compiled:
    """A kernel of a compiled file: its symbol, resources and code."""

    symbol: Symbol
    registers: int
    stack: int
    static_smem: int
    code: list[Instruction]


def read_compiled(
    path: Path, wanted: Mapping[str, Symbol], resources: Mapping[str, dict[str, int]]
) -> Iterator[Compiled]:
    """Yield the wanted kernels of a cubin or module with their code."""
    for name, text in _functions(path):
        if symbol := wanted.get(name):
            used = resources[name]
            # cuobjdump counts what the driver keeps of each block.
            yield Compiled(symbol, used["REG"], used["STACK"], used["SHARED"] - RESERVED_SMEM, parse_sass(text))


def _functions(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the name and the disassembly of every function, one at a time: a module's text is hundreds of MB."""
    process = subprocess.Popen([_tool("cuobjdump"), "-sass", path], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    name: str | None = None
    lines: list[str] = []
    for line in process.stdout:
        if "Function : " in line:
            if name is not None:
                yield name, "".join(lines)
            name, lines = line.split("Function : ")[1].strip(), []
        elif name is not None:
            lines.append(line)
    if name is not None:
        yield name, "".join(lines)
    if process.wait():
        raise SynthError(f"{path}: cuobjdump failed; it has to be of the toolkit's version or newer")


def resources(path: Path) -> dict[str, dict[str, int]]:
    """Return registers, stack and static shared memory of each kernel, by mangled name."""
    text = subprocess.run([_tool("cuobjdump"), "-res-usage", path], capture_output=True, text=True, check=True).stdout
    found = re.findall(r"Function (\S+):\n\s+(REG:.*)", text)
    return {name: {k: int(v) for k, v in re.findall(r"([A-Z]+):(\d+)", used)} for name, used in found}


def _tool(name: str) -> str:
    """Return a CUDA tool: of PATH, or of the wheel that PyPI has of it."""
    found = shutil.which(name)
    for folder in sys.path:
        found = found or next((str(p) for p in Path(folder).glob(f"nvidia/cu*/bin/{name}")), None)
    if found is None:
        raise SynthError(f"{name} is not on PATH; pip install nvidia-cuda-{name}")
    return found


def main_loop(symbol: Symbol, threads: int, code: Sequence[Instruction]) -> tuple[dict[str, int], float]:
    """Return the counts of the main loop, and how many steps of tile K one iteration covers; empty and 0 without one.

    The kernel of a gated gemm1 has a loop for each tile it can shrink to, and compilers peel and unroll loops. The main
    loop is the one whose iteration computes most products.
    """
    found = loops(code)
    if not found:
        return {}, 0.0
    body = max(found, key=_volume)
    m, n, k = symbol.tactic.tile
    if symbol.kind == "tma":
        k = int(k * _PER_BYTE[symbol.quant])
    # One warp group of a TMA kernel loads; its HGMMA and QGMMA are of a whole warp group, other MMAs of a warp.
    math_threads = threads - 128 if symbol.kind == "tma" else threads
    units = math_threads // (128 if symbol.tactic.family == "tma90" else 32)
    return count(body), round(_volume(body) * units / (m * n * k), 4)


def _volume(code: Iterable[Instruction]) -> int:
    return sum(i.mma_volume for i in code)


def extract(options: argparse.Namespace) -> int:
    """Write the tables of one architecture, beside those of the others; returns 1 where a kernel is missing."""
    files = [options.module] if options.module else sorted((options.work / options.arch).glob("*.cubin"))
    if not files:
        raise SynthError(f"{options.work / options.arch}: no cubins; run compile first, or name a --module")
    wanted: dict[str, Symbol] = {}
    used: dict[str, dict[str, int]] = {}
    tables = {quant: load_table(options.arch, quant) for quant in QUANTS[options.arch]}
    for path in files:
        here = resources(path)
        names = [n for n in here if re.search("device_kernel|MoeFCGemm|run_global", n)]
        for name, text in zip(names, demangle(names), strict=True):
            symbol = parse_symbol(name, text)
            if symbol and (symbol := _in_table(symbol, tables)):
                wanted[name], used[name] = symbol, here[name]
    size = sizes(list(wanted.values()), options.arch, options)
    rows: dict[tuple[str, bool], dict[Tactic, dict[str, Any]]] = defaultdict(dict)
    for path in files:
        for compiled in read_compiled(path, wanted, used):
            symbol = compiled.symbol
            smem, threads = size[symbol.mangled]
            loop, steps = main_loop(symbol, threads, compiled.code)
            row = {
                "tactic": str(symbol.tactic), "registers": compiled.registers, "threads": threads,
                "static_smem": compiled.static_smem, "dynamic_smem": smem, "stages": symbol.stages,
                "stack_bytes": compiled.stack, "instructions": count(compiled.code), "main_loop": loop,
                "main_loop_steps": steps,
            }  # fmt: skip
            known = rows[symbol.quant, symbol.kind == "sm80-gated"].setdefault(symbol.tactic, row)
            if known != row:
                raise SynthError(
                    f"{path}: two kernels of {symbol.tactic} with other numbers: the symbol says too little"
                )
    missing = 0
    written = []
    for quant, table in tables.items():
        plain, gated = rows[quant, False], rows[quant, True]
        for tactic in table.gemm2:
            if tactic not in plain:
                missing += 1
                print(f"{options.arch} {quant}: no kernel of {tactic}", file=sys.stderr)
        entry: dict[str, Any] = {"arch": options.arch, "quant": quant}
        entry["kernels"] = [plain[t] for t in table.gemm2 if t in plain]
        if gated:
            entry["gated_gemm1"] = [gated[t] for t in table.gemm1 if t in gated]
        if plain:
            written.append(entry)
    flags = portable(nvcc_flags(options.arch, options.cuda, options.work))
    _write_tables(options.out, options.arch, {"compiler": compiler_of(files[0]), "flags": flags}, written)
    show(options.out, options.arch)
    return 1 if missing else 0


def _in_table(symbol: Symbol, tables: Mapping[str, TacticTable]) -> Symbol | None:
    """Return `symbol` under the tactic of its table, ``None`` where no tactic runs it."""
    table = tables.get(symbol.quant)
    if table is None:
        return None
    if symbol.kind != "sm80-gated":
        return symbol if symbol.tactic in table.gemm2 else None
    # A gated kernel's name has no warp tile.
    for tactic in table.gemm1:
        if (tactic.family, tactic.tile, tactic.stages) == ("sm80", symbol.tactic.tile, symbol.stages):
            return Symbol(symbol.mangled, symbol.kind, symbol.type, symbol.quant, tactic, symbol.stages)
    return None


def compiler_of(path: Path) -> str:
    """Return what the assembler says of itself in a cubin, or in the first cubin of a module."""
    data = path.read_bytes()
    if not (found := re.search(rb"Cuda compilation tools, release [\d.]+, V[\d.]+", data)):
        with tempfile.TemporaryDirectory() as folder:
            first = subprocess.run(
                [_tool("cuobjdump"), "-lelf", path], capture_output=True, text=True, check=True
            ).stdout
            name = first.splitlines()[0].split()[-1]
            subprocess.run(
                [_tool("cuobjdump"), "-xelf", name, path.resolve()], cwd=folder, capture_output=True, check=True
            )
            data = (Path(folder) / name).read_bytes()
        found = re.search(rb"Cuda compilation tools, release [\d.]+, V[\d.]+", data)
    return found[0].decode() if found else "unknown"


def _write_tables(path: Path, arch: str, compiled: dict[str, Any], tables: Sequence[dict[str, Any]]) -> None:
    """Put the tables of one architecture into the file, a kernel a line; those of the others stay."""
    old = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"architectures": {}, "tables": []}
    data = {
        "flashinfer": DEFAULT_FLASHINFER,
        "source": "the package's kernels, compiled; written by benchmarks/kernels.py extract",
        "architectures": {**old["architectures"], arch: compiled},
        "tables": [*(t for t in old["tables"] if t["arch"] != arch), *tables],
    }
    text = json.dumps(data, indent=1)
    # One kernel a line: what lies below the lists of kernels is folded.
    text = re.sub(r"\{\n    +\"tactic\"(?:[^{}]|\{[^{}]*\})*\}", lambda m: re.sub(r"\s*\n\s*", " ", m[0]), text)
    write_atomically(path, (text + "\n").encode())


def show(path: Path, arch: str) -> None:
    """Print the table of one architecture."""
    data = json.loads(path.read_text(encoding="utf-8"))
    kinds = ("mma", "ldsm", "async_copy", "barrier", "shared", "total")
    for table in data["tables"]:
        if table["arch"] != arch:
            continue
        for key in ("kernels", "gated_gemm1"):
            if key in table:
                print(f"\n{arch} {table['quant']}{' gated gemm1' if key != 'kernels' else ''}")
                print("| tactic | regs | threads | smem | stages | stack | blocks/SM | limit | steps | "
                      + " | ".join(kinds) + " |")  # fmt: skip
            for row in table.get(key, ()):
                kernel = Kernel(**{k: v for k, v in row.items() if k != "tactic"})
                limits = LIMITS[arch]
                per_step = [f"{kernel.per_step(k):.4g}" if kernel.main_loop else "?" for k in kinds]
                cells = (
                    row["tactic"], kernel.registers, kernel.threads, kernel.smem, kernel.stages, kernel.stack_bytes,
                    kernel.blocks_per_sm(limits), kernel.limited_by(limits), kernel.main_loop_steps, *per_step,
                )  # fmt: skip
                print("| " + " | ".join(map(str, cells)) + " |")


# What it is worth.

#: Buckets of at least this many tokens are looked at.
_LARGE_BUCKET = 4096
#: Cells whose useful arithmetic takes at least this many times as long as their bytes, both at the specified peaks.
_COMPUTE_BOUND = 1.0
#: Fewer waves than this, and whole waves blur a tile's cost.
_FEWEST_WAVES = 4.0
#: A tactic with fewer cells than this is left out.
_FEWEST_CELLS = 8

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Cost:
    """What one tile-step of a tactic takes: microseconds of an SM, the median over `cells`."""

    stage: int
    tactic: Tactic
    kernel: Kernel
    us: float
    cells: int


def costs(device_name: str, quant: str) -> list[Cost]:
    """Return the measured cost of a tile-step of every tactic and stage, from large compute-bound cells.

    ``us = (ms - other) * 1000 * SMs / (tiles * k_steps)``, where `other` is the traffic outside the GEMM (activation,
    finalize) at the specified bandwidth. Prologue, epilogue and launch stay in it: they are part of a tile.
    """
    device = get_device(device_name)
    hardware = Hardware.of(device, quant)
    (timings,) = load(shipped("measurements"), device.name, quant, problems=[])
    large = timings.averaged()
    # A layer with a gate: its gemm1 has kernels of its own, an ungated one too few timings to judge.
    gated = np.array([s.gated for s in large.shapes])
    large = large.select((large.tokens >= _LARGE_BUCKET) & gated[large.shape])
    keys, site = large.buckets()
    geometry = sites(large.shapes, keys[:, 0], keys[:, 1], keys[:, 2])
    columns = tactic_columns(large.table, hardware)
    w = work(geometry, site, large.tactic, columns, hardware)
    tiles = w.tiles_m * w.tiles_n
    bound = w.flops / hardware.flops >= _COMPUTE_BOUND * w.dram_bytes / hardware.dram
    bound &= tiles / hardware.sms >= _FEWEST_WAVES
    us = (large.ms - (w.glue_bytes + w.finalize_bytes) / hardware.dram) * 1e3 * hardware.sms / (tiles * w.k_steps)
    found = []
    for stage in STAGES:
        kernels = load_kernels(device.tactics_arch, quant, gated_gemm1=stage == 1)
        for tactic_id, tactic in large.table.items(stage):
            rows = bound & (large.tactic == tactic_id)
            if rows.sum() >= _FEWEST_CELLS:
                found.append(Cost(stage, tactic, kernels[tactic], float(np.median(us[rows])), int(rows.sum())))
    return found


#: Columns of the regressions of log cost, by the name that the table prints.
FEATURES: Mapping[str, Callable[[Cost], tuple[float, ...]]] = {
    "tile area": lambda c: (_log_area(c),),
    "tile area, tile loads": lambda c: (_log_area(c), math.log(c.tactic.tile[0] + c.tactic.tile[1])),
    "MMAs of the main loop": lambda c: (_log_block(c, "mma"),),
    "all instructions of the main loop": lambda c: (_log_block(c, "total"),),
    "MMAs, other instructions": lambda c: (
        _log_block(c, "mma"), math.log(c.kernel.per_step() - c.kernel.per_step("mma")),
    ),
    "registers, smem, blocks per SM": lambda c: (
        math.log(c.kernel.registers * c.kernel.threads), math.log(c.kernel.smem), math.log(_resident(c)),
    ),
    "tile area, all instructions": lambda c: (_log_area(c), _log_block(c, "total")),
    "tile area, local memory": lambda c: (_log_area(c), math.log1p(c.kernel.per_step("local"))),
    "tile area, blocks per SM": lambda c: (_log_area(c), math.log(_resident(c))),
    "tile area, stages": lambda c: (_log_area(c), math.log(c.kernel.stages)),
    "tile area, stages, blocks per SM": lambda c: (_log_area(c), math.log(c.kernel.stages), math.log(_resident(c))),
}  # fmt: skip


def _log_area(c: Cost) -> float:
    return math.log(c.tactic.tile[0] * c.tactic.tile[1])


def _log_block(c: Cost, kind: str) -> float:
    """Logarithm of what all math warps of a block execute for one step; an HGMMA counts by the columns it covers."""
    tma = c.tactic.family != "sm80"
    warps = (c.kernel.threads - (128 if tma else 0)) / 32
    width = c.tactic.tile[1] / 8 if kind == "mma" and c.tactic.family == "tma90" else 1.0
    return math.log(c.kernel.per_step(kind) * warps * width)


def _resident(c: Cost) -> int:
    """Return the blocks of an SM at once; the launcher of the multistage kernels starts two at most."""
    return min(2, max(1, c.kernel.blocks_per_sm(LIMITS["sm90"])))


def worth(options: argparse.Namespace) -> int:
    """Print how far what the compiler says predicts what a tile-step takes."""
    for quant in QUANTS["sm90"]:
        every = costs(options.device, quant)
        multistage = [c for c in every if c.tactic.family == "sm80"]
        groups = {
            "TMA": [c for c in every if c.tactic.family != "sm80"],
            "multistage": multistage,
            # One that spills can be many times slower, and then decides every figure of its group.
            "multistage without spills": [c for c in multistage if not c.kernel.main_loop.get("local")],
        }
        for name, own in groups.items():
            if own:
                _report(f"{options.device} {quant}, {name}", own)
    return 0


def _report(title: str, found: Sequence[Cost]) -> None:
    """Print the regressions of one group of tactics."""
    log_us = np.log([c.us for c in found])
    tiles = [(c.tactic.tile, c.tactic.warp) for c in found]
    print(f"\n{title}: {len(found)} kernels (tactic, stage), {len(set(tiles))} tiles, "
          f"{sum(c.cells for c in found)} cells, {min(c.us for c in found):.3g} to {max(c.us for c in found):.3g} us; "
          f"standard deviation between kernels of one tile {np.std(_centred(log_us, tiles)):.1%}")  # fmt: skip
    print("| features | Spearman | R² | R² within tiles | error, tile left out: median | p90 | worst |")
    print("|---|---|---|---|---|---|---|")
    for name, columns in FEATURES.items():
        x = np.array([columns(c) for c in found])
        fitted = _fit(x, log_us)(x)
        rank = spearmanr(fitted, log_us).statistic if np.ptp(fitted) > 1e-9 else math.nan
        error = np.exp(np.abs(_left_out(x, log_us, tiles) - log_us)) - 1.0
        print(f"| {name} | {rank:.2f} | {_r2(fitted, log_us):.2f} | {_within(x, log_us, tiles):.2f} | "
              f"{np.median(error):.1%} | {np.quantile(error, 0.9):.1%} | {error.max():.1%} |")  # fmt: skip


def _fit(x: Floats, y: Floats) -> Callable[[Floats], Floats]:
    """Return the least-squares line; a feature without spread gets no slope."""
    spread = x.std(axis=0) > 1e-9
    centre = x.mean(axis=0)
    slope = np.zeros(x.shape[1])
    slope[spread] = np.linalg.lstsq((x - centre)[:, spread], y - y.mean(), rcond=1e-6)[0]
    return lambda at: np.asarray((at - centre) @ slope + y.mean())


def _left_out(x: Floats, y: Floats, tiles: Sequence[object]) -> Floats:
    """Return the prediction of each kernel from those of the other tiles."""
    predicted = np.empty(len(y))
    for tile in set(tiles):
        out = np.array([t == tile for t in tiles])
        predicted[out] = _fit(x[~out], y[~out])(x[out])
    return predicted


def _r2(fitted: Floats, y: Floats) -> float:
    return 1.0 - float(((y - fitted) ** 2).sum() / ((y - y.mean()) ** 2).sum())


def _within(x: Floats, y: Floats, tiles: Sequence[object]) -> float:
    """Return the share of the spread between kernels of one tile that the features explain."""
    x, y = _centred(x, tiles), _centred(y, tiles)
    return _r2(_fit(x, y)(x), y)


def _centred(values: Floats, tiles: Sequence[object]) -> Floats:
    """Return `values` less the mean of their tile."""
    values = values.copy()
    for tile in set(tiles):
        rows = np.array([t == tile for t in tiles])
        values[rows] -= values[rows].mean(axis=0)
    return values


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("compile", "extract"):
        own = commands.add_parser(name)
        own.add_argument("--work", type=Path, required=True, help="folder of sources and cubins")
        own.add_argument("--cuda", type=Path, default=Path("/usr/local/cuda"), help="folder of a CUDA 13 toolkit")
        own.add_argument("--include", type=Path, help="folder with cublasLt.h, nvrtc.h, curand_kernel.h")
        if name == "compile":
            own.add_argument(
                "--quant", action="append", choices=QUANTS["sm120"], help="repeatable; every one by default"
            )
            own.add_argument("--jobs", type=int, default=1)
        else:
            own.add_argument("--arch", choices=tuple(QUANTS), required=True)
            own.add_argument("--module", type=Path, help="a compiled module in place of the folder's cubins")
            own.add_argument("--out", type=Path, required=True, help="the table's file; other architectures in it stay")
    study = commands.add_parser("worth")
    study.add_argument("--device", default="NVIDIA H200")
    return parser.parse_args()


def main() -> int:
    """Run the command."""
    options = _options()
    return {"compile": compile_cubins, "extract": extract, "worth": worth}[options.command](options)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SynthError as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(2)
