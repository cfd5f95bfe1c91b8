"""The sections of the report, as HTML."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any, cast

import plotly.graph_objects as go

from invdist.evaluation.tables import METRICS, count, directions_text, metric_title, number
from invdist.report import figures as draw
from invdist.report.markup import Html, cell, duration, flatten, fold, head, key_values, note, row, table
from invdist.training.history import History

_LESS_IS_BETTER = ("logloss", "ece")
_COUNTS = ("rows", "users", "users_left_out")
_ALL_METRICS = (*METRICS, "gauc_weighted", *_LESS_IS_BETTER, *_COUNTS)

_NO_MEANS = (
    "No run of the method `means` is shown beside this one. It learns nothing and is often close: "
    "train it on the same data and name it with --compare."
)
_LEFT_OUT = "GAUC, NDCG and MRR are means over users with both classes; the others are left out."
_TIMELINE = (
    "Training-test loss at the candidate that was taken. Direct follows the annotations, inverse goes "
    "against them, pass leaves them out."
)

Figures = dict[str, str]
"""Plotly JSON by the id of the element it is drawn in; the sections fill it."""


def body(history: History, others: Sequence[History], figures: Figures) -> str:
    """The header and all sections that have something to show."""
    runs = [history, *others]
    parts = [
        _header(history),
        "<main>",
        _warnings(runs),
        _cards(history),
        _results(runs),
        _curves(runs, figures),
        _directions(history, figures),
        _annotations(history, figures),
        _speed(runs, figures),
        _data(history),
        _plan(history),
        _config(runs),
        _environment(history),
        "<footer>Made by invdist from metrics.jsonl, config.yaml and dataset.json of the run.</footer>",
        "</main>",
    ]
    return "\n".join(part for part in parts if part)


def _header(history: History) -> str:
    finished = history.final is not None
    state = "finished" if finished else f"not finished: {len(history.epochs)} epochs so far"
    what = f"{escape(history.method)} on {escape(history.model)}, {state}"
    return (
        f'<header><div><h1>{escape(history.name)}</h1><div class="soft">{what}</div></div>'
        '<button id="theme" type="button" hidden>Dark</button></header>'
    )


def _warnings(runs: Sequence[History]) -> str:
    texts = [f"{run.name}: {text}" if len(runs) > 1 else text for run in runs for text in run.warnings]
    if not texts:
        return ""
    items = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f'<div class="warnings" role="note"><b>Warnings</b><ul>{items}</ul></div>'


def _cards(history: History) -> str:
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
    if (final.get("annotations") or {}).get("auc") is not None:
        cards.append((number(final["annotations"]["auc"]), "annotation AUC"))
    if not cards:
        return note("No epoch has finished yet.")
    boxes = (f'<div class="card"><b>{escape(value)}</b><span>{name}</span></div>' for value, name in cards)
    return f'<div class="cards">{"".join(boxes)}</div>'


def _results(runs: Sequence[History]) -> str:
    tables = ""
    for split, title in (("test", "Test"), ("valid", "Validation")):
        measured = [((run.final or {}).get(split) or {}) for run in runs]
        names = [name for name in _ALL_METRICS if any(name in metrics for metrics in measured)]
        if names:
            tables += f"<h3>{title}</h3>{_result_table(runs, measured, names)}"
    if not tables:
        return ""
    floor = note(_NO_MEANS) if all(run.method != "means" for run in runs) else ""
    return f"<h2>Results</h2>{tables}{note(_LEFT_OUT)}{floor}"


def _result_table(runs: Sequence[History], measured: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Html:
    heads = [head(name) for name in ("run", "method", "model")]
    heads += [head(metric_title(name, runs[0].ndcg_k), "number") for name in names]
    rows = []
    for run, metrics in zip(runs, measured, strict=True):
        cells = [cell(run.name, "text"), cell(run.method), cell(run.model)]
        rows.append(row(cells + [_result_cell(name, metrics.get(name), measured) for name in names]))
    return table(heads, rows, "results")


def _result_cell(name: str, value: object, measured: Sequence[Mapping[str, Any]]) -> Html:
    if name in _COUNTS:
        return cell(count(value), "number")
    values = [metrics[name] for metrics in measured if isinstance(metrics.get(name), int | float)]
    best = (min if name in _LESS_IS_BETTER else max)(values, default=None)
    kind = "number best" if len(measured) > 1 and value is not None and value == best else "number"
    first = measured[0].get(name)
    if isinstance(value, int | float) and isinstance(first, int | float) and value is not first:
        return cell(Html(f"{number(value)}<small>{value - first:+.4f}</small>"), kind)
    return cell(number(value), kind)


def _curves(runs: Sequence[History], figures: Figures) -> str:
    lines = Counter((number, step.get("phase")) for number, run in enumerate(runs) for step in run.steps)
    loss_note = _thinned(max(lines.values(), default=0), "logged steps of a phase")
    legend_note = "Click a name in the legend to show or hide it."
    shown = [
        _figure("loss", "Training loss", draw.loss_curve(runs), loss_note, figures),
        _figure("metrics", "Validation metrics", draw.metric_curves(runs), legend_note, figures),
    ]
    return _section("Curves", shown)


def _directions(history: History, figures: Figures) -> str:
    totals = (history.final or {}).get("directions") or {
        name: sum((event.get("directions") or {}).get(name, 0) for event in history.epochs) for name in draw.DIRECTIONS
    }
    caption = f"{_TIMELINE} {_thinned(len(history.direction_steps), 'steps')}"
    timeline, counts = draw.direction_timeline(history), draw.direction_counts(history)
    shown = [
        _figure("timeline", "Which way every step went", timeline, caption, figures, wide=True),
        _figure("directions", "Directions by epoch", counts, directions_text(totals), figures, wide=True),
    ]
    return _section("Directions", shown)


def _annotations(history: History, figures: Figures) -> str:
    final = (history.final or {}).get("annotations") or {}
    compared = "First epoch against the last."
    ranks = "How well w1 ranks the labels that were hidden from training."
    if final.get("auc") is not None:
        ranks += f" At the end: {number(final['auc'])}."
    bins = "Share of truly positive rows against the annotation; larger marks hold more rows."
    w1, w0 = (draw.annotation_histograms(history, name) for name in ("w1", "w0"))
    shown = [
        _figure("w1", "w1: how positive unlabeled rows are taken to be", w1, compared, figures),
        _figure("w0", "w0: how negative", w0, compared, figures),
        _figure("annotation-auc", "Annotation AUC", draw.annotation_auc(history), ranks, figures),
        _figure("reliability", "Reliability", draw.reliability(history), bins, figures),
    ]
    return _section("Annotations", shown)


def _speed(runs: Sequence[History], figures: Figures) -> str:
    speed_note = "Labeled rows trained per second, over all ranks."
    shown = [
        _figure("time", "Where the time went", draw.time_split(runs[0]), "Seconds of each epoch.", figures),
        _figure("throughput", "Throughput", draw.throughput(runs), speed_note, figures),
    ]
    return _section("Speed", shown)


def _data(history: History) -> str:
    summary = history.dataset or history.start.get("dataset") or {}
    return f"<h2>Data</h2>{key_values(summary)}" if summary else ""


def _plan(history: History) -> str:
    plan = history.start.get("plan")
    tables = [entry for entry in plan if isinstance(entry, Mapping)] if isinstance(plan, list) else []
    if not tables:
        return ""
    rows = []
    for entry in tables:
        shards = entry.get("shards") or []
        listed = fold(str(len(shards)), "; ".join(map(_shard, shards))) if shards else "-"
        names = [cell(str(entry.get(name, "-"))) for name in ("table", "sharding")]
        sizes = [cell(count(entry.get(name)), "number") for name in ("rows", "dim")]
        rows.append(row([*names, *sizes, cell(listed, "text")]))
    heads = [
        head("table"),
        head("sharding"),
        head("rows", "number"),
        head("columns", "number"),
        head("shards"),
    ]
    start = history.start
    where = f"{start.get('world_size', '?')} ranks, device {start.get('device', 'unknown')}"
    stats = start.get("plan_stats")
    full = fold("The planner's account", Html(f"<pre>{escape(str(stats))}</pre>")) if stats else ""
    return f"<h2>Sharding plan</h2>{note(where)}{table(heads, rows, 'plan')}{full}"


def _shard(shard: object) -> str:
    """`rank 1: rows 1,000 to 1,999`, with columns where a row is cut."""
    try:
        found = cast(Mapping[str, int], shard)
        end, last = found["row"] + found["rows"], found["column"] + found["columns"]
        cut = f", columns {found['column']} to {last - 1}"
        return f"rank {found['rank']}: rows {found['row']:,} to {end - 1:,}{cut}"
    except (KeyError, TypeError, ValueError):
        return json.dumps(shard, default=str)


def _config(runs: Sequence[History]) -> str:
    configs = [flatten(run.config, as_written=True) for run in runs]
    keys = list(dict.fromkeys(key for config in configs for key in config))
    if not keys:
        return ""
    several = len(runs) > 1
    rows = []
    for key in keys:
        values = [config.get(key, "-") for config in configs]
        kind = "differs" if len(set(values)) > 1 else ""
        rows.append(row([cell(key), *[cell(value, "text") for value in values]], kind))
    shown = table([head("key"), *[head(run.name) for run in runs]], rows, "config")
    marked = note("What differs between the runs is marked.") if several else ""
    return f"<h2>Config</h2>{marked}{fold(f'{len(keys)} settings', shown, opened=several)}"


def _environment(history: History) -> str:
    names = ("time", "world_size", "device", "backend", "rows_per_epoch")
    shown = {name: history.start[name] for name in names if name in history.start}
    if isinstance(shown.get("time"), int | float):
        shown["time"] = datetime.fromtimestamp(shown["time"], UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    shown.update(history.start.get("environment") or {})
    return f"<h2>Environment</h2>{key_values(shown)}" if shown else ""


def _figure(name: str, title: str, figure: go.Figure | None, caption: str, figures: Figures, wide: bool = False) -> str:
    if figure is None:
        return ""
    figures[name] = str(figure.to_json())
    size = ' class="wide"' if wide else ""
    plot = f'<div class="plot" id="{name}" role="img" aria-label="{escape(title)}"></div>'
    return f"<figure{size}><h3>{title}</h3>{plot}<figcaption>{escape(caption)}</figcaption></figure>"


def _section(title: str, shown: Sequence[str]) -> str:
    present = "".join(shown)
    return f'<h2>{title}</h2><div class="figures">{present}</div>' if present else ""


def _thinned(total: int, what: str) -> str:
    stride = draw.thin(range(total))[1]
    return f"One in {stride} of {total:,} {what} is drawn." if stride > 1 else ""
