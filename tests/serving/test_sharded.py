"""Commands with sharded tables write what they write with whole ones, byte by byte."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.numpy import load_file

from invdist.cli import annotate, evaluate, export, recommend, score
from invdist.runtime import memory
from invdist.runtime.errors import UserError
from invdist.serving.raw_ids import RawIds
from invdist.serving.run import TrainedRun, find_run, open_run
from invdist.serving.sharded import choice
from invdist.serving.sharded.ids import IdShare, share_of
from invdist.serving.sharded.slices import Cut
from invdist.serving.sharded.workers import Workers
from tests.runs import train_here

Files = dict[str, bytes]


def _files(folder: Path) -> Files:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def raw_pairs(folder: Path, rows: int = 70_000) -> Path:
    """Raw pairs; some users and items are unknown, some ids missing."""
    source = np.random.default_rng(0)
    user = pa.array(source.integers(210, size=rows), mask=source.random(rows) < 0.01)
    table = pa.table({"user": user, "item": source.integers(310, size=rows)})
    pq.write_table(table, folder / "pairs.parquet", row_group_size=20_000)
    (folder / "users.csv").write_text("user\n7\nnobody\n3\n199\n")
    return folder / "pairs.parquet"


COMMANDS: dict[str, Callable[[list[str], Path], int]] = {
    "score": lambda how, to: score.main([*how, "--input", str(to.parent / "pairs.parquet"), "--output", str(to)]),
    "annotate": lambda how, to: annotate.main([*how, "--output", str(to), "--part-rows", "500", "--calibrate"]),
    "annotate a log": lambda how, to: annotate.main(
        [*how, "--input", str(to.parent / "pairs.parquet"), "--output", str(to), "--part-rows", "20000"]
    ),
    "recommend": lambda how, to: recommend.main([*how, "--output", str(to), "--k", "7"]),
    "recommend to some": lambda how, to: recommend.main(
        [*how, "--output", str(to), "--users", str(to.parent / "users.csv"), "--seen", "nothing", "--k", "300"]
    ),
    "evaluate": lambda how, to: evaluate.main([*how, "--json"]),
    "evaluate the catalogue": lambda how, to: evaluate.main([*how, "--json", "--catalogue", "--k", "5", "20"]),
}


def run_command(
    command: str, run: Path, tables: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> tuple[Files, str]:
    """The files a command writes, and what it prints if it writes none."""
    to, how = folder / f"{command}-{tables}", ["--run", str(run), "--tables", tables]
    capsys.readouterr()
    assert COMMANDS[command]([*how, *(["--workers", "0"] if tables == "whole" else [])], to) == 0
    printed = capsys.readouterr()
    assert f"tables: {tables} (" in printed.err
    return (_files(to), "") if to.exists() else ({}, printed.out)


@pytest.fixture(params=["gmf", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("neumf", "vectors", "means"))])
def run(request: pytest.FixtureRequest, run_of: Callable[[str], Path]) -> Path:
    return run_of(request.param)


@pytest.fixture
def workers(run: Path, ray_cluster: object, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workers]:
    """Workers that hold the run, which all commands of a test use: to start them takes most of the time."""
    with choice.sharded(find_run(run), 3) as group:
        monkeypatch.setattr(choice, "sharded", lambda run, workers: nullcontext(group))
        yield group


def test_every_command_gives_the_same_bytes(
    run: Path, workers: Workers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw_pairs(tmp_path)
    for command in COMMANDS:
        whole, sharded = (run_command(command, run, tables, tmp_path, capsys) for tables in ("whole", "sharded"))
        assert sharded == whole, command
        assert whole[0] or whole[1]


def test_an_export_is_copied_piece_by_piece(run_of: Callable[[str], Path], tmp_path: Path) -> None:
    for kind in ("gmf", "vectors"):
        for tables in ("whole", "sharded"):
            given = ["--run", str(run_of(kind)), "--output", str(tmp_path / f"{kind}-{tables}"), "--tables", tables]
            assert export.main(given) == 0
        whole, sharded = (_files(tmp_path / f"{kind}-{tables}") for tables in ("whole", "sharded"))
        assert whole.keys() - sharded.keys() == {"scorer.pt2"}
        for name in ("model.safetensors", "users.parquet", "items.parquet"):
            assert sharded[name] == whole[name]
        tables = load_file(tmp_path / f"{kind}-sharded" / "model.safetensors")
        program = torch.export.load(tmp_path / f"{kind}-sharded" / "row_scorer.pt2").module()
        user, item = np.array([0, 7, 199]), np.array([299, 3, 3])
        rows = (torch.from_numpy(tables[name][index]) for name, index in (("user", user), ("item", item)))
        model = open_run(run_of(kind)).model
        expected = model(torch.from_numpy(user), torch.from_numpy(item))
        torch.testing.assert_close(program(*rows), expected, rtol=0, atol=1e-6)


def test_tables_are_cut_into_equal_ranges() -> None:
    cut = Cut(10, 3)
    assert [cut.range_of(worker) for worker in range(3)] == [(0, 4), (4, 8), (8, 10)]
    assert cut.owners(np.arange(10)).tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]
    tiles = Cut(5000, 4, 2048)
    assert [tiles.range_of(worker) for worker in range(4)] == [(0, 2048), (2048, 4096), (4096, 5000), (5000, 5000)]
    assert [Cut(1, 2).range_of(worker) for worker in range(2)] == [(0, 1), (1, 1)]


@pytest.mark.parametrize("text", [False, True])
def test_shares_of_ids_know_every_id_once(text: bool) -> None:
    source = np.random.default_rng(0)
    ids = np.unique(source.integers(-(2**62), 2**62, size=5000))
    raw = pa.array([f"ü{value % 977}-{value}" for value in ids.tolist()] if text else ids)
    shares = [IdShare((raw.slice(first, 700) for first in range(0, len(raw), 700)), share, 3) for share in range(3)]
    asked = pa.concat_arrays(
        [raw.take(pa.array(source.permutation(len(raw)))), pa.array(["", "ü"] if text else [3, 4])]
    )
    share = share_of(asked, 3)
    assert min(np.bincount(share)) > 1500
    found = np.empty(len(asked), np.int64)
    for number, one in enumerate(shares):
        found[share == number] = one.indices(asked.filter(pa.array(share == number)))
    np.testing.assert_array_equal(found, RawIds(raw).indices(asked))


def test_tables_are_whole_where_they_fit(trained_run: Path) -> None:
    run: TrainedRun = find_run(trained_run)
    needed = run.tables.bytes + run.raw_id_bytes()
    assert run.tables.bytes == (200 + 300) * 12 * 4
    assert choice.choose(run, free=2 * needed) == ("whole", f"{needed / 2**20:.1f} MiB, and 0.1 MiB are free here")
    assert choice.choose(run, free=1.9 * needed)[0] == "sharded"
    assert choice.choose(run, free=2 * needed, whole_on_ray=True)[0] == "sharded"  # a copy in the object store
    assert choice.choose(run, workers=0, free=0)[0] == "whole"
    assert choice.choose(run, workers=2, free=1e12)[0] == "sharded"
    assert choice.choose(run, workers=2, free=1e12, whole_on_ray=True)[0] == "whole"
    with pytest.raises(UserError, match=r"--tables sharded needs Ray workers .* leave out --workers 0"):
        choice.choose(run, "sharded", 0)
    with pytest.raises(UserError, match="--tables whole works in this process"):
        choice.choose(run, "whole", 2)


def test_free_memory_is_what_the_container_has_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    everything = memory.free_memory()
    (tmp_path / "memory.max").write_text("5000000\n")
    assert memory.free_memory() == memory.host_memory() == min(5_000_000, everything)
    (tmp_path / "memory.current").write_text("4000000\n")
    (tmp_path / "memory.stat").write_text("anon 3900000\ninactive_file 50000\n")
    assert memory.free_memory() == 1_050_000
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.free_memory() > 5_000_000


def test_a_damaged_checkpoint_is_told_by_the_worker_that_finds_it(
    tiny_data: Path, tmp_path: Path, ray_cluster: object, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train_here(tiny_data, tmp_path / "run", "training.epochs=1")
    file = next((run / "checkpoints").glob("*/*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"\x00")
    assert evaluate.main(["--run", str(run), "--tables", "sharded", "--workers", "2"]) == 2
    assert f"{file.name} is damaged: its checksum is not the manifest's" in capsys.readouterr().err
