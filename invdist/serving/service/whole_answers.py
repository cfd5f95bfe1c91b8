"""Answers in one write.

uvicorn writes the head of an answer and its body apart. Where a replica dies between the two, HAProxy has passed the
head on, can ask no other replica, and the client has a broken connection (seen in 2 of 42 kills on a busy machine).
With one write, which the kernel delivers whole up to its buffers, a client has an answer or HAProxy asks again. It is
also half of the writes.
"""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http import httptools_impl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


class _HeadWithBody:
    """A transport of uvicorn that holds what is written while `hold` is set, and writes it with what follows."""

    def __init__(self, transport: Any) -> None:
        self.hold, self._transport, self._held = False, transport, b""

    def write(self, data: bytes) -> None:
        self._held += data
        if not self.hold:
            self.flush()

    def flush(self) -> None:
        if self._held:
            self._transport.write(self._held)
            self._held = b""

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class _WholeAnswer(RequestResponseCycle):
    """One request and its answer, as uvicorn has it."""

    def __init__(self, scope: Any, transport: Any, *others: Any, **named: Any) -> None:
        super().__init__(scope, _HeadWithBody(transport), *others, **named)  # type: ignore[arg-type]

    async def send(self, message: Any) -> None:
        transport: Any = self.transport
        transport.hold = message["type"] == "http.response.start"
        await super().send(message)
        if not transport.hold:
            transport.flush()  # the body of HEAD and an empty one are not written


def write_whole_answers() -> None:
    """Lets the HTTP servers that start in this process answer in one write. uvicorn has no setting for it."""
    httptools_impl.RequestResponseCycle = _WholeAnswer  # type: ignore[misc]
