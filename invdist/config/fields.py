"""Typed settings: a YAML mapping and `key=value` overrides become one checked pydantic model.

A section is a `Section`. Ranges are in the annotation (`gamma: Positive`), the doc line of a field is the string under
it, and a method `check(self)` yields `(field, problem)` for what concerns several fields. All problems are reported
at once, each with its source (a file or the command line), its dotted key and what would be right.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import ValidationError
from pydantic_core import to_jsonable_python

from invdist.config.plain_yaml import parse, shown
from invdist.config.registry import REMOVED
from invdist.config.section import (
    OneOf,
    Section,
    alternatives,
    as_section,
    bare,
    describe,
    element,
    hint_of,
    section_of,
    type_name,
)
from invdist.runtime.errors import UserError

__all__ = [
    "BelowOne",
    "Count",
    "CountOrZero",
    "NonNegative",
    "OneOf",
    "OpenShare",
    "Positive",
    "Problem",
    "Section",
    "Share",
    "as_section",
    "build",
    "describe",
    "fail",
    "to_mapping",
]

T = TypeVar("T")

_COMMAND_LINE = "command line"
_NUMBER = re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)(e[-+]?\d+)?", re.IGNORECASE)

Positive = Annotated[float, Gt(0)]
NonNegative = Annotated[float, Ge(0)]
Share = Annotated[float, Ge(0), Le(1)]
OpenShare = Annotated[float, Gt(0), Lt(1)]
BelowOne = Annotated[float, Ge(0), Lt(1)]
Count = Annotated[int, Ge(1)]
CountOrZero = Annotated[int, Ge(0)]


@dataclasses.dataclass(frozen=True)
class Problem:
    """One thing that is wrong with the settings."""

    source: str
    key: str
    message: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.source, self.key, self.message) if part)


def fail(problems: Sequence[Problem]) -> None:
    """Raises one `UserError` that names every problem; does nothing if there is none."""
    if len(problems) == 1:
        raise UserError(str(problems[0]))
    if problems:
        raise UserError("\n".join([f"{len(problems)} problems in the settings", *(f"  {p}" for p in problems)]))


def build(kind: type[T], mapping: Mapping[str, Any], overrides: Iterable[str] = (), *, source: str = "") -> T:
    """`mapping` with `key=value` `overrides`, as a checked `kind` (a `Section`, or a plain dataclass of others).

    `source` is where the mapping came from (a file name), for messages. Raises `UserError` with all problems.
    """
    section, problems = as_section(kind), []
    merged = _copied(mapping)
    typed = [path for override in overrides if (path := _set(merged, override, problems))]
    built, found = _validate(section, merged)
    # What is wrong with the file alone as well is not the command line's.
    of_file = _validate(section, mapping)[1] if found and typed else []
    for each in found:
        by_command = _is_typed(each, typed, mapping) or (each.kind == "check" and typed and each not in of_file)
        problems.append(Problem(_COMMAND_LINE if by_command else source, ".".join(map(str, each.path)), each.message))
    fail(problems)
    return built


def to_mapping(settings: Any) -> dict[str, Any]:
    """The plain mapping of a settings object."""
    return to_jsonable_python(settings)


# Validation, and its problems in our words

_Path = tuple[str | int, ...]


@dataclasses.dataclass(frozen=True)
class _Typed:
    """A value as typed on the command line: its field decides whether it is text or YAML."""

    text: str


@dataclasses.dataclass(frozen=True)
class _Found:
    """A problem of which it is not known yet where it came from."""

    path: _Path
    message: str
    kind: Literal["unknown", "missing", "value", "check"]


def _set(merged: dict[str, Any], override: str, problems: list[Problem]) -> _Path | None:
    """Sets one `dotted.key=value`; gives the path of its key, None after adding to `problems`."""
    key, equals, text = override.partition("=")
    path = tuple(key.strip().split("."))
    if not equals or not all(path):
        message = "expected key=value, for example training.epochs=5"
        problems.append(Problem(_COMMAND_LINE, shown(override), message))
        return None
    section = merged
    for step, name in enumerate(path[:-1]):
        if section.get(name) is None:  # not there, or a section all of whose keys are commented out
            section[name] = {}
        section = section[name]
        if not isinstance(section, dict):
            message = f"{'.'.join(path[: step + 1])} is a single value and has no keys below it"
            problems.append(Problem(_COMMAND_LINE, key, message))
            return None
    section[path[-1]] = _Typed(text)
    return path


def _is_typed(found: _Found, typed: Sequence[_Path], mapping: Mapping[str, Any]) -> bool:
    """Whether the command line gave the value of a key, or the section that the key is missing from."""
    if any(found.path[: len(path)] == path for path in typed):
        return True
    if found.kind == "unknown":
        return not _is_in(mapping, found.path)
    section = found.path[:-1]
    made = any(path[: len(section)] == section for path in typed)
    return found.kind == "missing" and made and not _is_in(mapping, section)


def _is_in(mapping: Any, path: _Path) -> bool:
    for part in path:
        if not isinstance(mapping, Mapping) or mapping.get(part) is None:
            return False
        mapping = mapping[part]
    return True


def _validate(section: type[Section], mapping: Mapping[str, Any]) -> tuple[Any, list[_Found]]:
    """The checked section, or everything that is wrong with it."""
    values = _read(section, mapping)
    try:
        return section.model_validate(values), []
    except ValidationError as error:
        found = [each for detail in error.errors(include_url=False) for each in _explain(section, detail, values)]
        return None, list(dict.fromkeys(found))


def _explain(section: type[Section], detail: Any, values: Any) -> Iterator[_Found]:
    """One error of pydantic in our words."""
    path, owner, hint = _locate(section, detail["loc"])
    kind = detail["type"]
    if kind == "check":
        yield from (_Found((*path, *key.split(".")), message, "check") for key, message in detail["ctx"]["problems"])
    elif kind in ("value_error", "assertion_error"):  # of somebody else's validator
        yield _Found(path, str(detail["ctx"]["error"]), "check")
    elif kind in ("extra_forbidden", "invalid_key"):
        known, prefix = list(owner.model_fields), "".join(f"{part}." for part in path[:-1])
        near = difflib.get_close_matches(str(path[-1]), known, n=1)
        instead = f"did you mean {prefix}{near[0]}?" if near else f"known here: {', '.join(known) or 'none'}"
        removed = REMOVED.get(str(path[-1]))
        yield _Found(path, f"was removed; {removed}" if removed else f"no such key; {instead}", "unknown")
    elif kind == "missing":
        yield _Found(path, f"is missing; expected {type_name(hint)}", "missing")
    else:
        value = functools.reduce(lambda inner, part: inner[part], path, values)
        if kind == "one_of" and (named := next((name for name in _texts(value) if name in REMOVED), None)):
            yield _Found(path, f"{named} was removed; {REMOVED[named]}", "value")
            return
        expected = "a section with keys" if section_of(hint) else type_name(hint)
        yield _Found(path, f"expected {expected}, not {shown(value)}", "value")


def _texts(value: Any) -> list[str]:
    """A text, or those of a list of texts."""
    return [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, str)]


def _locate(section: type[Section], place: Sequence[Any]) -> tuple[_Path, type[Section], Any]:
    """The key that a place in pydantic's report means, the section it belongs to, and its annotation.

    A place inside a value (an item of a list of numbers, one of several alternatives) means the key of that value.
    """
    path: _Path = ()
    owner, hint = section, section
    for part in place:
        if inner := section_of(hint):
            owner, field = inner, inner.model_fields.get(part)
            path, hint = (*path, part if field else str(part)[:60]), field and hint_of(field)
        elif isinstance(part, int) and section_of(element(hint)):
            path, hint = (*path, part), element(hint)
        else:
            break
    return path, owner, hint


# What only the type of a field can tell


def _read(hint: Any, value: Any) -> Any:
    """`value` as its field means it: what was typed becomes text or YAML, `"1e-4"` a number, an empty section `{}`.

    What does not fit stays as it is, for pydantic to refuse.
    """
    kinds = [bare(each) for each in alternatives(hint)]
    if isinstance(value, _Typed):
        value = _read_typed(kinds, value.text)
    if section := section_of(hint):
        value = {} if value is None and type(None) not in kinds else value
        return _read_section(section, value) if isinstance(value, Mapping) else value
    inside = next((get_args(kind)[-1] for kind in kinds if get_origin(kind) in (list, dict)), Any)
    if isinstance(value, list):
        return [_read(inside, each) for each in value]
    if isinstance(value, Mapping):
        return {key: _read(inside, each) for key, each in value.items()}
    number = next((kind for kind in kinds if kind in (int, float)), None)
    return value if number is None or str in kinds else _read_number(number, value)


def _read_section(section: type[Section], values: Mapping[str, Any]) -> dict[str, Any]:
    read = dict(values)
    for name, field in section.model_fields.items():
        hint = hint_of(field)
        if name in read or (field.is_required() and section_of(hint)):  # then its own missing keys are named
            read[name] = _read(hint, read.get(name))
    return read


def _read_typed(kinds: Sequence[Any], text: str) -> Any:
    if type(None) in kinds and text in ("null", "~"):
        return None
    if any(kind is str or text in get_args(kind) for kind in kinds):
        return text
    try:
        return parse(text.encode(), _COMMAND_LINE)
    except UserError:
        if Any in kinds:
            raise
        return text


def _read_number(kind: type, value: Any) -> Any:
    # YAML 1.1 reads `1e-4` (no dot) as text; a person means the number.
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        try:
            value = int(value) if kind is int and value.lstrip("+-").replace("_", "").isdecimal() else float(value)
        except ValueError:
            return value
    if isinstance(value, int) and abs(value) >= 2**63:
        return "a number beyond 64 bits"
    whole = kind is int and isinstance(value, float) and value.is_integer() and abs(value) <= 2**53
    return int(value) if whole else value


def _copied(value: Any) -> Any:
    return {key: _copied(inner) for key, inner in value.items()} if isinstance(value, Mapping) else value
