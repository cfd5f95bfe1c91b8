"""Trains on this machine the way a cluster would: `invdist local`, or launch/local.sh, which installs first.

Makes a small synthetic data set in ./data if there is none, starts a private Ray head (loopback, its own token, free
ports), submits `python -m invdist.train` to it as a job and follows the job. At the end, and on Ctrl-C, everything
that was started is ended, and nothing else. On the synthetic data, the same is trained a second time by plain training
(no method, no exposure vectors), and the last table has both. Exit code: 0 trained, 1 failed, 2 wrong settings,
130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from invdist.runtime.errors import exit_on_user_error
from invdist.runtime.install import check_stack
from invdist.runtime.private_ray import LOOPBACK, private_ray

if TYPE_CHECKING:
    from invdist.config import Config


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> int:
    """Prepares data if needed, trains, and returns the exit code described above."""
    args = _parser().parse_args(argv)
    check_stack()
    signal.signal(signal.SIGTERM, _as_interrupt)
    try:
        return _launch(args.preset, args.bind, args.overrides, compare=args.compare)
    except KeyboardInterrupt:
        print("\ninterrupted; everything that was started has ended", file=sys.stderr)
        return 130


def _launch(preset: str, bind: str, overrides: list[str], *, compare: bool) -> int:
    # Imported here: --help must work before anything is installed.
    from invdist import config as configs
    from invdist.config.defaults import LOCAL
    from invdist.data.dataset import Dataset
    from invdist.training.data_checks import check_against_data, check_fits_host
    from invdist.training.first_run import is_plain, train_and_compare
    from invdist.training.sizes import suited

    data = Path("data", preset).absolute()
    overrides = [f"data.path={data}", *overrides]
    config = configs.load(LOCAL, overrides)
    synthetic = config.data.path == str(data)
    if synthetic and (code := _prepare(data, preset)):
        return code
    dataset = Dataset.open(config.data.path, verify="fast")
    sized = suited(config, dataset)
    check_against_data(sized, dataset)
    check_fits_host(sized, dataset)
    command = [sys.executable, "-u", "-m", "invdist.train", "--config", str(LOCAL), *overrides]
    with _cluster(bind, _cpus(sized)) as train:
        if compare and synthetic and not is_plain(config):
            return train_and_compare(config, command, train)
        return train(command)


def _prepare(data: Path, preset: str) -> int:
    """Makes the synthetic data set unless it is there; returns an exit code."""
    if (data / "dataset.json").exists():
        return 0
    from invdist.cli import prepare

    print(f"preparing the synthetic data set {data}", flush=True)
    return prepare.main(["synthetic", "--output", str(data), f"preset={preset}"])


def _cpus(config: Config) -> int:
    """Logical CPUs of the head: what workers and readers reserve, even if this machine has fewer."""
    needed = math.ceil(config.ray.ranks * config.ray.cpus_per_worker) + config.data.readers + 1
    return max(os.cpu_count() or 1, needed)


@contextlib.contextmanager
def _cluster(bind: str, cpus: int) -> Iterator[Callable[[list[str]], int]]:
    """A private Ray; gives what runs a command as a job on it and returns its exit code."""
    from invdist.training.job import run_job

    with private_ray(cpus, dashboard=True, bind=bind) as head:
        assert head.dashboard is not None
        print(f"Ray: {head.dashboard} (dashboard; token in {head.folder}/token while this runs)", flush=True)
        if bind != LOOPBACK:
            print(
                f"opened beyond this machine: Ray on all interfaces, its dashboard and job server on {bind}; "
                "anybody with the token can run code here",
                flush=True,
            )
        yield functools.partial(run_job, head.dashboard)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="invdist local",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples (launch/local.sh takes the same arguments):\n"
        "  invdist local\n"
        "  launch/local.sh method=none model=neumf training.epochs=3\n"
        "  launch/local.sh data.path=/my/prepared/data ray.workers=4\n\n"
        "The run folder is made in ./runs. For launch/local.sh, INVDIST_PYTHON is the Python to install with and\n"
        "INVDIST_VENV an environment to use instead of .venv. All keys: python -m invdist.train --help.",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace those of local.yaml")
    parser.add_argument("--preset", default="small", help="size of the synthetic data set (default: %(default)s)")
    parser.add_argument(
        "--no-compare", dest="compare", action="store_false", help="leave out the second run, by plain training"
    )
    parser.add_argument(
        "--bind",
        default=LOOPBACK,
        metavar="ADDRESS",
        help="open the Ray head to other machines on ADDRESS (default: %(default)s, this machine only)",
    )
    return parser


def _as_interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt
