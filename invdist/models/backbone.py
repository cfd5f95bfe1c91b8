"""What a backbone is: the dense part of a model, from the table rows of users and items to one logit per pair.

Shapes: rows `[..., n, columns]`, logits `[..., n]`; `k` is the dimension of the paper (32). How to add one:
docs/backbones.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor, nn

from invdist.embeddings import row_moves
from invdist.embeddings.row_moves import Deltas, UniqueRows, moved

_CHUNK = 1024
BIAS_COLUMNS = 4  # FBGEMM wants a multiple of 4 columns; the first is the bias, the others stay as drawn.


@dataclass(slots=True)
class Tried:
    """What is known when all candidates have been tried."""

    logits: Tensor
    """`[candidates, n]`."""
    layers: list[list[Tensor]] = field(default_factory=list)
    """What `Backbone.of_candidate` wants to know again: for each chunk of pairs `[candidates, pairs, ...]` tensors."""

    def of(self, chosen: int | Tensor) -> tuple[Tensor, list[Tensor]]:
        """The logits and layers of one candidate, by its number: views where the host knows it and chunks are one."""

        def pick(values: Tensor) -> Tensor:
            return values.index_select(0, chosen.view(1))[0] if isinstance(chosen, Tensor) else values[chosen]

        chunks = [[pick(layer) for layer in layers] for layers in self.layers]
        joined = chunks[0] if len(chunks) == 1 else [torch.cat(parts) for parts in zip(*chunks, strict=True)]
        return pick(self.logits), joined


class Backbone(nn.Module):
    """The dense part of a model: called with the rows of users and of items, it gives logits."""

    columns: int
    """Columns that one row must have."""
    frozen_columns = 0
    """Columns after those that are not trained: see `invdist.models.exposure_head`."""
    separable = False
    """Whether part of the computation concerns the user alone or the item alone. Then
    `combine(user_part(user), item_part(item))` equals `self(user, item)`, and code that scores many pairs of the same
    rows computes each part once."""

    def of_rows(self, rows: Tensor) -> Tensor:
        """Logits of rows `[2n, columns]`, users first. What may be replaced by a faster way to the same numbers."""
        return self(*rows.chunk(2))

    def of_rows_and_features(self, rows: Tensor, features: Tensor) -> Tensor:
        """`of_rows` of trained rows and the frozen columns that follow them."""
        return self.of_rows(torch.cat([rows, features], 1))

    def takes_distinct_rows(self) -> bool:
        """Whether `of_distinct_rows` can be used now, and is faster where rows repeat."""
        return False

    def of_distinct_rows(self, rows: Tensor, pieces: UniqueRows) -> Tensor:
        """`of_rows(rows[pieces.inverse])`, where `rows` has each distinct row once."""
        raise NotImplementedError

    def candidate_logits(
        self, rows: Tensor, deltas: Deltas, dense: Tensor, step: Tensor, candidates: Sequence[float]
    ) -> Tensor | None:
        """Logits `[candidates, n]` at rows + c * deltas and dense + c * step, without dropout; None: try one by one.

        `rows` end with the frozen columns, which have no deltas. `dense` has all parameters in one vector, in their
        order, and `step` likewise.
        """
        return None

    def try_candidates(
        self, rows: Tensor, deltas: Deltas, dense: Tensor, step: Tensor, candidates: Sequence[float]
    ) -> Tried | None:
        """`candidate_logits`, and what `of_candidate` can use of the way to them."""
        logits = self.candidate_logits(rows, deltas, dense, step, candidates)
        return None if logits is None else Tried(logits)

    def of_candidate(self, rows: Tensor, tried: Tried, chosen: int | Tensor) -> Tensor:
        """`of_rows`, where the rows and all parameters have become those of the candidate with the number `chosen`."""
        return self.of_rows(rows)

    def penalty(self, rows: Tensor, features: Tensor | None, pairs: int) -> Tensor | None:
        """What is added to the loss to keep the rows `[2n, columns]` of the first `pairs` of n labeled pairs small.

        `features` are the frozen columns of the same rows. None: nothing is added.
        """
        return None

    def priors(self, prior: float) -> list[tuple[int, float]]:
        """The columns of a row in groups beside an exposure head: how many, and the precision of their Gaussian prior.

        A logit should vary by 1 / `prior`. By default columns are taken to be multiplied with those of the other side:
        with precision sqrt(columns * prior) the sum of their products has that variance.
        """
        return [(self.columns, (self.columns * prior) ** 0.5)]

    def user_part(self, rows: Tensor) -> Tensor:
        """The user's own part, prepared: rows of any width."""
        return rows

    def item_part(self, rows: Tensor) -> Tensor:
        """The item's own part, prepared."""
        return rows

    def combine(self, user: Tensor, item: Tensor) -> Tensor:
        """Logits of pairs of prepared rows."""
        return self(user, item)


def autocasts(rows: Tensor) -> bool:
    """Whether operators on these rows are computed in bf16: then by torch, which knows which of them may be."""
    return rows.device.type in ("cpu", "cuda") and torch.is_autocast_enabled(rows.device.type)


def at_candidates(value: Tensor, step: Tensor, candidates: Sequence[float], second: Tensor | None = None) -> Tensor:
    """`value + c * step + c^2 * second` for every c: `[candidates, ...]`; on a GPU as many operators for any number."""
    if row_moves.reads_are_free(value.device):
        steps = ((c, step if second is None else moved(step, second, c)) for c in candidates)
        return torch.stack([moved(value, of_c, c) for c, of_c in steps])
    c = _on_device(tuple(candidates), value.device).view(-1, *(1 for _ in value.shape))
    return moved(value, step if second is None else moved(step, second, c), c)


def candidate_chunks(pairs: int, device: torch.device) -> list[slice]:
    """Pairs for which all candidates are tried at once: on a CPU so few that their layers stay in the cache."""
    chunk = _CHUNK if row_moves.reads_are_free(device) else max(pairs, 1)
    return [slice(start, start + chunk) for start in range(0, max(pairs, 1), chunk)]


@lru_cache(maxsize=16)
def _on_device(numbers: tuple[float, ...], device: torch.device) -> Tensor:
    """Uploaded once: the host waits for the copy of its own memory."""
    return torch.tensor(numbers, device=device)


def init_linear(layer: nn.Module) -> None:
    """Xavier-uniform weights and zero biases, as in the paper."""
    assert isinstance(layer, nn.Linear)
    nn.init.xavier_uniform_(layer.weight)
    nn.init.zeros_(layer.bias)
