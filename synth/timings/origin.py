"""What must be equal for timings to be fitted as one: device, FlashInfer version, quantization and timing policy."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from synth.catalog.schemes import QUANTS
from synth.errors import SynthError
from synth.flashinfer.tactics import DEFAULT_FLASHINFER

#: The timing policy of the shipped measurements: FlashInfer's own timer, each tactic on all 16 routing samples.
DEFAULT_POLICY: Mapping[str, Any] = {
    "timer": "AutoTuner.profile_tactic",
    "profiling_repeat": 16,
    "l2": "hot",
    "cuda_graph": False,
    "pdl": True,
    "data": "normal(0, 0.1)",
    "routing": "uniform random",
}


@dataclass(frozen=True, order=True)
class Origin:
    """What must be equal for timings to be fitted as one.

    Attributes
    ----------
    device : str
        The GPU's name, exactly as torch reports it.
    arch : str
        For example ``"sm90"``.
    quant : str
        One of :data:`synth.catalog.schemes.QUANTS`.
    flashinfer : str
        FlashInfer version; tactic ids are those of this version.
    policy : str
        The timing policy, as JSON with sorted keys.
    simulated : bool
        The numbers come from a simulated device.
    """

    device: str
    arch: str
    quant: str
    flashinfer: str
    policy: str
    simulated: bool = False

    def __post_init__(self) -> None:
        if not self.device.isprintable() or not re.search("[a-z0-9]", self.device.lower()):
            raise SynthError(f"device {quoted(self.device)} is not a GPU's name")
        if not re.fullmatch(r"sm[0-9]+[a-z]?", self.arch):
            raise SynthError(f"arch {quoted(self.arch)} is not an architecture such as sm90")
        if self.quant not in QUANTS:
            raise SynthError(f"quant {quoted(self.quant)} is not one of {', '.join(QUANTS)}")
        # The version becomes a folder's name.
        if not re.fullmatch(r"[0-9][0-9A-Za-z.+_-]*", self.flashinfer):
            raise SynthError(f"flashinfer {quoted(self.flashinfer)} is not a version such as {DEFAULT_FLASHINFER}")

    @classmethod
    def make(
        cls,
        device: str,
        arch: str,
        quant: str,
        flashinfer: str = DEFAULT_FLASHINFER,
        policy: Mapping[str, Any] = DEFAULT_POLICY,
        simulated: bool = False,
    ) -> Origin:
        """Return the origin with `policy` in its canonical text form.

        Raises
        ------
        SynthError
            When a field is not valid or `policy` can't be written as JSON.
        """
        try:
            text = json.dumps(dict(policy), sort_keys=True, allow_nan=False)
        except (TypeError, ValueError) as e:
            raise SynthError(f"the timing policy can't be written as JSON: {e}") from e
        return cls(device, arch, quant, flashinfer, text, simulated)

    @property
    def slug(self) -> str:
        """The device's folder name: lower case, everything but letters and digits turned into ``-``."""
        return re.sub(r"[^a-z0-9]+", "-", self.device.lower()).strip("-")

    def folder(self, root: Path) -> Path:
        """Return the folder of this origin's files under `root`."""
        return root / self.slug / f"flashinfer-{self.flashinfer}" / self.quant


def quoted(value: object) -> str:
    """Return ``repr(value)``, cut to what fits into a message."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…" + text[0]
