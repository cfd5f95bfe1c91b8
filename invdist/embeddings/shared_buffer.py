"""Memory that several processes of one host map."""

from __future__ import annotations

import mmap
import os

import torch
from torch import Tensor


class Buffer:
    """Shared anonymous memory. Never given back: a rank keeps a few, of the sizes its steps need."""

    def __init__(self, fd: int, size: int) -> None:
        self.fd, self.size = fd, size
        self.memory = mmap.mmap(fd, size)
        self._bytes = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.address = self._bytes.data_ptr()

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

    def tensor(self, dtype: torch.dtype, start: int, count: int) -> Tensor:
        """`count` values from byte `start` on, without a copy."""
        return self._bytes[start : start + count * dtype.itemsize].view(dtype)
