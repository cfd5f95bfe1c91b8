"""Writes the best items of each user over the whole catalogue, with the best checkpoint of a run.

invdist recommend --run RUN --k 10 --output DIR [--users FILE] [--format parquet|csv|jsonl]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from invdist.data.schema import SPLITS, TRAINING_LABELED
from invdist.runtime.errors import UserError, exit_on_user_error
from invdist.serving import options
from invdist.serving.formats import FORMATS


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> int:
    """Ranks, writes, and prints how many rows are where."""
    parser = argparse.ArgumentParser(prog="invdist recommend", description=__doc__)
    options.add_run(parser)
    parser.add_argument("--k", type=int, default=10, help="items per user (default: 10)")
    parser.add_argument("--users", metavar="FILE", help="CSV or parquet with the raw ids of users (default: all users)")
    parser.add_argument("--user-column", default="user", metavar="NAME", help="its column of user ids (default: user)")
    parser.add_argument(
        "--seen",
        nargs="+",
        choices=(*SPLITS, "nothing"),
        default=list(TRAINING_LABELED),
        help="leave out the items a user has in these splits (default: train training_test); nothing: rank them too",
    )
    parser.add_argument("--format", choices=FORMATS, default="parquet", help="of the output (default: parquet)")
    parser.add_argument("--output", required=True, metavar="DIR", help="the new folder of recommendations")
    args = parser.parse_intermixed_args(argv)

    from invdist.serving.opened import open_run
    from invdist.serving.output import check_free
    from invdist.serving.pairs import read_users
    from invdist.serving.recommending import recommendations, write_tables

    check_free(args.output)
    run = open_run(args.run, args.overrides)
    users, unknown = read_users(args.users, args.user_column, run.users) if args.users else (None, [])
    if unknown:
        told = f"{args.users}: {len(unknown):,} users are not in the run's data set, such as {unknown[0]!r}"
        if users is None or not len(users):
            raise UserError(f"{told}; none is left to recommend to")
        print(f"{told}; they are left out", file=sys.stderr)
    seen = [split for split in args.seen if split != "nothing"]
    schema, tables = recommendations(run, args.k, users, seen)
    line = options.Progress()
    manifest = write_tables(
        run,
        args.output,
        "recommendations",
        args.format,
        schema,
        tables,
        about=lambda: {"k": args.k, "seen_left_out": seen, "unknown_users": len(unknown)},
        progress=lambda rows: line(f"{rows:,} rows"),
    )
    print(f"{manifest['rows']:,} rows in {args.output}/{manifest['file']}")
    return 0
