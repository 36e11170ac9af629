"""Calls of tools: forced ones with their grammar, and as the `openai` client sees them."""

import json
from contextlib import asynccontextmanager
from dataclasses import replace

import openai
import pytest
import xgrammar
from hypothesis import given
from hypothesis import strategies as st
from xgrammar.testing import _is_grammar_accept_string as accepts

from tandem.frontend.chat_template import ChatTemplate
from tandem.frontend.grammars import MAX_GRAMMAR_BYTES
from tandem.frontend.openai_body import read_chat
from tandem.frontend.options import FrontendOptions
from tandem.frontend.reply_formats import TOOL_FORMATS, Format, Thoughts
from tandem.frontend.reply_parser import ReplyFormats, reply_formats
from tandem.frontend.tool_calls import message, read_choice
from tandem.wire.errors import InvalidRequest
from tandem.wire.generation import Grammar
from tests.frontend.conftest import serve
from tests.frontend.fakes import FakeBackend, say, stop
from tests.frontend.helpers import each

CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Paris"]}}, "required": ["city"]}
SHARED = {
    "type": "object",
    "properties": {"where": {"$ref": "#/$defs/Place"}},
    "required": ["where"],
    "$defs": {"Place": {"enum": ["here", "there"]}},
}


def tool(name: str, parameters: dict | None = None) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("weather", CITY), tool("go", SHARED), tool("stop")]


def named(name: str) -> dict:
    return {"type": "function", "function": {"name": name}}


def reads(choice, *texts: str) -> dict:
    """Read an answer that comes in pieces; ids, which are random, become their number."""
    reply = choice.reply(None)
    parts = [part for text in texts for part in reply.push(text)] + reply.finish()
    return message(parts)


def grammar_of(choice):
    return xgrammar.Grammar.from_json_schema(choice.grammar.text)


def calls_of(said: dict) -> list[tuple[str, dict]]:
    assert len({call["id"] for call in said["tool_calls"]}) == len(said["tool_calls"])
    functions = [call["function"] for call in said["tool_calls"]]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]


def test_a_named_tool_is_answered_with_its_arguments_as_they_come():
    choice = read_choice(TOOLS, named("weather"), is_parallel=True)
    answer = '{"city": "Rome"}'
    assert accepts(grammar_of(choice), answer)
    assert not accepts(grammar_of(choice), '{"city": "Oslo"}')
    reply = choice.reply(None)
    deltas = [part.delta() for text in ("", '{"ci', 'ty": "Rome"}') for part in reply.push(text)]
    first, second = [delta["tool_calls"][0] for delta in deltas]
    assert (first["type"], first["function"]) == (
        "function",
        {"name": "weather", "arguments": '{"ci'},
    )
    assert second == {"index": 0, "function": {"arguments": 'ty": "Rome"}'}}
    assert calls_of(reads(choice, '{"ci', 'ty": "Rome"}')) == [("weather", {"city": "Rome"})]
    assert reply.finish_reason == "stop"


def test_a_required_call_may_be_several_of_any_tool():
    choice = read_choice(TOOLS, "required", is_parallel=True)
    calls = [
        {"name": "go", "parameters": {"where": "there"}},
        {"name": "weather", "parameters": {"city": "Rome"}},
        {"name": "stop", "parameters": {}},
    ]
    answer = json.dumps(calls)
    assert accepts(grammar_of(choice), answer)
    said = reads(choice, answer[:9], answer[9:])
    assert said["content"] is None
    assert calls_of(said) == [(call["name"], call["parameters"]) for call in calls]


@pytest.mark.parametrize("calls", [[], [{"name": "fly", "parameters": {}}], [{"name": "weather"}]])
def test_a_required_call_is_of_a_tool_and_whole(calls):
    choice = read_choice(TOOLS, "required", is_parallel=True)
    assert not accepts(grammar_of(choice), json.dumps(calls))


def test_required_calls_come_by_name_first_and_arguments_as_they_are_written():
    reply = read_choice(TOOLS, "required", is_parallel=True).reply(None)
    text = '[{"name": "go", "parameters": {"where": "there"}}]'
    first, *others = [part for char in text for part in reply.push(char)] + reply.finish()
    assert (first.name, first.text) == ("go", "")
    assert [part.text for part in others] == list('{"where": "there"}')
    assert reply.finish_reason == "tool_calls"


def test_calls_that_are_not_parallel_are_one():
    choice = read_choice(TOOLS, "required", is_parallel=False)
    call = {"name": "stop", "parameters": {}}
    assert accepts(grammar_of(choice), json.dumps([call]))
    assert not accepts(grammar_of(choice), json.dumps([call, call]))


def test_required_calls_that_are_cut_short_are_content():
    choice = read_choice(TOOLS, "required", is_parallel=True)
    reply = choice.reply(None)
    assert message([*reply.push('[{"na'), *reply.finish()])["content"] == '[{"na'
    assert reply.finish_reason == "stop"  # not `tool_calls`: there are none


@pytest.mark.parametrize("choice", [None, "auto", "none"])
def test_a_choice_left_to_the_model_has_no_grammar(choice):
    read = read_choice(TOOLS, choice, is_parallel=True)
    assert read.grammar is None
    assert list(read.tools) == ([] if choice == "none" else TOOLS)


BAD = {
    "unknown": (TOOLS, "always", "tool_choice: must be"),
    "no such tool": (TOOLS, named("fly"), "'fly' is none of the tools"),
    "no tools": ([], "required", "needs tools"),
    "no name": ([{"type": "function"}], "required", "tools: each must be"),
    "no schema": ([tool("a", ["b"])], "required", "'a' must be a JSON schema"),
    "two of a name": (
        [tool("a", SHARED), tool("b", SHARED | {"$defs": {"Place": {"enum": ["x"]}}})],
        "required",
        "define 'Place' differently",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_choice_that_cannot_be_is_refused(name):
    tools, choice, sentence = BAD[name]
    with pytest.raises(InvalidRequest) as caught:
        read_choice(tools, choice, is_parallel=True)
    assert sentence in str(caught.value)


@pytest.mark.parametrize("defs", [5, "x", [1], True])
@pytest.mark.parametrize("place", ["$defs", "definitions"])
def test_definitions_that_are_no_object_are_refused(place, defs):
    with pytest.raises(InvalidRequest, match="must be an object of schemas"):
        read_choice([tool("go", {"type": "object", place: defs})], "required", is_parallel=True)


CHAT = [{"role": "user", "content": "Weather in Rome?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
ARGUMENTS = '{"city": "Rome"}'
SAID = f'<think>Hm.</think>I look.\n<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
TAGGED = (
    "<think>Hm.</think>I look.\n<tool_call>weather\n<arg_key>city</arg_key>\n"
    "<arg_value>Rome</arg_value>\n</tool_call>"
)
FORMATS = FrontendOptions(reply_formats=reply_formats("hermes", "qwen3"))


@asynccontextmanager
async def client_of(backend, options: FrontendOptions | None = None):
    async with serve(backend, options) as server:
        base = str(server._base_url / "v1")
        async with openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0) as sdk:
            yield sdk


def speak(backend, text: str) -> None:
    backend.script = say(*each(backend.served.tokenizer, text), stop(2))


async def ask(sdk, **fields):
    """Return the message and the finish reason, whole and as streaming adds them up."""
    answer = await sdk.chat.completions.create(model="smol", messages=CHAT, **fields)
    async with sdk.chat.completions.stream(model="smol", messages=CHAT, **fields) as stream:
        streamed = await stream.get_final_completion()
    seen = []
    for choice in (answer.choices[0], streamed.choices[0]):
        said = choice.message.model_dump(exclude_none=True)
        calls = said.pop("tool_calls", [])
        functions = [call["function"] for call in calls]
        told = [(function["name"], function["arguments"]) for function in functions]
        kept = {name: said[name] for name in ("content", "reasoning_content") if said.get(name)}
        seen.append((kept, told, choice.finish_reason))
    assert seen[0] == seen[1]
    return seen[0]


@pytest.mark.parametrize(("name", "written"), [("hermes", SAID), ("glm45", TAGGED)])
async def test_calls_and_thoughts_are_told_apart(backend, name, written):
    speak(backend, written)
    formats = FrontendOptions(reply_formats=reply_formats(name, "qwen3"))
    async with client_of(backend, formats) as sdk:
        said, calls, reason = await ask(sdk, tools=WEATHER)
    assert said == {"content": "I look.", "reasoning_content": "Hm."}
    assert (calls, reason) == ([("weather", ARGUMENTS)], "tool_calls")


async def test_thoughts_are_left_out_where_the_client_wants_none(backend):
    speak(backend, SAID)
    async with client_of(backend, FORMATS) as sdk:
        fields = {"tools": WEATHER, "extra_body": {"include_reasoning": False}}
        said, calls, _ = await ask(sdk, **fields)
    assert (said, len(calls)) == ({"content": "I look."}, 1)


async def test_without_formats_all_is_content(backend):
    speak(backend, SAID)
    async with client_of(backend) as sdk:
        assert await ask(sdk, tools=WEATHER) == ({"content": SAID}, [], "stop")


async def test_a_named_tool_is_called_by_its_schema(backend):
    speak(backend, ARGUMENTS)
    choice = {"type": "function", "function": {"name": "weather"}}
    async with client_of(backend) as sdk:
        said, calls, reason = await ask(sdk, tools=WEATHER, tool_choice=choice)
    assert (said, calls, reason) == ({}, [("weather", ARGUMENTS)], "stop")
    text = json.dumps(SCHEMA, separators=(",", ":"))
    assert backend.requests[0].sampling.grammar == Grammar(kind="json_schema", text=text)


async def test_calls_that_are_not_parallel_are_the_first_one(backend):
    call = SAID.partition("I look.\n")[2]
    other = call.replace("Rome", "Oslo")
    speak(backend, f"I look.\n{call}\n{other}")
    async with client_of(backend, FORMATS) as sdk:
        said, calls, reason = await ask(sdk, tools=WEATHER, parallel_tool_calls=False)
        _, both, _ = await ask(sdk, tools=WEATHER)
    assert (said, reason) == ({"content": "I look."}, "tool_calls")
    assert calls == [("weather", ARGUMENTS)] == both[:1]
    assert len(both) == 2


KIMI_CALL = "<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
FORCED = f'{{"name": "weather", "parameters": {ARGUMENTS}}}'
# What a model is made to write, by the choice of tools, and how many calls that is.
KIMI = {
    "auto": (None, f"<|tool_calls_section_begin|>{KIMI_CALL * 2}<|tool_calls_section_end|>", 2),
    "required": ("required", f"[{FORCED}, {FORCED}]", 2),
    "named": ({"type": "function", "function": {"name": "weather"}}, ARGUMENTS, 1),
}


def asked_before(*numbers: int) -> list[dict]:
    """A conversation with so many calls in each of its turns."""
    turns = []
    for number in numbers:
        calls = [{"id": f"c{i}", "function": {"name": "f", "arguments": ""}} for i in range(number)]
        results = [{"role": "tool", "tool_call_id": f"c{i}", "content": ""} for i in range(number)]
        turns += [*CHAT, {"role": "assistant", "content": "", "tool_calls": calls}, *results]
    return [*turns, *CHAT]


async def call_ids(sdk, messages, **fields) -> list[str]:
    """Return the ids of the calls of an answer, which a stream has as well."""
    fields |= {"model": "smol", "messages": messages, "tools": WEATHER}
    whole = await sdk.chat.completions.create(**fields)
    async with sdk.chat.completions.stream(**fields) as stream:
        streamed = await stream.get_final_completion()
    told, streamed_ids = [
        [call.id for call in answer.choices[0].message.tool_calls] for answer in (whole, streamed)
    ]
    assert told == streamed_ids
    return told


@pytest.mark.parametrize("name", KIMI)
async def test_calls_of_kimi_k2_are_numbered_over_the_conversation(backend, name):
    choice, text, count = KIMI[name]
    fields = {} if choice is None else {"tool_choice": choice}
    speak(backend, text)
    async with client_of(
        backend, FrontendOptions(reply_formats=reply_formats("kimi_k2", ""))
    ) as sdk:
        for before in ([], [1], [2, 1]):
            first = sum(before)
            expected = [f"functions.weather:{first + i}" for i in range(count)]
            assert await call_ids(sdk, asked_before(*before), **fields) == expected


async def test_log_probabilities_stay_beside_a_call(backend):
    speak(backend, SAID)
    async with client_of(backend, FORMATS) as sdk:
        chunks = await sdk.chat.completions.create(
            model="smol", messages=CHAT, tools=WEATHER, logprobs=True, stream=True
        )
        told = [chunk.choices[0].logprobs async for chunk in chunks]
    tokens = [token.token for part in told if part is not None for token in part.content]
    assert "".join(tokens).removesuffix("<|im_end|>") == SAID


async def test_a_forced_call_beside_another_grammar_is_refused(backend):
    async with client_of(backend) as sdk:
        with pytest.raises(openai.BadRequestError, match="cannot be forced beside"):
            await ask(
                sdk, tools=WEATHER, tool_choice="required", response_format={"type": "json_object"}
            )


async def test_a_kept_stop_token_is_no_part_of_a_forced_call(backend):
    speak(backend, f"[{FORCED}]")
    kept = {"include_stop_str_in_output": True}
    async with client_of(backend) as sdk:
        said, calls, reason = await ask(sdk, tools=WEATHER, tool_choice="required", extra_body=kept)
    assert (said, calls, reason) == ({}, [("weather", ARGUMENTS)], "tool_calls")


def strict_body(*, is_strict: bool = True, **fields) -> dict:
    tools = [tool("weather", CITY), tool("stop", {"type": "object"})]
    tools[0]["function"]["strict"] = is_strict
    return {"messages": [{"role": "user", "content": "Hi"}], "tools": tools} | fields


def grammar_for(tokenizer, tools: str, thoughts: str = "", **fields) -> Grammar | None:
    model = FakeBackend(tokenizer).served
    options = FrontendOptions(reply_formats=reply_formats(tools, thoughts))
    call = read_chat(model, options, strict_body(**fields))
    assert call.make_reply is not None
    return call.generations[0].request.sampling.grammar


def test_a_strict_tool_is_called_by_its_schema_if_the_model_calls_it(tokenizer):
    right = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    other = '<tool_call>\n{"name": "stop", "arguments": {"any": 1}}\n</tool_call>'
    wrong = right.replace("Rome", "Oslo")
    for thoughts, before in (("", ""), ("think", "<think>Hm.</think>\n"), ("think", "")):
        made = grammar_for(tokenizer, "hermes", thoughts)
        strict = xgrammar.Grammar.from_structural_tag(made.text)
        for text in ("No call.", f"I ask. {right}", f"{right}\n{other}"):
            assert accepts(strict, before + text)
        assert not accepts(strict, before + wrong)
    once = grammar_for(tokenizer, "hermes", parallel_tool_calls=False)
    assert not accepts(xgrammar.Grammar.from_structural_tag(once.text), right + other)
    assert grammar_for(tokenizer, "hermes", is_strict=False) is None


@pytest.mark.parametrize("tools", ["kimi_k2", "llama3", ""])
def test_a_strict_tool_is_refused_where_its_schema_cannot_be_held_to(tokenizer, tools):
    model = FakeBackend(tokenizer).served
    options = FrontendOptions(reply_formats=reply_formats(tools, ""))
    with pytest.raises(InvalidRequest, match="tools: strict is supported with"):
        read_chat(model, options, strict_body())
    read_chat(model, options, strict_body(tool_choice="required"))


# ── thoughts before a forced call ────────────────────────────────────────────────────────────────

MARKS = ("<think>", "</think>")
# What looks like marks in arguments is theirs.
TRICKY = '{"city": "<think>a</think>"}'


@given(data=st.data())
@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("choice", ["required", named("weather")], ids=["required", "named"])
@pytest.mark.parametrize("thought", ["I </ see:\n so", None], ids=["thinks", "does not"])
def test_however_thoughts_and_a_forced_call_are_cut_they_are_the_same(
    choice, is_open, thought, data
):
    forced = read_choice(WEATHER, choice, is_parallel=True)
    text = TRICKY if forced.name else f'[{{"name": "weather", "parameters": {TRICKY}}}]'
    if thought is not None or is_open:
        text = f"{'' if is_open else MARKS[0]}\n{thought or ''}\n{MARKS[1]}\n\n{text}"
    ends = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    reply = forced.reply(None, Thoughts(*MARKS, is_open))
    parts = [
        part
        for a, b in zip([0, *ends], [*ends, len(text)], strict=True)
        for part in reply.push(text[a:b])
    ]
    said = message([*parts, *reply.finish()])
    [call] = said["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": TRICKY}
    assert (said["content"], said.get("reasoning_content")) == (None, thought)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<thi", {"content": "<thi"}),
        ("<think>Hm. </thi", {"reasoning_content": "Hm. </thi", "content": None}),
        ("<think>Hm.</think>\n", {"reasoning_content": "Hm.", "content": None}),
        ("", {"content": ""}),
    ],
)
def test_thoughts_that_are_cut_short_are_no_call(text, said):
    choice = read_choice(WEATHER, named("weather"), is_parallel=True)
    reply = choice.reply(None, Thoughts(*MARKS, is_open=False))
    assert message([*reply.push(text), *reply.finish()]) == {"role": "assistant"} | said


# Special tokens of the embedded model, which no text of a grammar is.
SPECIAL = ("<issue_start>", "<issue_closed>")
SPECIAL_FORMATS = ReplyFormats(
    thoughts=Format(
        {"reasoning_content": {"open": SPECIAL[0], "close": SPECIAL[1]}}, opening=SPECIAL[0]
    )
)


@pytest.mark.parametrize("name", ["required", "named"])
@pytest.mark.parametrize("marks", [MARKS, SPECIAL], ids=["text", "special"])
async def test_a_model_may_think_before_a_forced_call(backend, name, marks):
    choice, text, count = KIMI[name]
    formats = SPECIAL_FORMATS if marks == SPECIAL else reply_formats("", "think")
    speak(backend, f"{marks[0]}Hm.{marks[1]}\n{text}")
    # A kept stop token is no part of the arguments, though marks are shown.
    kept = {"include_stop_str_in_output": True}
    async with client_of(backend, FrontendOptions(reply_formats=formats)) as sdk:
        said, calls, reason = await ask(sdk, tools=WEATHER, tool_choice=choice, extra_body=kept)
    assert (said, calls) == ({"reasoning_content": "Hm."}, [("weather", ARGUMENTS)] * count)
    assert reason == ("tool_calls" if name == "required" else "stop")
    form = json.loads(backend.requests[0].sampling.grammar.text)["format"]
    thoughts = form["elements"][0]["content"]["elements"][0]
    expected = marks if marks == MARKS else [{"type": "token", "token": mark} for mark in marks]
    assert [thoughts["begin"], thoughts["end"]] == list(expected)


async def test_a_grammar_begins_behind_thoughts_between_special_tokens(backend):
    speak(backend, f"{SPECIAL[0]}Hm.{SPECIAL[1]}\n{ARGUMENTS}")
    async with client_of(backend, FrontendOptions(reply_formats=SPECIAL_FORMATS)) as sdk:
        said, _, _ = await ask(sdk, response_format={"type": "json_object"})
    assert said == {"reasoning_content": "Hm.", "content": ARGUMENTS}
    assert backend.requests[0].sampling.grammar.kind == "structural_tag"


@pytest.mark.parametrize(
    ("template", "fields", "is_behind"),
    [
        ("Hi", {}, True),
        ("Hi<think>\n", {}, True),
        ("Hi<think>\n", {"chat_template_kwargs": {"enable_thinking": False}}, True),
        ("Hi<think>\n\n</think>\n\n", {}, False),
        ("Hi", {"chat_template_kwargs": {"enable_thinking": False}}, False),
        ("Hi", {"chat_template_kwargs": {"thinking": False}}, False),
        ("Hi", {"separate_reasoning": False}, False),
        ("Hi", {"include_reasoning": False}, True),
    ],
)
def test_a_forced_call_begins_at_once_where_there_are_no_thoughts(
    tokenizer, monkeypatch, template, fields, is_behind
):
    monkeypatch.setattr(tokenizer, "_template", ChatTemplate({"default": template}, {}))
    made = grammar_for(
        tokenizer, "", "think", is_strict=False, tool_choice=named("weather"), **fields
    )
    assert made.kind == ("structural_tag" if is_behind else "json_schema")
    if is_behind:
        is_open = template.strip().endswith(MARKS[0])
        tag = xgrammar.Grammar.from_structural_tag(made.text)
        said = f'{"" if is_open else MARKS[0]}Hm.</think>{{"city": "Rome"}}'
        assert accepts(tag, said)
        assert not accepts(tag, said.replace("Rome", "Oslo"))
        assert accepts(tag, '{"city": "Rome"}') is not is_open


def test_strict_tools_may_follow_thoughts_between_special_tokens(tokenizer):
    formats = replace(SPECIAL_FORMATS, tools=TOOL_FORMATS["hermes"])
    options = FrontendOptions(reply_formats=formats)
    call = read_chat(FakeBackend(tokenizer).served, options, strict_body())
    form = json.loads(call.generations[0].request.sampling.grammar.text)["format"]
    assert form["elements"][0]["content"]["elements"][0]["end"]["token"] == SPECIAL[1]
    assert form["elements"][1]["type"] == "triggered_tags"


def test_the_largest_grammar_may_follow_thoughts(tokenizer):
    text = "a" * MAX_GRAMMAR_BYTES
    body = {"messages": [{"role": "user", "content": "Hi"}], "regex": text}
    options = FrontendOptions(reply_formats=reply_formats("", "think"))
    [generation] = read_chat(FakeBackend(tokenizer).served, options, body).generations
    assert text in generation.request.sampling.grammar.text


def test_strict_tools_that_are_too_large_together_are_refused(tokenizer):
    large = tool("large", {"type": "object", "title": "a" * MAX_GRAMMAR_BYTES})
    large["function"]["strict"] = True
    options = FrontendOptions(reply_formats=reply_formats("hermes", ""))
    with pytest.raises(InvalidRequest, match=r"tools: the grammar of strict calls has \d+ bytes"):
        read_chat(FakeBackend(tokenizer).served, options, strict_body(tools=[large]))
