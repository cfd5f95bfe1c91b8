"""Run folders, checkpoints, data and outputs in a bucket of a real S3 server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest

from invdist.cli import annotate
from invdist.runtime.files import Folder, exclusive, write_atomically
from invdist.runtime.paths import StorePath, path_at
from invdist.runtime.private_ray import PrivateRay
from invdist.training.checkpoint.folder import CheckpointFolder
from invdist.training.events import EventLog
from invdist.training.history import History, Tail
from invdist.training.run_folder import StopRequests
from tests.runs import SETTINGS, train_here


def test_a_path_of_a_store_reads_and_writes_like_a_local_one(s3_bucket: str) -> None:
    folder = path_at(f"{s3_bucket}/paths/one/")
    assert isinstance(folder, StorePath)
    assert (str(folder), folder.name, str(folder.parent)) == (f"{s3_bucket}/paths/one", "one", f"{s3_bucket}/paths")
    assert not folder.exists()
    folder.mkdir(parents=True)
    with pytest.raises(FileExistsError):
        folder.mkdir(parents=True)
    file = folder / "settings"
    write_atomically(file, "a: ü\n")
    assert (file.is_file(), file.is_dir(), folder.is_dir()) == (True, False, True)
    assert (file.read_text(), file.read_bytes()) == ("a: ü\n", "a: ü\n".encode())
    with exclusive(folder):
        file.unlink()
    file.unlink(missing_ok=True)
    with pytest.raises(FileNotFoundError):
        file.unlink()
    stop = StopRequests(folder)
    (folder / "stop").touch()
    assert stop.asked()
    folder.remove()
    assert not folder.exists()
    assert isinstance(path_at("runs/one"), Path)


def test_events_are_kept_in_a_bucket_and_continued(s3_bucket: str) -> None:
    run = path_at(f"{s3_bucket}/events/run")
    for first in (0, 5):
        log = EventLog(run, writes=True)
        log.write("start")
        tail = Tail(run / "metrics.jsonl")
        log.flush()
        for step in range(first, first + 5):
            log.write("step", epoch=0, global_step=step, loss=0.5)
        log.write("warning", message="seen at once")
        log.flush()
        assert tail.new()[-1]["message"] == "seen at once"
        log.close()
    assert [event["global_step"] for event in History.read(run).steps] == list(range(10))


@pytest.mark.slow
def test_a_run_in_a_bucket_is_killed_resumed_and_used(
    tiny_data: Path, tmp_path: Path, s3_bucket: str, ray_cluster: PrivateRay
) -> None:
    """Train, kill -9, resume, annotate, all in the bucket: equal to a run on a local disk that nobody killed."""
    where = f"{s3_bucket}/cycle"
    pafs.copy_files(str(tiny_data), f"{where}/data")
    shared = ("training.epochs=6", "method=none")
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps({**SETTINGS, "data": {**SETTINGS["data"], "path": f"{where}/data"}}))
    environment = os.environ | {"RAY_ADDRESS": ray_cluster.address}

    def train(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "invdist.train", *arguments]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    checkpoints = CheckpointFolder(f"{where}/runs/one/checkpoints")
    first = train("--config", str(config), f"runs={where}/runs", "name=one", *shared)
    while first.poll() is None and not checkpoints.steps():
        time.sleep(0.02)
    first.kill()
    output = first.communicate()[0]
    assert first.returncode == -9, output
    killed = History.read(f"{where}/runs/one")
    assert killed.final is None
    second = train("--resume", f"{where}/runs/one")
    output = second.communicate(timeout=600)[0]
    assert second.returncode == 0, output
    finished = History.read(f"{where}/runs/one")
    assert finished.final is not None
    assert len(finished.of("start")) == 2
    assert "report.html" in Folder.at(f"{where}/runs/one").files()

    given = ["--run", f"{where}/runs/one", "--output", f"{where}/labels", "--tables", "sharded", "--workers", "2"]
    assert annotate.main(given) == 0
    local = train_here(tiny_data, tmp_path / "local", *shared)
    assert annotate.main(["--run", str(local), "--output", str(tmp_path / "labels"), "--workers", "0"]) == 0
    with Folder.at(f"{where}/labels").open("part-00000.parquet") as file:
        found: pa.Table = pq.read_table(file)
    assert found.equals(pq.read_table(tmp_path / "labels" / "part-00000.parquet"))
