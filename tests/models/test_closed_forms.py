"""What backbones compute by hand against autograd on the plain forward pass, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from invdist.config.registry import BACKBONES
from invdist.embeddings import row_moves
from invdist.embeddings.row_moves import Deltas, UniqueRows
from invdist.models.backbone import Backbone
from invdist.models.exposure_head import ExposureHead
from invdist.models.flat import flatten

CANDIDATES = [-3.0, -1.0, -0.3, 0.0, 1.0]


def _new(model: str, dim: int, bias: bool) -> Backbone:
    """A backbone by name; with `+ vectors`, with a head over exposure vectors."""
    name, _, vectors = model.partition(" + ")
    inner = BACKBONES.get(name)(dim=dim, bias=bias)
    return ExposureHead(inner, 12, hidden=7).eval() if vectors else inner


def _backbone(model: str, dim: int, bias: bool) -> tuple[Backbone, Tensor]:
    torch.manual_seed(0)
    backbone = _new(model, dim, bias)
    for parameter in backbone.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return backbone, flatten(list(backbone.parameters()))


def _reference(model: str, dim: int, bias: bool, dense: Tensor) -> Backbone:
    """The same model in float64, which knows no closed form."""
    backbone = _new(model, dim, bias).double()
    flatten(list(backbone.parameters())).copy_(dense)
    return backbone


@pytest.mark.parametrize("model", ["gmf", "neumf"])
@pytest.mark.parametrize(("dim", "bias", "pairs"), [(4, False, 1), (20, True, 300), (32, False, 777), (32, True, 0)])
@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_logits_and_gradients_are_those_of_autograd(
    model: str, dim: int, bias: bool, pairs: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the kernels of the CPU, and the way of a GPU."""
    if device == "gpu":
        monkeypatch.setattr(row_moves, "reads_are_free", lambda device: False)
    backbone, dense = _backbone(model, dim, bias)
    rows = torch.randn(2 * pairs, backbone.columns, requires_grad=True)
    weights = torch.randn(pairs)
    logits = backbone.of_rows(rows)
    found = torch.autograd.grad((logits * weights).sum(), [rows, *backbone.parameters()])
    reference = _reference(model, dim, bias, dense)
    exact = rows.detach().double().requires_grad_()
    expected = reference(*exact.chunk(2))
    assert torch.allclose(logits.double(), expected, rtol=1e-5, atol=1e-5)
    gradients = torch.autograd.grad((expected * weights).sum(), [exact, *reference.parameters()])
    for one, other in zip(found, gradients, strict=True):
        assert one.shape == other.shape
        assert (one - other).abs().max() <= 1e-4 * other.abs().max() if pairs else not other.any()


@pytest.mark.parametrize(("dim", "bias", "pairs"), [(4, False, 1), (20, True, 300), (32, False, 257)])
def test_neumf_from_distinct_rows_is_that_of_autograd(dim: int, bias: bool, pairs: int) -> None:
    """Users and items are in any order among the distinct rows, as those of several owners are."""
    backbone, dense = _backbone("neumf", dim, bias)
    if not backbone.takes_distinct_rows():
        pytest.skip("without compiled kernels each pair has its rows")
    ids = torch.cat([2 * torch.randint(9, (pairs,)), 2 * torch.randint(15, (pairs,)) + 1])
    pieces = UniqueRows.of(ids)
    rows = torch.randn(len(pieces.rows), backbone.columns, requires_grad=True)
    weights = torch.randn(pairs)
    logits = backbone.of_distinct_rows(rows, pieces)
    found = torch.autograd.grad((logits * weights).sum(), [rows, *backbone.parameters()])
    reference = _reference("neumf", dim, bias, dense)
    exact = rows.detach().double().requires_grad_()
    expected = reference(*exact[pieces.inverse].chunk(2))
    assert torch.allclose(logits.double(), expected, rtol=1e-5, atol=1e-5)
    gradients = torch.autograd.grad((expected * weights).sum(), [exact, *reference.parameters()])
    for one, other in zip(found, gradients, strict=True):
        assert one.shape == other.shape
        assert (one - other).abs().max() <= 1e-4 * other.abs().max()


def _some(rows: int, of: int, share: float) -> Tensor:
    return torch.where(torch.rand(rows) < share, torch.randint(of, (rows,)), -1)


@pytest.mark.parametrize("model", ["gmf", "neumf", "gmf + vectors", "neumf + vectors"])
@pytest.mark.parametrize(("dim", "bias", "touched"), [(4, False, 1.0), (20, True, 0.1), (32, False, 0.0)])
@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_candidates_are_those_of_one_forward_pass_each(
    model: str, dim: int, bias: bool, touched: float, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks by the kernels of the CPU, and the way of a GPU."""
    monkeypatch.setattr("invdist.models.backbone._CHUNK", 64)
    if device == "gpu":
        monkeypatch.setattr(row_moves, "reads_are_free", lambda device: False)
    backbone, dense = _backbone(model, dim, bias)
    rows = torch.randn(400, backbone.columns + backbone.frozen_columns)
    deltas = Deltas(0.1 * torch.randn(50, backbone.columns), _some(400, 50, touched))
    step = torch.randn_like(dense) * 0.1
    found = backbone.candidate_logits(rows, deltas, dense, step, CANDIDATES)
    assert found is not None
    moves = torch.nn.functional.pad(deltas.dense(), (0, backbone.frozen_columns)).double()
    for c, logits in zip(CANDIDATES, found, strict=True):
        reference = _reference(model, dim, bias, dense.double() + c * step.double())
        expected = reference(*(rows.double() + c * moves).chunk(2))
        assert torch.allclose(logits.double(), expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_the_pass_after_a_commit_is_that_of_the_candidate(
    bias: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits and gradients at the committed candidate, from the layers that were kept when it was tried."""
    monkeypatch.setattr("invdist.models.backbone._CHUNK", 64)
    if device == "gpu":
        monkeypatch.setattr(row_moves, "reads_are_free", lambda device: False)
    backbone, dense = _backbone("neumf", 20, bias)
    rows, weights = torch.randn(400, backbone.columns), torch.randn(200)
    deltas, step = Deltas(0.03 * torch.randn(50, backbone.columns), _some(400, 50, 0.3)), 0.03 * torch.randn_like(dense)
    tried = backbone.try_candidates(rows, deltas, dense, step, CANDIDATES)
    assert tried is not None
    for number, c in enumerate(CANDIDATES):
        committed, _ = _backbone("neumf", 20, bias)
        torch.nn.utils.vector_to_parameters(dense + c * step, committed.parameters())
        moved = (rows + c * deltas.dense()).requires_grad_()
        found = committed.of_candidate(moved, tried, number if device == "cpu" else torch.tensor(number))
        expected = committed(*moved.chunk(2))
        assert torch.allclose(found, expected, rtol=1e-4, atol=2e-5)
        inputs = [moved, *committed.parameters()]
        of_found, of_expected = (torch.autograd.grad((s * weights).sum(), inputs) for s in (found, expected))
        for one, other in zip(of_found, of_expected, strict=True):
            assert (one - other).abs().max() <= 1e-3 * other.abs().max()


@pytest.mark.parametrize("model", ["gmf", "neumf", "gmf + vectors", "neumf + vectors"])
def test_a_step_that_is_not_finite_leaves_the_pass_as_it_is(model: str) -> None:
    backbone, dense = _backbone(model, 8, False)
    rows = torch.randn(20, backbone.columns + backbone.frozen_columns)
    broken = Deltas(torch.full((20, backbone.columns), torch.nan), torch.arange(20))
    found = backbone.candidate_logits(rows, broken, dense, torch.full_like(dense, torch.inf), CANDIDATES)
    assert found is not None
    assert torch.allclose(found[3], backbone.of_rows(rows), atol=1e-5)
    assert not found[[0, 1, 2, 4]].isfinite().any()
