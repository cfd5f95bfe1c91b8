"""A private Ray: loopback only, its own token, nothing left behind."""

from __future__ import annotations

import os
import re
import socket
import stat
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from invdist.runtime import private_ray
from invdist.runtime.errors import UserError


def listening(pids: set[int]) -> set[str]:
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


def is_alive(pid: int) -> bool:
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
        addresses = listening(pids)
        assert addresses, "nothing was found to listen: the check itself is broken"
        assert addresses <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
        secret = token.read_text()
        assert all(secret.encode() not in file.read_bytes() for file in head.folder.rglob("*.log"))
        assert head.dashboard is not None
        assert _status(head.dashboard, None) == 401
        assert _status(head.dashboard, secret) == 200
    finally:
        head.close()
    assert not any(map(is_alive, pids))
    assert not head.folder.exists()


def _status(url: str, token: str | None) -> int:
    import urllib.error
    import urllib.request

    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        return urllib.request.urlopen(urllib.request.Request(f"{url}/api/jobs/", headers=headers)).status
    except urllib.error.HTTPError as error:
        return error.code


def test_an_address_of_another_machine_is_refused_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_ray.tempfile, "tempdir", str(tmp_path))
    with pytest.raises(UserError, match=r"--bind 192\.0\.2\.1: not an address of this machine"):
        private_ray.start(1, bind="192.0.2.1")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
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
