"""Streams of several servers, cut into reads anywhere."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.tools.bench.client import AnswerFailed, AnswerParser, Sample


def native(count: int, finish=None, **fields) -> dict:
    ids = list(range(count))
    meta = {"prompt_tokens": 7, "completion_tokens": count, "cached_tokens": 3}
    # A decoy: the count is that of `meta_info`.
    text = '"completion_tokens": 99'
    return {"text": text, "output_ids": ids, "meta_info": meta | {"finish_reason": finish}} | fields


def chunk(text: str, count: int | None = None, finish=None) -> dict:
    usage = None if count is None else {"prompt_tokens": 7, "completion_tokens": count}
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish}], "usage": usage}


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
}


def encoded(events: list[dict], newline: str = "\n", done: bool = True) -> bytes:
    text = "".join(f"data: {json.dumps(event)}{newline * 2}" for event in events)
    return (text + f"data: [DONE]{newline * 2}" * done).encode()


def reading() -> tuple[AnswerParser, Sample]:
    sample = Sample(sent_s=100.0)
    return AnswerParser(sample), sample


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_each_event_with_tokens_is_an_arrival(name, newline):
    answer, sample = reading()
    for number, event in enumerate(STREAMS[name]):
        answer.feed(encoded([event], newline, done=False), 101.0 + number)
    answer.feed(encoded([], newline), 200.0)
    answer.finish()
    assert sample.counts == [1, 2, 3]
    assert sample.times[2] - sample.times[0] == 2.0
    assert (sample.output_tokens, sample.prompt_tokens) == (3, 7)
    assert sample.cached_tokens == 3


@given(st.sampled_from(sorted(STREAMS)), st.sets(st.integers(1, 2000)))
def test_tokens_do_not_depend_on_where_reads_cut_the_stream(name, cuts):
    whole, (answer, sample) = encoded(STREAMS[name]), reading()
    places = [0, *sorted(cut for cut in cuts if cut < len(whole)), len(whole)]
    for number, (start, end) in enumerate(pairwise(places)):
        answer.feed(whole[start:end], 101.0 + number)
    answer.finish()
    assert sample.counts[-1] == sample.output_tokens == 3
    assert sample.counts == sorted(set(sample.counts))
    assert len(sample.times) == len(sample.counts)


@pytest.mark.parametrize(
    ("events", "kind"),
    [
        ([native(1), native(2)], "cut off"),
        ([native(1, finish={"type": "abort", "message": "no node"})], "aborted"),
        ([chunk("a", 1), {"error": {"message": "out of pages"}}], "error event"),
        ([{"object": "error", "message": "bad"}], "error event"),
        ([chunk("a", 1), {"choices": 5}], "bad event"),
    ],
)
def test_an_incomplete_or_invalid_stream_is_a_failure(events, kind):
    answer, _ = reading()
    with pytest.raises(AnswerFailed) as raised:
        answer.feed(encoded(events, done=kind != "cut off"), 1.0)
        answer.finish()
    assert raised.value.kind == kind
