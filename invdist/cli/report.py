"""`invdist report --run RUN`: one HTML file that shows what a run did."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from invdist.report.page import write_report
from invdist.runtime.errors import exit_on_user_error


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> int:
    """Writes the report of a run, finished or under way, and prints where it is."""
    parser = argparse.ArgumentParser(prog="invdist report", description=__doc__)
    parser.add_argument("--run", required=True, help="folder of the run")
    parser.add_argument("--compare", nargs="+", default=[], metavar="RUN", help="folders of runs to show beside it")
    parser.add_argument("--output", metavar="FILE", help="file to write (default: RUN/report.html)")
    args = parser.parse_args(argv)
    print(write_report(args.run, args.compare, args.output))
    return 0
