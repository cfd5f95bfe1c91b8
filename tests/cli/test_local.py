"""`invdist local`: what is refused before anything is started, and what is opened."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from invdist.cli import local
from invdist.training import first_run, job


def test_opening_beyond_this_machine_must_be_asked_for_and_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert local._parser().parse_args([]).bind == "127.0.0.1"
    asked: list[str] = []

    @contextlib.contextmanager
    def fake_ray(cpus: int, *, dashboard: bool, bind: str) -> Iterator[SimpleNamespace]:
        asked.append(bind)
        yield SimpleNamespace(dashboard="http://x", folder=tmp_path)
        asked.append("closed")

    monkeypatch.setattr(local, "private_ray", fake_ray)
    monkeypatch.setattr(job, "run_job", lambda dashboard, command: 0)
    with local._cluster("127.0.0.1", 4) as train:
        assert train([]) == 0
    assert "opened" not in capsys.readouterr().out
    with local._cluster("10.0.0.1", 4) as train:
        assert train([]) == 0
    assert "opened beyond this machine" in capsys.readouterr().out
    assert asked == ["127.0.0.1", "closed", "10.0.0.1", "closed"]


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails the test if Ray is started."""
    monkeypatch.setattr(local, "private_ray", lambda *_, **__: pytest.fail("Ray was started"))


@pytest.mark.usefixtures("no_ray")
def test_wrong_settings_are_refused_before_anything_is_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(local, "_prepare", lambda *_: pytest.fail("data was made"))
    assert local.main(["training.epochs=0"]) == 2
    assert "training.epochs: expected a whole number at least 1" in capsys.readouterr().err


@pytest.mark.usefixtures("no_ray")
@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.path=/no/such/folder", "/no/such/folder is not a prepared data set"),
        ("rows.dim=100000000", "rows.dim: 100000000 makes a model of"),
        ("data.batch_size=100000", "data.batch_size: 100000 is more than"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_anything_is_started(
    tiny_data: Path, capsys: pytest.CaptureFixture[str], override: str, said: str
) -> None:
    assert local.main([f"data.path={tiny_data}", override]) == 2
    assert said in capsys.readouterr().err


def test_the_launcher_explains_itself() -> None:
    help_text = local._parser().format_help()
    for word in ("launch/local.sh method=none", "--bind", "INVDIST_PYTHON", "./runs", "Exit code"):
        assert word in help_text
    assert isinstance(local._parser(), argparse.ArgumentParser)


@pytest.mark.parametrize(
    ("arguments", "trainings"),
    [
        (["--preset", "tiny"], 2),
        (["--preset", "tiny", "--no-compare"], 1),
        (["--preset", "tiny", "method=none", "exposures.vectors=false"], 1),
        (["data.path={own}"], 1),
    ],
)
def test_plain_training_is_beside_a_run_on_the_synthetic_data_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_data: Path, arguments: list[str], trainings: int
) -> None:
    commands: list[list[str]] = []

    def train(command: list[str]) -> int:
        commands.append(command)
        return 0

    def both(config: object, command: list[str], train: Callable[[list[str]], int]) -> int:
        return train(command) or train(command)

    @contextlib.contextmanager
    def cluster(bind: str, cpus: int) -> Iterator[Callable[[list[str]], int]]:
        yield train

    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "tiny").symlink_to(tiny_data)
    monkeypatch.setattr(local, "_cluster", cluster)
    monkeypatch.setattr(first_run, "train_and_compare", both)
    assert local.main([text.format(own=tiny_data) for text in [*arguments, "data.batch_size=256"]]) == 0
    assert len(commands) == trainings
