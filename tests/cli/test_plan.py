from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from invdist.cli.plan import main
from invdist.embeddings.placement import GIB, DoesNotFit
from invdist.planning.estimate import estimate, smallest_gpus
from invdist.planning.job import Job, backbone_size
from invdist.planning.planner import make_plan

HUGE = ["--users", "1e9", "--items", "100M", "--dim", "32", "--hbm", "80GB"]


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_billion_users_on_eight_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, *HUGE, "--gpus", "8", "--batch", "65536", "--rows", "1e9")
    assert [table["sharding"] for table in found["tables"]] == ["row_wise", "row_wise"]
    assert found["tables"][0]["largest_shard"] == [125_000_000, 32]
    memory = found["device_bytes"]
    assert memory["rows"] == 1_100_000_000 // 8 * 32 * 4
    assert memory["optimizer_state"] == 2 * memory["rows"]
    # Ids and rows of 8,192 pairs, twice.
    assert memory["exchange_buffers"] == 2 * 8192 * (8 + 32 * 4)
    parts = ("rows", "optimizer_state", "exchange_buffers", "dense", "working", "ig_added")
    assert memory["total"] == pytest.approx(sum(memory[part] for part in parts))
    assert memory["total"] < memory["usable"] == 0.9 * 80 * GIB
    steps = found["step_seconds"]
    assert steps["ig"]["total"] > steps["plain"]["total"] > 0
    # 1e9 rows: 13,733 plain and 1,526 inverse-gradient steps.
    expected = 13_733 * steps["plain"]["total"] + 1_526 * steps["ig"]["total"]
    assert found["epoch_seconds"]["ig"] == pytest.approx(expected)


def test_the_largest_table_is_the_last_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--gpus", "4", "--hbm", "1GB", "--batch", "4096", "--items", "1000", "--sharding", "row_wise"]
    most = planned(capsys, "--users", "1000", *options)["largest_users"]
    assert 6_000_000 < most < 4 * 0.9 * GIB / (32 * 4 * 3)
    planned(capsys, "--users", str(most), *options)
    assert main(["--users", str(most + most // 500), *options]) == 2


def test_unified_memory_holds_what_the_gpus_cannot(capsys: pytest.CaptureFixture[str]) -> None:
    options = [*HUGE, "--gpus", "4", "--gpus-per-node", "4"]
    assert main([*options, "--tables", "auto", "--ddr", "100GB"]) == 2
    assert "At least" in capsys.readouterr().err
    found = planned(capsys, *options, "--tables", "auto", "--ddr", "600GB")
    assert found == planned(capsys, *options, "--tables", "uvm", "--ddr", "600GB") | {"request": found["request"]}
    memory = found["device_bytes"]
    assert (memory["rows"], memory["optimizer_state"]) == (0, 0)
    assert found["host_bytes_per_gpu"] == 3 * 1_100_000_000 // 4 * 32 * 4
    # Rows are read, moved, and their moments with them: 7 times a row of each of 2 x 16,384 ids over 25 GiB/s.
    assert found["step_seconds"]["plain"]["host_link"] == pytest.approx(7 * 2 * 16_384 * 32 * 4 / (25 * GIB))
    most = found["largest_users"]
    assert 600 * GIB / (32 * 4 * 3) - 10**8 >= most > 1.4e9
    assert planned(capsys, *HUGE, "--gpus", "8", "--tables", "auto")["host_bytes_per_gpu"] == 0
    assert main([*options, "--tables", "uvm", "--sharding", "data_parallel"]) == 2
    assert "data_parallel tables are on the device" in capsys.readouterr().err


def test_what_does_not_fit_says_how_many_gpus_would(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*HUGE, "--gpus", "4"]) == 2
    said = capsys.readouterr().err
    assert "does not fit" in said
    assert "At least 6 GPUs are needed" in said
    job = Job(users=10**9, items=10**8, gpus=4)
    assert smallest_gpus(job) == 6
    assert estimate(Job(users=10**9, items=10**8, gpus=6)).device_bytes < 0.9 * 80 * GIB
    assert main([*HUGE, "--gpus", "8", "--sharding", "table_wise"]) == 2
    assert "They would fit row-wise" in capsys.readouterr().err
    assert main(["--users", "10", "--items", "10", "--gpus", "1", "--hbm", "1GB", "--batch", "1e7"]) == 2
    assert "GPUs are needed" in capsys.readouterr().err  # more GPUs share the batch


def test_a_step_too_large_for_any_number_of_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--users", "10", "--items", "10", "--gpus", "2", "--hbm", "1GB", "--batch", "2", "--rate", "10000000"]
    assert main(options) == 2
    assert "No number of GPUs is enough" in capsys.readouterr().err


def test_neumf_needs_five_times_the_columns() -> None:
    columns, dense, saved, frozen = backbone_size("neumf", 32)
    assert frozen == 0
    assert columns == 160
    assert dense == 42 * 32**2 + 9 * 32 + 1
    assert saved >= (8 + 4 + 2 + 1 + 2) * 32
    assert backbone_size("gmf", 32) == (32, 33, 32, 0)


def test_a_sweep_is_a_line_per_value(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*HUGE, "--gpus", "8", "--batch-per-gpu", "1024", "--sweep", "gpus=4..32"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:6]] == ["4", "8", "16", "32"]
    assert "does not fit" in lines[2]
    found = planned(capsys, *HUGE, "--gpus", "8", "--batch-per-gpu", "1024", "--sweep", "gpus=8,16")
    assert [point["gpus"] for point in found] == [8, 16]
    assert [point["request"]["batch"] for point in found] == [8192, 16_384]
    rows = [point["device_bytes"]["rows"] for point in found]
    assert rows[0] == 2 * rows[1]


def test_candidates_cost_memory_of_their_rows_and_a_few_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--users", "1e6", "--items", "1e6", "--gpus", "8", "--sweep", "candidates=3,7"]
    three, seven = planned(capsys, *options)
    added = [found["bytes_per_step"]["ig"]["total"] for found in (three, seven)]
    assert added[1] - added[0] == pytest.approx(2 * 4 * 8 * 7 / 8)
    assert seven["device_bytes"]["ig_added"] > three["device_bytes"]["ig_added"]


def test_a_sweep_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--users", "1e6", "--items", "1e6", "--gpus", "8", "--sweep", "gpus=2..8"]
    assert main([*options, "--figure", str(tmp_path / "sweep.html")]) == 0
    page = (tmp_path / "sweep.html").read_text()
    assert "Memory of the fullest GPU" in page
    assert "<script src=" not in page
    assert main([*options, "--figure", str(tmp_path / "sweep.pdf")]) == 2
    assert "ending in .html, .svg, .png" in capsys.readouterr().err


def test_a_sweep_is_drawn_as_a_picture(tmp_path: Path) -> None:
    options = ["--users", "1e6", "--items", "1e6", "--gpus", "8", "--sweep", "gpus=2..8"]
    assert main([*options, "--figure", str(tmp_path / "sweep.svg")]) == 0
    picture = (tmp_path / "sweep.svg").read_text()
    assert "<svg" in picture
    for text in ("Memory of the fullest GPU (GiB)", "Step time, estimated (ms)", ">gpus<", ">IG step<"):
        assert text in picture
    # Seven lines with three marks each, and one mark for each of the five names in the legend.
    svg = "{http://www.w3.org/2000/svg}"
    lines = [group for group in ElementTree.fromstring(picture).iter(f"{svg}g") if "line2d" in group.get("id", "")]
    marks = [len(list(line.iter(f"{svg}use"))) for line in lines]
    assert marks.count(3) == 7
    assert main([*options, "--figure", str(tmp_path / "sweep.png")]) == 0
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_the_planner_is_told_of_optimizer_state() -> None:
    def bytes_with(optimizer: str) -> int:
        plan = make_plan(Job(users=10_000, items=10_000, gpus=4, batch=256, optimizer=optimizer), hbm=GIB)
        return plan.rows + plan.state

    per_rank = 20_000 // 4 * 32 * 4
    assert bytes_with("sgd") == per_rank
    assert bytes_with("rowwise_adagrad") == per_rank + 20_000 // 4 * 4
    assert bytes_with("adam") == 3 * per_rank
    with pytest.raises(DoesNotFit):
        make_plan(Job(users=10**9, items=1, gpus=4, batch=256), hbm=GIB)


@pytest.mark.parametrize("sharding", ["row_wise", "table_wise", "column_wise", "data_parallel"])
def test_every_sharding_can_be_planned(capsys: pytest.CaptureFixture[str], sharding: str) -> None:
    found = planned(capsys, "--users", "1e6", "--items", "1e5", "--gpus", "4", "--sharding", sharding)
    assert {table["sharding"] for table in found["tables"]} == {sharding}
    assert found["bytes_per_step"]["ig"]["total"] > 0


def test_items_can_be_replicated_beside_row_wise_users(capsys: pytest.CaptureFixture[str]) -> None:
    job = ["--users", "1e6", "--items", "1e5", "--gpus", "4", "--sharding", "row_wise"]
    cut, mixed = planned(capsys, *job), planned(capsys, *job, "--item-sharding", "data_parallel")
    assert [table["sharding"] for table in mixed["tables"]] == ["row_wise", "data_parallel"]
    # A quarter of the users and all items on each GPU.
    assert mixed["device_bytes"]["rows"] == (250_000 + 100_000) * 32 * 4
    assert mixed["bytes_per_step"]["plain"]["rows"] == cut["bytes_per_step"]["plain"]["rows"] / 2
    assert main([*job, "--item-sharding", "column_wise"]) == 2
    assert "both must be" in capsys.readouterr().err
    assert main([*job, "--item-sharding", "data_parallel", "--tables", "uvm"]) == 2
    assert "data_parallel tables are on the device" in capsys.readouterr().err


def test_the_text_names_its_sources(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--users", "37,692", "--items", "131,690", "--gpus", "8", "--rows", "9.462492M"]) == 0
    said = capsys.readouterr().out
    for text in ("planner", "ours", "Epoch of 9,462,492 rows", "Limit", "Nothing here was measured on a GPU"):
        assert text in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--users", "0"], "--users must be at least 1"),
        (["--dim", "30"], "multiple of 4"),
        (["--batch", "4"], "over all GPUs"),
        (["--batch", "0"], "at least 1, not 0"),
        (["--batch-per-gpu", "0"], "at least 1, not 0"),
        (["--model", "mf"], "gmf, neumf"),
        (["--candidates", "1"], "at least 2"),
        (["--sweep", "gpu=1..4"], "NAME one of gpus"),
        (["--sweep", "gpus=8..4"], "no less than A"),
        (["--sweep", "gpus=1..x"], "gpus=A..B*10"),
        (["--figure", "x.svg"], "--figure draws a sweep"),
        (["--test-share", "1"], "--test-share"),
        (["--inter", "0"], "--inter must be above 0"),
        (["--reserve", "1"], "--reserve"),
    ],
)
def test_bad_input_is_one_clear_sentence(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    assert main(["--users", "100", "--items", "100", "--gpus", "8", *arguments]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: ")
    assert said in shown
    assert len(shown.splitlines()) == 1


@pytest.mark.parametrize("text", ["x", "-1", "1.5", "1e-3", ""])
def test_a_number_that_is_none_is_refused(capsys: pytest.CaptureFixture[str], text: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main([f"--users={text}", "--items", "3", "--gpus", "1"])
    assert ended.value.code == 2
    assert "whole number" in capsys.readouterr().err or text != "1.5"


def test_exposure_vectors_are_counted_without_optimizer_state(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--users", "1M", "--items", "1M", "--gpus", "4", "--dim", "32"]
    plain, found = planned(capsys, *options), planned(capsys, *options, "--exposure-dim", "64")
    memory = found["device_bytes"]
    assert plain["device_bytes"]["exposure_vectors"] == 0
    assert memory["exposure_vectors"] == 2 * 250_000 * (64 + 4) * 4
    assert memory["rows"] == 2 * 250_000 * (32 + 4 + 64) * 4  # the backbone's columns, the bias, and c
    assert memory["optimizer_state"] == 2 * memory["rows"]
    parts = ("rows", "optimizer_state", "exchange_buffers", "exposure_vectors", "dense", "working", "ig_added")
    assert memory["total"] == pytest.approx(sum(memory[part] for part in parts))
    assert {table["sharding"] for table in found["tables"]} == {"row_wise"}
    assert found["largest_users"] < plain["largest_users"] / 3
    # 16,384 pairs of a rank, three quarters of whose rows are elsewhere.
    assert found["bytes_per_step"]["plain"]["vectors"] == 2 * 16_384 * 0.75 * 68 * 4
    assert main([*options, "--exposure-dim", "64"]) == 0
    assert "exposure vectors" in capsys.readouterr().out
    assert main([*options, "--exposure-dim", "30"]) == 2
    assert "multiple of 4" in capsys.readouterr().err
    assert main([*options, "--exposure-dim", "32", "--optimizer", "sgd"]) == 2
