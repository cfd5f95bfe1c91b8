"""Progress of long work, for the person who waits: a moving line in a terminal, a plain line now and then in a log."""

from __future__ import annotations

import sys
import time
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn


class ProgressLine:
    """One line of progress on `out` (default: stderr), used as a context manager.

    In a terminal it is a `rich` progress bar that disappears at the end. Anywhere else it is a plain line, at most one
    every `log_seconds`.
    """

    def __init__(self, out: TextIO | None = None, log_seconds: float = 10.0) -> None:
        self._out, self._log_seconds = out or sys.stderr, log_seconds
        self._last_line = time.monotonic()
        self._bar: Progress | None = None
        if self._out.isatty():
            text = TextColumn("{task.description}", markup=False)
            console = Console(file=self._out, highlight=False)
            self._bar = Progress(text, BarColumn(bar_width=20), TaskProgressColumn(), console=console, transient=True)
            self._task = self._bar.add_task("", total=None, visible=False)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, text: str, done: float | None = None, total: float | None = None) -> None:
        """Shows `text` as the state of now; `done` of `total` fills the bar."""
        if self._bar is not None:
            self._bar.update(self._task, description=text, completed=done or 0, total=total, visible=True)
        elif time.monotonic() - self._last_line >= self._log_seconds:
            self._last_line = time.monotonic()
            self.print(text)

    def print(self, text: str) -> None:
        """Prints lines that stay, above the moving one."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, emoji=False, soft_wrap=True)
        else:
            print(text, file=self._out, flush=True)


class RowProgress(ProgressLine):
    """Counts rows: call it as `progress(stage, rows)`, as often as you like.

    with RowProgress() as progress:
        progress("reading", 12_000)
        progress("writing", 5_000, total=12_000)
    """

    def __call__(self, stage: str, rows: int, total: int | None = None) -> None:
        """Shows `rows` of `total` (None: not known yet) as done in `stage`."""
        self.show(f"{stage} {rows:,}{f' of {total:,}' if total is not None else ''} rows", rows, total)
