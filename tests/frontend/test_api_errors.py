"""Every error as the client libraries of OpenAI and Anthropic see it, and the words of a prompt that is too long."""

import re

import anthropic
import openai
import pytest

from tandem.frontend.http.api_errors import ERROR_TYPES
from tandem.frontend.options import FrontendOptions, HttpOptions
from tandem.wire.errors import ErrorInfo, RateLimited, error_from_info, errors_by_code
from tests.frontend.conftest import serve
from tests.frontend.fakes import FakeBackend, say
from tests.frontend.helpers import post, post_large

ASK = {"model": "smol", "messages": [{"role": "user", "content": "Hi"}]}
_INVALID, _SERVER = "invalid_request_error", "server_error"
# Tandem's code -> for OpenAI's client: class, status, type, code; for Anthropic's: class, status, type.
KNOWN = {
    "invalid_request": (
        (openai.BadRequestError, 400, _INVALID, "invalid_request"),
        (anthropic.BadRequestError, 400, _INVALID),
    ),
    "context_length_exceeded": (
        (openai.BadRequestError, 400, _INVALID, "context_length_exceeded"),
        (anthropic.BadRequestError, 400, _INVALID),
    ),
    "out_of_pages": (
        (openai.BadRequestError, 400, _INVALID, "context_length_exceeded"),
        (anthropic.BadRequestError, 400, _INVALID),
    ),
    "unauthorized": (
        (openai.AuthenticationError, 401, _INVALID, "invalid_api_key"),
        (anthropic.AuthenticationError, 401, "authentication_error"),
    ),
    "forbidden": (
        (openai.PermissionDeniedError, 403, _INVALID, "forbidden"),
        (anthropic.PermissionDeniedError, 403, "permission_error"),
    ),
    "host_not_allowed": (
        (openai.PermissionDeniedError, 403, _INVALID, "host_not_allowed"),
        (anthropic.PermissionDeniedError, 403, "permission_error"),
    ),
    "origin_not_allowed": (
        (openai.PermissionDeniedError, 403, _INVALID, "origin_not_allowed"),
        (anthropic.PermissionDeniedError, 403, "permission_error"),
    ),
    "model_not_found": (
        (openai.NotFoundError, 404, _INVALID, "model_not_found"),
        (anthropic.NotFoundError, 404, "not_found_error"),
    ),
    "adapter_loaded": (
        (openai.BadRequestError, 400, _INVALID, "adapter_loaded"),
        (anthropic.BadRequestError, 400, _INVALID),
    ),
    "adapter_not_found": (
        (openai.NotFoundError, 404, _INVALID, "adapter_not_found"),
        (anthropic.NotFoundError, 404, "not_found_error"),
    ),
    "body_timeout": (
        (openai.APIStatusError, 408, _INVALID, "body_timeout"),
        (anthropic.RequestTimeoutError, 408, "timeout_error"),
    ),
    "body_too_large": (
        (openai.APIStatusError, 413, _INVALID, "body_too_large"),
        (anthropic.ContentTooLargeError, 413, "request_too_large"),
    ),
    "unsupported_encoding": (
        (openai.APIStatusError, 415, _INVALID, "unsupported_encoding"),
        (anthropic.APIStatusError, 415, _INVALID),
    ),
    "overloaded": (
        (openai.RateLimitError, 429, "rate_limit_error", "overloaded"),
        (anthropic.OverloadedError, 529, "overloaded_error"),
    ),
    "rate_limit_exceeded": (
        (openai.RateLimitError, 429, "rate_limit_error", "rate_limit_exceeded"),
        (anthropic.RateLimitError, 429, "rate_limit_error"),
    ),
    "aborted": (
        (openai.APIStatusError, 499, _SERVER, "aborted"),
        (anthropic.ClientClosedRequestError, 499, "api_error"),
    ),
} | {
    code: (
        (openai.InternalServerError, status, _SERVER, code),
        (kind, status, anthropic_type),
    )
    for codes, status, kind, anthropic_type in (
        (
            "internal_error transfer_refused transfer_failed kv_corrupted engine_failed message_invalid message_too_large "
            "request_ended_engine",
            500,
            anthropic.InternalServerError,
            "api_error",
        ),
        (
            "no_node_available adapter_gone node_draining peer_draining attempts_used_up peer_lost peer_behind layout_mismatch "
            "protocol_mismatch",
            503,
            anthropic.ServiceUnavailableError,
            "overloaded_error",
        ),
        (
            "deadline_passed transfer_timeout timeout",
            504,
            anthropic.GatewayTimeoutError,
            "timeout_error",
        ),
    )
    for code in codes.split()
}


def failing(backend: FakeBackend, code: str) -> None:
    kind = errors_by_code()[code]
    info = ErrorInfo(code=code, message="why", status=kind.status, is_retryable=kind.is_retryable)
    backend.script = say(error_from_info(info))


@pytest.mark.parametrize("code", KNOWN)
async def test_clients_know_every_error(backend, code):
    failing(backend, code)
    (kind, status, type_, name), (anthropic_kind, anthropic_status, anthropic_type) = KNOWN[code]
    async with serve(backend) as server:
        base = str(server._base_url).rstrip("/")
        async with openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="k", max_retries=0) as sdk:
            with pytest.raises(openai.APIStatusError) as caught:
                await sdk.chat.completions.create(**ASK)
        error = caught.value
        assert (type(error), error.status_code, error.type, error.code) == (
            kind,
            status,
            type_,
            name,
        )
        async with anthropic.AsyncAnthropic(base_url=base, api_key="k", max_retries=0) as sdk:
            with pytest.raises(anthropic.APIStatusError) as caught:
                await sdk.messages.create(**ASK, max_tokens=5)
        error = caught.value
        assert (type(error), error.status_code, error.type) == (
            anthropic_kind,
            anthropic_status,
            anthropic_type,
        )


def test_every_error_of_the_server_is_in_the_table():
    internal = {"config_invalid"}  # commands print it
    of_frontend = {
        code
        for code, kind in errors_by_code().items()
        if kind.__module__.startswith(("tandem.frontend", "tandem.wire"))
    }
    assert of_frontend - internal <= KNOWN.keys()
    assert {errors_by_code()[code].status for code in KNOWN} <= ERROR_TYPES.keys()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", ASK),
        ("/v1/messages", ASK | {"max_tokens": 5}),
        ("/generate", {"text": "a"}),
    ],
)
@pytest.mark.parametrize("code", ["overloaded", "rate_limit_exceeded", "no_node_available"])
async def test_errors_worth_a_retry_have_retry_after(backend, client, path, body, code):
    failing(backend, code)
    async with client.post(path, json=body) as response:
        assert response.headers["Retry-After"] == "1"


async def test_missing_key_is_openais_invalid_api_key(backend):
    options = FrontendOptions(http=HttpOptions(api_keys=("k",)))
    async with serve(backend, options) as client:
        status, answer = await post(client, "/v1/chat/completions", ASK)
    assert (status, answer["error"]["code"]) == (401, "invalid_api_key")


LONG = "hello world " * 5000
# By route: a body with a prompt that is too long, and the words by which its clients know that.
TOO_LONG = {
    "/v1/chat/completions": (
        {"messages": [{"role": "user", "content": LONG}]},
        r"This model's maximum context length is 8192 tokens\. However, your messages resulted in (\d+) tokens",
        "messages",
    ),
    "/v1/completions": (
        {"prompt": [5] * 9000},
        r"This model's maximum context length is 8192 tokens\. However, your prompt resulted in (9000) tokens",
        "prompt",
    ),
    "/v1/responses": (
        {"input": LONG},
        r"This model's maximum context length is 8192 tokens\. However, your input resulted in (\d+) tokens",
        "input",
    ),
    "/v1/messages": (
        {"messages": [{"role": "user", "content": LONG}], "max_tokens": 5},
        r"^prompt is too long: (\d+) tokens > 8191 maximum$",
        None,
    ),
    "/generate": (
        {"input_ids": [5] * 9000},
        r"The input \((9000) tokens\) is longer than the model's context length \(8192 tokens\)",
        None,
    ),
    "/inference/v1/generate": (
        {"token_ids": [5] * 9000},
        r"maximum context length is 8192 tokens\. However, your prompt resulted in (9000) tokens",
        None,
    ),
}


@pytest.mark.parametrize("path", TOO_LONG)
@pytest.mark.parametrize("is_stream", [False, True])
async def test_prompt_over_the_context_is_reported_in_the_words_of_its_api(client, path, is_stream):
    body, words, param = TOO_LONG[path]
    status, answer = await post(client, path, body | {"stream": is_stream})
    error = answer["error"]
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert int(re.search(words, error["message"])[1]) > 8191
    if path != "/v1/messages":
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)


@pytest.mark.parametrize("num_tokens", [8191, 8192])
async def test_context_limit_leaves_room_for_one_token(client, num_tokens):
    body = {"prompt": [5] * num_tokens, "max_tokens": 1}
    assert (await post(client, "/v1/completions", body))[0] == (200 if num_tokens < 8192 else 400)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_prompt_that_is_not_tokenized_has_a_lower_bound(client, path):
    body, words, _ = TOO_LONG[path]
    messages = [{"role": "user", "content": LONG * 60}]
    _, answer = await post_large(client, path, body | {"messages": messages})
    assert re.search(words.rstrip("$"), answer["error"]["message"])
    assert "the count is a lower bound" in answer["error"]["message"]


async def test_failed_response_has_a_code_of_openai(backend):
    backend.script = say([5], RateLimited("slow down"))
    async with serve(backend) as server:
        base = str(server._base_url / "v1")
        async with openai.AsyncOpenAI(base_url=base, api_key="k", max_retries=0) as sdk:
            stream = await sdk.responses.create(model="smol", input="Hi", stream=True)
            *_, last = [event async for event in stream]
    assert last.response.error.code == "rate_limit_exceeded"
