"""Set-up of a process that computes: threads, memory, a process group of one."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Iterator

import torch
import torch.distributed as dist

# From <malloc.h>. glibc accepts an M_MMAP_THRESHOLD of at most half a heap of a thread's malloc arena: 32 MiB.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD = 32 << 20
_NEVER = 2**31 - 1
_MADV_DONTNEED, _MADV_HUGEPAGE, _MADV_COLLAPSE = 4, 14, 25  # from <sys/mman.h>
_PAGE = mmap.PAGESIZE
HUGE_PAGE = 2 << 20
"""Bytes of a large page of memory on x86-64."""


def configure_process(threads: int) -> None:
    """Sets the number of threads of one operation, and makes malloc keep the memory that operations free.

    By default glibc returns the memory of a large tensor to the kernel when it is freed, and the next tensor faults it
    in page by page: a third or more of the CPU time of scoring 15,000 pairs with NeuMF (`invdist bench score`). Every
    step needs the same sizes again, so the process keeps them, and stays at its peak size. Other allocators are not
    changed.
    """
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


def use_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    """Asks for pages of 2 MiB where the memory of a tensor on the CPU was not written to yet; gives the tensor.

    The rows of a step are spread over a large table, and most of its time goes into finding their pages: with huge
    ones, Adam on 2,048 of 20 M rows takes half the time. Where the system has none to give, nothing changes.
    """
    if tensor.device.type == "cpu" and tensor.nbytes >= HUGE_PAGE:
        _advise(tensor, _MADV_HUGEPAGE)
    return tensor


def collapse(tensor: torch.Tensor) -> None:
    """Moves written memory of a tensor on the CPU into huge pages, also shared memory, which gets none by default.

    Nothing changes where the system cannot (Linux before 6.1), or for what is left of the last page.
    """
    if tensor.nbytes >= HUGE_PAGE:
        _advise(tensor, _MADV_COLLAPSE)


def give_back(tensor: torch.Tensor) -> None:
    """Returns the memory of a contiguous tensor on the CPU to the system, page by page; its values are lost."""
    if not tensor.is_shared():
        _advise(tensor, _MADV_DONTNEED)


def _advise(tensor: torch.Tensor, advice: int) -> None:
    """Tells the system something about the whole pages of a tensor's memory."""
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    first = -(-tensor.data_ptr() // _PAGE) * _PAGE
    length = (tensor.data_ptr() + tensor.nbytes - first) // _PAGE * _PAGE
    if madvise is not None and length > 0:
        madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), advice)


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
