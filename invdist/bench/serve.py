"""Load on `invdist serve`: requests/s and latency by number of clients; then a checkpoint change and a killed replica.

Clients are processes of their own that send requests of 100 items over real connections, and compare every score with
that of the checkpoint which the answer names, to the bit. `failed` counts requests without an answer or with a status
other than 200, `wrong` answers with another score. `long_*` is one load of `--minutes` in which the service takes over
a new checkpoint and one of its replicas is killed with SIGKILL.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from pydantic_core import to_json

from invdist.bench._serve_client import Load, Outcome, Question, question
from invdist.runtime.errors import UserError
from invdist.runtime.install import check_stack

_SETTINGS: dict[str, Any] = {
    "method": "none",
    "data": {"batch_size": 1024, "readers": 0},
    "rows": {"dim": 32, "sharding": "row_wise"},
    "training": {"epochs": 2, "test": False},
    "ray": {"workers": 1},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `invdist bench serve`."""
    parser.add_argument("--model", default="gmf", help="backbone of the run (default: gmf)")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 64], help="(default: 1 8 64)")
    parser.add_argument("--items", type=int, default=100, help="items of one request (default: 100)")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each number of clients (default: 10)")
    parser.add_argument("--minutes", type=float, default=2.0, help="of the long load, 0 for none (default: 2)")
    parser.add_argument("--replicas", type=int, default=2, help="(default: 2)")
    parser.add_argument("--data", help="a prepared data set (default: the synthetic preset small)")


def run(args: argparse.Namespace) -> dict[str, object]:
    """Trains a small run, serves it, and sends requests."""
    check_stack()
    if min(*args.clients, args.items, args.replicas) < 1 or args.seconds <= 0 or args.minutes < 0:
        raise UserError("--clients, --items, --replicas and --seconds must be more than 0")
    from invdist.serving.service.launch import running_service

    with tempfile.TemporaryDirectory() as folder:
        trained = train(Path(folder), args.model, args.data)
        newest = newest_checkpoint(trained)
        bodies, expected = questions_of(trained, args.items)
        hidden = Path(folder, "hidden")
        newest.rename(hidden)
        figures: dict[str, object] = {"model": args.model, "items": args.items, "replicas": args.replicas}
        started = time.monotonic()
        with running_service(trained, checkpoint="last", replicas=args.replicas) as service:
            figures["start_s"] = time.monotonic() - started
            token = service.token_file.read_text()
            asked = [question(service.url, token, *pair) for pair in zip(bodies, expected, strict=True)]
            _load(service.url, asked, 8, 2.0).outcomes()  # the first requests of a process are slow
            for clients in args.clients:
                outcomes = _load(service.url, asked, clients, args.seconds).outcomes()
                figures |= _figures(f"clients_{clients}", outcomes, args.seconds)
            if args.minutes:
                figures |= _long_load(service.url, asked, max(args.clients), args.minutes * 60, hidden, newest)
    return figures


def train(folder: Path, model: str, data: str | None) -> Path:
    """A small trained run with at least two checkpoints."""
    import torch

    from invdist import config as configs
    from invdist.data.dataset import Dataset
    from invdist.data.prepare.options import build_options
    from invdist.data.prepare.pipeline import prepare_log
    from invdist.runtime.process import single_rank
    from invdist.training import run_folder
    from invdist.training.trainer import Trainer

    if data is None:
        data = str(folder / "data")
        prepare_log(build_options("synthetic", {"preset": "small"}), [], data)
    config = configs.from_mapping(_SETTINGS, [f"data.path={data}", f"runs={folder}", "name=served", f"model={model}"])
    trained = run_folder.create(config, Dataset.open(data))
    with single_rank():
        Trainer(config, trained, device=torch.device("cpu")).fit()
    return Path(str(trained))


def newest_checkpoint(run: Path) -> Path:
    """The folder of the newest of several checkpoints."""
    found = sorted((run / "checkpoints").glob("step-*"))
    assert len(found) > 1, "a run of one checkpoint"
    return found[-1]


def questions_of(run: Path, items: int, count: int = 100) -> tuple[list[bytes], list[dict[str, bytes]]]:
    """Bodies of requests for one user and some items each, and the scores of both checkpoints as they are sent."""
    from invdist.serving.run import open_run
    from invdist.serving.scoring import logits

    rng = np.random.default_rng(0)
    steps = [int(folder.name[5:]) for folder in sorted((run / "checkpoints").glob("step-*"))[-2:]]
    opened = [open_run(run, checkpoint=step) for step in steps]
    dataset = opened[0].dataset
    bodies, expected = [], []
    for _ in range(count):
        user, item = np.full(items, rng.integers(dataset.users)), rng.integers(0, dataset.items, items)
        raw = opened[0].users.take(user[:1]).to_pylist()[0], opened[0].items.take(item).to_pylist()
        bodies.append(json.dumps({"user": raw[0], "item": raw[1]}).encode())
        scores = {one.about_checkpoint()["digest"]: logits(one.model, user, item).tolist() for one in opened}
        expected.append({digest: b'"score":' + to_json(values) for digest, values in scores.items()})
    return bodies, expected


def kill_a_replica() -> int:
    """Kills one of the processes that answer with SIGKILL, and gives its id."""
    import ray

    actors: Any = ray.util.list_named_actors(all_namespaces=True)
    names = [actor["name"] for actor in actors if "#Replica#" in actor["name"]]
    actor: Any = ray.get_actor(sorted(names)[0], namespace="serve")
    pid: Any = ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))
    os.kill(pid, signal.SIGKILL)
    return pid


def _load(url: str, asked: list[Question], clients: int, seconds: float) -> Load:
    return Load(url, asked, clients, seconds).start()


def _long_load(
    url: str, asked: list[Question], clients: int, seconds: float, hidden: Path, newest: Path
) -> dict[str, object]:
    load = _load(url, asked, clients, seconds)
    time.sleep(seconds / 3)
    changed = time.time()
    shutil.copytree(hidden, newest.with_name("copy.partial"))
    newest.with_name("copy.partial").rename(newest)
    time.sleep(seconds / 3)
    kill_a_replica()
    outcomes = load.outcomes()
    figures = _figures("long", outcomes, seconds)
    digests = Counter(outcome.digest for outcome in outcomes)
    last = max(outcomes).digest
    first_new = min((o.time for o in outcomes if o.digest == last and o.time > changed), default=float("nan"))
    last_old = max((o.time for o in outcomes if o.digest != last and not o.wrong), default=float("nan"))
    return figures | {
        "long_checkpoints": len(digests.keys() - {""}),
        "long_first_new_s": first_new - changed,
        "long_last_old_s": last_old - changed,
    }


def _figures(name: str, outcomes: list[Outcome], seconds: float) -> dict[str, object]:
    times = [outcome.seconds for outcome in outcomes if not outcome.wrong] or [float("nan")]
    return {
        f"{name}_per_s": len(times) / seconds,
        f"{name}_p50_ms": float(np.percentile(times, 50)) * 1000,
        f"{name}_p99_ms": float(np.percentile(times, 99)) * 1000,
        f"{name}_failed": sum(outcome.wrong not in ("", "scores") for outcome in outcomes),
        f"{name}_wrong": sum(outcome.wrong == "scores" for outcome in outcomes),
    }
