import asyncio
import json
import threading
from types import SimpleNamespace

import pytest

from tandem.frontend.app import create_app
from tandem.frontend.edge import EDGE, INLINE_BYTES, MAX_READERS
from tandem.wire.errors import NoNodeAvailable
from tests.frontend.conftest import serve_app
from tests.frontend.fakes import FakeBackend, length, say
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


@pytest.mark.parametrize(
    ("steps", "outcome"),
    [
        ([[5], length(6)], "finished"),
        ([[5], NoNodeAvailable("no pair")], "failed"),
        ([[5], asyncio.Event()], "cancelled"),
    ],
)
async def test_every_generation_is_reported_with_its_outcome(backend, steps, outcome):
    backend.script = say(*steps)
    app, reports = create_app(backend), asyncio.Queue()
    app[EDGE].timings_sinks.append(SimpleNamespace(request_ended=reports.put_nowait))
    async with asyncio.timeout(PATIENCE_S), serve_app(app) as client:
        body = {"input_ids": [1, 2], "stream": True}
        async with client.post("/generate", json=body) as response:
            first = json.loads((await response.content.readline()).removeprefix(b"data: "))
            if outcome != "cancelled":
                await response.read()
        report = await reports.get()
    assert first["meta_info"]["cached_tokens"] == report.num_cached_tokens == 1
    assert report.outcome == outcome
    assert report.num_output_tokens == (2 if outcome == "finished" else 1)
