"""How a process that computes is set up: how many threads it has, and that it keeps the memory it has used."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

import torch
import torch.distributed as dist

# From <malloc.h>. glibc takes no larger M_MMAP_THRESHOLD than half a heap of a thread's local_rows, which is 32 MiB.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD = 32 << 20
_NEVER = 2**31 - 1


def configure_process(threads: int) -> None:
    """Gives this process so many threads for one operation, and has it keep the memory that operations free.

    By itself glibc hands the memory of a large tensor back to the kernel when it is freed, and faults it in page by
    page for the next one: a third and more of the CPU time of scoring 15,000 pairs with NeuMF (`invdist bench score`).
    A training process wants the same sizes again at every step, so it keeps them; it then occupies what it needed
    most. Other allocators are left as they are.
    """
    torch.set_num_threads(threads)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        mallopt(_M_TRIM_THRESHOLD, _NEVER)


@contextlib.contextmanager
def single_rank() -> Iterator[None]:
    """A gloo process group of this process alone, unless it is in a group already."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
