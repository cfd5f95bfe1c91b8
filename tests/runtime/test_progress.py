"""Progress lines: a bar in a terminal, plain lines with a limit on their number in a log."""

from __future__ import annotations

import io

from invdist.runtime.progress import ProgressLine, RowProgress


class Terminal(io.StringIO):
    """Text that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_log_gets_plain_lines_and_not_too_many() -> None:
    out = io.StringIO()
    with RowProgress(out, log_seconds=0.0) as progress:
        progress("reading", 12_000)
        progress("writing", 5_000, total=12_000)
    assert out.getvalue() == "reading 12,000 rows\nwriting 5,000 of 12,000 rows\n"
    out = io.StringIO()
    with RowProgress(out, log_seconds=3600.0) as progress:
        for rows in range(1000):
            progress("reading", rows)
        progress.print("a warning [bold]is kept as it is[/bold]")
    assert out.getvalue() == "a warning [bold]is kept as it is[/bold]\n"


def test_a_terminal_gets_a_bar_that_disappears_and_lines_that_stay(monkeypatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    with ProgressLine(out) as line:
        line.show("step [1]", 3, 10)
        line.print("epoch 0 [done]")
    shown = out.getvalue()
    assert "step [1]" in shown
    assert "30%" in shown
    assert "epoch 0 [done]\n" in shown
    assert shown.rstrip("\r").endswith("\x1b[2K"), "the bar is erased"
