"""What the report of a run shows: the variables of the template `page.html`, which lays them out and escapes them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple, cast

import plotly.graph_objects as go
from markupsafe import Markup

from invdist.config.plain_yaml import dotted
from invdist.evaluation.tables import METRICS, count, directions_text, duration, metric_title, number
from invdist.report import figures as draw
from invdist.training.history import History

_LESS_IS_BETTER = ("logloss", "ece")
_COUNTS = ("rows", "users", "users_left_out")
_ALL_METRICS = (*METRICS, "gauc_weighted", "auc_few", *_LESS_IS_BETTER, *_COUNTS)


class Figure(NamedTuple):
    """A figure with the texts around it; `plot` is None if the run has nothing to draw."""

    id: str
    title: str
    plot: go.Figure | None
    caption: str
    wide: bool = False


class Cell(NamedTuple):
    """A figure of the results: its text, the difference to the first run, whether it is the best of all runs."""

    text: str
    difference: str = ""
    best: bool = False


def page_content(runs: Sequence[History]) -> dict[str, Any]:
    """The variables of `page.html`. The first run is reported, the others are compared with it."""
    history, final = runs[0], runs[0].final
    sections = {
        title: [figure for figure in group if figure.plot is not None]
        for title, group in {
            "Curves": _curves(runs),
            "Directions": _directions(history),
            "Annotations": _annotations(history),
            "Speed": _speed(runs),
        }.items()
    }
    plots = {figure.id: figure.plot for group in sections.values() for figure in group}
    plan = history.start.get("plan")
    return {
        "runs": runs,
        "run": history,
        "state": "finished" if final else f"not finished: {len(history.epochs)} epochs so far",
        "warnings": [f"{run.name}: {text}" if len(runs) > 1 else text for run in runs for text in run.warnings],
        "cards": _cards(history),
        "results": _results(runs),
        "sections": sections,
        "figures_json": _script_json(plots),
        "data": _texts({**(history.dataset or history.start.get("dataset") or {}), **_grown(history)}),
        "plan": [_table(entry) for entry in plan if isinstance(entry, Mapping)] if isinstance(plan, list) else [],
        "config": _config(runs),
        "environment": _texts(_environment(history)),
    }


def _script_json(plots: Mapping[str, Any]) -> Markup:
    """Figures by id as JSON for a script element; without "<", so that no text of a run can end the element."""
    texts = (f"{json.dumps(name)}:{figure.to_json()}" for name, figure in plots.items())
    return Markup("{" + ",".join(texts).replace("<", "\\u003c") + "}")


def _grown(history: History) -> dict[str, Any]:
    """What became of the ids of the run that this one goes on from."""
    events = history.of("grown")
    return (
        {"grown": {key: value for key, value in events[-1].items() if key not in ("event", "time")}} if events else {}
    )


def _cards(history: History) -> list[tuple[str, str]]:
    final, last = history.final or {}, (history.epochs or [{}])[-1]
    split = "test" if final.get("test") else "valid"
    metrics = final.get(split) or last.get("valid") or {}
    cards = [
        (number(metrics[name]), f"{split} {metric_title(name, history.ndcg_k)}") for name in METRICS if name in metrics
    ]
    if final.get("best_epoch") is not None:
        cards.append((str(final["best_epoch"]), "best epoch"))
    if (final or last).get("rows_per_s") is not None:
        cards.append((count((final or last)["rows_per_s"]), "rows/s"))
    if final.get("seconds") is not None:
        cards.append((duration(final["seconds"]), "training time"))
    learning = [event.get("seconds") for event in history.of("vectors")]
    if seconds := [value for value in learning if isinstance(value, int | float)]:
        cards.append((duration(sum(seconds)), "learning exposure vectors, once per data set"))
    if (final.get("annotations") or {}).get("auc") is not None:
        cards.append((number(final["annotations"]["auc"]), "annotation AUC"))
    return cards


def _results(runs: Sequence[History]) -> list[tuple[str, list[str], list[tuple[History, list[Cell]]]]]:
    """For each split: its title, the titles of its metrics, and their cells by run."""
    results = []
    for split, title in (("test", "Test"), ("valid", "Validation")):
        measured = [((run.final or {}).get(split) or {}) for run in runs]
        names = [name for name in _ALL_METRICS if any(name in metrics for metrics in measured)]
        if names:
            rows = [
                (run, [_cell(name, metrics.get(name), measured) for name in names])
                for run, metrics in zip(runs, measured, strict=True)
            ]
            results.append((title, [metric_title(name, runs[0].ndcg_k) for name in names], rows))
    return results


def _cell(name: str, value: object, measured: Sequence[Mapping[str, Any]]) -> Cell:
    if name in _COUNTS:
        return Cell(count(value))
    values = [metrics[name] for metrics in measured if isinstance(metrics.get(name), int | float)]
    best = (min if name in _LESS_IS_BETTER else max)(values, default=None)
    first = measured[0].get(name)
    compared = isinstance(value, int | float) and isinstance(first, int | float) and value is not first
    difference = f"{value - first:+.4f}" if compared else ""  # pyright: ignore[reportOperatorIssue]
    return Cell(number(value), difference, len(measured) > 1 and value is not None and value == best)


def _curves(runs: Sequence[History]) -> list[Figure]:
    lines = Counter((number, step.get("phase")) for number, run in enumerate(runs) for step in run.steps)
    thinned = _thinned(max(lines.values(), default=0), "logged steps of a phase")
    return [
        Figure("loss", "Training loss", draw.loss_curve(runs), thinned),
        Figure(
            "metrics",
            "Validation metrics",
            draw.metric_curves(runs),
            "Click a name in the legend to show or hide it.",
        ),
    ]


def _directions(history: History) -> list[Figure]:
    totals = (history.final or {}).get("directions") or {
        name: sum((event.get("directions") or {}).get(name, 0) for event in history.epochs) for name in draw.DIRECTIONS
    }
    caption = (
        "Training-test loss at the candidate that was taken. Direct follows the annotations, inverse goes against "
        f"them, pass leaves them out. {_thinned(len(history.direction_steps), 'steps')}"
    )
    counts = draw.direction_counts(history)
    return [
        Figure("timeline", "The direction of every step", draw.direction_timeline(history), caption, wide=True),
        Figure("directions", "Directions by epoch", counts, directions_text(totals), wide=True),
    ]


def _annotations(history: History) -> list[Figure]:
    final = (history.final or {}).get("annotations") or {}
    ranks = "How well w1 ranks the labels that were hidden from training."
    if final.get("auc") is not None:
        ranks += f" At the end: {number(final['auc'])}."
    bins = "Share of truly positive pairs against the annotation; larger marks hold more pairs."
    w1, w0 = (draw.annotation_histograms(history, name) for name in ("w1", "w0"))
    return [
        Figure("w1", "w1: how positive unlabeled pairs are rated", w1, "First epoch and last."),
        Figure("w0", "w0: how negative", w0, "First epoch and last."),
        Figure("annotation-auc", "Annotation AUC", draw.annotation_auc(history), ranks),
        Figure("reliability", "Reliability", draw.reliability(history), bins),
    ]


def _speed(runs: Sequence[History]) -> list[Figure]:
    speed = "Labeled interactions trained per second, over all ranks."
    return [
        Figure("time", "Where the time went", draw.time_split(runs[0]), "Seconds of each epoch."),
        Figure("throughput", "Throughput", draw.throughput(runs), speed),
    ]


def _table(entry: Mapping[str, Any]) -> dict[str, Any]:
    shards = entry.get("shards") or []
    return {
        **{name: str(entry.get(name, "-")) for name in ("table", "sharding")},
        **{name: count(entry.get(name)) for name in ("rows", "dim")},
        "shards": [_shard(shard) for shard in shards],
    }


def _shard(shard: object) -> str:
    """`rank 1: rows 1,000 to 1,999, columns 0 to 31`."""
    try:
        found = cast(Mapping[str, int], shard)
        end, last = found["row"] + found["rows"], found["column"] + found["columns"]
        columns = f"columns {found['column']} to {last - 1}"
        return f"rank {found['rank']}: rows {found['row']:,} to {end - 1:,}, {columns}"
    except (KeyError, TypeError, ValueError):
        return json.dumps(shard, default=str)


def _config(runs: Sequence[History]) -> list[tuple[str, list[str], bool]]:
    """Each setting with its value in every run, and whether the values differ."""
    configs = [_texts(run.config, as_written=True) for run in runs]
    keys = dict.fromkeys(key for config in configs for key in config)
    rows = [(key, [config.get(key, "-") for config in configs]) for key in keys]
    return [(key, values, len(set(values)) > 1) for key, values in rows]


def _environment(history: History) -> dict[str, Any]:
    names = ("time", "world_size", "device", "backend", "rows_per_epoch")
    shown = {name: history.start[name] for name in names if name in history.start}
    if isinstance(shown.get("time"), int | float):
        shown["time"] = datetime.fromtimestamp(shown["time"], UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return shown | (history.start.get("environment") or {})


def _texts(values: Mapping[str, Any], as_written: bool = False) -> dict[str, str]:
    """Nested values as texts under dotted names; numbers with separators, unless `as_written`."""
    return {key: _text(value, as_written) for key, value in dotted(values, keep_empty=True).items()}


def _text(value: object, as_written: bool) -> str:
    if isinstance(value, str):
        return value
    if value is None:
        return "-"
    if isinstance(value, bool) or as_written or not isinstance(value, int | float):
        return json.dumps(value, default=str)
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"


def _thinned(total: int, what: str) -> str:
    stride = draw.thin(range(total))[1]
    return f"One in {stride} of {total:,} {what} is drawn." if stride > 1 else ""
