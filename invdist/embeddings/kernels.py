"""The compiled kernels of rows (kernels.c) and of a step (step_kernels.c). Results are those of the torch operators."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from invdist.runtime.native import Native, addresses, compiled

SOURCE, STEP_SOURCE = (Path(__file__).with_name(name) for name in ("kernels.c", "step_kernels.c"))
_POINTER, _INT, _FLOAT, _DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_double

_SHARE = 16384
"""Values that each thread has at least."""
_LOSS, _INDEX = 8, 8
"""What a loss, and a place that is written in no order, cost in values that are moved."""


class Kernels:
    """Rows are float32, indices int64, everything contiguous and on the CPU.

    Lengths are `shape[0]` here: `len` of a tensor takes four times as long, and a step asks for dozens.
    """

    def __init__(self, rows: ctypes.CDLL, steps: ctypes.CDLL) -> None:
        def function(name: str, *arguments: Any, gives: Any = _INT) -> Any:
            found = getattr(rows if hasattr(rows, name) else steps, name)
            found.argtypes, found.restype = arguments, gives
            return found

        p, i, t = _POINTER, _INT, ctypes.c_int  # t: threads
        self._unique = function("unique_rows", p, i, p, p, p, p)
        self._inverse = function("inverse", p, p, i, i, p, t, gives=None)
        self._gather = function("gather", p, i, i, p, i, p, t)
        self._gather_parts = function("gather_parts", p, p, i, p, i, p, t, gives=None)
        self._gather_keys = function("gather_keys", p, p, i, i, i, p, i, p, t)
        self._sum = function("sum_segments", p, p, i, p, p, i, i, _FLOAT, p, t, gives=None)
        self._sum_and_step = function(
            "sum_and_step", p, p, i, p, p, i, i, _FLOAT, i, _FLOAT, _FLOAT, p, t, gives=_DOUBLE
        )
        self.wait_for = function("wait_for", p, i, i, gives=ctypes.c_int)
        """Whether the word at an address became a number within some microseconds."""
        self._add = function("add_rows", p, i, i, p, i, p, _FLOAT, t)
        self._places = function("places", p, i, p, p, p, i, i, p, t, gives=None)
        self._locate = function("locate", p, i, i, p, i, i, p)
        self._add_indexed = function("add_indexed", p, i, i, p, p, _FLOAT, t, gives=None)
        self._square_sum = function("square_sum", p, i, t, gives=_DOUBLE)
        self._dual_loss = function("dual_loss", p, i, p, t, gives=None)
        self._log_loss = function("log_loss", p, p, i, p, t, gives=None)
        self._log_loss_sums = function("log_loss_sums", p, p, i, i, p, t, gives=None)
        self._sign_step = function("sign_step", p, i, _FLOAT, _FLOAT, t, gives=None)
        self._adamw = function("adamw", p, p, p, i, i, p, i, p, i, i, *[_DOUBLE] * 6, t)
        self._gmf_logits = function("gmf_logits", p, p, i, i, i, i, p, p, p, t, gives=None)
        self._gmf_gradient = function("gmf_gradient", p, p, i, i, i, i, p, p, p, p, t, gives=None)
        self._gmf_candidates = function("gmf_candidates", p, p, p, i, i, i, i, p, p, p, i, p, t, gives=None)

    def unique(self, keys: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """Distinct keys ascending, occurrences sorted by key, and where each distinct key starts among them.

        None if the keys are too large for it.
        """
        n = keys.shape[0]
        space = torch.empty(5 * n, dtype=torch.int64)
        at = space.data_ptr()
        count = self._unique(keys.contiguous().data_ptr(), n, at, at + 8 * n, at + 16 * n, at + 24 * n)
        return None if count < 0 else (space[:count], space[n : 2 * n], space[2 * n : 2 * n + count])

    def inverse(self, order: Tensor, starts: Tensor) -> Tensor:
        """The place of each occurrence among the distinct keys."""
        out = torch.empty_like(order)
        self._inverse(
            order.data_ptr(),
            starts.data_ptr(),
            starts.shape[0],
            order.shape[0],
            out.data_ptr(),
            _team(_INDEX * order.shape[0]),
        )
        return out

    def gather(self, table: Tensor, index: Tensor, out: Tensor | None = None) -> Tensor:
        """`table[index]`, into `out` if given."""
        assert table.is_contiguous()
        rows, width = table.shape
        out = torch.empty((index.shape[0], width)) if out is None else out
        index = index.contiguous()
        place = (table.data_ptr(), rows, width, index.data_ptr(), index.shape[0], out.data_ptr())
        _check(self._gather(*place, _team(index.shape[0] * width)), index, rows)
        return out

    def gather_keys(self, tables: Sequence[Tensor], row_bits: int, keys: Tensor, out: Tensor) -> Tensor:
        """The rows of keys, which have the number of a table above its `row_bits` and a row of it below."""
        width, count = tables[0].shape[1], len(tables)
        places = addresses(tables)
        rows = (_INT * count)(*(table.shape[0] for table in tables))
        place = (places, rows, count, row_bits, width, keys.data_ptr(), keys.shape[0], out.data_ptr())
        wrong = self._gather_keys(*place, _team(keys.shape[0] * width))
        if wrong != -1:
            owner, row = divmod(int(keys[wrong]), 1 << row_bits)
            raise IndexError(f"row {row} of rank {owner}: there are {count} ranks with {list(rows)} rows")
        return out

    def gather_parts(self, parts: Sequence[Tensor], index: Tensor, out: Tensor | None = None) -> Tensor:
        """`torch.cat(parts)[index]` for indices in range, into `out` if given."""
        width = parts[0].shape[1]
        out = torch.empty((index.shape[0], width)) if out is None else out
        index = index.contiguous()
        place = (*_places(parts), width, index.data_ptr(), index.shape[0], out.data_ptr())
        self._gather_parts(*place, _team(index.shape[0] * width))
        return out

    def sum(
        self,
        parts: Sequence[Tensor],
        order: Tensor,
        starts: Tensor,
        scale: float = 1.0,
        out: Tensor | None = None,
    ) -> Tensor:
        """`scale` times the sums of `torch.cat(parts)` (`[occurrences, width]`) by distinct row."""
        width = parts[0].shape[1]
        out = torch.empty((starts.shape[0], width)) if out is None else out
        segments = (order.data_ptr(), starts.data_ptr(), starts.shape[0], order.shape[0])
        self._sum(*_places(parts), width, *segments, scale, out.data_ptr(), _team(order.shape[0] * width))
        return out

    def sum_and_step(
        self,
        parts: Sequence[Tensor],
        order: Tensor,
        starts: Tensor,
        scale: float,
        sign: tuple[float, float] | None,
    ) -> tuple[Tensor, float]:
        """`sum`, with the sum of its squares; then `sign_step` of it by (alpha, eps), if given."""
        width = parts[0].shape[1]
        out = torch.empty((starts.shape[0], width))
        segments = (order.data_ptr(), starts.data_ptr(), starts.shape[0], order.shape[0])
        step = (sign is not None, *(sign or (0.0, 0.0)))
        team = _team(order.shape[0] * width)
        return out, self._sum_and_step(*_places(parts), width, *segments, scale, *step, out.data_ptr(), team)

    def add(self, table: Tensor, index: Tensor, values: Tensor, scale: float) -> None:
        """`table[index] += scale * values` for distinct indices."""
        rows, width = table.shape
        place = (table.data_ptr(), rows, width, index.data_ptr(), index.shape[0], values.data_ptr())
        _check(self._add(*place, scale, _team(index.shape[0] * width)), index, rows)

    def places(self, given: Tensor, wanted: Tensor, order: Tensor, starts: Tensor) -> Tensor:
        """The place of each occurrence of the distinct rows `wanted` among the distinct rows `given`, or -1."""
        out = torch.empty_like(order)
        distinct = (given.data_ptr(), given.shape[0], wanted.data_ptr(), order.data_ptr(), starts.data_ptr())
        self._places(*distinct, starts.shape[0], order.shape[0], out.data_ptr(), _team(_INDEX * order.shape[0]))
        return out

    def locate(self, ids: Tensor, block: int, bases: Tensor, multiplier: int, rows: int) -> Tensor:
        """The keys of ids of a table cut into blocks of rows; see `RowLocator`."""
        ids = ids.contiguous()
        out = torch.empty_like(ids)
        wrong = self._locate(ids.data_ptr(), ids.shape[0], block, bases.data_ptr(), multiplier, rows, out.data_ptr())
        if wrong != -1:
            raise IndexError(f"id {int(ids[wrong])} of a table with {rows} rows")
        return out

    def add_indexed(self, rows: Tensor, index: Tensor, values: Tensor, c: float) -> None:
        """`rows += c * values[index]`; nothing where the index is -1."""
        n, width = rows.shape
        self._add_indexed(rows.data_ptr(), n, width, index.data_ptr(), values.data_ptr(), c, _team(n * width))

    def square_sum(self, values: Tensor) -> float:
        """The sum of squares of all values."""
        return self._square_sum(values.data_ptr(), values.numel(), _team(values.numel()))

    def dual_loss(self, logit: Tensor) -> Tensor:
        """Loss, w1, w0 and slope of the inverse dual loss of each logit: float64 `[4, n]`; see `losses.py`."""
        out = torch.empty((4, logit.shape[0]), dtype=torch.float64)
        self._dual_loss(logit.data_ptr(), logit.shape[0], out.data_ptr(), _team(_LOSS * logit.shape[0]))
        return out

    def log_loss(self, logit: Tensor, label: Tensor) -> Tensor:
        """Log-loss and slope of each logit: `[2, n]`."""
        out = torch.empty((2, logit.shape[0]))
        self._log_loss(
            logit.data_ptr(), label.data_ptr(), logit.shape[0], out.data_ptr(), _team(_LOSS * logit.shape[0])
        )
        return out

    def log_loss_sums(self, logits: Tensor, label: Tensor) -> list[float]:
        """The log-loss of `[count, n]` logits against `[n]` labels, summed over the pairs in float64."""
        count, n = logits.shape
        out = (_DOUBLE * count)()
        self._log_loss_sums(logits.data_ptr(), label.data_ptr(), count, n, out, _team(_LOSS * count * n))
        return list(out)

    def sign_step(self, values: Tensor, alpha: float, eps: float) -> None:
        """`alpha * values / (|values| + eps)`, in place."""
        self._sign_step(values.data_ptr(), values.numel(), alpha, eps, _team(values.numel()))

    def adamw(
        self,
        tables: tuple[Tensor, Tensor, Tensor],
        index: Tensor,
        gradient: Tensor,
        columns: tuple[int, int],
        *,
        step: int,
        gamma: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        """One step of AdamW, the `step`-th, of some columns (first, number) of distinct rows of (values, m, v)."""
        rows, width = tables[0].shape
        values, m, v = (table.data_ptr() for table in tables)
        place = (values, m, v, rows, width, index.data_ptr(), index.shape[0], gradient.data_ptr(), *columns)
        constants = (step, gamma, *betas, eps, weight_decay)
        _check(self._adamw(*place, *constants, _team(3 * index.shape[0] * columns[1])), index, rows)

    def gmf_logits(self, rows: Tensor, weight: Tensor, bias: Tensor, row_bias: bool) -> Tensor:
        """`weight . (user * item) + bias` of rows `[2n, width]`, users first; `row_bias`: see `GMF`."""
        n, width = rows.shape[0] // 2, rows.shape[1]
        out, user = torch.empty(n), rows.data_ptr()
        place = (user, user + 4 * n * width, n, width, weight.numel(), row_bias)
        self._gmf_logits(*place, weight.data_ptr(), bias.data_ptr(), out.data_ptr(), _team(2 * n * width))
        return out

    def gmf_gradient(self, rows: Tensor, weight: Tensor, row_bias: bool, logit: Tensor, out: Tensor) -> Tensor:
        """The gradient of the rows `[2n, width]` (in `out`) and of (weight, bias) from that of the logits `[n]`."""
        n, width = rows.shape[0] // 2, rows.shape[1]
        dense, user = torch.empty(weight.numel() + 1), rows.data_ptr()
        place = (user, user + 4 * n * width, n, width, weight.numel(), row_bias, weight.data_ptr())
        self._gmf_gradient(*place, logit.data_ptr(), out.data_ptr(), dense.data_ptr(), _team(2 * n * width))
        return dense

    def gmf_candidates(
        self,
        rows: Tensor,
        index: Tensor,
        deltas: Tensor,
        dense: Tensor,
        step: Tensor,
        row_bias: bool,
        candidates: Sequence[float],
    ) -> Tensor:
        """Logits `[candidates, n]` at every `theta + c * step`.

        `deltas[index]` is what is added to the rows (nothing at -1), `step` what is added to `dense`, (weight, bias).
        """
        n, width, k = rows.shape[0] // 2, rows.shape[1], dense.shape[0] - 1
        out = torch.empty((len(candidates), n))
        place = (rows.data_ptr(), index.data_ptr(), deltas.data_ptr(), n, width, k, row_bias)
        tried = (_DOUBLE * len(candidates))(*candidates)
        given = (dense.data_ptr(), step.data_ptr(), tried, len(candidates), out.data_ptr())
        self._gmf_candidates(*place, *given, _team(2 * n * width))
        return out


def _team(values: int) -> int:
    """How many threads work on so many values: those of torch, if each has enough."""
    return 1 if values < 2 * _SHARE else min(torch.get_num_threads(), values // _SHARE)


def _places(parts: Sequence[Tensor]) -> tuple[Any, Any]:
    """Where the parts are in memory, and the first row of each among all rows, and the end."""
    edges = list(accumulate((part.shape[0] for part in parts), initial=0))
    return addresses(parts), (_INT * len(edges))(*edges)


def _check(wrong: int, index: Tensor, rows: int) -> None:
    if wrong != -1:
        raise IndexError(f"row {int(index[wrong])} of a table with {rows} local rows")


def native() -> Native:
    """The compiled library of rows, or why there is none."""
    return compiled(SOURCE)


@cache
def kernels() -> Kernels | None:
    """The compiled kernels; None where there are none, and torch operators do the same."""
    rows, steps = native().library, compiled(STEP_SOURCE).library
    return None if rows is None or steps is None else Kernels(rows, steps)
