"""Regular expressions of JSON schemas: searched by the rules of ECMA-262, and written as JSON's characters."""

import json
import re

import pytest
import xgrammar
from hypothesis import assume, given
from hypothesis import strategies as st
from xgrammar.testing import _is_grammar_accept_string as accepts

from tandem.frontend.schemas.budget import Budget, BudgetSpent
from tandem.frontend.schemas.patterns import (
    Matcher,
    bounded,
    json_pattern,
    literal_prefix,
    other_than,
    parse,
)
from tandem.frontend.schemas.string_formats import PATTERNS


def matches(expression, text: str) -> bool:
    return Matcher(Budget()).matches(expression, text)


def grammar_of(expression) -> xgrammar.Grammar:
    schema = {"type": "string", "pattern": json_pattern(expression)}
    return xgrammar.Grammar.from_json_schema(json.dumps(schema))


@pytest.mark.parametrize(
    ("pattern", "found", "others"),
    [
        ("ab", ["ab", "xabx"], ["a b"]),
        ("^ab", ["ab", "abx"], ["xab"]),
        ("ab$", ["ab", "xab"], ["abx"]),
        ("^ab$", ["ab"], ["xab", "abx"]),
        ("^a|b$", ["ax", "xb"], ["xax"]),
        ("^(a|^b$)$", ["a", "b"], ["xb"]),
        ("(^|,)a(,|$)", ["a", "x,a,x"], ["xa", "ax"]),
        ("", ["", "x"], []),
        ("^$", [""], ["x"]),
        (r"^\d{2,}?-\w+$", ["12-a_"], ["1-a", "12-é"]),
        (r"^[^\s,;]+$", ["a.b"], ["a b", "a,b"]),
        (r"^\u00e9\x41\u{1F600}$", ["éA😀"], ["eA"]),
        (r"^\uD83D\uDE00$", ["😀"], ["x"]),
        ("^(?<year>[0-9]{4})$", ["2024"], ["24"]),
        (r"^[\w-\.]+@([\w-]+\.)+[\w-]{2,4}$", ["a-b.c@d-e.com"], ["a@b"]),
        (r"^[a-\s]+$", ["a- "], ["b"]),
        ("^[-a][b-]$", ["-b", "a-"], ["b-"]),
    ],
)
def test_pattern_is_found_anywhere_between_its_anchors(pattern, found, others):
    expression = parse(pattern)
    for text in (*found, *others):
        is_found = text in found
        assert matches(expression, text) is is_found
        assert accepts(grammar_of(expression), json.dumps(text, ensure_ascii=False)) is is_found


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ('^a"b$', 'a"b'),
        (r"^\\$", "\\"),
        ("^a\nb$", "a\nb"),
        (r"\n", "é\n"),
        (r'^"{2}\n+$', '""\n\n'),
        ('^".*"$', '"a \\ b"'),
        ("^\\x01$", "\1"),
    ],
)
def test_characters_that_json_escapes_are_escaped(pattern, text):
    grammar = grammar_of(parse(pattern))
    assert accepts(grammar, json.dumps(text, ensure_ascii=False))
    assert not accepts(grammar, f'"{text}"')


@pytest.mark.parametrize(
    "pattern", [".", "^[^a]$", "^\\S$", "^\\D$", '^(?:a|")$', '^[a"]$', "^a?\n?$"]
)
@pytest.mark.parametrize("char", ['"', "\\", "\n", "\x01"])
def test_pattern_never_allows_what_is_not_json(pattern, char):
    assert not accepts(grammar_of(parse(pattern)), f'"{char}"')


@pytest.mark.parametrize(
    ("pattern", "sentence"),
    [
        ("(?=a)b", "lookaround"),
        ("(?<!a)b", "lookaround"),
        ("(?i)a", "flags"),
        (r"\ba", r"uses \\b"),
        (r"(a)\1", r"uses \\1"),
        (r"\p{L}", r"uses \\p"),
        ("(", "without a"),
        ("a)", "without a"),
        ("[a", "without a"),
        ("[]a]", "dialects"),
        ("[b-a]", "invalid range"),
        ("a**", "cannot be repeated"),
        ("^*", "cannot be repeated"),
        ("*a", "repeats nothing"),
        ("a{2,1}", "out of order"),
        ("a{1,99999}", "more than 10000 times"),
        ("a^b", "in the middle"),
        ("(" * 100, "nests deeper"),
        ("a\\", "ends with"),
        ("a" * 9000, "longer than"),
    ],
)
def test_pattern_that_cannot_be_served_is_refused(pattern, sentence):
    with pytest.raises(ValueError, match=sentence):
        parse(pattern)


def test_repetitions_that_multiply_are_refused():
    with pytest.raises(ValueError, match="repeats too much"):
        json_pattern(parse("^(?:(?:a{9999}){9999}){9999}$"))


def test_comparison_that_takes_too_long_is_refused():
    with pytest.raises(BudgetSpent):
        matches(parse("^" + "(a|a)*" * 1000 + "$"), "a" * 1000)


PIECES = st.sampled_from(["a", "b", "[ab]", "[^a]", ".", r"\d", "(?:a|bc)", "(b)"])
COUNTS = st.sampled_from(["", "*", "+", "?", "{2}", "{1,3}", "{0,2}"])


@st.composite
def simple_patterns(draw):
    pieces = draw(st.lists(st.tuples(PIECES, COUNTS), max_size=4))
    start, end = draw(st.sampled_from(["", "^"])), draw(st.sampled_from(["", "$"]))
    return start + "".join(piece + count for piece, count in pieces) + end


@given(simple_patterns(), st.text("abc1 ", max_size=6))
def test_patterns_match_as_python_searches(pattern, text):
    assert matches(parse(pattern), text) is (re.search(pattern, text) is not None)


@given(
    simple_patterns(), st.integers(0, 4), st.integers(0, 4) | st.none(), st.text("abc1", max_size=6)
)
def test_bounded_pattern_matches_texts_of_these_lengths(pattern, least, most, text):
    expression = bounded(parse(pattern), least, most)
    assume(expression is not None)
    fits = least <= len(text) <= (len(text) if most is None else most)
    assert matches(expression, text) is (fits and re.search(pattern, text) is not None)


@given(st.lists(st.text("abé", max_size=3), max_size=4), st.text("abé", max_size=4))
def test_other_names_are_those_that_are_not_listed(names, text):
    assert matches(other_than(names), text) is (text not in names)


def test_every_string_begins_with_the_literal_prefix():
    assert [literal_prefix(parse(each)) for each in ("^ab+", "^x-", "a", "^[ab]", "^")] == [
        "a",
        "x-",
        "",
        "",
        "",
    ]


FORMATTED = {
    "date": (["2024-02-29", "2023-12-31"], ["2023-02-29", "2023-13-01"]),
    "time": (["12:00:00Z", "23:59:59.5+01:00"], ["24:00:00Z", "12:00:00"]),
    "date-time": (["2024-02-29T10:00:00Z"], ["2024-02-29 10:00:00Z"]),
    "duration": (["P1D", "PT1H30M", "P1Y2M", "P2W", "P1DT12H"], ["P", "P1", "1D"]),
    "email": (["a@b.c", "a.b+x@ex-a.co.uk"], ["a@b", "@b.c", "a..b@c.d"]),
    "hostname": (["a", "a.b-c"], ["-a", "a..b"]),
    "ipv4": (["1.2.3.4", "255.255.255.255"], ["256.1.1.1", "1.2.3"]),
    "ipv6": (
        ["::", "::1", "1::", "2001:db8::1:2", "1:2:3:4:5:6:7:8"],
        ["1:2", "1:2:3:4:5:6:7:8:9", ":::"],
    ),
    "uri": (
        ["http://a.b/c?d#e", "mailto:a@b.c", "https://user@host:80/x/", "urn:isbn:1"],
        ["a", "http://a b"],
    ),
    "uri-reference": (["/a/b", "http://x", "#f", "", "?q"], ["a b", "%"]),
    "uri-template": (["/a/{b}", "/{+x,y}{?q*}"], ["{", "{}"]),
    "uuid": (["123e4567-e89b-12d3-a456-426614174000"], ["123e4567e89b12d3a456426614174000"]),
    "json-pointer": (["", "/a~1b", "/é"], ["a", "/~2"]),
    "relative-json-pointer": (["0", "1/a", "0#"], ["01", "#"]),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_format_matches_its_standard(name):
    expression = parse(PATTERNS[name])
    grammar, (right, wrong) = grammar_of(expression), FORMATTED[name]
    for text in (*right, *wrong):
        assert matches(expression, text) is (text in right)
        assert accepts(grammar, json.dumps(text, ensure_ascii=False)) is (text in right)
