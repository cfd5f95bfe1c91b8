"""The launch scripts: set-up that installs once and in order, and a launcher that ends what it started."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from invdist.runtime import private_ray
from invdist.training.history import History
from tests.conftest import REPOSITORY

LAUNCH = REPOSITORY / "launch"


# Set-up: a stand-in for Python that writes down what it is asked to do.

_STAND_IN = """#!/usr/bin/env bash
case "$1 $2" in
  "-c "*) exit 0 ;;
  "-m venv") mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; echo "venv" >>"$LOG" ;;
  "-m pip")
    [ "$3" = --version ] && { [ "$(dirname "$0")" != "$TOOLS" ]; exit; }
    for last; do :; done
    case "$*" in *--no-deps*) last="--no-deps $last" ;; esac
    echo "pip $last" >>"$LOG"
    [ "$last" != "${FAIL:-}" ] || { echo "no such wheel"; exit 1; } ;;
esac
"""


class SetUp:
    """Runs launch/_setup.sh of a copied checkout with the stand-in for Python."""

    def __init__(self, folder: Path) -> None:
        self.root, self.tools, self.log = folder / "checkout", folder / "tools", folder / "log"
        (self.root / "launch").mkdir(parents=True)
        (self.root / "launch" / "_setup.sh").write_bytes((LAUNCH / "_setup.sh").read_bytes())
        (self.root / "pyproject.toml").write_text("[project]")
        self.tools.mkdir()
        self.tool("stand-in", _STAND_IN)

    def tool(self, name: str, text: str) -> None:
        file = self.tools / name
        file.write_text(text)
        file.chmod(0o755)

    def run(self, extra: str = "", **environment: str) -> tuple[int, list[str], str]:
        """Exit code, what was installed in order, and what was said."""
        self.log.write_text("")
        variables = {
            "PATH": f"{self.tools}:/usr/bin:/bin",
            "LOG": str(self.log),
            "TOOLS": str(self.tools),
            "INVDIST_PYTHON": str(self.tools / "stand-in"),
        }
        script = f'ROOT={self.root} EXTRA={extra}; . "$ROOT/launch/_setup.sh"; echo "PYTHON=$PYTHON"'
        command = ["bash", "-euo", "pipefail", "-c", script]
        done = subprocess.run(command, env=variables | environment, capture_output=True, text=True)
        return done.returncode, self.log.read_text().splitlines(), done.stdout + done.stderr


@pytest.fixture
def set_up(tmp_path: Path) -> SetUp:
    """A set-up in a folder of its own."""
    return SetUp(tmp_path)


def test_set_up_installs_exact_torch_first_and_torchrec_without_its_requirements(set_up: SetUp) -> None:
    code, installed, said = set_up.run()
    assert code == 0, said
    root = str(set_up.root)
    assert installed == ["venv", "pip torch==2.13.0", f"pip {root}[cpu]", "pip --no-deps torchrec==1.8.0"]
    assert f"PYTHON={root}/.venv/bin/python" in said


def test_set_up_takes_the_gpu_stack_where_a_gpu_is_seen(set_up: SetUp) -> None:
    set_up.tool("nvidia-smi", "#!/bin/sh\necho 'GPU 0: some'\n")
    _, installed, _ = set_up.run("dev")
    assert installed == ["venv", "pip torch==2.13.0", f"pip {set_up.root}[gpu,dev]"]


def test_a_second_set_up_installs_nothing_until_the_requirements_change(set_up: SetUp) -> None:
    set_up.run("dev")
    assert set_up.run("dev")[1] == []
    assert set_up.run()[1] == [], "the tools of development include what a run needs"
    (set_up.root / "pyproject.toml").write_text("[project] # changed")
    assert set_up.run()[1][0] == "pip torch==2.13.0"


def test_an_interrupted_or_failed_install_is_done_again_and_shows_why(set_up: SetUp) -> None:
    code, _, said = set_up.run(FAIL="--no-deps torchrec==1.8.0")
    assert code != 0
    assert "no such wheel" in said
    code, installed, _ = set_up.run()
    assert code == 0
    assert installed[-1] == "pip --no-deps torchrec==1.8.0"


def test_an_environment_of_the_users_own_is_used_as_it_is(set_up: SetUp, tmp_path: Path) -> None:
    own = tmp_path / "own"
    (own / "bin").mkdir(parents=True)
    (own / "bin" / "python").symlink_to(sys.executable)
    code, installed, said = set_up.run(INVDIST_VENV=str(own))
    assert (code, installed) == (0, [])
    assert f"PYTHON={own}/bin/python" in said


def test_no_python_is_a_sentence(set_up: SetUp) -> None:
    code, _, said = set_up.run(INVDIST_PYTHON="no-such-python")
    assert code != 0
    assert "set INVDIST_PYTHON" in said


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
class TestSignals:
    """A launcher that is stopped or killed takes everything with it."""

    def _start(self, folder: Path, tiny_data: Path) -> tuple[subprocess.Popen[str], list[str]]:
        endless = ("training.epochs=1000000", "training.patience=1000000", "ray.workers=1")
        command = [str(LAUNCH / "local.sh"), f"data.path={tiny_data}", *endless]
        environment = os.environ | {"INVDIST_VENV": sys.prefix}
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # As in a terminal: a shell's background jobs, and so tests that run in one, ignore Ctrl-C.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        return process, []

    def _read_until(self, process: subprocess.Popen[str], pattern: str, said: list[str]) -> re.Match[str]:
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line)
            if found := re.search(pattern, line):
                return found
        raise AssertionError(f"ended with {process.wait()} before {pattern!r}:\n{''.join(said)}")

    def _owned(self, process: subprocess.Popen[str], token: str) -> set[int]:
        """The launcher's descendants and whatever carries its token."""
        owned, before = {process.pid}, 0
        while len(owned) != before:
            before = len(owned)
            for pid in private_ray._pids():
                try:
                    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                except OSError:
                    continue
                if int(fields[1]) in owned:
                    owned.add(pid)
        return owned | set(private_ray._carrying(token))

    def test_ctrl_c_stops_the_run_and_leaves_nothing(self, tmp_path: Path, tiny_data: Path) -> None:
        process, said = self._start(tmp_path, tiny_data)
        token = self._read_until(process, r"token in (\S+)", said).group(1)
        self._read_until(process, r"rows/s", said)
        owned = self._owned(process, token)
        assert len(owned) > 10
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=120)
        assert process.returncode == 130, rest
        assert [pid for pid in owned if _alive(pid)] == []
        assert not Path(token).parent.exists()
        runs = [path for path in (tmp_path / "runs").iterdir() if path.name != "exposure-vectors"]
        assert len(runs) == 1, "the run folder is under the caller's ./runs"
        assert [event["event"] for event in History.read(runs[0]).events][-1] == "stopped", "and saved"

    def test_killing_the_launcher_ends_its_ray(self, tmp_path: Path, tiny_data: Path) -> None:
        process, said = self._start(tmp_path, tiny_data)
        token = self._read_until(process, r"token in (\S+)", said).group(1)
        owned = self._owned(process, token)
        process.kill()
        process.wait()
        deadline = time.monotonic() + 30
        while (left := [pid for pid in owned if _alive(pid)]) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert left == []
        assert list(private_ray._carrying(token)) == []


def test_help_needs_nothing_installed(repository: Path) -> None:
    bare = [sys.executable, "-S", "-m", "invdist", "local", "--help"]
    done = subprocess.run(bare, cwd=repository, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--bind" in done.stdout
