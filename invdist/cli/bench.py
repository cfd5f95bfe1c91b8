"""`invdist bench NAME`: measures speed and memory, as ratios within one run."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import pkgutil
import sys
from collections.abc import Sequence

from invdist import bench as benchmarks
from invdist.runtime.errors import exit_on_user_error


def _names() -> list[str]:
    names = [module.name for module in pkgutil.iter_modules(benchmarks.__path__)]
    return sorted(name for name in names if not name.startswith("_"))


def _table(figures: dict[str, object]) -> str:
    width = max(map(len, figures), default=0)
    return "\n".join(
        f"{key:<{width}}  {value:.4g}" if isinstance(value, float) else f"{key:<{width}}  {value}"
        for key, value in figures.items()
    )


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> int:
    """Runs one benchmark and prints its figures, as a table or as JSON."""
    parser = argparse.ArgumentParser(prog="invdist bench", description=__doc__)
    commands = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    for name in _names():
        module = importlib.import_module(f"invdist.bench.{name}")
        summary = (module.__doc__ or name).strip().splitlines()[0]
        command = commands.add_parser(name, help=summary, description=module.__doc__)
        command.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    args = parser.parse_args(argv)
    # Ray prints about dead workers to standard output, where only JSON may go.
    with contextlib.redirect_stdout(sys.stderr) if args.json else contextlib.nullcontext():
        figures = args.run(args)
    print(json.dumps(figures) if args.json else _table(figures))
    return 0
