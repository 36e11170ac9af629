"""The OpenAPI document of an app, from its routes: bodies by pydantic, answers by msgspec."""

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Literal

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler
from pydantic import AliasChoices, BaseModel
from pydantic.json_schema import models_json_schema

from tandem.frontend import answers
from tandem.frontend.keys import OPEN_ROUTES
from tandem.frontend.middleware import json_response
from tandem.telemetry.version import package_version

Schema = dict[str, Any]

JSON, EVENTS = "application/json", "text/event-stream"
# What `/docs` may load: nothing, from nowhere.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
DOCUMENT: web.AppKey[Callable[[], dict[str, Any]]] = web.AppKey("document")
_REF = "#/components/schemas/"


@dataclass(frozen=True, slots=True)
class Route:
    """One route, and what its handler takes and gives.

    Attributes:
        handler: Its docstring is the summary.
        answer: None for any JSON object.
        bodies: Models that together describe the body.
        event: One event, if the answer may be streamed.
        error: What an error looks like.
        has_named_events: Whether each event has a name, and no `[DONE]` follows the last.
        media: Of the answer.
        unavailable: Whether 503 has the answer's own shape instead of an error's.
    """

    method: Literal["get", "post", "put", "delete"]
    path: str
    handler: Handler
    answer: type[msgspec.Struct] | None = None
    bodies: tuple[type[BaseModel], ...] = ()
    event: type[msgspec.Struct] | None = None
    error: type[msgspec.Struct] = answers.Error
    has_named_events: bool = False
    media: str = JSON
    unavailable: bool = False


async def show_document(request: web.Request) -> web.Response:
    """Describe the server's API, as OpenAPI does."""
    return json_response(request.app[DOCUMENT]())


async def show_page(request: web.Request) -> web.Response:
    """Show the server's API in a browser."""
    text, headers = _page(request.app[DOCUMENT]()), {"Content-Security-Policy": _POLICY}
    return web.Response(text=text, content_type="text/html", headers=headers)


def document(routes: Sequence[Route], *, has_keys: bool) -> dict[str, Any]:
    """Return the document, version 3.1."""
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = re.sub(r"\{(\w+):[^}]*\}", r"{\1}", route.path)
        paths.setdefault(path, {})[route.method] = _operation(route, path, has_keys=has_keys)
    components: dict[str, Any] = {"schemas": _schemas(routes)}
    made: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "Tandem",
            "version": package_version(),
            "description": "The APIs of OpenAI, SGLang and Anthropic. Unknown fields are ignored, but for some that "
            "would change the answer; null is the same as absent.",
        },
        "paths": paths,
        "components": components,
    }
    if has_keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        made["security"] = [{"key": []}]
    return made


def _page(document: Mapping[str, Any]) -> str:
    """Return a document as a page: a list of its routes, then the whole as text."""
    title = escape(f"{document['info']['title']} {document['info']['version']}")
    rows = "".join(
        f"<tr><td>{method.upper()}<td><code>{escape(path)}</code><td>{escape(operation['summary'])}"
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    )
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><h1>{title}</h1>"
        f"<p>{escape(document['info']['description'])} <a href=openapi.json>openapi.json</a></p>"
        f"<table>{rows}</table><pre>{escape(json.dumps(document, indent=2))}</pre></html>"
    )


def _operation(route: Route, path: str, *, has_keys: bool) -> dict[str, Any]:
    described: dict[str, Any] = {
        "summary": (inspect.getdoc(route.handler) or "").partition("\n")[0],
        "operationId": f"{route.method}{re.sub(r'[^a-zA-Z0-9]+', '_', path)}",
        "responses": _responses(route),
    }
    if names := re.findall(r"\{(\w+)\}", path):
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    if route.bodies:
        body = {"allOf": [_ref(model.__name__) for model in route.bodies]}
        described["requestBody"] = {"required": True, "content": {JSON: {"schema": body}}}
    if has_keys and path in OPEN_ROUTES:
        described["security"] = []
    return described


def _ref(name: str) -> Schema:
    return {"$ref": _REF + name}


def _responses(route: Route) -> dict[str, Any]:
    """Return the answer, and what an error looks like."""
    schema: Schema = {"type": "object" if route.media == JSON else "string"}
    if route.answer is not None:
        # A batch is answered by a list.
        is_many = route.answer is answers.Generated
        schema = _ref("GeneratedOrList" if is_many else route.answer.__name__)
    content: dict[str, Any] = {route.media: {"schema": schema}}
    if route.event is not None:
        content[EVENTS] = {"schema": _event(route.event.__name__, route.has_named_events)}
    responses: dict[str, Any] = {"200": {"description": "the answer", "content": content}}
    if route.unavailable:
        responses["503"] = {"description": "it cannot be served now", "content": content}
    error = {JSON: {"schema": _ref(route.error.__name__)}}
    return responses | {"default": {"description": "an error", "content": error}}


def _event(name: str, is_named: bool) -> Schema:
    """Describe one event of a stream, in the manner of OpenAPI 3.2."""
    about = "JSON." if is_named else "JSON; that of the last event is `[DONE]`."
    data = {
        "type": "string",
        "contentMediaType": JSON,
        "contentSchema": _ref(name),
        "description": about,
    }
    fields = {"event": {"type": "string"}, "data": data} if is_named else {"data": data}
    return {
        "type": "object",
        "description": "With stream: true.",
        "properties": fields,
        "required": list(fields),
    }


def _schemas(routes: Sequence[Route]) -> dict[str, Schema]:
    models = sorted(
        {body for route in routes for body in route.bodies}, key=lambda model: model.__name__
    )
    _, found = models_json_schema(
        [(model, "validation") for model in models], ref_template=f"{_REF}{{model}}"
    )
    schemas: dict[str, Schema] = found["$defs"]
    for model in models:
        _name_aliases(model, schemas[model.__name__])
    structs = {part for route in routes for part in (route.answer, route.event, route.error)}
    [*_, several], described = msgspec.json.schema_components(
        [*(structs - {None}), answers.Generated | list[answers.Generated]],
        ref_template=f"{_REF}{{name}}",
    )
    return schemas | described | {"GeneratedOrList": several}


def _name_aliases(model: type[BaseModel], schema: Schema) -> None:
    """Describe every name of a field: pydantic describes the first."""
    for field in model.model_fields.values():
        if isinstance(field.validation_alias, AliasChoices):
            first, *others = map(str, field.validation_alias.choices)
            for name in others:
                schema["properties"][name] = schema["properties"][first]
