from __future__ import annotations

from hypothesis import settings

# Shared machines make single examples slow at times; that says nothing about the code.
settings.register_profile("synth", deadline=None)
settings.load_profile("synth")
