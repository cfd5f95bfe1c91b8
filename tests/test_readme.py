"""The README's two commands, taken from its text and run for real, the first in a reduced size."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY


def _quick_start() -> list[str]:
    section = (REPOSITORY / "README.md").read_text().split("## Quick start")[1].split("\n## ")[0]
    block = re.search(r"```bash\n(.*?)```", section, re.DOTALL)
    assert block is not None
    return block.group(1).splitlines()


def _run(command: str, *arguments: str, cwd: Path = REPOSITORY) -> subprocess.CompletedProcess[str]:
    # This environment instead of a second install of gigabytes; the set-up itself is tested in test_launch.py.
    environment = os.environ | {"INVDIST_VENV": sys.prefix}
    words = [str(REPOSITORY / command), *arguments]
    return subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600)


def test_the_quick_start_is_exactly_the_two_commands() -> None:
    assert _quick_start() == ["launch/local.sh", "launch/test.sh"]


def test_the_first_command_trains_a_model(tmp_path: Path, tiny_data: Path) -> None:
    reduced = ("training.epochs=4", "data.batch_size=256", "optimizer.gamma=0.03", "ray.workers=2", "name=first")
    done = _run(_quick_start()[0], f"data.path={tiny_data}", *reduced, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "runs" / "first"
    assert f"run: {run}" in done.stdout
    for column in ("AUC", "GAUC", "NDCG@10", "MRR", "rows/s"):
        assert column.lower() in done.stdout.lower()
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert next(event for event in events if event["event"] == "start")["world_size"] == 2
    final = next(event for event in events if event["event"] == "final")
    # Truth is known to be learnable: an untrained model is at 0.5.
    assert final["test"]["auc"] > 0.55
    assert sum(final["directions"].values()) > 0
    assert (run / "config.yaml").exists()
    assert list((run / "checkpoints").iterdir())


@pytest.mark.parametrize("fails", ["nothing", "ruff format", "pyright"])
def test_the_second_command_lints_checks_types_and_runs_the_tests(tmp_path: Path, fails: str) -> None:
    """The script itself is what runs this test, so here it meets a Python that only tells what it is asked."""
    launch = tmp_path / "launch"
    launch.mkdir()
    (launch / "test.sh").write_text((REPOSITORY / _quick_start()[1]).read_text())
    (launch / "_setup.sh").write_text(f"echo extra=$EXTRA\nPYTHON={launch}/python\n")
    (launch / "python").write_text(f'#!/bin/sh\necho "$*"\ncase "$*" in "-m {fails} "*) exit 7 ;; esac\n')
    (launch / "python").chmod(0o755)
    done = subprocess.run(["bash", launch / "test.sh", "-k", "one"], cwd=tmp_path, capture_output=True, text=True)
    calls = ["extra=dev", "-m ruff check .", "-m ruff format --check .", f"-m pyright --pythonpath {launch}/python"]
    calls.append("-m pytest -n 2 --dist loadscope --no-loadscope-reorder -k one")
    reached = {"nothing": 5, "ruff format": 3, "pyright": 4}[fails]
    assert done.stdout.splitlines() == calls[:reached]
    assert done.returncode == (0 if fails == "nothing" else 7)


def test_ci_calls_the_same_script_with_the_shared_data(tmp_path: Path) -> None:
    checkout, shared = tmp_path / "main", tmp_path / "shared" / "data"
    shared.mkdir(parents=True)
    for name in (".ci/run", "launch/test.sh"):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_text((REPOSITORY / name).read_text())
    (checkout / "launch" / "test.sh").write_text('#!/bin/sh\necho "data=$INVDIST_DATA args=$*"\n')
    (checkout / "launch" / "test.sh").chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name != "INVDIST_DATA"}
    done = subprocess.run(["bash", ".ci/run", "-x"], cwd=checkout, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == f"data={shared} args=-m slow or not slow -x"


def test_the_readme_has_no_dead_links() -> None:
    text = (REPOSITORY / "README.md").read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    assert links
    assert [link for link in links if not (REPOSITORY / link).exists()] == []


@pytest.mark.parametrize("script", ["launch/local.sh", "launch/test.sh"])
def test_help_needs_nothing_but_the_script(script: str) -> None:
    done = _run(script, "--help")
    assert done.returncode == 0
    assert script in done.stdout
