"""A recommender being trained: sharded rows, a backbone, and one optimizer step for both."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from invdist.embeddings import row_moves
from invdist.embeddings.exchange import Exchange, Pairs, Route
from invdist.embeddings.row_moves import Deltas, SignStep, moved
from invdist.embeddings.store import EmbeddingStore, RowUpdate
from invdist.models.anchor import Anchor
from invdist.models.backbone import Backbone, Tried
from invdist.models.flat import FlatAdamW, flatten, views
from invdist.runtime.errors import UserError


@dataclass(slots=True)
class Update:
    """A gradient or a step of all parameters: the touched rows of this rank, and the dense ones as one vector."""

    rows: RowUpdate
    dense: Tensor
    square: float | Tensor = math.nan
    """This rank's share of the squared norm of the gradient that it is or was made of; NaN: not computed."""

    def map(self, function: Callable[[Tensor], Tensor]) -> Update:
        """Applies an elementwise function to every value."""
        return Update(self.rows.map(function), function(self.dense), self.square)


class Recommender:
    """Rows, backbone and optimizers. `theta` in the paper is the rows of all ranks and `dense` together."""

    def __init__(
        self,
        rows: EmbeddingStore,
        backbone: Backbone,
        dense_optimizer: torch.optim.Optimizer,
        *,
        precision: str = "fp32",
        vectors: EmbeddingStore | None = None,
        dense_decay: Tensor | None = None,
    ) -> None:
        self.rows, self.backbone, self.dense_optimizer, self.vectors = rows, backbone, dense_optimizer, vectors
        self._dense_decay, self._gammas = dense_decay, [group["lr"] for group in dense_optimizer.param_groups]
        assert vectors is None or vectors.layout.places_rows_like(rows.layout), "one route serves both"
        self.anchor: Anchor | None = None
        self.comm = rows.comm
        self.device = rows.local_rows.device
        self._dense = list(backbone.parameters())
        self._flat = flatten(self._dense)
        self._odd = torch.arange(1, 2 * len(self._flat), 2, device=self.device)
        self._bf16 = precision == "bf16"
        self.compiled: dict[str, float] = {}
        """What is reported of `compile`."""

    @property
    def pace(self) -> float:
        """What all learning rates are multiplied by, those of rows and of dense weights, and alpha."""
        return self.rows.optimizer.pace

    @pace.setter
    def pace(self, pace: float) -> None:
        self.rows.optimizer.pace = pace
        for group, gamma in zip(self.dense_optimizer.param_groups, self._gammas, strict=True):
            group["lr"] = gamma * pace

    def compile(self, pairs: int) -> None:
        """Compiles the dense part with torch.compile, once for any number of pairs.

        What a backbone computes by hand is not compiled.
        """
        started = time.perf_counter()
        self.backbone.compile(dynamic=True)
        columns = self.backbone.columns + self.backbone.frozen_columns
        rows = torch.zeros((2 * max(pairs, 2), columns), device=self.device, requires_grad=True)
        try:
            with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []), self._autocast():
                torch.autograd.grad(self.backbone.of_rows(rows).float().sum(), [rows, *self._dense])
        except Exception as error:
            said = str(error).strip().partition("\n")[0]
            raise UserError(
                f"training.compile: torch.compile failed, {type(error).__name__}: {said}; it needs a C++ compiler "
                "(on a GPU, Triton). Set training.compile=false"
            ) from error
        self.compiled = {"compile_seconds": round(time.perf_counter() - started, 1)}

    def exchange(self, *groups: Pairs) -> Exchange:
        """Starts to find the owners of the rows of each group of pairs."""
        return self.rows.exchange(groups, distinct=self._takes_distinct)

    def pull(self, exchange: Exchange, distinct: Sequence[int] = ()) -> list[Tensor]:
        """The rows of every group, each a leaf that gradients can be taken of: `[2n, columns]`.

        The groups numbered in `distinct` are used in `logits`, `penalty` and `gradient` only: each of their rows comes
        once (`Route.distinct`) where that is faster.
        """
        return [rows.requires_grad_() for rows in self._pull(exchange, distinct if self._takes_distinct else ())]

    @property
    def _takes_distinct(self) -> bool:
        return not (self.vectors or self._bf16 or self._penalizes) and self.backbone.takes_distinct_rows()

    def _pull(self, exchange: Exchange, distinct: Sequence[int] = ()) -> list[Tensor]:
        pulled = self.rows.pull(exchange, distinct)
        if self.vectors is not None:
            for route, features in zip(exchange.routes, self.vectors.pull(exchange), strict=True):
                route.features = features
        return pulled

    def logits(self, rows: Tensor, route: Route, *, exact: bool = False) -> Tensor:
        """One float32 logit per pair of a group, from its rows as they were pulled and its route.

        The route carries the frozen columns of the same rows (`Route.features`), if the model has any.
        `exact`: computed in float32 also where training is in bf16.
        """
        if route.distinct:
            return self.backbone.of_distinct_rows(rows, route.pieces)
        with contextlib.nullcontext() if exact else self._autocast():
            if route.features is not None:
                return self.backbone.of_rows_and_features(rows, route.features).float()
            return self.backbone.of_rows(rows).float()

    def penalty(self, rows: Tensor, route: Route, pairs: int) -> Tensor | None:
        """The sum of the backbone's penalty over the first `pairs` pairs of a group; None if it has none."""
        return self.backbone.penalty(rows, route.features, pairs) if self._penalizes else None

    @property
    def _penalizes(self) -> bool:
        return type(self.backbone).penalty is not Backbone.penalty

    def gradient(
        self,
        loss_sum: Tensor,
        count: float | Tensor,
        rows: Tensor,
        route: Route,
        penalty: Tensor | None = None,
        *,
        squared: bool = False,
        sign: SignStep | None = None,
    ) -> tuple[Update, Tensor]:
        """The gradient of a mean over all ranks (and of a `penalty`), at the owners of the rows, and that mean.

        The mean is the sum over ranks of `loss_sum` divided by the sum of `count`, so ranks may have different numbers
        of pairs, or none. `squared`: with its norm. `sign`: the step of each of its values, in the same pass over them.
        """
        total = loss_sum if penalty is None else loss_sum + penalty
        row_gradient, *dense_gradient = torch.autograd.grad(total, [rows, *self._dense])
        counted = count.float().view(1) if isinstance(count, Tensor) else self._flat.new_full((1,), count)
        totals = (loss_sum.detach().float().view(1), counted)
        reducing = self.comm.all_reduce(torch.cat([*(g.reshape(-1) for g in dense_gradient), *totals]))
        arriving = self.rows.push(route, row_gradient)
        reduced = reducing.wait()
        if row_moves.reads_are_free(self.device):
            scale = 1 / max(reduced[-1].item(), 1e-12)
        else:
            scale = 1 / reduced[-1].clamp(min=1e-12)
        reduced[:-1].mul_(scale)
        found, dense = arriving(scale, squared=squared, sign=sign), reduced[:-2]
        square = found.square + row_moves.square_sum(dense) / self.comm.size if squared else math.nan
        return Update(found, dense if sign is None else sign(dense), square), reduced[-2]

    @torch.no_grad()
    def candidate_logits(
        self, rows: Tensor, route: Route, deltas: Deltas, step: Update, candidates: Sequence[float]
    ) -> Tensor:
        """The logits of `try_candidates`: `[candidates, n]`."""
        return self.try_candidates(rows, route, deltas, step, candidates).logits

    @torch.no_grad()
    def try_candidates(
        self, rows: Tensor, route: Route, deltas: Deltas, step: Update, candidates: Sequence[float]
    ) -> Tried:
        """Logits at `theta + c * step` for every multiplier c; `deltas` is what it adds to `rows`.

        Always in float32: candidates differ by less than bf16 can tell. A backbone may know a way to try all at once.
        Otherwise dense weights take the value of each candidate in turn; afterwards they are what they were.
        """
        whole = _whole_rows(rows, route)
        found = self.backbone.try_candidates(whole, deltas, self._flat, step.dense, candidates)
        if found is not None:
            return found
        theta, added, logits = self._flat.clone(), deltas.dense(), []
        with self.evaluating():
            for c in candidates:
                self._flat.copy_(moved(theta, step.dense, c))
                logits.append(self.logits(moved(rows, added, c), route, exact=True))
        self._flat.copy_(theta)
        return Tried(torch.stack(logits))

    def logits_of_candidate(self, rows: Tensor, route: Route, tried: Tried, chosen: int | Tensor) -> Tensor:
        """`logits`, once the candidate with the number `chosen` was committed: `rows` have its deltas."""
        if route.features is not None:
            return self.logits(rows, route)
        with self._autocast():
            return self.backbone.of_candidate(rows, tried, chosen).float()

    def add(self, step: Update, scale: float | Tensor) -> None:
        """Commits `theta + scale * step`; nothing changes at 0."""
        self.rows.add(step.rows, scale)
        if isinstance(scale, Tensor):
            self._flat.copy_(moved(self._flat, step.dense, scale))
        elif scale:
            self._flat.add_(step.dense, alpha=scale)

    def step(self, gradient: Update) -> None:
        """One gamma step of the optimizers of rows and dense parameters."""
        if self.anchor is not None:
            touched = gradient.rows
            touched.values.add_(self.anchor.gradient(self.rows.local_rows, touched.unique.rows))
        self.rows.step(gradient.rows)
        if self._dense_decay is not None:
            # Not computed where nothing changes: rounding would.
            self._flat.mul_(self._dense_decay if self.pace == 1 else 1 - self.pace * (1 - self._dense_decay))
        if isinstance(self.dense_optimizer, FlatAdamW):
            self.dense_optimizer.step_flat(self._flat, gradient.dense)
            return
        for parameter, part in zip(self._dense, views(gradient.dense, self._dense), strict=True):
            parameter.grad = part
        self.dense_optimizer.step()

    def score(self, pairs: Pairs) -> Tensor:
        """Logits of pairs. Every rank must call it; the number of pairs may differ."""
        return self.score_fetched(self.exchange(self.ids_to_fetch(pairs)), pairs)

    def ids_to_fetch(self, pairs: Pairs) -> Pairs:
        """The ids to exchange before `score_fetched`: the pairs, or each user and item once."""
        return _distinct(pairs)[0] if self._separates else pairs

    @property
    def _separates(self) -> bool:
        """Whether pairs are scored by distinct users and items. Not on a GPU: the host would read how many they are."""
        return self.backbone.separable and row_moves.reads_are_free(self.device)

    @torch.no_grad()
    def score_fetched(self, exchange: Exchange, pairs: Pairs) -> Tensor:
        """Logits of pairs from the exchange of their `ids_to_fetch`, without dropout or gradient."""
        rows, route = self._pull(exchange)[0], exchange.routes[0]
        with self.evaluating():
            if not self._separates:
                return self.logits(rows, route)
            ids, places = _distinct(pairs)
            user, item = _whole_rows(rows, route).split([len(ids.user), len(ids.item)])
            with self._autocast():
                user, item = self.backbone.user_part(user), self.backbone.item_part(item)
                user, item = user.index_select(0, places.user), item.index_select(0, places.item)
                return self.backbone.combine(user, item).float()

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Turns dropout off."""
        training = self.backbone.training
        if training:
            self.backbone.eval()
        try:
            yield
        finally:
            if training:
                self.backbone.train()

    def checksum(self) -> Tensor:
        """A number of the bits of the dense parameters: equal on replicas, and exact in float64 on any device."""
        bits = self._flat.view(torch.int32).long()
        # Odd factors by position, so that exchanged values are seen; int64 products and sums wrap around.
        return (bits * self._odd).sum().remainder(1 << 52).double()

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        return torch.autocast(self.device.type, torch.bfloat16) if self._bf16 else contextlib.nullcontext()


def _whole_rows(rows: Tensor, route: Route) -> Tensor:
    """Trained columns, then the frozen ones of the same rows."""
    return rows if route.features is None else torch.cat([rows, route.features], 1)


def _distinct(pairs: Pairs) -> tuple[Pairs, Pairs]:
    """The distinct users and the distinct items of pairs, and the place of each pair's user and item among them."""
    (user, at_user), (item, at_item) = (ids.unique(return_inverse=True) for ids in pairs)
    return Pairs(user, item), Pairs(at_user, at_item)
