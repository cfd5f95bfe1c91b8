"""The Inverse Gradient over sharded rows takes the directions of the textbook algorithm and ends at its weights."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from invdist.embeddings import row_moves
from invdist.embeddings.comm import Comm
from invdist.embeddings.exchange import Pairs
from invdist.embeddings.shared_memory import connect
from invdist.learning.inverse_gradient import InverseGradient
from invdist.learning.stopwatch import Stopwatch
from invdist.learning.strategy import unlabeled
from invdist.models.build import build_recommender
from tests.distributed import run_ranks
from tests.embeddings.sharded import (
    DIM,
    ITEMS,
    SHARDINGS,
    USERS,
    Step,
    largest_difference,
    local_weights,
    small_spec,
    steps,
    whole_weights,
)
from tests.oracle.textbook import Textbook

STEPS = 50
PAPER = (-1.0, 0.0, 1.0)
LINE_SEARCH = (-3.0, -1.0, -0.3, 0.0, 0.3, 1.0, 3.0)
MARGIN = 5e-6  # of the winner before the next, at every step: far above what float32 can confuse


@dataclass(frozen=True, slots=True)
class Case:
    """A run in which all three directions win, and by `MARGIN`.

    alpha and seed are such that the textbook itself ends at the same weights in float32 and in float64: where
    rounding is magnified from step to step, no two correct programs agree.
    """

    model: str
    inner: str
    candidates: tuple[float, ...]
    alpha: float
    seed: int


CASES = [
    Case("gmf", "sign", PAPER, 0.01, 5),
    Case("gmf", "sign", LINE_SEARCH, 0.03, 9),
    Case("gmf", "sgd", PAPER, 1.0, 5),
    Case("gmf", "sgd", LINE_SEARCH, 1.0, 42),
    Case("neumf", "sign", PAPER, 0.03, 15),
    Case("neumf", "sign", LINE_SEARCH, 0.03, 17),
    Case("neumf", "sgd", PAPER, 0.3, 2),
    Case("neumf", "sgd", LINE_SEARCH, 1.0, 0),
]
COMBINATIONS = [
    (case, sharding)
    for case in CASES
    for sharding in SHARDINGS
    if "data_parallel" not in sharding or case.candidates == LINE_SEARCH
] + [(CASES[1], "data_parallel/row_wise")]


def _train(rank: int, ranks: int, as_on_gpu: bool) -> list[tuple]:
    """First weights, directions, candidate losses and last weights of every case and sharding type.

    `as_on_gpu`: through gloo, the direction chosen and committed without reading a value on the way.
    """
    if as_on_gpu:
        row_moves.reads_are_free = lambda device: False
    comm = Comm() if as_on_gpu else connect()
    results = []
    for case, sharding in COMBINATIONS:
        model = build_recommender(small_spec(model=case.model, sharding=sharding), torch.device("cpu"), comm)
        algorithm = InverseGradient(model, alpha=case.alpha, inner=case.inner, candidates=case.candidates)
        first, details, watch = local_weights(model), [], Stopwatch()
        for number, step in enumerate(steps(STEPS, case.seed)):
            batch = step.cut(rank, ranks, number)
            exchange = model.exchange(Pairs(batch.user, batch.item), unlabeled(batch))
            details.append(algorithm.step(batch, exchange, watch).read())
        directions = [detail["direction"] for detail in details]
        losses = [detail["candidate_losses"] for detail in details]
        results.append((first, directions, losses, local_weights(model)))
    return results


@pytest.fixture(scope="module")
def expected() -> dict[Case, tuple[list[float], Tensor, dict[str, Tensor]]]:
    """What the textbook algorithm does in each case; filled on first need, from first weights."""
    return {}


def _textbook(case: Case, first: dict[str, Tensor]) -> tuple[list[float], Tensor, dict[str, Tensor]]:
    oracle = Textbook(
        case.model,
        USERS,
        ITEMS,
        DIM,
        {name: weight.double() for name, weight in first.items()},
        gamma=0.01,
        alpha=case.alpha,
        inner=case.inner,
        candidates=case.candidates,
    )
    taken = [oracle.ig_step(step.V, step.U) for step in steps(STEPS, case.seed)]
    losses = torch.tensor([losses for _, losses in taken], dtype=torch.float64)
    best, second = losses.sort(dim=1).values[:, :2].unbind(1)
    assert (second - best).min() > MARGIN, case
    directions = [direction for direction, _ in taken]
    assert {(d > 0) - (d < 0) for d in directions} == {-1, 0, 1}, case
    return directions, losses, oracle.weights()


@pytest.mark.parametrize(
    ("ranks", "as_on_gpu"),
    [(1, False), (2, False), pytest.param(4, False, marks=pytest.mark.slow), (2, True)],
)
def test_directions_and_weights_are_those_of_the_textbook(ranks: int, as_on_gpu: bool, expected: dict) -> None:
    by_rank = run_ranks(_train, ranks, as_on_gpu, timeout=400)
    wrong = []
    for number, (case, sharding) in enumerate(COMBINATIONS):
        parts = [results[number] for results in by_rank]
        if case not in expected:
            expected[case] = _textbook(case, whole_weights([part[0] for part in parts], case.model))
        directions, losses, last = expected[case]
        difference = largest_difference(whole_weights([part[3] for part in parts], case.model), last)
        off = max(float((torch.tensor(part[2]) - losses).abs().max()) for part in parts)
        if any(part[1] != directions for part in parts) or difference > 1e-5 or off > MARGIN:
            same = [a == b for a, b in zip(parts[0][1], directions, strict=True)]
            first_off = same.index(False) if False in same else None
            wrong.append(f"{case} {sharding}: weights off {difference:.1e}, losses {off:.1e}, step {first_off}")
    assert not wrong, "\n".join(wrong)


def test_the_data_has_every_kind_of_id() -> None:
    def users(step: Step) -> tuple[set[int], set[int]]:
        return set(step.V[0].tolist()), set(step.U[0].tolist())

    for case in CASES:
        run = steps(STEPS, case.seed)
        sets = [users(step) for step in run]
        many = 0.8 * STEPS
        assert sum(len(V) < len(step.V[0]) for step, (V, _) in zip(run, sets, strict=True)) > many, "repeats"
        assert sum(bool(V & U) for V, U in sets) > many, "ids in both"
        assert sum(bool(V - U) for V, U in sets) > many, "V ids untouched by U"
        assert sum(bool(U - V) for V, U in sets) > many, "U ids untouched by V"
        for ranks in (2, 4):
            cuts = [[step.cut(rank, ranks, n) for rank in range(ranks)] for n, step in enumerate(run)]
            assert any(len(cut.user) == 0 for ranks_of in cuts for cut in ranks_of), "a rank without rows"
            assert any(set(a.user.tolist()) & set(b.user.tolist()) for a, b, *_ in cuts), "repeats across ranks"
            assert any(len(a.user) != len(b.user) for a, b, *_ in cuts), "uneven"
