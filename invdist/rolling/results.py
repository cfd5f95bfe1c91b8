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
TABLE, PAGE, FIGURES = "results.md", "report.html", "results.json"


def write_results(roll: Roll, days: Sequence[Day], first: dict[str, float]) -> Path:
    """Writes `results.md`, `results.json` and `report.html` into the folder of the roll; gives the first."""
    table = markdown(roll, days, first)
    write_atomically(roll.folder / TABLE, table)
    write_atomically(roll.folder / FIGURES, json.dumps({"days": list(days), "summary": summary(roll, days)}, indent=1))
    plot = figure(roll, days).to_html(full_html=False, include_plotlyjs=True)
    title, text = html.escape(roll.name), html.escape(table)
    page = f"<!doctype html><meta charset=utf-8><title>{title}</title>{plot}<pre>{text}</pre>"
    write_atomically(roll.folder / PAGE, page)
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


def markdown(roll: Roll, days: Sequence[Day], first: dict[str, float]) -> str:
    """The table by day, and the means."""
    names = [ARMS[arm] for arm in roll.arms]
    lines = [
        f"# {roll.name}: next-day scores, {roll.first} to {roll.last}",
        "",
        f"Each day is scored before it is learned from. The first model (the history before {roll.first}) took "
        f"{_cost(first)}.",
        "",
        f"| day | rows | {' | '.join(f'{n}: AUC / GAUC / NDCG' for n in names)} | learning after it |",
        f"|---|---|{'---|' * (len(names) + 1)}",
    ]
    for day in days:
        cells = [_metrics(day["arms"][arm]["all"]) for arm in roll.arms]
        cost = "; ".join(f"{arm} {_cost(value)}" for arm, value in day.get("cost", {}).items()) or "-"
        best = f" (truth {_metrics(day['best possible']['all'])})" if day.get("best possible") else ""
        lines.append(f"| {day['day']} | {day['rows']:,}{best} | {' | '.join(cells)} | {cost} |")
    means = summary(roll, days)
    lines.append(f"| mean without the first day | | {' | '.join(_metrics(means[arm]) for arm in roll.arms)} | |")
    lines += ["", "| | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    for title, key in (("AUC of new users", "cold_users"), ("AUC of new items", "cold_items")):
        lines.append(f"| {title} | {' | '.join(_number(means[arm][key]) for arm in roll.arms)} |")
    for title, unit in (("seconds of learning a day", "seconds"), ("CPU seconds of it", "cpu_seconds")):
        lines.append(f"| {title} | {' | '.join(_number(means[arm][unit], 1) for arm in roll.arms)} |")
    if {"anew", "grown"} <= set(roll.arms):
        anew, grown = means["anew"], means["grown"]
        gap = (grown["auc"] or 0.0) - (anew["auc"] or 0.0)
        shares = [f"{b / a:.0%} of the {u}" for u in ("seconds", "cpu_seconds") if (a := anew[u]) and (b := grown[u])]
        lines += ["", f"Grown against anew: {gap:+.4f} AUC at {', '.join(shares)}."]
    return "\n".join(lines) + "\n"


def figure(roll: Roll, days: Sequence[Day]) -> go.Figure:
    """Next-day AUC by day and arm, and below it the seconds of learning."""
    found = make_subplots(rows=2, cols=1, shared_xaxes=True, subplot_titles=["Next-day AUC", "Seconds of learning"])
    for color, arm in zip(PALETTE, roll.arms):
        x, style = [day["day"] for day in days], {"name": ARMS[arm], "legendgroup": arm}
        auc = [day["arms"][arm]["all"].get("auc") for day in days]
        found.add_scatter(x=x, y=auc, line={"color": color}, **style, row=1, col=1)
        cost = [day.get("cost", {}).get(arm, {}).get("seconds") for day in days]
        found.add_bar(x=x, y=cost, marker={"color": color}, showlegend=False, **style, row=2, col=1)
    return found.update_layout(template="none", height=640, title=roll.name)


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
