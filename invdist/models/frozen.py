"""A trained model to score with: whole tables in memory, no optimizer, no ranks, no gradient."""

from __future__ import annotations

from torch import Tensor, nn

from invdist.models.backbone import Backbone


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

    @property
    def columns(self) -> int:
        """Columns of a row."""
        return self.user.shape[1]

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return self.backbone(self.user[user], self.item[item])


class Additive(Backbone):
    """No interaction: one number per user plus one per item minus a constant, the logit of a model of means."""

    columns = 1

    def __init__(self, overall: Tensor) -> None:
        super().__init__()
        self.overall = nn.Buffer(overall)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return user[..., 0] + item[..., 0] - self.overall
