"""Incremental parsing of calls in JSON."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.frontend.replies.call_scanner import CallBegin, CallScanner

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
CALLS = st.lists(st.tuples(st.text(min_size=1), st.dictionaries(st.text(), JSON, max_size=3)))


def scan(text: str, cuts=(), **options) -> list:
    """The events of a text in pieces, with neighbouring pieces of arguments joined, then what is no call."""
    scanner, events = CallScanner(**options), []
    ends = sorted(cuts)
    for a, b in zip([0, *ends], [*ends, len(text)], strict=True):
        if scanner.rest is not None:
            scanner.rest += text[a:b]
            continue
        for event in scanner.push(text[a:b]):
            if isinstance(event, str) and isinstance(events[-1], str):
                events[-1] += event
            else:
                events.append(event)
    events += scanner.end()
    return [*events, scanner.held + scanner.rest]


@given(
    calls=CALLS,
    is_list=st.booleans(),
    key=st.sampled_from(["arguments", "parameters"]),
    data=st.data(),
)
def test_scanned_calls_do_not_depend_on_text_splits(calls, is_list, key, data):
    entries = [json.dumps({"name": name, key: arguments}) for name, arguments in calls]
    text = f"[{', '.join(entries)}]" if is_list else "; ".join(entries)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    *events, rest = scan(text, cuts)
    assert rest == ("[]" if is_list and not calls else "")
    assert events[::2] == [CallBegin(name) for name, _ in calls]
    assert [json.loads(piece) for piece in events[1::2]] == [arguments for _, arguments in calls]


def test_name_and_argument_pieces_are_streamed_immediately():
    scanner = CallScanner()
    assert scanner.push('{"name": "f", "arg') == []
    assert scanner.push('uments": {"a"') == [CallBegin("f"), '{"a"']
    assert scanner.push(": [1") == [": [1"]
    assert scanner.push("]}}") == ["]}"]


@pytest.mark.parametrize(
    ("entry", "arguments"),
    [
        ('{"arguments": {"a": 1}, "name": "f"}', '{"a": 1}'),
        ('{"name": "f", "arguments": "{}"}', "{}"),
        ('{"name": "f"}', "{}"),
        ('{"name": "f", "arguments": null}', "{}"),
    ],
)
def test_unstreamable_call_is_returned_at_its_end(entry, arguments):
    assert scan(entry) == [CallBegin("f"), arguments, ""]


@pytest.mark.parametrize(
    "entry",
    [
        '{"name": 1, "arguments": {}}',
        '{"name": {"arguments": {}}}',
        '{"name": "f", "arguments": x{}}',
    ],
)
def test_entry_that_is_not_a_call_is_unchanged(entry):
    assert scan(entry) == [entry]


def test_line_breaks_in_strings_are_escaped():
    assert scan('{"name": "f", "arguments": {"a": "x\ny"}}')[1] == '{"a": "x\\ny"}'


@pytest.mark.parametrize("text", ["7", "x", '{"name"]', "{'name': 1}}}", '{"\\x": 1}'])
def test_text_that_is_not_a_call_list_is_unchanged(text):
    *events, _ = scan(text)
    assert not any(isinstance(event, CallBegin) for event in events)


@given(text=st.text(alphabet='{}[]":,; \\anmegruts\n', max_size=60), data=st.data())
def test_arbitrary_text_does_not_depend_on_splits(text, data):
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    assert scan(text, cuts) == scan(text)


CLOSED = '{"name": "f", "arguments": {"a": "</end> \\" </end>"}}'


@pytest.mark.parametrize(
    ("text", "arguments", "rest"),
    [
        (CLOSED + "</end> more", '{"a": "</end> \\" </end>"}', " more"),
        ('{"name": "f", "arguments": {"a": 1}</end>x', '{"a": 1}', "x"),
        ('{"name": "f", "arguments": {"a": 1}}}</end>x', '{"a": 1}', "}</end>x"),
        ('{"name": "f", "arguments": {"a": <b>}}</end>x', '{"a": <b>}', "x"),
    ],
)
def test_closing_mark_ends_calls_only_outside_of_strings(text, arguments, rest):
    assert scan(text, range(len(text)), closing="</end>") == [CallBegin("f"), arguments, rest]
    assert scan(text, closing="</end>") == [CallBegin("f"), arguments, rest]


@pytest.mark.parametrize("after", ["", " Done.", "[TOOL_CALLS]", "\n[1]"])
def test_without_closing_mark_calls_end_with_their_list(after):
    entry = '{"name": "f", "arguments": {}}'
    assert scan(f"[{entry}, {entry}]{after}") == [CallBegin("f"), "{}", CallBegin("f"), "{}", after]
    *events, rest = scan(f"{entry}; {entry}Done.")
    assert (len(events), rest) == (4, "Done.")
