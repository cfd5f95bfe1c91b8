"""The data sets of a study's tables: given by path, or prepared once into a cache folder."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from invdist.data.dataset import Dataset
from invdist.data.prepare.options import KINDS, build_options
from invdist.data.prepare.pipeline import RULES, prepare_log
from invdist.runtime.errors import UserError
from invdist.runtime.files import absolute
from invdist.study.spec import Recipe, Source, StudyTable

DATA_VARIABLE = "INVDIST_DATA"
_FILES = ("valid_file", "test_file")


def check(table: StudyTable) -> Dataset | None:
    """The data set of a table that is given by path; raises `UserError` if it cannot be opened, or prepared later."""
    if table.data.prepare is None:
        return Dataset.open(str(table.data.path), verify="fast")
    _options(table.data.prepare, table.name)
    return None


def open_source(source: Source, table: str, cache: Path, say: Callable[[str], None] = print) -> Dataset:
    """The data set of a table, prepared by its recipe unless that was done before."""
    if source.path is not None:
        return Dataset.open(absolute(source.path), verify="full")
    recipe = source.prepare
    assert recipe is not None
    options, inputs = _options(recipe, table)
    output = cache.absolute() / f"{recipe.kind}-{_identity(recipe, inputs, table)}"
    if not output.exists():
        say(f"{table}: preparing {recipe.kind} into {output}")
        prepare_log(options, inputs, output)
    return Dataset.open(str(output), verify="fast")


def _identity(recipe: Recipe, inputs: list[Path], table: str) -> str:
    """A hash of a recipe: equal for the same settings, the same raw files and the same rules of `prepare`.

    Files are compared by size and time of change.
    """
    files = [
        *inputs,
        *(found_input(recipe.options[name], f"table {table}") for name in _FILES if name in recipe.options),
    ]
    within = [path for file in files for path in (sorted(file.rglob("*")) if file.is_dir() else [file])]
    stamps = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in within if path.is_file()]
    settings = {**recipe.options, "kind": recipe.kind, "input": recipe.input, "files": stamps, "rules": RULES}
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:8]


def _options(recipe: Recipe, table: str) -> tuple[Any, list[Path]]:
    if recipe.kind not in KINDS:
        raise UserError(f"table {table}: {recipe.kind!r} is not a kind of log; expected {', '.join(KINDS)}")
    mapping = dict(recipe.options)
    for name in _FILES:
        if name in mapping:
            mapping[name] = str(found_input(mapping[name], f"table {table}"))
    options = build_options(recipe.kind, mapping, source=f"table {table}, prepare")
    return options, [found_input(name, f"table {table}") for name in recipe.input]


def found_input(name: str, where: str) -> Path:
    """A raw file by its path, or by its path in the folder INVDIST_DATA."""
    folder = os.environ.get(DATA_VARIABLE)
    for path in (Path(name), *([Path(folder) / name] if folder else [])):
        if path.exists():
            return path
    hint = f"neither is {folder}/{name}" if folder else f"set {DATA_VARIABLE} to the folder that has it"
    raise UserError(f"{where}: {name} not found; {hint}")
