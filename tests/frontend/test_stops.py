import itertools

import pytest
import regex
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tandem.frontend.text.stops import (
    MAX_MATCH_CHARS,
    SearchBudget,
    StopPatterns,
    StopStrings,
    compile_pattern,
    pattern_of_strings,
)
from tandem.wire.errors import InvalidRequest

SMALL = st.text(alphabet="ab", max_size=30)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=3)


@st.composite
def overlapping(draw):
    """A text, and stop strings that lie in it over each other, so that order of start and end differ."""
    text = draw(st.text(alphabet="abc", min_size=6, max_size=20))
    middle = draw(st.integers(2, len(text) - 3))
    spans = draw(
        st.lists(
            st.tuples(st.integers(0, middle), st.integers(middle + 1, len(text))),
            min_size=2,
            max_size=5,
        )
    )
    return text, [text[start:end] for start, end in spans]


def reference_of_strings(text: str, stops: list[str], keep: bool) -> tuple[str, str | None]:
    """The stop that is complete first; of two that end together, the longer."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if keep else end - len(stop)], stop
    return text, None


def cut(text: str, places: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(place for place in places if place < len(text))})
    return [text[a:b] for a, b in itertools.pairwise(edges)]


@given(SMALL, STOPS, st.booleans(), st.lists(st.integers(0, 30)))
def test_stop_string_result_does_not_depend_on_splits(text, stops, keep, places):
    watch = StopStrings(stops, keep)
    shown = "".join([watch.push(piece) for piece in cut(text, places)]) + watch.finish()
    assert (shown, watch.matched) == reference_of_strings(text, stops, keep)


@settings(max_examples=500)
@given(overlapping(), st.booleans(), st.lists(st.integers(0, 20)))
def test_first_complete_then_longest_stop_wins(drawn, keep, places):
    text, stops = drawn
    for pieces in ([text], cut(text, places)):
        for watch in (StopStrings(stops, keep), StopPatterns([pattern_of_strings(stops)], keep)):
            shown = "".join([watch.push(piece) for piece in pieces]) + watch.finish()
            assert (shown, watch.matched) == reference_of_strings(text, stops, keep)


@given(SMALL, STOPS)
def test_only_possible_stop_prefixes_are_held_back(text, stops):
    watch = StopStrings(stops)
    shown = watch.push(text)
    held = text[len(shown) :]
    if watch.matched is None:
        assert held == "" or any(stop.startswith(held) for stop in stops)


@pytest.mark.parametrize("kind", [StopStrings, lambda *args: watching(["x"], keep=True)])
def test_no_text_after_the_match(kind):
    watch = kind(["x"], True)
    assert [watch.push("axb"), watch.push("more"), watch.finish()] == ["ax", "", ""]


TEXTS = st.text(alphabet="abc \n", max_size=30)
ATOMS = r"a|b|c|\n|\s|\w|[ab]|[^a\]]|.|^|$|\b|\B|\A|\Z|(?=a)|(?!b)|(?>a+)|(a)"
GREEDY = ["*", "+", "?", "{2}", "{1,2}"]
LAZY = ["*?", "+?", "??"]


def patterns(quantifiers):
    """One or two patterns of a few atoms."""
    one = st.recursive(
        st.sampled_from(ATOMS.split("|")),
        lambda inner: st.one_of(
            st.tuples(inner, inner).map("".join),
            st.tuples(inner, inner).map(lambda pair: f"(?:{pair[0]}|{pair[1]})"),
            st.tuples(inner, st.sampled_from(quantifiers)).map(
                lambda pair: f"(?:{pair[0]}){pair[1]}"
            ),
        ),
        max_leaves=6,
    )
    return st.lists(one, min_size=1, max_size=2)


def usable(given_patterns):
    for pattern in given_patterns:
        try:
            compile_pattern(pattern)
        except ValueError:
            return False
    return True


def reference(text, given_patterns, keep=False):
    """The first prefix of the text that holds a match; of several matches in it the longest."""
    for end in range(1, len(text) + 1):
        found = [(pattern, regex.search(pattern, text[:end])) for pattern in given_patterns]
        found = [(pattern, match) for pattern, match in found if match is not None]
        if found:
            pattern, match = min(found, key=lambda pair: pair[1].start())
            return text[: match.end() if keep else match.start()], pattern
    return text, None


def watching(given_patterns, stops=(), keep=False):
    compiled = [compile_pattern(pattern) for pattern in given_patterns]
    return StopPatterns([*compiled, pattern_of_strings(stops)] if stops else compiled, keep)


def fed(pieces, given_patterns, stops=(), keep=False):
    watch = watching(given_patterns, stops, keep)
    return "".join([watch.push(piece) for piece in pieces]) + watch.finish(), watch.matched


PLACES = st.lists(st.integers(0, 30))


@given(TEXTS, patterns(GREEDY + LAZY), st.booleans(), PLACES)
def test_stop_pattern_result_does_not_depend_on_splits(text, given_patterns, keep, places):
    assume(usable(given_patterns))
    whole = fed([text], given_patterns, keep=keep)
    assert fed(cut(text, places), given_patterns, keep=keep) == whole


# A limitation of `regex`: a lazy repeat before a word boundary is not reported as a partial match.
@given(TEXTS, patterns(GREEDY), st.booleans())
def test_stop_pattern_ends_at_the_first_match(text, given_patterns, keep):
    assume(usable(given_patterns))
    assert fed(text, given_patterns, keep=keep) == reference(text, given_patterns, keep)


@given(SMALL, STOPS, st.booleans())
def test_stop_strings_match_equally_with_patterns(text, stops, keep):
    assert fed(text, ["never"], stops, keep) == reference_of_strings(text, stops, keep)


@pytest.mark.parametrize(
    ("pattern", "text", "shown"),
    [
        (r"\d+ apples", "I ate 12 apples today", "I ate "),
        (r"(?i)user:", "Hi\nUSER: you", "Hi\n"),
        (r"\n\bThe", "One.\nThe", "One."),
        (r"(?m)^end$", "the end\nend", "the end\n"),
        (r"\{end\}|{x", "a{end}", "a"),
        (r"(\d?<=3)", "if 5<=3", "if "),
        ("(?:(?:(?:ab)+c)+d){2,}" + "(?:e{2})?" * 30, "-abcdabcd", "-"),
        ("(?:" * 20 + "ab" + ")?" * 20 + "c", "xabc", "x"),
        (r"<b>.*?</b>", "x<b>y</b>z", "x"),
        (r"[^a\]]\B", "ab,,", "ab"),
        ("日本", "東京、日本", "東京、"),
    ],
)
def test_pattern_match_is_trimmed(pattern, text, shown):
    assert fed(text, [pattern]) == (shown, pattern)


def test_only_possible_matches_are_held_back():
    watch = watching([r"\d+ apples"])
    assert [watch.push(piece) for piece in ("a 1", "2", " app", "le 3", " ")] == [
        "a ",
        "",
        "",
        "12 apple ",
        "",
    ]
    assert watch.finish() == "3 "


def test_endless_match_is_released_after_the_limit():
    watch = watching(["(?s)<.*>"])
    text = "<" + "a" * (MAX_MATCH_CHARS - 1)
    assert watch.push(text) == ""
    assert watch.push("aa") == text + "aa"


def test_old_text_is_discarded_except_the_context():
    watch = watching([r"\Bd", r"\Aa b"])
    assert watch.push("a " * 5000) == "a " * 5000
    assert len(watch._text) < 2000
    assert watch.push("a bc") == "a bc"
    assert watch.push("d") == ""
    assert watch.matched == r"\Bd"


@pytest.mark.parametrize("pattern", ["(a+)+b", "(a|aa)+$x"])
def test_exponential_pattern_is_rejected(pattern):
    watch = watching([pattern])
    with pytest.raises(InvalidRequest, match="takes too long"):
        for _ in itertools.repeat(None, 3000):
            watch.push("a")


def searches_until_refusal(num_choices, num_pauses=0):
    """Return how many characters all choices of one request search while every search takes 1 ms."""
    ticks = itertools.count()
    budget = SearchBudget(num_choices, clock=lambda: next(ticks) / 1000)
    for _ in range(num_pauses):
        budget.add(100)
    choices = [StopPatterns([compile_pattern("b")], budget=budget) for _ in range(num_choices)]
    num_searched = 0
    for choice in choices:
        with pytest.raises(InvalidRequest, match="'b' takes too long"):
            for _ in itertools.repeat(None, 1000):
                choice.push("a")
                num_searched += 1
    return num_searched


def test_choices_of_a_request_share_one_search_budget():
    assert searches_until_refusal(128) <= searches_until_refusal(1) <= 25


def test_unused_search_budget_is_capped():
    assert searches_until_refusal(1, num_pauses=1000) <= searches_until_refusal(1) + 11


@pytest.mark.parametrize(
    ("pattern", "sentence"),
    [
        ("(", "not a valid regular expression: missing"),
        ("a{2}{3}*+", "not a valid regular expression"),
        (r"\L<names>", "not a valid regular expression"),
        ("a*", "matches the empty string"),
        ("(?r)ab", "has the flag"),
        ("(?V1)[a--b]", "has the flag"),
        (r"(?:.|..)*(?<=\x00)", "has lookbehind"),
        ("a(?<!b)", "has lookbehind"),
        ("[[:foo:](?<=a)b]", "has lookbehind"),
        (r"(?#\)(?<=a)b", "has lookbehind"),
        ("a(?#b)c", "has a comment"),
        ("(?:" * 60 + "a" + "){1,9}" * 60, "has more than 3 groups with"),
        ("(?:" * 20 + "a+b+" * 20 + ")+?" * 20, "has more than 3 groups with"),
        ("(((([)])+){2})+b){1,}", "has more than 3 groups with"),
        ("(?(?<=a)b|c)", "has lookbehind"),
        ("(?i-s:(?x:(?< =a)b))", r"has the flag \(\?x\)"),
        ("(?:foo){e}", "has fuzzy matching"),
        ("(?:foo){1<=e<=3}", "has fuzzy matching"),
        ("(?:foo){2i+d<=4}", "has fuzzy matching"),
        ("(?:foo){e<=1:[a-z]}", "has fuzzy matching"),
    ],
)
def test_invalid_pattern_is_rejected(pattern, sentence):
    with pytest.raises(ValueError, match=sentence):
        compile_pattern(pattern)


@given(st.text(alphabet=r"ab()[]{}\*+?|^$.:<>=!PNpbLGKRXhdwZ019,-&~#ix'", max_size=14), TEXTS)
def test_arbitrary_pattern_works_or_is_rejected(pattern, text):
    assume(usable([pattern]))
    shown, _ = fed(text, [pattern])
    assert text.startswith(shown)
