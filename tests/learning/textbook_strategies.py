"""The strategies as their papers have them: one process, plain loops, no code of the package."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.learning.harness import Rows
from tests.oracle.textbook import Textbook, inverse_dual_loss


class TextbookStrategy:
    """Takes steps on whole batches; `method` and `options` as in a config, every option given."""

    def __init__(self, book: Textbook, method: str, options: dict[str, Any], rate: int, seed: int) -> None:
        self.book, self.options, self.rate, self.seed = book, options, rate, seed
        self._loss = getattr(self, f"_{method}")
        self.steps = 0
        self.memory: dict[int, dict[int, list[float]]] = {}
        """srns: for each user its candidates in order, each with its past scores, newest first."""

    def step(self, rows: Rows) -> float:
        """One gamma step; gives the loss before it."""
        book = self.book
        book.model.zero_grad()
        touched_user, touched_item, loss = self._loss(rows)
        loss.backward()
        for table, ids in zip(book.rows, (touched_user, touched_item), strict=True):
            table.step(ids.unique())
        book.dense.step()
        self.steps += 1
        return loss.item()

    def _mixture(self, rows: Rows, user: Tensor, item: Tensor, loss_of) -> tuple[Tensor, Tensor, Tensor]:
        labeled = F.binary_cross_entropy_with_logits(self.book.model(rows.user, rows.item), rows.label)
        unlabeled = loss_of(self.book.model(user, item)).mean()
        touched = torch.cat([rows.user, user]), torch.cat([rows.item, item])
        return *touched, labeled + self.options["weight"] * unlabeled

    def _ns(self, rows: Rows):
        return self._mixture(rows, rows.unlabeled_user, rows.unlabeled_item, lambda s: -F.logsigmoid(-s))

    def _idl(self, rows: Rows):
        def loss(s: Tensor) -> Tensor:
            return inverse_dual_loss(s)[0]

        return self._mixture(rows, rows.unlabeled_user, rows.unlabeled_item, loss)

    def _r_ce(self, rows: Rows):
        p = torch.sigmoid(self.book.model(rows.user, rows.item))
        right = torch.where(rows.label == 1, p, 1 - p)
        loss = (right.detach() ** self.options["b"] * -torch.log(right)).mean()
        return rows.user, rows.item, loss

    def _t_ce(self, rows: Rows):
        rate = self.options["max_drop"] * min(self.steps / self.options["ramp_steps"], 1)
        logit = self.book.model(rows.user, rows.item)
        dropped = self.dropped(logit.tolist(), rows.label.tolist(), rate)
        keep = [i for i in range(len(logit)) if i not in dropped]
        return rows.user, rows.item, F.binary_cross_entropy_with_logits(logit[keep], rows.label[keep])

    @staticmethod
    def dropped(logit: list[float], label: list[float], rate: float) -> set[int]:
        """The largest-loss positives, those of the smallest logits."""
        positive = sorted((i for i, y in enumerate(label) if y == 1), key=lambda i: logit[i])
        return set(positive[: int(rate * len(positive) + 1e-9)])

    def _dns(self, rows: Rows):
        M, users, items = self.options["candidates"], [], []
        for start in range(0, len(rows.unlabeled_user), M):
            user, item = rows.unlabeled_user[start : start + M], rows.unlabeled_item[start : start + M]
            scores = self._scores(user.tolist(), item.tolist())
            best = scores.index(max(scores))
            users.append(user[best])
            items.append(item[best])
        return self._mixture(rows, torch.stack(users), torch.stack(items), lambda s: -F.logsigmoid(-s))

    def _srns(self, rows: Rows):
        o = self.options
        fresh = rows.unlabeled_item.view(-1, o["fresh"]).tolist()
        best: dict[int, list[int]] = {}
        for u, candidates in zip(rows.user.tolist(), fresh, strict=True):
            if u not in best:
                self._refresh(u, candidates)
                best[u] = self._best(u)
        users = rows.user.repeat_interleave(self.rate)
        items = torch.tensor([item for u in rows.user.tolist() for item in best[u]])
        return self._mixture(rows, users, items, lambda s: -F.logsigmoid(-s))

    def _refresh(self, user: int, fresh: list[int]) -> None:
        old = self.memory.get(user, {})
        candidates = list(dict.fromkeys([*old, *fresh]))
        scores = self._scores([user] * len(candidates), candidates)
        key = {
            item: score / self.options["temperature"] + self._gumbel(user, item)
            for item, score in zip(candidates, scores, strict=True)
        }
        drawn = sorted(candidates, key=lambda item: -key[item])[: self.options["memory"]]
        now = {item: 1 / (1 + math.exp(-score)) for item, score in zip(candidates, scores, strict=True)}
        self.memory[user] = {item: [now[item], *old.get(item, [])][: self.options["history"]] for item in drawn}

    def _best(self, user: int) -> list[int]:
        weight = self.options["variance_weight"] * min(self.steps / self.options["ramp_steps"], 1)
        value = {}
        for item, past in self.memory[user].items():
            mean = sum(past) / len(past)
            value[item] = past[0] + weight * math.sqrt(sum((x - mean) ** 2 for x in past) / len(past))
        ranked = sorted(value, key=lambda item: -value[item])
        return [ranked[i % len(ranked)] for i in range(self.rate)]

    def _gumbel(self, user: int, item: int) -> float:
        text = f"int:{self.seed}\x1fstr:srns\x1fint:{self.steps}"
        noise = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
        word = _splitmix(_splitmix(noise + user) + item)
        return -math.log(-math.log(((word >> 11) + 0.5) / 2**53))

    @torch.no_grad()
    def _scores(self, user: list[int], item: list[int]) -> list[float]:
        return self.book.model(torch.tensor(user), torch.tensor(item)).tolist()


def _splitmix(state: int) -> int:
    """The SplitMix64 generator's output after `state`, on Python's integers."""
    mask = 2**64 - 1
    z = (state + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)
