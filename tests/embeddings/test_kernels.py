"""The compiled kernels against the torch operators that do the same, and what happens where there are none."""

from __future__ import annotations

import math
import shutil

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from invdist.embeddings import row_moves
from invdist.embeddings.kernels import SOURCE, kernels
from invdist.embeddings.row_moves import Deltas, UniqueRows, add_rows, gather_keys, gather_rows, square_sum
from invdist.embeddings.row_optimizers import Adam, ColumnGroup
from invdist.learning.losses import inverse_dual_loss, log_loss, log_loss_sums
from invdist.runtime.native import compiled

ROWS = 5000


@pytest.fixture(autouse=True)
def _compiled() -> None:
    if kernels() is None:
        pytest.skip("no C compiler here")


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch):
    """Calls a function with torch operators alone."""

    def call(function, *arguments):
        with monkeypatch.context() as patch:
            patch.setattr(row_moves, "kernels", lambda: None)
            return function(*arguments)

    return call


def _lists() -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(0)
    few = [torch.tensor(values, dtype=torch.int64) for values in ([], [7], [3, 3, 3], [5, 2, 5, 0, 2])]
    return [*few, *(torch.randint(high, (3000,), generator=source) for high in (1, 40, ROWS, 1 << 45))]


@pytest.mark.parametrize("number", range(8))
@pytest.mark.parametrize("width", [4, 20, 160])
def test_row_moves_give_the_same_bits(without, number: int, width: int) -> None:
    occurrences = _lists()[number]
    expected, found = without(UniqueRows.of, occurrences), UniqueRows.of(occurrences)
    for name in ("rows", "order", "starts"):
        assert torch.equal(getattr(found, name), getattr(expected, name))
    assert torch.equal(found.inverse, without(lambda: expected.inverse))
    values, scale = torch.randn(len(occurrences), width), torch.tensor(0.37)
    sums = found.sum(values, scale)
    assert torch.equal(sums, without(expected.sum, values, scale))
    wanted = UniqueRows.of(occurrences[::3] + 1)
    index = found.places_of(wanted)
    assert torch.equal(index, without(expected.places_of, wanted))
    rows = torch.randn(len(index), width)
    expected_rows = without(Deltas(sums, index).add_to, rows.clone(), 0.7)
    assert torch.equal(Deltas(sums, index).add_to(rows.clone(), 0.7), expected_rows)
    if number < 7:
        table = torch.randn(ROWS, width)
        assert torch.equal(gather_rows(table, occurrences), table[occurrences])
        one, other = table.clone(), table.clone()
        add_rows(one, found.rows, sums, -0.3)
        without(add_rows, other, found.rows, sums, -0.3)
        assert torch.equal(one, other)
        keys = (occurrences % 3 << 13) + occurrences
        tables, out = [table, table + 1, table + 2], torch.empty(len(keys), width)
        assert torch.equal(gather_keys(tables, 13, keys, out), table[occurrences] + (occurrences % 3)[:, None])
        assert torch.equal(without(gather_keys, tables, 13, keys, torch.empty_like(out)), out)


@pytest.mark.parametrize("groups", [(), (ColumnGroup(12, 0.001, 1e-8), ColumnGroup(8, 0.03, 1 / 64))])
def test_adam_gives_the_same_rows(without, groups: tuple) -> None:
    """To the bit, except that torch's kernel takes another way for the last few values of a list."""
    ends = []
    for call in (without, lambda function, *arguments: function(*arguments)):
        torch.manual_seed(1)
        table = torch.randn(ROWS, 20)
        options = {"gamma": 0.01, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.999, "eps": 1e-6}
        optimizer = Adam(table, groups=groups, **options)
        for size in (ROWS, 2500, 0, 7):
            call(optimizer.update, table, torch.randperm(ROWS)[:size].sort().values, torch.randn(size, 20))
        ends.append([table, *optimizer.state.values()])
    for one, other in zip(*ends, strict=True):
        assert torch.allclose(one, other, rtol=1e-6, atol=1e-9)
        assert (one != other).sum() < 64


@pytest.mark.parametrize("count", [0, 1, 15, 16, 2048, 5003])
def test_sums_are_those_of_float64(count: int) -> None:
    torch.manual_seed(2)
    logits, label = torch.randn(3, count) * torch.tensor([[0.01], [3.0], [300.0]]), torch.randint(2, (count,)).float()
    exact = binary_cross_entropy_with_logits(logits.double(), label.double().expand_as(logits), reduction="none")
    assert torch.allclose(log_loss_sums(logits, label), exact.sum(1), rtol=2e-7)
    assert square_sum(logits) == pytest.approx(float(logits.double().square().sum()), rel=1e-6)


@pytest.mark.parametrize("count", [0, 1, 16, 1000])
def test_log_loss_and_its_gradient_are_those_of_float64(count: int) -> None:
    torch.manual_seed(3)
    logit, label = (20 * torch.randn(count)).requires_grad_(), torch.rand(count)
    loss, weights = log_loss(logit, label), torch.randn(count)
    exact = logit.detach().double().requires_grad_()
    expected = binary_cross_entropy_with_logits(exact, label.double(), reduction="none")
    # As in torch, (1 - label) * s cancels against -s: the error is that of the logit.
    assert ((loss - expected).abs() <= 3e-7 * (1 + logit.abs())).all()
    (found,), (gradient,) = (
        torch.autograd.grad((value * weights).sum(), [at]) for value, at in ((loss, logit), (expected, exact))
    )
    assert torch.allclose(found.double(), gradient, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("logit", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("label", [0.0, 1.0])
def test_a_logit_that_is_not_finite_has_the_loss_of_torch(without, logit: float, label: float) -> None:
    for pairs in (1, 40):
        logits, labels = torch.zeros(2, pairs), torch.full((pairs,), label)
        logits[1, pairs // 2] = logit
        found = log_loss_sums(logits, labels)
        assert torch.allclose(found, without(log_loss_sums, logits, labels), equal_nan=True)
        assert found[0].isfinite()
        assert not found[1].isfinite()


def test_the_dual_loss_and_its_gradient_are_those_of_torch_operators(without) -> None:
    special = [0.0, -0.0, 1e-30, -1e-9, 1e-4, 37.0, -90.0, 800.0, math.nan]
    logit = torch.cat([torch.tensor(special), torch.randn(500) * 5]).requires_grad_()

    def of(logit: torch.Tensor) -> tuple[torch.Tensor, ...]:
        loss, annotation = inverse_dual_loss(logit)
        return loss, *annotation, torch.autograd.grad(loss.sum(), logit)[0]

    for one, other in zip(of(logit), without(of, logit), strict=True):
        assert one.dtype == other.dtype
        assert torch.allclose(one, other, rtol=1e-13 if one.dtype == torch.float64 else 1e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize("multiplier", [1, 29])
@pytest.mark.parametrize(("rows", "ranks"), [(100, 3), (7, 7), (5, 8), (1 << 40, 1000)])
def test_ids_are_located_as_by_torch_operators(rows: int, ranks: int, multiplier: int) -> None:
    block = -(-rows // ranks)
    ids = torch.randint(rows, (2000,), generator=torch.Generator().manual_seed(1))
    edges = torch.arange(ranks) * block
    ids = torch.cat([ids, edges[edges < rows], (edges - 1).clamp(0, rows - 1), torch.tensor([rows - 1])])
    bases, place = torch.randint(1 << 20, (ranks,)), ids * multiplier % rows
    compiled_ones = kernels()
    assert compiled_ones is not None
    found = compiled_ones.locate(ids, block, bases, multiplier, rows)
    assert torch.equal(found, place + bases[place // block])
    for wrong in (-1, rows):
        with pytest.raises(IndexError, match=f"id {wrong} of a table with {rows} rows"):
            compiled_ones.locate(torch.tensor([0, wrong]), block, bases, multiplier, rows)


def test_a_row_that_is_not_there_is_an_error() -> None:
    table = torch.zeros(5, 4)
    for row in (-1, 5):
        with pytest.raises(IndexError, match=f"row {row} of a table with 5"):
            gather_rows(table, torch.tensor([0, row]))
        with pytest.raises(IndexError, match=f"row {row} of"):
            add_rows(table, torch.tensor([row]), torch.zeros(1, 4), 1.0)
    for key in (-1, 5, (1 << 3) + 5, 2 << 3):
        with pytest.raises(IndexError, match=r"there are 2 ranks with \[5, 5\] rows"):
            gather_keys([table, table], 3, torch.tensor([0, key]), torch.empty(2, 4))


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"INVDIST_KERNELS": "torch"}, "torch operators: INVDIST_KERNELS=torch"),
        ({"CC": "/no/such/compiler"}, "/no/such/compiler failed"),
        ({"CC": "false"}, "false failed"),
        ({}, "built in"),
    ],
)
def test_without_a_compiler_torch_operators_are_used(
    environment: dict[str, str], said: str, tmp_path, monkeypatch
) -> None:
    source = tmp_path / "kernels.c"
    shutil.copy(SOURCE, source)  # results are kept by source
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert said in compiled(source).said
    assert (compiled(source).library is None) == ("torch operators" in compiled(source).said)


def test_a_folder_that_others_can_write_is_not_used(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "invdist").mkdir()
    (tmp_path / "invdist").chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = tmp_path / "kernels.c"
    shutil.copy(SOURCE, source)
    assert "can be written by other users" in compiled(source).said
