"""What tests share: one private Ray for the whole session, on loopback, with a token of its own."""

from __future__ import annotations

import atexit
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Ray reads these once, when it is imported; the head, its workers and every subprocess of a test must agree.
# The folder is short because Ray puts Unix sockets below it, whose paths end at 107 characters.
_PRIVATE = Path(tempfile.mkdtemp(prefix="invdist-test-"))
atexit.register(shutil.rmtree, _PRIVATE, ignore_errors=True)
_TOKEN = _PRIVATE / "token"
_TOKEN.touch(mode=0o600)
_TOKEN.write_text(secrets.token_hex(32))
os.environ["RAY_AUTH_MODE"] = "token"
os.environ["RAY_AUTH_TOKEN_PATH"] = str(_TOKEN)
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
for _name in ("RAY_AUTH_TOKEN", "RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
    os.environ.pop(_name, None)

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Any]:
    """The address information of one local Ray: four logical CPUs, no dashboard, ended with the session."""
    import ray

    context = ray.init(
        num_cpus=4,
        num_gpus=0,
        object_store_memory=400 << 20,
        include_dashboard=False,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
        _temp_dir=str(_PRIVATE / "ray"),
    )
    yield context.address_info
    ray.shutdown()


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
