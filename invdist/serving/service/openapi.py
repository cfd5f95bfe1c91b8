"""The OpenAPI description of the service, and a page of it that loads nothing from elsewhere."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from typing import Any

from invdist.config.fields import Section

HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}

_STYLE = "body{font:15px sans-serif;max-width:50em;margin:2em auto}code,pre{background:#f3f3f3}td{padding:.2em .8em}"


_BEARER: list[dict[str, list[str]]] = [{"bearer": []}]
_ERROR = {"type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"]}
_ERRORS = {
    "400": "the body is not JSON",
    "401": "the token is missing or wrong",
    "408": "the body did not come in time",
    "413": "the body or its rows are too many",
    "415": "the body is not application/json",
    "422": "a field is missing, unknown or wrong",
    "503": "no answer in time",
}
_CHECKPOINT = {"type": "object", "description": "The run and the checkpoint that answered."}
_ID = {"anyOf": [{"type": "integer"}, {"type": "string"}]}
_TYPES = {
    "user": _ID,
    "item": _ID,
    "known": {"type": "boolean"},
    "rank": {"type": "integer"},
    "label": {"type": "integer"},
}
"""The types of columns that hold no numbers with a fraction."""


def of_body(kind: type[Section], columns: Sequence[str]) -> dict[str, Any]:
    """What OpenAPI says of a route whose body is such a request and whose answer has such columns."""
    answer = {
        "type": "object",
        "properties": {"checkpoint": _CHECKPOINT, **{name: _column(name) for name in columns}},
        "required": ["checkpoint", *columns],
    }
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": kind.model_json_schema()}}},
        "security": _BEARER,
        "responses": {
            "200": {"description": "Columns of equal length.", "content": {"application/json": {"schema": answer}}},
            **{status: _error(status) for status in _ERRORS},
        },
    }


def of_metrics() -> dict[str, Any]:
    """What OpenAPI says of the page for Prometheus."""
    text = {"description": "Metrics, as Prometheus reads them.", "content": {"text/plain": {}}}
    return {"security": _BEARER, "responses": {"200": text, **{status: _error(status) for status in ("401", "503")}}}


def completed(schema: dict[str, Any]) -> dict[str, Any]:
    """The description of the application with the token that its routes name."""
    schemes = {"bearer": {"type": "http", "scheme": "bearer", "description": "The token of the service."}}
    return {**schema, "components": {**schema.get("components", {}), "securitySchemes": schemes}}


def _error(status: str) -> dict[str, Any]:
    return {"description": _ERRORS[status], "content": {"application/json": {"schema": _ERROR}}}


def _column(name: str) -> dict[str, Any]:
    kinds = _TYPES.get(name, {"type": "number"})
    return {"type": "array", "items": {"anyOf": [*kinds.get("anyOf", [kinds]), {"type": "null"}]}}


def page(schema: dict[str, Any]) -> str:
    """The description as a page for people."""
    parts = [f"<!doctype html><meta charset=utf-8><title>invdist</title><style>{_STYLE}</style>"]
    parts.append("<h1>invdist serve</h1><p>The same for programs: <a href=openapi.json>openapi.json</a></p>")
    for path, methods in schema["paths"].items():
        for method, about in methods.items():
            parts.append(f"<h2>{method.upper()} {html.escape(path)}</h2><p>{html.escape(about.get('description', ''))}")
            body = about.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            rows = [_field(name, field, name in body.get("required", [])) for name, field in _fields(body)]
            parts.append(f"<table>{''.join(rows)}</table>" if rows else "")
            token = " (with the header <code>Authorization: Bearer TOKEN</code>)" if "security" in about else ""
            parts.append(f"<p>Answers{token}:<table>{_answers(about['responses'])}</table>")
    return "".join(parts)


def _answers(responses: dict[str, Any]) -> str:
    rows = []
    for status, about in responses.items():
        columns = about.get("content", {}).get("application/json", {}).get("schema", {}).get("properties", {})
        names = "".join(f" <code>{html.escape(name)}</code>" for name in columns)
        rows.append(f"<tr><td>{html.escape(status)}<td>{html.escape(about['description'])}{names}")
    return "".join(rows)


def _fields(body: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return list(body.get("properties", {}).items())


def _field(name: str, field: dict[str, Any], required: bool) -> str:
    default = "" if required else f" (default: {json.dumps(field.get('default'))})"
    return f"<tr><td><code>{html.escape(name)}</code><td>{html.escape(field.get('description', '') + default)}"
