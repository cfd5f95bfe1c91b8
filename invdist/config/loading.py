"""Reads settings: a YAML file or a mapping, with `key=value` overrides, becomes a checked `Config`."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from invdist.config.fields import Problem, convert, describe, fail, merge, to_mapping
from invdist.config.plain_yaml import parse, read_yaml, to_yaml
from invdist.config.registry import STRATEGIES
from invdist.config.schema import Config


def load(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """The checked settings of a YAML file with `key=value` overrides; `UserError` lists every problem."""
    return from_mapping(read_yaml(path), overrides, source=str(path))


def from_text(text: str, *, source: str = "settings") -> Config:
    """The checked settings of YAML text, such as `dump` gives."""
    return from_mapping(parse(text.encode(), source), source=source)


def from_mapping(mapping: Mapping[str, Any], overrides: Iterable[str] = (), *, source: str = "") -> Config:
    """The checked settings that a plain mapping describes: what `load` does after reading the file."""
    problems: list[Problem] = []
    merged = merge(mapping, overrides, problems)
    options = {
        name: convert(STRATEGIES.get(name).Config, merged.pop(name, None), source, problems, f"{name}.")
        for name in STRATEGIES.names()
    }
    config = convert(Config, merged, source, problems, also_known=options)
    fail(problems)
    assert config is not None
    config.strategy = options[config.method]
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
    parser.epilog = f"keys, each of which can be set as key=value:\n\n{_describe_all()}"


def _describe_all() -> str:
    sections = [describe(STRATEGIES.get(name).Config, f"{name}.") for name in STRATEGIES.names()]
    return "\n".join([describe(Config), *(section for section in sections if section)])
