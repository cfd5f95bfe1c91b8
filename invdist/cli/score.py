"""Scores given user-item pairs with a run: logits and probabilities.

invdist score --run RUN --input PAIRS.csv [--output DIR] [--format parquet|csv|jsonl]

There is one row for each pair, in order.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from invdist.cli import arguments
from invdist.runtime.errors import exit_on_user_error

if TYPE_CHECKING:
    import pyarrow as pa

    from invdist.serving.inputs import FilePairs
    from invdist.serving.scoring import ScoreTables
    from invdist.serving.sharded.workers import Workers


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> int:
    """Scores pairs, and writes a folder or prints CSV."""
    from invdist.serving.output import FORMATS, check_free, table_writer, write_tables

    parser = argparse.ArgumentParser(prog="invdist score", description=__doc__)
    arguments.add_run(parser)
    parser.add_argument(
        "--input", nargs="+", required=True, metavar="PATH", help="CSV or parquet files of raw pairs, or their folder"
    )
    arguments.add_pairs(parser)
    arguments.add_tables(parser)
    parser.add_argument("--output", metavar="DIR", help="the new folder of scores (default: CSV on the terminal)")
    parser.add_argument("--format", choices=FORMATS, default="parquet", help="of the output (default: parquet)")
    args = parser.parse_intermixed_args(argv)
    inputs, overrides = arguments.split_inputs(args.input, args.overrides)

    from invdist.serving.inputs import FilePairs
    from invdist.serving.scoring import Scorer, ScoreTables

    if args.output:
        check_free(args.output)
    with arguments.opened(args, overrides) as (run, workers):
        source = FilePairs(inputs, args.user_column, args.item_column)
        scores = ScoreTables(Scorer.of(run, args.unknown))
        tables = scores.of(source) if workers is None else _on(workers, source, scores)
        if args.output:
            about = {"unknown": args.unknown, "prior": run.prior, "counts": scores.counts}
            write_tables(run, args.output, "scores", args.format, scores.schema, tables, about=lambda: about)
        else:
            with table_writer(sys.stdout.buffer, scores.schema, "csv") as writer:
                for table in tables:
                    writer.write_table(table)
            sys.stdout.flush()
    print(arguments.counts_text(scores.counts, args.unknown), file=sys.stderr)
    return 0


def _on(workers: Workers, source: FilePairs, scores: ScoreTables) -> Iterator[pa.Table]:
    from invdist.serving.sharded.jobs import score_on_workers

    return score_on_workers(workers, source, scores)
