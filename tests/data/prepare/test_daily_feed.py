"""The synthetic feed of several days: who is there when, what is true on a day, and that it drifts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from invdist.data.dataset import Dataset
from invdist.data.prepare.options import build_options
from invdist.data.prepare.pipeline import prepare_log
from invdist.data.schema import LABELED_SPLITS
from invdist.runtime.errors import UserError

FEED = {"preset": "tiny", "days": 6, "labeled_rows": 12_000, "items": 600, "drift": 0.4, "test_fraction": 0.0}


def _prepared(folder: Path, name: str, onto: str | None = None, **options: Any) -> Dataset:
    prepare_log(
        build_options("synthetic", {**FEED, **options}), [], folder / name, onto=folder / onto if onto else None
    )
    return Dataset.open(str(folder / name))


def _labeled(dataset: Dataset) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    tables = [dataset.read(split) for split in LABELED_SPLITS]
    user, item, label = (np.concatenate([t[name].to_numpy() for t in tables]) for name in ("user", "item", "label"))
    return user, item, label


def test_a_day_is_the_same_whether_or_not_later_days_are_made(tmp_path: Path) -> None:
    alone = _prepared(tmp_path, "alone", since="2026-01-02", until="2026-01-02")
    among = _prepared(tmp_path, "among", since="2026-01-02", until="2026-01-02", days=6)
    whole = _prepared(tmp_path, "whole", until="2026-01-06")
    assert alone.fingerprint == among.fingerprint
    assert 1500 < len(_labeled(alone)[0]) < 2300
    assert 8_000 < len(_labeled(whole)[0]) < 12_000


def test_new_users_and_items_come_and_the_truth_of_a_day_is_that_of_the_day(tmp_path: Path) -> None:
    days = [_prepared(tmp_path, "0", until="2026-01-01")]
    for number in range(1, 4):
        days.append(
            _prepared(tmp_path, str(number), str(number - 1), since=(day := f"2026-01-0{number + 1}"), until=day)
        )
    growth = [dataset.manifest["growth"] for dataset in days[1:]]
    assert all(found["new_users"] > 3 and found["new_items"] > 10 for found in growth)
    # The true preferences of the third day tell its labels better than those of the first, by users of both.
    first, last = days[0], days[-1]
    user, item, label = _labeled(_prepared(tmp_path, "only", since="2026-01-04", until="2026-01-04"))
    only = Dataset.open(str(tmp_path / "only"))
    raw_user, raw_item = only.raw_ids("users").to_numpy()[user], only.raw_ids("items").to_numpy()[item]
    known = np.isin(raw_user, first.raw_ids("users")) & np.isin(raw_item, first.raw_ids("items"))
    scores = []
    for dataset in (first, last):
        at = {e: {raw: n for n, raw in enumerate(dataset.raw_ids(e).to_pylist())} for e in ("users", "items")}
        users = np.array([at["users"][one] for one in raw_user[known]])
        items = np.array([at["items"][one] for one in raw_item[known]])
        scores.append(roc_auc_score(label[known], dataset.true_preference(users, items)))
    assert scores[1] > scores[0] + 0.02


def test_days_before_the_feed_begins_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="begins on 2026-01-01"):
        _prepared(tmp_path, "early", until="2025-12-31")
