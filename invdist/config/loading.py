"""Reads settings: a YAML file or a mapping, with `key=value` overrides, becomes a checked `Config`."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import create_model

from invdist.config.fields import as_section, build, describe, to_mapping
from invdist.config.plain_yaml import parse, read_yaml, to_yaml
from invdist.config.registry import STRATEGIES
from invdist.config.schema import Config
from invdist.runtime.paths import AnyPath


def load(path: str | AnyPath, overrides: Iterable[str] = ()) -> Config:
    """The checked settings of a YAML file with `key=value` overrides; `UserError` lists every problem."""
    return from_mapping(read_yaml(path), overrides, source=str(path))


def from_text(text: str, *, source: str = "settings") -> Config:
    """The checked settings of YAML text, such as `dump` gives."""
    return from_mapping(parse(text.encode(), source), source=source)


def from_mapping(mapping: Mapping[str, Any], overrides: Iterable[str] = (), *, source: str = "") -> Config:
    """The checked settings that a plain mapping describes: what `load` does after reading the file."""
    whole = build(_with_options(), mapping, overrides, source=source)
    config = Config(**{name: getattr(whole, name) for name in Config.model_fields})
    config.strategy = getattr(whole, config.method)
    return config


def dump(config: Config) -> str:
    """YAML that `load` reads back to an equal config, with the section of the chosen method."""
    mapping = to_mapping(config)
    if config.strategy is not None:
        mapping[config.method] = to_mapping(config.strategy)
    return to_yaml(mapping)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds `--config FILE`, `--print-config` and `key=value` overrides to a command."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings")
    parser.add_argument("--print-config", action="store_true", help="show the resolved settings and stop")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings laid over the file's")
    parser.epilog = f"keys, each of which can be set as key=value:\n\n{describe(_with_options())}"


def _with_options() -> type[Config]:
    """`Config` with a section more for the options of each strategy."""
    return _extended(tuple((name, STRATEGIES.get(name).Config) for name in STRATEGIES.names()))


@functools.cache
def _extended(options: tuple[tuple[str, type], ...]) -> type[Config]:
    sections: dict[str, Any] = {name: (as_section(kind), ...) for name, kind in options}
    return create_model("Config", __base__=Config, **sections)
