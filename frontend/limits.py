"""Limits of a request's body: its bytes, and the seconds that it may take.

```
 head (aiohttp) ─▶ expect ─▶ key ─▶ read_body: 413 415 408 ─▶ handler
```
"""

import asyncio

from aiohttp import HttpVersion11, web
from aiohttp.typedefs import Handler

from tandem.frontend.edge import EDGE
from tandem.frontend.middleware import error_response
from tandem.wire.errors import BodyTooLarge, InvalidRequest, TandemError


class BodyTimedOut(InvalidRequest):
    """The body did not come in time."""

    code = "body_timeout"
    status = 408


class EncodingUnsupported(InvalidRequest):
    """The body is compressed."""

    code = "unsupported_encoding"
    status = 415


class ExpectationFailed(InvalidRequest):
    """The request expects something other than 100-continue."""

    code = "expectation_failed"
    status = 417


@web.middleware
async def read_body(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Read the body, so that a handler's own `read` never waits.

    Raises:
        BodyTooLarge: Its length, or what came so far, passes the limit.
        BodyTimedOut: It took too long.
        EncodingUnsupported: It is compressed, and could inflate.
    """
    if not request.body_exists or request.method not in {"POST", "PUT"}:
        return await handler(request)
    refuse_by_head(request)
    timeout_s = request.app[EDGE].options.body_timeout_s
    try:
        if request.content.is_eof():  # most bodies came with the head
            await request.read()
        else:
            async with asyncio.timeout(timeout_s):
                await request.read()
    except web.RequestPayloadError as error:
        raise InvalidRequest(f"the body cannot be read: {error}") from error
    except TimeoutError:
        raise BodyTimedOut(f"the body did not come within {timeout_s:g} s") from None
    return await handler(request)


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
