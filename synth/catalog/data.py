"""Tables that lie beside the code that reads them, as TOML."""

from __future__ import annotations

import sys
from importlib import resources
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def read_toml(package: str, name: str) -> dict[str, Any]:
    """Return a table of a package, for example ``read_toml("synth.catalog", "models.toml")``."""
    return tomllib.loads((resources.files(package) / name).read_text(encoding="utf-8"))
