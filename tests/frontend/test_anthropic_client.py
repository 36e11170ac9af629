"""Anthropic's API through its client library: messages, streams, tools, reasoning, token counts, errors."""

import typing
from contextlib import asynccontextmanager

import anthropic
import pytest
from anthropic.types import MessageCountTokensParams
from anthropic.types.beta import MessageCountTokensParams as BetaCountTokensParams
from anthropic.types.beta.message_create_params import MessageCreateParamsBase as BetaCreateParams
from anthropic.types.message_create_params import MessageCreateParamsBase

from tandem.frontend.apis.anthropic_body import UNSUPPORTED_IN_MESSAGES, CountBody, MessagesBody
from tandem.frontend.options import FrontendOptions, HttpOptions
from tandem.frontend.replies.parser import reply_formats
from tandem.wire.errors import EngineFailed, NoNodeAvailable, Overloaded, RateLimited
from tests.frontend.conftest import serve
from tests.frontend.fakes import length, say, stop
from tests.frontend.helpers import each

CHAT = {"model": "smol", "messages": [{"role": "user", "content": "Hi"}]}
ASK = CHAT | {"max_tokens": 500}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "Weather of a city.", "input_schema": SCHEMA}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
TAGGED = "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>"
FORMATS = FrontendOptions(reply_formats=reply_formats("hermes", "qwen3"))
FORCED = '[{"name": "weather", "parameters": {"city": "Rome"}}]'


@asynccontextmanager
async def client_of(backend, options: FrontendOptions | None = None, **key):
    async with serve(backend, options) as server:
        base = str(server._base_url).rstrip("/")
        given = key or {"api_key": "none"}
        async with anthropic.AsyncAnthropic(base_url=base, max_retries=0, **given) as made:
            yield made


def speak(backend, text: str) -> None:
    backend.script = say(*each(backend.served.tokenizer, text), stop(2))


def plain(block) -> dict:
    """A block without what is random or absent."""
    return {
        name: value
        for name, value in block.model_dump(exclude_none=True).items()
        if name not in ("id", "signature")
    }


async def ask(client, **fields):
    """Return the blocks, the stop reason and the stop sequence, whole and as a stream adds them up."""
    whole = await client.messages.create(**ASK | fields)
    async with client.messages.stream(**ASK | fields) as stream:
        streamed = await stream.get_final_message()
    told = [
        (list(map(plain, got.content)), got.stop_reason, got.stop_sequence)
        for got in (whole, streamed)
    ]
    assert told[0] == told[1]
    assert whole.usage.to_dict() == streamed.usage.to_dict()
    return told[0]


# Billing, latency, refusals and headers.
WITHOUT_EFFECT = frozenset(
    [
        "betas",
        "billing_policy",
        "cache_control",
        "fallback_credit_token",
        "fallbacks",
        "metadata",
        "service_tier",
        "speed",
        "user_profile_id",
        "workspace_id",
    ]
)


@pytest.mark.parametrize(
    ("params", "body"),
    [
        (MessageCreateParamsBase, MessagesBody),
        (BetaCreateParams, MessagesBody),
        (MessageCountTokensParams, CountBody),
        (BetaCountTokensParams, CountBody),
    ],
)
def test_every_client_field_is_supported_rejected_or_without_effect(params, body):
    fields = set(typing.get_type_hints(params))
    assert fields - body.names() - UNSUPPORTED_IN_MESSAGES - WITHOUT_EFFECT == set()
    assert not body.names() & (UNSUPPORTED_IN_MESSAGES | WITHOUT_EFFECT)


async def test_message_has_content_and_usage(backend, tokenizer):
    speak(backend, "Hello!")
    sampling = {
        "temperature": 0.5,
        "top_k": 3,
    }  # the client library no longer has arguments for them
    async with client_of(backend) as client:
        got = await client.messages.create(**ASK, system="Be brief.", extra_body=sampling)
    assert (got.type, got.role, got.model) == ("message", "assistant", "smol")
    assert got.id.startswith("msg_")
    assert [plain(block) for block in got.content] == [{"type": "text", "text": "Hello!"}]
    assert (got.stop_reason, got.stop_sequence) == ("end_turn", None)
    [asked] = backend.requests
    turns = [{"role": "system", "content": "Be brief."}, *ASK["messages"]]
    prompt = tokenizer.encode(tokenizer.render_chat(turns), add_special_tokens=False)
    assert asked.prompt_ids == prompt
    assert (asked.sampling.max_new_tokens, asked.sampling.temperature) == (500, 0.5)
    assert asked.sampling.top_k == 3
    read = len(prompt) // 2
    assert got.usage.input_tokens == len(prompt) - read
    assert got.usage.cache_read_input_tokens == read
    assert got.usage.output_tokens == len(tokenizer.encode("Hello!")) + 1


async def test_stream_events_are_typed_and_ordered(backend):
    speak(backend, "Hello you")
    async with client_of(backend) as client:
        events = [event async for event in await client.messages.create(**ASK, stream=True)]
    assert [event.type for event in events] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert events[0].message.content == []
    assert [event.delta.text for event in events[2:4]] == ["Hello", " you"]
    assert events[-2].usage.output_tokens == 3


async def test_truncated_answer_has_stop_reason_max_tokens(backend):
    backend.script = say(length(5))
    async with client_of(backend) as client:
        assert (await ask(client))[1:] == ("max_tokens", None)


async def test_stop_sequence_is_reported(backend):
    speak(backend, "One two three")
    async with client_of(backend) as client:
        got = await ask(client, stop_sequences=["zero", " three"])
    assert got == ([{"type": "text", "text": "One two"}], "stop_sequence", " three")


@pytest.mark.parametrize(("name", "written"), [("hermes", CALL), ("qwen3_coder", TAGGED)])
async def test_reasoning_text_and_calls_are_separate_blocks(backend, name, written):
    speak(backend, f"<think>Hm.</think>I look.\n{written}\n{written}")
    thinking = {"type": "thinking", "thinking": "Hm."}
    text = {"type": "text", "text": "I look."}
    call = {"type": "tool_use", "name": "weather", "input": {"city": "Rome"}}
    formats = FrontendOptions(reply_formats=reply_formats(name, "qwen3"))
    async with client_of(backend, formats) as client:
        assert await ask(client, tools=[WEATHER]) == (
            [thinking, text, call, call],
            "tool_use",
            None,
        )
        alone = {"type": "auto", "disable_parallel_tool_use": True}
        blocks, _, _ = await ask(client, tools=[WEATHER], tool_choice=alone)
    assert blocks == [thinking, text, call]


@pytest.mark.parametrize(
    ("choice", "text"),
    [({"type": "any"}, FORCED), ({"type": "tool", "name": "weather"}, '{"city": "Rome"}')],
)
async def test_forced_call_follows_its_schema(backend, choice, text):
    speak(backend, text)
    async with client_of(backend) as client:
        got = await ask(client, tools=[WEATHER | {"strict": True}], tool_choice=choice)
    assert got == (
        [{"type": "tool_use", "name": "weather", "input": {"city": "Rome"}}],
        "tool_use",
        None,
    )
    assert all(request.sampling.grammar.kind == "json_schema" for request in backend.requests)


async def test_forced_call_may_follow_reasoning(backend):
    speak(backend, f"<think>Hm.</think>\n{FORCED}")
    thinking = {"type": "enabled", "budget_tokens": 1024}
    async with client_of(backend, FORMATS) as client:
        got, reason, _ = await ask(
            client, tools=[WEATHER], tool_choice={"type": "any"}, thinking=thinking
        )
    call = {"type": "tool_use", "name": "weather", "input": {"city": "Rome"}}
    assert (got, reason) == ([{"type": "thinking", "thinking": "Hm."}, call], "tool_use")


@pytest.mark.parametrize(
    ("text", "read"), [("", None), ('{"city": "Ro', {}), ('{"city": "Rome",', {"city": "Rome"})]
)
async def test_truncated_forced_call_keeps_its_partial_input(backend, tokenizer, text, read):
    backend.script = say(*each(tokenizer, text), length(tokenizer.encode(" ")[0]))
    choice = {"type": "tool", "name": "weather"}
    async with client_of(backend) as client:
        whole = await client.messages.create(**ASK, tools=[WEATHER], tool_choice=choice)
    assert whole.stop_reason == "max_tokens"
    assert [block.input for block in whole.content] == [read or {}]


@pytest.mark.parametrize("arguments", ['{"city": Rome}', "[1]", "7"])
async def test_call_with_non_object_input_becomes_text(backend, arguments):
    speak(backend, CALL.replace('{"city": "Rome"}', arguments))
    async with client_of(backend, FORMATS) as client:
        [block], reason, _ = await ask(client, tools=[WEATHER])
    assert (block["type"], reason) == ("text", "end_turn")
    assert arguments in block["text"]


async def test_count_tokens_equals_the_prompt_of_messages(backend):
    fields = CHAT | {"system": "Be brief.", "tools": [WEATHER]}
    backend.script = say(stop(2))
    async with client_of(backend) as client:
        counted = await client.messages.count_tokens(**fields)
        got = await client.messages.create(**fields, max_tokens=5)
    assert counted.input_tokens == got.usage.input_tokens + got.usage.cache_read_input_tokens


async def test_count_tokens_accepts_prompts_beyond_the_context(backend):
    asked = CHAT | {"messages": [{"role": "user", "content": "hello world " * 5000}]}
    async with client_of(backend) as client:
        assert (await client.messages.count_tokens(**asked)).input_tokens > 8192
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
            await client.messages.create(**asked, max_tokens=5)


@pytest.mark.parametrize("key", [{"api_key": "k"}, {"auth_token": "k"}])
async def test_key_is_accepted_in_either_header(backend, key, monkeypatch):
    monkeypatch.delenv("ANTHROPIC_API_KEY", raising=False)
    monkeypatch.delenv("ANTHROPIC_AUTH_TOKEN", raising=False)
    speak(backend, "Hello!")
    options = FrontendOptions(http=HttpOptions(api_keys=("k",)))
    async with client_of(backend, options, **key) as client:
        assert (await ask(client))[1] == "end_turn"
    async with client_of(backend, options) as client:
        with pytest.raises(anthropic.AuthenticationError) as caught:
            await client.messages.create(**ASK)
    assert caught.value.body["error"]["type"] == "authentication_error"


ERRORS = {
    "model": (ASK | {"model": "x"}, None, anthropic.NotFoundError, "not_found_error"),
    "field": (ASK | {"max_tokens": 0}, None, anthropic.BadRequestError, "invalid_request_error"),
    "room": (ASK, Overloaded("full"), anthropic.OverloadedError, "overloaded_error"),
    "rate": (ASK, RateLimited("too many"), anthropic.RateLimitError, "rate_limit_error"),
    "nodes": (ASK, NoNodeAvailable("none"), anthropic.ServiceUnavailableError, "overloaded_error"),
    "engine": (ASK, EngineFailed("gone"), anthropic.InternalServerError, "api_error"),
}


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize("is_stream", [False, True])
async def test_errors_have_the_exception_types_of_the_client(backend, name, is_stream):
    fields, error, kind, told = ERRORS[name]
    backend.script = say(*[error] if error else [stop(2)])
    async with client_of(backend) as client:
        with pytest.raises(kind) as caught:
            await client.messages.create(**fields, stream=is_stream)
    body = caught.value.body
    assert (body["type"], body["error"]["type"], body["request_id"]) == ("error", told, None)


async def test_stream_error_is_raised_by_the_client(backend):
    backend.script = say([81], EngineFailed("the device is gone"))
    async with client_of(backend) as client:
        events = aiter(await client.messages.create(**ASK, stream=True))
        message = (await anext(events)).message
        with pytest.raises(anthropic.APIStatusError, match="the device is gone") as caught:
            async for _ in events:
                pass
    assert caught.value.body["request_id"] == message.id
