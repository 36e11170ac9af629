"""Calls with tags, as they are written: what transformers makes of the whole, however the text is cut."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils.chat_parsing import parse_response

from tandem.frontend.reply_parser import reply_formats
from tandem.frontend.tool_calls import message

TYPES = {
    "text": {"type": "string"},
    "any": {},
    "days": {"type": "integer"},
    "ratio": {"type": ["number", "null"]},
    "flag": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    "list": {"type": "array"},
    "maybe": {"type": "string", "nullable": True},
}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": {"properties": TYPES}}},
    {"type": "function", "function": {"name": "bare"}},
]
# Of each format: the call's opening and closing, an argument, and how transformers reads all of them.
FORMATS = {
    "qwen3_coder": (
        "<tool_call>\n<function={}>",
        "</function>\n</tool_call>",
        "<parameter={}>{}</parameter>",
        r"<tool_call>\n<function=(?P<name>[^>]+)>",
        r"<parameter=(?P<key>[^>]+)>\n?(?P<value>.*?)\n?</parameter>",
    ),
    "glm45": (
        "<tool_call>{}\n",
        "</tool_call>",
        "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>",
        r"<tool_call>(?P<name>[^\s<]+)",
        r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
    ),
}
VALUES = st.sampled_from(
    [*("2", "2.0", "1e999", "NaN", "true", "null", " null\n", '[1, "a"]', "[", "\n", "\n\n", '"\\')]
) | st.text(max_size=8)


def expected(name: str, text: str) -> dict:
    _, closing, _, opening, pattern = FORMATS[name]
    region = {
        "open_pattern": opening,
        "close": closing,
        "content": "xml-inline",
        "content_args": {"tag_pattern": pattern},
        "transform": {"name": "{name}", "function": {"name": "{name}", "arguments": "{content}"}},
    }
    template = {"fields": {"call": region}, "start_anchor": "\0"}
    arguments: dict = parse_response(text, template, prefix="", tools=TOOLS)["call"]["function"]
    return arguments["arguments"]


def told(name: str, text: str, cuts=()) -> dict:
    make = reply_formats(name, "").reply("", TOOLS)
    assert make is not None
    reply, ends = make(), sorted(cuts)
    pieces = [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]
    said = message([part for piece in pieces for part in reply.push(piece)] + reply.finish())
    [call] = said["tool_calls"]
    return call["function"] | {"content": said["content"]}


@pytest.mark.parametrize("name", FORMATS)
@given(
    tool=st.sampled_from(["f", "bare", "unknown"]),
    arguments=st.lists(st.tuples(st.sampled_from([*TYPES, "other"]), VALUES), max_size=4),
    data=st.data(),
)
def test_arguments_are_what_transformers_reads_at_the_end(name, tool, arguments, data):
    opening, closing, argument, *_ = FORMATS[name]
    body = "\n".join(argument.format(key, value) for key, value in arguments)
    text = opening.format(tool) + body + closing
    call = told(name, text, data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    assert call["name"] == tool
    assert json.loads(call["arguments"]) == expected(name, text)


@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data())
def test_broken_tags_lose_no_text_and_are_read_the_same_however_they_are_cut(name, data):
    opening, closing, argument, *_ = FORMATS[name]
    marks = [*argument.replace("{}", " ").split(), argument.format("text", "Rome"), "days", "\n"]
    pieces = data.draw(st.lists(st.sampled_from(marks) | st.text("ab<>/\n", max_size=3)))
    text = opening.format("f") + "".join(pieces) + closing
    call = told(name, text)
    assert told(name, text, data.draw(st.lists(st.integers(0, len(text)), max_size=12))) == call
    try:
        assert json.loads(call["arguments"]) == expected(name, text)
    except json.JSONDecodeError:
        *whole, _ = json.loads(call["arguments"] + '"}', object_pairs_hook=list)
        assert dict(whole) == expected(name, text)
    shown = call["arguments"] + (call["content"] or "")
    for char in "ab":
        assert shown.count(char) >= sum(piece.count(char) for piece in pieces if piece not in marks)
