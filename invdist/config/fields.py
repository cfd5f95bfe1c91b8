"""Typed settings: a dataclass, a YAML mapping and `key=value` overrides become one checked object.

A section is a dataclass. Ranges are written in the annotation (`gamma: Positive`), the doc line of a field is
the string under it, and what ties several fields together is a method `check(self)` that yields
`(field, problem)`. Everything wrong is reported at once: its place, its dotted key, what would be right.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import math
import re
import textwrap
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from invdist.config.plain_yaml import parse, shown
from invdist.runtime.errors import UserError

T = TypeVar("T")

_LARGEST_INT = 2**63 - 1
_NUMBER = re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)(e[-+]?\d+)?", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Range:
    """Bounds of a number, written in its annotation: `Annotated[float, Range(above=0)]`."""

    above: float | None = None
    at_least: float | None = None
    below: float | None = None
    at_most: float | None = None

    def holds(self, value: float) -> bool:
        """Whether `value` lies within the bounds."""
        return (
            (self.above is None or value > self.above)
            and (self.at_least is None or value >= self.at_least)
            and (self.below is None or value < self.below)
            and (self.at_most is None or value <= self.at_most)
        )

    def __str__(self) -> str:
        words = (
            ("above", self.above),
            ("at least", self.at_least),
            ("below", self.below),
            ("at most", self.at_most),
        )
        return " and ".join(f"{word} {bound:g}" for word, bound in words if bound is not None)


@dataclasses.dataclass(frozen=True)
class OneOf:
    """Names that are known only at run time (a registry's), written in the annotation of a text field."""

    names: Callable[[], Iterable[str]]

    def holds(self, value: str) -> bool:
        """Whether `value` is one of the names."""
        return value in self.names()

    def __str__(self) -> str:
        return f"that is one of {', '.join(self.names())}"


Positive = Annotated[float, Range(above=0)]
NonNegative = Annotated[float, Range(at_least=0)]
Share = Annotated[float, Range(at_least=0, at_most=1)]
OpenShare = Annotated[float, Range(above=0, below=1)]
Count = Annotated[int, Range(at_least=1)]
CountOrZero = Annotated[int, Range(at_least=0)]


@dataclasses.dataclass(frozen=True)
class Problem:
    """One thing that is wrong with the settings."""

    source: str
    key: str
    message: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.source, self.key, self.message) if part)


def fail(problems: Sequence[Problem]) -> None:
    """Raises one `UserError` that names every problem; nothing happens when there is none."""
    if len(problems) == 1:
        raise UserError(str(problems[0]))
    if problems:
        raise UserError("\n".join([f"{len(problems)} problems in the settings", *(f"  {p}" for p in problems)]))


def build(dataclass_type: type[T], mapping: Mapping[str, Any], overrides: Iterable[str] = (), *, source: str = "") -> T:
    """`mapping` with `key=value` `overrides` laid over it, as a checked `dataclass_type`.

    `source` is where the mapping came from (a file name), for messages. Raises `UserError` with all problems.
    """
    problems: list[Problem] = []
    merged = merge(mapping, overrides, problems)
    built = convert(dataclass_type, merged, source, problems)
    fail(problems)
    assert built is not None
    return built


def merge(mapping: Mapping[str, Any], overrides: Iterable[str], problems: list[Problem]) -> dict[str, Any]:
    """A copy of `mapping` with every `dotted.key=value` of `overrides` set in it."""
    merged = _copied(mapping)
    for override in overrides:
        key, equals, text = override.partition("=")
        path = key.strip().split(".")
        if not equals or not all(path):
            message = "expected key=value, for example training.epochs=5"
            problems.append(Problem("command line", shown(override), message))
            continue
        section = merged
        for step, name in enumerate(path[:-1]):
            if section.get(name) is None:  # not there, or a section all of whose keys are commented out
                section[name] = {}
            inner = section[name]
            if not isinstance(inner, dict):
                message = f"{'.'.join(path[: step + 1])} is a single value and has no keys below it"
                problems.append(Problem("command line", key, message))
                break
            section = inner
        else:
            section[path[-1]] = _Override(text)
    return merged


def convert(
    dataclass_type: type[T],
    mapping: Any,
    source: str,
    problems: list[Problem],
    prefix: str = "",
    also_known: Iterable[str] = (),
) -> T | None:
    """The checked `dataclass_type` that `mapping` describes, or None with what is wrong in `problems`.

    `also_known` are keys beside the fields that a typing error may have meant.
    """
    return _Converter(source, problems).section(dataclass_type, mapping, prefix, also_known)


def to_mapping(settings: Any) -> dict[str, Any]:
    """The plain mapping of a settings object; fields that are no setting (`init=False`) are left out."""
    return {field.name: _plain(getattr(settings, field.name)) for field in _fields(type(settings))}


def describe(dataclass_type: type, prefix: str = "") -> str:
    """One entry per key for `--help`: dotted key, type, default and doc line."""
    lines: list[str] = []
    docs = field_docs(dataclass_type)
    hints = get_type_hints(dataclass_type, include_extras=True)
    for field in _fields(dataclass_type):
        key, hint = f"{prefix}{field.name}", hints[field.name]
        nested = _strip(hint)
        if dataclasses.is_dataclass(nested):
            lines.append(describe(nested, f"{key}."))  # type: ignore[arg-type]
            continue
        default = _default(field)
        shown = "required" if default is dataclasses.MISSING else f"default {_scalar(default)}"
        lines.append(f"{key}  ({_type_name(hint)}; {shown})")
        if docs.get(field.name):
            lines.append(textwrap.fill(docs[field.name], 100, initial_indent="    ", subsequent_indent="    "))
    return "\n".join(lines)


def field_docs(dataclass_type: type) -> dict[str, str]:
    """The string under each field of a dataclass, as one line, bases included."""
    docs: dict[str, str] = {}
    for owner in reversed(dataclass_type.__mro__):
        if not dataclasses.is_dataclass(owner):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
        assert isinstance(body, ast.ClassDef)
        for statement, following in zip(body.body, body.body[1:]):
            if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
                continue
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                docs[statement.target.id] = " ".join(str(following.value.value).split())
    return docs


@dataclasses.dataclass(frozen=True)
class _Override:
    """A value as typed on the command line: read as YAML unless the field wants text."""

    text: str


class _Wrong(Exception):
    """What would have been right for one value."""


class _Converter:
    """Turns plain data into typed sections and collects what does not fit."""

    def __init__(self, source: str, problems: list[Problem]) -> None:
        self.source = source
        self.problems = problems

    def section(self, kind: type[T], mapping: Any, prefix: str, also_known: Iterable[str] = ()) -> T | None:
        """One dataclass; `prefix` is the dotted key of the section with a closing dot, or empty."""
        if isinstance(mapping, _Override):
            mapping = parse(mapping.text.encode(), "command line")
        if mapping is None:
            mapping = {}
        if not isinstance(mapping, Mapping):
            self._add(prefix.rstrip("."), f"expected a section with keys, not {shown(mapping)}", mapping)
            return None
        before = len(self.problems)
        fields = {field.name: field for field in _fields(kind)}
        hints = get_type_hints(kind, include_extras=True)
        for name, value in mapping.items():
            if name not in fields:
                self._add(f"{prefix}{str(name)[:60]}", _unknown(str(name), [*fields, *also_known], prefix), value)
        values: dict[str, Any] = {}
        for name, field in fields.items():
            if name in mapping:
                values[name] = self.value(hints[name], mapping[name], f"{prefix}{name}")
            elif _default(field) is dataclasses.MISSING:
                nested = _strip(hints[name])
                if dataclasses.is_dataclass(nested):
                    values[name] = self.section(nested, {}, f"{prefix}{name}.")  # type: ignore[arg-type]
                else:
                    self._add(f"{prefix}{name}", f"is missing; expected {_type_name(hints[name])}", None)
        if len(self.problems) > before:
            return None
        return self._checked(kind, values, prefix)

    def _checked(self, kind: type[T], values: dict[str, Any], prefix: str) -> T | None:
        try:
            built = kind(**values)
        except ValueError as error:
            self._add(prefix.rstrip("."), str(error), None)
            return None
        check = getattr(built, "check", None)
        found = list(check()) if callable(check) else []  # type: ignore[call-overload]
        for key, message in found:
            self._add(f"{prefix}{key}", message, None)
        return None if found else built

    def value(self, hint: Any, value: Any, key: str) -> Any:
        """One value as its annotation wants it; None after recording a problem."""
        nested = _strip(hint)
        if dataclasses.is_dataclass(nested) and not (value is None and _optional(hint)):
            return self.section(nested, value, f"{key}.")  # type: ignore[arg-type]
        element = _element(hint)
        if isinstance(element, type) and dataclasses.is_dataclass(element) and isinstance(value, list):
            return [self.section(element, each, f"{key}.{i}.") for i, each in enumerate(value)]
        try:
            return _coerce(hint, value)
        except _Wrong:
            given = value.text if isinstance(value, _Override) else value
            self._add(key, f"expected {_type_name(hint)}, not {shown(given)}", value)
            return None

    def _add(self, key: str, message: str, value: Any) -> None:
        self.problems.append(Problem("command line" if _typed_here(value) else self.source, key, message))


def _coerce(hint: Any, value: Any) -> Any:
    """`value` as `hint` wants it; raises `_Wrong` if it cannot be."""
    alternatives = _alternatives(hint)
    if isinstance(value, _Override):
        value = _typed(alternatives, value.text)
    if len(alternatives) > 1:
        for alternative in alternatives:
            try:
                return _coerce(alternative, value)
            except _Wrong:
                continue
        raise _Wrong
    kind, limits = _strip(hint), _limits(hint)
    origin = get_origin(kind) or kind
    if origin is Literal:
        if not any(value == choice and type(value) is type(choice) for choice in get_args(kind)):
            raise _Wrong
        return value
    if origin in (list, tuple, Sequence):
        return _coerce_list(kind, value)
    if origin in (dict, Mapping):
        if not isinstance(value, Mapping):
            raise _Wrong
        return {_coerce(get_args(kind)[0], k): _coerce(get_args(kind)[1], v) for k, v in value.items()}
    return _coerce_scalar(kind, value, limits)


def _typed(kinds: Sequence[Any], text: str) -> Any:
    """What was typed on the command line: text as it is where a type wants text, else read as YAML."""
    if type(None) in kinds and text in ("null", "~"):
        return None
    if any(_strip(kind) is str or text in get_args(_strip(kind)) for kind in kinds):
        return text
    try:
        return parse(text.encode(), "command line")
    except UserError:
        raise _Wrong from None


def _coerce_list(kind: Any, value: Any) -> Any:
    if not isinstance(value, (list, tuple)):
        raise _Wrong
    items = [_coerce(_element(kind), each) for each in value]
    return tuple(items) if get_origin(kind) is tuple else items


def _coerce_scalar(kind: Any, value: Any, limits: Range | OneOf | None) -> Any:
    if kind in (Any, object):
        return value
    if kind is type(None):
        if value is not None:
            raise _Wrong
        return None
    if kind in (int, float):
        value = _number(kind, value)
    elif kind is Path and isinstance(value, str):
        value = Path(value)
    elif not isinstance(kind, type) or not isinstance(value, kind):
        raise _Wrong
    if limits is not None and not limits.holds(value):
        raise _Wrong
    return value


def _number(kind: type, value: Any) -> int | float:
    # YAML 1.1 reads `1e-4` (no dot) as text; a person means the number.
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        try:
            value = float(value) if kind is float or "e" in value.lower() or "." in value else int(value)
        except ValueError:
            raise _Wrong from None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _Wrong
    if isinstance(value, int) and abs(value) > _LARGEST_INT:
        raise _Wrong
    if kind is float:
        if not math.isfinite(value):
            raise _Wrong
        return float(value)
    if isinstance(value, float) and (not math.isfinite(value) or value != int(value) or abs(value) > 2**53):
        raise _Wrong
    return int(value)


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copied(inner) for key, inner in value.items()}
    return value


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return to_mapping(value)
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return str(value) if isinstance(value, Path) else value


def _typed_here(value: Any) -> bool:
    """Whether a value, or everything below a section, was given on the command line."""
    if isinstance(value, Mapping):
        return bool(value) and all(_typed_here(inner) for inner in value.values())
    return isinstance(value, _Override)


def _fields(kind: type) -> Iterator[dataclasses.Field[Any]]:
    return (field for field in dataclasses.fields(kind) if field.init)


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _unknown(name: str, known: Sequence[str], prefix: str) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    if near:
        return f"no such key; did you mean {prefix}{near[0]}?"
    return f"no such key; known here: {', '.join(known)}"


def _alternatives(hint: Any) -> tuple[Any, ...]:
    stripped = _strip_annotated(hint)
    return get_args(stripped) if get_origin(stripped) in (Union, types.UnionType) else (hint,)


def _optional(hint: Any) -> bool:
    return type(None) in _alternatives(hint)


def _strip_annotated(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _strip(hint: Any) -> Any:
    """The bare type: without `Annotated`, and without `None` when one alternative is left."""
    alternatives = [each for each in _alternatives(hint) if each is not type(None)]
    return _strip_annotated(alternatives[0]) if len(alternatives) == 1 else _strip_annotated(hint)


def _element(hint: Any) -> Any:
    arguments = get_args(_strip(hint))
    if get_origin(_strip(hint)) in (list, tuple, Sequence) and arguments:
        return arguments[0]
    return Any


def _limits(hint: Any) -> Range | OneOf | None:
    if get_origin(hint) is not Annotated:
        return None
    return next((extra for extra in hint.__metadata__ if isinstance(extra, (Range, OneOf))), None)


def _type_name(hint: Any) -> str:
    alternatives = _alternatives(hint)
    if len(alternatives) > 1:
        return " or ".join(_type_name(each) for each in alternatives)
    kind, limits = _strip(hint), _limits(hint)
    origin = get_origin(kind)
    if origin is Literal:
        return "one of " + ", ".join(map(str, get_args(kind)))
    if origin in (list, tuple, Sequence):
        return f"a list of ({_type_name(_element(kind))})"
    if origin in (dict, Mapping):
        return "a mapping"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    name = names.get(kind, getattr(kind, "__name__", str(kind)))
    return f"{name} {limits}" if limits is not None else name


def _scalar(value: Any) -> str:
    return yaml.safe_dump(_plain(value), default_flow_style=True, width=1000).removesuffix("\n...\n").strip()
