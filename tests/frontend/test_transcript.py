"""Tokens to pieces: text, ids, log-probabilities and ending do not depend on how tokens arrive."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.frontend.apis.answering import CollectedAnswer
from tandem.frontend.text.stops import TextRules, compile_pattern
from tandem.frontend.text.transcript import StreamInterval, TextPiece, Transcript, join_pieces
from tandem.telemetry.histogram import Histogram
from tandem.wire.errors import InvalidRequest
from tandem.wire.generation import Finish
from tandem.wire.messages import TokenDelta
from tests.frontend.fakes import told

STOP = Finish(reason="stop", matched=99)
LENGTH = Finish(reason="length")
Z = Finish(reason="stop", matched=25)


class Letters:
    """Each id is a letter: 0 is a."""

    def __init__(self) -> None:
        self.ids = []

    def push(self, token_ids) -> str:
        self.ids += token_ids
        return "".join(chr(ord("a") + token_id) for token_id in token_ids)

    def finish(self) -> str:
        return ""


class Sink(CollectedAnswer):
    """An answer that takes ordinary tokens only while it has room."""

    def __init__(self) -> None:
        super().__init__()
        self.is_full, self.sizes = False, []

    def write(self, piece) -> bool:
        self.sizes.append(len(piece.token_ids))
        super().write(piece)
        return not self.is_full

    @property
    def whole(self) -> TextPiece:
        return join_pieces(self.pieces)


def transcript_of(rules, sink, interval=None) -> Transcript:
    return Transcript(rules, Letters(), sink, Histogram([1.0]), interval or StreamInterval())


def delta(token_ids, finish=None, index=0, *, is_told=False) -> TokenDelta:
    return TokenDelta(
        request_id="r",
        attempt=0,
        index=index,
        token_ids=list(token_ids),
        finish=finish,
        logprobs=[told(token_id, 0) for token_id in token_ids] if is_told else [],
    )


def read(parts, rules=TextRules(), direct=(), interval=None) -> Sink:  # noqa: B008 - it is frozen
    """Return a sink with the pieces of `parts`. Parts at the indexes in `direct` are sent as ordinary tokens if possible."""
    sink = Sink()
    transcript = transcript_of(rules, sink, interval)
    for place, part in enumerate(parts):
        is_ordinary = place in direct and part.token_ids and part.finish is None
        if is_ordinary and transcript.take_ordinary(part.token_ids):
            continue
        transcript.take(part)
    sink.write(transcript.end)
    assert transcript.num_tokens == len(sink.whole.token_ids)
    return sink


def in_parts(ids, sizes, **fields) -> list[TokenDelta]:
    parts, start = [], 0
    for size in sizes:
        parts.append(delta(ids[start : start + size], index=start, **fields))
        start += size
    return [*parts, delta(ids[start:], LENGTH, start, **fields)]


def told_of(sink):
    return sink.whole.text, sink.whole.token_ids, sink.whole.ending


INTERVALS = st.sampled_from(["1", "2", "3"]).map(StreamInterval)
RULES = st.builds(
    TextRules,
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=3), max_size=3).map(tuple),
    keeps_stop=st.booleans(),
    min_new_tokens=st.integers(0, 4),
    stream_interval=st.integers(1, 4),
)


@settings(max_examples=300)
@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=20),
    st.lists(st.integers(1, 3), max_size=8),
    RULES,
    st.sets(st.integers(1, 8)),
    INTERVALS,
)
def test_pieces_do_not_depend_on_token_grouping_or_path(ids, sizes, rules, direct, interval):
    whole = read([delta(ids, LENGTH, is_told=True)], rules)
    parted = read(in_parts(ids, sizes, is_told=True), rules)
    mixed = read(in_parts(ids, sizes), rules, direct, interval)
    assert told_of(parted) == told_of(mixed) == told_of(whole)
    # Each log-probability belongs to its token.
    for sink in (whole, parted):
        assert [entry.logprob for entry in sink.whole.logprobs] == [
            -i / 100 for i in sink.whole.token_ids
        ]


B = {"stops": ("b",)}
ABORT, HANDED = Finish(reason="abort"), Finish(reason="handed_off")
ANY_OF = compile_pattern("[bc]")
# After a first token "a": the last ids and finish, the rules, and the expected text, reason and match.
ENDS = {
    "length alone": ([1], LENGTH, {}, "ab", "length", None),
    "a stop with the last token": ([1], LENGTH, B, "a", "stop", "b"),
    "a stop before the last token": ([1, 2], LENGTH, B | {"keeps_stop": True}, "ab", "stop", "b"),
    "half a stop with the last token": ([1], LENGTH, {"stops": ("bc",)}, "ab", "length", None),
    "a pattern with the last token": ([1], LENGTH, {"patterns": (ANY_OF,)}, "a", "stop", "[bc]"),
    "a stop too early": ([1], LENGTH, B | {"min_new_tokens": 2}, "ab", "length", None),
    "a stop token": ([1, 99], STOP, {}, "ab", "stop", 99),
    "a stop token that stays": ([1, 25], Z, {"keeps_stop": True}, "abz", "stop", 25),
    "a stop token behind a stop string": ([1, 99], STOP, B, "a", "stop", "b"),
    "an abort behind a stop": ([1], ABORT, B, "a", "stop", "b"),
    "prefill's part": ([1], HANDED, {}, "ab", "length", None),
    "nothing is shown": ([1], LENGTH, {"is_silent": True}, "", "length", None),
}


@pytest.mark.parametrize("name", ENDS)
def test_first_ending_determines_the_reason(name):
    ids, finish, rules, *expected = ENDS[name]
    sink = read([delta([0]), delta(ids, finish)], TextRules(**rules))
    assert [sink.whole.text, sink.whole.ending.reason, sink.whole.ending.matched] == expected


def test_stop_in_ordinary_tokens_ends_the_text():
    sink = Sink()
    transcript = transcript_of(TextRules(stops=("bc",)), sink)
    transcript.take(delta([0]))
    assert transcript.take_ordinary([1])  # may still become the stop
    assert not transcript.is_ended
    assert not transcript.take_ordinary([2])
    transcript.take(delta([2, 0, 0], LENGTH, 2))
    end = transcript.end
    assert (end.text, list(end.token_ids), end.ending.matched) == ("", [2], "bc")
    assert (sink.whole.text, sink.whole.token_ids, transcript.num_tokens) == ("a", [0, 1], 3)


def test_slow_pattern_ends_the_text_with_an_error():
    rules = TextRules(patterns=(compile_pattern("(a+)+x"),))
    transcript = transcript_of(rules, Sink())
    for _ in range(3000):
        transcript.take_ordinary([0])
    assert isinstance(transcript.end, InvalidRequest)
    assert "takes too long" in transcript.end.message


async def test_tokens_for_a_full_sink_are_not_lost():
    sink = Sink()
    transcript = transcript_of(TextRules(), sink)
    sink.is_full = True
    assert transcript.take_ordinary([0])  # it fills the sink
    assert not transcript.take_ordinary([1])
    assert sink.whole.token_ids == [0]
    await transcript.drain()
    transcript.take(delta([1, 2], index=1))
    await transcript.drain()
    assert transcript.take_ordinary([0])
    assert (sink.whole.text, transcript.num_tokens) == ("abca", 4)


def test_stream_interval_applies_to_both_paths():
    parts = [delta([i % 3], LENGTH if i == 9 else None, i) for i in range(10)]
    for direct in ((), range(1, 10)):
        for rules, interval in ((TextRules(stream_interval=4), None), (TextRules(), "4")):
            sink = read(parts, rules, direct, interval and StreamInterval(interval))
            assert (sink.sizes, sink.whole.text) == ([1, 4, 4, 1], "abcabcabca")


def test_busy_process_writes_two_tokens_per_event():
    interval, sink = StreamInterval("auto"), Sink()
    transcript = transcript_of(TextRules(), sink, interval)
    transcript.take(delta([0]))
    for busy, sizes in ((0.5, [1, 1]), (0.7, [2]), (0.5, [2]), (0.7, []), (0.2, [2, 1])):
        interval.adapt(busy)
        del sink.sizes[:]
        for _ in range(1 if not sizes else 2):
            assert transcript.take_ordinary([1])
        assert sink.sizes == sizes, busy
    assert sink.whole.text == "abbbbbbbbb"


def test_fixed_stream_interval_does_not_adapt():
    interval = StreamInterval("1")
    interval.adapt(1.0)
    assert interval.num_tokens == 1


def test_tokens_that_wait_for_their_event_are_written_if_the_generation_fails():
    sink = Sink()
    transcript = transcript_of(TextRules(), sink, StreamInterval("3"))
    for index in range(3):
        transcript.take(delta([index], index=index))
    assert sink.whole.text == "a"
    transcript.flush()
    transcript.flush()
    assert sink.whole.text == "abc"
