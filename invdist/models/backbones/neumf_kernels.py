"""The compiled kernels of NeuMF (neumf.c). Results are those of the torch operators in neumf.py, to rounding."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from invdist.embeddings import row_moves
from invdist.embeddings.row_moves import Deltas
from invdist.models.backbone import Tried
from invdist.models.flat import views
from invdist.runtime.native import addresses, compiled

_SOURCE = Path(__file__).with_name("neumf.c")
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64
_BLOCK = 256  # PAIRS in neumf.c
_SHAPE = [_INT] * 4  # pairs, columns of a row, k, whether rows have a bias


class NeuMFKernels:
    """Rows `[2n, columns]`, users first, and parameters are float32, contiguous and on the CPU."""

    def __init__(self, library: ctypes.CDLL, gemm: int) -> None:
        p = _POINTER
        self._gemm = gemm
        self._logits, self._gradient, self._candidates = (
            getattr(library, f"neumf_{name}") for name in ("logits", "gradient", "candidates")
        )
        self._logits.argtypes = [p, p, p, *_SHAPE, p, p, ctypes.c_int]
        self._gradient.argtypes = [p, p, p, *_SHAPE, p, p, p, p, p, ctypes.c_int]
        self._candidates.argtypes = [p, p, p, _INT, p, p, p, *_SHAPE, p, _INT, p, p, p, ctypes.c_int]
        for function in (self._logits, self._gradient, self._candidates):
            function.restype = None

    def logits(self, rows: Tensor, k: int, row_bias: bool, parameters: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """The logits `[n]` of rows, and the outputs of all layers after ReLU."""
        n, columns = len(rows) // 2, rows.shape[1]
        logits, layers = rows.new_empty(n), [rows.new_empty((n, size)) for size in (4 * k, 2 * k, k)]
        shape = (n, columns, k, row_bias)
        given = (addresses(parameters), rows.data_ptr(), *shape, addresses(layers), logits.data_ptr())
        self._logits(self._gemm, *given, torch.get_num_threads())
        return logits, layers

    def gradient(
        self,
        rows: Tensor,
        k: int,
        row_bias: bool,
        parameters: Sequence[Tensor],
        layers: Sequence[Tensor],
        of_logits: Tensor,
        out: Tensor,
    ) -> list[Tensor]:
        """The gradients of the rows (in `out`) and of the parameters from that of the logits."""
        n, columns = len(rows) // 2, rows.shape[1]
        dense = rows.new_empty(sum(parameter.numel() for parameter in parameters))
        if n == 0:
            return views(dense.zero_(), parameters)
        threads, of_logits = torch.get_num_threads(), of_logits.contiguous()
        space = rows.new_empty(threads * (7 * k * min(n, _BLOCK) + 4 * k + 2))
        given = (
            addresses(parameters),
            rows.data_ptr(),
            n,
            columns,
            k,
            row_bias,
            addresses(layers),
            of_logits.data_ptr(),
        )
        self._gradient(self._gemm, *given, out.data_ptr(), dense.data_ptr(), space.data_ptr(), threads)
        return views(dense, parameters)

    def candidates(
        self,
        rows: Tensor,
        deltas: Deltas,
        k: int,
        row_bias: bool,
        dense: Tensor,
        step: Tensor,
        candidates: Sequence[float],
    ) -> Tried:
        """Logits and layers at every `theta + c * step`, where `deltas` is what is added to the rows."""
        n, columns, count = len(rows) // 2, rows.shape[1], len(candidates)
        logits = rows.new_empty((count, n))
        layers = [rows.new_empty((count, n, size)) for size in (4 * k, 2 * k, k)]
        threads = torch.get_num_threads()
        space = rows.new_empty(threads * 20 * k * min(n, _BLOCK) + count * len(dense))
        moves = (dense.data_ptr(), step.data_ptr(), len(dense), rows.data_ptr(), deltas.index.data_ptr())
        tried = (ctypes.c_double * count)(*candidates)
        found = (addresses(layers), logits.data_ptr(), space.data_ptr())
        shape = (n, columns, k, row_bias)
        self._candidates(self._gemm, *moves, deltas.values.data_ptr(), *shape, tried, count, *found, threads)
        return Tried(logits, [layers])


def neumf_kernels(rows: Tensor) -> NeuMFKernels | None:
    """The kernels if they can be used with these rows."""
    return _kernels() if row_moves.kernels_for(rows) is not None and rows.is_contiguous() else None


@cache
def _kernels() -> NeuMFKernels | None:
    library, gemm = compiled(_SOURCE).library, _matrix_product()
    return None if library is None or gemm is None else NeuMFKernels(library, gemm)


def _matrix_product() -> int | None:
    """The address of `sgemm_` in the BLAS that torch was built with; None if it has none with 32-bit sizes."""
    try:
        function: Any = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")).sgemm_
    except (OSError, AttributeError):
        return None
    return ctypes.cast(function, _POINTER).value
