"""A Ray job followed to its end: its output, its exit code, and one or two interrupts."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import ClassVar

import pytest

from invdist.training import job


class FakeClient:
    """A job server with one job: prints `lines`, then waits for a stop if `endless`, then ends as `details`."""

    lines: ClassVar[list[str]] = []
    endless = False
    code: ClassVar[int | None] = 0
    interrupts = 0
    stopped: ClassVar[list[str]] = []

    def __init__(self, address: str) -> None:
        self.ended = asyncio.Event()
        FakeClient.stopped = []

    def submit_job(self, entrypoint: str) -> str:
        assert entrypoint == "python -c 'a b'"
        return "job"

    async def tail_job_logs(self, job: str) -> AsyncIterator[str]:
        for line in self.lines:
            yield line
        for _ in range(self.interrupts):
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(0.05)
        if self.endless:
            while not self.stopped or self.interrupts > 1:
                await asyncio.sleep(0.01)
            yield "saved\n"

    def stop_job(self, job: str) -> None:
        self.stopped.append(job)

    def get_job_info(self, job: str) -> SimpleNamespace:
        status = SimpleNamespace(is_terminal=lambda: True, value="FAILED")
        return SimpleNamespace(status=status, driver_exit_code=self.code, message="no such Python")


@pytest.fixture
def fake_client(monkeypatch: pytest.MonkeyPatch) -> type[FakeClient]:
    """Ray's client replaced by one whose behaviour the test sets."""
    import ray.job_submission

    client = type("Client", (FakeClient,), {})
    monkeypatch.setattr(ray.job_submission, "JobSubmissionClient", client)
    return client


def _run_job() -> int:
    return job.run_job("http://x", ["python", "-c", "a b"])


@pytest.mark.parametrize(
    ("lines", "code", "expected", "shown", "said"),
    [
        (["Running entrypoint for job x: y\nepoch 0\n", "---- table\n"], 0, 0, "epoch 0\n---- table\n", ""),
        (["INFO -- Runtime env is setting up.\n", "error: no\n"], 3, 3, "error: no\n", ""),
        ([], None, 1, "", "error: the job ended as FAILED: no such Python\n"),
        (["half a"], -9, 1, "half a", "error: the job ended as FAILED: no such Python\n"),
    ],
    ids=["trained", "failed", "never began", "killed"],
)
def test_the_exit_code_and_the_output_of_the_job_are_passed_on(
    fake_client: type[FakeClient],
    capsys: pytest.CaptureFixture[str],
    lines: list[str],
    code: int | None,
    expected: int,
    shown: str,
    said: str,
) -> None:
    fake_client.lines, fake_client.code = lines, code
    assert _run_job() == expected
    assert capsys.readouterr() == (shown, said)


def test_the_first_interrupt_stops_the_job_and_follows_it_to_its_end(
    fake_client: type[FakeClient], capsys: pytest.CaptureFixture[str]
) -> None:
    fake_client.lines, fake_client.endless, fake_client.interrupts = ["epoch 0\n"], True, 1
    with pytest.raises(KeyboardInterrupt):
        _run_job()
    assert FakeClient.stopped == ["job"]
    assert capsys.readouterr().out == "epoch 0\nsaved\n"


def test_the_second_interrupt_does_not_wait(fake_client: type[FakeClient], capsys: pytest.CaptureFixture[str]) -> None:
    fake_client.lines, fake_client.endless, fake_client.interrupts = ["epoch 0\n"], True, 2
    with pytest.raises(KeyboardInterrupt):
        _run_job()
    assert capsys.readouterr().out == "epoch 0\n"
