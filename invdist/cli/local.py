"""`launch/local.sh`: train on this machine, the way a cluster would.

Prepares the embedded data set if it is not there, starts a private Ray head (loopback, a token of its own,
free ports), submits `python -m invdist.train` to it as a job with two workers, follows it, and ends only what
it started, also on Ctrl-C. Exit code: 0 trained, 1 failed, 2 wrong settings, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from invdist.runtime import private_ray
from invdist.runtime.errors import UserError, exit_on_user_error
from invdist.runtime.install import check_stack

ROOT = Path(__file__).resolve().parents[2]
WORKERS = 2


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the whole chain; returns the exit code described above."""
    args = _parser().parse_args(argv)
    check_stack()
    signal.signal(signal.SIGTERM, _as_interrupt)
    try:
        return _launch(args)
    except KeyboardInterrupt:
        print("\ninterrupted; nothing of it is left running", file=sys.stderr)
        return 130


def _launch(args: argparse.Namespace) -> int:
    from invdist.config.plain_yaml import parse  # --help works before anything is installed

    data = ROOT / "data" / args.preset
    overrides = [f"data.path={data}", f"ray.workers={WORKERS}", *args.overrides]
    train = [sys.executable, "-m", "invdist.train", "--config", str(ROOT / "configs" / "local.yaml"), *overrides]
    # Wrong settings are told before anything is made or started, with their own exit code.
    checked = subprocess.run([*train, "--print-config"], stdout=subprocess.PIPE)
    if checked.returncode:
        return checked.returncode
    path = parse(checked.stdout, "settings")["data"]["path"]
    if path == str(data):
        _prepare(data, args.preset)
    elif "://" not in path and not Path(path, "dataset.json").exists():
        raise UserError(f"data.path: {path} is no prepared data set (it has no dataset.json); see invdist prepare")
    return _run(train, args.bind)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="launch/local.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n"
        "  launch/local.sh\n"
        "  launch/local.sh method=none model=neumf training.epochs=3\n"
        "  launch/local.sh data.path=/my/prepared/data ray.workers=4\n\n"
        "The run folder is made in ./runs. INVDIST_PYTHON names another Python, INVDIST_VENV another\n"
        "environment than .venv. Keys: python -m invdist.train --help.",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings over configs/local.yaml")
    parser.add_argument("--preset", default="small", help="size of the embedded data set (default: %(default)s)")
    parser.add_argument(
        "--bind",
        default=private_ray.LOOPBACK,
        metavar="ADDRESS",
        help="open the Ray head beyond this machine, on ADDRESS (default: %(default)s, nothing is opened)",
    )
    return parser


def _prepare(data: Path, preset: str) -> None:
    if (data / "dataset.json").exists():
        return
    print(f"preparing the embedded data set in {data}", flush=True)
    command = [
        sys.executable,
        "-m",
        "invdist.prepare",
        "synthetic",
        "--output",
        str(data),
        f"preset={preset}",
    ]
    code = subprocess.run(command).returncode
    if code:
        raise UserError(f"the embedded data set could not be prepared (exit code {code})")


def _run(train: list[str], bind: str) -> int:
    # Every logical CPU that the run may ask for, whatever this machine has: two workers and their readers.
    cpus = max(os.cpu_count() or 1, 4)
    head = private_ray.start(cpus, dashboard=True, bind=bind)
    try:
        print(f"Ray: {head.dashboard} (dashboard; token in {head.folder}/token while this runs)", flush=True)
        if bind != private_ray.LOOPBACK:
            print(
                f"opened beyond this machine: Ray on all interfaces, its dashboard and job server on {bind}; "
                "whoever holds the token can run code here",
                flush=True,
            )
        return _submit(train, head)
    finally:
        head.close()


def _submit(train: list[str], head: private_ray.PrivateRay) -> int:
    job = f"invdist-{secrets.token_hex(4)}"
    ray = [sys.executable, "-c", private_ray.RAY_COMMAND, "job"]
    address = f"--address={head.dashboard}"
    environment = private_ray.without_another_ray() | head.environment | {"PYTHONUNBUFFERED": "1"}
    submit = [*ray, "submit", address, f"--submission-id={job}", "--log-style=pretty", "--log-color=false"]
    # In a session of its own: Ctrl-C is for this process alone, which stops the run first and follows it to its end.
    follower = subprocess.Popen(
        [*submit, "--", *train],
        env=environment,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert follower.stdout is not None
    shown = _JobLines(follower.stdout, job)
    try:
        _print_all(shown)
        return follower.wait()
    except KeyboardInterrupt:
        print("\nstopping the run, which saves it first (Ctrl-C again: at once)", file=sys.stderr, flush=True)
        stop = [*ray, "stop", address, "--no-wait", job]
        subprocess.run(stop, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        _print_all(shown)
        raise
    finally:
        follower.kill()
        follower.wait()


def _print_all(lines: Iterable[str]) -> None:
    for line in lines:
        print(line, end="", flush=True)


class _JobLines:
    """The job's own lines of what `ray job submit` prints; all lines if the job never began.

    An iterator that can be resumed after an interrupt, which a generator cannot.
    """

    def __init__(self, lines: Iterator[str], job: str) -> None:
        self._lines, self._job = lines, job
        self._before: list[str] | None = []
        self._after = False

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        for line in self._lines:
            if self._before is not None:
                self._before.append(line)
                if line.startswith("Running entrypoint for job"):
                    self._before = None
            elif line.startswith(f"Job '{self._job}' ") or f"WebSocket closed for job {self._job}" in line:
                self._after = True
            elif not self._after:
                return line
        if self._before:
            return self._before.pop(0)
        raise StopIteration


def _as_interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt
