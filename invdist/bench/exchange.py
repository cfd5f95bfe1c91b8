"""Host time of an exchange of ids at 8, 64 and 1,024 ranks, on one rank whose messages come back to itself.

What is measured is the work of this rank: sorting, counting, and the messages' Python. Nothing travels. The batch is
that of an inverse-gradient step, ids are uniformly random, and the sizes take turns in one thread.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

import torch

from invdist.bench._loopback import LoopbackComm, row_wise_layout
from invdist.bench._steps import on_ranks, random_batches
from invdist.embeddings.exchange import Exchange, Pairs
from invdist.embeddings.locate import RowLocator
from invdist.learning.strategy import unlabeled
from invdist.runtime.errors import UserError

GOALS = {64: 0.8, 1024: 2.5}
"""Milliseconds."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `invdist bench exchange`."""
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 1024])
    parser.add_argument("--users", type=int, default=37_692)
    parser.add_argument("--items", type=int, default=131_690)
    parser.add_argument("--batch", type=int, default=1024, help="labeled interactions per rank and step")
    parser.add_argument("--rate", type=int, default=1, help="unlabeled interactions for each labeled one")
    parser.add_argument("--repeats", type=int, default=101, help="medians are over this many exchanges of each size")


def run(args: argparse.Namespace) -> dict[str, object]:
    """Median and smallest milliseconds of an exchange, by number of ranks."""
    sizes = {name: getattr(args, name) for name in ("users", "items", "batch", "rate")}
    if min(*args.ranks, *sizes.values(), args.repeats) < 1:
        raise UserError("--ranks, --users, --items, --batch, --rate and --repeats must be at least 1")
    return sizes | on_ranks(_measure, 1, sizes, args.ranks, args.repeats)[0]


def _measure(rank: int, sizes: dict[str, int], ranks: Sequence[int], repeats: int) -> dict[str, float]:
    users, items, cpu = sizes["users"], sizes["items"], torch.device("cpu")
    groups = [
        [Pairs(batch.user, batch.item), unlabeled(batch)]
        for batch in random_batches(users, items, sizes["batch"], rate=sizes["rate"])
    ]
    locators = {size: RowLocator(row_wise_layout(size, users, items, 32), size, cpu) for size in ranks}
    seconds: dict[int, list[float]] = {size: [] for size in ranks}
    for repeat in range(repeats + len(groups)):  # the first turn of each batch is not counted
        for size, locate in locators.items():
            started = time.perf_counter()
            Exchange(locate, LoopbackComm(size, cpu), groups[repeat % len(groups)]).advance().finish()
            if repeat >= len(groups):
                seconds[size].append(time.perf_counter() - started)
    by_size = {"ms": statistics.median, "least_ms": min}
    return {f"{name}_{size}_ranks": 1e3 * of(seconds[size]) for size in ranks for name, of in by_size.items()}
