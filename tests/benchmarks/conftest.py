"""The scripts of benchmarks/ are imported as Python finds them when one is run: its folder is on the path."""

from __future__ import annotations

import sys
from pathlib import Path

# At the end: nothing else is to be found there.
sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
