"""Algorithm 1 of the paper as in a textbook: one process, deep copies of the model, plain autograd.

What the engine does over sharded rows is compared with this. It is slow and shares no code with the engine.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Labeled = tuple[Tensor, Tensor, Tensor]
"""user, item (int64 [n]) and label (0 or 1, [n])."""
Unlabeled = tuple[Tensor, Tensor]
"""user, item (int64 [n])."""


class Textbook:
    """A GMF or NeuMF model of `users` and `items` with vectors of `dim`, and its three kinds of step.

    `weights` are the first weights, which also set the dtype: `user` and `item` ([rows, dim], for NeuMF
    [rows, 5 dim]), `output.weight`, `output.bias`, and for NeuMF `tower.0.weight`, `tower.0.bias` to
    `tower.2.bias`. `row_optimizer` is `adam` (lazy), `sgd` or `rowwise_adagrad`, of rate `gamma`; dense
    weights get the optimizer of `torch.optim` that belongs to it. `alpha` is the rate of the inner update,
    `inner` its rule: `sign` or `sgd`.
    """

    def __init__(
        self,
        model: str,
        users: int,
        items: int,
        dim: int,
        weights: Mapping[str, Tensor],
        row_optimizer: str = "adam",
        gamma: float = 1e-3,
        alpha: float = 1e-4,
        inner: str = "sign",
        candidates: Sequence[float] = (-1, 0, 1),
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
    ) -> None:
        self.model = {"gmf": GMF, "neumf": NeuMF}[model](users, items, dim).to(weights["user"].dtype)
        self.model.load_state_dict({_with_suffix(name): value for name, value in weights.items()})
        self.alpha, self.inner, self.candidates = alpha, inner, tuple(candidates)
        tables = [self.model.user.weight, self.model.item.weight]
        dense = [p for p in self.model.parameters() if all(p is not table for table in tables)]
        if row_optimizer == "adam":
            self.rows = [LazyAdam(table, gamma, beta1, beta2, eps) for table in tables]
            self.dense = torch.optim.Adam(dense, gamma, (beta1, beta2), eps)
        elif row_optimizer == "sgd":
            self.rows = [SGD(table, gamma) for table in tables]
            self.dense = torch.optim.SGD(dense, gamma)
        elif row_optimizer == "rowwise_adagrad":
            self.rows = [RowwiseAdagrad(table, gamma, eps) for table in tables]
            self.dense = torch.optim.Adagrad(dense, gamma, eps=eps)
        else:
            raise ValueError(row_optimizer)

    def weights(self) -> dict[str, Tensor]:
        """Copies of all weights, by the names the constructor takes."""
        state = {_without_suffix(name): value for name, value in self.model.state_dict().items()}
        return {name: value.detach().clone() for name, value in state.items()}

    def plain_step(self, user: Tensor, item: Tensor, label: Tensor) -> float:
        """One gamma step on the mean log-loss of a batch; gives the loss before it."""
        self.model.zero_grad()
        loss = log_loss(self.model(user, item), label)
        loss.backward()
        for rows, ids in zip(self.rows, (user, item), strict=True):
            rows.step(ids.unique())
        self.dense.step()
        return loss.item()

    def ig_step(self, V: Labeled, U: Unlabeled) -> tuple[float, list[float]]:
        """One step of phase 2 on training-test batch `V` and unlabeled batch `U`.

        Gives the multiplier of D that won and the mean log-loss of `V` at each candidate.
        """
        # 1. the direct gradient of the inverse dual loss of U, and the update vector D
        self.model.zero_grad()
        inverse_dual_loss(self.model(*U))[0].mean().backward()
        D = [self.alpha * self._phi(_grad(theta)) for theta in self.model.parameters()]

        # 2. and 3. a copy of the model for each candidate theta + cD, and its log-loss over V
        copies, losses = [], []
        for c in self.candidates:
            candidate = copy.deepcopy(self.model)
            with torch.no_grad():
                for theta, d in zip(candidate.parameters(), D, strict=True):
                    theta += c * d
                losses.append(log_loss(candidate(V[0], V[1]), V[2]).item())
            copies.append(candidate)

        # 4. the smallest wins
        winner = choose(self.candidates, losses)

        # 5. commit, then one gamma step on V
        with torch.no_grad():
            for theta, committed in zip(self.model.parameters(), copies[winner].parameters(), strict=True):
                theta.copy_(committed)
        self.plain_step(*V)
        return self.candidates[winner], losses

    def _phi(self, g: Tensor) -> Tensor:
        if self.inner == "sign":
            return g / (g.abs() + 1e-8)
        if self.inner == "sgd":
            return g
        raise ValueError(self.inner)


def log_loss(logit: Tensor, label: Tensor) -> Tensor:
    """Mean log-loss of logits [n] against labels [n]."""
    return F.binary_cross_entropy_with_logits(logit, label.to(logit.dtype))


def inverse_dual_loss(logit: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse dual loss and annotation `w1` of each logit, word for word as the paper has them, in float64.

    Divides by the losses, so it is for logits within about 700 of 0.
    """
    s = logit.double()
    l1, l0 = -F.logsigmoid(s), -F.logsigmoid(-s)
    z = l0 / l1 + l1 / l0
    w1 = ((l0 / l1) / z).detach()
    w0 = ((l1 / l0) / z).detach()
    return w1 * l1 + w0 * l0, w1


def choose(candidates: Sequence[float], losses: Sequence[float]) -> int:
    """Index of the smallest finite loss; ties go to 0, then -1, then the smaller |c|, then the negative."""
    finite = [i for i, loss in enumerate(losses) if math.isfinite(loss)]
    if not finite:
        raise ArithmeticError(f"no candidate has a finite loss: {losses}")
    c = candidates
    return min(finite, key=lambda i: (losses[i], c[i] != 0, c[i] != -1, abs(c[i]), c[i] > 0))


class GMF(nn.Module):
    """The elementwise product of user and item vectors into one linear output."""

    def __init__(self, users: int, items: int, dim: int) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(users, dim), nn.Embedding(items, dim)
        self.output = nn.Linear(dim, 1)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return self.output(self.user(user) * self.item(item)).squeeze(1)


class NeuMF(nn.Module):
    """GMF on the first `dim` columns, a tower on the other 4 `dim`, one linear output over both."""

    def __init__(self, users: int, items: int, dim: int) -> None:
        super().__init__()
        k = self.k = dim
        self.user, self.item = nn.Embedding(users, k + 4 * k), nn.Embedding(items, k + 4 * k)
        self.tower = nn.ModuleList([nn.Linear(8 * k, 4 * k), nn.Linear(4 * k, 2 * k), nn.Linear(2 * k, k)])
        self.output = nn.Linear(2 * k, 1)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        p, q = self.user(user), self.item(item)
        mlp = torch.cat([p[:, self.k :], q[:, self.k :]], dim=1)
        for layer in self.tower:
            mlp = torch.relu(layer(mlp))
        gmf = p[:, : self.k] * q[:, : self.k]
        return self.output(torch.cat([gmf, mlp], dim=1)).squeeze(1)


class LazyAdam:
    """Adam that moves, and keeps moments for, the rows of a batch only; bias correction counts all steps."""

    def __init__(self, table: nn.Parameter, gamma: float, beta1: float, beta2: float, eps: float) -> None:
        self.table, self.gamma, self.beta1, self.beta2, self.eps = table, gamma, beta1, beta2, eps
        self.m, self.v = torch.zeros_like(table), torch.zeros_like(table)
        self.t = 0

    @torch.no_grad()
    def step(self, touched: Tensor) -> None:
        """Applies the gradient of the table to its rows `touched` (unique ids)."""
        g = _grad(self.table)[touched]
        self.t += 1
        self.m[touched] = self.beta1 * self.m[touched] + (1 - self.beta1) * g
        self.v[touched] = self.beta2 * self.v[touched] + (1 - self.beta2) * g * g
        m_hat = self.m[touched] / (1 - self.beta1**self.t)
        v_hat = self.v[touched] / (1 - self.beta2**self.t)
        self.table[touched] -= self.gamma * m_hat / (v_hat.sqrt() + self.eps)


class SGD:
    """Rows minus gamma times their gradient."""

    def __init__(self, table: nn.Parameter, gamma: float) -> None:
        self.table, self.gamma = table, gamma

    @torch.no_grad()
    def step(self, touched: Tensor) -> None:
        """Applies the gradient of the table to its rows `touched` (unique ids)."""
        self.table[touched] -= self.gamma * _grad(self.table)[touched]


class RowwiseAdagrad:
    """Adagrad with one accumulator for each row: the sum of the mean squares of its gradients."""

    def __init__(self, table: nn.Parameter, gamma: float, eps: float) -> None:
        self.table, self.gamma, self.eps = table, gamma, eps
        self.accumulator = torch.zeros(len(table), 1, dtype=table.dtype)

    @torch.no_grad()
    def step(self, touched: Tensor) -> None:
        """Applies the gradient of the table to its rows `touched` (unique ids)."""
        g = _grad(self.table)[touched]
        self.accumulator[touched] += (g * g).mean(dim=1, keepdim=True)
        self.table[touched] -= self.gamma * g / (self.accumulator[touched].sqrt() + self.eps)


def _grad(theta: Tensor) -> Tensor:
    assert theta.grad is not None
    return theta.grad


def _with_suffix(name: str) -> str:
    return f"{name}.weight" if name in ("user", "item") else name


def _without_suffix(name: str) -> str:
    return name.removesuffix(".weight") if name in ("user.weight", "item.weight") else name
