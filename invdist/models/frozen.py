"""A trained model to score with: whole tables in memory, no optimizer, no ranks, no gradient."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from invdist.models.backbone import Backbone

TILE = 256
"""Pairs that `score_in_tiles` computes at once; fewer are padded to it."""


class FrozenModel(nn.Module):
    """Rows of all users `[users, columns]` and items `[items, columns]` and the backbone over them, in float32.

    Called with indices (int64 `[n]` each) it gives logits `[n]`.
    """

    def __init__(self, user: Tensor, item: Tensor, backbone: Backbone) -> None:
        super().__init__()
        self.user = nn.Buffer(user)
        self.item = nn.Buffer(item)
        self.backbone = backbone
        self.requires_grad_(False)
        self.eval()

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return self.backbone(self.user[user], self.item[item])


@torch.inference_mode()
def score_in_tiles(model: Callable[[Tensor, Tensor], Tensor], user: Tensor, item: Tensor) -> Tensor:
    """Logits `[n]` of pairs of indices, computed in tiles of one fixed shape.

    The logit of a pair is then equal to the bit whatever is scored with it. Matrix products choose their kernel, and
    with it the order of their sums, by the number of rows. Threads divide rows too, so the caller must have set one
    thread per operation (`runtime.process.one_thread`).
    """
    if not len(user):
        return torch.empty(0)
    tiles = zip(*(pad(ids, (0, -len(ids) % TILE)).split(TILE) for ids in (user, item)), strict=True)
    return torch.cat([model(users, items) for users, items in tiles])[: len(user)]


class Additive(Backbone):
    """No interaction: one number per user plus one per item minus a constant, the logit of a model of means."""

    columns = 1

    def __init__(self, overall: Tensor) -> None:
        super().__init__()
        self.overall = nn.Buffer(overall)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return user[..., 0] + item[..., 0] - self.overall
