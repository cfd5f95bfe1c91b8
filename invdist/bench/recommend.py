"""Time to find the best items of all users in the whole catalogue, without seen items, and to write them as parquet.

Weights and seen pairs are synthetic, of the size of the paper's data set. Reading a checkpoint is not included.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time

import numpy as np
import pyarrow as pa
import torch

from invdist.config.registry import BACKBONES
from invdist.models.frozen import FrozenModel
from invdist.runtime.errors import UserError
from invdist.serving.output import table_writer
from invdist.serving.seen import SeenPairs
from invdist.serving.topk import TopK


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `invdist bench recommend`."""
    parser.add_argument("--users", type=int, default=37_692)
    parser.add_argument("--items", type=int, default=131_690)
    parser.add_argument("--seen", type=int, default=9_462_492, help="observed pairs that are left out")
    parser.add_argument("--k", type=int, default=10, help="items per user")
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--model", choices=BACKBONES.names(), default="gmf")
    parser.add_argument("--sample", type=int, help="rank only this many users (NeuMF is slow)")


def run(args: argparse.Namespace) -> dict[str, object]:
    """Measures on all cores that torch uses; `cpu_seconds` is the CPU time of all threads."""
    if min(args.users, args.items, args.k, args.dim) < 1 or args.seen < 0:
        raise UserError("--users, --items, --k and --dim must be at least 1, --seen at least 0")
    torch.manual_seed(0)
    backbone = BACKBONES.get(args.model)(dim=args.dim)
    user, item = (torch.randn(count, backbone.columns) for count in (args.users, args.items))
    model = FrozenModel(user, item, backbone)
    source = np.random.default_rng(0)
    seen = SeenPairs(
        source.integers(args.users, size=args.seen),
        source.integers(args.items, size=args.seen),
        args.items,
    )
    users = np.arange(min(args.sample or args.users, args.users))
    schema = pa.schema([("user", pa.int64()), ("rank", pa.int32()), ("item", pa.int64()), ("score", pa.float32())])
    started, cpu, written = time.perf_counter(), time.process_time(), 0
    with tempfile.TemporaryDirectory() as folder:
        with table_writer(os.path.join(folder, "best.parquet"), schema, "parquet") as writer:
            for best in TopK(model, args.k, seen).of(users):
                writer.write_table(pa.table(list(map(pa.array, best)), schema=schema))
                written += len(best.user)
    seconds = time.perf_counter() - started
    return {
        "model": args.model,
        "users": len(users),
        "items": args.items,
        "k": args.k,
        "threads": torch.get_num_threads(),
        "rows": written,
        "seconds": seconds,
        "cpu_seconds": time.process_time() - cpu,
        "users_per_s": len(users) / seconds,
    }
