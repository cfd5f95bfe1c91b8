"""Trains a recommender with Ray Train, on the cluster it is submitted to or on a private Ray on this machine.

python -m invdist.train [--config configs/ml1m.yaml] [key=value ...]
python -m invdist.train --resume runs/NAME [key=value ...]
python -m invdist.train --from runs/MONDAY data.path=data/tuesday [key=value ...]
ray job submit -- python -m invdist.train --config /path/on/the/cluster/run.yaml [key=value ...]

Without --config the settings are those of configs/own-data.yaml, which suit data sets of any size; only data.path must
be given. A setting that a file does not have has the default shown below. Exit code: 0 trained, 2 wrong settings,
130 stopped by Ctrl-C (saved, can be resumed), 1 any other failure.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import signal
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from invdist.runtime.errors import UserError, exit_on_user_error
from invdist.runtime.install import check_stack
from invdist.runtime.terminal import run_command

if TYPE_CHECKING:
    from invdist.config import Config
    from invdist.runtime.paths import AnyPath


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> int:
    """Checks everything, trains, prints the result and where it is."""
    from invdist import config as configs

    parser = argparse.ArgumentParser(prog="invdist train", description=__doc__)
    configs.add_arguments(parser)
    parser.add_argument("--resume", metavar="RUN", help="continue the run in this folder from its newest checkpoint")
    parser.add_argument(
        "--from",
        dest="parent",
        metavar="RUN",
        help="a new run that goes on from the best model of this one, on a newer data set: ids are joined by raw id",
    )
    parser.add_argument(
        "--result",
        metavar="FILE",
        help='write {"run": FOLDER} or {"error": MESSAGE} to FILE at the end, for programs that start a training',
    )
    args = parser.parse_intermixed_args(argv)
    try:
        check_stack()
        config = _settings(args)
        if args.print_config:
            print(configs.dump(config), end="")
            return 0
        run, code = train(config, resume=args.resume)
    except UserError as error:
        _write_result(args.result, {"error": str(error)})
        raise
    _write_result(args.result, {"run": str(run)})
    return code


def _settings(args: argparse.Namespace) -> Config:
    from invdist import config as configs
    from invdist.config.defaults import OWN_DATA
    from invdist.training import run_folder
    from invdist.training.growth import check_epochs, settings_from

    if args.resume and args.parent:
        raise UserError("--resume continues a run, --from starts a new one: give one of them")
    if (args.resume or args.parent) and args.config:
        option = "--resume" if args.resume else "--from"
        raise UserError(f"{option} takes the settings of the run: leave --config out, and override with key=value")
    if args.parent:
        return settings_from(args.parent, args.overrides)
    if args.resume:
        config = run_folder.reopen(args.resume, args.overrides)[0]
        if config.growth.run is not None:
            check_epochs(args.overrides)
        return config
    if args.config:
        return configs.load(args.config, args.overrides)
    if not any(text.startswith(("data.path=", "data=")) for text in args.overrides):
        raise UserError(
            "no data set: give data.path=FOLDER, made by `invdist prepare`, or --config FILE. To try invdist out, "
            "`invdist local` makes a small synthetic data set and trains on it"
        )
    return configs.load(OWN_DATA, args.overrides)


def train(config: Config, resume: str | None = None) -> tuple[AnyPath, int]:
    """Trains as `config` says and prints the result; gives the run folder, and 0 when finished or 130 when stopped.

    The run folder is a new one, or that of `resume`.
    """
    from invdist import config as configs
    from invdist.data.dataset import Dataset
    from invdist.evaluation.tables import final_table
    from invdist.report.page import write_report
    from invdist.runtime.files import absolute, exclusive, write_atomically
    from invdist.runtime.paths import path_at
    from invdist.training import ray_backend, run_folder
    from invdist.training.data_checks import check_against_data, check_fits_host
    from invdist.training.growth import check_growth
    from invdist.training.history import History
    from invdist.training.progress import ProgressView
    from invdist.training.resume import check_resume
    from invdist.training.sizes import suited
    from invdist.training.vectors import check_folder

    dataset = run_folder.data_of(config, resume) if resume else Dataset.open(config.data.path)
    config = suited(config, dataset)
    check_against_data(config, dataset)
    if not resume:
        check_growth(config, dataset)
    if not ray_backend.inside_cluster():
        check_fits_host(config, dataset)
    if config.watch.mlflow:
        from invdist.training.mlflow import open_client

        open_client(config)  # what is wrong with it is said now
    config.runs, config.data.path = absolute(config.runs), absolute(config.data.path)
    if config.checkpoint.path is not None:
        config.checkpoint.path = absolute(config.checkpoint.path)
    if config.exposures.path is not None:
        config.exposures.path = absolute(config.exposures.path)
    check_folder(config, dataset)
    if resume:
        run = path_at(resume)
        check_resume(config, run, dataset)
    else:
        run = run_folder.create(config, dataset)
    cpus = math.ceil(config.ray.ranks * config.ray.cpus_per_worker)
    try:
        with exclusive(run), ray_backend.connected(cpus), ProgressView(run), _stop_on_interrupt(run):
            ray_backend.fit(config, run)
    except BaseException as error:
        if not resume:
            run_folder.release_name(run, keep=not isinstance(error, UserError))
        raise
    if resume:
        # Only now: settings that made the run fail are not kept.
        write_atomically(run / run_folder.CONFIG_FILE, configs.dump(config))
    history = History.read(run)
    print(final_table(history.events, config.training.ndcg_k))
    write_report(run)
    print(f"run: {run}")
    if history.final is None:
        print(f"continue with: python -m invdist.train --resume {run}")
        return run, 130
    return run, 0


@contextlib.contextmanager
def _stop_on_interrupt(run: AnyPath) -> Iterator[None]:
    """The first Ctrl-C asks the workers to save and stop; the second stops at once."""
    from invdist.training.run_folder import STOP_FILE

    stop = run / STOP_FILE
    stop.unlink(missing_ok=True)

    def request(number: int, frame: object) -> None:
        if stop.exists():
            raise KeyboardInterrupt
        stop.touch()
        print("\nstopping after this step and saving; press Ctrl-C again to stop at once", flush=True)

    before = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        stop.unlink(missing_ok=True)


def _write_result(path: str | None, result: dict[str, str]) -> None:
    if path is not None:
        from invdist.runtime.files import write_atomically

        write_atomically(path, json.dumps(result))


if __name__ == "__main__":
    raise SystemExit(run_command(main))
