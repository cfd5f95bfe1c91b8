"""The strategies by name. Third parties register theirs the same way, see `invdist.learning.strategy`.

A strategy outside this package is found through an entry point of the group `invdist.strategies`, in every process of
a run alike.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any, TypeVar

from torch import Tensor

from invdist.errors import UserError
from invdist.learning.strategy import Phase, Setting, Strategy
from invdist.model.frozen import FrozenModel
from invdist.model.recommender import Recommender

S = TypeVar("S", bound=type[Strategy])


class _Registry:
    def __init__(self) -> None:
        self._types: dict[str, type[Strategy]] = {}
        self._loaded = False

    def register(self, name: str) -> Callable[[S], S]:
        """Makes the decorated class a choice of `method:`; its `Config` becomes the section `name:`."""

        def add(strategy: S) -> S:
            if name in self._types and self._types[name] is not strategy:
                raise ValueError(f"a strategy named {name!r} is registered already: {self._types[name]}")
            self._types[name] = strategy
            return strategy

        return add

    def names(self) -> list[str]:
        """The choices of `method:`."""
        self._load()
        return sorted(self._types)

    def config_type(self, name: str) -> type:
        """The dataclass of a strategy's options."""
        return self._type(name).Config

    def phases(self, name: str, setting: Setting) -> tuple[Phase, ...]:
        """`Strategy.phases` of a strategy by name."""
        return self._type(name).phases(setting)

    def build(self, name: str, setting: Setting, model: Recommender) -> Strategy:
        """A strategy by name."""
        return self._type(name)(setting, model)

    def frozen(self, name: str, options: Any, users: int, state: Mapping[str, Tensor]) -> FrozenModel | None:
        """`Strategy.frozen` of a strategy by name."""
        return self._type(name).frozen(options, users, state)

    def _type(self, name: str) -> type[Strategy]:
        self._load()
        if name not in self._types:
            raise UserError(f"method: there is no strategy {name!r}; there are {', '.join(self.names())}")
        return self._types[name]

    def _load(self) -> None:
        if not self._loaded:
            self._loaded = True
            from invdist.learning import strategies

            for module in pkgutil.iter_modules(strategies.__path__):
                importlib.import_module(f"{strategies.__name__}.{module.name}")
            for plugin in entry_points(group="invdist.strategies"):
                try:
                    plugin.load()
                except Exception as error:
                    raise UserError(
                        f"the strategy plugin {plugin.name} = {plugin.value} cannot be imported: {error!r}; "
                        "mend or uninstall the package that brings it"
                    ) from error


STRATEGIES = _Registry()
