"""The outbox of waiting writes, without a client, and silent streams."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.frontend.http import sse
from tandem.frontend.http.sse import KEEP_ALIVE_S, Outbox
from tandem.wire.errors import Overloaded
from tests.frontend.fakes import length, say
from tests.frontend.helpers import ROUTES, LoopClock, stream
from tests.patience import PATIENCE_S


class Transport:
    def __init__(self) -> None:
        self.written = []

    def write(self, data) -> None:
        self.written.append(data)


class Broken:
    def __init__(self, error, abort_error) -> None:
        self._error, self._abort_error = error, abort_error
        self.is_aborted = False

    def write(self, data) -> None:
        raise self._error("the handler is closed")

    def abort(self) -> None:
        self.is_aborted = True
        if self._abort_error is not None:
            raise self._abort_error


async def until_empty(outbox: Outbox) -> int:
    """Return after how many turns of the loop nothing waits any more."""
    turns = 0
    async with asyncio.timeout(PATIENCE_S):
        while outbox._waiting:
            turns += 1
            await asyncio.sleep(0)
    return turns


async def test_many_writes_yield_to_other_callbacks():
    outbox, transport = Outbox(), Transport()
    for _ in range(3 * sse.WRITES_AT_ONCE):
        outbox.put(transport, b"x")
    assert await until_empty(outbox) >= 3


@pytest.mark.parametrize("error", [RuntimeError, OSError, TypeError, AttributeError, MemoryError])
@pytest.mark.parametrize("abort_error", [None, RuntimeError])
@pytest.mark.usefixtures("logs")
async def test_failed_write_aborts_only_its_own_stream(error, abort_error):
    outbox, transport, broken = Outbox(), Transport(), Broken(error, abort_error)
    outbox.put(broken, b"a")
    for _ in range(2 * sse.WRITES_AT_ONCE):
        outbox.put(transport, b"b")
    await until_empty(outbox)
    assert broken.is_aborted
    assert len(transport.written) == 2 * sse.WRITES_AT_ONCE
    outbox.put(broken, b"a")
    outbox.put(transport, b"c")
    outbox.flush()
    assert transport.written[-1] == b"c"


STREAMS = ROUTES | {
    "/inference/v1/generate": {"token_ids": [5], "sampling_params": {"max_tokens": 4}},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}]},
}
PING = b'event: ping\ndata: {"type":"ping"}\n\n'


def keep_alive_of(path) -> bytes:
    return PING if path == "/v1/messages" else b": keep-alive\n\n"


async def opened(client, path, body):
    return await client.post(path, json=body)


@pytest.mark.parametrize("path", STREAMS)
async def test_silent_stream_sends_keep_alives_and_then_its_events(client, backend, path):
    clock, first, second = LoopClock(), asyncio.Event(), asyncio.Event()
    backend.script = say(first, [81], second, length(5))
    body, expected = STREAMS[path] | {"stream": True}, keep_alive_of(path)
    async with asyncio.timeout(PATIENCE_S + 4 * KEEP_ALIVE_S):
        asking = asyncio.create_task(opened(client, path, body))
        await backend.until(lambda: backend.aborts)
        clock.jump(KEEP_ALIVE_S)
        response = await asking
        assert await response.content.readexactly(len(expected)) == expected
        first.set()
        await response.content.readuntil(b"\n\n")  # the first token
        clock.jump(KEEP_ALIVE_S)  # ends the interval with the token
        for _ in range(10):  # turns of the loop in which the next interval begins
            await asyncio.sleep(0)
        clock.jump(KEEP_ALIVE_S)
        while await response.content.readuntil(b"\n\n") != expected:
            pass
        second.set()
        rest = await response.read()
    assert response.status == 200
    assert expected not in rest
    assert rest


async def test_stream_with_events_sends_no_keep_alive(client, backend):
    clock, go_on = LoopClock(), asyncio.Event()
    backend.script = say(go_on, length(5))
    asking = asyncio.create_task(stream(client, "/generate", ROUTES["/generate"]))
    await backend.until(lambda: backend.aborts)
    clock.jump(KEEP_ALIVE_S - 1)
    go_on.set()
    assert len(await asking) == 1


async def test_error_after_a_keep_alive_is_an_event(client, backend):
    clock, go_on = LoopClock(), asyncio.Event()
    backend.script = say(go_on, Overloaded("the queue is full"))
    body = ROUTES["/v1/completions"] | {"stream": True}
    asking = asyncio.create_task(opened(client, "/v1/completions", body))
    await backend.until(lambda: backend.aborts)
    clock.jump(KEEP_ALIVE_S)
    response = await asking
    go_on.set()
    comment, event, done = (await response.text()).strip().split("\n\n")
    assert (response.status, comment, done) == (200, ": keep-alive", "data: [DONE]")
    assert '"code":"overloaded"' in event


async def test_waiting_writes_are_bounded():
    outbox, transport = Outbox(), Transport()
    for _ in range(sse.MAX_WAITING + 1):
        outbox.put(transport, b"x")
    assert len(transport.written) == sse.MAX_WAITING + 1


@given(st.lists(st.one_of(st.integers(0, 3), st.just("flush"), st.just("turn")), max_size=300))
def test_each_transport_gets_its_writes_once_in_order(steps):
    async def run():
        outbox, transports = Outbox(), [Transport() for _ in range(4)]
        put = [[] for _ in transports]
        for number, one in enumerate(steps):
            if one == "flush":
                outbox.flush()
            elif one == "turn":
                await asyncio.sleep(0)
            else:
                put[one].append(b"%d" % number)
                outbox.put(transports[one], put[one][-1])
        outbox.flush()
        assert [transport.written for transport in transports] == put

    asyncio.run(run())
