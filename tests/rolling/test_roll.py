"""A roll over a small feed: scores against scikit-learn, days that were done are not done again."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pc
import pytest
from sklearn.metrics import roc_auc_score

from invdist.cli import roll as command
from invdist.config.plain_yaml import to_yaml
from invdist.data.dataset import Dataset
from invdist.data.schema import LABELED_SPLITS
from invdist.rolling import run as rolling
from invdist.rolling.spec import Roll, load
from invdist.runtime.errors import UserError
from invdist.serving.run import open_run
from invdist.training.mlflow import open_client

KEYS: dict[str, Any] = {
    "name": "feed",
    "data": {
        "kind": "synthetic",
        "options": {"preset": "tiny", "days": 5, "labeled_rows": 10_000, "items": 500, "test_fraction": 0.0},
    },
    "first": "2026-01-04",
    "last": "2026-01-05",
    "train": {
        "method": "none",
        "data": {"batch_size": 512},
        "rows": {"dim": 8},
        "optimizer": {"gamma": 0.02},
        "training": {"epochs": 6},
        "ray": {"workers": 1},
    },
}


@pytest.fixture(scope="module")
def rolled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Roll]:
    """The keys file of a roll that is done, and the roll."""
    folder = tmp_path_factory.mktemp("rolled")
    path = folder / "roll.yaml"
    path.write_text(to_yaml({**KEYS, "output": str(folder / "rolls")}))
    assert command.main(["--config", str(path)]) == 0
    return path, load(path)


def test_the_next_day_is_scored_by_models_that_have_not_seen_it(rolled: tuple[Path, Roll]) -> None:
    _, roll = rolled
    results = json.loads((roll.folder / "results.json").read_text())
    assert [day["day"] for day in results["days"]] == ["2026-01-04", "2026-01-05"]
    for yesterday, day in zip(("2026-01-03", "2026-01-04"), results["days"], strict=True):
        dataset = Dataset.open(str(roll.data_of("anew", day["day"])))
        tables = [dataset.read(split) for split in LABELED_SPLITS if dataset.rows[split]]
        columns = {
            name: np.concatenate([t[name].to_numpy() for t in tables]) for name in ("user", "item", "label", "day")
        }
        today = columns["day"] == dataset.manifest["day"]
        assert np.count_nonzero(today) == day["rows"]
        for arm in ("anew", "grown", "never"):
            first = arm == "never" or yesterday == "2026-01-03"
            run = open_run(roll.folder / "runs" / (f"first-{roll.history}" if first else f"{arm}-{yesterday}"))
            users, items = run.users.raw.to_pylist(), run.items.raw.to_pylist()
            model, raw_user, raw_item = (
                run.model,
                dataset.raw_ids("users").to_pylist(),
                dataset.raw_ids("items").to_pylist(),
            )
            score = []
            for user, item in zip(columns["user"][today].tolist(), columns["item"][today].tolist()):
                rows = [
                    table[ids.index(raw)] if raw in ids else table.mean(0)
                    for table, ids, raw in ((model.user, users, raw_user[user]), (model.item, items, raw_item[item]))
                ]
                score.append(float(model.backbone(rows[0][None], rows[1][None])))
            expected = roc_auc_score(columns["label"][today], score)
            assert day["arms"][arm]["all"]["auc"] == pytest.approx(expected, abs=2e-4), (day["day"], arm)
        assert day["arms"]["grown"]["cold_users"]["rows"] > 0
        assert day["best possible"]["all"]["auc"] > day["arms"]["never"]["all"]["auc"]
        costs = [found[unit] for found in day.get("cost", {}).values() for unit in ("seconds", "cpu_seconds")]
        assert len(costs) == (0 if day["day"] == roll.last else 4)
        assert all(cost > 0 for cost in costs)
    text, page = ((roll.folder / name).read_text() for name in ("results.md", "report.html"))
    assert "Grown against anew" in text
    for day in results["days"]:
        users, items = (
            " / ".join([f"{arms['anew'][part]['rows']:,.0f}", *(f"{arms[a][part]['auc']:.4f}" for a in roll.arms)])
            for arms, part in ((day["arms"], "cold_users"), (day["arms"], "cold_items"))
        )
        assert f"| {day['day']} | {users} | {items} |" in text
        assert f"<td>{day['day']}<td>{users}<td>{items}" in page
    assert "Content-Security-Policy" in page
    assert "src=" not in page.partition("<script")[0] + page.rpartition("</script>")[2], "it loads nothing"
    assert "plotly" in page.lower()


def test_what_is_done_is_not_done_again(
    rolled: tuple[Path, Roll], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, roll = rolled
    before = (roll.folder / "results.json").read_text()
    monkeypatch.setattr(rolling, "_train_here", lambda *_: pytest.fail("trained again"))
    monkeypatch.setattr(rolling, "prepare_log", lambda *_, **__: pytest.fail("prepared again"))
    assert command.main(["--config", str(path)]) == 0
    assert (roll.folder / "results.json").read_text() == before
    assert command.main(["--config", str(path), "train.rows.dim=4"]) == 2
    assert "was started with" in capsys.readouterr().err


@pytest.mark.parametrize(("line", "epochs"), [("anew learns", 0), ("grown learns", 1), ("anew learns", 2)])
def test_a_roll_that_was_killed_goes_on_to_the_same_results(
    rolled: tuple[Path, Roll], tmp_path: Path, line: str, epochs: int
) -> None:
    path, roll = rolled
    command_line = [sys.executable, "-u", "-m", "invdist", "roll", "--config", str(path), f"output={tmp_path}"]
    process = subprocess.Popen(command_line, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert any(line in said for said in process.stdout), "it ended before"
    events = tmp_path / "feed" / "runs" / f"{line.split()[0]}-2026-01-04" / "metrics.jsonl"
    while epochs and not (events.exists() and events.read_text().count('"event": "epoch"') >= epochs):
        assert process.poll() is None, "it ended before"
    process.kill()
    process.wait()
    assert not (tmp_path / "feed" / "results.json").exists()
    if not epochs:  # killed while the folder of the run was made
        shutil.rmtree(events.parent, ignore_errors=True)
        events.parent.mkdir(parents=True)
    assert command.main(["--config", str(path), f"output={tmp_path}"]) == 0
    found, expected = (
        json.loads((folder / "results.json").read_text())["days"] for folder in (tmp_path / "feed", roll.folder)
    )
    assert [day["arms"] for day in found] == [day["arms"] for day in expected]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("grown_data.kep=0", "grown_data: kep: no such key"),
        ("grown.growth.epoch=1", "growth.epoch"),
        ("grown.training.epochs=9", "takes growth.epochs=N"),
        ("grown.rows.dim=16", "the first model of the roll was trained with rows.dim=8"),
        ("train.watch.ray_metrics=true", "watch.ray_metrics: with ray.workers=1"),
        ("train.watch.mlflow=nosuch://x", "watch.mlflow"),
        ("grown_data.older=unclear", "older: unclear goes together with keep=N"),
        ("train.optimizer.gama=1", "optimizer.gama"),
        ("arms=[]", "arms: expected some of anew, grown, never"),
        ("arms=[grown,grown]", "each once"),
        ("grown_data.since=2026-01-01", "is set by the roll"),
        ("train.name=x", "train.name: is set by the roll"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, said: str
) -> None:
    path = tmp_path / "roll.yaml"
    path.write_text(to_yaml({**KEYS, "output": str(tmp_path / "rolls")}))
    assert command.main(["--config", str(path), override]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "rolls").exists()


def test_a_day_with_too_little_goes_together_with_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No rows on the 3rd, positives only on the 4th, no rows on the last day; no label is lost."""
    rng, counts = np.random.default_rng(0), {1: 600, 2: 300, 4: 6, 5: 300, 6: 300}
    date = np.repeat([f"2026-03-0{day}" for day in counts], list(counts.values()))
    user, item = rng.integers(0, 60, len(date)), rng.integers(0, 10_000, len(date))
    label = np.where(date == "2026-03-04", 1, rng.random(len(date)) < 0.5).astype(int)
    pc.write_csv(pa.table({"user": user, "item": item, "label": label, "date": date}), tmp_path / "log.csv")
    data = {"kind": "ratings", "input": [str(tmp_path / "log.csv")], "options": {"rule": "label", "test_fraction": 0.0}}
    train = {**KEYS["train"], "data": {"batch_size": 64}, "training": {"epochs": 1}}
    days = {"first": "2026-03-02", "last": "2026-03-07", "arms": ["anew", "grown"]}
    (tmp_path / "roll.yaml").write_text(
        to_yaml({"name": "quiet", "output": str(tmp_path), "data": data, "train": train, **days})
    )
    assert command.main(["--config", str(tmp_path / "roll.yaml")]) == 0
    said = capsys.readouterr().out
    for day, why in (("03", "the log has no rows"), ("04", "valid has no negatives"), ("07", "the log has no rows")):
        assert f"2026-03-{day}: goes together with the next day, by itself it has too little: {why}" in said
    results = (tmp_path / "quiet" / "results.json").read_text()
    pairs = {"2026-03-02": 300, "2026-03-05": 306, "2026-03-06": 300}
    assert {day["day"]: day["rows"] for day in json.loads(results)["days"]} == pairs
    assert "| 2026-03-03 to 2026-03-05 | 306 |" in said
    monkeypatch.setattr(rolling, "_train_here", lambda *_: pytest.fail("trained again"))
    assert command.main(["--config", str(tmp_path / "roll.yaml")]) == 0
    assert (tmp_path / "quiet" / "results.json").read_text() == results


def test_models_of_a_roll_are_logged_to_mlflow(tmp_path: Path) -> None:
    """With one worker, too: the first model, and the one that grew."""
    pytest.importorskip("mlflow")
    path = tmp_path / "roll.yaml"
    path.write_text(to_yaml({**KEYS, "output": str(tmp_path), "arms": ["grown"]}))
    uri = f"train.watch.mlflow=sqlite:///{tmp_path}/mlflow.db"
    assert command.main(["--config", str(path), uri, "train.training.epochs=1"]) == 0
    client = open_client(load(path, [uri]).config("first", "2026-01-03"))
    experiment = client.get_experiment_by_name("invdist")
    found = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert found.keys() == {"first-2026-01-03", "grown-2026-01-04"}
    for run in found.values():
        assert run.info.status == "FINISHED"
        assert "valid/auc" in run.data.metrics


def test_settings_of_the_grown_model_by_dotted_key_or_nested(tmp_path: Path) -> None:
    path = tmp_path / "roll.yaml"
    path.write_text(to_yaml({**KEYS, "grown": {"growth.epochs": 5}}))
    assert load(path).config("grown", "2026-01-04").growth.epochs == 5
    assert load(path, ["grown.growth.epochs=7"]).config("anew", "2026-01-04").growth.epochs == 3
    path.write_text(to_yaml(KEYS))
    assert load(path, ["grown.growth.epochs=7"]).config("grown", "2026-01-04").growth.epochs == 7


def test_keys_that_are_wrong_say_so(tmp_path: Path) -> None:
    path = tmp_path / "roll.yaml"
    path.write_text(to_yaml({**KEYS, "first": "2026-01-06"}))
    with pytest.raises(UserError, match="expected 2026-01-06"):
        load(path)
    path.write_text(to_yaml({**KEYS, "data": {"kind": "synthetic", "options": {"until": "2026-01-01"}}}))
    with pytest.raises(UserError, match="is set by the roll"):
        load(path)
