"""`invdist COMMAND ...`, also `python -m invdist COMMAND ...`. Imports only what the command needs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from invdist import __version__
from invdist.runtime.errors import exit_on_user_error
from invdist.runtime.terminal import run_command

COMMANDS = {
    "prepare": "turn a raw log into a data set, or make a synthetic one",
    "train": "train a recommender on Ray",
    "evaluate": "score a checkpoint on a split",
    "annotate": "write soft labels of unlabeled interactions",
    "recommend": "write the best items for each user",
    "score": "write scores of given user-item pairs",
    "serve": "answer requests for scores, annotations and recommendations over HTTP",
    "export": "write a trained model for use without invdist: tensors, card, scoring program",
    "roll": "score each day of a feed before learning from it: trained anew, grown, never updated",
    "study": "compare methods over seeds, all tuned in the same way",
    "plan": "show how tables would be sharded, without training",
    "report": "write tables and figures of runs as one HTML file",
    "bench": "measure speed and memory, as ratios within one process",
    "local": "train on a private Ray on this machine, on a synthetic data set unless told otherwise",
    "doctor": "show what is installed and what works here, and how to fix the rest",
}


def module_of(command: str) -> str:
    """The module of a command. `train` is at the top of the package: `ray job submit` starts it there."""
    return "invdist.train" if command == "train" else f"invdist.cli.{command}"


def usage() -> str:
    """The text of `invdist --help`."""
    lines = [f"  {name:<10} {summary}" for name, summary in COMMANDS.items()]
    return "\n".join(["usage: invdist COMMAND [...]", "", *lines, "", "invdist COMMAND --help explains each command."])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command with the rest of the arguments (default: those of this process); returns its exit code."""
    return run_command(lambda: _run(sys.argv[1:])) if argv is None else _run(list(argv))


@exit_on_user_error
def _run(arguments: list[str]) -> int:
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
