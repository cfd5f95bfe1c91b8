"""The trials of a study: cases (rows of a table), and the points of the space that each of them may take."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from invdist import config as configs
from invdist.config import Config
from invdist.config.fields import Section
from invdist.config.plain_yaml import parse, to_yaml
from invdist.data.dataset import Dataset
from invdist.runtime.errors import UserError
from invdist.study.spec import FLOOR, Study, StudyTable
from invdist.training.data_checks import misfits

Point = dict[str, Any]
"""Values by dotted key."""

_SECTIONS = {name for name, field in Config.model_fields.items() if isinstance(field.default, Section)}
_MOST_DRAWN = 4096
"""Points drawn from a large space to find those that fit the data."""


@dataclass(frozen=True)
class Case:
    """One row of a table: a strategy on a backbone, in one of the compared variants."""

    table: str
    strategy: str
    model: str
    variant: tuple[tuple[str, Any], ...] = ()
    points: tuple[Point, ...] = field(default=(), compare=False)
    """The settings to choose from, at most `trials` of them."""
    left_out: tuple[str, ...] = field(default=(), compare=False)
    """Why other settings were left out: they do not fit the data. Each reason once."""

    def __hash__(self) -> int:
        return hash((self.table, self.name))  # values of a variant may be lists

    @property
    def name(self) -> str:
        """The name of the folder of its trials."""
        parts = [self.strategy] if self.strategy == FLOOR else [self.strategy, self.model]
        return "-".join([*parts, *(f"{key.rpartition('.')[2]}={_short(value)}" for key, value in self.variant)])

    @property
    def label(self) -> str:
        """The strategy with its variant, for people."""
        shown = [f"{key.rpartition('.')[2]} {_short(value)}" for key, value in self.variant]
        return ", ".join([self.strategy, *shown])

    @property
    def backbone(self) -> str:
        """The backbone for people; `-` for the floor, which has none."""
        return "-" if self.strategy == FLOOR else self.model


def cases(study: Study, table: StudyTable, dataset: Dataset | None = None) -> list[Case]:
    """The rows of a table, the floor last. Raises `UserError` if a point is not a valid training config.

    With a `dataset`, points that do not fit it are left out and others are drawn instead.
    """
    strategies = [name for name in table.strategies or study.strategies if name != FLOOR]
    models = table.models or study.models
    variants = [tuple(zip(study.compare, values)) for values in itertools.product(*study.compare.values())]
    rows = [Case(table.name, s, m, v) for m in models for s in strategies for v in variants]
    rows.append(Case(table.name, FLOOR, models[0]))
    return [_with_points(study, table, row, dataset) for row in rows]


def _with_points(study: Study, table: StudyTable, case: Case, dataset: Dataset | None) -> Case:
    choices: dict[str, list[Any]] = {}
    for block in [*study.space, *table.space]:
        if block.concerns(case.strategy, case.model):
            choices.update(block.choices)
    choices.update({key: [value] for key, value in case.variant})
    whole = math.prod(len(values) for values in choices.values())
    where = f"space of {case.strategy} on {case.model} in table {table.name}"
    if study.search == "grid" and whole > study.trials:
        raise UserError(
            f"{where}: the grid has {whole} points, trials={study.trials}; make it smaller or trials larger"
        )
    first = [
        _start(choices, start.settings, where) for start in study.start if start.concerns(case.strategy, case.model)
    ]
    for point in _each_value(choices):
        resolve(study, table, case, point, 0, path="data")  # checks every value, drawn or not
    reasons: dict[str, None] = {}
    seen: set[str] = set()

    def fits(point: Point) -> bool:
        config = resolve(study, table, case, point, 0, path="data")
        if (text := configs.dump(config)) in seen:
            return False  # 1 and 1.0 are one setting
        seen.add(text)
        problems = misfits(config, dataset) if dataset is not None else []
        reasons.update(dict.fromkeys(map(str, problems)))
        return not problems

    points = draw(choices, study.trials, f"{study.tuning_seed} {case.table} {case.name}", first, fits)
    return replace(case, points=tuple(points), left_out=tuple(reasons))


def draw(
    choices: Mapping[str, list[Any]],
    count: int,
    seed: str,
    first: Sequence[Point] = (),
    fits: Callable[[Point], bool] = lambda point: True,
) -> list[Point]:
    """`count` different points of the product of `choices` that fit: those of `first`, then random ones.

    A product of at most `count` points is taken whole, in order. From a large product in which few points fit, some
    thousands are drawn.
    """
    sizes = [len(values) for values in choices.values()]
    whole = math.prod(sizes)
    if whole <= count:
        return [point for place in range(whole) if fits(point := _at(choices, sizes, place))]
    chance = random.Random(seed)

    def candidates() -> Iterator[Point]:
        yield from first
        for size in (count + len(first), _MOST_DRAWN):
            for place in chance.sample(range(whole), min(whole, size)):
                yield _at(choices, sizes, place)

    points: list[Point] = []
    for point in candidates():
        if point not in points and fits(point):
            points.append(point)
            if len(points) == count:
                break
    return points


def _start(choices: Mapping[str, list[Any]], settings: Point, where: str) -> Point:
    """A point with the given values, and the first choice for all other keys."""
    for key, value in settings.items():
        if key not in choices:
            raise UserError(f"start, {where}: {key} has no choices there; expected one of {', '.join(choices)}")
        if value not in choices[key]:
            raise UserError(f"start, {where}: {key}={value} is not among its choices {choices[key]}")
    return {key: settings.get(key, values[0]) for key, values in choices.items()}


def _at(choices: Mapping[str, list[Any]], sizes: list[int], place: int) -> Point:
    point = {}
    for (key, values), size in zip(choices.items(), sizes):
        place, index = divmod(place, size)
        point[key] = values[index]
    return point


def _each_value(choices: Mapping[str, list[Any]]) -> Iterator[Point]:
    """Points in which every value of every choice occurs."""
    for row in range(max((len(values) for values in choices.values()), default=0)):
        yield {key: values[min(row, len(values) - 1)] for key, values in choices.items()}


def resolve(
    study: Study, table: StudyTable, case: Case, point: Point, seed: int, *, path: str, test: bool = False
) -> Config:
    """The training config of a point; raises `UserError` for an unknown key or a value out of range."""
    mapping: dict[str, Any] = {}
    for settings in (study.base, table.base):
        _merge(mapping, settings)
    for key, value in point.items():
        _set(mapping, key, value)
    _merge(mapping, {"method": case.strategy, "model": case.model, "seed": seed, "data": {"path": path}})
    ray, training = (mapping.setdefault(section, {}) for section in ("ray", "training"))
    if case.strategy == FLOOR or ray.setdefault("workers", 1) == 1:
        # One rank needs no reader processes; and counting means is not worth the start of several ranks.
        ray["workers"], mapping["data"]["readers"] = 1, 0
        ray.pop("min_workers", None)
    if case.strategy == FLOOR:
        mapping.pop("exposures", None)  # it reads no vectors, so it need not wait for them
    training["test"] = test
    source = f"study {study.name}, table {table.name}, {case.label}"
    config = configs.from_mapping(mapping, source=source)
    if config.checkpoint.path is not None:
        raise UserError(f"{source}: checkpoint.path: trials keep their checkpoints in the study's folder; leave it out")
    return config


def identity(config: Config, fingerprint: str) -> str:
    """The identity of a trial: a hash of its data and all its settings, without paths."""
    settings = configs.from_text(configs.dump(config))
    settings.name, settings.runs, settings.data.path, settings.exposures.path = None, "", "-", None
    mapping = parse(configs.dump(settings).encode(), "settings")
    if not settings.exposures.vectors:
        del mapping["exposures"]  # so that studies from before there were vectors can be continued
    text = json.dumps([to_yaml(mapping), fingerprint])
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def _merge(mapping: dict[str, Any], over: Mapping[str, Any]) -> None:
    for key, value in over.items():
        if isinstance(value, Mapping) and isinstance(mapping.get(key), dict):
            _merge(mapping[key], value)
        elif isinstance(value, Mapping):
            mapping[key] = {}
            _merge(mapping[key], value)
        elif value is not None or key not in _SECTIONS:  # null: all keys of the section are commented out
            mapping[key] = value


def _set(mapping: dict[str, Any], key: str, value: Any) -> None:
    nested = value
    for name in reversed(key.split(".")):
        nested = {name: nested}
    _merge(mapping, nested)


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).replace("/", "_").replace(" ", "")
