"""Outputs are whole or not there, and continued only by the job that began them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from invdist.runtime.errors import UserError
from invdist.serving.output import Output, check_free

JOB = {"kind": "test", "threshold": 0.5}


def test_the_folder_has_its_name_only_when_it_is_whole(tmp_path: Path) -> None:
    where = tmp_path / "a folder with spaces"
    output = Output(where, JOB)
    output.write("one", b"1")
    assert not where.exists()
    output.finish({"rows": 1})
    assert json.loads((where / "manifest.json").read_text()) == {**JOB, "rows": 1}
    assert sorted(path.name for path in where.iterdir()) == ["manifest.json", "one"]
    assert [path.name for path in tmp_path.iterdir()] == [where.name]


def test_a_file_that_broke_off_is_not_there(tmp_path: Path) -> None:
    output = Output(tmp_path / "out", JOB)

    def break_off() -> None:
        with output.create("half") as file:
            file.write(b"half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        break_off()
    assert "half" not in output.folder.files()
    output.finish({})
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["manifest.json"]


def test_two_writers_of_one_file_do_not_mix(tmp_path: Path) -> None:
    output = Output(tmp_path / "out", JOB)
    with output.create("part") as first:
        first.write(b"whole")
        unfinished = output.create("part")
        unfinished.__enter__().write(b"to")  # and is killed there
    with output.folder.open("part") as file:
        assert file.read() == b"whole"


def test_an_interrupted_job_is_continued_or_begun_anew(tmp_path: Path) -> None:
    Output(tmp_path / "out", JOB).write("one", b"1")
    assert "one" in Output(tmp_path / "out", JOB, resume=True).folder.files()
    assert "one" not in Output(tmp_path / "out", JOB).folder.files()


def test_another_job_does_not_continue(tmp_path: Path) -> None:
    Output(tmp_path / "out", JOB).write("one", b"1")
    with pytest.raises(UserError, match=r"out\.partial holds an unfinished output .* another threshold"):
        Output(tmp_path / "out", {**JOB, "threshold": 0.7}, resume=True)


def test_nothing_of_others_is_removed_or_overwritten(tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "precious").touch()
    with pytest.raises(UserError, match="is in the way"):
        Output(tmp_path / "out", JOB)
    assert (tmp_path / "out.partial" / "precious").exists()
    (tmp_path / "out").touch()
    with pytest.raises(UserError, match="already there; choose another --output"):
        check_free(tmp_path / "out")
    late = Output(tmp_path / "late", JOB)
    (tmp_path / "late").mkdir()
    with pytest.raises(UserError, match="already there"):
        late.finish({})


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write"):
        Output(tmp_path / "file" / "out", JOB)
