"""Prove that the installed FlashInfer uses a config: load it, ask, and see which tactics are served.

Nothing about the lookup is re-implemented here. The file is loaded by ``AutoTuner.load_configs`` (JSON)
or by FlashInfer's bundled loader (``.py``), and each key is asked for by calling the public
``flashinfer.fused_moe.cutlass_fused_moe`` with tensors that have shapes and dtypes but no storage. What
stands in for the GPU is all in :func:`stubbed_gpu`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from synth.configs.model import Config
from synth.configs.reading import read
from synth.configs.replayed import Miss, ReplayReport
from synth.errors import MissingDependencyError, SynthError
from synth.flashinfer.buckets import is_grid_bucket, map_to_bucket, next_power_of_2, token_buckets
from synth.flashinfer.calls import BF16, SERVER_MAX_TOKENS, Extra, quant_of
from synth.flashinfer.keys import Key, parse_key
from synth.flashinfer.reachability import unreachable
from synth.flashinfer.tactics import DEFAULT_FLASHINFER, TacticTable, load_table
from synth.flashinfer.versions import ENV_BUNDLED, OPS, RUNNER, arch_number, arch_of, contract_for


def cache_module() -> Any:
    installed_flashinfer()
    try:
        module = importlib.import_module("flashinfer.autotune_cache")
        _ = (module.ManagedAutotuneCache, module.ReplayCoverage, module.autotune_v2, module.get_default_cache_root)
    except (ImportError, AttributeError) as e:
        raise SynthError(
            f"FlashInfer {installed_flashinfer()} has no managed store (it has one since 0.7.0); "
            "load the JSON file with AutoTuner.get().load_configs"
        ) from e
    return module


def installed_flashinfer() -> str:
    """Return the version of the installed FlashInfer.

    Raises
    ------
    MissingDependencyError
        When FlashInfer or torch can't be imported.
    """
    try:
        importlib.import_module("torch")
        importlib.import_module("flashinfer.fused_moe.core")
        version: str = importlib.import_module("flashinfer").__version__
    except ImportError as e:
        raise MissingDependencyError(
            f"replay needs FlashInfer and torch ({_first_line(e)}): pip install 'flashinfer-synth[flashinfer]'"
        ) from e
    except Exception as e:
        raise SynthError(f"the installed FlashInfer can't be imported: {_first_line(e)}; reinstall it") from e
    return version


# ---- the stub ----------------------------------------------------------------------------------------------


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

    def init(
        self,
        x_dtype: object,
        weight_dtype: object,
        _output_dtype: object,
        block_scale: bool,
        w4_group: bool,
        mxfp8: bool,
        packed: bool,
        fused_finalize: bool,
        humming: bool,
    ) -> FakeRunner:
        quant = quant_of(
            str(x_dtype), str(weight_dtype), mxfp8=mxfp8, other_scaling=block_scale or w4_group or packed or humming
        )
        runner = FakeRunner(_table(self._arch, quant, installed_flashinfer(), fused_finalize))
        self._runners.append(runner)
        return runner


class _NoDevice:
    """Stands in for ``torch.cuda.device``: selecting a device does nothing."""

    def __init__(self, _device: object) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_exc: object) -> None:
        pass


def _table(arch: str, quant: str | None, flashinfer: str, fused_finalize: bool) -> TacticTable | None:
    if quant is None:
        return None
    try:
        table = load_table(arch, quant, flashinfer)
    except SynthError:
        return None
    return table if fused_finalize else table.without_fused_finalize()


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
    torch = importlib.import_module("torch")
    core = importlib.import_module("flashinfer.fused_moe.core")
    autotuner = importlib.import_module("flashinfer.autotuner.autotuner")
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
            replace(torch.cuda, "device", _NoDevice)
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
            raise SynthError(f"the installed FlashInfer is built differently ({_first_line(e)}); update synth") from e
        yield StubbedFlashInfer(autotuner.AutoTuner.get(), core.cutlass_fused_moe, runners, core, arch)


# ---- replay ------------------------------------------------------------------------------------------------


@dataclass
class _Layer:
    """Every key of one layer and call, and the call's fixed arguments."""

    extras: Mapping[str, Extra]
    shapes: tuple[tuple[int, ...], ...]
    by_bucket: dict[int, dict[int, str]] = field(default_factory=lambda: defaultdict(dict))


@dataclass
class _Tally:
    tactics: dict[str, object]
    keys: dict[str, Key]
    misses: dict[tuple[str, str], Miss] = field(default_factory=dict)
    lookups: int = 0
    hits: int = 0
    calls: int = 0
    reprofiled: int = 0
    asked: set[str] = field(default_factory=set)

    def miss(self, key: str, code: str, reason: str) -> None:
        old = self.misses.get((key, code))
        self.misses[key, code] = Miss(key, code, old.reason if old else reason, old.lookups + 1 if old else 1)


def replay(path: Path, *, device: str | None = None, arch: str | None = None) -> ReplayReport:
    """Load a config into the installed FlashInfer and ask for every key.

    Each key is asked for at its bucket, one token below it, and one above the bucket before it, under every maximum
    token count that vLLM passes and under the one that SGLang passes; a maximum's own bucket also beyond the maximum.
    A hit is a lookup that hands the file's tactic to the kernel.

    Parameters
    ----------
    path : Path
        A v1 JSON file, a bundled ``.py``, which is parsed, never executed, or the folder of a managed store.
    device : str, optional
        The GPU's name; by default the one in the metadata or in the ``.py``'s file name.
    arch : str, optional
        The GPU's architecture; by default the catalogue's for that name, else one that has kernels for the file.

    Raises
    ------
    MissingDependencyError
        When FlashInfer or torch is not installed.
    SynthError
        When the file can't be read, or the installed FlashInfer is not known.
    """
    config = read(path)
    if config.form == "store":
        # The root, or one environment's folder in it: <root>/v2/<hash>.
        return replay_store(config, path if (path / "v2").is_dir() else path.resolve().parents[1])
    notes: list[str] = []
    name = device or config.gpu
    if name is None:
        name = "any GPU"
        notes.append("the file names no GPU; replayed as one that the metadata accepts")
    return ask(config, str(path), lambda stub: _installed(config, path, name, stub, notes), name, arch, notes)


def ask(
    config: Config,
    path: str,
    attach: Callable[[StubbedFlashInfer], contextlib.AbstractContextManager[tuple[str, str] | None]],
    device: str,
    arch: str | None = None,
    notes: Sequence[str] = (),
) -> ReplayReport:
    """Ask the installed FlashInfer for every key of a config, as :func:`replay` does.

    Parameters
    ----------
    config : Config
    path : str
        What the report calls it.
    attach : callable
        Puts the entries where FlashInfer finds them, for as long as the context is open. Gives the code and reason of a
        refusal, or None.
    device : str
        The GPU's name.
    arch : str, optional
        As in :func:`replay`.
    notes : sequence of str
        For the report; `attach` may add to them.

    Raises
    ------
    SynthError
        As :func:`replay`.
    """
    version = installed_flashinfer()
    if contract_for(version).extras != contract_for().extras:
        raise SynthError(f"replay can't drive FlashInfer {version}; install {DEFAULT_FLASHINFER}")
    keys = {entry.text: entry.key for entry in config.entries if entry.key is not None}
    unreadable = {entry.text: entry.problem for entry in config.entries if entry.key is None}
    arch = arch or arch_for(config, device)
    tactics = {k: v[1] if isinstance(v, (list, tuple)) and len(v) > 1 else None for k, v in config.raw.items()}
    tally = _Tally(tactics, keys)
    with stubbed_gpu(device, arch) as stub, attach(stub) as refusal:
        if refusal is not None:
            for key in config.raw:
                tally.miss(key, *refusal)
        else:
            for key, reason in unreadable.items():
                tally.miss(key, "unreadable-key", reason)
            _ask(stub, tally, _layers(tally, version), version)
    missed = {m.key for m in tally.misses.values()}
    order = {key: i for i, key in enumerate(config.raw)}
    return ReplayReport(
        path=path,
        flashinfer=version,
        device=device,
        arch=arch,
        loaded=refusal is None,
        keys=len(config.raw),
        keys_hit=len(config.raw) - len(missed),
        lookups=tally.lookups,
        hits=tally.hits,
        calls=tally.calls,
        reprofiled=tally.reprofiled,
        misses=tuple(sorted(tally.misses.values(), key=lambda m: (order[m.key], m.code))),
        notes=tuple(notes),
    )


def replay_file(config: Config, path: Path) -> ReplayReport:
    """Load a server's file into the installed FlashInfer and ask for every key of `config`.

    Parameters
    ----------
    config : Config
        What was installed; other entries of the file are not asked for.
    path : Path
        The server's file.

    Returns
    -------
    ReplayReport
        As :func:`synth.gpu.replay.replay` gives it.

    Raises
    ------
    SynthError
        As :func:`synth.gpu.replay.replay`.
    """
    theirs = read(path)
    return ask(config, str(path), lambda stub: loaded(theirs, path, stub), config.gpu or "any GPU")


def replay_store(config: Config, root: Path) -> ReplayReport:
    """Attach the store at `root` as ``autotune_v2(mode="replay")`` does, and ask for every key of `config`.

    FlashInfer's own ``ReplayCoverage`` has to agree: it must have seen at least as many hits of the store.

    Raises
    ------
    SynthError
        As :func:`synth.gpu.replay.replay`, or when FlashInfer's count is another.
    """
    module = cache_module()
    coverage = module.ReplayCoverage(max_records=0)

    @contextlib.contextmanager
    def attach(_stub: StubbedFlashInfer) -> Iterator[tuple[str, str] | None]:
        # A scoped store is preceded by nothing, and followed by bundled configs only, which are not read.
        with (
            without_bundled_configs(),
            module.autotune_v2(mode="replay", cache_root=root, cache_scope="context", replay_report=coverage),
        ):
            yield None

    report = ask(config, str(root), attach, config.gpu or "any GPU")
    if coverage.hits < report.hits:
        raise SynthError(
            f"FlashInfer counts {coverage.hits} hits of the store at {root}, but {report.hits} tactics came from it; "
            "update synth"
        )
    return report


@contextlib.contextmanager
def loaded(config: Config, path: Path, stub: StubbedFlashInfer) -> Iterator[tuple[str, str] | None]:
    """Let FlashInfer load a v1 JSON file, and answer out of nothing else."""
    with without_bundled_configs():
        yield _load_json(path, config, stub)


def arch_for(config: Config, device: str) -> str:
    """Return the architecture of a GPU of the catalogue, else one that has kernels for the config."""
    if (known := arch_of(device)) is not None:
        return known
    version = installed_flashinfer()
    quants = {q for entry in config.entries if entry.key is not None and (q := _quant(entry.key, version)) is not None}
    return "sm120" if quants - {"bf16", "fp8"} else "sm90"


def _quant(key: Key, version: str) -> str | None:
    return key.quant(version) if unreachable(key, version) is None else None


@contextlib.contextmanager
def _installed(
    config: Config, path: Path, device: str, stub: StubbedFlashInfer, notes: list[str]
) -> Iterator[tuple[str, str] | None]:
    """Put the file where FlashInfer looks for it; give the code and reason if FlashInfer refuses it."""
    if config.form != "bundled":
        with loaded(config, path, stub) as refusal:
            yield refusal
        return
    autotuner = importlib.import_module("flashinfer.autotuner.autotuner")
    module_name: str = autotuner.get_config_path(is_module=True)
    stem = module_name.rpartition("flashinfer.tuning_configs.")[2]
    if "." in stem or "/" in stem:
        yield "not-importable", f"FlashInfer can't import a module named {stem}: '.' or '/' in the GPU's name"
        return
    if path.stem != stem:
        notes.append(f"replayed as {stem}.py, the only name FlashInfer looks for on {device}")
    shadowed = sys.modules.get(module_name)
    module = types.ModuleType(module_name)
    module.best_configs = dict(config.raw)  # type: ignore[attr-defined]
    sys.modules[module_name] = module
    try:
        with _bundled_configs(True):
            yield None
    finally:
        del sys.modules[module_name]
        if shadowed is not None:
            sys.modules[module_name] = shadowed


def without_bundled_configs() -> contextlib.AbstractContextManager[None]:
    """Keep FlashInfer from answering out of its bundled configs."""
    return _bundled_configs(False)


@contextlib.contextmanager
def _bundled_configs(read_them: bool) -> Iterator[None]:
    """Say whether FlashInfer reads its bundled configs."""
    before = os.environ.get(ENV_BUNDLED)
    os.environ[ENV_BUNDLED] = "1" if read_them else "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[ENV_BUNDLED]
        else:
            os.environ[ENV_BUNDLED] = before


def _load_json(path: Path, config: Config, stub: StubbedFlashInfer) -> tuple[str, str] | None:
    autotuner = importlib.import_module("flashinfer.autotuner.autotuner")
    try:
        if stub.tuner.load_configs(str(path)):
            return None
    except Exception as e:
        return "load-error", f"FlashInfer's load_configs raises {type(e).__name__}: {_first_line(e)}; see synth check"
    hard, soft = autotuner._classify_metadata_mismatches(config.metadata, autotuner._collect_metadata())
    differing = ", ".join(f"{k} is {old!r}, here {new!r}" for k, (old, new) in {**hard, **soft}.items())
    return "metadata", f"FlashInfer ignores the whole file: {differing}"


def _layers(tally: _Tally, version: str) -> list[_Layer]:
    """Group the keys by call; keys that no call can ask for become misses."""
    layers: dict[object, _Layer] = {}
    for text, key in tally.keys.items():
        dead = unreachable(key, version)
        if dead is not None and not (dead.code in _ASKED_ANYWAY and _is_askable(key, version)):
            tally.miss(text, dead.code, dead.message)
            continue
        stage = key.stage or 1
        layer = layers.setdefault((key.call.shapes, repr(key.extras)), _Layer(key.named(version), key.shapes))
        here = layer.by_bucket[key.bucket]
        # Of entries that differ only in runner or spelling, FlashInfer can ask for one at most.
        if stage in here and dead is not None:
            tally.miss(text, dead.code, dead.message)
            continue
        if stage in here and (other := unreachable(tally.keys[here[stage]], version)) is not None:
            tally.miss(here[stage], other.code, other.message)
        here[stage] = text
    return list(layers.values())


#: Dead keys for which FlashInfer itself is asked, to see it ask for another. For the others no call can be made, or
#: only one that the kernel refuses.
_ASKED_ANYWAY = ("key-runner", "key-spelling")


def _is_askable(key: Key, version: str) -> bool:
    fits = key.call.fits(contract_for(version)) and len(key.call.shapes) == 5
    return fits and key.stage is not None and key.bucket >= 1


def _plan(layers: Iterable[_Layer]) -> dict[int, list[tuple[_Layer, int, int]]]:
    """Return maximum → (layer, tokens, bucket that the tokens belong to)."""
    plan: dict[int, dict[tuple[int, int], tuple[_Layer, int, int]]] = defaultdict(dict)
    for layer in layers:
        for bucket in layer.by_bucket:
            on_grid = is_grid_bucket(bucket)
            grid = token_buckets(bucket)
            before = grid[-2] if len(grid) > 1 else 0
            for tokens in {before + 1, max(before + 1, bucket - 1), bucket}:
                maxima = {m for m in SERVER_MAX_TOKENS if m >= bucket} | {next_power_of_2(tokens)} if on_grid else set()
                for maximum in maxima or {bucket}:
                    if map_to_bucket(tokens, maximum) == bucket:
                        plan[maximum][id(layer), tokens] = (layer, tokens, bucket)
            if not on_grid or bucket in SERVER_MAX_TOKENS:
                for tokens in (bucket + 1, 2 * bucket):
                    plan[bucket][id(layer), tokens] = (layer, tokens, bucket)
    return {maximum: list(plan[maximum].values()) for maximum in sorted(plan)}


def _ask(stub: StubbedFlashInfer, tally: _Tally, layers: list[_Layer], version: str) -> None:
    for maximum, calls in _plan(layers).items():
        stub.restart()
        for layer, tokens, bucket in calls:
            tally.calls += 1
            keys = layer.by_bucket[bucket]
            tally.lookups += len(keys)
            try:
                served, table = _call(stub, layer, tokens, maximum)
            except Exception as e:
                for key in keys.values():
                    tally.miss(key, "call-refused", f"FlashInfer refuses the call: {_first_line(e)}")
                continue
            for stage, key in keys.items():
                _judge(stub, tally, layer, tokens, maximum, stage, key, served[stage - 1], table)
            new = [(stage, key) for stage, key in keys.items() if key not in tally.asked]
            for stage, key in new:
                tally.asked.add(key)
                tally.reprofiled += _is_reprofiled(stub, layer, stage, tokens)


def _call(
    stub: StubbedFlashInfer, layer: _Layer, tokens: int, maximum: int
) -> tuple[tuple[object, object], TacticTable | None]:
    """Call FlashInfer's operation as the engine does; return the tactics that reach the kernel."""
    torch = importlib.import_module("torch")
    e = layer.extras
    x, w1, b1, w2, b2 = _tensors(layer, tokens)
    stub.cutlass_fused_moe(
        x,
        torch.empty((tokens, e["top_k"]), dtype=torch.int32, device="meta"),
        torch.empty((tokens, e["top_k"]), dtype=torch.float32, device="meta"),
        w1,
        w2,
        _dtype(e["output_dtype"]),
        [],
        fc1_expert_biases=b1,
        fc2_expert_biases=b2,
        tune_max_num_tokens=maximum,
        activation_type=_activation(e["activation_type"]),
        **{name: e[name] for name in _PASSED if name in e},
    )
    runner = next(r for r in stub.runners if r.served is not None)
    served, runner.served = runner.served or (None, None), None
    return served, runner.table


#: The extras that a caller passes by name; dtypes and top_k come from the tensors, enable_pdl from the GPU.
_PASSED = (
    "tp_size",
    "ep_size",
    "cluster_size",
    "enable_alltoall",
    "use_deepseek_fp8_block_scale",
    "use_w4_group_scaling",
    "use_mxfp8_act_scaling",
    "use_wfp4afp8_humming",
    "min_latency_mode",
    "use_packed_weights",
    "use_fused_finalize",
)


def _tensors(layer: _Layer, tokens: int) -> list[Any]:
    e = layer.extras
    weights = _dtype(e["weight_dtype"])
    dtypes = (_dtype(e["x_dtype"]), weights, _dtype(BF16), weights, _dtype(BF16))
    shapes = ((tokens, *layer.shapes[0][1:]), *layer.shapes[1:])
    return [_tensor(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]


@functools.lru_cache(maxsize=4096)
def _tensor(shape: tuple[int, ...], dtype: Any) -> Any:
    """Return a tensor without storage; an absent bias, (0,), is None."""
    return None if shape == (0,) else importlib.import_module("torch").empty(shape, dtype=dtype, device="meta")


def _dtype(name: object) -> Any:
    torch = importlib.import_module("torch")
    value = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(value, torch.dtype):
        raise SynthError(f"torch has no dtype {name}")
    return value


def _activation(number: object) -> Any:
    return importlib.import_module("flashinfer.tllm_enums").ActivationType(number)


def _judge(
    stub: StubbedFlashInfer,
    tally: _Tally,
    layer: _Layer,
    tokens: int,
    maximum: int,
    stage: int,
    key: str,
    served: object,
    table: TacticTable | None,
) -> None:
    wanted = tally.tactics[key]
    ids = table.ids(stage) if table is not None else None
    if type(served) is not int:
        tally.miss(key, "tactic-type", f"the tactic is {served!r}, not a number; the kernel refuses it")
    elif served == -1 and not _is_hit(stub, layer, stage, tokens):
        tally.miss(key, "not-found", _difference(stub, tally, layer, tokens, stage, key))
    elif served != wanted:
        tally.miss(
            key,
            "wrong-tactic",
            f"{tokens} tokens with a maximum of {maximum} are served tactic {served}, the file says {wanted!r}",
        )
    elif ids is not None and served != -1 and served not in ids:
        tally.miss(
            key, "id-out-of-range", f"gemm{stage} has ids {ids[0]} to {ids[-1]}, not {served}; the kernel raises"
        )
    else:
        tally.hits += 1


def _lookup_arguments(stub: StubbedFlashInfer, layer: _Layer, stage: int, tokens: int) -> tuple[Any, ...]:
    """Return what ``cutlass_fused_moe`` passes to ``AutoTuner.search_cache``."""
    e = layer.extras
    runner = stub.runner_class(
        x_dtype=_dtype(e["x_dtype"]),
        weight_dtype=_dtype(e["weight_dtype"]),
        output_dtype=_dtype(e["output_dtype"]),
        top_k=e["top_k"],
        tp_rank=0,
        ep_rank=0,
        cluster_rank=0,
        enable_pdl=arch_number(stub.arch) >= 90,
        activation_type=_activation(e["activation_type"]),
        **{name: e[name] for name in _PASSED},
    )
    tensors = _tensors(layer, tokens)
    shapes = tuple(stub.tuner._get_input_sizes(tensors))
    return OPS[stage], [runner], shapes, stub.runner_class.tuning_config, tensors


def _is_hit(stub: StubbedFlashInfer, layer: _Layer, stage: int, tokens: int) -> bool:
    return bool(stub.tuner.search_cache(*_lookup_arguments(stub, layer, stage, tokens))[0])


def _is_reprofiled(stub: StubbedFlashInfer, layer: _Layer, stage: int, tokens: int) -> bool:
    """Tell whether a server in its warm-up would time this key again."""
    arguments = _lookup_arguments(stub, layer, stage, tokens)
    stub.tuner.is_tuning_mode = True
    try:
        return not stub.tuner.search_cache(*arguments, require_profiling_policy=True)[0]
    finally:
        stub.tuner.is_tuning_mode = False


def _difference(stub: StubbedFlashInfer, tally: _Tally, layer: _Layer, tokens: int, stage: int, key: str) -> str:
    """Say in which field the key that FlashInfer asks for differs from the file's."""
    op, runners, shapes, config, tensors = _lookup_arguments(stub, layer, stage, tokens)
    asked_key = stub.tuner._get_cache_key(op, runners[0], shapes, config, runners[0].get_cache_key_extras(tensors))
    if asked_key.file_key == key:
        return _why_not_taken(stub, key)
    asked, mine = parse_key(asked_key.file_key), tally.keys[key]
    fields = _fields(mine)
    differing = [
        f"{name} is {fields.get(name)!r}, FlashInfer asks for {value!r}"
        for name, value in _fields(asked).items()
        if fields.get(name) != value
    ]
    return "; ".join(differing) or f"FlashInfer writes the key as {asked.text!r}"


def _fields(key: Key) -> Mapping[str, object]:
    names = ("x", "gemm1 weights", "gemm1 bias", "gemm2 weights", "gemm2 bias")
    return {
        "operation": key.op,
        "runner in the key": key.runner,
        **dict(zip(names, key.shapes, strict=False)),
        **key.named(installed_flashinfer()),
    }


def _why_not_taken(stub: StubbedFlashInfer, key: str) -> str:
    runner_name = stub.tuner._file_configs.get(key, (RUNNER,))[0]
    if runner_name != RUNNER:
        return f"the entry is for the runner {runner_name!r}, not {RUNNER}"
    return "FlashInfer asks for this key but does not take the entry"


def _first_line(e: BaseException) -> str:
    return (str(e).splitlines() or [""])[0] or type(e).__name__
