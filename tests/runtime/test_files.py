"""Files and folders that are whole or not there, whatever goes wrong while they are written."""

# ruff: noqa: PT012 - what is tested is the block that fails

from __future__ import annotations

import os
from pathlib import Path

import pyarrow.fs as pafs
import pytest

from invdist.runtime.errors import UserError
from invdist.runtime.files import Folder, new_folder, replacing, write_atomically


@pytest.mark.parametrize(("content", "expected"), [("häß\n", "häß\n".encode()), (b"\xff\x00", b"\xff\x00")])
def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path: Path, content: str | bytes, expected: bytes) -> None:
    for _ in range(2):
        write_atomically(tmp_path / "a", content)
    assert (tmp_path / "a").read_bytes() == expected
    assert os.listdir(tmp_path) == ["a"]


def test_an_error_leaves_the_old_file(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a", "old")
    with pytest.raises(KeyboardInterrupt), replacing(tmp_path / "a") as unfinished:
        unfinished.write_text("half")
        assert (tmp_path / "a").read_text() == "old"
        raise KeyboardInterrupt
    with pytest.raises(OSError, match="No such"):
        write_atomically(tmp_path / "missing" / "a", "new")
    assert (tmp_path / "a").read_text() == "old"
    assert os.listdir(tmp_path) == ["a"]


def test_a_long_name_can_be_written(tmp_path: Path) -> None:
    write_atomically(tmp_path / ("ä" * 120), "x")
    assert os.listdir(tmp_path) == ["ä" * 120]


def test_a_new_folder_appears_whole(tmp_path: Path) -> None:
    output = tmp_path / "deep" / "out"
    with new_folder(output) as folder:
        (folder / "a").write_text("x")
        assert not output.exists()
    assert os.listdir(output) == ["a"]
    assert os.listdir(output.parent) == ["out"]
    with pytest.raises(UserError, match="is already there"), new_folder(output):
        pass


def test_a_new_folder_that_fails_leaves_nothing(tmp_path: Path) -> None:
    output = tmp_path / "out"
    with pytest.raises(ZeroDivisionError), new_folder(output) as folder:
        (folder / "a").write_text("x")
        _ = 1 / 0
    with pytest.raises(UserError, match=f"cannot write {output}: no room on the disk"), new_folder(output):
        raise OSError(28, "No space left on device")
    assert os.listdir(tmp_path) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"), new_folder(tmp_path / "file" / "out"):
        pass


def test_a_new_folder_overwrites_nothing_that_appears_meanwhile(tmp_path: Path) -> None:
    output = tmp_path / "out"
    with pytest.raises(UserError, match="appeared while it was being written"), new_folder(output):
        output.mkdir()
        (output / "theirs").write_text("x")
    assert os.listdir(tmp_path) == ["out"]
    assert os.listdir(output) == ["theirs"]


@pytest.mark.parametrize("local", [True, False])
def test_a_file_of_a_folder_has_its_name_when_it_is_complete(tmp_path: Path, local: bool) -> None:
    base = pafs.LocalFileSystem()
    folder = Folder.at(tmp_path) if local else Folder(pafs.SubTreeFileSystem(str(tmp_path), base), "a")
    folder.make()
    with folder.create("x") as file:
        file.write(b"12")
        assert not local or "x" not in folder.files()
    assert folder.files() == {"x": 2}
    with pytest.raises(ZeroDivisionError), folder.create("y") as file:
        file.write(b"12")
        _ = 1 / 0
    assert not local or folder.files() == {"x": 2}
