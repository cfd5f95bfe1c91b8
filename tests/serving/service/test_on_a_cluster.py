"""`invdist serve` as an application of a cluster that somebody else started: RAY_ADDRESS."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import invdist
from invdist.runtime.errors import UserError
from invdist.runtime.private_ray import PrivateRay
from invdist.serving.service.launch import running_service
from tests.serving.service.conftest import Client, served

pytestmark = pytest.mark.slow


@pytest.fixture
def cluster(ray_cluster: PrivateRay) -> Iterator[PrivateRay]:
    """The Ray of the tests, without Serve afterwards."""
    from ray import serve

    yield ray_cluster
    serve.shutdown()


def test_on_a_cluster_it_is_one_application_among_others(
    cluster: PrivateRay, trained_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray
    from ray import serve

    command = [sys.executable, "-m", "invdist", "serve", "--run", trained_run, "--port", "0", "--replicas", "1"]
    environment = os.environ | {"RAY_ADDRESS": cluster.address}
    with served([*command, "--token-file", tmp_path / "token"], env=environment) as (url, process):
        client = Client(int(url.rpartition(":")[2]), (tmp_path / "token").read_text())
        pairs = {"user": [1, 2, 3], "item": [5, 6, 8]}
        expected = invdist.open_run(trained_run).score(pairs)
        assert client.post("/score", **pairs).json["score"] == expected["score"].to_pylist()
        assert client.send("POST", "/score", "{}", {"Authorization": "Bearer no"}).status == 401
        assert list(serve.status().applications) == [f"invdist-{trained_run.name}"]
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        with pytest.raises(UserError, match=f"application invdist-{trained_run.name} already"):
            with running_service(trained_run):
                pass
        other = shutil.copytree(trained_run, tmp_path / "other")
        with pytest.raises(UserError, match="Prefix / is being used"):
            with running_service(other):
                pass
        assert client.post("/score", **pairs).status == 200
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=60)
        assert process.returncode == 130, rest
        assert "Traceback" not in rest
    assert list(serve.status().applications) == [], "it is gone"
    assert ray.get(ray.remote(lambda: 7).remote(), timeout=60) == 7, "and the cluster is not"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (TimeoutError("HTTP proxies not available after 60s."), "HTTP proxies not available after 60s."),
        (RuntimeError("Traceback\n  File x\nRuntimeError: what was wrong\n"), "RuntimeError: what was wrong"),
    ],
)
def test_an_error_of_ray_is_one_line(
    cluster: PrivateRay, trained_run: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    from ray import serve

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    monkeypatch.setattr(serve, "start", fail)
    with pytest.raises(UserError) as caught, running_service(trained_run):
        pass
    assert str(caught.value) == f"the service did not start: {said}"
