"""Every benchmark of the page docs/benchmarks.md, one after the other, each in a process of its own.

What was measured is kept in `benchmarks.json` beside the page, each with its command and the load of the machine, so
that some can be measured again and the page be written without measuring.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from invdist.bench import _page
from invdist.runtime.errors import UserError
from invdist.runtime.files import write_atomically
from invdist.runtime.install import installed
from invdist.runtime.progress import ProgressLine

RESULTS = "benchmarks.json"
PLAN = {
    "peers": "peers --cases gmf:1024 gmf:8192",
    "peers_neumf": "peers --cases neumf:1024",
    "epoch": "epoch",
    "ranks": "ranks --parts weak",
    "strong": "ranks --parts strong",
    "crossover": "ranks --parts crossover --repeats 5",
    "latency": "ranks --parts latency --batch 1024",
    "exchange": "exchange",
    "step_1024": "step --repeats 21",
    "step_8192": "step --batch 8192 --repeats 21",
    "step_65536": "step --batch 65536 --repeats 5",
    "neumf_1024": "step --model neumf --repeats 11",
    "scale": "scale --repeats 15",
    "memory": "memory",
    "growth": "growth",
}
"""The arguments of `invdist bench`, by the name of what they measure."""


def measure(folder: Path, only: Sequence[str] | None = None, recbole: str | None = None) -> dict[str, Any]:
    """Measures what `PLAN` has, or `only` some of it, and keeps the figures in `folder`."""
    if unknown := set(only or ()) - PLAN.keys():
        raise UserError(f"--only {','.join(sorted(unknown))}: expected some of {', '.join(PLAN)}")
    results = read_results(folder)
    names = list(only or PLAN)
    with ProgressLine() as progress:
        for number, name in enumerate(names, 1):
            words = shlex.split(PLAN[name]) + (["--recbole", recbole] if recbole and name.startswith("peers") else [])
            progress.print(f"{number} of {len(names)}: invdist bench {shlex.join(words)}")
            results[name] = _measured(words) | {"command": f"invdist bench {PLAN[name]}"}
            results[name]["command"] += " --recbole" if "--recbole" in words else ""
            # After each: an interrupted run keeps what it has measured.
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / RESULTS, json.dumps(results, indent=1) + "\n")
    return results


def _measured(words: Sequence[str]) -> dict[str, Any]:
    load, started, used = os.getloadavg()[0], time.monotonic(), _cpu_seconds()
    command = [sys.executable, "-m", "invdist", "bench", *words, "--json"]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if ended.returncode:
        raise UserError(f"invdist bench {shlex.join(words)} ended with code {ended.returncode}")
    seconds = time.monotonic() - started
    by_all, by_us = (after - before for before, after in zip(used, _cpu_seconds(), strict=True))
    return {
        "figures": json.loads(ended.stdout),
        "date": time.strftime("%Y-%m-%d"),
        "seconds": round(seconds),
        "load_before": round(load, 2),
        "used_by_others": round(max(0.0, by_all - by_us) / (seconds * (os.cpu_count() or 1)), 3),
        "machine": _machine(),
    }


def _cpu_seconds() -> tuple[float, float]:
    """CPU seconds of everything on this machine, and of the processes that were started here and have ended.

    The load average still shows who was there a minute ago; this shows who was there while it was measured.
    """
    with open("/proc/stat") as status:
        user, nice, system, _, _, irq, soft_irq = map(int, status.readline().split()[1:8])
    ours = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (user + nice + system + irq + soft_irq) / os.sysconf("SC_CLK_TCK"), ours.ru_utime + ours.ru_stime


def _machine() -> str:
    with open("/proc/cpuinfo") as information:
        named = [line.partition(":")[2].strip() for line in information if line.startswith("model name")]
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    versions = ", ".join(f"{name} {installed(name)}" for name in ("torch", "torchrec", "ray"))
    return f"{os.cpu_count()} cores ({named[0] if named else platform.machine()}), {memory:.0f} GiB, {versions}"


def read_results(folder: Path) -> dict[str, Any]:
    """What was measured before; nothing, if there is no file."""
    path = folder / RESULTS
    if not path.exists():
        return {}
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}): remove it, and measure with `invdist bench --all`") from None


def write_page(folder: Path) -> Path:
    """Writes `benchmarks.md` and its pictures from what was measured."""
    results = read_results(folder)
    if not results:
        raise UserError(f"{folder / RESULTS} is not there: measure first, with `invdist bench --all --report {folder}`")
    page = folder / "benchmarks.md"
    _page.write(page, results)
    return page
