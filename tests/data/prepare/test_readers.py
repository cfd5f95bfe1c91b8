"""Columns of real files: ids as they are written, any delimiter and encoding, dates and units."""

from __future__ import annotations

import gzip
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from invdist.cli.prepare import main
from invdist.data.dataset import Dataset
from invdist.data.prepare import readers
from invdist.data.prepare.options import MicroVideo, RatingColumns, Ratings
from invdist.data.prepare.pipeline import prepare_log
from invdist.data.prepare.readers import NO_TIME, canonical, days_of, find_column
from invdist.runtime.errors import UserError


def ratings(users: list[str], folder: Path, **options: Any) -> Dataset:
    """The data set of a CSV log in which these users rate 60 items each."""
    lines = [f"{user},{item},{item % 5 + 1}\n" for user in users for item in range(60)]
    (folder / "log.csv").write_text("user,item,rating\n" + "".join(lines))
    prepare_log(Ratings(**options), [folder / "log.csv"], folder / "out")
    return Dataset.open(str(folder / "out"))


NAMES = ["NA", "NULL", "N/A", "NaN", "nan", "null", "#N/A", "alice"]


@pytest.mark.parametrize("id_type", ["auto", "string"])
def test_only_an_empty_id_is_missing(tmp_path: Path, id_type: str):
    dataset = ratings([*NAMES, "", '""'], tmp_path, id_type=id_type)
    assert dataset.raw_ids("users").to_pylist() == sorted(NAMES)
    assert dataset.manifest["counts"]["missing_ids"] == 120


def test_an_empty_id_is_missing_in_parquet_too(tmp_path: Path):
    rows = {"user": ["NA", "", None, "x", "y"] * 20, "item": list(range(100)), "rating": [1.0, 5.0] * 50}
    pq.write_table(pa.table(rows), tmp_path / "log.parquet")
    manifest = prepare_log(Ratings(), [tmp_path / "log.parquet"], tmp_path / "out")
    assert manifest["counts"]["missing_ids"] == 40
    assert Dataset.open(str(tmp_path / "out")).raw_ids("users").to_pylist() == ["NA", "x", "y"]


def test_a_missing_number_may_be_written_in_any_way(tmp_path: Path):
    lines = [f"u{n % 9},{n},{['NA', 'nan', '', 'null', '1', '5'][n % 6]}\n" for n in range(120)]
    (tmp_path / "log.csv").write_text("user,item,rating\n" + "".join(lines))
    manifest = prepare_log(Ratings(), [tmp_path / "log.csv"], tmp_path / "out")
    assert manifest["counts"]["missing_ratings"] == 80


@pytest.mark.parametrize(
    ("users", "expected"),
    [
        (["5", "12", "-3", "0"], [-3, 0, 5, 12]),
        (["00012", "12", "5"], ["00012", "12", "5"]),
        (["5", "x7"], ["5", "x7"]),
        (["5.0", "x7"], ["5.0", "x7"]),
        ([str(2**63 - 1), "1"], [1, 2**63 - 1]),
    ],
)
def test_ids_are_numbers_only_if_nothing_is_lost(tmp_path: Path, users: list[str], expected: list):
    assert ratings(users, tmp_path).raw_ids("users").to_pylist() == expected


def test_the_type_of_ids_is_that_of_the_whole_log(tmp_path: Path):
    for name, users in (("a", ["1", "2"]), ("b", ["x", "2"])):
        lines = [f"{user},{item},{item % 5 + 1}\n" for user in users for item in range(60)]
        (tmp_path / f"{name}.csv").write_text("user,item,rating\n" + "".join(lines))
    prepare_log(Ratings(), [tmp_path / "a.csv", tmp_path / "b.csv"], tmp_path / "out")
    assert Dataset.open(str(tmp_path / "out")).raw_ids("users").to_pylist() == ["1", "2", "x"]


@pytest.mark.parametrize("odd", ["5.0", "1e5", str(2**63), "9" * 5000])
def test_numbers_that_would_lose_something_are_refused_and_the_way_out_named(tmp_path: Path, odd: str):
    with pytest.raises(UserError, match=rf"log\.csv: user id {odd} is not a whole number .*id_type=string"):
        ratings(["7", odd], tmp_path)
    assert ratings(["7", odd], tmp_path, id_type="string").raw_ids("users").to_pylist() == sorted(["7", odd])


TEXT = "User;Item;Rating\n" + "".join(f"jörg{n % 9};{n};{n % 5 + 1}\n" for n in range(90))


@pytest.mark.parametrize(("name", "encoding"), [("log.csv", "latin-1"), ("log.dat", "utf-8"), ("log.csv.gz", "utf-16")])
def test_delimiter_encoding_and_headers_in_another_case(tmp_path: Path, name: str, encoding: str):
    content = TEXT.encode(encoding)
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    arguments = ["--input", str(tmp_path / name), "--output", str(tmp_path / "out")]
    assert main(["ratings", *arguments, "delimiter=;", f"encoding={encoding}"]) == 0
    assert Dataset.open(str(tmp_path / "out")).raw_ids("users").to_pylist() == [f"jörg{n}" for n in range(9)]


def test_a_tab_by_name(tmp_path: Path):
    (tmp_path / "log.txt").write_text(TEXT.replace(";", "\t"))
    for name in ("tab", "\\t"):
        arguments = ["--input", str(tmp_path / "log.txt"), "--output", str(tmp_path / f"out{len(name)}")]
        assert main(["ratings", *arguments, f"delimiter={name}"]) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["delimiter=::"], "delimiter: expected one ASCII character"),
        (["encoding=klingon"], "Python knows no encoding 'klingon'"),
        (["delimiter=;"], r"encoding=NAME reads other encodings"),
    ],
)
def test_wrong_formats_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str):
    (tmp_path / "log.csv").write_bytes(TEXT.encode("latin-1"))
    assert main(["ratings", "--input", str(tmp_path / "log.csv"), "--output", str(tmp_path / "out"), *options]) == 2
    assert message in capsys.readouterr().err


def test_the_exact_header_wins_and_doubt_is_an_error():
    file = Path("log.csv")
    assert find_column("user", ["USER", "user"], file) == "user"
    assert find_column("user", ["id", " User"], file) == " User"
    assert find_column("user", ["id"], file) is None
    with pytest.raises(UserError, match=r"log.csv: column user could be USER or User"):
        find_column("user", ["USER", "User"], file)


def label_log(folder: Path, labels: list) -> Path:
    rows = [f"{n % 7},{n},{labels[n % len(labels)]}\n" for n in range(140)]
    (folder / "log.csv").write_text("user,item,good\n" + "".join(rows))
    return folder / "log.csv"


@pytest.mark.parametrize(
    ("kind", "labels"),
    [
        ("ratings", ["1", "0", "", "0"]),
        ("microvideo", ["True", "False", "", "false"]),
        ("microvideo", ["1.0", "0.0", "NA", "0"]),
    ],
)
def test_a_log_with_labels_of_its_own(tmp_path: Path, kind: str, labels: list[str]):
    arguments = ["--input", str(label_log(tmp_path, labels)), "--output", str(tmp_path / "out")]
    assert main([kind, *arguments, "rule=label", "columns.label=good"]) == 0
    dataset = Dataset.open(str(tmp_path / "out"))
    assert (dataset.summary["positives"], dataset.summary["negatives"], dataset.rows["unclear"]) == (35, 70, 35)
    assert dataset.manifest["counts"]["missing_labels"] == 35


@pytest.mark.parametrize("workers", [None, "0"])
def test_labels_may_begin_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: str | None):
    """Nothing tells their type in the part of the file that types are inferred from."""
    monkeypatch.setattr(readers, "BLOCK_BYTES", 1000)
    rows = [f"{n % 7},{n},{'' if n < 500 else n % 2}\n" for n in range(1000)]
    (tmp_path / "log.csv").write_text("user,item,good\n" + "".join(rows))
    arguments = ["--input", str(tmp_path / "log.csv"), "--output", str(tmp_path / "out")]
    arguments += ["--workers", workers] if workers else []
    assert main(["ratings", *arguments, "rule=label", "columns.label=good"]) == 0
    assert Dataset.open(str(tmp_path / "out")).rows["unclear"] == 500


def test_a_label_is_one_zero_or_nothing(tmp_path: Path):
    options = Ratings(rule="label", columns=RatingColumns(label="good"))
    with pytest.raises(UserError, match=r"log.csv: label is 2; expected 1 \(positive\), 0 \(negative\) or nothing"):
        prepare_log(options, [label_log(tmp_path, [0, 1, 2])], tmp_path / "out")


def test_days_of_times_in_any_unit():
    moment = datetime(2022, 4, 24, 17, 30, tzinfo=UTC)
    day = (date(2022, 4, 24) - date(1970, 1, 1)).days
    seconds = int(moment.timestamp())
    times = np.array([seconds, seconds * 10**3, seconds * 10**6, seconds * 10**9, NO_TIME])
    assert days_of(times, 0.0).tolist() == [day] * 4 + [NO_TIME]
    assert days_of(times, 8.0).tolist() == [day + 1] * 4 + [NO_TIME]
    assert days_of(np.array([-1, 0, 86_399, 86_400]), 0.0).tolist() == [-1, 0, 0, 1]


@pytest.mark.parametrize(
    "column",
    [
        pa.array([20220425, None]),
        pa.array([date(2022, 4, 25), None]),
        pa.array([datetime(2022, 4, 25, 23, 59), None]),
    ],
)
def test_dates_of_any_type(column: pa.Array):
    days = canonical(pa.RecordBatch.from_arrays([column], ["date"]), Path("log"))["date"].to_pylist()
    assert days == [(date(2022, 4, 25) - date(1970, 1, 1)).days, NO_TIME]


@pytest.mark.parametrize("column", [pa.array([20221325]), pa.array([7]), pa.array(["monday"]), pa.array([1.5])])
def test_what_is_no_date_is_refused(column: pa.Array):
    with pytest.raises(UserError, match="YYYYMMDD"):
        canonical(pa.RecordBatch.from_arrays([column], ["date"]), Path("log"))


def play_log(folder: Path, factor: float) -> Path:
    """A log whose durations are in milliseconds, and play times so many times too small."""
    rng = np.random.default_rng(0)
    rows = [f"{n % 20},{n},{rng.choice([500, 5000, 9500]) / factor},10000\n" for n in range(300)]
    (folder / "log.csv").write_text("user,item,play_time,duration\n" + "".join(rows))
    return folder / "log.csv"


def test_seconds_for_milliseconds_are_noticed_and_can_be_set_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    log = play_log(tmp_path, 1000)
    with pytest.raises(UserError) as refused:
        prepare_log(MicroVideo(), [log], tmp_path / "out")
    for part in ("train has no positives", "finish rates: min 5e-05", "play_time_unit=s duration_unit=ms"):
        assert part in str(refused.value)
    arguments = ["--input", str(log), "--output", str(tmp_path / "out")]
    assert main(["microvideo", *arguments, "play_time_unit=s", "duration_unit=ms"]) == 0
    shown = capsys.readouterr().out
    assert "finish rates: min 0.05, 10% 0.05, 25% 0.05, 50% 0.5, 75% 0.95, 90% 0.95, max 0.95" in shown
    assert "warning" not in shown
    right = prepare_log(MicroVideo(), [play_log(tmp_path, 1)], tmp_path / "right")
    assert Dataset.open(str(tmp_path / "out")).fingerprint == right["fingerprint"]
    assert right["finish_rates"]["50%"] == 0.5


def test_milliseconds_for_seconds_warn(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A few zeros are enough for two classes: the data set is made, and the doubt is printed."""
    log = play_log(tmp_path, 0.001)
    text = log.read_text().splitlines(keepends=True)
    log.write_text(text[0] + "".join(f"{n % 20},{n + 900},0,10000\n" for n in range(60)) + "".join(text[1:]))
    assert main(["microvideo", "--input", str(log), "--output", str(tmp_path / "out")]) == 0
    assert "warning: the median finish rate is 500: are play times in ms and durations in s?" in capsys.readouterr().out
