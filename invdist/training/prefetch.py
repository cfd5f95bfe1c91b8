"""Batches with their exchange, two steps ahead: ids travel while earlier batches are computed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from invdist.data.stream.batches import Batch
from invdist.embeddings.exchange import Exchange
from invdist.learning.stopwatch import Stopwatch
from invdist.learning.strategy import Phase, Strategy


def with_exchange(
    batches: Iterable[Batch], strategy: Strategy, phase: Phase, watch: Stopwatch
) -> Iterator[tuple[Batch, Exchange]]:
    """Yields each batch on the model's device with its finished exchange.

    While a batch is computed, the ids of the next one are sent and those of the one after are counted. Every rank must
    take the same number of steps.
    """
    source = iter(batches)

    def start() -> tuple[Batch, Exchange] | None:
        with watch("stream"):
            batch = next(source, None)
        if batch is None:
            return None
        batch = batch.to(strategy.model.device)
        with watch("exchange"):
            return batch, strategy.model.exchange(*strategy.groups(phase, batch))

    following, after = start(), start()
    while following is not None:
        current, following = following, after
        with watch("exchange"):
            current[1].finish()
            if following is not None:
                following[1].advance()
        after = start()
        yield current
