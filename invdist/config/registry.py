"""The strategies (`method:`) and backbones (`model:`) that settings can name, ours and those of installed packages.

The registries are in a room below the code that they list: settings are checked without importing a trainer.
An entry registers itself when its module is imported:

    @STRATEGIES.register("mine")
    class Mine(Strategy): ...

A package of your own declares the module as an entry point (`[project.entry-points."invdist.strategies"]`); every
process of a run then finds it by itself.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any, TypeVar

from invdist.runtime.errors import UserError

C = TypeVar("C", bound=type)

REMOVED = {
    "none_warm": "use method=none with exposures.vectors=true",
    "ig_warm": "use method=ig with exposures.vectors=true",
}
"""Names that settings and runs of earlier versions may have, and what to use instead."""


class Registry:
    """Classes by name: the modules of `package`, and the entry points of `group`."""

    def __init__(self, kind: str, setting: str, package: str, group: str) -> None:
        self._kind, self._setting, self._package, self._group = kind, setting, package, group
        self._types: dict[str, Any] = {}
        self._loaded = False

    def register(self, name: str) -> Callable[[C], C]:
        """Makes the decorated class a choice of the setting."""

        def add(entry: C) -> C:
            if name in self._types and self._types[name] is not entry:
                raise ValueError(f"a {self._kind} named {name!r} is registered already: {self._types[name]}")
            self._types[name] = entry
            return entry

        return add

    def names(self) -> list[str]:
        """The choices of the setting, sorted."""
        self._load()
        return sorted(self._types)

    def get(self, name: str) -> Any:
        """The class of that name; `UserError` if there is none."""
        self._load()
        if name in REMOVED:
            raise UserError(f"{self._setting}: {name} was removed; {REMOVED[name]}")
        if name not in self._types:
            raise UserError(f"{self._setting}: there is no {self._kind} {name!r}; there are {', '.join(self.names())}")
        return self._types[name]

    def _load(self) -> None:
        if self._loaded:
            return
        self._loaded = True
        package = importlib.import_module(self._package)
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{self._package}.{module.name}")
        for plugin in entry_points(group=self._group):
            try:
                plugin.load()
            except Exception as error:
                raise UserError(
                    f"the {self._kind} plugin {plugin.name} = {plugin.value} cannot be imported: {error!r}; "
                    "fix or uninstall the package that brings it"
                ) from error


STRATEGIES = Registry("strategy", "method", "invdist.learning.strategies", "invdist.strategies")
BACKBONES = Registry("backbone", "model", "invdist.models.backbones", "invdist.backbones")
