"""A small HTTP load generator on raw sockets. It times complete responses, and reads streams without parsing them.

It reads a `Plan` as JSON from stdin and writes a `Measured` as JSON to stdout. A request costs the client only 20 µs, so that
the server dominates the measurement. The client also reads the server's CPU time over the measured window.
"""

import asyncio
import subprocess
import sys
import time
from typing import cast

import msgspec
import uvloop
from typing_extensions import override

from benchmarks.rig import OTHER_CORES, cpu_s, pinned

STALL_TIMEOUT_S = 120.0
# Includes the end of the previous line. Without it, a response whose last header ends in 0 would match, such as one
# with a hexadecimal id (1 in 16).
LAST_CHUNK = b"\r\n0\r\n\r\n"


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The load to generate.

    Attributes:
        body: Body of each timed POST.
        connections: Number of connections with timed requests, one in flight on each.
        pause_s: Pause between a response and the next request on a connection; 0: none.
        warm_up_s: Requests that start within this time are not counted.
        num_streams: Number of connections that repeat a streaming request.
        stream_body: Body of each streaming POST.
        warm_events: Mean number of events per stream before the measured window starts.
        pids: Processes whose CPU time is measured.
    """

    port: int
    path: str
    duration_s: float
    body: str = ""
    connections: int = 0
    pause_s: float = 0.0
    warm_up_s: float = 1.0
    num_streams: int = 0
    stream_body: str = ""
    warm_events: int = 0
    pids: list[int] = []


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """The results of the measured window.

    Attributes:
        latencies_ms: Latencies of the responses with status 200.
        errors: The first three failures.
    """

    latencies_ms: list[float]
    num_events: int
    num_stream_bytes: int
    cpu_s: float
    num_failed: int
    errors: list[str]


class _Connection(asyncio.Protocol):
    """Sends a request, and repeats it when the response is complete."""

    def __init__(self, load: "_Load", request: bytes, *, is_stream: bool) -> None:
        self._load, self._request, self._is_stream = load, request, is_stream
        self._received, self._tail = bytearray(), b""
        self._sent_s = 0.0
        self._is_first = True
        self._transport: asyncio.Transport

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(
            asyncio.Transport, transport
        )  # uvloop's transport is of a different class
        self._send()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        if not self._load.is_over:
            self._load.failed(f"connection lost: {exc}")

    @override
    def data_received(self, data: bytes) -> None:
        load = self._load
        if self._is_stream:
            if self._is_first and b" 200 " not in data[:16]:
                load.failed(data[:300].decode(errors="replace"))
            self._is_first = False
            load.num_events += data.count(b"data: ")
            load.num_stream_bytes += len(data)
            self._tail = (self._tail + data[-len(LAST_CHUNK) :])[-len(LAST_CHUNK) :]
            if self._tail == LAST_CHUNK:
                self._send()
            return
        self._received += data
        if not _is_whole(self._received):
            return
        load.answered(self._sent_s, self._received)
        self._received = bytearray()
        if load.plan.pause_s:
            asyncio.get_running_loop().call_later(load.plan.pause_s, self._send)
        else:
            self._send()

    def _send(self) -> None:
        if not self._load.is_over:
            self._sent_s, self._is_first = time.perf_counter(), True
            self._transport.write(self._request)


def _is_whole(response: bytearray) -> bool:
    end = response.find(b"\r\n\r\n")
    if end < 0:
        return False
    _, found, length = bytes(response[:end]).lower().partition(b"content-length:")
    if found:
        return len(response) >= end + 4 + int(length.split(b"\r\n", 1)[0])
    return response.endswith(LAST_CHUNK)


class _Load:
    """The execution of one plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.is_over = plan, False
        self.num_events = self.num_stream_bytes = self._num_failed = 0
        self._latencies_ms: list[float] = []
        self._errors: list[str] = []
        self._counts_from_s = float("inf")
        self._transports: list[asyncio.WriteTransport] = []

    def answered(self, sent_s: float, response: bytearray) -> None:
        """Record a complete response."""
        if not response.startswith(b"HTTP/1.1 200"):
            self.failed(bytes(response[:300]).decode(errors="replace"))
        elif sent_s >= self._counts_from_s:
            self._latencies_ms.append((time.perf_counter() - sent_s) * 1000)

    def failed(self, error: str) -> None:
        """Record a failed request."""
        self._num_failed += 1
        self._errors = [*self._errors, error][:3]

    async def run(self) -> Measured:
        """Run the plan; return its measurements."""
        plan = self.plan
        for _ in range(plan.num_streams):
            await self._connect(plan.stream_body, is_stream=True)
        for _ in range(plan.connections):
            await self._connect(plan.body, is_stream=False)
        await asyncio.sleep(plan.warm_up_s)
        async with asyncio.timeout(STALL_TIMEOUT_S):
            while self.num_events < plan.warm_events * plan.num_streams and not self._errors:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        begin_cpu_s, self._counts_from_s = cpu_s(plan.pids), time.perf_counter()
        self.num_events = self.num_stream_bytes = 0
        await asyncio.sleep(plan.duration_s)
        measured = Measured(
            latencies_ms=self._latencies_ms,
            num_events=self.num_events,
            num_stream_bytes=self.num_stream_bytes,
            cpu_s=cpu_s(plan.pids) - begin_cpu_s,
            num_failed=self._num_failed,
            errors=self._errors,
        )
        self.is_over = True
        for transport in self._transports:
            transport.abort()
        return measured

    async def _connect(self, body: str, *, is_stream: bool) -> None:
        content = body.encode()
        head = f"POST {self.plan.path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        request = f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content
        transport, _ = await asyncio.get_running_loop().create_connection(
            lambda: _Connection(self, request, is_stream=is_stream), "127.0.0.1", self.plan.port
        )
        self._transports.append(transport)


def drive(plan: Plan) -> Measured:
    """Run the plan in a separate process."""
    command = [*pinned(OTHER_CORES), sys.executable, "-m", "benchmarks.http_load"]
    done = subprocess.run(
        command, input=msgspec.json.encode(plan), capture_output=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"the client failed:\n{done.stderr.decode()[-2000:]}")
    return msgspec.json.decode(done.stdout, type=Measured)


if __name__ == "__main__":
    its_plan = msgspec.json.decode(sys.stdin.buffer.read(), type=Plan)
    sys.stdout.buffer.write(msgspec.json.encode(uvloop.run(_Load(its_plan).run())))
