import json
import re

import pytest
import xgrammar
from hypothesis import given
from hypothesis import strategies as st
from xgrammar.testing import _is_grammar_accept_string as accepts

from tandem.frontend.chat import grammars
from tandem.frontend.chat.grammars import MAX_SENT_BYTES, after_reasoning
from tandem.frontend.replies.formats import ReasoningMarks
from tandem.frontend.schemas.budget import Budget
from tandem.wire.errors import InvalidRequest
from tandem.wire.generation import Grammar

SCHEMA = {"type": "object", "properties": {"é": {"type": "integer"}}}
SCHEMA_TEXT = '{"type":"object","properties":{"é":{"type":"integer"}}}'
OF_SCHEMA = Grammar(kind="json_schema", text=SCHEMA_TEXT)
OF_REGEX = Grammar(kind="regex", text="a+")
OF_EBNF = Grammar(kind="ebnf", text='root ::= "a"')
ANY_OBJECT = Grammar(kind="json_object")


def native_grammar(fields) -> Grammar | None:
    sent = grammars.native_grammar(fields)
    return sent and sent.served(Budget())


def openai_grammar(fields) -> Grammar | None:
    sent = grammars.openai_grammar(fields)
    return sent and sent.served(Budget())


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({}, None),
        ({"json_schema": SCHEMA}, OF_SCHEMA),
        ({"json_schema": SCHEMA_TEXT}, OF_SCHEMA),
        ({"json_schema": {}}, Grammar(kind="json_schema", text="{}")),
        ({"json_schema": True}, Grammar(kind="json_schema", text="{}")),
        ({"json_schema": " true "}, Grammar(kind="json_schema", text="{}")),
        ({"regex": "a+"}, OF_REGEX),
        ({"ebnf": 'root ::= "a"'}, OF_EBNF),
        ({"json_schema": None, "regex": "", "ebnf": None}, None),
    ],
)
def test_all_apis_accept_native_grammar_fields(fields, grammar):
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
def test_openai_bodies_accept_three_grammar_dialects(fields, grammar):
    assert openai_grammar(fields) == grammar


@given(st.lists(st.text(min_size=1), min_size=1), st.text())
def test_guided_choice_matches_exactly_its_strings(choices, other):
    pattern = re.compile(openai_grammar({"guided_choice": choices}).text)
    assert all(pattern.fullmatch(choice) for choice in choices)
    assert (pattern.fullmatch(other) is not None) == (other in choices)


LONG = "a" * (MAX_SENT_BYTES + 1)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"json_schema": "{"}, "json_schema: is not valid JSON"),
        ({"json_schema": "[" * 60000}, "json_schema: is not valid JSON"),
        ({"json_schema": '{"maximum": NaN}'}, "json_schema: is not valid JSON"),
        ({"json_schema": "5"}, "json_schema: must be a JSON schema"),
        ({"json_schema": 5}, "json_schema: must be true or false, a string or an object"),
        ({"json_schema": [SCHEMA]}, "json_schema: must be true or false, a string or"),
        ({"json_schema": {"title": LONG}}, "json_schema: has 65549 bytes; at most"),
        ({"json_schema": LONG}, "json_schema: has 65537 bytes"),
        ({"regex": 5}, "regex: must be a string"),
        ({"regex": "é" * MAX_SENT_BYTES}, "regex: has 131072 bytes"),
        ({"ebnf": ["a"]}, "ebnf: must be a string"),
        ({"regex": "a", "guided_regex": "b"}, "regex and guided_regex: send only one"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs and response_format: send only one",
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
        ({"guided_choice": []}, "guided_choice: must have at least 1 entry"),
        ({"guided_choice": "a"}, "guided_choice: must be a list"),
        ({"guided_choice": ["a", 5]}, "guided_choice.1: must be a string"),
        ({"guided_choice": ["a", ""]}, "guided_choice.1: must have at least 1 character"),
        ({"guided_choice": ["é" * 1000] * 40}, "guided_choice: has 80041 bytes"),
        ({"response_format": "json_object"}, "response_format: must be an object"),
        ({"response_format": {}}, "response_format.type: is missing"),
        (
            {"response_format": {"type": ["x"]}},
            "response_format.type: must be 'json_object', 'json",
        ),
        ({"response_format": {"type": "structural_tag"}}, "must have either format, or structures"),
        (
            {"response_format": {"type": "structural_tag", "structures": [{}], "triggers": []}},
            "each entry of structures must have begin, schema and end",
        ),
        ({"response_format": {"type": "json_schema"}}, "requires a json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format: type json_schema requires a json_schema with a schema",
        ),
    ],
)
def test_invalid_grammar_error_names_the_field(fields, sentence):
    with pytest.raises(InvalidRequest, match=re.escape(sentence)):
        openai_grammar(fields)


def test_schema_keeps_its_property_order():
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
def test_structural_tag_has_two_forms_in_several_fields(fields):
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
def test_reasoning_precedes_the_grammar(grammar, right, wrong, is_open):
    after = after_reasoning(
        grammar, ReasoningMarks("<think>", "</think>", is_open), lambda _: False
    )
    thoughts = "Hm { [ so</think>\n\n" if is_open else "<think>Hm { [ so</think>\n\n"
    assert follows(after, thoughts + right)
    assert not follows(after, thoughts + wrong)
    assert follows(after, right) is not is_open


# ── regular expressions ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("line_break", ["\n", "\r", "\u2028", "\u2029"])
@pytest.mark.parametrize(
    "fields",
    [
        {"regex": "a.b"},
        {"guided_regex": "a.b"},
        {"structured_outputs": {"regex": "a.b"}},
        {"structural_tag": {"format": {"type": "regex", "pattern": "a.b"}}},
    ],
)
def test_dot_matches_no_line_break(fields, line_break):
    grammar = openai_grammar(fields)
    compiled = (
        xgrammar.Grammar.from_regex(grammar.text)
        if grammar.kind == "regex"
        else xgrammar.Grammar.from_structural_tag(grammar.text)
    )
    assert accepts(compiled, "axb")
    assert accepts(compiled, 'a"b')
    assert not accepts(compiled, f"a{line_break}b")


@pytest.mark.parametrize("regex", [r"a\.b", "[.]", r"[\].]", r"\\[a.]", "é"])
def test_dot_that_is_a_character_stays(regex):
    assert native_grammar({"regex": regex}).text == regex


# ── schemas ──────────────────────────────────────────────────────────────────────────────────────

REFUSED = {"type": "array", "uniqueItems": True}


@pytest.mark.parametrize(
    "fields",
    [
        {"json_schema": REFUSED},
        {"json_schema": json.dumps(REFUSED)},
        {"guided_json": REFUSED},
        {"structured_outputs": {"json": REFUSED}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": REFUSED}}},
        {"structural_tag": {"format": {"type": "json_schema", "json_schema": REFUSED}}},
        {"structural_tag": OLDER | {"structures": [{"begin": "", "schema": REFUSED, "end": ""}]}},
    ],
)
def test_schema_with_a_keyword_that_is_not_served_is_refused_in_each_field(fields):
    with pytest.raises(InvalidRequest, match="uniqueItems at # is served only"):
        openai_grammar(fields)


def test_fields_are_checked_before_schemas_are_served():
    with pytest.raises(InvalidRequest, match="json_schema and guided_json: send only one of these"):
        openai_grammar({"json_schema": REFUSED, "guided_json": REFUSED})


@pytest.mark.parametrize("kind", ["json_schema", "structural_tag"])
def test_schema_that_grows_beyond_what_nodes_compile_is_refused(kind):
    values = [f"{'v' * 60}{number}" for number in range(400)]
    schema = {"properties": {"x": {"enum": values}}, "anyOf": [{"maxProperties": 9}] * 12}
    fields = {"json_schema": schema}
    if kind == "structural_tag":
        fields = {kind: {"format": {"type": "json_schema", "json_schema": schema}}}
    with pytest.raises(InvalidRequest, match=rf"{kind}: has \d+ bytes when it is rewritten"):
        native_grammar(fields)


def test_schema_in_a_structural_tag_is_rewritten():
    schema = {"type": "array", "minItems": 1}
    grammar = openai_grammar(
        {"structural_tag": {"format": {"type": "json_schema", "json_schema": schema}}}
    )
    assert follows(grammar, '["a"]')
    assert not follows(grammar, "[]")


def test_json_with_a_large_number_of_values_is_read_quickly():
    values = [f"value {number}" for number in range(4000)]
    assert len(json.loads(native_grammar({"json_schema": {"enum": values}}).text)["enum"]) == 4000
