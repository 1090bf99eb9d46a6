"""Ask FlashInfer on a stubbed GPU for every key of a config, judge what it serves, and explain what it doesn't."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from synth.catalog.untrusted import first_line
from synth.configs.model import Config
from synth.configs.replayed import Miss
from synth.flashinfer.buckets import is_grid_bucket, map_to_bucket, next_power_of_2, token_buckets
from synth.flashinfer.calls import BF16, SERVER_MAX_TOKENS, Extra
from synth.flashinfer.keys import Key, parse_key
from synth.flashinfer.reachability import unreachable
from synth.flashinfer.tactics import TacticTable
from synth.flashinfer.versions import OPS, RUNNER, arch_of, contract_for
from synth.gpu.libraries import dtype, installed_flashinfer, load_core, load_torch, moe_runner
from synth.gpu.stub import StubbedFlashInfer

#: Dead keys for which FlashInfer itself is asked, to see it ask for another. For the others no call can be made, or
#: only one that the kernel refuses.
_ASKED_ANYWAY = ("key-runner", "key-spelling")
#: The extras that a caller doesn't pass by name: FlashInfer takes them from the tensors, or from the GPU.
_NOT_PASSED = ("x_dtype", "weight_dtype", "output_dtype", "top_k", "enable_pdl", "activation_type")


@dataclass
class _Layer:
    """Every key of one layer and call, and the call's fixed arguments."""

    extras: Mapping[str, Extra]
    shapes: tuple[tuple[int, ...], ...]
    by_bucket: dict[int, dict[int, str]] = field(default_factory=lambda: defaultdict(dict))


@dataclass(frozen=True)
class _Call:
    """One call of a layer, as a server with this maximum token count makes it."""

    layer: _Layer
    tokens: int
    bucket: int
    maximum: int

    @property
    def tensors(self) -> list[Any]:
        """x, gemm1's weights and bias, gemm2's weights and bias."""
        extras, (x, *others) = self.layer.extras, self.layer.shapes
        weights = extras["weight_dtype"]
        shapes, names = ((self.tokens, *x[1:]), *others), (extras["x_dtype"], weights, BF16, weights, BF16)
        return [_tensor(shape, str(name)) for shape, name in zip(shapes, names, strict=True)]


class Asking:
    """The lookups of a config's keys, and what came of them.

    Parameters
    ----------
    config : Config

    Attributes
    ----------
    keys : dict of str to Key
        Those that can be read.
    misses : dict
        (key, code) → miss.
    lookups, hits, calls, reprofiled : int
        See :class:`synth.gpu.replay.ReplayReport`.
    """

    def __init__(self, config: Config) -> None:
        self.keys = {entry.text: entry.key for entry in config.entries if entry.key is not None}
        self._unreadable = {entry.text: entry.problem for entry in config.entries if entry.key is None}
        self.misses: dict[tuple[str, str], Miss] = {}
        self.lookups = self.hits = self.calls = self.reprofiled = 0
        # As they are in the file: some may be no number.
        self._tactics = {text: _second(value) for text, value in config.raw.items()}
        self._asked: set[str] = set()

    def refuse(self, code: str, reason: str) -> None:
        """Count every key as a miss: FlashInfer refuses the whole file."""
        for key in self._tactics:
            self._miss(key, code, reason)

    def ask(self, stub: StubbedFlashInfer) -> None:
        """Look every key up in the config that FlashInfer has loaded."""
        for key, reason in self._unreadable.items():
            self._miss(key, "unreadable-key", reason)
        for calls in _plan(self._layers()).values():
            stub.restart()
            for call in calls:
                self._ask(stub, call)

    def _miss(self, key: str, code: str, reason: str) -> None:
        old = self.misses.get((key, code))
        self.misses[key, code] = Miss(key, code, old.reason if old else reason, old.lookups + 1 if old else 1)

    def _layers(self) -> list[_Layer]:
        """Group the keys by call; keys that no call can ask for become misses."""
        version = installed_flashinfer()
        layers: dict[object, _Layer] = {}
        found = [(text, key, unreachable(key, version)) for text, key in self.keys.items()]
        # Of entries that differ only in runner or spelling, FlashInfer can ask for one at most; the right one is first.
        for text, key, dead in sorted(found, key=lambda item: item[2] is not None):
            if dead is not None and not (dead.code in _ASKED_ANYWAY and _is_askable(key, version)):
                self._miss(text, dead.code, dead.message)
                continue
            layer = layers.setdefault((key.call.shapes, repr(key.extras)), _Layer(key.named(version), key.shapes))
            here, stage = layer.by_bucket[key.bucket], key.stage or 1
            if dead is not None and stage in here:
                self._miss(text, dead.code, dead.message)
            else:
                here[stage] = text
        return list(layers.values())

    def _ask(self, stub: StubbedFlashInfer, call: _Call) -> None:
        self.calls += 1
        keys = call.layer.by_bucket[call.bucket]
        self.lookups += len(keys)
        try:
            served, table = _served(stub, call)
        except Exception as e:
            for key in keys.values():
                self._miss(key, "call-refused", f"FlashInfer refuses the call: {first_line(e)}")
            return
        for stage, key in keys.items():
            fault = self._fault(stub, call, stage, key, served[stage - 1], table)
            if fault is None:
                self.hits += 1
            else:
                self._miss(key, *fault)
        for stage, key in keys.items():
            if key not in self._asked:
                self._asked.add(key)
                self.reprofiled += _is_reprofiled(stub, call, stage)

    def _fault(
        self, stub: StubbedFlashInfer, call: _Call, stage: int, key: str, served: object, table: TacticTable | None
    ) -> tuple[str, str] | None:
        """Return code and reason where the served tactic isn't the file's, None where it is."""
        wanted = self._tactics[key]
        if type(served) is not int:
            return "tactic-type", f"the tactic is {served!r}, not a number; the kernel refuses it"
        if served == -1 and not stub.tuner.search_cache(*_lookup(stub, call, stage))[0]:
            return "not-found", self._difference(stub, call, stage, key)
        if served != wanted:
            return "wrong-tactic", (
                f"{call.tokens} tokens with a maximum of {call.maximum} are served tactic {served}, "
                f"the file says {wanted!r}"
            )
        if table is not None and served != -1 and served not in (ids := table.ids(stage)):
            return "id-out-of-range", f"gemm{stage} has ids {ids[0]} to {ids[-1]}, not {served}; the kernel raises"
        return None

    def _difference(self, stub: StubbedFlashInfer, call: _Call, stage: int, key: str) -> str:
        """Say in which field the key that FlashInfer asks for differs from the file's."""
        op, (runner,), shapes, config, tensors = _lookup(stub, call, stage)
        text = stub.tuner._get_cache_key(op, runner, shapes, config, runner.get_cache_key_extras(tensors)).file_key
        if text == key:
            theirs = stub.tuner._file_configs.get(key, (RUNNER,))[0]
            if theirs != RUNNER:
                return f"the entry is for the runner {theirs!r}, not {RUNNER}"
            return "FlashInfer asks for this key but does not take the entry"
        fields = _fields(self.keys[key])
        differing = [
            f"{name} is {fields.get(name)!r}, FlashInfer asks for {value!r}"
            for name, value in _fields(parse_key(text)).items()
            if fields.get(name) != value
        ]
        return "; ".join(differing) or f"FlashInfer writes the key as {text!r}"


def arch_for(keys: Iterable[Key], device: str) -> str:
    """Return the architecture of a GPU of the catalogue, else one that has kernels for the keys."""
    if (known := arch_of(device)) is not None:
        return known
    version = installed_flashinfer()
    quants = {key.quant(version) for key in keys if unreachable(key, version) is None}
    return "sm120" if quants - {None, "bf16", "fp8"} else "sm90"


def _second(value: object) -> object:
    return value[1] if isinstance(value, (list, tuple)) and len(value) > 1 else None


def _is_askable(key: Key, version: str) -> bool:
    fits = key.call.fits(contract_for(version)) and len(key.call.shapes) == 5
    return fits and key.stage is not None and key.bucket >= 1


def _plan(layers: Iterable[_Layer]) -> dict[int, list[_Call]]:
    """Return the calls by maximum token count, each layer's token counts once."""
    plan: dict[int, dict[tuple[int, int], _Call]] = defaultdict(dict)
    for layer in layers:
        for bucket in layer.by_bucket:
            on_grid = is_grid_bucket(bucket)
            grid = token_buckets(bucket)
            before = grid[-2] if len(grid) > 1 else 0
            for tokens in {before + 1, max(before + 1, bucket - 1), bucket}:
                maxima = {m for m in SERVER_MAX_TOKENS if m >= bucket} | {next_power_of_2(tokens)} if on_grid else set()
                for maximum in maxima or {bucket}:
                    if map_to_bucket(tokens, maximum) == bucket:
                        plan[maximum][id(layer), tokens] = _Call(layer, tokens, bucket, maximum)
            if not on_grid or bucket in SERVER_MAX_TOKENS:
                for tokens in (bucket + 1, 2 * bucket):
                    plan[bucket][id(layer), tokens] = _Call(layer, tokens, bucket, bucket)
    return {maximum: list(plan[maximum].values()) for maximum in sorted(plan)}


def _served(stub: StubbedFlashInfer, call: _Call) -> tuple[tuple[object, object], TacticTable | None]:
    """Call FlashInfer's operation as the engine does; return the tactics that reach the kernel."""
    torch, extras = load_torch(), call.layer.extras
    x, w1, b1, w2, b2 = call.tensors
    routed = call.tokens, extras["top_k"]
    stub.cutlass_fused_moe(
        x,
        torch.empty(routed, dtype=torch.int32, device="meta"),
        torch.empty(routed, dtype=torch.float32, device="meta"),
        w1,
        w2,
        dtype(extras["output_dtype"]),
        [],
        fc1_expert_biases=b1,
        fc2_expert_biases=b2,
        tune_max_num_tokens=call.maximum,
        activation_type=load_core().ActivationType(extras["activation_type"]),
        **{name: value for name, value in extras.items() if name not in _NOT_PASSED},
    )
    runner = next(r for r in stub.runners if r.served is not None)
    served, runner.served = runner.served or (None, None), None
    return served, runner.table


@functools.lru_cache(maxsize=4096)
def _tensor(shape: tuple[int, ...], dtype_name: str) -> Any:
    """Return a tensor without storage; an absent bias, (0,), is None."""
    return None if shape == (0,) else load_torch().empty(shape, dtype=dtype(dtype_name), device="meta")


def _lookup(stub: StubbedFlashInfer, call: _Call, stage: int) -> tuple[Any, ...]:
    """Return what ``cutlass_fused_moe`` passes to ``AutoTuner.search_cache``."""
    tensors = call.tensors
    runner = moe_runner(stub.runner_class, call.layer.extras, tensors[0].device)
    return OPS[stage], [runner], tuple(stub.tuner._get_input_sizes(tensors)), runner.tuning_config, tensors


def _is_reprofiled(stub: StubbedFlashInfer, call: _Call, stage: int) -> bool:
    """Tell whether a server in its warm-up would time this key again."""
    lookup = _lookup(stub, call, stage)
    stub.tuner.is_tuning_mode = True
    try:
        return not stub.tuner.search_cache(*lookup, require_profiling_policy=True)[0]
    finally:
        stub.tuner.is_tuning_mode = False


def _fields(key: Key) -> dict[str, object]:
    names = ("x", "gemm1 weights", "gemm1 bias", "gemm2 weights", "gemm2 bias")
    return {
        "operation": key.op,
        "runner in the key": key.runner,
        **dict(zip(names, key.shapes, strict=False)),
        **key.named(installed_flashinfer()),
    }
