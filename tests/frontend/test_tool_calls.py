"""Tool calls: forced calls with their grammar, and calls through the `openai` client library."""

import json
import shutil
from contextlib import asynccontextmanager
from dataclasses import replace

import openai
import pytest
import xgrammar
from hypothesis import given
from hypothesis import strategies as st
from xgrammar.testing import _is_grammar_accept_string as accepts

from tandem.frontend.chat.grammars import MAX_SENT_BYTES
from tandem.frontend.chat.openai_body import read_chat
from tandem.frontend.chat.tool_choice import read_choice
from tandem.frontend.options import FrontendOptions
from tandem.frontend.replies.formats import TOOL_FORMATS, ReasoningFormat, ReasoningMarks
from tandem.frontend.replies.parser import ReplyFormats, reply_formats
from tandem.frontend.replies.tool_calls import message
from tandem.frontend.schemas.budget import Budget
from tandem.frontend.text.chat_template import ChatTemplate
from tandem.frontend.text.tokenizer import Tokenizer
from tandem.frontend.text.tokenizer_files import tokenizer_files
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


def strict(name: str, parameters: dict) -> dict:
    return {"type": "function", "function": tool(name, parameters)["function"] | {"strict": True}}


TOOLS = [tool("weather", CITY), tool("go", SHARED), tool("stop")]


def named(name: str) -> dict:
    return {"type": "function", "function": {"name": name}}


def reads(choice, *texts: str) -> dict:
    """Read an answer that comes in pieces; ids, which are random, become their number."""
    reply = choice.reply(None)
    parts = [part for text in texts for part in reply.push(text)] + reply.finish()
    return message(parts)


def grammar_of(choice):
    return xgrammar.Grammar.from_json_schema(choice.grammar(Budget()).text)


def calls_of(said: dict) -> list[tuple[str, dict]]:
    assert len({call["id"] for call in said["tool_calls"]}) == len(said["tool_calls"])
    functions = [call["function"] for call in said["tool_calls"]]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]


def test_named_tool_call_streams_its_arguments():
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


def test_required_allows_several_calls_of_any_tool():
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
def test_required_grammar_rejects_unknown_or_incomplete_calls(calls):
    choice = read_choice(TOOLS, "required", is_parallel=True)
    assert not accepts(grammar_of(choice), json.dumps(calls))


def test_required_calls_stream_name_then_arguments():
    reply = read_choice(TOOLS, "required", is_parallel=True).reply(None)
    text = '[{"name": "go", "parameters": {"where": "there"}}]'
    first, *others = [part for char in text for part in reply.push(char)] + reply.finish()
    assert (first.name, first.text) == ("go", "")
    assert [part.text for part in others] == list('{"where": "there"}')
    assert reply.finish_reason == "tool_calls"


def test_required_without_parallel_calls_allows_one():
    choice = read_choice(TOOLS, "required", is_parallel=False)
    call = {"name": "stop", "parameters": {}}
    assert accepts(grammar_of(choice), json.dumps([call]))
    assert not accepts(grammar_of(choice), json.dumps([call, call]))


def test_truncated_required_calls_become_content():
    choice = read_choice(TOOLS, "required", is_parallel=True)
    reply = choice.reply(None)
    assert message([*reply.push('[{"na'), *reply.finish()])["content"] == '[{"na'
    assert reply.finish_reason == "stop"  # not `tool_calls`, because there are none


@pytest.mark.parametrize("choice", [None, "auto", "none"])
def test_unforced_tool_choice_has_no_grammar(choice):
    read = read_choice(TOOLS, choice, is_parallel=True)
    assert not read.is_forced
    assert list(read.tools) == ([] if choice == "none" else TOOLS)


BAD = {
    "unknown": (TOOLS, "always", "tool_choice: must be"),
    "no such tool": (TOOLS, named("fly"), "'fly' is not in tools"),
    "no tools": ([], "required", "requires tools"),
    "no such keyword": (
        [strict("a", {"if": {"properties": {"where": {"const": "x"}}}, "then": False})],
        "required",
        "tools: the parameters of 'a': if at # is not supported",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_invalid_tool_choice_is_rejected(name):
    tools, choice, sentence = BAD[name]
    with pytest.raises(InvalidRequest) as caught:
        read_choice(tools, choice, is_parallel=True).grammar(Budget())
    assert sentence in str(caught.value)


OPEN = {"a": 1}
LOOSE = {
    "a keyword left out": (
        {"properties": {"tags": {"type": "array", "uniqueItems": True}, "n": {"type": "integer"}}},
        [{"tags": [1, 1]}, {"n": 1}],
        [{"n": "x"}],
    ),
    "several keywords": (
        {
            "type": "object",
            "properties": {"a": {"type": "str", "enum": ["x"]}, "b": {"pattern": "(?=a)"}},
            "required": True,
        },
        [{"a": "x"}, {"b": "y"}],
        [{"a": "y"}],
    ),
    "branches that overlap": (
        {"properties": {"a": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}},
        [{"a": 1}, {"a": 1.5}],
        [{"a": "x"}],
    ),
    "a referenced schema": (
        {"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"multipleOf": 0.01}}},
        [{"a": 1.005}],
        [{"b": 1}],
    ),
    "an unknown type": ({"type": "dict", "properties": {"b": {}}}, [OPEN], ["x"]),
    "patterns of names, which close an object": (
        {"patternProperties": {"^a": {}, "a$": {}}, "additionalProperties": False},
        [OPEN],
        ["x"],
    ),
    "conditions": ({"if": {"required": ["b"]}, "then": {"required": ["c"]}}, [OPEN], ["x"]),
    "no value": ({"type": "object", "required": ["a"], "properties": {"a": False}}, [OPEN], [1]),
    "too much work": (
        {"allOf": [{"anyOf": [{"required": ["a"]}] * 50} for _ in range(9)]},
        [OPEN],
        ["x"],
    ),
}


@pytest.mark.parametrize("name", LOOSE)
def test_tool_that_is_not_strict_is_held_without_what_cannot_be_served(name):
    schema, allowed, others = LOOSE[name]
    choice = read_choice([tool("f", schema)], named("f"), is_parallel=True)
    assert [accepts(grammar_of(choice), json.dumps(each)) for each in allowed] == [True] * len(
        allowed
    )
    assert not any(accepts(grammar_of(choice), json.dumps(each)) for each in others)
    tools = [tool("f", schema), strict("g", SHARED)]
    choice = read_choice(tools, "required", is_parallel=True)
    for call in (
        {"name": "f", "parameters": allowed[0]},
        {"name": "g", "parameters": {"where": "here"}},
    ):
        assert accepts(grammar_of(choice), json.dumps([call]))
    assert not accepts(grammar_of(choice), '[{"name": "g", "parameters": {"where": "x"}}]')
    with pytest.raises(InvalidRequest, match=r"tools: the parameters of 'f': .* at #"):
        read_choice([strict("f", schema)], named("f"), is_parallel=True).grammar(Budget())


def test_grammar_next_to_a_forced_call_is_refused_before_schemas_are_served(tokenizer):
    tools = [strict("a", {"uniqueItems": True})]
    body = strict_body(tools=tools, tool_choice=named("a"), json_schema={"uniqueItems": True})
    options = FrontendOptions(reply_formats=reply_formats("", ""))
    with pytest.raises(InvalidRequest, match="tool_choice: a forced call cannot be combined"):
        read_chat(FakeBackend(tokenizer).served, options, body)


def test_tools_of_a_request_have_one_budget():
    pair = [{"required": ["a"]}, {"required": ["b"]}]
    schema = {"allOf": [{"anyOf": pair} for _ in range(6)]}
    alone = read_choice([strict("t", schema)], "required", is_parallel=True)
    assert accepts(grammar_of(alone), '[{"name": "t", "parameters": {"a": 1}}]')
    tools = [strict(f"t{number}", schema) for number in range(180)]
    with pytest.raises(
        InvalidRequest, match=r"the parameters of 't[0-9]+': .* takes too much work"
    ):
        read_choice(tools, "required", is_parallel=True).grammar(Budget())


def test_forced_call_keeps_the_references_of_each_tool():
    tree = {
        "type": "object",
        "properties": {"leaf": {"$ref": "#/$defs/Place"}, "next": {"$ref": "#"}},
        "required": ["leaf"],
        "$defs": {"Place": {"enum": ["x"]}},
    }
    grammar = grammar_of(
        read_choice([tool("a", SHARED), tool("b", tree)], "required", is_parallel=True)
    )
    assert accepts(grammar, '[{"name": "a", "parameters": {"where": "here"}}]')
    assert accepts(grammar, '[{"name": "b", "parameters": {"leaf": "x", "next": {"leaf": "x"}}}]')
    assert not accepts(grammar, '[{"name": "a", "parameters": {"where": "x"}}]')
    assert not accepts(grammar, '[{"name": "b", "parameters": {"leaf": "x", "next": []}}]')


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
        assert said.get("reasoning") == said.get(
            "reasoning_content"
        )  # vLLM's name, and the others'
        kept = {name: said[name] for name in ("content", "reasoning_content") if said.get(name)}
        seen.append((kept, told, choice.finish_reason))
    assert seen[0] == seen[1]
    return seen[0]


@pytest.mark.parametrize(("name", "written"), [("hermes", SAID), ("glm45", TAGGED)])
async def test_calls_and_reasoning_are_separated(backend, name, written):
    speak(backend, written)
    formats = FrontendOptions(reply_formats=reply_formats(name, "qwen3"))
    async with client_of(backend, formats) as sdk:
        said, calls, reason = await ask(sdk, tools=WEATHER)
    assert said == {"content": "I look.", "reasoning_content": "Hm."}
    assert (calls, reason) == ([("weather", ARGUMENTS)], "tool_calls")


# As transformers serves Qwen 3, whose tokenizer ships none: `_RESPONSE_TEMPLATE_FALLBACKS` in its cli/serving/utils.py.
OWN_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"\s*<\|im_end\|>", "content": "text"},
    },
}


@pytest.mark.thorough
async def test_response_template_of_the_tokenizer_is_used(tokenizer_dir, tmp_path):
    shutil.copytree(tokenizer_dir, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "tokenizer_config.json"
    config = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(config | {"response_template": OWN_TEMPLATE}))
    backend = FakeBackend(Tokenizer.from_files(tokenizer_files(tmp_path)))
    speak(backend, SAID)
    formats = FrontendOptions(reply_formats=reply_formats("hf", "hf"))
    async with client_of(backend, formats) as sdk:
        said, calls, reason = await ask(sdk, tools=WEATHER)
    assert said == {"content": "I look.", "reasoning_content": "Hm."}
    assert (calls, reason) == ([("weather", ARGUMENTS)], "tool_calls")


async def test_model_without_response_template_is_an_error_of_the_server(backend):
    formats = FrontendOptions(reply_formats=reply_formats("hf", ""))
    async with client_of(backend, formats) as sdk:
        with pytest.raises(openai.InternalServerError, match="has no response_template"):
            await ask(sdk, tools=WEATHER)


async def test_include_reasoning_false_omits_reasoning(backend):
    speak(backend, SAID)
    async with client_of(backend, FORMATS) as sdk:
        fields = {"tools": WEATHER, "extra_body": {"include_reasoning": False}}
        said, calls, _ = await ask(sdk, **fields)
    assert (said, len(calls)) == ({"content": "I look."}, 1)


async def test_without_parsers_all_text_is_content(backend):
    speak(backend, SAID)
    async with client_of(backend) as sdk:
        assert await ask(sdk, tools=WEATHER) == ({"content": SAID}, [], "stop")


async def test_named_tool_call_follows_its_schema(backend):
    speak(backend, ARGUMENTS)
    choice = {"type": "function", "function": {"name": "weather"}}
    async with client_of(backend) as sdk:
        said, calls, reason = await ask(sdk, tools=WEATHER, tool_choice=choice)
    assert (said, calls, reason) == ({}, [("weather", ARGUMENTS)], "stop")
    text = json.dumps(SCHEMA, separators=(",", ":"))
    assert backend.requests[0].sampling.grammar == Grammar(kind="json_schema", text=text)


async def test_without_parallel_calls_only_the_first_is_kept(backend):
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
# Model output for each tool choice, and the number of calls in it.
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
async def test_kimi_k2_call_ids_are_numbered_across_the_conversation(backend, name):
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


async def test_tool_call_keeps_logprobs(backend):
    speak(backend, SAID)
    async with client_of(backend, FORMATS) as sdk:
        chunks = await sdk.chat.completions.create(
            model="smol", messages=CHAT, tools=WEATHER, logprobs=True, stream=True
        )
        told = [chunk.choices[0].logprobs async for chunk in chunks]
    tokens = [token.token for part in told if part is not None for token in part.content]
    assert "".join(tokens).removesuffix("<|im_end|>") == SAID


async def test_forced_call_with_a_grammar_is_rejected(backend):
    async with client_of(backend) as sdk:
        with pytest.raises(openai.BadRequestError, match="cannot be combined with a grammar"):
            await ask(
                sdk, tools=WEATHER, tool_choice="required", response_format={"type": "json_object"}
            )


async def test_kept_stop_token_is_not_in_a_forced_call(backend):
    speak(backend, f"[{FORCED}]")
    kept = {"include_stop_str_in_output": True}
    async with client_of(backend) as sdk:
        said, calls, reason = await ask(sdk, tools=WEATHER, tool_choice="required", extra_body=kept)
    assert (said, calls, reason) == ({}, [("weather", ARGUMENTS)], "tool_calls")


def strict_body(*, is_strict: bool = True, **fields) -> dict:
    tools = [tool("weather", CITY), tool("stop", {"type": "object"})]
    tools[0]["function"]["strict"] = is_strict
    return {"messages": [{"role": "user", "content": "Hi"}], "tools": tools} | fields


def grammar_for(tokenizer, tools: str, reasoning: str = "", **fields) -> Grammar | None:
    model = FakeBackend(tokenizer).served
    options = FrontendOptions(reply_formats=reply_formats(tools, reasoning))
    call = read_chat(model, options, strict_body(**fields))
    assert call.make_reply is not None
    return call.generations[0].request.sampling.grammar


def test_strict_tool_call_follows_its_schema(tokenizer):
    right = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    other = '<tool_call>\n{"name": "stop", "arguments": {"any": 1}}\n</tool_call>'
    wrong = right.replace("Rome", "Oslo")
    for reasoning, before in (("", ""), ("think", "<think>Hm.</think>\n"), ("think", "")):
        made = grammar_for(tokenizer, "hermes", reasoning)
        strict = xgrammar.Grammar.from_structural_tag(made.text)
        for text in ("No call.", f"I ask. {right}", f"{right}\n{other}"):
            assert accepts(strict, before + text)
        assert not accepts(strict, before + wrong)
    once = grammar_for(tokenizer, "hermes", parallel_tool_calls=False)
    assert not accepts(xgrammar.Grammar.from_structural_tag(once.text), right + other)
    assert grammar_for(tokenizer, "hermes", is_strict=False) is None


@pytest.mark.parametrize("tools", ["kimi_k2", "llama3", ""])
def test_strict_tool_without_supported_format_is_rejected(tokenizer, tools):
    model = FakeBackend(tokenizer).served
    options = FrontendOptions(reply_formats=reply_formats(tools, ""))
    with pytest.raises(InvalidRequest, match="tools: strict requires"):
        read_chat(model, options, strict_body())
    read_chat(model, options, strict_body(tool_choice="required"))


# ── reasoning before a forced call ────────────────────────────────────────────────────────────────

MARKS = ("<think>", "</think>")
# Marks inside arguments belong to the arguments.
TRICKY = '{"city": "<think>a</think>"}'


@given(data=st.data())
@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("choice", ["required", named("weather")], ids=["required", "named"])
@pytest.mark.parametrize("thought", ["I </ see:\n so", None], ids=["thinks", "does not"])
def test_reasoning_and_forced_call_do_not_depend_on_splits(choice, is_open, thought, data):
    forced = read_choice(WEATHER, choice, is_parallel=True)
    text = TRICKY if forced.name else f'[{{"name": "weather", "parameters": {TRICKY}}}]'
    if thought is not None or is_open:
        text = f"{'' if is_open else MARKS[0]}\n{thought or ''}\n{MARKS[1]}\n\n{text}"
    ends = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    reply = forced.reply(None, ReasoningMarks(*MARKS, is_open))
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
def test_truncated_reasoning_is_not_a_call(text, said):
    choice = read_choice(WEATHER, named("weather"), is_parallel=True)
    reply = choice.reply(None, ReasoningMarks(*MARKS, is_open=False))
    assert message([*reply.push(text), *reply.finish()]) == {"role": "assistant"} | said


# Special tokens of the embedded model, which text in a grammar never matches.
SPECIAL = ("<issue_start>", "<issue_closed>")
SPECIAL_FORMATS = ReplyFormats(reasoning=ReasoningFormat((SPECIAL[0],), SPECIAL[1]))


@pytest.mark.parametrize("name", ["required", "named"])
@pytest.mark.parametrize("marks", [MARKS, SPECIAL], ids=["text", "special"])
async def test_reasoning_may_precede_a_forced_call(backend, name, marks):
    choice, text, count = KIMI[name]
    formats = SPECIAL_FORMATS if marks == SPECIAL else reply_formats("", "think")
    speak(backend, f"{marks[0]}Hm.{marks[1]}\n{text}")
    # A kept stop token is not part of the arguments, although marks are shown.
    kept = {"include_stop_str_in_output": True}
    async with client_of(backend, FrontendOptions(reply_formats=formats)) as sdk:
        said, calls, reason = await ask(sdk, tools=WEATHER, tool_choice=choice, extra_body=kept)
    assert (said, calls) == ({"reasoning_content": "Hm."}, [("weather", ARGUMENTS)] * count)
    assert reason == ("tool_calls" if name == "required" else "stop")
    form = json.loads(backend.requests[0].sampling.grammar.text)["format"]
    reasoning = form["elements"][0]["content"]["elements"][0]
    expected = marks if marks == MARKS else [{"type": "token", "token": mark} for mark in marks]
    assert [reasoning["begin"], reasoning["end"]] == list(expected)


async def test_grammar_starts_after_special_token_reasoning(backend):
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
def test_forced_call_without_reasoning_starts_immediately(
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


def test_strict_tools_may_follow_special_token_reasoning(tokenizer):
    formats = replace(SPECIAL_FORMATS, tools=TOOL_FORMATS["hermes"])
    options = FrontendOptions(reply_formats=formats)
    call = read_chat(FakeBackend(tokenizer).served, options, strict_body())
    form = json.loads(call.generations[0].request.sampling.grammar.text)["format"]
    assert form["elements"][0]["content"]["elements"][0]["end"]["token"] == SPECIAL[1]
    assert form["elements"][1]["type"] == "triggered_tags"


def test_largest_grammar_may_follow_reasoning(tokenizer):
    text = "a" * MAX_SENT_BYTES
    body = {"messages": [{"role": "user", "content": "Hi"}], "regex": text}
    options = FrontendOptions(reply_formats=reply_formats("", "think"))
    [generation] = read_chat(FakeBackend(tokenizer).served, options, body).generations
    assert text in generation.request.sampling.grammar.text


def test_oversized_strict_tools_are_rejected(tokenizer):
    large = tool("large", {"type": "object", "title": "a" * MAX_SENT_BYTES})
    large["function"]["strict"] = True
    options = FrontendOptions(reply_formats=reply_formats("hermes", ""))
    with pytest.raises(
        InvalidRequest, match=r"tools: the schemas of the parameters: has \d+ bytes"
    ):
        read_chat(FakeBackend(tokenizer).served, options, strict_body(tools=[large]))
