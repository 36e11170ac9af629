"""Answering a call of any API: its generations side by side, as one answer or as one event stream."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from aiohttp import web

from tandem.frontend.backend import ServedModel
from tandem.frontend.body import session_of
from tandem.frontend.caller import asked_by, in_time
from tandem.frontend.edge import EDGE, Edge
from tandem.frontend.generation import Generation
from tandem.frontend.middleware import public_info
from tandem.frontend.sse import EventStream
from tandem.frontend.transcript import Piece, Sink, joined
from tandem.wire.errors import ErrorInfo, TandemError

CallT = TypeVar("CallT", bound="Call")


class Call(Protocol):
    """A checked body."""

    generations: list[Generation]


class StreamSink(Sink, Protocol):
    """Writes one generation as events."""

    generation: Generation

    def write_failure(self, error: ErrorInfo) -> None:
        """Write the end of a generation that an error cut short."""


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


async def read_call(
    request: web.Request, read: Callable[[ServedModel, dict[str, Any]], CallT]
) -> CallT:
    """Return the checked body of a request, its generations marked with who asks.

    Raises:
        NoNodeAvailable: The model is not known yet.
        TandemError: As `read` raises it.
    """
    edge = request.app[EDGE]
    model = edge.backend.model()

    def read_both(data: dict[str, Any]) -> tuple[CallT, str]:
        return read(model, data), session_of(request.headers, data)

    call, session = await edge.read(await request.read(), read_both)
    call.generations = asked_by(request, call.generations, session)
    return call


async def whole(request: web.Request, generations: Sequence[Generation]) -> list[Piece]:
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


async def stream(edge: Edge, events: EventStream, sinks: Sequence[StreamSink]) -> None:
    """Send the events of several generations, an error after the first event included.

    Raises:
        TandemError: Nothing was sent yet.
        ConnectionError: The client is gone.
    """
    await _side_by_side([_stream_one(edge, events, sink) for sink in sinks])


async def _stream_one(edge: Edge, events: EventStream, sink: StreamSink) -> None:
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
        raise _first(errors) from errors


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    first = errors.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
