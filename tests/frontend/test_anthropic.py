"""Anthropic's API without its client: what the template gets, what is refused, what errors look like."""

import json

import pytest

from tandem.frontend.anthropic_body import read_messages
from tandem.frontend.chat_template import ChatTemplate
from tandem.frontend.options import FrontendOptions, HttpOptions
from tandem.frontend.reply_parser import reply_formats
from tandem.wire.errors import InvalidRequest
from tandem.wire.generation import Finish
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


def test_a_conversation_is_a_chat(sees):
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
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": "t1", "type": "function", "function": arguments}],
        },
        {"role": "tool", "tool_call_id": "t1", "name": "f", "content": "2"},
        {"role": "user", "content": "D\nE"},
    ]


def test_a_result_that_is_an_error_reads_so(sees):
    failed = {"role": "user", "content": [RESULT | {"is_error": True}]}
    messages = [USER, {"role": "assistant", "content": [CALL]}, failed]
    assert json.loads(sees({"messages": messages}))[-1]["content"] == "Error: 2"


@pytest.mark.parametrize(("choice", "count"), [({}, 1), ({"tool_choice": {"type": "none"}}, 0)])
def test_tools_reach_the_template_unless_none_may_be_called(sees, choice, count):
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
def test_thinking_is_the_template_s_switch(sees, thinking, written):
    body = {"thinking": thinking} if thinking else {}
    template = "{{ enable_thinking if enable_thinking is defined else none }}"
    assert sees(body, template, THINKS) == written
    assert sees(body | {"chat_template_kwargs": {"enable_thinking": 5}}, template, THINKS) == "5"


def test_the_effort_and_the_format_of_the_output_are_those_of_a_chat(sees, backend):
    schema = {"type": "object", "properties": {}}
    config = {"effort": "low", "format": {"type": "json_schema", "schema": schema}}
    assert sees({"output_config": config}, "{{ reasoning_effort }}") == "low"
    body = ASK | {"output_config": config}
    for options, is_behind in ((FrontendOptions(), False), (THINKS, True)):
        [generation] = read_messages(backend.served, options, body).generations
        asked = json.loads(generation.request.sampling.grammar.text)
        behind = asked["format"]["elements"][-1]["json_schema"] if is_behind else asked
        assert behind == schema


def content(*blocks) -> dict:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


def answered(*blocks) -> dict:
    return {"messages": [USER, {"role": "assistant", "content": list(blocks)}, USER]}


def forced(**others) -> dict:
    return {"tools": [TOOL | others], "tool_choice": {"type": "any"}}


REFUSED = {
    "image": (
        content({"type": "image", "source": {}}),
        "messages.0.user.content.0: 'type' 'image'",
    ),
    "document": (content({"type": "document"}), "'document' is not supported here, only 'text'"),
    "image of a tool": (
        answered(CALL) | content(RESULT | {"content": [{"type": "image"}]}),
        "content.0.type: must be 'text'",
    ),
    "redacted": (answered({"type": "redacted_thinking", "data": ""}), "'redacted_thinking'"),
    "call of a server": (answered({"type": "server_tool_use"}), "'server_tool_use'"),
    "call of the user": (content(CALL), "'tool_use' is not supported"),
    "role": ({"messages": [{"role": "tool", "content": "a"}]}, "messages.0: 'role' 'tool'"),
    "no type": (content({"text": "a"}), "must be an object with 'type'"),
    "no block": (content(5), "messages.0.user.content.0"),
    "no text": (content({"type": "text"}), "content.0.text.text: is missing"),
    "result of nothing": (content(RESULT), "no tool_use with id 't1'"),
    "prefill": ({"messages": [USER, {"role": "assistant", "content": "A"}]}, "cannot be continued"),
    "no messages": ({"messages": []}, "messages: must have at least 1"),
    "no maximum": ({"max_tokens": None}, "max_tokens: is missing"),
    "server tool": ({"tools": [{"type": "web_search_20250305"}]}, "tools.0.type: must be 'custom'"),
    "deferred": ({"tools": [TOOL | {"defer_loading": True}]}, "tools.0.defer_loading"),
    "examples": ({"tools": [TOOL | {"input_examples": [{}]}]}, "tools.0.input_examples"),
    "callers": (
        {"tools": [TOOL | {"allowed_callers": ["code_execution_20250825"]}]},
        "tools.0.allowed_callers.0",
    ),
    "strict": ({"tools": [TOOL | {"strict": True}]}, "tools: strict is supported with"),
    "schema": ({"tools": [TOOL | {"input_schema": {}}]}, "input_schema: must be a JSON schema"),
    "forced without tools": ({"tool_choice": {"type": "any"}}, "'any' needs tools"),
    "forced unknown": (
        {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}},
        "'g' is none of the tools",
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
async def test_what_is_not_done_is_refused_by_name(client, name):
    body, sentence = REFUSED[name]
    status, answer = await post(client, "/v1/messages", ASK | body)
    assert (status, answer["type"], answer["error"]["type"]) == (
        400,
        "error",
        "invalid_request_error",
    )
    assert sentence in answer["error"]["message"]


@pytest.mark.parametrize(
    ("body", "thoughts", "sentence"),
    [
        (THINKING | forced(), "gpt_oss", "beside a forced call"),
        ({"thinking": {"type": "disabled"}}, "qwen3", "cannot turn it off"),
    ],
)
def test_thinking_that_cannot_be_is_refused(sees, body, thoughts, sentence):
    with pytest.raises(InvalidRequest, match=sentence):
        sees(body, "a", FrontendOptions(reply_formats=reply_formats("", thoughts)))


def test_a_strict_tool_follows_its_schema_where_the_model_chooses(backend):
    options = FrontendOptions(reply_formats=reply_formats("hermes", ""))
    for is_strict in (True, False):
        call = read_messages(
            backend.served, options, ASK | {"tools": [TOOL | {"strict": is_strict}]}
        )
        grammar = call.generations[0].request.sampling.grammar
        assert (grammar is not None) == is_strict


async def test_what_means_nothing_here_is_passed_over(client, backend):
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


async def test_each_event_has_its_name_and_none_follows_the_last(client, backend, tokenizer):
    backend.script = say(*each(tokenizer, "Hello you"), stop(2))
    async with client.post("/v1/messages", json=ASK | {"stream": True}) as response:
        blocks = (await response.text()).removesuffix("\n\n").split("\n\n")
    named = [block.split("\n") for block in blocks]
    events = [(name.removeprefix("event: "), json.loads(data[6:])) for name, data in named]
    assert all(name == event["type"] for name, event in events)
    assert events[-1] == ("message_stop", {"type": "message_stop"})


@pytest.mark.parametrize("is_stream", [False, True])
async def test_an_aborted_message_is_an_error(client, backend, is_stream):
    backend.script = say([81], End([], Finish(reason="abort")))
    async with client.post("/v1/messages", json=ASK | {"stream": is_stream}) as response:
        *_, last = (await response.text()).strip().split("\n")
    assert response.status == (200 if is_stream else 499)
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == "the request was aborted"


async def test_every_error_of_these_routes_has_their_shape(backend):
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
        # Other routes take the key as OpenAI's clients send it.
        assert (await post(client, "/v1/completions", {}, headers={"x-api-key": "k"}))[0] == 401
    assert told == {
        401: "authentication_error",
        413: "request_too_large",
        400: "invalid_request_error",
        405: "invalid_request_error",
    }


async def test_timings_come_where_they_are_wanted(client, backend):
    backend.script = say(length(5))
    headers = {"X-Tandem-Timings": "1"}
    _, answer = await post(client, "/v1/messages", ASK, headers=headers)
    assert answer["timings"]["request_id"].startswith(answer["id"])
