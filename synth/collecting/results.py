"""From a journal to measurements files."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from synth.catalog.files import locked
from synth.collecting.journal import Content, Entry, is_journal, read_journal
from synth.collecting.reporters import Drift
from synth.errors import SynthError
from synth.timings.files import path_of, read, write
from synth.timings.flat import read_flat
from synth.timings.folders import merge
from synth.timings.origin import DEFAULT_POLICY
from synth.timings.rows import Problem
from synth.timings.table import ShapeTimings


def journal_timings(content: Content) -> list[ShapeTimings]:
    """Return what a journal holds as timings, one :class:`ShapeTimings` for each layer that has any."""
    head = content.head
    parts = []
    for index, layer in enumerate(head.layers):
        rows = [e.row for e in content.entries if e.layer == index]
        if not rows:
            continue
        provenance = _provenance(content, index)
        passes = {n: {**provenance, "run": f"{head.run}/{n}"} for n in {row.pass_ for row in rows}}
        parts.append(ShapeTimings.from_rows(head.origin(layer), layer.shape, layer.label, passes, rows))
    return parts


def journal_to_measurements(journal: Path, root: Path, problems: list[Problem] | None = None) -> list[Path]:
    """Put a journal's timings into the measurements files under `root` and return the files' paths.

    A journal may be added again after its run went on: its passes replace what an earlier addition of it left.

    Parameters
    ----------
    problems : list, optional
        Gets the lines of the journal, and the rows of the present files, that can't be read.

    Raises
    ------
    SynthError
        When the journal or a file can't be read or written.
    """
    content = read_journal(journal)
    if problems is not None:
        problems += content.problems
    return [_store(part, root, problems) for part in journal_timings(content)]


def add_file(
    path: Path,
    root: Path,
    *,
    device: str = "NVIDIA H200",
    arch: str = "sm90",
    flashinfer: str = "0.7.4",
    policy: Mapping[str, Any] = DEFAULT_POLICY,
    passes: Mapping[int, Mapping[str, Any]] | None = None,
    problems: list[Problem] | None = None,
) -> list[Path]:
    """Add a journal, a measurements file or a flat table to the measurements under `root`; return the files' paths.

    Parameters
    ----------
    device, arch, flashinfer, policy, passes
        What a flat table doesn't say; see :func:`synth.timings.flat.read_flat`.
    problems : list, optional
        Gets what can't be read.

    Raises
    ------
    SynthError
        When the file is none of the three, or can't be merged with what is there.
    """
    if not path.is_file():
        raise SynthError(f"{path} is not a file; name a journal, a measurements file or a flat table")
    found: list[Problem] = [] if problems is None else problems
    if is_journal(path):
        return journal_to_measurements(path, root, found)
    try:
        part = read(path, found)
    except SynthError as e:
        not_measurements = e
    else:
        return [_store(part, root, found)]
    try:
        parts = read_flat(path, device, arch, flashinfer, policy, passes, problems=found)
    except SynthError as e:
        # A file that is nearly a measurements file should hear what is wrong with that.
        raise (not_measurements if path.name.endswith(".csv.gz") and "lacks the column" in str(e) else e) from None
    return [_store(part, root, found) for part in parts]


def drift_of(layer: str, references: Sequence[Entry]) -> Drift | None:
    """Return the drift of one layer's reference cell, over the worker where it is largest."""
    runs: dict[tuple[int, str], list[Entry]] = {}
    for entry in references:
        runs.setdefault((entry.session, entry.worker), []).append(entry)
    if not runs:
        return None
    times = {key: [e.row.ms for e in run] for key, run in runs.items()}
    worst = max(times.values(), key=lambda ms: abs(ms[-1] / ms[0] - 1))
    deviation = max(max(abs(x / statistics.median(ms) - 1) for x in ms) for ms in times.values())
    row = references[0].row
    return Drift(
        layer=layer,
        stage=row.stage,
        tokens=row.tokens,
        tactic=row.tactic,
        times=sum(map(len, times.values())),
        first_ms=worst[0],
        last_ms=worst[-1],
        drift=worst[-1] / worst[0] - 1,
        max_deviation=deviation,
    )


def _provenance(content: Content, layer: int) -> dict[str, Any]:
    head = content.head
    environment = {k: v for k, v in head.environment.items() if k not in ("device", "arch", "flashinfer", "simulated")}
    provenance: dict[str, Any] = {"source": "synth collect", "date": head.date, **environment}
    if len(content.sessions) > 1:
        provenance["resumed"] = [s.get("date", "") for s in content.sessions[1:]]
    workers = {e.worker for e in content.entries if e.layer == layer}
    if len(workers) > 1:
        provenance["gpus"] = len(workers)
    drift = drift_of(str(head.layers[layer]), [e for e in content.references if e.layer == layer])
    if drift is not None:
        values = asdict(drift)
        del values["layer"]
        rounded = {name: round(values[name], 5) for name in ("drift", "max_deviation")}
        provenance["reference"] = {**values, **rounded}
    return provenance


def _store(part: ShapeTimings, root: Path, problems: list[Problem] | None) -> Path:
    """Merge `part` into its file; where that has an earlier or later state of the same run, the two become one."""
    with locked(part.origin.folder(root)):
        path = path_of(part, root)
        if not path.exists():
            return write(part, root)
        present = read(path, problems)
        there = {p["run"]: n for n, p in present.passes.items() if "run" in p}
        moved = {n: there[p["run"]] for n, p in part.passes.items() if p.get("run") in there}
        if moved:
            kept = {n: p for n, p in present.passes.items() if n not in moved.values()}
            part = _united(part, present, moved, kept.keys())
            if not kept:
                return write(part, root)
            rows = [row for row in present.rows() if row.pass_ in kept]
            present = ShapeTimings.from_rows(present.origin, present.shape, present.label, kept, rows, present.tactics)
        return write(merge([present, part]), root)


def _united(part: ShapeTimings, present: ShapeTimings, moved: dict[int, int], kept: Collection[int]) -> ShapeTimings:
    """Return `part` with its passes numbered as in `present`, and with the rows that only `present` has of them."""
    numbers = dict(moved)
    for n in sorted(part.passes.keys() - moved.keys()):
        taken = {*kept, *numbers.values()}
        numbers[n] = n if n not in taken else max(taken) + 1
    rows = {row.cell: row for row in (r._replace(pass_=numbers[r.pass_]) for r in part.rows())}
    passes = {numbers[n]: p for n, p in part.passes.items()}
    old = [row for row in present.rows() if row.pass_ in moved.values()]
    for n in moved.values():
        if sum(row.pass_ == n for row in old) > sum(cell[0] == n for cell in rows):
            passes[n] = present.passes[n]
    for row in old:
        rows.setdefault(row.cell, row)
    return ShapeTimings.from_rows(
        part.origin, part.shape, part.label, passes, rows.values(), {**present.tactics, **part.tactics}
    )
