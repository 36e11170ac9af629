"""Server-sent events to clients that may read slowly, or not at all.

A stream holds no events of its own: whoever makes them waits in `send` while the client does not
read, so that a stalled client costs one write buffer and its token ids.
"""

import asyncio
import contextlib
from collections import deque
from types import TracebackType
from typing import Self

import msgspec
from aiohttp import HttpVersion11, web
from typing_extensions import override

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


class Outbox:
    """Writes that wait until every token of a step has become an event.

    A write takes the kernel several times what making the event takes us, and leaves the caches with
    nothing of ours: between two writes each token's work would find all it touches in far memory.
    Only so many are made in one go, so that a step of thousands of streams keeps no request waiting.

    Attributes:
        round: Changes when all that waited was written.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[asyncio.WriteTransport, bytes]] = deque()
        self.round = 0

    @override
    def __repr__(self) -> str:
        return f"Outbox({len(self._waiting)} waiting)"

    def put(self, transport: asyncio.WriteTransport, data: bytes) -> None:
        """Write `data` soon: once the callback under way has returned."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._write_some)
        self._waiting.append((transport, data))
        if len(self._waiting) > MAX_WAITING:
            # This process falls behind. Steps that wait meanwhile become one event a stream.
            self.flush()

    def flush(self) -> None:
        """Write all that waits."""
        while self._waiting:
            self._write(*self._waiting.popleft())
        self.round += 1

    def _write_some(self) -> None:
        for _ in range(min(WRITES_AT_ONCE, len(self._waiting))):
            self._write(*self._waiting.popleft())
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._write_some)
        else:
            self.round += 1

    def _write(self, transport: asyncio.WriteTransport, data: bytes) -> None:
        """Write, and never raise: other clients' writes wait behind this one."""
        try:
            transport.write(data)
        except RuntimeError:
            # So says uvloop of a connection that is gone. Its handler is about to hear of it.
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
        request: What is answered.
        is_started: Whether the status is sent: from then on an error is an event.
    """

    __slots__ = (
        "_is_chunked",
        "_last_round",
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
        self._last_round = -1  # in which something of this stream was put into the outbox
        self._stall_timeout_s = stall_timeout_s
        self._response = web.StreamResponse(headers=_HEADERS)
        self._starting = asyncio.Lock()
        # Of a stream that has begun.
        self._transport: asyncio.Transport | None = None
        self._is_chunked = request.version >= HttpVersion11
        self.is_started = False

    @override
    def __repr__(self) -> str:
        return f"EventStream({self.request.path}, is_started={self.is_started})"

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

    async def send(self, events: bytes) -> None:
        """Send one or several events; returns when there is room for more.

        Raises:
            ConnectionError: The client is gone, or was cut off because it does not read.
        """
        self._flush()
        if not self.is_started:
            await self._start()
        if self._has_room(len(events)):
            await self._response.write(events)
        else:
            await self._send_slowly(events)

    def has_room(self) -> bool:
        """Whether `send_now` may be called: the stream has begun, and its client keeps up."""
        transport = self._transport
        return transport is not None and transport.get_write_buffer_size() < _ROOM_BYTES

    def send_now(self, events: bytes) -> None:
        """Send without waiting, when there is room: in one write, past aiohttp's writer."""
        assert self._transport is not None
        if self._is_chunked:
            events = b"%x\r\n%b\r\n" % (len(events), events)
        self._outbox.put(self._transport, events)
        self._last_round = self._outbox.round

    def _flush(self) -> None:
        """See to it that nothing of this stream waits in the outbox: what is written now follows it."""
        if self._last_round == self._outbox.round:
            self._outbox.flush()

    async def finish(self) -> web.StreamResponse:
        """Send the end of the stream; return the response for aiohttp.

        Raises:
            ConnectionError: As `send`.
        """
        self._flush()
        if not self.is_started:
            await self._start()
        try:
            async with asyncio.timeout(self._stall_timeout_s):
                await self._response.write_eof(DONE)
        except TimeoutError:
            self._cut_off()
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
            # The head itself goes with the first event, before anybody else runs.
            self.is_started, self._transport = True, transport

    def _has_room(self, size_bytes: int) -> bool:
        """Tell whether a write cannot block, so that the price of a timer can be saved."""
        transport = self.request.transport
        if transport is None:
            raise ConnectionResetError("the client is gone")
        return transport.get_write_buffer_size() + size_bytes < _ROOM_BYTES

    async def _send_slowly(self, events: bytes) -> None:
        try:
            async with asyncio.timeout(self._stall_timeout_s):
                await self._response.write(events)
        except TimeoutError:
            self._cut_off()

    def _cut_off(self) -> None:
        log.info("client.stalled", path=self.request.path, timeout_s=self._stall_timeout_s)
        self._abort()
        raise ConnectionAbortedError("the client does not read its stream")

    def _abort(self) -> None:
        if (transport := self.request.transport) is not None:
            transport.abort()
