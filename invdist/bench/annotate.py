"""Annotating with sharded tables against whole ones: rows/s of the same Ray workers, bytes and memory per worker.

The run is made up: random tables of any size and random pairs, in a temporary folder. `--limit` gives the workers of
sharded tables an address space for data (RLIMIT_DATA) of so many MiB beyond their imports.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import torch

from invdist import config as configs
from invdist.config.registry import BACKBONES, STRATEGIES
from invdist.data.dataset import Dataset
from invdist.data.prepare.ids import id_table
from invdist.learning.strategy import Setting
from invdist.models.build import ModelSpec, build_recommender
from invdist.runtime.errors import UserError
from invdist.runtime.process import single_rank
from invdist.serving.annotation import AnnotationJob, Work
from invdist.serving.inputs import UnclearPairs
from invdist.serving.run import TrainedRun
from invdist.training.checkpoint import CheckpointStore, Position

_PART_ROWS = 1 << 18
_ID_ROWS = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `invdist bench annotate`."""
    parser.add_argument("--users", type=int, default=37_692)
    parser.add_argument("--items", type=int, default=131_690)
    parser.add_argument("--pairs", type=int, default=1 << 23)
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--model", choices=BACKBONES.names(), default="gmf")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--limit", type=int, metavar="MIB", help="of a worker's memory, beyond its imports")
    parser.add_argument("--sharded-only", action="store_true", help="for tables that do not fit this machine twice")
    parser.add_argument("--folder", help="where to write; default: the temporary folder of the system")


def run(args: argparse.Namespace) -> dict[str, object]:
    """Measures from the first finished part to the last one, so that starting workers is not counted."""
    if min(args.users, args.items, args.pairs, args.workers) < 1 or args.dim < 4:
        raise UserError("--users, --items, --pairs and --workers must be at least 1, --dim at least 4")
    from invdist.training.ray_backend import connected

    with tempfile.TemporaryDirectory(dir=args.folder) as folder, connected(args.workers):
        from invdist.serving.annotation_on_ray import annotate_on_ray
        from invdist.serving.sharded.jobs import annotate_on_workers
        from invdist.serving.sharded.workers import Workers

        found = _made_up_run(Path(folder), args)
        figures: dict[str, object] = {
            "table_rows": args.users + args.items,
            "table_mib": found.tables.bytes / 2**20,
            "pairs": args.pairs,
            "workers": args.workers,
        }
        group = Workers(found, args.workers)
        try:
            imports = list(group.everywhere(_limit, args.limit))
            group.load()
            sharded = _rate(group.run, f"{folder}/sharded", annotate_on_workers(group))
            peaks = list(group.everywhere(_peak))
        finally:
            group.close()
        figures["sharded_rows_per_s"] = sharded
        figures["worker_mib_beyond_imports"] = max(peak - before for peak, before in zip(peaks, imports, strict=True))
        if not args.sharded_only:

            def on_ray(parts: Any, source: Any, annotator: Any, output: Any) -> Iterator[int]:
                return annotate_on_ray(parts, source, annotator, output, args.workers)

            figures["whole_rows_per_s"] = whole = _rate(found, f"{folder}/whole", on_ray)
            figures["ratio"] = sharded / whole
            for file in Path(folder, "whole").glob("*.parquet"):
                assert file.read_bytes() == Path(folder, "sharded", file.name).read_bytes(), file
    return figures


def _rate(run: TrainedRun, output: str, work: Work) -> float:
    """Rows per second between the first finished part and the last."""
    times: list[tuple[float, int]] = []

    def progress(done: int, parts: int, rows: int) -> None:
        if rows:
            times.append((time.perf_counter(), rows))

    AnnotationJob(run, UnclearPairs(run.dataset, _PART_ROWS), output).execute(work, progress)
    if len(times) < 2:
        raise UserError(f"--pairs: more than {2 * _PART_ROWS} are needed, so that there are parts to measure")
    (started, before), (ended, rows) = times[0], times[-1]
    return (rows - before) / (ended - started)


def _limit(worker: Any, mib: int | None) -> float:
    """Limits the memory of a worker; gives the MiB it has now."""
    if mib is not None:
        limit = int(_status("VmData")) * 2**20 + mib * 2**20
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    return _status("VmRSS")


def _peak(worker: Any) -> float:
    return _status("VmHWM")


def _status(name: str) -> float:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) / 1024


def _made_up_run(folder: Path, args: argparse.Namespace) -> TrainedRun:
    users, items = args.users, args.items
    dataset = _made_up_data(folder / "data", users, items, args.pairs)
    rows = {"dim": args.dim, "bias": False}
    config = configs.from_mapping(
        {"method": "none", "model": args.model, "rows": rows, "data": {"path": dataset.path}, "runs": str(folder)}
    )
    with single_rank():
        spec = ModelSpec(model=args.model, users=users, items=items, dim=args.dim, optimizer="sgd")
        model = build_recommender(spec, torch.device("cpu"))
        setting = Setting(
            options=STRATEGIES.get("none").Config(), unlabeled_rate=1, gamma=1e-3, users=users, items=items
        )
        store = CheckpointStore(folder / "checkpoints", model.comm, asynchronous=False)
        store.save(model, STRATEGIES.get("none")(setting, model), Position(global_step=1), {})
    checkpoint = store.latest()
    assert checkpoint is not None
    return TrainedRun(folder, config, dataset, checkpoint)


def _made_up_data(folder: Path, users: int, items: int, pairs: int) -> Dataset:
    """A data set with raw ids and unclear exposures only."""
    folder.mkdir()
    files = {}
    for name, count in (("users", users), ("items", items)):
        with pq.ParquetWriter(folder / f"{name}.parquet", id_table(pa.array([], pa.int64())).schema) as writer:
            for first in range(0, count, _ID_ROWS):
                index = np.arange(first, min(first + _ID_ROWS, count))
                writer.write_table(pa.table({"index": index, "raw": 7 * index + 3}))
        files[name] = {"file": f"{name}.parquet", "bytes": (folder / f"{name}.parquet").stat().st_size}
    source = np.random.default_rng(0)
    columns = {
        name: source.integers(count, size=pairs, dtype=np.int32) for name, count in (("user", users), ("item", items))
    }
    pq.write_table(pa.table(columns), folder / "unclear.parquet", row_group_size=_PART_ROWS)
    unknown = pa.table({"truth": np.full(pairs, np.nan, np.float32)})
    pq.write_table(unknown, folder / "truth.parquet", row_group_size=_PART_ROWS)
    manifest = {
        "users": users,
        "items": items,
        "rows": {"unclear": pairs},
        "summary": {},
        "fingerprint": "made up",
        "files": files,
        "classes": {name: {"positives": 1, "negatives": 1} for name in ("train", "training_test")},
        "shards": {name: [{"file": f"{name}.parquet", "rows": pairs}] for name in ("unclear", "truth")},
    }
    return Dataset(str(folder), pafs.LocalFileSystem(), str(folder), manifest)
