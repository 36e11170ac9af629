"""The OpenAPI document of an app, from its routes, their docstrings, bodies and answers.

```
 route table ─┬─ handler's docstring ──▶ summary
              └─ OPERATIONS[handler] ──▶ body (schemas by pydantic), answers (schemas by msgspec)
```

A route without an entry in `OPERATIONS` is an error: the document leaves no route out.
"""

import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

import msgspec
from aiohttp import web
from pydantic import AliasChoices, BaseModel
from pydantic.json_schema import models_json_schema

from tandem.frontend import answers, native, openai, routes
from tandem.frontend.grammars import NativeGrammar, OpenAIGrammar
from tandem.frontend.keys import OPEN_ROUTES
from tandem.frontend.middleware import json_response
from tandem.frontend.openai_body import ChatBody, CompletionBody
from tandem.frontend.sampling import CompletionSampling, NativeSampling, OpenAISampling
from tandem.telemetry.version import package_version

Schema = dict[str, Any]

JSON, EVENTS = "application/json", "text/event-stream"
# What `/docs` may load: nothing, from nowhere.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
DOCUMENT: web.AppKey[Callable[[], dict[str, Any]]] = web.AppKey("document")
_REF = "#/components/schemas/"


@dataclass(frozen=True, slots=True)
class Operation:
    """What one handler takes and gives.

    Attributes:
        answer: None for any JSON object.
        bodies: Models that together describe the body.
        event: One event, if the answer may be streamed.
        media: Of the answer.
        unavailable: Whether 503 has the answer's own shape instead of an error's.
    """

    answer: type[msgspec.Struct] | None = None
    bodies: tuple[type[BaseModel], ...] = ()
    event: type[msgspec.Struct] | None = None
    media: str = JSON
    unavailable: bool = False


async def show_document(request: web.Request) -> web.Response:
    """Describe the server's API, as OpenAPI does."""
    return json_response(request.app[DOCUMENT]())


async def show_page(request: web.Request) -> web.Response:
    """Show the server's API in a browser."""
    text, headers = _page(request.app[DOCUMENT]()), {"Content-Security-Policy": _POLICY}
    return web.Response(text=text, content_type="text/html", headers=headers)


OPERATIONS: dict[Callable[..., Any], Operation] = {
    native.generate: Operation(
        answers.Generated,
        (native.GenerateBody, NativeSampling, NativeGrammar),
        answers.Generated,
    ),
    openai.completions: Operation(
        answers.Completion,
        (CompletionBody, CompletionSampling, OpenAIGrammar),
        answers.CompletionChunk,
    ),
    openai.chat_completions: Operation(
        answers.ChatCompletion,
        (ChatBody, OpenAISampling, OpenAIGrammar),
        answers.ChatCompletionChunk,
    ),
    routes.models: Operation(),
    routes.one_model: Operation(),
    routes.health: Operation(unavailable=True),
    routes.live: Operation(),
    routes.health_generate: Operation(),
    routes.model_info: Operation(),
    routes.server_info: Operation(),
    routes.metrics: Operation(media="text/plain"),
    routes.flush_cache: Operation(),
    routes.abort_request: Operation(bodies=(routes.AbortBody,)),
    routes.tokenizer: Operation(),
    show_document: Operation(),
    show_page: Operation(media="text/html"),
}


def document(table: Iterable[web.RouteDef], *, has_keys: bool) -> dict[str, Any]:
    """Return the document, version 3.1.

    Raises:
        KeyError: A route's handler is not in `OPERATIONS`.
    """
    paths: dict[str, dict[str, Any]] = {}
    for route in table:
        path = re.sub(r"\{(\w+):[^}]*\}", r"{\1}", route.path)
        described = _operation(route, path, has_keys=has_keys)
        paths.setdefault(path, {})[route.method.lower()] = described
    components: dict[str, Any] = {"schemas": _schemas()}
    made: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "Tandem",
            "version": package_version(),
            "description": "OpenAI's API and SGLang's. Unknown fields are ignored, but for some that "
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


def _operation(route: web.RouteDef, path: str, *, has_keys: bool) -> dict[str, Any]:
    operation = OPERATIONS[route.handler]
    is_open = path in OPEN_ROUTES
    described: dict[str, Any] = {
        "summary": (inspect.getdoc(route.handler) or "").partition("\n")[0],
        "operationId": f"{route.method.lower()}{re.sub(r'[^a-zA-Z0-9]+', '_', path)}",
        "responses": _responses(operation),
    }
    if names := re.findall(r"\{(\w+)\}", path):
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    if operation.bodies:
        body = {"allOf": [_ref(model.__name__) for model in operation.bodies]}
        described["requestBody"] = {"required": True, "content": {JSON: {"schema": body}}}
    if has_keys and is_open:
        described["security"] = []
    return described


def _ref(name: str) -> Schema:
    return {"$ref": _REF + name}


def _responses(operation: Operation) -> dict[str, Any]:
    """Return the answer, and what an error looks like."""
    schema: Schema = {"type": "object" if operation.media == JSON else "string"}
    if operation.answer is not None:
        # A batch is answered by a list.
        is_many = operation.answer is answers.Generated
        schema = _ref("GeneratedOrList" if is_many else operation.answer.__name__)
    content: dict[str, Any] = {operation.media: {"schema": schema}}
    if operation.event is not None:
        content[EVENTS] = {"schema": _event(operation.event.__name__)}
    responses: dict[str, Any] = {"200": {"description": "the answer", "content": content}}
    if operation.unavailable:
        responses["503"] = {"description": "it cannot be served now", "content": content}
    error = {JSON: {"schema": _ref("Error")}}
    return responses | {"default": {"description": "an error", "content": error}}


def _event(name: str) -> Schema:
    """Describe one event of a stream, in the manner of OpenAPI 3.2."""
    data = {
        "type": "string",
        "contentMediaType": JSON,
        "contentSchema": _ref(name),
        "description": "JSON; that of the last event is `[DONE]`.",
    }
    return {
        "type": "object",
        "description": "With stream: true.",
        "properties": {"data": data},
        "required": ["data"],
    }


def _schemas() -> dict[str, Schema]:
    operations = OPERATIONS.values()
    models = sorted(
        {body for operation in operations for body in operation.bodies},
        key=lambda model: model.__name__,
    )
    _, found = models_json_schema(
        [(model, "validation") for model in models], ref_template=f"{_REF}{{model}}"
    )
    schemas: dict[str, Schema] = found["$defs"]
    for model in models:
        _name_aliases(model, schemas[model.__name__])
    structs = {part for operation in operations for part in (operation.answer, operation.event)}
    [*_, several], described = msgspec.json.schema_components(
        [*(structs - {None}), answers.Error, answers.Generated | list[answers.Generated]],
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
