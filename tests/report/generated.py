"""Runs made up for tests: folders as training leaves them, with numbers a reader can count."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import yaml

EDGES = [place / 20 for place in range(21)]


def ig_events(epochs: int = 3, train_steps: int = 6, test_steps: int = 4, seed: int = 0) -> list[dict[str, Any]]:
    """An inverse-gradient run: `train_steps` logged plain steps and `test_steps` directed ones an epoch."""
    draw = random.Random(seed)
    events: list[dict[str, Any]] = [
        {
            "event": "start",
            "time": 1794794848.99,
            "world_size": 2,
            "device": "cpu",
            "backend": "gloo",
            "plan": [
                {"table": "user", "sharding": "row_wise", "rows": 6040, "dim": 32, "shards": _shards(6040, 2)},
                {"table": "item", "sharding": "table_wise", "rows": 3706, "dim": 32, "shards": _shards(3706, 1)},
            ],
            "dataset": {"users": 6040, "items": 3706, "fingerprint": "abc123"},
            "environment": {"python": "3.11.9", "torch": "2.13.0+cpu", "cpus": 2},
            "rows_per_epoch": 1000,
            "plan_stats": "--- Planner Statistics ---",
        }
    ]
    step, totals = 0, {"direct": 0, "pass": 0, "inverse": 0}
    for epoch in range(epochs):
        counts = {"direct": 0, "pass": 0, "inverse": 0}
        for place in range(train_steps):
            step += 1
            loss = 0.69 - 0.02 * step / (1 + epoch) + draw.gauss(0, 0.01)
            events.append(
                {
                    "event": "step",
                    "epoch": epoch,
                    "phase": 1,
                    "step": place,
                    "global_step": step,
                    "loss": loss,
                }
            )
        for place in range(test_steps):
            step += 1
            losses = [0.6 + draw.gauss(0, 0.02) - 0.03 * epoch for _ in range(3)]
            choice = min(range(3), key=losses.__getitem__)
            counts[("direct", "pass", "inverse")[choice]] += 1
            events.append(
                {
                    "event": "step",
                    "epoch": epoch,
                    "phase": 2,
                    "step": place,
                    "global_step": step,
                    "loss": losses[choice] + 0.001,
                    "direction": (-1, 0, 1)[choice],
                    "candidates": [-1, 0, 1],
                    "candidate_losses": losses,
                    "annotation_mean": draw.random(),
                    "direct_grad_norm": draw.random(),
                    "test_grad_norm": draw.random(),
                }
            )
        for name, count in counts.items():
            totals[name] += count
        events.append(_epoch(epoch, counts, draw))
    events.append(
        {
            "event": "final",
            "method": "ig",
            "model": "gmf",
            "valid": metrics(0.801, 1800),
            "test": metrics(0.793, 2000),
            "best_epoch": epochs - 1,
            "rows_per_s": 123456.7,
            "seconds": 75.4,
            "directions": totals,
            "annotations": {"auc": 0.713},
        }
    )
    return events


def metrics(auc: float, rows: int) -> dict[str, float | int]:
    """A full set of metrics around one AUC."""
    return {
        "auc": auc,
        "gauc": auc - 0.05,
        "gauc_weighted": auc - 0.04,
        "ndcg": auc + 0.15,
        "mrr": auc - 0.1,
        "logloss": 1.2 - auc,
        "ece": 0.0123,
        "rows": rows,
        "users": 420,
        "users_left_out": 17,
    }


def write_run(folder: Path, events: list[dict[str, Any]], **config: Any) -> Path:
    """Writes a run folder and gives its path."""
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    settings = {
        "method": "ig",
        "model": "gmf",
        "seed": 0,
        "data": {"batch_size": 1024},
        "training": {"ndcg_k": 10},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(settings | config))
    (folder / "dataset.json").write_text(json.dumps({"users": 6040, "items": 3706, "fingerprint": "abc123"}))
    return folder


def _shards(rows: int, count: int) -> list[dict[str, int]]:
    each = rows // count
    return [{"rank": r, "row": r * each, "rows": each, "column": 0, "columns": 32} for r in range(count)]


def _epoch(epoch: int, directions: dict[str, int], draw: random.Random) -> dict[str, Any]:
    w1 = [draw.randrange(50, 100) for _ in range(20)]
    return {
        "event": "epoch",
        "epoch": epoch,
        "seconds": 2.0,
        "rows": 1000,
        "rows_per_s": 500.0 + epoch,
        "loss": 0.6 - 0.05 * epoch,
        "directions": directions,
        "seconds_by": {
            "stream": 0.2,
            "pull": 0.5,
            "step": 0.7,
            "candidates": 0.3,
            "commit": 0.1,
            "evaluate": 0.2,
        },
        "valid": metrics(0.75 + 0.02 * epoch, 1800),
        "annotations": {
            "edges": EDGES,
            "w1": w1,
            "w0": w1[::-1],
            "auc": 0.65 + 0.02 * epoch,
            "reliability": [[place / 10 + 0.05, (place / 10 + 0.05) ** 1.3, 10 * place + 5] for place in range(10)],
        },
    }
