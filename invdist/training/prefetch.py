"""Batches with their exchange, two steps ahead: ids travel while earlier batches are computed.

On a GPU all of it is on a stream of its own: the host, which waits for the sizes of messages, then waits for the
exchange of the next batch alone and not for the step that is being computed.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from invdist.data.stream.batches import Batch
from invdist.embeddings.exchange import Exchange
from invdist.learning.stopwatch import Stopwatch
from invdist.learning.strategy import Phase, Strategy

_MOST_HELD = 8


class SideStream:
    """A CUDA stream beside the one that computes. `cuda` is `torch.cuda`."""

    def __init__(self, cuda: Any = torch.cuda) -> None:
        self._cuda, self._stream = cuda, cuda.Stream()
        self._held: deque[tuple[Any, Any]] = deque()

    def __call__(self) -> contextlib.AbstractContextManager[Any]:
        """Inside, work is launched on this stream."""
        return self._cuda.stream(self._stream)

    def join(self) -> None:
        """What is computed from now on waits for what was launched on this stream."""
        self._cuda.current_stream().wait_stream(self._stream)

    def hold(self, used: Any) -> None:
        """Keeps `used`, made on this stream, until all that was launched so far to compute with it is over.

        The allocator would give its memory to the next exchange at once: it knows of the uses on this stream only.
        """
        event = self._cuda.Event()
        event.record()
        self._held.append((used, event))
        while self._held and (self._held[0][1].query() or len(self._held) > _MOST_HELD):
            self._held[0][1].synchronize()
            self._held.popleft()


class _SameStream:
    """On a CPU there is one stream."""

    def __call__(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def join(self) -> None:
        pass

    def hold(self, used: Any) -> None:
        del used


def with_exchange(
    batches: Iterable[Batch], strategy: Strategy, phase: Phase, watch: Stopwatch, side: SideStream | None = None
) -> Iterator[tuple[Batch, Exchange]]:
    """Yields each batch on the model's device with its finished exchange.

    While a batch is computed, the ids of the next one are sent and those of the one after are counted. Every rank must
    take the same number of steps.
    """
    source, device = iter(batches), strategy.model.device
    own = side or (SideStream() if device.type == "cuda" else _SameStream())

    def start() -> tuple[Batch, Exchange] | None:
        with watch("stream"):
            batch = next(source, None)
        if batch is None:
            return None
        with own(), watch("exchange"):
            batch = batch.to(device)
            return batch, strategy.model.exchange(*strategy.groups(phase, batch))

    following, after = start(), start()
    while following is not None:
        current, following = following, after
        with own(), watch("exchange"):
            current[1].finish()
            if following is not None:
                following[1].advance()
        after = start()
        own.join()
        yield current
        own.hold(current)
