"""invdist: distributed inverse learning for recommenders with extremely sparse feedback.

From Python: `invdist.prepare_dataset(...)`, `invdist.train_model(config) -> Run`, `invdist.open_run(path)`; see
`invdist.api`. From a shell: `invdist --help`.
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

__all__ = ["Run", "__version__", "open_run", "prepare_dataset", "train_model"]


def __getattr__(name: str) -> Any:
    # Imported on first use: `invdist --help` must not wait for pyarrow and torch.
    if name in __all__:
        return getattr(importlib.import_module("invdist.api"), name)
    raise AttributeError(f"module 'invdist' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
