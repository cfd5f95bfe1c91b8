"""Figures of a run as plotly objects, for the report and for notebooks.

Every function takes `History` objects and returns a `plotly.graph_objects.Figure`, or None if the run has nothing to
show. Text that comes from a run is escaped, because plotly reads markup in labels.
"""

from __future__ import annotations

import html
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import plotly.graph_objects as go

from invdist.evaluation.tables import METRICS, metric_title
from invdist.training.history import Event, History, direction_name

MAX_POINTS = 3000
"""Longer series are thinned evenly: a browser draws every point as an SVG path."""

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31", "#7F7F7F")
"""Distinct for colour-blind readers (Okabe and Ito), and readable on white and on black."""

DIRECTIONS = {
    "direct": ("#0072B2", "triangle-down"),
    "pass": ("#8A8A8A", "circle"),
    "inverse": ("#D55E00", "triangle-up"),
}
"""Colour and marker of each direction."""

_LEGEND_NAME = 28
_TIME_PARTS = ("stream", "exchange", "pull", "step", "candidates", "commit", "checkpoint", "evaluate")


def thin(rows: Sequence[Any], limit: int = MAX_POINTS) -> tuple[list[Any], int]:
    """Every n-th row, with the smallest n that leaves at most `limit` of them; returns the rows and n."""
    stride = max(1, -(-len(rows) // limit))
    return list(rows[::stride]), stride


def loss_curve(histories: Sequence[History]) -> go.Figure | None:
    """Training loss of each logged step, one line per run and phase."""
    figure = go.Figure()
    for history in histories:
        by_phase: defaultdict[str, list[Event]] = defaultdict(list)
        for step in history.steps:
            by_phase[str(step.get("phase", ""))].append(step)
        for phase, steps in by_phase.items():
            points = [(step["global_step"], step["loss"]) for step in thin(steps)[0]]
            name = _label(history, histories, f"phase {phase}" if phase.isdigit() else phase or "loss")
            mode = "lines" if len(points) > 1 else "markers"
            _add_line(figure, points, name, "step %{x:,}<br>loss %{y:.5f}", mode=mode, width=1.4)
    return _finish(figure, x="step", y="training loss")


def metric_curves(histories: Sequence[History], names: Sequence[str] = METRICS) -> go.Figure | None:
    """Validation metrics by epoch. With several runs: a colour per run, a line style per metric, and all but the
    first metric hidden until they are clicked in the legend."""
    figure = go.Figure()
    several = len(histories) > 1
    for (run, history), (place, name) in itertools.product(enumerate(histories), enumerate(names)):
        _add_line(
            figure,
            _by_epoch(history, lambda event, name=name: (event.get("valid") or {}).get(name)),
            _label(history, histories, metric_title(name, history.ndcg_k)),
            "epoch %{x}<br>%{y:.4f}",
            color=PALETTE[(run if several else place) % len(PALETTE)],
            dash=("solid", "dash", "dot", "dashdot")[place % 4] if several else "solid",
            visible="legendonly" if several and place else True,
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
    """How many steps of each epoch took each direction."""
    steps = {event["epoch"]: event["directions"] for event in history.epochs if any(_of(event, "directions").values())}
    figure = go.Figure()
    if steps:
        add_direction_bars(figure, steps, hovertemplate="epoch %{x}<br>%{y:,} steps<extra>%{fullData.name}</extra>")
    return _finish(figure, x="epoch", y="steps", whole_x=True)


def add_direction_bars(figure: go.Figure, steps: Mapping[int, Mapping[str, float]], **options: Any) -> None:
    """Adds stacked bars of `steps`: by epoch, then by direction."""
    for name, (color, _) in DIRECTIONS.items():
        heights = [counts.get(name, 0) for counts in steps.values()]
        figure.add_bar(x=list(steps), y=heights, name=name, legendgroup=name, marker={"color": color}, **options)
    figure.update_layout(barmode="stack")


def annotation_histograms(history: History, weight: str = "w1") -> go.Figure | None:
    """Annotations (`w1`: how positive, `w0`: how negative) of unlabeled pairs: first epoch and last."""
    epochs = [event for event in history.epochs if _of(event, "annotations").get(weight)]
    figure = go.Figure()
    for event, color in zip([*epochs[:1], *epochs[1:][-1:]], (PALETTE[4], PALETTE[0]), strict=False):
        edges, counts = event["annotations"]["edges"], event["annotations"][weight]
        total = sum(counts) or 1
        figure.add_bar(
            x=[(low + high) / 2 for low, high in itertools.pairwise(edges)],
            y=[count / total for count in counts],
            width=[high - low for low, high in itertools.pairwise(edges)],
            customdata=[[low, high, count] for low, high, count in zip(edges, edges[1:], counts, strict=False)],
            name=f"epoch {event['epoch']}",
            opacity=0.65,
            marker={"color": color},
            hovertemplate=(
                weight + " %{customdata[0]:.2f} to %{customdata[1]:.2f}<br>%{y:.1%} (%{customdata[2]:,} pairs)"
                "<extra>%{fullData.name}</extra>"
            ),
        )
    figure.update_layout(barmode="overlay", bargap=0, yaxis={"tickformat": ".0%"})
    return _finish(figure, x=weight, y="share of pairs")


def annotation_auc(history: History) -> go.Figure | None:
    """How well the annotations rank the true labels, by epoch, for data whose hidden labels are known."""
    figure = go.Figure()
    points = _by_epoch(history, lambda event: _of(event, "annotations").get("auc"))
    _add_line(figure, points, "annotation AUC", "epoch %{x}<br>%{y:.4f}", color=PALETTE[2])
    return _finish(figure, x="epoch", y="annotation AUC", whole_x=True)


def reliability(history: History) -> go.Figure | None:
    """Mean truth against mean `w1` in each bin of the final annotations (or those of the last epoch)."""
    found = [_of(event, "annotations") for event in [history.final or {}, *reversed(history.epochs)]]
    bins = next((notes["reliability"] for notes in found if notes.get("reliability")), [])
    bins = [row for row in bins if row[2]]
    figure = go.Figure()
    if bins:
        largest = max(row[2] for row in bins)
        _add_line(figure, [(0, 0), (1, 1)], "perfect", "", mode="lines", color="#8A8A8A", dash="dot", hoverinfo="skip")
        _add_line(
            figure,
            [(row[0], row[1]) for row in bins],
            "annotations",
            "w1 %{x:.3f}<br>truth %{y:.3f}<br>%{customdata:,} pairs",
            color=PALETTE[0],
            customdata=[row[2] for row in bins],
            marker={"size": [6 + 14 * (row[2] / largest) ** 0.5 for row in bins], "opacity": 0.8},
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
    """Interactions trained per second, by epoch, one line per run."""
    figure = go.Figure()
    for history in histories:
        points = _by_epoch(history, lambda event: event.get("rows_per_s"))
        _add_line(figure, points, _label(history, histories, "rows/s"), "epoch %{x}<br>%{y:,.0f} rows/s")
    figure.update_layout(yaxis={"rangemode": "tozero"})
    return _finish(figure, x="epoch", y="rows per second", whole_x=True)


def chosen_loss(step: Event) -> float | None:
    """The training-test loss at the candidate that a step took."""
    candidates, losses = step.get("candidates") or [], step.get("candidate_losses") or []
    if step["direction"] in candidates[: len(losses)]:
        return losses[candidates.index(step["direction"])]
    return step["loss"]


def _candidates_text(step: Event) -> str:
    pairs = zip(step.get("candidates") or [], step.get("candidate_losses") or [], strict=False)
    return "".join(f"<br>  at {float(c):+g}: {float(loss):.5f}" for c, loss in pairs if loss is not None)


def _of(event: Event, name: str) -> dict[str, Any]:
    return event.get(name) or {}


def _by_epoch(history: History, value: Callable[[Event], Any]) -> list[tuple[int, float]]:
    points = [(event["epoch"], value(event)) for event in history.epochs]
    return [(epoch, found) for epoch, found in points if isinstance(found, int | float)]


def _add_line(
    figure: go.Figure,
    points: Iterable[tuple[float, float | None]],
    name: str,
    hover: str,
    *,
    color: str | None = None,
    dash: str = "solid",
    width: float = 2,
    mode: str = "lines+markers",
    **options: Any,
) -> None:
    """Adds a line through `points`, if there are any; without a `color`, in the next one of the palette."""
    points = list(points)
    if points:
        figure.add_scatter(
            x=[x for x, _ in points],
            y=[y for _, y in points],
            name=name,
            mode=mode,
            line={"width": width, "dash": dash, "color": color or PALETTE[len(_traces(figure)) % len(PALETTE)]},
            hovertemplate=f"{hover}<extra>%{{fullData.name}}</extra>",
            **options,
        )


def _label(history: History, histories: Sequence[History], what: str) -> str:
    if len(histories) == 1:
        return html.escape(what)
    name = history.name
    if len(name) > _LEGEND_NAME:
        name = f"{name[: _LEGEND_NAME // 2]}…{name[1 - _LEGEND_NAME // 2 :]}"
    return html.escape(f"{name}: {what}")


def _finish(figure: go.Figure, *, x: str, y: str, whole_x: bool = False) -> go.Figure | None:
    traces = _traces(figure)
    if not traces:
        return None
    figure.update_layout(
        template="none",
        margin={"l": 60, "r": 12, "t": 34, "b": 48},
        # Room for a long legend, which would otherwise cover the figure on a narrow screen.
        height=340 + 19 * min(12, max(0, len(traces) - 4)),
        hovermode="closest",
        showlegend=True,
        legend={"orientation": "h", "x": 0, "y": 0, "yref": "container", "yanchor": "bottom", "traceorder": "normal"},
        xaxis={"title": {"text": x, "standoff": 6}, "automargin": True},
        yaxis={"title": {"text": y}, "automargin": True},
    )
    if whole_x:
        values = [value for trace in traces for value in trace.x]
        # With two or three epochs plotly would put ticks at halves of them.
        figure.update_xaxes(tickformat="d", dtick=1 if max(values) - min(values) <= 12 else None)
    return figure


def _traces(figure: go.Figure) -> list[Any]:
    return list(cast(Any, figure.data))
