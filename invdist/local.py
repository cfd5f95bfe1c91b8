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
from collections.abc import Sequence
from pathlib import Path

from invdist import private_ray
from invdist.errors import UserError, exit_on_user_error
from invdist.install import check_stack

ROOT = Path(__file__).resolve().parents[1]
WORKERS = 2


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the whole chain; returns the exit code described above."""
    args = _parser().parse_args(argv)
    check_stack()
    overrides = [f"ray.workers={WORKERS}", *args.overrides]
    if not any(override.startswith("data.path=") for override in args.overrides):
        data = ROOT / "data" / args.preset
        overrides.insert(0, f"data.path={data}")
        _prepare(data, args.preset)
    train = [
        sys.executable,
        "-m",
        "invdist.train",
        "--config",
        str(ROOT / "configs" / "local.yaml"),
        *overrides,
    ]
    # Wrong settings are told before Ray is started, with their own exit code.
    checked = subprocess.run([*train, "--print-config"], stdout=subprocess.DEVNULL)
    if checked.returncode:
        return checked.returncode
    signal.signal(signal.SIGTERM, _as_interrupt)
    try:
        return _run(train, args.bind)
    except KeyboardInterrupt:
        print("\ninterrupted; nothing of it is left running", file=sys.stderr)
        return 130


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
    parser.add_argument(
        "--preset", default="small", help="size of the embedded data set (default: %(default)s)"
    )
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
    environment = os.environ | head.environment
    submit = [*ray, "submit", address, f"--submission-id={job}", "--log-style=pretty", "--", *train]
    follower = subprocess.Popen(submit, env=environment, start_new_session=True)
    try:
        return follower.wait()
    except KeyboardInterrupt:
        print("\nstopping the run (Ctrl-C again: at once)", file=sys.stderr, flush=True)
        stop = [*ray, "stop", address, job]
        subprocess.run(stop, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        raise
    finally:
        follower.kill()
        follower.wait()


def _as_interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    raise SystemExit(main())
