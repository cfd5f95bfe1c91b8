"""Prepared data against a plain Python reading of the same log."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from invdist.data.dataset import Dataset
from invdist.data.prepare.labeling import Labeling
from invdist.data.prepare.logs import FileLog
from invdist.data.prepare.options import Options
from invdist.data.prepare.pipeline import RULES, prepare
from invdist.data.schema import LABELED_SPLITS
from invdist.runtime.errors import UserError
from tests.datasets import digest_of_rows

RATING = Labeling(rules=("rating",))
COLUMNS = {"user": "user", "item": "item", "rating": "rating", "time": "time"}
NAN = float("nan")


def make(folder: Path, rows: dict[str, Any], **options: Any) -> tuple[Dataset, dict]:
    """The data set prepared from a rating log, and its manifest."""
    log = folder / "log.parquet"
    pq.write_table(pa.table(rows), log)
    manifest = prepare(FileLog("ratings", [log], COLUMNS, ["rating"]), RATING, Options(**options), folder / "out")
    return Dataset.open(str(folder / "out")), manifest


def triples(dataset: Dataset, split: str) -> list[tuple[Any, Any, int]]:
    """Rows of a split with raw ids."""
    users, items = dataset.raw_ids("users").to_pylist(), dataset.raw_ids("items").to_pylist()
    table = dataset.read(split).to_pydict()
    labels = table.get("label", [-1] * len(table["user"]))
    return [(users[u], items[i], label) for u, i, label in zip(table["user"], table["item"], labels)]


def random_log(rows: int, seed: int = 0, users: int = 40, items: int = 60) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "user": rng.integers(0, users, rows) * 7 + 100,
        "item": rng.integers(0, items, rows) * 3,
        "rating": rng.choice([1.0, 2, 2.5, 3, 4, NAN], rows),
        "time": rng.integers(0, 50, rows),
    }


def expected_labels(log: dict[str, np.ndarray], duplicates: str = "last") -> dict[tuple[int, int], int]:
    """Label of each pair, read row by row."""
    best: dict[tuple[int, int], tuple[int, int, float]] = {}
    for row, (user, item, rating, time) in enumerate(zip(*(log[name].tolist() for name in COLUMNS))):
        mark = (time, row, rating)
        old = best.get((user, item))
        if old is None or (mark[:2] > old[:2]) == (duplicates == "last"):
            best[user, item] = mark
    return {pair: 1 if rating >= 3 else 0 if rating <= 2 else -1 for pair, (_, _, rating) in best.items()}


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 1000),
    duplicates=st.sampled_from(["last", "first"]),
    split=st.sampled_from(["seed", "time"]),
    fraction=st.sampled_from([1.0, 0.3]),
)
def test_every_pair_once_with_its_label(seed: int, duplicates: str, split: str, fraction: float):
    log = random_log(800, seed)
    options = {"seed": seed, "split": split, "duplicates": duplicates, "label_fraction": fraction}
    with tempfile.TemporaryDirectory() as folder:
        dataset, manifest = make(Path(folder), log, **options, shard_rows=100)
        expected = expected_labels(log, duplicates)
        found = [row for name in LABELED_SPLITS for row in triples(dataset, name)]
        unclear = triples(dataset, "unclear")
        truth = dataset.read("truth")["truth"].to_numpy()
    # A partition: no pair twice, none invented, none lost but those of a stated rule.
    pairs = [row[:2] for row in found + unclear]
    assert len(set(pairs)) == len(pairs)
    assert set(pairs) <= set(expected)
    assert len(pairs) == len(expected) - manifest["counts"]["unclear_after_training"]
    assert all(expected[row[:2]] == row[2] for row in found)
    # Hidden labels are known to the truth and to nobody else.
    hidden = ~np.isnan(truth)
    assert [expected[row[:2]] for row in unclear] == [int(t) if h else -1 for t, h in zip(truth, hidden)]
    assert hidden.sum() == manifest["counts"]["hidden_labels"]
    assert len(log["user"]) - len(expected) == (
        manifest["counts"]["exact_duplicates"] + manifest["counts"]["repeated_pairs"]
    )


def test_shares_and_summary(tmp_path: Path):
    log = random_log(5000, users=200, items=300)
    dataset, manifest = make(tmp_path, log, label_fraction=0.25)
    labels = Counter(expected_labels(log).values())
    clear = labels[0] + labels[1]
    train = round(0.6 * clear)
    kept = round(0.25 * train)
    assert dataset.rows["valid"] == pytest.approx(0.2 * clear, abs=1)
    assert dataset.rows["test"] == pytest.approx(0.2 * clear, abs=1)
    assert dataset.rows["train"] + dataset.rows["training_test"] == pytest.approx(kept, abs=1)
    assert dataset.rows["training_test"] == pytest.approx(0.1 * kept, abs=1)
    assert dataset.rows["unclear"] == pytest.approx(labels[-1] + train - kept, abs=1)
    summary = dataset.summary
    assert summary["users"] == len(set(log["user"].tolist())) == len(dataset.raw_ids("users"))
    assert summary["positives"] + summary["negatives"] == sum(dataset.rows[split] for split in LABELED_SPLITS)
    assert summary["density"] == pytest.approx(
        (summary["positives"] + summary["negatives"]) / summary["users"] / summary["items"]
    )
    assert manifest["counts"]["missing_ratings"] == np.isnan(log["rating"]).sum()


def test_noise_turns_a_share_of_the_training_labels_around(tmp_path: Path):
    log = random_log(20_000, users=400, items=300)
    expected = expected_labels(log)
    made = []
    for noise in (0.0, 0.2):
        (folder := tmp_path / str(noise)).mkdir()
        made.append(make(folder, log, label_fraction=0.5, label_noise=noise))
    (clean, without), (noisy, manifest) = made
    for split in ("train", "training_test"):
        rows = triples(noisy, split)
        wrong = sum(expected[row[:2]] != row[2] for row in rows)
        assert [row[:2] for row in rows] == [row[:2] for row in triples(clean, split)]
        assert wrong / len(rows) == pytest.approx(0.2, abs=4 * (0.16 / len(rows)) ** 0.5)
    for split in ("valid", "test", "unclear"):
        assert triples(noisy, split) == triples(clean, split)
    truth = [dataset.read("truth")["truth"].to_numpy() for dataset in (clean, noisy)]
    np.testing.assert_array_equal(*truth)
    assert manifest["cut"]["label_noise"] == 0.2
    assert "label_noise" not in without["cut"]


def test_a_split_by_time_does_not_look_ahead(tmp_path: Path):
    log = random_log(3000)
    log["time"] = np.random.default_rng(1).permutation(3000)
    dataset, _ = make(tmp_path, log, split="time")
    last: dict[tuple[int, int], int] = {}
    for user, item, time in zip(*(log[name].tolist() for name in ("user", "item", "time"))):
        last[user, item] = max(time, last.get((user, item), -1))
    times = {split: [last[row[:2]] for row in triples(dataset, split)] for split in dataset.rows}
    assert max(times["train"] + times["training_test"]) < min(times["valid"])
    assert max(times["valid"]) < min(times["test"])
    assert max(times["unclear"]) <= max(times["train"] + times["training_test"])
    clear = sum(dataset.rows[split] for split in LABELED_SPLITS)
    assert dataset.rows["valid"] == pytest.approx(0.2 * clear, abs=1)


def given_files(folder: Path, valid: list, test: list) -> dict[str, str]:
    for name, pairs in (("valid", valid), ("test", test)):
        (folder / name).write_text("".join(f"{user}\t{item}\t5\n" for user, item in pairs))
    return {"valid_file": str(folder / "valid"), "test_file": str(folder / "test")}


def test_a_given_split_is_kept(tmp_path: Path):
    log = random_log(3000)
    clear = [pair for pair, label in expected_labels(log).items() if label >= 0]
    valid, test = clear[:300], clear[300:700]
    dataset, _ = make(tmp_path, log, split="given", **given_files(tmp_path, valid, test))
    assert {row[:2] for row in triples(dataset, "valid")} == set(valid)
    assert {row[:2] for row in triples(dataset, "test")} == set(test)


def test_given_pairs_must_be_in_the_log(tmp_path: Path):
    log = random_log(500)
    clear = [pair for pair, label in expected_labels(log).items() if label >= 0]
    unclear = [pair for pair, label in expected_labels(log).items() if label < 0]
    for valid, test, message in (
        (clear[:5], [(1, 1)], r"test: line 1: user 1, item 1 is not in the log"),
        (clear[:5], clear[4:9], "share 1 pairs"),
        ([clear[0]] * 2, clear[4:9], "more than once"),
        (clear[:5], unclear[:3], "3 pairs are unclear in the log"),
    ):
        with pytest.raises(UserError, match=message):
            make(tmp_path, log, split="given", **given_files(tmp_path, valid, test))
        assert not (tmp_path / "out").exists()


def content(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_same_seed_same_bytes(tmp_path: Path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        (tmp_path / name).mkdir()
        make(tmp_path / name, random_log(2000), seed=seed)
    assert content(tmp_path / "a" / "out") == content(tmp_path / "b" / "out")
    first, other = (Dataset.open(str(tmp_path / name / "out")) for name in ("a", "c"))
    assert first.fingerprint != other.fingerprint
    assert triples(first, "test") != triples(other, "test")


def test_the_order_of_the_log_does_not_matter(tmp_path: Path):
    log = random_log(2000)
    log["time"] = np.arange(2000)
    mixed = np.random.default_rng(5).permutation(2000)
    prints = set()
    for name, order in (("a", slice(None)), ("b", mixed)):
        (tmp_path / name).mkdir()
        prints.add(make(tmp_path / name, {key: values[order] for key, values in log.items()})[1]["fingerprint"])
    assert len(prints) == 1


def test_rows_are_written_in_random_order(tmp_path: Path):
    rows = 20_000
    log = {"user": np.arange(rows) // 100, "item": np.arange(rows) % 100, "rating": np.arange(rows) % 5 + 1.0}
    dataset, _ = make(tmp_path, {**log, "time": np.arange(rows)})
    user = dataset.read("train")["user"].to_numpy().astype(float)
    assert abs(np.corrcoef(user, np.arange(len(user)))[0, 1]) < 0.05
    assert abs(np.corrcoef(user[1:], user[:-1])[0, 1]) < 0.05


@pytest.mark.parametrize("raw", [["b", "ä", "a"], [2**40, -5, 7]])
def test_raw_ids_keep_type_and_order(tmp_path: Path, raw: list):
    users = raw * 20
    log = {"user": users, "item": [f"i{n}" for n in range(60)], "rating": [1.0, 5.0] * 30, "time": list(range(60))}
    dataset, _ = make(tmp_path, log)
    assert dataset.raw_ids("users").to_pylist() == sorted(raw)
    table = pq.read_table(tmp_path / "out" / "items.parquet")
    assert table.schema.names == ["index", "raw"]
    assert table["index"].to_pylist() == list(range(60))
    found = {row for split in LABELED_SPLITS for row in triples(dataset, split)}
    assert found == {(u, i, int(r > 2)) for u, i, r in zip(log["user"], log["item"], log["rating"])}


def test_rows_without_an_id_are_counted_and_left_out(tmp_path: Path):
    log = {name: values.tolist() for name, values in random_log(500).items()}
    log["user"][3] = None
    log["item"][4] = log["item"][5] = None
    _, manifest = make(tmp_path, log)
    assert manifest["counts"]["missing_ids"] == 3
    assert manifest["counts"]["log_rows"] == 500


@pytest.mark.parametrize(
    ("ratings", "message"), [([5.0], "train has no negatives"), ([1.0], "no positives"), ([2.5], "no row is clear")]
)
def test_one_class_is_refused(tmp_path: Path, ratings: list[float], message: str):
    log = {**random_log(300), "rating": np.resize(ratings, 300)}
    with pytest.raises(UserError, match=message):
        make(tmp_path, log)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["log.parquet"]


def test_time_is_needed_for_a_split_by_time(tmp_path: Path):
    log = random_log(300)
    del log["time"]
    with pytest.raises(UserError, match="split=time needs a time"):
        make(tmp_path, log, split="time")


def test_rules_that_give_other_rows_have_another_number(tmp_path: Path):
    """If this fails, the same log is no longer prepared as it was: raise RULES, and note the new digest here."""
    number = np.arange(2000)
    rows = {
        "user": number * 7919 % 53,
        "item": number * 104729 % 97,
        "rating": (number * 31 % 5 + 1).astype(float),
        "time": number * 17 % 1009,
    }
    dataset, manifest = make(tmp_path, rows, label_fraction=0.5)
    assert manifest["rules"] == RULES
    assert (RULES, digest_of_rows(dataset)) == (5, "ed268e9bc9dfe17e")
