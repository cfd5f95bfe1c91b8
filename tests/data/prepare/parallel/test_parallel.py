"""`prepare` in many processes, against the one-process path: the same manifest and the same bytes."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest

from invdist.cli import prepare as command
from invdist.data.dataset import Dataset
from invdist.data.prepare.options import build_options
from invdist.data.prepare.parallel.driver import Sizes
from invdist.data.prepare.parallel.on_ray import prepare_on_ray
from invdist.data.prepare.pipeline import prepare_log
from invdist.runtime.errors import UserError
from invdist.runtime.private_ray import PrivateRay
from tests.runs import train_here

SMALL = Sizes(chunk_rows=1000, piece_bytes=30_000, part_ids=150)
"""So small that every stage has several tasks."""
ROWS = 4000


def content(folder: Path) -> dict[str, bytes]:
    """All files of a folder."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def plays(text_ids: bool = False) -> pa.Table:
    """A messy log: repeated pairs, exact copies, missing ids, broken durations, empty times."""
    rng = np.random.default_rng(5)
    user, item = rng.integers(0, 700, ROWS) * 7919 % 100_003, rng.integers(0, 300, ROWS)
    columns: dict[str, Any] = {
        "user": [f"ü{n:x}" if text_ids else int(n) for n in user],
        "item": [None if n == 13 else f"v {n}" if text_ids else int(n) for n in item],
        "play_time": np.where(rng.random(ROWS) < 0.02, -1.0, np.round(rng.random(ROWS) * 900)),
        "duration": np.where(rng.random(ROWS) < 0.03, 0.0, 1000.0),
        "time": pa.array(1_650_000_000 + rng.integers(0, 2_000_000, ROWS), mask=rng.random(ROWS) < 0.01),
    }
    table = pa.table(columns)
    return pa.concat_tables([table, table.slice(100, 40)])


def write_csv(table: pa.Table, path: Path) -> Path:
    pacsv.write_csv(table, path)
    return path


def csv_and_gzip(folder: Path) -> list[Path]:
    """A large CSV file, and a smaller one that cannot be cut."""
    table = plays()
    whole = write_csv(table.slice(0, 3000), folder / "a.csv")
    with gzip.open(folder / "b.csv.gz", "wb") as file:
        file.write(write_csv(table.slice(3000), folder / "b.csv").read_bytes())
    return [whole, folder / "b.csv.gz"]


def parquet_of_text(folder: Path) -> list[Path]:
    pq.write_table(plays(text_ids=True), folder / "log.parquet", row_group_size=300)
    return [folder / "log.parquet"]


def with_given_split(folder: Path) -> list[Path]:
    """Ratings, and lists of pairs beside them."""
    table = plays()
    rating = pa.array(np.where(np.arange(len(table)) % 3 > 0, 5.0, 1.0))
    table = table.drop_columns(["play_time", "duration", "time"]).append_column("rating", rating)
    pairs = [
        pair for pair in dict.fromkeys(zip(table["user"].to_pylist(), table["item"].to_pylist())) if pair[1] is not None
    ]
    for name, some in (("valid", pairs[::9]), ("test", pairs[1::9])):
        (folder / name).write_text("".join(f"{user}\t{item}\n" for user, item in some))
    return [write_csv(table, folder / "ratings.csv")]


Logs = Callable[[Path], list[Path]]
CASES: dict[str, tuple[str, Logs, dict[str, Any]]] = {
    "time and csv": ("microvideo", csv_and_gzip, {"split": "time", "label_fraction": 0.5, "duplicates": "first"}),
    "text and quartiles": ("microvideo", parquet_of_text, {"rule": "play_time", "since": "2022-04-18"}),
    "given": ("ratings", with_given_split, {"split": "given", "valid_file": "valid", "test_file": "test"}),
    "synthetic": ("synthetic", lambda _: [], {"preset": "tiny", "label_fraction": 0.3}),
}


def options_of(case: str, folder: Path) -> tuple[Any, list[Path]]:
    """The options and the log of a case."""
    kind, logs, mapping = CASES[case]
    mapping = {name: str(folder / value) if name.endswith("_file") else value for name, value in mapping.items()}
    inputs = logs(folder)
    return build_options(kind, {"shard_rows": 500, **mapping}), inputs


@pytest.mark.parametrize("case", CASES)
def test_the_same_bytes_as_in_two_passes(case: str, tmp_path: Path) -> None:
    options, inputs = options_of(case, tmp_path)
    alone = prepare_log(options, inputs, tmp_path / "alone")
    together = prepare_on_ray(options, inputs, tmp_path / "together", 0, sizes=SMALL)
    assert together == alone
    assert content(tmp_path / "together") == content(tmp_path / "alone")
    assert not (tmp_path / "together.partial").exists()


def test_the_same_bytes_on_ray(tmp_path: Path, ray_cluster: object) -> None:
    options, inputs = options_of("time and csv", tmp_path)
    alone = prepare_log(options, inputs, tmp_path / "alone")
    measured: dict[str, dict[str, Any]] = {}
    together = prepare_on_ray(options, inputs, tmp_path / "together", 4, sizes=SMALL, measured=measured)
    assert together == alone
    assert content(tmp_path / "together") == content(tmp_path / "alone")
    assert min(measured["peak_memory"].values()) > 1 << 20
    assert measured["seconds"].keys() == measured["peak_memory"].keys()


class Stopped(Exception):
    """Stands for whatever ends the process."""


@pytest.mark.parametrize("case", ["time and csv", "given"])
def test_an_interrupted_call_goes_on_where_it_stopped(case: str, tmp_path: Path) -> None:
    options, inputs = options_of(case, tmp_path)
    alone = prepare_log(options, inputs, tmp_path / "alone")
    seen: list[str] = []
    stop_at = 3

    def stop(stage: str, rows: int) -> None:
        seen.append(stage)
        if len(seen) % stop_at == 0:
            raise Stopped

    for _ in range(200):
        try:
            together = prepare_on_ray(options, inputs, tmp_path / "together", 0, stop, sizes=SMALL)
            break
        except Stopped:
            assert not (tmp_path / "together").exists()
    assert together == alone
    assert content(tmp_path / "together") == content(tmp_path / "alone")
    # Every task reports once when it is done: a task that was done twice would be in the list twice.
    again: list[str] = []
    prepare_on_ray(options, inputs, tmp_path / "again", 0, lambda stage, rows: again.append(stage), sizes=SMALL)
    assert sorted(seen) == sorted(again)


def test_unfinished_work_of_another_call_is_left_alone(tmp_path: Path) -> None:
    options, inputs = options_of("given", tmp_path)

    def stop(stage: str, rows: int) -> None:
        raise Stopped

    with pytest.raises(Stopped):
        prepare_on_ray(options, inputs, tmp_path / "out", 0, stop, sizes=SMALL)
    other = options.model_copy(update={"seed": 7})
    with pytest.raises(UserError, match=r"out.partial has the unfinished work of another prepare \(other options\)"):
        prepare_on_ray(other, inputs, tmp_path / "out", 0, sizes=SMALL)
    (tmp_path / "mine.partial").mkdir()
    (tmp_path / "mine.partial" / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="is not of an unfinished prepare"):
        prepare_on_ray(options, inputs, tmp_path / "mine", 0, sizes=SMALL)
    (tmp_path / "there").mkdir()
    with pytest.raises(UserError, match="is already there"):
        prepare_on_ray(options, inputs, tmp_path / "there", 0, sizes=SMALL)


def test_noise_is_refused(tmp_path: Path) -> None:
    options, inputs = options_of("synthetic", tmp_path)
    with pytest.raises(UserError, match="label_noise"):
        prepare_on_ray(options.model_copy(update={"label_noise": 0.1}), inputs, tmp_path / "out", 0)
    assert not (tmp_path / "out.partial").exists()


def test_what_is_wrong_with_a_log_is_said_as_in_one_process(tmp_path: Path) -> None:
    for name, ids in (("a", [1, 2]), ("b", ["x", "y"])):
        pq.write_table(pa.table({"user": ids, "item": ids, "rating": [1.0, 5.0]}), tmp_path / f"{name}.parquet")
    options = build_options("ratings", {})
    inputs = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    messages = []
    for prepare in (prepare_log, lambda *args: prepare_on_ray(*args, workers=0)):
        with pytest.raises(UserError) as error:
            prepare(options, inputs, tmp_path / "out")
        messages.append(str(error.value))
    assert messages[0] == messages[1]
    assert sorted(os.listdir(tmp_path)) == ["a.parquet", "b.parquet"]


def test_the_command(tmp_path: Path) -> None:
    write = ["synthetic", "preset=tiny", "--output"]
    assert command.main([*write, str(tmp_path / "a"), "--workers", "0"]) == 0
    assert command.main([*write, str(tmp_path / "b")]) == 0
    assert content(tmp_path / "a") == content(tmp_path / "b")
    assert command.main([*write, str(tmp_path / "c"), "--workers", "-1"]) == 2
    for name, how in (("d", ["--workers", "0"]), ("e", [])):
        assert command.main([*write, str(tmp_path / name), "--onto", str(tmp_path / "a"), *how]) == 0
    assert content(tmp_path / "d") == content(tmp_path / "e")


def a_day(folder: Path, number: int) -> list[Path]:
    """Plays of a day, some of them of pairs of the day before; a file of text ids."""
    table = plays(text_ids=True).slice(600 * number, 1500)
    pq.write_table(table, folder / f"day-{number}.parquet", row_group_size=300)
    return [folder / f"day-{number}.parquet"]


@pytest.mark.parametrize(
    "onto", [{}, {"keep": 1, "duplicates": "first"}, {"keep": 0, "older": "unclear", "drop_unseen": 1}]
)
def test_days_grow_to_the_same_bytes(onto: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before: Path | None = None
    for number in range(3):
        given = {"rule": "play_time", "shard_rows": 400, **(onto if number else {})}
        options, inputs = build_options("microvideo", given), a_day(tmp_path, number)
        alone = prepare_log(options, inputs, tmp_path / f"alone-{number}", onto=before)
        with monkeypatch.context() as patched:
            patched.delattr(Dataset, "raw_ids")  # nobody needs all of them
            together = prepare_on_ray(options, inputs, tmp_path / f"{number}", 0, sizes=SMALL, onto=before)
        assert together == alone
        before = tmp_path / f"alone-{number}"
        assert content(tmp_path / f"{number}") == content(before)
    assert together["growth"]["pairs_seen_before"] > 100
    assert together["growth"]["new_users"] > 10
    assert bool(together["growth"]["dropped_users"]) == ("drop_unseen" in onto)


def test_numbers_of_a_day_join_the_text_of_another(tmp_path: Path) -> None:
    """Their order is then that of text."""
    for name, kind in (("monday", pa.string()), ("tuesday", pa.int64())):
        table = plays().slice(0, 1500) if name == "monday" else plays().slice(1000, 2000)
        ids = {column: table[column].cast(kind) for column in ("user", "item")}
        pq.write_table(pa.table({**ids, "play_time": table["play_time"]}), tmp_path / f"{name}.parquet")
    options = build_options("microvideo", {"rule": "play_time"})
    prepare_log(options, [tmp_path / "monday.parquet"], tmp_path / "monday")
    given = options, [tmp_path / "tuesday.parquet"]
    prepare_log(*given, tmp_path / "alone", onto=tmp_path / "monday")
    prepare_on_ray(*given, tmp_path / "together", 0, sizes=SMALL, onto=tmp_path / "monday")
    assert content(tmp_path / "together") == content(tmp_path / "alone")
    prepare_log(*given, tmp_path / "numbers")
    inputs = [tmp_path / "monday.parquet"]
    with pytest.raises(UserError, match="users of the log are text"):
        prepare_on_ray(options, inputs, tmp_path / "wrong", 0, sizes=SMALL, onto=tmp_path / "numbers")
    assert not (tmp_path / "wrong.partial").exists()


def test_a_day_grows_on_two_workers(tmp_path: Path, ray_cluster: object) -> None:
    given = {"rule": "play_time", "shard_rows": 400}
    prepare_log(build_options("microvideo", given), a_day(tmp_path, 0), tmp_path / "before")
    options, inputs = build_options("microvideo", {**given, "drop_unseen": 1}), a_day(tmp_path, 1)
    prepare_log(options, inputs, tmp_path / "alone", onto=tmp_path / "before")
    prepare_on_ray(options, inputs, tmp_path / "together", 2, sizes=SMALL, onto=tmp_path / "before")
    assert content(tmp_path / "together") == content(tmp_path / "alone")
    call = ["microvideo", "--input", *map(str, inputs), "--output", str(tmp_path / "command"), "--workers", "2"]
    call += ["--onto", str(tmp_path / "before"), "rule=play_time", "shard_rows=400", "drop_unseen=1"]
    assert command.main(call) == 0
    assert content(tmp_path / "command") == content(tmp_path / "alone")


def test_days_of_a_synthetic_feed_grow_to_the_same_bytes(tmp_path: Path) -> None:
    """Its truth is known, too; and an interrupted growth goes on."""
    before: Path | None = None
    for day in ("2026-01-01", "2026-01-02"):
        options = build_options("synthetic", {"preset": "tiny", "days": 3, "since": day, "until": day})
        alone = prepare_log(options, [], tmp_path / f"alone {day}", onto=before)
        output = tmp_path / day
        for stage in ("joining days", "cleaning days", "writing days") if before else ():

            def stop(now: str, rows: int, at: str = stage) -> None:
                if now == at:
                    raise Stopped

            with pytest.raises(Stopped):
                prepare_on_ray(options, [], output, 0, stop, onto=before)
        if before:
            with pytest.raises(UserError, match=r"another prepare \(other onto\)"):
                prepare_on_ray(options, [], output, 0)
        assert prepare_on_ray(options, [], output, 0, onto=before) == alone
        before = tmp_path / f"alone {day}"
        assert content(output) == content(before)


def test_a_bucket_takes_a_data_set_whole(tmp_path: Path, s3_bucket: str) -> None:
    options, inputs = options_of("time and csv", tmp_path)
    alone = prepare_log(options, inputs, tmp_path / "alone")
    for name, prepare in (("two", prepare_log), ("steps", lambda *args: prepare_on_ray(*args, workers=0))):
        where = f"{s3_bucket}/prepared/{name}"
        assert prepare(options, inputs, where) == alone
        opened = Dataset.open(where)
        assert opened.fingerprint == alone["fingerprint"]
        assert opened.read("unclear").equals(Dataset.open(str(tmp_path / "alone")).read("unclear"))
        with pytest.raises(UserError, match="is already there"):
            prepare(options, inputs, where)


@pytest.mark.parametrize("case", ["time and csv", "text and quartiles", "given"])
def test_a_log_in_a_bucket_is_read_as_one_on_a_disk(case: str, tmp_path: Path, s3_bucket: str) -> None:
    """CSV in pieces, gzip, parquet and lists of pairs, all in the bucket."""
    options, inputs = options_of(case, tmp_path)
    alone = prepare_log(options, inputs, tmp_path / "alone")
    where = f"{s3_bucket}/{case.replace(' ', '-')}"
    for file in inputs:
        pafs.copy_files(str(file), f"{where}/log/{file.name}")
    for name in ("valid", "test") if options.split == "given" else ():
        pafs.copy_files(str(tmp_path / name), f"{where}/lists/{name}")
        options = options.model_copy(update={f"{name}_file": f"{where}/lists/{name}"})
    assert prepare_log(options, [f"{where}/log"], tmp_path / "two") == alone
    assert prepare_on_ray(options, [f"{where}/log/{file.name}" for file in inputs], tmp_path / "steps", 0) == alone
    assert prepare_on_ray(options, [f"{where}/log"], tmp_path / "small", 0, sizes=SMALL) == alone
    assert content(tmp_path / "small") == content(tmp_path / "alone")
    with pytest.raises(UserError, match=f"{where}/nothing is not there"):
        prepare_log(options, [f"{where}/nothing"], tmp_path / "nothing")


def test_a_day_grows_in_a_bucket(tmp_path: Path, s3_bucket: str) -> None:
    """Log, data set of the day before and output in the bucket; by the command."""
    where = f"{s3_bucket}/days"
    for number in range(2):
        options, (log,) = build_options("microvideo", {}), a_day(tmp_path, number)
        before = tmp_path / f"alone-{number - 1}" if number else None
        prepare_log(options, [log], tmp_path / f"alone-{number}", onto=before)
        pafs.copy_files(str(log), f"{where}/logs/day={number}/{log.name}")
        given = ["microvideo", "--input", f"{where}/logs/day={number}", "--output", f"{where}/{number}"]
        onto = ["--onto", f"{where}/{number - 1}"] if number else []
        assert command.main([*given, "--workers", "0", *onto]) == 0
    alone, grown = Dataset.open(str(tmp_path / "alone-1")), Dataset.open(f"{where}/1")
    assert grown.manifest == alone.manifest
    assert grown.read("unclear").equals(alone.read("unclear"))


def test_training_reads_a_bucket(tmp_path: Path, tiny_data: Path, s3_bucket: str) -> None:
    where = f"{s3_bucket}/trained/tiny"
    assert command.main(["synthetic", "preset=tiny", "--output", where]) == 0
    settings = ("training.epochs=1", "unlabeled.source=sampled")
    losses = []
    for name, data in (("a", tiny_data), ("b", where)):
        events = (train_here(data, tmp_path / name, *settings) / "metrics.jsonl").read_text().splitlines()  # type: ignore[arg-type]
        losses.append([(e["step"], e["loss"]) for e in map(json.loads, events) if e["event"] == "step"])
    assert losses[0]
    assert losses[0] == losses[1]


def test_a_bucket_with_half_a_data_set_has_none(tmp_path: Path, s3_bucket: str) -> None:
    options, inputs = options_of("synthetic", tmp_path)
    where = f"{s3_bucket}/half/data"

    def stop(stage: str, rows: int) -> None:
        if stage == "writing":
            raise Stopped

    with pytest.raises(Stopped):
        prepare_on_ray(options, inputs, where, 0, stop)
    with pytest.raises(UserError, match="is not a prepared data set"):
        Dataset.open(where)
    with pytest.raises(UserError, match="is already there"):
        prepare_log(options, inputs, where)
    assert prepare_on_ray(options, inputs, where, 0) == prepare_log(options, inputs, tmp_path / "alone")
    assert Dataset.open(where).rows == Dataset.open(str(tmp_path / "alone")).rows


@pytest.mark.slow
def test_killed_workers_cost_nothing_but_time(tmp_path: Path, ray_cluster: PrivateRay) -> None:
    """A worker is killed in every stage, while it works: nothing is lost, nothing is doubled."""
    options, inputs = options_of("time and csv", tmp_path)
    before = tmp_path / "before"
    prepare_log(options, inputs[1:], before)
    alone = prepare_log(options, inputs[:1], tmp_path / "alone", onto=before)
    stages, killed, over = ["start"], {}, threading.Event()

    def kill() -> None:
        while not over.wait(0.01):
            stage = stages[-1]
            for pid in workers_of(ray_cluster) if stage not in killed else ():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    killed[stage] = pid

    killer = threading.Thread(target=kill, daemon=True)  # beside the work: who waits for progress may come too late
    killer.start()
    try:
        say = lambda stage, rows: stages.append(stage)  # noqa: E731
        together = prepare_on_ray(options, inputs[:1], tmp_path / "together", 3, say, sizes=SMALL, onto=before)
    finally:
        over.set()
        killer.join()
    assert len(killed) >= 20, killed
    assert together == alone
    assert content(tmp_path / "together") == content(tmp_path / "alone")


def workers_of(head: PrivateRay) -> list[int]:
    """Processes of a Ray that are at work on a task of ours."""
    return [pid for pid in head.processes() if _command(pid).startswith("ray::_run")]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


@pytest.mark.slow
def test_a_killed_command_goes_on(tmp_path: Path) -> None:
    """The driver is killed at several moments, with its private Ray; the same command ends with the same data set."""
    options, inputs = options_of("text and quartiles", tmp_path)
    alone = prepare_log(options.model_copy(update={"shard_rows": 1 << 20}), inputs, tmp_path / "alone")
    call = [sys.executable, "-m", "invdist", "prepare", "microvideo", "--input", *map(str, inputs)]
    call += ["--output", str(tmp_path / "out"), "--workers", "2", "rule=play_time", "since=2022-04-18"]
    killed = 0
    for marker in ("reading-", "routing-", "cleaning-"):
        process = subprocess.Popen(call, start_new_session=True, stderr=subprocess.DEVNULL)
        done = tmp_path / "out.partial" / "done"
        while process.poll() is None and not list(done.glob(f"{marker}*")):
            time.sleep(0.01)
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            killed += 1
        process.wait()
    assert killed
    subprocess.run(call, check=True)
    assert Dataset.open(str(tmp_path / "out")).fingerprint == alone["fingerprint"]
    assert content(tmp_path / "out") == content(tmp_path / "alone")
