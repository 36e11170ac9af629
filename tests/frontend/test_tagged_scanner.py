"""Incremental parsing of calls with tags: equals transformers' result for the complete text, for any split."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils.chat_parsing import parse_response

from tandem.frontend.replies.parser import reply_formats
from tandem.frontend.replies.tool_calls import message

TYPES = {
    "text": {"type": "string"},
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
# Of each format: the call's opening and closing, an argument, and transformers' template for all of them.
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
        r"<arg_key>(?P<key>[^<]+)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
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


def told(name: str, text: str, cuts=(), tools=TOOLS) -> dict:
    make = reply_formats(name, "").reply("", tools)
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
def test_tagged_arguments_equal_transformers_result(name, tool, arguments, data):
    opening, closing, argument, *_ = FORMATS[name]
    body = "\n".join(argument.format(key, value) for key, value in arguments)
    text = opening.format(tool) + body + closing
    call = told(name, text, data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    assert call["name"] == tool
    assert json.loads(call["arguments"]) == expected(name, text)


@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data())
def test_broken_tags_lose_no_text_at_any_split(name, data):
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


@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data())
def test_json_value_may_contain_the_marks_of_its_call(name, data):
    opening, closing, argument, *_ = FORMATS[name]
    mark = st.sampled_from([closing, argument.partition("{}")[0], argument.rpartition("{}")[2]])
    value = data.draw(st.lists(mark | st.text(max_size=4), max_size=4))
    body = argument.format("list", json.dumps(value)) + argument.format("days", "2")
    text = opening.format("f") + body + closing
    call = told(name, text, data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    assert json.loads(call["arguments"]) == {"list": value, "days": 2}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("value", ['["a', '{"a": "b', "{'a': \"b'}"])
def test_unclosed_string_in_a_value_ends_at_the_closing_tag(name, value):
    opening, closing, argument, *_ = FORMATS[name]
    text = opening.format("f") + argument.format("list", value) + argument.format("days", "2")
    for cuts in ((), range(len(text))):
        call = told(name, text + closing, cuts)
        assert json.loads(call["arguments"]) == {"list": value, "days": 2}


@pytest.mark.parametrize("name", FORMATS)
def test_text_value_may_contain_the_marks_of_its_call(name):
    opening, closing, argument, *_ = FORMATS[name]
    text = opening.format("f") + argument.format("text", closing) + closing
    assert json.loads(told(name, text)["arguments"]) == {"text": closing}


ADDRESS = {"type": "object", "properties": {"city": {"type": "string"}}}
WITHOUT_TYPE = {
    "reference": ({"$ref": "#/$defs/Address"}, '{"city": "Rome"}', {"city": "Rome"}),
    "allOf": ({"allOf": [{"$ref": "#/$defs/Address"}]}, "{}", {}),
    "optional": ({"anyOf": [{"$ref": "#/$defs/Address"}, {"type": "null"}]}, "{}", {}),
    "optional, null": ({"anyOf": [{"$ref": "#/$defs/Address"}, {"type": "null"}]}, "null", None),
    "reference to a reference": ({"$ref": "#/$defs/a~1b"}, "[1]", "[1]"),
    "loop": ({"$ref": "#/$defs/Loop"}, "[1]", [1]),
    "missing reference": ({"$ref": "#/$defs/Nothing/x"}, "5", "5"),
    "remote reference": ({"$ref": "https://example.com/a"}, "[1]", [1]),
    "enum": ({"enum": [1, 2]}, "2", 2),
    "enum of texts": ({"enum": ["1", "2"]}, "2", "2"),
    "enum of both": ({"enum": ["auto", 2, None]}, "auto", "auto"),
    "const": ({"const": 5}, "5", 5),
    "const null": ({"const": None}, "null", None),
    "empty, number": ({}, "5", "5"),
    "empty, list": ({}, ' [1, "a"]', [1, "a"]),
    "empty, no JSON": ({}, "[a]", "[a]"),
    "empty, NaN": ({}, "[NaN]", "[NaN]"),
    "true": (True, "{}", {}),
    "wrong": ({"enum": 5, "anyOf": 5, "type": 5}, "5", "5"),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("case", WITHOUT_TYPE)
def test_type_of_an_argument_may_be_elsewhere_in_its_schema(name, case):
    schema, value, expected = WITHOUT_TYPE[case]
    defs = {"Address": ADDRESS, "Loop": {"$ref": "#/$defs/Loop"}, "a/b": {"$ref": "#/$defs/Text"}}
    parameters = {"properties": {"a": schema}, "$defs": defs | {"Text": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    opening, closing, argument, *_ = FORMATS[name]
    text = opening.format("f") + argument.format("a", value) + closing
    for cuts in ((), range(len(text))):
        assert json.loads(told(name, text, cuts, tools)["arguments"]) == {"a": expected}
