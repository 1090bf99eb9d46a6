"""Files of a folder are replaced all at once, and what was there comes back."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synth.errors import SynthError
from synth.servers.placing import KEPT, Placed, Record, missing_folders, place, plan, read_record, undo

NAMES = ("a", "b", "c", "entries/d", "entries/e")
ALLOWED = re.compile("|".join(map(re.escape, NAMES)))
Tree = dict[str, tuple[bytes, int]]


def tree(folder: Path) -> Tree:
    """Every file with its content and mode, but for what an install keeps for itself."""
    return {
        p.relative_to(folder).as_posix(): (p.read_bytes(), p.stat().st_mode)
        for p in sorted(folder.rglob("*"))
        if p.is_file() and KEPT not in p.parts
    }


def fill(folder: Path, contents: dict[str, bytes]) -> None:
    for name, data in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def install(folder: Path, contents: dict[str, bytes], config: bytes = b"{}") -> None:
    place(folder, read_record(folder, ALLOWED), contents, config, made=missing_folders(folder))


def take_back(folder: Path) -> dict[str, str | None]:
    record = read_record(folder, ALLOWED)
    assert record is not None
    return {change.name: change.copy for change in undo(folder, record)}


contents = st.dictionaries(st.sampled_from(NAMES), st.binary(max_size=3), max_size=5)


@given(before=contents, installs=st.lists(contents, min_size=1, max_size=3), written=contents)
def test_undo_restores_what_was_there_before_the_first_install_and_loses_nothing(
    before: dict[str, bytes], installs: list[dict[str, bytes]], written: dict[str, bytes]
) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        fill(folder, before)
        original = tree(folder)
        for one in installs:
            install(folder, one)
            assert one.items() <= {name: data for name, (data, _) in tree(folder).items()}.items()
        # What an install of other files put there is gone, unless it was there before.
        assert tree(folder).keys() == original.keys() | installs[-1].keys()
        record = read_record(folder, ALLOWED)
        if record is None:
            assert tree(folder) == original
            return
        # A server writes some of the files meanwhile.
        fill(folder, {name: data for name, data in written.items() if name in record.files})
        foreign = {
            name: data
            for name, data in written.items()
            if name in record.files and not record.files[name].is_synths(_sha(data))
        }
        copies = take_back(folder)
        assert {name for name, copy in copies.items() if copy} == foreign.keys()
        kept = {copy: (folder / copy).read_bytes() for copy in copies.values() if copy}
        assert sorted(kept.values()) == sorted(foreign.values())
        for copy in kept:
            (folder / copy).unlink()
        assert tree(folder) == original
        assert not (folder / KEPT).exists()


def _sha(data: bytes) -> str:
    import hashlib

    return hashlib.sha256(data).hexdigest()


def test_a_dry_run_changes_nothing_and_says_what_is_done_then(tmp_path: Path) -> None:
    fill(tmp_path, {"a": b"1", "b": b"2"})
    wanted = {"a": b"1", "b": b"3", "c": b"4"}
    before = tree(tmp_path)
    said = plan(tmp_path, None, wanted)
    assert tree(tmp_path) == before and not (tmp_path / KEPT).exists()
    assert [(c.name, c.kind) for c in said] == [("a", "same"), ("b", "replaced"), ("c", "made")]
    assert place(tmp_path, None, wanted, b"{}") == said
    record = read_record(tmp_path, ALLOWED)
    assert record is not None
    after = tree(tmp_path)
    said = undo(tmp_path, record, dry_run=True)
    assert tree(tmp_path) == after
    assert undo(tmp_path, record) == said
    assert tree(tmp_path) == before


def test_modes_stay_and_come_back(tmp_path: Path) -> None:
    fill(tmp_path, {"a": b"1"})
    (tmp_path / "a").chmod(0o640)
    os.utime(tmp_path / "a", (1_000_000, 1_000_000))
    install(tmp_path, {"a": b"2", "b": b"2"})
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640
    umask = os.umask(0)
    os.umask(umask)
    assert (tmp_path / "b").stat().st_mode & 0o777 == 0o666 & ~umask
    take_back(tmp_path)
    stat = (tmp_path / "a").stat()
    assert (stat.st_mode & 0o777, stat.st_mtime) == (0o640, 1_000_000)


def test_folders_that_were_made_go_and_others_stay(tmp_path: Path) -> None:
    folder = tmp_path / "root/v2/env"
    assert missing_folders(folder) == ("entries", ".", "..", "../..")
    install(folder, {"entries/d": b"1"})
    take_back(folder)
    assert list(tmp_path.iterdir()) == []

    (tmp_path / "root/v2").mkdir(parents=True)
    install(folder, {"entries/d": b"1"})
    (folder / "else").write_bytes(b"")
    take_back(folder)
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["else", "env", "root", "v2"]


def test_what_a_server_wrote_between_two_installs_is_kept(tmp_path: Path) -> None:
    fill(tmp_path, {"a": b"first"})
    install(tmp_path, {"a": b"ours"})
    (tmp_path / "a").write_bytes(b"the server's")
    install(tmp_path, {"a": b"ours again"})
    assert (tmp_path / "a.synth-kept").read_bytes() == b"the server's"
    (tmp_path / "a").write_bytes(b"the server's again")
    assert take_back(tmp_path) == {"a": "a.synth-kept-2"}
    assert (tmp_path / "a").read_bytes() == b"first"
    assert (tmp_path / "a.synth-kept-2").read_bytes() == b"the server's again"


# ---- failing -----------------------------------------------------------------------------------------------


def failing_at(n: int) -> Callable[..., None]:
    """Return an ``os.replace`` whose n-th call fails, as on a disk that is full or gone."""
    calls = iter(range(n + 100))
    real = os.replace

    def replace(*args: object, **kwargs: object) -> None:
        if next(calls) == n:
            raise OSError(28, "No space left on device")
        real(*args, **kwargs)  # type: ignore[arg-type]

    return replace


@pytest.mark.parametrize("again", [False, True], ids=["first", "again"])
@pytest.mark.parametrize("n", range(6))
def test_an_error_at_any_file_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n: int, again: bool
) -> None:
    folder = tmp_path / "f"
    fill(folder, {"a": b"1", "b": b"2"})
    if again:
        install(folder, {"a": b"ours", "c": b"ours"}, b"first config")
    everything = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    # Two renames for the record and the config, then one for each of the four files.
    wanted = {"a": b"5", "b": b"6", "c": b"7", "entries/d": b"8"}
    with monkeypatch.context() as m:
        m.setattr(os, "replace", failing_at(n))
        with pytest.raises(SynthError, match="No space left on device"):
            install(folder, wanted)
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == everything
    install(folder, wanted)
    take_back(folder)
    assert {name: data for name, (data, _) in tree(folder).items()} == {"a": b"1", "b": b"2"}


def test_an_error_after_the_last_file_changes_nothing_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, {"a": b"1", "c": b"1"})
    install(tmp_path, {"a": b"2", "b": b"2", "c": b"2"})
    with monkeypatch.context() as m:
        # Record, config, three files; the sixth rename would only shorten the record.
        m.setattr(os, "replace", failing_at(5))
        install(tmp_path, {"a": b"3"})
    assert {name: data for name, (data, _) in tree(tmp_path).items()} == {"a": b"3", "c": b"1"}
    take_back(tmp_path)
    assert {name: data for name, (data, _) in tree(tmp_path).items()} == {"a": b"1", "c": b"1"}


@pytest.mark.parametrize("n", range(4))
def test_an_error_in_undo_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    fill(tmp_path, {"a": b"1", "b": b"2"})
    install(tmp_path, {"a": b"3", "b": b"4", "c": b"5", "entries/d": b"6"})
    (tmp_path / "b").write_bytes(b"the server's")
    before = tree(tmp_path)
    with monkeypatch.context() as m:
        m.setattr(os, "replace", failing_at(n))
        with pytest.raises(SynthError, match="No space left on device"):
            take_back(tmp_path)
    assert tree(tmp_path) == before
    assert take_back(tmp_path)["b"] == "b.synth-kept"


KILLED = """
import os, re, sys
from pathlib import Path
from synth.servers import placing
left = int(sys.argv[2])
real = os.replace
def replace(*args, **kwargs):
    global left
    if left == 0:
        os.kill(os.getpid(), 9)
    left -= 1
    return real(*args, **kwargs)
os.replace = replace
folder = Path(sys.argv[1])
names = ("a", "b", "c")
placing.place(folder, placing.read_record(folder, re.compile("[abc]")), {n: b"new" for n in names}, b"{}")
"""


@pytest.mark.parametrize("n", range(5))
def test_what_a_killed_install_left_can_be_taken_back_or_done_again(tmp_path: Path, n: int) -> None:
    for again in (False, True):
        folder = tmp_path / f"{again}"
        fill(folder, {"a": b"1", "b": b"2"})
        before = tree(folder)
        done = subprocess.run([sys.executable, "-c", KILLED, str(folder), str(n)], capture_output=True, text=True)
        assert done.returncode == -9, done.stderr
        record = read_record(folder, ALLOWED)
        assert (record is None) == (n < 1)
        if again or record is None:
            install(folder, {name: b"new" for name in ("a", "b", "c")})
            assert {name: data for name, (data, _) in tree(folder).items()} == {
                name: b"new" for name in ("a", "b", "c")
            }
        take_back(folder)
        assert tree(folder) == before


def test_a_file_that_was_written_meanwhile_stops_the_install(tmp_path: Path) -> None:
    fill(tmp_path, {"a": b"1", "b": b"2"})
    with pytest.raises(SynthError, match=r"b was written by somebody else meanwhile; stop the server"):
        place(tmp_path, None, {"a": b"3", "b": b"4"}, b"{}", seen={"a": _sha(b"1"), "b": _sha(b"older")})
    assert {p.name: p.read_bytes() for p in tmp_path.rglob("*")} == {"a": b"1", "b": b"2"}


# ---- links and strangers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["out", "in", "dangling"])
def test_a_file_that_is_a_link_is_refused(tmp_path: Path, where: str) -> None:
    folder = tmp_path / "f"
    fill(folder, {"b": b"1"})
    fill(tmp_path, {"outside": b"1"})
    targets = {"out": tmp_path / "outside", "in": folder / "b", "dangling": folder / "nowhere"}
    (folder / "a").symlink_to(targets[where])
    with pytest.raises(SynthError, match="is a link"):
        install(folder, {"a": b"2"})
    assert (tmp_path / "outside").read_bytes() == (folder / "b").read_bytes() == b"1"
    assert not (folder / "nowhere").exists() and not (folder / KEPT).exists()


def test_a_folder_in_it_that_is_a_link_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "f"
    folder.mkdir()
    (tmp_path / "elsewhere").mkdir()
    (folder / "entries").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SynthError, match="entries is a link"):
        install(folder, {"entries/d": b"2"})
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize("which", [KEPT, f"{KEPT}/before", f"{KEPT}/record.json", f"{KEPT}/config.json"])
def test_links_among_what_is_kept_are_refused(tmp_path: Path, which: str) -> None:
    folder = tmp_path / "f"
    fill(folder, {"a": b"1"})
    install(folder, {"a": b"2"})
    (folder / which).rename(tmp_path / "moved")
    (folder / which).symlink_to(tmp_path / "moved")
    with pytest.raises(SynthError, match="is a link, which synth never makes"):
        read_record(folder, ALLOWED)


def test_a_copy_is_not_written_through_a_link_that_waits_for_it(tmp_path: Path) -> None:
    folder = tmp_path / "f"
    fill(folder, {"a": b"1", "b": b"1"})
    fill(tmp_path, {"outside": b"precious"})
    install(folder, {"a": b"2"})
    (folder / KEPT / "before" / "b").symlink_to(tmp_path / "outside")
    install(folder, {"a": b"2", "b": b"2"})
    assert (tmp_path / "outside").read_bytes() == b"precious"
    take_back(folder)
    assert (folder / "b").read_bytes() == b"1"


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "entries/../../outside", "other", ""])
def test_a_record_that_names_other_files_is_refused(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "f"
    fill(folder, {"a": b"1"})
    fill(tmp_path, {"outside": b"precious"})
    install(folder, {"a": b"2"})
    record = json.loads((folder / KEPT / "record.json").read_text())
    record["files"][name] = {"before": None, "after": [_sha(b"precious")]}
    (folder / KEPT / "record.json").write_text(json.dumps(record))
    with pytest.raises(SynthError, match="is not a record"):
        read_record(folder, ALLOWED)
    assert (tmp_path / "outside").read_bytes() == b"precious"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)


@given(
    data=st.binary(max_size=40)
    | json_values.map(lambda v: json.dumps(v).encode())
    | st.fixed_dictionaries({"files": json_values, "made": json_values}).map(lambda v: json.dumps(v).encode())
)
def test_a_damaged_record_is_an_error_of_one_line_and_never_a_traceback(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / KEPT).mkdir()
        (folder / KEPT / "record.json").write_bytes(data)
        try:
            record = read_record(folder, ALLOWED)
        except SynthError as e:
            assert str(folder) in str(e) and "\n" not in str(e)
        else:
            # Nothing is named by it.
            assert record == Record({}, record.made if record else ())


def test_a_damaged_original_is_not_restored(tmp_path: Path) -> None:
    fill(tmp_path, {"a": b"1", "b": b"1"})
    install(tmp_path, {"a": b"2", "b": b"2"})
    (tmp_path / KEPT / "before" / "b").write_bytes(b"other")
    with pytest.raises(SynthError, match="the original can't be restored"):
        take_back(tmp_path)
    assert {name: data for name, (data, _) in tree(tmp_path).items()} == {"a": b"2", "b": b"2"}


def test_the_original_and_every_content_of_synths_are_known_as_such() -> None:
    placed = Placed("0" * 64, ("1" * 64, "2" * 64))
    assert all(placed.is_synths(c * 64) for c in "012")
    assert not placed.is_synths("3" * 64) and not placed.is_synths(None)
    assert Placed(None, ()).is_synths(None)
