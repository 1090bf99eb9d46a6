"""A stand-in for the GPU: the installed FlashInfer runs, its kernels don't."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from synth.catalog.untrusted import first_line
from synth.errors import SynthError
from synth.flashinfer.calls import quant_of
from synth.flashinfer.tactics import TacticTable, load_table
from synth.flashinfer.versions import arch_number
from synth.gpu.libraries import installed_flashinfer, load_core, load_flashinfer, load_torch


@dataclass
class FakeRunner:
    """What ``module.init`` returns instead of a compiled runner: keeps the tactics of the last call."""

    table: TacticTable | None
    served: tuple[object, object] | None = None

    def run_moe(self, *args: object) -> None:
        """Keep ``[gemm1 tactic, gemm2 tactic]``, the last list among FlashInfer's arguments."""
        pair = next(a for a in reversed(args) if isinstance(a, list))
        self.served = (pair[0], pair[1])

    def get_gemm1_tactic_count(self) -> int:
        """Return gemm1's number of tactics, from the table."""
        return len(self.table.gemm1) if self.table else 0

    def get_gemm2_tactic_count(self) -> int:
        """Return gemm2's number of tactics, from the table."""
        return len(self.table.gemm2) if self.table else 0


class _FakeModule:
    """What the JIT compiler's ``build_and_load`` returns."""

    interleave_moe_weights_for_sm90_mixed_gemm = None

    def __init__(self, arch: str, runners: list[FakeRunner]) -> None:
        self._arch = arch
        self._runners = runners

    def set_deepgemm_jit_include_dirs(self, _dirs: object) -> None:
        pass

    def init(self, x_dtype: object, weight_dtype: object, _output_dtype: object, *flags: bool) -> FakeRunner:
        block_scale, w4_group, mxfp8, packed, fused_finalize, humming = flags
        other_scaling = block_scale or w4_group or packed or humming
        quant = quant_of(str(x_dtype), str(weight_dtype), mxfp8=mxfp8, other_scaling=other_scaling)
        runner = FakeRunner(None)
        with contextlib.suppress(SynthError):
            if quant is not None:
                table = load_table(self._arch, quant, installed_flashinfer())
                runner.table = table if fused_finalize else table.without_fused_finalize()
        self._runners.append(runner)
        return runner


@dataclass(frozen=True)
class StubbedFlashInfer:
    """FlashInfer as :func:`stubbed_gpu` leaves it.

    Attributes
    ----------
    tuner : Any
        A fresh ``AutoTuner``.
    cutlass_fused_moe : Callable
        FlashInfer's public operation.
    runners : list of FakeRunner
        Every runner that FlashInfer made, the newest last.
    """

    tuner: Any
    cutlass_fused_moe: Callable[..., Any]
    runners: list[FakeRunner]
    _core: Any
    arch: str

    def restart(self) -> None:
        """Forget the compiled module, as a fresh server process would.

        FlashInfer keeps the tuning grid in a cached class method, so that of several maximum token
        counts in one process the last *new* one stays active. A server has one maximum; so has each
        stretch between two restarts.
        """
        self._core.get_cutlass_fused_moe_module.cache_clear()
        self.runners.clear()

    @property
    def runner_class(self) -> Any:
        """FlashInfer's ``MoERunner`` of the current stretch."""
        return self._core.get_cutlass_fused_moe_module(str(arch_number(self.arch))).MoERunner


@contextlib.contextmanager
def stubbed_gpu(device_name: str, arch: str) -> Iterator[StubbedFlashInfer]:
    """Let the installed FlashInfer believe that it runs on a GPU; put everything back afterwards.

    This is the one place where anything is stubbed, and this is all of it:

    - ``torch.cuda.get_device_name`` gives `device_name`, ``current_device`` gives 0, and ``torch.cuda.device``
      does nothing;
    - FlashInfer's ``get_compute_capability`` and ``device_support_pdl`` answer for `arch`, and
      ``is_cuda_version_at_least`` says yes;
    - the JIT compiler is not run: ``build_and_load`` of the MoE module returns an object whose runner records the
      pair of tactics that it is given. No kernel runs;
    - a fresh ``AutoTuner`` takes the place of the process's own, FlashInfer's module caches are fresh, and its log
      is off.

    Everything in between, from the public operation to the tactics that it hands to the runner, is FlashInfer's
    own code: operation, tuner, keys, buckets, loaders, metadata check.

    Parameters
    ----------
    device_name : str
        What torch reports for the GPU.
    arch : str
        For example ``"sm90"``.
    """
    installed_flashinfer()
    torch, core, autotuner = load_torch(), load_core(), load_flashinfer("autotuner.autotuner")
    capability = divmod(arch_number(arch), 10)
    runners: list[FakeRunner] = []
    spec = types.SimpleNamespace(build_and_load=lambda: _FakeModule(arch, runners))
    with contextlib.ExitStack() as stack:

        def replace(owner: Any, name: str, value: object) -> None:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)

        try:
            replace(torch.cuda, "get_device_name", lambda _device=None: device_name)
            replace(torch.cuda, "current_device", lambda: 0)
            replace(torch.cuda, "device", contextlib.nullcontext)
            replace(core, "get_compute_capability", lambda _device: capability)
            replace(core, "device_support_pdl", lambda _device: capability >= (9, 0))
            replace(core, "is_cuda_version_at_least", lambda _version: True)
            for name in [n for n in vars(core) if n.startswith("gen_cutlass_fused_moe_sm")]:
                replace(core, name, lambda _fast=False: spec)
            module = core.get_cutlass_fused_moe_module
            replace(core, "get_cutlass_fused_moe_module", functools.cache(module.__wrapped__))
            replace(autotuner.logger, "disabled", True)
            replace(autotuner.AutoTuner, "_instance", None)
            autotuner.load_from_file.cache_clear()
            stack.callback(autotuner.load_from_file.cache_clear)
        except AttributeError as e:
            raise SynthError(f"the installed FlashInfer is built differently ({first_line(e)}); update synth") from e
        yield StubbedFlashInfer(autotuner.AutoTuner.get(), core.cutlass_fused_moe, runners, core, arch)
