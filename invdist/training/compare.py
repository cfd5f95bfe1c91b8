"""Compares runs: weights to the bit, and rows per epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from invdist.training import run_folder
from invdist.training.checkpoint import CheckpointInfo
from invdist.training.checkpoint.folder import CheckpointFolder
from invdist.training.history import History


def same_weights(one: Path, other: Path) -> bool:
    """Whether the newest checkpoints of two runs have identical tables, optimizer state and dense weights."""
    first, second = _newest(one), _newest(other)
    names = sorted(first.names(""))
    return (
        first.position == second.position
        and names == sorted(second.names(""))
        and all(torch.equal(first.read(name), second.read(name)) for name in names)
    )


def rows_seen(run: Path, rows_per_epoch: int) -> dict[str, int]:
    """Interactions that the epochs of a run lost or repeated, from its events."""
    epochs: dict[int, Any] = {event["epoch"]: event["rows"] for event in History.read(run).of("epoch")}
    difference = np.array([rows - rows_per_epoch for rows in epochs.values()], dtype=np.int64)
    return {
        "lost_rows": int(-difference[difference < 0].sum()),
        "doubled_rows": int(difference[difference > 0].sum()),
    }


def _newest(run: Path) -> CheckpointInfo:
    config, folder = run_folder.reopen(run, [])
    return CheckpointFolder(run_folder.checkpoints(config, folder)).select("last")
