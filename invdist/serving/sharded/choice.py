"""Whole tables in one process, or slices of them in many: chosen by size against the memory that is there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from invdist.runtime.errors import UserError
from invdist.runtime.memory import free_memory
from invdist.serving.run import TrainedRun

if TYPE_CHECKING:
    from invdist.serving.sharded.workers import Workers

Tables = Literal["whole", "sharded"]

_SHARE = 0.5
"""Of the free memory that whole tables may take: scoring, and other processes, need some too."""
_GIB = 2**30


def choose(
    run: TrainedRun,
    asked: Literal["auto"] | Tables = "auto",
    workers: int | None = None,
    *,
    whole_on_ray: bool = False,
    free: float | None = None,
) -> tuple[Tables, str]:
    """(which, why). `workers` are those that the user asked for, `free` the bytes of memory that are free.

    With `whole_on_ray` workers also work on whole tables, which then are here and in the object store.
    """
    if asked == "sharded" and workers == 0:
        raise UserError("--tables sharded needs Ray workers to hold the slices: leave out --workers 0")
    if asked == "whole" and workers and not whole_on_ray:
        raise UserError("--tables whole works in this process: leave out --workers, or use --tables sharded")
    if asked != "auto":
        return asked, f"--tables {asked}"
    if workers == 0:
        return "whole", "--workers 0"
    if workers and not whole_on_ray:
        return "sharded", f"--workers {workers}"
    free = free_memory() if free is None else free
    copies = 2 if whole_on_ray else 1
    needed = copies * (run.tables.bytes + run.raw_id_bytes())
    size = f"{_size(needed)}{', with the copy in the object store' * (copies - 1)}"
    if needed <= _SHARE * free:
        return "whole", f"{size}, and {_size(free)} are free here"
    return "sharded", f"{size} are more than half of the {_size(free)} that are free here"


@contextmanager
def sharded(run: TrainedRun, workers: int | None = None) -> Iterator[Workers]:
    """Workers that hold the run, on the Ray cluster of this process or a private one; they end with the block."""
    from invdist.training.ray_backend import connected

    with connected(workers):
        from invdist.serving.sharded.workers import Workers

        group = Workers(run, workers)
        try:
            group.load()
            yield group
        finally:
            group.close()


def _size(size: float) -> str:
    return f"{size / _GIB:,.1f} GiB" if size >= _GIB / 10 else f"{size / 2**20:,.1f} MiB"
