"""A run with plain training beside it, and one table of both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from invdist import config as configs
from invdist.config.defaults import LOCAL
from invdist.training.first_run import is_plain, train_and_compare


class Jobs:
    """Stands for the jobs of a cluster: every training makes a run folder with a `final` event."""

    def __init__(self, runs: Path, fails_at: int | None = None) -> None:
        self.runs, self.fails_at = runs, fails_at
        self.commands: list[list[str]] = []

    def __call__(self, command: list[str]) -> int:
        self.commands.append(command)
        if len(self.commands) == self.fails_at:
            return 130
        name = [word.removeprefix("name=") for word in command if word.startswith("name=")][-1]
        auc = 0.5 + 0.1 / len(self.commands)
        metrics = {"auc": auc, "gauc": auc, "ndcg": auc, "mrr": auc}
        means = {"auc": 0.57, "gauc": 0.57, "ndcg": 0.57, "mrr": 0.57}
        final = {"event": "final", "valid": metrics, "test": metrics, "means": {"valid": means, "test": means}}
        (self.runs / name).mkdir()
        (self.runs / name / "metrics.jsonl").write_text(json.dumps(final) + "\n")
        result = Path(command[command.index("--result") + 1])
        result.write_text(json.dumps({"run": str(self.runs / name)}))
        return 0


def test_the_table_has_the_run_plain_training_and_the_means(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs, command = Jobs(tmp_path), ["train", "name=first", "method=ig"]
    assert train_and_compare(configs.load(LOCAL), command, jobs) == 0
    first, second = jobs.commands
    assert first[:3] == second[:3] == command
    settings = configs.load(LOCAL, [word for word in second[1:] if "=" in word and "/" not in word])
    assert is_plain(settings), "later settings win"
    assert settings.name == "first-plain"
    lines = capsys.readouterr().out.splitlines()
    rows = [line.strip().split("  ") for line in lines[-3:]]
    assert [row[0] for row in rows] == ["ig, exposure vectors", "plain training", "(means)"]
    assert [line.split()[-4] for line in lines[-3:]] == ["0.6000", "0.5500", "0.5700"]


@pytest.mark.parametrize("fails_at", [1, 2])
def test_a_run_that_ends_early_gives_its_exit_code_and_no_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fails_at: int
) -> None:
    jobs = Jobs(tmp_path, fails_at)
    assert train_and_compare(configs.load(LOCAL), ["train", "name=first"], jobs) == 130
    assert len(jobs.commands) == fails_at
    assert "(means)" not in capsys.readouterr().out


def test_plain_training_has_nothing_to_compare_with() -> None:
    assert not is_plain(configs.load(LOCAL))
    assert not is_plain(configs.load(LOCAL, ["method=none"])), "it still has exposure vectors"
    assert is_plain(configs.load(LOCAL, ["method=none", "exposures.vectors=false"]))
