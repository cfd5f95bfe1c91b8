"""Rolls over the days of a feed: each day is scored before anything is learned from it, then models learn.

invdist roll --config configs/roll/kuairand.yaml [key=value ...]

Compared are models trained anew each day, one that grows, and one that is never updated. A roll that was stopped goes
on where it was when it is started again.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence

from invdist.runtime.errors import exit_on_user_error
from invdist.runtime.install import check_stack


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> int:
    """Runs a roll and prints its table; 0 when done, 130 when interrupted."""
    args = _parser().parse_intermixed_args(argv)
    check_stack()
    from invdist.rolling.spec import load

    roll = load(args.config, args.overrides)
    roll.check_parts()
    config = roll.config("first", roll.history)
    from invdist.rolling.run import run
    from invdist.training.ray_backend import connected

    with connected(config.ray.ranks + 1) if config.ray.ranks > 1 else contextlib.nullcontext():
        try:
            path = run(roll)
        except KeyboardInterrupt:
            print("interrupted; finished days are kept. The same command goes on", file=sys.stderr)
            return 130
    print(f"\n{path.read_text()}\nresults: {path}")
    return 0


def _parser() -> argparse.ArgumentParser:
    from invdist.config.fields import describe
    from invdist.rolling.spec import Roll

    parser = argparse.ArgumentParser(
        prog="invdist roll", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="YAML file of the roll")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="keys that override the file")
    parser.epilog = f"keys of a roll:\n\n{describe(Roll)}"
    return parser
