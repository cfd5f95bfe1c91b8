"""Peak memory of a rank against the least it could be, by optimizer.

The least is what no engine can do without: the rows of the rank and the state of their optimizer (Adam: two values for
each; row-wise Adagrad: one for each row; SGD: none). Beside it there is what a step works in, which does not grow with
the tables, and what is allocated while tables are made. Libraries, measured with a small model first, do not count.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch

from invdist.bench._steps import Driver, memory_mb, on_ranks, random_batches
from invdist.config.registry import BACKBONES
from invdist.embeddings.shared_memory import connect
from invdist.models.build import ModelSpec, build_recommender
from invdist.runtime.errors import UserError
from invdist.runtime.progress import ProgressLine

_OPTIMIZERS = ("adam", "rowwise_adagrad", "sgd")
_STEPS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `invdist bench memory`."""
    parser.add_argument("--rows", type=int, default=4_000_000, help="rows of both tables together")
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--model", choices=BACKBONES.names(), default="gmf")
    parser.add_argument("--batch", type=int, default=1024, help="labeled interactions a rank and step")
    parser.add_argument("--world-size", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--optimizer", choices=_OPTIMIZERS, nargs="+", default=_OPTIMIZERS)


def run(args: argparse.Namespace) -> dict[str, object]:
    """One line for each optimizer and number of ranks; `ratio` is the peak with `ig` steps over the least."""
    if args.rows < 4 or min(args.batch, *args.world_size) < 1 or args.dim < 4 or args.dim % 4:
        raise UserError("--rows must be at least 4, --batch and --world-size at least 1, --dim a multiple of 4")
    measured: list[dict[str, Any]] = []
    with ProgressLine() as progress:
        for optimizer in args.optimizer:
            for ranks in args.world_size:
                progress.show(f"{optimizer}, {ranks} ranks")
                sizes = {"model": args.model, "dim": args.dim, "optimizer": optimizer}
                found = on_ranks(_measure, ranks, ranks, args.rows, args.batch, sizes)
                fullest = max(found, key=lambda rank: rank["ig_mb"])
                measured.append({"optimizer": optimizer, "ranks": ranks, **fullest})
    return {
        "rows": args.rows,
        "dim": args.dim,
        "model": args.model,
        "batch": args.batch,
        "load": list(os.getloadavg()),
        "ratio": max(row["ig_mb"] / row["least_mb"] for row in measured),
        "ig_vs_none": max(row["ig_mb"] / row["none_mb"] for row in measured),
        "ranks": [{**row, "ratio": row["ig_mb"] / row["least_mb"]} for row in measured],
    }


def _measure(rank: int, ranks: int, rows: int, batch: int, sizes: dict[str, Any]) -> dict[str, float]:
    comm = connect()

    def steps(rows: int) -> tuple[Any, dict[str, float]]:
        spec = ModelSpec(**sizes, users=rows // 4, items=rows - rows // 4, batch_size=batch * ranks)
        model = build_recommender(spec, torch.device("cpu"), comm)
        batches = random_batches(spec.users, spec.items, batch, rank=rank, ranks=ranks)
        peaks = {"built": memory_mb("VmHWM")}
        for method, phase in (("none", 0), ("ig", 1)):
            Driver(model, method, phase, batches)(_STEPS)
            peaks[method] = memory_mb("VmHWM")
        return model, peaks

    steps(4000)
    before = memory_mb("VmRSS")
    model, peaks = steps(rows)
    held = [model.rows.local_rows, *model.rows.optimizer.state.values()]
    least = sum(tensor.nbytes for tensor in held) / 2**20
    return {"least_mb": least, **{f"{name}_mb": peak - before for name, peak in peaks.items()}}
