"""The memory of candidates alone: chances, preference, bounds."""

from __future__ import annotations

import numpy as np
import torch

from invdist.learning.candidate_memory import CandidateMemory

CPU = torch.device("cpu")


def _memory(users: int = 1, slots: int = 2, history: int = 3, first: int = 0) -> CandidateMemory:
    return CandidateMemory(first, users, slots, history, CPU)


def _refresh(memory: CandidateMemory, user: list[int], scores: dict[int, float], fresh: list[int]) -> None:
    """Refreshes users with the same fresh candidates; `scores` are logits by item."""
    ids = torch.tensor(user)
    kept = memory.items(ids)
    logit = torch.tensor([[scores.get(item, 0.0) for item in row] for row in kept.tolist()])
    offered = torch.tensor([fresh] * len(user))
    offered_logit = torch.tensor([[scores[item] for item in fresh]] * len(user))
    memory.refresh(ids, logit, offered, offered_logit, temperature=1e-6, noise=1)


def test_candidates_are_drawn_with_the_chances_of_a_softmax() -> None:
    """20,000 users draw one of four candidates: shares within four standard errors of softmax(logit / temperature)."""
    users, logit, temperature = 20_000, torch.tensor([0.0, 1.0, -1.0, 0.5]), 0.7
    memory = _memory(users, slots=1)
    everyone = torch.arange(users)
    fresh = torch.tensor([3, 8, 5, 11]).expand(users, 4)
    empty = torch.zeros(users, 1)
    memory.refresh(everyone, empty, fresh, logit.expand(users, 4), temperature=temperature, noise=77)
    share = np.array([(memory.item == item).float().mean() for item in (3, 8, 5, 11)])
    chance = torch.softmax(logit / temperature, 0).numpy()
    assert (np.abs(share - chance) < 4 * np.sqrt(chance * (1 - chance) / users)).all()


def test_another_step_draws_otherwise() -> None:
    def drawn(noise: int) -> list[int]:
        memory = _memory(200, slots=1)
        fresh = torch.arange(8).expand(200, 8)
        memory.refresh(torch.arange(200), torch.zeros(200, 1), fresh, torch.zeros(200, 8), temperature=1.0, noise=noise)
        return memory.item.view(-1).tolist()

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_a_candidate_stands_in_memory_once_and_keeps_its_history() -> None:
    memory = _memory(slots=3)
    _refresh(memory, [0], {4: 3.0, 6: 1.0}, fresh=[4, 4, 6, 4])
    assert memory.item.tolist() == [[4, 6, -1]]
    _refresh(memory, [0], {4: 2.0, 6: 5.0, 7: 1.0}, fresh=[6, 4, 7])
    assert memory.item.tolist() == [[6, 4, 7]]
    past = torch.sigmoid(torch.tensor([[5.0, 1.0], [2.0, 3.0]]))
    torch.testing.assert_close(memory.past[0, :2, :2], past)
    assert memory.past[0, :, 2].isnan().all()
    assert memory.past[0, 2, 1:].isnan().all()


def test_memory_takes_the_bytes_it_says() -> None:
    memory = _memory(users=1000, slots=16, history=5)
    assert memory.item.nbytes + memory.past.nbytes == 1000 * 16 * (4 + 4 * 5)


def test_history_is_bounded() -> None:
    memory = _memory(slots=1, history=2)
    for score in (1.0, 2.0, 3.0):
        _refresh(memory, [0], {4: score}, fresh=[4])
    torch.testing.assert_close(memory.past[0, 0], torch.sigmoid(torch.tensor([3.0, 2.0])))


def test_a_candidate_whose_score_varied_is_preferred_to_a_steady_one() -> None:
    memory = _memory(slots=2)
    for varying in (-2.0, 2.0, 0.9):
        _refresh(memory, [0], {1: 1.0, 2: varying}, fresh=[1, 2])
    user = torch.tensor([0])
    assert memory.best(user, 1, variance_weight=0.0).tolist() == [[1]]
    assert memory.best(user, 1, variance_weight=1.0).tolist() == [[2]]


def test_fewer_candidates_than_asked_for_are_gone_through_again() -> None:
    memory = _memory(users=2, slots=4, first=10)
    _refresh(memory, [11], {1: 1.0, 2: 2.0}, fresh=[1, 2])
    assert memory.best(torch.tensor([11]), 4, 0.0).tolist() == [[2, 1, 2, 1]]
    assert memory.item[0].tolist() == [-1] * 4
