from __future__ import annotations

import errno
import json
import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up import DEVICE, LARGE, SMALL

from synth.collecting.journal import Entry, Head, Journal, JournalError, read_journal
from synth.errors import SynthError
from synth.flashinfer.tactics import load_table
from synth.timings.origin import DEFAULT_POLICY
from synth.timings.rows import Row

HEAD = Head("r", "p", DEVICE, "sm90", "0.7.4", dict(DEFAULT_POLICY), True, "today", {"driver": "580"}, (SMALL, LARGE))
IDS = {stage: load_table("sm90", "bf16").ids(stage) for stage in (1, 2)}


@st.composite
def entries(draw: Callable[..., object]) -> Entry:
    stage = draw(st.sampled_from((1, 2)))
    error = draw(st.none() | st.text(max_size=20))
    ms = math.nan if error is not None else draw(st.floats(1e-6, 1e6))
    row = Row(
        draw(st.integers(1, 3)), stage, draw(st.integers(1, 99999)), draw(st.sampled_from(IDS[stage])), ms,
        error is None and draw(st.booleans()), error,
    )  # fmt: skip
    seconds = round(draw(st.floats(0, 100)), 6)
    return Entry(draw(st.integers(0, 1)), row, seconds, draw(st.text(max_size=5)))


def written(path: Path, items: list[Entry]) -> bytes:
    journal = Journal(path)
    journal.begin(HEAD)
    journal.session("today", {"driver": "580"})
    for item in items:
        journal.add(item)
    journal.close()
    return path.read_bytes()


def same(a: tuple[Entry, ...], b: list[Entry]) -> bool:
    return [repr(x) for x in a] == [repr(x) for x in b]


def unique(items: list[Entry]) -> list[Entry]:
    return list({item.key: item for item in items}.values())


lists = st.lists(entries(), max_size=8).map(unique)


@given(lists)
def test_what_is_written_is_read_back(items: list[Entry]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "j.jsonl"
        text = written(path, items)
        content = read_journal(path)
        assert same(content.entries, items)
        assert content.head == HEAD
        assert content.sessions == ({"date": "today", "environment": {"driver": "580"}},)
        assert not content.problems and content.torn == 0
        assert text.count(b"\n") == 2 + len(items)


@given(lists, st.data())
def test_a_journal_cut_anywhere_goes_on_from_its_last_whole_line(items: list[Entry], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "j.jsonl"
        text = written(path, items)
        cut = data.draw(st.integers(0, len(text)))
        path.write_bytes(text[:cut])
        whole = text[:cut].count(b"\n")
        journal = Journal(path)
        if whole == 0:
            assert journal.content is None
            journal.begin(HEAD)
            kept: list[Entry] = []
        else:
            assert journal.content is not None
            kept = items[: max(whole - 2, 0)]
            assert same(journal.content.entries, kept)
            assert journal.content.torn == cut - (text[:cut].rfind(b"\n") + 1)
        if whole < 2:
            journal.session("later", {})
        for item in items[len(kept) :]:
            journal.add(item)
        journal.close()
        assert same(read_journal(path).entries, items)


@given(lists, st.binary(min_size=1, max_size=6), st.data())
def test_damage_costs_the_lines_that_it_touches(items: list[Entry], junk: bytes, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "j.jsonl"
        text = written(path, items)
        at = data.draw(st.integers(0, len(text) - 1))
        path.write_bytes(text[:at] + junk + text[at + len(junk) :])
        hit = text[: at + len(junk)].count(b"\n") + 1
        first = text[:at].count(b"\n") + 1
        try:
            content = read_journal(path)
        except SynthError as e:
            assert first == 1
            assert str(path) in str(e)
            return
        untouched = [x for n, x in enumerate(items, 3) if not first <= n <= hit]
        got = {repr(x) for x in content.entries}
        # A damaged line may read as another cell's, which then is there twice.
        lost = [x for x in untouched if repr(x) not in got]
        assert len(lost) <= 1 and (not lost or content.problems)


def entry(tactic: int, ms: float = 1.0) -> Entry:
    return Entry(0, Row(1, 1, 16, tactic, ms), 0.01, "gpu0")


def test_only_one_run_writes_a_journal(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.jsonl")
    with pytest.raises(SynthError, match="another run is writing"):
        Journal(tmp_path / "j.jsonl")
    journal.close()
    Journal(tmp_path / "j.jsonl").close()


def test_an_empty_journal_leaves_nothing_behind(tmp_path: Path) -> None:
    Journal(tmp_path / "j.jsonl").close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EFBIG, errno.EIO])
def test_a_full_disk_keeps_every_whole_line(tmp_path: Path, code: int) -> None:
    room = 2600

    def write(fd: int, data: bytes) -> int:
        nonlocal room
        if room == 0:
            raise OSError(code, os.strerror(code))
        n = os.write(fd, data[:room])
        room -= n
        return n

    path = tmp_path / "j.jsonl"
    journal = Journal(path, write)
    journal.begin(HEAD)
    journal.session("today", {})
    added = []
    with pytest.raises(JournalError, match="nothing that it holds is lost"):
        for i in IDS[1]:
            journal.add(entry(i))
            added.append(entry(i))
    journal.close()
    assert len(added) > 3
    assert path.read_bytes().endswith(b"}\n")
    assert same(read_journal(path).entries, added)


@pytest.mark.parametrize(
    "text",
    ["", "hello\n", "{}\n", "[1]\n", '{"synth journal": 2}\n', '{"synth journal": 1}\n', "# {}\npass\n", "\0\0\n"],
)
def test_other_files_are_refused_and_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "j.jsonl"
    path.write_text(text)
    with pytest.raises(SynthError, match=r"j\.jsonl"):
        read_journal(path)
    if text:
        with pytest.raises(SynthError, match=r"j\.jsonl"):
            Journal(path)
        assert path.read_text() == text


def test_a_missing_journal_is_named(tmp_path: Path) -> None:
    with pytest.raises(SynthError, match=r"can't read .*nowhere"):
        read_journal(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "change",
    [
        {"tactic": 45}, {"tactic": -1}, {"stage": 3}, {"tokens": 0}, {"pass": 0}, {"layer": 2}, {"ms": 0}, {"ms": -1},
        {"ms": "x"}, {"ms": None}, {"error": 5}, {"seconds": -1}, {"seconds": "y"}, {"tactic": True}, {"tokens": 1.5},
    ],
)  # fmt: skip
def test_a_line_that_is_no_timing_is_a_problem(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "j.jsonl"
    written(path, [entry(3)])
    with path.open("a") as f:
        f.write(json.dumps({**entry(4).dumps(), **change}) + "\n")
    content = read_journal(path)
    assert same(content.entries, [entry(3)])
    assert [p.row for p in content.problems] == [4]


def test_a_cell_that_is_there_twice_counts_once(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    written(path, [entry(3, 1.0), entry(3, 2.0)])
    content = read_journal(path)
    assert same(content.entries, [entry(3, 1.0)])
    assert "there already" in str(content.problems[0])
