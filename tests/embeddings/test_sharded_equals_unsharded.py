"""Steps over sharded rows give the weights of a plain model in one process, however the tables are cut."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from invdist.config.registry import STRATEGIES
from invdist.embeddings import row_moves
from invdist.embeddings.comm import Comm
from invdist.embeddings.exchange import Pairs
from invdist.embeddings.shared_memory import connect
from invdist.learning.strategy import Setting
from invdist.models.build import build_recommender
from tests.distributed import run_ranks
from tests.embeddings.sharded import (
    DIM,
    ITEMS,
    MODELS,
    SHARDINGS,
    USERS,
    largest_difference,
    local_weights,
    small_spec,
    steps,
    whole_weights,
)
from tests.oracle.textbook import Textbook

OPTIMIZERS = ("adam", "sgd", "rowwise_adagrad")
COMBINATIONS = [
    *product(MODELS, OPTIMIZERS, SHARDINGS),
    ("gmf", "adam", "data_parallel/row_wise"),
    ("gmf", "adam", "data_parallel/table_wise"),
]
STEPS, SEED = 8, 3
SCORED = Pairs(torch.tensor([3, 3, 0, USERS - 1, 3, 0, 1]), torch.tensor([5, 2, 5, 5, ITEMS - 1, 0, 5]))


def _train(rank: int, ranks: int, as_on_gpu: bool) -> list[tuple]:
    """First and last weights of every combination, all in one start of the ranks.

    `as_on_gpu`: through gloo and without reading a value on the way; else by shared memory, with exact sizes.
    """
    if as_on_gpu:
        row_moves.reads_are_free = lambda device: False
    comm = Comm() if as_on_gpu else connect()
    results = []
    for model, optimizer, sharding in COMBINATIONS:
        recommender = build_recommender(
            small_spec(model=model, optimizer=optimizer, sharding=sharding), torch.device("cpu"), comm
        )
        options = STRATEGIES.get("none").Config()
        strategy = STRATEGIES.get("none")(Setting(options, 0, 0.01, USERS, ITEMS), recommender)
        phase = strategy.phases(strategy.setting)[0]
        first, losses = local_weights(recommender), []
        for number, step in enumerate(steps(STEPS, SEED)):
            batch = step.cut(rank, ranks, number)
            exchange = recommender.exchange(*strategy.groups(phase, batch))
            losses.append(float(strategy.step(phase, batch, exchange).loss))
        # Ranks score different numbers of pairs, and of several ranks the last scores none.
        mine = len(SCORED.user) - rank * len(SCORED.user) // max(1, ranks - 1)
        scores = recommender.score(Pairs(SCORED.user[:mine], SCORED.item[:mine]))
        results.append((first, local_weights(recommender), losses, scores.tolist()))
    return results


@pytest.mark.parametrize(("ranks", "as_on_gpu"), [(1, False), (2, False), (4, False), (1, True), (2, True)])
def test_sharded_equals_unsharded(ranks: int, as_on_gpu: bool) -> None:
    by_rank = run_ranks(_train, ranks, as_on_gpu)
    first_of: dict[str, dict] = {}
    wrong = []
    for number, (model, optimizer, sharding) in enumerate(COMBINATIONS):
        first = whole_weights([results[number][0] for results in by_rank], model)
        # The first weights are a function of the seed alone.
        assert largest_difference(first, first_of.setdefault(model, first)) == 0
        oracle = Textbook(
            model, USERS, ITEMS, DIM, {n: w.double() for n, w in first.items()}, row_optimizer=optimizer, gamma=0.01
        )
        losses = [oracle.plain_step(*step.V) for step in steps(STEPS, SEED)]
        last = whole_weights([results[number][1] for results in by_rank], model)
        difference = largest_difference(last, oracle.weights())
        seen = [results[number][2] for results in by_rank]
        if difference > 1e-5 or any(rank != pytest.approx(losses, abs=1e-6) for rank in seen):
            wrong.append(f"{model} {optimizer} {sharding}: {difference:.1e}, losses {seen} for {losses}")
        expected = oracle.model(*SCORED).tolist()
        for scores in (results[number][3] for results in by_rank):
            if scores != pytest.approx(expected[: len(scores)], abs=1e-5):
                wrong.append(f"{model} {optimizer} {sharding}: scores {scores} for {expected}")
        assert largest_difference(first, last) > 1e-3, "nothing was learned: the comparison is empty"
    assert not wrong, "\n".join(wrong)
