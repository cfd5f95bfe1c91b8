"""Top-k and all-pairs logits against scoring every pair by itself."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from invdist.config.registry import BACKBONES
from invdist.models.backbone import Backbone
from invdist.models.exposure_head import ExposureHead
from invdist.models.frozen import Additive, FrozenModel
from invdist.runtime.errors import UserError
from invdist.runtime.process import one_thread
from invdist.serving.all_pairs import Pairwise, all_pairs
from invdist.serving.seen import SeenPairs
from invdist.serving.topk import TILE, FoundItems, Ranker, TopK, batches, prepared_items, scored

USERS = 300


class _Odd(Backbone):
    """A backbone that serving has never heard of."""

    columns = 3

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        return torch.sin(user).sum(-1) - (user * item).abs().amax(-1)


def _model(kind: str, items: int) -> FrozenModel:
    torch.manual_seed(0)
    name, _, more = kind.partition("+")
    if name == "means":
        backbone: Backbone = Additive(torch.tensor(0.3))
    elif name == "odd":
        backbone = _Odd()
    else:
        backbone = BACKBONES.get(name)(dim=8, bias=bool(more), dropout=0.5)
    if more == "vectors":
        backbone = ExposureHead(backbone, 12, hidden=20, dropout=0.3)
    columns = backbone.columns + backbone.frozen_columns
    return FrozenModel(torch.randn(USERS, columns), torch.randn(items, columns), backbone)


def _tolerance(kind: str) -> dict[str, Any]:
    # Logits of a head over random rows are in the tens, not near one as the others.
    return {"rtol": 1e-6, "atol": 2e-5} if "vectors" in kind else {"atol": 1e-5}


def _seen(items: int, pairs: int = 20_000) -> SeenPairs:
    source = np.random.default_rng(0)
    return SeenPairs(source.integers(USERS, size=pairs), source.integers(items, size=pairs), items)


def _brute_force(model: FrozenModel, user: int) -> np.ndarray:
    items = torch.arange(len(model.item))
    with torch.inference_mode():
        return model(torch.full_like(items, user), items).numpy()


@pytest.mark.parametrize(
    "kind", ["gmf", "gmf+bias", "neumf", "neumf+bias", "means", "odd", "gmf+vectors", "neumf+vectors", "odd+vectors"]
)
def test_all_pairs_are_every_pair_by_itself(kind: str) -> None:
    model = _model(kind, 700)
    form = all_pairs(model.backbone)
    assert isinstance(form, Pairwise) == (kind == "odd")
    with torch.inference_mode():
        logits = form.logits(form.users(model.user[:40]), form.items(model.item))
    expected = np.stack([_brute_force(model, user) for user in range(40)])
    np.testing.assert_allclose(logits.numpy(), expected, **_tolerance(kind))


@pytest.mark.parametrize(
    ("kind", "items", "k"),
    [
        ("gmf", 5000, 10),
        ("gmf+bias", 4096, 1),
        ("neumf", 2500, 7),
        ("odd", 3000, 10),
        ("gmf+vectors", 3000, 10),
        ("neumf+vectors", 90, 10),
        ("gmf", 90, 10),  # every item is a candidate
        ("gmf", 90, 90),  # users have seen some, so they get fewer
    ],
)
def test_the_best_are_those_of_brute_force(kind: str, items: int, k: int) -> None:
    model, seen = _model(kind, items), _seen(items)
    users = np.random.default_rng(1).permutation(USERS)[:270]
    found = list(TopK(model, k, seen).of(users))
    user, rank, item, score = (np.concatenate(column) for column in zip(*found, strict=True))
    assert list(dict.fromkeys(user.tolist())) == users.tolist()
    for one in users[:40]:
        mine = user == one
        expected = _brute_force(model, one).copy()
        expected[seen.of(np.array([one]))[1]] = -np.inf
        best = np.argsort(-expected, kind="stable")[:k]
        best = best[expected[best] > -np.inf]
        np.testing.assert_allclose(score[mine], expected[best], **_tolerance(kind))
        np.testing.assert_allclose(expected[item[mine]], expected[best], **_tolerance(kind))
        assert len(set(item[mine].tolist())) == len(best)
        assert rank[mine].tolist() == list(range(1, len(best) + 1))
        assert all(a >= b for a, b in pairwise(score[mine]))


@pytest.mark.parametrize(("kind", "k"), [("gmf", 10), ("neumf+bias", 3), ("gmf+vectors", 10), ("ties", 20)])
def test_the_best_of_slices_are_the_best_of_all_to_the_bit(kind: str, k: int) -> None:
    items = 3 * TILE + 100
    model, seen = _model("gmf" if kind == "ties" else kind, items), _seen(items)
    if kind == "ties":
        model.item[:] = model.item[:40].repeat(200, 1)[:items].clone()
    users = np.arange(USERS)
    rankers = [
        Ranker(model.backbone, prepared_items(model.backbone, model.item[first:end]), range(first, end), k, seen_part)
        for first, end in ((0, TILE), (TILE, 3 * TILE), (3 * TILE, items), (items, items))
        for seen_part in [_part_of(seen, users, first, end, items)]
    ]
    merged = []
    with one_thread():
        for batch in batches(users, k):
            parts = [ranker.best(batch, model.user[torch.from_numpy(batch)]) for ranker in rankers]
            merged.append(scored(model, batch, FoundItems.merged(parts, k)))
    for one, whole in zip(merged, TopK(model, k, seen).of(users), strict=True):
        for found, expected in zip(one, whole, strict=True):
            np.testing.assert_array_equal(found, expected)
    if kind == "ties":  # of equal items the lowest that the user has not seen
        user = int(users[7])
        scores = _brute_force(model, user)
        scores[seen.of(np.array([user]))[1]] = -np.inf
        mine = merged[0].item[merged[0].user == user]
        assert mine.tolist() == np.lexsort((np.arange(items), -scores))[:k].tolist()


def _part_of(seen: SeenPairs, users: np.ndarray, first: int, end: int, items: int) -> SeenPairs:
    user, item = seen.of(users)
    mine = (item >= first) & (item < end)
    return SeenPairs(user[mine], item[mine], items)


def test_nothing_seen_leaves_nothing_out() -> None:
    model = _model("means", 400)
    found = next(TopK(model, 3).of(np.array([5])))
    assert found.item.tolist() == model.item[:, 0].argsort(descending=True)[:3].tolist()


def test_threads_are_given_back() -> None:
    before = torch.get_num_threads()
    batches = TopK(_model("gmf", 400), 2).of(np.arange(USERS))
    next(batches)
    batches.close()
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(("k", "message"), [(0, "at least 1"), (91, "more than the 90 items of the catalogue")])
def test_a_k_that_cannot_be(k: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        TopK(_model("gmf", 90), k)
