"""Memory that several processes of one host map."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

import torch
from torch import Tensor

from invdist.runtime.process import HUGE_PAGE, collapse

_FIXED = 0x10  # MAP_FIXED of <sys/mman.h>
_FAILED = ctypes.c_void_p(-1).value


class Buffer:
    """Shared anonymous memory. Never given back: a rank keeps a few, of the sizes its steps need."""

    def __init__(self, fd: int, size: int) -> None:
        self.fd, self.size = fd, size
        self._bytes = torch.frombuffer(_mapped(fd, size), dtype=torch.uint8)
        self.address = self._bytes.data_ptr()
        self._huge = 0

    @classmethod
    def new(cls, size: int) -> Buffer:
        fd = os.memfd_create("invdist", os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        return cls(fd, size)

    @classmethod
    def open(cls, pid: int, fd: int, size: int) -> Buffer:
        opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            return cls(opened, size)
        finally:
            os.close(opened)  # the mapping stays

    def words(self) -> memoryview:
        """As int64 numbers that Python reads fast."""
        return self._bytes.view(torch.int64).numpy().data

    def tensor(self, dtype: torch.dtype, start: int, count: int) -> Tensor:
        """`count` values from byte `start` on, without a copy."""
        return self._bytes[start : start + count * dtype.itemsize].view(dtype)

    def use_huge_pages(self, written: int) -> None:
        """Moves the first bytes, which were written, into huge pages for all processes, unless they are there."""
        if written > self._huge:
            collapse(self._bytes[:written])
            self._huge = written


def _mapped(fd: int, size: int) -> ctypes.Array[ctypes.c_char]:
    """A file in memory as an array, at an address where it can have huge pages; unmapped when nobody has the array.

    Python's mmap cannot choose an address, and Linux aligns shared memory only where huge pages are its default.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    room = size + HUGE_PAGE
    reserved = libc.mmap(None, room, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if reserved != _FAILED:
        start = -(-reserved // HUGE_PAGE) * HUGE_PAGE
        access = mmap.PROT_READ | mmap.PROT_WRITE
        if libc.mmap(start, size, access, mmap.MAP_SHARED | _FIXED, fd, 0) != _FAILED:
            memory = (ctypes.c_char * size).from_address(start)
            # Not at exit: other threads may still read it.
            weakref.finalize(memory, libc.munmap, reserved, room).atexit = False
            return memory
        libc.munmap(reserved, room)
    raise OSError(ctypes.get_errno(), f"cannot map {size:,} bytes of shared memory")
