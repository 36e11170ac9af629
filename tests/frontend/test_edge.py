import asyncio
import threading

import pytest

from tandem.frontend.app import create_app
from tandem.frontend.edge import EDGE, INLINE_BYTES, MAX_READERS
from tests.frontend.fakes import FakeBackend
from tests.patience import PATIENCE_S

LARGE = b'{"text": "' + b"a" * INLINE_BYTES + b'"}'


class Readers:
    """Readers that hold their thread until the test lets go."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Semaphore(0), threading.Event()

    def read(self, data):
        self.begun.release()
        assert self.may_end.wait(PATIENCE_S)
        return data

    async def begin(self) -> None:
        assert await asyncio.to_thread(self.begun.acquire, timeout=PATIENCE_S)


async def test_readers_whose_clients_are_gone_still_count_as_readers():
    edge, readers = create_app(FakeBackend(None))[EDGE], Readers()
    for _ in range(MAX_READERS):
        gone = asyncio.ensure_future(edge.read(LARGE, readers.read))
        await readers.begin()
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
    order = []
    late = asyncio.ensure_future(edge.read(LARGE, lambda _: order.append("late")))
    small = await edge.read(b"{}", lambda data: data)
    assert small == {}
    assert await asyncio.to_thread(lambda: "free") == "free"
    assert order == []
    order.append("let go")
    readers.may_end.set()
    await late
    assert order == ["let go", "late"]


async def test_an_app_that_is_cleaned_up_leaves_no_reader_behind():
    app = create_app(FakeBackend(None))
    await app[EDGE].read(LARGE, lambda data: data)
    app.freeze()
    await app.startup()
    await app.cleanup()
    with pytest.raises(RuntimeError, match="shutdown"):
        await app[EDGE].read(LARGE, lambda data: data)
