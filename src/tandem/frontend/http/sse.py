"""Server-sent events to clients that may read slowly, or not at all.

```
 put ──▶ Outbox ──▶ transport, once every token of the step has become an event
 drain ──▶ waits while the client does not read
```

A stalled client costs at most one write buffer, because the generation waits in `drain`. While a stream has no events,
`keep_alive` lines keep proxies from closing its connection.
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

# The default of aiohttp and uvloop.
WRITE_BUFFER_BYTES = 64 * 1024
# About half a millisecond of writes.
WRITES_AT_ONCE = 64
# Several steps of all the streams that a process can serve.
MAX_WAITING = 16_384
# With less than this in its buffer, a transport has room for more events.
_ROOM_BYTES = WRITE_BUFFER_BYTES // 2
_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # otherwise NGINX buffers events
}
# Proxies close connections that are idle for 60 s: NGINX, AWS and Google by default. The HTML standard, section 9.2.7,
# advises a comment every 15 s.
KEEP_ALIVE_S = 15.0
COMMENT = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
encode = msgspec.json.Encoder().encode


def event(data: object) -> bytes:
    """Return `data` as one event."""
    return b"data: " + encode(data) + b"\n\n"


def named_event(name: str, data: object) -> bytes:
    """Return `data` as one named event."""
    return b"event: %b\n%b" % (name.encode(), event(data))


class Outbox:
    """Delays writes until every token of a step has become an event.

    A write takes several times longer than building the event, and evicts the CPU caches that the next
    token needs. Writes run in batches of `WRITES_AT_ONCE`, so that a step of thousands of streams does
    not delay other requests.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[asyncio.WriteTransport, bytes]] = deque()

    def put(self, transport: asyncio.WriteTransport, data: bytes) -> None:
        """Write `data` after the current callback has returned."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._write_some)
        self._waiting.append((transport, data))
        if len(self._waiting) > MAX_WAITING:
            # This process falls behind. Tokens that arrive meanwhile are merged into one event per stream.
            self.flush()

    def flush(self) -> None:
        """Perform all waiting writes now."""
        while self._waiting:
            self._write(*self._waiting.popleft())

    def _write_some(self) -> None:
        for _ in range(min(WRITES_AT_ONCE, len(self._waiting))):
            self._write(*self._waiting.popleft())
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._write_some)

    def _write(self, transport: asyncio.WriteTransport, data: bytes) -> None:
        """Write without raising, because the writes of other clients follow this one."""
        try:
            transport.write(data)
        except RuntimeError:
            # uvloop raises RuntimeError on a closed connection. The request's handler is cancelled next.
            log.debug("client.gone")
        except Exception:
            log.exception("client.write_failed")
        else:
            return
        with contextlib.suppress(Exception):
            transport.abort()  # the stream is incomplete from here on


class EventStream:
    """One streamed response. Several tasks may send events concurrently without interleaving.

    A context manager: an exception after the start aborts the connection, so that the client does
    not mistake the incomplete stream for a complete answer.

    Args:
        stall_timeout_s: How long the client may leave the write buffer full.
        outbox: Shared by all streams of the process.
        keep_alive: What clients ignore, sent after `KEEP_ALIVE_S` to twice that time without an event.

    Attributes:
        request: The request being answered.
        is_started: Whether the status line was sent. Later errors are sent as events.
    """

    __slots__ = (
        "_is_chunked",
        "_is_idle",
        "_is_keeping",
        "_keep_alive",
        "_keeper",
        "_outbox",
        "_pending",
        "_response",
        "_stall_timeout_s",
        "_start_lock",
        "_transport",
        "is_started",
        "request",
    )

    def __init__(
        self,
        request: web.Request,
        stall_timeout_s: float,
        outbox: Outbox,
        keep_alive: bytes = COMMENT,
    ) -> None:
        self.request, self._outbox, self._keep_alive = request, outbox, keep_alive
        self._is_idle, self._is_keeping = True, False
        self._stall_timeout_s = stall_timeout_s
        self._response = web.StreamResponse(headers=_HEADERS)
        self._start_lock = asyncio.Lock()
        self._pending: list[bytes] = []  # events that were put before the start
        self._transport: asyncio.Transport | None = None  # set at the start
        self._is_chunked = request.version >= HttpVersion11
        self.is_started = False

    async def __aenter__(self) -> Self:
        self._keeper = asyncio.create_task(self._keep_open())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        await self._end_keeper()
        if error is not None and self.is_started:
            self._abort()

    def put(self, events: bytes) -> bool:
        """Send one or several events in one write, bypassing aiohttp's writer.

        Returns:
            True if there is room for more. If False, call `drain` before the next `put`.
        """
        self._is_idle = False
        transport = self._transport
        if transport is None:
            self._pending.append(events)
            return False
        if self._is_chunked:
            events = b"%x\r\n%b\r\n" % (len(events), events)
        self._outbox.put(transport, events)
        return transport.get_write_buffer_size() < _ROOM_BYTES

    async def drain(self) -> None:
        """Start the response if it has events, then wait until the write buffer has room.

        Raises:
            ConnectionError: The client has disconnected, or was disconnected because it stopped reading.
        """
        if not self.is_started:
            if not self._pending:
                return
            await self._start()
        if self.request.transport is None:
            raise ConnectionResetError("the client has disconnected")
        transport = self._transport
        if transport is not None and transport.get_write_buffer_size() >= _ROOM_BYTES:
            self._outbox.flush()
            await self._with_stall_timeout(self.request.writer.drain())

    async def finish(self, last: bytes) -> web.StreamResponse:
        """Send the last events and end the stream. Returns the response for aiohttp.

        Raises:
            ConnectionError: The client has disconnected, or was disconnected because it stopped reading.
        """
        await self._end_keeper()
        if not self.is_started:
            await self._start()
        self._outbox.flush()  # aiohttp's final write must follow all waiting writes
        await self._with_stall_timeout(self._response.write_eof(last))
        return self._response

    async def _keep_open(self) -> None:
        """Send `keep_alive` while there are no events. An error after it is an event, because it starts the response."""
        # A client that has gone or does not read ends the handler, which ends this task.
        with contextlib.suppress(ConnectionError):
            while True:
                self._is_idle = True
                await asyncio.sleep(KEEP_ALIVE_S)
                if self._is_idle:
                    self._is_keeping = True
                    self.put(self._keep_alive)
                    await self.drain()
                    self._is_keeping = False

    async def _end_keeper(self) -> None:
        self._keeper.cancel()
        # `asyncio.wait` suspends even for a finished task. A client that closes after the last event would then cancel
        # the handler of a complete answer, which would count as 499.
        if self._is_keeping:
            await asyncio.wait({self._keeper})
            self._is_keeping = False

    async def _start(self) -> None:
        async with self._start_lock:
            if self.is_started:
                return
            if (transport := self.request.transport) is not None:
                transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
            if self._is_chunked:
                self._response.enable_chunked_encoding()
            await self._response.prepare(self.request)
            self.is_started, self._transport = True, transport
            if self._pending:
                self.put(b"".join(self._pending))
                self._pending.clear()

    async def _with_stall_timeout(self, write: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(self._stall_timeout_s):
                await write
        except TimeoutError:
            log.info("client.stalled", path=self.request.path, timeout_s=self._stall_timeout_s)
            self._abort()
            raise ConnectionAbortedError("the client stopped reading its stream") from None

    def _abort(self) -> None:
        if (transport := self.request.transport) is not None:
            transport.abort()
