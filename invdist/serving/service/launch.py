"""Starts the service and gives its address; ends what was started."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from invdist.runtime.errors import UserError
from invdist.runtime.private_ray import LOOPBACK, free_port, new_environment
from invdist.serving.service import front
from invdist.serving.service.requests import Limits
from invdist.serving.service.watch import CheckpointWatcher
from invdist.training import ray_backend

_LEAST_TOKEN = 16


@dataclass(frozen=True)
class Service:
    """A running service."""

    url: str
    token_file: Path
    """Holds the token; only its owner can read it."""


@contextlib.contextmanager
def running_service(
    run: str | Path,
    overrides: Sequence[str] = (),
    checkpoint: str | int = "best",
    *,
    replicas: int = 2,
    host: str = LOOPBACK,
    port: int = 0,
    token_file: str | Path | None = None,
    limits: Limits = Limits(),  # noqa: B008
) -> Iterator[Service]:
    """Inside, the service answers; it is on a private Ray, or on the cluster that RAY_ADDRESS names.

    `port` 0 is a free one. A `token_file` that does not exist is made; by default it is a new one that is removed at
    the end.
    """
    watcher = CheckpointWatcher(run, overrides, checkpoint)
    with contextlib.ExitStack() as stack:
        own = not ray_backend.inside_cluster()
        _check_address(host, port if own else 0)  # Serve of a cluster may be listening on the port already
        file = Path(token_file) if token_file else Path(stack.enter_context(tempfile.TemporaryDirectory()), "token")
        token = read_or_make_token(file)
        variables = new_environment() if own else None
        if variables is not None:
            folder = Path(variables["RAY_AUTH_TOKEN_PATH"]).parent
            stack.callback(shutil.rmtree, folder, ignore_errors=True)  # in case Ray does not start, which removes it
            variables |= front.environment(folder, limits)
        stack.enter_context(ray_backend.connected(replicas + 1, variables))

        from ray import serve
        from ray.exceptions import RayError

        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        from invdist.serving.service.deployment import application

        name = f"invdist-{Path(run).resolve().name}"
        port = port or free_port(host)
        try:
            serve.start(http_options={"host": host, "port": port})
            if not own:  # a private Ray ends as a whole
                host, port = _address_of_cluster()
                if name in serve.status().applications:
                    raise UserError(f"the cluster has an application {name} already: end the service that it is of")
                stack.callback(serve.delete, name)
            serve.run(application(watcher, token, limits, replicas), name=name, route_prefix="/")
        except (RuntimeError, RayError, TimeoutError) as error:
            # Ray's errors hold the tracebacks of its processes; what was wrong comes last.
            what = (str(error).strip() or repr(error)).splitlines()[-1]
            raise UserError(f"the service did not start: {what}") from None
        yield Service(f"http://{f'[{host}]' if ':' in host else host}:{port}", file)


def _check_address(host: str, port: int) -> None:
    """`UserError` if nothing can listen there. Ray tells it late, among tracebacks."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, UnicodeError) as error:  # UnicodeError: such as a host name with two dots in a row
            reason = getattr(error, "strerror", None) or error
            if isinstance(error, socket.gaierror | UnicodeError) or error.errno == errno.EADDRNOTAVAIL:
                raise UserError(f"--bind {host}: expected an address of this machine ({reason})") from None
            raise UserError(f"--port {port} on {host}: {reason}; choose another, or 0 for a free one") from None


def _address_of_cluster() -> tuple[str, int]:
    """Where Serve of a cluster listens: where it was told to when it was started, whatever is asked for later."""
    from ray.serve.context import _get_global_client

    client: Any = _get_global_client()
    options = client.http_config
    everywhere = options.host in (None, "", "0.0.0.0", "::")
    return LOOPBACK if everywhere else options.host, options.port


def read_or_make_token(file: Path) -> str:
    """The token in a file that only its owner can read; a new one if there is no such file."""
    try:
        with contextlib.suppress(FileExistsError):
            with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
                opened.write(token := secrets.token_urlsafe(32))
            return token
        token = file.read_text("utf-8", errors="replace").strip()  # what is replaced is not ASCII
        mode = file.stat().st_mode
    except OSError as error:
        raise UserError(f"--token-file {file}: {error.strerror}") from None
    if mode & 0o077:
        raise UserError(f"--token-file {file}: others can read it; chmod 600 {file}")
    if len(token) < _LEAST_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise UserError(
            f"--token-file {file}: expected one line of at least {_LEAST_TOKEN} printable characters without spaces"
        )
    return token
