"""An engine's answers over a real link, and the stream of one attempt."""

import asyncio
import itertools
import math
from contextlib import asynccontextmanager

import pytest

from tandem.wire.channel import Heartbeat
from tandem.wire.engine_client import EngineClient, deliver
from tandem.wire.errors import EngineFailed, InvalidRequest, PeerLost, TandemError
from tandem.wire.generation import Epoch
from tandem.wire.messages import Cancel, FlushCache, NodeLoad, Pong, StartColocated, TokenBatch
from tandem.wire.token_stream import TokenStream
from tests.patience import PATIENCE_S, until_async
from tests.router.fake_node import FakeEngine, delta, logprobs, request

START = StartColocated(request=request())


@asynccontextmanager
async def connected(engine: FakeEngine, epoch=None):
    client = EngineClient(engine.address, epoch=epoch)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(client.run())
        async with asyncio.timeout(PATIENCE_S):
            await client.answered.wait()
        yield client
        client.stop()


@pytest.fixture
async def engine():
    engine = FakeEngine(load=NodeLoad(num_running=3))
    yield engine
    engine.close()


@pytest.fixture
async def client(engine):
    async with connected(engine, engine.epoch) as client:
        yield client


async def read(stream) -> list:
    async with asyncio.timeout(PATIENCE_S):
        return [part async for part in stream.read()]


def ids_of(parts) -> list[int]:
    return [token for part in parts for token in part.token_ids]


async def test_tokens_reach_their_stream_and_finish_ends_it(client, engine):
    stream = client.generate(START)
    start = await engine.next(StartColocated)
    engine.say(start, 0, [5])
    engine.say(start, 1, [6, 7], "length")
    parts = await read(stream)
    assert ids_of(parts) == [5, 6, 7]
    assert parts[-1].finish.reason == "length"
    assert client.num_streams == 0


async def test_on_change_is_called_after_each_change_of_load_or_state(engine):
    seen = []

    def record() -> None:
        seen.append((client.is_up, client.load.num_running))

    client = EngineClient(engine.address, on_change=record)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(client.run())
        # Possibly several calls: the first answer may arrive after the second ping.
        await until_async(lambda: seen)
        assert set(seen) == {(True, 3)}
        engine.send(Pong(epoch=engine.epoch, load=NodeLoad(num_running=4)))
        await until_async(lambda: (True, 4) in seen)
        client.stop()
        assert seen[-1][0] is False


class BrokenTap:
    def take_ordinary_at(self, index, token_ids):
        raise KeyError(index)


async def test_exception_in_tap_cancels_only_its_stream(client, engine):
    other = StartColocated(request=request(request_id="r2"))
    broken, whole = client.generate(START), client.generate(other)
    numbers = [(await engine.next(StartColocated)).stream for _ in range(2)]
    broken.tap = BrokenTap()
    engine.send(
        TokenBatch(epoch=engine.epoch, deltas=[], streams=numbers, indexes=[0, 0], token_ids=[1, 2])
    )
    with pytest.raises(TandemError, match="KeyError") as failed:
        await read(broken)
    assert (failed.value.code, failed.value.is_retryable) == ("internal_error", False)
    engine.say(other, 1, [3], "stop")
    assert ids_of(await read(whole)) == [2, 3]
    assert await engine.next(Cancel) == Cancel(request_id="r1")


async def test_failure_is_raised_after_earlier_tokens(client, engine):
    stream = client.generate(START)
    start = await engine.next(StartColocated)
    engine.say(start, 0, [5])
    engine.fail(start, EngineFailed("out of luck"))
    received = []
    with pytest.raises(EngineFailed, match="out of luck"):
        async for part in stream.read():
            received += part.token_ids
    assert received == [5]


async def test_tokens_of_another_attempt_are_ignored(client, engine):
    stream = client.generate(START)
    await engine.next(StartColocated)
    engine.say(StartColocated(request=request(), attempt=7), 0, [9])
    engine.say(START, 0, [5], "stop")
    assert ids_of(await read(stream)) == [5]


async def test_leaving_a_stream_early_cancels_once(client, engine):
    with client.generate(START) as stream:
        await engine.next(StartColocated)
    stream.close()
    assert await engine.next(Cancel) == Cancel(request_id="r1")
    client.flush_cache()
    await engine.next(FlushCache)  # and no second Cancel before it


async def test_aborted_request_finishes_with_reason_abort_and_is_cancelled(client, engine):
    stream = client.generate(START)
    engine.say(await engine.next(StartColocated), 0, [5])
    await until_async(lambda: stream.take() is not None)
    assert client.abort("r1")
    (last,) = await read(stream)
    assert (last.index, last.token_ids, last.finish.reason) == (1, [], "abort")
    await engine.next(Cancel)
    assert not client.abort("r1")


async def test_second_stream_for_one_attempt_is_rejected(client):
    with client.generate(START), pytest.raises(InvalidRequest, match="in use"):
        client.generate(START)


async def test_engine_death_fails_every_stream(engine):
    async with connected(engine) as client:
        streams = [
            client.generate(START),
            client.generate(StartColocated(request=request(request_id="r2"))),
        ]
        engine.close()
        for stream in streams:
            with pytest.raises(PeerLost, match="connection broke"):
                await read(stream)
        with pytest.raises(PeerLost):
            client.generate(START)


async def test_message_of_another_epoch_fails_every_stream(client, engine):
    stream = client.generate(START)
    await engine.next(StartColocated)
    engine.send(Pong(epoch=Epoch(engine.epoch + 1), load=NodeLoad()))
    with pytest.raises(PeerLost, match="restarted"):
        await read(stream)
    assert not client.is_up


async def test_unresolvable_host_is_reported_as_refusal_and_retried():
    client = EngineClient("tcp://nowhere.invalid:1")
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(client.run())
        await until_async(lambda: client.refusal)
        assert "cannot resolve nowhere.invalid" in client.refusal
        assert not running.done()
        client.stop()


async def test_client_without_engine_starts_no_streams():
    client = EngineClient("tcp://127.0.0.1:1")
    with pytest.raises(PeerLost):
        client.generate(START)
    assert client.num_streams == 0
    client.stop()
    await client.run()


class Tap:
    """Accepts ordinary tokens of one stream; rejects them while it is closed."""

    def __init__(self) -> None:
        self.taken, self.is_open = [], True

    def take_ordinary_at(self, index, token_ids) -> bool:
        if self.is_open:
            self.taken.append((index, list(token_ids)))
        return self.is_open


def step(engine, **tokens: tuple[int, int]) -> TokenBatch:
    """Return a step's ordinary tokens: index and id by stream number."""
    return TokenBatch(
        epoch=engine.epoch,
        deltas=[],
        streams=[int(name.removeprefix("s")) for name in tokens],
        indexes=[index for index, _ in tokens.values()],
        token_ids=[token_id for _, token_id in tokens.values()],
    )


async def two_streams(client):
    streams = [client.generate(StartColocated(request=request(request_id=i))) for i in "ab"]
    taps = [Tap(), Tap()]
    for stream, tap in zip(streams, taps, strict=True):
        stream.tap = tap
    return streams, taps


async def test_steps_that_arrive_together_reach_each_stream_as_one_run(client, engine):
    _, (first, second) = await two_streams(client)
    client._take([step(engine, s1=(1, 11), s2=(1, 21)), step(engine, s1=(2, 12), s2=(2, 22))])
    assert (first.taken, second.taken) == ([(1, [11, 12])], [(1, [21, 22])])


async def test_tokens_with_index_gaps_are_not_merged(client, engine):
    _, (tap, _) = await two_streams(client)
    client._take([step(engine, s1=(1, 11)), step(engine, s1=(1, 11)), step(engine, s1=(3, 13))])
    assert tap.taken == [(1, [11]), (1, [11]), (3, [13])]


async def test_delta_is_delivered_after_earlier_ordinary_tokens(client, engine):
    (stream, _), (tap, _) = await two_streams(client)
    end = delta(StartColocated(request=request(request_id="a")), 3, [13], "length")
    last = TokenBatch(epoch=engine.epoch, deltas=[end])
    client._take([step(engine, s1=(1, 11)), step(engine, s1=(2, 12)), last])
    assert tap.taken == [(1, [11, 12])]
    assert ids_of(await read(stream)) == [13]


async def test_is_alive_waits_for_a_message_or_the_loss_of_the_link(
    engine,
):
    client = EngineClient(engine.address, heartbeat=Heartbeat(60))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(client.run())
        await client.answered.wait()
        assert await client.is_alive()
        # From here on the engine sends nothing on its own: the client sends no more pings, and the engine answered
        # the earlier ones before it reported the flush.
        client.flush_cache()
        client._send = lambda message: None
        await engine.next(FlushCache)
        engine.send(Pong(epoch=engine.epoch, load=NodeLoad(num_running=4)))
        await until_async(lambda: client.load.num_running == 4)
        client._received_at_s = -math.inf
        checking = tasks.create_task(client.is_alive())
        await asyncio.sleep(0)
        assert not checking.done()
        engine.send(Pong(epoch=engine.epoch, load=NodeLoad()))
        assert await checking
        client._received_at_s = -math.inf
        checking = tasks.create_task(client.is_alive())
        await asyncio.sleep(0)
        engine.close()
        assert not await checking


async def test_idle_client_pings_at_every_second_interval():
    client, sent = EngineClient("tcp://127.0.0.1:1"), []
    client._send = sent.append
    client.answered.set()

    def pings(num_intervals: int) -> list[bool]:
        counts = [len(sent)]
        for _ in range(num_intervals):
            client._ping()
            client._next_ping.cancel()
            counts.append(len(sent))
        return [after > before for before, after in itertools.pairwise(counts)]

    assert pings(6) == [True, True, True, False, True, False]
    stream = client.generate(START)
    assert pings(3) == [True, True, True]
    stream.close()
    # Two idle pings show the engine that its last answer was read.
    assert pings(4) == [True, True, True, False]
    client.generate(START).close()
    assert pings(2) == [True, True], "a stream that ended between two pings counts too"


async def test_is_alive_returns_true_for_a_silent_engine_at_the_deadline(client):
    client._received_at_s, client._heartbeat = -math.inf, Heartbeat(0)
    assert await client.is_alive()


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


def test_deltas_with_index_gaps_are_not_merged(stream):
    stream.put(delta(START, 0, [1]))
    stream.put(delta(START, 0, [1]))
    assert [stream.take().index, stream.take().index] == [0, 0]


def test_logprobs_are_merged_with_their_tokens_without_loss(stream):
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


def test_prompt_logprobs_with_position_gaps_are_not_merged(stream):
    stream.put(delta(START, 0, [], prompt_logprobs=logprobs(0, 2)))
    stream.put(delta(START, 0, [], prompt_index=3, prompt_logprobs=logprobs(3, 4)))
    assert [stream.take().prompt_index, stream.take().prompt_index] == [0, 3]


def test_failure_is_raised_after_queued_deltas(stream):
    stream.put(delta(START, 0, [1]))
    stream.fail(PeerLost("gone"))
    assert (stream.is_open, stream.is_empty) == (False, False)
    assert stream.take().token_ids == [1]
    assert stream.is_empty
    with pytest.raises(PeerLost):
        stream.take()


def test_abort_cancels_once_and_finishes_at_the_next_index(stream, cancelled):
    stream.put(delta(START, 0, [1, 2]))
    assert stream.take().token_ids == [1, 2]
    stream.abort()
    stream.close()
    last = stream.take()
    assert (last.index, last.finish.reason) == (2, "abort")
    assert cancelled == [("r1", 0)]


def test_abort_before_first_token_of_replay_keeps_the_earlier_index():
    stream = made(StartColocated(request=request(num_prior_tokens=3)), [])
    stream.abort()
    assert stream.take().index == 3


class FullTap:
    """Accepts ordinary tokens; rejects them while it is full."""

    def __init__(self) -> None:
        self.taken, self.is_full = [], False

    def take_ordinary(self, token_ids) -> bool:
        if not self.is_full:
            self.taken += token_ids
        return not self.is_full


async def next_delta(reading):
    async with asyncio.timeout(PATIENCE_S):
        return await anext(reading)


async def start_reading(reading) -> asyncio.Task:
    """Return the task of a reader that is waiting for a delta."""
    waiting = asyncio.ensure_future(next_delta(reading))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return waiting


async def test_replayed_stream_passes_its_tap_tokens_in_order_only():
    again = StartColocated(request=request(num_prior_tokens=3), attempt=1)
    stream, tap = made(again), FullTap()
    reading = stream.read(tap)
    waiting = await start_reading(reading)
    stream.put(delta(again, 3, []))  # no tokens yet
    assert (await waiting).token_ids == []
    waiting = await start_reading(reading)
    # The first token is never ordinary: it carries more than an id.
    deliver(stream, 3, (13,))
    first = await waiting
    assert (first.index, first.token_ids, tap.taken) == (3, [13], [])
    waiting = await start_reading(reading)
    deliver(stream, 4, (14,))
    deliver(stream, 5, (15,))
    assert tap.taken == [14, 15]
    # A token that does not follow, and all later ones, go to the reader, which checks their index.
    deliver(stream, 7, (17,))
    deliver(stream, 8, (18,))
    late = await waiting
    assert (late.index, late.token_ids, tap.taken) == (7, [17, 18], [14, 15])
    await reading.aclose()


async def test_tokens_rejected_by_a_full_tap_reach_the_reader_and_later_ones_the_tap(stream):
    tap = FullTap()
    reading = stream.read(tap)
    waiting = await start_reading(reading)
    deliver(stream, 0, (10,))
    assert (await waiting).token_ids == [10]
    waiting = await start_reading(reading)
    tap.is_full = True
    deliver(stream, 1, (11,))
    tap.is_full = False
    deliver(stream, 2, (12,))  # must follow the queued token
    late = await waiting
    assert (late.index, late.token_ids, tap.taken) == (1, [11, 12], [])
    waiting = await start_reading(reading)
    deliver(stream, 3, (13,))
    assert tap.taken == [13]
    stream.put(delta(START, 4, [14], "length"))
    assert (await waiting).token_ids == [14]
    with pytest.raises(StopAsyncIteration):
        await next_delta(reading)
