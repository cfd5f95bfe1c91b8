"""Sharded workers that are killed in every kind of work lose nothing and double nothing."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from invdist.serving.run import find_run
from invdist.serving.sharded import choice
from invdist.serving.sharded.workers import Workers
from invdist.training.ray_backend import ray_prints_to_stderr
from tests.serving.test_sharded import raw_pairs, run_command

KINDS = {
    "_load": {"after"},
    "_annotate": {"after", "rows_of_both", "raw", "indices"},
    "_score": {"after", "rows_of_both", "indices"},
    "_logits": {"after", "rows_of_both"},
    "_rank": {"after", "rows_of_both"},
    "_merge": {"after", "rows_of_both", "raw"},
}
"""The kinds of work, and what a worker asks of another one in it."""


class Deadly:
    """A piece of work during which workers are killed, each in its way once.

    `after`: its worker, when the work is done but not reported. Otherwise the worker that is asked for something: when
    the question has been sent.
    """

    def __init__(self, work: Callable[..., Any], folder: Path) -> None:
        self.work, self.folder = work, folder

    def __call__(self, worker: Any, *arguments: Any) -> Any:
        peers = worker.run.peers
        if not hasattr(peers, "harmless"):
            peers.harmless = peers.ask
        peers.ask = lambda *asked: self._ask(peers, worker.number, *asked)
        result = self.work(worker, *arguments)
        if self._claim("after"):
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    def _ask(self, peers: Any, own: int, peer: int, method: str, *arguments: Any) -> Any:
        import ray

        answer = peers.harmless(peer, method, *arguments)
        if peer != own and self._claim(method):
            ray.kill(peers._handles[peer], no_restart=False)
        return answer

    def _claim(self, kind: str) -> bool:
        try:
            (self.folder / f"{self.work.__name__} {kind}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


@contextmanager
def deadly_workers(run: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workers]:
    """Workers of a run that die; all commands inside use them."""
    submit = Workers.submit

    def deadly(self: Workers, worker: int, function: Callable[..., Any], *arguments: Any) -> Any:
        return submit(self, worker, Deadly(function, folder), *arguments)

    monkeypatch.setattr(Workers, "submit", deadly)
    with choice.sharded(find_run(run), 3) as group:
        monkeypatch.setattr(choice, "sharded", lambda run, workers: _given(group))
        yield group


@contextmanager
def _given(group: Workers) -> Iterator[Workers]:
    yield group


@pytest.mark.slow
def test_workers_killed_in_every_kind_of_work_lose_and_double_nothing(
    run_of: Callable[[str], Path],
    ray_cluster: object,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import ray.cloudpickle

    run, kills = run_of("gmf"), tmp_path / "kills"
    kills.mkdir()
    raw_pairs(tmp_path)
    commands = ("annotate a log", "annotate", "score", "recommend", "evaluate")
    whole = {command: run_command(command, run, "whole", tmp_path, capsys) for command in commands}
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with ray_prints_to_stderr(), deadly_workers(run, kills, monkeypatch):
        for command in commands:
            assert run_command(command, run, "sharded", tmp_path, capsys) == whole[command], command
    killed = {tuple(file.name.split()) for file in kills.iterdir()}
    assert killed == {(work, kind) for work, kinds in KINDS.items() for kind in kinds}
