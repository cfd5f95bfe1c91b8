"""Answers in one write: the same bytes as uvicorn writes, in fewer pieces."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from uvicorn.protocols.http import httptools_impl
from uvicorn.server import ServerState

from invdist.serving.service.whole_answers import write_whole_answers

REQUESTS = {
    "body": (b"GET /json HTTP/1.1\r\nHost: x\r\n\r\n", 1),
    "head": (b"HEAD /json HTTP/1.1\r\nHost: x\r\n\r\n", 1),
    "head and close": (b"HEAD /json HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 1),
    "nothing": (b"GET /nothing HTTP/1.1\r\nHost: x\r\n\r\n", 1),
    "close": (b"GET /json HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 1),
    "one after the other": (b"GET /json HTTP/1.1\r\nHost: x\r\n\r\n" * 3, 3),
    "in chunks": (b"GET /chunks HTTP/1.1\r\nHost: x\r\n\r\n", 3),
    "with 100": (b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\nhi", 2),
    "broken": (b"GET /broken HTTP/1.1\r\nHost: x\r\n\r\n", 1),
}


async def _json(request: Any) -> Response:
    return JSONResponse({"a": 1})


async def _nothing(request: Any) -> Response:
    return Response(status_code=204)


async def _chunks(request: Any) -> Response:
    async def parts() -> AsyncIterator[bytes]:
        yield b"ab"
        yield b"cd"

    return StreamingResponse(parts())


async def _echo(request: Any) -> Response:
    return Response(await request.body())


async def _broken(request: Any) -> Response:
    raise RuntimeError("for the test")


ANSWERS = {"json": _json, "nothing": _nothing, "chunks": _chunks, "echo": _echo, "broken": _broken}
APP = Starlette(routes=[Route(f"/{name}", answer, methods=["GET", "POST"]) for name, answer in ANSWERS.items()])


class _Written(asyncio.Transport):
    """A connection that keeps what is written."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.writes: list[bytes] = []
        self.closed = False

    def write(self, data: Any) -> None:
        assert not self.closed
        self.writes.append(bytes(data))

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None: ...


def _answered(request: bytes) -> _Written:
    async def answer() -> _Written:
        config = uvicorn.Config(APP, date_header=False, log_config=None, lifespan="off")
        config.load()
        protocol, transport = httptools_impl.HttpToolsProtocol(config, ServerState(), {}), _Written()
        protocol.connection_made(transport)
        protocol.data_received(request)
        for _ in range(200):
            await asyncio.sleep(0)
        if protocol.timeout_keep_alive_task is not None:
            protocol.timeout_keep_alive_task.cancel()
        return transport

    return asyncio.run(answer())


@pytest.mark.parametrize("name", REQUESTS)
def test_the_bytes_of_uvicorn_in_one_write(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    request, writes = REQUESTS[name]
    monkeypatch.setattr(httptools_impl, "RequestResponseCycle", httptools_impl.RequestResponseCycle)  # put back
    before = _answered(request)
    write_whole_answers()
    now = _answered(request)
    assert b"".join(now.writes) == b"".join(before.writes)
    assert b"HTTP/1.1" in now.writes[0]
    assert now.closed == before.closed
    assert len(now.writes) == writes <= len(before.writes)
