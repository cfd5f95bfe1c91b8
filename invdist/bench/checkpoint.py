"""How long a checkpoint blocks a step, is written, and is loaded: one rank, GMF, table rows with Adam state.

The first save takes longer because it allocates the memory of the snapshot, which later saves reuse. Then a delta, of
which `--changed` of the rows changed. Files are hashed and written by as many threads as torch has.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from invdist.config.registry import STRATEGIES
from invdist.learning.strategy import Setting
from invdist.models.build import ModelSpec, build_recommender
from invdist.runtime.errors import UserError
from invdist.runtime.process import single_rank
from invdist.training.checkpoint import CheckpointStore, Position


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `invdist bench checkpoint`."""
    parser.add_argument("--rows", type=int, default=2_000_000, help="table rows of users and items together")
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--saves", type=int, default=4, help="the median of all but the first is reported")
    parser.add_argument("--changed", type=float, default=0.1, help="share of the rows that a delta holds")
    parser.add_argument("--threads", type=int, default=None, help="threads that hash and write; default: torch's own")
    parser.add_argument("--folder", default=None, help="where to write; default: the temporary folder of the system")


def run(args: argparse.Namespace) -> dict[str, object]:
    """Measures asynchronous saves, and loads the last one back."""
    if args.rows < 2 or args.dim < 4 or args.saves < 2 or not 0 <= args.changed <= 0.5:
        raise UserError("--rows and --saves must be at least 2, --dim at least 4, --changed between 0 and 0.5")
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    users = args.rows // 2
    with single_rank(), tempfile.TemporaryDirectory(dir=args.folder) as folder:
        model = build_recommender(ModelSpec(users=users, items=args.rows - users, dim=args.dim), torch.device("cpu"))
        setting = Setting(
            options=STRATEGIES.get("none").Config(), unlabeled_rate=1, gamma=1e-3, users=users, items=users
        )
        strategy = STRATEGIES.get("none")(setting, model)
        store = CheckpointStore(folder, model.comm, keep_last=1, keep_best=0, deltas=True)
        blocked, written, sizes, loads = [], [], [], []
        for step in range(args.saves + 1):
            is_delta = step == args.saves
            if is_delta:
                assert model.rows.changed is not None
                model.rows.changed[: int(args.changed * args.rows)] = True
            started = time.perf_counter()
            store.save(model, strategy, Position(global_step=step), {}, None if is_delta else 0.5)
            returned = time.perf_counter()
            store.wait()
            blocked.append(returned - started)
            written.append(time.perf_counter() - returned)
            newest = store.latest()
            assert newest is not None
            sizes.append(sum(path.stat().st_size for path in Path(newest.path).iterdir()))
        assert newest.base is not None
        for info in (newest.base, newest):
            started = time.perf_counter()
            store.load(info, model, strategy)
            loads.append(time.perf_counter() - started)
    return {
        "rows": args.rows,
        "dim": args.dim,
        "threads": torch.get_num_threads(),
        "bytes": sizes[0],
        "first_save_blocks_s": blocked[0],
        "save_blocks_s": statistics.median(blocked[1:-1]),
        "background_write_s": statistics.median(written[1:-1]),
        "load_s": loads[0],
        "delta_bytes": sizes[-1],
        "delta_blocks_s": blocked[-1],
        "delta_write_s": written[-1],
        "delta_load_s": loads[1],
    }
