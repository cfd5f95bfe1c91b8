"""Serves a run over HTTP on Ray Serve: scores, annotations and recommendations of raw ids, as JSON.

invdist serve --run RUN [--port 8000] [--replicas 2] [--checkpoint best|last|STEP]

Starts a private Ray (or uses the cluster of RAY_ADDRESS) and answers until Ctrl-C, which ends what was started. While
the run trains on, each checkpoint that becomes the best (with --checkpoint last: each new one) is taken over without
dropping a request. Listens on loopback and asks for a token. Details: docs/serving.md.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Sequence

from invdist.cli import arguments
from invdist.runtime.errors import UserError, exit_on_user_error
from invdist.runtime.install import check_stack
from invdist.runtime.private_ray import LOOPBACK

_MOST = {"replicas": 1000, "max_rows": 1 << 30, "max_bytes": 1 << 27, "timeout": 86_400}
"""Upper bounds of numbers. HAProxy has buffers below 256 MiB and times below 25 days."""


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> int:
    """Starts the service, prints where it is, and waits."""
    args = _parser().parse_intermixed_args(argv)
    check_stack()
    from invdist.serving.service.launch import running_service
    from invdist.serving.service.requests import Limits

    for name, most in _MOST.items():
        value = getattr(args, name)
        if not 0 < value <= most:
            raise UserError(f"--{name.replace('_', '-')} {value}: expected more than 0 and at most {most:,}")
    if not 0 <= args.port < 1 << 16:
        raise UserError(f"--port {args.port}: expected 0 to 65535")
    arguments.open_run(args)  # what cannot be opened is said before anything is started
    limits = Limits(args.max_bytes, args.max_rows, args.timeout)
    _interrupt_on_signals()
    try:
        with running_service(
            args.run,
            args.overrides,
            args.checkpoint,
            replicas=args.replicas,
            host=args.bind,
            port=args.port,
            token_file=args.token_file,
            limits=limits,
        ) as service:
            if args.bind != LOOPBACK:
                print(f"opened beyond this machine, on {args.bind}: anybody with the token can ask", flush=True)
            print(
                f"serving {args.run} on {service.url} (token in {service.token_file}; {service.url}/docs)", flush=True
            )
            _interrupt_on_signals()  # again: Ray has a handler of its own for SIGTERM
            threading.Event().wait()
    except KeyboardInterrupt:
        print("\nended what was started", file=sys.stderr)
    return 130


def _interrupt_on_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="invdist serve", description=__doc__)
    arguments.add_run(parser)
    parser.add_argument("--replicas", type=int, default=2, help="processes that answer (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="0: a free one (default: %(default)s)")
    parser.add_argument(
        "--bind",
        default=LOOPBACK,
        metavar="ADDRESS",
        help="answer on ADDRESS (default: %(default)s, this machine only)",
    )
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        help="holds the token; made if it is missing (default: a new file that is removed at the end)",
    )
    parser.add_argument("--max-rows", type=int, default=10_000, help="rows of one request (default: %(default)s)")
    parser.add_argument("--max-bytes", type=int, default=1 << 20, help="of one body (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=10.0, help="seconds for one request (default: %(default)s)")
    return parser
