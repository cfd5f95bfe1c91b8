"""The textbook algorithm against torch's own optimizers, finite differences in numpy, and closed forms."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.oracle.textbook import Labeled, Textbook, choose, inverse_dual_loss

USERS, ITEMS, DIM = 7, 9, 2
MODELS = ("gmf", "neumf")


def first_weights(model: str, seed: int = 0, scale: float = 0.5) -> dict[str, Tensor]:
    """Random float64 weights by the names of the oracle."""
    k = DIM
    columns, inputs = (k, k) if model == "gmf" else (5 * k, 2 * k)
    shapes: dict[str, tuple[int, ...]] = {"user": (USERS, columns), "item": (ITEMS, columns)}
    if model == "neumf":
        for layer, (rows, into) in enumerate([(4 * k, 8 * k), (2 * k, 4 * k), (k, 2 * k)]):
            shapes |= {f"tower.{layer}.weight": (rows, into), f"tower.{layer}.bias": (rows,)}
    shapes |= {"output.weight": (1, inputs), "output.bias": (1,)}
    generator = torch.Generator().manual_seed(seed)
    return {n: scale * torch.randn(s, dtype=torch.float64, generator=generator) for n, s in shapes.items()}


def batch(seed: int, rows: int = 6) -> Labeled:
    """Few ids, so that they repeat; users 5.. and items 6.. stay untouched."""
    generator = torch.Generator().manual_seed(seed)
    user = torch.randint(USERS - 2, (rows,), generator=generator)
    item = torch.randint(ITEMS - 3, (rows,), generator=generator)
    return user, item, torch.randint(2, (rows,), generator=generator).float()


def textbook(model: str, weights: dict[str, Tensor], **options: object) -> Textbook:
    return Textbook(model, USERS, ITEMS, DIM, weights, **options)  # pyright: ignore[reportArgumentType]


# The model, its losses and their gradients once more, row by row in numpy and by finite differences.


def logit(w: dict[str, np.ndarray], user: int, item: int) -> float:
    p, q = w["user"][user], w["item"][item]
    features = [p[j] * q[j] for j in range(DIM)]
    if "tower.0.weight" in w:
        hidden = [*p[DIM:], *q[DIM:]]
        for layer in range(3):
            matrix, bias = w[f"tower.{layer}.weight"], w[f"tower.{layer}.bias"]
            hidden = [
                max(0.0, math.fsum(r * h for r, h in zip(row, hidden, strict=True)) + b)
                for row, b in zip(matrix, bias, strict=True)
            ]
        features += hidden
    return math.fsum(a * f for a, f in zip(w["output.weight"][0], features, strict=True)) + w["output.bias"][0]


def mean_log_loss(w: dict[str, np.ndarray], V: Labeled) -> float:
    rows = zip(*(column.tolist() for column in V), strict=True)
    return float(np.mean([np.logaddexp(0, -logit(w, u, i) if y else logit(w, u, i)) for u, i, y in rows]))


def numeric_gradient(loss: Callable[[dict], float], w: dict[str, np.ndarray], h: float = 1e-5) -> dict:
    gradient = {name: np.zeros_like(value) for name, value in w.items()}
    for name, value in w.items():
        for place in np.ndindex(value.shape):
            kept = value[place]
            value[place] = kept + h
            above = loss(w)
            value[place] = kept - h
            gradient[name][place] = (above - loss(w)) / (2 * h)
            value[place] = kept
    return gradient


def to_numpy(w: dict[str, Tensor]) -> dict[str, np.ndarray]:
    return {name: value.numpy().copy() for name, value in w.items()}


def assert_same(got: dict[str, Tensor], expected: dict[str, np.ndarray], atol: float) -> None:
    assert got.keys() == expected.keys()
    for name, value in got.items():
        np.testing.assert_allclose(value.numpy(), expected[name], rtol=0, atol=atol, err_msg=name)


@pytest.mark.parametrize("model", MODELS)
def test_ig_step_equals_finite_differences(model: str) -> None:
    """The whole of Algorithm 1's phase 2 with both rates of plain gradient descent."""
    w0, alpha, gamma, candidates = first_weights(model), 0.7, 0.3, (-3.0, -1.0, 0.0, 1.0)
    V, U = batch(1), batch(2, rows=9)[:2]
    oracle = textbook(model, w0, row_optimizer="sgd", gamma=gamma, alpha=alpha, inner="sgd", candidates=candidates)
    direction, losses = oracle.ig_step(V, U)

    w = to_numpy(w0)
    pairs = list(zip(*(column.tolist() for column in U), strict=True))
    annotations = []
    for u, i in pairs:
        l1, l0 = np.logaddexp(0, -logit(w, u, i)), np.logaddexp(0, logit(w, u, i))
        annotations.append((l0**2 / (l0**2 + l1**2), l1**2 / (l0**2 + l1**2)))

    def dual(w: dict[str, np.ndarray]) -> float:
        return float(
            np.mean(
                [
                    w1 * np.logaddexp(0, -logit(w, u, i)) + w0 * np.logaddexp(0, logit(w, u, i))
                    for (u, i), (w1, w0) in zip(pairs, annotations, strict=True)
                ]
            )
        )

    g = numeric_gradient(dual, w)
    expected = [mean_log_loss({n: w[n] + c * alpha * g[n] for n in w}, V) for c in candidates]
    assert losses == pytest.approx(expected, abs=1e-7)
    assert direction == candidates[int(np.argmin(expected))] != 0

    committed = {n: w[n] + direction * alpha * g[n] for n in w}
    step = numeric_gradient(lambda w: mean_log_loss(w, V), committed)
    assert_same(oracle.weights(), {n: committed[n] - gamma * step[n] for n in w}, atol=1e-7)


@pytest.mark.parametrize("model", MODELS)
def test_sign_rule_moves_each_touched_weight_by_alpha(model: str) -> None:
    w0 = first_weights(model)
    oracle = textbook(model, w0, row_optimizer="sgd", gamma=0.0, alpha=1e-3, candidates=(0, 1))
    # V whose only row wants what the inverse of U's update gives: try both labels, one of them moves.
    U = batch(2, rows=9)[:2]
    for label in (0.0, 1.0):
        direction, _ = oracle.ig_step((U[0][:1], U[1][:1], torch.tensor([label])), U)
        if direction:
            break
    assert direction == 1
    moved = {name: (oracle.weights()[name] - w0[name]).abs() for name in w0}
    for name, ids in (("user", U[0]), ("item", U[1])):
        untouched = torch.ones(len(w0[name]), dtype=torch.bool)
        untouched[ids] = False
        assert moved[name][untouched].eq(0).all()
        assert moved[name][~untouched].max() == pytest.approx(1e-3, rel=1e-3)
    # The product part alone: a unit of the tower may be dead, and a dead one has no gradient.
    assert moved["output.weight"][0, :DIM].min() == pytest.approx(1e-3, rel=1e-3)


def test_lazy_adam_equals_torchs_sparse_adam() -> None:
    w = first_weights("gmf")
    # SparseAdam adds eps before the bias correction; without eps both are the same formula.
    oracle = textbook("gmf", w, gamma=0.05, eps=1e-300)
    user = torch.nn.Embedding.from_pretrained(w["user"].clone(), freeze=False, sparse=True)
    item = torch.nn.Embedding.from_pretrained(w["item"].clone(), freeze=False, sparse=True)
    weight, bias = (w[name].clone().requires_grad_() for name in ("output.weight", "output.bias"))
    sparse = torch.optim.SparseAdam([user.weight, item.weight], lr=0.05, eps=1e-300)
    dense = torch.optim.Adam([weight, bias], lr=0.05, eps=1e-300)
    for step in range(12):
        u, i, y = batch(step, rows=3)
        s = (user(u) * item(i)) @ weight[0] + bias
        loss = torch.nn.functional.softplus(torch.where(y > 0, -s, s)).mean()
        for optimizer in (sparse, dense):
            optimizer.zero_grad()
        loss.backward()
        sparse.step()
        dense.step()
        assert oracle.plain_step(u, i, y) == pytest.approx(loss.item(), rel=1e-12)
    expected = {"user": user.weight, "item": item.weight, "output.weight": weight, "output.bias": bias}
    assert_same(oracle.weights(), to_numpy({n: p.detach() for n, p in expected.items()}), atol=1e-12)
    assert oracle.weights()["user"][5:].equal(w["user"][5:])


def test_lazy_adam_equals_torchs_adam_when_every_row_is_touched() -> None:
    w = first_weights("gmf")
    oracle = textbook("gmf", w, gamma=0.05)
    parameters = {name: value.clone().requires_grad_() for name, value in w.items()}
    adam = torch.optim.Adam(parameters.values(), lr=0.05)
    u, i = torch.arange(USERS * ITEMS) % USERS, torch.arange(USERS * ITEMS) // USERS
    for step in range(8):
        y = torch.randint(2, (len(u),), generator=torch.Generator().manual_seed(step)).float()
        s = (parameters["user"][u] * parameters["item"][i]) @ parameters["output.weight"][0]
        s = s + parameters["output.bias"]
        adam.zero_grad()
        torch.nn.functional.softplus(torch.where(y > 0, -s, s)).mean().backward()
        adam.step()
        oracle.plain_step(u, i, y)
    assert_same(oracle.weights(), to_numpy({n: p.detach() for n, p in parameters.items()}), atol=1e-12)


def test_rowwise_adagrad_equals_its_formula_over_two_steps() -> None:
    w0, gamma = first_weights("gmf"), 0.1
    oracle = textbook("gmf", w0, row_optimizer="rowwise_adagrad", gamma=gamma)
    w = to_numpy(w0)
    sums = {name: np.zeros((len(value), 1) if name in ("user", "item") else value.shape) for name, value in w.items()}
    for seed in (3, 4):
        V = batch(seed)
        oracle.plain_step(*V)
        for name, g in numeric_gradient(lambda w, V=V: mean_log_loss(w, V), w).items():
            sums[name] += np.mean(g**2, axis=1, keepdims=True) if name in ("user", "item") else g**2
            w[name] -= gamma * g / (np.sqrt(sums[name]) + 1e-8)
    assert_same(oracle.weights(), w, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("model", MODELS)
def test_state_is_kept_through_both_phases_and_a_pass_leaves_no_trace(model: str, dtype: torch.dtype) -> None:
    w = {name: value.to(dtype) for name, value in first_weights(model).items()}
    only_pass = textbook(model, w, candidates=(0,), alpha=0.5)
    plain = textbook(model, w)
    for step in range(4):
        V = batch(step)
        only_pass.plain_step(*batch(step + 50))
        plain.plain_step(*batch(step + 50))
        assert only_pass.ig_step(V, batch(step + 90)[:2])[0] == 0
        plain.plain_step(*V)
    for name, value in plain.weights().items():
        assert value.dtype == dtype
        assert value.equal(only_pass.weights()[name])


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(MODELS), st.sampled_from([0, 1]), st.sampled_from(["sign", "sgd"]))
def test_losses_of_a_single_instance_are_ordered_one_way_or_the_other(
    seed: int, model: str, label: int, inner: str
) -> None:
    """Theorem 1 of the paper: on one instance the update helps in one direction and harms in the other."""
    oracle = textbook(model, first_weights(model, seed), alpha=1e-4, inner=inner)
    u, i, _ = batch(seed, rows=1)
    direct, stay, inverse = oracle.ig_step((u, i, torch.tensor([float(label)])), (u, i))[1]
    assert direct <= stay <= inverse or direct >= stay >= inverse


@pytest.mark.parametrize(
    ("candidates", "losses", "winner"),
    [
        ((-1, 0, 1), (0.2, 0.3, 0.1), 1),
        ((-1, 0, 1), (0.1, 0.1, 0.1), 0),
        ((-1, 0, 1), (0.1, 0.2, 0.1), -1),
        ((1, 0, -1), (0.1, 0.2, 0.1), -1),
        ((-1, 0, 1), (math.nan, 0.3, 0.3), 0),
        ((-1, 0, 1), (-math.inf, math.nan, 0.3), 1),
        ((-3, -1, -0.3, 0, 0.3, 1, 3), (0.1, 0.1, 0.1, 0.2, 0.1, 0.1, 0.1), -1),
        ((-3, -1, -0.3, 0, 0.3, 1, 3), (0.1, 0.2, 0.1, 0.2, 0.1, 0.1, 0.1), -0.3),
        ((-3, -1, -0.3, 0, 0.3, 1, 3), (0.1, 0.2, 0.2, 0.2, 0.1, 0.1, 0.1), 0.3),
        ((-3, -1, -0.3, 0, 0.3, 1, 3), (0.1, 0.2, 0.2, 0.2, 0.2, 0.2, 0.1), -3),
    ],
)
def test_choice(candidates: tuple[float, ...], losses: tuple[float, ...], winner: float) -> None:
    assert candidates[choose(candidates, losses)] == winner


def test_choice_refuses_when_nothing_is_finite() -> None:
    with pytest.raises(ArithmeticError):
        choose((-1, 0, 1), (math.nan, math.inf, -math.inf))


def test_inverse_dual_loss_equals_its_closed_form() -> None:
    s = torch.tensor([-600.0, -50.0, -3.0, 0.0, 0.5, 20.0, 600.0], requires_grad=True)
    loss, w1 = inverse_dual_loss(s)
    x = s.detach().double().numpy()
    l1, l0 = np.logaddexp(0, -x), np.logaddexp(0, x)
    expected_w1 = l0**2 / (l0**2 + l1**2)
    np.testing.assert_allclose(w1, expected_w1, rtol=1e-9, atol=1e-300)
    np.testing.assert_allclose(loss.detach(), (l0**2 * l1 + l1**2 * l0) / (l0**2 + l1**2), rtol=1e-9)
    loss.sum().backward()
    # No gradient through the weights: w1 * l1' + w0 * l0'.
    sigmoid = 1 / (1 + np.exp(-x))
    assert s.grad is not None
    np.testing.assert_allclose(
        s.grad, -expected_w1 * (1 - sigmoid) + (1 - expected_w1) * sigmoid, rtol=2e-6, atol=1e-30
    )
