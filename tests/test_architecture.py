"""The rooms and their arrows: no import cycle, and no import against the order of docs/architecture.md.

Imports are read from the source, those inside functions included. Imports under `TYPE_CHECKING` do not run and are
left out.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import itertools
import re
from collections import defaultdict
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

PACKAGE = "invdist"

# Who may import whom, as in docs/architecture.md. A room may always import from itself.
_BELOW_LEARNING = {"runtime", "config", "data", "embeddings", "models"}
_BELOW_TRAINING = {*_BELOW_LEARNING, "learning", "evaluation"}
ALLOWED: dict[str, set[str]] = {
    "runtime": set(),
    "config": {"runtime"},
    "data": {"runtime", "config"},
    "embeddings": {"runtime", "config", "data"},
    "models": {"runtime", "config", "data", "embeddings"},
    "learning": _BELOW_LEARNING,
    "evaluation": {"runtime"},
    "training": _BELOW_TRAINING,
    "serving": {*_BELOW_TRAINING, "training"},
    "report": {"runtime", "config", "evaluation", "training"},
    "planning": {*_BELOW_TRAINING, "training", "report"},
    "study": {*_BELOW_TRAINING, "training", "report"},
    "rolling": {*_BELOW_TRAINING, "training", "serving", "report", "study", "train"},
    "bench": {*_BELOW_TRAINING, "training", "serving", "report", "planning", "study"},
    "train": {*_BELOW_TRAINING, "training", "report"},
    "api": {*_BELOW_TRAINING, "training", "serving", "report", "planning", "study", "train"},
    "cli": {*_BELOW_TRAINING, "training", "serving", "report", "planning", "study", "rolling", "bench", "api", "train"},
}

# (importing module, imported module or room, reason). Finer than rooms: nothing of the left imports the right, even
# through others.
FORBIDDEN = [
    ("invdist.serving", "invdist.training.trainer", "a finished run is opened without the training loop"),
    ("invdist.report", "torch", "a report is read from events"),
    ("invdist.report", "invdist.learning", "a report is read from events"),
    ("invdist.learning", "ray", "learning is a function of its arguments"),
    ("invdist.embeddings", "ray", "the engine runs under any launcher"),
    ("invdist.training.trainer", "ray", "the loop runs under any launcher"),
    ("invdist.training", "invdist.learning.strategies", "training knows no strategy by name"),
    ("invdist.training", "invdist.learning.inverse_gradient", "training knows no strategy by name"),
]

# Known violations, none at present: (importing module, imported module). Each is to be removed by its room.
EXCEPTIONS: set[tuple[str, str]] = set()


def _modules() -> dict[str, Path]:
    found = {}
    for path in sorted((REPOSITORY / PACKAGE).rglob("*.py")):
        parts = path.relative_to(REPOSITORY).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = _modules()


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _imports(tree: ast.AST, *, lazy: bool) -> set[str]:
    """Dotted names that a module imports; `lazy` includes those inside functions."""
    found: set[str] = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "absolute imports only"
            assert node.module is not None
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and not lazy:
            continue
        elif not _is_type_checking(node):
            found |= _imports(node, lazy=lazy)
    return found


def _resolve(name: str) -> str:
    """The module that an imported name is in; the top-level package for those of others."""
    if name.split(".")[0] != PACKAGE:
        return name.split(".")[0]
    while name not in MODULES:
        name = name.rpartition(".")[0]
    return name


@functools.cache
def _graph(*, lazy: bool) -> dict[str, set[str]]:
    graph: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        tree = ast.parse(path.read_text(), str(path))
        graph[module] = {_resolve(name) for name in _imports(tree, lazy=lazy)} - {module}
    return graph


def _room(module: str) -> str | None:
    """`invdist.data.stream.order` is in `data`; the package itself and `__main__` are in no room."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] != "__main__" else None


def test_every_room_is_in_the_table() -> None:
    assert {room for module in MODULES if (room := _room(module))} == set(ALLOWED)


def test_the_documented_table_is_this_one() -> None:
    text = (REPOSITORY / "docs" / "architecture.md").read_text()
    table = text.split("| room | may import |\n|---|---|\n")[1].split("\n\n")[0]
    rows = [re.findall(r"`(\w+)`", line) for line in table.splitlines()]
    assert {room: set(allowed) for room, *allowed in rows} == ALLOWED


def test_the_table_itself_has_no_cycle() -> None:
    graphlib.TopologicalSorter(ALLOWED).prepare()


def test_no_import_goes_against_the_order_of_the_rooms() -> None:
    wrong = defaultdict(list)
    for module, imported in _graph(lazy=True).items():
        for other in sorted(imported & MODULES.keys()):
            room, target = _room(module), _room(other)
            allowed = room is None or target is None or target == room or target in ALLOWED[room]
            if not allowed and (module, other) not in EXCEPTIONS:
                wrong[module].append(other)
    assert not wrong, f"not allowed by the table above: {dict(wrong)}"


def test_modules_have_no_import_cycle() -> None:
    """A package counts as what its `__init__` imports. Lazy imports count: they hide a cycle, they do not break it."""
    graph = {module: imported & MODULES.keys() for module, imported in _graph(lazy=True).items()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"import cycle: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize(("importer", "imported", "reason"), FORBIDDEN, ids=lambda value: value.replace("invdist.", ""))
def test_what_must_stay_apart_does(importer: str, imported: str, reason: str) -> None:
    graph = _graph(lazy=False)
    starts = [module for module in MODULES if module == importer or module.startswith(f"{importer}.")]
    seen: dict[str, tuple[str, ...]] = {start: (start,) for start in starts}
    waiting = list(starts)
    while waiting:
        module = waiting.pop()
        for other in sorted(graph.get(module, ())):
            # Importing a module imports the packages that it is in.
            for found in [other, *(parent for parent in MODULES if other.startswith(f"{parent}."))]:
                if found not in seen:
                    seen[found] = (*seen[module], found)
                    waiting.append(found)
    bad = [path for name, path in seen.items() if name == imported or name.startswith(f"{imported}.")]
    bad = [path for path in bad if not EXCEPTIONS & set(itertools.pairwise(path))]
    assert not bad, f"{reason}: {' -> '.join(min(bad, key=len))}"


def test_every_exception_is_still_needed() -> None:
    graph = _graph(lazy=True)
    assert {(one, other) for one, other in EXCEPTIONS if other not in graph.get(one, ())} == set()
