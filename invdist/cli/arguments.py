"""Arguments that the commands over a trained run share, and the lines that they all print."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from invdist.serving.run import TrainedRun


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


def open_run(args: argparse.Namespace, overrides: list[str] | None = None) -> TrainedRun:
    """Opens the run that `add_run` asked for, and prints its checkpoint to stderr."""
    from invdist.serving import run as runs

    run = runs.open_run(args.run, args.overrides if overrides is None else overrides, args.checkpoint)
    about = run.about_checkpoint()
    metric = run.config.training.metric
    measured = "" if about[metric] is None else f", validation {metric} {about[metric]:.4f}"
    print(f"checkpoint: {run.checkpoint.path} (epoch {about['epoch']}{measured})", file=sys.stderr, flush=True)
    return run


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
    inputs = [value for value in given if "=" not in value or Path(value).exists()]
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
