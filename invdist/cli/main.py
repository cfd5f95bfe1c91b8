"""`invdist COMMAND ...`, also `python -m invdist COMMAND ...`; imports only what the command needs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from invdist import __version__
from invdist.runtime.errors import exit_on_user_error

COMMANDS = {
    "prepare": "make a data set from a raw log, or a synthetic one",
    "train": "train a recommender on Ray",
    "evaluate": "score a checkpoint on a split",
    "annotate": "write soft labels of unlabeled rows",
    "recommend": "write the best items of each user",
    "score": "write scores of given pairs",
    "export": "a trained model without invdist: tensors, card, scoring program",
    "study": "compare methods over seeds, all tuned alike",
    "plan": "show how tables would be sharded, without training",
    "report": "tables and figures of runs",
    "bench": "speed and memory, as ratios measured within one run",
    "local": "train on a private Ray on this machine (what launch/local.sh runs)",
    "doctor": "what is installed, what works here, and how to mend the rest",
}


def module_of(command: str) -> str:
    """The module of a command; `train` is at the top of the package, where `ray job submit` starts it."""
    return "invdist.train" if command == "train" else f"invdist.cli.{command}"


def usage() -> str:
    """What `invdist --help` prints."""
    lines = [f"  {name:<10} {summary}" for name, summary in COMMANDS.items()]
    return "\n".join(["usage: invdist COMMAND [...]", "", *lines, "", "invdist COMMAND --help explains each."])


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command with the rest of the arguments; returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"invdist {__version__}")
        return 0
    name = arguments[0]
    if name not in COMMANDS:
        print(f"error: no command {name!r}\n{usage()}", file=sys.stderr)
        return 2
    return importlib.import_module(module_of(name)).main(arguments[1:])
