"""invdist: distributed inverse learning for recommenders with extremely sparse feedback.

For notebooks: `invdist.prepare(...)`, `invdist.train(config) -> Run`, `invdist.open_run(path)`; see `invdist.api`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from invdist.api import Run as Run
    from invdist.api import open_run as open_run

__version__ = "0.1.0"

_COMMANDS = ("prepare", "train")
"""Modules that are commands and, called, functions of the API: see `invdist.callable_module`."""


def __getattr__(name: str) -> Any:
    # Nothing is imported before it is asked for: `invdist --help` must not wait for torch.
    if name in _COMMANDS:
        return importlib.import_module(f"invdist.{name}")
    if name in ("Run", "open_run"):
        return getattr(importlib.import_module("invdist.api"), name)
    raise AttributeError(f"module 'invdist' has no attribute {name!r}")
