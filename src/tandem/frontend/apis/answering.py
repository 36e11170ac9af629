"""Request handling that all APIs share: run a call's generations concurrently, answer with JSON or a stream.

```
 JSON ──read──▶ ApiCall: generations ──Edge.run──▶ TextPiece, TextPiece, ... ──Writer──▶ one body, or events
```

Each API provides a function that parses its body into an `ApiCall`, and a `Writer` for its answers.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec
from aiohttp import web

from tandem.frontend import timings
from tandem.frontend.backend import ServedModel
from tandem.frontend.chat.body import max_priority, session_of, with_overrides
from tandem.frontend.chat.generation import Generation
from tandem.frontend.http.api_errors import ANTHROPIC_ROUTES
from tandem.frontend.http.edge import EDGE, Edge
from tandem.frontend.http.keys import client_of
from tandem.frontend.http.middleware import public_info
from tandem.frontend.http.sse import COMMENT, EventStream, named_event
from tandem.frontend.http.tracing import TRACE
from tandem.frontend.options import FrontendOptions
from tandem.frontend.request_ids import record_ids, with_header_id
from tandem.frontend.text.transcript import Sink, TextPiece, join_pieces
from tandem.wire.errors import ErrorInfo, InvalidRequest, TandemError

# Anthropic's clients know this event, and show that the server is at work.
PING = named_event("ping", {"type": "ping"})
TIMEOUT_MS = "X-Request-Timeout-Ms"

CallT = TypeVar("CallT", bound="ApiCall")


class RequestTimedOut(TandemError, code="timeout", status=504):
    """The request took longer than `--request-timeout-s`."""


class Caller(msgspec.Struct, frozen=True):
    """The sender of a request and the sender's limits.

    Attributes:
        client: Name of its key; see `client_of`.
        start_by_s: Latest useful start, on the loop's clock. None: no limit.
        end_by_s: When the server cancels the request, on the same clock. None: never.
        received_s: When the request's head was read, by `time.perf_counter`.
        include_timings: Whether the answer must contain the timing report.
    """

    client: str
    start_by_s: float | None
    end_by_s: float | None
    received_s: float
    include_timings: bool


CALLER: web.RequestKey[Caller] = web.RequestKey("caller", Caller)


def attach_caller(request: web.Request) -> None:
    """Attach the `Caller` to a request, before its body is read.

    Raises:
        InvalidRequest: The timeout header is not a positive number.
    """
    received_s = time.perf_counter()
    timeout_s = request.app[EDGE].options.http.request_timeout_s
    wait_s = client_timeout_s(request.headers)
    start_by_s = end_by_s = None
    if wait_s or timeout_s:  # finding the loop would take longer than the rest of this function
        now = asyncio.get_running_loop().time()
        start_by_s = now + min(wait_s or math.inf, timeout_s or math.inf)
        end_by_s = now + timeout_s if timeout_s else None
    include_timings = request.headers.get(timings.HEADER, "").lower() in {"1", "true"}
    request[CALLER] = Caller(client_of(request), start_by_s, end_by_s, received_s, include_timings)


def set_caller(request: web.Request, generations: Sequence[Generation], session: str) -> None:
    """Set the client, session, trace and deadline of the generations, and record their ids.

    A priority above the limit of the client's key is lowered to it, so that clients cannot overtake each other.
    """
    caller, options = request[CALLER], request.app[EDGE].options
    trace = request.get(TRACE) if options.http.traces_endpoint else None
    left_s = None
    if caller.start_by_s is not None:
        left_s = caller.start_by_s - asyncio.get_running_loop().time()
    fields: dict[str, Any] = {"client": caller.client, "deadline_s": left_s, "session": session}
    if caller.client and generations:
        limit = options.max_priority(caller.client)
        fields["priority"] = min(generations[0].request.priority, limit)
    record_ids(request, [generation.id for generation in generations])
    for generation in generations:
        generation.request = msgspec.structs.replace(generation.request, **fields)
        generation.timings = timings.Timings(caller.received_s, is_requested=caller.include_timings)
        generation.trace = trace


def client_timeout_s(headers: Mapping[str, str]) -> float | None:
    """Return the client's timeout in seconds. None: its header is absent.

    Raises:
        InvalidRequest: The header is not a positive number.
    """
    if (header := headers.get(TIMEOUT_MS)) is None:
        return None
    try:
        wait_ms = float(header)
    except ValueError:
        wait_ms = 0.0
    if not 0 < wait_ms < math.inf:
        raise InvalidRequest(f"{TIMEOUT_MS}: must be a positive number of milliseconds")
    return wait_ms / 1000


class ApiCall(Protocol):
    """A request after its body was parsed and checked."""

    generations: list[Generation]
    is_stream: bool


class StreamSink(Sink, Protocol):
    """Writes one generation to a stream as events."""

    generation: Generation

    def write_failure(self, error: ErrorInfo) -> None:
        """Write the final event of a generation that failed with `error`."""


class Writer(Protocol):
    """Writes the answer of one call, as one JSON body or as events."""

    def body(self, pieces: Sequence[TextPiece]) -> bytes:
        """Return the complete answer as JSON. `pieces` has one piece per generation."""

    def sinks(self, events: EventStream) -> Sequence[StreamSink]:
        """Return one sink per generation, which writes it to the stream."""

    def trailer(self) -> bytes:
        """Return the events that follow the last generation, `[DONE]` included; may be empty."""


class CollectedAnswer:
    """Collects the pieces of one generation. A `Sink`."""

    def __init__(self) -> None:
        self.pieces: list[TextPiece] = []

    def write(self, piece: TextPiece) -> bool:
        """Store a piece. The sink always has room."""
        self.pieces.append(piece)
        return True

    async def drain(self) -> None:
        """Return at once."""


async def answer(
    request: web.Request,
    read: Callable[[ServedModel, FrontendOptions, dict[str, Any]], CallT],
    writer_of: Callable[[CallT, FrontendOptions], Writer],
) -> web.StreamResponse:
    """Answer one request.

    Args:
        read: Parses the API's body.
        writer_of: Creates the writer of the answer.

    Raises:
        NoNodeAvailable: No node has reported its model yet.
        TandemError: Raised by `read` or the backend before anything was sent.
        ConnectionError: The client has disconnected.
    """
    edge = request.app[EDGE]
    models, options = edge.backend.models(), edge.options

    def read_both(data: dict[str, Any]) -> tuple[CallT, str]:
        data = with_header_id(request, with_overrides(request.headers, data))
        model = models.choose(data.get("model"))
        return read(model, options, data), session_of(request.headers, data)

    body, client = await request.read(), request[CALLER].client
    priority = max_priority(request.headers, body)
    edge.backend.check(client, min(priority, options.max_priority(client)) if client else priority)
    call, session = await edge.read(body, read_both)
    set_caller(request, call.generations, session)
    writer = writer_of(call, options)
    if not call.is_stream:
        body = writer.body(await _collect(request, call.generations))
        return web.Response(body=body, content_type="application/json")
    keep_alive = PING if request.path in ANTHROPIC_ROUTES else COMMENT
    async with EventStream(request, options.stall_timeout_s, edge.outbox, keep_alive) as events:
        await _run_concurrently([_stream(edge, events, sink) for sink in writer.sinks(events)])
        return await events.finish(writer.trailer())


async def within_request_timeout(request: web.Request, work: Awaitable[None]) -> None:
    """Await `work`. Cancel it if the request exceeds `--request-timeout-s`.

    Raises:
        RequestTimedOut: The work was cancelled.
    """
    if (end_by_s := request[CALLER].end_by_s) is None:
        return await work
    limit = asyncio.timeout_at(end_by_s)
    try:
        async with limit:
            await work
    except TimeoutError:
        if not limit.expired():
            raise
        timeout_s = request.app[EDGE].options.http.request_timeout_s
        raise RequestTimedOut(
            f"the request was cancelled: it took longer than {timeout_s:g} s"
        ) from None


async def _collect(request: web.Request, generations: Sequence[Generation]) -> list[TextPiece]:
    """Run the generations to their end and return one piece for each.

    Raises:
        TandemError: A generation failed; the remaining ones were cancelled.
    """
    edge, answers = request.app[EDGE], [CollectedAnswer() for _ in generations]
    runs = [edge.run(*each) for each in zip(generations, answers, strict=True)]
    await within_request_timeout(request, _run_concurrently(runs))
    return [join_pieces(answer.pieces) for answer in answers]


async def _stream(edge: Edge, events: EventStream, sink: StreamSink) -> None:
    """Stream one generation. An error after the first event is sent as an event.

    Raises:
        TandemError: The generation failed before the first event.
    """
    try:
        await within_request_timeout(events.request, edge.run(sink.generation, sink))
    except TandemError as error:
        if not events.is_started:
            raise
        sink.write_failure(public_info(error))
        await sink.drain()


async def _run_concurrently(coroutines: Sequence[Coroutine[None, None, None]]) -> None:
    """Run the coroutines concurrently. On the first error, cancel the rest and raise that error alone."""
    if len(coroutines) == 1:
        await coroutines[0]
        return
    try:
        async with asyncio.TaskGroup() as group:
            for coroutine in coroutines:
                group.create_task(coroutine)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from errors
