"""Owns the description of the API: an OpenAPI document made of the types that requests and replies are checked by, and a page.

Does not own the fields (schema) or the replies (shapes).
"""

import html
import json
import re
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from runtime.modes import Playing
from server import schema, shapes
from server.errors import STATUSES

REF = "#/components/schemas/"
NOT_BUILT = "Not built; these values change nothing and pass."


BOUNDS = {"minimum": "from", "exclusiveMinimum": "above", "maximum": "to", "exclusiveMaximum": "below"}


@dataclass(frozen=True)
class Endpoint:
    """What can be asked where: types of body and reply, and errors besides those that every body can meet."""

    method: str
    path: str
    about: str
    body: type | None
    reply: type | str
    errors: tuple[int, ...] = ()


ENDPOINTS = (
    Endpoint("post", "/v1/completions", "Continue a text or token ids.", schema.CompletionRequest, shapes.Completion, (429,)),
    Endpoint("post", "/v1/chat/completions", "Answer a conversation.", schema.ChatRequest, shapes.Chat, (429,)),
    Endpoint("get", "/v1/models", "The names that are served.", None, shapes.Models),
    Endpoint("get", "/v1/models/{name}", "One of them.", None, shapes.Model, (404,)),
    Endpoint("post", "/tokenize", "Ids of a prompt, or of a chat by its template.", schema.TokenizeRequest, shapes.Tokens),
    Endpoint("post", "/detokenize", "Text of ids, special tokens included.", schema.DetokenizeRequest, shapes.Text),
    Endpoint("get", "/v1/runtime", "How decode steps are played, and on what.", None, Playing, (503,)),
    Endpoint("post", "/v1/runtime", "Change that between two steps.", schema.SwitchRequest, Playing, (403, 415)),
    Endpoint("get", "/health", "200 once every kernel is compiled, until the server drains.", None, shapes.Health, (503,)),
    Endpoint("get", "/version", "Quartet's version.", None, shapes.Version),
    Endpoint("get", "/metrics", "Prometheus' text format.", None, "text/plain"),
)
BODY_ERRORS = (400, 404, 408, 413, 500, 503)


def openapi(version: str, locked: bool) -> dict[str, Any]:
    """The document; `locked` says that a key is asked for."""
    types = {kind for each in ENDPOINTS for kind in (each.body, each.reply) if isinstance(kind, type)} | {shapes.Error}
    wanted: Any = [(kind, "validation", TypeAdapter(kind)) for kind in sorted(types, key=lambda kind: kind.__name__)]
    schemas: dict[str, Any] = TypeAdapter.json_schemas(wanted, ref_template=REF + "{model}")[1]["$defs"]
    for name, made in schemas.items():
        if name in ("CompletionRequest", "ChatRequest"):
            _add_neutral(made["properties"])
        if name.endswith("Request") or name in ("Message", "StreamOptions"):
            _allow_null(made)
    paths: dict[str, dict[str, Any]] = {}
    for each in ENDPOINTS:
        paths.setdefault(each.path, {})[each.method] = _operation(each, locked)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Quartet", "version": version, "description": "OpenAI's API for one model."},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{"key": []}] if locked else [],
    }


def _operation(endpoint: Endpoint, locked: bool) -> dict[str, Any]:
    reply, body = endpoint.reply, endpoint.body
    content = {reply: {}} if isinstance(reply, str) else _json_of(reply)
    if reply in (shapes.Completion, shapes.Chat):
        about = "With stream: a line `data: {...}` and an empty one for each token, `data: [DONE]` at the end."
        content["text/event-stream"] = {"schema": {"type": "string", "description": about}}
    responses: dict[str, Any] = {"200": {"description": "Done.", "content": content}}
    opened = endpoint.path == "/health"
    for code in sorted({*endpoint.errors, *(BODY_ERRORS if body else ()), *((401,) if locked and not opened else ())}):
        names = sorted(status.name for status in STATUSES.values() if status.code == code and status.name)
        responses[str(code)] = {"description": f"code {', '.join(names)}", "content": _json_of(shapes.Error)}
    operation: dict[str, Any] = {"summary": endpoint.about, "responses": responses}
    if body is not None:
        operation["requestBody"] = {"required": True, "content": _json_of(body)}
    if "{name}" in endpoint.path:
        name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        operation["parameters"] = [name]
    return {**operation, "security": []} if opened else operation


def _json_of(kind: type) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": REF + kind.__name__}}}


def _add_neutral(properties: dict[str, Any]) -> None:
    """Fields that are not built have few values that pass."""
    for name, values in schema.NEUTRAL.items():
        properties.setdefault(name, {"enum": list(values), "description": NOT_BUILT})


def _allow_null(model: dict[str, Any]) -> None:
    """Null counts as absent."""
    for name, field in model["properties"].items():
        if name in model.get("required", ()) or {"type": "null"} in field.get("anyOf", ()):
            continue
        kept = {key: field.pop(key) for key in ("description", "title", "default") if key in field}
        model["properties"][name] = {"anyOf": [field, {"type": "null"}], **kept}


def docs_page(document: dict[str, Any]) -> str:
    """The document as one page that fetches nothing."""
    style = (
        ":root{color-scheme:light dark}body{font:15px system-ui;margin:2em auto;max-width:60em;padding:0 1em}"
        "td,th{text-align:left;padding-right:1em}@media(max-width:40em){th{display:none}tr,td{display:block}tr{padding:.4em 0}"
        "td:nth-child(3):not(:empty)::before{content:'default: '}}"
    )
    head = '<meta charset=utf-8><meta name=viewport content="width=device-width,initial-scale=1">'
    title = f"<!doctype html><html lang=en>{head}<title>Quartet API</title><style>{style}</style>"
    parts = [title, '<h1>Quartet API</h1><p><a href="openapi.json">openapi.json</a></p>']
    schemas = document["components"]["schemas"]
    for endpoint in ENDPOINTS:
        operation = document["paths"][endpoint.path][endpoint.method]
        parts.append(f"<h2><code>{endpoint.method.upper()} {endpoint.path}</code></h2><p>{html.escape(endpoint.about)}</p>")
        if endpoint.body is not None:
            parts.append(_table(schemas[endpoint.body.__name__], schemas))
        answers = (f"{code}: {html.escape(answer['description'])}" for code, answer in operation["responses"].items())
        parts.append(f"<p>{'<br>'.join(answers)}</p>")
    return "".join(parts)


def _table(model: dict[str, Any], schemas: dict[str, Any]) -> str:
    """A body's fields, those of the objects in it, and the names of what is not built."""
    fields, required = model["properties"], model.get("required", ())
    built = {name: field for name, field in fields.items() if field.get("description") != NOT_BUILT}
    rows = "".join(_row(name, field, name in required) for name, field in built.items())
    words = f"<table><tr><th>field<th>values<th>default<th></tr>{rows}</table>"
    inner = dict.fromkeys(re.findall(f'"{REF}(\\w+)"', json.dumps(built)))
    words += "".join(f"<h3>{name}</h3>{_table(schemas[name], schemas)}" for name in inner)
    left = ", ".join(f"<code>{name}</code>" for name in fields if name not in built)
    return words + (f"<p>Not built, and passed over at values that change nothing: {left}.</p>" if left else "")


def _row(name: str, field: dict[str, Any], required: bool) -> str:
    default = "required" if required else json.dumps(field["default"]) if field.get("default") is not None else ""
    cells = (f"<code>{name}</code>", html.escape(_kind(field)), html.escape(default), html.escape(field.get("description", "")))
    return f"<tr><td>{'<td>'.join(cells)}</tr>"


def _kind(field: dict[str, Any]) -> str:
    """A field's values in words."""
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(_kind(each) for each in field["anyOf"] if each != {"type": "null"}))
    if "enum" in field:
        return ", ".join(str(value).lower() if isinstance(value, bool) else str(value) for value in field["enum"])
    if "$ref" in field:
        return str(field["$ref"]).removeprefix(REF)
    bounds = [f"{word} {field[key]}" for key, word in BOUNDS.items() if key in field]
    return " ".join([f"list of {_kind(field['items'])}" if "items" in field else str(field.get("type", "")), *bounds])
