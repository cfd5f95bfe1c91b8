"""Launching: set-up that installs once and in order, a Ray that stays private and goes."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import signal
import socket
import stat
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest

from invdist.cli import local
from invdist.runtime import private_ray
from invdist.runtime.errors import UserError
from invdist.training import job
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


# The private Ray.


def _listening(pids: set[int]) -> set[str]:
    """Addresses on which any of the processes listens, from the kernel's tables."""
    inodes: set[str] = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                inodes |= set(re.findall(r"socket:\[(\d+)\]", os.readlink(descriptor)))
            except OSError:
                continue
    addresses: set[str] = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                raw = fields[1].partition(":")[0]
                packed = b"".join(struct.pack("=I", int(raw[i : i + 8], 16)) for i in range(0, len(raw), 8))
                family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
                addresses.add(socket.inet_ntop(family, packed))
    return addresses


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_private_ray_listens_on_loopback_only_and_leaves_nothing(tmp_path: Path) -> None:
    head = private_ray.start(1, dashboard=True)
    try:
        token = Path(head.environment["RAY_AUTH_TOKEN_PATH"])
        assert stat.S_IMODE(token.stat().st_mode) == 0o600
        assert stat.S_IMODE(head.folder.stat().st_mode) == 0o700
        pids = set(head.processes())
        addresses = _listening(pids)
        assert addresses, "nothing was found to listen: the check itself is broken"
        assert addresses <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
        secret = token.read_text()
        assert all(secret.encode() not in file.read_bytes() for file in head.folder.rglob("*.log"))
        assert head.dashboard is not None
        assert _status(head.dashboard, None) == 401
        assert _status(head.dashboard, secret) == 200
    finally:
        head.close()
    assert not any(map(_alive, pids))
    assert not head.folder.exists()


def _status(url: str, token: str | None) -> int:
    import urllib.error
    import urllib.request

    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        return urllib.request.urlopen(urllib.request.Request(f"{url}/api/jobs/", headers=headers)).status
    except urllib.error.HTTPError as error:
        return error.code


def test_opening_beyond_this_machine_must_be_asked_for_and_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert local._parser().parse_args([]).bind == "127.0.0.1"
    asked: list[str] = []

    @contextlib.contextmanager
    def fake_ray(cpus: int, *, dashboard: bool, bind: str) -> Iterator[SimpleNamespace]:
        asked.append(bind)
        yield SimpleNamespace(dashboard="http://x", folder=tmp_path)
        asked.append("closed")

    monkeypatch.setattr(local, "private_ray", fake_ray)
    monkeypatch.setattr(job, "run_job", lambda dashboard, command: 0)
    assert local._train([], "127.0.0.1", 4) == 0
    assert "opened" not in capsys.readouterr().out
    assert local._train([], "10.0.0.1", 4) == 0
    assert "opened beyond this machine" in capsys.readouterr().out
    assert asked == ["127.0.0.1", "closed", "10.0.0.1", "closed"]


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails the test if Ray is started."""
    monkeypatch.setattr(local, "private_ray", lambda *_, **__: pytest.fail("Ray was started"))


@pytest.mark.usefixtures("no_ray")
def test_wrong_settings_are_refused_before_anything_is_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(local, "_prepare", lambda *_: pytest.fail("data was made"))
    assert local.main(["training.epochs=0"]) == 2
    assert "training.epochs: expected a whole number at least 1" in capsys.readouterr().err


@pytest.mark.usefixtures("no_ray")
@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.path=/no/such/folder", "/no/such/folder is not a prepared data set"),
        ("rows.dim=100000000", "rows.dim: 100000000 makes a model of"),
        ("data.batch_size=100000", "data.batch_size: 100000 is more than"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_anything_is_started(
    tiny_data: Path, capsys: pytest.CaptureFixture[str], override: str, said: str
) -> None:
    assert local.main([f"data.path={tiny_data}", override]) == 2
    assert said in capsys.readouterr().err


class FakeClient:
    """A job server with one job: prints `lines`, then waits for a stop if `endless`, then ends as `details`."""

    lines: ClassVar[list[str]] = []
    endless = False
    code: ClassVar[int | None] = 0
    interrupts = 0
    stopped: ClassVar[list[str]] = []

    def __init__(self, address: str) -> None:
        self.ended = asyncio.Event()
        FakeClient.stopped = []

    def submit_job(self, entrypoint: str) -> str:
        assert entrypoint == "python -c 'a b'"
        return "job"

    async def tail_job_logs(self, job: str) -> AsyncIterator[str]:
        for line in self.lines:
            yield line
        for _ in range(self.interrupts):
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(0.05)
        if self.endless:
            while not self.stopped or self.interrupts > 1:
                await asyncio.sleep(0.01)
            yield "saved\n"

    def stop_job(self, job: str) -> None:
        self.stopped.append(job)

    def get_job_info(self, job: str) -> SimpleNamespace:
        status = SimpleNamespace(is_terminal=lambda: True, value="FAILED")
        return SimpleNamespace(status=status, driver_exit_code=self.code, message="no such Python")


@pytest.fixture
def fake_client(monkeypatch: pytest.MonkeyPatch) -> type[FakeClient]:
    """Ray's client replaced by one whose behaviour the test sets."""
    import ray.job_submission

    client = type("Client", (FakeClient,), {})
    monkeypatch.setattr(ray.job_submission, "JobSubmissionClient", client)
    return client


def _run_job() -> int:
    return job.run_job("http://x", ["python", "-c", "a b"])


@pytest.mark.parametrize(
    ("lines", "code", "expected", "shown", "said"),
    [
        (["Running entrypoint for job x: y\nepoch 0\n", "---- table\n"], 0, 0, "epoch 0\n---- table\n", ""),
        (["INFO -- Runtime env is setting up.\n", "error: no\n"], 3, 3, "error: no\n", ""),
        ([], None, 1, "", "error: the job ended as FAILED: no such Python\n"),
        (["half a"], -9, 1, "half a", "error: the job ended as FAILED: no such Python\n"),
    ],
    ids=["trained", "failed", "never began", "killed"],
)
def test_the_exit_code_and_the_output_of_the_job_are_passed_on(
    fake_client: type[FakeClient],
    capsys: pytest.CaptureFixture[str],
    lines: list[str],
    code: int | None,
    expected: int,
    shown: str,
    said: str,
) -> None:
    fake_client.lines, fake_client.code = lines, code
    assert _run_job() == expected
    assert capsys.readouterr() == (shown, said)


def test_the_first_interrupt_stops_the_job_and_follows_it_to_its_end(
    fake_client: type[FakeClient], capsys: pytest.CaptureFixture[str]
) -> None:
    fake_client.lines, fake_client.endless, fake_client.interrupts = ["epoch 0\n"], True, 1
    with pytest.raises(KeyboardInterrupt):
        _run_job()
    assert FakeClient.stopped == ["job"]
    assert capsys.readouterr().out == "epoch 0\nsaved\n"


def test_the_second_interrupt_does_not_wait(fake_client: type[FakeClient], capsys: pytest.CaptureFixture[str]) -> None:
    fake_client.lines, fake_client.endless, fake_client.interrupts = ["epoch 0\n"], True, 2
    with pytest.raises(KeyboardInterrupt):
        _run_job()
    assert capsys.readouterr().out == "epoch 0\n"


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
        runs = list((tmp_path / "runs").iterdir())
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


def test_an_address_of_another_machine_is_refused_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_ray.tempfile, "tempdir", str(tmp_path))
    with pytest.raises(UserError, match=r"--bind 192\.0\.2\.1: not an address of this machine"):
        private_ray.start(1, bind="192.0.2.1")
    assert list(tmp_path.iterdir()) == []


def test_a_token_of_another_ray_is_not_taken_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray prefers the variable to the file: a private head would refuse its own driver."""
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of another")
    monkeypatch.setenv("KEPT", "yes")
    assert "RAY_AUTH_TOKEN" not in private_ray.without_another_ray()
    assert private_ray.without_another_ray()["KEPT"] == "yes"
    program = (
        "from invdist.training.ray_backend import connected\n"
        "with connected(1):\n    import ray; print(int(ray.cluster_resources()['CPU']))\n"
        "import os; print(os.environ['RAY_AUTH_TOKEN'])"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_") or k == "RAY_AUTH_TOKEN"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split("\n")[:2] == ["1", "of another"], done.stderr


def test_help_needs_nothing_installed(repository: Path) -> None:
    bare = [sys.executable, "-S", "-m", "invdist", "local", "--help"]
    done = subprocess.run(bare, cwd=repository, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--bind" in done.stdout


def test_the_launcher_explains_itself() -> None:
    help_text = local._parser().format_help()
    for word in ("launch/local.sh method=none", "--bind", "INVDIST_PYTHON", "./runs", "Exit code"):
        assert word in help_text
    assert isinstance(local._parser(), argparse.ArgumentParser)
