"""Where a config is installed, beside where the servers' own code looks. Slow: downloads their wheels.

The functions of vLLM 0.33.0 and SGLang 0.5.23 that decide the paths are run as they are in the wheels. What they import
of their packages is stubbed here, for it needs a GPU: the configuration, the parallel groups, the runner.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import shutil
import subprocess
import sys
import types
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from installs import install, uninstall

from synth.catalog.shapes import Deployment, MoEShape
from synth.configs.model import Entry
from synth.configs.v1 import dumps_json
from synth.errors import SynthError
from synth.flashinfer.buckets import token_buckets
from synth.flashinfer.keys import file_keys
from synth.flashinfer.tactics import load_table
from synth.flashinfer.versions import build_metadata
from synth.gpu.stub import StubbedFlashInfer, stubbed_gpu
from synth.servers.places import LAYOUTS, search_root

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

H200 = "NVIDIA H200"
OLMOE = Deployment("olmoe", 1, 1, "bf16", "swiglu", False, MoEShape(2048, 1024, 64, 8))
VLLM_FILES = (
    "vllm/envs.py",
    "vllm/model_executor/warmup/flashinfer_autotune_cache.py",
    "vllm/model_executor/warmup/kernel_warmup.py",
    "vllm/utils/flashinfer.py",
)
SGLANG_FILES = ("sglang/srt/environ.py", "sglang/srt/model_executor/runner/flashinfer_autotune.py")


def unpack(requirement: str, files: tuple[str, ...], folder: Path) -> Path:
    """Download a wheel and keep only these files of it."""
    if importlib.util.find_spec("pip") is None:
        pytest.skip("pip is not installed")
    options = ["--quiet", "--no-deps", "--only-binary=:all:", "--python-version=3.11"]
    options += [f"--platform=manylinux_2_{n}_x86_64" for n in (34, 31, 28, 17)] + ["--platform=any"]
    command = [sys.executable, "-m", "pip", "download", *options, "-d", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"pip can't download {requirement}: {(done.stderr.splitlines() or ['?'])[-1]}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as z:
        for name in files:
            z.extract(name, folder)
    wheel.unlink()
    return folder


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = unpack("vllm==0.33.0", VLLM_FILES, tmp_path_factory.mktemp("vllm"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def sglang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = unpack("sglang==0.5.23", SGLANG_FILES, tmp_path_factory.mktemp("sglang"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("VLLM_CACHE_ROOT", "VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR", "SGLANG_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def h200() -> Iterator[StubbedFlashInfer]:
    pytest.importorskip("flashinfer.autotuner")
    with stubbed_gpu(H200, "sm90") as stub:
        yield stub


@pytest.fixture
def config(tmp_path: Path) -> Path:
    table = load_table("sm90", "bf16")
    entries = [
        Entry(key, table.ids(stage)[i], 0.25, 0.5, 1.0, 45)
        for stage in (1, 2)
        for i, bucket in enumerate(token_buckets(512))
        for key in file_keys(OLMOE, "vllm", bucket, stage, "sm90")
    ]
    path = tmp_path / "config.json"
    path.write_bytes(dumps_json(build_metadata(H200), entries))
    return path


def save_as_a_server(stub: StubbedFlashInfer, config: Path, paths: list[Path]) -> None:
    """Let FlashInfer save what a first start would have tuned: here one of the config's keys, with another tactic."""
    content = json.loads(config.read_text())
    key = next(k for k in content if k.startswith("("))
    content[key][1] += 1
    tuned = config.with_name("tuned.json")
    tuned.write_text(json.dumps({"_metadata": content["_metadata"], key: content[key]}))
    assert stub.tuner.load_configs(str(tuned))
    for path in paths:
        stub.tuner.save_configs(str(path))
    stub.tuner.clear_cache()


def stub_module(monkeypatch: pytest.MonkeyPatch, name: str, **values: object) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__dict__.update(values)
    module.__path__ = []  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, module)
    parent, _, child = name.rpartition(".")
    if parent in sys.modules:
        monkeypatch.setattr(sys.modules[parent], child, module, raising=False)
    return module


def real_module(monkeypatch: pytest.MonkeyPatch, name: str, path: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    parent, _, child = name.rpartition(".")
    if parent in sys.modules:
        monkeypatch.setattr(sys.modules[parent], child, module, raising=False)
    spec.loader.exec_module(module)
    return module


def functions(path: Path, names: set[str], globals_: dict[str, object]) -> SimpleNamespace:
    """Return functions out of a module that can't be imported without a GPU."""
    body = [n for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef) and n.name in names]
    assert {n.name for n in body} == names
    future = ast.parse("from __future__ import annotations").body
    exec(compile(ast.Module([*future, *body], []), str(path), "exec"), globals_)
    return SimpleNamespace(**{name: globals_[name] for name in names})


# ---- vLLM --------------------------------------------------------------------------------------------------


class Group(SimpleNamespace):
    """A parallel group as seen by one rank."""

    world_size: int
    rank_in_group: int


@pytest.fixture
def vllm_code(vllm: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, Any, Any]]:
    """Return vLLM's module of paths, a runner, and vLLM's functions that load a file, as rank `rank` of `size`."""

    flashinfer = pytest.importorskip("flashinfer.jit.env")
    # FlashInfer's name for its folder of an H200, which a machine without a GPU has no architecture for.
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    monkeypatch.setattr(flashinfer, "FLASHINFER_WORKSPACE_DIR", flashinfer._get_workspace_dir_name())

    def load(rank: int = 0, size: int = 1, dp: int = 0, stages: int = 1) -> tuple[Any, Any, Any]:
        world = Group(world_size=size, rank_in_group=rank, cpu_group=None)
        for name, values in {
            "vllm": {},
            "vllm.config": {"CacheConfig": object, "VllmConfig": object, "replace": None},
            "vllm.logger": {"init_logger": lambda _: SimpleNamespace(info_once=lambda *_: None)},
            "vllm.distributed": {},
            "vllm.distributed.parallel_state": {"get_world_group": lambda: world, "get_node_count": lambda: 1},
            "vllm.utils": {},
            "vllm.utils.flashinfer": {"has_flashinfer_autotune_v2": lambda: True},
        }.items():
            stub_module(monkeypatch, name, **values)
        real_module(monkeypatch, "vllm.envs", vllm / "vllm/envs.py")
        module = real_module(monkeypatch, "vllm.autotune_cache", vllm / VLLM_FILES[1])
        runner = SimpleNamespace(
            vllm_config=SimpleNamespace(
                cache_config=SimpleNamespace(mamba_block_size=None, kv_cache_layout=None),
                compute_hash=lambda include_version: "a configuration",
                parallel_config=SimpleNamespace(
                    data_parallel_rank=dp, enable_elastic_ep=False, pipeline_parallel_size=stages
                ),
            )
        )
        loading = functions(
            vllm / VLLM_FILES[2],
            {"_autotune_cache_fingerprint", "_all_ranks_have_matching_cache", "_load_shared_autotune_cache"},
            {"json": json, "Path": Path, "torch": importlib.import_module("torch")},
        )
        return module, runner, loading

    return load


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"XDG_CACHE_HOME": "HOME/x"},
        {"VLLM_CACHE_ROOT": "~/v"},
        {"VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR": "~/a", "VLLM_CACHE_ROOT": "~/v"},
        {"VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR": ""},
    ],
    ids=repr,
)
def test_vllm_looks_below_the_same_root(
    vllm_code: Callable[..., Any], home: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {name: value.replace("HOME", str(home)) for name, value in environment.items()}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    module, runner, _ = vllm_code()
    path = module.resolve_rank_flashinfer_autotune_file(runner)
    root, pattern = search_root("vllm", environment)
    assert path.parent in list(root.glob(pattern.format(version="0.7.4")))
    assert LAYOUTS["vllm"].folder.fullmatch(path.parent.name) and LAYOUTS["vllm"].file.fullmatch(path.name)
    assert LAYOUTS["vllm"].file.fullmatch(module.resolve_flashinfer_autotune_file(runner).name)


def test_vllm_loads_what_was_installed_on_every_rank_and_tunes_nothing(
    vllm_code: Callable[..., Any], h200: StubbedFlashInfer, config: Path
) -> None:
    paths = []
    for dp in (0, 1):
        for rank in range(4):
            module, runner, _ = vllm_code(rank, 4, dp)
            paths.append(module.resolve_rank_flashinfer_autotune_file(runner))
    assert len(set(paths)) == 8
    save_as_a_server(h200, config, paths)
    before = [path.read_bytes() for path in paths]

    done = install(config, "vllm")
    assert [done.folder / name for name in done.merged] == sorted(paths)
    assert done.report is not None and done.report.ok and done.variables == {}
    _, _, loading = vllm_code()
    prints = [loading._autotune_cache_fingerprint(path) for path in paths]
    assert prints[0] is not None and all(p == prints[0] for p in prints)
    alone = Group(world_size=1, rank_in_group=0, cpu_group=None)
    assert all(loading._load_shared_autotune_cache(path, h200.tuner, alone) is True for path in paths)
    ours = {k: v for k, v in json.loads(config.read_text()).items() if not k.startswith("_")}
    assert {key: tactic for key, (_, tactic) in h200.tuner._file_configs.items()} == {k: v[1] for k, v in ours.items()}

    uninstall("vllm")
    assert [path.read_bytes() for path in paths] == before


def test_on_one_gpu_vllm_uses_the_managed_store(
    vllm_code: Callable[..., Any], home: Path, monkeypatch: pytest.MonkeyPatch, config: Path
) -> None:
    for size, stages, managed in ((1, 1, True), (2, 1, False), (2, 2, False)):
        module, runner, _ = vllm_code(0, size, 0, stages)
        assert module.use_flashinfer_autotune_v2(runner) is managed
    for override in (None, str(home / "a")):
        if override:
            monkeypatch.setenv("VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR", override)
        module, _, _ = vllm_code()
        root = module.resolve_flashinfer_autotune_v2_root()
        assert root == (Path(override) if override else None)
        with pytest.raises(SynthError) as e:
            install(config, "vllm")
        assert str(e.value).endswith("--engine flashinfer" + (f" --folder {root}" if override else ""))


# ---- SGLang ------------------------------------------------------------------------------------------------


@pytest.fixture
def sglang_code(sglang: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, Any]]:
    """Return SGLang's module of paths and a runner, as rank `tp` of tensor parallelism."""

    def load(tp: int = 0, pp: int = 0, dp: int | None = None) -> tuple[Any, Any]:
        kernel = SimpleNamespace(flashinfer_autotune_skip_ops=None)
        execution = SimpleNamespace(kernel=kernel, moe=SimpleNamespace(moe_runner_backend="flashinfer_cutlass"))
        parallel = SimpleNamespace(
            tp_size=4, pp_size=2, attn_dp_size=1, moe_ep_size=1, tp_rank=tp, pp_rank=pp, dp_rank=dp
        )
        unused = ("get_disagg", "get_schedule", "get_spec", "max_prefill_buffer_tokens")
        context = {
            "get_exec": lambda: execution,
            "get_parallel": lambda: parallel,
            "get_model": lambda: SimpleNamespace(model_path="a/model", quantization=None),
            "max_speculative_num_draft_tokens": None,
            **dict.fromkeys(unused),
        }
        for name, values in {
            "sglang": {},
            "sglang.srt": {},
            "sglang.srt.model_executor": {},
            "sglang.srt.model_executor.forward_batch_info": {"ForwardMode": None},
            "sglang.srt.runtime_context": context,
            "sglang.srt.utils": {"empty_context": None, "log_info_on_rank0": lambda *_: None},
            "sglang.srt.utils.common": {"get_eager_max_batch_size": None},
        }.items():
            stub_module(monkeypatch, name, **values)
        real_module(monkeypatch, "sglang.srt.environ", sglang / SGLANG_FILES[0])
        module = real_module(monkeypatch, "sglang.autotune", sglang / SGLANG_FILES[1])
        torch = importlib.import_module("torch")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: (9, 0))
        hf = SimpleNamespace(hf_config=object(), quantization=None)
        return module, SimpleNamespace(device="cuda", dtype="bf16", model_config=hf, is_draft_worker=False)

    return load


@pytest.mark.parametrize("environment", [{}, {"SGLANG_CACHE_DIR": "HOME/s"}], ids=repr)
def test_sglang_looks_below_the_same_root(
    sglang_code: Callable[..., Any], home: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("flashinfer")
    environment = {name: value.replace("HOME", str(home)) for name, value in environment.items()}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    module, runner = sglang_code(3, 1, 2)
    path = module.flashinfer_autotune_cache_path(runner)
    root, pattern = search_root("sglang", environment)
    assert path.parent in list(root.glob(pattern.format(version="0.7.4")))
    assert LAYOUTS["sglang"].folder.fullmatch(path.parent.name)
    m = LAYOUTS["sglang"].file.fullmatch(path.name)
    assert m is not None and m["peers"] == "pp1_dp2"


def test_sglang_finds_equal_files_on_every_rank_and_discards_none(
    sglang_code: Callable[..., Any], h200: StubbedFlashInfer, config: Path
) -> None:
    places = []
    for tp in range(4):
        module, runner = sglang_code(tp)
        places.append(module.flashinfer_autotune_cache_path(runner))
    save_as_a_server(h200, config, places)
    before = [path.read_bytes() for path in places]
    done = install(config, "sglang")
    assert [done.folder / name for name in done.merged] == places
    assert done.report is not None and done.report.ok and done.variables == {}
    digests = {module._autotune_cache_digest(path, {"gpu": H200}) for path in places}
    assert len(digests) == 1 and digests != {""}
    # With ranks that differ SGLang would discard all of them: that is refused.
    content = json.loads(places[1].read_text())
    content["('another', 'Runner', ((1,),), ())"] = ["Runner", 1]
    places[1].write_text(json.dumps(content))
    assert len({module._autotune_cache_digest(path, {"gpu": H200}) for path in places}) == 2
    with pytest.raises(SynthError, match="would discard all ranks' files"):
        install(config, "sglang")
    uninstall("sglang")
    assert [path.read_bytes() for path in places] == before
