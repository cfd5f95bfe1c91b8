"""The results of a study as Markdown: tables, the best row and its lead, the selected settings, failures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from invdist.data.dataset import Dataset
from invdist.evaluation.tables import METRICS, direction_shares, metric_title
from invdist.study.results import Row
from invdist.study.spec import FLOOR, Study, StudyTable
from invdist.study.statistics import paired

_TIMELINE = (0, 1, 2, 4, 8, 16, 32, 64, 128)
"""Epochs whose directions are shown."""


def markdown(study: Study, table: StudyTable, rows: Sequence[Row], dataset: Dataset, metric: str, k: int) -> str:
    """The section of one table, its rows in the order of the study, the floor last."""
    seeds = ", ".join(map(str, table.seeds or study.seeds))
    labeled = dataset.rows.get("train", 0) + dataset.rows.get("training_test", 0)
    tuned = any(row.tuning for row in rows)
    tuning = f"up to {study.trials} settings tried per row, the setting" if tuned else "nothing tuned,"
    ended = [result for row in rows for _, result in (*row.tuning, *row.runs) if result is not None]
    parts = [
        f"## {table.name}",
        f"{dataset.users:,} users, {dataset.items:,} items, {labeled:,} labeled training rows, "
        f"{dataset.rows.get('unclear', 0):,} unclear rows (data set {dataset.fingerprint}). Seeds {seeds}; "
        f"{tuning} and the epoch chosen by validation {metric_title(metric, k)}. "
        "Test figures, mean ± standard deviation over seeds. "
        f"{len(ended)} trials, {sum(result.seconds for result in ended) / 60:.1f} minutes of training, all trials "
        "summed.",
        _results(table, rows, k),
        *_comparisons(rows, metric, k),
        _timeline(rows),
        _list(
            "Settings that were selected:",
            (
                f"{row.title}: {', '.join(f'`{key}={value}`' for key, value in row.point.items()) or 'as the base'}"
                for row in rows
                if row.point is not None
            ),
        ),
        _list(
            "Settings that were left out, because they do not fit the data or each other:",
            (f"{row.title}: {reason}" for row in rows for reason in row.case.left_out),
        ),
        _list(
            "Trials that failed:",
            (f"{row.title}, {trial.folder.name}: {result.reason}" for row in rows for trial, result in row.failures),
        ),
    ]
    return "\n\n".join(part for part in parts if part)


def _results(table: StudyTable, rows: Sequence[Row], k: int) -> str:
    directed = any(row.directions for row in rows)
    # Studies from before have no AUC of users with few labels.
    names = [*METRICS, *(["auc_few"] if any(row.spread("auc_few") for row in rows) else [])]
    head = ["strategy", "backbone", *(metric_title(name, k) for name in names), "annotation AUC", "rows/s"]
    head += ["direct / pass / inverse"] if directed else []
    head += ["seeds", "settings tried"] + (["published AUC / GAUC / NDCG"] if table.published else [])
    best = {name: max((s.mean for row in rows if (s := row.spread(name))), default=None) for name in names}
    lines = []
    for row in rows:
        cells = [row.case.label, row.case.backbone]
        for name in names:
            value = row.spread(name)
            cells.append(f"**{value}**" if value and value.mean == best[name] else str(value or "-"))
        speed = row.spread("rows_per_s")
        cells += [str(row.spread("annotation_auc") or "-"), f"{speed.mean:,.0f}" if speed else "-"]
        cells += [_shares(row.directions)] if directed else []
        cells += [str(len(row.runs)), row.tried]
        if table.published:
            figures = table.published.get(row.case.backbone, {}).get(row.case.strategy, [])
            cells.append(" / ".join(f"{figure:.4f}" for figure in figures) or "-")
        lines.append(cells)
    return _table(head, lines)


def _timeline(rows: Sequence[Row]) -> str:
    """The directions of compared settings in some epochs."""
    directed = [(row, row.directions_by_epoch()) for row in rows if row.case.variant and row.directions]
    epochs = [epoch for epoch in _TIMELINE if any(epoch in steps for _, steps in directed)]
    lines = [[row.title, *(_shares(steps.get(epoch, {})) for epoch in epochs)] for row, steps in directed]
    return _table(["direct / pass / inverse in epoch", *map(str, epochs)], lines) if lines else ""


def _comparisons(rows: Sequence[Row], metric: str, k: int) -> list[str]:
    """The best row against the next: on each backbone (with the floor), and over everything."""
    backbones = list(dict.fromkeys(row.case.backbone for row in rows if row.case.strategy != FLOOR))
    groups = [(f"On {name}", [r for r in rows if r.case.backbone in (name, "-")]) for name in backbones]
    if len(backbones) > 1:
        groups.append(("Over everything", list(rows)))
    return [text for where, group in groups if (text := ahead(where, group, metric, k))]


def ahead(where: str, rows: Sequence[Row], metric: str, k: int) -> str | None:
    """One line: the row that is best by a test metric, its lead over the next, and whether it is significant."""
    ranked = sorted(((s.mean, row) for row in rows if (s := row.spread(metric))), key=lambda pair: -pair[0])
    if len(ranked) < 2:
        return None
    (first, best), (second, following) = ranked[:2]
    values = best.by_seed(metric), following.by_seed(metric)
    test = paired(*values)
    sure = ""
    if values[0].keys() != values[1].keys():
        sure = " (not tested: their seeds differ)"
    elif test is not None and test.p is not None:
        verdict = "significant" if test.p < 0.05 else "not significant"
        sure = f", paired t-test over {test.seeds} seeds p = {test.p:.2g} ({verdict} at 0.05)"
    return (
        f"{where}: **{best.title}** {first:.4f}, ahead of {following.title} {second:.4f} by "
        f"{first - second:.4f} {metric_title(metric, k)}{sure}."
    )


def _shares(directions: Mapping[str, int]) -> str:
    return " / ".join(f"{share:.0%}" for share in direction_shares(directions)) or "-"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))


def _list(title: str, items: Iterable[str]) -> str:
    lines = [f"- {item}" for item in items]
    return "\n".join([title, "", *lines]) if lines else ""
