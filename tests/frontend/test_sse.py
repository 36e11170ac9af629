"""The outbox of waiting writes, without a client."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.frontend.http import sse
from tandem.frontend.http.sse import Outbox
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
