"""The head over exposure vectors: its formula by numpy, its parts, its penalty, rows without labels or exposures."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from invdist.config.registry import BACKBONES
from invdist.embeddings.kernels import kernels
from invdist.models.exposure_head import ExposureHead

DIM, HIDDEN, PAIRS = 8, 5, 40


def _head(model: str, **options: float) -> ExposureHead:
    torch.manual_seed(0)
    inner = BACKBONES.get(model)(dim=4, dropout=0.4, bias=True)
    return ExposureHead(inner, DIM, hidden=HIDDEN, dropout=0.5, **options).eval()


def _rows(head: ExposureHead, seed: int) -> Tensor:
    torch.manual_seed(seed)
    rows = torch.randn(PAIRS, head.columns + head.frozen_columns)
    rows[:, -3] = torch.randint(0, 6, (PAIRS,)).float()  # labels, none for some
    rows[:, -2] = 0.0  # all of them are in the data set
    return rows


@pytest.mark.parametrize("model", ["gmf", "neumf"])
def test_parts_combined_are_the_whole(model: str) -> None:
    head = _head(model)
    user, item = _rows(head, 1), _rows(head, 2)
    with torch.no_grad():
        whole = head(user, item)
        parts = head.combine(head.user_part(user), head.item_part(item))
    assert whole.std() > 0.5
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("model", ["gmf", "neumf"])
def test_logits_are_those_of_the_formula(model: str) -> None:
    head = _head(model)
    user, item = _rows(head, 1), _rows(head, 2)
    k = head.inner.columns
    with torch.no_grad():
        found = head(user, item).numpy()
        inner = head.inner(user[:, :k], item[:, :k]).double().numpy()
    weights = {name: value.double().numpy() for name, value in head.state_dict().items()}
    u, i = user.double().numpy(), item.double().numpy()
    bias, c, x, log_count = k, slice(k + 4, k + 4 + DIM), slice(k + 4 + DIM, k + 4 + 2 * DIM), k + 4 + 2 * DIM
    for n in range(PAIRS):
        a_x = weights["mix.weight"] @ u[n, x]
        f = np.concatenate([u[n, x], i[n, x], a_x * i[n, x], [u[n, log_count] - 4, i[n, log_count] - 4]])
        hidden = np.maximum(weights["hidden.weight"] @ f + weights["hidden.bias"], 0)
        logit = inner[n] + u[n, bias] + i[n, bias] + u[n, c] @ i[n, x] + u[n, x] @ i[n, c]
        logit += weights["direct.weight"][0] @ f + weights["direct.bias"][0] + weights["output.weight"][0] @ hidden
        assert found[n] == pytest.approx(logit, abs=1e-4)


def _penalty(head: ExposureHead, user: Tensor, item: Tensor, pairs: int = PAIRS) -> Tensor:
    rows, features = torch.cat([user, item]).tensor_split([head.columns], 1)
    return head.penalty(rows, features, pairs)


@pytest.mark.parametrize(
    ("model", "inner"),  # dim 4, prior 7, and bias columns
    [("gmf", [(8 * 7.0) ** 0.5] * 8), ("neumf", [28.0**0.5] * 4 + [16.0**2 * 7] * 16 + [28.0**0.5] * 4)],
)
def test_the_penalty_of_a_row_is_shared_by_its_labels(model: str, inner: list[float]) -> None:
    """The first pairs pay, the others do not; the gradient is that of the sum."""
    head, paying = _head(model, prior=7.0), PAIRS - 3
    user, item = _rows(head, 1).requires_grad_(), _rows(head, 2).requires_grad_()
    found = _penalty(head, user, item, paying)
    precision = torch.tensor(inner + [7.0] * (head.columns - len(inner)), dtype=torch.float64)
    assert torch.equal(head.curvature()[0], precision.float())
    expected = 0.0
    for side in (user, item):
        labels = side[:paying, -3:-2].detach().double().clamp(min=1)
        expected = expected + 0.5 * (precision * side[:paying, : head.columns].double() ** 2 / labels).sum()
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)
    gradients, correct = (torch.autograd.grad(value, [user, item]) for value in (2 * found, 2 * expected))
    torch.testing.assert_close(gradients, correct, rtol=1e-5, atol=1e-6)


def test_products_pay_by_the_square_root_of_the_labels_that_are_left() -> None:
    head = _head("gmf", prior=7.0)
    rows = _rows(head, 1)
    rows[:, -3], rows[:, -2] = 32.0, 0.0
    columns, k = rows[:, : head.columns].square(), head.inner.columns
    whole = _penalty(head, rows, rows)
    rows[:, -2] = 32.0
    assert torch.equal(_penalty(head, rows, rows), whole), "all are there"
    rows[:, -2] = 8.0
    added = _penalty(head, rows, rows) - whole
    torch.testing.assert_close(added, (k * 7.0) ** 0.5 * columns[:, :k].sum() / 32, rtol=1e-4, atol=1e-5)


def test_before_any_label_both_parts_of_a_logit_vary_alike() -> None:
    """Rows drawn from the prior that the penalty is of: products of columns say as much as the head's own columns."""
    torch.manual_seed(0)
    inner = BACKBONES.get("gmf")(dim=32)
    torch.nn.init.ones_(inner.output.weight)
    head = ExposureHead(inner, 64, prior=3.0)
    rows = torch.zeros(2, 20_000, head.columns + head.frozen_columns)
    one = torch.ones(1, rows.shape[-1], requires_grad=True)
    (precision,) = torch.autograd.grad(_penalty(head, one, one.detach(), 1), one)  # the penalty is a square
    rows[..., : head.columns] = torch.randn(2, 20_000, head.columns) * precision[0, : head.columns].rsqrt().float()
    x = torch.nn.functional.normalize(torch.randn(20_000, 64), dim=1)
    with torch.no_grad():
        products = inner(*rows[..., :32])
        own = (rows[0, :, 36:100] * x).sum(1)
    assert products.var().item() == pytest.approx(1 / 3, rel=0.05)
    assert own.var().item() == pytest.approx(1 / 3, rel=0.05)


def test_a_pair_without_labels_is_scored_by_its_exposures_alone() -> None:
    """The trained columns of such rows are zero: exposures tell them apart, and without exposures nothing does."""
    head = _head("gmf")
    user, item = _rows(head, 1), _rows(head, 2)[:1].expand(PAIRS, -1)
    user[:, : head.columns], user[:, -3:] = 0.0, 0.0
    with torch.no_grad():
        assert len(head(user, item).unique()) == PAIRS
        user[:, head.columns :] = 0.0  # neither labels nor exposures
        scores = head(user, item)
        assert scores.isfinite().all()
        assert len(scores.unique()) == 1
        assert len(head(user, _rows(head, 2)).unique()) == PAIRS  # items still differ


def test_trained_columns_get_gradients_and_every_weight_of_the_head_too() -> None:
    head = _head("neumf").train()
    user, item = _rows(head, 1).requires_grad_(), _rows(head, 2).requires_grad_()
    head(user, item).square().sum().backward()
    assert user.grad is not None
    unused = {head.inner.columns - 3 + n for n in range(3)} | {head.inner.columns + 1 + n for n in range(3)}
    moved = set(user.grad[:, : head.columns].abs().sum(0).nonzero().flatten().tolist())
    assert moved == set(range(head.columns)) - unused
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in head.head_parameters())
    assert len(head.head_parameters()) == len(list(head.parameters())) - len(list(head.inner.parameters()))


@pytest.mark.parametrize("model", ["gmf", "neumf"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("pairs", [PAIRS, 1, 0])
def test_the_gradient_by_hand_is_that_of_autograd(model: str, dropout: float, pairs: int) -> None:
    """With the same values dropped, as both ways draw them from the same seed in the same order."""
    if kernels() is None:
        pytest.skip("without compiled kernels there is only autograd")
    inner = BACKBONES.get(model)(dim=4, dropout=0.0, bias=True)
    head = ExposureHead(inner, DIM, hidden=HIDDEN, dropout=dropout).train()
    whole = torch.cat([_rows(head, 1)[:pairs], _rows(head, 2)[:pairs]])
    whole[3:4, head.columns + DIM] = 0.0  # a user without exposures
    rows, features = (part.contiguous() for part in whole.tensor_split([head.columns], 1))
    rows.requires_grad_()
    found = {}
    for name, logits in {
        "by hand": lambda: head.of_rows_and_features(rows, features),
        "autograd": lambda: head(*torch.cat([rows, features], 1).chunk(2)),
    }.items():
        torch.manual_seed(7)
        value = logits()
        found[name] = [value, *torch.autograd.grad(value.square().sum(), [rows, *head.parameters()])]
    for by_hand, expected in zip(found["by hand"], found["autograd"]):
        torch.testing.assert_close(by_hand, expected, rtol=1e-4, atol=1e-4)


def test_whoever_has_no_exposures_is_an_average_one() -> None:
    """Not one with log(1 + 0) of them, which no training pair has: the count moves no score where it is unknown."""
    head = _head("gmf")
    user, item = _rows(head, 1), _rows(head, 2)
    count = head.columns + DIM
    user[:, head.columns : count + 1] = 0.0
    with torch.no_grad():
        found = head(user, item)
        user[:, count] = 4.0  # where the log counts of `direct` and `hidden` are zero
        average = head(user, item)
        user[:, count] = 0.5
        other = head(user, item)
    torch.testing.assert_close(found, average)
    assert (other - average).abs().min() > 1e-3
