"""Ranking metrics over all ranks, where each rank holds all scored rows of its users.

Per-user metrics are summed, exactly, so that they are the same at any number of ranks. For the AUC over all rows,
scores of different ranks must be compared: the ranks agree on one range of scores per rank and send each distinct
score, with its row counts, to the rank of its range. The result is exact and no rank holds all rows. Above
`exact_rows` rows the ranks add up a histogram instead.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from invdist.evaluation.metrics import ScoredRows, Totals, doubled_wins
from invdist.runtime.errors import UserError

_EXACT_ROWS = 100_000_000
_BINS = 65_536
_SAMPLES_PER_RANK = 256
_MESSAGE_BYTES = 400


def distributed_metrics(
    user: np.ndarray,
    label: np.ndarray,
    score: np.ndarray,
    k: int = 10,
    group: dist.ProcessGroup | None = None,
    exact_rows: int = _EXACT_ROWS,
) -> dict[str, float | int]:
    """`ranking_metrics` of the rows of all ranks of `group`: the same result on every rank.

    Every rank calls it with the rows of its own users (`user % world_size == rank`), maybe none. All metrics are
    exact up to `exact_rows` rows in total. Above, `auc` comes from a histogram; if it may be inexact, the key
    `auc_error_bound` is added: the most that it can be off (about 1 / (2 x 65,536) if the ranks have similar scores).
    Bad rows on one rank raise the same `UserError` on all.
    """
    ranks = _Ranks(group)
    rows, problem = None, ""
    try:
        rows = ScoredRows.checked(user, label, score, k)
        if np.any(rows.user % ranks.size != ranks.rank):
            problem = "it holds rows of users that belong to another rank (user % world_size)"
    except UserError as error:
        problem = str(error)
    sums = Totals.of(rows, k).sums if rows and not problem else np.zeros((Totals.SIZE, 3), dtype=np.int64)
    gathered = ranks.gather(np.append(sums.ravel(), int(bool(problem))))
    _raise_on_every_rank(ranks, gathered[:, -1] > 0, problem)
    assert rows is not None

    totals = Totals(gathered[:, :-1].sum(axis=0).reshape(Totals.SIZE, 3))
    totals.check_both_classes()
    shares = gathered[:, 0] / totals["rows"]
    if totals["rows"] <= exact_rows:
        auc, bound = _exact_auc(ranks, rows, shares), 0.0
    else:
        auc, bound = _histogram_auc(ranks, rows, shares)
    return totals.metrics(auc) | ({"auc_error_bound": bound} if bound else {})


def rows_by_user(columns: Sequence[np.ndarray], group: dist.ProcessGroup | None = None) -> list[np.ndarray]:
    """Sends rows, of which every rank has some, to the ranks of their users (`user % world_size`).

    `columns` are integer arrays of one length, users first. Gives the columns of this rank's rows as int64.
    """
    ranks = _Ranks(group)
    table = np.stack([column.astype(np.int64) for column in columns], axis=1)
    owner = table[:, 0] % ranks.size
    order = np.argsort(owner, kind="stable")
    received = ranks.exchange(table[order], np.bincount(owner, minlength=ranks.size))
    return [np.ascontiguousarray(column) for column in received.T]


class _Ranks:
    """Collectives on numpy arrays."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.device = "cpu" if "cpu:" in str(dist.get_backend_config(group)) else "cuda"

    def gather(self, array: np.ndarray) -> np.ndarray:
        """[world_size, *shape] from arrays of one shape."""
        mine = torch.from_numpy(array).to(self.device)
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(everyone, mine, group=self.group)
        return torch.stack(everyone).cpu().numpy()

    def sum(self, array: np.ndarray) -> np.ndarray:
        """Sum over ranks of integer arrays of one shape."""
        total = torch.from_numpy(array).to(self.device)
        dist.all_reduce(total, group=self.group)
        return total.cpu().numpy()

    def exchange(self, table: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Sends the first `counts[0]` rows of an int64 `table` to rank 0, and so on; returns what it received."""
        incoming = self.gather(counts)[:, self.rank]
        received = torch.empty((int(incoming.sum()), table.shape[1]), dtype=torch.int64, device=self.device)
        sent = torch.from_numpy(np.ascontiguousarray(table)).to(self.device)
        dist.all_to_all_single(received, sent, incoming.tolist(), counts.tolist(), group=self.group)
        return received.cpu().numpy()


def _raise_on_every_rank(ranks: _Ranks, refused: np.ndarray, problem: str) -> None:
    if not refused.any():
        return
    text = np.zeros(_MESSAGE_BYTES, dtype=np.uint8)
    encoded = problem.encode()[:_MESSAGE_BYTES]
    text[: len(encoded)] = np.frombuffer(encoded, dtype=np.uint8)
    first = int(np.flatnonzero(refused)[0])
    message = ranks.gather(text)[first].tobytes().rstrip(b"\0").decode(errors="ignore")
    raise UserError(f"rank {first} of {ranks.size} cannot evaluate its rows: {message}")


def _shared_quantiles(ranks: _Ranks, rows: ScoredRows, shares: np.ndarray, count: int) -> np.ndarray:
    """About `count` scores that cut the rows of all ranks into even parts; ascending, equal on every rank."""
    wanted: list[int] = np.ceil(shares * count).astype(int).tolist()
    mine = np.zeros(max(wanted))
    # Ranks with similar scores would all choose the same quantiles. Shifted by rank, they are spread evenly.
    places = (np.arange(wanted[ranks.rank]) + (ranks.rank + 0.5) / ranks.size) / max(wanted[ranks.rank], 1)
    if len(places):
        through = np.cumsum(np.bincount(rows.level, minlength=len(rows.scores)))
        mine[: len(places)] = rows.scores[np.searchsorted(through, places * through[-1], side="right")]
    everyone = ranks.gather(mine)
    return np.sort(np.concatenate([values[:n] for values, n in zip(everyone, wanted, strict=True)]))


def _exact_auc(ranks: _Ranks, rows: ScoredRows, shares: np.ndarray) -> float:
    quantiles = _shared_quantiles(ranks, rows, shares, _SAMPLES_PER_RANK * ranks.size)
    edges = quantiles[np.arange(1, ranks.size) * len(quantiles) // ranks.size]
    # Ranges are cut at scores, never between equal ones, so that ties are on one rank.
    cuts = np.searchsorted(rows.scores, edges, side="right")
    counts = np.diff(np.concatenate([[0], cuts, [len(rows.scores)]]))
    table = np.stack([rows.scores.view(np.int64), *rows.counts()], axis=1)
    bits, positives, negatives = ranks.exchange(table, counts).T

    scores, level = np.unique(np.ascontiguousarray(bits).view(np.float64), return_inverse=True)
    by_score = np.zeros((2, len(scores)), dtype=np.int64)
    np.add.at(by_score[0], level, positives)
    np.add.at(by_score[1], level, negatives)
    mine = np.array([doubled_wins(*by_score), *by_score.sum(axis=1)], dtype=np.int64)
    wins, positives, negatives = ranks.gather(mine).T
    below = np.cumsum(negatives) - negatives
    total = int(wins.sum() + 2 * positives @ below)
    return total / (2 * int(positives.sum()) * int(negatives.sum()))


def _histogram_auc(ranks: _Ranks, rows: ScoredRows, shares: np.ndarray) -> tuple[float, float]:
    edges = np.unique(_shared_quantiles(ranks, rows, shares, _BINS))
    # Bin 2i+1 is the score edges[i] itself, bin 2i the open range below it: a score of many rows becomes an edge,
    # and its ties are exact. Only open ranges can be wrong, by half of their mixed pairs.
    below, through = (np.searchsorted(edges, rows.scores, side=side) for side in ("left", "right"))
    counts = np.zeros((2, 2 * len(edges) + 1), dtype=np.int64)
    for total, part in zip(counts, rows.counts(), strict=True):
        np.add.at(total, below + through, part)
    positives, negatives = ranks.sum(counts).astype(np.float64)
    pairs = positives.sum() * negatives.sum()
    below = np.cumsum(negatives) - negatives
    auc = positives @ (below + negatives / 2) / pairs
    return float(auc), float(positives[::2] @ negatives[::2] / 2 / pairs)
