"""Tactics by meaning: tile, cluster, swap, fusion; ids only for one FlashInfer version.

FlashInfer names a tactic by its position in a list that its C++ enumerates anew in each release.
Here a tactic is what it *is*, written as one line of text, and a :class:`TacticTable` holds the list
of one FlashInfer version, GPU architecture and quantization, in order.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from typing import Any

from synth.catalog.schemes import STAGES
from synth.errors import SynthError

#: The FlashInfer version whose tables are used unless another is named.
DEFAULT_FLASHINFER = "0.7.4"

_TMA = re.compile(
    r"(?P<family>tma\d+) (?P<m>\d+)x(?P<n>\d+)x(?P<k>\d+)B cl(?P<c0>\d+)x(?P<c1>\d+)x(?P<c2>\d+)"
    r" ml(?P<ml>\d+) epi(?P<epi>\d+) fin(?P<fin>[01]) swap(?P<swap>[01])"
)
_SM80 = re.compile(r"sm80 (?P<m>\d+)x(?P<n>\d+)x(?P<k>\d+)_w(?P<w0>\d+)x(?P<w1>\d+)x(?P<w2>\d+) stages(?P<stages>\d+)")


@dataclass(frozen=True, order=True)
class Tactic:
    """What one kernel variant is, independent of any FlashInfer version.

    Attributes
    ----------
    family : str
        ``"tma90"`` or ``"tma120"`` (TMA warp-specialised) or ``"sm80"`` (multistage).
    tile : tuple of int
        CTA tile M, N in elements and K in bytes (TMA) or elements (SM80).
    warp : tuple of int
        Warp tile of an SM80-style kernel, ``(0, 0, 0)`` for TMA kernels.
    cluster : tuple of int
        Thread-block cluster.
    swap_ab : bool
        The kernel computes the transposed product: tile M covers the weight's N, tile N covers tokens.
    finalize : bool
        gemm2 fuses the finalize step (un-permute and weighted sum) into its epilogue.
    stages : int
        Pipeline stages of an SM80-style kernel, 0 for TMA kernels (chosen by the kernel).
    mainloop, epilogue : int
        Mainloop and epilogue schedule, 0 for the default.
    """

    family: str
    tile: tuple[int, int, int]
    warp: tuple[int, int, int] = (0, 0, 0)
    cluster: tuple[int, int, int] = (1, 1, 1)
    swap_ab: bool = False
    finalize: bool = False
    stages: int = 0
    mainloop: int = 0
    epilogue: int = 0

    def __str__(self) -> str:
        tile = "x".join(map(str, self.tile))
        if self.family == "sm80":
            return f"sm80 {tile}_w{'x'.join(map(str, self.warp))} stages{self.stages}"
        cluster = "x".join(map(str, self.cluster))
        return (
            f"{self.family} {tile}B cl{cluster} ml{self.mainloop} epi{self.epilogue}"
            f" fin{int(self.finalize)} swap{int(self.swap_ab)}"
        )

    @property
    def tokens_tile(self) -> int:
        """Tile size along tokens, after the swap."""
        return self.tile[1] if self.swap_ab else self.tile[0]

    @property
    def columns_tile(self) -> int:
        """Tile size along the weight's columns (N), after the swap."""
        return self.tile[0] if self.swap_ab else self.tile[1]

    @classmethod
    def parse(cls, text: str) -> Tactic:
        """Read the text form that ``str`` writes.

        Raises
        ------
        SynthError
            When `text` is not a tactic's text form.
        """
        if m := _TMA.fullmatch(text):
            g = {k: int(v) for k, v in m.groupdict().items() if k != "family"}
            return cls(
                family=m["family"],
                tile=(g["m"], g["n"], g["k"]),
                cluster=(g["c0"], g["c1"], g["c2"]),
                swap_ab=bool(g["swap"]),
                finalize=bool(g["fin"]),
                mainloop=g["ml"],
                epilogue=g["epi"],
            )
        if m := _SM80.fullmatch(text):
            g = {k: int(v) for k, v in m.groupdict().items()}
            return cls(
                family="sm80",
                tile=(g["m"], g["n"], g["k"]),
                warp=(g["w0"], g["w1"], g["w2"]),
                stages=g["stages"],
            )
        raise SynthError(
            f"{text!r} is not a tactic; expected, for example, "
            "'tma90 128x64x128B cl1x1x1 ml0 epi0 fin0 swap1' or 'sm80 64x128x64_w32x64x64 stages3'"
        )


@dataclass(frozen=True)
class TacticTable:
    """The tactics of one FlashInfer version, architecture and quantization, in FlashInfer's order.

    gemm1's ids are ``0 … len(gemm1) - 1``; gemm2's follow on from there.
    """

    flashinfer: str
    arch: str
    quant: str
    gemm1: tuple[Tactic, ...]
    gemm2: tuple[Tactic, ...]

    def __len__(self) -> int:
        return len(self.gemm1) + len(self.gemm2)

    def ids(self, stage: int) -> range:
        """Return the ids of `stage`."""
        n1 = len(self.gemm1)
        return range(n1) if stage == 1 else range(n1, n1 + len(self.gemm2))

    def stage(self, tactic_id: int) -> int:
        """Return the stage that `tactic_id` belongs to."""
        return 1 if self._checked(tactic_id) < len(self.gemm1) else 2

    def tactic(self, tactic_id: int) -> Tactic:
        """Return what `tactic_id` is.

        Raises
        ------
        SynthError
            When this table has no such id.
        """
        i = self._checked(tactic_id)
        n1 = len(self.gemm1)
        return self.gemm1[i] if i < n1 else self.gemm2[i - n1]

    def id_of(self, stage: int, tactic: Tactic) -> int:
        """Return the id of `tactic` in `stage`.

        Raises
        ------
        SynthError
            When this table has no such tactic in this stage.
        """
        try:
            return self._index[stage, tactic]
        except KeyError:
            raise SynthError(
                f"FlashInfer {self.flashinfer} has no gemm{stage} tactic '{tactic}' for {self.arch} {self.quant}"
            ) from None

    def items(self, stage: int) -> Iterator[tuple[int, Tactic]]:
        """Yield ``(id, tactic)`` of `stage` in id order."""
        tactics = self.gemm1 if stage == 1 else self.gemm2
        return zip(self.ids(stage), tactics, strict=True)

    def fallback_id(self, stage: int) -> int:
        """Return the id that FlashInfer's fallback tactic -1 runs: the first of the stage."""
        return self.ids(stage)[0]

    def without_fused_finalize(self) -> TacticTable:
        """Return the shorter table that FlashInfer enumerates with ``use_fused_finalize=False``."""
        return TacticTable(
            self.flashinfer, self.arch, self.quant, self.gemm1, tuple(t for t in self.gemm2 if not t.finalize)
        )

    @functools.cached_property
    def _index(self) -> dict[tuple[int, Tactic], int]:
        return {(stage, t): i for stage in STAGES for i, t in self.items(stage)}

    def _checked(self, tactic_id: int) -> int:
        if not 0 <= tactic_id < len(self):
            raise SynthError(
                f"tactic id {tactic_id} does not exist: FlashInfer {self.flashinfer} has ids 0 to "
                f"{len(self) - 1} for {self.arch} {self.quant}"
            )
        return tactic_id


@functools.cache
def _releases() -> dict[str, list[dict[str, Any]]]:
    """Return the rows of every release; releases whose C++ enumerates alike share a file, named after the first."""
    folder = resources.files("synth.flashinfer") / "tactics"
    found: dict[str, list[dict[str, Any]]] = {}
    for path in folder.iterdir():
        if path.name.endswith(".json"):
            data = json.loads(path.read_text(encoding="utf-8"))
            found.update(dict.fromkeys(data["versions"], data["tables"]))
    return found


@functools.cache
def _tables(flashinfer: str) -> dict[tuple[str, str], TacticTable]:
    rows = _releases().get(flashinfer)
    if rows is None:
        known = known_versions()
        raise SynthError(
            f"no tactic table for FlashInfer {flashinfer}; known: {len(known)} releases from {known[0]} to {known[-1]}"
        )
    return {
        (row["arch"], row["quant"]): TacticTable(
            flashinfer,
            row["arch"],
            row["quant"],
            tuple(map(Tactic.parse, row["gemm1"])),
            tuple(map(Tactic.parse, row["gemm2"])),
        )
        for row in rows
    }


@functools.cache
def known_versions() -> tuple[str, ...]:
    """Return the FlashInfer releases with a tactic table, oldest first; a post-release is one of its own."""
    return tuple(sorted(_releases(), key=lambda v: [int(x) for x in re.findall(r"\d+", v)]))


def load_tables(flashinfer: str = DEFAULT_FLASHINFER) -> tuple[TacticTable, ...]:
    """Return every table of one FlashInfer version."""
    return tuple(_tables(flashinfer).values())


def load_table(arch: str, quant: str, flashinfer: str = DEFAULT_FLASHINFER) -> TacticTable:
    """Return the table of one architecture and quantization.

    Parameters
    ----------
    arch : str
        ``"sm90"`` or ``"sm120"``.
    quant : str
        One of :data:`QUANTS`.
    flashinfer : str
        FlashInfer version.

    Raises
    ------
    SynthError
        When there is no such table.
    """
    tables = _tables(flashinfer)
    try:
        return tables[arch, quant]
    except KeyError:
        known = ", ".join(f"{a} {q}" for a, q in tables)
        raise SynthError(f"no tactics known for {arch} {quant} in FlashInfer {flashinfer}; known: {known}") from None
