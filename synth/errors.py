"""Errors that a person can act on: one line, the place, the way out."""

from __future__ import annotations

import os
import sys


class SynthError(Exception):
    """Bad input. The message is one line that names the file, row or option and the way out.

    The command line prints it without a traceback and exits with code 2.
    """


class MissingDependencyError(SynthError):
    """An optional package that this command needs is not installed."""


class UnsupportedShapeError(SynthError):
    """FlashInfer has no kernel for this shape under this quantization."""


class OutOfMemory(SynthError):
    """The layer, or this bucket of it, doesn't fit into the GPU's memory."""


class TacticError(Exception):
    """The tactic failed and the GPU is fine."""


class StickyError(Exception):
    """The CUDA context is lost; only a new process can go on."""


def pip_install(*packages: str) -> str:
    """Return a command that installs packages for the Python that runs this, whichever one PATH has."""
    import shlex
    import shutil

    on_path = shutil.which("python")
    is_this = on_path is not None and os.path.dirname(on_path) == os.path.dirname(sys.executable)
    return f"{'python' if is_this else shlex.quote(sys.executable)} -m pip install {' '.join(packages)}"
