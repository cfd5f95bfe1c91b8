"""Kernels give the same bits for any number of threads: those of one thread, which other tests compare with torch."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from invdist.config.registry import BACKBONES
from invdist.embeddings import kernels as kernel_module
from invdist.embeddings.kernels import SOURCE, Kernels, kernels
from invdist.embeddings.row_moves import Deltas, UniqueRows
from invdist.models.backbones.neumf_kernels import neumf_kernels
from invdist.runtime.native import compiled

SIZES = (0, 1, 2, 3, 15, 17, 127, 128, 129, 255, 256, 257, 511, 513, 2047, 2049, 8191, 8193, 33000)
"""Around the edges of blocks (16, 128, 256, 2,048, 8,192 pairs), and fewer than threads."""


@pytest.fixture(autouse=True)
def _threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if kernels() is None:
        pytest.skip("no C compiler here")
    monkeypatch.setattr(kernel_module, "_SHARE", 1)  # all inputs are large
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def _same(compute: Callable[[], list[Tensor]]) -> list[Tensor]:
    """What `compute` gives with one thread; asserts that it gives the same with more."""
    torch.set_num_threads(1)
    one = compute()
    for threads in (2, 3, 7):
        torch.set_num_threads(threads)
        for found, expected in zip(compute(), one, strict=True):
            assert torch.equal(found, expected)
    return one


def _kernels() -> Kernels:
    found = kernels()
    assert found is not None
    return found


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("width", [4, 36])
def test_rows(n: int, width: int) -> None:
    k, source = _kernels(), torch.Generator().manual_seed(n)
    table = torch.randn(5000, width, generator=source)
    # Most occurrences are of few rows: a segment is longer than the part of a thread.
    index = torch.cat([torch.randint(9, (n // 2,)), torch.randint(5000, (n - n // 2,))])[torch.randperm(n)]
    values = torch.randn(n, width, generator=source)
    (found,) = _same(lambda: [k.gather(table, index)])
    assert torch.equal(found, table[index])
    keys, out = (index % 2 << 13) + index, torch.empty(n, width)
    (found,) = _same(lambda: [k.gather_keys([table, table + 1], 13, keys, out.clone())])
    assert torch.equal(found, table[index] + (index % 2)[:, None])
    (found,) = _same(lambda: [k.gather_parts([table[:77], table[77:]], index)])
    assert torch.equal(found, table[index])
    unique = UniqueRows.of(index)
    (inverse,) = _same(lambda: [k.inverse(unique.order, unique.starts)])
    assert torch.equal(unique.rows[inverse], index)
    parts = list(values.tensor_split([n // 3]))
    (sums,) = _same(lambda: [k.sum(parts, unique.order, unique.starts, 0.3)])
    exact = torch.zeros(len(unique.rows), width, dtype=torch.float64).index_add_(0, inverse, values.double())
    assert torch.allclose(sums.double(), 0.3 * exact, rtol=1e-4, atol=1e-4)
    for sign in (None, (0.1, 1e-8), (0.0, 1e-8)):
        stepped, square = _same(lambda sign=sign: _sum_and_step(parts, unique, sign))
        assert float(square) == pytest.approx(float(sums.double().square().sum()), rel=1e-5)
        expected = sums if sign is None else sign[0] * (sums / (sums.abs() + sign[1]))
        assert torch.equal(stepped, expected)
    wanted = UniqueRows.of(index.flip(0) // 2)
    (places,) = _same(lambda: [k.places(unique.rows, wanted.rows, wanted.order, wanted.starts)])
    there = places >= 0
    assert torch.equal(there, torch.isin(index.flip(0) // 2, index))
    assert torch.equal(unique.rows[places[there]], (index.flip(0) // 2)[there])

    def add() -> list[Tensor]:
        rows, more = table.clone(), values.clone()
        k.add(rows, unique.rows, sums, 0.7)
        k.add_indexed(more, places, sums, 0.7)
        return [rows, more]

    rows, more = _same(add)
    assert torch.allclose(rows, table.index_add(0, unique.rows, sums, alpha=0.7), rtol=1e-6, atol=1e-6)
    dense = torch.where(there[:, None], sums[places], 0.0) if len(sums) else torch.zeros_like(values)
    assert torch.allclose(more, values + 0.7 * dense, rtol=1e-6, atol=1e-6)

    def adamw() -> list[Tensor]:
        tables = (table.clone(), torch.zeros_like(table), torch.zeros_like(table))
        constants = {"gamma": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
        k.adamw(tables, unique.rows, sums, (0, width), step=1, **constants)
        return list(tables)

    _, m, _ = _same(adamw)
    assert torch.allclose(m, torch.zeros_like(m).index_copy(0, unique.rows, 0.1 * sums), rtol=1e-5)


def _sum_and_step(parts: list[Tensor], unique: UniqueRows, sign: tuple[float, float] | None) -> list[Tensor]:
    values, square = _kernels().sum_and_step(parts, unique.order, unique.starts, 0.3, sign)
    return [values, torch.tensor(square)]


def test_the_first_row_that_is_not_there_is_named() -> None:
    index = torch.arange(1000)
    index[[300, 301, 900]] = torch.tensor([5001, -1, 5002])
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        with pytest.raises(IndexError, match="row 5001 of"):
            _kernels().gather(torch.zeros(5000, 4), index)


@pytest.mark.parametrize("n", SIZES)
def test_losses(n: int) -> None:
    k, source = _kernels(), torch.Generator().manual_seed(n)
    logits, label = torch.randn(5, n, generator=source), torch.rand(n, generator=source)
    _same(lambda: [k.dual_loss(logits[0]), k.log_loss(logits[0], label), torch.tensor(k.log_loss_sums(logits, label))])
    (found,) = _same(lambda: [torch.tensor(k.square_sum(logits))])
    assert float(found) == pytest.approx(float(logits.double().square().sum()), rel=1e-5)

    def sign() -> list[Tensor]:
        values = logits.clone()
        k.sign_step(values, 0.1, 1e-8)
        return [values]

    _same(sign)


def test_a_sum_over_several_rounds_of_blocks() -> None:
    values = torch.randn(5_000_003, generator=torch.Generator().manual_seed(0))
    (found,) = _same(lambda: [torch.tensor(_kernels().square_sum(values))])
    assert float(found) == pytest.approx(float(values.double().square().sum()), rel=1e-6)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(("model", "dim"), [("gmf", 4), ("gmf", 36), ("neumf", 4), ("neumf", 16)])
def test_backbones(model: str, dim: int, n: int) -> None:
    torch.manual_seed(n)
    backbone = BACKBONES.get(model)(dim, bias=True)
    rows = torch.randn(2 * n, backbone.columns).requires_grad_()
    deltas = Deltas(torch.randn(max(n, 1), backbone.columns), torch.randint(-1, max(n, 1), (2 * n,)))
    dense = torch.cat([parameter.detach().view(-1) for parameter in backbone.parameters()])
    step, weights = torch.randn_like(dense), torch.randn(n)

    def compute() -> list[Tensor]:
        logits = backbone.of_rows(rows)
        gradients = torch.autograd.grad((logits * weights).sum(), [rows, *backbone.parameters()])
        tried = backbone.candidate_logits(rows.detach(), deltas, dense, step, [0.0, -0.5, 1.0])
        assert tried is not None
        return [logits.detach(), *gradients, tried]

    logits, of_rows, *of_dense = _same(compute)[:-1]
    assert model == "gmf" or neumf_kernels(rows) is not None
    plain = backbone(rows[:n], rows[n:])
    assert torch.allclose(logits, plain, rtol=1e-4, atol=1e-4)
    for found, expected in zip(
        [of_rows, *of_dense], torch.autograd.grad((plain * weights).sum(), [rows, *backbone.parameters()]), strict=True
    ):
        assert torch.allclose(found, expected, rtol=1e-3, atol=1e-3 * max(1.0, n**0.5 / 10))


def test_without_openmp_there_is_one_thread(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here a compiler that does not know the option."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    script = tmp_path / "cc"
    script.write_text('#!/bin/sh\ncase "$*" in *-fopenmp*) exit 1;; esac\nexec cc "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))
    source = tmp_path / SOURCE.name
    shutil.copy(SOURCE, source)
    found = compiled(source)
    assert "compiled kernels with one thread" in found.said
    assert found.library is not None
    function, values = found.library.square_sum, torch.randn(9000)
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int], ctypes.c_double
    assert function(values.data_ptr(), len(values), 3) == _kernels().square_sum(values)


_TEAMS = """
import os, sys, torch
from invdist.embeddings.kernels import kernels
def of_this(): return len(os.listdir("/proc/self/task"))
def libraries(): return {line.split()[-1] for line in open("/proc/self/maps") if "omp" in line.split("/")[-1]}
torch.set_num_threads(1)
table, index = torch.randn(5000, 64), torch.arange(5000)
kernels().gather(table, index)
before, loaded = of_this(), libraries()
kernels().gather(table, index)
torch.ones(1 << 20).add_(1)
assert of_this() == before, "one thread started a team"
torch.set_num_threads(3)
torch.ones(1 << 20).add_(1)
assert of_this() == before + 2
expected = kernels().gather(table, index)
assert of_this() == before + 2, "a team beside that of torch"
assert libraries() == loaded
child = os.fork()
if child == 0:
    torch.set_num_threads(1)
    os._exit(0 if torch.equal(kernels().gather(table, index), expected) else 1)
assert os.waitpid(child, 0)[1] == 0
"""


def test_one_team_for_torch_and_kernels_and_none_for_one_thread() -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", _TEAMS], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
