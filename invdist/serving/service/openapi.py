"""The OpenAPI description of the service, and a page of it that loads nothing from elsewhere."""

from __future__ import annotations

import html
import json
from typing import Any

from invdist.config.fields import Section

HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}

_STYLE = "body{font:15px sans-serif;max-width:50em;margin:2em auto}code,pre{background:#f3f3f3}td{padding:.2em .8em}"


def of_body(kind: type[Section]) -> dict[str, Any]:
    """What OpenAPI says of a route whose body is such a request."""
    responses = {
        "400": "the body is not JSON",
        "401": "the token is missing or wrong",
        "413": "the body or its rows are too many",
        "415": "the body is not application/json",
        "422": "a field is missing, unknown or wrong",
        "503": "no answer in time",
    }
    error = {"type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"]}
    answer = {"type": "object", "description": "The checkpoint used, and one list for each column."}
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": kind.model_json_schema()}}},
        "security": [{"bearer": []}],
        "responses": {
            "200": {"description": "Columns of equal length.", "content": {"application/json": {"schema": answer}}},
            **{
                status: {"description": text, "content": {"application/json": {"schema": error}}}
                for status, text in responses.items()
            },
        },
    }


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
    return "".join(parts)


def _fields(body: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return list(body.get("properties", {}).items())


def _field(name: str, field: dict[str, Any], required: bool) -> str:
    default = "" if required else f" (default: {json.dumps(field.get('default'))})"
    return f"<tr><td><code>{html.escape(name)}</code><td>{html.escape(field.get('description', '') + default)}"
