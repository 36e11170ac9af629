"""Parsing calls and reasoning in each model format, for any split of the text."""

import json
import re
import sys
from pathlib import Path

import pytest
import xgrammar
from hypothesis import given
from hypothesis import strategies as st
from xgrammar.builtin_structural_tag import get_model_structural_tag
from xgrammar.testing import _is_grammar_accept_string as accepts

from tandem.frontend.replies.call_scanner import MAX_HEAD
from tandem.frontend.replies.formats import (
    OWN,
    REASONING_ALIASES,
    REASONING_FORMATS,
    TOOL_ALIASES,
    TOOL_FORMATS,
    ReasoningMarks,
)
from tandem.frontend.replies.parser import formats_by_model, reply_formats
from tandem.frontend.replies.tool_calls import (
    AfterReasoning,
    ForcedCalls,
    Reply,
    ReplyPart,
    message,
)
from tandem.wire.errors import ConfigInvalid
from tests.sample import sampled

ARGUMENTS = {"city": "Paris; or Rome", "days": 2}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}]
JSON = json.dumps(ARGUMENTS)
NAMED = f'{{"name": "get_weather", "arguments": {JSON}}}'
LLAMA = f'{{"name": "get_weather", "parameters": {JSON}}}'


def mark(name: str) -> str:
    return f"<\uff5c{name}\uff5c>".replace("_", "\u2581")


def deepseek(call: str) -> str:
    call = mark("tool_call_begin") + call + mark("tool_call_end")
    return mark("tool_calls_begin") + call + "\n" + call + mark("tool_calls_end")


TAGGED = """<tool_call>
<function=get_weather>
<parameter=city>
Paris; or Rome
</parameter>
<parameter=days>
2
</parameter>
</function>
</tool_call>"""
GLM = (
    "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris; or Rome</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"
)
KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
    f"<|tool_call_argument_begin|>{JSON}<|tool_call_end|><|tool_call_begin|>functions.get_weather:1"
    f"<|tool_call_argument_begin|>{JSON}<|tool_call_end|><|tool_calls_section_end|>"
)
HARMONY = (
    f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{JSON}<|call|>"
)


def functions(section: str) -> str:
    return TAGGED.replace("tool_call>", f"{section}>")


def invokes(section: str, dsml: str = "", *kinds: str) -> str:
    city, days = kinds or ("", "")
    call = (
        f'<{dsml}invoke name="get_weather">\n'
        f'<{dsml}parameter name="city"{city}>Paris; or Rome</{dsml}parameter>\n'
        f'<{dsml}parameter name="days"{days}>2</{dsml}parameter>\n</{dsml}invoke>\n'
    )
    return f"<{dsml}{section}>\n{call}{call}</{dsml}{section}>"


DSML = "\uff5cDSML\uff5c"
KINDS = (' string="true"', ' string="false"')
PYTHON = "get_weather(city='Paris; or Rome', days=2)"
# Model output in each format, and the part of it that is calls.
WRITTEN = {
    "hermes": (f"<tool_call>\n{NAMED}\n</tool_call>\n<tool_call>{NAMED}</tool_call>", 2),
    "qwen3_coder": (f"{TAGGED}\n{TAGGED}", 2),
    "glm45": (f"{GLM}\n{GLM}", 2),
    "mistral": (f"[TOOL_CALLS] [{NAMED}, {NAMED}]", 2),
    "llama3": (f"{LLAMA}; {LLAMA}", 2),
    "deepseek_v3": (
        deepseek(f"function{mark('tool_sep')}get_weather\n```json\n{JSON}\n```"),
        2,
    ),
    "deepseek_v31": (deepseek(f"get_weather{mark('tool_sep')}{JSON}"), 2),
    "kimi_k2": (KIMI, 2),
    "gpt_oss": (HARMONY, 1),
    # Source: tests/tool_parsers/test_seed_oss_tool_parser.py of vLLM
    "seed_oss": (f"{functions('seed:tool_call')}\n{functions('seed:tool_call')}", 2),
    # Chat template of MiniMax-M2; vLLM: tests/tool_parsers/test_minimax_m2_tool_parser.py
    "minimax_m2": (invokes("minimax:tool_call"), 2),
    # encoding_dsv32.py of DeepSeek-V3.2; vLLM: tests/tool_parsers/test_deepseekv32_tool_parser.py
    "deepseek_v32": (invokes("function_calls", DSML, *KINDS), 2),
    # encoding_dsv4.py of DeepSeek-V4; vLLM: tests/tool_parsers/test_deepseekv4_tool_parser.py
    "deepseek_v4": (invokes("tool_calls", DSML, *KINDS), 2),
    # text_prompt_format.md of Llama 3.2; vLLM: tests/tool_parsers/test_pythonic_tool_parser.py
    "pythonic": (f"[{PYTHON}, {PYTHON}]", 2),
    # Source: tests/tool_parsers/test_llama4_pythonic_tool_parser.py of vLLM
    "llama4_pythonic": (f"<|python_start|>[{PYTHON},{PYTHON}]<|python_end|>", 2),
    # Source: tests/tool_parsers/test_phi4mini_tool_parser.py of vLLM
    "phi4_mini": (f"functools[\n  {NAMED},\n  {NAMED}\n]", 2),
    # Source: tests/tool_parsers/test_granite_tool_parser.py of vLLM
    "granite": (f"<|tool_call|> [{NAMED}, {NAMED}]", 2),
}
# xgrammar's names of the same formats, with a call that its grammars allow.
KNOWN_ELSEWHERE = {
    "hermes": ("qwen_3", f"<tool_call>\n{NAMED}\n</tool_call>"),
    "qwen3_coder": ("qwen_3_5", TAGGED),
    "glm45": ("glm_4_7", GLM.replace("\n", "")),
    "llama3": ("llama", LLAMA),
    "deepseek_v3": ("deepseek_r1", WRITTEN["deepseek_v3"][0]),
    "deepseek_v31": ("deepseek_v3_1", WRITTEN["deepseek_v31"][0].replace("\n", "")),
    "kimi_k2": ("kimi", KIMI),
    "gpt_oss": ("harmony", HARMONY.replace(" <|con", "<|con")),
    "minimax_m2": ("minimax", WRITTEN["minimax_m2"][0]),
    "deepseek_v32": ("deepseek_v3_2", WRITTEN["deepseek_v32"][0]),
}


assert set(WRITTEN) == set(TOOL_FORMATS) - {OWN}


def parts_of(text: str, cuts=(), *, tools="", reasoning="", prompt="") -> list[ReplyPart]:
    make = reply_formats(tools, reasoning).reply(prompt, TOOLS)
    assert make is not None
    reply = make()
    ends = sorted(cuts)
    pieces = [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]
    return [part for piece in pieces for part in reply.push(piece)] + reply.finish()


def read(text: str, cuts=(), **names: str) -> dict:
    """The message that a text becomes, without the ids of its calls."""
    said = message(parts_of(text, cuts, **names))
    for call in said.get("tool_calls", []):
        assert call.pop("id").startswith("call_")
    return said


def call_of(arguments=ARGUMENTS) -> dict:
    text = json.dumps(arguments)
    return {"type": "function", "function": {"name": "get_weather", "arguments": text}}


@pytest.mark.parametrize("name", WRITTEN)
def test_calls_of_each_format_are_parsed(name):
    text, count = WRITTEN[name]
    expected = {"role": "assistant", "content": None, "tool_calls": [call_of()] * count}
    assert read(text, tools=name) == expected
    reply = reply_formats(name, "").reply("", TOOLS)()
    reply.push(text)
    reply.finish()
    assert reply.finish_reason == "tool_calls"


@pytest.mark.parametrize("name", KNOWN_ELSEWHERE)
def test_call_format_matches_xgrammar(name):
    model, text = KNOWN_ELSEWHERE[name]
    tag = get_model_structural_tag(model, TOOLS, reasoning="disabled")
    grammar = xgrammar.Grammar.from_structural_tag(tag)
    assert accepts(grammar, text) or accepts(grammar, "\n</think>" + "\n" * 4 + text)
    assert read(text, tools=name)["tool_calls"][0] == call_of()


@pytest.mark.parametrize("name", WRITTEN)
@given(data=st.data())
def test_parsed_call_does_not_depend_on_splits(name, data):
    head = "" if name in ("llama3", "gpt_oss") else "Let me look. "
    text = head + WRITTEN[name][0]
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=12))
    assert read(text, cuts, tools=name) == read(text, tools=name)


def bits(name: str) -> list[str]:
    """Marks of a format and of others, in which a parser may lose its way."""
    form = TOOL_FORMATS[name]
    tags = (form.tags.start, 'city">', "city>", form.tags.closing) if form.tags else ()
    marks = [*form.opening, form.closing, *(form.section or ()), *tags, "f>", 'f">', "f(city="]
    marks += [
        "<think>",
        "</think>",
        "<|channel|>final<|message|>",
        "<|end|>",
        "[ARGS]",
        NAMED,
        JSON,
    ]
    return [*filter(None, marks), *'"{}[]()\\,<f\n', "'", "  ", WRITTEN[name][0]]


@pytest.mark.parametrize("name", WRITTEN)
@given(data=st.data())
def test_parsed_reply_does_not_depend_on_splits(name, data):
    whole = WRITTEN[name][0]
    text = whole[: data.draw(st.integers(0, len(whole)))]
    text += "".join(data.draw(st.lists(st.sampled_from(bits(name)) | st.text(max_size=3))))
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    names = {"tools": name, "reasoning": "gpt_oss" if name == "gpt_oss" else "think"}
    assert read(text, cuts, **names) == read(text, **names)
    assert read(text, range(len(text)), **names) == read(text, **names)


@pytest.mark.parametrize("text", ["Hello\n", " two\n\nlines  ", "", "a < b, <tool", "[1, 2]"])
@pytest.mark.parametrize("name", [name for name in WRITTEN if name != "gpt_oss"])
def test_text_without_calls_is_unchanged_content(name, text):
    assert read(text, tools=name) == {"role": "assistant", "content": text}


def test_call_that_is_not_json_becomes_content():
    for body in ("{'name': 1}", "[" * 5000, '{"arguments": {}}', "7", "", "[]", '{"name": "f"'):
        text = f"Look:\n\n<tool_call>{body}</tool_call> ok"
        assert read(text, tools="hermes") == {"role": "assistant", "content": text}
        assert read(text, range(len(text)), tools="hermes")["content"] == text
    assert read('{"a": 1}', tools="llama3")["content"] == '{"a": 1}'


@pytest.mark.parametrize("name", ["llama3", "granite"])
def test_only_a_mark_makes_an_object_without_arguments_a_call(name):
    answer = '[{"name": "Alice", "age": 3}]'
    content = {"role": "assistant", "content": answer}
    assert read(answer, tools=name) == content
    assert read(answer, range(len(answer)), tools=name) == content
    for text in (
        TOOL_FORMATS[name].opening[0] + '[{"name": "f"}]',
        '[{"name": "f", "arguments": null}]',
    ):
        [call] = read(text, tools=name)["tool_calls"]
        assert call["function"] == {"name": "f", "arguments": "{}"}


@pytest.mark.parametrize("depth", [900, 5_000, 100_000])
def test_deeply_nested_argument_loses_no_text(depth):
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": {}}}]
    tools[0]["function"]["parameters"] = {"properties": {"city": {"type": "array"}}}
    reply = reply_formats("qwen3_coder", "").reply("", tools)()
    text = TAGGED.replace("Paris; or Rome", "[" * depth + "]" * depth)
    parts = [*reply.push(text[:100]), *reply.push(text[100:]), *reply.push("!"), *reply.finish()]
    said = "".join(part.text for part in parts)
    assert (said.count("["), said[-1]) == (depth, "!")


@pytest.mark.parametrize("name", sorted({*REASONING_FORMATS} - {"gpt_oss", OWN}))
def test_reasoning_is_separated(name):
    shape = REASONING_FORMATS[name]
    opening, closing = shape.opening[0], shape.closing
    expected = {"role": "assistant", "content": "Four.", "reasoning_content": "2 + 2"}
    assert read(f"{opening}\n2 + 2\n{closing}\n\nFour.", reasoning=name) == expected
    # The output if the template has already opened the reasoning.
    assert (
        read(f"\n2 + 2\n{closing}\n\nFour.", reasoning=name, prompt=f"...{opening}\n") == expected
    )
    assert read("Four.", reasoning=name) == {"role": "assistant", "content": "Four."}


@given(data=st.data())
def test_reasoning_and_calls_do_not_depend_on_splits(data):
    text = f"<think>\n I see:\n</think>\n\nOne moment. \n<tool_call>{NAMED}</tool_call>\n"
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=12))
    said = read(text, cuts, tools="hermes", reasoning="qwen3")
    assert said == {
        "role": "assistant",
        "content": "One moment.",
        "reasoning_content": "I see:",
        "tool_calls": [call_of()],
    }


def test_call_in_reasoning_is_not_parsed():
    said = read(f"<think><tool_call>{NAMED}</tool_call>", tools="hermes", reasoning="deepseek-r1")
    assert "tool_calls" not in said


def test_channels_are_separated():
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
        "<|channel|>final<|message|>Four.<|return|>"
    )
    expected = {"role": "assistant", "content": "Four.", "reasoning_content": "Hm."}
    assert read(text, tools="gpt-oss", reasoning="gpt-oss") == expected
    said = read(text.partition("<|start|>")[0] + "<|start|>assistant" + HARMONY, tools="openai")
    assert said["tool_calls"] == [call_of()]


@pytest.mark.parametrize(
    ("channel", "field"),
    [("final", "content"), ("commentary", "content"), ("analysis", "reasoning_content")],
)
def test_answer_continues_the_open_message_of_the_prompt(channel, field):
    prompt = (
        f"<|start|>user<|message|>Hi<|end|><|start|>assistant<|channel|>{channel}<|message|>One"
    )
    names = {"tools": "gpt-oss", "reasoning": "gpt-oss", "prompt": prompt}
    said = read(" two.", **names)
    assert said == {"role": "assistant", "content": None} | {field: " two."}
    rest = "<|end|><|start|>assistant" + HARMONY
    said = read(" two." + rest, range(5 + len(rest)), **names)
    assert (said[field], said["tool_calls"]) == (" two.", [call_of()])


@pytest.mark.parametrize("end", ["<|end|>", "<|return|>", "<|end|><|start|>assistant"])
def test_answer_behind_a_complete_message_begins_with_a_header(end):
    prompt = f"<|start|>assistant<|channel|>final<|message|>One.{end}"
    said = read("<|channel|>final<|message|>Two.<|return|>", reasoning="gpt-oss", prompt=prompt)
    assert said["content"] == "Two."


BEFORE = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"


@pytest.mark.parametrize("before", ["", BEFORE, PREAMBLE, BEFORE + PREAMBLE])
@pytest.mark.parametrize("channel", ["commentary", "analysis"])
@pytest.mark.parametrize("kind", ["", " json", " <|constrain|>json", "<|constrain|>json"])
def test_recipient_in_role_or_channel_is_parsed(before, channel, kind):
    end = f"{kind}<|message|>{JSON}<|call|>"
    by_role = f"{before} to=functions.get_weather<|channel|>{channel}{end}"
    by_channel = f"{before}<|channel|>{channel} to=functions.get_weather{end}"
    for text in (by_role, by_channel):
        said = read(text, range(len(text)), tools="gpt-oss", reasoning="gpt-oss")
        assert said["tool_calls"] == [call_of()]
        assert said.get("reasoning_content", "") == ("Hm." if BEFORE in before else "")
        assert (said["content"] or "") == ("I look." if PREAMBLE in before else "")
        assert read(text, tools="gpt-oss", reasoning="gpt-oss") == said


def test_no_format_means_no_parser():
    assert reply_formats("", "").reply("", TOOLS) is None
    assert reply_formats("hermes", "").reply("", []) is None
    assert reply_formats("", "think").reply("", TOOLS, is_split=False) is None


def test_unknown_parser_error_names_it():
    with pytest.raises(ConfigInvalid, match=r"--tool-call-parser: unknown parser 'nosuch'.*hermes"):
        reply_formats("nosuch", "")
    with pytest.raises(ConfigInvalid, match=r"--reasoning-parser: unknown parser 'nosuch'.*think"):
        reply_formats("", "nosuch")


def test_parsers_of_one_model_override_those_of_all_models():
    found = formats_by_model(["hermes", "big=llama3", "small="], ["big=think"])
    assert found == {
        "": reply_formats("hermes", ""),
        "big": reply_formats("llama3", "think"),
        "small": reply_formats("", ""),
    }
    assert formats_by_model([], []) == {"": reply_formats("", "")}
    with pytest.raises(ConfigInvalid, match="unknown parser 'nosuch'"):
        formats_by_model(["big=nosuch"], [])


@pytest.mark.parametrize("name", WRITTEN)
def test_call_name_comes_first_and_arguments_stream(name):
    text, count = WRITTEN[name]
    parts = parts_of(text, range(1, len(text)), tools=name)
    assert {part.kind for part in parts} == {"tool_call"}
    for index in range(count):
        first, *others = [part for part in parts if part.index == index]
        assert (first.name, first.text) == ("get_weather", "")
        assert "".join(part.text for part in others) == JSON
        # Between tags a key is returned immediately.
        longest = len(', "days": ') if TOOL_FORMATS[name].tags else 1
        # Python's literals have to be complete.
        longest = len(JSON) if TOOL_FORMATS[name].is_python else longest
        assert max(len(part.text) for part in others) == longest


@pytest.mark.parametrize("name", [name for name in WRITTEN if name != "gpt_oss"])
def test_call_respects_max_calls_and_numbering(name):
    make = reply_formats(name, "").reply("", TOOLS, 3, is_parallel=False)
    reply = make()
    parts = [part for char in WRITTEN[name][0] for part in reply.push(char)] + reply.finish()
    [call] = message(parts)["tool_calls"]
    assert call == call_of() | {"id": "functions.get_weather:3"}


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("qwen3_coder", "<tool_call><function=a<b></tool_call>", None, []),
        ("qwen3_coder", "<tool_call><function=", None, []),
        ("glm45", f"<tool_call>{'x' * 300}</tool_call>", None, []),
        ("glm45", "<tool_call>get_weather", "", ["{}"]),
        ("glm45", '<tool_call>get_weather\n{"city": 1}</tool_call>', '{"city": 1}', ["{}"]),
        ("qwen3_coder", TAGGED.partition("; or")[0], "", ['{"city": "Paris']),
        (
            "qwen3_coder",
            TAGGED.rpartition("</parameter>")[0],
            "",
            ['{"city": "Paris; or Rome", "days": "2\\n'],
        ),
    ],
)
def test_broken_tagged_call_loses_no_text(name, text, content, calls):
    said = read(text, range(len(text)), tools=name)
    assert [call["function"]["arguments"] for call in said.get("tool_calls", [])] == calls
    assert (said["content"] or "") == (text if content is None else content)


@pytest.mark.parametrize("arguments", ["", "null", "[1]", '{"a": '])
def test_call_with_non_object_arguments_is_returned_at_its_end(arguments):
    text = KIMI.replace(JSON, arguments)
    [first, *_] = read(text, tools="kimi_k2")["tool_calls"]
    assert first["function"]["name"] == "get_weather"
    assert first["function"]["arguments"] == (arguments or "{}")


# Of each format whose arguments are JSON: a call with these arguments, and marks that they may contain.
NESTED = {
    "hermes": ('<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>', "</tool_call>"),
    "mistral": ("[TOOL_CALLS]f%s", "[TOOL_CALLS]f{"),
    "mistral, with [ARGS]": ("[TOOL_CALLS]f[ARGS]%s", "[TOOL_CALLS]g[ARGS]{}"),
    "mistral, listed": ('[TOOL_CALLS] [{"name": "f", "arguments": %s}]', '[TOOL_CALLS] [{"name":'),
    "llama3": ('<|python_tag|>{"name": "f", "parameters": %s}', '}; {"name": "g", "parameters": {'),
    "deepseek_v3": (deepseek(f"function{mark('tool_sep')}f\n```json\n%s\n```"), "\n```"),
    "deepseek_v31": (deepseek(f"f{mark('tool_sep')}%s"), mark("tool_call_end")),
    "kimi_k2": (KIMI.replace("%", "").replace(JSON, "%s"), "<|tool_call_end|>"),
    "phi4_mini": ('functools[{"name": "f", "arguments": %s}]', '}]functools[{"'),
    "granite": ('<|tool_call|>[{"name": "f", "arguments": %s}]', "<tool_call>[{"),
    "gpt_oss": (HARMONY.replace(JSON, "%s"), "<|call|><|channel|>final<|message|>"),
}
assert {name.partition(",")[0] for name in NESTED} == {
    name for name, form in TOOL_FORMATS.items() if not (form.tags or form.is_python or name == OWN)
}


@pytest.mark.parametrize("name", sampled(NESTED, "hermes", "mistral", "deepseek_v3", "gpt_oss"))
@given(data=st.data())
def test_arguments_may_contain_the_marks_of_their_format(name, data):
    text, tricky = NESTED[name]
    texts = st.sampled_from([tricky, text.replace("%s", "{}"), '"', "\\", "}", "]"]) | st.text(
        max_size=5
    )
    value = st.recursive(
        texts | st.integers() | st.none() | st.booleans(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
        max_leaves=6,
    )
    arguments = data.draw(st.dictionaries(texts, value, max_size=3))
    is_ascii = data.draw(st.booleans())
    count = text.count("%s")
    text = text.replace("%s", json.dumps(arguments, ensure_ascii=is_ascii))
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=12))
    said = read(text, cuts, tools=name.partition(",")[0])
    assert [json.loads(call["function"]["arguments"]) for call in said["tool_calls"]] == (
        [arguments] * count
    )
    assert said["content"] is None


@pytest.mark.parametrize("name", [name for name in TOOL_FORMATS if TOOL_FORMATS[name].is_python])
@given(data=st.data())
def test_python_arguments_become_json(name, data):
    texts = st.sampled_from(["]", ")]", "<|python_end|>", "'", '"', "\\", "\n"]) | st.text(
        max_size=5
    )
    texts = texts.filter(lambda text: text.isprintable() or text == "\n")
    value = st.recursive(
        texts | st.integers() | st.none() | st.booleans(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
        max_leaves=6,
    )
    calls = data.draw(st.lists(st.dictionaries(st.sampled_from("abc"), value), min_size=1))
    written = [f"f({', '.join(f'{k}={v!r}' for k, v in call.items())})" for call in calls]
    text = f"[{', '.join(written)}]"
    if name == "llama4_pythonic" and data.draw(st.booleans()):
        text = f"<|python_start|>{text}<|python_end|>"
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=12))
    said = read(text, cuts, tools=name)
    assert [json.loads(call["function"]["arguments"]) for call in said["tool_calls"]] == calls


@pytest.mark.parametrize(
    "text",
    [
        "[1, 2]",
        "[see f()]",
        "[f(1)]",
        "[f(a=b)]",
        "[f(**a)]",
        "[f(a=1e999)]",
        "[",
        "[f(",
        "[f(a='",
        "[]",
    ],
)
def test_list_that_is_not_python_calls_is_content(text):
    text += " done"
    for cuts in ((), range(len(text))):
        assert read(text, cuts, tools="pythonic") == {"role": "assistant", "content": text}


# vLLM: tests/tool_parsers/test_mistral_tool_parser.py, test_qwen3coder_tool_parser.py and test_pythonic_tool_parser.py;
# Phi-4-mini's special tokens.
@pytest.mark.parametrize(
    ("name", "text", "calls", "content"),
    [
        ("mistral", '[TOOL_CALLS]add{"a": 3.5}[TOOL_CALLS]sub{"b": 6}', ["add", "sub"], None),
        ("mistral", 'Hello[TOOL_CALLS] [{"name": "add", "arguments":{"a": 1}}]', ["add"], "Hello"),
        ("mistral", '[TOOL_CALLS] [{"arguments":{"name": "John"}, "name": "age"}]', ["age"], None),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments":{}}]\nmore', ["f"], "more"),
        ("mistral", "[TOOL_CALLS] not json at all", [], "[TOOL_CALLS] not json at all"),
        ("qwen3_coder", TAGGED.removeprefix("<tool_call>\n"), ["get_weather"], None),
        ("phi4_mini", f"<|tool_call|>[{NAMED}]<|/tool_call|>", ["get_weather"], None),
        ("granite", f"[{NAMED}]", ["get_weather"], None),
        ("llama3", f"I look.<|python_tag|>{LLAMA}", ["get_weather"], "I look."),
        ("pythonic", "[f(role=None, is_done=true, n=-1)]", ["f"], None),
        ("deepseek_v31", f"Hm. {WRITTEN['deepseek_v31'][0]}", ["get_weather"] * 2, "Hm."),
        ("minimax_m2", '<invoke name="f"></invoke>', [], '<invoke name="f"></invoke>'),
        ("minimax_m2", "<minimax:tool_call> is a mark", [], "<minimax:tool_call> is a mark"),
    ],
)
def test_published_examples_are_parsed(name, text, calls, content):
    for cuts in ((), range(len(text))):
        said = read(text, cuts, tools=name)
        assert [call["function"]["name"] for call in said.get("tool_calls", [])] == calls
        assert said["content"] == content


@pytest.mark.parametrize("blank", ["", "\n", "\n\n"])
@pytest.mark.parametrize("prompt", ["", "<think>\n"])
def test_empty_reasoning_leaves_no_leading_whitespace(blank, prompt):
    text = f"{'' if prompt else '<think>'}{blank}</think>\n\nHello  there\n"
    for cuts in ((), range(len(text))):
        said = read(text, cuts, reasoning="think", prompt=prompt)
        assert said == {"role": "assistant", "content": "Hello  there\n"}


def test_marks_of_reasoning_in_the_answer_are_content():
    text = "<think>Hm.</think>Write <think> and </think>."
    assert read(text, reasoning="think")["content"] == "Write <think> and </think>."


# ── names ─────────────────────────────────────────────────────────────────────────────────────────

# vllm/tool_parsers/__init__.py, vllm/reasoning/__init__.py, sglang/srt/function_call/function_call_parser.py and
# sglang/srt/parser/reasoning_parser.py: the names of the ten most served families.
PEER_TOOLS = (
    "deepseek_v3 deepseek_v31 deepseek_v32 deepseek_v4 deepseekv3 deepseekv31 deepseekv32 deepseekv4 "
    "glm glm45 glm47 gpt-oss granite granite4 hermes kimi_k2 llama3 llama3_json llama4_json "
    "llama4_pythonic mimo minimax-m2 minimax_m2 mistral openai phi4_mini_json pythonic qwen qwen25 "
    "qwen3_coder qwen3_xml seed_oss step3p5 hf"
)
PEER_REASONING = (
    "deepseek-r1 deepseek-v3 deepseek-v4 deepseek_r1 deepseek_v3 deepseek_v4 ernie45 glm45 glm47 gpt-oss "
    "granite holo2 interns1 kimi kimi_k2 mimo minimax minimax_m2 mistral nemotron_3 nemotron_v3 olmo3 "
    "openai_gptoss qwen3 qwen3-thinking seed_oss step3 step3p5 hf"
)


def test_names_of_vllm_and_sglang_are_known():
    for name in PEER_TOOLS.split():
        assert reply_formats(name, "").tools is not None
    for name in PEER_REASONING.split():
        assert reply_formats("", name).reasoning is not None


def test_documented_parsers_are_those_of_the_tables():
    page = (Path(__file__).parents[2] / "docs" / "parsers.md").read_text()
    _, tools, reasoning = page.split("\n## ")[:3]
    for section, formats, aliases in (
        (tools, TOOL_FORMATS, TOOL_ALIASES),
        (reasoning, REASONING_FORMATS, REASONING_ALIASES),
    ):
        rows = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| `")]
        found = {name.strip(" `"): set(re.findall("`(.+?)`", others)) for name, others in rows}
        assert found == {
            name: {alias for alias, meant in aliases.items() if meant == name} for name in formats
        }


# ── the model's own template ──────────────────────────────────────────────────────────────────────

# Gemma 4's response template, as its checkpoints publish it.
GEMMA = {
    "defaults": {"role": "assistant"},
    "start_anchor": ["<|turn>model\n", "<tool_response|>"],
    "fields": {
        "thinking": {"open": "<|channel>thought\n", "close": "<channel|>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
            "close": "<tool_call|>",
            "repeats": True,
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            "transform": {
                "type": "function",
                "function": {"name": "{name}", "arguments": "{content}"},
            },
        },
        "content": {"close": ["<turn|>", "<|tool_response>", "<eos>"], "content": "text"},
    },
}
GEMMA_CALL = '<|tool_call>call:get_weather{city:<|"|>Paris; or Rome<|"|>,days:2}<tool_call|>'


def own(text: str, cuts=(), prompt="<|turn>model\n", **options) -> dict:
    make = reply_formats("hf", "hf").for_model(GEMMA).reply(prompt, TOOLS, **options)
    assert make is not None
    reply, ends = make(), sorted(cuts)
    pieces = [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]
    said = message([part for piece in pieces for part in reply.push(piece)] + reply.finish())
    for call in said.get("tool_calls", []):
        assert call.pop("id").startswith("call_")
    return said


@given(data=st.data())
def test_own_template_separates_reasoning_and_calls(data):
    text = f"<|channel>thought\nHm.\n<channel|>I look. {GEMMA_CALL}{GEMMA_CALL}<turn|>"
    said = own(text, data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    assert said == {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "Hm.",
        "tool_calls": [call_of()] * 2,
    }
    assert len(own(text, is_parallel=False)["tool_calls"]) == 1


def test_own_template_reads_the_end_of_the_prompt():
    said = own("Hm.<channel|>\n\nFour.<turn|>", prompt="Hi<|turn>model\n<|channel>thought\n")
    assert said == {"role": "assistant", "content": "Four.", "reasoning_content": "Hm."}


def test_call_that_the_own_template_cannot_parse_is_content():
    said = own("<|tool_call>call:get_weather{city:<tool_call|> ok<turn|>")
    assert said == {"role": "assistant", "content": "{city: ok"}


def test_own_template_has_marks_of_reasoning():
    formats = reply_formats("", "hf").for_model(GEMMA)
    assert formats.reasoning_marks() == ("<|channel>thought\n", "<channel|>")
    assert reply_formats("", "qwen3").for_model(None) == reply_formats("", "qwen3")


@pytest.mark.parametrize("template", [None, {}, {"fields": {}}, {"x_schema": {}}])
def test_missing_own_template_error_says_what_to_do(template):
    with pytest.raises(ConfigInvalid, match=r"response_template.*; name the parser"):
        reply_formats("hf", "").for_model(template)


def test_own_template_cannot_be_combined_with_a_parser():
    with pytest.raises(ConfigInvalid, match="set both to hf, or neither"):
        reply_formats("hermes", "hf")


# ── work ──────────────────────────────────────────────────────────────────────────────────────────

# Of each format: what begins something that never ends.
UNENDED = {
    "hermes": ("<tool_call>", '<tool_call>{"name": "f", "arguments": {"a": "', '<tool_call>{"'),
    "qwen3_coder": ("<tool_call>", "<tool_call><function=", "<function=f><parameter="),
    "seed_oss": ("<seed:tool_call>", "<seed:tool_call><function=f><parameter=a>"),
    "glm45": ("<tool_call>", "<tool_call>f<arg_key>", "<tool_call>f<arg_key>a</arg_key>"),
    "mistral": ("[TOOL_CALLS]", "[TOOL_CALLS][", "[TOOL_CALLS]f{", '[TOOL_CALLS]f{"a'),
    "llama3": ("", "{", '{"name": "f", "parameters": {', "<|python_tag|>"),
    "deepseek_v3": (
        mark("tool_calls_begin"),
        mark("tool_call_begin"),
        mark("tool_call_begin") + "f",
    ),
    "deepseek_v31": (mark("tool_calls_begin"), mark("tool_call_begin") + f"f{mark('tool_sep')}["),
    "kimi_k2": ("<|tool_call_begin|>", "<|tool_call_begin|>f<|tool_call_argument_begin|>x"),
    "gpt_oss": ("", "<|channel|>", "<|channel|>final<|message|>", HARMONY.partition("{")[0] + "["),
    "minimax_m2": ("<minimax:tool_call>", '<minimax:tool_call><invoke name="f"><parameter name="'),
    "deepseek_v32": (f"<{DSML}function_calls>", f'<{DSML}function_calls><{DSML}invoke name="'),
    "deepseek_v4": (f"<{DSML}tool_calls>", f'<{DSML}tool_calls><{DSML}invoke name="f">'),
    "pythonic": ("", "[", "[f", "[f(", "[f(a='", "[f(a=["),
    "llama4_pythonic": ("<|python_start|>", "<|python_start|>[f(a="),
    "phi4_mini": ("functools[", 'functools[{"name": "f", "arguments": {"a": ['),
    "granite": ("<|tool_call|>", '<|tool_call|>[{"name": "f", "arguments": {"a": "'),
}
assert set(UNENDED) == set(TOOL_FORMATS) - {OWN}


def parser_of(name: str) -> Reply:
    make = reply_formats(name, "gpt_oss" if name == "gpt_oss" else "think").reply("", TOOLS)
    assert make is not None
    return make()


def work(reply: Reply, text: str, size: int) -> int:
    """Calls of functions, the characters that they get, and those that their object has kept."""
    total = 0

    def count(frame, event, _):
        nonlocal total
        total += event in ("call", "c_call")
        if event == "call" and "frontend/replies" in frame.f_code.co_filename:
            kept = vars(frame.f_locals["self"]) if "self" in frame.f_locals else {}
            values = [*frame.f_locals.values(), *kept.values()]
            total += sum(len(value) for value in values if isinstance(value, str))

    sys.setprofile(count)
    try:
        for at in range(0, len(text), size):
            reply.push(text[at : at + size])
        reply.finish()
    finally:
        sys.setprofile(None)
    return total


@pytest.mark.parametrize(
    "name", sampled(UNENDED, "hermes", "qwen3_coder", "glm45", "mistral", "pythonic")
)
@pytest.mark.parametrize("filling", sampled(["\n", "x", "<", '"', "{", "opening"], "\n", "opening"))
def test_work_grows_linearly_with_the_text(name, filling):
    for opening in UNENDED[name]:
        unit = (opening or " ") if filling == "opening" else filling
        texts = [opening + unit * (length // len(unit)) for length in (2000, 4000)]
        small, large = (work(parser_of(name), text, 4) for text in texts)
        assert large < 2.3 * small
        assert large < 4 * MAX_HEAD * len(texts[1])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("glm45", "<tool_call>f<arg_key>" + "x" * 200_000),
        ("qwen3_coder", "<tool_call>" + "\n" * 200_000),
    ],
)
def test_long_unclosed_text_is_not_read_again(name, text):
    assert work(parser_of(name), text, 20) < 20 * len(text)


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("opening", ["", "<think>", "x</think>[", '[{"name": "f", "parameters": {'])
@pytest.mark.parametrize("filling", ["\n", "x", "<", '"', "</think"])
def test_work_on_forced_calls_grows_linearly(is_open, opening, filling):
    def parse(length: int) -> int:
        reply = AfterReasoning(ReasoningMarks("<think>", "</think>", is_open), ForcedCalls(None))
        return work(reply, opening + filling * (length // len(filling)), 4)

    assert parse(4000) < 2.3 * parse(2000)
