"""What a request may cost before it is understood, and in all: bytes of its body, seconds.

```
 head (aiohttp) ─▶ expect ─▶ key ─▶ end_in_time: 504
                                      └─ read_body: 413 415 429 408 ─▶ handler, and what it runs
```

How long a connection may take for a head, or be idle, is an option of `frontend/server.py`.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from aiohttp import HttpVersion11, web
from aiohttp.typedefs import Handler
from typing_extensions import override

from tandem.frontend.edge import EDGE
from tandem.frontend.middleware import error_response
from tandem.wire.errors import BodyTooLarge, InvalidRequest, Overloaded, TandemError

# What bodies that are still coming in may hold of one process, as many as there are of them.
INCOMING_BYTES = 1024 * 1024 * 1024
# Ten thousand of these hold as much as that, and are not counted.
SMALL_BYTES = 64 * 1024
# Past its deadline, a stream that says itself how it ends has this long to write that.
_LAST_EVENT_S = 1.0


class BodyTimedOut(InvalidRequest):
    """The body did not come in time."""

    code = "body_timeout"
    status = 408


class EncodingUnsupported(InvalidRequest):
    """The body is compressed."""

    code = "unsupported_encoding"
    status = 415


class ExpectationFailed(InvalidRequest):
    """The request expects something other than a word to go on."""

    code = "expectation_failed"
    status = 417


class Incoming:
    """Bytes set aside for bodies that are coming in.

    Attributes:
        size_bytes: By what their heads announce; a body in chunks as large as one may be.
    """

    def __init__(self, limit_bytes: int = INCOMING_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self.size_bytes = 0

    @override
    def __repr__(self) -> str:
        return f"Incoming({self.size_bytes} of {self._limit_bytes} bytes)"

    @contextmanager
    def reserve(self, size_bytes: int) -> Iterator[None]:
        """Set aside what one body may hold, inside the block.

        Raises:
            Overloaded: Others hold too much already.
        """
        counted = size_bytes if size_bytes > SMALL_BYTES else 0
        if counted and self.size_bytes and self.size_bytes + counted > self._limit_bytes:
            raise Overloaded("too many large bodies are on their way: send this one again later")
        self.size_bytes += counted
        try:
            yield
        finally:
            self.size_bytes -= counted


INCOMING = web.AppKey("incoming", Incoming)


class RequestTimedOut(TandemError):
    """The request and what it generates took longer than the operator allows."""

    code = "timeout"
    status = 504

    def __init__(self, timeout_s: float) -> None:
        super().__init__(f"the request was ended: it took longer than {timeout_s:g} s")


@dataclass(frozen=True, slots=True)
class _Limit:
    """When a request is over, by the loop's clock, and what cancels it then."""

    deadline: float
    timeout_s: float
    outer: asyncio.Timeout


_LIMIT: web.RequestKey[_Limit] = web.RequestKey("limit", _Limit)


@web.middleware
async def read_body(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Read the body of what has one, so that a handler's own `read` never waits.

    Raises:
        BodyTooLarge: By its length, or as soon as more came.
        BodyTimedOut: It took longer than one may.
        Overloaded: Too much of others is coming in.
        EncodingUnsupported: It is compressed: small bodies could become large ones.
    """
    if not request.body_exists or request.method not in {"POST", "PUT"}:
        return await handler(request)
    refuse_by_head(request)
    try:
        if request.content.is_eof():  # it is here already, as most are
            await request.read()
        else:
            await _read_slowly(request)
    except web.RequestPayloadError as error:
        raise InvalidRequest(f"the body cannot be read: {error}") from error
    return await handler(request)


async def _read_slowly(request: web.Request) -> None:
    options = request.app[EDGE].options
    announced = request.content_length
    size_bytes = options.http.max_body_bytes if announced is None else announced
    try:
        with request.app[INCOMING].reserve(size_bytes):
            async with asyncio.timeout(options.body_timeout_s):
                await request.read()
    except TimeoutError:
        sentence = f"the body did not come within {options.body_timeout_s:g} s"
        raise BodyTimedOut(sentence) from None


def refuse_by_head(request: web.Request) -> None:
    """Refuse a body by what the head says of it.

    Raises:
        BodyTooLarge: Its length passes the limit.
        EncodingUnsupported: It is compressed.
    """
    limit = request.app[EDGE].options.http.max_body_bytes
    if (request.content_length or 0) > limit:
        raise BodyTooLarge(f"the body passes {limit} bytes")
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise EncodingUnsupported("send the body as it is, without Content-Encoding")


async def expect(request: web.Request) -> web.StreamResponse | None:
    """Tell a client that waits for it to send the body; or return why it would be refused.

    aiohttp calls it outside of all middlewares, with a request that has `Expect`.
    """
    if request.version < HttpVersion11:
        return None
    try:
        if request.headers["Expect"].lower() != "100-continue":
            raise ExpectationFailed("Expect: only 100-continue can be met")
        refuse_by_head(request)
    except TandemError as error:
        return error_response(error.info())
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # else aiohttp would take it for the beginning of the answer
    return None


@web.middleware
async def end_in_time(request: web.Request, handler: Handler) -> web.StreamResponse:
    """End a request that takes longer than `request_timeout_s`, and with it what it generates.

    A stream that has begun is cut, unless it ends itself: see `within_time`.

    Raises:
        RequestTimedOut: Nothing was sent yet.
    """
    timeout_s = request.app[EDGE].options.http.request_timeout_s
    deadline = asyncio.get_running_loop().time() + timeout_s
    outer = asyncio.timeout_at(deadline)
    request[_LIMIT] = _Limit(deadline, timeout_s, outer)
    try:
        async with outer:
            return await handler(request)
    except TimeoutError:
        if not outer.expired():
            raise
        raise RequestTimedOut(timeout_s) from None


@asynccontextmanager
async def within_time(request: web.Request) -> AsyncIterator[None]:
    """Raise inside a stream what `end_in_time` would end it with, so that it can say so.

    Raises:
        RequestTimedOut: The request's time is over; there is a little left to send an event.
    """
    limit = request.get(_LIMIT)
    if limit is None:
        yield
        return
    if not limit.outer.expired():
        limit.outer.reschedule(limit.deadline + _LAST_EVENT_S)
    inner = asyncio.timeout_at(limit.deadline)
    try:
        async with inner:
            yield
    except TimeoutError:
        if not inner.expired():
            raise
        raise RequestTimedOut(limit.timeout_s) from None
