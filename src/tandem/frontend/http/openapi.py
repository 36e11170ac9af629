"""The OpenAPI document of an app, generated from the structs of its routes."""

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import chain
from typing import Any, Literal

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from tandem import __version__
from tandem.frontend import answers
from tandem.frontend.http.keys import OPEN_ROUTES
from tandem.frontend.http.middleware import json_response

JsonSchema = dict[str, Any]

JSON, EVENTS = "application/json", "text/event-stream"
# `/docs` loads no external resources.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
DOCUMENT: web.AppKey[Callable[[], dict[str, Any]]] = web.AppKey("document")
_REF = "#/components/schemas/"


@dataclass(frozen=True, slots=True)
class Route:
    """One route, with the types of its bodies and answers.

    Attributes:
        handler: Its docstring's first line is the summary.
        answer: Struct of the answer. None: any JSON object.
        bodies: Structs that together describe the body.
        event: Struct of one event. None: the answer cannot be streamed.
        error: Struct of an error response.
        has_named_events: Whether each event has a name and the stream has no `[DONE]`.
        media: Media type of the answer.
        unavailable: True: a 503 has the same body as a 200.
    """

    method: Literal["get", "post", "put", "delete"]
    path: str
    handler: Handler
    answer: type[msgspec.Struct] | None = None
    bodies: tuple[type[msgspec.Struct], ...] = ()
    event: type[msgspec.Struct] | None = None
    error: type[msgspec.Struct] = answers.Error
    has_named_events: bool = False
    media: str = JSON
    unavailable: bool = False


async def show_document(request: web.Request) -> web.Response:
    """Return the OpenAPI document of the server."""
    return json_response(request.app[DOCUMENT]())


async def show_page(request: web.Request) -> web.Response:
    """Show the server's API as an HTML page."""
    text, headers = _page(request.app[DOCUMENT]()), {"Content-Security-Policy": _POLICY}
    return web.Response(text=text, content_type="text/html", headers=headers)


def document(routes: Sequence[Route], *, has_keys: bool) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of the routes."""
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = re.sub(r"\{(\w+):[^}]*\}", r"{\1}", route.path)
        paths.setdefault(path, {})[route.method] = _operation(route, path, has_keys=has_keys)
    components: dict[str, Any] = {"schemas": _schemas(routes)}
    result: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "Tandem",
            "version": __version__,
            "description": "The APIs of OpenAI, SGLang and Anthropic. Unknown fields are ignored, except some that "
            "would change the answer, which are rejected. null is the same as absent.",
        },
        "paths": paths,
        "components": components,
    }
    if has_keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        result["security"] = [{"key": []}]
    return result


def _page(document: Mapping[str, Any]) -> str:
    """Return an HTML page of the document: a table of the routes, then the JSON text."""
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


def _ref(name: str) -> JsonSchema:
    return {"$ref": _REF + name}


def _responses(route: Route) -> dict[str, Any]:
    """Return the descriptions of a route's answer and of its errors."""
    schema: JsonSchema = {"type": "object" if route.media == JSON else "string"}
    if route.answer is not None:
        # The answer to a batch is a list.
        may_be_list = route.answer is answers.Generated
        schema = _ref("GeneratedOrList" if may_be_list else route.answer.__name__)
    content: dict[str, Any] = {route.media: {"schema": schema}}
    if route.event is not None:
        content[EVENTS] = {"schema": _event(route.event.__name__, route.has_named_events)}
    responses: dict[str, Any] = {"200": {"description": "the answer", "content": content}}
    if route.unavailable:
        responses["503"] = {"description": "unavailable", "content": content}
    error = {JSON: {"schema": _ref(route.error.__name__)}}
    return responses | {"default": {"description": "an error", "content": error}}


def _event(name: str, is_named: bool) -> JsonSchema:
    """Describe one event of a stream, in the style of OpenAPI 3.2."""
    about = "JSON." if is_named else "JSON. The last event's data is `[DONE]`."
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


def _schemas(routes: Sequence[Route]) -> dict[str, JsonSchema]:
    parts = ((*route.bodies, route.answer, route.event, route.error) for route in routes)
    structs = {*chain.from_iterable(parts)} - {None}
    [*_, several], schemas = msgspec.json.schema_components(
        [*structs, answers.Generated | list[answers.Generated]],
        ref_template=f"{_REF}{{name}}",
    )
    return dict(sorted(schemas.items())) | {"GeneratedOrList": several}
