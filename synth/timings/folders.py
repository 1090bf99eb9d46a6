"""Folders of measurements: their files loaded, those of one shape merged, and nothing mixed.

Rows may be fitted as one only where their :class:`synth.timings.origin.Origin` is equal, so :func:`load` returns one
:class:`synth.timings.table.Timings` for each origin.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from synth.catalog.paths import readable
from synth.catalog.schemes import STAGES
from synth.catalog.shapes import MoEShape
from synth.errors import SynthError
from synth.flashinfer.tactics import DEFAULT_FLASHINFER, Tactic, TacticTable
from synth.timings.files import SUFFIX, open_file
from synth.timings.origin import Origin
from synth.timings.rows import COLUMNS, Problem, Row, hand_over, tactic_table
from synth.timings.table import ShapeTimings, Timings


def load(
    roots: Path | str | Iterable[Path | str],
    device: str | None = None,
    quant: str | None = None,
    flashinfer: str | None = None,
    *,
    problems: list[Problem] | None = None,
) -> list[Timings]:
    """Load measurements from folders (searched for ``*.csv.gz``) and files, one :class:`Timings` for each origin.

    The rows of one shape and origin may come from several files: see :func:`merge`.

    Parameters
    ----------
    roots : path or iterable of paths
        Folders and files.
    device, quant, flashinfer : str, optional
        Only these.
    problems : list, optional
        Gets one :class:`Problem` for each row left out. Without it each is a :class:`MeasurementWarning`.

    Returns
    -------
    list of Timings
        Sorted by origin, shapes sorted within each, rows by pass, stage, tokens and tactic within those.

    Raises
    ------
    SynthError
        When a path doesn't exist, a file is not a measurements file, its head can't be read, its gzip data is
        damaged (other than cut short), or its tactics contradict this FlashInfer version's table.
    """
    return combine(load_shapes(roots, device, quant, flashinfer, problems=problems))


def load_timings(
    device: str, quant: str, flashinfer: str = DEFAULT_FLASHINFER, *, measurements: Path | None = None
) -> Timings:
    """Return all timings of one GPU in one quantization: one's own and the shipped ones.

    Parameters
    ----------
    device : str
        The GPU's name as torch reports it.
    measurements : Path, optional
        Folder of one's own, in place of the usual one.

    Raises
    ------
    SynthError
        When there are none, or they were taken under several timing policies.

    Examples
    --------
    >>> import synth
    >>> timings = synth.load_timings("NVIDIA H200", "fp8")
    >>> len(timings.shapes), timings.origin.flashinfer
    (18, '0.7.4')
    """
    folders = readable("measurements", measurements)
    found = [t for t in load(folders, device, quant, flashinfer) if not t.origin.simulated]
    if len(found) != 1:
        what = "no timings" if not found else f"timings under {len(found)} policies"
        raise SynthError(f"{what} of {device} {quant}, FlashInfer {flashinfer}, in {', '.join(map(str, folders))}")
    return found[0]


def load_shapes(
    roots: Path | str | Iterable[Path | str],
    device: str | None = None,
    quant: str | None = None,
    flashinfer: str | None = None,
    *,
    problems: list[Problem] | None = None,
) -> list[ShapeTimings]:
    """Load as :func:`load` does, but one :class:`ShapeTimings` for each origin and shape."""
    found: list[Problem] = []
    parts = []
    for file in map(open_file, _files(roots)):
        origin = file.origin
        wanted = zip((device, quant, flashinfer), (origin.device, origin.quant, origin.flashinfer), strict=True)
        if all(value in (None, own) for value, own in wanted):
            parts.append(file.timings(found))
    hand_over(found, problems)
    return _merge_equal(parts)


def combine(parts: Sequence[ShapeTimings]) -> list[Timings]:
    """Concatenate timings into one :class:`Timings` for each origin, sorted."""
    by_origin: dict[Origin, list[ShapeTimings]] = {}
    for part in _merge_equal(parts):
        by_origin.setdefault(part.origin, []).append(part)
    return [_concatenate(origin, by_origin[origin]) for origin in sorted(by_origin)]


def merge(parts: Sequence[ShapeTimings]) -> ShapeTimings:
    """Merge the timings of one shape and origin.

    A pass of a later part is a pass that is already there when number and provenance are equal and no cell has two
    different outcomes, or when it repeats one under another number. Any other pass keeps its number where that is
    free and gets the next free one where not. So equal files count once, and no timing is dropped as a duplicate
    of a different one.

    Raises
    ------
    SynthError
        When the parts are of different shapes or origins, or disagree on what a tactic id is; the line names both
        files and the field.
    """
    if not parts:
        raise SynthError("nothing to merge; name at least one measurements file")
    merged = parts[0]
    for part in parts[1:]:
        merged = _merge_two(merged, part)
    return merged


def _files(roots: Path | str | Iterable[Path | str]) -> list[Path]:
    """Return the measurements files of `roots`, each once, those of a folder sorted."""
    files: dict[Path, Path] = {}
    for root in [roots] if isinstance(roots, (str, Path)) else roots:
        path = Path(root)
        if path.is_dir():
            inside = sorted(p for p in path.rglob(f"*{SUFFIX}") if not p.name.startswith(".") and p.is_file())
        elif path.exists():
            inside = [path]
        else:
            raise SynthError(f"{path} does not exist; name a folder of measurements or a measurements file")
        for p in inside:
            files.setdefault(p.resolve(), p)
    return list(files.values())


def _merge_equal(parts: Iterable[ShapeTimings]) -> list[ShapeTimings]:
    groups: dict[tuple[Origin, MoEShape], list[ShapeTimings]] = {}
    for part in parts:
        groups.setdefault((part.origin, part.shape), []).append(part)
    return [merge(groups[key]) for key in sorted(groups)]


def _merge_two(a: ShapeTimings, b: ShapeTimings) -> ShapeTimings:
    _check_mergeable(a, b)
    ours, theirs = _outcomes(a), _outcomes(b)
    number: dict[int, int] = {}
    for n, cells in theirs.items():
        same = [
            m
            for m in [n, *ours]
            if m in ours
            and m not in number.values()
            and a.passes[m] == b.passes[n]
            and all(ours[m].get(c, o) == o for c, o in cells.items())
            # Under another number it is the same pass only where it repeats timings.
            and (m == n or not cells or any(c in ours[m] for c in cells))
        ]
        if same:
            number[n] = same[0]
    for n in theirs:
        taken = {*ours, *number.values()}
        if n not in number:
            number[n] = n if n not in taken else max(taken | theirs.keys()) + 1
    rows = {row.cell: row for row in a.rows()}
    for row in b.rows():
        moved = row._replace(pass_=number[row.pass_])
        rows.setdefault(moved.cell, moved)
    passes = {**a.passes, **{number[n]: p for n, p in b.passes.items()}}
    return ShapeTimings.of_checked(
        rows.values(),
        {**a.tactics, **b.tactics},
        origin=a.origin,
        shape=a.shape,
        label=a.label,
        passes={n: passes[n] for n in sorted(passes)},
        path=a.path or b.path,
    )


def _check_mergeable(a: ShapeTimings, b: ShapeTimings) -> None:
    fields: list[tuple[str, object, object]] = [
        (name, getattr(a.origin, name), getattr(b.origin, name))
        for name in ("device", "arch", "flashinfer", "quant", "policy", "simulated")
    ]
    fields.append(("shape", a.shape, b.shape))
    fields += [(f"tactic {i}", a.tactics[i], b.tactics[i]) for i in a.tactics if i in b.tactics]
    for name, ours, theirs in fields:
        if ours != theirs:
            raise SynthError(
                f"can't merge {_name(a)} and {_name(b)}: {name} is {ours} in the first and {theirs} in the second; "
                "keep them in separate folders"
            )


def _name(timings: ShapeTimings) -> str:
    return str(timings.path) if timings.path is not None else f"the new timings of {timings.shape} ({timings.label})"


def _outcomes(timings: ShapeTimings) -> dict[int, dict[tuple[int, ...], Row]]:
    """Return each pass's rows by cell, such that equal outcomes are equal rows."""
    found: dict[int, dict[tuple[int, ...], Row]] = {n: {} for n in timings.passes}
    for row in timings.rows():
        # No NaN is equal to another, and a pass may get another number.
        found[row.pass_][row.cell[1:]] = row._replace(pass_=0, ms=row.ms if row.error is None else 0.0)
    return found


def _concatenate(origin: Origin, parts: Sequence[ShapeTimings]) -> Timings:
    table = tactic_table(origin)
    if table is None:
        table, parts = _renumbered(origin, parts)
    return Timings(
        origin=origin,
        table=table,
        shapes=tuple(part.shape for part in parts),
        labels=tuple(part.label for part in parts),
        passes=tuple(part.passes for part in parts),
        shape=np.repeat(np.arange(len(parts), dtype=np.int64), [len(part) for part in parts]),
        **{name: np.concatenate([getattr(part, name) for part in parts]) for name in COLUMNS},
    )


def _renumbered(origin: Origin, parts: Sequence[ShapeTimings]) -> tuple[TacticTable, list[ShapeTimings]]:
    """Make a table of the tactics that were timed, in the order of their ids, and give the rows its ids."""
    used = [list(zip(part.stage.tolist(), part.tactic.tolist(), strict=True)) for part in parts]
    lowest: dict[tuple[int, str], int] = {}
    for part, cells in zip(parts, used, strict=True):
        for stage, i in set(cells):
            key = stage, part.tactics[i]
            lowest[key] = min(i, lowest.get(key, i))
    order = sorted(lowest, key=lambda key: (key[0], lowest[key], key[1]))
    gemm1, gemm2 = (tuple(Tactic.parse(text) for s, text in order if s == stage) for stage in STAGES)
    new_id = {key: i for i, key in enumerate(order)}
    ids = [[new_id[s, part.tactics[i]] for s, i in cells] for part, cells in zip(parts, used, strict=True)]
    return TacticTable(origin.flashinfer, origin.arch, origin.quant, gemm1, gemm2), [
        replace(part, tactic=np.array(tactic, dtype=np.int64)) for part, tactic in zip(parts, ids, strict=True)
    ]
