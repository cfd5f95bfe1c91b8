"""Trains a recommender with Ray Train, on the cluster it is submitted to or on a Ray of its own.

python -m invdist.train --config configs/local.yaml [key=value ...]
python -m invdist.train --resume runs/NAME [key=value ...]
ray job submit -- python -m invdist.train --config /path/on/the/cluster/run.yaml [key=value ...]
"""

from __future__ import annotations

import argparse
import contextlib
import math
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

from invdist.runtime.errors import UserError, exit_on_user_error
from invdist.runtime.install import check_stack


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> int:
    """Checks everything, trains, prints the result and where it is."""
    from invdist import config as configs

    parser = argparse.ArgumentParser(prog="invdist train", description=__doc__)
    configs.add_arguments(parser)
    parser.add_argument("--resume", metavar="RUN", help="continue the run of this folder from its newest checkpoint")
    args = parser.parse_intermixed_args(argv)
    check_stack()
    if args.print_config:
        print(configs.dump(_settings(args)), end="")
        return 0
    return train(_settings(args), resume=args.resume)


def _settings(args: argparse.Namespace):
    from invdist import config as configs
    from invdist.training import run_folder

    if args.resume and args.config:
        raise UserError("--resume takes the settings of the run: leave --config out, and override with key=value")
    if args.resume:
        return run_folder.reopen(args.resume, args.overrides)[0]
    if not args.config:
        raise UserError("--config FILE is missing (or --resume RUN): configs/local.yaml is a good first one")
    return configs.load(args.config, args.overrides)


def train(config, resume: str | None = None) -> int:
    """Trains as `config` says, in a new run folder or that of `resume`; 0 when finished, 130 when stopped."""
    from invdist import config as configs
    from invdist.cli.report import write_report
    from invdist.data.dataset import Dataset
    from invdist.evaluation.tables import final_table
    from invdist.runtime.files import absolute, exclusive
    from invdist.training import ray_backend, run_folder
    from invdist.training.data_checks import check_against_data
    from invdist.training.history import History
    from invdist.training.progress import ProgressView

    dataset = run_folder.data_of(config, resume) if resume else Dataset.open(config.data.path)
    check_against_data(config, dataset)
    config.data.path = absolute(config.data.path)
    if config.checkpoint.path is not None:
        config.checkpoint.path = absolute(config.checkpoint.path)
    run = Path(resume).absolute() if resume else run_folder.create(config, dataset)
    cpus = math.ceil(config.ray.workers * config.ray.cpus_per_worker)
    with exclusive(run), ray_backend.connected(cpus), ProgressView(run), _stop_on_interrupt(run):
        ray_backend.fit(config, run)
    if resume:
        run_folder.write_atomically(run / run_folder.CONFIG_FILE, configs.dump(config))  # overrides have proved right
    history = History.read(run)
    print(final_table(history.events, config.training.ndcg_k))
    write_report(run)
    print(f"run: {run}")
    if history.final is None:
        print(f"continue with: python -m invdist.train --resume {run}")
        return 130
    return 0


@contextlib.contextmanager
def _stop_on_interrupt(run: Path) -> Iterator[None]:
    """The first Ctrl-C asks the workers to save and end; the second ends at once."""
    from invdist.training.run_folder import STOP_FILE

    stop = run / STOP_FILE
    stop.unlink(missing_ok=True)

    def ask(number: int, frame: object) -> None:
        if stop.exists():
            raise KeyboardInterrupt
        stop.touch()
        print("\nstopping after this step, saving; once more to stop at once", flush=True)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        stop.unlink(missing_ok=True)


if __name__ == "__main__":
    raise SystemExit(main())
