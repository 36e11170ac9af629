"""A small HTTP client that times whole answers, beside streams that it only reads.

Run with a `Plan` as JSON on standard input; writes `Measured` as JSON. Raw sockets on uvloop, some 20 µs a
request: what is measured is the far side.
"""

import asyncio
import sys
import time
from typing import cast

import msgspec
import uvloop
from typing_extensions import override


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to send.

    Attributes:
        body: Of each timed POST.
        connections: Each has one request under way.
        pause_s: Between an answer and the next request on a connection; 0 for as fast as it goes.
        warm_up_s: Requests that begin before are not counted.
        num_streams: Connections that stream, again and again.
        stream_body: Of their POSTs.
    """

    host: str = "127.0.0.1"
    port: int
    path: str
    body: str
    connections: int
    duration_s: float
    pause_s: float = 0.0
    warm_up_s: float = 1.0
    num_streams: int = 0
    stream_body: str = ""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What came back.

    Attributes:
        latencies_ms: Of answers that were counted, and good.
        elapsed_s: While they were counted.
        stream_bytes: Read from the streams meanwhile.
        errors: Of answers that were not good, the first few.
    """

    latencies_ms: list[float]
    elapsed_s: float
    stream_bytes: int
    num_failed: int
    errors: list[str]


class Connection(asyncio.Protocol):
    """Sends a request, and another when the answer is whole."""

    def __init__(self, load: "Load", request: bytes, *, is_stream: bool) -> None:
        self._load, self._request, self._is_stream = load, request, is_stream
        self._received = bytearray()
        self._sent_s = 0.0
        self._transport: asyncio.Transport | None = None

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(
            asyncio.Transport, transport
        )  # uvloop's is none of asyncio's classes
        self._send()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        if not self._load.is_over:
            self._load.failed(f"connection lost: {exc}")

    @override
    def data_received(self, data: bytes) -> None:
        if self._is_stream:
            self._load.stream_bytes += len(data)
            if data.endswith(b"0\r\n\r\n"):
                self._send()
            return
        self._received += data
        if not _is_whole(self._received):
            return
        self._load.answered(self._sent_s, self._received)
        self._received = bytearray()
        if self._load.plan.pause_s:
            asyncio.get_running_loop().call_later(self._load.plan.pause_s, self._send)
        else:
            self._send()

    def _send(self) -> None:
        assert self._transport is not None
        if not self._load.is_over:
            self._sent_s = time.perf_counter()
            self._transport.write(self._request)


def _is_whole(response: bytearray) -> bool:
    end = response.find(b"\r\n\r\n")
    if end < 0:
        return False
    head = bytes(response[:end]).lower()
    _, found, length = head.partition(b"content-length:")
    if found:
        return len(response) >= end + 4 + int(length.split(b"\r\n", 1)[0])
    return response.endswith(b"0\r\n\r\n")


class Load:
    """One plan under way."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.is_over = False
        self.stream_bytes = 0
        self._latencies_ms: list[float] = []
        self._num_failed = 0
        self._errors: list[str] = []
        self._counts_from_s = float("inf")
        self._transports: list[asyncio.WriteTransport] = []

    def answered(self, sent_s: float, response: bytearray) -> None:
        """Note an answer."""
        if not response.startswith(b"HTTP/1.1 200"):
            self.failed(bytes(response[:300]).decode(errors="replace"))
        elif sent_s >= self._counts_from_s:
            self._latencies_ms.append((time.perf_counter() - sent_s) * 1000)

    def failed(self, error: str) -> None:
        """Note that there was none, or no good one."""
        self._num_failed += 1
        if len(self._errors) < 3:
            self._errors.append(error)

    async def run(self) -> Measured:
        """Load for the time of the plan."""
        plan = self.plan
        try:
            for _ in range(plan.num_streams):
                await self._connect(plan.stream_body, is_stream=True)
            for _ in range(plan.connections):
                await self._connect(plan.body, is_stream=False)
            await asyncio.sleep(plan.warm_up_s)
            # For who reads the other side's CPU time: from here to the end it is all of requests that count.
            sys.stderr.write("warm\n")
            sys.stderr.flush()
            self._counts_from_s, self.stream_bytes = time.perf_counter(), 0
            await asyncio.sleep(plan.duration_s)
            return self.measured()
        finally:
            self.is_over = True
            for transport in self._transports:
                transport.abort()

    def measured(self) -> Measured:
        """Return what was measured so far."""
        return Measured(
            latencies_ms=self._latencies_ms,
            elapsed_s=time.perf_counter() - self._counts_from_s,
            stream_bytes=self.stream_bytes,
            num_failed=self._num_failed,
            errors=self._errors,
        )

    async def _connect(self, body: str, *, is_stream: bool) -> None:
        plan = self.plan
        content = body.encode()
        head = (
            f"POST {plan.path} HTTP/1.1\r\nHost: {plan.host}:{plan.port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        request = head.encode() + content
        transport, _ = await asyncio.get_running_loop().create_connection(
            lambda: Connection(self, request, is_stream=is_stream), plan.host, plan.port
        )
        self._transports.append(transport)


def main() -> None:
    """Do one plan."""
    plan = msgspec.json.decode(sys.stdin.buffer.read(), type=Plan)
    sys.stdout.buffer.write(msgspec.json.encode(uvloop.run(Load(plan).run())))


if __name__ == "__main__":
    main()
