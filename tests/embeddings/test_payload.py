"""Embeddings and gradients in bf16 between ranks: half the bytes, rounded on the way, tables in fp32."""

from __future__ import annotations

import pytest
import torch

from invdist.embeddings.comm import Comm
from invdist.embeddings.exchange import Pairs
from invdist.embeddings.shared_memory import connect
from invdist.models.build import build_recommender
from tests.distributed import run_ranks
from tests.embeddings.sharded import small_spec

PAIRS = Pairs(torch.tensor([0, 3, 3, 7, 12]), torch.tensor([1, 1, 5, 16, 9]))
DISTINCT = Pairs(torch.tensor([0, 3, 7, 12]), torch.tensor([1, 5, 16, 9]))
"""Ranks that share memory may show gradients of repeated rows in fp32 as they are, in bf16 always summed."""


def _moves(rank: int, ranks: int, by_gloo: bool) -> dict[str, list]:
    """Rows, summed gradients and bytes of a pull and a push, with each payload."""
    comm = Comm() if by_gloo else connect()
    found, sent = {}, 0
    for payload in ("fp32", "bf16"):
        model = build_recommender(small_spec(payload=payload), torch.device("cpu"), comm)
        for pairs in (DISTINCT, PAIRS):
            exchange = model.exchange(pairs).finish()
            before = comm.traffic.bytes
            rows = model.rows.pull(exchange)[0]
            update = model.rows.push(exchange.routes[0], rows / 3)()
            sent = comm.traffic.bytes - before if pairs is DISTINCT else sent
        found[payload] = [rows.tolist(), update.values.tolist(), sent, str(model.rows.local_rows.dtype)]
    comm.barrier()  # a rank that ends takes its messages with it
    return found


@pytest.mark.parametrize("by_gloo", [False, True])
def test_bf16_is_rounded_on_the_way_and_half_the_bytes(by_gloo: bool) -> None:
    for found in run_ranks(_moves, 2, by_gloo):
        exact, rounded = (found[payload] for payload in ("fp32", "bf16"))
        rows = torch.tensor(exact[0])
        assert torch.equal(torch.tensor(rounded[0]), rows.bfloat16().float())
        assert torch.allclose(torch.tensor(rounded[1]), torch.tensor(exact[1]), rtol=2**-6)
        assert rounded[1] != exact[1]
        assert (exact[2], rounded[3]) == (2 * rounded[2], "torch.float32")
