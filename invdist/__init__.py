"""invdist: distributed inverse learning for recommenders with extremely sparse feedback.

For notebooks: `invdist.prepare_dataset(...)`, `invdist.train_model(config) -> Run`, `invdist.open_run(path)`; see
`invdist.api`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from invdist.api import Run as Run
    from invdist.api import open_run as open_run
    from invdist.api import prepare_dataset as prepare_dataset
    from invdist.api import train_model as train_model

__version__ = "0.2.0"

_API = ("Run", "open_run", "prepare_dataset", "train_model")


def __getattr__(name: str) -> Any:
    # Imported when first used: `invdist --help` must not wait for torch.
    if name in _API:
        return getattr(importlib.import_module("invdist.api"), name)
    raise AttributeError(f"module 'invdist' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_API])
