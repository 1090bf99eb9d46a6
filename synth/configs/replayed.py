"""What an installed FlashInfer did with a config: every key that it was asked for, and why some were not served."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Miss:
    """Why a key was not served.

    Attributes
    ----------
    key : str
    code : str
        Stable name of the reason.
    reason : str
        One line.
    lookups : int
        How many lookups of this key failed in this way.
    """

    key: str
    code: str
    reason: str
    lookups: int = 1


@dataclass(frozen=True)
class ReplayReport:
    """What the installed FlashInfer did with a file.

    Attributes
    ----------
    path : str
    flashinfer : str
        The installed version.
    device, arch : str
        What the stub pretended to be.
    loaded : bool
        FlashInfer took the file.
    keys, keys_hit : int
        Keys in the file, and those whose every lookup was served with the file's tactic.
    lookups, hits : int
        Lookups at the buckets, between them and beyond the last, for every maximum that servers pass.
    calls : int
        Calls of ``cutlass_fused_moe``; each looks up both stages.
    reprofiled : int
        Keys that a server would time again while it warms up, instead of using them.
    misses : tuple of Miss
        One per key and reason, in the file's order.
    notes : tuple of str
    """

    path: str
    flashinfer: str
    device: str
    arch: str
    loaded: bool
    keys: int
    keys_hit: int
    lookups: int
    hits: int
    calls: int
    reprofiled: int
    misses: tuple[Miss, ...]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Every key was served."""
        return self.keys > 0 and self.keys_hit == self.keys
