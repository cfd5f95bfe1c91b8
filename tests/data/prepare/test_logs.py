"""Raw logs as people have them: good, odd and broken."""

from __future__ import annotations

import gzip
import zipfile
from datetime import datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from invdist.data.dataset import Dataset
from invdist.data.prepare.options import KuaiRand, MicroVideo, Ml1m, PlayColumns, RatingColumns, Ratings
from invdist.data.prepare.pipeline import prepare_log
from invdist.runtime.errors import UserError

PLAYS = "user,item,play_time,duration,like,hate,time\n"


def plays(rows: int = 300, seed: int = 0) -> str:
    rng = np.random.default_rng(seed)
    lines = [
        f"u{rng.integers(20)},v{row},{rng.choice([1, 50, 95])},100,{int(row % 50 == 0)},{int(row % 60 == 1)},{row}\n"
        for row in range(rows)
    ]
    return PLAYS + "".join(lines)


def run(kind, inputs: list[Path], output: Path) -> dict:
    return prepare_log(kind, inputs, output)


def test_csv_gzip_tsv_and_parquet_give_the_same(tmp_path: Path):
    text = plays()
    (tmp_path / "a.csv").write_text(text)
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "c.tsv").write_text(text.replace(",", "\t"))
    lines = [line.split(",") for line in text.splitlines()]
    table = {name: [line[at] for line in lines[1:]] for at, name in enumerate(lines[0])}
    numbers = {name: [int(x) for x in table[name]] for name in ("play_time", "duration", "like", "hate", "time")}
    pq.write_table(pa.table({**table, **numbers}), tmp_path / "d.parquet")
    prints = {
        run(MicroVideo(), [tmp_path / name], tmp_path / f"out-{name}")["fingerprint"]
        for name in ("a.csv", "b.csv.gz", "c.tsv", "d.parquet")
    }
    assert len(prints) == 1


def test_a_folder_and_several_files(tmp_path: Path):
    text = plays()
    lines = text.splitlines(keepends=True)
    folder = tmp_path / "logs"
    folder.mkdir()
    (folder / "1.csv").write_text("".join(lines[:100]))
    (folder / "2.csv").write_text(lines[0] + "".join(lines[100:]))
    (folder / "notes.txt").write_text("not a log")
    (tmp_path / "whole.csv").write_text(text)
    parts = run(MicroVideo(), [folder], tmp_path / "parts")
    whole = run(MicroVideo(), [tmp_path / "whole.csv"], tmp_path / "whole")
    assert parts["fingerprint"] == whole["fingerprint"]


def test_columns_by_any_name(tmp_path: Path):
    (tmp_path / "log.csv").write_text(plays().replace("user,item,play_time", "uid,vid,watched"))
    columns = PlayColumns(user="uid", item="vid", play_time="watched")
    assert run(MicroVideo(columns=columns), [tmp_path / "log.csv"], tmp_path / "out")["users"] == 20
    with pytest.raises(UserError, match=r"log.csv: column user is missing; it has uid, vid, .*columns.user=NAME"):
        MicroVideo().open([tmp_path / "log.csv"])


def test_a_time_that_was_named_must_be_there(tmp_path: Path):
    (tmp_path / "log.csv").write_text(plays().replace(",time\n", ",ts\n"))
    assert not MicroVideo().open([tmp_path / "log.csv"]).has_time
    assert MicroVideo(columns=PlayColumns(time="ts")).open([tmp_path / "log.csv"]).has_time
    with pytest.raises(UserError, match=r"log.csv: column tss is missing; it has .*ts .*columns.time=NAME"):
        MicroVideo(columns=PlayColumns(time="tss")).open([tmp_path / "log.csv"])


@pytest.mark.parametrize("rule", ["finish_rate", "play_time", "feedback", "feedback+finish_rate"])
def test_rules_on_a_play_log(tmp_path: Path, rule: str):
    (tmp_path / "log.csv").write_text(plays(2000))
    manifest = run(MicroVideo(rule=rule), [tmp_path / "log.csv"], tmp_path / "out")
    rows = [line.split(",") for line in plays(2000).splitlines()[1:]]
    play, like, hate = (np.array([int(row[at]) for row in rows]) for at in (2, 4, 5))
    by_feedback = [np.sum((like == 1) & (hate == 0)), np.sum((hate == 1) & (like == 0))]
    by_rate = [np.sum(play > 80), np.sum(play < 20)]
    if rule == "feedback":
        expected = by_feedback
    elif rule == "feedback+finish_rate":
        neither = like == hate
        expected = [by_feedback[0] + np.sum(neither & (play > 80)), by_feedback[1] + np.sum(neither & (play < 20))]
    else:
        # Three values a third each: the quartiles are the smallest and the largest.
        expected = by_rate
    assert [manifest["summary"]["positives"], manifest["summary"]["negatives"]] == [int(n) for n in expected]


def test_nan_play_times_and_bad_durations_are_counted_and_unclear(tmp_path: Path):
    lines = plays().splitlines(keepends=True)
    for row, (play, duration) in {5: ("", "100"), 6: ("nan", "100"), 7: ("-3", "100"), 8: ("9", "0")}.items():
        lines[row] = f"u1,v{row - 1},{play},{duration},0,0,1\n"
    lines[9] = "u1,v8,9,-100,0,0,1\n"
    (tmp_path / "log.csv").write_text("".join(lines))
    manifest = run(MicroVideo(), [tmp_path / "log.csv"], tmp_path / "out")
    assert manifest["counts"]["bad_play_times"] == 3
    assert manifest["counts"]["bad_durations"] == 2
    dataset = Dataset.open(str(tmp_path / "out"))
    items = dataset.raw_ids("items").to_pylist()
    unclear = {items[item] for item in dataset.read("unclear")["item"].to_pylist()}
    assert {f"v{row - 1}" for row in range(5, 10)} <= unclear


def test_numbers_that_are_ids_may_be_text(tmp_path: Path):
    rows = "".join(f"{n:03d},{n % 7},{n % 5 + 1}\n" for n in range(100))
    (tmp_path / "log.csv").write_text("user,item,rating\n" + rows)
    run(Ratings(id_type="string"), [tmp_path / "log.csv"], tmp_path / "out")
    assert Dataset.open(str(tmp_path / "out")).raw_ids("users").to_pylist()[7] == "007"


def test_ratings_with_named_columns(tmp_path: Path):
    rng = np.random.default_rng(0)
    table = {"who": rng.integers(0, 9, 200), "what": np.arange(200), "stars": rng.integers(1, 11, 200)}
    pq.write_table(pa.table(table), tmp_path / "log.parquet")
    kind = Ratings(columns=RatingColumns(user="who", item="what", rating="stars"), positive_from=8.0, negative_to=3.0)
    summary = run(kind, [tmp_path / "log.parquet"], tmp_path / "out")["summary"]
    assert summary["positives"] == np.sum(table["stars"] >= 8)
    assert summary["negatives"] == np.sum(table["stars"] <= 3)
    assert summary["unclear"] == 200 - summary["positives"] - summary["negatives"]


def broken(tmp_path: Path, name: str) -> Path:
    """A file that is wrong in the way that its name says."""
    path = tmp_path / name
    whole = tmp_path / "whole.parquet"
    pq.write_table(pa.table({"user": [1], "item": [1], "play_time": [1.0], "duration": [2.0]}), whole)
    content = {
        "empty.csv": b"",
        "empty.parquet": b"",
        "header.csv": PLAYS.encode(),
        "truncated.parquet": whole.read_bytes()[:-20],
        "truncated.csv.gz": gzip.compress(plays().encode())[:-50],
        "text.csv": (PLAYS + "u1,v1,soon,100,0,0,1\n").encode(),
        "ragged.csv": (PLAYS + "u1,v1,1,100,0,0,1\nu1,v1\n").encode(),
        "log.json": b"{}",
    }
    if name in content:
        path.write_bytes(content[name])
    elif name == "ids.parquet":
        pq.write_table(pa.table({"user": [1.5], "item": [1], "play_time": [1.0], "duration": [2.0]}), path)
    elif name == "types.parquet":
        pq.write_table(pa.table({"user": [1], "item": [1], "play_time": ["long"], "duration": [2.0]}), path)
    elif name == "times.parquet":
        table = {"user": [1], "item": [1], "play_time": [1.0], "duration": [2.0], "time": ["noon"]}
        pq.write_table(pa.table(table), path)
    return path


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("empty.csv", "empty.csv is empty"),
        ("empty.parquet", "empty.parquet is empty"),
        ("header.csv", "the log has no rows"),
        ("truncated.parquet", "truncated.parquet cannot be read"),
        ("truncated.csv.gz", "truncated.csv.gz cannot be read"),
        ("text.csv", r"text.csv cannot be read: .*'soon'"),
        ("ragged.csv", r"ragged.csv cannot be read: .*Expected 7 columns, got 2"),
        ("log.json", "log.json: expected a name that ends in .csv"),
        ("nowhere.csv", "nowhere.csv is not there"),
        ("ids.parquet", "ids.parquet: user ids are double; expected whole numbers or text"),
        ("types.parquet", r"types.parquet: play time is string; expected numbers"),
        ("times.parquet", "times.parquet: time is string; expected"),
    ],
)
def test_a_broken_log_is_named_and_leaves_nothing(tmp_path: Path, name: str, message: str):
    path = broken(tmp_path, name)
    with pytest.raises(UserError, match=message):
        run(MicroVideo(), [path], tmp_path / "out" / "data")
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


def test_files_that_do_not_fit_together(tmp_path: Path):
    pair = {"play_time": [1.0], "duration": [2.0]}
    pq.write_table(pa.table({"user": [1], "item": [1], **pair}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"user": ["x"], "item": [1], **pair}), tmp_path / "b.parquet")
    pq.write_table(pa.table({"user": [1], "item": [1], **pair, "time": [1]}), tmp_path / "c.parquet")
    files = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    with pytest.raises(UserError, match="user ids are int64 in one part of the log and string in another"):
        run(MicroVideo(), files, tmp_path / "out")
    with pytest.raises(UserError, match=r"a.parquet: column time is missing here, but other files have it"):
        MicroVideo().open([tmp_path / "a.parquet", tmp_path / "c.parquet"])
    pq.write_table(pa.table({"user": [1], "item": [1], **pair, "time": [datetime(2024, 1, 1)]}), tmp_path / "d.parquet")
    with pytest.raises(UserError, match=r"time is numbers in .*c.parquet and timestamps in .*d.parquet"):
        run(MicroVideo(), [tmp_path / "c.parquet", tmp_path / "d.parquet"], tmp_path / "out")
    with pytest.raises(UserError, match=r"a.parquet is given twice"):
        MicroVideo().open([tmp_path / "a.parquet", tmp_path / "a.parquet"])


def test_times_of_any_unit_are_in_order(tmp_path: Path):
    """pyarrow takes whole seconds, fractions and days for three types, whose numbers cannot be compared."""
    times = {"a": "2024-01-01 10:00:00", "b": "2024-01-02 10:00:00.5", "c": "2024-01-03"}
    for name, time in times.items():
        (tmp_path / f"{name}.csv").write_text(f"user,item,play_time,duration,time\nu,v,1,2,{time}\n")
    log = MicroVideo().open([tmp_path / f"{name}.csv" for name in "cab"])
    read = [batch["time"][0].as_py() for batch in log.batches()]
    assert read[1] < read[2] < read[0]
    assert read[0] - read[1] == (2 * 24 - 10) * 3600 * 10**6


def test_a_copied_log_counts_as_duplicates(tmp_path: Path):
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_text(plays())
    manifest = run(MicroVideo(), [tmp_path / "a.csv", tmp_path / "b.csv"], tmp_path / "out")
    once = run(MicroVideo(), [tmp_path / "a.csv"], tmp_path / "once")
    assert manifest["counts"]["exact_duplicates"] == manifest["counts"]["log_rows"] // 2 == 300
    assert manifest["fingerprint"] == once["fingerprint"]


def test_ml_1m_by_itself_and_zipped(tmp_path: Path):
    rng = np.random.default_rng(0)
    lines = "".join(f"{rng.integers(1, 9)}::{n}::{rng.integers(1, 6)}::{n}\n" for n in range(200))
    (tmp_path / "ratings.dat").write_text(lines)
    with zipfile.ZipFile(tmp_path / "ml.zip", "w") as archive:
        archive.writestr("ml-1m/README", "x")
        archive.writestr("ml-1m/ratings.dat", lines)
    plain = run(Ml1m(), [tmp_path / "ratings.dat"], tmp_path / "plain")
    zipped = run(Ml1m(), [tmp_path / "ml.zip"], tmp_path / "zipped")
    assert Ml1m().open([tmp_path]).describe() == Ml1m().open([tmp_path / "ratings.dat"]).describe()
    assert plain["fingerprint"] == zipped["fingerprint"]
    assert plain["summary"]["negatives"] == sum(int(line.split("::")[2]) <= 2 for line in lines.splitlines())
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("readme", "x")
    (tmp_path / "no.zip").write_bytes(b"no zip")
    (tmp_path / "folder").mkdir()
    wrong = {
        "other.zip": "has no ratings.dat",
        "no.zip": "no.zip cannot be read",
        "folder": "ratings.dat is not there",
    }
    for name, message in wrong.items():
        with pytest.raises(UserError, match=message):
            run(Ml1m(), [tmp_path / name], tmp_path / "out")


def test_real_ml_1m_has_the_published_counts(shared_data: Path, tmp_path: Path):
    split = shared_data / "ml-1m-authors-split"
    valid, test = str(split / "ml1m.valid.rating.gz"), str(split / "ml1m.test.negative.gz")
    kind = Ml1m(split="given", valid_file=valid, test_file=test)
    manifest = run(kind, [shared_data / "ml-1m.zip"], tmp_path / "out")
    summary = manifest["summary"]
    assert (summary["users"], summary["items"]) == (6_040, 3_706)
    assert (summary["positives"], summary["negatives"], summary["unclear"]) == (836_478, 163_731, 0)
    assert manifest["rows"] == {
        "train": 540_113,
        "training_test": 60_012,
        "valid": 200_042,
        "test": 200_042,
        "unclear": 0,
    }
    dataset = Dataset.open(str(tmp_path / "out"))
    raw = [dataset.raw_ids(entity).to_numpy() for entity in ("users", "items")]
    table = dataset.read("valid").to_pydict()
    with gzip.open(valid, "rt") as file:
        expected = {(int(u), int(i), int(int(r) >= 3)) for u, i, r in (line.split() for line in file)}
    assert {(raw[0][u], raw[1][i], y) for u, i, y in zip(*table.values())} == expected


def test_real_kuairand_has_its_flaws_counted(shared_data: Path, tmp_path: Path):
    manifest = run(KuaiRand(split="time"), [shared_data / "kuairand-pure"], tmp_path / "out")
    counts = manifest["counts"]
    assert counts["log_rows"] == 94_784
    assert counts["bad_durations"] == 1_665
    assert counts["exact_duplicates"] + counts["repeated_pairs"] == 94_784 - 91_229
    assert counts["exact_duplicates"] >= 2_750
    pairs = sum(manifest["rows"].values()) + counts["unclear_after_training"]
    assert pairs == 91_229
