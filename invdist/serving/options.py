"""Arguments that the commands over a trained run share, and their progress lines."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from invdist.serving.pairs import COUNTS


def add_run(parser: argparse.ArgumentParser) -> None:
    """`--run` and `key=value` overrides."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--run", required=True, help="folder of the run")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, such as a moved data.path")


def add_pairs(parser: argparse.ArgumentParser) -> None:
    """Where the user and the item stand in an input, and what to do about those the run does not know."""
    parser.add_argument("--user-column", default="user", metavar="NAME", help="column of raw user ids (default: user)")
    parser.add_argument("--item-column", default="item", metavar="NAME", help="column of raw item ids (default: item)")
    parser.add_argument(
        "--unknown",
        choices=("drop", "prior"),
        default="drop",
        help="pairs whose user or item the run's data set does not have: leave them out (the default), or score them "
        "all with the log-odds of its training labels and mark them in a column `known`",
    )


def separate(given: list[str], overrides: list[str]) -> tuple[list[str], list[str]]:
    """`--input a.csv data.path=D` is one list to argparse: (inputs, overrides)."""
    inputs = [value for value in given if "=" not in value or Path(value).exists()]
    return inputs, [value for value in given if value not in inputs] + overrides


def counts_text(counts: Mapping[str, int], unknown: str) -> str:
    """What was met in an input, in words."""
    rows, unreadable, users, items = (counts.get(name, 0) for name in COUNTS)
    done = "left out" if unknown == "drop" else "scored by the prior"
    parts = [f"{rows:,} pairs"]
    if users or items:
        parts.append(f"{users:,} with an unknown user and {items:,} with an unknown item ({done})")
    if unreadable:
        parts.append(f"{unreadable:,} without a usable id (left out)")
    return "; ".join(parts)


class Progress:
    """A line on stderr, at most every few seconds."""

    def __init__(self, every: float = 5.0) -> None:
        self._every, self._last = every, time.monotonic()

    def __call__(self, text: str) -> None:
        now = time.monotonic()
        if now - self._last >= self._every:
            self._last = now
            print(text, file=sys.stderr, flush=True)
