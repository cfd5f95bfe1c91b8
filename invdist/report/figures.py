"""Figures of a run as plotly objects: for the report, for notebooks.

Every function takes `History` objects and gives a `plotly.graph_objects.Figure`, or None where the run has
nothing to show. Text that comes from a run is escaped, since plotly reads markup in labels.
"""

from __future__ import annotations

import html
import itertools
from collections.abc import Sequence
from typing import Any, cast

import plotly.graph_objects as go

from invdist.evaluation.tables import METRICS, metric_title
from invdist.learning.directions import direction_name
from invdist.training.history import Event, History

MAX_POINTS = 3000
"""More points than this in one series are thinned evenly: a browser draws them as one SVG path each."""

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31", "#7F7F7F")
"""Told apart by colour-blind readers too (Okabe and Ito), and dark enough on white, light enough on black."""

DIRECTIONS = {
    "direct": ("#0072B2", "triangle-down"),
    "pass": ("#8A8A8A", "circle"),
    "inverse": ("#D55E00", "triangle-up"),
}

_LEGEND_NAME = 28

_TIME_PARTS = ("stream", "exchange", "pull", "step", "candidates", "commit", "checkpoint", "evaluate")


def thin(rows: Sequence[Any], limit: int = MAX_POINTS) -> tuple[list[Any], int]:
    """Every n-th row, with the smallest n that leaves at most `limit`; gives the rows and n."""
    stride = max(1, -(-len(rows) // limit))
    return list(rows[::stride]), stride


def loss_curve(histories: Sequence[History]) -> go.Figure | None:
    """Training loss of each logged step, one line per run and phase."""
    figure = go.Figure()
    for history in histories:
        by_phase: dict[str, list[Event]] = {}
        for step in history.steps:
            by_phase.setdefault(str(step.get("phase", "")), []).append(step)
        for phase, steps in by_phase.items():
            shown, _ = thin(steps)
            label = f"phase {phase}" if phase.isdigit() else phase
            figure.add_scatter(
                x=[step["global_step"] for step in shown],
                y=[step["loss"] for step in shown],
                mode="lines" if len(shown) > 1 else "markers",
                name=_label(history, histories, label or "loss"),
                line={"width": 1.4, "color": PALETTE[len(_traces(figure)) % len(PALETTE)]},
                hovertemplate="step %{x:,}<br>loss %{y:.5f}<extra>%{fullData.name}</extra>",
            )
    return _finish(figure, x="step", y="training loss")


def metric_curves(histories: Sequence[History], names: Sequence[str] = METRICS) -> go.Figure | None:
    """Validation metrics by epoch. Several runs: a colour per run, a line style per metric, all but the first
    metric switched on in the legend."""
    figure = go.Figure()
    styles = ("solid", "dash", "dot", "dashdot")
    for run, history in enumerate(histories):
        for place, name in enumerate(names):
            points = [
                (event["epoch"], event["valid"][name])
                for event in history.epochs
                if isinstance((event.get("valid") or {}).get(name), int | float)
            ]
            if points:
                several = len(histories) > 1
                figure.add_scatter(
                    x=[epoch for epoch, _ in points],
                    y=[value for _, value in points],
                    mode="lines+markers",
                    name=_label(history, histories, metric_title(name, history.ndcg_k)),
                    visible="legendonly" if several and place else True,
                    line={
                        "width": 2,
                        "color": PALETTE[(run if several else place) % len(PALETTE)],
                        "dash": styles[place % len(styles)] if several else "solid",
                    },
                    hovertemplate="epoch %{x}<br>%{y:.4f}<extra>%{fullData.name}</extra>",
                )
    return _finish(figure, x="epoch", y="validation", whole_x=True)


def direction_timeline(history: History) -> go.Figure | None:
    """Training-test loss of every inverse-gradient step, marked by the direction it took."""
    shown, _ = thin(history.direction_steps)
    figure = go.Figure()
    for name, (color, symbol) in DIRECTIONS.items():
        steps = [step for step in shown if direction_name(step["direction"]) == name]
        if steps:
            figure.add_scatter(
                x=[step["global_step"] for step in steps],
                y=[chosen_loss(step) for step in steps],
                customdata=[[step["epoch"], step["direction"], _candidates_text(step)] for step in steps],
                mode="markers",
                name=name,
                marker={"color": color, "symbol": symbol, "size": 7, "opacity": 0.75},
                hovertemplate=(
                    "epoch %{customdata[0]}, step %{x:,}<br>loss %{y:.5f}, multiplier %{customdata[1]}"
                    "%{customdata[2]}<extra>" + name + "</extra>"
                ),
            )
    return _finish(figure, x="step", y="training-test loss")


def direction_counts(history: History) -> go.Figure | None:
    """How many steps of each epoch went each way."""
    epochs = [event for event in history.epochs if any((event.get("directions") or {}).values())]
    figure = go.Figure()
    for name, (color, _) in DIRECTIONS.items():
        if epochs:
            figure.add_bar(
                x=[event["epoch"] for event in epochs],
                y=[event["directions"].get(name, 0) for event in epochs],
                name=name,
                marker={"color": color},
                hovertemplate="epoch %{x}<br>%{y:,} steps<extra>" + name + "</extra>",
            )
    figure.update_layout(barmode="stack")
    return _finish(figure, x="epoch", y="steps", whole_x=True)


def annotation_histograms(history: History, weight: str = "w1") -> go.Figure | None:
    """Annotations (`w1`: how positive, `w0`: how negative) of unlabeled rows: first epoch against last."""
    epochs = [event for event in history.epochs if (event.get("annotations") or {}).get(weight)]
    figure = go.Figure()
    for event, color in zip(dict.fromkeys((0, len(epochs) - 1)), (PALETTE[4], PALETTE[0]), strict=False):
        if epochs:
            found = epochs[event]["annotations"]
            edges, counts = found["edges"], found[weight]
            total = sum(counts) or 1
            figure.add_bar(
                x=[(low + high) / 2 for low, high in itertools.pairwise(edges)],
                y=[count / total for count in counts],
                width=[high - low for low, high in itertools.pairwise(edges)],
                customdata=[[low, high, count] for low, high, count in zip(edges, edges[1:], counts, strict=False)],
                name=f"epoch {epochs[event]['epoch']}",
                opacity=0.65,
                marker={"color": color},
                hovertemplate=(
                    weight + " %{customdata[0]:.2f} to %{customdata[1]:.2f}<br>%{y:.1%} (%{customdata[2]:,} rows)"
                    "<extra>%{fullData.name}</extra>"
                ),
            )
    figure.update_layout(barmode="overlay", bargap=0, yaxis={"tickformat": ".0%"})
    return _finish(figure, x=weight, y="share of rows")


def annotation_auc(history: History) -> go.Figure | None:
    """How well the annotations rank the true labels, by epoch, where the truth is known."""
    points = [
        (event["epoch"], event["annotations"]["auc"])
        for event in history.epochs
        if (event.get("annotations") or {}).get("auc") is not None
    ]
    figure = go.Figure()
    if points:
        figure.add_scatter(
            x=[epoch for epoch, _ in points],
            y=[value for _, value in points],
            mode="lines+markers",
            name="annotation AUC",
            line={"color": PALETTE[2], "width": 2},
            hovertemplate="epoch %{x}<br>%{y:.4f}<extra></extra>",
        )
    return _finish(figure, x="epoch", y="annotation AUC", whole_x=True)


def reliability(history: History) -> go.Figure | None:
    """Mean truth against mean `w1`, bin by bin, of the final annotations (or those of the last epoch)."""
    found = [event.get("annotations") or {} for event in [history.final or {}, *reversed(history.epochs)]]
    bins = next((notes["reliability"] for notes in found if notes.get("reliability")), None)
    figure = go.Figure()
    if bins:
        bins = [row for row in bins if row[2]]
        largest = max((row[2] for row in bins), default=1)
        figure.add_scatter(
            x=[0, 1],
            y=[0, 1],
            mode="lines",
            name="perfect",
            line={"color": "#8A8A8A", "dash": "dot"},
            hoverinfo="skip",
        )
        figure.add_scatter(
            x=[row[0] for row in bins],
            y=[row[1] for row in bins],
            customdata=[row[2] for row in bins],
            mode="lines+markers",
            name="annotations",
            line={"color": PALETTE[0]},
            marker={"size": [6 + 14 * (row[2] / largest) ** 0.5 for row in bins], "opacity": 0.8},
            hovertemplate="w1 %{x:.3f}<br>truth %{y:.3f}<br>%{customdata:,} rows<extra></extra>",
        )
    return _finish(figure, x="mean w1", y="mean truth")


def time_split(history: History) -> go.Figure | None:
    """Seconds of each epoch by what they were spent on."""
    epochs = [event for event in history.epochs if event.get("seconds_by")]
    present = dict.fromkeys(name for event in epochs for name in event["seconds_by"])
    names = [name for name in _TIME_PARTS if name in present] + [n for n in present if n not in _TIME_PARTS]
    figure = go.Figure()
    for place, name in enumerate(names):
        figure.add_bar(
            x=[event["epoch"] for event in epochs],
            y=[event["seconds_by"].get(name, 0) for event in epochs],
            name=html.escape(name),
            marker={"color": PALETTE[place % len(PALETTE)]},
            hovertemplate="epoch %{x}<br>%{y:.2f} s<extra>%{fullData.name}</extra>",
        )
    figure.update_layout(barmode="stack")
    return _finish(figure, x="epoch", y="seconds", whole_x=True)


def throughput(histories: Sequence[History]) -> go.Figure | None:
    """Rows trained per second, by epoch, one line per run."""
    figure = go.Figure()
    for history in histories:
        epochs = [event for event in history.epochs if event.get("rows_per_s") is not None]
        if epochs:
            figure.add_scatter(
                x=[event["epoch"] for event in epochs],
                y=[event["rows_per_s"] for event in epochs],
                mode="lines+markers",
                name=_label(history, histories, "rows/s"),
                line={"width": 2, "color": PALETTE[len(_traces(figure)) % len(PALETTE)]},
                hovertemplate="epoch %{x}<br>%{y:,.0f} rows/s<extra>%{fullData.name}</extra>",
            )
    figure.update_layout(yaxis={"rangemode": "tozero"})
    return _finish(figure, x="epoch", y="rows per second", whole_x=True)


def chosen_loss(step: Event) -> float | None:
    """The training-test loss at the candidate a step took: what the direction was chosen by."""
    candidates, losses = step.get("candidates") or [], step.get("candidate_losses") or []
    if step["direction"] in candidates[: len(losses)]:
        return losses[candidates.index(step["direction"])]
    return step["loss"]


def _candidates_text(step: Event) -> str:
    pairs = zip(step.get("candidates") or [], step.get("candidate_losses") or [], strict=False)
    return "".join(f"<br>  at {float(c):+g}: {float(loss):.5f}" for c, loss in pairs if loss is not None)


def _label(history: History, histories: Sequence[History], what: str) -> str:
    if len(histories) == 1:
        return html.escape(what)
    name = history.name
    if len(name) > _LEGEND_NAME:
        name = f"{name[: _LEGEND_NAME // 2]}…{name[1 - _LEGEND_NAME // 2 :]}"
    return html.escape(f"{name}: {what}")


def _finish(figure: go.Figure, *, x: str, y: str, whole_x: bool = False) -> go.Figure | None:
    if not _traces(figure):
        return None
    figure.update_layout(
        template="none",
        margin={"l": 60, "r": 12, "t": 34, "b": 48},
        # A long legend must not eat the figure on a narrow screen.
        height=340 + 19 * min(12, max(0, len(_traces(figure)) - 4)),
        hovermode="closest",
        showlegend=True,
        legend={
            "orientation": "h",
            "x": 0,
            "y": 0,
            "yref": "container",
            "yanchor": "bottom",
            "traceorder": "normal",
        },
        xaxis={"title": {"text": x, "standoff": 6}, "automargin": True},
        yaxis={"title": {"text": y}, "automargin": True},
    )
    if whole_x:
        # With two or three epochs plotly would put ticks at separable of them.
        figure.update_xaxes(tickformat="d", dtick=1 if _span(figure) <= 12 else None)
    return figure


def _span(figure: go.Figure) -> float:
    values = [value for trace in _traces(figure) for value in trace.x]
    return max(values) - min(values)


def _traces(figure: go.Figure) -> list[Any]:
    return list(cast(Any, figure.data))
