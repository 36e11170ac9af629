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
from tandem.frontend.transcript import Ending, Piece, Sink
from tandem.wire.errors import ErrorInfo, TandemError
from tandem.wire.generation import TokenLogprobs

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
    """The whole of one generation, as its pieces come. A `Sink`.

    Attributes:
        output_ids: All ids so far.
        logprobs: One for each of `output_ids`, when wanted.
        prompt_logprobs: Of the wanted positions, in order.
    """

    def __init__(self) -> None:
        self.text = ""
        self.output_ids: list[int] = []
        self.cached_tokens = 0
        self.ending: Ending | None = None
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] = []

    def write(self, piece: Piece) -> bool:
        """Add a piece. There is always room."""
        self.text += piece.text
        self.output_ids += piece.token_ids
        self.cached_tokens = max(self.cached_tokens, piece.cached_tokens)
        self.ending = piece.ending
        self.logprobs += piece.logprobs
        self.prompt_logprobs += piece.prompt_logprobs
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


async def whole(request: web.Request, generations: Sequence[Generation]) -> list[Answer]:
    """Return the answers of several generations.

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
    return answers


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
