"""docs/benchmarks.md, from the figures of all benchmarks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from invdist.bench._bars import BARS
from invdist.bench._figures import growth_lines, speed_bars
from invdist.report.page import write_output

_TRAINERS = {
    "invdist": "invdist, none",
    "invdist_ig": "invdist, ig",
    "recbole": "RecBole 1.2",
    "torch_loop": "PyTorch loop",
    "torch_loop_by_row": "PyTorch loop, by row",
    "torchrec": "TorchRec pipeline",
    "three_copies": "ig by three copies",
}
_CASES = {"gmf": "GMF, batch 1,024", "gmf_8192": "GMF, batch 8,192", "neumf": "NeuMF, batch 1,024"}
_SWEEPS = {
    "batch": "interactions a step",
    "dim": "columns",
    "rows": "table rows",
    "ranks": "ranks",
    "candidates": "candidates",
    "rate": "unlabeled a labeled",
}
SUPERLINEAR = 1.05
_HEAD = """# Benchmarks

What it costs to train, measured. Each section has its command, what was measured, and the load of the machine before it
started (which still shows who was there a minute ago) and how much of it others used meanwhile. This page is written by
one command, from what it measures and keeps in `benchmarks.json`:

```sh
invdist bench --all --report              # about 15 minutes on a quiet machine
invdist bench --all --only peers --report --recbole DIR    # measure some again; RecBole goes into an environment in DIR
invdist bench --report                    # write the page again, without measuring
```

Figures are ratios within one run where possible: machines differ, and this one is small. How costs grow on a cluster,
as arithmetic: [scale.md](scale.md).
"""


def write(page: Path, results: Mapping[str, Any]) -> None:
    """Writes the page, and its pictures into the folder `figures` beside it."""
    sections = {
        "peers": _peers,
        "epoch": _epoch,
        "ranks": _ranks,
        "strong": _strong,
        "crossover": _crossover,
        "latency": _latency,
        "step_1024": lambda *_: _steps(results),
        "memory": _memory,
        "growth": _growth,
    }
    merged = _with_all_peers(results)
    parts = [_HEAD, _machines(results), _goals(merged)]
    for name, section in sections.items():
        if name in results:
            parts.append("\n".join(section(merged[name]["figures"], page.parent, _measured(merged[name]))))
    write_output(page, "\n".join(part.rstrip("\n") + "\n" for part in parts))


def _with_all_peers(results: Mapping[str, Any]) -> Mapping[str, Any]:
    """The results with all cases of the contest in one: NeuMF's is run apart, because it takes long."""
    if not results.keys() >= {"peers", "peers_neumf"}:
        return results
    gmf, neumf = (results[name]["figures"] for name in ("peers", "peers_neumf"))
    by_case = {key: gmf[key] | neumf[key] for key in ("times_peers", "ig_epoch_vs_none")}
    more = _measured(results["peers_neumf"])
    return {**results, "peers": {**results["peers"], "figures": {**neumf, **gmf, **by_case}, "more": f" {more}"}}


def _machines(results: Mapping[str, Any]) -> str:
    machines = sorted({(result["machine"], result["date"]) for result in results.values()})
    return "\n".join(f"Measured on {machine}, {date}." for machine, date in machines)


def _measured(result: Mapping[str, Any]) -> str:
    load = (
        f"load before it {result['load_before']:.2f}, others used {result['used_by_others']:.0%} of the CPUs meanwhile"
    )
    return f"`{result['command']}`: {load}; {result['seconds']} s.{result.get('more', '')}"


def _goals(results: Mapping[str, Any]) -> str:
    lines = []
    for bar in BARS:
        if bar.source not in results:
            continue
        try:
            value = bar.value(results[bar.source]["figures"])
        except KeyError:
            continue  # a peer that was not asked for
        sign, verdict = ("<=" if bar.most else ">="), ("met" if bar.met(value) else "**missed**")
        lines.append((bar.what, f"{sign} {_number(bar.goal)}", _number(value), verdict))
    met = sum(verdict == "met" for *_, verdict in lines)
    head = f"\n## Goals: {met} of {len(lines)} met\n"
    return "\n".join([head, *_table(("what", "goal", "measured", ""), lines)])


def _peers(figures: Mapping[str, Any], folder: Path, measured: str) -> Iterator[str]:
    cases = {name: title for name, title in _CASES.items() if name in figures}
    speed_bars(folder / "figures" / "peers.svg", {title: figures[name] for name, title in cases.items()}, _TRAINERS)
    yield "## Against other trainers\n"
    yield (
        "The same interactions, model, batch size and learning rate, from files to weights. Each is a process with one "
        f"thread; all take turns on one core. {figures['data']}, {figures['interactions']:,} training interactions.\n"
    )
    yield measured + "\n"
    yield "![Interactions/s of invdist and of others](figures/peers.svg)\n"
    lines = [
        (text, *(_speed(figures[name].get(key), figures["times_peers"][name].get(key)) for name in cases))
        for key, text in _TRAINERS.items()
    ]
    yield from _table(("interactions/s (invdist is so many times as fast)", *cases.values()), lines)
    for key, why in figures.get("absent", {}).items():
        yield f"\n{_TRAINERS[key]}: {why}."
    yield """
What is fair about it, and what is not:

- The peers have all interactions in memory before their clock starts. invdist streams its shards: it decodes them in
  the first epoch, which does not count, keeps what it decoded (up to 64 MB), and shuffles and slices in every epoch.
- `none` and the PyTorch loops have lazy Adam on the rows, RecBole its default, dense Adam. TorchRec has exact SGD:
  FBGEMM has no Adam on CPUs, and SGD is its cheapest. Its `TrainPipelineSparseDist` runs on CPUs as it is.
- *PyTorch loop* takes whole batches by index, as PyTorch's documentation has it; *by row* is `DataLoader(TensorDataset,
  shuffle=True)`, as most people write it. RecBole has no GMF; it is written as its documentation says, in ten lines.
- *Three copies* is an `ig` epoch with dense gradients, as in the authors' code. At the few table rows of MovieLens-1M
  copies are cheap: at those of Micro Video (`invdist bench step`) they are not."""


def _epoch(figures: Mapping[str, Any], folder: Path, measured: str) -> Iterator[str]:
    batches = [key.removeprefix("ratio_") for key in figures if key.startswith("ratio_")]
    yield "## Files to weights, against in-memory\n"
    yield (
        "A run that streams its shards, against bare steps on the same batches in memory. One core, in turns, after a "
        "first epoch that decodes the shards.\n"
    )
    yield measured + "\n"
    lines = [
        (
            f"{int(batch):,}",
            f"{figures[f'files_rows_per_s_{batch}']:,.0f}",
            f"{figures[f'in_memory_rows_per_s_{batch}']:,.0f}",
            f"{figures[f'ratio_{batch}']:.2f}",
            f"{figures[f'waiting_for_input_{batch}']:.1%}",
        )
        for batch in batches
    ]
    yield from _table(("batch", "files, rows/s", "in memory, rows/s", "ratio", "waiting for input"), lines)


def _ranks(figures: Mapping[str, Any], folder: Path, measured: str) -> Iterator[str]:
    yield "## A second rank: weak scaling\n"
    yield (
        "Every rank has the same number of interactions. Efficiency is the time of a step of one rank *beside an "
        "equally busy neighbour* over that of a step of two ranks. They take turns of 50 steps: in shorter ones both "
        "would mostly fill the caches again that the other has used.\n"
    )
    yield measured + "\n"
    keys = [key.removeprefix("weak_scaling_") for key in figures if key.startswith("weak_scaling_")]
    lines = [
        (
            f"{'IG' if key.endswith('_ig') else 'plain'}, {int(key.removesuffix('_ig')):,} a rank",
            *(f"{figures[f'{name}_ms_{key}']:.2f}" for name in ("alone", "two_ranks")),
            f"{figures[f'weak_scaling_{key}']:.2f}",
        )
        for key in keys
    ]
    yield from _table(("step", "alone, ms", "two ranks, ms", "efficiency"), lines)


def _strong(figures: Mapping[str, Any], folder: Path, measured: str) -> Iterator[str]:
    yield "## A second worker: strong scaling\n"
    yield "Real runs by Ray with the global batch held, files to weights. Readers are Ray actors on the same cores.\n"
    yield measured + "\n"
    batches = [key.removeprefix("strong_scaling_") for key in figures if key.startswith("strong_scaling_")]
    lines = [
        (
            f"{int(batch):,}",
            *(f"{figures[f'{name}_rows_per_s_{batch}']:,.0f}" for name in ("one", "two", "threads")),
            f"{figures[f'strong_scaling_{batch}']:.2f}",
            f"{figures.get(f'free_messages_{batch}', math.nan):.2f}",
            f"{figures[f'threads_{batch}']:.2f}",
        )
        for batch in batches
    ]
    heads = (
        "global batch",
        "one worker, rows/s",
        "two workers",
        "one with two threads",
        "two over one",
        "if messages cost nothing",
        "threads over one",
    )
    yield from _table(heads, lines)
    yield (
        "\nIf messages cost nothing, two workers have twice the rows/s of one with half the batch, as long as readers "
        "find a core that is free."
    )
    yield "\nWhere two threads in one worker have more than two workers: `ray.workers=1 ray.cpus_per_worker=2`."


def _crossover(figures: Mapping[str, Any], folder: Path, measured: str) -> Iterator[str]:
    yield "## When a second rank pays\n"
    yield (
        "Plain steps with the global batch held, one rank against two on the same machine, in turns. A run whose ranks "
        "share a host warns where the model (`training/second_rank.py`) says that they do not pay, and "
        "`ray.workers=auto` follows it.\n"
    )
    yield measured + "\n"
    lines = [
        (
            f"{row['model']}, {row['batch']:,}",
            *(f"{row[name]:.2f}" for name in ("one_ms", "two_ms", "gain")),
            "yes" if row["model_pays"] else "no",
        )
        for row in figures["crossover"]
    ]
    yield from _table(("global batch", "one rank, ms", "two ranks, ms", "gain", "pays, by the model"), lines)


def _latency(figures: Mapping[str, Any], folder: Path, measured: str) -> Iterator[str]:
    yield "## Four and eight ranks under simulated latency\n"
    yield (
        "Every message arrives so long after the last rank has sent it. The model: `step = step without latency + "
        "waits * latency`, with two waits in a plain step (rows; gradients, with which the dense ones travel) and five "
        "in an inverse-gradient step (rows; gradients of U; deltas; losses; gradients of V). Ids travel two steps "
        "ahead and cost no wait. "
        f"All ranks share {figures['cores']} cores, so the step itself takes longer than on machines of their own.\n"
    )
    yield measured + "\n"
    lines = [
        (
            f"{row['ranks']}",
            row["method"],
            f"{row['latency_ms']:g}",
            f"{row['step_ms']:.1f}",
            f"{row['modelled_ms']:.1f}",
            f"{row['waits']:.1f} / {row['modelled_waits']}",
        )
        for row in figures["latency"]
    ]
    yield from _table(("ranks", "step", "latency, ms", "measured, ms", "model, ms", "waits, measured / model"), lines)


def _steps(results: Mapping[str, Any]) -> Iterator[str]:
    yield "## Single steps\n"
    yield "Random ids on the tables of Micro Video, one rank, one thread; milliseconds.\n"
    names = [name for name in ("step_1024", "step_8192", "step_65536", "neumf_1024", "scale") if name in results]
    yield "\n".join(f"- {_measured(results[name])}" for name in names) + "\n"
    lines = []
    for name in names:
        of = results[name]["figures"]
        if name == "scale":
            continue
        times = (f"{of[f'{kind}_ms']:.2f}" for kind in ("plain", "ig", "candidates7", "fused", "textbook"))
        lines.append((f"{of['model']}, {of['batch']:,}", *times, f"{of['ratio']:.2f}", f"{of['plain_vs_fused']:.2f}"))
    heads = ("", "plain", "IG", "IG, 7 candidates", "TorchRec fused", "three copies", "IG / two plain", "plain / fused")
    yield from _table(heads, lines)
    if "scale" in results:
        yield ""
        rows = results["scale"]["figures"]["rows"]
        lines = [(f"{r['rows']:,}", r["method"], f"{r['step_ms']:.2f}", f"{r['peak_mb']:,.0f}") for r in rows]
        yield from _table(("table rows", "method", "step, ms", "peak memory, MB"), lines)


def _memory(figures: Mapping[str, Any], folder: Path, measured: str) -> Iterator[str]:
    yield "## Memory\n"
    yield (
        f"Peak of the fullest rank over what the process had before, {figures['rows']:,} table rows of "
        f"{figures['dim']} columns. The least is rows and optimizer state, without which no engine trains.\n"
    )
    yield measured + "\n"
    lines = [
        (
            row["optimizer"],
            f"{row['ranks']}",
            *(f"{row[f'{name}_mb']:,.0f}" for name in ("least", "built", "none", "ig")),
            f"{row['ratio']:.2f}",
        )
        for row in figures["ranks"]
    ]
    yield from _table(("optimizer", "ranks", "least, MB", "built", "after `none`", "after `ig`", "ig / least"), lines)


def _growth(figures: Mapping[str, Any], folder: Path, measured: str) -> Iterator[str]:
    sweeps = {name: figures[name] for name in _SWEEPS if name in figures}
    growth_lines(folder / "figures" / "growth.svg", sweeps, _SWEEPS)
    yield "## Growth\n"
    yield (
        "Time of a step against one size at a time. An exponent of 0: the size costs nothing; 1: time is in "
        "proportion. The second "
        "exponent is that between the two largest sizes, where the fixed cost of a step no longer hides it.\n"
    )
    yield measured + "\n"
    yield "![Time of a step against batch, columns, table rows, ranks, candidates, rate](figures/growth.svg)\n"
    lines = []
    for name, sweep in sweeps.items():
        for kind in ("plain", "ig"):
            if f"{kind}_exponent" not in sweep:
                continue
            times = ", ".join(f"{ms:.3g}" for ms in sweep[f"{kind}_ms"])
            sizes = ", ".join(f"{size:,}" for size in sweep["sizes"]).replace(",000,000", " M")
            exponents = sweep[f"{kind}_exponent"], sweep[f"{kind}_last"]
            lines.append((_SWEEPS[name], sizes, kind, times, *map(_exponent, exponents)))
    yield from _table(("grows", "sizes", "step", "ms", "exponent", "between the largest"), lines)
    for name, sweep in sweeps.items():
        if sweep.get("left_out"):
            yield f"\nDid not fit the free memory of this machine: {sweep['left_out']} {_SWEEPS[name]}."
    yield from _explained(sweeps)


def _explained(sweeps: Mapping[str, Any]) -> Iterator[str]:
    """What the measurements themselves say of growth that is faster than in proportion."""
    fits = [f"{kind}_{fit}" for kind in ("plain", "ig") for fit in ("exponent", "last")]
    fast = [name for name, sweep in sweeps.items() if any(sweep.get(fit, 0) > SUPERLINEAR for fit in fits)]
    yield "\nBold: faster than in proportion.\n" if fast else "\nNothing grows faster than in proportion."
    for name in fast:
        if name == "ranks":
            most, ms = sweeps[name]["sizes"][-1], sweeps[name]["plain_ms"]
            yield (
                f"- *Ranks* are processes on the cores of this machine. The plain steps of {most} ranks, one after the "
                f"other on one core, would take {most * ms[0]:.3g} ms; together they take {ms[-1]:.3g} ms."
            )
        else:
            yield f"- *{_SWEEPS[name].capitalize()}*: the cause was not measured."


def _speed(speed: float | None, times: float | None) -> str:
    if speed is None:
        return "-"
    return f"{speed:,.0f}" + (f" ({times:.2f}x)" if times else "")


def _exponent(value: float) -> str:
    return f"**{value:.2f}**" if value > SUPERLINEAR else f"{value:.2f}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> Iterator[str]:
    for cells in (heads, ["---"] * len(heads), *lines):
        yield f"| {' | '.join(cells)} |"
