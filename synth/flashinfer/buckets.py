"""The token counts that FlashInfer tunes at, and which of them a call's tokens are looked up in."""

from __future__ import annotations

from synth.errors import SynthError
from synth.flashinfer.tactics import DEFAULT_FLASHINFER
from synth.flashinfer.versions import contract_for


def _hybrid_grid(max_tokens: int) -> tuple[int, ...]:
    grid = [1, 2, 4, 8, 16, 32, 64, 128, 256, *range(512, 2049, 256), *range(2560, 4097, 512)]
    while grid[-1] < max_tokens:
        grid.append(grid[-1] * 2)
    return tuple(b for b in grid if b <= max_tokens)


def token_buckets(max_tokens: int, flashinfer: str = DEFAULT_FLASHINFER) -> tuple[int, ...]:
    """Return the token counts that FlashInfer tunes at, for one ``tune_max_num_tokens``.

    Parameters
    ----------
    max_tokens : int
        At least 1. A maximum off the grid is appended (hybrid grid only).
    flashinfer : str
        FlashInfer version.

    Examples
    --------
    >>> token_buckets(600)
    (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 600)
    """
    if max_tokens < 1:
        raise SynthError(f"the maximum token count must be at least 1, not {max_tokens}")
    if not contract_for(flashinfer).hybrid_buckets:
        return tuple(2**i for i in range(max_tokens.bit_length()))
    grid = _hybrid_grid(max_tokens)
    return grid if grid[-1] == max_tokens else (*grid, max_tokens)


def map_to_bucket(tokens: int, max_tokens: int, flashinfer: str = DEFAULT_FLASHINFER) -> int:
    """Return the bucket that FlashInfer looks up for `tokens`: rounded up and clamped to the maximum.

    Versions before 0.6.10 round down to a power of two. With a maximum that is none, they look a power of two above it
    up in a bucket of the maximum, which they never tune.
    """
    if max_tokens < 1:
        raise SynthError(f"the maximum token count must be at least 1, not {max_tokens}")
    if tokens < 1:
        return 1
    if not contract_for(flashinfer).hybrid_buckets:
        return min(1 << (tokens.bit_length() - 1), max_tokens)
    if tokens >= max_tokens:
        return max_tokens
    if tokens <= 256:
        # Not clamped: with a maximum of 200, FlashInfer looks 150 tokens up in bucket 256, which it never tunes.
        return next_power_of_2(tokens)
    if tokens > 4096:
        return min(next_power_of_2(tokens), max_tokens)
    step = 256 if tokens <= 2048 else 512
    return min(-(-tokens // step) * step, max_tokens)


def next_power_of_2(tokens: int) -> int:
    """Return the smallest power of two that is at least `tokens`: the maximum that SGLang passes."""
    return 1 << max(tokens - 1, 0).bit_length()


def is_grid_bucket(bucket: int, flashinfer: str = DEFAULT_FLASHINFER) -> bool:
    """Tell whether `bucket` is on the grid; another one is looked up only by a server with that very maximum."""
    return bucket >= 1 and map_to_bucket(bucket, 2 * next_power_of_2(bucket), flashinfer) == bucket
