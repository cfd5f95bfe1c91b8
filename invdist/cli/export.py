"""Exports a run: tensors, a card, and a program that scores pairs without invdist.

invdist export --run RUN [--output DIR]

With --tables sharded tables are copied piece by piece, and the program takes rows instead of indices.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from invdist.cli import arguments
from invdist.runtime.errors import exit_on_user_error


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> int:
    """Exports, and prints the files with their sizes."""
    parser = argparse.ArgumentParser(prog="invdist export", description=__doc__)
    arguments.add_run(parser)
    arguments.add_tables(parser, workers=False)
    parser.add_argument("--output", metavar="DIR", help="the new folder (default: RUN/export)")
    args = parser.parse_intermixed_args(argv)
    output = args.output or f"{args.run.rstrip('/')}/export"

    from invdist.serving.export import export
    from invdist.serving.output import check_free

    check_free(output)
    run, whole = arguments.found(args)
    card = export(run, output, whole=whole)
    for name, entry in card["files"].items():
        print(f"{entry['bytes']:>14,}  {output}/{name}")
    print(f"{output}/card.json")
    return 0
