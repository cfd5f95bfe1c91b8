"""`invdist COMMAND`: one door to the modules, nothing else."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from invdist.cli import doctor
from invdist.cli import main as cli
from tests.conftest import REPOSITORY


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert listed == list(cli.COMMANDS)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_its_module(name: str) -> None:
    assert importlib.util.find_spec(cli.module_of(name)) is not None


def test_every_module_that_is_a_command_is_listed() -> None:
    files = [REPOSITORY / "invdist" / "train.py", *(REPOSITORY / "invdist" / "cli").glob("*.py")]
    commands = {file.stem for file in files if "def main(argv" in file.read_text() and file.stem != "main"}
    assert commands == set(cli.COMMANDS)


def test_no_command_or_a_wrong_one_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert cli.main(["trian"]) == 2
    assert "no command 'trian'" in capsys.readouterr().err


def test_arguments_and_exit_code_pass_through(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(doctor, "main", lambda argv: seen.append(argv) or 7)
    assert cli.main(["doctor", "--check", "ray"]) == 7
    assert seen == [["--check", "ray"]]


def test_the_module_and_the_console_script_are_the_same_door() -> None:
    done = subprocess.run([sys.executable, "-m", "invdist", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()[0]) == (0, "invdist")
    assert 'invdist = "invdist.cli.main:main"' in (REPOSITORY / "pyproject.toml").read_text()


def test_doctor_reports_what_works_here(capfd: pytest.CaptureFixture[str]) -> None:
    assert doctor.main([]) == 0
    out = capfd.readouterr().out
    assert "torch            2.13.0" in out
    for title in ("stack", "device", "ray", "sharded lookup"):
        assert f"ok    {title}" in out


def test_doctor_turns_a_crash_and_a_hang_into_advice() -> None:
    slow = doctor.Check("nothing", lambda: "", advice="do this", seconds=0.01)
    title, good, text = doctor._examine("device", slow)
    assert (title, good) == ("nothing", False)
    assert "no answer within" in text
    assert "-> do this" in text
    title, good, text = doctor._examine("no-such-check", doctor.Check("x", lambda: "", advice="do that"))
    assert not good
    assert "-> do that" in text


def test_doctor_stops_at_a_wrong_stack(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "stack_problem", lambda: "torch 1.0 does not match")
    assert doctor.main([]) == 1
    assert "WRONG stack           torch 1.0 does not match" in capfd.readouterr().out
