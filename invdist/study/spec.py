"""The keys of a study's YAML file: tables of strategies and backbones, the space that is searched, seeds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Gt

from invdist.config.fields import Count, CountOrZero, OneOf, Section, build
from invdist.config.plain_yaml import read_yaml
from invdist.config.registry import BACKBONES, STRATEGIES
from invdist.runtime.errors import UserError

FLOOR = "means"
"""The strategy that every table has, listed or not."""

Strategy = Annotated[str, OneOf(STRATEGIES.names)]
Backbone = Annotated[str, OneOf(BACKBONES.names)]


class Recipe(Section):
    """How a raw log becomes the data set of a table: the arguments of `invdist prepare`."""

    kind: str
    """A kind of log that `invdist prepare` knows."""
    input: list[str] = []
    """Files or folders, by their paths or inside the folder that INVDIST_DATA names."""
    options: dict[str, Any] = {}
    """Options of the kind, such as label_fraction."""


class Source(Section):
    """The data set of a table: a path, or a recipe that is prepared once."""

    path: str | None = None
    """Folder or URI of a prepared data set."""
    prepare: Recipe | None = None
    """A recipe, prepared into `cache` if it is not there yet."""

    def check(self) -> Iterator[tuple[str, str]]:
        """Problems that concern both fields."""
        if (self.path is None) == (self.prepare is None):
            yield "path", "expected either a path or a `prepare:` recipe"


class _Scope(Section):
    """Some strategies on some backbones."""

    strategies: list[Strategy] | None = None
    """Which strategies; null: all but `means`, which learns nothing."""
    models: list[Backbone] | None = None
    """Which backbones; null: all."""

    def concerns(self, strategy: str, model: str) -> bool:
        """Whether the block applies to a strategy on a backbone."""
        named = strategy != FLOOR if self.strategies is None else strategy in self.strategies
        return named and (self.models is None or model in self.models)


class Block(_Scope):
    """Settings to choose from, for some strategies and backbones; a later block wins over an earlier one."""

    choices: dict[str, list[Any]]
    """Dotted keys of a training config, each with the values to choose from; one value fixes it."""

    def check(self) -> Iterator[tuple[str, str]]:
        """Problems of single choices."""
        for key, values in self.choices.items():
            if not values:
                yield f"choices.{key}", "expected at least one value"


class Start(_Scope):
    """A point to try before the random ones; it counts as one of the trials."""

    settings: dict[str, Any]
    """Values by dotted key; each must be among the choices, and keys left out take their first choice."""


class StudyTable(Section):
    """One table of results: a data set, and what differs from the rest of the study."""

    name: str
    """Title of the table and name of its folder."""
    data: Source
    base: dict[str, Any] = {}
    """Training settings that replace those of the study."""
    space: list[Block] = []
    """Blocks after those of the study."""
    strategies: list[Strategy] | None = None
    """Instead of those of the study."""
    models: list[Backbone] | None = None
    """Instead of those of the study."""
    seeds: list[CountOrZero] | None = None
    """Instead of those of the study."""
    published: dict[str, dict[str, list[float]]] = {}
    """Published figures to show beside ours: by backbone and strategy, [AUC, GAUC, NDCG]."""

    def check(self) -> Iterator[tuple[str, str]]:
        """Problems of the name."""
        if not self.name or self.name in (".", "..") or set(self.name) & set("/\\"):
            yield "name", f"{self.name!r} names no folder: expected a name without slashes"


class Stopping(Section):
    """ASHA: trials that fall behind others of the same strategy and backbone are stopped early."""

    grace_epochs: Count = 5
    """No trial is stopped before this many epochs."""
    reduction: Annotated[float, Gt(1)] = 3.0
    """At epochs grace * reduction^k one trial in `reduction` goes on."""


class Study(Section):
    """A study."""

    name: str
    """Names the study's folder."""
    folder: str = "studies"
    """Where study folders are."""
    cache: str = "data"
    """Where data sets of recipes are."""
    strategies: list[Strategy]
    """Which strategies to compare; `means` is always one of them."""
    models: list[Backbone] = ["gmf"]
    """Which backbones."""
    seeds: list[CountOrZero] = [0, 1, 2, 3, 4]
    """The selected settings of each strategy and backbone are trained and tested with each of these seeds."""
    trials: Count = 8
    """Settings tried for each strategy and backbone: the same tuning budget for all."""
    search: Literal["random", "grid"] = "random"
    """`random`: that many different points of the space; `grid`: all of it, which must be no more."""
    tuning_seed: CountOrZero = 1000
    """Seed of the tuning trials, and of the random search; none of `seeds`."""
    concurrent: Count = 2
    """Trials at once. One of one rank takes a CPU, and a GPU where there is one."""
    gpus: Annotated[float, Gt(0)] = 1.0
    """GPUs of each trial, where the cluster has any and ray.device is not cpu; with a fraction trials share one."""
    cpus: Count | None = None
    """CPUs of the private Ray; null: as many as trials at once or workers need."""
    keep_tuning_checkpoints: bool = False
    """Keep the weights of tuning trials, too; their settings, metrics and events are always kept."""
    stopping: Stopping = Stopping()
    compare: dict[str, list[Any]] = {}
    """Dotted keys whose values are compared: each value has its own row in the table and its own tuning."""
    base: dict[str, Any] = {}
    """Training settings of every trial, as in a training config, without data.path."""
    space: list[Block] = []
    """The settings to search; if they leave one point there is nothing to tune."""
    start: list[Start] = []
    """Points to try first, such as the settings of a strategy's authors."""
    tables: list[StudyTable]
    """The tables."""

    def check(self) -> Iterator[tuple[str, str]]:
        """Problems that concern several fields."""
        if not self.tables:
            yield "tables", "expected at least one table"
        names = [table.name for table in self.tables]
        if len(set(names)) != len(names):
            yield "tables", f"two tables have the same name: {', '.join(names)}"
        seeds = [self.seeds, *(table.seeds for table in self.tables if table.seeds is not None)]
        if any(not each or len(set(each)) != len(each) for each in seeds):
            yield "seeds", "expected at least one seed, none twice"
        if any(self.tuning_seed in each for each in seeds):
            yield "tuning_seed", f"{self.tuning_seed} is also one of seeds; settings are selected on another seed"
        if not self.name or self.name in (".", "..") or set(self.name) & set("/\\"):
            yield "name", f"{self.name!r} names no folder: expected a name without slashes"
        lists = [("strategies", self.strategies), ("models", self.models)]
        for table in self.tables:
            for key, values in (("strategies", table.strategies), ("models", table.models)):
                lists += [(f"tables: {table.name}: {key}", values)] if values is not None else []
        lists += [(f"compare.{key}", values) for key, values in self.compare.items()]
        for key, values in lists:
            if not values or any(value in values[:place] for place, value in enumerate(values)):
                yield key, f"{values}: expected at least one, none twice"
        if FLOOR in self.strategies and len(self.strategies) == 1:
            yield "strategies", f"expected another strategy beside {FLOOR}"

    @property
    def path(self) -> Path:
        """The study's folder."""
        return Path(self.folder).absolute() / self.name


def load(path: str | Path, overrides: Iterable[str] = (), *, only: list[str] | None = None, data: str | None = None):
    """The checked study of a YAML file.

    `only` keeps the tables of these names. `data` is the path of another prepared data set: then only the first table
    is made, on that data set and without published figures.
    """
    study = build(Study, read_yaml(path), overrides, source=str(path))
    if only:
        unknown = [name for name in only if name not in [table.name for table in study.tables]]
        if unknown:
            names = ", ".join(table.name for table in study.tables)
            raise UserError(f"--table {unknown[0]}: {path} has no such table; it has {names}")
        study.tables = [table for table in study.tables if table.name in only]
    if data:
        first = study.tables[0]
        study.tables = [first.model_copy(update={"data": Source(path=data), "published": {}})]
    return study
