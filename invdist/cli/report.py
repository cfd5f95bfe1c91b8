"""`invdist report --run RUN`: one HTML file that shows a run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from invdist.report.figures import direction_timeline
from invdist.report.page import write_report
from invdist.report.pictures import check_picture, save_figure
from invdist.runtime.errors import UserError, exit_on_user_error
from invdist.training.history import History


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> int:
    """Writes the report of a run, finished or not, and prints its path."""
    parser = argparse.ArgumentParser(prog="invdist report", description=__doc__)
    parser.add_argument("--run", required=True, help="folder of the run")
    parser.add_argument("--compare", nargs="+", default=[], metavar="RUN", help="folders of runs to show beside it")
    parser.add_argument("--output", metavar="FILE", help="file to write (default: RUN/report.html)")
    parser.add_argument(
        "--directions",
        metavar="FILE",
        help="draw only the direction of every step, as .svg, .png or .html",
    )
    args = parser.parse_args(argv)
    if args.directions:
        path = check_picture(args.directions)
        history = History.read(args.run)
        figure = direction_timeline(history)
        if figure is None:
            raise UserError(f"{args.run}: no step of this run chose a direction (method {history.method})")
        save_figure(figure, path, width=900, height=380)
        print(path)
    else:
        print(write_report(args.run, args.compare, args.output))
    return 0
