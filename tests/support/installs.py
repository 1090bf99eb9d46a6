"""``synth install`` as its command calls it: with the installed FlashInfer passed in."""

from __future__ import annotations

from functools import partial

from synth.gpu import here
from synth.servers import installing

install = partial(installing.install, here=here)
uninstall = partial(installing.uninstall, here=here)
