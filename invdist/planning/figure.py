"""A sweep as a figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from invdist.embeddings.placement import GIB
from invdist.planning.estimate import Estimate
from invdist.report.figures import PALETTE
from invdist.runtime.errors import UserError

_LINES: list[tuple[int, str, Callable[[Estimate], float], str]] = [
    (1, "tables and state", lambda found: (found.plan.rows + found.plan.state) / GIB, PALETTE[2]),
    (1, "all, with IG", lambda found: found.device_bytes / GIB, PALETTE[3]),
    (1, "usable", lambda found: found.job.usable / GIB, PALETTE[7]),
    (2, "plain step", lambda found: found.plain_traffic.total / 1e6, PALETTE[0]),
    (2, "IG step", lambda found: found.ig_traffic.total / 1e6, PALETTE[1]),
    (3, "plain step", lambda found: 1e3 * found.plain_step.total, PALETTE[0]),
    (3, "IG step", lambda found: 1e3 * found.ig_step.total, PALETTE[1]),
]
"""Panel, name, value and colour of each line."""


def sweep_figure(name: str, results: Sequence[tuple[int, Estimate | UserError]]) -> go.Figure:
    """Memory, bytes and time against the swept field; both axes are logarithmic."""
    fitting = [(value, result) for value, result in results if isinstance(result, Estimate)]
    if not fitting:
        raise UserError(f"no value of {name} fits, so there is nothing to draw")
    titles = ("Memory of the fullest GPU (GiB)", "Bytes sent per rank and step (MB)", "Step time, estimated (ms)")
    figure = make_subplots(rows=1, cols=3, subplot_titles=titles)
    for panel, label, value_of, color in _LINES:
        figure.add_scatter(
            x=[value for value, _ in fitting],
            y=[value_of(result) for _, result in fitting],
            mode="lines+markers",
            name=label,
            legendgroup=label,
            showlegend=panel != 3,
            line={"color": color},
            row=1,
            col=panel,
        )
    values = [value for value, _ in results]
    figure.update_xaxes(type="log", title={"text": name}, tickvals=values, tickformat=",.3~s")
    figure.update_yaxes(type="log", gridcolor="#E4E8EC", tickformat=",.3~s")
    margin, legend = {"l": 60, "r": 20, "t": 50}, {"orientation": "h", "x": 0, "y": -0.25}
    return figure.update_layout(template="none", height=420, paper_bgcolor="white", margin=margin, legend=legend)
