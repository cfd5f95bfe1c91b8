"""Figures of a study: metrics with their spread, curves over a compared setting, which way the updates went."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from invdist.evaluation.tables import METRICS, metric_title
from invdist.report.figures import DIRECTIONS, PALETTE
from invdist.study.results import Row
from invdist.study.spec import FLOOR


def write(folder: Path, name: str, rows: Sequence[Row], k: int) -> list[Path]:
    """Writes the figures that the rows of a table give, as HTML that needs no network; gives their paths."""
    figures = {"metrics": metric_bars(rows, k), "compared": compared_curve(rows, k), "directions": directions(rows)}
    written = []
    for kind, figure in figures.items():
        if figure is not None:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"{name}-{kind}.html"
            figure.update_layout(template="none", title=f"{name}: {kind}")
            figure.write_html(path, include_plotlyjs="directory")
            written.append(path)
    return written


def metric_bars(rows: Sequence[Row], k: int) -> go.Figure | None:
    """One panel per test metric: a bar per strategy and backbone, with the deviation over seeds."""
    shown = [row for row in rows if row.runs]
    if not shown:
        return None
    figure = make_subplots(rows=2, cols=2, subplot_titles=[metric_title(name, k) for name in METRICS])
    backbones = list(dict.fromkeys(row.case.backbone for row in shown))
    for place, name in enumerate(METRICS):
        low = min((s.mean for row in shown if (s := row.spread(name))), default=0.0)
        for color, backbone in zip(PALETTE, backbones):
            group = [(row, s) for row in shown if row.case.backbone == backbone and (s := row.spread(name))]
            figure.add_bar(
                x=[row.case.label for row, _ in group],
                y=[s.mean for _, s in group],
                error_y={"type": "data", "array": [s.deviation or 0.0 for _, s in group]},
                name=backbone,
                legendgroup=backbone,
                showlegend=place == 0,
                marker={"color": color},
                row=place // 2 + 1,
                col=place % 2 + 1,
            )
        # Bars from zero would hide differences that matter: they start below the lowest.
        figure.update_yaxes(range=[max(0.0, low - 0.05), None], row=place // 2 + 1, col=place % 2 + 1)
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
            figure.add_scatter(
                x=[x for x, _ in points],
                y=[s.mean for _, s in points],
                error_y={"type": "data", "array": [s.deviation or 0.0 for _, s in points]},
                name=f"{strategy} on {model}, {metric_title(name, k)}",
                line={"color": color, "dash": dash},
            )
    for row in rows:
        if row.case.strategy == FLOOR and (s := row.spread("auc")):
            figure.add_hline(y=s.mean, line={"dash": "dash", "color": "#7F7F7F"}, annotation_text=f"{FLOOR}, AUC")
    figure.update_xaxes(type="category", title=varied[0].case.variant[0][0])
    return figure.update_layout(height=480)


def directions(rows: Sequence[Row]) -> go.Figure | None:
    """The share of direct, pass and inverse steps by epoch, over the seeds of each row that chose directions."""
    chosen = [(row, row.directions_by_epoch()) for row in rows if row.directions]
    if not chosen:
        return None
    figure = make_subplots(
        rows=len(chosen), cols=1, shared_xaxes=False, subplot_titles=[_name(row) for row, _ in chosen]
    )
    for place, (_, steps) in enumerate(chosen, 1):
        for name, (color, _) in DIRECTIONS.items():
            figure.add_bar(
                x=list(steps),
                y=[counts[name] / counts.total() for counts in steps.values()],
                name=name,
                legendgroup=name,
                showlegend=place == 1,
                marker={"color": color},
                row=place,
                col=1,
            )
    return figure.update_layout(barmode="stack", height=180 + 160 * len(chosen), bargap=0.05)


def _name(row: Row) -> str:
    return f"{row.case.label} on {row.case.backbone}"
