"""Results as text: names of metrics, numbers, and tables for the terminal."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

METRICS = ("auc", "gauc", "ndcg", "mrr")
"""The metrics that every table shows, in this order."""

DIRECTIONS = ("direct", "pass", "inverse")


def metric_title(name: str, ndcg_k: int = 10) -> str:
    """The name of a metric as people write it: `NDCG@10` for `ndcg`."""
    titles = {
        "ndcg": f"NDCG@{ndcg_k}",
        "gauc_weighted": "GAUC (weighted)",
        "logloss": "log-loss",
        "auc_few": "AUC, <= 2 labels",
        "users_left_out": "users left out",
    }
    return titles.get(name, name if name in ("rows", "users") else name.upper())


def direction_shares(directions: Mapping[str, Any] | None) -> list[float]:
    """The share of direct, pass and inverse steps; empty if no step chose a direction."""
    counts = [int((directions or {}).get(name) or 0) for name in DIRECTIONS]
    return [count / sum(counts) for count in counts] if any(counts) else []


def directions_text(directions: Mapping[str, Any] | None) -> str:
    """`direct 12%  pass 30%  inverse 58%` of the steps that chose one, or a dash."""
    return "  ".join(f"{name} {share:.0%}" for name, share in zip(DIRECTIONS, direction_shares(directions))) or "-"


def plain_table(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str | None = None) -> str:
    """A text table, as wide as needed: the first column aligned left, the others right."""
    table = Table(title=title, title_justify="left", title_style="", box=SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*[_plain(cell) for cell in row])
    out = io.StringIO()
    Console(file=out, width=1000, color_system=None, markup=False, emoji=False, highlight=False).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).strip("\n")


def metrics_table(metrics: Mapping[str, Any], ndcg_k: int = 10) -> str:
    """All metrics of one split, a line each; a note follows if the AUC is an estimate."""
    rows = [
        [metric_title(name, ndcg_k), f"{value:,}" if isinstance(value, int) else number(value)]
        for name, value in metrics.items()
        if name != "auc_error_bound"
    ]
    return plain_table(["metric", "value"], rows) + _auc_note(metrics)


def final_table(events: Sequence[Mapping[str, Any]], ndcg_k: int = 10) -> str:
    """The result of a run, shown at its end: a line for validation and one for test, each with the means below it."""
    final = next((event for event in reversed(events) if event.get("event") == "final"), None)
    if final is None:
        return "no result yet: the run has not finished"
    titles = [metric_title(name, ndcg_k) for name in METRICS]
    columns = ["method", "model", "split", *titles, "best epoch", "rows/s", "directions"]
    rows = []
    for split in ("valid", "test"):
        if metrics := final.get(split):
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
        if metrics and (means := (final.get("means") or {}).get(split)):
            rows.append(["(means)", "-", split, *[number(means.get(name)) for name in METRICS], "-", "-", "-"])
    return plain_table(columns, rows) + _auc_note(final.get("valid"), final.get("test"))


def comparison_table(titles: Sequence[str], finals: Sequence[Mapping[str, Any]], ndcg_k: int = 10) -> str:
    """The results of runs on one data set, a line for each `final` event under its title, and the means below them.

    The test split is shown, or validation if a run left the test out.
    """
    split = "test" if all(final.get("test") for final in finals) else "valid"
    columns = ["trained with", *[f"{split} {metric_title(name, ndcg_k)}" for name in METRICS]]
    means = (finals[0].get("means") or {}).get(split)
    lines = [*zip(titles, [final[split] for final in finals]), *([("(means)", means)] if means else [])]
    return plain_table(columns, [[title, *[number(metrics.get(name)) for name in METRICS]] for title, metrics in lines])


def number(value: object, digits: int = 4) -> str:
    """A metric with fixed digits, or a dash if it was not measured."""
    return f"{value:.{digits}f}" if isinstance(value, int | float) and value == value else "-"


def count(value: object) -> str:
    """A whole number with thousands separated, or a dash."""
    return f"{value:,.0f}" if isinstance(value, int | float) and value == value else "-"


def duration(seconds: float) -> str:
    """Seconds for people: `3.2 s`, `4 min 05 s`, `2 h 10 min`."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def _auc_note(*splits: Mapping[str, Any] | None) -> str:
    # The bound is present only if there were too many rows for an exact AUC.
    bound = max((metrics or {}).get("auc_error_bound", 0.0) for metrics in splits)
    return f"\n\nAUC is estimated from a histogram of the scores, within {bound:.1g}." if bound else ""


def _plain(cell: str) -> str:
    # Control characters in a name must not reach the terminal.
    return "".join(character if character.isprintable() else "?" for character in cell)
