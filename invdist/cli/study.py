"""Compares strategies on the same data: equally tuned on Ray Tune, selected on validation, tested once per seed.

invdist study --config configs/study/ml1m-sparse.yaml [key=value ...]
invdist study --config configs/study/ml1m-sparse.yaml --resume
invdist study --config configs/study/ml1m-sparse.yaml --data data/mine name=mine
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence

from invdist.runtime.errors import exit_on_user_error
from invdist.runtime.install import check_stack


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> int:
    """Checks everything, runs the study and prints its tables; 0 when done, 130 when interrupted."""
    args = _parser().parse_intermixed_args(argv)
    check_stack()
    from invdist.study import run as running
    from invdist.study.spec import load

    study = load(args.config, args.overrides, only=args.table, data=args.data)
    planned = running.check(study, resume=args.resume or args.report or args.plan)
    if args.plan:
        print("\n".join(running.plan(planned, study)))
        return 0
    given = [word for word in (sys.argv[1:] if argv is None else argv) if word not in ("--resume", "--report")]
    command = shlex.join(["python", "-m", "invdist", "study", *given])
    if args.report:
        print(running.rewrite(study, command=command).read_text())
        return 0
    from invdist.training.ray_backend import connected

    with connected(running.cpus(study)):
        from invdist.study.tuning import Interrupted

        try:
            path = running.run(study, resume=args.resume, command=command)
        except (Interrupted, KeyboardInterrupt):
            print(f"interrupted; finished trials are kept. Continue with: {command} --resume", file=sys.stderr)
            return 130
    print(f"\n{path.read_text()}\nresults: {path}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="invdist study", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="YAML file of the study")
    parser.add_argument(
        "--resume", action="store_true", help="continue a study: trials that have a result are not run again"
    )
    parser.add_argument(
        "--table", action="append", metavar="NAME", help="only this table of the study; may be repeated"
    )
    parser.add_argument("--data", metavar="PATH", help="run the study's first table on this prepared data set instead")
    parser.add_argument("--plan", action="store_true", help="check everything, show the trials, and stop")
    parser.add_argument("--report", action="store_true", help="write the results of the trials run so far, and stop")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that override the file")
    from invdist.config.fields import describe
    from invdist.study.spec import Study

    parser.epilog = f"keys of a study:\n\n{describe(Study)}"
    return parser
