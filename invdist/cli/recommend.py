"""Writes the best items of each user over the whole catalogue of a run.

invdist recommend --run RUN --k 10 --output DIR [--users FILE] [--format parquet|csv|jsonl]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from invdist.cli import arguments
from invdist.data.schema import SPLITS, TRAINING_LABELED
from invdist.runtime.errors import UserError, exit_on_user_error

if TYPE_CHECKING:
    from invdist.serving.recommendation import Ranked
    from invdist.serving.sharded.workers import Workers


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> int:
    """Ranks items, writes them, and prints how many rows are in which file."""
    from invdist.serving.output import FORMATS, check_free, write_tables

    parser = argparse.ArgumentParser(prog="invdist recommend", description=__doc__)
    arguments.add_run(parser)
    parser.add_argument("--k", type=int, default=10, help="items per user (default: 10)")
    parser.add_argument("--users", metavar="FILE", help="CSV or parquet with the raw ids of users (default: all users)")
    parser.add_argument("--user-column", default="user", metavar="NAME", help="its column of user ids (default: user)")
    parser.add_argument(
        "--unknown",
        choices=("null", "drop"),
        default="null",
        help="users of FILE that the run's data set does not have: one row without an item (null, the default), or "
        "no row (drop)",
    )
    parser.add_argument(
        "--seen",
        nargs="+",
        choices=(*SPLITS, "nothing"),
        default=list(TRAINING_LABELED),
        help="leave out the items a user has in these splits (default: train training_test); nothing: rank them too",
    )
    parser.add_argument("--format", choices=FORMATS, default="parquet", help="of the output (default: parquet)")
    arguments.add_tables(parser)
    parser.add_argument("--output", required=True, metavar="DIR", help="the new folder of recommendations")
    args = parser.parse_intermixed_args(argv)

    from invdist.runtime.progress import ProgressLine
    from invdist.serving.inputs import read_users
    from invdist.serving.recommendation import AskedUsers, recommendations

    check_free(args.output)
    with arguments.opened(args) as (run, workers):
        users = AskedUsers(read_users(args.users, args.user_column), run.users) if args.users else None
        unknown = users.unknown if users else []
        if users and unknown:
            found = f"{args.users}: {len(unknown):,} users are not in the run's data set, such as {unknown[0]!r}"
            if args.unknown == "drop" and not len(users.known):
                raise UserError(f"{found}; none is left to recommend to")
            print(f"{found} ({'left out' if args.unknown == 'drop' else 'without an item'})", file=sys.stderr)
        seen = [split for split in args.seen if split != "nothing"]
        schema, tables = recommendations(run, args.k, users, seen, args.unknown, _ranked(workers))
        with ProgressLine() as line:
            manifest = write_tables(
                run,
                args.output,
                "recommendations",
                args.format,
                schema,
                tables,
                about=lambda: {
                    "k": args.k,
                    "seen_left_out": seen,
                    "unknown": args.unknown,
                    "unknown_users": len(unknown),
                },
                progress=lambda rows: line.show(f"wrote {rows:,} rows"),
            )
    print(f"{manifest['rows']:,} rows in {args.output}/{manifest['file']}")
    return 0


def _ranked(workers: Workers | None) -> Ranked | None:
    """Ranks on the workers that hold the run; None: here."""
    if workers is None:
        return None
    from invdist.serving.sharded.jobs import best_on_workers

    return partial(best_on_workers, workers)
