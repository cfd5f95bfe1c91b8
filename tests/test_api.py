"""invdist from Python: the same things as the commands, and the example notebook, executed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import invdist
from invdist import api
from invdist.runtime.errors import UserError
from invdist.runtime.private_ray import PrivateRay
from tests.conftest import REPOSITORY

NOTEBOOK = REPOSITORY / "examples" / "quickstart.ipynb"

EXECUTE = """
import ast, json, sys

names = {}
for number, cell in enumerate(json.load(open(sys.argv[1]))["cells"]):
    if cell["cell_type"] != "code":
        continue
    tree = ast.parse("".join(cell["source"]), f"cell {number}")
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, f"cell {number}", "exec"), names)
    if last is not None:
        shown = eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), names)
        getattr(shown, "_repr_html_", shown.__repr__)()
print(json.dumps({"path": str(names["run"].path), "metrics": names["run"].metrics, "rows": len(names["labels"])}))
"""


@pytest.fixture(scope="module")
def run(trained_run: Path) -> api.Run:
    return api.open_run(trained_run)


def test_the_package_is_light() -> None:
    code = "import sys, invdist, invdist.cli; print(sorted({'torch', 'ray', 'pyarrow', 'plotly'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY)
    assert done.stdout == "[]\n", done.stderr


def test_the_functions_of_the_api_are_the_packages_own() -> None:
    names = {"Run", "open_run", "prepare_dataset", "train_model"}
    assert names <= set(dir(invdist))
    assert all(getattr(invdist, name) is getattr(api, name) for name in names)
    with pytest.raises(AttributeError):
        invdist.__getattr__("no_such_thing")


def test_prepare_gives_an_open_data_set(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("uid,item,rating\n" + "".join(f"{n % 9},{n},{n % 5 + 1}\n" for n in range(200)))
    dataset = api.prepare_dataset(
        "ratings", tmp_path / "out", tmp_path / "log.csv", columns={"user": "uid"}, positive_from=4
    )
    assert (dataset.users, dataset.items) == (9, 200)
    with pytest.raises(UserError, match="no kind of log"):
        api.prepare_dataset("raitings", tmp_path / "out2")
    with pytest.raises(UserError, match="ratings needs inputs"):
        api.prepare_dataset("ratings", tmp_path / "out2")


def test_metrics_and_history_are_those_of_the_run(run: api.Run, trained_run: Path) -> None:
    events = [json.loads(line) for line in (trained_run / "metrics.jsonl").read_text().splitlines()]
    assert run.metrics["test"] == events[-1]["test"]
    epochs = [event for event in events if event["event"] == "epoch"]
    frame = run.history.to_pandas()
    assert frame["valid.auc"].tolist() == [event["valid"]["auc"] for event in epochs]
    assert repr(run).startswith(f"Run('{trained_run}', test AUC 0.")


def test_directions_are_plotted_one_point_a_step(run: api.Run, trained_run: Path) -> None:
    events = [json.loads(line) for line in (trained_run / "metrics.jsonl").read_text().splitlines()]
    steps = {event["global_step"] for event in events if event.get("direction") is not None}
    assert sum(len(trace["x"]) for trace in run.plot_directions().to_dict()["data"]) == len(steps) > 0


def test_pairs_may_be_a_mapping_a_table_or_a_frame(run: api.Run) -> None:
    pairs = {"user": [1, 2, 555], "item": [3, 4, 5]}
    table = run.annotate(pairs)
    assert table["user"].to_pylist() == [1, 2, 555]
    assert table["score"].is_null().to_pylist() == [False, False, True]
    assert len(run.annotate(pairs, unknown="drop")) == 2
    assert run.annotate(pa.table(pairs)).equals(table)
    assert run.annotate(pd.DataFrame(pairs)).equals(table)
    assert run.annotate(pairs, unknown="prior")["score"].null_count == 0
    scores = run.score({"user": np.array([1, 2]), "item": ["3", "4"]})
    assert scores["score"].equals(table["score"].slice(0, 2))
    for wrong, message in (({"user": [1]}, "need columns"), ({"user": [1], "item": [1, 2]}, "as many users as items")):
        with pytest.raises(UserError, match=message):
            run.score(wrong)


def test_scores_have_a_row_for_each_pair_asked_in_order(run: api.Run) -> None:
    pairs = {"user": ["1", "nobody", None, "2", "999"], "item": [3, 4, 5, 6, 7]}
    scores = run.score(pairs)
    assert scores["item"].to_pylist() == pairs["item"]
    assert scores["user"].to_pylist() == [1, None, None, 2, 999]
    assert scores["known"].to_pylist() == [True, False, False, True, False]
    assert scores["score"].is_null().to_pylist() == scores["probability"].is_null().to_pylist()
    assert scores["score"].is_valid().to_pylist() == scores["known"].to_pylist()
    with pytest.raises(UserError, match="unknown='skip': expected null, prior, drop"):
        run.score(pairs, unknown="skip")  # type: ignore[arg-type]


def test_a_checkpoint_of_a_run_can_be_chosen(run: api.Run, trained_run: Path) -> None:
    steps = sorted(int(folder.name[5:]) for folder in (trained_run / "checkpoints").glob("step-*"))
    pairs = {"user": [1], "item": [3]}
    scores = {step: api.open_run(trained_run, checkpoint=step).score(pairs)["score"][0].as_py() for step in steps}
    assert len(set(scores.values())) == len(steps) > 1
    assert api.open_run(trained_run, checkpoint="last").score(pairs)["score"][0].as_py() == scores[steps[-1]]
    assert run.score(pairs)["score"][0].as_py() == scores[run._opened.checkpoint.step]


def test_unclear_exposures_are_annotated_by_default(run: api.Run) -> None:
    table = run.annotate(calibrate=True)
    assert len(table) == run._opened.dataset.rows["unclear"]
    assert 0 < np.mean(table["label"].to_numpy()) < 1


def test_recommendations_by_raw_id(run: api.Run) -> None:
    everybody = run.recommend(k=3)
    assert len(everybody) == 600
    some = run.recommend(k=3, users=[5, 2])
    assert some["user"].to_pylist() == [5] * 3 + [2] * 3
    assert some.slice(3).equals(everybody.slice(6, 3).combine_chunks())
    unknown = run.recommend(k=3, users=[1000, 5])
    assert unknown.slice(1).equals(some.slice(0, 3))
    assert unknown.slice(0, 1).to_pylist() == [{"user": 1000, "rank": None, "item": None, "score": None}]
    assert run.recommend(k=3, users=[1000, 5], unknown="drop").equals(some.slice(0, 3))
    with pytest.raises(UserError, match="unknown='prior': expected null, drop"):
        run.recommend(users=[5], unknown="prior")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="no split 'trian'"):
        run.recommend(seen=["trian"])


def test_a_folder_that_is_no_run_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a run folder"):
        api.open_run(tmp_path)


def test_a_failed_training_is_an_error_with_its_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere is not a prepared data set"):
        api.train_model({"data": {"path": str(tmp_path / "nowhere")}}, f"runs={tmp_path}", show=False)


@pytest.mark.slow
def test_the_example_notebook_runs(ray_cluster: PrivateRay, tmp_path: Path) -> None:
    notebook = json.loads(NOTEBOOK.read_text())
    assert all(not cell.get("outputs") for cell in notebook["cells"])
    environment = os.environ | {"RAY_ADDRESS": ray_cluster.address, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", EXECUTE, str(NOTEBOOK)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["metrics"]["test"]["auc"] > 0.55
    assert told["rows"] > 1000
    assert (Path(told["path"]) / "export" / "scorer.pt2").exists()
