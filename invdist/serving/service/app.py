"""The HTTP application: routes, the token, limits, and errors that say what is wrong."""

from __future__ import annotations

import asyncio
import http.client
import secrets
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Protocol

from fastapi import FastAPI, Request, Response
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from invdist import __version__
from invdist.config.fields import Section
from invdist.runtime.errors import UserError
from invdist.serving.service import openapi
from invdist.serving.service.batching import Batcher
from invdist.serving.service.model import ServedModel
from invdist.serving.service.requests import (
    AnnotateRequest,
    Limits,
    RecommendRequest,
    RequestError,
    ScoreRequest,
    parse,
)

OPEN_PATHS = ("/healthz", "/docs", "/openapi.json")
"""Paths that need no token: nothing of the run is there."""

Answer = dict[str, Any]


class Serving(Protocol):
    """What answers: the model of now, with its batcher. It may be replaced between two requests."""

    limits: Limits

    def current(self) -> tuple[ServedModel, Batcher]:
        """The model and its batcher; a request takes both once and keeps them to its end."""
        ...

    async def in_thread(self, function: Callable[[], Answer]) -> Answer:
        """Computes something long outside the event loop."""
        ...

    async def metrics(self) -> str:
        """Metrics of all replicas of this node, as Prometheus reads them."""
        ...

    def observe(self, route: str, status: int, seconds: float, rows: int) -> None:
        """Counts an answer."""
        ...


def build_app(serving: Serving, token: str) -> FastAPI:
    """The application. Every path but `OPEN_PATHS` needs the header `Authorization: Bearer TOKEN`."""
    app = FastAPI(
        title="invdist",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,  # a redirect has no body, and goes to the Host that the client names
    )

    async def score(request: ScoreRequest) -> Answer:
        """Scores of pairs, as `invdist score` gives them: logit, probability, known."""
        served, batcher = serving.current()
        pairs = served.match(*request.pairs(serving.limits))
        scores = await batcher.score(pairs.user[pairs.known], pairs.item[pairs.known])
        return {"checkpoint": served.checkpoint, **served.scores(pairs, scores, request.unknown)}

    async def annotate(request: AnnotateRequest) -> Answer:
        """Soft labels of pairs, as `invdist annotate` gives them: score, w1, w0, label, confidence, known."""
        served, batcher = serving.current()
        pairs = served.match(*request.pairs(serving.limits))
        scores = await batcher.score(pairs.user[pairs.known], pairs.item[pairs.known])
        columns = served.annotations(pairs, scores, request.unknown, request.threshold)
        return {"checkpoint": served.checkpoint, **columns}

    async def recommend(request: RecommendRequest) -> Answer:
        """The best items of users, as `invdist recommend` gives them: user, rank, item, score."""
        served, _ = serving.current()
        users, leave_out = request.users(serving.limits), request.seen == "leave_out"
        columns = await serving.in_thread(
            lambda: served.recommendations(users, request.k, request.unknown, leave_out_seen=leave_out)
        )
        return {"checkpoint": served.checkpoint, **columns}

    routes: list[tuple[str, type[Section], Callable[[Any], Awaitable[Answer]], str]] = [
        ("/score", ScoreRequest, score, "user item score probability known"),
        ("/annotate", AnnotateRequest, annotate, "user item score w1 w0 label confidence known"),
        ("/recommend", RecommendRequest, recommend, "user rank item score"),
    ]
    for path, kind, answer, columns in routes:
        _add_route(app, serving, path, answer, kind, openapi.of_body(kind, columns.split()))

    async def healthz() -> Response:
        """200 as soon as a model is loaded."""
        return _json(200, {"status": "ok"})

    async def metrics() -> Response:
        """Metrics of all replicas of this node, for Prometheus."""
        try:
            async with asyncio.timeout(serving.limits.seconds):
                return Response(await serving.metrics(), media_type="text/plain; version=0.0.4")
        except (OSError, http.client.HTTPException):  # TimeoutError is an OSError
            return _error(503, "Ray did not give the metrics of this node; try again")

    async def schema() -> Response:
        return _json(200, openapi.completed(app.openapi()))

    async def page() -> Response:
        return Response(openapi.page(app.openapi()), media_type="text/html", headers=openapi.HEADERS)

    app.add_api_route("/healthz", healthz, response_class=Response)
    app.add_api_route("/metrics", metrics, response_class=Response, openapi_extra=openapi.of_metrics())
    app.add_api_route("/openapi.json", schema, include_in_schema=False)
    app.add_api_route("/docs", page, include_in_schema=False)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _internal_error)
    app.add_middleware(_Guard, token=token)  # type: ignore[arg-type]
    return app


def _add_route(
    app: FastAPI,
    serving: Serving,
    path: str,
    answer: Callable[[Any], Awaitable[Answer]],
    kind: type[Section],
    described: dict[str, Any],
) -> None:
    async def route(request: Request) -> Response:
        started, rows, body = time.perf_counter(), 0, None
        seconds = f"{serving.limits.seconds:g} s"
        try:
            async with asyncio.timeout(serving.limits.seconds):
                body = await _body(request, serving.limits)
                content = await answer(parse(kind, body))
            rows = len(content["user"])
            response = _json(200, content)
        except (RequestError, UserError) as error:
            response = _error(error.status if isinstance(error, RequestError) else 422, str(error))
        except TimeoutError:
            if body is None:
                response = _error(408, f"the body did not come within {seconds}; send it at once, or a smaller one")
            else:
                response = _error(503, f"no answer within {seconds}; try again, or ask for less")
                response.headers["Retry-After"] = "1"
        except ClientDisconnect:
            response = _error(499, "the client went away")  # counted, as nginx does; nobody reads it
        except Exception:
            serving.observe(path, 500, time.perf_counter() - started, rows)
            raise
        serving.observe(path, response.status_code, time.perf_counter() - started, rows)
        return response

    route.__doc__ = answer.__doc__
    # The first one answers, the second one is described: FastAPI takes a third of the time of an answer.
    app.add_route(path, route, methods=["POST"])
    app.add_api_route(path, route, methods=["POST"], response_class=Response, name=path[1:], openapi_extra=described)


class _Guard:
    """Refuses requests without the token before anything of them is read."""

    def __init__(self, app: Any, token: str) -> None:
        self._app, self._expected = app, f"Bearer {token}".encode()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            given = [value for name, value in scope["headers"] if name == b"authorization"]
            if len(given) != 1 or not secrets.compare_digest(given[0], self._expected):
                response = _error(
                    401, "expected the header 'Authorization: Bearer TOKEN' with the token of the service"
                )
                response.headers["WWW-Authenticate"] = "Bearer"
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)


async def _body(request: Request, limits: Limits) -> bytes:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RequestError(415, f"Content-Type: expected application/json, not {kind[:60] or 'nothing'}")
    too_large = RequestError(413, f"the body has more than {limits.body_bytes:,} bytes; send several requests")
    if int(request.headers.get("content-length") or 0) > limits.body_bytes:
        raise too_large
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limits.body_bytes:
            raise too_large
    return bytes(body)


def _json(status: int, content: Answer) -> Response:
    return Response(to_json(content, inf_nan_mode="null"), status, media_type="application/json")


def _error(status: int, message: str) -> Response:
    return _json(status, {"error": message})


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path[:80]
    known = {404: f"there is no {path!r}; see /docs", 405: f"{path} does not take {request.method[:20]}; see /docs"}
    response = _error(error.status_code, known.get(error.status_code, str(error.detail)))
    response.headers.update(error.headers or {})
    return response


async def _internal_error(request: Request, error: Exception) -> Response:
    return _error(500, "an error of the service, which is in its log; the request may be right")
