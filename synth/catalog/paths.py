"""Where models and measurements lie: those shipped with synth, and the user's own.

The user's folders come first. Nothing is ever written into the installed package.
"""

from __future__ import annotations

from pathlib import Path

from synth.catalog.devices import slug
from synth.errors import SynthError


def shipped(kind: str) -> Path:
    """Return the folder of shipped ``models`` or ``measurements``: in the wheel, or at the top of a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "shipped" / kind
    return inside if inside.is_dir() else package.parent / kind


def user_folder(kind: str) -> Path:
    """Return the user's own folder of ``models`` or ``measurements``; it may not exist yet."""
    from platformdirs import user_data_path

    return user_data_path("synth", appauthor=False) / kind


def readable(kind: str, own: Path | None) -> list[Path]:
    """Return the folders to read, in order: the user's (`own`, or the default one), then the shipped one.

    Raises
    ------
    SynthError
        When `own` was named but isn't a folder.
    """
    if own is not None and not own.is_dir() and (own.exists() or kind == "measurements"):
        raise SynthError(f"{own}: {'not a' if own.exists() else 'no such'} folder; name one with --{kind}")
    folders = [own or user_folder(kind), shipped(kind)]
    return list(dict.fromkeys(f.resolve() for f in folders if f.is_dir()))


def model_file(device: str, quant: str, flashinfer: str) -> Path:
    """Return a model's file, relative to a folder of models."""
    return Path(slug(device)) / f"flashinfer-{flashinfer}" / f"{quant}.zip"


def find_model(folders: list[Path], device: str, quant: str, flashinfer: str) -> Path | None:
    """Return the first of `folders` that holds this model; None when none does."""
    candidates = (folder / model_file(device, quant, flashinfer) for folder in folders)
    return next((path for path in candidates if path.is_file()), None)
