"""Calls in JSON, as they are written."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.frontend.call_scanner import Begun, CallScanner, Whole

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
CALLS = st.lists(st.tuples(st.text(min_size=1), st.dictionaries(st.text(), JSON, max_size=3)))


def scan(text: str, cuts=()) -> list:
    """What is told of a text in pieces, with neighbouring pieces of arguments joined."""
    scanner, events = CallScanner(), []
    ends = sorted(cuts)
    for a, b in zip([0, *ends], [*ends, len(text)], strict=True):
        for event in scanner.push(text[a:b]):
            if isinstance(event, str) and isinstance(events[-1], str):
                events[-1] += event
            else:
                events.append(event)
    return [*events, scanner.rest]


@given(
    calls=CALLS,
    is_list=st.booleans(),
    key=st.sampled_from(["arguments", "parameters"]),
    data=st.data(),
)
def test_calls_are_told_by_name_and_arguments_however_they_are_cut(calls, is_list, key, data):
    entries = [json.dumps({"name": name, key: arguments}) for name, arguments in calls]
    text = f"[{', '.join(entries)}]" if is_list else "; ".join(entries)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    *events, rest = scan(text, cuts)
    assert rest == ""
    assert events[::2] == [Begun(name) for name, _ in calls]
    assert [json.loads(piece) for piece in events[1::2]] == [arguments for _, arguments in calls]


def test_the_name_and_each_piece_of_arguments_come_at_once():
    scanner = CallScanner()
    assert scanner.push('{"name": "f", "arg') == []
    assert scanner.push('uments": {"a"') == [Begun("f"), '{"a"']
    assert scanner.push(": [1") == [": [1"]
    assert scanner.push("]}}") == ["]}"]


@pytest.mark.parametrize(
    "entry",
    [
        '{"arguments": {"a": 1}, "name": "f"}',
        '{"name": "f", "arguments": "{}"}',
        '{"name": "f"}',
        '{"name": 1, "arguments": {}}',
        '{"name": {"arguments": {}}}',
    ],
)
def test_a_call_that_cannot_be_told_as_it_comes_is_told_whole(entry):
    assert scan(entry) == [Whole(entry), ""]


def test_line_breaks_within_strings_are_escaped():
    assert scan('{"name": "f", "arguments": {"a": "x\ny"}}')[1] == '{"a": "x\\ny"}'


@pytest.mark.parametrize("text", ["7", "x", '{"name"]', "{'name': 1}}}", '{"\\x": 1}'])
def test_what_is_no_list_of_calls_is_left_as_it_is(text):
    *events, _ = scan(text)
    assert not any(isinstance(event, Begun) for event in events)


@given(text=st.text(alphabet='{}[]":,; \\anmegruts\n', max_size=60), data=st.data())
def test_anything_is_read_the_same_however_it_is_cut(text, data):
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    assert scan(text, cuts) == scan(text)
