"""Steps on a GPU, as far as a machine without one can show: on the `meta` device, where tensors have no values.

What reads a value, or a shape that depends on one, raises. `OneDevice` raises where a tensor of another device takes
part in a step. Code that asks for the device type takes the way of a GPU: it asks whether it is a CPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from invdist.config.registry import STRATEGIES
from invdist.learning.strategy import Setting
from tests.embeddings.loopback import LoopbackComm, batch, loopback_model

GPU = torch.device("meta")
USERS = ITEMS = 4096
LINE_SEARCH = [-3.0, -1.0, -0.3, 0.0, 0.3, 1.0, 3.0]


class OneDevice(TorchDispatchMode):
    """Counts operators, and raises where one takes or makes a tensor that is not on the GPU."""

    operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.operators += 1
        for tensor in tree_leaves((args, kwargs, out)):
            if isinstance(tensor, torch.Tensor) and tensor.device != GPU:
                raise AssertionError(f"{func} has a tensor on {tensor.device}")
        return out


class NoUploads(TorchFunctionMode):
    """Raises where values of the host become a tensor: a GPU would copy them, and the host would wait for the copy."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.tensor, torch.as_tensor, torch.from_numpy) and not isinstance(args[0], torch.Tensor):
            raise AssertionError(f"{func.__name__} uploads {args[0]}")
        return func(*args, **(kwargs or {}))


def _one_step(method: str, phase: int, ranks: int, model: str = "gmf", **options: Any) -> int:
    """Takes a step of a strategy; gives how often the host read from the device."""
    return _reads_and_operators(method, phase, ranks, model, **options)[0]


def _reads_and_operators(
    method: str,
    phase: int,
    ranks: int,
    model: str,
    replicated_items: bool = False,
    vectors: bool = False,
    **options: Any,
) -> tuple[int, int]:
    recommender = loopback_model(ranks, GPU, model=model, replicated_items=replicated_items, vectors=vectors)
    setting = Setting(STRATEGIES.get(method).Config(**options), unlabeled_rate=2, gamma=1e-3, users=USERS, items=ITEMS)
    strategy = STRATEGIES.get(method)(setting, recommender)
    if hasattr(strategy, "drop"):
        strategy.drop.done = strategy.drop.steps  # the end of the ramp: before, nothing is dropped
    chosen = strategy.phases(setting)[phase]
    pairs = ranks if method == "srns" else max(64, ranks)  # which sends as many to each rank as loopback says
    rows = batch(pairs, max(1, chosen.unlabeled_per_row), GPU)
    comm = recommender.comm
    assert isinstance(comm, LoopbackComm)

    def step() -> None:
        exchange = recommender.exchange(*strategy.groups(chosen, rows)).advance().finish()
        record = strategy.step(chosen, rows, exchange)
        assert record.loss.device == GPU

    step()  # constants are uploaded in the first step
    comm.host_reads = 0
    with OneDevice() as counted, NoUploads():
        step()
    return comm.host_reads, counted.operators


@pytest.mark.parametrize("ranks", [8, 64, 1024])
@pytest.mark.parametrize(
    ("method", "phase", "options"),
    [
        *(("none", 0, {}), ("ig", 0, {}), ("ig", 1, {}), ("ns", 0, {}), ("idl", 0, {}), ("r_ce", 0, {})),
        ("t_ce", 0, {"max_drop": 0.5, "ramp_steps": 1}),
    ],
)
@pytest.mark.parametrize("model", ["gmf", "neumf"])
def test_the_host_waits_once_per_step_for_split_sizes(
    method: str, phase: int, options: dict, ranks: int, model: str
) -> None:
    assert _one_step(method, phase, ranks, model, **options) == 1


@pytest.mark.parametrize("ranks", [8, 64, 1024])
def test_replicated_items_are_not_waited_for(ranks: int) -> None:
    """Their sizes are read with those of the users, which are cut."""
    assert _one_step("none", 0, ranks, replicated_items=True) == 1
    assert _one_step("ig", 1, ranks, "neumf", replicated_items=True) == 1


@pytest.mark.parametrize("inner", ["sign", "sgd"])
def test_a_line_search_waits_no_more_often(inner: str) -> None:
    assert _one_step("ig", 1, 8, inner=inner, candidates=LINE_SEARCH) == 1


@pytest.mark.parametrize("vectors", [False, True])
@pytest.mark.parametrize("model", ["gmf", "neumf"])
def test_seven_candidates_launch_no_more_than_three(model: str, vectors: bool) -> None:
    three, seven = (
        _reads_and_operators("ig", 1, 8, model, vectors=vectors, candidates=candidates)
        for candidates in ([-1.0, 0.0, 1.0], LINE_SEARCH)
    )
    assert seven == three
    assert three[0] == 1


@pytest.mark.parametrize("ranks", [8, 64, 1024])
@pytest.mark.parametrize("model", ["gmf", "neumf"])
def test_hard_negatives_are_exchanged_once_more(ranks: int, model: str) -> None:
    """`dns` finds its negatives by their scores, so it cannot ask for their rows ahead."""
    assert _one_step("dns", 0, ranks, model) == 2


@pytest.mark.parametrize("ranks", [8, 64, 1024])
@pytest.mark.parametrize("model", ["gmf", "neumf"])
def test_robust_negatives_come_from_the_owner_of_the_user(ranks: int, model: str) -> None:
    """`srns` asks for rows of fresh candidates, for owners of users, for rows of their memory, then the winners."""
    assert _one_step("srns", 0, ranks, model, memory=4, fresh=4) == 4


def test_with_one_rank_nothing_is_waited_for() -> None:
    assert _one_step("none", 0, 1) == 0
    assert _one_step("ig", 1, 1) == 0
    assert _one_step("dns", 0, 1) == _one_step("srns", 0, 1) == _one_step("means", 0, 1) == 0


def test_the_proof_can_fail() -> None:
    """Reading a value raises, and so does a tensor of another device, in an operator or on its way to other ranks."""
    tensor = torch.zeros(3, device=GPU)
    with pytest.raises((NotImplementedError, RuntimeError)):
        tensor.nonzero()
    with pytest.raises((NotImplementedError, RuntimeError)):
        float(tensor.sum())
    with pytest.raises((NotImplementedError, RuntimeError)):
        tensor.tolist()
    with pytest.raises(AssertionError, match="has a tensor on cpu"), OneDevice():
        torch.zeros(3)
    with pytest.raises(AssertionError, match="uploads 3"), NoUploads():
        torch.as_tensor(3.0, device=GPU)
    with pytest.raises(AssertionError, match="reaches the ranks"):
        LoopbackComm(2, GPU).all_reduce(torch.zeros(3))
