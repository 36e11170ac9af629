"""Routes about the server: health, the model, metrics, the tokenizer, aborts and cache flushes.

`frontend/http/middleware.py` converts the errors that they raise.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import Annotated

from aiohttp import web
from msgspec import Meta

from tandem.frontend.backend import NO_PEER, Backend, Health, ServedModel
from tandem.frontend.chat.body import Body, read_json, validate
from tandem.frontend.http.edge import EDGE, SHUTTING_DOWN
from tandem.frontend.http.keys import operators_only, owner_of, require_operator
from tandem.frontend.http.middleware import json_response
from tandem.frontend.text.tokenizer import tokenizer_hash
from tandem.wire.errors import (
    InvalidRequest,
    ModelNotFound,
    NoNodeAvailable,
    Overloaded,
)
from tandem.wire.generation import GenerateRequest, SamplingParams, new_request_id
from tandem.wire.messages import TokenDelta

# Poll interval of `/health_generate`. Engines report their progress twice a second.
_POLL_INTERVAL_S = 0.1


class AbortBody(Body):
    """`/abort_request`."""

    rid: Annotated[str, Meta(max_length=512)] = ""
    abort_all: bool = False


# A name is part of names of prefixes, which end it with a zero byte.
_AdapterName = Annotated[str, Meta(min_length=1, max_length=256, pattern=r"^[^\x00-\x1f]+$")]


class LoadAdapterBody(Body, kw_only=True):
    """`/v1/load_lora_adapter`. `model` names the base model, if several are served."""

    model: str | None = None
    lora_name: _AdapterName
    lora_path: Annotated[str, Meta(min_length=1, max_length=4096)]
    load_inplace: bool = False
    is_3d_lora_weight: bool = False


class UnloadAdapterBody(Body, kw_only=True):
    """`/v1/unload_lora_adapter`, with `model` as for loading."""

    model: str | None = None
    lora_name: _AdapterName


# The checked body of an `/abort_request`, for the router's middleware.
ABORT_BODY = web.RequestKey("abort_body", AbortBody)


def _health_response(health: Health) -> web.Response:
    status, code = ("ok", 200) if health.is_serving else ("unavailable", 503)
    return json_response({"status": status, "detail": health.detail}, code)


async def health(request: web.Request) -> web.Response:
    """Report whether a request sent now can be served: 200 or 503."""
    edge = request.app[EDGE]
    return _health_response(SHUTTING_DOWN if edge.is_shutting_down else edge.backend.health())


async def live(_request: web.Request) -> web.Response:
    """Report that the process is alive: always 200, even if it cannot serve requests."""
    return json_response({"status": "ok"})


async def health_generate(request: web.Request) -> web.Response:
    """Generate one token: 200 if it arrives, or if busy engines make progress."""
    edge = request.app[EDGE]
    backend, timeout_s = edge.backend, edge.options.health_timeout_s
    first_counts: dict[object, int] = {}

    def has_progress() -> bool:
        # The first report of a new engine is not progress.
        counts = backend.token_counts().items()
        return any(count > first_counts.setdefault(engine, count) for engine, count in counts)

    probe = asyncio.create_task(_one_token(backend))
    try:
        async with asyncio.timeout(timeout_s):
            while not has_progress():
                await asyncio.wait({probe}, timeout=_POLL_INTERVAL_S)
                if probe.done() and not isinstance(probe.exception(), Overloaded):
                    probe.result()
                    break
                if probe.done():
                    await asyncio.sleep(_POLL_INTERVAL_S)
    except TimeoutError:
        raise NoNodeAvailable(f"no token was generated within {timeout_s:g} s") from None
    finally:
        probe.cancel()
        await asyncio.wait({probe})
    return _health_response(Health(is_serving=True, detail="tokens are generated"))


async def _one_token(backend: Backend) -> None:
    probe = GenerateRequest(
        request_id=new_request_id(),
        prompt_ids=[0],
        sampling=SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True, seed=0),
    )
    answer = _FirstToken()
    await backend.generate(probe, answer, NO_PEER)
    if not answer.has_token:
        raise NoNodeAvailable("the generation ended without a token")


class _FirstToken:
    """A `TokenReceiver` that ends with the first token."""

    def __init__(self) -> None:
        self.has_room, self.has_token, self.is_ended = True, False, False

    def take(self, delta: TokenDelta) -> None:
        """Record whether a token or the end has arrived."""
        self.has_token = self.has_token or bool(delta.token_ids)
        self.is_ended = self.has_token or delta.finish is not None

    def take_ordinary(self, _token_ids: Sequence[int]) -> bool:
        """Reject ordinary tokens, so that they arrive as deltas."""
        return False

    async def drain(self) -> None:
        """Return at once."""


async def models(request: web.Request) -> web.Response:
    """List the models by all their names, and their adapters, as OpenAI and vLLM do."""
    served = request.app[EDGE].backend.models().models
    cards = [
        _model_card(model, name) for model in served for name in (*model.names, *model.adapters)
    ]
    return json_response({"object": "list", "data": cards})


async def one_model(request: web.Request) -> web.Response:
    """Describe a model or an adapter by its name, as OpenAI does."""
    models, name = request.app[EDGE].backend.models(), request.match_info["name"]
    model = models.choose(name)
    if name not in {*model.names, *model.adapters}:
        raise ModelNotFound(name, *models.names)
    return json_response(_model_card(model, name))


def _model_card(model: ServedModel, name: str) -> dict[str, object]:
    parent = {} if name in model.names else {"parent": model.name}
    return parent | {
        "id": name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "tandem",
        "root": model.name,
        "max_model_len": model.context_length,
    }


async def model_info(request: web.Request) -> web.Response:
    """Describe the model, as SGLang does; with several models, that of `?model=NAME`."""
    model = request.app[EDGE].backend.models().choose(request.query.get("model"))
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
    # SGLang's load client reads statistics of speculative decoding from the first entry.
    return json_response({"internal_states": [{}], **info})


async def metrics(request: web.Request) -> web.Response:
    """Return the metrics of the backend and of the edge."""
    edge = request.app[EDGE]
    parts = [part.rstrip("\n") for part in (edge.backend.metrics(), edge.metrics.render())]
    text = "".join(f"{part}\n" for part in parts if part)
    return web.Response(text=text, content_type="text/plain", charset="utf-8")


@operators_only
async def flush_cache(request: web.Request) -> web.Response:
    """Drop every cached page that no request is using."""
    await request.app[EDGE].backend.flush_cache()
    return json_response({"success": True, "message": "the cache was flushed"})


@operators_only
async def load_adapter(request: web.Request) -> web.Response:
    """Load a LoRA adapter on every node, as vLLM does."""
    body = validate(LoadAdapterBody, read_json(await request.read()))
    if body.is_3d_lora_weight:
        raise InvalidRequest("is_3d_lora_weight: must be false")
    backend, name = request.app[EDGE].backend, body.lora_name
    models = backend.models()
    model = models.choose(body.model)
    if any(each.is_base(name) for each in models.models):
        raise InvalidRequest(f"The lora adapter '{name}' conflicts with a served base model.")
    if any(name in each.adapters for each in models.models if each is not model):
        raise InvalidRequest(f"The lora adapter '{name}' conflicts with one of another model.")
    await backend.load_adapter(name, body.lora_path, in_place=body.load_inplace, model=model.name)
    return web.Response(text=f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@operators_only
async def unload_adapter(request: web.Request) -> web.Response:
    """Unload a LoRA adapter on every node, as vLLM does."""
    body = validate(UnloadAdapterBody, read_json(await request.read()))
    backend = request.app[EDGE].backend
    model = backend.models().choose(body.model or body.lora_name)
    await backend.unload_adapter(body.lora_name, model.name)
    return web.Response(text=f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


async def abort_request(request: web.Request) -> web.Response:
    """Abort a request of the same key by its id; an unknown id is not an error. Operators may abort any, and all."""
    edge = request.app[EDGE]
    body = await edge.read(await request.read(), lambda data: validate(AbortBody, data))
    request[ABORT_BODY] = body
    if body.abort_all:
        require_operator(request)
        return json_response({"aborted": await edge.abort_all()})
    if not body.rid:
        raise InvalidRequest("rid: missing; send the id of the request to abort")
    return json_response({"aborted": await edge.abort(body.rid, owner_of(request))})


async def tokenizer(request: web.Request) -> web.Response:
    """Serve the tokenizer's files, so that a router without the model can process text."""
    read = request.app[EDGE].options.tokenizer_files
    files = read() if read is not None else {}
    if not files:
        raise NoNodeAvailable("the tokenizer is not loaded yet, or the model has none")
    return json_response({"hash": tokenizer_hash(files), "files": dict(files)})
