"""An epoch from files to weights, against the same steps on batches that are in memory already: one core, in turns.

`ratio` is the rows/s of a run that streams its shards over those of bare steps on the same batches. What it lacks to 1
is reading, shuffling, slicing, events and bookkeeping. `waiting_for_input` is the share of an epoch in which the step
waits for its batch. With `--ray` a run of one worker is measured too, whose reader is a Ray actor on another core.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from invdist.bench._contest import contest, rows_per_s
from invdist.bench._data import movielens_or_like
from invdist.bench._runs import ray_epochs, ray_for
from invdist.config.registry import BACKBONES
from invdist.runtime.errors import UserError
from invdist.runtime.progress import ProgressLine

RATIO_GOAL, WAITING_GOAL = 0.85, 0.05


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `invdist bench epoch`."""
    parser.add_argument("--data", metavar="DIR", help="a prepared data set (default: MovieLens-1M, or one of its size)")
    parser.add_argument("--model", choices=BACKBONES.names(), default="gmf")
    parser.add_argument("--batch", type=int, nargs="+", default=[1024, 8192], help="labeled interactions a step")
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each that count")
    parser.add_argument("--seconds", type=float, default=8.0, help="a turn is at least a quarter of this long")
    parser.add_argument("--ray", action="store_true", help="also by Ray, with one worker and a reader")


def run(args: argparse.Namespace) -> dict[str, object]:
    """Medians by batch size: `ratio_1024` and so on."""
    if min(*args.batch, args.rounds) < 1 or args.dim < 4 or args.dim % 4 or args.seconds <= 0:
        raise UserError("--batch and --rounds must be at least 1, --dim a multiple of 4, --seconds above 0")
    with tempfile.TemporaryDirectory() as temporary, ProgressLine() as progress:
        folder = Path(temporary)
        data, source = movielens_or_like(args.data, folder)
        figures: dict[str, object] = {"data": source, "model": args.model, "load": list(os.getloadavg())}
        for batch in args.batch:
            settings = {"model": args.model, "batch": batch, "dim": args.dim, "seconds": args.seconds, "data": data}
            commands = {
                name: [sys.executable, "-m", "invdist.bench._contestants", name, json.dumps(settings)]
                for name in ("invdist", "in_memory")
            }
            answers = contest(commands, args.rounds, folder, progress.show)
            files, memory = (rows_per_s(answers[name]) for name in commands)
            figures |= {
                f"files_rows_per_s_{batch}": files,
                f"in_memory_rows_per_s_{batch}": memory,
                f"ratio_{batch}": files / memory,
                f"waiting_for_input_{batch}": statistics.median(by["stream"] / s for _, s, by in answers["invdist"]),
            }
        if args.ray:
            with ray_for(workers=1):
                for batch in args.batch:
                    progress.show(f"by Ray, batch {batch}")
                    figures |= _by_ray(data, folder, args, batch)
    return figures


def _by_ray(data: str, folder: Path, args: argparse.Namespace, batch: int) -> dict[str, Any]:
    settings = {"model": args.model, "data": {"batch_size": batch}, "rows": {"dim": args.dim}}
    epochs = ray_epochs(data, folder, settings, workers=1, epochs=args.rounds + 1)[1:]
    waiting = statistics.median(epoch["seconds_by"]["stream"] / epoch["seconds"] for epoch in epochs)
    speed = statistics.median(epoch["rows_per_s"] for epoch in epochs)
    return {f"ray_rows_per_s_{batch}": speed, f"ray_waiting_for_input_{batch}": waiting}
