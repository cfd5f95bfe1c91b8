"""Starts a private Ray cluster on this machine: loopback only, free ports, its own token; it ends with its owner.

Three properties of Ray 2.60 need a workaround here. It replaces `127.0.0.1` and binds every interface, unless
RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 says that this machine is not part of a cluster. It reads that variable and the
authentication mode once, when it is imported. And `ray stop` ends every Ray on the machine, so a head here runs in a
session of its own, and `close` ends only processes of that session or with the path of its token in their environment.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from invdist.runtime.errors import UserError

LOOPBACK = "127.0.0.1"
RAY_COMMAND = "from ray.scripts.scripts import main; main()"
"""The `ray` command for `python -c`, because the console script may not be on PATH."""
_OF_ANOTHER_RAY = ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_AUTH_TOKEN")
_START_SECONDS = 90.0
_END_SECONDS = 20.0
_PR_SET_PDEATHSIG = 1
# Ray puts Unix sockets up to 70 characters below the folder, and their paths are limited to 107.
_LONGEST_FOLDER = 36


@dataclass(frozen=True)
class PrivateRay:
    """A running head: its addresses, and the environment of a process that connects to it."""

    process: subprocess.Popen[bytes]
    folder: Path
    address: str
    """GCS address, for `ray.init` and RAY_ADDRESS."""
    dashboard: str | None
    """URL of the dashboard and job server, if the head has one."""
    environment: dict[str, str]
    """Variables to set before Python imports ray."""

    def processes(self) -> list[int]:
        """Ids of the live processes that belong to this head, its workers and its jobs."""
        token = self.environment["RAY_AUTH_TOKEN_PATH"]
        return sorted({*_session(self.process.pid), *_carrying(token)})

    def close(self) -> None:
        """Ends every process of this head and removes its folder with the token; safe to call twice."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_END_SECONDS)
        deadline = time.monotonic() + _END_SECONDS
        # A job's driver is ended by a watcher that polls once a second: wait for it before killing.
        kill_from = time.monotonic() + 2.0
        while (left := self.processes()) and time.monotonic() < deadline:
            if time.monotonic() > kill_from:
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.contextmanager
def private_ray(
    cpus: int | None = None,
    *,
    dashboard: bool = False,
    bind: str = LOOPBACK,
    variables: dict[str, str] | None = None,
) -> Iterator[PrivateRay]:
    """Inside, a private head runs and the environment of this process points to it; it always ends on leaving.

    Call it before anything imports ray. `bind` opens the head and its dashboard to another address. `variables` is an
    earlier `new_environment` with more in it.
    """
    assert "ray" not in sys.modules, "ray reads its environment at import: start the private head before that"
    head = start(cpus, dashboard=dashboard, bind=bind, variables=variables)
    before = {name: os.environ.get(name) for name in [*head.environment, *_OF_ANOTHER_RAY]}
    for name in _OF_ANOTHER_RAY:
        os.environ.pop(name, None)
    os.environ.update(head.environment, RAY_ADDRESS=head.address)
    try:
        yield head
    finally:
        head.close()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def new_environment(bind: str = LOOPBACK) -> dict[str, str]:
    """Variables that a head, its job clients and its workers must share, with a new token in a private folder."""
    folder = _short_folder()
    token = folder / "token"
    descriptor = os.open(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(32))
    variables = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_USAGE_STATS_ENABLED": "0",
        # These ports are fixed by default, and a second Ray on the machine would fail to export its metrics.
        "AUTOSCALER_METRIC_PORT": "0",
        "DASHBOARD_METRIC_PORT": "0",
        # A head that still has a train controller would wait this long before it ends.
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        # A stopped job has this long to save before it is killed.
        "RAY_JOB_STOP_WAIT_TIME_S": "30",
    }
    if bind == LOOPBACK:
        variables["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    return variables


def start(
    cpus: int | None = None,
    *,
    dashboard: bool = False,
    bind: str = LOOPBACK,
    variables: dict[str, str] | None = None,
) -> PrivateRay:
    """Starts a head and waits until it answers; `UserError` with the end of its log if it does not.

    `variables` is an earlier `new_environment`, for a process that imports ray before it starts the head.
    """
    variables = variables or new_environment(bind)
    folder = Path(variables["RAY_AUTH_TOKEN_PATH"]).parent
    log = folder / "head.log"
    try:
        command = _command(folder, cpus, dashboard, bind)
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise UserError(f"--bind {bind}: not an address of this machine ({error.strerror or error})") from None
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=_environment_of_head() | variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
    try:
        address, url = _wait(process, folder, log, dashboard)
    except BaseException:
        PrivateRay(process, folder, "", None, variables).close()
        raise
    return PrivateRay(process, folder, address, url, variables)


def _command(folder: Path, cpus: int | None, dashboard: bool, bind: str) -> list[str]:
    # With this interpreter, so that the head is the Ray that invdist was installed with.
    command = [sys.executable, "-c", RAY_COMMAND, "start", "--head", "--block"]
    command += ["--log-color=false", "--disable-usage-stats", f"--temp-dir={folder / 'ray'}"]
    command += [f"--node-ip-address={bind}", f"--dashboard-host={bind}", f"--include-dashboard={dashboard}"]
    free = ("port", "dashboard-port", "dashboard-agent-listen-port", "dashboard-agent-grpc-port")
    free += ("runtime-env-agent-port", "metrics-export-port", "min-worker-port", "max-worker-port")
    command += [f"--{name}=0" for name in free]
    # The client server cannot be turned off and does not accept port 0.
    command.append(f"--ray-client-server-port={free_port(bind)}")
    if cpus is not None:
        command.append(f"--num-cpus={cpus}")
    return command


def _wait(process: subprocess.Popen[bytes], folder: Path, log: Path, dashboard: bool) -> tuple[str, str | None]:
    deadline = time.monotonic() + _START_SECONDS
    marker = folder / "ray" / "ray_current_cluster"
    while process.poll() is None and time.monotonic() < deadline:
        url = re.search(r"http://[\w.:\[\]-]+:\d+", log.read_text(errors="replace"))
        if marker.exists() and (address := marker.read_text().strip()) and (url or not dashboard):
            return address, url.group() if url else None
        time.sleep(0.05)
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
    raise UserError(f"Ray did not start here within {_START_SECONDS:.0f} s; the end of its log:\n{tail}")


def _short_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="invdist-"))
    if len(str(folder)) > _LONGEST_FOLDER and os.path.isdir("/tmp"):
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="invdist-", dir="/tmp"))
    return folder


def without_another_ray() -> dict[str, str]:
    """The environment of this process without variables of another Ray, whose token would override ours."""
    return {name: value for name, value in os.environ.items() if name not in _OF_ANOTHER_RAY}


def _environment_of_head() -> dict[str, str]:
    kept = without_another_ray()
    # Workers import this package from the same place as this process, installed or not.
    package = str(Path(__file__).resolve().parents[2])
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, [package, kept.get("PYTHONPATH")]))
    return kept


def free_port(host: str) -> int:
    """A port of an address that nobody listens on."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def _end_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _session(leader: int) -> Iterator[int]:
    """Live processes of a session, without zombies."""
    for pid in _pids():
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == leader and fields[0] != "Z":
                yield pid


def _carrying(path: str) -> Iterator[int]:
    """Live processes with the path of the token in their environment, such as a job's driver in its own session."""
    needle = f"RAY_AUTH_TOKEN_PATH={path}".encode()
    for pid in _pids():
        with contextlib.suppress(OSError):
            if pid != os.getpid() and needle in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                yield pid


def _pids() -> list[int]:
    proc = Path("/proc")
    return [int(entry.name) for entry in proc.iterdir() if entry.name.isdigit()] if proc.is_dir() else []
