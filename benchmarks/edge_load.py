"""One load process of `benchmarks/edge.py`: many streams on sockets of their own, read and not understood.

Run with an `EdgeLoad` as JSON on standard input; writes an `EdgeReading` as JSON. A load client that
parsed events would take more of the machine than what is measured.
"""

import asyncio
import sys
import time
from pathlib import Path
from typing import cast

import msgspec
import uvloop
from typing_extensions import override

# Every stream has told so much before anything is counted.
WARM_EVENTS = 16
STALL_TIMEOUT_S = 120.0


class EdgeLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What to open and for how long to count.

    Attributes:
        pids: The processes whose CPU time is counted.
        body: Sent on every socket, as JSON.
    """

    port: int
    path: str
    body: str
    num_streams: int
    window_s: float
    pids: list[int]


class EdgeReading(msgspec.Struct, frozen=True, kw_only=True):
    """What was counted in the window."""

    num_events: int
    num_bytes: int
    cpu_s: float
    wall_s: float


class _Counts:
    def __init__(self) -> None:
        self.events = self.bytes = 0
        self.refusal = b""


class _Stream(asyncio.Protocol):
    """One socket."""

    def __init__(self, request: bytes, counts: _Counts) -> None:
        self._request, self._counts = request, counts
        self._is_first = True

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.WriteTransport, transport).write(self._request)

    @override
    def data_received(self, data: bytes) -> None:
        counts = self._counts
        if self._is_first:
            self._is_first = False
            if b" 200 " not in data[:16]:
                counts.refusal = data
        counts.events += data.count(b"data: ")
        counts.bytes += len(data)


def cpu_s(pids: list[int]) -> float:
    """Return the CPU time of processes that run, in seconds: of all their threads, by the scheduler."""
    threads = [task for pid in pids for task in Path(f"/proc/{pid}/task").iterdir()]
    return sum(int((task / "schedstat").read_text().split()[0]) for task in threads) / 1e9


async def run(load: EdgeLoad) -> EdgeReading:
    """Open all streams, wait until each has begun, count for a while, cut them off."""
    body = load.body.encode()
    head = f"POST {load.path} HTTP/1.1\r\nHost: edge\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    counts, loop = _Counts(), asyncio.get_running_loop()
    transports = []
    for _ in range(load.num_streams):
        transport, _ = await loop.create_connection(
            lambda: _Stream(request, counts), "127.0.0.1", load.port
        )
        transports.append(transport)
    async with asyncio.timeout(STALL_TIMEOUT_S):
        while counts.events < WARM_EVENTS * load.num_streams:
            if counts.refusal:
                raise SystemExit(f"refused: {counts.refusal[:500]!r}")
            await asyncio.sleep(0.05)
    before = (counts.events, counts.bytes, cpu_s(load.pids), time.monotonic())
    await asyncio.sleep(load.window_s)
    after = (counts.events, counts.bytes, cpu_s(load.pids), time.monotonic())
    for transport in transports:
        transport.abort()
    events, size, cpu, wall = (new - old for new, old in zip(after, before, strict=True))
    return EdgeReading(num_events=int(events), num_bytes=int(size), cpu_s=cpu, wall_s=wall)


def main() -> None:
    """Do what standard input says."""
    load = msgspec.json.decode(sys.stdin.buffer.read(), type=EdgeLoad)
    sys.stdout.buffer.write(msgspec.json.encode(uvloop.run(run(load))))


if __name__ == "__main__":
    main()
