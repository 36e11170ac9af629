"""The OpenAPI document of an app, from its routes, the models of their bodies and their docstrings.

```
 route table ─┬─ handler's docstring ──▶ summary
              └─ OPERATIONS[handler] ──▶ body (pydantic's schemas), answers (openapi_answers.py)
```

A route without an entry in `OPERATIONS` is an error: no route is left out of the document.
"""

import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from pydantic import AliasChoices, BaseModel
from pydantic.json_schema import models_json_schema

from tandem.frontend import generate, openai, routes
from tandem.frontend.middleware import OPEN_ROUTES
from tandem.frontend.native_body import GenerateBody
from tandem.frontend.openai_body import ChatBody, CompletionBody
from tandem.frontend.openapi_answers import ANSWERS, Schema
from tandem.frontend.sampling import CompletionSampling, NativeSampling, OpenAISampling
from tandem.telemetry.version import package_version

JSON, EVENTS, TEXT, HTML = "application/json", "text/event-stream", "text/plain", "text/html"
_REF = "#/components/schemas/"
_REFUSALS = {
    "400": "something in the body cannot be; the message names it",
    "404": "the model is not the one served",
    "408": "the body did not come in time",
    "413": "the body is too large",
    "415": "the body is compressed",
    "429": "there is no room now; Retry-After says when to try again",
    "500": "the server's fault",
    "503": "no node can serve now; Retry-After says when to try again",
    "504": "it took too long",
}
_UNAUTHORIZED = "the API key is missing or wrong"


@dataclass(frozen=True, slots=True)
class Operation:
    """What one handler takes and gives.

    Attributes:
        answer: Name of its schema; empty for what is no JSON.
        bodies: Models that together describe the body; none where there is no body.
        event: Name of the schema of one event, where the answer may be streamed.
        unavailable: Whether 503 has the answer's own shape instead of an error's.
    """

    answer: str
    bodies: tuple[type[BaseModel], ...] = ()
    event: str = ""
    media: str = JSON
    unavailable: bool = False


_GRAMMAR: Schema = {
    "type": "object",
    "description": "What the answer must follow; only one of these.",
    "properties": {
        "json_schema": {"type": ["string", "object", "boolean", "null"]},
        "regex": {"type": ["string", "null"]},
        "ebnf": {"type": ["string", "null"]},
    },
}
_OPENAI_GRAMMAR: Schema = {
    "type": "object",
    "properties": {
        "response_format": {"type": ["object", "null"]},
        "structured_outputs": {"type": ["object", "null"]},
        "guided_json": {"type": ["string", "object", "boolean", "null"]},
        "guided_regex": {"type": ["string", "null"]},
        "guided_grammar": {"type": ["string", "null"]},
        "guided_choice": {"type": ["array", "null"], "items": {"type": "string"}},
    },
}
_GRAMMARS: dict[type[BaseModel], tuple[str, ...]] = {
    GenerateBody: ("Grammar",),
    CompletionBody: ("Grammar", "OpenAIGrammar"),
    ChatBody: ("Grammar", "OpenAIGrammar"),
}

OPERATIONS: dict[Callable[..., Any], Operation] = {
    generate.generate: Operation(
        "GeneratedOrList", (GenerateBody, NativeSampling), event="GenerateEvent"
    ),
    openai.completions: Operation(
        "Completion", (CompletionBody, CompletionSampling), event="CompletionChunk"
    ),
    openai.chat_completions: Operation(
        "ChatCompletion", (ChatBody, OpenAISampling), event="ChatCompletionChunk"
    ),
    routes.models: Operation("ModelList"),
    routes.one_model: Operation("Model"),
    routes.health: Operation("Health", unavailable=True),
    routes.live: Operation("Live"),
    routes.health_generate: Operation("Health"),
    routes.model_info: Operation("ModelInfo"),
    routes.server_info: Operation("Anything"),
    routes.metrics: Operation("", media=TEXT),
    routes.flush_cache: Operation("Flushed"),
    routes.abort_request: Operation("Aborted", (routes.AbortBody,)),
    routes.tokenizer: Operation("TokenizerFiles"),
    routes.openapi: Operation("Anything"),
    routes.docs: Operation("", media=HTML),
}


def document(table: Iterable[web.RouteDef], *, has_keys: bool) -> dict[str, Any]:
    """Return the document, version 3.1.

    Raises:
        KeyError: A route's handler is not in `OPERATIONS`.
    """
    paths: dict[str, dict[str, Any]] = {}
    for route in table:
        path = re.sub(r"\{(\w+):[^}]*\}", r"{\1}", route.path)
        paths.setdefault(path, {})[route.method.lower()] = _operation(
            route, path, has_keys=has_keys
        )
    components: dict[str, Any] = {"schemas": _schemas()}
    described: dict[str, Any] = {
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
        described["security"] = [{"key": []}]
    return described


def _operation(route: web.RouteDef, path: str, *, has_keys: bool) -> dict[str, Any]:
    operation = OPERATIONS[route.handler]
    summary = (inspect.getdoc(route.handler) or "").partition("\n")[0]
    described: dict[str, Any] = {
        "summary": summary,
        "operationId": f"{route.method.lower()}{re.sub(r'[^a-zA-Z0-9]+', '_', path)}",
        "responses": _responses(operation, is_open=path in OPEN_ROUTES or not has_keys),
    }
    if names := re.findall(r"\{(\w+)\}", path):
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    if operation.bodies:
        content = {JSON: {"schema": _body(operation)}}
        described["requestBody"] = {"required": True, "content": content}
    if has_keys and path in OPEN_ROUTES:
        described["security"] = []
    return described


def _body(operation: Operation) -> Schema:
    names = [body.__name__ for body in operation.bodies]
    names += _GRAMMARS.get(operation.bodies[0], ())
    return {"allOf": [{"$ref": _REF + name} for name in names]}


def _responses(operation: Operation, *, is_open: bool) -> dict[str, Any]:
    """Return the answer and the errors that are to be reckoned with; `default` is any other."""
    schema: Schema = {"$ref": _REF + operation.answer} if operation.answer else {"type": "string"}
    content: dict[str, Any] = {operation.media: {"schema": schema}}
    if operation.event:
        content[EVENTS] = {"schema": _event(operation.event)}
    errors = dict(_REFUSALS) if operation.bodies else {"503": _REFUSALS["503"]}
    if not is_open:
        errors["401"] = _UNAUTHORIZED
    responses = {status: _error(errors[status]) for status in sorted(errors)}
    if operation.unavailable:
        responses["503"] = {"description": "it cannot be served now", "content": content}
    return (
        {"200": {"description": "the answer", "content": content}}
        | responses
        | {"default": _error("another error")}
    )


def _event(name: str) -> Schema:
    """Describe one event of a stream, in the manner of OpenAPI 3.2."""
    data = {
        "type": "string",
        "contentMediaType": JSON,
        "contentSchema": {"$ref": _REF + name},
        "description": "JSON; that of the last event is `[DONE]`.",
    }
    return {
        "type": "object",
        "description": "With stream: true.",
        "properties": {"data": data},
        "required": ["data"],
    }


def _error(description: str) -> dict[str, Any]:
    return {"description": description, "content": {JSON: {"schema": {"$ref": f"{_REF}Error"}}}}


def _schemas() -> dict[str, Schema]:
    models = {body for operation in OPERATIONS.values() for body in operation.bodies}
    ordered = sorted(models, key=lambda model: model.__name__)
    _, found = models_json_schema(
        [(model, "validation") for model in ordered], ref_template=f"{_REF}{{model}}"
    )
    schemas: dict[str, Schema] = found["$defs"]
    for model in ordered:
        _name_aliases(model, schemas[model.__name__])
    return schemas | ANSWERS | {"Grammar": _GRAMMAR, "OpenAIGrammar": _OPENAI_GRAMMAR}


def _name_aliases(model: type[BaseModel], schema: Schema) -> None:
    """Describe every name of a field: pydantic describes the first."""
    for field in model.model_fields.values():
        if isinstance(field.validation_alias, AliasChoices):
            first, *others = map(str, field.validation_alias.choices)
            for name in others:
                schema["properties"][name] = schema["properties"][first]
