import json
import re

import pytest
import xgrammar
from hypothesis import given
from hypothesis import strategies as st
from xgrammar.testing import _is_grammar_accept_string as accepts

from tandem.frontend.grammars import (
    MAX_GRAMMAR_BYTES,
    after_thoughts,
    native_grammar,
    openai_grammar,
)
from tandem.frontend.reply_formats import Thoughts
from tandem.wire.errors import InvalidRequest
from tandem.wire.generation import Grammar

SCHEMA = {"type": "object", "properties": {"é": {"type": "integer"}}}
SCHEMA_TEXT = '{"type":"object","properties":{"é":{"type":"integer"}}}'
OF_SCHEMA = Grammar(kind="json_schema", text=SCHEMA_TEXT)
OF_REGEX = Grammar(kind="regex", text="a+")
OF_EBNF = Grammar(kind="ebnf", text='root ::= "a"')
ANY_OBJECT = Grammar(kind="json_object")


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({}, None),
        ({"json_schema": SCHEMA}, OF_SCHEMA),
        ({"json_schema": SCHEMA_TEXT}, OF_SCHEMA),
        ({"json_schema": {}}, Grammar(kind="json_schema", text="{}")),
        ({"json_schema": True}, Grammar(kind="json_schema", text="true")),
        ({"json_schema": " true "}, Grammar(kind="json_schema", text=" true ")),
        ({"regex": "a+"}, OF_REGEX),
        ({"ebnf": 'root ::= "a"'}, OF_EBNF),
        ({"json_schema": None, "regex": "", "ebnf": None}, None),
    ],
)
def test_all_apis_take_the_native_fields(fields, grammar):
    assert native_grammar(fields) == openai_grammar(fields) == grammar


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, ANY_OBJECT),
        ({"response_format": {"type": "json_object", "json_schema": {}}}, ANY_OBJECT),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            OF_SCHEMA,
        ),
        ({"guided_json": SCHEMA}, OF_SCHEMA),
        ({"guided_json": SCHEMA_TEXT}, OF_SCHEMA),
        ({"guided_regex": "a+"}, OF_REGEX),
        ({"guided_grammar": 'root ::= "a"'}, OF_EBNF),
        ({"guided_choice": ["a b", "c.d"]}, Grammar(kind="regex", text=r"(a b|c\.d)")),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, OF_SCHEMA),
        ({"structured_outputs": {"regex": "a+"}}, OF_REGEX),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, OF_EBNF),
        ({"structured_outputs": {"choice": ["a"]}}, Grammar(kind="regex", text="(a)")),
        ({"structured_outputs": {"json_object": True}}, ANY_OBJECT),
        ({"structured_outputs": {"json_object": False, "a_field_of_the_future": 1}}, None),
        ({"response_format": {"type": "text"}, "guided_regex": "a+"}, OF_REGEX),
    ],
)
def test_openai_bodies_take_three_dialects(fields, grammar):
    assert openai_grammar(fields) == grammar


@given(st.lists(st.text(min_size=1), min_size=1), st.text())
def test_a_choice_is_matched_by_its_texts_and_by_nothing_else(choices, other):
    pattern = re.compile(openai_grammar({"guided_choice": choices}).text)
    assert all(pattern.fullmatch(choice) for choice in choices)
    assert (pattern.fullmatch(other) is not None) == (other in choices)


LONG = "a" * (MAX_GRAMMAR_BYTES + 1)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"json_schema": "{"}, "json_schema: is not valid JSON"),
        ({"json_schema": "[" * 60000}, "json_schema: is not valid JSON"),
        ({"json_schema": '{"maximum": NaN}'}, "json_schema: is not valid JSON"),
        ({"json_schema": {"maximum": float("nan")}}, "json_schema: is not valid JSON"),
        ({"json_schema": "5"}, "json_schema: must be a JSON schema"),
        ({"json_schema": 5}, "json_schema: must be a JSON schema"),
        ({"json_schema": [SCHEMA]}, "json_schema: must be a JSON schema"),
        ({"json_schema": {"title": LONG}}, "json_schema: has 65549 bytes and may have at most"),
        ({"json_schema": LONG}, "json_schema: has 65537 bytes"),
        ({"regex": 5}, "regex: must be a string"),
        ({"regex": "é" * MAX_GRAMMAR_BYTES}, "regex: has 131072 bytes"),
        ({"ebnf": ["a"]}, "ebnf: must be a string"),
        ({"regex": "a", "guided_regex": "b"}, "regex and guided_regex: only one"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs and response_format: only one",
        ),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "only one of these"),
        ({"structured_outputs": "a"}, "structured_outputs: must be an object"),
        ({"structured_outputs": {"json_object": [1]}}, "json_object: must be true or false"),
        ({"structured_outputs": {"structural_tag": "a"}}, "structural_tag: is not valid JSON"),
        (
            {"structured_outputs": {"json": {}, "whitespace_pattern": " "}},
            "whitespace_pattern: not",
        ),
        (
            {"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
            "structured_outputs.disable_any_whitespace: not supported here",
        ),
        ({"guided_choice": []}, "guided_choice: must not be empty"),
        ({"guided_choice": "a"}, "guided_choice: must be a list of strings"),
        ({"guided_choice": ["a", 5]}, "guided_choice: must be a list of strings"),
        ({"guided_choice": ["a", ""]}, "guided_choice: must be a list of strings"),
        ({"guided_choice": ["é" * 1000] * 40}, "guided_choice: has 80041 bytes"),
        ({"response_format": "json_object"}, "response_format: must be an object"),
        ({"response_format": {}}, "response_format.type: is missing"),
        ({"response_format": {"type": ["x"]}}, "response_format.type: must be 'text'"),
        ({"response_format": {"type": "structural_tag"}}, "must have a format, or structures"),
        (
            {"response_format": {"type": "structural_tag", "structures": [{}], "triggers": []}},
            "each of structures must have begin, schema and end",
        ),
        ({"response_format": {"type": "json_schema"}}, "needs a json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format: type json_schema needs a json_schema with a schema",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_its_field(fields, sentence):
    with pytest.raises(InvalidRequest, match=re.escape(sentence)):
        openai_grammar(fields)


def test_a_schema_keeps_the_order_of_its_properties():
    schema = {"properties": {"z": {}, "a": {}}}
    assert list(json.loads(native_grammar({"json_schema": schema}).text)["properties"]) == [
        "z",
        "a",
    ]


# ── tags ─────────────────────────────────────────────────────────────────────────────────────────

NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TAG = {
    "type": "triggered_tags",
    "triggers": ["<f"],
    "tags": [
        {
            "type": "tag",
            "begin": "<f>",
            "content": {"type": "json_schema", "json_schema": NUMBERS},
            "end": "</f>",
        }
    ],
}
OLDER = {"structures": [{"begin": "<f>", "schema": NUMBERS, "end": "</f>"}], "triggers": ["<f"]}


def follows(grammar, text: str) -> bool:
    return accepts(xgrammar.Grammar.from_structural_tag(grammar.text), text)


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "structural_tag", "format": TAG}},
        {"response_format": {"type": "structural_tag", **OLDER}},
        {"structural_tag": json.dumps(OLDER)},
        {"structured_outputs": {"structural_tag": json.dumps({"format": TAG})}},
    ],
)
def test_a_structural_tag_has_two_forms_and_several_places(fields):
    grammar = openai_grammar(fields)
    assert json.loads(grammar.text) == {"type": "structural_tag", "format": TAG}
    assert follows(grammar, 'So: <f>{"a": 1}</f> done')
    assert not follows(grammar, 'So: <f>{"b": 1}</f>')


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        (Grammar(kind="json_schema", text=json.dumps(NUMBERS)), '{"a": 1}', '{"a": "x"}'),
        (Grammar(kind="json_object"), '{"b": 1}', "[1]"),
        (Grammar(kind="regex", text="a+"), "aa", "b"),
        (OF_EBNF, "a", "b"),
        (openai_grammar({"structural_tag": OLDER}), '<f>{"a": 1}</f>', '<f>{"a": "x"}</f>'),
    ],
    ids=["schema", "object", "regex", "ebnf", "tag"],
)
@pytest.mark.parametrize("is_open", [True, False])
def test_thoughts_come_before_what_a_grammar_binds(grammar, right, wrong, is_open):
    after = after_thoughts(grammar, Thoughts("<think>", "</think>", is_open), lambda _: False)
    thoughts = "Hm { [ so</think>\n\n" if is_open else "<think>Hm { [ so</think>\n\n"
    assert follows(after, thoughts + right)
    assert not follows(after, thoughts + wrong)
    assert follows(after, right) is not is_open
