"""Will FlashInfer use this file? Needs neither torch nor FlashInfer: it judges by the versioned contract."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from synth.catalog.legality import smem_block_bytes, why_not
from synth.catalog.tactics import DEFAULT_FLASHINFER, TacticTable, load_tables
from synth.errors import SynthError
from synth.flashinfer.contract import (
    ACTIVATION_TYPES,
    POLICY,
    RUNNER,
    ParsedKey,
    arch_of,
    contract_for,
    is_grid_bucket,
    parse_file_key,
    token_buckets,
    unreachable,
)
from synth.flashinfer.formats import BUNDLED_PREFIX, RECORDS, ConfigFile, read

#: Severities, worst first: the entry or file is not served; it is, at a cost; worth knowing.
SEVERITIES = ("error", "warning", "note")
#: Below this top bucket a server with FlashInfer's default maximum falls back for its largest batches.
_USUAL_MAX_TOKENS = 8192
_INDETERMINATE = (None, "unknown", "None")


@dataclass(frozen=True)
class Finding:
    """Something that FlashInfer will trip over.

    Attributes
    ----------
    code : str
        Stable name of the kind of finding.
    key : str
        The entry's key, ``""`` for the file as a whole.
    message : str
        What is wrong, one line.
    way_out : str
        What to do about it, one line.
    severity : str
        One of :data:`SEVERITIES`.
    """

    code: str
    key: str
    message: str
    way_out: str
    severity: str = "error"


@dataclass(frozen=True)
class FindingGroup:
    """Findings of one code: how many, and the first as an example."""

    code: str
    severity: str
    count: int
    example: Finding


def check(
    path: Path,
    flashinfer: str = DEFAULT_FLASHINFER,
    *,
    device: str | None = None,
    arch: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> list[Finding]:
    """Return everything that keeps FlashInfer from using `path`, file-wide findings first.

    Parameters
    ----------
    path : Path
        A v1 JSON file, or a bundled ``.py``.
    flashinfer : str
        The version that is to use the file.
    device : str, optional
        The GPU's name; by default the one in the metadata.
    arch : str, optional
        The GPU's architecture; by default the catalogue's for `device`. Where it is not known, an id is out of
        range only if it is for every architecture.
    environment : mapping, optional
        What a running FlashInfer has for the metadata keys, to compare field by field. Keys that it lacks are
        not compared; `flashinfer` and `device` stand for theirs.

    Raises
    ------
    SynthError
        When the file can't be read at all, or the version is not known.
    """
    contract_for(flashinfer)
    config = read(path)
    device = device or config.gpu
    arch = arch or arch_of(device)
    expected = {"flashinfer_version": flashinfer, **({"gpu": device} if device else {}), **(environment or {})}
    findings = list(_check_file(config, path, flashinfer, expected))
    live: list[ParsedKey] = []
    for text, value in config.raw.items():
        findings += _check_value(config.kind, text, value)
        try:
            key = parse_file_key(text)
        except SynthError as e:
            findings.append(Finding("unreadable-key", text, str(e), "drop the entry"))
            continue
        dead = unreachable(key, flashinfer, arch)
        if dead is not None:
            findings.append(Finding(dead.code, text, dead.message, dead.way_out))
            continue
        live.append(key)
        findings += _check_bucket(key, flashinfer)
        findings += _check_id(key, _tactic(value), flashinfer, arch)
        findings += _check_legal(key, _tactic(value), flashinfer, device, arch)
    findings += _check_coverage(live, flashinfer, "note" if _count(config.metadata, "left_out") else "warning")
    if config.raw and not live:
        dead_file = f"the file is dead: FlashInfer {flashinfer} can look up none of its {len(config.raw)} keys"
        findings.insert(0, Finding("dead-file", "", dead_file, "write the file anew for this version"))
    return findings


def summary(findings: Iterable[Finding]) -> tuple[FindingGroup, ...]:
    """Group findings by code, worst and most frequent first.

    Examples
    --------
    >>> [(g.code, g.count) for g in summary([Finding("bucket", "k", "m", "w")] * 3)]
    [('bucket', 3)]
    """
    groups: dict[tuple[str, str], list[Finding]] = defaultdict(list)
    for finding in findings:
        groups[finding.severity, finding.code].append(finding)
    ordered = sorted(groups.items(), key=lambda g: (SEVERITIES.index(g[0][0]), -len(g[1]), g[0][1]))
    return tuple(FindingGroup(code, severity, len(found), found[0]) for (severity, code), found in ordered)


# ---- the file ----------------------------------------------------------------------------------------------


def _check_file(config: ConfigFile, path: Path, flashinfer: str, expected: Mapping[str, str]) -> Iterator[Finding]:
    if not config.raw:
        yield Finding("no-entries", "", "the file has no entries", "write it anew")
    analytical = _count(config.metadata, "entries", "analytical")
    if analytical:
        yield Finding(
            "analytical",
            "",
            f"{analytical} of {len(config.raw)} entries are analytical: nobody has measured them",
            "time some with synth collect; they are not for contributing",
            "note",
        )
    for key in config.duplicates:
        yield Finding("duplicate-key", key, "the key occurs more than once; the last one counts", "drop all but one")
    if config.kind == "bundled":
        yield from _check_bundled(path, expected.get("gpu"))
        return
    if not contract_for(flashinfer).metadata_keys:
        yield Finding("no-json", "", f"FlashInfer {flashinfer} reads no JSON configs", "write a bundled .py")
        return
    if not isinstance(config.special.get(RECORDS, {}), dict):
        yield Finding("crash", "", f"{RECORDS} is not an object: load_configs raises ValueError", f"drop {RECORDS}")
    yield from _check_metadata(config.metadata, flashinfer, expected)


def _check_metadata(metadata: object, flashinfer: str, expected: Mapping[str, str]) -> Iterator[Finding]:
    if metadata is None:
        yield Finding(
            "no-metadata",
            "",
            "no _metadata: FlashInfer takes the file on any GPU and version, where its ids mean other tactics",
            "add the metadata; synth emit writes it",
        )
        return
    if not isinstance(metadata, dict):
        yield Finding(
            "metadata-form",
            "",
            f"_metadata is {type(metadata).__name__}, not an object: FlashInfer rejects and later overwrites the file",
            "add the metadata; synth emit writes it",
        )
        return
    for name in contract_for(flashinfer).metadata_keys:
        saved = metadata.get(name)
        wanted = expected.get(name)
        if name not in metadata:
            yield Finding(
                "metadata-missing",
                "",
                f"_metadata lacks {name}: FlashInfer rejects the whole file and overwrites it at its next save",
                f'add "{name}": "*", or the exact value for flashinfer_version and gpu',
            )
        elif _in(saved, _INDETERMINATE):
            yield Finding(
                "metadata-unknown",
                "",
                f"{name} is {saved!r}: FlashInfer rejects the whole file where it knows its {name}, and overwrites it",
                f'set {name} to its value, or to "*" if it changes no tactic',
            )
        elif saved == "*":
            if name in ("flashinfer_version", "gpu"):
                yield Finding(
                    "metadata-wildcard",
                    "",
                    f"{name} is a wildcard: under another one the ids mean other tactics",
                    f"set {name} to its exact value",
                    "warning",
                )
        elif wanted is not None and saved != wanted:
            yield Finding(
                "metadata-mismatch",
                "",
                f"{name} is {saved!r}, the environment has {wanted!r}: FlashInfer rejects the whole file",
                "tune or emit for this environment",
            )
        elif wanted is None:
            yield Finding(
                "metadata-pinned",
                "",
                f"{name} is {saved!r}: FlashInfer rejects the whole file under any other",
                f'set {name} to "*" if it changes no tactic',
                "note",
            )


def _in(value: object, values: tuple[object, ...]) -> bool:
    return any(value is v or (isinstance(value, str) and value == v) for v in values)


def _check_bundled(path: Path, gpu: str | None) -> Iterator[Finding]:
    yield Finding(
        "bundled",
        "",
        "FlashInfer reads bundled files only with FLASHINFER_AUTOTUNER_LOAD_FROM_FILE=1, never while it tunes, and "
        "checks neither version nor GPU but for the file's name",
        "prefer the JSON form",
        "note",
    )
    named = path.stem.startswith(BUNDLED_PREFIX)
    device = gpu if gpu is not None else path.stem.removeprefix(BUNDLED_PREFIX) if named else ""
    if any(c in device for c in "./"):
        yield Finding(
            "not-importable",
            "",
            f"no module can be imported for {device!r}: '.' or '/' in the name",
            "use the JSON form",
        )
    elif not named or (gpu is not None and path.stem != BUNDLED_PREFIX + gpu.replace(" ", "_")):
        expected = BUNDLED_PREFIX + (gpu.replace(" ", "_") if gpu else "<GPU with _ for spaces>")
        yield Finding(
            "bundled-name",
            "",
            f"FlashInfer looks for {expected}.py, not {path.name}",
            f"install it as flashinfer/tuning_configs/{expected}.py",
            "warning",
        )


# ---- one entry ---------------------------------------------------------------------------------------------


def _check_value(kind: str, key: str, value: object) -> Iterator[Finding]:
    crash = _crash(value, bundled=kind == "bundled")
    if crash:
        where = "a lookup" if kind == "bundled" else "load_configs"
        example = "(0, tactic)" if kind == "bundled" else f'["{RUNNER}", tactic, {list(POLICY)}]'
        yield Finding("crash", key, f"{crash}: {where} raises in the server", f"write it as {example}")
        return
    if kind == "json" and isinstance(value, (list, str)):
        if value[0] != RUNNER:
            yield Finding(
                "entry-runner",
                key,
                f"the entry is for the runner {value[0]!r}, so the lookup passes it over",
                f"write {RUNNER!r} as its first element",
            )
            return
        if len(value) > 2 and not _is_policy(value[2]):
            yield Finding(
                "reprofiled",
                key,
                f"its policy {value[2]!r} is not this operation's: a server's warm-up times the key anew",
                f"write the policy as {list(POLICY)!r}",
                "warning",
            )
        if len(value) > 4 or (len(value) > 3 and not isinstance(value[3], dict)):
            yield Finding("extra-elements", key, "FlashInfer drops what follows the policy", "drop it too", "note")
    tactic = _tactic(value)
    if type(tactic) is not int:
        yield Finding(
            "tactic-type",
            key,
            f"the tactic is {tactic!r}, not a whole number: it is served and the kernel refuses it",
            "write the tactic's id",
        )
    elif tactic == -1:
        yield Finding("fallback", key, "the tactic is -1, the fallback that runs anyway", "drop the entry", "note")
    elif tactic < -1:
        yield Finding("id-out-of-range", key, f"no tactic has the id {tactic}; the kernel raises", "write the id anew")


def _crash(value: object, *, bundled: bool) -> str:
    """Name the exception that this value raises inside FlashInfer, ``""`` for none."""
    if isinstance(value, dict):
        return "a dict: KeyError"
    if not isinstance(value, (list, tuple, str)):
        return f"{value!r} is no list: TypeError"
    if len(value) < 2:
        return f"{len(value)} element{'s' * (len(value) != 1)}, at least 2 expected: IndexError"
    if bundled:
        return ""
    if not isinstance(value[0], str):
        return f"the runner {value[0]!r} is no text: AttributeError"
    if len(value) > 2 and (value[2] is None or isinstance(value[2], (bool, int, float))):
        return f"the policy {value[2]!r} is no list: TypeError"
    return ""


def _is_policy(value: object) -> bool:
    return (
        isinstance(value, list)
        and len(value) == len(POLICY)
        and all(a is b or (isinstance(a, str) and a == b) for a, b in zip(value, POLICY, strict=True))
    )


def _tactic(value: object) -> object:
    return value[1] if isinstance(value, (list, tuple)) and len(value) > 1 else None


def _check_bucket(key: ParsedKey, flashinfer: str) -> Iterator[Finding]:
    if not is_grid_bucket(key.bucket, flashinfer):
        yield Finding(
            "off-grid-bucket",
            key.text,
            f"only a server whose maximum token count is exactly {key.bucket} looks this bucket up",
            f"write the buckets {token_buckets(key.bucket, flashinfer)[-2:]} or keep it for that server",
            "warning",
        )


def _check_id(key: ParsedKey, tactic: object, flashinfer: str, arch: str | None) -> Iterator[Finding]:
    if type(tactic) is not int or tactic < 0 or key.stage is None:
        return
    tables = _tables(key, flashinfer, arch)
    if not tables:
        yield Finding(
            "id-unchecked",
            key.text,
            f"synth knows no tactics of this quantization for {arch or 'any GPU'} in FlashInfer {flashinfer}",
            "check the ids on the GPU",
            "note",
        )
    elif all(tactic not in t.ids(key.stage) for t in tables):
        ids = " or ".join(f"{t.ids(key.stage)[0]} to {t.ids(key.stage)[-1]} ({t.arch} {t.quant})" for t in tables)
        yield Finding(
            "id-out-of-range",
            key.text,
            f"gemm{key.stage} has no id {tactic}, but {ids}: it is served and the kernel raises",
            "emit the file anew, or synth port it from the version that it was tuned under",
        )


def _check_legal(
    key: ParsedKey, tactic: object, flashinfer: str, device: str | None, arch: str | None
) -> Iterator[Finding]:
    """Yield a finding where the entry's tactic can't run on the key's layer, on any GPU that may be meant."""
    if type(tactic) is not int or key.stage is None:
        return
    tables = [t for t in _tables(key, flashinfer, arch) if tactic in t.ids(key.stage)]
    try:
        shape, number = key.shape(flashinfer), key.named(flashinfer)["activation_type"]
    except SynthError:
        return
    # Only Situ's gate is never fused.
    activation = "situ" if ACTIVATION_TYPES.get(int(number), ("",))[0] == "Situ" else None
    reasons = [
        why_not(
            shape,
            t.quant,
            t.tactic(tactic),
            key.stage,
            t.arch,
            smem_block_bytes(device, t.arch),
            activation=activation,
            flashinfer=flashinfer,
        )
        for t in tables
    ]
    if reasons and all(reasons):
        yield Finding(
            "tactic-cant-run", key.text, f"id {tactic}: {reasons[0]}: it is served and the kernel raises", "emit anew"
        )


def _tables(key: ParsedKey, flashinfer: str, arch: str | None) -> list[TacticTable]:
    try:
        quant, named = key.quant(flashinfer), key.named(flashinfer)
        tables = [t for t in load_tables(flashinfer) if t.quant == quant and arch in (None, t.arch)]
    except SynthError:
        return []
    return tables if named["use_fused_finalize"] is True else [t.without_fused_finalize() for t in tables]


# ---- what is missing ---------------------------------------------------------------------------------------


def _count(metadata: object, *names: str) -> int:
    """Return a number that `synth emit` put below ``_metadata.synth``; 0 where there is none."""
    value: object = metadata
    for name in ("synth", *names):
        value = value.get(name) if isinstance(value, dict) else None
    return value if type(value) is int else 0


def _check_coverage(keys: Iterable[ParsedKey], flashinfer: str, severity: str) -> Iterator[Finding]:
    """Find what no entry covers, with this severity: a file that abstains on purpose says how often."""
    groups: dict[object, dict[int, dict[int, ParsedKey]]] = defaultdict(lambda: defaultdict(dict))
    for key in keys:
        groups[key.group()][key.stage or 1][key.bucket] = key
    for stages in groups.values():
        top = max(b for buckets in stages.values() for b in buckets)
        grid = token_buckets(top, flashinfer)
        for stage in (1, 2):
            buckets = stages.get(stage, {})
            example = next(iter((buckets or stages[3 - stage]).values()))
            if not buckets:
                yield Finding(
                    "missing-stage",
                    example.text,
                    f"{_layer(example, flashinfer)}: no entry for gemm{stage}, which always runs the fallback",
                    f"add gemm{stage}'s entries",
                    severity,
                )
                continue
            missing = [b for b in grid if b not in buckets and is_grid_bucket(b, flashinfer)]
            if missing:
                yield Finding(
                    "missing-buckets",
                    example.text,
                    f"{_layer(example, flashinfer)} gemm{stage}: no entry for bucket{'s' * (len(missing) > 1)} "
                    f"{', '.join(map(str, missing))}; {_ranges(missing, grid)} tokens run the fallback",
                    "add them, unless the fallback was meant",
                    severity,
                )
        if top < _USUAL_MAX_TOKENS:
            example = next(iter(next(iter(stages.values())).values()))
            yield Finding(
                "low-top-bucket",
                example.text,
                f"{_layer(example, flashinfer)}: the largest bucket is {top}; a server with a larger maximum runs the "
                f"fallback above it",
                f"cover the maximum that the server passes, {_USUAL_MAX_TOKENS} by FlashInfer's default",
                "warning",
            )


def _layer(key: ParsedKey, flashinfer: str) -> str:
    try:
        return f"{key.shape(flashinfer)} {key.quant(flashinfer) or 'other'}"
    except SynthError:
        return f"weights {key.shapes[1:]}"


def _ranges(missing: list[int], grid: tuple[int, ...]) -> str:
    """Return the token counts that round to `missing`, as ranges."""
    spans: list[list[int]] = []
    below = {b: (0, *grid)[i] for i, b in enumerate(grid)}
    for bucket in missing:
        if spans and spans[-1][1] == below[bucket]:
            spans[-1][1] = bucket
        else:
            spans.append([below[bucket] + 1, bucket])
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in spans)
