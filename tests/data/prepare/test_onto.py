"""Data sets that grow from day to day, against a plain Python account of the same days."""

from __future__ import annotations

import datetime
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from invdist.cli import prepare as command
from invdist.data.dataset import Dataset
from invdist.data.prepare.options import build_options
from invdist.data.prepare.parallel.on_ray import prepare_on_ray
from invdist.data.prepare.pipeline import prepare_log
from invdist.data.prepare.since_until import TooLittle
from invdist.data.schema import LABELED_SPLITS, SPLITS, TRAINING_LABELED
from invdist.data.stream.exposures import LabeledPairs
from invdist.runtime.errors import UserError

Row = tuple[Any, Any, float]
SPLIT = {"valid_fraction": 0.3, "test_fraction": 0.0}
PREPARE: dict[str, Callable[..., Any]] = {"alone": prepare_log, "0 workers": partial(prepare_on_ray, workers=0)}
RATINGS = {1.0: 0, 2.0: 0, 2.5: -1, 3.0: 1, 5.0: 1}


def day(
    folder: Path,
    name: str,
    rows: list[Row],
    onto: str | None = None,
    prepare: Callable[..., Any] = prepare_log,
    **options: Any,
) -> Dataset:
    """The data set of a day's ratings, onto that of another day."""
    log = folder / f"{name}.parquet"
    pq.write_table(pa.table(dict(zip(("user", "item", "rating"), map(list, zip(*rows))))), log)
    built = build_options("ratings", {**SPLIT, **options})
    prepare(built, [log], folder / name, onto=folder / onto if onto else None)
    return Dataset.open(str(folder / name))


def rows_of(dataset: Dataset) -> dict[tuple[Any, Any], tuple[int, int]]:
    """Label and day of each pair by raw ids; no pair is there twice."""
    users, items = (dataset.raw_ids(entity).to_pylist() for entity in ("users", "items"))
    found: dict[tuple[Any, Any], tuple[int, int]] = {}
    for split in SPLITS:
        table = dataset.read(split).to_pydict()
        labels, days = table.get("label", [-1] * len(table["user"])), table.get("day", [0] * len(table["user"]))
        for user, item, label, day in zip(table["user"], table["item"], labels, days, strict=True):
            assert (users[user], items[item]) not in found
            found[users[user], items[item]] = label, day
    return found


# Every day has pairs of both classes enough for each split.
CLEAR: list[Row] = [(f"u{n}", f"i{n}", 5.0 if n % 2 else 1.0) for n in range(12)]
a_row = st.tuples(st.sampled_from("abcdefgh"), st.sampled_from("stuvwxyz"), st.sampled_from(list(RATINGS)))
a_day = st.lists(a_row, max_size=12, unique_by=lambda row: row[:2])


@settings(max_examples=5, deadline=None)
@given(
    days=st.lists(a_day, min_size=2, max_size=3),
    keep=st.sampled_from([None, 0, 1, 2]),
    drop=st.sampled_from([None, 1, 2]),
)
def test_growing_equals_a_plain_account_of_the_days(days: list[list[Row]], keep: int | None, drop: int | None) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        grown = day(folder, "0", CLEAR + days[0])
        ids = {entity: grown.raw_ids(entity).to_pylist() for entity in ("users", "items")}
        seen = {entity: dict.fromkeys(known, 0) for entity, known in ids.items()}
        rows: dict[tuple[Any, Any], tuple[int, int]] = {(u, i): (RATINGS[r], 0) for u, i, r in CLEAR + days[0]}
        for number, log in enumerate(days[1:], 1):
            log = CLEAR + log
            grown = day(folder, str(number), log, str(number - 1), keep=keep, drop_unseen=drop)
            rows = {p: row for p, row in rows.items() if keep is None or row[1] >= number - keep}
            rows |= {(u, i): (RATINGS[r], number) for u, i, r in log}
            for column, entity in enumerate(("users", "items")):
                today = {row[column] for row in log}
                ids[entity] += sorted(today - seen[entity].keys())
                seen[entity] |= dict.fromkeys(today, number)
                gone = {one for one, last in seen[entity].items() if drop is not None and number - last >= drop}
                ids[entity] = [one for one in ids[entity] if one not in gone]
                seen[entity] = {one: last for one, last in seen[entity].items() if one not in gone}
                rows = {pair: row for pair, row in rows.items() if pair[column] not in gone}
                assert grown.raw_ids(entity).to_pylist() == ids[entity]
            assert rows_of(grown) == rows
            assert len(grown.manifest["ancestors"]) == number == grown.manifest["day"]


def test_the_past_trains_and_only_today_validates(tmp_path: Path) -> None:
    first = day(tmp_path, "monday", CLEAR)
    second = day(tmp_path, "tuesday", [("new", "i1", 5.0), *CLEAR[:8]], "monday")
    assert second.manifest["ancestors"] == [first.fingerprint]
    assert second.read("valid").num_rows == 3
    assert set(second.read("valid")["day"].to_pylist()) == {1}
    assert sum(second.rows[split] for split in ("train", "training_test")) == 13 - 3
    counted = {split: second.read(split)["label"].to_pylist().count(1) for split in LABELED_SPLITS}
    assert counted == {split: second.manifest["classes"][split]["positives"] for split in LABELED_SPLITS}


def test_older_rows_can_stay_as_exposures(tmp_path: Path) -> None:
    """Labels that the model of the day before has learned from; those that only validated it are learned now."""
    log = CLEAR + [(f"v{n}", f"i{n}", 5.0 if n % 2 else 1.0) for n in range(12)]
    monday = day(tmp_path, "monday", log)
    grown = day(tmp_path, "tuesday", log[:8], "monday", keep=0, older="unclear", replay=0)
    users = grown.raw_ids("users").to_pylist()

    def users_of(dataset: Dataset, *splits: str) -> set[str]:
        return {users[user] for split in splits for user in dataset.read(split)["user"].to_pylist()}

    today = {user for user, _, _ in log[:8]}
    learned = users_of(monday, *TRAINING_LABELED) - today
    validated = users_of(monday, "valid") - today
    assert len(learned) > 3
    assert len(validated) > 3
    assert users_of(grown, "unclear") == learned
    assert users_of(grown, *LABELED_SPLITS) == today | validated
    assert users_of(grown, "valid") <= today
    # What the label was is still known, to score annotations by.
    unclear = [users[user] for user in grown.read("unclear")["user"].to_pylist()]
    truth = dict(zip(unclear, grown.read("truth")["truth"].to_pylist(), strict=True))
    assert truth == {user: float(RATINGS[rating]) for user, _, rating in log if user in learned}


def test_a_share_of_the_older_labels_trains_again(tmp_path: Path) -> None:
    """Each day another one, of all the labels that were learned from before; and none gets another label."""
    log = [(n, n % 37, 5.0 if n % 3 else 1.0) for n in range(2000)]
    first = day(tmp_path, "0", log)
    new = {n: [(10_000 * n + m, m, 5.0 if m % 2 else 1.0) for m in range(20)] for n in (1, 2)}
    again, marked = [], []
    for number in (1, 2):
        grown = day(tmp_path, str(number), new[number], str(number - 1), keep=0, older="unclear", replay=0.3)
        expected = {(u, i): RATINGS[r] for u, i, r in log}
        users, items = (grown.raw_ids(entity).to_pylist() for entity in ("users", "items"))
        trained, replayed = set(), set()
        for split in TRAINING_LABELED:
            table = grown.read(split).to_pydict()
            columns = (table[name] for name in ("user", "item", "label", "day", "replayed"))
            for user, item, label, when, mark in zip(*columns):
                if mark:
                    replayed.add(users[user])
                if when == 0:
                    assert expected[users[user], items[item]] == label
                    trained.add(users[user])
        again.append(trained)
        marked.append(replayed)
        counted = sum(len(user) for user, _ in LabeledPairs(grown, 0, 1).batches())
        assert counted == 2000 + 20 * number - grown.rows["valid"], "labels of earlier days still count"
    validated = set(first.read("valid")["user"].to_pylist())
    assert validated <= again[0], "what validated the first model trains the second"
    learned = [again[0] - validated, again[1]]
    assert marked[0] == learned[0], "marked is what a model has learned from"
    assert {user for user in marked[1] if user < 10_000} == learned[1]
    assert len(learned[0]) == pytest.approx(0.3 * (2000 - len(validated)), rel=0.15)
    assert len(learned[1]) == pytest.approx(0.3 * 2000, rel=0.15)
    assert len(learned[0] & learned[1]) == pytest.approx(0.3 * len(learned[0]), rel=0.35)
    whole = day(tmp_path, "all", new[1], "2")  # every label is still there
    assert sum(whole.rows[split] for split in LABELED_SPLITS) == 2040


def test_an_unchanged_day_keeps_every_index(tmp_path: Path) -> None:
    first = day(tmp_path, "monday", CLEAR)
    second = day(tmp_path, "tuesday", CLEAR, "monday")
    assert [first.raw_ids(e).to_pylist() for e in ("users", "items")] == [
        second.raw_ids(e).to_pylist() for e in ("users", "items")
    ]


def test_labels_are_those_of_the_first_day(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Play times double overnight: by quartiles of their own, as many would be positive as before."""
    options = ["rule=play_time", "valid_fraction=0.2", "test_fraction=0"]
    shares, quartiles = [], []
    for name, factor, onto in (("monday", 1, []), ("tuesday", 2, ["--onto", str(tmp_path / "monday")])):
        log = tmp_path / f"{name}.parquet"
        pq.write_table(
            pa.table({"user": list(range(400)), "item": [7] * 400, "play_time": [factor * n for n in range(400)]}), log
        )
        output = str(tmp_path / name)
        arguments = ["--input", str(log), "--output", output, *onto, *options, *(["keep=0"] if onto else [])]
        assert command.main(["microvideo", *arguments]) == 0
        manifest = Dataset.open(output).manifest
        shares.append(sum(c["positives"] for c in manifest["classes"].values()) / 400)
        quartiles.append(manifest["labeling"]["quartiles"])
    assert quartiles[0] == quartiles[1] == [99.0, 300.0]
    assert shares == [0.25, 0.625]
    assert manifest["drift"]["first"]["quartiles"] == [99.0, 300.0]
    assert manifest["drift"]["today"]["quartiles"] == [198.0, 600.0]
    printed = capsys.readouterr().out
    assert "play-time quartiles 99 and 300" in printed
    assert "play-time quartiles 198 and 600" in printed


def test_what_cannot_be_grown_says_why(tmp_path: Path) -> None:
    day(tmp_path, "monday", CLEAR)
    with pytest.raises(UserError, match=r"positive_from=3.*positive_from=4"):
        day(tmp_path, "other", CLEAR, "monday", positive_from=4.0)
    refused: list[tuple[str, dict[str, Any]]] = [
        ("keep", {"keep": 1}),
        ("keep", {"keep": 0, "older": "unclear"}),
        ("drop_unseen", {"drop_unseen": 1}),
    ]
    for name, options in refused:
        with pytest.raises(UserError, match=rf"{name} goes together with --onto"):
            day(tmp_path, "alone", CLEAR, **options)
    with pytest.raises(UserError, match=r"older: unclear goes together with keep=N"):
        build_options("ratings", {"older": "unclear"})
    with pytest.raises(UserError, match=r"replay: goes together with older=unclear"):
        build_options("ratings", {"keep": 0, "replay": 0.5})
    numbers: list[Row] = [(n, n, rating) for n, (_, _, rating) in enumerate(CLEAR)]
    day(tmp_path, "numbers", numbers)
    with pytest.raises(UserError, match="users of the log are text"):
        day(tmp_path, "text", CLEAR, "numbers")
    # The other way round a number is a text that looks like one.
    known = day(tmp_path, "digits", [(str(u), str(i), r) for u, i, r in numbers])
    grown = day(tmp_path, "more", [*numbers, (99, 99, 5.0)], "digits")
    assert grown.raw_ids("users").to_pylist() == [*known.raw_ids("users").to_pylist(), "99"]
    assert not list(tmp_path.glob(".*"))


def test_a_quiet_day_needs_labels_for_validation_only(tmp_path: Path) -> None:
    """What else a data set needs, the days before have. Validation gets a label of each class."""
    day(tmp_path, "monday", CLEAR)
    quiet: list[Row] = [*CLEAR[:2], ("new", "i0", 5.0)]
    with pytest.raises(TooLittle, match="train has no negatives"):
        day(tmp_path, "alone", quiet, valid_fraction=0.6)
    for name, prepare in PREPARE.items():
        grown = day(tmp_path, name, quiet, "monday", prepare, valid_fraction=0.6)
        assert sorted(grown.read("valid")["label"].to_pylist()) == [0, 1]
        assert sum(grown.rows.values()) == 13


@pytest.mark.parametrize("prepare", PREPARE.values(), ids=PREPARE)
@pytest.mark.parametrize(
    ("since", "said"),
    [
        ("2026-03-01", "valid has no negatives under rule rating (4 rows of one class): nothing to learn or to rank"),
        ("2026-03-02", "valid has no positives under rule rating (0 rows of one class): nothing to learn or to rank"),
        ("2026-03-03", "the log has no rows with since=2026-03-03 and until=2026-03-03"),
    ],
)
def test_a_day_with_too_little_says_what_to_do(
    tmp_path: Path, prepare: Callable[..., Any], since: str, said: str
) -> None:
    """A day of positives only, one of unclear rows only, one without rows."""
    day(tmp_path, "monday", CLEAR)
    dates = [datetime.date(2026, 3, 1)] * 12 + [datetime.date(2026, 3, 2)]
    rows = {"user": list("abcdefghijklm"), "item": ["i"] * 13, "rating": [5.0] * 12 + [2.5], "date": dates}
    pq.write_table(pa.table(rows), tmp_path / "log.parquet")
    options = build_options("ratings", {**SPLIT, "since": since, "until": since})
    with pytest.raises(TooLittle) as error:
        prepare(options, [tmp_path / "log.parquet"], tmp_path / "tuesday", onto=tmp_path / "monday")
    found, advice = str(error.value).splitlines()
    assert found == said
    assert advice.startswith("a day with too little goes together with the next one")
    assert {path.name for path in tmp_path.iterdir()} == {"monday", "monday.parquet", "log.parquet"}


def test_days_of_one_log(tmp_path: Path) -> None:
    """`since` and `until` cut a log into days; rows without a date come before all."""
    log = tmp_path / "log.parquet"
    dates = ["2026-03-01", "2026-03-02", "2026-03-03", None]
    rows = [(f"u{n}", "i", [1, 5][n % 2], dates[n // 10]) for n in range(40)]
    table = dict(zip(("user", "item", "rating", "date"), map(list, zip(*rows))))
    days = pa.array(table["date"], pa.string()).cast(pa.date32())
    pq.write_table(pa.table({**table, "date": days}), log)

    def prepared(name: str, onto: str | None, **options: Any) -> Dataset:
        built = build_options("ratings", {**SPLIT, **options})
        prepare_log(built, [log], tmp_path / name, onto=tmp_path / onto if onto else None)
        return Dataset.open(str(tmp_path / name))

    assert prepared("first", None, until="2026-03-01").users == 20
    assert prepared("second", "first", since="2026-03-02", until="2026-03-02").users == 30
    assert prepared("third", "second", since="2026-03-03", keep=1).users == 40
    assert sum(Dataset.open(str(tmp_path / "third")).rows.values()) == 20
    with pytest.raises(UserError, match="no rows with since=2026-04-01"):
        prepared("later", None, since="2026-04-01")
    with pytest.raises(UserError, match="expected 2026-03-02"):
        build_options("ratings", {"since": "2026-03-02", "until": "2026-03-01"})
