"""Routes about the server: health, the model, metrics, its API, the tokenizer, aborting, flushing.

`answer_errors` in `frontend/middleware.py` answers what they raise.
"""

import asyncio
import time
from contextlib import aclosing
from typing import Annotated

from aiohttp import web
from pydantic import Field

from tandem.frontend.backend import ALONE, Backend, Health, ServedModel
from tandem.frontend.body import Body, validate
from tandem.frontend.edge import EDGE, LEAVING
from tandem.frontend.keys import operators_only, require_operator
from tandem.frontend.middleware import json_response
from tandem.frontend.tokenizer import tokenizer_hash
from tandem.wire.errors import (
    InvalidRequest,
    ModelNotFound,
    NoNodeAvailable,
    Overloaded,
)
from tandem.wire.generation import GenerateRequest, SamplingParams, new_request_id

# How often `/health_generate` polls: engines report their progress twice a second.
_LOOK_INTERVAL_S = 0.1


class AbortBody(Body):
    """`/abort_request`."""

    rid: Annotated[str, Field(max_length=512)] = ""
    abort_all: bool = False


# What a request of `/abort_request` asked for, once it is checked.
ABORTED = web.RequestKey("ABORTED", AbortBody)


def _health_response(health: Health) -> web.Response:
    status, code = ("ok", 200) if health.is_serving else ("unavailable", 503)
    return json_response({"status": status, "detail": health.detail}, code)


async def health(request: web.Request) -> web.Response:
    """Report whether a request sent now can be served: 200 or 503."""
    edge = request.app[EDGE]
    return _health_response(LEAVING if edge.is_leaving else edge.backend.health())


async def live(_request: web.Request) -> web.Response:
    """Report that the process answers: 200, whatever it can serve."""
    return json_response({"status": "ok"})


async def health_generate(request: web.Request) -> web.Response:
    """Generate one token: 200 if it came, or if busy engines made progress."""
    edge = request.app[EDGE]
    backend, timeout_s = edge.backend, edge.options.health_timeout_s
    first_told: dict[object, int] = {}

    def is_progress() -> bool:
        # The first report of a new engine does not count.
        told = backend.tokens_told().items()
        return any(count > first_told.setdefault(engine, count) for engine, count in told)

    probe = asyncio.create_task(_one_token(backend))
    try:
        async with asyncio.timeout(timeout_s):
            while not is_progress():
                await asyncio.wait({probe}, timeout=_LOOK_INTERVAL_S)
                if probe.done() and not isinstance(probe.exception(), Overloaded):
                    probe.result()
                    break
                if probe.done():
                    await asyncio.sleep(_LOOK_INTERVAL_S)
    except TimeoutError:
        raise NoNodeAvailable(f"no token came within {timeout_s:g} s") from None
    finally:
        probe.cancel()
        await asyncio.wait({probe})
    return _health_response(Health(is_serving=True, detail="tokens come"))


async def _one_token(backend: Backend) -> None:
    probe = GenerateRequest(
        request_id=new_request_id(),
        prompt_ids=[0],
        sampling=SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True, seed=0),
    )
    async with aclosing(backend.generate(probe, ALONE)) as deltas:
        async for delta in deltas:
            if delta.token_ids:
                return
    raise NoNodeAvailable("the generation ended without a token")


async def models(request: web.Request) -> web.Response:
    """List the model and its adapters, as OpenAI and vLLM do."""
    model = request.app[EDGE].backend.model()
    cards = [_model_card(model, adapter) for adapter in ("", *model.adapters)]
    return json_response({"object": "list", "data": cards})


async def one_model(request: web.Request) -> web.Response:
    """Describe the model or an adapter by its name, as OpenAI does."""
    model = request.app[EDGE].backend.model()
    asked = request.match_info["name"]
    if asked not in {model.name, *model.adapters}:
        raise ModelNotFound(asked, model.name, *model.adapters)
    return json_response(_model_card(model, asked if asked != model.name else ""))


def _model_card(model: ServedModel, adapter: str) -> dict[str, object]:
    parent = {"parent": model.name} if adapter else {}
    return parent | {
        "id": adapter or model.name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "tandem",
        "root": model.name,
        "max_model_len": model.context_length,
    }


async def model_info(request: web.Request) -> web.Response:
    """Describe the model, as SGLang does."""
    model = request.app[EDGE].backend.model()
    return json_response(
        {
            "model_path": model.name,
            "served_model_name": model.name,
            "tokenizer_path": model.name if model.tokenizer is not None else None,
            "is_generation": True,
            "context_length": model.context_length,
            "max_prompt_tokens": model.max_prompt_tokens,
            "vocab_size": model.vocab_size,
            "eos_token_ids": sorted(model.eos_token_ids),
            "default_sampling_params": model.default_sampling,
            "weight_version": model.weight_version,
        }
    )


async def server_info(request: web.Request) -> web.Response:
    """Describe the backend."""
    info = request.app[EDGE].backend.server_info()
    # SGLang's load client looks for the statistics of speculative decoding in the first.
    return json_response({"internal_states": [{}], **info})


async def metrics(request: web.Request) -> web.Response:
    """Return the backend's metrics and the edge's own."""
    edge = request.app[EDGE]
    parts = [part.rstrip("\n") for part in (edge.backend.metrics(), edge.metrics.render())]
    text = "".join(f"{part}\n" for part in parts if part)
    return web.Response(text=text, content_type="text/plain", charset="utf-8")


@operators_only
async def flush_cache(request: web.Request) -> web.Response:
    """Drop every cached page that nobody reads."""
    await request.app[EDGE].backend.flush_cache()
    return json_response({"success": True, "message": "the cache was flushed"})


async def abort_request(request: web.Request) -> web.Response:
    """End a request by the id its client gave; an unknown one is no error. Operators may end all."""
    edge = request.app[EDGE]
    body = await edge.read(await request.read(), lambda data: validate(AbortBody, data))
    request[ABORTED] = body
    if body.abort_all:
        require_operator(request)
        return json_response({"aborted": await edge.abort_all()})
    if not body.rid:
        raise InvalidRequest("rid: is missing")
    return json_response({"aborted": await edge.abort(body.rid)})


async def tokenizer(request: web.Request) -> web.Response:
    """Serve the tokenizer's files, so that a router without the model can speak text."""
    read = request.app[EDGE].options.tokenizer_files
    files = read() if read is not None else {}
    if not files:
        raise NoNodeAvailable("the tokenizer is not known yet, or the model has none")
    return json_response({"hash": tokenizer_hash(files), "files": dict(files)})
