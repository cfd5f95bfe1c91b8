"""Set-up of a process that computes: threads, memory, a process group of one."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist

# From <malloc.h>. glibc accepts an M_MMAP_THRESHOLD of at most half a heap of a thread's malloc arena: 32 MiB.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD = 32 << 20
_NEVER = 2**31 - 1


def configure_process(threads: int) -> None:
    """Sets the number of threads of one operation, asks for huge pages, and makes malloc keep memory that is freed.

    By default glibc returns the memory of a large tensor to the kernel when it is freed, and the next tensor faults it
    in page by page: a third or more of the CPU time of scoring 15,000 pairs with NeuMF (`invdist bench score`). Every
    step needs the same sizes again, so the process keeps them, and stays at its peak size. Other allocators are not
    changed.

    Rows of a large table are on as many pages, and most of the time of a step is spent on finding those: with pages of
    2 MiB, Adam on 16,384 of 20 M rows takes two thirds of the time, on 2,048 half. torch reads the variable at its
    first allocation.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    torch.set_num_threads(threads)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        mallopt(_M_TRIM_THRESHOLD, _NEVER)


@contextlib.contextmanager
def one_thread() -> Iterator[int]:
    """Inside, an operation has one thread; gives how many it had before, for threads that each do a part of the work.

    The results of a matrix product depend on how many threads divide it.
    """
    before = torch.get_num_threads()
    if before == 1:
        yield 1
        return
    torch.set_num_threads(1)
    try:
        yield before
    finally:
        torch.set_num_threads(before)


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
