"""Clients of `invdist bench serve`: processes that send the same requests over and over and check every answer."""

from __future__ import annotations

import multiprocessing
import random
import socket
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import urlsplit


class Question(NamedTuple):
    """A request as it is sent, and the bytes that the answer of each checkpoint (by digest) must have."""

    sent: bytes
    expected: dict[str, bytes]


class Outcome(NamedTuple):
    """One answer: when it came (epoch seconds), after how many seconds, and what was wrong with it ("" if nothing)."""

    time: float
    seconds: float
    digest: str
    wrong: str


@dataclass
class Load:
    """`clients` connections that send at once, in `processes` processes, for some seconds."""

    url: str
    questions: list[Question]
    clients: int
    seconds: float
    processes: int = 2
    _workers: list[multiprocessing.Process] = field(default_factory=list, init=False)

    def start(self) -> Load:
        """Begins to send."""
        context = multiprocessing.get_context("spawn")  # a copy of a process that uses Ray would not work
        self._queue = context.Queue()
        shares = [len(range(start, self.clients, self.processes)) for start in range(self.processes)]
        for number, share in enumerate(shares):
            if share:
                arguments = (self._queue, number, self.url, self.questions, share, self.seconds)
                worker = context.Process(target=_send, args=arguments, daemon=True)
                worker.start()
                self._workers.append(worker)  # type: ignore[arg-type]
        return self

    def outcomes(self) -> list[Outcome]:
        """All answers, when the time is over."""
        found = [outcome for _ in self._workers for outcome in self._queue.get(timeout=self.seconds + 120)]
        for worker in self._workers:
            worker.join()
        return found


def question(url: str, token: str, body: bytes, expected: dict[str, bytes]) -> Question:
    """A request to `/score` with this body."""
    lines = [
        "POST /score HTTP/1.1",
        f"Host: {urlsplit(url).netloc}",
        f"Authorization: Bearer {token}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    ]
    return Question("\r\n".join([*lines, "", ""]).encode() + body, expected)


def _send(
    queue: multiprocessing.Queue, seed: int, url: str, questions: list[Question], clients: int, seconds: float
) -> None:
    sys.setswitchinterval(2e-4)  # its threads would wait for each other longer than for an answer
    outcomes: list[Outcome] = []
    address = urlsplit(url)
    end = time.time() + seconds
    arguments = (outcomes, (address.hostname, address.port), questions, end)
    threads = [threading.Thread(target=_client, args=(*arguments, seed * 1000 + n)) for n in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    queue.put(outcomes)


def _client(
    outcomes: list[Outcome], address: tuple[str, int], questions: list[Question], end: float, seed: int
) -> None:
    """One connection, kept alive as long as the service keeps it. Nothing is sent twice: a failure is a failure."""
    choose = random.Random(seed)
    connection: socket.socket | None = None
    while time.time() < end:
        asked = choose.choice(questions)
        started, digest = time.perf_counter(), ""
        try:
            if connection is None:
                connection = socket.create_connection(address, timeout=60)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(asked.sent)
            status, closes, body = _receive(connection)
            digest = next((known for known in asked.expected if known.encode() in body), "")
            wrong = (
                f"status {status}" if status != 200 else "" if asked.expected.get(digest, b"?") in body else "scores"
            )
            if closes:
                connection.close()
                connection = None
        except OSError as error:
            wrong = type(error).__name__
            connection = None
        outcomes.append(Outcome(time.time(), time.perf_counter() - started, digest, wrong))


def _receive(connection: socket.socket) -> tuple[int, bool, bytes]:
    """(status, whether the service closes the connection, body) of one answer."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += _some(connection)
    head, _, body = data.partition(b"\r\n\r\n")
    head = head.lower()
    length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0])
    while len(body) < length:
        body += _some(connection)
    return int(head.split()[1]), b"connection: close" in head, body


def _some(connection: socket.socket) -> bytes:
    data = connection.recv(1 << 16)
    if not data:
        raise ConnectionResetError("closed without an answer")
    return data
