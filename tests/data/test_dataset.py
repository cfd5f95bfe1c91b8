"""Opening a data set: from anywhere, and never a broken one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest

from invdist.data.dataset import SPLITS, Dataset
from invdist.data.schema import fingerprint
from invdist.runtime.errors import UserError
from invdist.runtime.files import Folder


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    """A copy of the tiny data set that a test may break."""
    return Path(shutil.copytree(tiny, tmp_path / "copy"))


def test_opened_from_a_path_a_uri_and_a_subtree(tiny: Path):
    local = Dataset.open(str(tiny))
    subtree = pafs.SubTreeFileSystem(str(tiny.parent), pafs.LocalFileSystem())
    for other in (Dataset.open(tiny.as_uri()), Dataset.open("tiny", filesystem=subtree), Dataset.open(f"{tiny}/")):
        assert other.fingerprint == local.fingerprint
        assert other.read("valid").equals(local.read("valid"))


def test_opened_from_a_bucket_here_and_on_ray(tiny: Path, s3_bucket: str, ray_cluster: object):
    import ray

    where = f"{s3_bucket}/opened/tiny"
    pafs.copy_files(str(tiny), where)
    local, remote = Dataset.open(str(tiny)), Dataset.open(where)
    assert remote.fingerprint == local.fingerprint
    assert remote.read("valid").equals(local.read("valid"))
    on_ray = ray.remote(lambda: Dataset.open(where, verify="fast").read("valid"))
    assert ray.get(on_ray.remote()).equals(local.read("valid"))
    with Folder.at(where).create("dataset.json") as file:
        file.write(b"{")
    with pytest.raises(UserError, match=r"s3://tests/opened/tiny/dataset\.json is not JSON"):
        Dataset.open(where)
    with pytest.raises(UserError, match="is not a prepared data set"):
        Dataset.open(f"{s3_bucket}/opened/nothing")


def test_any_parquet_tool_reads_it(tiny: Path):
    dataset = Dataset.open(str(tiny))
    for split in SPLITS:
        table = pq.read_table(tiny / split)
        assert table.num_rows == dataset.rows[split]
        assert table.equals(dataset.read(split))
        assert pa.Table.from_batches(dataset.scan(split, batch_rows=77)).equals(table)
    assert set(dataset.read("train", ["label"])["label"].to_pylist()) == {0, 1}
    shapes = [(len(pq.read_table(a)), len(pq.read_table(b))) for a, b in pairs_of_shards(tiny)]
    assert len(shapes) > 3
    assert all(unclear == truth for unclear, truth in shapes)


def pairs_of_shards(path: Path) -> list[tuple[Path, Path]]:
    return list(zip(sorted((path / "unclear").iterdir()), sorted((path / "truth").iterdir()), strict=True))


def test_true_preference_of_any_pair(tiny: Path, all_labeled: Path):
    dataset = Dataset.open(str(tiny))
    unclear = dataset.read("unclear")
    truth = dataset.read("truth")["truth"].to_numpy()
    found = dataset.true_preference(unclear["user"].to_numpy(), unclear["item"].to_numpy())
    np.testing.assert_allclose(found, truth, atol=1e-5)
    empty = Dataset.open(str(all_labeled))
    assert empty.read("unclear").num_rows == 0
    assert empty.read("truth").schema.names == ["truth"]


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    manifest = json.loads((path / "dataset.json").read_text())
    change(manifest)
    (path / "dataset.json").write_text(json.dumps(manifest))


def replace_column(file: Path, name: str, values: pa.Array) -> None:
    table = pq.read_table(file)
    at = table.schema.get_field_index(name)
    pq.write_table(table.set_column(at, name, values), file)


def break_range(path: Path) -> None:
    file = path / "train" / "part-00001.parquet"
    items = pq.read_table(file)["item"].to_numpy().copy()
    items[17] = 300
    replace_column(file, "item", pa.array(items))


def break_label(path: Path) -> None:
    file = path / "valid" / "part-00000.parquet"
    replace_column(file, "label", pa.array(np.full(300, -1, np.int8)))


def no_user(path: Path) -> None:
    file = path / "train" / "part-00000.parquet"
    users = pq.read_table(file)["user"].to_pylist()
    replace_column(file, "user", pa.array([None, *users[1:]], pa.int32()))


def break_truth(path: Path) -> None:
    file = path / "truth" / "part-00000.parquet"
    replace_column(file, "truth", pa.array(np.full(300, 1.5, np.float32)))


def break_type(path: Path) -> None:
    file = path / "test" / "part-00000.parquet"
    replace_column(file, "user", pq.read_table(file)["user"].cast(pa.string()))


def drop_column(path: Path) -> None:
    file = path / "test" / "part-00000.parquet"
    pq.write_table(pq.read_table(file).drop_columns(["label"]), file)


def truncate(path: Path) -> None:
    file = path / "unclear" / "part-00002.parquet"
    file.write_bytes(file.read_bytes()[:-100])


def fewer_rows(path: Path) -> None:
    file = path / "train" / "part-00000.parquet"
    pq.write_table(pq.read_table(file).slice(1), file)


def flip(path: Path) -> None:
    file = path / "train" / "part-00000.parquet"
    users = pq.read_table(file)["user"].to_numpy().copy()
    users[0] = (users[0] + 1) % 200
    replace_column(file, "user", pa.array(users))


def copy_shard(path: Path) -> None:
    shutil.copy(path / "train" / "part-00000.parquet", path / "train" / "part-00000 (1).parquet")


def list_copy(path: Path) -> None:
    def change(manifest: dict[str, Any]) -> None:
        shards = manifest["shards"]["train"]
        shards.append({**shards[0], "file": "train/part-00099.parquet"})
        manifest["rows"]["train"] += shards[0]["rows"]
        manifest["fingerprint"] = fingerprint(manifest)

    rewrite(path, change)


BROKEN = {
    "out of range": (break_range, r"train/part-00001.parquet: row 17: item is 300; expected 0 to 299"),
    "label": (break_label, r"valid/part-00000.parquet: row 0: label is -1; expected 0 to 1"),
    "null": (no_user, r"train/part-00000.parquet: 1 rows have no user"),
    "classes": (lambda path: rewrite(path, lambda m: m["classes"].pop("train")), r"classes.train: expected positives"),
    "truth": (break_truth, r"truth/part-00000.parquet: row 0: truth is 1.5"),
    "type": (break_type, r"test/part-00000.parquet: column user is string; expected int32"),
    "column": (drop_column, r"test/part-00000.parquet: column label is missing; it has user, item"),
    "truncated": (truncate, r"unclear/part-00002.parquet is not a whole parquet file"),
    "rows": (fewer_rows, r"train/part-00000.parquet: 299 rows, but the manifest says 300"),
    "checksum": (flip, r"train/part-00000.parquet: its checksum is not the manifest's"),
    "missing shard": (lambda path: (path / "test" / "part-00001.parquet").unlink(), r"part-00001.parquet is missing"),
    "stray shard": (copy_shard, r"part-00000 \(1\).parquet is not in the manifest"),
    "listed twice": (list_copy, r"train/part-00099.parquet is a copy of train/part-00000.parquet"),
    "version": (lambda path: rewrite(path, lambda m: m.update(version=7)), r"version 7, but .* reads version 1"),
    "edited": (lambda path: rewrite(path, lambda m: m.update(users=9)), r"dataset.json was changed after"),
    "negative": (lambda path: rewrite(path, lambda m: m.update(items=-1)), r"items is -1; expected"),
    "incomplete": (lambda path: rewrite(path, lambda m: m.pop("shards")), r"shards is missing"),
    "counts": (lambda path: rewrite(path, lambda m: m["rows"].update(test=1)), r"rows.test says 1"),
    "no json": (lambda path: (path / "dataset.json").write_text("{"), r"dataset.json is not JSON"),
    "other json": (lambda path: (path / "dataset.json").write_text("[1]"), r"does not describe an invdist data set"),
    "no manifest": (lambda path: (path / "dataset.json").unlink(), r"is not a prepared data set"),
    "ids": (lambda path: (path / "users.parquet").write_bytes(b"x"), r"users.parquet is not a whole parquet file"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_data_set_is_refused_and_the_place_named(copy: Path, name: str):
    change, message = BROKEN[name]
    change(copy)
    with pytest.raises(UserError, match=message):
        Dataset.open(str(copy))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (pa.table({"index": [0, 1]}), "column raw is missing"),
        (pa.table({"raw": [0.5, 1.5]}), "raw ids are double"),
        (pa.table({"raw": pa.array([1, None])}), "none missing"),
    ],
)
def test_ids_that_are_none_are_refused_where_they_are_read(copy: Path, table: pa.Table, message: str):
    dataset = Dataset.open(str(copy))
    pq.write_table(table, copy / "users.parquet")
    with pytest.raises(UserError, match=message):
        dataset.raw_ids("users")


@pytest.mark.parametrize("name", ["truncated", "missing shard", "stray shard", "version", "edited", "no manifest"])
def test_fast_opening_sees_what_sizes_tell(copy: Path, name: str):
    change, message = BROKEN[name]
    change(copy)
    with pytest.raises(UserError, match=message):
        Dataset.open(str(copy), verify="fast")


def test_a_path_that_is_not_there(tmp_path: Path):
    with pytest.raises(UserError, match="is not a prepared data set"):
        Dataset.open(str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="cannot reach"):
        Dataset.open("nosuch://bucket/data")
