"""The results of a study as Markdown: tables, who is ahead and by how much, the selected settings, what failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from invdist.evaluation.tables import METRICS, metric_title
from invdist.study.results import Row
from invdist.study.spec import FLOOR, Study, Table
from invdist.study.statistics import paired

_DIRECTIONS = ("direct", "pass", "inverse")
_TIMELINE = (0, 1, 2, 4, 8, 16, 32, 64, 128)
"""Epochs whose directions are shown."""


def markdown(study: Study, table: Table, rows: Sequence[Row], dataset: dict[str, Any], metric: str, k: int) -> str:
    """The section of one table. Rows stand in the order of the study; the floor stands last."""
    seeds = ", ".join(map(str, table.seeds or study.seeds))
    labeled = dataset["rows"].get("train", 0) + dataset["rows"].get("training_test", 0)
    parts = [
        f"## {table.name}",
        f"{dataset['users']:,} users, {dataset['items']:,} items, {labeled:,} labeled training rows, "
        f"{dataset['rows'].get('unclear', 0):,} unclear rows (data set {dataset['fingerprint']}). Seeds {seeds}; "
        f"{_tuning(study, rows)} and the epoch chosen by validation {metric_title(metric, k)}. "
        "Test figures, mean ± standard deviation over seeds.",
        _table(table, rows, k),
        *_comparisons(rows, metric, k),
        _timeline(rows),
        _settings(rows),
        _left_out(rows),
        _failures(rows),
    ]
    return "\n\n".join(part for part in parts if part)


def _tuning(study: Study, rows: Sequence[Row]) -> str:
    if not any(row.tuning for row in rows):
        return "nothing tuned,"
    return f"up to {study.trials} settings tried per row, the setting"


def _table(table: Table, rows: Sequence[Row], k: int) -> str:
    published = bool(table.published)
    head = ["strategy", "backbone", *(metric_title(name, k) for name in METRICS), "annotation AUC", "rows/s"]
    chose = any(row.directions for row in rows)
    head += ["direct / pass / inverse"] if chose else []
    head += ["seeds", "settings tried"] + (["published AUC / GAUC / NDCG"] if published else [])
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    best = {name: max((s.mean for row in rows if (s := row.spread(name))), default=None) for name in METRICS}
    for row in rows:
        cells = [row.case.label, row.case.backbone]
        for name in METRICS:
            value = row.spread(name)
            text = str(value) if value else "-"
            cells.append(f"**{text}**" if value and value.mean == best[name] else text)
        speed = row.spread("rows_per_s")
        cells += [str(row.spread("annotation_auc") or "-"), f"{speed.mean:,.0f}" if speed else "-"]
        if chose:
            cells.append(_shares(row.directions))
        cells += [str(len(row.runs)), row.tried]
        if published:
            figures = table.published.get(row.case.backbone, {}).get(row.case.strategy, [])
            cells.append(" / ".join(f"{figure:.4f}" for figure in figures) or "-")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _shares(directions: Mapping[str, int]) -> str:
    total = sum(directions.values())
    return " / ".join(f"{directions.get(name, 0) / total:.0%}" for name in _DIRECTIONS) if total else "-"


def _timeline(rows: Sequence[Row]) -> str:
    """Which way the steps of compared settings went as training went on."""
    chosen = [(row, row.directions_by_epoch()) for row in rows if row.case.variant and row.directions]
    if not chosen:
        return ""
    epochs = [epoch for epoch in _TIMELINE if any(epoch in steps for _, steps in chosen)]
    head = ["direct / pass / inverse in epoch", *map(str, epochs)]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row, steps in chosen:
        lines.append("| " + " | ".join([_who(row), *(_shares(steps.get(epoch, {})) for epoch in epochs)]) + " |")
    return "\n".join(lines)


def _comparisons(rows: Sequence[Row], metric: str, k: int) -> list[str]:
    """The best row against the next: on each backbone (the floor among them), and over everything."""
    backbones = list(dict.fromkeys(row.case.backbone for row in rows if row.case.strategy != FLOOR))
    groups = [(f"On {name}", [r for r in rows if r.case.backbone in (name, "-")]) for name in backbones]
    if len(backbones) > 1:
        groups.append(("Over everything", list(rows)))
    return [text for where, group in groups if (text := ahead(where, group, metric, k))]


def ahead(where: str, rows: Sequence[Row], metric: str, k: int) -> str | None:
    """One line: which row is best by a test metric, by how much over the next, and how surely."""
    ranked = sorted(((s.mean, row) for row in rows if (s := row.spread(metric))), key=lambda pair: -pair[0])
    if len(ranked) < 2:
        return None
    (first, best), (second, following) = ranked[:2]
    values = best.by_seed(metric), following.by_seed(metric)
    test = paired(*values)
    sure = ""
    if values[0].keys() != values[1].keys():
        sure = " (not tested: they have not the same seeds)"
    elif test is not None and test.p is not None:
        verdict = "significant" if test.p < 0.05 else "not significant"
        sure = f", paired t-test over {test.seeds} seeds p = {test.p:.2g} ({verdict} at 0.05)"
    return (
        f"{where}: **{_who(best)}** {first:.4f}, ahead of {_who(following)} {second:.4f} by "
        f"{first - second:.4f} {metric_title(metric, k)}{sure}."
    )


def _who(row: Row) -> str:
    return row.case.label if row.case.backbone == "-" else f"{row.case.label} on {row.case.backbone}"


def _settings(rows: Sequence[Row]) -> str:
    lines = [
        f"- {_who(row)}: {', '.join(f'`{key}={value}`' for key, value in row.point.items()) or 'as the base'}"
        for row in rows
        if row.point is not None
    ]
    return "\n".join(["Settings that were selected:", "", *lines]) if lines else ""


def _left_out(rows: Sequence[Row]) -> str:
    lines = [f"- {_who(row)}: {reason}" for row in rows for reason in row.case.left_out]
    title = "Settings that were left out, since they do not fit the data or each other:"
    return "\n".join([title, "", *lines]) if lines else ""


def _failures(rows: Sequence[Row]) -> str:
    lines = [f"- {_who(row)}, {trial.folder.name}: {r.reason}" for row in rows for trial, r in row.failures]
    return "\n".join(["Trials that failed:", "", *lines]) if lines else ""
