"""10,000 damaged files: check neither fails nor hangs, and calls none good that FlashInfer serves otherwise.

What FlashInfer serves is asked of FlashInfer itself, not of check: of ``AutoTuner.load_configs`` for JSON files and of
``ManagedAutotuneCache.lookup`` for stores; a module is read by Python's own parser. For each key of the undamaged file
the outcome is the tactic that the kernel gets, or the way in which it gets none. A damaged file is

- *equivalent* where every outcome is what it was;
- *undetectable* where those that changed are other tactics that can run: no file shows that another one was meant;
- *wrong* otherwise. Check must then refuse it, or find an error or a warning.
"""

from __future__ import annotations

import ast
import contextlib
import json
import random
import shutil
import signal
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flashinfer.autotuner")

from flashinfer.autotune_cache import ManagedAutotuneCache
from flashinfer.autotuner import autotuner

from synth.catalog.shapes import Deployment, MoEShape
from synth.checking.check import check
from synth.configs.model import BUNDLED_PREFIX, Entry
from synth.configs.module import dumps_bundled
from synth.configs.v1 import dumps_json
from synth.errors import SynthError
from synth.flashinfer.buckets import token_buckets
from synth.flashinfer.keys import file_keys
from synth.flashinfer.legality import runnable_ids, smem_block_bytes
from synth.flashinfer.tactics import load_table
from synth.flashinfer.versions import POLICY, build_metadata
from synth.gpu.stub import stubbed_gpu

#: Damaged files of each kind; 10,000 in all.
JSON_FILES, MODULES, STORES = 6000, 2500, 1500
#: Seconds after which check counts as hanging. The slowest of the 10,000 takes a tenth of one.
PATIENCE_S = 20

LAYERS = {
    "NVIDIA H200": ("sm90", Deployment("olmoe", 1, 1, "bf16", "swiglu", False, MoEShape(2048, 1024, 64, 8))),
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": (
        "sm120",
        Deployment("deepseek-v3", 8, 1, "nvfp4", "swiglu", False, MoEShape(7168, 256, 256, 8)),
    ),
}
MAX_TOKENS = 16

#: What a key's lookup comes to: the tactic that is served, or why none is.
Outcome = int | str
Lookup = Callable[[str], Outcome]


class Case:
    """One device's undamaged entries, and what may be served for each key."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.arch, self.layer = LAYERS[device]
        table = load_table(self.arch, self.layer.quant)
        smem = smem_block_bytes(device, self.arch)
        self.runnable: dict[str, frozenset[int]] = {}
        self.entries: list[Entry] = []
        for stage in (1, 2):
            ids = runnable_ids(table, stage, self.layer.shape, smem)
            for i, bucket in enumerate(token_buckets(MAX_TOKENS)):
                for key in file_keys(self.layer, "vllm", bucket, stage, self.arch):
                    self.entries.append(Entry(key, ids[i % len(ids)], 0.25, 0.5, 1.0, 45))
                    # -1 is another name of the stage's first tactic; check notes it.
                    self.runnable[key] = frozenset((-1, *ids))
        self.metadata = build_metadata(device, provenance={"synth": "0.1.0", "entries": {"measured": 10}})

    def is_wrong(self, lookup: Lookup) -> bool:
        """Tell whether a damaged file is neither equivalent nor undetectable."""
        changed = [(e.text, found) for e in self.entries if (found := lookup(e.text)) != e.tactic_id]
        return any(not (type(found) is int and found in self.runnable[key]) for key, found in changed)

    def outcome(self, runner: object, tactic: object, policy: object) -> Outcome:
        if runner != "MoERunner":
            return "passed over"
        if policy is not None and policy != POLICY:
            return "tuned anew"
        return tactic if type(tactic) is int else "refused by the kernel"


# ---- what is served ----------------------------------------------------------------------------------------


def json_lookup(case: Case, path: Path, tuner: Any) -> Lookup:
    tuner._file_configs.clear()
    tuner._file_config_policies.clear()
    try:
        if not tuner.load_configs(str(path)):
            return lambda key: "file ignored"
    except Exception as e:
        error = type(e).__name__
        return lambda key: error

    def lookup(key: str) -> Outcome:
        if key not in tuner._file_configs:
            return "not found"
        return case.outcome(*tuner._file_configs[key], tuner._file_config_policies.get(key))

    return lookup


def module_lookup(case: Case, data: bytes) -> Lookup | None:
    """Return what a module serves, None where that can't be told without executing it."""
    try:
        tree = ast.parse(data)
    except (SyntaxError, ValueError):
        return lambda key: "no module"
    assigned = [n for n in tree.body if not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))]
    if len(assigned) != 1 or not isinstance(assigned[0], ast.Assign):
        return None
    try:
        found = ast.literal_eval(assigned[0].value)
    except ValueError:
        return None
    except TypeError:
        return lambda key: "no module"
    if ast.unparse(assigned[0].targets[0]) != "best_configs":
        return lambda key: "no configs"

    def lookup(key: str) -> Outcome:
        try:
            return case.outcome("MoERunner", (found[key][0], found[key][1])[1], None) if key in found else "not found"
        except Exception as e:
            return type(e).__name__

    return lookup


def store_lookup(case: Case, root: Path, environment: Mapping[str, str]) -> Lookup:
    cache = ManagedAutotuneCache(dict(environment), root)

    def lookup(key: str) -> Outcome:
        entry = cache.lookup(key)
        if entry is None:
            return "not found"
        return case.outcome(
            entry.runner, entry.tactic, "unknown" if entry.profiling_policy is None else entry.profiling_policy
        )

    return lookup


# ---- damage ------------------------------------------------------------------------------------------------

_JUNK: tuple[object, ...] = (
    None, True, False, 0, -1, -2, 1, 3, 44, 45, 46, 125, 126, 127, 10**30,
    1.5, float("nan"), float("inf"), "", "x", "3",
    "MoERunner", [], [1, 2], ["MoERunner"], {}, {"a": {"b": [{}]}}, [[[[[]]]]], "\x1b[31m",
    "\ud800", "unknown", "*",
)  # fmt: skip
_TEXTS = (
    b"\0", b"\xff", b"\xef\xbb\xbf",
    b"NaN", b"1e999", b"-", b"[" * 70, b"]" * 3, b"{" * 200, b"}", b'"', b"'", b",", b":",
    b"\\", b"\\ud800", b"__import__('os')", b"\n", b"\n#", b"9" * 1200, b"1+" * 300, b"/*", b"None", b"true",
    b"\xe2\x80\xae",
)  # fmt: skip
_DTYPES = (
    "torch.bfloat16",
    "torch.float16",
    "torch.float8_e4m3fn",
    "torch.uint8",
    "torch.int64",
    "torch.x",
    "8",
    "True",
)


def damage_bytes(rng: random.Random, data: bytes) -> bytes:
    if not data:
        return data
    at = rng.randrange(len(data))
    end = min(len(data), at + rng.choice((1, 1, 2, 5, 40, 400)))
    how = rng.randrange(7)
    if how == 0:
        return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
    if how == 1:
        return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
    if how == 2:
        return data[:at] + data[end:]
    if how == 3:
        return data[:end] + data[at:end] * rng.choice((1, 1, 3, 30)) + data[end:]
    if how == 4:
        return data[:at] + rng.choice(_TEXTS) + data[at:]
    if how == 5:
        return data[:at]
    other = rng.randrange(len(data))
    low, high = sorted((at, other))
    return data[:low] + data[high:] + data[low:high]


def damage_key(rng: random.Random, key: str) -> str:
    how = rng.randrange(8)
    if how == 0:
        return key.replace(rng.choice(("torch.bfloat16", "torch.uint8", "torch.int64")), rng.choice(_DTYPES), 1)
    if how == 1:
        return key.replace("gemm1", rng.choice(("gemm2", "gemm3", "gemm 1")))
    if how == 2:
        return (
            key.replace("True", "False", 1) if rng.random() < 0.5 else key.replace("False", "True", rng.randrange(1, 7))
        )
    if how == 3:
        return key.replace(" ", rng.choice(("", "  ", "\t")), rng.randrange(1, 9))
    numbers = [i for i, c in enumerate(key) if c.isdigit() and not key[i - 1].isalnum()]
    if how == 4 and numbers:
        at = rng.choice(numbers)
        return key[:at] + rng.choice(("0", "-", "1", "99999999999", "7", "1_", "0x1")) + key[at + rng.randrange(2) :]
    if how == 5:
        return key.replace("MoERunner", rng.choice(("MoERunner ", "Other", "")))
    parts = key.split(", ")
    at = rng.randrange(len(parts))
    if how == 6:
        del parts[at]
    else:
        parts.insert(at, rng.choice(parts))
    return ", ".join(parts)


def damage_object(rng: random.Random, content: dict[str, Any]) -> dict[str, Any]:
    keys = [k for k in content if k != "_metadata"]
    if not keys:
        return content
    key = rng.choice(keys)
    how = rng.randrange(10)
    if how == 0:
        del content[key]
    elif how == 1:
        renamed = damage_key(rng, key)
        content = {renamed if k == key else k: v for k, v in content.items()}
    elif how == 2:
        content[damage_key(rng, key)] = content[key]
    elif how == 3:
        content[key] = rng.choice(_JUNK)
    elif how in (4, 5) and isinstance(content[key], list) and content[key]:
        content[key][rng.randrange(len(content[key]))] = rng.choice(_JUNK)
    elif how == 6 and isinstance(content[key], list) and len(content[key]) > 1:
        content[key][1] = rng.randrange(-3, 140)
    elif how == 7 and isinstance(content.get("_metadata"), dict) and content["_metadata"]:
        name = rng.choice(list(content["_metadata"]))
        if rng.random() < 0.3:
            del content["_metadata"][name]
        else:
            content["_metadata"][name] = rng.choice((*_JUNK, "0.7.2", "99.0.0", "NVIDIA B200"))
    elif how == 8:
        content[rng.choice(("_metadata", "_records", "_generation", "_new", ""))] = rng.choice(_JUNK)
    else:
        content[key] = content[rng.choice(keys)]
    return content


def damage_json(rng: random.Random, data: bytes) -> bytes:
    for _ in range(rng.choice((1, 1, 2, 3))):
        content = None
        if rng.random() < 0.6:
            with contextlib.suppress(ValueError):
                content = json.loads(data)
        if isinstance(content, dict):
            data = json.dumps(damage_object(rng, content), indent=rng.choice((None, 1))).encode()
            if rng.random() < 0.1:
                again = json.dumps(rng.choice(list(content) or ["x"]))
                data = data.rstrip().removesuffix(b"}") + f", {again}: {json.dumps(rng.choice(_JUNK))}}}".encode()
        else:
            data = damage_bytes(rng, data)
    return data


def damage_module(rng: random.Random, data: bytes) -> bytes:
    for _ in range(rng.choice((1, 1, 2))):
        lines = data.split(b"\n")
        entries = [i for i, line in enumerate(lines) if b"fused_moe" in line]
        if rng.random() < 0.5 or not entries:
            data = damage_bytes(rng, data)
            continue
        at = rng.choice(entries)
        how = rng.randrange(5)
        if how == 0:
            lines[at] = damage_key(rng, lines[at].decode("utf-8", "replace")).encode()
        elif how == 1:
            lines[at] = lines[at].rpartition(b"(")[0] + repr(rng.choice(_JUNK)).encode("utf-8", "replace") + b","
        elif how == 2:
            lines[at] = lines[at].rpartition(b"(")[0] + f"(0, {rng.randrange(-3, 140)}),".encode()
        elif how == 3:
            lines[at] = lines[rng.choice(entries)]
        else:
            lines.insert(
                at, rng.choice((lines[rng.choice(entries)], b"    # x", b"    **{},", b"import os", b"    1: 2,"))
            )
        data = b"\n".join(lines)
    return data


def damage_store(rng: random.Random, folder: Path) -> None:
    """Damage a store in place."""
    entries = folder / "entries"
    for _ in range(rng.choice((1, 1, 2))):
        files = sorted(f for f in entries.iterdir() if f.is_file())
        if not files:
            return
        file = rng.choice(files)
        how = rng.randrange(8)
        if how == 0:
            file.unlink()
        elif how == 1:
            file.rename(file.with_name(rng.choice(("0" * 24 + ".json", file.name + ".tmp", "x.json"))))
        elif how == 2:
            file.write_bytes(rng.choice(files).read_bytes())
        elif how == 3:
            target = rng.choice([*files, folder / "manifest.json"])
            target.write_bytes(damage_bytes(rng, target.read_bytes()))
        elif how == 4:
            manifest = None
            with contextlib.suppress(OSError, ValueError):
                manifest = json.loads((folder / "manifest.json").read_bytes())
            if isinstance(manifest, dict) and manifest:
                manifest[rng.choice(list(manifest))] = rng.choice(("*", "unknown", None, 3, "9.9.9", {}))
                (folder / "manifest.json").write_text(json.dumps(manifest))
                if rng.random() < 0.5:
                    # A store that is whole, but another environment's.
                    name = ManagedAutotuneCache(
                        {k: v for k, v in manifest.items() if k != "cache_schema"}, folder
                    ).env_hash
                    folder.rename(folder.with_name(name))
                    return
        else:
            try:
                entry = json.loads(file.read_bytes())
            except ValueError:
                continue
            if isinstance(entry, dict) and entry:
                field = rng.choice(list(entry))
                if rng.random() < 0.2:
                    del entry[field]
                elif field == "key" and isinstance(entry["key"], str) and rng.random() < 0.7:
                    entry["key"] = damage_key(rng, entry["key"])
                elif field == "tactic" and rng.random() < 0.6:
                    entry["tactic"] = rng.randrange(-3, 140)
                else:
                    entry[field] = rng.choice(_JUNK)
                file.write_text(json.dumps(entry))


# ---- the test ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def patience() -> Iterator[None]:
    def hangs(_signal: int, _frame: types.FrameType | None) -> None:
        raise TimeoutError(f"check says nothing for {PATIENCE_S} s")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(PATIENCE_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def verdict(path: Path, environment: Mapping[str, str]) -> str:
    """Return what check says: refused, bad or good. Anything but a SynthError is an error of check."""
    with patience(), warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            findings = check(path, device=environment["gpu"], environment=environment, max_tokens=[MAX_TOKENS])
        except SynthError as e:
            assert "\n" not in str(e)
            return "refused"
    assert all((f.message + f.way_out).isprintable() for f in findings)
    return "bad" if any(f.severity != "note" for f in findings) else "good"


def judge(seen: Counter[str], said: str, wrong: bool | None, seed: int, shown: object) -> None:
    """Count a file; `wrong` is None where it can't be told without executing the file, which check has to refuse."""
    if wrong is None:
        assert said == "refused", f"seed {seed}: code is {said}: {shown!r}"
    elif wrong:
        assert said != "good", f"seed {seed}: FlashInfer serves something else, and check calls it good: {shown!r}"
    seen[f"{'code' if wrong is None else 'wrong' if wrong else 'harmless'}, {said}"] += 1


def has_both_sides(seen: Counter[str], total: int, refused: float = 0.1) -> None:
    """The test means something only if damage of every kind was met, and check doesn't refuse everything."""
    assert sum(seen.values()) == total
    assert seen["harmless, good"] > total / 100
    assert seen["wrong, bad"] > total / 10
    assert seen["wrong, refused"] > total * refused


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep FlashInfer from logging every damaged file."""
    monkeypatch.setattr(autotuner.logger, "disabled", True)


@pytest.mark.parametrize("device", LAYERS)
def test_damaged_json_files(tmp_path: Path, device: str) -> None:
    case = Case(device)
    good = dumps_json(case.metadata, case.entries)
    path = tmp_path / "config.json"
    seen: Counter[str] = Counter()
    with stubbed_gpu(device, case.arch) as stub:
        environment = dict(autotuner._collect_metadata())
        path.write_bytes(good)
        assert not case.is_wrong(json_lookup(case, path, stub.tuner)) and verdict(path, environment) == "good"
        for seed in range(JSON_FILES // len(LAYERS)):
            data = damage_json(random.Random(seed), good)
            path.write_bytes(data)
            wrong = case.is_wrong(json_lookup(case, path, stub.tuner))
            judge(seen, verdict(path, environment), wrong, seed, data)
    has_both_sides(seen, JSON_FILES // len(LAYERS))


@pytest.mark.parametrize("device", LAYERS)
def test_damaged_modules(tmp_path: Path, device: str) -> None:
    case = Case(device)
    good = dumps_bundled(case.metadata, case.entries)
    path = tmp_path / f"{BUNDLED_PREFIX}{device.replace(' ', '_')}.py"
    environment = {"gpu": device}
    seen: Counter[str] = Counter()
    path.write_bytes(good)
    assert verdict(path, environment) == "good"
    for seed in range(MODULES // len(LAYERS)):
        data = damage_module(random.Random(seed), good)
        path.write_bytes(data)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            lookup = module_lookup(case, data)
        judge(seen, verdict(path, environment), case.is_wrong(lookup) if lookup else None, seed, data)
    has_both_sides(seen, MODULES // len(LAYERS))


@pytest.mark.parametrize("device", LAYERS)
def test_damaged_stores(tmp_path: Path, device: str) -> None:
    case = Case(device)
    environment = {**dict.fromkeys(case.metadata, "1.2.3"), "flashinfer_version": "0.7.4", "gpu": device}
    del environment["synth"]
    cache = ManagedAutotuneCache(environment, tmp_path / "good")
    for entry in case.entries:
        cache.publish(entry.text, "MoERunner", entry.tactic_id, profiling_policy=POLICY)
    assert verdict(tmp_path / "good", environment) == "good"
    files = {p.relative_to(cache.root): p.read_bytes() for p in cache.root.rglob("*.json")}
    seen: Counter[str] = Counter()
    root = tmp_path / "damaged"
    for seed in range(STORES // len(LAYERS)):
        (root / "v2" / cache.env_hash / "entries").mkdir(parents=True)
        for name, data in files.items():
            (root / name).write_bytes(data)
        damage_store(random.Random(seed), root / "v2" / cache.env_hash)
        wrong = case.is_wrong(store_lookup(case, root, environment))
        judge(seen, verdict(root, environment), wrong, seed, sorted(p.name for p in root.rglob("*")))
        shutil.rmtree(root)
    # FlashInfer passes damaged files of a store over one by one, and so does check.
    has_both_sides(seen, STORES // len(LAYERS), refused=0.0)
