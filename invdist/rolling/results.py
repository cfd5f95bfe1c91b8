"""The results of a roll: a table by day as Markdown, and a page with the table and a figure."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from invdist.report.figures import PALETTE
from invdist.rolling.spec import ARMS, Roll
from invdist.runtime.files import write_atomically

Day = dict[str, Any]
Table = list[list[str]]
"""Rows of cells; the first is the header."""
_HEAD = (
    "<!doctype html><meta charset=utf-8><meta http-equiv=Content-Security-Policy content=\"default-src 'none'; "
    "script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:\">"
    "<style>body{font:15px sans-serif;max-width:75em;margin:2em auto}table{border-collapse:collapse;margin:2em 0}"
    "td,th{padding:.3em .8em;text-align:left;border-bottom:1px solid #ddd}</style>"
)
TABLE, PAGE, FIGURES = "results.md", "report.html", "results.json"


def write_results(roll: Roll, days: Sequence[Day], first: dict[str, float]) -> Path:
    """Writes `results.md`, `results.json` and `report.html` into the folder of the roll; gives the first."""
    title, said = f"{roll.name}: next-day scores, {roll.first} to {roll.last}", introduction(roll, first)
    tables, end = [by_day(roll, days), cold_by_day(roll, days), means(roll, days)], conclusion(roll, days)
    text = "\n\n".join([f"# {title}", said, *map(_markdown, tables), *end])
    write_atomically(roll.folder / TABLE, text + "\n")
    write_atomically(roll.folder / FIGURES, json.dumps({"days": list(days), "summary": summary(roll, days)}, indent=1))
    plot = figure(roll, days).to_html(full_html=False, include_plotlyjs=True)
    parts = [f"<p>{html.escape(each)}</p>" for each in (said, *end)]
    page = [_HEAD, f"<title>{html.escape(roll.name)}</title><h1>{html.escape(title)}</h1>", *parts, plot]
    write_atomically(roll.folder / PAGE, "\n".join([*page, *map(_html, tables)]))
    return roll.folder / TABLE


def summary(roll: Roll, days: Sequence[Day]) -> dict[str, dict[str, float | None]]:
    """By arm the means over the days: next-day metrics, and seconds of learning.

    The first day is left out of the metrics: all arms have the same model then.
    """
    found: dict[str, dict[str, float | None]] = {}
    for arm in roll.arms:
        scores = [day["arms"][arm] for day in days[1:] or days]
        found[arm] = {name: _mean([score["all"].get(name) for score in scores]) for name in ("auc", "gauc", "ndcg")}
        for part in ("cold_users", "cold_items"):
            found[arm][part] = _mean([score[part].get("auc") for score in scores], [s[part]["rows"] for s in scores])
        for unit in ("seconds", "cpu_seconds"):
            found[arm][unit] = _mean([day.get("cost", {}).get(arm, {}).get(unit) for day in days])
    return found


def introduction(roll: Roll, first: dict[str, float]) -> str:
    """What the tables show, and what the first model cost."""
    return (
        f"Each day is scored before it is learned from. The first model (the history before {roll.first}) took "
        f"{_cost(first)}."
    )


def by_day(roll: Roll, days: Sequence[Day]) -> Table:
    """Metrics and costs of each day."""
    names = [ARMS[arm] for arm in roll.arms]
    found: Table = [["day", "rows", *(f"{name}: AUC / GAUC / NDCG" for name in names), "learning after it"]]
    for day in days:
        cells = [_metrics(day["arms"][arm]["all"]) for arm in roll.arms]
        cost = "; ".join(f"{arm} {_cost(value)}" for arm, value in day.get("cost", {}).items()) or "-"
        best = f" (truth {_metrics(day['best possible']['all'])})" if day.get("best possible") else ""
        found.append([_dates(day), f"{day['rows']:,}{best}", *cells, cost])
    mean = summary(roll, days)
    return [*found, ["mean without the first day", "", *(_metrics(mean[arm]) for arm in roll.arms), ""]]


def cold_by_day(roll: Roll, days: Sequence[Day]) -> Table:
    """The AUC of each day for users and for items that came on it; those that no model has seen."""
    parts = (("cold_users", "new users"), ("cold_items", "new items"))
    found: Table = [["day", *(f"{title}: {' / '.join(['rows', *roll.arms])}" for _, title in parts)]]
    for day in days:
        scores = [[day["arms"][arm][part] for arm in roll.arms] for part, _ in parts]
        cells = [[f"{of_arms[0]['rows']:,.0f}", *(_number(s.get("auc")) for s in of_arms)] for of_arms in scores]
        found.append([_dates(day), *(" / ".join(cell) for cell in cells)])
    return found


def means(roll: Roll, days: Sequence[Day]) -> Table:
    """What new users and items got on the mean of all rows, and what learning cost a day."""
    mean = summary(roll, days)
    rows = (
        ("AUC of new users", "cold_users", 4),
        ("AUC of new items", "cold_items", 4),
        ("seconds of learning a day", "seconds", 1),
        ("CPU seconds of it", "cpu_seconds", 1),
    )
    cells = [[title, *(_number(mean[arm][key], digits) for arm in roll.arms)] for title, key, digits in rows]
    return [["", *(ARMS[arm] for arm in roll.arms)], *cells]


def conclusion(roll: Roll, days: Sequence[Day]) -> list[str]:
    """The grown model against the one that was trained anew, if both are there."""
    if not {"anew", "grown"} <= set(roll.arms):
        return []
    anew, grown = (summary(roll, days)[arm] for arm in ("anew", "grown"))
    if anew["auc"] is None or grown["auc"] is None:
        return []
    units = (("seconds", "seconds"), ("cpu_seconds", "CPU seconds"))
    shares = [f"{b / a:.0%} of the {name}" for unit, name in units if (a := anew[unit]) and (b := grown[unit])]
    cost = f" at {', '.join(shares)}" if shares else ""
    return [f"Grown against anew: {grown['auc'] - anew['auc']:+.4f} AUC{cost}."]


def figure(roll: Roll, days: Sequence[Day]) -> go.Figure:
    """By day and arm: next-day AUC of all rows, of new users and of new items; below it what learning cost."""
    parts = {"all": "Next-day AUC", "cold_users": "of new users", "cold_items": "of new items"}
    costs = [cost for day in days for cost in day.get("cost", {}).values()]
    unit, title = ("seconds", "Seconds of learning")
    if costs and all("cpu_seconds" in cost for cost in costs):
        unit, title = ("cpu_seconds", "CPU seconds of learning")
    found = make_subplots(rows=4, cols=1, shared_xaxes=True, subplot_titles=[*parts.values(), title])
    for color, arm in zip(PALETTE, roll.arms):
        x, style = [day["day"] for day in days], {"name": ARMS[arm], "legendgroup": arm}
        for row, part in enumerate(parts, 1):
            auc = [day["arms"][arm][part].get("auc") for day in days]
            found.add_scatter(x=x, y=auc, line={"color": color}, showlegend=row == 1, **style, row=row, col=1)
        cost = [day.get("cost", {}).get(arm, {}).get(unit) for day in days]
        found.add_bar(x=x, y=cost, marker={"color": color}, showlegend=False, **style, row=4, col=1)
    return found.update_layout(template="none", height=1000)


def _markdown(table: Table) -> str:
    lines = [f"| {' | '.join(row)} |" for row in table]
    return "\n".join([lines[0], f"|{'---|' * len(table[0])}", *lines[1:]])


def _html(table: Table) -> str:
    def row(cells: Sequence[str], kind: str) -> str:
        return f"<tr>{''.join(f'<{kind}>{html.escape(cell)}' for cell in cells)}"

    return f"<table>{row(table[0], 'th')}{''.join(row(cells, 'td') for cells in table[1:])}</table>"


def _dates(day: Day) -> str:
    since = day.get("since", day["day"])  # rolls of before do not say
    return day["day"] if since == day["day"] else f"{since} to {day['day']}"


def _metrics(found: dict[str, Any]) -> str:
    return " / ".join(_number(found.get(name)) for name in ("auc", "gauc", "ndcg"))


def _cost(cost: dict[str, float]) -> str:
    cpu = f" ({cost['cpu_seconds']:.1f} CPU)" if "cpu_seconds" in cost else ""
    return f"{cost['seconds']:.1f} s{cpu}" if cost else "-"


def _number(value: float | None, digits: int = 4) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _mean(values: Sequence[float | None], weights: Sequence[float] | None = None) -> float | None:
    pairs = [(v, w) for v, w in zip(values, weights or [1.0] * len(values)) if v is not None]
    total = sum(w for _, w in pairs)
    return sum(v * w for v, w in pairs) / total if total else None
