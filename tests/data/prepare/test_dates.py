"""Splits by date, of any log and of KuaiRand's two kinds of file."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from invdist.data.dataset import Dataset
from invdist.data.prepare.options import KuaiRand, Ratings
from invdist.data.prepare.pipeline import prepare_log
from invdist.runtime.errors import UserError


@pytest.fixture
def kuairand_folder(tmp_path: Path) -> Path:
    """A log of three days and exposures before it, in KuaiRand's columns."""
    folder = tmp_path / "kuairand"
    folder.mkdir()
    rng = np.random.default_rng(0)
    exposures = [f"{n % 40},{n % 57},{n // 40},1,{rng.integers(2)}\n" for n in range(400)]
    (folder / "exposures_1.csv").write_text("user_id,video_id,seq,exact,long_view\n" + "".join(exposures))
    start = int(datetime(2022, 4, 24, 16, tzinfo=UTC).timestamp() * 1000)  # 25 April in China
    log = []
    for n in range(300):
        day = n // 100
        log.append(f"{n % 40},{n % 83},{20220425 + day},{start + day * 86_400_000 + n},{rng.integers(2)}\n")
    # KuaiRand's dates and times disagree now and then: the date counts.
    log.append(f"1,900,20220427,{start},1\n")
    (folder / "log_1.csv").write_text("user_id,video_id,date,time_ms,long_view\n" + "".join(log))
    return folder


DATES: dict[str, Any] = {"split": "date", "valid_from": "2022-04-26", "test_from": "2022-04-27"}


def pairs_of(dataset: Dataset, *splits: str) -> set[tuple[int, int]]:
    users, items = (dataset.raw_ids(entity).to_numpy() for entity in ("users", "items"))
    tables = [dataset.read(split) for split in splits]
    return {(int(users[u]), int(items[i])) for t in tables for u, i in zip(t["user"].to_numpy(), t["item"].to_numpy())}


def test_kuairand_exposures_and_log_split_by_date(kuairand_folder: Path, tmp_path: Path):
    manifest = prepare_log(KuaiRand(rule="long_view", **DATES), [kuairand_folder], tmp_path / "out")
    assert manifest["counts"]["log_rows"] == 701
    assert manifest["source"]["files"] == ["exposures_1.csv", "log_1.csv"]
    log = [line.split(",") for line in (kuairand_folder / "log_1.csv").read_text().splitlines()[1:]]
    days: dict[tuple[int, int], int] = {}
    for user, item, day, *_ in log:
        days[int(user), int(item)] = max(int(day), days.get((int(user), int(item)), 0))
    dataset = Dataset.open(str(tmp_path / "out"))
    # A pair that comes again later belongs to its last day.
    assert pairs_of(dataset, "valid") == {pair for pair, day in days.items() if day == 20220426}
    assert pairs_of(dataset, "test") == {pair for pair, day in days.items() if day == 20220427}
    assert (1, 900) in pairs_of(dataset, "test")
    train = pairs_of(dataset, "train", "training_test")
    assert {pair for pair, day in days.items() if day == 20220425} < train
    last = {(int(u), int(i)): int(y) for u, i, _, _, y in log}
    users, items = (dataset.raw_ids(entity).to_numpy() for entity in ("users", "items"))
    test = dataset.read("test").to_pydict()
    assert all(last[int(users[u]), int(items[i])] == y for u, i, y in zip(*test.values()))


def test_kuairand_exposures_need_the_rule_that_can_label_them(kuairand_folder: Path, tmp_path: Path):
    with pytest.raises(UserError, match=r"exposures_1.csv has no play times; only rule=long_view"):
        KuaiRand().open([kuairand_folder / "exposures_1.csv"])
    with pytest.raises(UserError, match="column play_time_ms is missing"):
        KuaiRand().open([kuairand_folder])


@pytest.mark.parametrize("unit", [1, 1000, 10**6, "timestamp", "date", "dates only"])
def test_a_split_by_date_of_any_log(tmp_path: Path, unit: int | str):
    first = int(datetime(2024, 1, 1, tzinfo=UTC).timestamp())
    lines = []
    for n in range(300):
        second = first + n * 864  # three days
        moment = datetime.fromtimestamp(second, UTC)
        time = second * unit if isinstance(unit, int) else f"{moment:%Y-%m-%d %H:%M:%S}"
        lines.append(f"{n % 20},{n},{n % 5 + 1},{time if unit != 'dates only' else f'{moment:%Y%m%d}'}\n")
    name = {"date": "date", "dates only": "date"}.get(str(unit), "time")
    (tmp_path / "log.csv").write_text(f"user,item,rating,{name}\n" + "".join(lines))
    options = Ratings(split="date", valid_from="2024-01-02", test_from="2024-01-03")
    manifest = prepare_log(options, [tmp_path / "log.csv"], tmp_path / "out")
    assert manifest["rows"] == {"train": 90, "training_test": 10, "valid": 100, "test": 100, "unclear": 0}
    assert (manifest["cut"]["valid_from"], manifest["cut"]["test_from"]) == ("2024-01-02", "2024-01-03")
    if isinstance(unit, int):
        shifted = Ratings(split="date", valid_from="2024-01-02", test_from="2024-01-03", utc_offset=12)
        rows = prepare_log(shifted, [tmp_path / "log.csv"], tmp_path / "shifted")["rows"]
        assert (rows["valid"], rows["test"]) == (100, 150)


def test_a_split_by_date_needs_dates(tmp_path: Path):
    (tmp_path / "log.csv").write_text("user,item,rating\n1,1,1\n")
    with pytest.raises(UserError, match=r"log.csv: split=date needs a column time or date"):
        Ratings(split="date", valid_from="2024-01-02", test_from="2024-01-03").open([tmp_path / "log.csv"])


def test_unclear_rows_after_training_are_left_out_of_a_split_by_date(tmp_path: Path):
    lines = [f"{n % 20},{n},{n % 5 + 1 if n % 7 else 2.5},2024-01-0{n % 3 + 1}\n" for n in range(300)]
    (tmp_path / "log.csv").write_text("user,item,rating,date\n" + "".join(lines))
    options = Ratings(split="date", valid_from="2024-01-02", test_from="2024-01-03")
    manifest = prepare_log(options, [tmp_path / "log.csv"], tmp_path / "out")
    unclear = [n for n in range(300) if n % 7 == 0]
    assert manifest["rows"]["unclear"] == sum(n % 3 == 0 for n in unclear)
    assert manifest["counts"]["unclear_after_training"] == sum(n % 3 != 0 for n in unclear)


def test_real_kuairand_long_views_are_split_as_by_the_reference(shared_data: Path, tmp_path: Path):
    """Counts of the reference script: pairs of 25 to 27 April validate, of 28 to 30 April test, all others train."""
    options = KuaiRand(rule="long_view", split="date", valid_from="2022-04-25", test_from="2022-04-28")
    manifest = prepare_log(options, [shared_data / "kuairand-pure"], tmp_path / "out")
    assert (manifest["users"], manifest["items"]) == (26_768, 7_489)
    assert manifest["rows"] == {
        "train": 709_988,
        "training_test": 78_888,
        "valid": 42_292,
        "test": 48_937,
        "unclear": 0,
    }
    assert manifest["classes"]["valid"] == {"positives": 13_358, "negatives": 28_934}
    assert manifest["classes"]["test"] == {"positives": 15_560, "negatives": 33_377}
