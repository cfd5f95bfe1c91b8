"""Figures as files: a page of its own, or a picture drawn by a headless browser."""

from __future__ import annotations

import base64
import os
import tempfile
import urllib.parse
from pathlib import Path

import plotly.graph_objects as go

from invdist.report.browser import Browser
from invdist.report.page import write_whole
from invdist.runtime.errors import UserError

FORMATS = (".html", ".svg", ".png")


def check_picture(path: str | Path) -> Path:
    """The path, if `save_figure` could write it; a `UserError` otherwise."""
    path = Path(path)
    if path.suffix not in FORMATS:
        raise UserError(f"{path}: a figure is a file ending in {', '.join(FORMATS)}")
    if not path.parent.is_dir():
        raise UserError(f"{path}: the folder {path.parent} does not exist")
    return path


def save_figure(figure: go.Figure, path: str | Path, width: int = 1000, height: int | None = None) -> None:
    """Writes a figure as .html (self-contained), or as .svg or .png, for which Chromium is needed."""
    path = check_picture(path)
    page = figure.to_html(include_plotlyjs=True, full_html=True, config={"displaylogo": False}, div_id="figure")
    if path.suffix == ".html":
        write_whole(path, page)
        return
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "figure.html").write_text(page, encoding="utf-8")
        with Browser() as browser:
            opened = browser.open((Path(folder) / "figure.html").as_uri(), width, height or 800)
            size = f"width: {width}, height: {height or 'figure.layout.height || 500'}"
            options = f"{{format: '{path.suffix[1:]}', {size}, scale: {2 if path.suffix == '.png' else 1}}}"
            address = opened.evaluate(f"Plotly.toImage(document.getElementById('figure'), {options})")
    kind, _, data = address.partition(",")
    if kind.endswith("base64"):
        partial = path.with_name(f".{path.name}.part")
        partial.write_bytes(base64.b64decode(data))
        os.replace(partial, path)
    else:
        write_whole(path, urllib.parse.unquote(data))
