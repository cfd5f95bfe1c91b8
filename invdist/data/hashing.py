"""Stateless randomness: every random number is a hash of where it is used, so any position can be replayed alone.

Nothing here depends on the version of NumPy's generators: an order made today is the order made after an upgrade.
"""

from __future__ import annotations

import ctypes
import hashlib
from pathlib import Path

import numpy as np

from invdist.runtime.native import compiled

_SHUFFLE = Path(__file__).with_name("shuffle.c")
_WORD = (1 << 64) - 1
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def key(*parts: int | str) -> int:
    """A 64-bit key of the given parts: one independent random sequence per distinct tuple."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def mix(sequence: int, counter: np.ndarray) -> np.ndarray:
    """The random words (uint64) at the positions `counter` of a sequence; distinct for distinct positions."""
    with np.errstate(over="ignore"):
        word = counter.astype(np.uint64)  # a copy, so the steps below may work in place
        word += np.uint64(1)
        word *= _GOLDEN
        word += np.uint64(sequence & _WORD)
        word ^= word >> np.uint64(30)
        word *= _FIRST
        word ^= word >> np.uint64(27)
        word *= _SECOND
        word ^= word >> np.uint64(31)
    return word


def uniform(words: np.ndarray) -> np.ndarray:
    """Random words as float64 in [0, 1)."""
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def permutation(sequence: int, size: int) -> np.ndarray:
    """A permutation of `range(size)` (int64), a function of its arguments alone."""
    seed, library = _seed(sequence), _library(size)
    if library is None:
        # RandomState's sequence is frozen for good, and its shuffle is several times faster than sorting random words.
        return np.random.RandomState(seed).permutation(size)
    out = np.empty(size, np.int32)
    library.permutation(*map(ctypes.c_uint32, seed), ctypes.c_int64(size), out.ctypes)
    return out.astype(np.int64)


def shuffled(sequence: int, rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Rows by `permutation(sequence, size)`: columns `user`, `item` (int32) and, if there, `label` (int8, 0 to 3).

    May use the memory of `rows`.
    """
    user, item, label = rows["user"], rows["item"], rows.get("label")
    size = len(user)
    if (library := _library(size)) is None:
        order = permutation(sequence, size)
        return {name: column.take(order) for name, column in rows.items()}
    words, places = np.empty(size, np.uint64), (user.ctypes, item.ctypes, None if label is None else label.ctypes)
    library.shuffle_rows(*map(ctypes.c_uint32, _seed(sequence)), ctypes.c_int64(size), *places, words.ctypes)
    return rows


def _seed(sequence: int) -> tuple[int, int]:
    return sequence & 0xFFFFFFFF, sequence >> 32


def _library(size: int) -> ctypes.CDLL | None:
    return compiled(_SHUFFLE).library if size < 1 << 31 else None
