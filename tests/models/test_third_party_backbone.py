"""A backbone from another package: found by its entry point, trained, scored, and as documented."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import binary_cross_entropy_with_logits

from invdist import config
from invdist.bench.step import random_vectors
from invdist.config.registry import BACKBONES
from invdist.config.schema import ExposuresConfig
from invdist.embeddings.exchange import Pairs
from invdist.embeddings.shared_memory import connect
from invdist.models.build import build_recommender, with_head
from invdist.models.recommender import Recommender
from invdist.runtime.errors import UserError
from tests.embeddings.sharded import ITEMS, USERS, small_spec

EXAMPLE = Path(__file__).with_name("third_party.py")
PAIRS = Pairs(torch.tensor([0, 3, 3, 7]), torch.tensor([1, 1, 5, 16]))
LABELS = torch.tensor([1.0, 0.0, 1.0, 0.0])


@pytest.fixture(scope="module", autouse=True)
def _alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package with the example as its only plugin, for the time of a test."""
    (tmp_path / "their_backbones.py").write_text(EXAMPLE.read_text())
    (tmp_path / "theirs-1.0.dist-info").mkdir()
    (tmp_path / "theirs-1.0.dist-info" / "METADATA").write_text("Name: theirs\nVersion: 1.0\n")
    entry = "[invdist.backbones]\ntwo_tower = their_backbones\n"
    (tmp_path / "theirs-1.0.dist-info" / "entry_points.txt").write_text(entry)
    BACKBONES.names()
    monkeypatch.setattr(BACKBONES, "_types", dict(BACKBONES._types))
    monkeypatch.setattr(BACKBONES, "_loaded", False)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("their_backbones", None)


def _gamma_step(model: Recommender) -> float:
    """One step on the log-loss of PAIRS; gives the mean loss before it."""
    exchange = model.exchange(PAIRS)
    rows = model.pull(exchange)[0]
    logits = model.logits(rows, exchange.routes[0])
    loss = binary_cross_entropy_with_logits(logits, LABELS, reduction="sum")
    gradient, mean = model.gradient(loss, len(LABELS), rows, exchange.routes[0])
    model.step(gradient)
    return float(mean)


def test_its_name_is_a_choice_of_the_settings() -> None:
    assert BACKBONES.names() == ["gmf", "neumf", "two_tower"]
    assert config.from_mapping({"data": {"path": "x"}, "model": "two_tower"}).model == "two_tower"


@pytest.mark.parametrize("bias", [False, True])
def test_it_is_trained_through_build_recommender(bias: bool) -> None:
    model = build_recommender(small_spec(model="two_tower", bias=bias), torch.device("cpu"))
    rows, dense = model.rows.local_rows.clone(), [p.detach().clone() for p in model.backbone.parameters()]
    losses = [_gamma_step(model) for _ in range(5)]
    assert losses[-1] < losses[0]
    assert all(not torch.equal(a, b) for a, b in zip(model.backbone.parameters(), dense, strict=True))
    changed = model.rows.local_rows.ne(rows).any(1).nonzero().flatten()
    assert len(changed) == 3 + 3, "the distinct users and items of PAIRS, and no other row"
    assert model.rows.local_rows.shape == (USERS + ITEMS, model.backbone.columns)


@pytest.mark.parametrize("head", [False, True])
def test_its_separable_form_is_its_forward(head: bool) -> None:
    torch.manual_seed(0)
    inner = BACKBONES.get("two_tower")(dim=4, dropout=0.5, bias=True)
    backbone = with_head(inner, ExposuresConfig(vectors=head, dim=8, learned=8)).eval()
    user, item = torch.randn(2, 6, backbone.columns + backbone.frozen_columns)
    combined = backbone.combine(backbone.user_part(user), backbone.item_part(item))
    torch.testing.assert_close(combined, backbone(user, item))


def test_the_documented_example_is_the_one_that_is_run(repository: Path) -> None:
    text = (repository / "docs" / "backbones.md").read_text()
    assert text.split("```python\n")[1].split("```")[0] in EXAMPLE.read_text()


def _built(model: str, exposures: ExposuresConfig) -> Recommender:
    cpu, comm = torch.device("cpu"), connect()
    vectors = random_vectors(USERS, ITEMS, exposures.dim, comm, cpu) if exposures.vectors else None
    return build_recommender(small_spec(model=model, exposures=exposures), cpu, comm, vectors)


@pytest.mark.slow
@pytest.mark.parametrize("vectors", [False, True])
@pytest.mark.parametrize("model", ["two_tower", "gmf", "neumf"])
def test_compiled_it_gives_the_same(model: str, vectors: bool) -> None:
    """By torch.compile for the CPU: the same weights after some steps, batches of other sizes, and the same scores.

    What `gmf` and `neumf` compute by hand is not compiled; with exposure vectors they are.
    """
    exposures = ExposuresConfig(vectors=vectors, dim=8, learned=8, hidden=8, dropout=0.0)
    plain, compiled = (_built(model, exposures) for _ in range(2))
    compiled.compile(len(LABELS))
    assert (compiled.compiled["compile_seconds"] > 0) or (model != "two_tower" and not vectors)
    for _ in range(5):
        assert _gamma_step(compiled) == pytest.approx(_gamma_step(plain), abs=1e-6)
    torch.testing.assert_close(compiled.rows.local_rows, plain.rows.local_rows, rtol=0, atol=1e-6)
    fewer = Pairs(PAIRS.user[:3], PAIRS.item[:3])
    torch.testing.assert_close(compiled.score(fewer), plain.score(fewer), rtol=0, atol=1e-6)
    assert compiled.backbone.state_dict().keys() == plain.backbone.state_dict().keys()


def test_what_cannot_be_compiled_is_an_error_of_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_recommender(small_spec(model="two_tower"), torch.device("cpu"))

    def fail(*args: object) -> torch.Tensor:
        raise RuntimeError("no working compiler\nand more")

    monkeypatch.setattr(model.backbone, "of_rows", fail)
    with pytest.raises(
        UserError, match=r"training\.compile: torch\.compile failed, RuntimeError: no working compiler;"
    ):
        model.compile(4)
