"""Errors for the person who ran the command."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec

P = ParamSpec("P")


class UserError(ValueError):
    """An error the user can fix: the message says what is wrong, where, and what would be right."""


def exit_on_user_error(command: Callable[P, int]) -> Callable[P, int]:
    """Makes a command's `main` print a `UserError` as one line and return 2, without a traceback."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            return command(*args, **kwargs)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2

    return wrapped
