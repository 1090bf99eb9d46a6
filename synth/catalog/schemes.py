"""How a checkpoint's experts are quantized and scaled, and the two GEMMs of which a layer is made."""

from __future__ import annotations

from synth.catalog.data import read_toml
from synth.errors import SynthError

_TABLE = read_toml("synth.catalog", "schemes.toml")
#: Every scheme that is told apart, by name: what the experts have.
SCHEMES: dict[str, str] = {name: row["is"] for name, row in _TABLE.items()}
#: Quantizations: the schemes that FlashInfer's CUTLASS MoE is tuned for here.
QUANTS: tuple[str, ...] = tuple(name for name, row in _TABLE.items() if row.get("tactics"))
#: The two GEMMs of an MoE layer.
STAGES = (1, 2)


def check_scheme(scheme: str) -> None:
    """Refuse a scheme that isn't known.

    Raises
    ------
    SynthError
    """
    if scheme not in SCHEMES:
        raise SynthError(f"unknown quantization {scheme!r}; known: {', '.join(SCHEMES)}")
