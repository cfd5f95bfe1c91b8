"""Column groups of row-wise Adam against an update written out by hand, and the way without groups to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from invdist.embeddings import row_moves
from invdist.embeddings.row_optimizers import Adam, ColumnGroup

ROWS, COLUMNS, SPLIT = 3000, 20, 12
SHARED: dict[str, Any] = {"weight_decay": 0.1, "beta1": 0.9, "beta2": 0.999}


def _steps() -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    touched = [torch.randperm(ROWS)[:size] for size in (ROWS, 2500, 7, 0, 1500)]
    return [(rows, torch.randn(len(rows), COLUMNS) * 0.1) for rows in touched]


def _start() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(ROWS, COLUMNS)


def _by_hand(values: np.ndarray, steps: list, columns: slice, gamma: float, eps: float) -> np.ndarray:
    """Lazy AdamW of some columns in float64."""
    m, v = np.zeros_like(values), np.zeros_like(values)
    for number, (rows, gradient) in enumerate(steps, 1):
        r, g = rows.numpy(), gradient[:, columns].double().numpy()
        m[r] = 0.9 * m[r] + 0.1 * g
        v[r] = 0.999 * v[r] + 0.001 * g**2
        step = (m[r] / (1 - 0.9**number)) / (np.sqrt(v[r] / (1 - 0.999**number)) + eps)
        values[r] = values[r] * (1 - gamma * SHARED["weight_decay"]) - gamma * step
    return values


def test_each_group_of_columns_has_its_own_step_size_and_epsilon() -> None:
    groups = (ColumnGroup(SPLIT, 0.001, 1e-8), ColumnGroup(COLUMNS - SPLIT, 0.03, 1 / 64))
    table, steps = _start(), _steps()
    optimizer = Adam(table, gamma=9.0, eps=9.0, groups=groups, **SHARED)
    for rows, gradient in steps:
        optimizer.update(table, rows, gradient)
    for columns, (_, gamma, eps) in zip((slice(SPLIT), slice(SPLIT, None)), groups, strict=True):
        expected = _by_hand(_start()[:, columns].double().numpy(), steps, columns, gamma, eps)
        np.testing.assert_allclose(table[:, columns].numpy(), expected, atol=1e-5)


def test_without_groups_it_is_one_group_to_the_bit() -> None:
    found = []
    for groups in ((), (ColumnGroup(COLUMNS, 0.01, 1e-6),)):
        table = _start()
        optimizer = Adam(table, gamma=0.01, eps=1e-6, groups=groups, **SHARED)
        for rows, gradient in _steps():
            optimizer.update(table, rows, gradient)
        found.append([table, *optimizer.state.values()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    # And both are those of torch.optim.AdamW where every row is touched.
    whole = torch.nn.Parameter(_start())
    reference = torch.optim.AdamW([whole], lr=0.01, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.1, fused=True)
    table = _start()
    optimizer = Adam(table, gamma=0.01, eps=1e-6, **SHARED)
    for _ in range(3):
        whole.grad = torch.randn(ROWS, COLUMNS)
        optimizer.update(table, torch.arange(ROWS), whole.grad)
        reference.step()
    assert torch.equal(table, whole.data)


@pytest.mark.parametrize("compiled", [True, False])
def test_a_row_moves_alike_wherever_it_is_in_the_list(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks have the rows of a replicated table in lists of different lengths, and must end with the same bits."""
    if not compiled:
        monkeypatch.setattr(row_moves, "reads_are_free", lambda device: False)
    torch.manual_seed(2)
    gradients = torch.randn(3, 200, 4) * 0.1
    found = []
    for at_once in (200, 1, 3, 7):
        table = torch.randn(200, 4, generator=torch.Generator().manual_seed(3))
        optimizer = Adam(table, gamma=0.01, eps=1e-8, **SHARED)
        for step, gradient in enumerate(gradients):
            for rows in torch.arange(200).split(at_once):
                optimizer.steps = step
                optimizer.update(table, rows, gradient[rows])
        found.append(table)
    assert all(torch.equal(found[0], other) for other in found[1:])
