"""`invdist bench NAME`: measures speed and memory, as ratios within one run."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import pkgutil
import sys
from collections.abc import Sequence
from pathlib import Path

from invdist import bench as benchmarks
from invdist.runtime.errors import exit_on_user_error


def _names() -> list[str]:
    names = [module.name for module in pkgutil.iter_modules(benchmarks.__path__)]
    return sorted(name for name in names if not name.startswith("_"))


def _flat(figures: dict[str, object], prefix: str = "") -> dict[str, object]:
    """Figures within figures by dotted names."""
    flat: dict[str, object] = {}
    for key, value in figures.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _table(figures: dict[str, object]) -> str:
    figures = _flat(figures)
    width = max(map(len, figures), default=0)
    return "\n".join(
        f"{key:<{width}}  {value:.4g}" if isinstance(value, float) else f"{key:<{width}}  {value}"
        for key, value in figures.items()
    )


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> int:
    """Runs one benchmark and prints its figures, as a table or as JSON; or all of them, for the page of benchmarks."""
    parser = argparse.ArgumentParser(prog="invdist bench", description=__doc__)
    parser.add_argument("--all", action="store_true", help="measure everything (about 15 minutes on a quiet machine)")
    parser.add_argument("--only", metavar="NAMES", help="with --all: only these, separated by commas")
    parser.add_argument("--recbole", metavar="DIR", help="with --all: compare with RecBole too, as in `bench peers`")
    parser.add_argument(
        "--report",
        nargs="?",
        const="docs",
        metavar="DIR",
        help="write benchmarks.md and its pictures into DIR (default: docs); without --all, of what was measured last",
    )
    commands = parser.add_subparsers(dest="name", metavar="NAME")
    for name in _names():
        module = importlib.import_module(f"invdist.bench.{name}")
        summary = (module.__doc__ or name).strip().splitlines()[0]
        command = commands.add_parser(name, help=summary, description=module.__doc__)
        command.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    args = parser.parse_args(argv)
    if args.name is None:
        return _several(args, parser)
    # Ray prints about dead workers to standard output, where only JSON may go.
    with contextlib.redirect_stdout(sys.stderr) if args.json else contextlib.nullcontext():
        figures = args.run(args)
    print(json.dumps(figures) if args.json else _table(figures))
    return 0


def _several(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from invdist.bench._all import measure, write_page

    if not args.all and not args.report:
        parser.error(f"expected a benchmark ({', '.join(_names())}), --all or --report")
    folder = Path(args.report or ".")
    if args.all:
        measure(folder, only=args.only.split(",") if args.only else None, recbole=args.recbole)
    if args.report:
        print(write_page(folder))
    return 0
