"""Outputs appear complete or not at all, and are continued only by the job that began them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from invdist.runtime.errors import UserError
from invdist.serving.output import OutputFolder, check_free

JOB = {"kind": "test", "threshold": 0.5}


def _interrupted(where: Path, job: dict = JOB) -> None:
    """What a killed process leaves: the job and one file."""
    OutputFolder(where, job).__enter__().write("one", b"1")


def test_the_folder_has_its_name_only_when_it_is_complete(tmp_path: Path) -> None:
    where = tmp_path / "a folder with spaces"
    with OutputFolder(where, JOB) as output:
        output.write("one", b"1")
        assert not where.exists()
        assert output.finish({"rows": 1}) == {**JOB, "rows": 1}
    assert json.loads((where / "manifest.json").read_text()) == {**JOB, "rows": 1}
    assert sorted(path.name for path in where.iterdir()) == ["manifest.json", "one"]
    assert [path.name for path in tmp_path.iterdir()] == [where.name]


@pytest.mark.parametrize("resume", [False, True])
def test_after_an_error_nothing_is_left_unless_it_can_be_continued(tmp_path: Path, resume: bool) -> None:
    def fail() -> None:
        with OutputFolder(tmp_path / "out", JOB, resume=resume) as output:
            output.write("one", b"1")
            with output.create("half") as file:
                file.write(b"half")
                raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert left == (["out.partial/job.json", "out.partial/one"] if resume else [])
    assert resume or not list(tmp_path.iterdir())


@pytest.mark.parametrize("resume", [False, True])
def test_a_full_disk_is_told_with_what_is_left(tmp_path: Path, resume: bool) -> None:
    def fill() -> None:
        with OutputFolder(tmp_path / "out", JOB, resume=resume):
            raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match=r"cannot write .*out: no room on the disk") as caught:
        fill()
    kept = f"finished parts are kept in {tmp_path}/out.partial: repeat the command to continue"
    assert (kept if resume else "nothing was kept") in str(caught.value)
    assert (tmp_path / "out.partial").exists() == resume


def test_two_writers_of_one_file_do_not_mix(tmp_path: Path) -> None:
    with OutputFolder(tmp_path / "out", JOB) as output:
        with output.create("part") as first:
            first.write(b"complete")
            unfinished = output.create("part")
            unfinished.__enter__().write(b"to")  # and is killed there
        with output.folder.open("part") as file:
            assert file.read() == b"complete"
        output.finish({})
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["manifest.json", "part"]


def test_an_interrupted_job_is_continued_or_begun_anew(tmp_path: Path) -> None:
    _interrupted(tmp_path / "out")
    assert "one" in OutputFolder(tmp_path / "out", JOB, resume=True).__enter__().folder.files()
    assert "one" not in OutputFolder(tmp_path / "out", JOB).__enter__().folder.files()


def test_another_job_does_not_continue(tmp_path: Path) -> None:
    _interrupted(tmp_path / "out")
    with pytest.raises(UserError, match=r"out\.partial holds an unfinished output .* another threshold"):
        OutputFolder(tmp_path / "out", {**JOB, "threshold": 0.7}, resume=True).__enter__()
    assert (tmp_path / "out.partial" / "one").exists()


@pytest.mark.parametrize("content", [None, b"{", b"[]"])
def test_nothing_of_others_is_removed(tmp_path: Path, content: bytes | None) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "precious").touch()
    if content is not None:
        (tmp_path / "out.partial" / "job.json").write_bytes(content)
    with pytest.raises(UserError, match=r"out\.partial is not an unfinished output.*remove it or choose another"):
        OutputFolder(tmp_path / "out", JOB).__enter__()
    assert (tmp_path / "out.partial" / "precious").exists()


@pytest.mark.parametrize("target", ["folder", "nowhere", "file"])
def test_a_linked_partial_is_told(tmp_path: Path, target: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "job.json").write_text(json.dumps(JOB))
    (tmp_path / "file").touch()
    (tmp_path / "out.partial").symlink_to(tmp_path / target)
    with pytest.raises(UserError, match=r"out\.partial is a symbolic link.*remove it or choose another --output"):
        OutputFolder(tmp_path / "out", JOB).__enter__()
    assert (tmp_path / "folder" / "job.json").exists()


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    with pytest.raises(UserError, match="already there; choose another --output"):
        check_free(tmp_path / "out")
    (tmp_path / "file.partial").touch()
    with pytest.raises(UserError, match=r"file\.partial is a file"):
        OutputFolder(tmp_path / "file", JOB).__enter__()
    late = OutputFolder(tmp_path / "late", JOB).__enter__()
    (tmp_path / "late").mkdir()
    with pytest.raises(UserError, match="already there"):
        late.finish({})


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write"):
        OutputFolder(tmp_path / "file" / "out", JOB).__enter__()
