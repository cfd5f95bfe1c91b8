"""Modules that can be called: `invdist.train` is the module of a command and a function of the API."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any


def make_callable(module: str) -> None:
    """Calling the module `invdist.NAME` calls `invdist.api.NAME` from now on.

    Python binds a submodule to its name in the package whenever anything imports it, so a function of that name in
    the package would not stay.
    """
    name = module.rpartition(".")[2]

    class Callable(ModuleType):
        def __call__(self, *args: Any, **options: Any) -> Any:
            return getattr(importlib.import_module("invdist.api"), name)(*args, **options)

    sys.modules[module].__class__ = Callable
