"""GPUs: what is public about each, under the exact name that torch reports."""

from __future__ import annotations

import difflib
import functools
import re
import sys
from dataclasses import dataclass, field
from importlib import resources

from synth.errors import SynthError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class Device:
    """A GPU model. ``None``, or a missing peak, means not public.

    Attributes
    ----------
    name : str
        What ``torch.cuda.get_device_name`` reports.
    arch : str
        Architecture, for example ``"sm90"``.
    sms : int or None
        Streaming multiprocessors.
    l2_mb : float or None
        L2 cache in MB.
    dram_gbs : float or None
        Specified memory bandwidth in GB/s.
    tflops : dict of str to float
        Specified dense peak in TFLOPS of each quantization.
    smem_block_bytes : int
        Shared memory in bytes that one block can have.
    source : str
        Where the numbers are from.
    """

    name: str
    arch: str
    sms: int | None
    l2_mb: float | None
    dram_gbs: float | None
    tflops: dict[str, float] = field(hash=False)
    smem_block_bytes: int
    source: str

    @property
    def slug(self) -> str:
        """Name for files, for example ``nvidia-h200``."""
        return slug(self.name)

    @property
    def tactics_arch(self) -> str:
        """Architecture whose tactics run here: FlashInfer enumerates SM121's with SM120's."""
        return "sm120" if self.arch == "sm121" else self.arch


def slug(name: str) -> str:
    """Return a device's name as file names spell it, whether the device is known or not."""
    return "-".join(_words(name))


@functools.cache
def load_devices() -> tuple[Device, ...]:
    """Return the known devices, in the order of ``devices.toml``."""
    text = (resources.files("synth.catalog") / "devices.toml").read_text(encoding="utf-8")
    return tuple(
        Device(
            name=row["name"],
            arch=row["arch"],
            sms=row.get("sms"),
            l2_mb=row.get("l2_mb"),
            dram_gbs=row.get("dram_gbs"),
            tflops=row.get("tflops", {}),
            smem_block_bytes=row["smem_block_bytes"],
            source=row["source"],
        )
        for row in tomllib.loads(text)["device"]
    )


def find_devices(query: str) -> tuple[Device, ...]:
    """Return the device with this name or slug, else every device whose name has all words of `query`.

    Parameters
    ----------
    query : str
        Whole words in any order; case is ignored. ``"RTX PRO 6000"`` means each of its editions, ``"h200"`` the
        H200 and not the GB200.

    Raises
    ------
    SynthError
        When no device matches; the message lists near matches.
    """
    words = _words(query)
    exact = tuple(d for d in load_devices() if _words(d.name) == words)
    found = exact or tuple(d for d in load_devices() if words and set(words) <= set(_words(d.name)))
    if not found:
        raise SynthError(f"unknown device {query!r}; {_near(words)}")
    return found


def get_device(name: str) -> Device:
    """Return the one device that `name` means.

    Raises
    ------
    SynthError
        When no device matches, or more than one.
    """
    found = find_devices(name)
    if len(found) > 1:
        raise SynthError(f"{name!r} means {len(found)} devices; give one of {', '.join(d.name for d in found)}")
    return found[0]


def _near(words: list[str]) -> str:
    """Say which devices a query without a match may have meant."""
    near = [
        d.name
        for d in load_devices()
        if any(difflib.get_close_matches(word, _words(d.name), n=1, cutoff=0.6) for word in words if word != "nvidia")
    ]
    if near:
        return f"did you mean {', '.join(near)}?"
    return f"known: {', '.join(d.name for d in load_devices())}"


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", name.lower())
