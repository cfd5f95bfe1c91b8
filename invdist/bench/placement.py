"""How evenly the rows of an item table are asked for, by placement: the busiest rank over the mean of all ranks.

Ids are drawn by popularity. Each rank asks once for each distinct id of its share of a batch, as the exchange does.
"""

from __future__ import annotations

import argparse

import numpy as np

from invdist.bench._steps import popular_ids
from invdist.embeddings.placement import spread_multiplier
from invdist.runtime.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `invdist bench placement`."""
    parser.add_argument("--items", type=int, default=131_690, help="table rows, the most popular first")
    parser.add_argument("--zipf", type=float, default=1.0, help="the chance of item i is ~ (i + 1)^-zipf")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--batch", type=int, default=65_536, help="pairs of a step over all ranks")
    parser.add_argument(
        "--data", metavar="DIR", help="a prepared data set: its training items instead, by their own ids"
    )


def run(args: argparse.Namespace) -> dict[str, object]:
    """Draws one batch, and counts what is asked of each rank."""
    if args.items < 1 or args.batch < 1 or min(args.ranks) < 1:
        raise UserError("--items, --batch and --ranks must be at least 1")
    rng = np.random.default_rng(0)
    if args.data:
        from invdist.data.dataset import Dataset

        dataset = Dataset.open(args.data, verify="fast")
        items = dataset.items
        drawn = rng.choice(dataset.read("train", ["item"])["item"].to_numpy(), args.batch)
    else:
        items = args.items
        drawn = popular_ids(rng, items, args.batch, args.zipf)
    found: dict[str, object] = {"items": items, "batch": args.batch}
    for ranks in args.ranks:
        for name, multiplier in (("in_order", 1), ("hashed", spread_multiplier(items))):
            found[f"{name}_{ranks}_ranks"] = busiest(drawn, items, ranks, multiplier)
    return found


def busiest(ids: np.ndarray, rows: int, ranks: int, multiplier: int) -> float:
    """Rows asked of the busiest rank over those asked of a rank on average, in one step."""
    asked = np.zeros(ranks)
    block = -(-rows // ranks)
    for part in np.array_split(ids.astype(np.int64), ranks):
        asked += np.bincount(np.unique(part) * multiplier % rows // block, minlength=ranks)
    return float(asked.max() / asked.mean())
