"""Limits of a request's body: its bytes, and the seconds that it may take.

```
 head (aiohttp) ─▶ expect ─▶ key ─▶ read_body: 413 415 429 408 ─▶ handler
```
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import HttpVersion11, web
from aiohttp.typedefs import Handler
from typing_extensions import override

from tandem.frontend.edge import EDGE
from tandem.frontend.middleware import error_response
from tandem.wire.errors import BodyTooLarge, InvalidRequest, Overloaded, TandemError

# What all bodies that are still coming in may hold of one process.
INCOMING_BYTES = 1024 * 1024 * 1024
# Ten thousand of these hold as much as that, and are not counted.
SMALL_BYTES = 64 * 1024


class BodyTimedOut(InvalidRequest, code="body_timeout", status=408):
    """The body did not come in time."""


class EncodingUnsupported(InvalidRequest, code="unsupported_encoding", status=415):
    """The body is compressed."""


class ExpectationFailed(InvalidRequest, code="expectation_failed", status=417):
    """The request expects something other than 100-continue."""


class Incoming:
    """Bytes reserved for bodies that are coming in.

    Attributes:
        size_bytes: As their heads announce. A body in chunks counts as large as one may be.
    """

    def __init__(self, limit_bytes: int = INCOMING_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self.size_bytes = 0

    @override
    def __repr__(self) -> str:
        return f"Incoming({self.size_bytes} of {self._limit_bytes} bytes)"

    @contextmanager
    def reserve(self, size_bytes: int) -> Iterator[None]:
        """Reserve what one body may hold, inside the block.

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


@web.middleware
async def read_body(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Read the body, so that a handler's own `read` never waits.

    Raises:
        BodyTooLarge: Its length, or what came so far, passes the limit.
        BodyTimedOut: It took too long.
        Overloaded: Other bodies hold too much.
        EncodingUnsupported: It is compressed, and could inflate.
    """
    if not request.body_exists or request.method not in {"POST", "PUT"}:
        return await handler(request)
    refuse_by_head(request)
    try:
        if request.content.is_eof():  # most bodies came with the head
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
    """Reject a body by its head.

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
    """Ask a client with `Expect` for its body, or return why it would be rejected.

    aiohttp calls it outside of all middlewares.
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
