"""Time of all ranking metrics, compared with scikit-learn's AUC on the same scored interactions.

scikit-learn offers no per-user metrics: it is timed on `roc_auc_score` over all rows and once for each user
with both classes, which gives only the AUC and GAUC of `ranking_metrics`.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from invdist.evaluation.metrics import ranking_metrics
from invdist.runtime.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `invdist bench metrics`."""
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--users", type=int, default=37_692)
    parser.add_argument("--repeats", type=int, default=3, help="the median of this many runs is reported")
    parser.add_argument("--no-sklearn", action="store_true", help="without scikit-learn, whose loop takes a minute")


def run(args: argparse.Namespace) -> dict[str, object]:
    """Measures one core; float32 scores rounded to 1/256, so that users have ties."""
    if min(args.rows, args.users, args.repeats) < 1:
        raise UserError("--rows, --users and --repeats must be at least 1")
    generator = np.random.default_rng(0)
    user = generator.integers(args.users, size=args.rows)
    label = (generator.random(args.rows) < 0.4).astype(np.int8)
    score = (np.round((generator.normal(size=args.rows) + label) * 256) / 256).astype(np.float32)

    seconds = []
    metrics: dict[str, float | int] = {}
    for _ in range(args.repeats):
        started = time.perf_counter()
        metrics = ranking_metrics(user, label, score)
        seconds.append(time.perf_counter() - started)
    figures: dict[str, object] = {
        "rows": args.rows,
        "users": args.users,
        "seconds": statistics.median(seconds),
        "seconds_max": max(seconds),
    }
    return figures if args.no_sklearn else {**figures, **_sklearn(user, label, score, metrics)}


def _sklearn(
    user: np.ndarray, label: np.ndarray, score: np.ndarray, metrics: dict[str, float | int]
) -> dict[str, object]:
    try:
        from sklearn.metrics import roc_auc_score
    except ImportError as error:
        raise UserError("scikit-learn is not installed; install it, or pass --no-sklearn") from error
    started = time.perf_counter()
    auc = roc_auc_score(label, score)
    auc_seconds = time.perf_counter() - started
    order = np.argsort(user, kind="stable")
    parts = np.split(order, np.flatnonzero(np.diff(user[order])) + 1)
    gauc = np.mean([roc_auc_score(label[part], score[part]) for part in parts if len(set(label[part])) == 2])
    return {
        "sklearn_seconds": time.perf_counter() - started,
        "sklearn_auc_seconds": auc_seconds,
        "sklearn_covers": "roc_auc_score over all rows and per user (no NDCG, MRR, log-loss or ECE)",
        "auc_difference": abs(metrics["auc"] - float(auc)),
        "gauc_difference": abs(metrics["gauc"] - float(gauc)),
    }
