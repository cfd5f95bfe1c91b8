"""Plain YAML: safe data only, bounded in size, and errors that name the file and the line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from invdist.runtime.errors import UserError
from invdist.runtime.paths import AnyPath, path_at

MAX_BYTES = 1 << 20


def read_yaml(path: str | AnyPath) -> dict[str, Any]:
    """The mapping of a YAML file: plain data only, no aliases, no repeated keys, at most 1 MiB."""
    path = path_at(path)
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from None
    if len(content) > MAX_BYTES:
        raise UserError(f"{path}: larger than {MAX_BYTES} bytes, so not a settings file")
    mapping = parse(content, str(path))
    if mapping is None:
        return {}
    if not isinstance(mapping, dict):
        raise UserError(f"{path}: expected `key: value` lines, found {shown(mapping)}")
    return mapping


def dotted(values: Mapping[str, Any], *, keep_empty: bool = False, prefix: str = "") -> dict[str, Any]:
    """Nested values by dotted key; an empty mapping has none, or with `keep_empty` is a value itself."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and (value or not keep_empty):
            flat |= dotted(value, keep_empty=keep_empty, prefix=f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def to_yaml(mapping: Mapping[str, Any]) -> str:
    """YAML that `read_yaml` reads back to the same mapping, with the keys in their order."""
    return yaml.safe_dump(dict(mapping), sort_keys=False, allow_unicode=True, width=100)


class _Loader(yaml.SafeLoader):
    """Safe YAML without aliases (a small file could expand to gigabytes) and without repeated keys."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise UserError(f"line {self.peek_event().start_mark.line + 1}: YAML aliases (*name) are not allowed")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen if isinstance(key.value, str) else False:
                raise UserError(f"line {key.start_mark.line + 1}: the key {shown(key.value)} appears twice")
            if isinstance(key.value, str):
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def parse(content: bytes, source: str) -> Any:
    """Plain data of a YAML text."""
    try:
        return yaml.load(content, Loader=_Loader)
    except UserError as error:
        raise UserError(f"{source}: {error}") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise UserError(f"{source}: line {line}: not YAML ({error.problem})") from None
    except RecursionError:
        raise UserError(f"{source}: nested too deeply") from None
    # PyYAML lets KeyError, ValueError, AttributeError and others out where a value does not fit its tag.
    except Exception as error:
        raise UserError(f"{source}: a value is malformed ({error})"[:300]) from None


def shown(value: Any) -> str:
    """A value for a message, short whatever it is."""
    try:
        text = repr(value)
    except ValueError:  # Python does not write integers of thousands of digits
        text = "a huge number"
    return text if len(text) <= 60 else f"{text[:57]}..."
