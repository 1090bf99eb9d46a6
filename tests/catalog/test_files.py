from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from synth.catalog.files import write_atomically
from synth.errors import SynthError


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_a_file_is_written_in_folders_that_do_not_exist_yet(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "c.bin"
    write_atomically(path, b"\0\xff")
    assert path.read_bytes() == b"\0\xff" and names(path.parent) == ["c.bin"]


def test_a_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "x"
    for data in (b"long " * 100, b"short", b""):
        write_atomically(path, data)
        assert path.read_bytes() == data
    assert names(tmp_path) == ["x"]


def test_permissions_are_those_of_a_plain_file(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(b"")
    write_atomically(tmp_path / "x", b"")
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


def test_a_failed_rename_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for step in ("replace", "fsync"):
        with monkeypatch.context() as m:
            m.setattr(os, step, fail)
            with pytest.raises(SynthError, match="No space left on device") as e:
                write_atomically(path, b"new")
        assert str(path) in str(e.value) and "\n" not in str(e.value)
        assert path.read_bytes() == b"old" and names(tmp_path) == ["x"]


def test_a_folder_in_the_way_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(b"kept")
    for path in (tmp_path / "folder", tmp_path / "file" / "below", tmp_path / "file" / "far" / "below"):
        with pytest.raises(SynthError, match="can't write") as e:
            write_atomically(path, b"new")
        assert "\n" not in str(e.value)
    assert names(tmp_path) == ["file", "folder"] and names(tmp_path / "folder") == []
    assert (tmp_path / "file").read_bytes() == b"kept"


def test_a_name_that_is_too_long_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(SynthError, match="can't write"):
        write_atomically(tmp_path / ("x" * 300), b"new")
    assert names(tmp_path) == []
