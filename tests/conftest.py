"""What tests share: one private Ray for the whole session, on loopback, with a token of its own."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import socket
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from invdist.runtime import private_ray

# The same examples in every run; `--hypothesis-profile=default` looks for new ones.
hypothesis.settings.register_profile("same", derandomize=True)
hypothesis.settings.load_profile("same")

# Ray reads these once, when it is imported; the head, its workers and every subprocess of a test must agree.
_RAY = private_ray.new_environment()
_RAY["RAY_metrics_report_interval_ms"] = "1000"  # a test waits for them
os.environ.update(_RAY)
for _name in ("RAY_AUTH_TOKEN", "RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
    os.environ.pop(_name, None)
atexit.register(shutil.rmtree, Path(_RAY["RAY_AUTH_TOKEN_PATH"]).parent, ignore_errors=True)

# The S3 server of `s3_bucket`: its port is reserved here, because Ray's workers have the environment their head had.
_S3 = socket.socket()
_S3.bind(("127.0.0.1", 0))
os.environ.update(
    AWS_ENDPOINT_URL=f"http://127.0.0.1:{_S3.getsockname()[1]}",
    AWS_ACCESS_KEY_ID="tests",
    AWS_SECRET_ACCESS_KEY="tests",
    AWS_DEFAULT_REGION="us-east-1",
    AWS_EC2_METADATA_DISABLED="true",
)

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `-n`: the tests of a file stay together, for their fixtures; files that need Ray go first and share one."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _group(nodeid.split("::")[0])

    return ByFile(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The order in which they are given to the workers."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: _group(item.nodeid.split("::")[0]) != "ray")


@cache
def _group(file: str) -> str:
    return "ray" if "ray_cluster" in (REPOSITORY / file).read_text() else file


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[private_ray.PrivateRay]:
    """One Ray with four logical CPUs and no dashboard, joined by this process, ended with the session."""
    import ray

    head = private_ray.start(4, variables=_RAY)
    try:
        ray.init(head.address, log_to_driver=False)
        yield head
        ray.shutdown()
    finally:
        head.close()


@pytest.fixture(scope="session")
def s3_bucket() -> Iterator[str]:
    """The URI of a bucket on a real S3 server (moto's, on loopback), which this process and all it starts can reach.

    One bucket for the session: a test writes below a prefix of its own.
    """
    pytest.importorskip("moto", reason="moto, which has the S3 server, is not installed")
    import pyarrow.fs as pafs
    from moto.moto_server.threaded_moto_server import MotoRequestHandler
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    host, port = _S3.getsockname()
    application = DomainDispatcherApplication(create_backend_app)  # type: ignore[arg-type]
    _S3.listen(128)
    server = make_server(host, port, application, threaded=True, request_handler=MotoRequestHandler, fd=_S3.fileno())
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        filesystem, _ = pafs.FileSystem.from_uri("s3://tests?allow_bucket_creation=true")
        filesystem.create_dir("tests")
        yield "s3://tests"
    finally:
        server.shutdown()
        thread.join()


@pytest.fixture
def repository() -> Path:
    """The root of the checkout."""
    return REPOSITORY


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data sets named by INVDIST_DATA; tests that need it are skipped without."""
    folder = os.environ.get("INVDIST_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("INVDIST_DATA does not name a folder with the real data sets")
    return Path(folder)


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The smallest synthetic data set."""
    from invdist.cli import prepare

    folder = tmp_path_factory.mktemp("data") / "tiny"
    assert prepare.main(["synthetic", "--output", str(folder), "preset=tiny"]) == 0
    return folder


@pytest.fixture(scope="session")
def all_labeled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same feed without unclear rows: every exposure is decided at a finish rate of one half."""
    from invdist.data.prepare.labeling import Labeling
    from invdist.data.prepare.options import Options
    from invdist.data.prepare.pipeline import prepare
    from invdist.data.prepare.synthetic import PRESETS, SyntheticLog

    folder = tmp_path_factory.mktemp("data") / "all_labeled"
    half = Labeling(rules=("finish_rate",), finish_above=0.4999, finish_below=0.5)
    prepare(SyntheticLog("tiny", PRESETS["tiny"], 0), half, Options(), folder)
    return folder


@pytest.fixture(scope="session")
def trained_run(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished GMF run on `tiny_data`, trained on this process alone; nobody may change it."""
    from tests.runs import train_here

    return train_here(tiny_data, tmp_path_factory.mktemp("runs") / "gmf")
