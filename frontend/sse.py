"""Server-sent events to clients that may read slowly, or not at all.

```
 put ──▶ Outbox ──▶ transport, once every token of the step has become an event
 drain ──▶ waits while the client does not read
```

A stalled client costs one write buffer: whoever makes events waits in `drain`.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable
from types import TracebackType
from typing import Self

import msgspec
from aiohttp import HttpVersion11, web

from tandem.telemetry.log import get_logger

log = get_logger(__name__)

# aiohttp and uvloop stop the writer at the same size by default.
WRITE_BUFFER_BYTES = 64 * 1024
# Half a millisecond of writes.
WRITES_AT_ONCE = 64
# Several steps of all the streams that a process can carry.
MAX_WAITING = 16_384
# Below it a write cannot block.
_ROOM_BYTES = WRITE_BUFFER_BYTES // 2
_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would hold events back
}
DONE = b"data: [DONE]\n\n"
encode = msgspec.json.Encoder().encode


def event(data: object) -> bytes:
    """Return `data` as one event."""
    return b"data: " + encode(data) + b"\n\n"


def named_event(name: str, data: object) -> bytes:
    """Return `data` as one event with a name."""
    return b"event: %b\n%b" % (name.encode(), event(data))


class Outbox:
    """Writes that wait until every token of a step has become an event.

    A write costs the kernel several times what making the event costs us, and leaves the caches cold
    for the next token. Only so many are made in one go: a step of thousands of streams must not hold
    up other requests.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[asyncio.WriteTransport, bytes]] = deque()

    def put(self, transport: asyncio.WriteTransport, data: bytes) -> None:
        """Write `data` once the running callback has returned."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._write_some)
        self._waiting.append((transport, data))
        if len(self._waiting) > MAX_WAITING:
            # This process falls behind. Steps that arrive meanwhile become one event a stream.
            self.flush()

    def flush(self) -> None:
        """Make all waiting writes now."""
        while self._waiting:
            self._write(*self._waiting.popleft())

    def _write_some(self) -> None:
        for _ in range(min(WRITES_AT_ONCE, len(self._waiting))):
            self._write(*self._waiting.popleft())
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._write_some)

    def _write(self, transport: asyncio.WriteTransport, data: bytes) -> None:
        """Write, and never raise: other clients' writes wait behind this one."""
        try:
            transport.write(data)
        except RuntimeError:
            # uvloop raises it for a closed connection, whose handler is about to be cancelled.
            log.debug("client.gone")
        except Exception:
            log.exception("client.write_failed")
        else:
            return
        with contextlib.suppress(Exception):
            transport.abort()  # rather than to go on without a part


class EventStream:
    """One streamed response. Several tasks may send to it; each event stays whole.

    A context manager: an error that leaves it after the start cuts the connection, so that no
    client takes half an answer for a whole one.

    Args:
        stall_timeout_s: How long a client may leave the write buffer full.
        outbox: Shared by the streams of one process.

    Attributes:
        request: The request that is answered.
        is_started: Whether the status is sent. From then on an error is an event.
    """

    __slots__ = (
        "_early",
        "_is_chunked",
        "_outbox",
        "_response",
        "_stall_timeout_s",
        "_starting",
        "_transport",
        "is_started",
        "request",
    )

    def __init__(self, request: web.Request, stall_timeout_s: float, outbox: Outbox) -> None:
        self.request, self._outbox = request, outbox
        self._stall_timeout_s = stall_timeout_s
        self._response = web.StreamResponse(headers=_HEADERS)
        self._starting = asyncio.Lock()
        self._early: list[bytes] = []  # events put before the start
        self._transport: asyncio.Transport | None = None  # of a stream that has begun
        self._is_chunked = request.version >= HttpVersion11
        self.is_started = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if error is not None and self.is_started:
            self._abort()

    def put(self, events: bytes) -> bool:
        """Send one or several events, in one write past aiohttp's writer.

        Returns:
            Whether there is room for more. If not, `drain` comes first.
        """
        transport = self._transport
        if transport is None:
            self._early.append(events)
            return False
        if self._is_chunked:
            events = b"%x\r\n%b\r\n" % (len(events), events)
        self._outbox.put(transport, events)
        return transport.get_write_buffer_size() < _ROOM_BYTES

    async def drain(self) -> bool:
        """Start the response if it has events, and wait while its client does not read.

        Returns:
            Whether the stream has begun: then there is room for more.

        Raises:
            ConnectionError: The client is gone, or was cut off because it does not read.
        """
        if not self.is_started:
            if not self._early:
                return False
            await self._start()
        if self.request.transport is None:
            raise ConnectionResetError("the client is gone")
        transport = self._transport
        if transport is not None and transport.get_write_buffer_size() >= _ROOM_BYTES:
            self._outbox.flush()
            await self._within_stall_time(self.request.writer.drain())
        return transport is not None

    async def finish(self, last: bytes) -> web.StreamResponse:
        """Send the last events and the end of the stream. Returns the response for aiohttp.

        Raises:
            ConnectionError: The client is gone, or was cut off because it does not read.
        """
        if not self.is_started:
            await self._start()
        self._outbox.flush()  # what aiohttp writes now stands behind it
        await self._within_stall_time(self._response.write_eof(last))
        return self._response

    async def _start(self) -> None:
        async with self._starting:
            if self.is_started:
                return
            if (transport := self.request.transport) is not None:
                transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
            if self._is_chunked:
                self._response.enable_chunked_encoding()
            await self._response.prepare(self.request)
            self.is_started, self._transport = True, transport
            if self._early:
                self.put(b"".join(self._early))
                self._early.clear()

    async def _within_stall_time(self, work: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(self._stall_timeout_s):
                await work
        except TimeoutError:
            log.info("client.stalled", path=self.request.path, timeout_s=self._stall_timeout_s)
            self._abort()
            raise ConnectionAbortedError("the client does not read its stream") from None

    def _abort(self) -> None:
        if (transport := self.request.transport) is not None:
            transport.abort()
