"""Runs a roll: for each day prepare it onto the day before, score it with every model, then let the models learn.

A day with too little to be a data set goes together with the next one.

What a day gave is written when it is complete (`days/DAY.json`); a roll that is started again goes on from there. Data
sets and runs that are finished are used again, too.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from invdist.config import Config
from invdist.data.dataset import Dataset
from invdist.data.prepare.pipeline import prepare_log
from invdist.data.prepare.since_until import TooLittle
from invdist.rolling.results import write_results
from invdist.rolling.scoring import DayRows
from invdist.rolling.spec import Arm, Roll
from invdist.runtime.errors import UserError
from invdist.runtime.files import exclusive, write_atomically
from invdist.runtime.process import configure_process, single_rank
from invdist.serving.run import open_run
from invdist.train import train
from invdist.training import run_folder
from invdist.training.data_checks import check_against_data
from invdist.training.growth import check_growth, settings_from
from invdist.training.history import METRICS_FILE, History
from invdist.training.mlflow import Mlflow
from invdist.training.sizes import suited
from invdist.training.trainer import Trainer

Say = Callable[[str], None]
_SPEC = "roll.json"
_COST = "cost.json"


def run(roll: Roll, say: Say = print) -> Path:
    """Rolls over all days; gives the page of results."""
    folder = roll.folder
    (folder / "days").mkdir(parents=True, exist_ok=True)
    with exclusive(folder):
        _check_same(roll)
        prepare(roll, "first", roll.history, None, say)
        first = learn(roll, "first", roll.history, None, say)
        models: dict[Arm, Path] = dict.fromkeys(roll.arms, first)
        yesterday, since = roll.history, None
        records: list[dict[str, Any]] = []
        for day in roll.days:
            since = since or day
            # Nobody would score what is learned from the last day.
            learning: list[Arm] = [arm for arm in roll.arms if arm != "never" and day != roll.last]
            try:
                for arm in dict.fromkeys(["anew", *learning]):
                    prepare(roll, arm, day, yesterday, say, since)
            except TooLittle as error:
                why = str(error).splitlines()[0]
                say(f"{day}: goes together with the next day, by itself it has too little: {why}")
                continue
            rows = DayRows(*(Dataset.open(str(roll.data_of("anew", d)), verify="fast") for d in (day, yesterday)))
            record = folder / "days" / f"{day}.json"
            scores = _read(record) or {"day": day, "since": since, "rows": len(rows.label), "arms": {}}
            for arm in roll.arms:
                if arm not in scores["arms"]:
                    scores["arms"][arm] = rows.score(open_run(models[arm]))
                    say(f"{day}: {arm} scores {scores['arms'][arm]['all'].get('auc')}")
            scores["best possible"] = rows.best_possible(roll.config("anew", day).training.ndcg_k)
            write_atomically(record, json.dumps(scores, indent=1))
            for arm in learning:
                models[arm] = learn(roll, arm, day, models[arm] if arm == "grown" else None, say)
                scores.setdefault("cost", {})[arm] = cost(models[arm])
            write_atomically(record, json.dumps(scores, indent=1))
            records.append(scores)
            yesterday, since = day, None
        return write_results(roll, records, cost(first))


def prepare(roll: Roll, arm: str, day: str, onto: str | None, say: Say, since: str | None = None) -> None:
    """The data set of an arm after a day, unless it is there; `since` is the first day that has no data set yet."""
    output = roll.data_of(arm, day)
    if not output.exists():
        say(f"{day}: preparing for {arm}")
        before = roll.data_of(arm, onto) if onto else None
        prepare_log(roll.options(arm, day, since), roll.inputs(), output, onto=before)


def learn(roll: Roll, arm: str, day: str, parent: Path | None, say: Say) -> Path:
    """The finished run of an arm after a day: of a new model, or of one that goes on from the run `parent`."""
    config = roll.config(arm, day)
    folder = Path(config.runs) / str(config.name)
    if (folder / METRICS_FILE).exists() and History.read(folder).final is not None:
        return folder
    if resumed := (folder / run_folder.CONFIG_FILE).exists():
        config = run_folder.reopen(folder, [])[0]
    elif parent is not None:
        given = [f"data.path={config.data.path}", f"runs={config.runs}", f"name={config.name}"]
        config = settings_from(str(parent), [*roll.grown_overrides(), *given])
    if not resumed:
        shutil.rmtree(folder, ignore_errors=True)  # of a roll that was killed while it made the folder
    say(f"{day}: {arm} {'goes on' if resumed else 'learns'}")
    if config.ray.ranks > 1:
        if train(config, resume=str(folder) if resumed else None)[1]:
            raise KeyboardInterrupt
        return folder
    started = time.process_time()
    _train_here(config, folder, resumed)
    cpu = time.process_time() - started
    write_atomically(folder / _COST, json.dumps({"cpu_seconds": cpu}))
    return folder


def _train_here(config: Config, folder: Path, resumed: bool) -> None:
    """Trains on one rank in this process, as trials of a study do: Ray workers start for longer than a day takes."""
    dataset = Dataset.open(config.data.path, verify="fast")
    config = suited(config, dataset)
    if not resumed:
        check_against_data(config, dataset)
        check_growth(config, dataset)
        run_folder.create(config, dataset)
    configure_process(max(1, int(config.ray.cpus_per_worker)))
    with single_rank():
        sinks = [Mlflow(config, folder)] if config.watch.mlflow else []
        Trainer(config, folder, device=torch.device("cpu"), sinks=sinks).fit()


def cost(run: Path) -> dict[str, float]:
    """What a finished training cost: `seconds` of its vectors and from its first step to its last score.

    And `cpu_seconds`, which other work on the machine does not change, of one that ran in the process of the roll.
    Nothing is known of one that was interrupted: it has done some steps twice.
    """
    events = History.read(run).events
    times = [event["time"] for event in events if event["event"] in ("start", "final")]
    if len(times) != 2:
        return {}
    vectors = sum(event["seconds"] for event in events if event["event"] == "vectors")
    return {"seconds": vectors + times[1] - times[0], **(_read(run / _COST) or {})}


def _check_same(roll: Roll) -> None:
    """A roll goes on with the keys that it was started with."""
    path, keys = roll.folder / _SPEC, json.loads(roll.model_dump_json())
    before = _read(path)
    if before is None:
        write_atomically(path, json.dumps(keys, indent=1))
        return
    changed = [key for key in keys if key != "last" and keys[key] != before.get(key)]
    if changed:
        raise UserError(
            f"{roll.folder} was started with {', '.join(f'{key}={before.get(key)}' for key in changed)}: go on with "
            "that, or choose another name="
        )


def _read(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text()) if path.exists() else None
