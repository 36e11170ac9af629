"""Calls that a client forces: the grammar they follow, and the answer read back."""

import json

import pytest
import xgrammar
from xgrammar.testing import _is_grammar_accept_string as accepts

from tandem.frontend.tool_calls import message, read_choice
from tandem.wire.errors import InvalidRequest

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
