"""Arguments that the commands over a trained run share, and the lines that they all print."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from invdist.runtime.errors import UserError

if TYPE_CHECKING:
    from invdist.serving.run import TrainedRun
    from invdist.serving.sharded.workers import Workers


def add_run(parser: argparse.ArgumentParser) -> None:
    """`--run`, `--checkpoint` and `key=value` overrides."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--run", required=True, help="folder of the run")
    parser.add_argument(
        "--checkpoint",
        default="best",
        metavar="best|last|STEP",
        help="which checkpoint to use: the best on validation rows (the default), the last, or that of a step",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, such as a moved data.path")


def add_tables(parser: argparse.ArgumentParser, *, workers: bool = True, whole_on_ray: bool = False) -> None:
    """`--tables` and `--workers`: whether this process holds the tables, or Ray workers a slice each.

    Without `workers` this process reads slices one after the other.
    """
    parser.add_argument(
        "--tables",
        choices=("auto", "whole", "sharded"),
        default="auto",
        help=f"whole: every process has the whole tables; sharded: {'each Ray worker has' if workers else 'only'} a "
        "slice at a time; auto (the default): whole if they take at most half of the memory that is free here",
    )
    if not workers:
        return
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="processes on Ray (default: all CPUs); 0: here, without Ray"
        if whole_on_ray
        else "sharded tables on N Ray workers (default: all CPUs, if the tables are sharded); 0: here, without Ray",
    )


@contextmanager
def opened(
    args: argparse.Namespace, overrides: list[str] | None = None, *, whole_on_ray: bool = False
) -> Iterator[tuple[TrainedRun, Workers | None]]:
    """The run that `add_run` and `add_tables` asked for, and the workers that hold it if its tables are sharded.

    What was chosen is printed to stderr. With `whole_on_ray` workers do not mean that the tables are sharded.
    """
    from invdist.serving.sharded.choice import sharded

    if args.workers is not None and args.workers < 0:
        raise UserError(f"--workers {args.workers}: expected 0 or more")
    run, whole = found(args, overrides, args.workers, whole_on_ray=whole_on_ray, load=True)
    if whole:
        yield run, None
        return
    with sharded(run, args.workers) as workers:
        yield workers.run, workers


def open_run(args: argparse.Namespace, overrides: list[str] | None = None) -> TrainedRun:
    """Opens the run that `add_run` asked for with whole tables, and prints its checkpoint to stderr."""
    from invdist.serving.run import find_run, loaded

    run = loaded(find_run(args.run, args.overrides if overrides is None else overrides, args.checkpoint))
    _print_checkpoint(run)
    return run


def found(
    args: argparse.Namespace,
    overrides: list[str] | None = None,
    workers: int | None = None,
    *,
    whole_on_ray: bool = False,
    load: bool = False,
) -> tuple[TrainedRun, bool]:
    """The run that was asked for, and whether its tables should be whole; both are printed to stderr.

    With `load` whole tables are read before anything is printed: the first line about a damaged one is its error.
    """
    from invdist.serving.run import find_run, loaded
    from invdist.serving.sharded.choice import choose

    run = find_run(args.run, args.overrides if overrides is None else overrides, args.checkpoint)
    chosen, why = choose(run, args.tables, workers, whole_on_ray=whole_on_ray)
    if load and chosen == "whole":
        run = loaded(run)
    _print_checkpoint(run)
    print(f"tables: {chosen} ({why})", file=sys.stderr, flush=True)
    return run, chosen == "whole"


def _print_checkpoint(run: TrainedRun) -> None:
    about = run.about_checkpoint()
    metric = run.config.training.metric
    measured = "" if about[metric] is None else f", validation {metric} {about[metric]:.4f}"
    print(f"checkpoint: {run.checkpoint.path} (epoch {about['epoch']}{measured})", file=sys.stderr, flush=True)


def add_pairs(parser: argparse.ArgumentParser) -> None:
    """The columns of the user and the item in an input, and what to do about those the run does not know."""
    parser.add_argument("--user-column", default="user", metavar="NAME", help="column of raw user ids (default: user)")
    parser.add_argument("--item-column", default="item", metavar="NAME", help="column of raw item ids (default: item)")
    parser.add_argument(
        "--unknown",
        choices=("null", "prior", "drop"),
        default="null",
        help="pairs whose user or item the run's data set does not have: a row without a score (null, the default), "
        "a row with the log-odds of the training labels as its score (prior), or no row (drop)",
    )


def split_inputs(given: list[str], overrides: list[str]) -> tuple[list[str], list[str]]:
    """(inputs, overrides): to argparse `--input a.csv data.path=D` is one list."""
    inputs = [value for value in given if "=" not in value.partition("://")[0] or Path(value).exists()]
    return inputs, [value for value in given if value not in inputs] + overrides


def counts_text(counts: Mapping[str, int], unknown: str) -> str:
    """The rows of an input by what was wrong with them, as a sentence."""
    rows, unreadable, users, items = (
        counts.get(name, 0) for name in ("rows", "unreadable", "unknown_users", "unknown_items")
    )
    parts = [f"{rows:,} pairs"]
    if users or items:
        parts.append(f"{users:,} with an unknown user and {items:,} with an unknown item")
    if unreadable:
        parts.append(f"{unreadable:,} without a usable id")
    done = {"null": "without a score", "prior": "scored by the prior", "drop": "left out"}[unknown]
    return "; ".join(parts) + (f" ({done})" if len(parts) > 1 else "")
