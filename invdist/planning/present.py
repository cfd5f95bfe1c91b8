"""Estimates as text, as plain values, and as a figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from invdist.evaluation.tables import duration, plain_table
from invdist.planning.estimate import Estimate, StepTime
from invdist.planning.formulas import Traffic
from invdist.planning.planner import GIB
from invdist.report.figures import PALETTE
from invdist.runtime.errors import UserError

_NOTE = (
    "Sharding, rows, optimizer state and exchange buffers are TorchRec's planner's figures; everything else is this "
    "engine's own\narithmetic on assumed hardware (see --help and docs/scale.md). Nothing here was measured on a GPU."
)


def text(found: Estimate) -> str:
    """The whole plan for a terminal."""
    parts = [_headline(found), _tables(found), _memory(found), _traffic(found), _time(found)]
    parts += [_epoch(found), f"Limit  {found.limit}", _NOTE]
    return "\n\n".join(part for part in parts if part)


def values(found: Estimate) -> dict[str, Any]:
    """The whole plan as JSON-able values; bytes and seconds."""
    epoch = found.epoch_s
    return {
        "request": asdict(found.request),
        "tables": [asdict(table) for table in found.plan.tables],
        "device_bytes": {
            "rows": found.plan.rows,
            "optimizer_state": found.plan.state,
            "exchange_buffers": found.plan.buffers,
            "dense": found.dense,
            "working": found.working,
            "ig_added": found.ig_added,
            "total": found.device_bytes,
            "usable": found.usable,
        },
        "bytes_per_step": {
            "plain": asdict(found.plain_traffic) | {"total": found.plain_traffic.total},
            "ig": asdict(found.ig_traffic) | {"total": found.ig_traffic.total},
        },
        "step_seconds": {
            "plain": asdict(found.plain_step) | {"total": found.plain_step.total},
            "ig": asdict(found.ig_step) | {"total": found.ig_step.total},
            "planner_fused": found.plan.fused_step_s,
        },
        "epoch_seconds": {"none": epoch[0], "ig": epoch[1]} if epoch else None,
        "largest_users": found.largest_users,
        "limit": {"step": found.ig_step.limit, "text": found.limit},
    }


def sweep_text(name: str, points: Sequence[int], results: Sequence[Estimate | UserError]) -> str:
    """A line per value of the swept field."""
    columns = [name, "sharding", "GiB/GPU", "of it IG", "plain MB", "IG MB", "plain ms", "IG ms", "rows/s", "limit"]
    rows, failures = [], []
    for point, result in zip(points, results, strict=True):
        if isinstance(result, UserError):
            rows.append([f"{point:,}", "does not fit" if "does not fit" in str(result) else "no", *["-"] * 8])
            failures.append(f"{name}={point:,}: {result}")
            continue
        rows.append(
            [
                f"{point:,}",
                "/".join(dict.fromkeys(table.sharding for table in result.plan.tables)),
                f"{result.device_bytes / GIB:,.2f}",
                f"{result.ig_added / GIB:,.3f}",
                f"{result.plain_traffic.total / 1e6:,.2f}",
                f"{result.ig_traffic.total / 1e6:,.2f}",
                f"{1e3 * result.plain_step.total:,.2f}",
                f"{1e3 * result.ig_step.total:,.2f}",
                f"{result.request.batch / result.plain_step.total:,.0f}",
                result.ig_step.limit.replace("_", " "),
            ]
        )
    return "\n\n".join([plain_table(columns, rows), *failures, _NOTE])


def sweep_figure(name: str, points: Sequence[int], results: Sequence[Estimate | UserError]) -> go.Figure:
    """Memory, bytes and time against the swept field; both axes logarithmic."""
    done = [(p, r) for p, r in zip(points, results, strict=True) if isinstance(r, Estimate)]
    if not done:
        raise UserError(f"no value of {name} fits, so there is nothing to draw")
    titles = ("Memory of the fullest GPU (GiB)", "Bytes sent per rank and step (MB)", "Step time, estimated (ms)")
    figure = make_subplots(rows=1, cols=3, subplot_titles=titles)
    lines = [
        (1, "tables and state", lambda r: (r.plan.rows + r.plan.state) / GIB, PALETTE[2]),
        (1, "all, with IG", lambda r: r.device_bytes / GIB, PALETTE[3]),
        (1, "usable", lambda r: r.usable / GIB, PALETTE[7]),
        (2, "plain step", lambda r: r.plain_traffic.total / 1e6, PALETTE[0]),
        (2, "IG step", lambda r: r.ig_traffic.total / 1e6, PALETTE[1]),
        (3, "plain step", lambda r: 1e3 * r.plain_step.total, PALETTE[0]),
        (3, "IG step", lambda r: 1e3 * r.ig_step.total, PALETTE[1]),
    ]
    for column, label, value, color in lines:
        figure.add_scatter(
            x=[point for point, _ in done],
            y=[value(result) for _, result in done],
            mode="lines+markers",
            name=label,
            legendgroup=label,
            showlegend=column != 3,
            line={"color": color},
            row=1,
            col=column,
        )
    figure.update_xaxes(type="log", title={"text": name}, tickvals=list(points), tickformat=",.3~s")
    figure.update_yaxes(type="log", gridcolor="#E4E8EC", tickformat=",.3~s")
    legend = {"orientation": "h", "x": 0, "y": -0.25}
    figure.update_layout(
        template="none", height=420, paper_bgcolor="white", margin={"l": 60, "r": 20, "t": 50}, legend=legend
    )
    return figure


def _headline(found: Estimate) -> str:
    request, hardware = found.request, found.request.hardware
    columns = found.plan.tables[0].columns
    return (
        f"{request.gpus:,} GPUs of {hardware.hbm / GIB:g} GiB, {min(hardware.gpus_per_node, request.gpus)} to a node; "
        f"{request.model}, dim {request.dim}: rows of {columns} columns\n"
        f"{request.batch:,} labeled rows a step, {found.request.job.pairs:,} a rank; {request.candidates} candidates; "
        f"{request.rate} unlabeled row(s) for each row of a training-test batch"
    )


def _tables(found: Estimate) -> str:
    rows = [
        [table.name, f"{table.rows:,}", table.sharding, f"{table.shards:,}", "{:,} x {}".format(*table.largest_shard)]
        for table in found.plan.tables
    ]
    rows.append(["users that would fit", f"{found.largest_users:,}", "row_wise", f"{found.request.gpus:,}", ""])
    return plain_table(["table", "rows", "sharding", "shards", "largest shard"], rows)


def _memory(found: Estimate) -> str:
    parts = [
        ("rows", found.plan.rows, "planner"),
        (f"optimizer state ({found.request.optimizer})", found.plan.state, "planner"),
        ("exchange buffers", found.plan.buffers, "planner"),
        ("dense parameters and state", found.dense, "ours"),
        ("a plain step works in", found.working, "ours"),
        ("an IG step adds", found.ig_added, "ours"),
        ("all", found.device_bytes, ""),
        ("usable", found.usable, ""),
    ]
    rows = [[name, f"{size / GIB:,.3f}", source] for name, size, source in parts]
    return plain_table(["memory of the fullest GPU", "GiB", "by"], rows)


def _traffic(found: Estimate) -> str:
    def line(name: str, value: Any) -> list[str]:
        return [name, *[f"{value(traffic):,.0f}" for traffic in (found.plain_traffic, found.ig_traffic)]]

    parts: list[tuple[str, Any]] = [
        ("ids", lambda t: t.ids),
        ("rows", lambda t: t.rows),
        ("gradients of rows", lambda t: t.gradients),
        ("deltas", lambda t: t.deltas),
        ("candidate losses", lambda t: t.losses),
        ("dense gradients", lambda t: t.dense),
        ("all", lambda t: t.total),
        ("to other GPUs of the node", lambda t: t.total * _near(found)),
        ("to other nodes", lambda t: t.total * (1 - _near(found))),
        ("collectives", _collectives),
    ]
    rows = [line(name, value) for name, value in parts]
    return plain_table(["bytes the busiest rank sends", "plain step", "IG step"], rows)


def _time(found: Estimate) -> str:
    def line(name: str, value: Any) -> list[str]:
        return [name, *[f"{1e3 * value(step):,.3f}" for step in (found.plain_step, found.ig_step)]]

    parts: list[tuple[str, Any]] = [
        ("launching operators", lambda s: s.launch),
        ("memory", lambda s: s.memory),
        ("tower", lambda s: s.compute),
        ("links in the node", lambda s: s.intra_link),
        ("links between nodes", lambda s: s.inter_link),
        ("starting collectives", lambda s: s.latency),
    ]
    rows = [line(name, value) for name, value in parts]
    rows.append(line("all, nothing overlapping", _total))
    rows.append(["planner: fused embedding step", f"{1e3 * found.plan.fused_step_s:,.3f}", "-"])
    return plain_table(["estimated step time, ms", "plain step", "IG step"], rows)


def _epoch(found: Estimate) -> str:
    if found.epoch_s is None or found.request.rows is None:
        return ""
    none, inverse = (duration(seconds) for seconds in found.epoch_s)
    return f"Epoch of {found.request.rows:,} rows  {none} for `none`, {inverse} for `ig`"


def _near(found: Estimate) -> float:
    ranks = found.request.gpus
    return (min(found.request.hardware.gpus_per_node, ranks) - 1) / (ranks - 1) if ranks > 1 else 1.0


def _collectives(traffic: Traffic) -> int:
    return traffic.all_to_alls + traffic.all_reduces


def _total(step: StepTime) -> float:
    return step.total
