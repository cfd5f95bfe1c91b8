"""Small pieces of HTML. Text given to any of these is escaped here; `Html` marks what already is markup."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from invdist.config.plain_yaml import dotted


class Html(str):
    """Text that is markup already."""


def safe(text: str) -> str:
    """Text as HTML: escaped, unless it is markup."""
    return text if isinstance(text, Html) else escape(text)


def cell(text: str, kind: str = "", tag: str = "td") -> Html:
    """A table cell with the given style classes."""
    style = f' class="{kind}"' if kind else ""
    return Html(f"<{tag}{style}>{safe(text)}</{tag}>")


def head(text: str, kind: str = "") -> Html:
    """A heading cell."""
    return cell(text, kind, tag="th")


def row(cells: Sequence[Html], kind: str = "") -> Html:
    """A table row of cells."""
    style = f' class="{kind}"' if kind else ""
    return Html(f"<tr{style}>{''.join(cells)}</tr>")


def table(heads: Sequence[Html], rows: Sequence[Html], kind: str = "") -> Html:
    """A table that scrolls sideways by itself on a narrow screen."""
    style = f' class="{kind}"' if kind else ""
    top = f"<thead>{row(heads)}</thead>" if heads else ""
    return Html(f'<div class="scroll"><table{style}>{top}<tbody>{"".join(rows)}</tbody></table></div>')


def key_values(values: Mapping[str, Any]) -> Html:
    """Nested values as a table of dotted names."""
    return table([], [row([head(key), cell(value, "text")]) for key, value in flatten(values).items()])


def note(text: str) -> Html:
    """A paragraph in a quieter colour."""
    return Html(f'<p class="soft">{safe(text)}</p>')


def fold(summary: str, content: str, opened: bool = False) -> Html:
    """Content behind a line to click on."""
    state = " open" if opened else ""
    return Html(f"<details{state}><summary>{safe(summary)}</summary>{safe(content)}</details>")


def flatten(values: Mapping[str, Any], as_written: bool = False) -> dict[str, str]:
    """Nested values as texts under dotted names; numbers with separators, or `as_written`."""
    return {key: _text(value, as_written) for key, value in dotted(values, keep_empty=True).items()}


def duration(seconds: float) -> str:
    """Seconds as people say them: `3.2 s`, `4 min 05 s`, `2 h 10 min`."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def _text(value: object, as_written: bool) -> str:
    if isinstance(value, str):
        return value
    if value is None:
        return "-"
    if isinstance(value, bool) or as_written or not isinstance(value, int | float):
        return json.dumps(value, default=str)
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"
