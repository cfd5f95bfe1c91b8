"""Raw pairs from files: the same pairs whatever the file, every row counted once, parts that cover the input."""

from __future__ import annotations

import gzip
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest

from invdist.data.dataset import Dataset
from invdist.runtime.errors import UserError
from invdist.serving.inputs import FilePairs, MatchedPairs, PairSource, UnclearPairs, match, read_users
from invdist.serving.raw_ids import RawIds
from invdist.serving.recommendation import AskedUsers

USERS, ITEMS = RawIds(pa.array([10, 20, 30])), RawIds(pa.array(["a", "b"]))


def _all(
    source: PairSource, users: RawIds = USERS, items: RawIds = ITEMS
) -> tuple[list[tuple[int, int]], Counter[str]]:
    rows, counts = [], Counter[str]()
    for part in source.parts:
        for pairs in source.read(part, users, items):
            rows += list(zip(pairs.user.tolist(), pairs.item.tolist(), strict=True))
            counts += pairs.counts
    return rows, counts


def test_ids_of_any_type_find_their_index() -> None:
    as_text = USERS.cast(pa.array(["20", " 30", "+10", "x", "1.5", None, "9" * 30, "-20"]))
    assert as_text.to_pylist() == [20, 30, 10, None, None, None, None, -20]
    assert USERS.indices(as_text).tolist() == [1, 2, 0, -1, -1, -1, -1, -1]
    numbers = RawIds(pa.array(["7", "08"]))
    assert numbers.indices(numbers.cast(pa.array([7, 8, None]))).tolist() == [0, -1, -1]
    assert USERS.take(np.array([2, 0])).to_pylist() == [30, 10]
    large = RawIds(pa.array([7012345678901234567, 2**63 - 1, -(2**63 - 1)]))
    texts = pa.array(["7012345678901234567", str(2**63 - 1), str(1 - 2**63), str(2**63), "9" * 19])
    assert large.indices(large.cast(texts)).tolist() == [0, 1, 2, -1, -1]


def test_rows_are_counted_by_what_is_wrong_with_them() -> None:
    pairs: MatchedPairs = match(
        pa.array(["10", "99", "x", None, "20", "99"]), pa.array(["a", "a", "a", "a", "z", "z"]), USERS, ITEMS
    )
    assert pairs.user.tolist() == [0, -1, -1, -1, 1, -1]
    assert pairs.item.tolist() == [0, 0, 0, 0, -1, -1]
    assert pairs.raw_user.to_pylist() == [10, 99, None, None, 20, 99]
    assert pairs.known.tolist() == [True, False, False, False, False, False]
    assert pairs.counts == {"rows": 6, "unreadable": 2, "unknown_users": 2, "unknown_items": 2}


@pytest.mark.parametrize("name", ["p.csv", "p.csv.gz", "p.tsv", "p.parquet"])
def test_every_kind_of_file_gives_the_same_pairs(tmp_path: Path, name: str) -> None:
    table = pa.table({"when": [1, 2, 3], "vid": ["a", "b", "q"], "uid": [10, 30, 20]})
    if name == "p.parquet":
        pq.write_table(table, tmp_path / name)
    else:
        mark = "\t" if "tsv" in name else ","
        opened = gzip.open if name.endswith("gz") else open
        with opened(tmp_path / name, "wb") as file:
            pacsv.write_csv(table, file, pacsv.WriteOptions(delimiter=mark))
    rows, counts = _all(FilePairs([tmp_path / name], "uid", "vid"))
    assert rows == [(0, 0), (2, 1), (1, -1)]
    assert +counts == {"rows": 3, "unknown_items": 1}


def test_parts_of_parquet_are_whole_row_groups_that_cover_the_file(tmp_path: Path) -> None:
    raw = np.resize([10, 20, 30], 1000)
    pq.write_table(pa.table({"user": raw, "item": ["b"] * 1000}), tmp_path / "p.parquet", row_group_size=70)
    source = FilePairs([tmp_path / "p.parquet"], part_rows=200)
    assert [part.row_groups for part in source.parts][:2] == [(0, 1), (2, 3)]
    assert [part.name for part in source.parts] == [f"part-{n:05d}" for n in range(7)]
    rows, counts = _all(source)
    assert rows == [((n % 3), 1) for n in range(1000)]
    assert counts["rows"] == 1000
    large = FilePairs([tmp_path / "p.parquet"], part_rows=10)
    assert all(len(part.row_groups or ()) == 1 for part in large.parts)


def test_parts_that_are_cut_elsewhere_are_another_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = pa.table({"user": [10] * 50, "item": ["b"] * 50})
    pq.write_table(table, tmp_path / "p.parquet", row_group_size=10)
    monkeypatch.chdir(tmp_path)
    three, four, again = (FilePairs([Path("p.parquet")], part_rows=rows) for rows in (30, 40, 30))
    assert len(three.parts) == len(four.parts) == 2
    assert three.identity() == again.identity() != four.identity()
    assert {part.file for part in three.parts} == {str(tmp_path / "p.parquet")}  # workers have another current folder


def test_unclear_exposures_are_those_of_the_data_set_in_order(tiny_data: Path) -> None:
    dataset = Dataset.open(str(tiny_data))
    users, items = RawIds(dataset.raw_ids("users")), RawIds(dataset.raw_ids("items"))
    rows, counts = _all(UnclearPairs(dataset), users, items)
    table = dataset.read("unclear")
    assert rows == list(zip(table["user"].to_pylist(), table["item"].to_pylist(), strict=True))
    assert counts == {"rows": dataset.rows["unclear"]}


def test_users_of_a_file_each_once_in_order(tmp_path: Path) -> None:
    (tmp_path / "u.csv").write_text("id\n30\n10\nnobody\n30\n77\n")
    users = AskedUsers(read_users(tmp_path / "u.csv", "id"), USERS)
    assert users.raw.to_pylist() == [30, 10, None, 77]
    assert (users.known.tolist(), users.unknown) == ([2, 0], ["nobody", "77"])


def test_bad_files_are_told(tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match=r"p\.csv: column user is missing; it has a, b \(--user-column NAME"):
        FilePairs([tmp_path / "p.csv"])
    with pytest.raises(UserError, match="is not there"):
        FilePairs([tmp_path / "no.csv"])
    (tmp_path / "p.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(UserError, match=r"p\.parquet cannot be read"):
        FilePairs([tmp_path / "p.parquet"])
    pq.write_table(pa.table({"user": [1.5], "item": ["a"]}), tmp_path / "f.parquet")
    with pytest.raises(UserError, match="user ids are double; expected whole numbers or text"):
        _all(FilePairs([tmp_path / "f.parquet"]))
