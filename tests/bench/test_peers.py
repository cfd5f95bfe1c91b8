"""The contest between trainers at its smallest size: real processes, real training, figures that agree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from invdist.bench._contest import contest, rows_per_s
from invdist.bench._recbole import REQUIREMENTS
from invdist.cli import bench
from invdist.runtime.errors import UserError

_SMALL = ["--dim", "8", "--rounds", "1", "--seconds", "0.2", "--json"]


def _figures(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert bench.main(list(arguments)) == 0
    return json.loads(capsys.readouterr().out)


def test_peers_train_and_are_compared(tiny_data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = _figures(
        capsys, "peers", "--data", str(tiny_data), "--cases", "gmf:512", "--peers", "torch_loop", *_SMALL
    )
    assert figures["interactions"] == 3600
    speeds = figures["gmf"]
    assert speeds["recbole"] is None
    assert "--recbole" in figures["absent"]["recbole"]
    assert all(speeds[name] > 100 for name in ("invdist", "torch_loop"))
    assert figures["times_peers"]["gmf"]["torch_loop"] == pytest.approx(speeds["invdist"] / speeds["torch_loop"])


@pytest.mark.slow
def test_all_peers_that_need_no_environment_of_their_own(tiny_data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = _figures(capsys, "peers", "--data", str(tiny_data), "--cases", "neumf:512", *_SMALL)
    present = {"invdist", "invdist_ig", "torch_loop", "torch_loop_by_row", "torchrec", "three_copies"}
    assert all(figures["neumf"][name] > 100 for name in present)
    assert figures["ig_epoch_vs_none"]["neumf"] == pytest.approx(
        figures["neumf"]["invdist"] / figures["neumf"]["invdist_ig"]
    )


def test_an_epoch_from_files_is_compared_with_one_in_memory(
    tiny_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--data", str(tiny_data), "--batch", "512", "--dim", "8", "--rounds", "1", "--seconds", "0.2"]
    figures = _figures(capsys, "epoch", *small, "--json")
    files, memory = figures["files_rows_per_s_512"], figures["in_memory_rows_per_s_512"]
    assert figures["ratio_512"] == pytest.approx(files / memory)
    assert min(files, memory) > 100
    assert 0 < figures["waiting_for_input_512"] < 1


def test_a_peer_that_ends_is_reported_with_its_last_words(tmp_path: Path) -> None:
    commands = {"broken": ["bash", "-c", "echo '\"ready\"'; read line; echo no memory left >&2; exit 3"]}
    with pytest.raises(UserError, match=r"(?s)broken ended with code 3.*no memory left"):
        contest(commands, 1, tmp_path)


def test_the_first_turn_does_not_count_and_medians_are_of_the_others(tmp_path: Path) -> None:
    script = """echo '"ready"'; n=0; while read line; do n=$((n + 1)); echo "[${n}00, 1.0]"; done"""
    answers = contest({"one": ["bash", "-c", script]}, 3, tmp_path)
    assert answers == {"one": [[200, 1.0], [300, 1.0], [400, 1.0]]}
    assert rows_per_s(answers["one"]) == 300


@pytest.mark.parametrize("case", ["gmf", "gmf:0", "tower:64"])
def test_a_case_that_cannot_be_is_refused(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["peers", "--cases", case]) == 2
    assert f"--cases {case}" in capsys.readouterr().err


def test_every_version_of_recbole_and_what_it_needs_is_pinned() -> None:
    assert all("==" in requirement or "<" in requirement for requirement in REQUIREMENTS)
    assert REQUIREMENTS[0].startswith("torch==")
