"""Scores the best checkpoint of a run on a split of its data set.

invdist evaluate --run runs/NAME [--split test] [key=value ...]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from invdist.data.schema import LABELED_SPLITS
from invdist.runtime.errors import UserError, exit_on_user_error
from invdist.runtime.install import check_stack


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> int:
    """Prints the metrics of a run as a table, or as JSON."""
    parser = argparse.ArgumentParser(
        prog="invdist evaluate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", required=True, help="folder of the run")
    parser.add_argument("--split", choices=LABELED_SPLITS, default="test", help="rows to score (default: test)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, such as a moved data.path")
    args = parser.parse_intermixed_args(argv)
    check_stack()

    from invdist.evaluation.tables import metric_title, number, plain_table
    from invdist.training.events import jsonable
    from invdist.training.scoring import SplitScorer
    from invdist.training.trained import open_trained

    with open_trained(args.run, args.overrides) as trained:
        config = trained.config
        if not trained.dataset.rows.get(args.split):
            raise UserError(f"{config.data.path}: the data set has no rows in its split {args.split!r}")
        k = config.training.ndcg_k
        metrics = SplitScorer(trained.dataset, args.split, trained.strategy, config.data.eval_batch_size, k).metrics()
        if args.json:
            about = {"run": str(trained.run), "checkpoint": trained.checkpoint, "split": args.split}
            print(json.dumps(jsonable({**about, **metrics})))
        else:
            print(f"{trained.checkpoint}, {args.split} rows")
            figures = [f"{value:,}" if isinstance(value, int) else number(value) for value in metrics.values()]
            titles = [metric_title(name, k) for name in metrics]
            print(plain_table(["metric", "value"], list(zip(titles, figures, strict=True))))
    return 0
