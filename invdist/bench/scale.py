"""Step time and peak memory of `none` and `ig` steps as the tables grow.

The time of a step must not depend on the size of the tables. Memory grows with them, but `ig` must need no more than
`none`. Every measurement is a process with one thread, so that each has its own peak memory. The sizes of a method
take turns, so that other load on the machine slows all of them.
"""

from __future__ import annotations

import argparse
import statistics
from multiprocessing.synchronize import Barrier

import torch
import torch.multiprocessing as mp

from invdist.bench._steps import Driver, forget_peak, memory_mb, on_ranks, random_batches
from invdist.models.build import ModelSpec, build_recommender
from invdist.runtime.errors import UserError

_PHASE = {"none": 0, "ig": 1}
_CHUNK_STEPS = 5
_TURN_S = 600  # more than the initialisation of the largest tables takes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `invdist bench scale`."""
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[200_000, 2_000_000, 20_000_000], help="rows of both tables together"
    )
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--batch", type=int, default=1024, help="labeled interactions a step")
    parser.add_argument("--repeats", type=int, default=41, help="medians are over this many turns of each size")


def run(args: argparse.Namespace) -> dict[str, object]:
    """Time and memory of each size and method, and the ratios that matter."""
    if min(args.rows) < 4 or min(args.batch, args.repeats) < 1 or args.dim < 4 or args.dim % 4:
        raise UserError("--rows must be at least 4, --batch and --repeats at least 1, --dim a multiple of 4")
    sizes = sorted(args.rows)
    measured = [
        {"rows": rows, "method": method, **figures}
        for method in _PHASE
        for rows, figures in zip(sizes, _measure_all(method, sizes, args), strict=True)
    ]
    of = {(row["rows"], row["method"]): row for row in measured}
    small, large = min(args.rows), max(args.rows)
    return {
        "dim": args.dim,
        "batch": args.batch,
        "time_ratio": of[large, "ig"]["step_ms"] / of[small, "ig"]["step_ms"],
        "memory_ratio": max(of[rows, "ig"]["peak_mb"] / of[rows, "none"]["peak_mb"] for rows in args.rows),
        "rows": measured,
    }


def _measure_all(method: str, sizes: list[int], args: argparse.Namespace) -> list[dict[str, float]]:
    turns = mp.get_context("spawn").Barrier(len(sizes), timeout=_TURN_S)
    return on_ranks(_measure, len(sizes), method, sizes, args.dim, args.batch, args.repeats, turns, together=False)


def _measure(
    number: int, method: str, sizes: list[int], dim: int, batch: int, repeats: int, turns: Barrier
) -> dict[str, float]:
    users, items = sizes[number] // 4, sizes[number] - sizes[number] // 4
    spec = ModelSpec(users=users, items=items, dim=dim, batch_size=batch, sharding="row_wise")
    model = build_recommender(spec, torch.device("cpu"))
    forget_peak()  # of building, which is the same for all methods and differs by chance
    driver = Driver(model, method, _PHASE[method], random_batches(users, items, batch))
    driver(_CHUNK_STEPS)
    seconds = []
    for turn in range(repeats * len(sizes)):
        turns.wait()
        if turn % len(sizes) == number:
            seconds.append(driver(_CHUNK_STEPS))
    return {"step_ms": 1e3 * statistics.median(seconds), "peak_mb": memory_mb("VmHWM")}
