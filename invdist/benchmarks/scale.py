"""Step time and peak memory of `none` and `ig` as the tables grow: neither may depend on the table size.

Every row is a process of its own with one thread, so that its peak memory is its own. Memory grows with the
tables, of course; what counts is that `ig` needs no more of it than `none`.
"""

from __future__ import annotations

import argparse
import statistics

import torch

from invdist.benchmarks._steps import Driver, memory_mb, on_ranks, random_batches
from invdist.errors import UserError
from invdist.model.build import ModelSpec, build_recommender

_PHASE = {"none": 0, "ig": 1}
_CHUNKS, _CHUNK_STEPS = 41, 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `invdist bench scale`."""
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[200_000, 2_000_000, 20_000_000], help="of both tables together"
    )
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--batch", type=int, default=1024, help="labeled rows a step")


def run(args: argparse.Namespace) -> dict[str, object]:
    """One figure of time and one of memory for each size and method, and the ratios that matter."""
    if min(args.rows) < 4 or args.batch < 1 or args.dim < 4 or args.dim % 4:
        raise UserError("--rows must be at least 4, --batch at least 1, --dim a multiple of 4, as FBGEMM wants")
    measured = [
        {"rows": rows, "method": method, **on_ranks(_measure, 1, method, rows, args.dim, args.batch)[0]}
        for rows in sorted(args.rows)
        for method in _PHASE
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


def _measure(rank: int, method: str, rows: int, dim: int, batch: int) -> dict[str, float]:
    users, items = rows // 4, rows - rows // 4
    model = build_recommender(
        ModelSpec(users=users, items=items, dim=dim, batch_size=batch, sharding="row_wise"), torch.device("cpu")
    )
    driver = Driver(model, method, _PHASE[method], random_batches(users, items, batch, rank=rank))
    driver(_CHUNK_STEPS)
    step_ms = 1e3 * statistics.median(driver(_CHUNK_STEPS) for _ in range(_CHUNKS))
    return {"step_ms": step_ms, "peak_mb": memory_mb("VmHWM")}
