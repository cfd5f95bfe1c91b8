"""Sections of settings as pydantic models, and what their annotations mean to people."""

from __future__ import annotations

import dataclasses
import functools
import textwrap
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml
from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError, core_schema, to_jsonable_python

_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}


@dataclasses.dataclass(frozen=True)
class OneOf:
    """Names that are known only at run time (a registry's), for the annotation of a text field."""

    names: Callable[[], Iterable[str]]

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __str__(self) -> str:
        return f"that is one of {', '.join(self.names())}"

    def _check(self, value: str) -> str:
        if value not in self.names():
            raise PydanticCustomError("one_of", "not one of the names")
        return value


class Section(BaseModel):
    """Base class of everything that can be set: no unknown keys, and values of the declared types only."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)

    def check(self) -> Iterator[tuple[str, str]]:
        """What is wrong with the fields taken together, as (dotted key, message); for subclasses to override."""
        yield from ()

    @model_validator(mode="after")
    def _checked(self) -> Any:
        if problems := list(self.check()):
            message = "; ".join(f"{key}: {problem}" for key, problem in problems)
            raise PydanticCustomError("check", "{message}", {"message": message, "problems": problems})
        return self


def describe(kind: type, prefix: str = "") -> str:
    """One entry per key for `--help`: dotted key, type, default and doc line."""
    lines: list[str] = []
    for name, field in as_section(kind).model_fields.items():
        key, hint = f"{prefix}{name}", hint_of(field)
        if section := section_of(hint):
            lines.append(describe(section, f"{key}."))
            continue
        shown = "required"
        if not field.is_required():
            default = to_jsonable_python(field.get_default(call_default_factory=True, validated_data={}))
            text = yaml.safe_dump(default, default_flow_style=True, width=1000).removesuffix("\n...\n").strip()
            shown = f"default {text}"
        lines.append(f"{key}  ({type_name(hint)}; {shown})")
        doc = " ".join((field.description or "").split())
        lines.append(textwrap.fill(doc, 100, initial_indent="    ", subsequent_indent="    "))
    return "\n".join(line for line in lines if line)


@functools.cache
def as_section(kind: type) -> type[Section]:
    """`kind` itself, or for a plain dataclass (options of somebody else's strategy) a section with its fields."""
    if issubclass(kind, Section):
        return kind
    fields, hints = dataclasses.fields(kind), get_type_hints(kind, include_extras=True)
    body: dict[str, Any] = {name: value for name, value in vars(kind).items() if isinstance(value, types.FunctionType)}
    body = {name: value for name, value in body.items() if not name.startswith("__")}
    body |= {"__module__": kind.__module__, "__annotations__": {field.name: hints[field.name] for field in fields}}
    for field in fields:
        if field.default_factory is not dataclasses.MISSING:
            body[field.name] = Field(default_factory=field.default_factory)
        elif field.default is not dataclasses.MISSING:
            body[field.name] = field.default
    return types.new_class(kind.__name__, (Section,), exec_body=lambda namespace: namespace.update(body))


# Annotations


def hint_of(field: FieldInfo) -> Any:
    """The annotation of a field, with its ranges."""
    return Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation


def bare(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def alternatives(hint: Any) -> tuple[Any, ...]:
    kind = bare(hint)
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (hint,)


def section_of(hint: Any) -> type[Section] | None:
    """The section that an annotation names, if it does."""
    return next((k for k in map(bare, alternatives(hint)) if isinstance(k, type) and issubclass(k, Section)), None)


def element(hint: Any) -> Any:
    """What a list holds."""
    lists = (kind for kind in map(bare, alternatives(hint)) if get_origin(kind) is list)
    return next((get_args(kind)[0] for kind in lists), Any)


def type_name(hint: Any) -> str:
    """An annotation for people: `a number above 0 or null`."""
    if len(several := alternatives(hint)) > 1:
        return " or ".join(map(type_name, several))
    kind = bare(hint)
    if get_origin(kind) is Literal:
        names = ", ".join(map(str, get_args(kind)))
        return f"one of {names}" if len(get_args(kind)) > 1 else names
    if get_origin(kind) is list:
        return f"a list of ({type_name(element(kind))})"
    if get_origin(kind) is dict:
        return "a mapping"
    words = {Gt: "above {.gt:g}", Ge: "at least {.ge:g}", Lt: "below {.lt:g}", Le: "at most {.le:g}", OneOf: "{}"}
    limits = [each for each in getattr(hint, "__metadata__", ()) if type(each) in words]
    name = _NAMES.get(kind, getattr(kind, "__name__", str(kind)))
    return f"{name} {' and '.join(words[type(each)].format(each) for each in limits)}".strip()
