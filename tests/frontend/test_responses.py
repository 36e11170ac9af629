"""`/v1/responses` through the `openai` client library."""

import json
from contextlib import asynccontextmanager

import openai
import pytest
from openai.types.responses.response_create_params import ResponseCreateParamsBase

from tandem.frontend.apis.responses_body import (
    GRAMMARS,
    REFUSED,
    ResponsesBody,
    _messages,
    with_types,
)
from tandem.frontend.chat.body import UNSUPPORTED, validate
from tandem.frontend.chat.sampling import OpenAISampling
from tandem.frontend.options import FrontendOptions
from tandem.frontend.replies.parser import reply_formats
from tandem.wire.errors import NoNodeAvailable
from tandem.wire.generation import Grammar
from tests.frontend.conftest import serve
from tests.frontend.fakes import length, say, stop
from tests.frontend.helpers import each, post
from tests.frontend.peer_fields import FIELDS

WEATHER = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
TAGGED = "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>"
FORMATS = FrontendOptions(reply_formats=reply_formats("hermes", "qwen3"))


@asynccontextmanager
async def client_of(backend, options: FrontendOptions | None = None, key="none"):
    async with serve(backend, options) as client:
        base = str(client._base_url / "v1")
        async with openai.AsyncOpenAI(base_url=base, api_key=key, max_retries=0) as sdk:
            yield sdk


def speak(backend, text: str) -> None:
    backend.script = say(*each(backend.served.tokenizer, text), stop(2))


def prompt_of(backend) -> str:
    return backend.served.tokenizer.decode(backend.requests[-1].prompt_ids, False)


async def test_response_to_text_is_a_message(backend):
    speak(backend, "Paris.")
    async with client_of(backend) as sdk:
        found = await sdk.responses.create(
            model="smol", input="Capital?", instructions="Be brief.", metadata={"a": "b"}
        )
    assert (found.status, found.output_text) == ("completed", "Paris.")
    assert (found.metadata, found.instructions) == ({"a": "b"}, "Be brief.")
    assert "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nCapital?" in prompt_of(
        backend
    )
    assert found.usage.total_tokens == found.usage.input_tokens + found.usage.output_tokens
    assert found.usage.input_tokens == len(backend.requests[-1].prompt_ids)


async def test_truncated_response_is_incomplete(backend):
    backend.script = say([5], length(6))
    async with client_of(backend) as sdk:
        found = await sdk.responses.create(model="smol", input="Hi", max_output_tokens=2)
    assert backend.requests[-1].sampling.max_new_tokens == 2
    assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert found.output[0].status == "incomplete"


async def streamed(sdk, **fields) -> list:
    stream = await sdk.responses.create(model="smol", stream=True, **fields)
    events = [event async for event in stream]
    for event in events:  # the client library does not validate events
        type(event).model_validate(event.model_dump(exclude_unset=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return events


@pytest.mark.parametrize(("name", "written"), [("hermes", CALL), ("qwen3_coder", TAGGED)])
async def test_response_stream_has_openai_events(backend, name, written):
    speak(backend, f"<think>Hm, Rome.</think>I ask.{written}{written}")
    formats = FrontendOptions(reply_formats=reply_formats(name, "qwen3"))
    async with client_of(backend, formats) as sdk:
        events = await streamed(sdk, input="Weather?", tools=[WEATHER])
    kinds = [event.type for event in events if not event.type.endswith("delta")]
    text_item = ["output_item.added", "content_part.added", "{}.done", "content_part.done"]
    call = ["output_item.added", "function_call_arguments.done", "output_item.done"]
    assert kinds == [
        f"response.{kind}"
        for kind in [
            *("created", "in_progress"),
            *(part.format("reasoning_text") for part in text_item),
            "output_item.done",
            *(part.format("output_text") for part in text_item),
            "output_item.done",
            *call,
            *call,
            "completed",
        ]
    ]
    whole = events[-1].response
    thoughts, said, *calls = whole.output
    assert (thoughts.content[0].text, said.content[0].text) == ("Hm, Rome.", "I ask.")
    assert [(each.name, json.loads(each.arguments)) for each in calls] == [
        ("weather", {"city": "Rome"})
    ] * 2
    assert 0 < whole.usage.output_tokens_details.reasoning_tokens < whole.usage.output_tokens
    for item in whole.output:
        deltas = "".join(
            event.delta
            for event in events
            if event.type.endswith("delta") and event.item_id == item.id
        )
        assert deltas == (item.arguments if item.type == "function_call" else item.content[0].text)


async def test_excluded_reasoning_is_counted_and_not_sent(backend):
    speak(backend, "<think>Hm, Rome.</think>I ask.")
    formats = FrontendOptions(reply_formats=reply_formats("", "qwen3"))
    async with client_of(backend, formats) as sdk:
        events = await streamed(sdk, input="Weather?", extra_body={"include_reasoning": False})
    whole = events[-1].response
    assert [item.content[0].text for item in whole.output] == ["I ask."]
    assert not any("reasoning" in event.type for event in events)
    assert whole.usage.output_tokens_details.reasoning_tokens > 0


async def test_required_call_may_follow_reasoning(backend):
    speak(backend, '<think>Hm.</think>[{"name": "weather", "parameters": {"city": "Rome"}}]')
    async with client_of(backend, FORMATS) as sdk:
        events = await streamed(sdk, input="Hi", tools=[WEATHER], tool_choice="required")
    thoughts, call = events[-1].response.output
    assert (thoughts.content[0].text, call.name) == ("Hm.", "weather")
    assert json.loads(call.arguments) == {"city": "Rome"}


async def test_response_stream_error_is_the_last_event(backend):
    backend.script = say([5], NoNodeAvailable("no pair"))
    async with client_of(backend) as sdk:
        events = await streamed(sdk, input="Hi")
    assert events[-1].type == "response.failed"
    assert "no pair" in events[-1].response.error.message


async def test_responses_are_never_stored(backend):
    speak(backend, "Hi")
    async with client_of(backend) as sdk:
        found = await sdk.responses.create(model="smol", input="Hi", store=True)
        assert (found.store, found.previous_response_id) == (False, None)
        for act in (sdk.responses.retrieve, sdk.responses.delete):
            with pytest.raises(openai.NotFoundError, match="send the whole conversation"):
                await act(found.id)
        with pytest.raises(openai.BadRequestError, match=r"previous_response_id.*whole conv"):
            await sdk.responses.create(model="smol", input="Go", previous_response_id=found.id)


async def test_conversation_continues_from_resent_items(backend):
    async with client_of(backend, FORMATS) as sdk:
        speak(backend, CALL)
        first = await sdk.responses.create(model="smol", input="Weather?", tools=[WEATHER])
        [call] = first.output
        speak(backend, "Sunny.")
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        items = [{"role": "user", "content": "Weather?"}, call.model_dump(), result]
        await sdk.responses.create(model="smol", input=items, tools=[WEATHER])
        prompt = prompt_of(backend)
        assert prompt.index("Weather?") < prompt.index("sunny")


@pytest.mark.parametrize("fields", [{"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}])
async def test_grammar_fields_of_other_servers_are_served(client, backend, fields):
    assert (await post(client, "/v1/responses", {"input": "Hi"} | fields))[0] == 200
    assert backend.requests[-1].sampling.grammar == Grammar(kind="regex", text="a+")
    both = {"input": "Hi", "text": {"format": {"type": "json_object"}}} | fields
    status, answer = await post(client, "/v1/responses", both)
    assert (status, "send only one" in answer["error"]["message"]) == (400, True)


async def test_text_format_sets_the_grammar(backend):
    speak(backend, "{}")
    schema = {"type": "object", "properties": {}}
    asked = {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}}
    async with client_of(backend) as sdk:
        await sdk.responses.create(model="smol", input="Hi", text=asked)
    assert json.loads(backend.requests[-1].sampling.grammar.text) == schema


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"background": True}, "background: "),
        ({"conversation": "c"}, "conversation: not supported here"),
        ({"truncation": "auto"}, "truncation: must be 'disabled'"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type: must be 'function'"),
        ({"include": ["file_search_call.results"]}, "include.0: "),
        (
            {"input": [{"type": "item_reference", "id": "x"}]},
            "input.0.type: 'item_reference' is not",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input.0.content.0.type: ",
        ),
        (
            {"input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]},
            "no function_call with",
        ),
        ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "encrypted reasoning"),
        ({"input": []}, "input: "),
        ({"input": [{"type": "reasoning"}]}, "messages: must have at least 1 entry"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary: must be 'auto'"),
        ({"text": {"verbosity": "low"}}, "text.verbosity: must be 'medium'"),
        ({"top_logprobs": 2}, "top_logprobs: not supported here"),
        ({"max_tokens": 2}, "max_tokens: not supported here"),
        ({"n": 2}, "n: must be 1"),
        ({"previous_response_id": 5}, "previous_response_id: responses are not stored"),
        ({"image_data": "x"}, "image_data: not supported here"),
    ],
)
async def test_unsupported_responses_field_is_rejected_by_name(client, backend, fields, said):
    status, answer = await post(client, "/v1/responses", {"input": "Hi"} | fields)
    assert (status, backend.requests) == (400, [])
    assert said in answer["error"]["message"]


# Fields that cannot change the answer. Tools that the server would run are rejected anyway.
WITHOUT_EFFECT = {
    *("data_parallel_rank", "ec_transfer_params", "session_id"),
    *("media_io_kwargs", "mm_payload", "mm_processor_kwargs", "return_mm_kwargs"),
    *("access_programs", "max_tool_calls", "prompt_cache_key", "prompt_cache_options"),
    *(
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "stream_options",
        "user",
    ),
}


def test_every_peer_field_is_supported_rejected_or_without_effect():
    theirs = {*ResponseCreateParamsBase.__annotations__, *FIELDS["/v1/responses"]}
    taken = ResponsesBody.names() | OpenAISampling.names() | GRAMMARS
    refused = REFUSED | (UNSUPPORTED.keys() - {"reasoning"})
    assert theirs - taken - refused == WITHOUT_EFFECT
    assert not ResponsesBody.names() & refused


def test_items_of_one_answer_become_one_message():
    items = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "I ask."}]},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "b", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "b", "output": "1"},
        {"role": "assistant", "content": "One."},
        {"role": "assistant", "content": "Two."},
    ]
    messages = _messages(validate(ResponsesBody, {"input": with_types(items)}).input)
    assert [message["role"] for message in messages] == [
        *("developer", "user", "assistant", "tool", "assistant", "assistant"),
    ]
    answer = messages[2]
    assert (answer["reasoning_content"], answer["content"]) == ("Hm", "I ask.")
    assert [call["id"] for call in answer["tool_calls"]] == ["a", "b"]
    assert messages[3]["name"] == "g"


def test_text_after_a_call_starts_another_message():
    items = [
        {"role": "user", "content": "Hi"},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
        {"role": "assistant", "content": "I have called it."},
    ]
    messages = _messages(validate(ResponsesBody, {"input": with_types(items)}).input)
    assert [message["role"] for message in messages] == ["user", "assistant", "assistant"]
    assert messages[1]["content"] is None
