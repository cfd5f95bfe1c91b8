"""The application over real HTTP in this process, without Ray; and a client of a few lines."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import uvicorn

from invdist.serving.run import open_run
from invdist.serving.service.app import build_app
from invdist.serving.service.batching import Batcher
from invdist.serving.service.model import ServedModel, pack
from invdist.serving.service.requests import Limits

TOKEN = "a-token-for-the-tests"


class LocalServing:
    """Answers as a replica does. `limits` may be changed by a test."""

    def __init__(self, run: Path) -> None:
        self.limits, self.seen = Limits(rows=1000, body_bytes=1 << 16), []
        served = ServedModel(pack(open_run(run)))
        self.answers = served, Batcher(served.logits, ThreadPoolExecutor(1))

    def current(self) -> tuple[ServedModel, Batcher]:
        return self.answers

    async def in_thread(self, function: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(None, function)

    async def metrics(self) -> str:
        return "ray_invdist_something 1\n"

    def observe(self, route: str, status: int, seconds: float, rows: int) -> None:
        self.seen.append((route, status, rows))


class Answered(NamedTuple):
    """A response."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Client:
    """Sends requests with the token, unless `headers` say otherwise."""

    def __init__(self, port: int, token: str) -> None:
        self.port, self._token = port, token

    def send(self, method: str, path: str, body: bytes | str = b"", headers: dict[str, str] | None = None) -> Answered:
        usual = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, body, {**usual, **(headers or {})})
            answer = connection.getresponse()
            return Answered(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    def post(self, path: str, **fields: Any) -> Answered:
        return self.send("POST", path, json.dumps(fields))


@contextmanager
def served(command: Sequence[str | Path], **options: Any) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The address and the process of a command that serves a run, killed at the end if it is still there."""
    process = subprocess.Popen(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        **options,
    )
    try:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if found := re.search(r"serving \S+ on (http://\S+) \(token in", line):
                break
        else:
            raise AssertionError("".join(said))
        yield found.group(1), process
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="session")
def serving(trained_run: Path) -> LocalServing:
    """What answers in `client`."""
    return LocalServing(trained_run)


@pytest.fixture(scope="session")
def client(serving: LocalServing) -> Iterator[Client]:
    """A client of the application on a free port."""
    server = uvicorn.Server(uvicorn.Config(build_app(serving, TOKEN), port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        threading.Event().wait(0.01)
    yield Client(server.servers[0].sockets[0].getsockname()[1], TOKEN)
    server.should_exit = True
    thread.join(10)
