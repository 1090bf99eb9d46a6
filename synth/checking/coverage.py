"""Which calls a file doesn't cover: buckets, stages, runtime token counts, ranks and engines."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from synth.checking.findings import Finding, finding
from synth.errors import SynthError
from synth.flashinfer.buckets import is_grid_bucket, map_to_bucket, token_buckets
from synth.flashinfer.calls import SIGNATURES
from synth.flashinfer.keys import Call, Key
from synth.flashinfer.versions import contract_for

#: Below this top bucket a server with FlashInfer's default maximum falls back for its largest batches.
_USUAL_MAX_TOKENS = 8192
#: Fewer buckets than this make no pattern.
_LEAST_BUCKETS = 3

#: All keys of one layer and call, by stage and bucket.
_Layer = Mapping[int, Mapping[int, Key]]


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
    layers: dict[Call, dict[int, dict[int, Key]]] = {}
    for key in keys:
        layers.setdefault(key.call, {}).setdefault(key.stage or 1, {})[key.bucket] = key
    severity = "note" if abstains else "warning"
    top = max(map(_top, layers.values()), default=0)
    found = [] if abstains else list(_overridden_buckets(layers, flashinfer))
    for layer in layers.values():
        for stage in {1, 2} - layer.keys():
            example = _example(layer)
            found.append(
                finding(
                    "missing-stage", example.text, severity=severity, layer=name_of(example, flashinfer), stage=stage
                )
            )
        if max_tokens:
            found += _uncovered(layer, flashinfer, max_tokens, severity, top)
        else:
            found += _missing_buckets(layer, flashinfer, severity)
    for most in sorted(set(max_tokens)) if layers else ():
        found.append(finding("clamped-tokens", most=most, bucket=map_to_bucket(most + 1, most, flashinfer)))
    found += _missing_ranks(layers, flashinfer)
    found += _missing_calls(layers, flashinfer)
    return found


def name_of(key: Key, flashinfer: str) -> str:
    """Return what a person calls a key's layer: its shape and quantization, or the shapes of its weights."""
    try:
        return f"{key.shape(flashinfer)} {key.quant(flashinfer) or 'other'}"
    except SynthError:
        return f"weights {key.shapes[1:]}"


def _example(layer: _Layer) -> Key:
    return next(key for buckets in layer.values() for key in buckets.values())


def _top(layer: _Layer) -> int:
    return max(map(max, layer.values()))


# ---- buckets -----------------------------------------------------------------------------------------------


def _missing_buckets(layer: _Layer, flashinfer: str, severity: str) -> Iterator[Finding]:
    top = _top(layer)
    grid = token_buckets(top, flashinfer)
    for stage, buckets in sorted(layer.items()):
        gaps = [b for b in grid if b not in buckets and is_grid_bucket(b, flashinfer)]
        if gaps:
            key = next(iter(buckets.values()))
            yield finding(
                "missing-buckets",
                key.text,
                severity=severity,
                layer=name_of(key, flashinfer),
                stage=stage,
                s="s" * (len(gaps) > 1),
                buckets=", ".join(map(str, gaps)),
                tokens=_spans(_counts(b, grid, flashinfer) for b in gaps),
            )
    if top < _USUAL_MAX_TOKENS:
        key = _example(layer)
        yield finding("low-top-bucket", key.text, layer=name_of(key, flashinfer), top=top, usual=_USUAL_MAX_TOKENS)


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
    """Return what a server with this maximum looks up: bucket, and the first and last token count up to the maximum."""
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
        for stage, buckets in sorted(layer.items()):
            gaps = [(first, last) for bucket, first, last in lookups(most, flashinfer) if bucket not in buckets]
            if gaps:
                key = next(iter(buckets.values()))
                yield finding(
                    "uncovered-tokens",
                    key.text,
                    severity="warning" if any(last > top for _, last in gaps) else severity,
                    layer=name_of(key, flashinfer),
                    stage=stage,
                    most=most,
                    tokens=_spans(gaps),
                )


def _overridden_buckets(layers: Mapping[Call, _Layer], flashinfer: str) -> Iterator[Finding]:
    """Find layers that were tuned in buckets other than FlashInfer's own: ``autotune(tuning_buckets=…)``."""
    tuned = [set(buckets) for layer in layers.values() for buckets in layer.values()]
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
        yield finding("tuning-buckets", count=count, of=len(tuned), buckets=listed, flashinfer=flashinfer)


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


def _missing_ranks(layers: Mapping[Call, _Layer], flashinfer: str) -> Iterator[Finding]:
    """Where keys hold ranks: find layers that some ranks have entries of and others don't."""
    if "tp_rank" not in (contract_for(flashinfer).extras or ()):
        return
    places: dict[object, set[tuple[int, int]]] = defaultdict(set)
    examples: dict[object, Key] = {}
    for call, layer in layers.items():
        values = call.named(flashinfer)
        rest = tuple(v for name, v in values.items() if name not in _RANKS)
        for buckets in layer.values():
            for key in buckets.values():
                place: object = (call.shapes, rest, key.stage, key.bucket)
                places[place].add((int(values["tp_rank"]), int(values["ep_rank"])))
                examples.setdefault(place, key)
    for place, ranks in places.items():
        example = examples[place]
        values = example.named(flashinfer)
        # Sizes come from strangers, so the ranks are counted and not listed.
        every = int(values["tp_size"]) * int(values["ep_size"])
        if every > len(ranks):
            yield finding(
                "missing-ranks",
                example.text,
                layer=name_of(example, flashinfer),
                there=len(ranks),
                of=every,
                ranks=", ".join(f"{t}/{e}" for t, e in sorted(ranks)[:8]),
            )


def _missing_calls(layers: Mapping[Call, _Layer], flashinfer: str) -> Iterator[Finding]:
    """Where engines ask for one layer with activations of different types: find those that are not covered."""
    if not contract_for(flashinfer).extras:
        return
    present: dict[object, dict[str, Key]] = defaultdict(dict)
    for call, layer in layers.items():
        quant = call.quant(flashinfer)
        if quant is not None and call.extras:
            place = quant, call.shapes[1:], call.extras[1:]
            present[place].setdefault(str(call.extras[0]), _example(layer))
    for found in present.values():
        example = next(iter(found.values()))
        quant, weights = example.quant(flashinfer), example.named(flashinfer)["weight_dtype"]
        for signature in SIGNATURES:
            if signature.quant == quant and signature.weight_dtype == weights and signature.x_dtype not in found:
                others = [s.engine for s in SIGNATURES if s.quant == quant and str(s.x_dtype) in found]
                yield finding(
                    "other-calls",
                    example.text,
                    layer=name_of(example, flashinfer),
                    there=", ".join(found),
                    others=" and ".join(dict.fromkeys(others)),
                    engine=signature.engine,
                    x_dtype=signature.x_dtype,
                    source=signature.source,
                )
