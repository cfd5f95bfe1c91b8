"""`prepare` in one process and with workers on Ray: time as a ratio, and the largest memory of a process."""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from invdist.data.prepare.options import Kind, MicroVideo, Synthetic
from invdist.data.prepare.parallel.on_ray import prepare_on_ray
from invdist.data.prepare.pipeline import prepare_log
from invdist.runtime.errors import UserError

_BATCH = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `invdist bench prepare`."""
    parser.add_argument("--log-rows", type=int, help="interactions of a parquet log; by default the Micro-Video preset")
    parser.add_argument("--users", type=int, default=1_000_000, help="distinct users of the parquet log")
    parser.add_argument("--items", type=int, default=200_000, help="distinct items of the parquet log")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--folder", metavar="DIR", help="where there is room for the log and for the unfinished work")
    parser.add_argument("--only-workers", action="store_true", help="leave the one-process path out")


def run(args: argparse.Namespace) -> dict[str, object]:
    """Prepares the same log both ways; the two must have the same fingerprint."""
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="invdist-bench-") as name:
        folder = Path(name)
        inputs = [_write_log(folder / "log", args)] if args.log_rows else []
        options: Kind = MicroVideo() if args.log_rows else Synthetic(preset="microvideo")
        alone = None if args.only_workers else _alone(options, inputs, folder / "alone")
        shared = _with_workers(options, inputs, folder / "shared", args.workers)
    figures: dict[str, object] = {"log_rows": shared["log_rows"], "users": shared["users"], "items": shared["items"]}
    figures |= {"workers": args.workers, "seconds": shared["seconds"], "seconds_with_ray": shared["seconds_with_ray"]}
    figures |= {"worker_memory_mb": max(shared["memory_mb"].values()), "memory_mb_by_stage": shared["memory_mb"]}
    figures |= {"seconds_by_stage": shared["seconds_by_stage"]}
    if alone is not None:
        if alone["fingerprint"] != shared["fingerprint"]:
            raise UserError(f"fingerprints differ: {alone['fingerprint']} and {shared['fingerprint']}")
        figures |= {"one_process_seconds": alone["seconds"], "one_process_memory_mb": alone["memory_mb"]}
        figures |= {"ratio": alone["seconds"] / shared["seconds"]}
        figures |= {"ratio_with_ray": alone["seconds"] / shared["seconds_with_ray"]}
    return figures


def _alone(options: Kind, inputs: list[Path], output: Path) -> dict[str, float]:
    """In a process of its own, whose memory is that of nothing else."""
    code = "import json, sys; from invdist.bench.prepare import _measure_alone; _measure_alone(json.loads(sys.argv[1]))"
    what = {"log": [str(path) for path in inputs], "output": str(output)}
    done = subprocess.run([sys.executable, "-c", code, json.dumps(what)], stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def _measure_alone(what: dict) -> None:
    options: Kind = MicroVideo() if what["log"] else Synthetic(preset="microvideo")
    start = time.perf_counter()
    manifest = prepare_log(options, what["log"], what["output"])
    seconds = time.perf_counter() - start
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"seconds": seconds, "memory_mb": memory, "fingerprint": manifest["fingerprint"]}))


def _with_workers(options: Kind, inputs: list[Path], output: Path, workers: int) -> dict:
    from invdist.training.ray_backend import connected

    measured: dict[str, dict[str, float]] = {}
    begin = time.perf_counter()
    with connected(workers):
        start = time.perf_counter()
        manifest = prepare_on_ray(options, inputs, output, workers, measured=measured)
        seconds = time.perf_counter() - start
    return {
        "seconds": seconds,
        "seconds_with_ray": time.perf_counter() - begin,
        "memory_mb": {stage: size / 2**20 for stage, size in measured["peak_memory"].items()},
        "seconds_by_stage": measured["seconds"],
        "log_rows": manifest["counts"]["log_rows"],
        **{name: manifest[name] for name in ("users", "items", "fingerprint")},
    }


def _write_log(folder: Path, args: argparse.Namespace) -> Path:
    """A play log in parquet files: ids of 63 bits, uniform, so that nearly every one of them occurs."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for number, start in enumerate(range(0, args.log_rows, _BATCH)):
        rows = min(_BATCH, args.log_rows - start)
        # An odd factor modulo 2^61 - 1: distinct numbers stay distinct, and their order is another.
        user, item = (rng.integers(0, size, rows) * 1_000_003 % (2**61 - 1) for size in (args.users, args.items))
        table = {
            "user": user,
            "item": item,
            "play_time": np.floor(rng.random(rows) * 10_000),
            "duration": np.full(rows, 10_000.0),
            "time": rng.integers(0, 2_592_000, rows) + 1_650_000_000,
        }
        pq.write_table(pa.table(table), folder / f"{number:05d}.parquet", row_group_size=_BATCH // 4)
    return folder
