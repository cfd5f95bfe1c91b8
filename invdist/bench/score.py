"""CPU time of scoring pairs, in a process that keeps freed memory (`invdist.runtime.process`) and in a usual one."""

from __future__ import annotations

import argparse
import multiprocessing
import resource
from concurrent.futures import ProcessPoolExecutor

import torch

from invdist.config.registry import BACKBONES
from invdist.runtime.errors import UserError
from invdist.runtime.process import configure_process


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `invdist bench score`."""
    parser.add_argument("--pairs", type=int, default=15_200, help="pairs of one forward")
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--model", choices=BACKBONES.names(), default="neumf")
    parser.add_argument("--repeats", type=int, default=100)


def run(args: argparse.Namespace) -> dict[str, object]:
    """Measures each in a fresh process of one thread, because settings of glibc cannot be undone."""
    if min(args.pairs, args.dim, args.repeats) < 1:
        raise UserError("--pairs, --dim and --repeats must be at least 1")
    sizes = args.model, args.dim, args.pairs, args.repeats
    (kept, kept_kernel), (usual, usual_kernel) = (_in_fresh_process(keeps, *sizes) for keeps in (True, False))
    return {
        "model": args.model,
        "pairs": args.pairs,
        "kept_ms": kept,
        "kept_kernel_share": kept_kernel / kept,
        "usual_ms": usual,
        "usual_kernel_share": usual_kernel / usual,
        "ratio": kept / usual,
    }


def _in_fresh_process(keeps: bool, model: str, dim: int, pairs: int, repeats: int) -> tuple[float, float]:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_score, keeps, model, dim, pairs, repeats).result()


@torch.no_grad()
def _score(keeps: bool, model: str, dim: int, pairs: int, repeats: int) -> tuple[float, float]:
    """CPU milliseconds of one forward, and how many of them in the kernel."""
    if keeps:
        configure_process(threads=1)
    else:
        torch.set_num_threads(1)
    torch.manual_seed(0)
    backbone = BACKBONES.get(model)(dim=dim)
    table = torch.randn(4096, backbone.columns)
    user, item = (torch.randint(len(table), (pairs,)) for _ in range(2))

    def forward() -> None:
        backbone.combine(backbone.user_part(table)[user], backbone.item_part(table)[item])

    for _ in range(3):
        forward()
    before = resource.getrusage(resource.RUSAGE_SELF)
    for _ in range(repeats):
        forward()
    after = resource.getrusage(resource.RUSAGE_SELF)
    kernel = after.ru_stime - before.ru_stime
    return (after.ru_utime - before.ru_utime + kernel) / repeats * 1000, kernel / repeats * 1000
