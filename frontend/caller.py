"""Who sent a request, how long they wait, and how long it and its body may take."""

import asyncio
import hashlib
import math
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from tandem.frontend import timings
from tandem.frontend.edge import EDGE
from tandem.frontend.generation import Generation
from tandem.frontend.keys import key_of
from tandem.frontend.tracing import TRACE
from tandem.wire.errors import BodyTooLarge, InvalidRequest, TandemError

# Enough to tell keys apart, too few to guess them.
CLIENT_DIGITS = 8
TIMEOUT_MS = "X-Request-Timeout-Ms"


class RequestTimedOut(TandemError, code="timeout", status=504):
    """The request and what it generates took longer than the operator allows."""


class BodyTimedOut(InvalidRequest, code="body_timeout", status=408):
    """The body did not come in time."""


class EncodingUnsupported(InvalidRequest, code="unsupported_encoding", status=415):
    """The body is compressed."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request.

    Attributes:
        client: Short name of the key, which may be logged. Empty where no key is needed.
        deadline: Until when it is worth starting, by the loop's clock. None: without end.
        ends_at: When the server ends it, by the same clock. None: never.
        arrived: When the request's head was read, by `time.perf_counter`.
        wants_timings: Whether the answer must report where the time went.
    """

    client: str
    deadline: float | None
    ends_at: float | None
    arrived: float
    wants_timings: bool


CALLER: web.RequestKey[Caller] = web.RequestKey("caller", Caller)


@web.middleware
async def note_caller(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Note who sent a request, before its body has come.

    Raises:
        InvalidRequest: The time to wait is no number.
    """
    arrived = time.perf_counter()
    http = request.app[EDGE].options.http
    wait_s, timeout_s = wait_of(request.headers), http.request_timeout_s
    if timeout_s:
        wait_s = min(timeout_s, math.inf if wait_s is None else wait_s)
    now = asyncio.get_running_loop().time()
    deadline = None if wait_s is None else now + wait_s
    ends_at = now + timeout_s if timeout_s else None
    client = hashlib.sha256(key_of(request)).hexdigest()[:CLIENT_DIGITS] if http.api_keys else ""
    wants_timings = request.headers.get(timings.HEADER, "").lower() in {"1", "true"}
    request[CALLER] = Caller(client, deadline, ends_at, arrived, wants_timings)
    return await handler(request)


def asked_by(
    request: web.Request, generations: Sequence[Generation], session: str
) -> list[Generation]:
    """Return the generations with their caller and session, and with the time that is left now."""
    caller, trace = request[CALLER], request.get(TRACE)
    left_s = None
    if caller.deadline is not None:
        left_s = caller.deadline - asyncio.get_running_loop().time()
    asked = {"client": caller.client, "deadline_s": left_s, "session": session}
    return [
        replace(
            generation,
            request=msgspec.structs.replace(generation.request, **asked),
            timings=timings.Timings(caller.arrived, is_wanted=caller.wants_timings),
            trace=trace,
        )
        for generation in generations
    ]


@asynccontextmanager
async def in_time(request: web.Request) -> AsyncIterator[None]:
    """End the block when the request has taken as long as the operator allows.

    Raises:
        RequestTimedOut: The block was ended.
    """
    limit = asyncio.timeout_at(request[CALLER].ends_at)
    try:
        async with limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        timeout_s = request.app[EDGE].options.http.request_timeout_s
        sentence = f"the request was ended: it took longer than {timeout_s:g} s"
        raise RequestTimedOut(sentence) from None


def wait_of(headers: Mapping[str, str]) -> float | None:
    """Return how many seconds a client waits. None: its header is absent.

    Raises:
        InvalidRequest: The header is no number over 0.
    """
    if (given := headers.get(TIMEOUT_MS)) is None:
        return None
    try:
        wait_ms = float(given)
    except ValueError:
        wait_ms = 0.0
    if not 0 < wait_ms < math.inf:
        raise InvalidRequest(f"{TIMEOUT_MS}: must be milliseconds, a number over 0")
    return wait_ms / 1000


@web.middleware
async def read_body(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Read the body, so that a handler's own `read` never waits. Reject what passes a limit."""
    if not request.body_exists or request.method not in {"POST", "PUT"}:
        return await handler(request)
    options = request.app[EDGE].options
    limit, timeout_s = options.http.max_body_bytes, options.body_timeout_s
    if (request.content_length or 0) > limit:
        raise BodyTooLarge(f"the body passes {limit} bytes")
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise EncodingUnsupported("send the body as it is, without Content-Encoding")
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
