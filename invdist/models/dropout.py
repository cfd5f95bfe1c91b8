"""Dropout whose random numbers are cheap on a CPU, where torch draws each with a call of its own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_LEVELS = 1 << 16


class Dropout(nn.Module):
    """`nn.Dropout`. On a CPU one random number of 64 bits decides about four values: `p` is rounded to 1 / 65,536."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self._dropped = min(round(p * _LEVELS), _LEVELS - 1)

    def forward(self, x: Tensor) -> Tensor:
        """`x` with each value dropped with probability `p`, and the others scaled to keep the mean."""
        if x.device.type != "cpu":
            return torch.dropout(x, self.p, self.training)
        mask = self.mask(x)
        return x if mask is None else x * mask

    def mask(self, x: Tensor) -> Tensor | None:
        """What `forward` multiplies an `x` on the CPU by; None: nothing."""
        if not self.training or not self._dropped:
            return None
        bits = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(1 << 63), None)
        kept = bits.view(torch.int16)[: x.numel()].view(x.shape) >= self._dropped - _LEVELS // 2
        return kept.to(x.dtype).mul_(_LEVELS / (_LEVELS - self._dropped))
