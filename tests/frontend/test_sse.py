"""Writes that wait, without a client."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from frontend import sse
from frontend.sse import Outbox


class Transport:
    def __init__(self) -> None:
        self.written = []

    def write(self, data) -> None:
        self.written.append(data)


class Gone:
    def write(self, data) -> None:
        raise RuntimeError("the handler is closed")


async def until_empty(outbox: Outbox) -> int:
    """Return after how many turns of the loop nothing waits any more."""
    turns, first = 0, outbox.round
    while outbox.round == first:
        turns += 1
        await asyncio.sleep(0)
    return turns


async def test_nothing_is_written_before_the_callback_under_way_returned():
    outbox, transport = Outbox(), Transport()
    outbox.put(transport, b"a")
    outbox.put(transport, b"b")
    assert transport.written == []
    await until_empty(outbox)
    assert transport.written == [b"a", b"b"]


async def test_others_have_their_turn_between_many_writes():
    outbox, transport = Outbox(), Transport()
    for _ in range(3 * sse.WRITES_AT_ONCE):
        outbox.put(transport, b"x")
    assert await until_empty(outbox) >= 3


async def test_a_client_that_is_gone_holds_up_nobody():
    outbox, transport = Outbox(), Transport()
    outbox.put(Gone(), b"a")
    outbox.put(transport, b"b")
    await until_empty(outbox)
    assert transport.written == [b"b"]


async def test_what_waits_is_bounded():
    outbox, transport = Outbox(), Transport()
    for _ in range(sse.MAX_WAITING + 1):
        outbox.put(transport, b"x")
    assert len(transport.written) == sse.MAX_WAITING + 1


@given(st.lists(st.one_of(st.integers(0, 3), st.just("flush"), st.just("turn")), max_size=300))
def test_each_transport_gets_its_writes_in_order_once(steps):
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
