"""The report of a run: one HTML file with everything inside, that asks nothing of any network."""

from __future__ import annotations

import html
import os
import tempfile
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from plotly.offline import get_plotlyjs

from invdist.report import sections
from invdist.runtime.errors import UserError
from invdist.training.history import History

_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
"""The browser itself refuses anything from outside the file."""


def write_report(run: str | Path, compare: Sequence[str | Path] = (), output: str | Path | None = None) -> Path:
    """Writes the report of `run`, beside those of `compare`, to `output` or RUN/report.html; gives its path.

    The file appears whole or not at all.
    """
    history = History.read(run)
    others = [History.read(other) for other in compare]
    path = Path(output) if output is not None else history.path / "report.html"
    if path.is_dir():
        raise UserError(f"{path}: is a folder; name the file to write")
    if not path.parent.is_dir():
        raise UserError(f"{path}: the folder {path.parent} does not exist")
    write_whole(path, render(history, others))
    return path


def render(history: History, others: Sequence[History] = ()) -> str:
    """The report as HTML text."""
    figures: dict[str, str] = {}
    body = sections.body(
        history, [_renamed(other, place, history, others) for place, other in enumerate(others)], figures
    )
    data = ",".join(f'"{name}":{text}' for name, text in figures.items())
    title = html.escape(f"{history.name} · invdist")
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<link rel="icon" href="data:,">',
            f"<title>{title}</title>",
            f"<style>{_asset('page.css')}</style>",
            f"<script>{get_plotlyjs()}</script>",
            "</head>",
            "<body>",
            body,
            # "<" never stands in the data as itself, so no text of a run can end the element.
            '<script type="application/json" id="figures">{' + data.replace("<", "\\u003c") + "}</script>",
            f"<script>{_asset('page.js')}</script>",
            "</body>",
            "</html>",
            "",
        ]
    )


def write_whole(path: Path, text: str) -> None:
    """Writes a text file so that a reader sees the old one or the whole new one."""
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            # The surrogate of a broken byte in a run's files must not stop the report.
            with os.fdopen(handle, "w", encoding="utf-8", errors="replace") as file:
                file.write(text)
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from None


def _renamed(other: History, place: int, history: History, others: Sequence[History]) -> History:
    """Two runs of the same folder name would be one line in every figure."""
    names = [history.name, *(earlier.name for earlier in others[:place])]
    if other.name not in names:
        return other
    return History(other.path, other.events, other.config, other.dataset, name=f"{other.name} ({place + 2})")


def _asset(name: str) -> str:
    return resources.files("invdist.report").joinpath(name).read_text(encoding="utf-8")
