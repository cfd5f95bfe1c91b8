"""Metrics of a run on a split of its data set.

invdist evaluate --run RUN [--split test]                          AUC, GAUC, NDCG, MRR over the rows of the split
invdist evaluate --run RUN [--split test] --catalogue --k 10 50    Recall, HitRate, NDCG, MRR, coverage over all items

The first compares rows that were exposed; the second ranks every item of the catalogue that is new to a user.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from invdist.cli import arguments
from invdist.runtime.errors import UserError, exit_on_user_error

if TYPE_CHECKING:
    from invdist.serving.evaluation import Logits, Ranked
    from invdist.serving.sharded.workers import Workers

_TITLES = {
    "recall": "Recall",
    "hit_rate": "HitRate",
    "ndcg": "NDCG",
    "mrr": "MRR",
    "coverage": "coverage",
    "relevant": "relevant items",
    "items": "items of the catalogue",
    "seen_left_out": "seen items left out",
}


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> int:
    """Prints the metrics of a run as a table, or as JSON."""
    from invdist.data.schema import LABELED_SPLITS

    parser = argparse.ArgumentParser(prog="invdist evaluate", description=__doc__)
    arguments.add_run(parser)
    parser.add_argument("--split", choices=LABELED_SPLITS, default="test", help="rows to score (default: test)")
    parser.add_argument("--catalogue", action="store_true", help="rank the whole catalogue for each user")
    parser.add_argument(
        "--k", type=int, nargs="+", metavar="N", help="with --catalogue: lengths of lists (default: 10)"
    )
    arguments.add_tables(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else on stdout")
    args = parser.parse_intermixed_args(argv)
    if args.k and not args.catalogue:
        raise UserError("--k is the length of the lists of --catalogue; give both (training.ndcg_k is that of NDCG)")

    from invdist.evaluation.tables import metrics_table
    from invdist.runtime.progress import ProgressLine
    from invdist.serving.evaluation import catalogue_metrics, split_metrics
    from invdist.training.events import jsonable

    with arguments.opened(args) as (run, workers), ProgressLine() as line:
        score, ranked = _on(workers) if workers else (None, None)
        if args.catalogue:
            metrics = catalogue_metrics(
                run,
                args.split,
                args.k or [10],
                lambda done, users: line.show(f"ranked for {done:,} of {users:,} users", done, users),
                ranked,
            )
        else:
            metrics = split_metrics(run, args.split, score)
    if args.json:
        about = {"run": str(run.folder), "checkpoint": run.about_checkpoint(), "split": args.split}
        print(json.dumps(jsonable({**about, **metrics})))
    else:
        print(f"{args.split} rows, {'the whole catalogue ranked' if args.catalogue else 'ranked among themselves'}")
        print(_catalogue_table(metrics) if args.catalogue else metrics_table(metrics, run.config.training.ndcg_k))
    return 0


def _on(workers: Workers) -> tuple[Logits, Ranked]:
    """Scores and ranks on the workers that hold the run."""
    from invdist.serving.sharded.jobs import best_on_workers, logits_on_workers

    def ranked(users, k, seen):
        return (best for best, _ in best_on_workers(workers, users, k, seen, tables=False))

    return partial(logits_on_workers, workers), ranked


def _catalogue_table(metrics: dict[str, Any]) -> str:
    from invdist.evaluation.tables import number, plain_table

    rows = []
    for name, value in metrics.items():
        base, at, k = name.partition("@")
        text = (
            ", ".join(value) if isinstance(value, list) else f"{value:,}" if isinstance(value, int) else number(value)
        )
        rows.append([f"{_TITLES.get(base, base)}{at}{k}", text])
    return plain_table(["metric", "value"], rows)
