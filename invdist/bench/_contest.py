"""Trainers that take turns on one core, each in a process of its own.

A contestant is a process that reads one line for each turn from its standard input and answers `[rows, seconds, ...]`
as JSON. While one trains, the others wait for their line and use no CPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from invdist.runtime.errors import UserError

_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
_END_S = 10


class Turns:
    """The contestant's side: what the library prints goes to the log, answers go to the one who asks."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def __iter__(self) -> Iterator[None]:
        """One item for each turn, until no more are asked for."""
        self.answer("ready")
        for _ in sys.stdin:
            yield

    def answer(self, value: Any) -> None:
        """Sends the result of a turn."""
        print(json.dumps(value), file=self._answers, flush=True)


def least_seconds(most_seconds: float) -> float:
    """A turn is one epoch, or as many as take this long: a short one would be measured badly."""
    return most_seconds / 4


def one_turn(steps: Iterator[int], epoch_rows: int, most_seconds: float) -> tuple[int, float]:
    """Takes steps until an epoch is done, and `least_seconds` are over, or the time is up. Gives rows and seconds."""
    started, rows, seconds, least = time.perf_counter(), 0, 0.0, least_seconds(most_seconds)
    while seconds < most_seconds and (rows < epoch_rows or seconds < least):
        rows += next(steps)
        seconds = time.perf_counter() - started
    return rows, seconds


class _Contestant:
    def __init__(self, name: str, command: Sequence[str], folder: Path) -> None:
        self.name, self._log = name, folder / f"{name}.log"
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | _ONE_THREAD,
                text=True,
            )

    def pin(self, core: int) -> None:
        """Keeps all threads of the process on one core."""
        if hasattr(os, "sched_setaffinity"):
            for thread in os.listdir(f"/proc/{self._process.pid}/task"):
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setaffinity(int(thread), {core})

    def hear(self) -> Any:
        """The next answer; a `UserError` with the end of the log if the process ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code, tail = self._process.wait(), self._log.read_text(errors="replace")[-1500:]
            raise UserError(f"{self.name} ended with code {code}:\n{tail}")
        return json.loads(line)

    def turn(self) -> Any:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `hear` tells why
            print(file=self._process.stdin, flush=True)
        return self.hear()

    def end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()


def contest(
    commands: Mapping[str, Sequence[str]], rounds: int, folder: Path, show: Callable[[str], None] = lambda text: None
) -> dict[str, list[Any]]:
    """What each contestant answers in `rounds` turns, after one that does not count.

    Contestants share the last core that this process may use: the first has the work of the system.
    """
    core = max(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    contestants: list[_Contestant] = []
    answers: dict[str, list[Any]] = {name: [] for name in commands}
    try:
        show(f"starting {', '.join(commands)}")
        contestants += [_Contestant(name, command, folder) for name, command in commands.items()]
        for contestant in contestants:
            contestant.hear()
            contestant.pin(core)
        for number in range(rounds + 1):
            for contestant in contestants:
                show(f"round {number} of {rounds}: {contestant.name}")
                answer = contestant.turn()
                if number:
                    answers[contestant.name].append(answer)
    finally:
        for contestant in contestants:
            contestant.end()
    return answers


def rows_per_s(answers: Sequence[Any]) -> float:
    """The median over the turns of a contestant."""
    return statistics.median(rows / seconds for rows, seconds, *_ in answers)
