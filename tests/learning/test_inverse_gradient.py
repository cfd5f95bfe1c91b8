"""Directions that must win, the choice itself, and what happens when a rank goes wrong."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from invdist.data.stream.batches import Batch
from invdist.embeddings.exchange import Pairs
from invdist.embeddings.row_moves import SignStep
from invdist.learning.inverse_gradient import (
    InverseGradient,
    RanksDisagree,
    choose,
    choose_on_host,
    tie_order,
)
from invdist.learning.losses import log_loss
from invdist.learning.stopwatch import Stopwatch
from invdist.learning.strategy import Record, TrainingDiverged, unlabeled
from invdist.models.build import build_recommender
from invdist.models.recommender import Recommender
from invdist.runtime.errors import UserError
from invdist.training.history import direction_name
from tests.distributed import run_ranks
from tests.embeddings.sharded import (
    DIM,
    ITEMS,
    USERS,
    Step,
    largest_difference,
    local_weights,
    small_spec,
    steps,
    whole_weights,
)
from tests.oracle.textbook import Textbook

PAPER = (-1.0, 0.0, 1.0)
LINE_SEARCH = (-3.0, -1.0, -0.3, 0.0, 0.3, 1.0, 3.0)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def batch(V: list[tuple[int, int, float]], U: list[tuple[int, int]]) -> Batch:
    """Labeled (user, item, label) and unlabeled (user, item) rows."""
    user, item, label = (torch.tensor([row[i] for row in V]) for i in range(3))
    other = [torch.tensor([pair[i] for pair in U], dtype=torch.int64) for i in range(2)]
    return Batch(user, item, label.float(), other[0], other[1], len(V), 0)


def ig_step(algorithm: InverseGradient, rows: Batch) -> Record:
    exchange = algorithm.model.exchange(Pairs(rows.user, rows.item), unlabeled(rows))
    return algorithm.step(rows, exchange, Stopwatch())


def with_logit(model: Recommender, user: int, item: int, wanted: float) -> None:
    """Sets the output bias so that one pair has the wanted logit."""
    seen = float(model.score(Pairs(torch.tensor([user]), torch.tensor([item]))))
    with torch.no_grad():
        model.backbone.get_parameter("output.bias").add_(wanted - seen)


# The three cases of the paper. The dual loss of a pair pushes its logit further to the side it leans to.


@pytest.mark.parametrize("inner", ["sign", "sgd"])
@pytest.mark.parametrize("model", ["gmf", "neumf"])
@pytest.mark.parametrize(
    ("logit", "labels", "winner"),
    [
        (1.0, [1], "direct"),
        (-1.0, [0], "direct"),
        (1.0, [0], "inverse"),
        (-1.0, [1], "inverse"),
        # Three of four are positive and the logit says so already: the loss is least where it is.
        (math.log(3), [1, 1, 1, 0], "pass"),
        (-math.log(3), [0, 1, 0, 0], "pass"),
    ],
)
@pytest.mark.usefixtures("alone")
def test_planted_direction_wins(model: str, inner: str, logit: float, labels: list[int], winner: str) -> None:
    recommender = build_recommender(small_spec(model=model), CPU)
    with_logit(recommender, 2, 3, logit)
    algorithm = InverseGradient(recommender, alpha=0.02, inner=inner, candidates=PAPER)
    record = ig_step(algorithm, batch([(2, 3, float(label)) for label in labels], [(2, 3)]))
    assert direction_name(record.details["direction"]) == winner
    losses = record.details["candidate_losses"]
    assert sorted(losses)[1] - sorted(losses)[0] > 1e-6, "the case is not planted deep enough"
    assert record.details["annotation_mean"] > 0.5 if logit > 0 else record.details["annotation_mean"] < 0.5


@pytest.mark.usefixtures("alone")
def test_a_pass_leaves_no_trace() -> None:
    """After a pass, weights and optimizer state are those of the gamma step alone, to the bit."""
    tried, plain = (build_recommender(small_spec(), CPU) for _ in range(2))
    for model in (tried, plain):
        with_logit(model, 2, 3, math.log(3))
    V = [(2, 3, 1.0), (2, 3, 1.0), (2, 3, 1.0), (2, 3, 0.0)]
    rows = batch(V, [(2, 3)])
    record = ig_step(InverseGradient(tried, alpha=0.02, inner="sign", candidates=PAPER), rows)
    assert record.details["direction"] == 0
    exchange = plain.exchange(Pairs(rows.user, rows.item))
    pulled = plain.pull(exchange)[0]
    losses = log_loss(plain.logits(pulled, exchange.routes[0]), rows.label)
    plain.step(plain.gradient(losses.sum(), len(losses), pulled, exchange.routes[0])[0])
    assert torch.equal(tried.rows.local_rows, plain.rows.local_rows)
    for name, state in plain.rows.optimizer.state.items():
        assert torch.equal(tried.rows.optimizer.state[name], state)
    for a, b in zip(tried.backbone.parameters(), plain.backbone.parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(tried.dense_optimizer.state[a]["exp_avg"], plain.dense_optimizer.state[b]["exp_avg"])


@pytest.fixture(scope="module")
def models(alone: None) -> dict[str, Recommender]:
    return {name: build_recommender(small_spec(model=name), CPU) for name in ("gmf", "neumf")}


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    name=st.sampled_from(["gmf", "neumf"]),
    label=st.sampled_from([0.0, 1.0]),
    inner=st.sampled_from(["sign", "sgd"]),
    logit=st.floats(0.1, 4.0),
    sign=st.sampled_from([-1, 1]),
)
def test_theorem_1(
    models: dict[str, Recommender], seed: int, name: str, label: float, inner: str, logit: float, sign: int
) -> None:
    """Of a single instance the losses are ordered one way or the other, and the lean of the logit says which.

    The theorem is about a step within which the loss is smooth: every unit of the tower is far on or far off.
    """
    model = models[name]
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        model.rows.local_rows.normal_(0, 0.5, generator=source)
        for parameter in model.backbone.parameters():
            parameter.normal_(0, 0.5, generator=source)
        for layer in getattr(model.backbone, "tower", ()):
            layer.weight.mul_(0.2)
            layer.bias.sign_().mul_(3.0)
    user, item = int(torch.randint(USERS, (1,), generator=source)), int(torch.randint(ITEMS, (1,), generator=source))
    with_logit(model, user, item, sign * logit)
    algorithm = InverseGradient(model, alpha=0.002 if inner == "sign" else 0.02, inner=inner, candidates=LINE_SEARCH)
    details = ig_step(algorithm, batch([(user, item, label)], [(user, item)])).details
    losses = details["candidate_losses"]
    assume(abs(losses[2] - losses[4]) > 1e-6)  # a smaller difference is rounding
    agrees = (sign > 0) == (label == 1)
    assert losses == sorted(losses, reverse=not agrees)
    assert details["direction"] == (-3 if agrees else 3)


# The choice


@pytest.mark.parametrize(
    ("candidates", "losses", "winner"),
    [
        (PAPER, (0.2, 0.3, 0.1), 1),
        (PAPER, (0.1, 0.1, 0.1), 0),
        (PAPER, (0.1, 0.2, 0.1), -1),
        ((1, 0, -1), (0.1, 0.2, 0.1), -1),
        (PAPER, (math.nan, 0.3, 0.3), 0),
        (PAPER, (-math.inf, math.nan, 0.3), 1),
        (LINE_SEARCH, (0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1), 0),
        (LINE_SEARCH, (0.1, 0.1, 0.1, 0.2, 0.1, 0.1, 0.1), -1),
        (LINE_SEARCH, (0.1, 0.2, 0.2, 0.2, 0.1, 0.2, 0.1), 0.3),
        (LINE_SEARCH, (0.1, 0.2, 0.2, 0.2, 0.2, 0.2, 0.1), -3),
    ],
)
def test_smallest_finite_loss_wins_and_ties_go_to_pass_then_direct(
    candidates: tuple[float, ...], losses: tuple[float, ...], winner: float
) -> None:
    order = torch.tensor(tie_order(candidates))
    assert candidates[int(choose(torch.tensor(losses, dtype=torch.float64), order))] == winner
    assert candidates[choose_on_host(losses, order.tolist())] == winner


@pytest.mark.usefixtures("alone")
def test_nothing_finite_is_nothing_to_choose() -> None:
    """The step raises before it commits: every weight is as it was."""
    model = build_recommender(small_spec(), CPU)
    before = model.rows.local_rows.clone()
    algorithm = InverseGradient(model, alpha=0.02, inner="sign", candidates=PAPER)
    with pytest.raises(TrainingDiverged, match="not finite at any candidate"):
        ig_step(algorithm, batch([(2, 3, math.nan)], [(2, 3)]))
    assert torch.equal(model.rows.local_rows, before)
    assert issubclass(TrainingDiverged, UserError)


def test_the_sign_step_of_a_gradient() -> None:
    g = torch.tensor([3.0, -0.5, 0.0, 1e-8])
    assert SignStep(1.0)(g.clone()).tolist() == pytest.approx([1.0, -1.0, 0.0, 0.5], rel=1e-6)
    assert SignStep(0.0)(g.clone()).tolist() == [0.0, 0.0, 0.0, 0.0]


# Failures, on two ranks


def _go_wrong(rank: int, ranks: int) -> dict[str, str]:
    """What each case raises on this rank, by name; '' if nothing."""
    first, second = steps(2, seed=5)
    outcome: dict[str, str] = {}

    def start() -> InverseGradient:
        return InverseGradient(build_recommender(small_spec(), CPU), alpha=0.01, inner="sign", candidates=PAPER)

    def attempt(name: str, algorithm: InverseGradient, rows: Batch) -> Record | None:
        try:
            record = ig_step(algorithm, rows)
        except (TrainingDiverged, RanksDisagree) as error:
            outcome[name] = f"{type(error).__name__}: {error}"
            return None
        outcome[name] = ""
        return record

    def half(step: Step) -> Batch:
        n, m = len(step.V[0]) // 2, len(step.U[0]) // 2
        return Batch(
            *(t[:n] if rank == 0 else t[n:] for t in step.V),
            *(t[:m] if rank == 0 else t[m:] for t in step.U),
            global_rows=2 * n,
            step=0,
        )

    poisoned = half(first)
    if rank == 1:
        poisoned = replace(poisoned, label=torch.full_like(poisoned.label, math.nan))
    attempt("nan label on rank 1", start(), poisoned)

    # A row that only rank 1's unlabeled batch names: the candidates that move are lost, pass is not.
    algorithm = start()
    spare = Pairs(torch.tensor([USERS - 1]), torch.tensor([ITEMS - 1]))
    rows = half(first)
    if rank == 1:
        rows = replace(rows, unlabeled_user=spare.user, unlabeled_item=spare.item)
    shard = next(s for s in algorithm.model.rows.layout.on(rank) if s.table == "user")
    if shard.row <= USERS - 1 < shard.row + shard.rows:
        algorithm.model.rows.local_rows[shard.base + USERS - 1 - shard.row] = math.nan
    record = attempt("nan in an unlabeled row", algorithm, rows)
    assert record is not None
    outcome["direction after nan"] = str(record.details["direction"])
    broken = algorithm.model.rows.local_rows.isnan().any(1).sum()
    outcome["broken rows"] = str(int(broken))

    algorithm = start()
    attempt("agreed", algorithm, half(first))
    if rank == 1:
        with torch.no_grad():
            next(algorithm.model.backbone.parameters()).add_(1e-3)
    attempt("dense weights of rank 1 moved", algorithm, half(second))

    algorithm = start()
    attempt("agreed again", algorithm, half(first))
    algorithm._chosen = (algorithm._chosen + rank) % 3
    attempt("rank 1 chose otherwise", algorithm, half(second))
    return outcome


def test_failures_are_seen_by_every_rank_and_name_the_culprit() -> None:
    for rank, outcome in enumerate(run_ranks(_go_wrong, 2)):
        assert outcome["nan label on rank 1"].startswith("TrainingDiverged"), outcome
        assert outcome["nan in an unlabeled row"] == ""
        assert outcome["direction after nan"] == "0.0"
        assert outcome["broken rows"] == str(rank), "the last user lies on rank 1, and no other row broke"
        assert outcome["agreed"] == outcome["agreed again"] == ""
        assert (
            "RanksDisagree: ranks [1] differ from rank 0 in their dense weights"
            in outcome["dense weights of rank 1 moved"]
        )
        assert "RanksDisagree: ranks [1] differ from rank 0 in their direction" in outcome["rank 1 chose otherwise"]


def _with_an_idle_rank(rank: int, ranks: int) -> tuple:
    model = build_recommender(small_spec(), CPU)
    algorithm = InverseGradient(model, alpha=0.03, inner="sign", candidates=PAPER)
    first, directions = local_weights(model), []
    for step in steps(6, seed=2):
        V, U = ((t if rank == 0 else t[:0] for t in tensors) for tensors in (step.V, step.U))
        directions.append(ig_step(algorithm, Batch(*V, *U, global_rows=len(step.V[0]), step=0)).details["direction"])
    return first, directions, local_weights(model)


def test_a_rank_without_rows_counts_for_nothing() -> None:
    results = run_ranks(_with_an_idle_rank, 2)
    first: dict[str, Tensor] = whole_weights([result[0] for result in results], "gmf")
    oracle = Textbook(
        "gmf", USERS, ITEMS, DIM, {n: w.double() for n, w in first.items()}, gamma=0.01, alpha=0.03, inner="sign"
    )
    directions = [oracle.ig_step(step.V, step.U)[0] for step in steps(6, seed=2)]
    assert [result[1] for result in results] == [directions, directions]
    assert largest_difference(whole_weights([result[2] for result in results], "gmf"), oracle.weights()) < 1e-5
