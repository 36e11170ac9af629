"""Calls and thoughts found in what models write: for each format, however the text is cut."""

import json

import pytest
import xgrammar
from hypothesis import given
from hypothesis import strategies as st
from xgrammar.builtin_structural_tag import get_model_structural_tag
from xgrammar.testing import _is_grammar_accept_string as accepts

from tandem.frontend.reply_formats import REASONING_FORMATS, TOOL_FORMATS
from tandem.frontend.reply_parser import reply_formats
from tandem.frontend.tool_calls import Part, message
from tandem.wire.errors import ConfigInvalid

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
# What a model of each format writes, and how much of it is calls.
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
}
# The same formats as xgrammar knows them, with a call as its grammars allow it.
KNOWN_ELSEWHERE = {
    "hermes": ("qwen_3", f"<tool_call>\n{NAMED}\n</tool_call>"),
    "qwen3_coder": ("qwen_3_5", TAGGED),
    "glm45": ("glm_4_7", GLM.replace("\n", "")),
    "llama3": ("llama", LLAMA),
    "deepseek_v3": ("deepseek_r1", WRITTEN["deepseek_v3"][0]),
    "deepseek_v31": ("deepseek_v3_1", WRITTEN["deepseek_v31"][0].replace("\n", "")),
    "kimi_k2": ("kimi", KIMI),
    "gpt_oss": ("harmony", HARMONY.replace(" <|con", "<|con")),
}


assert set(WRITTEN) == set(TOOL_FORMATS)


def parts_of(text: str, cuts=(), *, tools="", thoughts="", prompt="") -> list[Part]:
    make = reply_formats(tools, thoughts).reply(prompt, TOOLS)
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
def test_calls_are_found(name):
    text, count = WRITTEN[name]
    expected = {"role": "assistant", "content": None, "tool_calls": [call_of()] * count}
    assert read(text, tools=name) == expected
    reply = reply_formats(name, "").reply("", TOOLS)()
    reply.push(text)
    reply.finish()
    assert reply.finish_reason == "tool_calls"


@pytest.mark.parametrize("name", KNOWN_ELSEWHERE)
def test_a_call_is_written_as_others_know_the_format(name):
    model, text = KNOWN_ELSEWHERE[name]
    tag = get_model_structural_tag(model, TOOLS, reasoning="disabled")
    assert accepts(xgrammar.Grammar.from_structural_tag(tag), text)
    assert read(text, tools=name)["tool_calls"][0] == call_of()


@pytest.mark.parametrize("name", WRITTEN)
@given(data=st.data())
def test_however_a_call_is_cut_it_is_the_same(name, data):
    head = "" if name in ("llama3", "gpt_oss") else "Let me look. "
    text = head + WRITTEN[name][0]
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=12))
    assert read(text, cuts, tools=name) == read(text, tools=name)


@pytest.mark.parametrize("name", WRITTEN)
@given(data=st.data())
def test_whatever_is_written_is_read_and_the_same_however_it_is_cut(name, data):
    whole = WRITTEN[name][0]
    text = whole[: data.draw(st.integers(0, len(whole)))] + data.draw(st.text(max_size=20))
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    assert read(text, cuts, tools=name) == read(text, tools=name)


@pytest.mark.parametrize("text", ["Hello\n", " two\n\nlines  ", "", "a < b, <tool", "[1, 2]"])
@pytest.mark.parametrize("name", [name for name in WRITTEN if name != "gpt_oss"])
def test_text_without_calls_is_content_as_it_came(name, text):
    assert read(text, tools=name) == {"role": "assistant", "content": text}


def test_a_call_that_is_not_json_is_told_as_content():
    for body in ("{'name': 1}", "[" * 5000, '{"arguments": {}}', "7"):
        said = read(f"<tool_call>{body}</tool_call>", tools="hermes")
        assert said == {"role": "assistant", "content": body}
    assert read('{"a": 1}', tools="llama3")["content"] == '{"a": 1}'


@pytest.mark.parametrize("depth", [900, 5_000, 100_000])
def test_an_argument_nested_without_end_loses_no_text(depth):
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": {}}}]
    tools[0]["function"]["parameters"] = {"properties": {"city": {"type": "array"}}}
    reply = reply_formats("qwen3_coder", "").reply("", tools)()
    text = TAGGED.replace("Paris; or Rome", "[" * depth + "]" * depth)
    parts = [*reply.push(text[:100]), *reply.push(text[100:]), *reply.push("!"), *reply.finish()]
    said = "".join(part.text for part in parts)
    assert (said.count("["), said[-1]) == (depth, "!")


@pytest.mark.parametrize("name", [name for name in REASONING_FORMATS if name != "gpt_oss"])
def test_thoughts_are_told_apart(name):
    shape = REASONING_FORMATS[name]
    opening, closing = shape.opening, shape.fields["reasoning_content"]["close"]
    expected = {"role": "assistant", "content": "Four.", "reasoning_content": "2 + 2"}
    assert read(f"{opening}\n2 + 2\n{closing}\n\nFour.", thoughts=name) == expected
    # As templates that begin the thoughts themselves leave it to the model.
    assert read(f"\n2 + 2\n{closing}\n\nFour.", thoughts=name, prompt=f"...{opening}\n") == expected
    assert read("Four.", thoughts=name) == {"role": "assistant", "content": "Four."}


@given(data=st.data())
def test_however_thoughts_and_calls_are_cut_they_are_the_same(data):
    text = f"<think>\n I see:\n</think>\n\nOne moment. \n<tool_call>{NAMED}</tool_call>\n"
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=12))
    said = read(text, cuts, tools="hermes", thoughts="qwen3")
    assert said == {
        "role": "assistant",
        "content": "One moment.",
        "reasoning_content": "I see:",
        "tool_calls": [call_of()],
    }


def test_a_call_in_thoughts_is_not_made():
    said = read(f"<think><tool_call>{NAMED}</tool_call>", tools="hermes", thoughts="deepseek-r1")
    assert "tool_calls" not in said


def test_messages_on_channels_are_told_apart():
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
        "<|channel|>final<|message|>Four.<|return|>"
    )
    expected = {"role": "assistant", "content": "Four.", "reasoning_content": "Hm."}
    assert read(text, tools="gpt-oss", thoughts="gpt-oss") == expected
    said = read(text.partition("<|start|>")[0] + "<|start|>assistant" + HARMONY, tools="openai")
    assert said["tool_calls"] == [call_of()]


BEFORE = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"


@pytest.mark.parametrize("before", ["", BEFORE, PREAMBLE, BEFORE + PREAMBLE])
@pytest.mark.parametrize("channel", ["commentary", "analysis"])
@pytest.mark.parametrize("kind", ["", " json", " <|constrain|>json", "<|constrain|>json"])
def test_a_recipient_may_stand_in_the_role_or_on_the_channel(before, channel, kind):
    end = f"{kind}<|message|>{JSON}<|call|>"
    by_role = f"{before} to=functions.get_weather<|channel|>{channel}{end}"
    by_channel = f"{before}<|channel|>{channel} to=functions.get_weather{end}"
    for text in (by_role, by_channel):
        said = read(text, range(len(text)), tools="gpt-oss", thoughts="gpt-oss")
        assert said["tool_calls"] == [call_of()]
        assert said.get("reasoning_content", "") == ("Hm." if BEFORE in before else "")
        assert (said["content"] or "") == ("I look." if PREAMBLE in before else "")
        assert read(text, tools="gpt-oss", thoughts="gpt-oss") == said


def test_nothing_is_looked_for_where_nothing_was_asked_for():
    assert reply_formats("", "").reply("", TOOLS) is None
    assert reply_formats("hermes", "").reply("", []) is None
    assert reply_formats("", "think").reply("", TOOLS, is_split=False) is None


def test_an_unknown_format_is_named():
    with pytest.raises(ConfigInvalid, match=r"--tool-call-parser: 'nosuch' .*hermes"):
        reply_formats("nosuch", "")
    with pytest.raises(ConfigInvalid, match=r"--reasoning-parser: 'nosuch' .*think"):
        reply_formats("", "nosuch")


@pytest.mark.parametrize("name", WRITTEN)
def test_the_name_of_a_call_comes_first_and_its_arguments_as_they_are_written(name):
    text, count = WRITTEN[name]
    parts = parts_of(text, range(1, len(text)), tools=name)
    assert {part.kind for part in parts} == {"tool_call"}
    for index in range(count):
        first, *others = [part for part in parts if part.index == index]
        assert (first.name, first.text) == ("get_weather", "")
        assert "".join(part.text for part in others) == JSON
        # Between tags a key comes at once.
        longest = len(', "days": ') if name in ("qwen3_coder", "glm45") else 1
        assert max(len(part.text) for part in others) == longest


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45"])
def test_a_call_with_tags_may_be_the_only_one_and_have_a_number(name):
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
        ("glm45", f"<tool_call>{'x' * 300}</tool_call>", "x" * 300, []),
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
def test_what_is_broken_in_a_call_with_tags_is_not_lost(name, text, content, calls):
    said = read(text, range(len(text)), tools=name)
    assert [call["function"]["arguments"] for call in said.get("tool_calls", [])] == calls
    assert (said["content"] or "") == (text if content is None else content)


@pytest.mark.parametrize("arguments", ["", "null", "[1]", '{"a": '])
def test_a_call_whose_arguments_are_no_object_is_told_at_its_end(arguments):
    text = KIMI.replace(JSON, arguments)
    [first, *_] = read(text, tools="kimi_k2")["tool_calls"]
    assert first["function"]["name"] == "get_weather"
    assert first["function"]["arguments"] == (arguments or "{}")
