"""Compiles a C file of this package for this processor on first use, and keeps the result for later processes."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

SWITCH = "INVDIST_KERNELS"
"""The environment variable that turns compiled code off: `INVDIST_KERNELS=torch`."""
_FLAGS = ("-O3", "-march=native", "-std=gnu11", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
_BUILD_S = 120.0
_THREADS = "-fopenmp"
_HEADER = Path(__file__).with_name("parts.h")


@dataclass(frozen=True, slots=True)
class Native:
    """A compiled library, or why there is none."""

    library: ctypes.CDLL | None
    said: str
    """What was done, for people: one line."""


@cache
def compiled(source: Path) -> Native:
    """The library of a C file. Never raises: what it does must also be possible, if slower, without it."""
    if os.environ.get(SWITCH, "auto") == "torch":
        return Native(None, f"torch operators: {SWITCH}=torch")
    if platform.machine() != "x86_64":
        return Native(None, f"torch operators: compiled kernels are for x86-64, this is {platform.machine()}")
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return Native(None, "torch operators, which are slower: no C compiler was found (cc, gcc or clang)")
    try:
        return _load(source, compiler, (*_FLAGS, _THREADS), "compiled kernels")
    except (OSError, RuntimeError, subprocess.SubprocessError):
        pass  # no compiler at all, or one whose OpenMP is not the one of torch
    try:
        return _load(source, compiler, _FLAGS, "compiled kernels with one thread")
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: no home folder
        reason = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        return Native(None, f"torch operators, which are slower: {compiler} failed ({reason[-1] if reason else error})")


def addresses(tensors: Sequence[Any]) -> ctypes.Array[ctypes.c_void_p]:
    """Where the tensors are in memory, as an argument."""
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


def _load(source: Path, compiler: str, flags: Sequence[str], kind: str) -> Native:
    library = _cache_folder() / f"{source.stem}-{_key(source, compiler, flags)}.so"
    if library.exists():
        return Native(ctypes.CDLL(str(library)), f"{kind} ({library})")
    started = time.perf_counter()
    _compile(source, compiler, flags, library)
    seconds = time.perf_counter() - started
    return Native(ctypes.CDLL(str(library)), f"{kind}, built in {seconds:.1f} s ({library})")


def _compile(source: Path, compiler: str, flags: Sequence[str], library: Path) -> None:
    """Processes that start together may all compile; each puts a whole file in place.

    Linked without OpenMP: the library then uses what this process has loaded with torch. With its own it would have its
    own team of threads beside that of torch, and each waits for work without giving up its core.
    """
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        built, compile_command = Path(folder) / library.name, shlex.split(compiler)
        steps = (
            [*flags, "-fPIC", f"-I{_HEADER.parent}", "-c", str(source), "-o", f"{built}.o"],
            ["-shared", f"{built}.o", "-o", str(built), "-lm"],
        )
        for arguments in steps:
            command = [*compile_command, *arguments]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=_BUILD_S)
        os.replace(built, library)


def _cache_folder() -> Path:
    """A folder of this user alone: what is in it is run."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "invdist"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid() or folder.stat().st_mode & 0o022:
        raise OSError(f"{folder} can be written by other users")
    return folder


def _key(source: Path, compiler: str, flags: Sequence[str]) -> str:
    """Differs wherever the library would: home folders are shared by machines with other processors."""
    files = [source, _HEADER, *sorted(source.parent.glob("*.h"))]
    processor = [
        line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(("flags", "model name"))
    ]
    said = [*(file.read_text() for file in files), compiler, *flags, *processor[:2]]
    return hashlib.sha256("\n".join(said).encode()).hexdigest()[:16]
