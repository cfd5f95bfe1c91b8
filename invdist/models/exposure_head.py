"""Any backbone with exposure vectors beside its own columns.

A row is `[columns of the backbone | bias, 3 unused | c | x | log(1 + exposures), labels, labels now, 1 unused]`. All up
to the column `c` is trained; the exposure vector `x` of unit length and the counts are frozen. With two sides,

    logit = backbone(user, item) + bias_u + bias_i          as without vectors
          + c_u . x_i + x_u . c_i                           what this user thinks of such items, who likes this item
          + w . f + hidden(f),   f = [x_u, x_i, (A x_u) * x_i, log counts]

so a user without labels is scored by what similar users liked, and a new one moves away from that with every label.
Whoever has no exposures either is taken for an average one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from invdist.embeddings.row_moves import Deltas, kernels_for
from invdist.models.backbone import BIAS_COLUMNS, Backbone, at_candidates, autocasts, candidate_chunks
from invdist.models.dropout import Dropout
from invdist.models.exposure_gradient import HeadLogits, PriorOfRows
from invdist.models.flat import views

COUNT_COLUMNS = 4
"""Frozen columns after a vector: the log of the exposures, the number of labels that taught the model, how many of them
are in its data set (0: all; fewer in one that grew), and padding for FBGEMM."""
_INFORMATION = 0.22
"""p (1 - p) of a label where a third is positive; it changes little with the share."""
_LOG_COUNT_OFFSET = 4.0  # brings log counts of a few dozen exposures near zero


class ExposureHead(Backbone):
    """`inner` and a head over exposure vectors of `dim` columns."""

    separable = True

    def __init__(
        self, inner: Backbone, dim: int, *, hidden: int = 128, dropout: float = 0.3, prior: float = 3.0
    ) -> None:
        super().__init__()
        self.inner, self.dim, self.prior = inner, dim, prior
        self.columns = inner.columns + BIAS_COLUMNS + dim
        self.frozen_columns = dim + COUNT_COLUMNS
        self.mix = nn.Linear(dim, dim, bias=False)
        self.direct = nn.Linear(3 * dim + 2, 1)
        self.hidden = nn.Linear(3 * dim + 2, hidden)
        self.output = nn.Linear(hidden, 1, bias=False)
        self.dropout = Dropout(dropout)

    def head_parameters(self) -> list[nn.Parameter]:
        """The dense weights that are not the inner backbone's."""
        return [p for module in (self.mix, self.direct, self.hidden, self.output) for p in module.parameters()]

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        u, i = self._split(user), self._split(item)
        f = _features(u, i, self.mix(u.x) * i.x)
        hidden = torch.relu(self.hidden(self.dropout(f)))
        logit = (self.direct(f) + self.output(self.dropout(hidden))).squeeze(-1)
        return self.inner(u.inner, i.inner) + logit + _of_columns(u, i)

    def of_rows_and_features(self, rows: Tensor, features: Tensor) -> Tensor:
        if kernels_for(rows) is None or autocasts(rows):
            return super().of_rows_and_features(rows, features)
        x, count, _ = features.tensor_split([self.dim, self.dim + 1], -1)
        weights = (self.mix.weight, self.direct.weight, self.direct.bias, self.hidden.weight, self.hidden.bias)
        inner, logit = HeadLogits.apply(
            rows, x.contiguous(), _log_count(count), self.inner.columns, self.dropout, *weights, self.output.weight
        )
        return self.inner.of_rows(inner) + logit

    def penalty(self, rows: Tensor, features: Tensor | None, pairs: int) -> Tensor:
        """What the first `pairs` of n labeled pairs pay for the size of their trained columns `[2n, columns]`.

        Each row has a Gaussian prior, and pays its share at each of its labels. The precision is `prior` for the head's
        own columns, which give a logit the variance 1 / prior. That of the columns of the backbone follows from it
        (`Backbone.priors`).

        A model that grew sees `now` of its `labels`, and pays that share of the penalty. Of products it is too little:
        the noise that two sides can learn together goes with the square root of what is seen, so the products of a
        sample grow where those of all labels do not, a little more every day. They pay by the square root, too.
        """
        assert features is not None
        counts, inner = features[:, self.dim :], self.inner.priors(self.prior)
        labels, now = counts[:, 1].clamp(min=1), counts[:, 2]
        more = (labels / torch.where(now > 0, now, labels)).sqrt()
        precision = torch.stack([*(each * more / labels for _, each in inner), self.prior / labels], 1)
        precision.view(2, -1, len(inner) + 1)[:, pairs:] = 0.0
        own = [columns for columns, _ in inner]
        return PriorOfRows.apply(rows, precision, [*own, self.columns - sum(own)])

    def curvature(self) -> tuple[Tensor, Tensor]:
        """By trained column the precision of its prior, and the Fisher information that one label has of it.

        A label tells p (1 - p) of a bias. It is spread over the columns of `c`, which are multiplied with a vector of
        length one. The columns of the backbone are multiplied with short ones: next to nothing.
        """
        own, prior, information = self.inner.columns, torch.full((self.columns,), self.prior), torch.zeros(self.columns)
        prior[:own] = torch.cat([torch.full((columns,), each) for columns, each in self.inner.priors(self.prior)])
        information[own], information[own + BIAS_COLUMNS :] = _INFORMATION, _INFORMATION / self.dim
        return prior, information

    def candidate_logits(
        self, rows: Tensor, deltas: Deltas, dense: Tensor, step: Tensor, candidates: Sequence[float]
    ) -> Tensor | None:
        """As in `Backbone`, if the inner backbone knows a way to try all at once."""
        own, edge = self.inner.columns, sum(parameter.numel() for parameter in self.inner.parameters())
        inner = self.inner.candidate_logits(
            rows[:, :own].contiguous(),
            Deltas(deltas.values[:, :own].contiguous(), deltas.index),
            dense[:edge],
            step[:edge],
            candidates,
        )
        if inner is None:
            return None
        n, weights, d_weights = len(rows) // 2, self._weights(dense[edge:]), self._weights(step[edge:])
        sides, added = rows.view(2, n, rows.shape[1]), deltas.dense().view(2, n, self.columns)
        found = [
            self._try(sides[:, some], added[:, some], weights, d_weights, candidates)
            for some in candidate_chunks(n, rows.device)
        ]
        return inner + torch.cat(found, 1)

    def _try(
        self, sides: Tensor, added: Tensor, weights: _Weights, d_weights: _Weights, candidates: Sequence[float]
    ) -> Tensor:
        """The head's part of logits `[candidates, n]` of rows `[2, n, columns]`. Vectors and counts do not move, so

        (W + c dW) f + b + c db,   with   (A + c dA) x_u * x_i   in f,

        is a polynomial of degree 2 in c, whose coefficients are found once for all candidates.
        """
        (u, i), own = (self._split(side) for side in sides), self.inner.columns
        d_u, d_i = (
            side._replace(bias=step[:, own], c=step[:, own + BIAS_COLUMNS :])
            for side, step in zip((u, i), added, strict=True)
        )
        w, d = weights, d_weights
        product, d_product = (linear(u.x, mix) * i.x for mix in (w.mix, d.mix))
        f, of_product = _features(u, i, product), slice(2 * self.dim, 3 * self.dim)
        first = linear(f, d.both, d.bias) + linear(d_product, w.both[:, of_product])
        second = linear(d_product, d.both[:, of_product])
        both = at_candidates(linear(f, w.both, w.bias), first, candidates, second)
        output = at_candidates(w.output, d.output, candidates)
        logits = torch.bmm(both[..., :-1].relu(), output.transpose(1, 2)).squeeze(-1) + both[..., -1]
        return logits + at_candidates(_of_columns(u, i), _of_columns(d_u, d_i), candidates)

    def _weights(self, flat: Tensor) -> _Weights:
        mix, direct, direct_bias, hidden, hidden_bias, output = views(flat, self.head_parameters())
        return _Weights(mix, torch.cat([hidden, direct]), torch.cat([hidden_bias, direct_bias]), output)

    # `user_part` and `item_part` compute once per row what `combine` would compute again for every pair:
    #   user    [inner | bias + its share of `direct` | c | x | A x | its share of `hidden`]
    #   item    [inner | bias + its share of `direct` | c | x | its share of `hidden`]

    def user_part(self, rows: Tensor) -> Tensor:
        side, d = self._split(rows), self.dim
        inner = self.inner.user_part(side.inner) if self.inner.separable else side.inner
        scalar = side.bias + side.x @ self.direct.weight[0, :d] + side.log_count[..., 0] * self.direct.weight[0, -2]
        hidden = linear(side.x, self.hidden.weight[:, :d], self.hidden.bias)
        hidden = hidden + side.log_count * self.hidden.weight[:, -2]
        scalar = (scalar + self.direct.bias).unsqueeze(-1)
        return torch.cat([inner, scalar, side.c, side.x, self.mix(side.x), hidden], -1)

    def item_part(self, rows: Tensor) -> Tensor:
        side, d = self._split(rows), self.dim
        inner = self.inner.item_part(side.inner) if self.inner.separable else side.inner
        scalar = side.bias + side.x @ self.direct.weight[0, d : 2 * d]
        scalar = scalar + side.log_count[..., 0] * self.direct.weight[0, -1]
        hidden = linear(side.x, self.hidden.weight[:, d : 2 * d]) + side.log_count * self.hidden.weight[:, -1]
        return torch.cat([inner, scalar.unsqueeze(-1), side.c, side.x, hidden], -1)

    def combine(self, user: Tensor, item: Tensor) -> Tensor:
        d, h = self.dim, self.hidden.out_features
        user_inner, user_scalar, user_c, user_x, mixed, user_hidden = user.split(
            [user.shape[-1] - 1 - 3 * d - h, 1, d, d, d, h], -1
        )
        item_inner, item_scalar, item_c, item_x, item_hidden = item.split(
            [item.shape[-1] - 1 - 2 * d - h, 1, d, d, h], -1
        )
        product = mixed * item_x
        hidden = torch.relu(user_hidden + item_hidden + linear(product, self.hidden.weight[:, 2 * d : 3 * d]))
        logit = self.output(hidden) + user_scalar + item_scalar
        logit = logit.squeeze(-1) + product @ self.direct.weight[0, 2 * d : 3 * d]
        logit = logit + (user_c * item_x).sum(-1) + (user_x * item_c).sum(-1)
        score = self.inner.combine if self.inner.separable else self.inner
        return logit + score(user_inner, item_inner)

    def _split(self, rows: Tensor) -> _Side:
        first, bias, c, x, counts = rows.split(
            [self.inner.columns, BIAS_COLUMNS, self.dim, self.dim, COUNT_COLUMNS], -1
        )
        return _Side(first, bias[..., 0], c, x, _log_count(counts[..., :1]))


class _Side(NamedTuple):
    """The columns of one side of a pair."""

    inner: Tensor
    bias: Tensor
    c: Tensor
    x: Tensor
    log_count: Tensor


class _Weights(NamedTuple):
    """The weights of the head, or a step of them."""

    mix: Tensor
    both: Tensor
    """Those of `hidden`, and as the last row those of `direct`."""
    bias: Tensor
    output: Tensor


def _log_count(count: Tensor) -> Tensor:
    """Nobody without exposures trains, so the head does not know what a count of zero means: it gets none to read."""
    return torch.where(count != 0, count - _LOG_COUNT_OFFSET, 0.0)


def _features(u: _Side, i: _Side, product: Tensor) -> Tensor:
    """What `direct` and `hidden` read."""
    return torch.cat([u.x, i.x, product, u.log_count, i.log_count], -1)


def _of_columns(u: _Side, i: _Side) -> Tensor:
    """What the trained columns of the head add to a logit: linear in them."""
    return u.bias + i.bias + (u.c * i.x).sum(-1) + (u.x * i.c).sum(-1)
