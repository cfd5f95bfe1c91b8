"""Per-user memory of candidate items with the scores they got before: what `srns` keeps on the owner of a user.

Shapes: `m` distinct users of one call, `S1` slots of a user's memory, `S2` fresh candidates, `H` past scores.
Memory is `users x S1 x (4 + 4H)` bytes over all ranks, whatever is trained for however long.
"""

from __future__ import annotations

import torch
from torch import Tensor

from invdist.data import hashing

_EMPTY = -1


class CandidateMemory:
    """The memory of the users `[first, first + users)`. An empty slot has item -1, a missing score is NaN."""

    def __init__(self, first: int, users: int, slots: int, history: int, device: torch.device) -> None:
        self.first = first
        self.item = torch.full((users, slots), _EMPTY, dtype=torch.int32, device=device)
        self.past = torch.full((users, slots, history), torch.nan, device=device)
        """Probabilities that the slot's item was given at past refreshes, newest first."""

    def items(self, user: Tensor) -> Tensor:
        """The candidates of users: int64 `[m, S1]`, -1 where a slot is empty."""
        return self.item[user - self.first].long()

    def renumber(self, items: Tensor) -> None:
        """Gives every item i the number `items[i]`; slots of items that are gone (-1) become empty."""
        items = items.to(self.item.device, self.item.dtype)
        self.item = torch.where(self.item == _EMPTY, _EMPTY, items[self.item.long().clamp(min=0)])
        self.past[self.item == _EMPTY] = torch.nan

    def refresh(
        self, user: Tensor, logit: Tensor, fresh: Tensor, fresh_logit: Tensor, *, temperature: float, noise: int
    ) -> None:
        """Draws the memory of distinct users anew from itself and `fresh`, and notes every score.

        `logit [m, S1]` and `fresh_logit [m, S2]` are present scores. Candidates are drawn without repetition
        with chances ~ exp(logit / temperature): the largest of `logit / temperature + Gumbel noise`. The noise
        is a hash of (noise, user, item), so it is the same wherever and in whatever order candidates stand.
        """
        at, slots = user - self.first, self.item.shape[1]
        item = torch.cat([self.items(user), fresh], 1)
        logit = torch.cat([logit, fresh_logit], 1)
        known = torch.cat([self.past[at], self.past.new_full((*fresh.shape, self.past.shape[2]), torch.nan)], 1)
        usable = (item != _EMPTY) & ~_repeated(item)
        key = logit.double() / temperature + _gumbel(noise, user.unsqueeze(1), item)
        drawn = key.masked_fill(~usable, -torch.inf).topk(slots, 1).indices

        usable = usable.gather(1, drawn)
        score = torch.sigmoid(logit.gather(1, drawn)).unsqueeze(2)
        before = known.gather(1, drawn.unsqueeze(2).expand(-1, -1, known.shape[2]))[:, :, :-1]
        past = torch.cat([score, before], 2)
        self.item[at] = item.gather(1, drawn).masked_fill(~usable, _EMPTY).int()
        self.past[at] = past.masked_fill(~usable.unsqueeze(2), torch.nan)

    def best(self, user: Tensor, count: int, variance_weight: float) -> Tensor:
        """The `count` candidates of each user with the largest `score + variance_weight * deviation`: `[m, count]`.

        The score is that of the last refresh, the deviation that of all scores remembered. Where a user has fewer
        candidates they are repeated.
        """
        past, item = self.past[user - self.first], self.items(user)
        value = past[:, :, 0] + variance_weight * _deviation(past)
        ranked = value.masked_fill(item == _EMPTY, -torch.inf).argsort(dim=1, descending=True, stable=True)
        filled = (item != _EMPTY).sum(1, keepdim=True)
        turn = torch.arange(count, device=item.device) % filled
        return item.gather(1, ranked.gather(1, turn))


def _deviation(past: Tensor) -> Tensor:
    """Standard deviation over the last dimension of what is not NaN; 0 where that is one value."""
    count = (~past.isnan()).sum(-1).clamp(min=1)
    mean = past.nansum(-1) / count
    return ((past - mean.unsqueeze(-1)).square().nansum(-1) / count).sqrt()


def _repeated(item: Tensor) -> Tensor:
    """Which entries of each row are repetitions of an entry further left."""
    ordered, order = item.sort(dim=1, stable=True)
    again = torch.zeros_like(ordered, dtype=torch.bool)
    again[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    return torch.zeros_like(again).scatter_(1, order, again)


def _gumbel(noise: int, user: Tensor, item: Tensor) -> Tensor:
    """Standard Gumbel noise (float64) of each (user, item), a function of its arguments alone."""
    word = _mix(_mix(user + _signed(noise)) + item)
    chance = ((_shift(word, 11)).double() + 0.5) * 2.0**-53
    return -torch.log(-torch.log(chance))


def _mix(word: Tensor) -> Tensor:
    """The finalizer of SplitMix64 on int64, whose products wrap around."""
    word = word + _signed(0x9E3779B97F4A7C15)
    word = (word ^ _shift(word, 30)) * _signed(0xBF58476D1CE4E5B9)
    word = (word ^ _shift(word, 27)) * _signed(0x94D049BB133111EB)
    return word ^ _shift(word, 31)


def _shift(word: Tensor, bits: int) -> Tensor:
    """A logical shift to the right."""
    return (word >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word


def noise_of(seed: int, step: int) -> int:
    """The `noise` of one step of one run."""
    return hashing.key(seed, "srns", step)
