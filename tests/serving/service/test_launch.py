"""What is wrong with the arguments of `invdist serve` is said before Ray is started, and nothing is left behind."""

from __future__ import annotations

import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from invdist.cli import serve
from invdist.runtime.errors import UserError
from invdist.runtime.private_ray import LOOPBACK
from invdist.serving.service import front
from invdist.serving.service.launch import read_or_make_token, running_service
from invdist.serving.service.requests import Limits
from invdist.training import ray_backend


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Ray is not started here; the test fails if a private folder is left."""
    for name in ("RAY_ADDRESS", "RAY_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))

    def fail(*_: object) -> None:
        raise UserError("Ray would start now")

    monkeypatch.setattr(ray_backend, "connected", fail)
    yield
    assert list(temporary.iterdir()) == []


def _refused(**options: Any) -> str:
    with pytest.raises(UserError) as caught, running_service("run", **options):
        pass
    return str(caught.value)


def test_an_address_where_nothing_can_listen(no_ray: None) -> None:
    with socket.create_server((LOOPBACK, 0)) as other:
        port = other.getsockname()[1]
        assert _refused(port=port).startswith(f"--port {port} on {LOOPBACK}: Address already in use; choose another")
    assert _refused(port=port) == "Ray would start now"
    for host in ("nope.invalid", "a..b", "203.0.113.1", "::zz"):
        assert _refused(host=host).startswith(f"--bind {host}: expected an address of this machine (")


def test_a_token_file_that_cannot_be_used(no_ray: None, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "bytes").write_bytes(b"\xff" * 40)
    (tmp_path / "short").write_text("short")
    (tmp_path / "open").write_text("x" * 40)
    for name in ("folder", "bytes", "short"):
        (tmp_path / name).chmod(0o700)
    (tmp_path / "open").chmod(0o644)
    reasons = {
        "folder": "Is a directory",
        "link": "No such file or directory",
        "missing/token": "No such file or directory",
        "bytes": "expected one line of at least 16 printable characters",
        "short": "expected one line of at least 16 printable characters",
        "open": "others can read it; chmod 600",
    }
    for name, reason in reasons.items():
        assert _refused(token_file=tmp_path / name).startswith(f"--token-file {tmp_path / name}: {reason}")


def test_a_token_file_is_made_once(tmp_path: Path) -> None:
    token = read_or_make_token(tmp_path / "token")
    assert len(token) > 40
    assert read_or_make_token(tmp_path / "token") == token


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("timeout", "nan"),
        ("timeout", "inf"),
        ("timeout", "0"),
        ("timeout", "86401"),
        ("max-bytes", str((1 << 27) + 1)),
        ("max-rows", "-1"),
        ("replicas", "0"),
    ],
)
def test_a_number_out_of_range_is_named(name: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert serve.main(["--run", "run", f"--{name}={value}"]) == 2
    assert capsys.readouterr().err.startswith(f"error: --{name} {value}")


def test_haproxy_takes_the_largest_numbers(tmp_path: Path) -> None:
    largest = Limits(body_bytes=serve._MOST["max_bytes"], seconds=float(serve._MOST["timeout"]))
    settings = front.environment(tmp_path, largest)
    size, seconds = (settings[f"RAY_SERVE_HAPROXY_{name}"] for name in ("TUNE_BUFSIZE", "TIMEOUT_SERVER_S"))
    config = tmp_path / "haproxy.cfg"
    config.write_text(
        f"global\n tune.bufsize {size}\ndefaults\n mode http\n timeout server {seconds}s\n timeout connect 1s\n"
        " timeout client 1s\nfrontend http_frontend\n bind 127.0.0.1:1\n default_backend none\nbackend none\n"
    )
    subprocess.run([tmp_path / "haproxy", "-c", "-f", config], check=True)  # of the wrapper, the third is the file
