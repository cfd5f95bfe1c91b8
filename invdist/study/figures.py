"""Figures of a study: metrics with their spread, curves over a compared setting, directions by epoch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from invdist.evaluation.tables import METRICS, metric_title
from invdist.report.figures import PALETTE, add_direction_bars
from invdist.study.results import Row
from invdist.study.spec import FLOOR
from invdist.study.statistics import Spread


def write(folder: Path, name: str, rows: Sequence[Row], k: int) -> None:
    """Writes the figures of a table into `folder`, as HTML that loads nothing from a network."""
    figures = {"metrics": metric_bars(rows, k), "compared": compared_curve(rows, k), "directions": directions(rows)}
    for kind, figure in figures.items():
        if figure is not None:
            folder.mkdir(parents=True, exist_ok=True)
            figure.update_layout(template="none", title=f"{name}: {kind}")
            figure.write_html(folder / f"{name}-{kind}.html", include_plotlyjs="directory")


def metric_bars(rows: Sequence[Row], k: int) -> go.Figure | None:
    """One panel per test metric: a bar per strategy and backbone, with the deviation over seeds."""
    shown = [row for row in rows if row.runs]
    if not shown:
        return None
    figure = make_subplots(rows=2, cols=2, subplot_titles=[metric_title(name, k) for name in METRICS])
    backbones = list(dict.fromkeys(row.case.backbone for row in shown))
    for place, name in enumerate(METRICS):
        panel: dict[str, Any] = {"row": place // 2 + 1, "col": place % 2 + 1}
        for color, backbone in zip(PALETTE, backbones):
            points = [(r.case.label, s) for r in shown if r.case.backbone == backbone and (s := r.spread(name))]
            legend = {"legendgroup": backbone, "showlegend": place == 0}
            figure.add_bar(**_points(points), name=backbone, marker={"color": color}, **legend, **panel)
        # Bars from zero would hide differences that matter: they start a little below the lowest.
        low = min((s.mean for row in shown if (s := row.spread(name))), default=0.0)
        figure.update_yaxes(range=[max(0.0, low - 0.05), None], **panel)
    return figure.update_layout(height=760, barmode="group")


def compared_curve(rows: Sequence[Row], k: int) -> go.Figure | None:
    """Test metrics over the values of the one compared setting; the floor is a dashed line."""
    varied = [row for row in rows if len(row.case.variant) == 1 and row.runs]
    if len(varied) < 2:
        return None
    figure = go.Figure()
    lines = dict.fromkeys((row.case.strategy, row.case.model) for row in varied)
    for color, (strategy, model) in zip(PALETTE, lines):
        group = [row for row in varied if (row.case.strategy, row.case.model) == (strategy, model)]
        for dash, name in zip(("solid", "dot"), ("auc", "gauc")):
            points = [(str(row.case.variant[0][1]), s) for row in group if (s := row.spread(name))]
            title = f"{strategy} on {model}, {metric_title(name, k)}"
            figure.add_scatter(**_points(points), name=title, line={"color": color, "dash": dash})
    for row in rows:
        if row.case.strategy == FLOOR and (s := row.spread("auc")):
            figure.add_hline(y=s.mean, line={"dash": "dash", "color": "#7F7F7F"}, annotation_text=f"{FLOOR}, AUC")
    figure.update_xaxes(type="category", title=varied[0].case.variant[0][0])
    return figure.update_layout(height=480)


def directions(rows: Sequence[Row]) -> go.Figure | None:
    """The share of direct, pass and inverse steps by epoch, over the seeds of each row that chose directions."""
    directed = [(row, row.directions_by_epoch()) for row in rows if row.directions]
    if not directed:
        return None
    figure = make_subplots(rows=len(directed), cols=1, subplot_titles=[row.title for row, _ in directed])
    for place, (_, steps) in enumerate(directed, 1):
        shares = {epoch: {n: c / counts.total() for n, c in counts.items()} for epoch, counts in steps.items()}
        add_direction_bars(figure, shares, showlegend=place == 1, row=place, col=1)
    return figure.update_layout(height=180 + 160 * len(directed), bargap=0.05)


def _points(points: Sequence[tuple[str, Spread]]) -> dict[str, Any]:
    return {
        "x": [x for x, _ in points],
        "y": [spread.mean for _, spread in points],
        "error_y": {"type": "data", "array": [spread.deviation or 0.0 for _, spread in points]},
    }
