"""The scripts of benchmarks/ are imported as Python finds them when one is run; kernels need no GPU here."""

from __future__ import annotations

import sys
from pathlib import Path

from fake_kernels import h200, kernels  # noqa: F401

# At the end: nothing else is to be found there.
sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
