"""Which tactics the FlashInfer in a folder serves from a config: run as ``probe_flashinfer.py FOLDER REQUEST``.

A process of its own, because the folder holds another FlashInfer than the installed one. The GPU is stubbed as in
:func:`synth.gpu.stub.stubbed_gpu`, with means that exist in every release; keys, buckets, loaders and the
metadata check are FlashInfer's own. `REQUEST` is a JSON file, the answer the last line that is printed, JSON, too.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import os
import sys
import types
from pathlib import Path
from typing import Any


class NoDevice:
    """Stands in for ``torch.cuda.device``."""

    def __init__(self, *_: object) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


class Runner:
    """Keeps the pairs of tactics that it is given."""

    def __init__(self, counts: list[int], served: list[list[int]]) -> None:
        self.get_gemm1_tactic_count = lambda: counts[0]
        self.get_gemm2_tactic_count = lambda: counts[1]
        self.served = served

    def run_moe(self, *arguments: object) -> None:
        self.served.append(next(a for a in reversed(arguments) if isinstance(a, list)))


def main(folder: str, request: str) -> None:
    asked: dict[str, Any] = json.loads(Path(request).read_text())
    sys.path.insert(0, folder)
    if asked["bundled"]:
        os.environ["FLASHINFER_AUTOTUNER_LOAD_FROM_FILE"] = "1"
    torch: Any = importlib.import_module("torch")
    capability = tuple(asked["capability"])
    device = types.SimpleNamespace(name=asked["gpu"], major=capability[0], minor=capability[1], multi_processor_count=1)
    torch.cuda.get_device_name = lambda *_: asked["gpu"]
    torch.cuda.get_device_capability = lambda *_: capability
    torch.cuda.get_device_properties = lambda *_: device
    torch.cuda.current_device = lambda: 0
    torch.cuda.device = NoDevice

    flashinfer = importlib.import_module("flashinfer")
    assert Path(str(flashinfer.__file__)).is_relative_to(folder), f"this is {flashinfer.__file__}"
    core: Any = importlib.import_module("flashinfer.fused_moe.core")
    autotuner: Any = importlib.import_module("flashinfer.autotuner")
    autotuner = getattr(autotuner, "autotuner", autotuner)  # a package in later releases

    served: list[list[int]] = []
    module = types.SimpleNamespace(
        init=lambda *_: Runner(asked["counts"], served),
        interleave_moe_weights_for_sm90_mixed_gemm=None,
        set_deepgemm_jit_include_dirs=lambda _: None,
    )
    for name in [n for n in vars(core) if n.startswith("gen_cutlass_fused_moe_sm")]:
        setattr(core, name, lambda *_: types.SimpleNamespace(build_and_load=lambda: module))
    core.get_compute_capability = lambda _: capability
    core.device_support_pdl = lambda _: capability >= (9, 0)
    core.is_cuda_version_at_least = lambda _: True

    tuner = autotuner.AutoTuner.get()
    answer: dict[str, Any] = {"version": flashinfer.__version__, "served": served}
    if hasattr(autotuner, "_collect_metadata"):
        answer["metadata"] = list(autotuner._collect_metadata())
    if not asked["bundled"]:
        answer["loaded"] = tuner.load_configs(asked["config"])
        read = ("_file_configs", "_file_config_policies", "_file_config_selections")
        runner_and_tactic, policy, selection = (next(iter(getattr(tuner, name, {}).values()), None) for name in read)
        answer["elements"] = len(runner_and_tactic or ()) + (policy is not None) + (selection is not None)
    answer["finalize_option"] = "use_fused_finalize" in inspect.signature(core.cutlass_fused_moe).parameters
    answer["managed_store"] = (Path(folder) / "flashinfer/autotune_cache.py").exists()

    empty = functools.partial(torch.empty, device="meta")
    for call in asked["calls"]:
        # A process keeps the first grid of buckets; a server has only one maximum.
        core.get_cutlass_fused_moe_module.cache_clear()
        core.cutlass_fused_moe(
            input=empty(call["x"], dtype=getattr(torch, call["x_dtype"])),
            token_selected_experts=empty((call["x"][0], call["top_k"]), dtype=torch.int32),
            token_final_scales=empty((call["x"][0], call["top_k"])),
            fc1_expert_weights=empty(call["w1"], dtype=torch.int64),
            fc2_expert_weights=empty(call["w2"], dtype=torch.int64),
            output_dtype=torch.bfloat16,
            quant_scales=[],
            tp_size=call["tp"],
            tp_rank=call["tp"] - 1,
            ep_size=call["ep"],
            ep_rank=call["ep"] - 1,
            tune_max_num_tokens=call["maximum"],
            **call["options"],
        )
    if hasattr(tuner, "_profiling_policy"):
        runner = core.get_cutlass_fused_moe_module(f"{capability[0]}{capability[1]}").MoERunner
        answer["policy"] = tuner._profiling_policy(runner.tuning_config)
    print(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
