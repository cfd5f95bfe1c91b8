"""Interactions/s from parquet through Ray into batches, of the unlabeled sampler, and of the training step."""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np

from invdist.data.prepare.options import Synthetic
from invdist.data.prepare.pipeline import prepare_log
from invdist.data.prepare.synthetic import PRESETS
from invdist.data.schema import TRAINING_LABELED
from invdist.data.stream.batches import Stream, StreamSpec, UnlabeledSpec, ray_readers
from invdist.data.stream.observed import ObservedPairs
from invdist.data.stream.sampler import Sampler

_SIZE = PRESETS["microvideo"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `invdist bench stream`."""
    parser.add_argument("--data", metavar="DIR", help="a prepared data set; by default a synthetic one is made")
    parser.add_argument("--rows", type=int, default=2_000_000, help="labeled interactions of the synthetic one")
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--readers", type=int, default=1)


def run(args: argparse.Namespace) -> dict[str, object]:
    """Measures the sampler alone, the stream without and with sampling, then the training step.

    `ratio` is the labeled interactions/s of the stream, sampling an unlabeled pair for each, over those of the step.
    """
    sampler = _sampler_rows_per_s()
    with tempfile.TemporaryDirectory() as folder:
        data = args.data or _synthetic(Path(folder), args.rows)
        plain, sampled = _stream_rows_per_s(data, args.batch, args.readers)
    from invdist.bench.step import plain_step_ms

    trainer = args.batch / plain_step_ms(_SIZE.users, _SIZE.items, args.dim, args.batch) * 1000
    return {
        "rows_per_s": plain,
        "sampled_rows_per_s": sampled,
        "sampler_rows_per_s_one_core": sampler,
        "trainer_rows_per_s": trainer,
        "ratio": sampled / trainer,
        "batch": args.batch,
        "readers": args.readers,
    }


def _sampler_rows_per_s(rows: int = 1 << 18, repeats: int = 7) -> float:
    """Sampled pairs/s with exact exclusion of 9.46 M observed pairs (median; NumPy uses one thread)."""
    rng = np.random.default_rng(0)
    user, item = (rng.integers(0, size, _SIZE.labeled_rows) for size in (_SIZE.users, _SIZE.items))
    sampler = Sampler(ObservedPairs(user, item, _SIZE.users, _SIZE.items), seed=0)
    seconds = []
    for repeat in range(repeats):
        asked = rng.integers(0, _SIZE.users, rows)
        position = np.arange(repeat * rows, (repeat + 1) * rows, dtype=np.uint64)
        start = time.perf_counter()
        sampler.sample(asked, position)
        seconds.append(time.perf_counter() - start)
    return rows / float(np.median(seconds))


def _synthetic(folder: Path, rows: int) -> str:
    path = folder / "data"
    prepare_log(Synthetic(preset="microvideo", labeled_rows=rows), [], path)
    return str(path)


def _stream_rows_per_s(data: str, batch: int, readers: int) -> tuple[float, float]:
    from invdist.runtime import private_ray

    with private_ray.private_ray(cpus=2) as head:
        import ray

        ray.init(head.address, log_to_driver=False)
        try:
            return _epoch_rows_per_s(data, batch, readers, 0), _epoch_rows_per_s(data, batch, readers, 1)
        finally:
            ray.shutdown()


def _epoch_rows_per_s(data: str, batch: int, readers: int, sampled: int) -> float:
    """Labeled interactions/s of the second epoch: the readers start in the first."""
    spec = StreamSpec(
        path=data,
        splits=TRAINING_LABELED,
        batch_size=batch,
        unlabeled_per_row=sampled,
        unlabeled=UnlabeledSpec(source="sampled"),
    )
    stream = Stream(spec, 0, 1, readers=ray_readers(spec, readers))
    rows, start = 0, 0.0
    for epoch in (0, 1):
        rows, start = 0, time.perf_counter()
        for step in stream.epoch(epoch):
            rows += len(step.user)
    return rows / (time.perf_counter() - start)
