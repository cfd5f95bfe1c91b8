"""Estimates as text for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from invdist.embeddings.placement import GIB
from invdist.evaluation.tables import duration, plain_table
from invdist.planning.estimate import Estimate
from invdist.runtime.errors import UserError

_NOTE = (
    "Sharding, rows, optimizer state and exchange buffers are TorchRec's planner's figures; everything else is this "
    "engine's own\narithmetic on assumed hardware (see --help and docs/scale.md). Nothing here was measured on a GPU."
)


def estimate_text(found: Estimate) -> str:
    """The whole estimate."""
    parts = [_headline(found), _tables(found), _memory(found), _traffic(found), _time(found)]
    parts += [_epoch(found), f"Limit  {found.limit}", _NOTE]
    return "\n\n".join(part for part in parts if part)


def sweep_text(name: str, results: Sequence[tuple[int, Estimate | UserError]]) -> str:
    """A line per value of the swept field."""
    columns = [name, "sharding", "GiB/GPU", "of it IG", "plain MB", "IG MB", "plain ms", "IG ms", "rows/s", "limit"]
    rows, failures = [], []
    for value, result in results:
        if isinstance(result, UserError):
            rows.append([f"{value:,}", "does not fit" if "does not fit" in str(result) else "no", *["-"] * 8])
            failures.append(f"{name}={value:,}: {result}")
            continue
        rows.append(
            [
                f"{value:,}",
                "/".join(dict.fromkeys(table.sharding for table in result.plan.tables)),
                f"{result.device_bytes / GIB:,.2f}",
                f"{result.ig_added / GIB:,.3f}",
                *(f"{traffic.total / 1e6:,.2f}" for traffic in (result.plain_traffic, result.ig_traffic)),
                *(f"{1e3 * step.total:,.2f}" for step in (result.plain_step, result.ig_step)),
                f"{result.job.batch / result.plain_step.total:,.0f}",
                result.ig_step.limit.replace("_", " "),
            ]
        )
    return "\n\n".join([plain_table(columns, rows), *failures, _NOTE])


def _headline(found: Estimate) -> str:
    job = found.job
    return (
        f"{job.gpus:,} GPUs of {job.hardware.hbm / GIB:g} GiB, {min(job.hardware.gpus_per_node, job.gpus)} per node; "
        f"{job.model}, dim {job.dim}: table rows of {job.backbone.columns} columns\n"
        f"{job.batch:,} labeled interactions a step, {job.pairs:,} a rank; {job.candidates} candidates; "
        f"{job.rate} unlabeled pair(s) for each interaction of a training-test batch"
    )


def _tables(found: Estimate) -> str:
    rows = [
        [table.name, f"{table.rows:,}", table.sharding, f"{table.shards:,}", "{:,} x {}".format(*table.largest_shard)]
        for table in found.plan.tables
    ]
    rows.append(["users that would fit", f"{found.largest_users:,}", "row_wise", f"{found.job.gpus:,}", ""])
    return plain_table(["table", "rows", "sharding", "shards", "largest shard"], rows)


def _memory(found: Estimate) -> str:
    parts = [
        ("rows", found.plan.rows, "planner"),
        (f"optimizer state ({found.job.optimizer})", found.plan.state, "planner"),
        ("exchange buffers", found.plan.buffers, "planner"),
        *([("exposure vectors", found.vectors, "ours")] if found.vectors else []),
        ("dense parameters and state", found.dense, "ours"),
        ("working memory of a plain step", found.working, "ours"),
        ("added by an IG step", found.ig_added, "ours"),
        ("all", found.device_bytes, ""),
        ("usable", found.job.usable, ""),
        *([("host memory per GPU: rows and state (uvm)", found.plan.host, "planner")] if found.plan.host else []),
    ]
    rows = [[name, f"{size / GIB:,.3f}", source] for name, size, source in parts]
    return plain_table(["memory of the fullest GPU", "GiB", "by"], rows)


def _traffic(found: Estimate) -> str:
    near = found.job.near
    parts: dict[str, Callable[[Any], float]] = {
        "ids": lambda t: t.ids,
        "rows": lambda t: t.rows,
        **({"exposure vectors": lambda t: t.vectors} if found.vectors else {}),
        "gradients of rows": lambda t: t.gradients,
        "deltas": lambda t: t.deltas,
        "candidate losses": lambda t: t.losses,
        "dense gradients": lambda t: t.dense,
        "all": lambda t: t.total,
        "to other GPUs of the node": lambda t: t.total * near,
        "to other nodes": lambda t: t.total * (1 - near),
        "collectives": lambda t: t.collectives,
    }
    kinds = found.plain_traffic, found.ig_traffic
    rows = [[name, *(f"{value(kind):,.0f}" for kind in kinds)] for name, value in parts.items()]
    return plain_table(["bytes the busiest rank sends (ours)", "plain step", "IG step"], rows)


def _time(found: Estimate) -> str:
    parts: dict[str, Callable[[Any], float]] = {
        "launching operators": lambda s: s.launch,
        "memory": lambda s: s.memory,
        **({"link to the host's memory": lambda s: s.host_link} if found.plan.host else {}),
        "tower": lambda s: s.compute,
        "links in the node": lambda s: s.intra_link,
        "links between nodes": lambda s: s.inter_link,
        "starting collectives": lambda s: s.latency,
        "all, if nothing overlaps": lambda s: s.total,
    }
    kinds = found.plain_step, found.ig_step
    rows = [[name, *(f"{1e3 * value(kind):,.3f}" for kind in kinds)] for name, value in parts.items()]
    rows.append(["planner: TorchRec's fused embeddings", f"{1e3 * found.plan.fused_step_s:,.3f}", "-"])
    return plain_table(["estimated step time, ms (ours)", "plain step", "IG step"], rows)


def _epoch(found: Estimate) -> str:
    if found.epoch_s is None or found.job.rows is None:
        return ""
    none, inverse = (duration(seconds) for seconds in found.epoch_s)
    return f"Epoch of {found.job.rows:,} rows  {none} for `none`, {inverse} for `ig`"
