"""Configs as they are read, made of plain values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from synth.configs import v1
from synth.configs.model import Config


def config_of(metadata: object, raw: Mapping[str, Any], members: Mapping[str, Any] | None = None) -> Config:
    """Return what a v1 JSON file with these values holds."""
    content = {**({"_metadata": metadata} if metadata is not None else {}), **(members or {}), **raw}
    return v1.loads(Path("made-up.json"), json.dumps(content).encode())
