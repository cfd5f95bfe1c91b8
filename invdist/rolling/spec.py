"""The keys of a roll's YAML file: a log with dates, the days to roll over, and how the models are trained."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from invdist import config as configs
from invdist.config import Config
from invdist.config.fields import Section, build
from invdist.config.plain_yaml import dotted, read_yaml
from invdist.data.prepare.options import Kind, build_options
from invdist.runtime.errors import UserError
from invdist.study.sources import found_input
from invdist.study.spec import Recipe
from invdist.training.growth import check_epochs
from invdist.training.mlflow import open_client
from invdist.training.resume import check_same_model

Arm = Literal["anew", "grown", "never"]
ARMS: dict[Arm, str] = {"anew": "trained anew each day", "grown": "grown each day", "never": "never updated"}


class Roll(Section):
    """Days of a feed, each scored by models that have not seen it, which then learn from it."""

    name: str
    """Name of the folder of the roll."""
    output: str = "rolls"
    """Folder that holds rolls."""
    data: Recipe
    """The log, as for `invdist prepare`; `since` and `until` are set by the roll."""
    first: str
    """The first day that is scored, as 2022-04-25; all days before it are the history that models start from."""
    last: str
    """The last day that is scored."""
    arms: list[Arm] = ["anew", "grown", "never"]
    """Which models to compare."""
    train: dict[str, Any] = {}
    """Settings of every training, as in a training config; `data.path`, `runs` and `name` are set by the roll."""
    grown: dict[str, Any] = {}
    """Settings of the model that grows that differ from those of the model it goes on from, such as growth.epochs."""
    grown_data: dict[str, Any] = {"keep": 0, "older": "unclear"}
    """Options of `prepare` for the model that grows, beside those of the log: by default it learns from new labels and
    a sample of the older ones, whose other rows stay as exposures without a label."""

    def check(self) -> Iterator[tuple[str, str]]:
        """Problems of the name and the days."""
        if not self.name or self.name in (".", "..") or set(self.name) & set("/\\"):
            yield "name", f"{self.name!r} names no folder: expected a name without slashes"
        try:
            if datetime.date.fromisoformat(self.first) > datetime.date.fromisoformat(self.last):
                yield "last", f"expected {self.first} (first) or a later day"
        except ValueError:
            yield "first", f"expected dates as 2022-04-25, not {self.first!r} and {self.last!r}"
        if not self.arms or len(set(self.arms)) < len(self.arms):
            yield "arms", f"expected some of {', '.join(ARMS)}, each once"
        for part, options in (("data.options", self.data.options), ("grown_data", self.grown_data)):
            for key in {"since", "until"} & set(options):
                yield f"{part}.{key}", "is set by the roll"
        for part, settings in (("train", self.train), ("grown", self.grown)):
            for key in {"data.path", "runs", "name"} & set(dotted(settings)):
                yield f"{part}.{key}", "is set by the roll"

    def check_parts(self) -> None:
        """`UserError` if a log, an option or a setting is wrong: said before the first model is trained, not after."""
        self.inputs()
        for arm, day in (("first", self.history), *((arm, self.first) for arm in self.arms if arm != "never")):
            self.options(arm, day)
            self._check_watch(self.config(arm, day))
        if "grown" in self.arms:
            check_epochs(self.grown_overrides())
            first = {"config": configs.dump(self.config("first", self.history))}
            check_same_model("the first model of the roll", first, self.config("grown", self.first))

    def _check_watch(self, config: Config) -> None:
        given = {**dotted(self.train), **dotted(self.grown)}
        if given.get("watch.ray_metrics") and config.ray.ranks == 1:
            raise UserError(
                "watch.ray_metrics: with ray.workers=1 a roll trains without Ray, which would export them: leave it "
                "out, or give more workers"
            )
        if config.watch.mlflow:
            open_client(config)

    @property
    def folder(self) -> Path:
        """Where everything of the roll is."""
        return Path(self.output).absolute() / self.name

    @property
    def days(self) -> list[str]:
        """The days that are scored."""
        first, last = (datetime.date.fromisoformat(day) for day in (self.first, self.last))
        return [str(first + datetime.timedelta(n)) for n in range((last - first).days + 1)]

    @property
    def history(self) -> str:
        """The last day before the first one that is scored."""
        return str(datetime.date.fromisoformat(self.first) - datetime.timedelta(1))

    def options(self, arm: str, day: str, since: str | None = None) -> Kind:
        """The options of `prepare` for a day and those before it from `since` on, or for the history."""
        given = {**self.data.options, **(self.grown_data if arm == "grown" else {})}
        source = "data.options and grown_data" if arm == "grown" else "data.options"
        if day == self.history:
            for name in ("keep", "older", "replay", "drop_unseen"):
                given.pop(name, None)
            return build_options(self.data.kind, {**given, "until": day}, source=source)
        return build_options(self.data.kind, {**given, "since": since or day, "until": day}, source=source)

    def inputs(self) -> list[Path]:
        """The files of the log."""
        return [found_input(name, "data.input") for name in self.data.input]

    def config(self, arm: str, day: str) -> Config:
        """The settings of the training of an arm after a day."""
        changed = self.grown_overrides() if arm == "grown" else []
        given = {"data.path": str(self.data_of(arm, day)), "runs": str(self.folder / "runs"), "name": f"{arm}-{day}"}
        return configs.from_mapping(
            self.train, [*changed, *(f"{key}={value}" for key, value in given.items())], source="train"
        )

    def grown_overrides(self) -> list[str]:
        """What the model that grows has otherwise, as `key=value`."""
        return [f"{key}={json.dumps(value)}" for key, value in dotted(self.grown).items()]

    def data_of(self, arm: str, day: str) -> Path:
        """The data set of an arm after a day; the history is the same for all."""
        return self.folder / "data" / (day if day == self.history else f"{arm}-{day}")


def load(path: str | Path, overrides: Iterable[str] = ()) -> Roll:
    """The checked keys of a YAML file with `key=value` overrides."""
    mapping = {key: str(value) if isinstance(value, datetime.date) else value for key, value in read_yaml(path).items()}
    return build(Roll, mapping, overrides, source=str(path))
