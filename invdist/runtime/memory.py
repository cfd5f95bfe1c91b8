"""How much memory processes here may still take: the machine's, or what is left of the container's limit."""

from __future__ import annotations

import os
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def host_memory() -> float:
    """Bytes of memory that processes of this machine (or container) may use."""
    memory = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(memory, _number(_CGROUP / "memory.max", memory))


def free_memory() -> float:
    """Bytes of memory that are free for processes of this machine (or container); file caches count as free."""
    free = host_memory()
    if _MEMINFO.is_file():
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        free = min(free, float(lines["MemAvailable"].split()[0]) * 1024)
    limit, used = (_number(_CGROUP / name, -1.0) for name in ("memory.max", "memory.current"))
    if limit >= 0 and used >= 0:
        free = min(free, limit - used + _cached(_CGROUP / "memory.stat"))
    return max(0.0, free)


def _cached(stat: Path) -> float:
    """Bytes of file caches that the kernel would give up, of a cgroup's `memory.stat`."""
    if not stat.is_file():
        return 0.0
    lines = dict(line.split() for line in stat.read_text().splitlines())
    return float(lines.get("inactive_file", 0))


def _number(file: Path, otherwise: float) -> float:
    text = file.read_text().strip() if file.is_file() else ""
    return float(text) if text.isdigit() else otherwise
