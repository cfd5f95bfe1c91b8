"""Figures as files: an interactive HTML page by plotly, or a picture of the same figure by matplotlib."""

from __future__ import annotations

import html
import io
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from invdist.report.page import check_output, write_output
from invdist.runtime.errors import UserError

FORMATS = (".html", ".svg", ".png")

_DPI = 100
_DASHES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}
_MARKERS = {"triangle-up": "^", "triangle-down": "v"}


def check_picture(path: str | Path) -> Path:
    """The path, if `save_figure` could write it; a `UserError` otherwise."""
    if Path(path).suffix not in FORMATS:
        raise UserError(f"{path}: a figure is a file ending in {', '.join(FORMATS)}")
    return check_output(path)


def save_figure(figure: go.Figure, path: str | Path, width: int = 1000, height: int | None = None) -> None:
    """Writes a figure of lines and markers as .html (self-contained), .svg or .png of the given size in pixels."""
    path = check_picture(path)
    if path.suffix == ".html":
        write_output(path, figure.to_html(include_plotlyjs=True, full_html=True, config={"displaylogo": False}))
        return
    import matplotlib

    content = figure.to_dict()
    size = width / _DPI, (height or content["layout"].get("height", 500)) / _DPI
    picture = io.BytesIO()
    # Text stays text, and the same figure gives the same bytes.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "invdist", "font.size": 9}):
        scale = {"dpi": 2 * _DPI} if path.suffix == ".png" else {"metadata": {"Date": None}}
        _draw(content, size).savefig(picture, format=path.suffix[1:], **scale)
    write_output(path, picture.getvalue())


def _draw(content: dict[str, Any], size: tuple[float, float]) -> Any:
    """A matplotlib figure of the scatter traces of a plotly one: a panel for each pair of axes, from left to right."""
    from matplotlib.figure import Figure

    layout, traces = content["layout"], content["data"]
    # Plotly calls the axes of the panels x, x2, x3: the layout has them as xaxis, xaxis2, xaxis3.
    numbers = sorted({trace.get("xaxis", "x")[1:] for trace in traces})
    figure = Figure(figsize=size, layout="constrained")
    panels = dict(zip(numbers, figure.subplots(1, len(numbers), squeeze=False)[0], strict=True))
    for panel, note in zip(panels.values(), layout.get("annotations", ())):
        panel.set_title(html.unescape(note["text"]))
    for trace in traces:
        if trace["type"] != "scatter":
            raise UserError(f"only lines and markers can be drawn as a picture, not {trace['type']}: write .html")
        _draw_trace(panels[trace.get("xaxis", "x")[1:]], trace)
    for number, panel in panels.items():
        for name in ("x", "y"):
            _set_axis(panel, name, layout.get(f"{name}axis{number}", {}))
        panel.grid(color="#E4E8EC")
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
    shown = {label: line for panel in panels.values() for line, label in zip(*panel.get_legend_handles_labels())}
    figure.legend(shown.values(), shown.keys(), loc="outside lower left", ncols=len(shown), frameon=False)
    return figure


def _draw_trace(panel: Any, trace: dict[str, Any]) -> None:
    line, marker, mode = trace.get("line", {}), trace.get("marker", {}), trace.get("mode", "lines")
    panel.plot(
        trace["x"],
        [float("nan") if y is None else y for y in trace["y"]],
        label=html.unescape(trace["name"]),
        color=line.get("color") or marker.get("color"),
        linestyle=_DASHES[line.get("dash", "solid")] if "lines" in mode else "none",
        linewidth=line.get("width", 2),
        marker=_MARKERS.get(marker.get("symbol", ""), "o") if "markers" in mode else None,
        markersize=marker.get("size", 6),
        markeredgewidth=0,
        alpha=marker.get("opacity"),
    )


def _set_axis(panel: Any, name: str, settings: dict[str, Any]) -> None:
    from matplotlib.ticker import EngFormatter, LogLocator, NullLocator

    panel.set(**{f"{name}label": settings.get("title", {}).get("text", "")})
    axis = getattr(panel, f"{name}axis")
    if settings.get("type") == "log":
        panel.set(**{f"{name}scale": "log"})
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(EngFormatter(sep=""))
        axis.set_minor_locator(NullLocator())
    if "tickvals" in settings:
        axis.set_ticks(list(settings["tickvals"]))
