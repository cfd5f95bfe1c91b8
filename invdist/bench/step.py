"""Time of a training step of this engine, of TorchRec's fused engine, and of the authors' three copies, interleaved.

Every rank is a process with one thread, with `--device cuda` on a GPU of its own, and has its own batches of uniformly
random ids. `ratio` is the time of an inverse-gradient step divided by that of two plain steps: it reads two batches.
`rows_named` are the table rows that an inverse-gradient step asks for, `rows_distinct` those that travel: pairs repeat
rows if there are many of them (`--rate`), or if some are popular (`--zipf`).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from invdist.bench._peers import FusedStep, ThreeCopiesStep
from invdist.bench._steps import Driver, memory_mb, on_ranks, random_batches
from invdist.config.registry import BACKBONES
from invdist.config.schema import ExposuresConfig
from invdist.data.stream.batches import Batch
from invdist.embeddings.comm import Comm
from invdist.embeddings.row_optimizers import NoOptimizer
from invdist.embeddings.shared_memory import connect
from invdist.embeddings.store import EmbeddingStore
from invdist.embeddings.tables import Table, shard_tables
from invdist.learning.exposure_vectors import PADDING
from invdist.learning.strategy import unlabeled
from invdist.models.build import ModelSpec, build_recommender
from invdist.runtime.errors import UserError

LINE_SEARCH = [-3.0, -1.0, -0.3, 0.0, 0.3, 1.0, 3.0]
_CHUNK_STEPS = 5
_DEVICES = {"gloo": "cpu", "nccl": "cuda"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `invdist bench step`; the defaults are the tables of Micro Video."""
    parser.add_argument("--world-size", type=int, default=1, help="processes on this machine; with cuda, a GPU each")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="where steps are computed (default: cpu)")
    parser.add_argument("--backend", choices=_DEVICES, help="of the process group: gloo on cpu, nccl on cuda")
    parser.add_argument("--users", type=int, default=37_692)
    parser.add_argument("--items", type=int, default=131_690)
    parser.add_argument("--dim", type=int, default=32, help="k of the paper")
    parser.add_argument("--batch", type=int, default=1024, help="labeled interactions per rank and step")
    parser.add_argument("--rate", type=int, default=1, help="unlabeled interactions for each labeled one")
    parser.add_argument("--zipf", type=float, default=0.0, help="the chance of id i is ~ (i + 1)^-zipf; 0: uniform")
    parser.add_argument("--model", choices=BACKBONES.names(), default="gmf")
    parser.add_argument("--exposures", type=int, default=0, metavar="DIM", help="columns of exposure vectors; 0: none")
    parser.add_argument("--repeats", type=int, default=41, help="medians are over this many chunks of each kind")


def run(args: argparse.Namespace) -> dict[str, object]:
    """Measures everything in one run. Times are medians in milliseconds on the first rank."""
    sizes = {name: getattr(args, name) for name in ("users", "items", "dim", "batch", "rate")}
    for name, value in {**sizes, "world-size": args.world_size, "repeats": args.repeats}.items():
        if value < 1:
            raise UserError(f"--{name} must be at least 1, not {value}")
    if args.dim % 4:
        raise UserError(f"--dim must be a multiple of 4, as FBGEMM needs, not {args.dim}")
    if args.exposures < 0 or args.exposures % 4:
        raise UserError(f"--exposures must be 0 or a multiple of 4, not {args.exposures}")
    if args.zipf < 0:
        raise UserError(f"--zipf must be at least 0, not {args.zipf:g}")
    sizes |= {"exposures": args.exposures, "zipf": args.zipf}
    backend = _backend(args.device, args.backend, args.world_size)
    device = _DEVICES[backend]
    ranks = on_ranks(
        _measure, args.world_size, args.world_size, args.model, sizes, args.repeats, device, backend=backend
    )
    first = ranks[0]
    plain, ig, fused, textbook = (first[f"{name}_ms"] for name in ("plain", "ig", "fused", "textbook"))
    return {
        "world_size": args.world_size,
        "device": device,
        "backend": backend,
        "model": args.model,
        **sizes,
        **first,
        "ratio": ig / (2 * plain),
        "plain_vs_fused": plain / fused,
        "ig_vs_fused": ig / fused,
        "speedup_vs_textbook": textbook / ig,
        "candidates7_vs_3": first["candidates7_ms"] / ig,
        "bytes_sent_per_rank": max(rank["bytes_sent_per_rank"] for rank in ranks),
        "rss_mb": max(rank["rss_mb"] for rank in ranks),
    }


def _backend(device: str | None, backend: str | None, ranks: int) -> str:
    """The backend that was asked for, by its name or by that of its device; a `UserError` where it cannot run."""
    backend = backend or ("nccl" if device == "cuda" else "gloo")
    needed = _DEVICES[backend]
    if device is not None and device != needed:
        raise UserError(f"--backend {backend} moves tensors of {needed}, --device is {device}: leave one of them out")
    if needed == "cpu":
        return backend
    if not torch.cuda.is_available():
        raise UserError(
            f"--device cuda, --backend nccl: no GPU was found (torch.cuda.is_available() is False, torch "
            f"{torch.__version__}); `invdist doctor` shows what is installed, --device cpu measures here"
        )
    if not torch.distributed.is_nccl_available():
        raise UserError(f"--backend nccl: torch {torch.__version__} was built without NCCL")
    if ranks > torch.cuda.device_count():
        raise UserError(f"--world-size {ranks}: each rank needs a GPU, and {torch.cuda.device_count()} were found")
    return backend


def plain_step_ms(users: int, items: int, dim: int, batch: int) -> float:
    """Median milliseconds of a plain GMF step on one rank, measured in a new process."""
    return on_ranks(_measure_plain, 1, {"users": users, "items": items, "dim": dim, "batch": batch})[0]


def _measure_plain(rank: int, sizes: dict[str, Any]) -> float:
    model, batches = _build(rank, 1, "gmf", sizes, torch.device("cpu"))
    plain = Driver(model, "none", 0, batches)
    plain(_CHUNK_STEPS)
    return 1e3 * statistics.median(plain(_CHUNK_STEPS) for _ in range(41))


def _build(rank: int, ranks: int, model: str, sizes: dict[str, Any], device: torch.device):
    users, items, dim, batch = (sizes[name] for name in ("users", "items", "dim", "batch"))
    spec = ModelSpec(users=users, items=items, model=model, dim=dim, batch_size=batch * ranks, sharding="row_wise")
    comm, vectors = connect(), None
    if columns := sizes.get("exposures", 0):
        spec.exposures = ExposuresConfig(vectors=True, dim=columns, learned=columns)
        vectors = random_vectors(users, items, columns, comm, device)
    recommender = build_recommender(spec, device, comm, vectors)
    more = {name: sizes[name] for name in ("rate", "zipf") if name in sizes}
    return recommender, random_batches(users, items, batch, rank=rank, ranks=ranks, **more)


def random_vectors(users: int, items: int, columns: int, comm: Comm, device: torch.device) -> EmbeddingStore:
    """Exposure vectors whose values do not matter."""
    tables = tuple(Table(name, rows, columns + PADDING) for name, rows in (("user", users), ("item", items)))
    placed = shard_tables(tables, "row_wise", device=device, batch_size=1024, hbm_gb=1, ddr_gb=1024)
    store = EmbeddingStore(placed, comm, lambda local_rows, store: NoOptimizer())
    store.init(0, columns**-0.5)
    return store


def _measure(
    rank: int, ranks: int, model: str, sizes: dict[str, Any], repeats: int, device_type: str
) -> dict[str, float]:
    device = torch.device("cuda", rank) if device_type == "cuda" else torch.device("cpu")
    recommender, batches = _build(rank, ranks, model, sizes, device)
    ours = {
        "plain": Driver(recommender, "none", 0, batches),
        "ig": Driver(recommender, "ig", 1, batches),
        "candidates7": Driver(recommender, "ig", 1, batches, candidates=LINE_SEARCH),
    }
    figures: dict[str, float] = {}
    for name, driver in ours.items():
        driver(_CHUNK_STEPS)
        figures |= _traffic(driver, "plain_" if name == "plain" else "") if name != "candidates7" else {}
    figures |= _repetition(batches)
    # Before the tables of the peers are made.
    figures["rss_mb"] = memory_mb("VmRSS")

    peers = {
        "fused": FusedStep(sizes["users"], sizes["items"], model, sizes["dim"], batches, device),
        "textbook": ThreeCopiesStep(sizes["users"], sizes["items"], model, sizes["dim"], batches, device),
    }
    peers["fused"](_CHUNK_STEPS)
    seconds: dict[str, list[float]] = {name: [] for name in (*ours, *peers)}
    for chunk in range(repeats):
        for name, step in {**ours, "fused": peers["fused"]}.items():
            # Chunks of similar length: on a busy machine a longer one is interrupted more often.
            seconds[name].append(step((2 if name == "plain" else 1) * _CHUNK_STEPS))
        # It runs in one process, on the first rank, while the others wait. It is slow: a few runs are enough.
        if chunk % 10 == 0 and rank == 0:
            seconds["textbook"].append(peers["textbook"](1))
        recommender.comm.barrier()
    return figures | {f"{name}_ms": 1e3 * statistics.median(s) for name, s in seconds.items() if s}


def _repetition(batches: Sequence[Batch]) -> dict[str, float]:
    """Table rows that the pairs of an inverse-gradient step name on one rank, and how many of each group differ."""
    named = distinct = 0
    for batch in batches:
        for ids in (batch.user, batch.item, *unlabeled(batch)):
            named, distinct = named + len(ids), distinct + len(ids.unique())
    return {"rows_named": named / len(batches), "rows_distinct": distinct / len(batches)}


def _traffic(driver: Driver, prefix: str) -> dict[str, float]:
    """Collectives and bytes of one step, averaged over a chunk (how many rows are local varies)."""
    traffic = driver.model.comm.traffic
    before = traffic.collectives, traffic.bytes
    driver(_CHUNK_STEPS)
    barrier = int(driver.model.comm.size > 1)
    return {
        f"{prefix}collectives": (traffic.collectives - before[0] - barrier) / _CHUNK_STEPS,
        f"{prefix}bytes_sent_per_rank": round((traffic.bytes - before[1]) / _CHUNK_STEPS),
    }
