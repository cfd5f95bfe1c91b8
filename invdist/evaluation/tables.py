"""Tables of results as plain text, for the terminal."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from invdist.training.history import Event

METRICS = ("auc", "gauc", "ndcg", "mrr")


def metric_title(name: str, ndcg_k: int = 10) -> str:
    """The name of a metric as people write it: `NDCG@10` for `ndcg`."""
    titles = {
        "ndcg": f"NDCG@{ndcg_k}",
        "gauc_weighted": "GAUC (weighted)",
        "logloss": "log-loss",
        "users_left_out": "users left out",
    }
    return titles.get(name, name if name in ("rows", "users") else name.upper())


def directions_text(directions: Mapping[str, Any] | None) -> str:
    """`direct 12%  pass 30%  inverse 58%` of the steps that chose one, or a dash."""
    counts = {name: int((directions or {}).get(name) or 0) for name in ("direct", "pass", "inverse")}
    total = sum(counts.values())
    if not total:
        return "-"
    return "  ".join(f"{name} {100 * count / total:.0f}%" for name, count in counts.items())


def plain_table(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str | None = None) -> str:
    """A text table, as wide as it needs: the first column to the left, all others to the right."""
    table = Table(title=title, title_justify="left", title_style="", box=SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*[_plain(cell) for cell in row])
    out = io.StringIO()
    Console(file=out, width=1000, color_system=None, markup=False, emoji=False, highlight=False).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).strip("\n")


def final_table(events: Sequence[Event], ndcg_k: int = 10) -> str:
    """The result of a run for the end of its log: a line for validation and one for test."""
    final = next((event for event in reversed(events) if event.get("event") == "final"), None)
    if final is None:
        return "no result yet: the run has not finished"
    columns = ["method", "model", "rows of", *[metric_title(name, ndcg_k) for name in METRICS]]
    columns += ["best epoch", "rows/s", "directions"]
    rows = []
    for split in ("valid", "test"):
        metrics = final.get(split)
        if metrics:
            rows.append(
                [
                    str(final.get("method", "-")),
                    str(final.get("model", "-")),
                    split,
                    *[number(metrics.get(name)) for name in METRICS],
                    str(final["best_epoch"]) if final.get("best_epoch") is not None else "-",
                    count(final.get("rows_per_s")),
                    directions_text(final.get("directions")),
                ]
            )
    return plain_table(columns, rows)


def number(value: object, digits: int = 4) -> str:
    """A metric with fixed digits, or a dash for what was not measured."""
    return f"{value:.{digits}f}" if isinstance(value, int | float) and value == value else "-"


def count(value: object) -> str:
    """A whole number with thousands separated, or a dash."""
    return f"{value:,.0f}" if isinstance(value, int | float) and value == value else "-"


def _plain(cell: str) -> str:
    # Control characters in a name would reach the terminal.
    return "".join(letter if letter.isprintable() else "?" for letter in cell)
