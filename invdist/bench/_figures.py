"""Pictures of the page of benchmarks."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from invdist.report.figures import PALETTE
from invdist.report.page import write_output

_STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "invdist", "font.size": 9}
_OURS, _OTHERS = PALETTE[0], "#B8C0C8"


def speed_bars(path: Path, cases: Mapping[str, Mapping[str, float | None]], names: Mapping[str, str]) -> None:
    """One panel per case: a bar of rows/s for each trainer, in the order and with the titles of `names`."""
    figure, panels = _panels(len(cases), 1, (9.0, 2.6))
    present = {name for speeds in cases.values() for name, speed in speeds.items() if speed}
    for panel, (title, speeds) in zip(panels, cases.items(), strict=True):
        shown = [(text, speeds.get(name) or 0.0, name) for name, text in names.items() if name in present]
        values = [value for _, value, _ in shown]
        colors = [_OURS if name.startswith("invdist") else _OTHERS for *_, name in shown]
        bars = panel.barh([text for text, *_ in shown], values, color=colors)
        panel.bar_label(bars, [f"{value / 1e3:,.0f} k" for value in values], padding=3)
        panel.set(title=title, xlabel="interactions/s on one core", xlim=(0, 1.35 * max(values)))
        panel.invert_yaxis()
        panel.locator_params(axis="x", nbins=4)
        panel.xaxis.set_major_formatter(lambda value, _: f"{value / 1e3:,.0f} k")
        panel.spines[["top", "right"]].set_visible(False)
        if panel is not panels[0]:
            panel.set_yticklabels([])  # the same trainers in every panel
    _save(figure, path)


def growth_lines(path: Path, sweeps: Mapping[str, Any], titles: Mapping[str, str]) -> None:
    """One panel per sweep: milliseconds of plain and inverse-gradient steps, both axes logarithmic."""
    from matplotlib.ticker import EngFormatter, NullLocator

    shown = {name: sweeps[name] for name in titles if name in sweeps}
    rows = -(-len(shown) // 3)
    figure, panels = _panels(min(3, len(shown)), rows, (9.0, 2.6 * rows))
    for panel, (name, sweep) in zip(panels, shown.items()):
        for color, kind, label in ((PALETTE[0], "plain", "plain step"), (PALETTE[1], "ig", "inverse-gradient step")):
            if f"{kind}_ms" in sweep:
                panel.plot(sweep["sizes"], sweep[f"{kind}_ms"], "o-", color=color, label=label)
        panel.set(xscale="log", yscale="log", title=titles[name], ylabel="ms")
        panel.set_xticks(sweep["sizes"])
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_major_formatter(EngFormatter(sep=""))
            axis.set_minor_locator(NullLocator())
        panel.grid(color="#E4E8EC")
        panel.spines[["top", "right"]].set_visible(False)
    for panel in panels[len(shown) :]:
        panel.set_visible(False)
    handles = {label: line for panel in panels for line, label in zip(*panel.get_legend_handles_labels())}
    figure.legend(handles.values(), handles.keys(), loc="outside lower left", ncols=2, frameon=False)
    _save(figure, path)


def _panels(columns: int, rows: int, size: tuple[float, float]) -> tuple[Any, Sequence[Any]]:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=size, layout="constrained")
        return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def _save(figure: Any, path: Path) -> None:
    import matplotlib

    picture = io.BytesIO()
    with matplotlib.rc_context(_STYLE):
        figure.savefig(picture, format="svg", metadata={"Date": None})
    path.parent.mkdir(parents=True, exist_ok=True)
    write_output(path, picture.getvalue())
