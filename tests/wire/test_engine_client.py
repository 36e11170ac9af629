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
from tandem.wire.token_stream import Relay, SoleStream, TokenStream
from tests.patience import PATIENCE_S, until_async
from tests.receivers import Receiver
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


def opened(client, start=START) -> TokenStream:
    """Start an attempt and return its stream, for `read`."""
    return client.generate(start, lambda: None)


async def read(stream) -> list:
    """Return the deltas of a stream until it ends."""
    parts = []
    async with asyncio.timeout(PATIENCE_S):
        while stream.is_open or not stream.is_empty or stream.failure is not None:
            await until_async(lambda: not (stream.is_open and stream.is_empty))
            parts.append(stream.take())
    return parts


def ids_of(parts) -> list[int]:
    return [token for part in parts for token in part.token_ids]


async def test_tokens_reach_their_stream_and_finish_ends_it(client, engine):
    stream = opened(client)
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


class BrokenReceiver:
    def take_ordinary_at(self, index, token_ids):
        raise KeyError(index)

    def take(self, part):
        raise KeyError(part.index)


async def test_exception_in_direct_receiver_cancels_only_its_stream(client, engine):
    other = StartColocated(request=request(request_id="r2"))
    broken, whole = opened(client), opened(client, other)
    numbers = [(await engine.next(StartColocated)).stream for _ in range(2)]
    broken.direct = BrokenReceiver()
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
    stream = opened(client)
    start = await engine.next(StartColocated)
    engine.say(start, 0, [5])
    engine.fail(start, EngineFailed("out of luck"))
    await until_async(lambda: not stream.is_open)
    assert stream.take().token_ids == [5]
    with pytest.raises(EngineFailed, match="out of luck"):
        stream.take()


async def test_tokens_of_another_attempt_are_ignored(client, engine):
    stream = opened(client)
    await engine.next(StartColocated)
    engine.say(StartColocated(request=request(), attempt=7), 0, [9])
    engine.say(START, 0, [5], "stop")
    assert ids_of(await read(stream)) == [5]


async def test_leaving_a_stream_early_cancels_once(client, engine):
    with opened(client) as stream:
        await engine.next(StartColocated)
    stream.close()
    assert await engine.next(Cancel) == Cancel(request_id="r1")
    client.flush_cache()
    await engine.next(FlushCache)  # and no second Cancel before it


async def test_aborted_request_finishes_with_reason_abort_and_is_cancelled(client, engine):
    stream = opened(client)
    engine.say(await engine.next(StartColocated), 0, [5])
    await until_async(lambda: stream.take() is not None)
    assert client.abort("r1")
    (last,) = await read(stream)
    assert (last.index, last.token_ids, last.finish.reason) == (1, [], "abort")
    await engine.next(Cancel)
    assert not client.abort("r1")


async def test_second_stream_for_one_attempt_is_rejected(client):
    with opened(client), pytest.raises(InvalidRequest, match="in use"):
        opened(client)


async def test_engine_death_fails_every_stream(engine):
    async with connected(engine) as client:
        streams = [
            opened(client),
            opened(client, StartColocated(request=request(request_id="r2"))),
        ]
        engine.close()
        for stream in streams:
            with pytest.raises(PeerLost, match="connection broke"):
                await read(stream)
        with pytest.raises(PeerLost):
            opened(client)


async def test_message_of_another_epoch_fails_every_stream(client, engine):
    stream = opened(client)
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
        opened(client)
    assert client.num_streams == 0
    client.stop()
    await client.run()


class Direct:
    """Accepts the ordinary tokens of one stream."""

    def __init__(self) -> None:
        self.taken = []

    def take_ordinary_at(self, index, token_ids) -> bool:
        self.taken.append((index, list(token_ids)))
        return True


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
    streams = [opened(client, StartColocated(request=request(request_id=i))) for i in "ab"]
    for stream in streams:
        stream.direct = Direct()
    return streams, [stream.direct for stream in streams]


async def test_steps_that_arrive_together_reach_each_stream_as_one_run(client, engine):
    _, (first, second) = await two_streams(client)
    client._take([step(engine, s1=(1, 11), s2=(1, 21)), step(engine, s1=(2, 12), s2=(2, 22))])
    assert (first.taken, second.taken) == ([(1, [11, 12])], [(1, [21, 22])])


async def test_tokens_with_index_gaps_are_not_merged(client, engine):
    _, (direct, _) = await two_streams(client)
    client._take([step(engine, s1=(1, 11)), step(engine, s1=(1, 11)), step(engine, s1=(3, 13))])
    assert direct.taken == [(1, [11]), (1, [11]), (3, [13])]


async def test_delta_is_delivered_after_earlier_ordinary_tokens(client, engine):
    (stream, _), (direct, _) = await two_streams(client)
    end = delta(StartColocated(request=request(request_id="a")), 3, [13], "length")
    last = TokenBatch(epoch=engine.epoch, deltas=[end])
    client._take([step(engine, s1=(1, 11)), step(engine, s1=(2, 12)), last])
    assert direct.taken == [(1, [11, 12])]
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
    stream = opened(client)
    assert pings(3) == [True, True, True]
    stream.close()
    # Two idle pings show the engine that its last answer was read.
    assert pings(4) == [True, True, True, False]
    opened(client).close()
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
        lambda: None,
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


class Limited(Receiver):
    """A receiver that records tokens, and accepts ordinary ones while `has_room` is true."""

    def __init__(self) -> None:
        super().__init__(self._take)
        self.deltas, self.ordinary = [], []

    def _take(self, part) -> None:
        self.deltas.append((part.index, list(part.token_ids)))

    def take_ordinary(self, token_ids) -> bool:
        self.ordinary += token_ids if self.has_room else ()
        return self.has_room


@asynccontextmanager
async def relayed(start=START):
    """Yield a stream, its receiver, and the task that relays its deltas."""
    receiver = Limited()
    relay = Relay(receiver)
    stream = TokenStream(start, relay.on_change, forget=lambda _: None, cancel=lambda *_: None)
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(relay.run(SoleStream(stream, receiver).take))
        await asyncio.sleep(0)
        yield stream, receiver, running


async def test_first_token_arrives_as_a_delta_and_later_ones_directly():
    again = StartColocated(request=request(num_prior_tokens=3), attempt=1)
    async with relayed(again) as (stream, receiver, _):
        stream.put(delta(again, 3, []))  # no tokens yet
        deliver(stream, 3, (13,))
        deliver(stream, 4, (14,))
        deliver(stream, 5, (15,))
        assert (receiver.deltas, receiver.ordinary) == ([(3, []), (3, [13])], [14, 15])
        stream.put(delta(again, 6, [16], "length"))


async def test_tokens_for_a_full_receiver_are_merged_until_it_is_drained():
    async with relayed() as (stream, receiver, _):
        deliver(stream, 0, (10,))
        receiver.has_room = False
        deliver(stream, 1, (11,))
        deliver(stream, 2, (12,))
        assert (receiver.deltas, receiver.ordinary) == ([(0, [10])], [])
        await until_async(lambda: receiver.deltas[1:] == [(1, [11, 12])])
        deliver(stream, 3, (13,))
        assert receiver.ordinary == [13]
        stream.put(delta(START, 4, [14], "length"))


async def test_receiver_error_is_raised_by_relay_run():
    with pytest.raises(ExceptionGroup) as raised:
        async with relayed() as (stream, receiver, _):
            receiver.take = BrokenReceiver().take
            stream.put(delta(START, 0, [10]))
    assert raised.group_contains(KeyError)


async def test_relay_raises_a_failure_after_earlier_tokens():
    with pytest.raises(ExceptionGroup) as raised:
        async with relayed() as (stream, receiver, _):
            deliver(stream, 0, (10,))
            stream.fail(PeerLost("gone"))
    assert raised.group_contains(PeerLost)
    assert receiver.deltas == [(0, [10])]


async def test_relay_raises_the_first_of_two_errors():
    with pytest.raises(ExceptionGroup) as raised:
        async with relayed() as (stream, _, _):
            stream.fail(EngineFailed("out of luck"))
            stream.fail(PeerLost("gone"))
    assert raised.group_contains(EngineFailed)
