"""Answering a call of any API: who sent it, its generations side by side, as one answer or one stream.

```
 JSON ──read──▶ Call: generations ──Edge.run──▶ Piece, Piece, ... ──Writer──▶ one body, or events
```

An API is a function that reads its body into a `Call`, and a `Writer` of its answers.
"""

import asyncio
import hashlib
import math
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from tandem.frontend import timings
from tandem.frontend.backend import ServedModel
from tandem.frontend.body import session_of
from tandem.frontend.edge import EDGE, Edge
from tandem.frontend.generation import Generation
from tandem.frontend.keys import key_of
from tandem.frontend.middleware import public_info
from tandem.frontend.options import FrontendOptions
from tandem.frontend.sse import EventStream
from tandem.frontend.tracing import TRACE
from tandem.frontend.transcript import Piece, Sink, joined
from tandem.wire.errors import ErrorInfo, InvalidRequest, TandemError

# Enough to tell keys apart, too few to guess them.
CLIENT_DIGITS = 8
TIMEOUT_MS = "X-Request-Timeout-Ms"

CallT = TypeVar("CallT", bound="Call")


class RequestTimedOut(TandemError, code="timeout", status=504):
    """The request and what it generates took longer than the operator allows."""


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


class Call(Protocol):
    """A checked body."""

    generations: list[Generation]
    is_stream: bool


class StreamSink(Sink, Protocol):
    """Writes one generation as events."""

    generation: Generation

    def write_failure(self, error: ErrorInfo) -> None:
        """Write the end of a generation that an error cut short."""


class Writer(Protocol):
    """Writes the answer of one call, either whole or as events."""

    def whole(self, pieces: Sequence[Piece]) -> bytes:
        """Return the whole answer as JSON; each generation is one piece."""

    def sinks(self, events: EventStream) -> Sequence[StreamSink]:
        """Return what writes each generation to the stream."""

    def summary(self) -> bytes:
        """Return the events behind those of the generations, `[DONE]` included, maybe none."""


class Answer:
    """Keeps the pieces of one generation. A `Sink`."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []

    def write(self, piece: Piece) -> bool:
        """Keep a piece. There is always room."""
        self.pieces.append(piece)
        return True

    async def drain(self) -> bool:
        """Return at once."""
        return True


async def answer(
    request: web.Request,
    read: Callable[[ServedModel, FrontendOptions, dict[str, Any]], CallT],
    writer_of: Callable[[CallT, FrontendOptions], Writer],
) -> web.StreamResponse:
    """Answer a request of an API that `read` and `writer_of` are all of.

    Raises:
        NoNodeAvailable: The model is not known yet.
        TandemError: As `read` or the backend raises it, before anything was sent.
        ConnectionError: The client is gone.
    """
    edge = request.app[EDGE]
    model, options = edge.backend.model(), edge.options

    def read_both(data: dict[str, Any]) -> tuple[CallT, str]:
        return read(model, options, data), session_of(request.headers, data)

    call, session = await edge.read(await request.read(), read_both)
    call.generations = asked_by(request, call.generations, session)
    writer = writer_of(call, options)
    if not call.is_stream:
        body = writer.whole(await _whole(request, call.generations))
        return web.Response(body=body, content_type="application/json")
    async with EventStream(request, options.stall_timeout_s, edge.outbox) as events:
        await _side_by_side([_stream(edge, events, sink) for sink in writer.sinks(events)])
        return await events.finish(writer.summary())


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


async def _whole(request: web.Request, generations: Sequence[Generation]) -> list[Piece]:
    """Return each of several generations as one piece.

    Raises:
        TandemError: One of them failed; the others are cancelled.
    """
    edge, answers = request.app[EDGE], [Answer() for _ in generations]
    async with in_time(request):
        await _side_by_side(
            [
                edge.run(generation, answer)
                for generation, answer in zip(generations, answers, strict=True)
            ]
        )
    return [joined(answer.pieces) for answer in answers]


async def _stream(edge: Edge, events: EventStream, sink: StreamSink) -> None:
    """Send one generation, an error after the first event included.

    Raises:
        TandemError: Nothing was sent yet.
    """
    try:
        async with in_time(events.request):
            await edge.run(sink.generation, sink)
    except TandemError as error:
        if not events.is_started:
            raise
        sink.write_failure(public_info(error))
        await sink.drain()


async def _side_by_side(work: Sequence[Coroutine[None, None, None]]) -> None:
    """Run all of `work` at once. The first error is raised alone, and the others are cancelled."""
    if len(work) == 1:
        await work[0]
        return
    try:
        async with asyncio.TaskGroup() as group:
            for part in work:
                group.create_task(part)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from errors
