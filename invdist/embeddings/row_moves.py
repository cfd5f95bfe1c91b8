"""Moves of table rows in memory: gather, store, and sums over rows that occur several times.

On the CPU by compiled kernels (kernels.py), elsewhere and without a compiler by torch operators with the same results.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from invdist.embeddings.kernels import Kernels, kernels
from invdist.runtime.process import use_huge_pages


def reads_are_free(device: torch.device) -> bool:
    """Whether the host reads values without waiting for a device. Where not, steps take the way without reads."""
    return device.type == "cpu"


def square_sum(values: Tensor) -> float | Tensor:
    """The sum of squares of all values: a number where the host has it for nothing."""
    if (compiled := kernels_for(values)) is not None:
        return compiled.square_sum(values.contiguous())
    return values.reshape(-1).dot(values.reshape(-1))


@dataclass(frozen=True, slots=True)
class SignStep:
    """The step `alpha * g / (|g| + eps)` of each value g: what one step of a fresh Adam is."""

    alpha: float
    eps: float = 1e-8

    def __call__(self, values: Tensor) -> Tensor:
        """The step of each value, in the memory of `values` where that is faster."""
        if (compiled := kernels_for(values)) is not None:
            compiled.sign_step(values, self.alpha, self.eps)
            return values
        return self.alpha * (values / values.abs().add_(self.eps))


def in_unified_memory(table: Tensor) -> bool:
    """Whether a tensor of a GPU is in unified memory."""
    return table.device.type == "cuda" and bool(torch.ops.fbgemm.is_uvm_tensor(table))


def zeros_beside(table: Tensor) -> Tensor:
    """Zeros of the shape of `table`, in the same memory: unified memory if that is where it is (`rows.memory`)."""
    if not in_unified_memory(table):
        return use_huge_pages(torch.empty_like(table)).zero_()
    return torch.ops.fbgemm.new_managed_tensor(table, list(table.shape)).zero_()


def kernels_for(values: Tensor) -> Kernels | None:
    """The compiled kernels if they can be used with these values."""
    return kernels() if values.dtype == torch.float32 and reads_are_free(values.device) else None


def set_gradient_memory(rows: Tensor, make: Callable[[], Tensor]) -> Tensor:
    """Says where a gradient of `rows` is best written: into what `make` gives. Whoever does not ask copies it later."""
    rows.gradient_memory = make  # pyright: ignore[reportAttributeAccessIssue]
    return rows


def gradient_memory(rows: Tensor) -> Callable[[], Tensor]:
    """Gives memory for a gradient of `rows`."""
    return getattr(rows, "gradient_memory", None) or functools.partial(torch.empty_like, rows)


def detached(rows: Tensor) -> Tensor:
    """`rows.detach()`, with the same memory for gradients."""
    make = getattr(rows, "gradient_memory", None)
    return rows.detach() if make is None else set_gradient_memory(rows.detach(), make)


def gather_rows(table: Tensor, rows: Tensor, out: Tensor | None = None) -> Tensor:
    """`table[rows]`: `[n, width]`, in `out` if given.

    Without kernels on the CPU as bags of one row each: FBGEMM prefetches rows, and takes half the time of
    `index_select`.
    """
    if (compiled := kernels_for(table)) is not None:
        return compiled.gather(table, rows, out)
    if table.device.type != "cpu" or len(rows) == 0:
        return torch.index_select(table, 0, rows, out=out)
    found = embedding_bag(rows, table, _counting(len(rows)), mode="sum")
    return found if out is None else out.copy_(found)


def gather_keys(tables: Sequence[Tensor], row_bits: int, keys: Tensor, out: Tensor) -> Tensor:
    """The rows of keys, which have the number of a table above its `row_bits` and a row of it below."""
    if (compiled := kernels_for(tables[0])) is not None:
        return compiled.gather_keys(tables, row_bits, keys, out)
    for number, table in enumerate(tables):
        here = (keys >> row_bits == number).nonzero().view(-1)
        out.index_copy_(0, here, table.index_select(0, keys.index_select(0, here) & ((1 << row_bits) - 1)))
    return out


def gather_parts(parts: Sequence[Tensor], rows: Tensor, out: Tensor | None = None) -> Tensor:
    """`torch.cat(parts)[rows]`, in `out` if given."""
    if (compiled := kernels_for(parts[0])) is not None:
        return compiled.gather_parts(parts, rows, out)
    return gather_rows(_joined(parts), rows, out)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def add_rows(table: Tensor, rows: Tensor, values: Tensor, scale: float | Tensor) -> None:
    """`table[rows] += scale * values` for distinct rows; nothing where the scale is 0."""
    if not len(rows) or (isinstance(scale, float) and not scale):
        return
    compiled = kernels_for(table)
    if compiled is not None and isinstance(scale, float):
        compiled.add(table, rows, values, scale)
    else:
        store_rows(table, rows, moved(gather_rows(table, rows), values, scale))


def moved(values: Tensor, step: Tensor, c: float | Tensor) -> Tensor:
    """`values + c * step`. Nothing is added at 0: 0 * NaN is NaN, and a broken step must not break the pass."""
    if isinstance(c, Tensor):
        return torch.where(c == 0, values, torch.addcmul(values, step, c.to(values.dtype)))
    return torch.add(values, step, alpha=c) if c else values


def store_rows(table: Tensor, rows: Tensor, values: Tensor) -> None:
    """`table[rows] = values` for distinct rows; both have a multiple of 4 columns, as FBGEMM wants.

    Rows move as elements of 16 bytes, which takes half the time of `index_copy_` and a fifth of that of
    `index_add_` by 4-byte elements on the CPU.
    """
    table.view(torch.complex128).index_copy_(0, rows, values.view(torch.complex128))


@lru_cache(maxsize=16)
def _counting(count: int) -> Tensor:
    return torch.arange(count)


@dataclass(slots=True)
class Deltas:
    """What an update adds to each of some rows `[m, width]`: `values[index]`, nothing where the index is -1.

    Most rows of a batch are not touched by the update from another batch, so this is less than a matrix.
    """

    values: Tensor
    index: Tensor

    def dense(self, out: Tensor | None = None) -> Tensor:
        """As a matrix: `[m, width]`, in `out` if given."""
        zeros = self.values.new_zeros((1, self.values.shape[1]))
        return gather_parts([self.values, zeros], torch.where(self.index < 0, len(self.values), self.index), out)

    def add_to(self, rows: Tensor, c: float | Tensor) -> Tensor:
        """`rows + c * deltas`, in the memory of `rows` where that is faster."""
        compiled = kernels_for(rows)
        if compiled is None or isinstance(c, Tensor):
            return moved(rows, self.dense(), c)
        if c:
            compiled.add_indexed(rows, self.index, self.values, c)
        return rows


@dataclass
class UniqueRows:
    """The distinct values of a list of rows, and which entries of the list ("occurrences") have each value.

    On a GPU the number of distinct rows is not read back, which would stop the host: `rows` then has one entry per
    occurrence, and the entries after the last distinct row repeat it, with equal values in everything made from it.
    """

    rows: Tensor
    """The distinct rows, ascending."""
    order: Tensor
    """Occurrences sorted by row."""
    starts: Tensor
    """Where the occurrences of each distinct row start in `order`."""
    count: Tensor | None = None
    """How many of `rows` are distinct; None: all of them."""

    @classmethod
    def of(cls, occurrences: Tensor, exact: bool | None = None) -> UniqueRows:
        """Sorts the rows once; sums over occurrences are then sums over segments. `exact`: the default on a CPU."""
        exact = reads_are_free(occurrences.device) if exact is None else exact
        if exact and (compiled := kernels()) is not None and (found := compiled.unique(occurrences)) is not None:
            return cls(*found)
        rows, order = torch.sort(occurrences, stable=True)
        if len(rows) == 0:
            return cls(rows, order, order)
        new = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
        torch.ne(rows[1:], rows[:-1], out=new[1:])
        if exact:
            starts = new.nonzero().view(-1)
            return cls(rows.index_select(0, starts), order, starts)
        segment = new.cumsum(0) - 1
        number = torch.arange(len(rows), device=rows.device)
        starts = torch.searchsorted(segment, number)
        last = segment[-1:]
        return cls(rows.index_select(0, starts.index_select(0, number.minimum(last))), order, starts, last + 1)

    def first(self, count: int) -> UniqueRows:
        """The same, once the number of distinct rows is known."""
        if self.count is None:
            return self
        return UniqueRows(self.rows[:count], self.order, self.starts[:count])

    @property
    def repeats(self) -> bool:
        """Whether there are at least two occurrences of a row, as a mean; unknown on a GPU."""
        return self.count is None and 0 < 2 * len(self.rows) <= len(self.order)

    def below(self, edges: Tensor) -> Tensor:
        """How many distinct rows are smaller than each of `edges`."""
        found = torch.searchsorted(self.rows, edges)
        return found if self.count is None else found.minimum(self.count)

    @cached_property
    def inverse(self) -> Tensor:
        """The place of each occurrence among the distinct rows: `rows[inverse]` is the list it was made of."""
        if self.count is None and (compiled := kernels()) is not None and self.order.device.type == "cpu":
            return compiled.inverse(self.order, self.starts)
        sizes = torch.diff(self.starts, append=torch.full_like(self.starts[:1], len(self.order)))
        number = torch.arange(len(self.starts), device=self.starts.device)
        segment = torch.repeat_interleave(number, sizes, output_size=len(self.order))
        return torch.empty_like(self.order).index_copy_(0, self.order, segment)

    def sum(self, occurrences: Tensor, scale: float | Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """Sums `[occurrences, width]` by distinct row, times `scale` if given: `[rows, width]`, in `out` if given."""
        return self.sum_parts([occurrences], scale, out)

    def sum_parts(
        self, parts: Sequence[Tensor], scale: float | Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """The same where the occurrences are in parts, one after the other."""
        if len(self.rows) == 0:
            return parts[0].new_zeros((0, parts[0].shape[1]))
        if self.count is None and (compiled := kernels_for(parts[0])) is not None:
            factor = 1.0 if scale is None else float(scale)
            return compiled.sum([part.contiguous() for part in parts], self.order, self.starts, factor, out)
        sums = embedding_bag(self.order, _joined(parts), self.starts, mode="sum")
        sums = sums if self.count is None else sums.index_select(0, self._repeat_last)
        sums = sums if scale is None else sums.mul_(scale)
        return sums if out is None else out.copy_(sums)

    def sum_and_step(
        self, parts: Sequence[Tensor], scale: float | Tensor | None, sign: SignStep | None
    ) -> tuple[Tensor, float | Tensor]:
        """`sum_parts`, with the sum of its squares; then its step, if `sign` is given."""
        if self.count is None and len(self.rows) and (compiled := kernels_for(parts[0])) is not None:
            step = None if sign is None else (sign.alpha, sign.eps)
            factor = 1.0 if scale is None else float(scale)
            return compiled.sum_and_step([part.contiguous() for part in parts], self.order, self.starts, factor, step)
        values = self.sum_parts(parts, scale)
        square = square_sum(values) if self.count is None else self.square_sum(values)
        return values if sign is None else sign(values), square

    def find(self, rows: Tensor) -> Tensor:
        """Index of each of `rows` among the distinct ones; `len(self.rows)` where it is missing."""
        if len(self.rows) == 0:
            return torch.zeros_like(rows)
        at = torch.searchsorted(self.rows, rows).clamp_(max=len(self.rows) - 1)
        return torch.where(self.rows.index_select(0, at) == rows, at, len(self.rows))

    def places_of(self, wanted: UniqueRows) -> Tensor:
        """The place of each occurrence of `wanted` among the distinct rows here; -1 where it is missing."""
        if self.count is None and wanted.count is None and (compiled := kernels()) is not None:
            return compiled.places(self.rows, wanted.rows, wanted.order, wanted.starts)
        found = self.find(wanted.rows).index_select(0, wanted.inverse)
        return torch.where(found == len(self.rows), -1, found)

    def square_sum(self, values: Tensor) -> Tensor:
        """The sum of squares of `values` `[rows, width]`, each distinct row counted once."""
        if self.count is None:
            return values.view(-1).dot(values.view(-1))
        number = torch.arange(len(self.rows), device=values.device)
        return torch.where(number < self.count, values.square().sum(1), 0.0).sum()

    @cached_property
    def _repeat_last(self) -> Tensor:
        assert self.count is not None
        return torch.arange(len(self.rows), device=self.rows.device).minimum(self.count - 1)
