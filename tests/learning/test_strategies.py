"""Every strategy against its textbook version, on one rank and on two."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from invdist import config
from invdist.config.registry import STRATEGIES
from invdist.embeddings.comm import Comm
from invdist.learning.strategies.dns import hardest
from invdist.learning.strategies.t_ce import globally_largest
from invdist.learning.strategy import Setting
from invdist.runtime.errors import UserError
from tests.distributed import run_ranks
from tests.learning.harness import DIM, GAMMA, ITEMS, USERS, Result, Run, batches, execute, whole
from tests.learning.textbook_strategies import TextbookStrategy
from tests.oracle.textbook import Textbook

SRNS = {
    "weight": 0.7,
    "memory": 6,
    "fresh": 4,
    "history": 3,
    "temperature": 0.5,
    "variance_weight": 2.0,
    "ramp_steps": 2,
}
RUNS = {
    "ns-gmf": Run("ns", {"weight": 0.5}, rate=3, per_row=3),
    "ns-neumf": Run("ns", {"weight": 1.0}, model="neumf", rate=1, per_row=1),
    "idl-gmf": Run("idl", {"weight": 2.0}, rate=2, per_row=2),
    "idl-neumf": Run("idl", {"weight": 1.0}, model="neumf", rate=2, per_row=2),
    "t_ce-gmf": Run("t_ce", {"max_drop": 0.5, "ramp_steps": 3}),
    "t_ce-neumf": Run("t_ce", {"max_drop": 0.3, "ramp_steps": 1}, model="neumf"),
    "r_ce-gmf": Run("r_ce", {"b": 0.2}),
    "r_ce-neumf": Run("r_ce", {"b": 1.5}, model="neumf"),
    "dns-gmf": Run("dns", {"weight": 1.0, "candidates": 4}, rate=2, per_row=8),
    "dns-neumf": Run("dns", {"weight": 0.5, "candidates": 3}, model="neumf", rate=1, per_row=3),
    "srns-gmf": Run("srns", SRNS, rate=2, per_row=4),
    "srns-neumf": Run("srns", SRNS, model="neumf", rate=1, per_row=4),
    "srns-gpu": Run("srns", SRNS, rate=2, per_row=4, as_on_gpu=True),
}
SGD_SRNS = Run("srns", SRNS, rate=2, per_row=4, optimizer="sgd")
MEANS = Run("means", {"smoothing": 4.0}, end_epoch=True)
OTHERS = {
    "sgd-srns": SGD_SRNS,
    "sgd-srns-begun": Run("srns", SRNS, rate=2, per_row=4, optimizer="sgd", stop=3),
    "means": MEANS,
    "means-begun": Run("means", {"smoothing": 4.0}, stop=3),
}
LOSSES = [[5.0, 4.0, 3.0, 2.0], [1.0, 0.5, 0.25, 4.0, 0.1, 0.0]]


def _all(rank: int, world_size: int, runs: dict[str, Run]) -> dict[str, Result]:
    return {name: execute(rank, world_size, run) for name, run in runs.items()}


def _two(rank: int, world_size: int, runs: dict[str, Run]):
    from tests.learning import third_party  # noqa: F401 - registers itself

    runs = {**runs, "third party": Run("smoothed", {"amount": 0.3})}
    values = torch.tensor(LOSSES[rank])
    chosen = {share: globally_largest(values, share, Comm()).tolist() for share in (0.0, 0.2, 0.3, 1.0)}
    some = torch.empty(0) if rank else torch.tensor([1.0, 3.0, 2.0])
    chosen[-1.0] = globally_largest(some, 0.7, Comm()).tolist()
    return _all(rank, world_size, runs), chosen


class Ranks(NamedTuple):
    """Results of each rank."""

    runs: list[dict[str, Result]]
    largest: list[dict[float, list[int]]]


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """The textbook's tensors are tiny: threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def two() -> Ranks:
    """Every run on two ranks."""
    runs, largest = zip(*run_ranks(_two, 2, {**RUNS, **OTHERS}), strict=True)
    return Ranks(list(runs), list(largest))


@pytest.fixture(scope="module")
def one(two: Ranks) -> dict[str, Result]:
    """Every run on one rank, and those that two ranks began taken up where they were left."""
    begun = [ranks["sgd-srns-begun"] for ranks in two.runs]
    rest: dict[str, Any] = {"start": 3}
    resumed = {
        "sgd-srns resumed": replace(
            SGD_SRNS,
            weights=begun[0].after,
            state=begun[0].state,
            sharded={name: whole(begun, name) for name in begun[0].sharded},
            **rest,
        ),
        "means resumed": replace(MEANS, state=two.runs[0]["means-begun"].state, **rest),
    }
    return run_ranks(_all, 1, {**RUNS, **OTHERS, **resumed})[0]


def _textbook(run: Run, before: dict[str, np.ndarray]) -> TextbookStrategy:
    weights = {name: torch.from_numpy(value) for name, value in before.items()}
    book = Textbook(run.model, USERS, ITEMS, DIM, weights, run.optimizer, gamma=GAMMA)
    return TextbookStrategy(book, run.method, run.options, run.rate, seed=9)


def _close(got: dict[str, np.ndarray], wanted: dict[str, Any], limit: float = 1e-5) -> None:
    assert got.keys() == wanted.keys()
    for name, value in got.items():
        np.testing.assert_allclose(value, np.asarray(wanted[name]), rtol=0, atol=limit, err_msg=name)


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_steps_are_those_of_the_textbook(name: str, ranks: int, one: dict[str, Result], two: Ranks) -> None:
    result = one[name] if ranks == 1 else two.runs[0][name]
    textbook = _textbook(RUNS[name], result.before)
    losses = [textbook.step(rows) for rows in batches(RUNS[name].per_row)]
    np.testing.assert_allclose(result.losses, losses, rtol=1e-5)
    _close(result.after, textbook.book.weights())
    moved = {table: np.abs(result.after[table] - result.before[table]).max() for table in ("user", "item")}
    assert min(moved.values()) > GAMMA / 2


@pytest.mark.parametrize("name", RUNS)
def test_every_rank_reports_the_same_loss(name: str, two: Ranks) -> None:
    assert two.runs[0][name].losses == two.runs[1][name].losses


def test_truncation_is_over_the_global_batch(two: Ranks) -> None:
    # Ten values on two ranks: a fifth of them are two, of which each rank would drop its own largest, 5 and 4.
    assert [chosen[0.0] for chosen in two.largest] == [[], []]
    # 5 and one of the two 4s: the lower rank's.
    assert [chosen[0.2] for chosen in two.largest] == [[0, 1], []]
    assert [chosen[0.3] for chosen in two.largest] == [[0, 1], [3]]
    assert [sorted(chosen[1.0]) for chosen in two.largest] == [[0, 1, 2, 3], [0, 1, 2, 3, 4, 5]]
    assert [chosen[-1.0] for chosen in two.largest] == [[1, 2], []]


def test_truncating_on_each_rank_would_give_other_weights(two: Ranks) -> None:
    """The batches of the textbook test can tell: here some rank holds more of the worst than its share."""
    result = two.runs[0]["t_ce-neumf"]
    textbook = _textbook(RUNS["t_ce-neumf"], result.before)
    rows, differs = batches(0), []
    for step, batch in enumerate(rows):
        logit = textbook.book.model(batch.user, batch.item).tolist()
        rate = 0.3 * min(step, 1)
        label, half = batch.label.tolist(), len(logit) // 2
        own = textbook.dropped(logit[:half], label[:half], rate) | {
            half + i for i in textbook.dropped(logit[half:], label[half:], rate)
        }
        differs.append(own != textbook.dropped(logit, label, rate))
        textbook.step(batch)
    assert any(differs)


def test_the_drop_rate_ramps_and_is_checkpointed(two: Ranks) -> None:
    result = two.runs[0]["t_ce-gmf"]
    rates = [details["drop_rate"] for details in result.details]
    assert rates == pytest.approx([0, 0.5 / 3, 1 / 3, 0.5, 0.5])
    assert result.state["steps"] == len(rates)


def test_reweighting_by_closed_form() -> None:
    """One positive at p = 0.8 and one negative at p = 0.4: the loss, and its gradient, without that of the weight."""
    captured = {}

    class _Model:
        """Hands the strategy's loss function the logits of the case."""

        def pull(self, exchange, distinct):
            return [None]

        def logits(self, rows, route):
            captured["logits"] = torch.tensor([math.log(4.0), math.log(2 / 3)], requires_grad=True)
            return captured["logits"]

        def penalty(self, rows, route, pairs):
            return None

        def gradient(self, loss_sum, count, rows, route, penalty):
            (captured["gradient"],) = torch.autograd.grad(loss_sum / count, captured["logits"])
            return None, loss_sum.detach() / count

        def step(self, gradient):
            pass

    options = STRATEGIES.get("r_ce").Config(b=0.2)
    setting = Setting(options=options, unlabeled_rate=0, gamma=1, users=1, items=1)
    strategy = STRATEGIES.get("r_ce")(setting, _Model())  # type: ignore[arg-type]
    batch = SimpleNamespace(label=torch.tensor([1.0, 0.0]))
    record = strategy.step(strategy.phases(setting)[0], batch, SimpleNamespace(routes=[SimpleNamespace(pairs=2)]))  # type: ignore[arg-type]
    expected = (-(0.8**0.2) * math.log(0.8) - 0.6**0.2 * math.log(0.6)) / 2
    assert float(record.loss) == pytest.approx(expected, rel=1e-6)
    assert captured["gradient"].tolist() == pytest.approx([0.8**0.2 * -0.2 / 2, 0.6**0.2 * 0.4 / 2], rel=1e-5)


def test_the_hardest_candidate_is_taken() -> None:
    logits = torch.tensor([0.1, 0.9, -3.0, 2.0, 2.0, 1.0, -5.0, -6.0, -4.0])
    assert hardest(logits, 3).tolist() == [1, 3, 8]
    assert hardest(torch.empty(0), 3).tolist() == []


def _memory(result: Result | list[Result]) -> dict[int, dict[int, list[float]]]:
    """The memory of every user who has one, as the textbook keeps it."""
    results = result if isinstance(result, list) else [result]
    item, past = whole(results, "item"), whole(results, "past")
    memory = {}
    for user in np.flatnonzero((item >= 0).any(1)).tolist():
        kept = [(int(i), scores) for i, scores in zip(item[user], past[user], strict=True) if i >= 0]
        memory[user] = {i: scores[~np.isnan(scores)].tolist() for i, scores in kept}
    return memory


def test_srns_memory_is_that_of_the_textbook_at_any_number_of_ranks(one: dict[str, Result], two: Ranks) -> None:
    textbook = _textbook(RUNS["srns-gmf"], one["srns-gmf"].before)
    for rows in batches(4):
        textbook.step(rows)
    assert len(textbook.memory) > USERS / 2
    for result in (one["srns-gmf"], *([ranks[name] for ranks in two.runs] for name in ("srns-gmf", "srns-gpu"))):
        memory = _memory(result)
        assert {user: list(kept) for user, kept in memory.items()} == {
            user: list(kept) for user, kept in textbook.memory.items()
        }
        for user, kept in memory.items():
            for item, past in kept.items():
                assert past == pytest.approx(textbook.memory[user][item], abs=1e-5)


def test_srns_goes_on_at_another_number_of_ranks(one: dict[str, Result], two: Ranks) -> None:
    """Begun on two ranks, ended on one: weights and memory are those of a run that was not interrupted."""
    resumed, whole_run = one["sgd-srns resumed"], two.runs[0]["sgd-srns"]
    _close(resumed.after, whole_run.after)
    assert resumed.state == whole_run.state
    np.testing.assert_array_equal(whole([resumed], "item"), whole([r["sgd-srns"] for r in two.runs], "item"))
    np.testing.assert_allclose(whole([resumed], "past"), whole([r["sgd-srns"] for r in two.runs], "past"), atol=1e-5)


def test_means_are_closed_form(one: dict[str, Result], two: Ranks) -> None:
    user, item, label = (
        np.concatenate([getattr(rows, name).numpy() for rows in batches(0)]) for name in ("user", "item", "label")
    )
    p = (label.sum() + 1) / (len(label) + 2)

    def logit(q):
        return np.log(q / (1 - q))

    def mean(mask):
        return (label[mask].sum() + 4 * p) / (mask.sum() + 4)

    expected = [logit(mean(user == u)) + logit(mean(item == u)) - logit(p) for u in range(USERS)]
    for result in (one["means"], one["means resumed"], two.runs[0]["means"], two.runs[1]["means"]):
        np.testing.assert_allclose(result.scores, expected, rtol=1e-5)
        _close(result.after, result.before, 0)
        # Nothing is counted yet while the first epoch runs: every probability is one half.
        np.testing.assert_allclose(result.losses, math.log(2), rtol=1e-6)


def test_a_third_party_adds_a_strategy_in_one_file(two: Ranks) -> None:
    result = two.runs[0]["third party"]
    book = _textbook(Run("ns"), result.before).book
    for rows in batches(0):
        book.plain_step(rows.user, rows.item, rows.label * 0.7 + 0.15)
    _close(result.after, book.weights())


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes a function that installs a package with one strategy plugin, for the time of a test."""

    def install(code: str) -> None:
        (tmp_path / "their_strategies.py").write_text(code)
        (tmp_path / "theirs-1.0.dist-info").mkdir()
        (tmp_path / "theirs-1.0.dist-info" / "METADATA").write_text("Name: theirs\nVersion: 1.0\n")
        entry = "[invdist.strategies]\nsmoothed = their_strategies\n"
        (tmp_path / "theirs-1.0.dist-info" / "entry_points.txt").write_text(entry)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(STRATEGIES, "_loaded", False)

    STRATEGIES.names()
    monkeypatch.setattr(STRATEGIES, "_types", dict(STRATEGIES._types))
    yield install
    sys.modules.pop("their_strategies", None)


def test_an_installed_plugin_is_a_choice_and_configured_like_any_other(installed) -> None:
    installed((Path(__file__).parent / "third_party.py").read_text())
    loaded = config.from_mapping({"data": {"path": "x"}, "method": "smoothed", "smoothed": {"amount": 0.2}})
    assert loaded.strategy.amount == 0.2
    with pytest.raises(UserError, match=r"smoothed\.amount: expected a number at least 0 and at most 1"):
        config.from_mapping({"data": {"path": "x"}, "method": "smoothed"}, ["smoothed.amount=2"])


def test_a_plugin_that_cannot_be_imported_is_named(installed) -> None:
    installed("import something_that_is_not_there")
    with pytest.raises(UserError, match="smoothed = their_strategies cannot be imported: ModuleNotFoundError"):
        STRATEGIES.names()


def test_the_documented_example_is_the_one_that_is_run(repository: Path) -> None:
    text = (repository / "docs" / "strategies.md").read_text()
    example = text.split("```python\n")[1].split("```")[0]
    assert example in (Path(__file__).parent / "third_party.py").read_text()
    assert [name for name in STRATEGIES.names() if f"| `{name}` |" not in text] == []


def test_every_strategy_of_the_paper_is_a_choice() -> None:
    assert {"none", "ns", "t_ce", "r_ce", "dns", "srns", "idl", "ig", "means"} <= set(STRATEGIES.names())


@pytest.mark.parametrize(
    ("method", "wrong", "key"),
    [
        ("ns", {"wieght": 2}, "did you mean ns.weight"),
        ("idl", {"weight": -1}, "idl.weight"),
        ("t_ce", {"max_drop": 1.5}, "t_ce.max_drop"),
        ("t_ce", {"ramp_steps": 0}, "t_ce.ramp_steps"),
        ("r_ce", {"beta": 0.2}, "r_ce.beta"),
        ("dns", {"candidates": 1}, "dns.candidates"),
        ("srns", {"memory": 0}, "srns.memory"),
        ("srns", {"history": 1}, "srns.history"),
        ("means", {"smoothing": 0}, "means.smoothing"),
    ],
)
def test_unknown_or_wrong_options_are_refused(method: str, wrong: dict[str, Any], key: str) -> None:
    with pytest.raises(UserError, match=key.replace(".", r"\.")):
        config.from_mapping({"data": {"path": "x"}, "method": method, method: wrong})


@pytest.mark.parametrize(
    ("method", "rate", "key"),
    [
        ("ns", 0, "unlabeled.rate"),
        ("dns", 0, "unlabeled.rate"),
        ("ig", 0, "unlabeled.rate"),
        ("srns", 17, "srns.memory"),
    ],
)
def test_a_rate_that_a_strategy_cannot_serve_is_refused(method: str, rate: int, key: str) -> None:
    options = STRATEGIES.get(method).Config()
    setting = Setting(options=options, unlabeled_rate=rate, gamma=1, users=1, items=1)
    with pytest.raises(UserError, match=key):
        STRATEGIES.get(method).phases(setting)
