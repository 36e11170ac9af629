"""Streams of several servers, cut into reads at any place."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.bench.answer import Answer, Broken, Tally


def native(count: int, finish=None, **fields) -> dict:
    ids = list(range(count))
    meta = {"prompt_tokens": 7, "completion_tokens": count, "cached_tokens": 3}
    # What the count must not be taken from.
    text = '"completion_tokens": 99'
    return {"text": text, "output_ids": ids, "meta_info": meta | {"finish_reason": finish}} | fields


def chunk(text: str, count: int | None = None, finish=None) -> dict:
    usage = None if count is None else {"prompt_tokens": 7, "completion_tokens": count}
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish}], "usage": usage}


def chat(delta: dict, count: int | None = None, finish=None) -> dict:
    return chunk("", count) | {"choices": [{"delta": delta, "finish_reason": finish}]}


USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 3}}
STREAMS = {
    "native": [native(1), native(2), native(3, finish={"type": "length", "length": 3})],
    "completions": [
        chunk("a", 1),
        chunk("", 2),  # half a character: a token without text
        chunk("b", 3, finish="length"),
        {"choices": [], "usage": USAGE},
    ],
    "completions without counts": [
        chunk("a"),
        chunk("b"),
        chunk("c", finish="length"),
        {"choices": [], "usage": USAGE},
    ],
    "chat": [
        chat({"role": "assistant", "content": ""}, 0),
        chat({"reasoning_content": "a"}, 1),
        chat({"content": "b"}, 2),
        chat({"content": "c"}, 3, finish="stop"),
        {"choices": [], "usage": USAGE},
    ],
}


def encoded(events: list[dict], newline: str = "\n", done: bool = True) -> bytes:
    text = "".join(f"data: {json.dumps(event)}{newline * 2}" for event in events)
    return (text + f"data: [DONE]{newline * 2}" * done).encode()


def reading(name: str, **kwargs) -> Answer:
    return Answer(name.partition(" ")[0], 100.0, Tally(), **kwargs)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_each_event_that_brings_tokens_is_an_arrival(name, newline):
    answer = reading(name)
    for number, event in enumerate(STREAMS[name]):
        answer.feed(encoded([event], newline, done=False), 101.0 + number)
    answer.feed(encoded([], newline), 200.0)
    answer.finish()
    assert list(answer.counts) == [1, 2, 3]
    assert answer.times[2] - answer.times[0] == 2.0
    assert (answer.output_tokens, answer.prompt_tokens) == (3, 7)
    assert answer.cached_tokens == 3


@given(st.sampled_from(sorted(STREAMS)), st.sets(st.integers(1, 2000)), st.booleans())
def test_wherever_reads_cut_the_stream_the_tokens_are_the_same(name, cuts, is_kept):
    whole, answer = encoded(STREAMS[name]), reading(name, is_kept=is_kept)
    places = [0, *sorted(cut for cut in cuts if cut < len(whole)), len(whole)]
    for number, (start, end) in enumerate(pairwise(places)):
        answer.feed(whole[start:end], 101.0 + number)
    answer.finish()
    assert list(answer.counts)[-1] == answer.output_tokens == 3
    assert list(answer.counts) == sorted(set(answer.counts))
    assert len(answer.times) == len(answer.counts)


@pytest.mark.parametrize(("name", "text"), [("completions", "ab"), ("chat", "abc")])
def test_a_kept_answer_has_its_text(name, text):
    answer = reading(name, is_kept=True)
    answer.feed(encoded(STREAMS[name]), 101.0)
    answer.finish()
    assert answer.text == text


@pytest.mark.parametrize("is_incremental", [False, True])
def test_a_kept_native_answer_has_its_ids_once(is_incremental):
    events = STREAMS["native"]
    if is_incremental:
        events = [event | {"output_ids": event["output_ids"][-1:]} for event in events]
    answer = reading("native", is_kept=True)
    answer.feed(encoded(events), 101.0)
    answer.finish()
    assert answer.output_ids == [0, 1, 2]


@pytest.mark.parametrize(
    ("api", "events", "kind"),
    [
        ("native", [native(1), native(2)], "cut off"),
        ("native", [native(1, finish={"type": "abort", "message": "no node"})], "aborted"),
        ("completions", [chunk("a", 1), {"error": {"message": "out of pages"}}], "error event"),
        ("completions", [{"object": "error", "message": "bad"}], "error event"),
        ("chat", [chat({"content": "a"}, 1), {"choices": 5}], "bad event"),
    ],
)
def test_a_stream_that_did_not_end_well_is_broken(api, events, kind):
    answer = Answer(api, 0.0, Tally())
    with pytest.raises(Broken) as raised:
        answer.feed(encoded(events, done=kind != "cut off"), 1.0)
        answer.finish()
    assert raised.value.kind == kind


def test_an_end_without_done_is_an_end_when_a_reason_was_given():
    answer = reading("chat")
    answer.feed(encoded(STREAMS["chat"], done=False), 1.0)
    answer.finish()
    assert answer.output_tokens == 3


def test_a_tally_adds_up_what_answers_brought_and_starts_again():
    tally = Tally()
    for sent_s in (0.0, 10.0):
        answer = Answer("native", sent_s, tally)
        answer.feed(encoded([native(1)], done=False), sent_s + 1)
        answer.feed(encoded([native(4)], done=False), sent_s + 2)
    told = tally.take(5, [])
    assert (told.num_tokens, told.first_token_s) == (8, [1.0, 1.0])
    assert (told.gap_s, told.num_gaps, told.num_running) == (2.0, 6, 5)
    assert tally.take(0, []).num_tokens == 0
