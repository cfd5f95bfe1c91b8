"""Commands in an awkward shell: a reader that goes away, and a locale that knows ASCII only."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

ASCII_ONLY = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def _invdist(*arguments: str, **environment: str) -> list:
    return [[sys.executable, "-m", "invdist", *arguments], os.environ | {"PYTHONPATH": str(REPOSITORY)} | environment]


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [["--help"], ["local", "--help"]], ids=["printed", "by argparse"])
def test_a_reader_that_goes_away_ends_a_command_quietly(arguments: list[str], unbuffered: str) -> None:
    command, environment = _invdist(*arguments, PYTHONUNBUFFERED=unbuffered)
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0)
    assert process.stdout is not None
    process.stdout.close()  # `| head -1`, at its earliest
    _, said = process.communicate(timeout=120)
    assert said == b""
    # argparse itself ignores a write that fails at once.
    assert process.returncode in ((141, 0) if arguments[0] == "local" and unbuffered else (141,))


def test_a_pipe_that_breaks_elsewhere_is_still_an_error() -> None:
    program = (
        "from invdist.runtime.terminal import run_command\n"
        "def command(): raise BrokenPipeError('of some socket')\n"
        "run_command(command)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 1
    assert "of some socket" in done.stderr


def test_paths_beyond_ascii_work_in_a_c_locale(tmp_path: Path) -> None:
    output = tmp_path / "données"
    command, environment = _invdist("prepare", "synthetic", "--output", str(output), "preset=tiny", **ASCII_ONLY)
    done = subprocess.run(command, env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert str(output).encode() in done.stdout
    assert (output / "dataset.json").exists()
    command, environment = _invdist("train", f"data.path={output}/fehlt-ü", **ASCII_ONLY)
    done = subprocess.run(command, env=environment, capture_output=True)
    assert done.returncode == 2
    assert f"{output}/fehlt-ü is not a prepared data set".encode() in done.stderr
