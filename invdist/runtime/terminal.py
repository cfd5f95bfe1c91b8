"""What every command needs of the shell it runs in: UTF-8 paths, and a quiet end when nobody reads its output."""

from __future__ import annotations

import codecs
import io
import os
import select
import sys
from collections.abc import Callable

SIGPIPE_EXIT_CODE = 141
"""128 + SIGPIPE: what a shell reports for a program that is ended by `| head`."""


def run_command(command: Callable[[], int]) -> int:
    """Runs `command` and gives its exit code; for the entry points of the package.

    A locale of plain ASCII (LC_ALL=C without Python's UTF-8 mode) cannot name a file with other letters: the process
    starts again in UTF-8 mode. If the reader of standard output has gone (`invdist ... | head -1`), the command ends
    without a traceback.
    """
    if codecs.lookup(sys.getfilesystemencoding()).name == "ascii":
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal of another encoding still shows the line
    try:
        try:
            return command()
        finally:
            sys.stdout.flush()  # also after argparse's `SystemExit`
    except BrokenPipeError:
        if not _reader_has_gone(sys.stdout.fileno()):
            raise
        # Python flushes standard output once more when it exits, which would print a second error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return SIGPIPE_EXIT_CODE


def _reader_has_gone(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return any(event & select.POLLERR for _, event in poll.poll(0))
