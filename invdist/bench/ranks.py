"""What a second rank pays: weak and strong scaling on one machine, and four and eight ranks under simulated latency.

Weak scaling: every rank has `--batch` rows. `weak_scaling_1024` is the time of a plain step of one rank, *beside an
equally busy neighbour*, over that of a step of two ranks; `weak_scaling_1024_ig` is that of inverse-gradient steps.
Strong scaling (`--parts strong`): real runs by Ray, files to weights, with the global batch held. `strong_scaling_1024`
is the rows/s of two workers over those of one, `threads_1024` those of one worker with two threads over those of one.
`free_messages_1024` is the most that two workers could have: twice the rows/s of one worker with half the batch.
Crossover (`--parts crossover`): plain steps with the global batch held, one rank against two, in turns: from which
batch on a second rank pays, and what the model says (`training/second_rank.py`).
Latency (`--parts latency`): every message arrives so long after the last rank has sent it, while all ranks share the
cores of this machine. `waits` is how much a step slows down, in latencies; `modelled_waits` counts the
messages that a step must wait for one after the other: rows, gradients; and deltas, losses, gradients of V for IG. Ids
travel ahead. See docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from invdist.bench._data import movielens_or_like
from invdist.bench._delay import delay
from invdist.bench._runs import ray_epochs, ray_for
from invdist.bench._steps import Driver, on_ranks, random_batches
from invdist.config.registry import BACKBONES
from invdist.embeddings.comm import Comm
from invdist.embeddings.shared_memory import connect
from invdist.models.build import ModelSpec, build_recommender
from invdist.models.recommender import Recommender
from invdist.runtime.errors import UserError
from invdist.runtime.progress import ProgressLine
from invdist.training.second_rank import StepCost

GOALS = {"weak_scaling_1024": 0.5, "weak_scaling_8192": 0.75, "strong_scaling_1024": 0.8, "strong_scaling_8192": 1.3}
METHODS = {"plain": ("none", 0), "ig": ("ig", 1)}
MODELLED_WAITS = {"plain": 2, "ig": 5}
_PARTS = ("weak", "strong", "crossover", "latency")
_CROSSOVER_BATCHES = {"gmf": (1024, 2048, 4096, 8192, 16384, 32768), "neumf": (128, 256, 512, 1024, 2048)}
_TURN_STEPS = 50
"""So many that the caches hold what they hold in training: with 5, both fill them again after the turn of the other."""
_CHUNK_STEPS = 5
_TURN_S = 600


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `invdist bench ranks`; the default tables are those of Micro Video."""
    parser.add_argument("--users", type=int, default=37_692)
    parser.add_argument("--items", type=int, default=131_690)
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--model", choices=BACKBONES.names(), default="gmf")
    parser.add_argument("--batch", type=int, nargs="+", default=[1024, 8192], help="interactions a rank and step")
    parser.add_argument("--repeats", type=int, default=11, help="medians are over this many turns of each kind")
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=["weak"], help="what to measure (default: weak)")
    parser.add_argument("--data", metavar="DIR", help="what they train on (default: MovieLens-1M, or one of its size)")
    parser.add_argument("--epochs", type=int, default=12, help="epochs of each such run; the first does not count")
    parser.add_argument(
        "--latency", type=float, nargs="+", default=[5.0, 20.0], metavar="MS", help="latencies to simulate"
    )
    parser.add_argument("--world-size", type=int, nargs="+", default=[4, 8], help="ranks under simulated latency")


def run(args: argparse.Namespace) -> dict[str, object]:
    """The parts that were asked for."""
    if min(*args.batch, *args.world_size, args.repeats, args.users, args.items) < 1 or args.epochs < 2:
        raise UserError("sizes, --batch, --world-size and --repeats must be at least 1, --epochs at least 2")
    if args.dim < 4 or args.dim % 4 or any(value <= 0 for value in args.latency):
        raise UserError("--dim must be a multiple of 4, latencies above 0")
    sizes = {name: getattr(args, name) for name in ("users", "items", "dim", "model")}
    figures: dict[str, object] = {**sizes, "load": list(os.getloadavg()), "cores": os.cpu_count()}
    with ProgressLine() as progress:
        for batch in args.batch if "weak" in args.parts else ():
            progress.show(f"weak scaling, batch {batch}")
            found = _weak_scaling(sizes, batch, args.repeats)
            for name in METHODS:
                suffix = f"{batch}" if name == "plain" else f"{batch}_{name}"
                figures[f"alone_ms_{suffix}"], figures[f"two_ranks_ms_{suffix}"] = found[name]
                figures[f"weak_scaling_{suffix}"] = found[name][0] / found[name][1]
        if "strong" in args.parts:
            figures |= _strong(args, progress)
        if "crossover" in args.parts:
            figures["crossover"] = _crossover(sizes, args.repeats, progress)
        if "latency" in args.parts:
            figures["latency"] = _latency(args, sizes, progress)
    return figures


def _driver(sizes: dict[str, Any], batch: int, model: Recommender, method: str) -> Driver:
    name, phase, comm = *METHODS[method], model.comm
    batches = random_batches(sizes["users"], sizes["items"], batch, rank=comm.rank, ranks=comm.size)
    return Driver(model, name, phase, batches)


def _model(sizes: dict[str, Any], comm: Comm) -> Recommender:
    return build_recommender(ModelSpec(**sizes, batch_size=8192, sharding="row_wise"), torch.device("cpu"), comm)


def _weak_scaling(sizes: dict[str, Any], batch: int, repeats: int) -> dict[str, tuple[float, float]]:
    """Median milliseconds of a step, by method: of two ranks that work alone side by side, and of two together."""
    steps = {name: (name, batch) for name in METHODS}
    return _in_turns(sizes, [(2, False, steps), (2, True, steps)], repeats)


def _crossover(sizes: dict[str, Any], repeats: int, progress: ProgressLine) -> list[dict[str, Any]]:
    """Plain steps of one rank and of two, by model and global batch."""
    rows = []
    for model, batches in _CROSSOVER_BATCHES.items():
        progress.show(f"crossover, {model}")
        groups = [(ranks, True, {f"{batch}": ("plain", batch // ranks) for batch in batches}) for ranks in (1, 2)]
        found = _in_turns({**sizes, "model": model}, groups, repeats)
        cost = StepCost.of(BACKBONES.get(model)(sizes["dim"]))
        for batch in batches:
            one, two = found[f"{batch}"]
            pays = cost.pays(batch, 2)
            rows.append(
                {"model": model, "batch": batch, "one_ms": one, "two_ms": two, "gain": one / two, "model_pays": pays}
            )
    return rows


_Steps = dict[str, tuple[str, int]]
"""Method and interactions a rank, by name."""


def _in_turns(
    sizes: dict[str, Any], groups: list[tuple[int, bool, _Steps]], repeats: int
) -> dict[str, tuple[float, float]]:
    """Median milliseconds of steps, by name, of two groups of (processes, whether they are ranks together, steps).

    They take turns. While one works, the other sleeps.
    """
    turns = mp.get_context("spawn").Barrier(sum(processes for processes, *_ in groups), timeout=_TURN_S)

    def group(place: int) -> list[dict[str, float]]:
        processes, together, steps = groups[place]
        try:
            return on_ranks(_take_turns, processes, place, sizes, steps, repeats, turns, together=together)
        except BaseException:
            turns.abort()  # or the other group would wait for its turn
            raise

    with ThreadPoolExecutor(2) as pool:
        working = [pool.submit(group, place) for place in (0, 1)]
        for done in as_completed(working):
            done.result()  # raises the first error: the other group only misses its turn then
        found = [each.result() for each in working]
    one, other = ({name: statistics.mean(rank[name] for rank in ranks) for name in groups[0][2]} for ranks in found)
    return {name: (one[name], other[name]) for name in one}


def _take_turns(
    rank: int, place: int, sizes: dict[str, Any], steps: _Steps, repeats: int, turns: Barrier
) -> dict[str, float]:
    model = _model(sizes, connect())
    drivers = {name: _driver(sizes, batch, model, method) for name, (method, batch) in steps.items()}
    seconds: dict[str, list[float]] = {name: [] for name in drivers}
    for driver in drivers.values():
        driver(_TURN_STEPS)
    for turn in range(2 * repeats):
        for name, driver in drivers.items():
            turns.wait()
            if turn % 2 == place:
                seconds[name].append(driver(_TURN_STEPS))
    return {name: 1e3 * statistics.median(found) for name, found in seconds.items()}


def _strong(args: argparse.Namespace, progress: ProgressLine) -> dict[str, float]:
    """Rows/s of real runs: one worker, two workers, one worker with two threads, one with half the batch."""
    figures = {}
    with tempfile.TemporaryDirectory() as folder, ray_for(workers=2):
        data, _ = movielens_or_like(args.data, Path(folder))
        for batch in args.batch:
            speeds = {}
            for name, workers, threads, size in (
                ("one", 1, 1, batch),
                ("two", 2, 1, batch),
                ("threads", 1, 2, batch),
                ("half", 1, 1, -(-batch // 2)),
            ):
                progress.show(f"strong scaling, batch {batch}: {name}")
                settings = {"model": args.model, "data": {"batch_size": size}, "rows": {"dim": args.dim}}
                epochs = ray_epochs(data, Path(folder), settings, workers=workers, epochs=args.epochs, threads=threads)
                speeds[name] = statistics.median(epoch["rows_per_s"] for epoch in epochs[1:])
            figures |= {f"{name}_rows_per_s_{batch}": speed for name, speed in speeds.items()}
            figures[f"strong_scaling_{batch}"] = speeds["two"] / speeds["one"]
            figures[f"threads_{batch}"] = speeds["threads"] / speeds["one"]
            figures[f"free_messages_{batch}"] = 2 * speeds["half"] / speeds["one"]
    return figures


def _latency(args: argparse.Namespace, sizes: dict[str, Any], progress: ProgressLine) -> list[dict[str, Any]]:
    """Step time by ranks, method and latency, against `step without latency + modelled waits * latency`."""
    rows, batch = [], args.batch[0]
    for ranks in args.world_size:
        progress.show(f"latency, {ranks} ranks")
        with tempfile.TemporaryDirectory() as folder:
            clock = str(Path(folder) / "clock")
            found = on_ranks(_delayed, ranks, ranks, sizes, batch, max(3, args.repeats // 2), args.latency, clock)
        # A step takes as long as its slowest rank.
        for method in METHODS:
            ms = {value: max(of_rank[method][value] for of_rank in found) for value in (0.0, *args.latency)}
            for value in args.latency:
                modelled = ms[0.0] + MODELLED_WAITS[method] * value
                rows.append(
                    {
                        "ranks": ranks,
                        "method": method,
                        "latency_ms": value,
                        "step_ms": ms[value],
                        "modelled_ms": modelled,
                        "step_vs_model": ms[value] / modelled,
                        "waits": (ms[value] - ms[0.0]) / value,
                        "modelled_waits": MODELLED_WAITS[method],
                    }
                )
    return rows


def _delayed(
    rank: int, ranks: int, sizes: dict[str, Any], batch: int, repeats: int, latencies: list[float], clock: str
) -> dict[str, dict[float, float]]:
    comm = connect()
    late, model = delay(comm, clock), _model(sizes, comm)
    figures: dict[str, dict[float, float]] = {}
    for method in METHODS:
        driver = _driver(sizes, batch, model, method)
        driver(_CHUNK_STEPS)
        seconds: dict[float, list[float]] = {value: [] for value in (0.0, *latencies)}
        for _ in range(repeats):
            for value, found in seconds.items():
                comm.barrier()
                late.seconds = value / 1e3
                driver(2)  # messages that were sent with another latency
                found.append(driver(_CHUNK_STEPS))
                late.seconds = 0.0
        figures[method] = {value: 1e3 * statistics.median(found) for value, found in seconds.items()}
    return figures
