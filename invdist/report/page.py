"""The report of a run: one HTML file that holds everything it shows and loads nothing from a network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path

import jinja2
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from invdist.report.content import page_content
from invdist.runtime.errors import UserError
from invdist.runtime.files import write_atomically
from invdist.runtime.paths import AnyPath, StorePath
from invdist.training.history import History


def write_report(
    run: str | AnyPath, compare: Sequence[str | AnyPath] = (), output: str | AnyPath | None = None
) -> AnyPath:
    """Writes the report of `run`, compared with the runs `compare`, to `output` or RUN/report.html; returns its path.

    The file appears whole or not at all.
    """
    runs = [History.read(folder) for folder in (run, *compare)]
    where = output if output is not None else runs[0].path / "report.html"
    path = where if isinstance(where, StorePath) else check_output(where)
    write_output(path, render(runs))
    return path


def render(runs: Sequence[History]) -> str:
    """The report of the first run, compared with the others, as HTML text."""
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    template = environment.from_string(_asset("page.html"))
    css, js, plotly = (Markup(text) for text in (_asset("page.css"), _asset("page.js"), get_plotlyjs()))
    return template.render(page_content(_distinct_names(runs)), css=css, js=js, plotly=plotly)


def check_output(path: str | Path) -> Path:
    """The path as one that a file can be written to; a `UserError` otherwise."""
    path = Path(path)
    if path.is_dir():
        raise UserError(f"{path}: is a folder; name the file to write")
    if not path.parent.is_dir():
        raise UserError(f"{path}: the folder {path.parent} does not exist")
    return path


def write_output(path: AnyPath, content: str | bytes) -> None:
    """Writes a file that appears whole or not at all; `UserError` if the disk refuses it."""
    try:
        # A run's files may hold bytes that are no UTF-8. They must not stop the report.
        write_atomically(path, content.encode(errors="replace") if isinstance(content, str) else content)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from None


def _distinct_names(runs: Sequence[History]) -> list[History]:
    """Numbers runs of the same folder name, which would be one line in every figure."""
    named: list[History] = []
    for place, run in enumerate(runs, 1):
        taken = run.name in [earlier.name for earlier in runs[: place - 1]]
        named.append(replace(run, name=f"{run.name} ({place})") if taken else run)
    return named


def _asset(name: str) -> str:
    return resources.files("invdist.report").joinpath(name).read_text(encoding="utf-8")
