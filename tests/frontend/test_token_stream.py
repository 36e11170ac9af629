import asyncio

import pytest

from tandem.frontend.engine_client import give
from tandem.frontend.token_stream import TokenStream
from tandem.wire.errors import PeerLost
from tandem.wire.messages import StartColocated
from tests.patience import PATIENCE_S
from tests.router.fake_node import delta, logprobs, request

START = StartColocated(request=request())


@pytest.fixture
def cancelled():
    return []


@pytest.fixture
def stream(cancelled):
    return made(START, cancelled)


def made(start, cancelled=()) -> TokenStream:
    return TokenStream(
        start,
        None,
        forget=lambda _: None,
        cancel=lambda *key: cancelled.append(key),
    )


def test_what_waits_for_a_slow_reader_is_one_delta(stream):
    for index in range(100):
        stream.put(delta(START, index, [index]))
    stream.put(delta(START, 100, [], "stop"))
    only = stream.take()
    assert only.token_ids == list(range(100))
    assert only.finish.reason == "stop"
    assert stream.take() is None


def test_deltas_that_do_not_continue_each_other_stay_apart(stream):
    stream.put(delta(START, 0, [1]))
    stream.put(delta(START, 0, [1]))
    assert [stream.take().index, stream.take().index] == [0, 0]


def test_log_probabilities_are_merged_with_their_tokens_and_none_is_lost(stream):
    prompt, output = logprobs(0, 6), logprobs(10, 13)
    stream.put(delta(START, 0, [], prompt_logprobs=prompt[:2]))
    stream.put(delta(START, 0, [], prompt_index=2, prompt_logprobs=prompt[2:5]))
    stream.put(
        delta(
            START,
            0,
            [7],
            logprobs=output[:1],
            prompt_index=5,
            prompt_logprobs=prompt[5:],
            cached_tokens=4,
            cached_by_tier={"host": 1},
        )
    )
    stream.put(delta(START, 1, [8, 9], "length", logprobs=output[1:]))
    only = stream.take()
    assert stream.take() is None
    assert (only.prompt_index, only.prompt_logprobs) == (0, logprobs(0, 6))
    assert (only.token_ids, only.logprobs) == ([7, 8, 9], logprobs(10, 13))
    assert (only.cached_tokens, only.finish.reason) == (4, "length")
    assert only.cached_by_tier == {"host": 1}


def test_runs_of_prompt_positions_that_do_not_continue_each_other_stay_apart(stream):
    stream.put(delta(START, 0, [], prompt_logprobs=logprobs(0, 2)))
    stream.put(delta(START, 0, [], prompt_index=3, prompt_logprobs=logprobs(3, 4)))
    assert [stream.take().prompt_index, stream.take().prompt_index] == [0, 3]


def test_a_failure_comes_after_what_waits(stream):
    stream.put(delta(START, 0, [1]))
    stream.fail(PeerLost("gone"))
    assert (stream.is_open, stream.is_empty) == (False, False)
    assert stream.take().token_ids == [1]
    assert stream.is_empty
    with pytest.raises(PeerLost):
        stream.take()


def test_an_abort_cancels_once_and_ends_where_the_tokens_ended(stream, cancelled):
    stream.put(delta(START, 0, [1, 2]))
    assert stream.take().token_ids == [1, 2]
    stream.abort()
    stream.close()
    last = stream.take()
    assert (last.index, last.finish.reason) == (2, "abort")
    assert cancelled == [("r1", 0)]


def test_an_abort_before_any_token_of_a_replay_ends_where_the_earlier_attempt_did():
    stream = made(StartColocated(request=request(num_prior_tokens=3)), [])
    stream.abort()
    assert stream.take().index == 3


class Tap:
    """Takes ordinary tokens, or none while it is full."""

    def __init__(self) -> None:
        self.taken, self.is_full = [], False

    def take_ordinary(self, token_ids) -> bool:
        if not self.is_full:
            self.taken += token_ids
        return not self.is_full


async def next_delta(reading):
    async with asyncio.timeout(PATIENCE_S):
        return await anext(reading)


async def until_reading(reading) -> asyncio.Task:
    """Return the task of a reader that waits."""
    waiting = asyncio.ensure_future(next_delta(reading))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return waiting


async def test_a_stream_that_goes_on_after_a_replay_gives_its_tap_tokens_in_order_only():
    again = StartColocated(request=request(num_prior_tokens=3), attempt=1)
    stream, tap = made(again), Tap()
    reading = stream.read(tap)
    waiting = await until_reading(reading)
    stream.put(delta(again, 3, []))  # of the prompt only
    assert (await waiting).token_ids == []
    waiting = await until_reading(reading)
    # The first token is never ordinary: there is more to say of it.
    give(stream, 3, (13,))
    first = await waiting
    assert (first.index, first.token_ids, tap.taken) == (3, [13], [])
    waiting = await until_reading(reading)
    give(stream, 4, (14,))
    give(stream, 5, (15,))
    assert tap.taken == [14, 15]
    # One that does not follow, and all behind it, are for the reader to judge by their index.
    give(stream, 7, (17,))
    give(stream, 8, (18,))
    late = await waiting
    assert (late.index, late.token_ids, tap.taken) == (7, [17, 18], [14, 15])
    await reading.aclose()


async def test_tokens_that_a_full_tap_refuses_reach_the_reader_and_the_next_ones_the_tap(stream):
    tap = Tap()
    reading = stream.read(tap)
    waiting = await until_reading(reading)
    give(stream, 0, (10,))
    assert (await waiting).token_ids == [10]
    waiting = await until_reading(reading)
    tap.is_full = True
    give(stream, 1, (11,))
    tap.is_full = False
    give(stream, 2, (12,))  # behind what waits, not before it
    late = await waiting
    assert (late.index, late.token_ids, tap.taken) == (1, [11, 12], [])
    waiting = await until_reading(reading)
    give(stream, 3, (13,))
    assert tap.taken == [13]
    stream.put(delta(START, 4, [14], "length"))
    assert (await waiting).token_ids == [14]
    with pytest.raises(StopAsyncIteration):
        await next_delta(reading)
