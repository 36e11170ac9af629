"""JSON schemas of structured output: a text that the grammar allows is valid, or the schema is refused by name."""

import cProfile
import json
import math
import re
import tracemalloc
from pathlib import Path

import jsonschema_specifications
import numpy as np
import pytest
import xgrammar
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from xgrammar.testing import _is_grammar_accept_string as accepts

from tandem.engine.grammar.compiler import Library, compile_text
from tandem.engine.grammar.matcher import GrammarState
from tandem.frontend.schemas import keywords, rewriting
from tandem.frontend.schemas.budget import MAX_STEPS, Budget
from tandem.frontend.schemas.keywords import SchemaRefused
from tandem.frontend.schemas.shapes import PLAIN
from tandem.frontend.schemas.string_formats import PATTERNS
from tandem.wire.generation import MAX_GRAMMAR_BYTES, Grammar
from tests.frontend.schema_texts import EMITTED

TEXT, WHOLE, NULL = {"type": "string"}, {"type": "integer"}, {"type": "null"}
FEATURES = Path(__file__).resolve().parents[2] / "docs" / "features.md"


def served(schema) -> dict:
    return rewriting.served(schema, Budget())


def allows(schema, text: str) -> bool:
    return accepts(
        xgrammar.Grammar.from_json_schema(json.dumps(served(schema)), max_whitespace_cnt=20), text
    )


def under(schema) -> dict:
    return {"type": "object", "properties": {"x": schema}, "required": ["x"]}


# ── what people send ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", EMITTED)
def test_emitted_schema_is_held(name):
    schema, valid, invalid = EMITTED[name]
    assert {text: allows(schema, text) for text in valid} == dict.fromkeys(valid, True)
    assert {text: allows(schema, text) for text in invalid} == dict.fromkeys(invalid, False)


# ── keywords ─────────────────────────────────────────────────────────────────────────────────────

PARTLY_SERVED = {
    "oneOf": {"oneOf": [WHOLE, {"type": "number"}]},
    "pattern": {"type": "string", "pattern": "(?=a)b"},
    "patternProperties": {"type": "object", "patternProperties": {"^a": WHOLE, "b$": TEXT}},
    "propertyNames": {
        "type": "object",
        "propertyNames": {"pattern": "^a"},
        "patternProperties": {"b": WHOLE},
    },
    "minProperties": {"type": "object", "minProperties": 2},
    "multipleOf": {"type": "number", "multipleOf": 0.01},
    "contains": {"type": "array", "contains": TEXT},
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "not": {"type": "string", "not": {"const": "a"}},
    "if": {"if": {"required": ["a"]}, "then": {"required": ["b"]}},
}


@pytest.mark.parametrize(
    ("options", "is_served"),
    [
        ([WHOLE, TEXT], True),
        ([WHOLE, {"type": "number"}], False),
        ([{"const": 1}, {"enum": [2, "a"]}], True),
        ([{"const": 1}, {"enum": [2, 1.0]}], False),
        ([TEXT, {"properties": {"a": WHOLE}}], False),
        ([TEXT, {"properties": {"a": False}, "required": ["a"]}], False),
        ([TEXT, under(WHOLE)], True),
        ([under(WHOLE), under(TEXT)], True),
        ([under({"const": "a"}), under({"const": "b"})], True),
        ([under(TEXT), under({"const": "b"})], False),
        ([under(WHOLE), {"type": "object", "properties": {"y": WHOLE}, "required": ["y"]}], True),
        ([under(WHOLE), {"type": "object", "properties": {"y": WHOLE}}], False),
        (
            [
                under(WHOLE),
                {"type": "object", "properties": {"y": WHOLE}, "additionalProperties": False},
            ],
            True,
        ),
    ],
)
def test_one_of_is_served_if_its_branches_exclude_each_other(options, is_served):
    if is_served:
        assert served({"oneOf": options})
    else:
        with pytest.raises(SchemaRefused, match="oneOf at # is served only"):
            served({"oneOf": options})


@pytest.mark.parametrize("keyword", PARTLY_SERVED)
def test_keyword_that_cannot_be_held_is_refused_by_name_and_path(keyword):
    with pytest.raises(SchemaRefused, match=re.escape(f"{keyword} at #/properties/x ")):
        served(under(PARTLY_SERVED[keyword]))


def test_every_keyword_of_the_specification_is_in_one_table():
    tables = [keywords.SERVED, keywords.PARTLY.keys(), keywords.REFUSED, keywords.ANNOTATIONS]
    listed = frozenset().union(*tables)
    assert sum(map(len, tables)) == len(listed)
    specified = {
        keyword
        for uri, resource in jsonschema_specifications.REGISTRY.items()
        if "draft/2020-12" in uri or "draft-07" in uri
        for keyword in resource.contents.get("properties", {})
    }
    assert len(specified) > 50
    assert specified - listed <= {"$dynamicRef"} | {"$recursiveAnchor"}
    assert listed >= PLAIN


def test_documentation_lists_the_keywords_of_the_code():
    text = FEATURES.read_text()
    rows = re.findall(r"^\| (served|refused|annotations)[^|]* \| (.*) \|$", text, re.MULTILINE)
    listed = {name: set() for name, _ in rows}
    for name, cell in rows:
        listed[name] |= set(re.findall(r"`([^`]+)`", cell))
    assert listed == {
        "served": keywords.SERVED,
        "refused": keywords.REFUSED,
        "annotations": keywords.ANNOTATIONS,
    }
    for keyword, condition in keywords.PARTLY.items():
        assert f"| `{keyword}` | {condition} |" in text
    formats = re.search(r"^- Formats: (.*)\.$", text, re.MULTILINE)[1]
    assert set(re.findall(r"`([^`]+)`", formats)) == PATTERNS.keys()


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"allOf": [WHOLE, {"minimum": 4}]}, "4", "3"),
        ({"allOf": [{"properties": {"a": WHOLE}}, {"required": ["a"]}]}, '{"a":1}', "{}"),
        (
            {
                "properties": {"a": WHOLE, "b": WHOLE},
                "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
            },
            '{"b":1}',
            "{}",
        ),
        ({"type": "object", "properties": {"a": WHOLE}, "required": ["z"]}, '{"z":1}', '{"a":1}'),
        (
            {"properties": {"a": WHOLE, "b": TEXT}, "dependentRequired": {"a": ["b"]}},
            '{"a":1,"b":""}',
            '{"a":1}',
        ),
        (
            {"properties": {"a": WHOLE, "b": TEXT}, "not": {"required": ["a", "b"]}},
            '{"a":1}',
            '{"a":1,"b":""}',
        ),
        ({"type": ["object", "null"], "not": {"required": ["a"]}}, '{"b":1}', "null"),
        ({"type": "array", "contains": {}}, "[1]", "[]"),
        ({"type": "array", "minContains": 2, "items": TEXT}, "[]", "[1]"),
        ({"$ref": "#/$defs/a", "minimum": 5, "$defs": {"a": WHOLE}}, "5", "4"),
        ({"$ref": "#b", "$defs": {"a": {"$anchor": "b", **WHOLE}}}, "5", '"b"'),
        ({"$dynamicRef": "#b", "$defs": {"a": {"$dynamicAnchor": "b", **WHOLE}}}, "5", '"b"'),
        (
            {"properties": {"a": {"$id": "x", "$ref": "#/$defs/b", "$defs": {"b": NULL}}}},
            '{"a":null}',
            '{"a":1}',
        ),
        ({"type": ["integer", "string"], "enum": ["a", 1, None]}, "1", "null"),
        ({"enum": [1, 2, 3], "not": {"enum": [3]}, "minimum": 2}, "2", "3"),
        ({"minimum": 5}, "5", "4"),
        ({"type": "integer", "minimum": 0.5, "maximum": 1e30}, "1", "0"),
        ({"type": "number", "minimum": 0, "exclusiveMinimum": True}, "1", "0"),
        ({"type": "string", "pattern": "^u_[a-z]*$", "maxLength": 4}, '"u_ab"', '"u_abc"'),
        ({"type": "string", "format": "ipv4", "minLength": 7}, '"1.2.3.4"', '"abcdefg"'),
        (
            {"type": "string", "pattern": "^[a-z]{1,200}$"},
            json.dumps("a" * 200),
            json.dumps("a" * 201),
        ),
        ({"type": "string", "maxLength": 1}, '"a"', '"\x01"'),
        ({"propertyNames": {"pattern": "^[a-z]+$"}, "required": ["a"]}, '{"a":1}', '{"A":1}'),
        ({"type": "object", "patternProperties": {'^"$': WHOLE}}, '{"\\"":1}', '{""":1}'),
        ({"type": "object", "patternProperties": {"a": WHOLE}}, '{"bab":1}', '{"bab":""}'),
        ({"type": "array", "minItems": 2}, "[1,null]", "[1]"),
        ({"type": "array", "maxItems": 1}, '["a"]', "[1,2]"),
        ({"type": "array", "prefixItems": [True], "minItems": 2}, "[1,2]", "[1]"),
        ({"type": "object", "minProperties": 1}, '{"a":1}', "{}"),
    ],
)
def test_keyword_that_the_library_ignores_is_held(schema, valid, invalid):
    assert allows(schema, valid)
    assert not allows(schema, invalid)
    assert (
        Draft202012Validator(schema).is_valid(json.loads(valid))
        or schema.get("exclusiveMinimum") is True
    )


@pytest.mark.parametrize("least", [0, 1])
def test_array_is_closed_after_its_prefix_unless_it_needs_more_items(least):
    schema = {"type": "array", "prefixItems": [WHOLE], "minItems": least}
    assert allows(schema, "[1]")
    assert not allows(schema, "[1,2]")


def test_unknown_keywords_and_annotations_assert_nothing():
    noted = dict.fromkeys(keywords.ANNOTATIONS, "x") | {
        "x-foo": 1,
        "nullable": True,
        "discriminator": 5,
    }
    assert served(noted) == {}
    assert served(noted | WHOLE) == WHOLE


@pytest.mark.parametrize(
    ("schema", "sentence"),
    [
        ({"properties": []}, "properties at # must be an object"),
        ({"minimum": None}, "minimum at # must be a number"),
        ({"type": "string", "minLength": -1}, "minLength at # must be a non-negative integer"),
        ({"type": "any"}, "type at # is 'any', which is no type"),
        ({"required": True}, "required at # must be an array of strings"),
        ({"items": {"anyOf": 5}}, "anyOf at #/items must be an array"),
        (
            {"properties": {"a/b": 5}},
            "the schema at #/properties/a~1b must be an object or a boolean",
        ),
        ({"minimum": 10**400}, "minimum at # must be a finite number"),
        ({"exclusiveMaximum": -(10**400)}, "exclusiveMaximum at # must be a finite number"),
        ({"minimum": math.inf}, "minimum at # must be a finite number"),
        ({"multipleOf": math.inf}, "multipleOf at # must be a finite number"),
        ({"type": "string", "maxLength": 10**400}, "maxLength at # must be a finite number"),
        ({"type": "array", "maxItems": 2**63}, "maxItems at # is beyond 64 bits"),
        ({"enum": [1, math.inf]}, "enum at # has a number that is not finite"),
        ({"const": math.nan}, "const at # has a number that is not finite"),
        ({"const": 2**63}, "const at # has a number beyond 64 bits"),
        (
            {"$ref": "https://example.com/x"},
            "$ref at # refers to 'https://example.com/x', which is not part of the schema",
        ),
        ({"$ref": "#/$defs/a"}, "$ref at # refers to '/$defs/a', which does not exist"),
        ({"allOf": [{"pattern": "a"}, {"pattern": "b"}]}, "pattern at #/allOf/1 is served only"),
        ({"pattern": "a", "maxLength": 5}, "pattern at # has several parts of varying length"),
        ({"patternProperties": {"(": {}}}, "patternProperties at # has a ( without a ): ("),
    ],
)
def test_invalid_keyword_is_refused_by_name(schema, sentence):
    with pytest.raises(SchemaRefused, match=re.escape(sentence)):
        served(schema)


def test_schema_that_multiplies_out_is_refused():
    pair = [{"required": ["a"]}, {"required": ["b"]}]
    with pytest.raises(SchemaRefused, match="takes too much work"):
        served({"type": "object", "allOf": [{"anyOf": pair * 5} for _ in range(20)]})


def many(count, part) -> dict:
    return {f"{number}": part for number in range(count)}


# Of 50 to 60 KB, and up to half a minute of work where some loop is not counted.
COSTLY = {
    "a long value next to a pattern": {"enum": ["a" * 57_000], "pattern": "a*b"},
    "many names and many patterns": {
        "patternProperties": {f"^{number}(a*)*b": {} for number in range(257)},
        "properties": many(200, {}),
        "additionalProperties": TEXT,
    },
    "a type that is repeated": {"type": ["string"] * 5_000, "pattern": "[a-z]" * 1_000},
    "formats": {"properties": many(1_300, {"type": "string", "format": "uri"})},
    "values of each alternative": {
        "enum": [f"v{number}" for number in range(4_000)],
        "anyOf": [{"maxLength": 9}] * 500,
    },
    "nested values": {"allOf": [{"enum": [[[[number]]] for number in range(50)]}] * 40},
    "names of each alternative": {
        "properties": many(3_000, {}),
        "additionalProperties": True,
        "anyOf": [{"maxProperties": 9}] * 500,
    },
    "merged names": {"allOf": [{"properties": many(2_000, {})}, *[{"required": ["1"]}] * 1_500]},
    "multiples": {
        "properties": many(700, {"type": "integer", "multipleOf": 2, "minimum": 0, "maximum": 1998})
    },
    "a long reference": {"anyOf": [{"$ref": "#/" + "a/" * 15_000}] * 2},
    "branches": {
        "oneOf": [{"required": ["k"], "properties": {"k": {"const": n}}} for n in range(700)]
    },
}


def num_calls(profile: cProfile.Profile) -> int:
    """Return the number of function calls, a measure of time that does not depend on the machine."""
    return sum(entry.callcount for entry in profile.getstats())


@pytest.mark.parametrize("name", COSTLY)
def test_schema_of_any_shape_is_served_or_refused_with_little_work(name):
    schema = COSTLY[name]
    assert len(json.dumps(schema)) < 64_000
    text, refusal = "", " at #"
    with cProfile.Profile() as work:
        try:
            text = json.dumps(served(schema))
        except SchemaRefused as error:
            refusal = str(error)
    assert " at #" in refusal
    assert len(text) < 4 * MAX_GRAMMAR_BYTES
    assert num_calls(work) < 10 * MAX_STEPS


@pytest.mark.parametrize("keyword", ["pattern", "patternProperties", "propertyNames"])
def test_pattern_that_repeats_too_much_is_refused_by_keyword_and_place(keyword):
    pattern = "^(?:(?:a{9999}){9999}){9999}$"
    value = {
        "pattern": pattern,
        "patternProperties": {pattern: {}},
        "propertyNames": {"pattern": pattern},
    }
    refused = "pattern" if keyword == "propertyNames" else keyword
    with pytest.raises(SchemaRefused, match=rf"{refused} at #/properties/x\S* repeats too much"):
        served(under({keyword: value[keyword]}))


def test_requests_have_one_budget_for_all_their_schemas():
    schema, budget = {"properties": many(1_000, TEXT)}, Budget()
    with pytest.raises(SchemaRefused, match="takes too much work"):
        for _ in range(1_000):
            rewriting.served(schema, budget)


def test_deep_schema_takes_memory_for_its_text_only():
    schema: dict = {"properties": many(3_000, {})}
    for _ in range(30):
        schema = {"properties": {"k" * 300: schema}}
    tracemalloc.start()
    served(schema)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 10 << 20  # 11 KiB of path for each of 3,000 names would be 33 MiB


def test_refusal_does_not_quote_whole_texts_of_clients():
    with pytest.raises(SchemaRefused) as refused:
        served({"properties": {"k" * 5_000: {"$ref": "x" * 5_000}}})
    assert len(str(refused.value)) < 1_000


def test_recursive_alternatives_that_are_alike_are_refused():
    def node(name):
        following = {"anyOf": [NULL, {"$ref": f"#/$defs/{name}"}]}
        return {"properties": {"next": following}, "required": ["next"]}

    branches = [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]
    with pytest.raises(SchemaRefused, match="oneOf at # is served only"):
        served({"oneOf": branches, "$defs": {"a": node("a"), "b": node("b")}})


def test_alternatives_that_are_too_many_to_compare_are_refused():
    branches = [
        {"anyOf": [{"const": [first, second]} for second in range(40)]} for first in range(40)
    ]
    with pytest.raises(SchemaRefused, match="the schema at # takes too much work"):
        served({"oneOf": branches})


def test_schema_that_merges_recursive_references_is_refused():
    both = {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]}
    node = {"type": "object", "properties": {"x": both}}
    with pytest.raises(SchemaRefused, match="combines recursive"):
        served({**both, "$defs": {"a": node, "b": node | {"maxProperties": 1}}})


# ── references and dead ends ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("pointer", ["a~1b%20~0", "a%7E1b%20%7e0"])
def test_reference_is_a_json_pointer(pointer):
    schema = {"$ref": f"#/$defs/{pointer}", "$defs": {"a/b ~": WHOLE}}
    assert allows(schema, "1")
    assert not allows(schema, '"a"')


def test_long_chain_of_references_is_served():
    links = {f"d{at}": {"$ref": f"#/$defs/d{at + 1}"} for at in range(60)}
    first = {name: {"$ref": f"#/$defs/{name}"} for name in [*links, "d60"]}
    schema = {"type": "object", "properties": first, "$defs": links | {"d60": WHOLE}}
    assert allows(schema, '{"d0":1}')


def test_reference_may_lead_into_a_list():
    assert allows({"properties": {"a": {"$ref": "#/anyOf/1"}}, "anyOf": [{}, NULL]}, '{"a":null}')


@pytest.mark.parametrize(
    "schema",
    [
        False,
        {"anyOf": []},
        {"oneOf": []},
        {"enum": []},
        {"$ref": "#"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {"properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {"type": "string", "allOf": [WHOLE]},
        {"properties": {"a": False}, "required": ["a"]},
        {"properties": {}, "propertyNames": {"pattern": "^b$"}, "required": ["a"]},
        {"type": "array", "minItems": 2, "maxItems": 1},
    ],
)
def test_schema_without_a_value_is_refused(schema):
    with pytest.raises(SchemaRefused, match="the schema at # can match no value"):
        served(schema)


def test_recursive_schema_that_can_end_is_served_without_its_dead_ends():
    endless = {
        "type": "object",
        "properties": {"next": {"$ref": "#/$defs/endless"}},
        "required": ["next"],
    }
    schema = {
        "type": "object",
        "properties": {
            "left": {"anyOf": [{"$ref": "#"}, NULL]},
            "never": {"$ref": "#/$defs/endless"},
        },
        "required": ["left"],
        "$defs": {"endless": endless},
    }
    assert allows(schema, '{"left":{"left":null}}')
    assert not allows(schema, '{"left":null,"never')
    assert "never" not in json.dumps(served(schema))


# ── random schemas, random texts ─────────────────────────────────────────────────────────────────

EOS = 256
NAMES = ("a", "b", "ab", "é")
SOUGHT = (
    "a",
    "^[ab]+$",
    "^a|b$",
    '"',
    '^"[a-z]*\\\\$',
    "\\n",
    "^.{1,3}$",
    "^[^a]",
    "^\\S+$",
    "^(?:ab){1,2}c?$",
    "x$",
)
LEAVES = (
    TEXT,
    WHOLE,
    NULL,
    True,
    False,
    {},
    {"const": 1},
    {"enum": ["a", 1, None]},
    {"$ref": "#/$defs/x"},
    {"$ref": "#"},
)
VALUES = (1, "a", None, True, 2.5, "ab", {"a": 1}, [1])


@pytest.fixture(scope="module")
def byte_library() -> Library:
    tokens = [bytes([byte]) for byte in range(256)] + [b""]
    return Library(xgrammar.TokenizerInfo(tokens, vocab_size=EOS + 1, stop_token_ids=[EOS]))


def random_schema(rng, depth: int):
    """Return a schema that mixes keywords of all kinds, most of them next to a fitting type."""
    if depth == 0 or rng.random() < 0.1:
        return rng.choice(LEAVES)

    def part():
        return random_schema(rng, depth - 1)

    def parts(most):
        return [part() for _ in range(rng.randint(1, most))]

    kind = rng.choice(["object", "object", "array", "string", "number", "integer"])
    makers = {
        "object": {
            "properties": (
                0.8,
                lambda: {name: part() for name in rng.sample(NAMES, rng.randint(0, 3))},
            ),
            "required": (0.4, lambda: rng.sample(NAMES, rng.randint(1, 2))),
            "additionalProperties": (0.3, lambda: rng.choice([False, True, part()])),
            "unevaluatedProperties": (0.07, lambda: rng.choice([False, part()])),
            "patternProperties": (
                0.1,
                lambda: {rng.choice(["^a", "^x-", "b$", '^"', "."]): part()},
            ),
            "propertyNames": (
                0.1,
                lambda: rng.choice(
                    [{"pattern": "^[a-c]+$"}, {"enum": ["a", "c"]}, {"maxLength": 2}]
                ),
            ),
            "minProperties": (0.1, lambda: rng.randint(0, 2)),
            "maxProperties": (0.1, lambda: rng.randint(0, 3)),
            "dependentRequired": (0.1, lambda: {"a": ["b"]}),
            "dependentSchemas": (0.05, lambda: {"a": part()}),
            "not": (0.05, lambda: {"required": rng.sample(NAMES, rng.randint(1, 2))}),
        },
        "array": {
            "items": (0.6, part),
            "prefixItems": (0.3, lambda: parts(2)),
            "unevaluatedItems": (0.07, lambda: rng.choice([False, part()])),
            "minItems": (0.3, lambda: rng.randint(0, 3)),
            "maxItems": (0.3, lambda: rng.randint(0, 3)),
            "contains": (0.07, lambda: rng.choice([{}, part()])),
            "uniqueItems": (0.1, lambda: rng.random() < 0.5),
        },
        "string": {
            "minLength": (0.3, lambda: rng.randint(0, 3)),
            "maxLength": (0.3, lambda: rng.randint(1, 4)),
            "pattern": (0.4, lambda: rng.choice(SOUGHT)),
            "format": (
                0.1,
                lambda: rng.choice(["date", "email", "uuid", "json-pointer", "unknown"]),
            ),
        },
        "number": {
            "minimum": (0.3, lambda: rng.choice([0, -3, 0.5])),
            "maximum": (0.3, lambda: rng.choice([5, 2.5])),
            "exclusiveMinimum": (0.2, lambda: rng.choice([0, -1.5])),
            "exclusiveMaximum": (0.1, lambda: 4),
            "multipleOf": (0.15, lambda: rng.choice([1, 2, 0.5, 7])),
        },
    }
    makers["integer"] = makers["number"]
    makers[""] = {
        "anyOf": (0.15, lambda: parts(3)),
        "oneOf": (0.12, lambda: parts(2)),
        "allOf": (0.12, lambda: parts(2)),
        "enum": (0.05, lambda: list(VALUES)),
        "const": (0.03, lambda: rng.choice(VALUES)),
        "$ref": (0.05, lambda: rng.choice(["#", "#/$defs/x", "#/$defs/y"])),
    }
    schema = {"type": rng.choice([kind, [kind, "null"]])} if rng.random() < 0.75 else {}
    for keyword, (share, make) in (makers[kind] | makers[""]).items():
        if rng.random() < share:
            schema[keyword] = make()
    return schema


def random_text(compiled, rng) -> bytes | None:
    """Return a text that a grammar allows, byte by byte; None: it did not end after many bytes."""
    state, text = GrammarState(compiled), b""
    masks = xgrammar.allocate_token_bitmask(1, EOS + 1)
    while len(text) < 400:
        state.fill(masks, 0)
        bits = np.unpackbits(masks[0].numpy().view(np.uint8), bitorder="little")
        # Without bytes that begin surrogates or overlong characters, which the library allows and UTF-8 does not.
        allowed = [byte for byte in np.flatnonzero(bits).tolist() if byte not in {0xE0, 0xED, 0xF0}]
        wanted = b'"}]' if len(text) > 40 else b'ab01"{}[],:-x\\'
        better = [byte for byte in allowed if byte == EOS or byte in wanted]
        token = rng.choice(better if better and rng.random() < 0.7 else allowed)
        state.accept(token)
        if token == EOS:
            return text
        text += bytes([token])
    return None


@given(st.randoms(use_true_random=False))
def test_text_of_a_served_schema_is_valid(byte_library, rng):
    schema = random_schema(rng, 3)
    if isinstance(schema, dict):
        schema = schema | {"$defs": {"x": random_schema(rng, 2), "y": random_schema(rng, 1)}}
    try:
        rewritten = served(schema)
    except SchemaRefused:
        return
    compiled = compile_text(byte_library, Grammar(kind="json_schema", text=json.dumps(rewritten)))
    for _ in range(3):
        text = random_text(compiled, rng)
        if text is None:
            continue
        value = json.loads(text)
        try:
            errors = list(Draft202012Validator(schema).iter_errors(value))
        except RecursionError:  # a schema that refers to itself at the same place has no meaning
            return
        assert not errors, text
