"""Which calls a file doesn't cover: buckets, stages, runtime token counts, ranks and engines."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from synth.checking.findings import Finding
from synth.errors import SynthError
from synth.flashinfer.buckets import is_grid_bucket, map_to_bucket, token_buckets
from synth.flashinfer.calls import SIGNATURES, Extra
from synth.flashinfer.keys import Key
from synth.flashinfer.versions import contract_for

#: Below this top bucket a server with FlashInfer's default maximum falls back for its largest batches.
_USUAL_MAX_TOKENS = 8192
#: Fewer buckets than this make no pattern.
_LEAST_BUCKETS = 3

_Group = tuple[tuple[tuple[int, ...], ...], tuple[Extra, ...] | None]


@dataclass(frozen=True)
class _Layer:
    """All keys of one layer and call.

    Attributes
    ----------
    by_stage : dict
        Stage → bucket → key.
    """

    by_stage: dict[int, dict[int, Key]]

    @property
    def example(self) -> Key:
        return next(key for buckets in self.by_stage.values() for key in buckets.values())

    @property
    def top(self) -> int:
        return max(b for buckets in self.by_stage.values() for b in buckets)


def missing(
    keys: Iterable[Key], flashinfer: str, *, max_tokens: Sequence[int] = (), abstains: bool = False
) -> list[Finding]:
    """Find what no entry covers.

    Parameters
    ----------
    keys : iterable of Key
        Keys that FlashInfer can look up.
    max_tokens : sequence of int
        Maximum token counts of the servers that are to use the file; without them every bucket up to a layer's top
        one is expected.
    abstains : bool
        The file says that it leaves entries out on purpose, so that gaps are notes.
    """
    layers = _layers(keys)
    severity = "note" if abstains else "warning"
    top = max(
        (bucket for layer in layers.values() for buckets in layer.by_stage.values() for bucket in buckets), default=0
    )
    found = [] if abstains else list(_overridden_buckets(layers, flashinfer))
    for layer in layers.values():
        found += _missing_stages(layer, flashinfer, severity)
        if max_tokens:
            found += _uncovered(layer, flashinfer, max_tokens, severity, top)
        else:
            found += _missing_buckets(layer, flashinfer, severity)
    if layers:
        found += [_clamped(n, flashinfer) for n in sorted(set(max_tokens))]
    found += _missing_ranks(layers, flashinfer)
    found += _missing_calls(layers, flashinfer)
    return found


def _layers(keys: Iterable[Key]) -> dict[_Group, _Layer]:
    layers: dict[_Group, _Layer] = {}
    for key in keys:
        layer = layers.setdefault(key.group(), _Layer(defaultdict(dict)))
        layer.by_stage[key.stage or 1][key.bucket] = key
    return layers


def name_of(key: Key, flashinfer: str) -> str:
    """Return what a person calls a key's layer: its shape and quantization, or the shapes of its weights."""
    try:
        return f"{key.shape(flashinfer)} {key.quant(flashinfer) or 'other'}"
    except SynthError:
        return f"weights {key.shapes[1:]}"


# ---- buckets -----------------------------------------------------------------------------------------------


def _missing_stages(layer: _Layer, flashinfer: str, severity: str) -> Iterator[Finding]:
    for stage in (1, 2):
        if stage not in layer.by_stage:
            yield Finding(
                "missing-stage",
                layer.example.text,
                f"{name_of(layer.example, flashinfer)}: no entry for gemm{stage}, which always runs the fallback",
                f"add gemm{stage}'s entries",
                severity,
            )


def _missing_buckets(layer: _Layer, flashinfer: str, severity: str) -> Iterator[Finding]:
    grid = token_buckets(layer.top, flashinfer)
    for stage, buckets in sorted(layer.by_stage.items()):
        gaps = [b for b in grid if b not in buckets and is_grid_bucket(b, flashinfer)]
        if gaps:
            key = next(iter(buckets.values()))
            counts = {b: _counts(b, grid, flashinfer) for b in gaps}
            yield Finding(
                "missing-buckets",
                key.text,
                f"{name_of(key, flashinfer)} gemm{stage}: no entry for bucket{'s' * (len(gaps) > 1)} "
                f"{', '.join(map(str, gaps))}; {_spans(counts.values())} tokens run the fallback",
                "add them, unless the fallback was meant",
                severity,
            )
    if layer.top < _USUAL_MAX_TOKENS:
        yield Finding(
            "low-top-bucket",
            layer.example.text,
            f"{name_of(layer.example, flashinfer)}: the largest bucket is {layer.top}; a server with a larger maximum "
            f"runs the fallback above it",
            f"cover the maximum that the server passes, {_USUAL_MAX_TOKENS} by FlashInfer's default",
            "warning",
        )


def _counts(bucket: int, grid: Sequence[int], flashinfer: str) -> tuple[int, int]:
    """Return the first and the last token count that round to a bucket of the grid."""
    at = grid.index(bucket)
    if contract_for(flashinfer).hybrid_buckets:
        return (grid[at - 1] + 1 if at else 1), bucket
    return bucket, 2 * bucket - 1


def _spans(counts: Iterable[tuple[int, int]]) -> str:
    """Return ranges of token counts as text, those that meet joined."""
    spans: list[list[int]] = []
    for first, last in sorted(counts):
        if spans and spans[-1][1] == first - 1:
            spans[-1][1] = last
        else:
            spans.append([first, last])
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in spans)


@functools.lru_cache(maxsize=256)
def lookups(max_tokens: int, flashinfer: str) -> tuple[tuple[int, int, int], ...]:
    """Return what a server with this maximum looks up: bucket, and the first and last token count up to the maximum.

    Examples
    --------
    >>> lookups(6, "0.7.4")
    ((1, 1, 1), (2, 2, 2), (4, 3, 4), (8, 5, 5), (6, 6, 6))
    """
    found = []
    first = 1
    while first <= max_tokens:
        bucket = map_to_bucket(first, max_tokens, flashinfer)
        # Buckets never fall with the token count but at the maximum itself, which is a bucket of its own.
        last, beyond = first, max_tokens if first < max_tokens else first + 1
        while beyond - last > 1:
            middle = (last + beyond) // 2
            if map_to_bucket(middle, max_tokens, flashinfer) == bucket:
                last = middle
            else:
                beyond = middle
        if beyond == max_tokens and map_to_bucket(max_tokens, max_tokens, flashinfer) == bucket:
            last = max_tokens
        found.append((bucket, first, last))
        first = last + 1
    return tuple(found)


def _uncovered(layer: _Layer, flashinfer: str, max_tokens: Sequence[int], severity: str, top: int) -> Iterator[Finding]:
    """Find token counts without an entry; what lies above the file's top bucket was not left out on purpose."""
    for most in sorted(set(max_tokens)):
        for stage, buckets in sorted(layer.by_stage.items()):
            gaps = [(first, last) for bucket, first, last in lookups(most, flashinfer) if bucket not in buckets]
            if gaps:
                key = next(iter(buckets.values()))
                yield Finding(
                    "uncovered-tokens",
                    key.text,
                    f"{name_of(key, flashinfer)} gemm{stage}: a server whose maximum is {most} finds no entry for "
                    f"{_spans(gaps)} tokens and runs the fallback",
                    "add their buckets, unless the fallback was meant",
                    "warning" if any(last > top for _, last in gaps) else severity,
                )


def _clamped(most: int, flashinfer: str) -> Finding:
    bucket = map_to_bucket(most + 1, most, flashinfer)
    return Finding(
        "clamped-tokens",
        "",
        f"a server whose maximum is {most} runs every batch of more tokens with the tactics of bucket {bucket}",
        "raise the server's maximum if it runs larger batches; vLLM passes max_cudagraph_capture_size",
        "note",
    )


def _overridden_buckets(layers: dict[_Group, _Layer], flashinfer: str) -> Iterator[Finding]:
    """Find layers that were tuned in buckets other than FlashInfer's own: ``autotune(tuning_buckets=…)``."""
    tuned = [set(buckets) for layer in layers.values() for buckets in layer.by_stage.values()]
    patterns: dict[frozenset[int], int] = defaultdict(int)
    for buckets in tuned:
        if len(buckets) >= _LEAST_BUCKETS and _is_overridden(buckets, flashinfer, same=len(layers) > 1):
            patterns[frozenset(buckets)] += 1
    for pattern, count in patterns.items():
        off = [b for b in sorted(pattern) if not is_grid_bucket(b, flashinfer)]
        if not off and not _powers_only(pattern, flashinfer) and count < len(tuned):
            # Gaps that only some layers have are no override.
            continue
        listed = ", ".join(map(str, sorted(pattern)[:12])) + (", …" if len(pattern) > 12 else "")
        yield Finding(
            "tuning-buckets",
            "",
            f"{count} of {len(tuned)} layers' stages have entries in the buckets {listed} only: tuned under "
            f"autotune(tuning_buckets=…), or by another FlashInfer; outside of such a context FlashInfer {flashinfer} "
            "looks its own buckets up",
            "tune without tuning_buckets, or serve inside of the same context",
            "warning",
        )


def _is_overridden(buckets: set[int], flashinfer: str, *, same: bool) -> bool:
    grid = {b for b in token_buckets(max(buckets), flashinfer) if is_grid_bucket(b, flashinfer)}
    # The top bucket off the grid is a server's maximum, and so may others be where the grid is whole.
    off = {b for b in buckets - {max(buckets)} if not is_grid_bucket(b, flashinfer)}
    gaps = grid - buckets
    if off:
        return len(gaps) >= max(len(grid & buckets), 1)
    return _powers_only(buckets, flashinfer) or (same and bool(gaps))


def _powers_only(buckets: Iterable[int], flashinfer: str) -> bool:
    """Tell whether the powers of two are all there, and none of the grid's other buckets is."""
    found = set(buckets)
    grid = [b for b in token_buckets(max(found), flashinfer) if is_grid_bucket(b, flashinfer)]
    powers = {b for b in grid if b & (b - 1) == 0}
    return len(powers) >= _LEAST_BUCKETS and found == powers and len(powers) < len(grid)


# ---- ranks and engines -------------------------------------------------------------------------------------

_RANKS = ("tp_rank", "ep_rank", "cluster_rank")


def _missing_ranks(layers: dict[_Group, _Layer], flashinfer: str) -> Iterator[Finding]:
    """Where keys hold ranks: find layers that some ranks have entries of and others don't."""
    names = contract_for(flashinfer).extras or ()
    if "tp_rank" not in names:
        return
    places: dict[object, set[tuple[int, int]]] = defaultdict(set)
    examples: dict[object, Key] = {}
    for (shapes, _), layer in layers.items():
        for buckets in layer.by_stage.values():
            for key in buckets.values():
                values = key.named(flashinfer)
                rest = tuple(v for name, v in values.items() if name not in _RANKS)
                place: object = (shapes, rest, key.stage, key.bucket)
                places[place].add((int(values["tp_rank"]), int(values["ep_rank"])))
                examples.setdefault(place, key)
    for place, ranks in places.items():
        values = examples[place].named(flashinfer)
        # Sizes come from strangers, so the ranks are counted and not listed.
        lacking = int(values["tp_size"]) * int(values["ep_size"]) - len(ranks)
        if lacking > 0:
            shown = ", ".join(f"{t}/{e}" for t, e in sorted(ranks)[:8])
            yield Finding(
                "missing-ranks",
                examples[place].text,
                f"{name_of(examples[place], flashinfer)}: only {len(ranks)} of {len(ranks) + lacking} ranks (tp/ep "
                f"{shown}) have this entry; the others run the fallback or tune, and ranks that disagree can hang",
                "write the keys of every rank; synth emit does",
                "warning",
            )


def _missing_calls(layers: dict[_Group, _Layer], flashinfer: str) -> Iterator[Finding]:
    """Where engines ask for one layer with activations of different types: find those that are not covered."""
    names = contract_for(flashinfer).extras
    if not names:
        return
    present: dict[object, dict[str, Key]] = defaultdict(dict)
    for (shapes, extras), layer in layers.items():
        key = layer.example
        if key.quant(flashinfer) is not None and extras:
            present[key.quant(flashinfer), shapes[1:], extras[1:]].setdefault(str(extras[0]), key)
    for found in present.values():
        example = next(iter(found.values()))
        quant, weights = example.quant(flashinfer), example.named(flashinfer)["weight_dtype"]
        for signature in SIGNATURES:
            if signature.quant == quant and signature.weight_dtype == weights and signature.x_dtype not in found:
                others = [s.engine for s in SIGNATURES if s.quant == quant and str(s.x_dtype) in found]
                yield Finding(
                    "other-calls",
                    example.text,
                    f"{name_of(example, flashinfer)}: keys with x in {', '.join(found)} only, as "
                    f"{' and '.join(dict.fromkeys(others))} asks; {signature.engine} asks with {signature.x_dtype} too "
                    f"({signature.source})",
                    f"add the keys of --engine {signature.engine} if it is to use the file",
                    "note",
                )
