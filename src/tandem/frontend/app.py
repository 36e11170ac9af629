"""The HTTP application: its routes and its middleware. `frontend/http/server.py` serves it."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

from aiohttp import web

from tandem.frontend import answers
from tandem.frontend.apis import anthropic, inference, native, openai, responses, routes, tokenizing
from tandem.frontend.apis.answering import attach_caller
from tandem.frontend.apis.anthropic_body import CountBody, MessagesBody
from tandem.frontend.apis.responses_body import ResponsesBody
from tandem.frontend.backend import Backend
from tandem.frontend.chat.grammars import NativeGrammar, OpenAIGrammar
from tandem.frontend.chat.openai_body import ChatBody, CompletionBody
from tandem.frontend.chat.sampling import CompletionSampling, NativeSampling, OpenAISampling
from tandem.frontend.http import loads
from tandem.frontend.http.edge import EDGE, Edge
from tandem.frontend.http.keys import AcceptedKeys, check_key
from tandem.frontend.http.middleware import prepare_answers, serve_requests
from tandem.frontend.http.openapi import DOCUMENT, Route, document, show_document, show_page
from tandem.frontend.http.origins import refuse_pages
from tandem.frontend.http.tracing import create_tracing
from tandem.frontend.options import FrontendOptions
from tandem.wire.keys import reader_key

__all__ = ["FrontendOptions", "create_app"]


def create_app(backend: Backend, options: FrontendOptions | None = None) -> web.Application:
    """Return the app of one edge worker, or of a node's own HTTP server.

    Serve it with `tandem.frontend.http.server`: a disconnect then cancels its request.

    Args:
        backend: Generates tokens. It may become ready after the app.
    """
    options = options or FrontendOptions()
    for formats in (options.reply_formats, *options.model_formats.values()):
        formats.load()
    http, edge = options.http, Edge(backend, options)
    tracing = (
        create_tracing(http.traces_endpoint, options.service) if http.traces_endpoint else None
    )
    if http.has_keys:
        keys = AcceptedKeys(options)
        edge.reloaded.append(keys.files)
        # Only nodes serve their tokenizer; routers fetch it with the reader key.
        is_node = options.tokenizer_files is not None
        reader = reader_key(options.operator_key) if is_node else ""
        guard = check_key(keys, options.open_paths, reader)
    else:
        guard = refuse_pages(edge)  # with API keys, a page has to send one
    app = web.Application(
        client_max_size=http.max_body_bytes,
        middlewares=[serve_requests(edge, [guard, attach_caller], tracing)],
    )
    app[EDGE] = edge
    if tracing is not None:
        app.cleanup_ctx.append(tracing.lifespan)
    app.cleanup_ctx.append(edge.lifespan)
    app.on_response_prepare.append(prepare_answers(edge))
    table = route_table(options)
    for route in table:
        add = {"get": web.get, "post": web.post, "put": web.put, "delete": web.delete}[
            route.method
        ]  # `get` adds HEAD
        app.add_routes([add(route.path, route.handler)])
    # Built on the first request, because most processes never receive one.
    describe: Callable[[], dict[str, Any]] = cache(partial(document, table, has_keys=http.has_keys))
    app[DOCUMENT] = describe
    return app


def route_table(options: FrontendOptions) -> list[Route]:
    """Return all routes, for serving and for the OpenAPI document."""
    generate = (
        native.generate,
        answers.Generated,
        (native.GenerateBody, NativeSampling, NativeGrammar),
        answers.Generated,
    )
    tokenize = (tokenizing.to_ids, answers.Tokenized, (tokenizing.TokenizeBody,))
    detokenize = (tokenizing.to_text, answers.Detokenized, (tokenizing.DetokenizeBody,))
    table = [
        Route("post", "/generate", *generate),
        Route("put", "/generate", *generate),
        Route(
            "post",
            "/v1/completions",
            openai.completions,
            answers.Completion,
            (CompletionBody, CompletionSampling, OpenAIGrammar),
            answers.CompletionChunk,
        ),
        Route(
            "post",
            "/v1/chat/completions",
            openai.chat_completions,
            answers.ChatCompletion,
            (ChatBody, OpenAISampling, OpenAIGrammar),
            answers.ChatCompletionChunk,
        ),
        Route(
            "post",
            "/inference/v1/generate",
            inference.generate,
            answers.Inference,
            (inference.InferenceBody,),
            answers.InferenceChunk,
        ),
        Route(
            "post",
            "/v1/responses",
            responses.create_response,
            answers.ResponseObject,
            (ResponsesBody, OpenAISampling),
            answers.ResponseEvent,
            has_named_events=True,
        ),
        *(Route("post", f"{base}/tokenize", *tokenize) for base in ("", "/v1")),
        *(Route("post", f"{base}/detokenize", *detokenize) for base in ("", "/v1")),
        Route(
            "post",
            "/v1/messages",
            anthropic.messages,
            answers.AnthropicMessage,
            (MessagesBody,),
            answers.AnthropicEvent,
            answers.AnthropicError,
            has_named_events=True,
        ),
        Route(
            "post",
            "/v1/messages/count_tokens",
            anthropic.count_tokens,
            answers.TokenCount,
            (CountBody,),
            error=answers.AnthropicError,
        ),
        Route("get", "/v1/models", routes.models),
        Route("get", "/v1/models/{name:.+}", routes.one_model),
        Route("get", "/health", routes.health, unavailable=True),
        Route("get", "/live", routes.live),
        Route("get", "/health_generate", routes.health_generate),
        Route("get", "/model_info", routes.model_info),
        Route("get", "/get_model_info", routes.model_info),
        Route("get", "/server_info", routes.server_info),
        Route("get", "/get_server_info", routes.server_info),
        Route("get", "/get_load", loads.get_load),
        Route("get", "/v1/loads", loads.v1_loads),
        Route("get", "/metrics", routes.metrics, media="text/plain"),
        Route("get", "/openapi.json", show_document),
        Route("get", "/docs", show_page, media="text/html"),
        Route("post", "/flush_cache", routes.flush_cache),
        Route(
            "post",
            "/v1/load_lora_adapter",
            routes.load_adapter,
            bodies=(routes.LoadAdapterBody,),
            media="text/plain",
        ),
        Route(
            "post",
            "/v1/unload_lora_adapter",
            routes.unload_adapter,
            bodies=(routes.UnloadAdapterBody,),
            media="text/plain",
        ),
        Route("post", "/abort_request", routes.abort_request, bodies=(routes.AbortBody,)),
    ]
    if options.tokenizer_files is not None:
        table.insert(0, Route("get", "/tokenizer", routes.tokenizer))
    return table
