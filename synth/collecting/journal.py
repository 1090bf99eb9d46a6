"""The journal of a run: JSON lines, one a timing, appended whole and never rewritten.

The first line is the head: what is timed (device, layers, policy) and the provenance (driver, CUDA, torch, clocks,
date). Every start adds a ``session`` line, every timing a line such as ::

    {"layer": 0, "pass": 1, "stage": 2, "tokens": 256, "tactic": 63, "ms": 0.213, "seconds": 0.009, "worker": "gpu0"}

with ``error`` in place of ``ms`` where the tactic failed, ``throttled`` where the GPU was, and ``reference`` where it
is the reference cell's time that is meant. A timing counts once its line is there; a torn last line is cut off when
the journal is opened again.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from synth.catalog import untrusted
from synth.catalog.schemes import STAGES
from synth.catalog.shapes import MoEShape
from synth.choosing.plan import Layer
from synth.errors import SynthError
from synth.flashinfer.tactics import load_table
from synth.timings.origin import Origin
from synth.timings.rows import Problem, Row

#: Version of the journal's format.
FORMAT = 1
#: A sweep of one layer has some 200 KiB.
_MAX_BYTES = 256 << 20
#: Seconds between two calls of fsync.
SYNC_EVERY_S = 1.0
#: A journal goes on only where these are what they were.
MUST_MATCH = ("device", "arch", "flashinfer", "driver", "cuda", "torch", "simulated")

Write = Callable[[int, bytes], int]


class JournalError(SynthError):
    """The journal can't be written any more; what it holds is safe."""


@dataclass(frozen=True)
class Entry:
    """A timing in a journal.

    Attributes
    ----------
    layer : int
        Index into the head's layers.
    row : Row
        The timing itself.
    seconds : float
        What it cost.
    worker : str
        Who took it.
    session : int
        In which start of the run, from 0.
    reference : bool
        It is the layer's reference cell, timed to see drift.
    """

    layer: int
    row: Row
    seconds: float
    worker: str
    session: int = 0
    reference: bool = False

    @property
    def key(self) -> tuple[int, int, int, int, int]:
        """What a journal holds only once, references aside."""
        return self.layer, *self.row.cell

    def dumps(self) -> dict[str, Any]:
        """Return the line's values; the session follows from the line's place."""
        row = self.row
        line: dict[str, Any] = {"layer": self.layer, "pass": row.pass_, "stage": row.stage, "tokens": row.tokens}
        line["tactic"] = row.tactic
        if row.error is None:
            line["ms"] = row.ms
        else:
            line["error"] = row.error
        if row.throttled:
            line["throttled"] = True
        if self.reference:
            line["reference"] = True
        return {**line, "seconds": round(self.seconds, 6), "worker": self.worker}


@dataclass(frozen=True)
class Head:
    """The first line of a journal; its values in this order.

    Attributes
    ----------
    run : str
        Unique for every journal.
    plan : str
        Identity of the plan.
    layers : tuple of Layer
        What is timed.
    device, arch, flashinfer : str
        As in :class:`synth.timings.origin.Origin`.
    policy : mapping
        Timing policy.
    simulated : bool
        The numbers are not from a GPU.
    environment : dict
        What the first worker said of itself.
    date : str
        When the run began.
    """

    run: str
    plan: str
    device: str
    arch: str
    flashinfer: str
    policy: Mapping[str, Any]
    simulated: bool
    date: str
    environment: Mapping[str, Any]
    layers: tuple[Layer, ...]

    def dumps(self) -> dict[str, Any]:
        """Return the line's values."""
        layers = [{**vars(layer), "shape": str(layer.shape)} for layer in self.layers]
        return {"synth journal": FORMAT, **vars(self), "layers": layers}

    @classmethod
    def loads(cls, data: Mapping[str, Any]) -> Head:
        """Read a line's values.

        Raises
        ------
        SynthError, KeyError, TypeError
            When they aren't a head's.
        """
        if data["synth journal"] != FORMAT:
            raise SynthError(f"has format {data['synth journal']!r} and this version of synth reads {FORMAT}")
        layers = tuple(
            Layer(MoEShape.parse(x["shape"]), x["quant"], x["label"], x["activation"]) for x in data["layers"]
        )
        values = {field.name: data[field.name] for field in fields(cls)}
        containers = {"policy": dict(data["policy"]), "environment": dict(data["environment"])}
        head = cls(**{**values, **containers, "layers": layers, "simulated": data["simulated"] is not False})
        for layer in layers:
            head.origin(layer)
            load_table(head.arch, layer.quant, head.flashinfer)
        if not all(isinstance(x, str) for x in (head.run, head.plan, head.date)):
            raise TypeError("run, plan or date is not text")
        return head

    def origin(self, layer: Layer) -> Origin:
        """Return what a layer's timings may be fitted with."""
        return Origin.make(self.device, self.arch, layer.quant, self.flashinfer, self.policy, self.simulated)


@dataclass(frozen=True)
class Content:
    """What a journal holds.

    Attributes
    ----------
    head : Head
        Its first line.
    sessions : tuple of dict
        One for each start: date and environment.
    entries : tuple of Entry
        Timings, each cell once.
    references : tuple of Entry
        Reference timings, in order.
    problems : tuple of Problem
        Lines that can't be read.
    size : int
        Bytes up to the end of the last whole line.
    torn : int
        Bytes after it.
    """

    head: Head
    sessions: tuple[dict[str, Any], ...]
    entries: tuple[Entry, ...]
    references: tuple[Entry, ...]
    problems: tuple[Problem, ...]
    size: int
    torn: int


def is_journal(path: Path) -> bool:
    """Say whether a file looks like a journal."""
    try:
        with path.open("rb") as f:
            return f.read(32).startswith(b'{"synth journal"')
    except OSError as e:
        raise SynthError(f"can't read {path}: {e.strerror or e}") from e


def read_journal(path: Path) -> Content:
    """Read a journal, whether its run is over or not.

    Raises
    ------
    SynthError
        When it can't be read or its head is damaged.
    """
    content = _parse(path, untrusted.read_bytes(path, _MAX_BYTES, "journal"))
    if content is None:
        raise SynthError(f"{path} is not a journal or was cut short before its first timing; remove it and start again")
    return content


class Journal:
    """An open journal; only one process can have it open.

    Parameters
    ----------
    path : Path
        Made if it isn't there, with its folder.
    write : callable
        ``os.write``, or what a test puts in its place.

    Attributes
    ----------
    content : Content or None
        What was there when it was opened; None for a new one.

    Raises
    ------
    SynthError
        When another run has it open, or it can't be read or written.
    """

    def __init__(self, path: Path, write: Write = os.write) -> None:
        self.path = path
        self.content: Content | None = None
        self._write = write
        self._synced = time.monotonic()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as e:
            raise SynthError(f"can't open {path}: {e.strerror or e}; name another place or free some space") from e
        try:
            self._open()
        except BaseException:
            os.close(self._fd)
            raise

    def _open(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise SynthError(f"another run is writing {self.path}; wait for it or stop it") from None
        try:
            raw = _read_all(self._fd)
        except OSError as e:
            raise SynthError(f"can't read {self.path}: {e.strerror or e}") from e
        self.content = _parse(self.path, raw)
        self._size = self.content.size if self.content is not None else 0
        if self._size < len(raw):
            os.ftruncate(self._fd, self._size)

    def begin(self, head: Head) -> None:
        """Write the head of a new journal."""
        self._append(head.dumps())

    def session(self, date: str, environment: Mapping[str, Any]) -> None:
        """Say that the run starts (again)."""
        self._append({"session": {"date": date, "environment": dict(environment)}})

    def add(self, entry: Entry) -> None:
        """Append a timing.

        Raises
        ------
        JournalError
            When it can't be written; the journal is as it was before.
        """
        self._append(entry.dumps())

    def note(self, text: str) -> None:
        """Append a line for people: what was skipped, which worker died."""
        self._append({"note": text})

    def close(self) -> None:
        """Sync and close; an empty journal is removed."""
        try:
            if self._size:
                os.fsync(self._fd)
            else:
                self.path.unlink(missing_ok=True)
        except OSError as e:
            raise self._failed(e) from e
        finally:
            os.close(self._fd)

    def _append(self, line: Mapping[str, Any]) -> None:
        data = json.dumps(line, ensure_ascii=False, allow_nan=False).encode("utf-8", "backslashreplace") + b"\n"
        try:
            rest = data
            while rest:
                rest = rest[self._write(self._fd, rest) :]
            self._size += len(data)
            if time.monotonic() - self._synced >= SYNC_EVERY_S:
                os.fsync(self._fd)
                self._synced = time.monotonic()
        except OSError as e:
            # Half a line must not stay; where even this fails, opening the journal again cuts it off.
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)
            raise self._failed(e) from e

    def _failed(self, e: OSError) -> JournalError:
        return JournalError(
            f"can't write {self.path}: {e.strerror or e}; nothing that it holds is lost: free some space and run the "
            "same command again"
        )


def _read_all(fd: int) -> bytes:
    parts = []
    offset = 0
    while part := os.pread(fd, 1 << 24, offset):
        parts.append(part)
        offset += len(part)
    return b"".join(parts)


def _parse(path: Path, raw: bytes) -> Content | None:
    """Read a journal's bytes; None where not even the head is whole."""
    size = raw.rfind(b"\n") + 1
    if size == 0:
        if raw and not b'{"synth journal"'.startswith(raw[:16]):
            raise SynthError(f"{path} is not a journal; move it elsewhere")
        return None
    lines = raw[:size].split(b"\n")[:-1]
    try:
        head = Head.loads(json.loads(lines[0]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, SynthError) as e:
        what = f"its head {e}" if isinstance(e, SynthError) else "its first line is not a journal's head"
        raise SynthError(f"{path}: {what}; restore the file or move it elsewhere") from None
    sessions: list[dict[str, Any]] = []
    entries: dict[tuple[int, int, int, int, int], Entry] = {}
    references: list[Entry] = []
    problems: list[Problem] = []
    for number, line in enumerate(lines[1:], 2):
        try:
            data = json.loads(line)
            if "session" in data:
                sessions.append(dict(data["session"]))
                continue
            if "note" in data:
                continue
            entry = _entry(head, data, max(len(sessions) - 1, 0))
            if entry.reference:
                references.append(entry)
            elif entry.key in entries:
                problems.append(Problem(path, number, "this cell is there already"))
            else:
                entries[entry.key] = entry
        except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
            problems.append(Problem(path, number, "is not a timing"))
    return Content(
        head, tuple(sessions), tuple(entries.values()), tuple(references), tuple(problems), size, len(raw) - size
    )


def _entry(head: Head, data: Mapping[str, Any], session: int) -> Entry:
    numbers = [data[name] for name in ("layer", "pass", "stage", "tokens", "tactic")]
    if any(type(n) is not int for n in numbers):
        raise ValueError("not a whole number")
    layer, pass_, stage, tokens, tactic = numbers
    error = data.get("error")
    ms = math.nan if error is not None else float(data["ms"])
    if (
        not 0 <= layer < len(head.layers)
        or pass_ < 1
        or stage not in STAGES
        or not 1 <= tokens < 2**31
        or tactic not in load_table(head.arch, head.layers[layer].quant, head.flashinfer).ids(stage)
        or (error is None and not 0 < ms < math.inf)
        or not isinstance(error, (str, type(None)))
    ):
        raise ValueError("out of range")
    seconds = float(data["seconds"])
    if not 0 <= seconds < math.inf:
        raise ValueError("out of range")
    row = Row(pass_, stage, tokens, tactic, ms, data.get("throttled") is True, error)
    return Entry(layer, row, seconds, str(data["worker"]), session, data.get("reference") is True)
