"""Labels that train again after a model has learned from them: they are mixed with what the model predicted.

A model that grew sees a sample of the labels that it has learned from, a share r of them. As they are, it would fit
them better from epoch to epoch, and with them what is chance in the sample: another chance each day. So each label that
is seen counts with the share r, and for those that are not seen stands p0, the probability that the older model gave
the pair. Together they are

    r * label + (1 - r) * p0

Where nothing new is learned, the gradient of p0 is zero: of the noise of the sample, the share r is left. If all labels
are seen, r is 1, and this is the label.
"""

from __future__ import annotations

import dataclasses

import torch

from invdist.data.stream.batches import Batch
from invdist.embeddings.exchange import Exchange
from invdist.models.recommender import Recommender


class Replay:
    """Softens the labels of batches. `older` is the model as it was before it grew, `share` is r."""

    def __init__(self, older: Recommender, share: float) -> None:
        self._older, self._share = older, share

    @torch.no_grad()
    def __call__(self, batch: Batch, exchange: Exchange) -> Batch:
        """The batch with what is said of its labels that train again; every rank calls it.

        The first group of the `exchange` is the labeled pairs.
        """
        assert batch.replayed is not None
        rows = self._older.pull(exchange)[0]
        with self._older.evaluating():
            said = self._older.logits(rows, exchange.routes[0]).sigmoid()
        label = torch.lerp(batch.label, said, (1 - self._share) * batch.replayed)
        return dataclasses.replace(batch, label=label)
