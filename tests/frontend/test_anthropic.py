"""Anthropic's API without its client library: template input, rejected fields, error bodies."""

import json

import pytest

from tandem.frontend.apis.anthropic_body import read_messages
from tandem.frontend.apis.responses_body import read_responses
from tandem.frontend.chat.openai_body import read_chat
from tandem.frontend.options import FrontendOptions, HttpOptions
from tandem.frontend.replies.parser import reply_formats
from tandem.frontend.text.chat_template import ChatTemplate
from tandem.frontend.text.template_forms import REASONING_NAMES
from tandem.wire.errors import InvalidRequest
from tandem.wire.generation import Finish, Grammar
from tests.frontend.conftest import serve
from tests.frontend.fakes import End, length, say, stop
from tests.frontend.helpers import each, post

USER = {"role": "user", "content": "Hi"}
ASK = {"max_tokens": 50, "messages": [USER]}
TOOL = {"name": "f", "input_schema": {"type": "object"}}
CALL = {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "2"}
THINKS = FrontendOptions(reply_formats=reply_formats("hermes", "qwen3"))
THINKING = {"thinking": {"type": "enabled", "budget_tokens": 1024}}


def text(value: str, **others) -> dict:
    return {"type": "text", "text": value, **others}


@pytest.fixture
def sees(backend, tokenizer, monkeypatch):
    """Return a function that reads a body and returns what a template of this text wrote."""

    def read(body, template: str = "{{ messages | tojson }}", options=None) -> str:
        monkeypatch.setattr(tokenizer, "_template", ChatTemplate({"default": template}, {}))
        call = read_messages(backend.served, options or FrontendOptions(), ASK | body)
        return tokenizer.decode(call.generations[0].request.prompt_ids, skip_special_tokens=False)

    return read


def test_messages_are_converted_to_a_chat(sees):
    messages = [
        {"role": "user", "content": [text("A", cache_control={"type": "ephemeral"}), text("B")]},
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": "Hm.", "signature": "s"}, text("C"), CALL],
        },
        {"role": "user", "content": [RESULT | {"content": [text("2")]}, text("D")]},
        {"role": "user", "content": "E"},
    ]
    arguments = {"name": "f", "arguments": {"x": 1}}
    assert json.loads(sees({"system": [text("S"), text("T")], "messages": messages})) == [
        {"role": "system", "content": "S\nT"},
        {"role": "user", "content": "A\nB"},
        {
            "role": "assistant",
            "content": "C",
            **dict.fromkeys(REASONING_NAMES, "Hm."),
            "tool_calls": [{"id": "t1", "type": "function", "function": arguments}],
        },
        {"role": "tool", "tool_call_id": "t1", "name": "f", "content": "2"},
        {"role": "user", "content": "D\nE"},
    ]


def test_tool_result_error_is_marked_in_the_prompt(sees):
    failed = {"role": "user", "content": [RESULT | {"is_error": True}]}
    messages = [USER, {"role": "assistant", "content": [CALL]}, failed]
    assert json.loads(sees({"messages": messages}))[-1]["content"] == "Error: 2"


@pytest.mark.parametrize(("choice", "count"), [({}, 1), ({"tool_choice": {"type": "none"}}, 0)])
def test_tools_reach_the_template_unless_tool_choice_is_none(sees, choice, count):
    tool = TOOL | {"type": "custom", "description": "Does."}
    written = json.loads(sees({"tools": [tool], **choice}, "{{ (tools or []) | tojson }}"))
    function = {"name": "f", "description": "Does.", "parameters": {"type": "object"}}
    assert written == [{"type": "function", "function": function}] * count


@pytest.mark.parametrize(
    ("thinking", "written"),
    [
        ({}, "None"),
        ({"type": "enabled"}, "True"),
        ({"type": "adaptive"}, "True"),
        ({"type": "disabled"}, "False"),
    ],
)
def test_thinking_sets_the_template_switch(sees, thinking, written):
    body = {"thinking": thinking} if thinking else {}
    template = "{{ enable_thinking if enable_thinking is defined else none }}"
    assert sees(body, template, THINKS) == written
    assert sees(body | {"chat_template_kwargs": {"enable_thinking": 5}}, template, THINKS) == "5"


def test_output_config_sets_reasoning_effort_and_grammar(sees, backend):
    schema = {"type": "object", "properties": {}}
    config = {"effort": "low", "format": {"type": "json_schema", "schema": schema}}
    assert sees({"output_config": config}, "{{ reasoning_effort }}") == "low"
    body = ASK | {"output_config": config}
    for options, is_behind in ((FrontendOptions(), False), (THINKS, True)):
        [generation] = read_messages(backend.served, options, body).generations
        asked = json.loads(generation.request.sampling.grammar.text)
        behind = asked["format"]["elements"][-1]["json_schema"] if is_behind else asked
        assert behind == schema


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "^[a-z]{3}$"},
        {"type": "string", "format": "date"},
        {"type": "object", "properties": {"a": {"pattern": "b"}}},
    ],
)
def test_grammars_of_schemas_equal_those_of_chats(backend, schema):
    def grammar(read, body) -> Grammar:
        return (
            read(backend.served, FrontendOptions(), ASK | body)
            .generations[0]
            .request.sampling.grammar
        )

    form = {"type": "json_schema", "schema": schema}
    chat = {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
    answer = {"input": "Hi", "text": {"format": form}, "messages": None, "max_tokens": None}
    expected = grammar(read_chat, chat)
    assert grammar(read_messages, {"output_config": {"format": form}}) == expected
    assert grammar(read_responses, answer) == expected


def content(*blocks) -> dict:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


def answered(*blocks) -> dict:
    return {"messages": [USER, {"role": "assistant", "content": list(blocks)}, USER]}


def forced(**others) -> dict:
    return {"tools": [TOOL | others], "tool_choice": {"type": "any"}}


REFUSED = {
    "image": (
        content({"type": "image", "source": {}}),
        "messages.0.content.0.type: 'image' is not supported",
    ),
    "document": (content({"type": "document"}), "'document' is not supported; use 'text'"),
    "image of a tool": (
        answered(CALL) | content(RESULT | {"content": [{"type": "image"}]}),
        "content.0.type: 'image' is not supported; use 'text'",
    ),
    "redacted": (answered({"type": "redacted_thinking", "data": ""}), "'redacted_thinking'"),
    "call of a server": (answered({"type": "server_tool_use"}), "'server_tool_use'"),
    "call of the user": (content(CALL), "'tool_use' is not supported"),
    "role": (
        {"messages": [{"role": "tool", "content": "a"}]},
        "messages.0.role: 'tool' is not supported",
    ),
    "no type": (content({"text": "a"}), "messages.0.content.0.type: is missing"),
    "no block": (content(5), "messages.0.content.0: must be an object"),
    "no text": (content({"type": "text"}), "content.0.text: is missing"),
    "result of nothing": (content(RESULT), "no tool_use with id 't1'"),
    "prefill": ({"messages": [USER, {"role": "assistant", "content": "A"}]}, "cannot be continued"),
    "no blocks": (content(), "messages: must have at least 1"),
    "no messages": ({"messages": []}, "messages: must have at least 1"),
    "no maximum": ({"max_tokens": None}, "max_tokens: is missing"),
    "server tool": ({"tools": [{"type": "web_search_20250305"}]}, "tools.0.type: must be 'custom'"),
    "deferred": ({"tools": [TOOL | {"defer_loading": True}]}, "tools.0.defer_loading"),
    "examples": ({"tools": [TOOL | {"input_examples": [{}]}]}, "tools.0.input_examples"),
    "callers": (
        {"tools": [TOOL | {"allowed_callers": ["code_execution_20250825"]}]},
        "tools.0.allowed_callers.0",
    ),
    "strict": ({"tools": [TOOL | {"strict": True}]}, "tools: strict requires"),
    "schema": ({"tools": [TOOL | {"input_schema": {}}]}, "input_schema: must be a JSON schema"),
    "forced without tools": ({"tool_choice": {"type": "any"}}, "'any' requires tools"),
    "forced unknown": (
        {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}},
        "'g' is not in tools",
    ),
    "thinking unread": (THINKING, "--reasoning-parser"),
    "thinking hidden": (
        {"thinking": {"type": "adaptive", "display": "omitted"}},
        "thinking.display: must be 'summarized'",
    ),
    "servers": ({"mcp_servers": [{"name": "x"}]}, "mcp_servers: not supported"),
    "context": (
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
        "context_management.edits.0.type: must be 'clear_thinking_20251015'",
    ),
    "chat's stop": ({"stop": ["a"]}, "stop: not supported"),
    "chat's format": ({"response_format": {"type": "json_object"}}, "response_format: not supp"),
    "a seed": ({"seed": 5}, "seed: not supported"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_unsupported_anthropic_field_is_rejected_by_name(client, name):
    body, sentence = REFUSED[name]
    status, answer = await post(client, "/v1/messages", ASK | body)
    assert (status, answer["type"], answer["error"]["type"]) == (
        400,
        "error",
        "invalid_request_error",
    )
    assert sentence in answer["error"]["message"]


def test_unsupported_thinking_is_rejected(sees):
    options = FrontendOptions(reply_formats=reply_formats("", "gpt_oss"))
    with pytest.raises(InvalidRequest, match="together with a forced tool call"):
        sees(THINKING | forced(), "a", options)


@pytest.mark.parametrize("options", [THINKS, FrontendOptions()], ids=["parser", "no parser"])
def test_disabled_thinking_is_accepted_where_the_template_has_no_switch(sees, options):
    assert sees({"thinking": {"type": "disabled"}}, "a", options) == "a"


def test_answer_with_calls_alone_has_no_content(sees):
    result = {"role": "user", "content": [RESULT]}
    messages = [USER, {"role": "assistant", "content": [CALL]}, result]
    assert sees({"messages": messages}, "{{ messages[1].content is none }}") == "True"


def test_unforced_strict_tool_call_follows_its_schema(backend):
    options = FrontendOptions(reply_formats=reply_formats("hermes", ""))
    for is_strict in (True, False):
        call = read_messages(
            backend.served, options, ASK | {"tools": [TOOL | {"strict": is_strict}]}
        )
        grammar = call.generations[0].request.sampling.grammar
        assert (grammar is not None) == is_strict


async def test_fields_without_effect_are_ignored(client, backend):
    backend.script = say(length(5))
    hints = {
        "metadata": {"user_id": "me"},
        "service_tier": "auto",
        "speed": "fast",
        "cache_control": {"type": "ephemeral"},
        "thinking": {"type": "disabled"},
        "mcp_servers": [],
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "system": None,
    }
    headers = {"anthropic-version": "2099-01-01", "anthropic-beta": "anything-2025-01-01"}
    status, _ = await post(client, "/v1/messages?beta=true", ASK | hints, headers=headers)
    assert status == 200
    assert backend.requests[0].session == "me"


async def test_anthropic_events_are_named_and_message_stop_is_last(client, backend, tokenizer):
    backend.script = say(*each(tokenizer, "Hello you"), stop(2))
    async with client.post("/v1/messages", json=ASK | {"stream": True}) as response:
        blocks = (await response.text()).removesuffix("\n\n").split("\n\n")
    named = [block.split("\n") for block in blocks]
    events = [(name.removeprefix("event: "), json.loads(data[6:])) for name, data in named]
    assert all(name == event["type"] for name, event in events)
    assert events[-1] == ("message_stop", {"type": "message_stop"})


@pytest.mark.parametrize("is_stream", [False, True])
async def test_aborted_message_is_an_error(client, backend, is_stream):
    backend.script = say([81], End([], Finish(reason="abort")))
    async with client.post("/v1/messages", json=ASK | {"stream": is_stream}) as response:
        *_, last = (await response.text()).strip().split("\n")
    assert response.status == (200 if is_stream else 499)
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == "the request was aborted"


async def test_anthropic_routes_return_anthropic_errors(backend):
    options = FrontendOptions(http=HttpOptions(api_keys=("k",), max_body_bytes=2000))
    big = ASK | {"system": "a" * 3000}
    async with serve(backend, options) as client:
        told = {}
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            for key, body in (("wrong", ASK), ("k", big), ("k", [])):
                status, answer = await post(client, path, body, headers={"x-api-key": key})
                told[status] = answer["error"]["type"]
        async with client.get("/v1/messages", headers={"x-api-key": "k"}) as response:
            told[response.status] = (await response.json())["error"]["type"]
    assert told == {
        401: "authentication_error",
        413: "request_too_large",
        400: "invalid_request_error",
        405: "invalid_request_error",
    }


async def test_timings_are_returned_on_request(client, backend):
    backend.script = say(length(5))
    headers = {"X-Tandem-Timings": "1"}
    _, answer = await post(client, "/v1/messages", ASK, headers=headers)
    assert answer["timings"]["request_id"].startswith(answer["id"])
