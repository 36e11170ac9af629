"""The floor under an edge: a process that does nothing but `transport.write` an event to each socket.

Run as `python -m benchmarks.edge_floor PORT STEP_S EVENT_BYTES`; whoever connects and sends anything gets
an event of that size every step, for as long as it stays.
"""

import asyncio
import sys
import time
from typing import cast

import uvloop
from typing_extensions import override

BACKLOG = 8192


class _Client(asyncio.Protocol):
    def __init__(self, streams: "list[asyncio.Transport]") -> None:
        self._streams = streams
        self._transport: asyncio.Transport | None = None

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's says that it is none

    @override
    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        if data.startswith(b"GET /health"):
            self._transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
            return
        self._transport.write(b"HTTP/1.1 200 OK\r\n\r\n")
        self._streams.append(self._transport)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        if self._transport in self._streams:
            self._streams.remove(self._transport)


async def run(port: int, step_s: float, event_bytes: int) -> None:
    """Write until the process is ended."""
    streams: list[asyncio.Transport] = []
    loop = asyncio.get_running_loop()
    await loop.create_server(lambda: _Client(streams), "127.0.0.1", port, backlog=BACKLOG)
    event = b"data: ".ljust(event_bytes - 2, b"x") + b"\n\n"
    due = time.monotonic()
    while True:
        due = max(due + step_s, time.monotonic())
        await asyncio.sleep(due - time.monotonic())
        for transport in streams:
            transport.write(event)


if __name__ == "__main__":
    uvloop.run(run(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])))
