"""How the time of a step grows: with the batch, the columns, the table rows, the ranks, candidates, unlabeled pairs.

One thing grows at a time; the others are as in `invdist bench step`, with batch 1,024. The sizes take turns in one
process of one thread. `exponent` is the slope of log(time) over log(size) by least squares, `last` that between the two
largest sizes: 0 if the size costs nothing, 1 if time is in proportion, above 1 if it grows faster. Ranks are
processes on the cores of this machine, so their time grows with ranks per core.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from invdist.bench._steps import Driver, on_ranks, random_batches
from invdist.config.registry import BACKBONES
from invdist.models.build import ModelSpec, build_recommender
from invdist.models.recommender import Recommender
from invdist.runtime.errors import UserError
from invdist.runtime.progress import ProgressLine

SWEEPS: dict[str, list[int]] = {
    "batch": [256, 1024, 4096, 16_384, 65_536],
    "dim": [16, 32, 64, 128, 256],
    "rows": [200_000, 2_000_000, 20_000_000, 50_000_000],
    "ranks": [1, 2, 4, 8],
    "candidates": [3, 7, 15, 31],
    "rate": [1, 4, 16, 64],
}
_ROWS_DIM = 16  # of the sweep over rows: 50 million with Adam are 9.6 GB
_CHUNK_S = 0.02
_MEMORY_SHARE = 0.7


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `invdist bench growth`."""
    parser.add_argument("--sweep", choices=SWEEPS, nargs="+", default=list(SWEEPS), help="what grows")
    parser.add_argument("--sizes", type=int, nargs="+", help="its sizes, for one --sweep")
    parser.add_argument("--model", choices=BACKBONES.names(), default="gmf")
    parser.add_argument("--users", type=int, default=37_692)
    parser.add_argument("--items", type=int, default=131_690)
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=15, help="medians are over this many turns of each size")


def run(args: argparse.Namespace) -> dict[str, object]:
    """For each sweep: sizes, milliseconds and exponents of plain and inverse-gradient steps."""
    if args.sizes and len(args.sweep) != 1:
        raise UserError("--sizes are those of one sweep: name it with --sweep")
    fixed = {name: getattr(args, name) for name in ("users", "items", "dim", "batch")}
    if min(*fixed.values(), *(args.sizes or [1]), args.repeats) < 1 or args.dim % 4:
        raise UserError("sizes and --repeats must be at least 1, --dim a multiple of 4")
    figures: dict[str, Any] = {"model": args.model, "fixed": fixed, "load": list(os.getloadavg())}
    with ProgressLine() as progress:
        for sweep in args.sweep:
            progress.show(f"growth with {sweep}")
            sizes, left_out = sorted(args.sizes or SWEEPS[sweep]), []
            if sweep == "rows":
                sizes, left_out = _that_fit(sizes)
            figures[sweep] = _grown(args.model, sweep, sizes, fixed, args.repeats)
            if left_out:
                figures[sweep]["left_out"] = left_out
    return figures


def exponent(sizes: list[int], ms: list[float]) -> float:
    """The slope of log(time) over log(size)."""
    return float(np.polyfit(np.log(sizes), np.log(ms), 1)[0])


def _that_fit(sizes: list[int]) -> tuple[list[int], list[int]]:
    """The sizes whose tables fit the free memory together, and the others."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with open("/proc/meminfo") as status:
        free = next((int(line.split()[1]) * 1024 for line in status if line.startswith("MemAvailable:")), free)
    taken = np.cumsum(sizes) * _ROWS_DIM * 4 * 3
    fitting = int((taken <= _MEMORY_SHARE * free).sum())
    if not fitting:
        raise UserError(f"{free / 1e9:.1f} GB of memory are free, too few for tables of {sizes[0]:,} rows")
    return sizes[:fitting], sizes[fitting:]


def _grown(model: str, sweep: str, sizes: list[int], fixed: dict[str, int], repeats: int) -> dict[str, Any]:
    if sweep == "ranks":
        measured = [on_ranks(_of_ranks, ranks, ranks, model, fixed, repeats)[0] for ranks in sizes]
        ms = {name: [found[name] for found in measured] for name in measured[0]}
    else:
        ms = on_ranks(_of_sizes, 1, model, sweep, sizes, fixed, repeats)[0]
    grown: dict[str, Any] = {"sizes": sizes}
    for name, values in ms.items():
        grown[f"{name}_ms"] = values
        if len(sizes) > 1:
            grown[f"{name}_exponent"] = exponent(sizes, values)
            grown[f"{name}_last"] = exponent(sizes[-2:], values[-2:])
    return grown


def _of_ranks(rank: int, ranks: int, model: str, fixed: dict[str, int], repeats: int) -> dict[str, float]:
    recommender = _model(model, fixed, ranks)
    batches = random_batches(fixed["users"], fixed["items"], fixed["batch"], rank=rank, ranks=ranks)
    drivers = {"plain": Driver(recommender, "none", 0, batches), "ig": Driver(recommender, "ig", 1, batches)}
    found = {}
    for name, driver in drivers.items():
        driver(5)
        found[name] = 1e3 * statistics.median(driver(5) for _ in range(repeats))
    return found


def _of_sizes(
    rank: int, model: str, sweep: str, sizes: list[int], fixed: dict[str, int], repeats: int
) -> dict[str, list[float]]:
    """Milliseconds of plain and IG steps by size; what a plain step does not have is left out of it."""
    make = _maker(model, sweep, fixed)
    drivers = [make(size) for size in sizes]
    return {name: _in_turns([found[name] for found in drivers], repeats) for name in drivers[0]}


def _maker(model: str, sweep: str, fixed: dict[str, int]) -> Callable[[int], Mapping[str, Driver]]:
    """What makes the drivers of a size, by the kind of step."""

    def drivers(recommender: Recommender, shape: dict[str, int], rate: int = 1, **options: Any) -> dict[str, Driver]:
        count = 16 if shape["batch"] * rate < 1 << 16 else 4  # beyond that, a batch does not stay in the cache
        batches = random_batches(shape["users"], shape["items"], shape["batch"], rate=rate, count=count)
        found = {"ig": Driver(recommender, "ig", 1, batches, **options)}
        return found if rate > 1 or options else {"plain": Driver(recommender, "none", 0, batches), **found}

    if sweep in ("batch", "candidates", "rate"):
        shared = _model(model, fixed)
        if sweep == "batch":
            return lambda size: drivers(shared, {**fixed, "batch": size})
        if sweep == "rate":
            return lambda size: {"ig": drivers(shared, fixed, rate=size)["ig"]}
        return lambda size: drivers(shared, fixed, candidates=_multipliers(size))
    if sweep == "dim":
        return lambda size: drivers(_model(model, {**fixed, "dim": size}), fixed)

    def of_rows(size: int) -> Mapping[str, Driver]:
        shape = {**fixed, "users": size // 4, "items": size - size // 4, "dim": _ROWS_DIM}
        return drivers(_model(model, shape), shape)

    return of_rows


def _multipliers(count: int) -> list[float]:
    """An odd number of candidates, pass among them."""
    half = count // 2
    return [float(c) for c in range(-half, half + 1)]


def _model(model: str, shape: dict[str, int], ranks: int = 1) -> Recommender:
    spec = ModelSpec(
        users=shape["users"],
        items=shape["items"],
        model=model,
        dim=shape["dim"],
        batch_size=shape["batch"] * ranks,
        sharding="row_wise",
    )
    return build_recommender(spec, torch.device("cpu"))


def _in_turns(drivers: list[Driver], repeats: int) -> list[float]:
    """The median milliseconds of a step of each, in chunks of similar length."""
    steps = []
    for driver in drivers:
        driver(2)
        started = time.perf_counter()
        driver(1)
        steps.append(min(20, max(1, math.ceil(_CHUNK_S / (time.perf_counter() - started)))))
    seconds: list[list[float]] = [[] for _ in drivers]
    for _ in range(repeats):
        for driver, count, found in zip(drivers, steps, seconds, strict=True):
            found.append(driver(count))
    return [1e3 * statistics.median(found) for found in seconds]
