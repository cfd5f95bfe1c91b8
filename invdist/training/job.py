"""Runs a command as a Ray job and follows it to its end, through Ray's `JobSubmissionClient`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.job_submission import JobDetails, JobSubmissionClient

_END_SECONDS = 60.0
"""The status of a job may lag behind the end of its output by this much."""

_PREAMBLE = ("Runtime env is setting up", "Running entrypoint for job")
"""Ray's own lines at the start of a job's log, before the output of the command."""


def run_job(dashboard: str, command: Sequence[str]) -> int:
    """Submits `command` to the cluster at `dashboard`, prints its output as it comes, and gives its exit code.

    The first Ctrl-C (or SIGTERM) stops the job, which may save first, and still follows it to its end; the second
    does not wait. Both raise `KeyboardInterrupt`. The environment must hold the token of the cluster before ray is
    imported, so ray is imported here.
    """
    from ray.job_submission import JobSubmissionClient

    logging.getLogger("ray.dashboard.modules.job.sdk").setLevel(logging.WARNING)  # it logs every closed connection
    client = JobSubmissionClient(dashboard)
    job = client.submit_job(entrypoint=shlex.join(command))
    interrupted = asyncio.run(_follow(client, job))
    if interrupted:
        raise KeyboardInterrupt
    return _exit_code(_ended(client, job))


async def _follow(client: JobSubmissionClient, job: str) -> bool:
    """Prints the output of a job until it ends; True if it was interrupted."""
    loop = asyncio.get_running_loop()
    printing = asyncio.create_task(_print_output(client, job))
    signals = 0

    def interrupt() -> None:
        nonlocal signals
        signals += 1
        if signals > 1:
            printing.cancel()
            return
        print("\nstopping the run, which saves first (press Ctrl-C again to stop at once)", file=sys.stderr, flush=True)
        loop.run_in_executor(None, client.stop_job, job)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupt)
    with contextlib.suppress(asyncio.CancelledError):
        await printing
    return signals > 0


async def _print_output(client: JobSubmissionClient, job: str) -> None:
    """Prints what the job prints. A lost connection ends it early; the job itself goes on."""
    started = False
    try:
        async for text in client.tail_job_logs(job):
            for line in text.splitlines(keepends=True):
                started = started or not any(message in line for message in _PREAMBLE)
                if started:
                    print(line, end="", flush=True)
    except RuntimeError as error:
        print(f"\nthe output of the job is lost ({error}); waiting for its end", file=sys.stderr, flush=True)
        while not client.get_job_status(job).is_terminal():
            await asyncio.sleep(1.0)


def _ended(client: JobSubmissionClient, job: str) -> JobDetails:
    """What is known of a job whose output has ended."""
    deadline = time.monotonic() + _END_SECONDS
    while not (details := client.get_job_info(job)).status.is_terminal() and time.monotonic() < deadline:
        time.sleep(0.1)
    return details


def _exit_code(details: Any) -> int:
    """The exit code of the command; 1 if it was killed or could not be started, with Ray's reason on stderr."""
    code = details.driver_exit_code
    if code is not None and code >= 0:
        return code
    print(f"error: the job ended as {details.status.value}: {details.message}", file=sys.stderr)
    return 1
