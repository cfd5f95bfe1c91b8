"""Trying an update is what committing it would be, and leaves everything as it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from invdist.embeddings.exchange import Pairs
from invdist.embeddings.row_moves import store_rows
from invdist.models.build import build_recommender, indexed_device
from invdist.models.recommender import Recommender, Update
from tests.embeddings.sharded import ITEMS, MODELS, USERS, small_spec

CPU = torch.device("cpu")
PAIRS = Pairs(torch.tensor([0, 3, 3, 7]), torch.tensor([1, 1, 5, 16]))
OTHERS = Pairs(torch.tensor([3, 8]), torch.tensor([5, 2]))


@pytest.fixture(scope="module", autouse=True)
def _alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def an_update(model: Recommender, scale: float = 0.1) -> Update:
    """Some update of the rows that OTHERS name, and of the dense weights."""
    exchange = model.exchange(OTHERS)
    rows = model.pull(exchange)[0]
    gradient, _ = model.gradient(model.logits(rows, exchange.routes[0]).sum(), 2, rows, exchange.routes[0])
    return gradient.map(lambda value: scale * value)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_candidates_are_what_committing_them_would_be(model: str, dropout: float) -> None:
    recommender = build_recommender(small_spec(model=model, dropout=dropout), CPU)
    step = an_update(recommender)
    exchange = recommender.exchange(PAIRS)
    rows = recommender.pull(exchange)[0]
    before = [parameter.detach().clone() for parameter in recommender.backbone.parameters()]
    deltas = recommender.rows.lookup_delta(exchange.routes[0], step.rows)
    candidates = [-3.0, -1.0, 0.0, 0.5]
    logits = recommender.candidate_logits(rows, exchange.routes[0], deltas, step, candidates)
    assert logits.shape == (4, 4)
    assert all(torch.equal(a, b) for a, b in zip(recommender.backbone.parameters(), before, strict=True))
    assert recommender.backbone.training

    committed = 0.0
    for number, c in enumerate(candidates):
        recommender.add(step, c - committed)
        committed = c
        assert torch.allclose(recommender.score(PAIRS), logits[number], atol=1e-6)
        assert torch.allclose(recommender.pull(recommender.exchange(PAIRS))[0], rows + c * deltas.dense(), atol=1e-6)
    assert logits[0].ne(logits[2]).any()


def test_bf16_computes_close_to_fp32_and_answers_in_fp32() -> None:
    exact, rough = (build_recommender(small_spec(model="neumf", precision=p), CPU) for p in ("fp32", "bf16"))
    expected, seen = exact.score(PAIRS), rough.score(PAIRS)
    assert seen.dtype == torch.float32
    assert not torch.equal(seen, expected), "bf16 is not in use"
    assert torch.allclose(seen, expected, atol=0.05)
    rough.step(an_update(rough))  # gradients flow through it
    assert all(p.dtype == torch.float32 for p in rough.backbone.parameters())


@pytest.mark.parametrize("model", MODELS)
def test_bias_columns_add_to_the_logit(model: str) -> None:
    recommender = build_recommender(small_spec(model=model, bias=True), CPU)
    before = recommender.score(PAIRS)
    column = recommender.rows.columns - 4
    with torch.no_grad():
        recommender.rows.local_rows[3, column] += 2.0  # user 3
        recommender.rows.local_rows[USERS + 16, column] -= 1.0  # item 16
    assert torch.allclose(recommender.score(PAIRS) - before, torch.tensor([0.0, 2.0, 2.0, -1.0]), atol=1e-5)


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "rowwise_adagrad"])
def test_weight_decay_falls_on_touched_rows_alone(optimizer: str) -> None:
    recommender = build_recommender(small_spec(optimizer=optimizer, weight_decay=0.5), CPU)
    before = recommender.rows.local_rows.clone()
    update = an_update(recommender, scale=0.0)
    recommender.step(update)
    touched = torch.tensor([3, 8, USERS + 2, USERS + 5])
    expected = before.clone()
    expected[touched] *= 1 - 0.01 * 0.5
    assert torch.allclose(recommender.rows.local_rows, expected, atol=1e-7)
    assert len(before) == USERS + ITEMS


@pytest.mark.parametrize("columns", [4, 8, 20])
def test_store_rows_is_assignment(columns: int) -> None:
    table, values = torch.randn(9, columns), torch.randn(3, columns)
    rows, expected = torch.tensor([7, 0, 4]), table.clone()
    expected[rows] = values
    store_rows(table, rows, values)
    assert torch.equal(table, expected)
    store_rows(table, rows[:0], values[:0])
    assert torch.equal(table, expected)


@pytest.mark.parametrize("model", MODELS)
def test_candidates_are_compared_in_float32_also_under_bf16(model: str) -> None:
    logits = []
    for precision in ("fp32", "bf16"):
        recommender = build_recommender(small_spec(model=model, precision=precision), CPU)
        torch.manual_seed(0)
        step = an_update(build_recommender(small_spec(model=model), CPU), scale=1e-4)
        exchange = recommender.exchange(PAIRS)
        rows = recommender.pull(exchange)[0]
        deltas = recommender.rows.lookup_delta(exchange.routes[0], step.rows)
        logits.append(recommender.candidate_logits(rows, exchange.routes[0], deltas, step, [-1.0, 0.0, 1.0]))
    assert torch.equal(logits[0], logits[1])


def test_the_checksum_is_of_bits() -> None:
    recommender = build_recommender(small_spec(model="neumf"), CPU)
    first = recommender.checksum()
    assert first == first.round(), "a whole number that float64 has exactly"
    assert torch.equal(recommender.checksum(), first)
    weight = recommender.backbone.get_parameter("tower.0.weight")
    with torch.no_grad():
        kept = weight[0, :2].clone()
        weight[0, 0], weight[0, 1] = kept[1], kept[0]
        assert recommender.checksum() != first, "two weights exchanged"
        weight[0, :2] = kept
        assert recommender.checksum() == first
        weight[0, 0] = torch.nextafter(kept[0], torch.tensor(9.0))
        assert recommender.checksum() != first, "the last bit of one weight"
        weight.fill_(torch.nan)
        assert recommender.checksum().isfinite()


def test_a_device_is_given_its_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert indexed_device(torch.device("cuda")) == torch.device("cuda:3")
    assert indexed_device(torch.device("cuda:1")) == torch.device("cuda:1")
    assert indexed_device(CPU) == CPU
