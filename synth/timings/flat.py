"""Flat tables: timings of several shapes in one CSV file, as other programs write them."""

from __future__ import annotations

import csv
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from synth.catalog.schemes import QUANTS
from synth.catalog.shapes import MoEShape
from synth.errors import SynthError
from synth.flashinfer.tactics import DEFAULT_FLASHINFER, load_table
from synth.timings.files import of_real_size
from synth.timings.origin import DEFAULT_POLICY, Origin, quoted
from synth.timings.rows import Accepted, BadRow, Problem, Row, hand_over
from synth.timings.table import ShapeTimings, as_json
from synth.timings.text import integer, read_text, take_lines, time

_SIZES = ("hidden", "inter", "experts", "top_k", "ep_size")
#: Columns that a flat table must have; ``pass`` may be missing and means 1.
FLAT_COLUMNS = ("shape", "dtype", *_SIZES, "gated", "stage", "tokens", "tactic", "ms")


@dataclass
class _Layer:
    """The rows of one quantization and shape."""

    origin: Origin
    shape: MoEShape
    accepted: Accepted
    label: str = ""


def read_flat(
    path: Path | str,
    device: str = "NVIDIA H200",
    arch: str = "sm90",
    flashinfer: str = DEFAULT_FLASHINFER,
    policy: Mapping[str, Any] = DEFAULT_POLICY,
    passes: Mapping[int, Mapping[str, Any]] | None = None,
    *,
    problems: list[Problem] | None = None,
) -> list[ShapeTimings]:
    """Read a flat table: a CSV file, gzipped or not, with the columns :data:`FLAT_COLUMNS` and maybe ``pass``.

    Columns may come in any order and others are ignored; lines may end in CRLF.

    Parameters
    ----------
    device, arch, flashinfer, policy
        What the table doesn't say: see :class:`synth.timings.origin.Origin`.
    passes : mapping, optional
        Provenance of each pass in the table; the file's name alone if not given.
    problems : list, optional
        Gets one :class:`Problem` for each row left out. Without it each is a :class:`MeasurementWarning`.

    Returns
    -------
    list of ShapeTimings
        One for each quantization and shape in the table, sorted.

    Raises
    ------
    SynthError
        When the file can't be read, lacks a column, is not UTF-8 text, has no good row, or has a pass that `passes`
        doesn't describe.
    """
    path = Path(path)
    found: list[Problem] = []
    names, text, cut = _open(path)
    layers: dict[tuple[Origin, MoEShape], _Layer] = {}

    # Different texts (a size of 64 and of 064) may be one layer.
    @functools.cache
    def layer_of(quant: str, gated: str, *sizes: str) -> _Layer:
        if quant not in QUANTS:
            raise BadRow(f"dtype {quoted(quant)} is not one of {', '.join(QUANTS)}")
        if gated not in ("0", "1"):
            raise BadRow(f"gated {quoted(gated)} is not 0 or 1")
        hidden, inter, experts, top_k, ep_size = map(integer, _SIZES, sizes)
        origin = Origin.make(device, arch, quant, flashinfer, policy)
        try:
            shape = of_real_size(MoEShape(hidden, inter, experts, top_k, ep_size, gated == "1"))
            # Without a table the ids of a flat file mean nothing.
            load_table(arch, quant, flashinfer)
        except SynthError as e:
            raise BadRow(str(e)) from None
        return layers.setdefault((origin, shape), _Layer(origin, shape, Accepted(origin, {})))

    def take(cells: list[str]) -> None:
        row = dict(zip(names, map(str.strip, cells), strict=True))
        layer = layer_of(row["dtype"], row["gated"], *(row[name] for name in _SIZES))
        pass_, stage, tokens, tactic = (
            integer(name, row.get(name, "1")) for name in ("pass", "stage", "tokens", "tactic")
        )
        if not row["shape"]:
            raise BadRow("shape is empty")
        layer.accepted.add(Row(pass_, stage, tokens, tactic, time(row["ms"])))
        layer.label = layer.label or row["shape"]

    take_lines(path, text, 2, cut, len(names), take, found)
    parts = []
    for layer in layers.values():
        rows = layer.accepted.rows.values()
        if not rows:
            continue
        numbers = sorted({row.pass_ for row in rows})
        described = {n: {"source": path.name} for n in numbers} if passes is None else passes
        if missing := [n for n in numbers if n not in described]:
            raise SynthError(f"{path}: pass {missing[0]} has no provenance; describe it or leave its rows out")
        parts.append(
            ShapeTimings.of_checked(
                rows,
                layer.accepted.texts,
                origin=layer.origin,
                shape=layer.shape,
                label=layer.label,
                passes=as_json({n: described[n] for n in numbers}),
                path=path,
            )
        )
    if not parts:
        why = f" (row {found[0].row}: {found[0].message})" if found else ""
        raise SynthError(f"{path} has no row that can be used{why}; expected the columns {','.join(FLAT_COLUMNS)}")
    hand_over(found, problems)
    return sorted(parts, key=lambda p: (p.origin, p.shape))


def _open(path: Path) -> tuple[list[str], bytes, bool]:
    """Return a flat table's column names, its rows as text, and whether its gzip file is cut short."""
    text, cut = read_text(path, may_be_plain=True)
    expected = f"expected the columns {','.join(FLAT_COLUMNS)}"
    text = text.removeprefix(b"\xef\xbb\xbf")
    if not text.strip():
        raise SynthError(f"{path} is empty; {expected}")
    header, _, body = text.partition(b"\n")
    try:
        names = [cell.strip() for cell in next(csv.reader([header.decode()]))]
    except (UnicodeDecodeError, csv.Error):
        names = ["\0"]
    # UTF-16 shows as zero bytes.
    if any("\0" in name for name in names):
        raise SynthError(f"{path} is not UTF-8 text; save it as UTF-8 ({expected})")
    if missing := [name for name in FLAT_COLUMNS if name not in names]:
        raise SynthError(f"{path} lacks the column{'s' * (len(missing) > 1)} {', '.join(missing)}; {expected}")
    if twice := [name for name in (*FLAT_COLUMNS, "pass") if names.count(name) > 1]:
        raise SynthError(f"{path} has the column {twice[0]} twice; remove one")
    return names, body, cut
