"""A run with plain training beside it: what the settings of `invdist local` buy on the same data."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from invdist.config import Config
from invdist.evaluation.tables import comparison_table
from invdist.training.history import History

PLAIN = ("method=none", "exposures.vectors=false", "rows.bias=true")
"""Settings of the run beside: log-loss on the labeled interactions. Without bias columns it would be far below the
means on few labels, and a comparison with it would flatter."""


def is_plain(config: Config) -> bool:
    """Whether a run is plain training itself, so that there is nothing to compare it with."""
    return config.method == "none" and not config.exposures.vectors


def train_and_compare(config: Config, command: Sequence[str], train: Callable[[list[str]], int]) -> int:
    """Trains by `command`, then again with plain training, and prints one table of both and the means.

    `config` has the settings of `command`. `train` runs a command and gives its exit code. The second run is named like
    the first with `-plain` behind it. If one of them fails or is stopped, its exit code is given, and no table.
    """
    title = f"{config.method}, exposure vectors" if config.exposures.vectors else config.method
    runs: list[Path] = []
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        for beside in (False, True):
            overrides = [*PLAIN, f"name={runs[0].name}-plain"] if beside else []
            if beside:
                print("\nthe same by plain training, to compare with (--no-compare leaves it out)", flush=True)
            if code := train([*command, *overrides, "--result", str(result)]):
                return code
            runs.append(Path(json.loads(result.read_text())["run"]))
    finals = [final for run in runs if (final := History.read(run).final)]
    print(f"\n{comparison_table([title, 'plain training'], finals, config.training.ndcg_k)}", flush=True)
    return 0
