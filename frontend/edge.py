"""What the routes of one app share: the backend, the options, the metrics, who is running."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from typing import Any, TypeVar

from aiohttp import web
from typing_extensions import override

from tandem.frontend.backend import Backend
from tandem.frontend.body import read_json
from tandem.frontend.generation import Answer, Generation, run, transcript_of
from tandem.frontend.metrics import FrontendMetrics
from tandem.frontend.options import FrontendOptions
from tandem.frontend.sse import Outbox
from tandem.frontend.timings import Outcome, TimingsSink
from tandem.frontend.transcript import Outlet, Piece, Transcript
from tandem.wire.errors import InvalidRequest
from tandem.wire.ids import RequestId

T = TypeVar("T")

# Reading so many bytes, tokenizing included, holds up the loop for 2 ms at most; more goes to a thread.
INLINE_BYTES = 4096
# Parsing 32 MiB holds the interpreter's lock for 0.2 s: together they must not silence the links to engines,
# which are lost after 2 s.
MAX_READERS = 2


class Edge:
    """Runs generations for the routes, times them, and ends them by their id.

    Attributes:
        timings_sinks: Told of every generation that is over.
        is_leaving: Whether the server is about to end; see `leaving.py`.
    """

    def __init__(self, backend: Backend, options: FrontendOptions) -> None:
        self.backend = backend
        self.options = options
        self.metrics = FrontendMetrics()
        self.outbox = Outbox()
        self.timings_sinks: list[TimingsSink] = []
        self.is_leaving = False
        self._running: set[RequestId] = set()
        # Threads of its own: a reader goes on after its client is gone, and must not keep others from DNS.
        self._readers = ThreadPoolExecutor(MAX_READERS, thread_name_prefix="reader")

    @override
    def __repr__(self) -> str:
        return f"Edge({len(self._running)} running)"

    async def read(self, body: bytes, reader: Callable[[dict[str, Any]], T]) -> T:
        """Return what `reader` makes of a JSON body: of a large one in a thread, while the loop goes on.

        Raises:
            InvalidRequest: It is no JSON object, or one of too many parts.
            TandemError: As `reader` raises it.
        """
        if len(body) <= INLINE_BYTES:
            return reader(read_json(body))
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._readers, lambda: reader(read_json(body)))

    async def close_readers(self, _app: web.Application) -> None:
        """Read no more bodies. Called as the app is cleaned up, when no route runs."""
        self._readers.shutdown(wait=False, cancel_futures=True)

    async def run(
        self, generation: Generation, outlet: Outlet | None = None
    ) -> AsyncGenerator[Piece, None]:
        """Yield the pieces of a generation. Close it when leaving early: that cancels.

        Args:
            outlet: Takes ordinary tokens between two pieces.

        Raises:
            InvalidRequest: A generation with this id is running.
            TandemError: As the backend raises it.
        """
        timings, is_begun = generation.timings, False
        transcript = transcript_of(generation, outlet, self.metrics.token_gaps())
        with self._entered(generation, transcript):
            async with aclosing(run(self.backend, generation, transcript)) as pieces:
                async for piece in pieces:
                    if not is_begun and _follows_a_prompt(piece):
                        is_begun = True
                        self.metrics.prompt_tokens.inc(len(generation.request.prompt_ids))
                    if piece.token_ids and (ttft_s := timings.token_read()) is not None:
                        self.metrics.time_to_first_token.observe(ttft_s)
                    if piece.ending is not None:
                        timings.num_output_tokens = transcript.num_tokens
                        self.metrics.duration.observe(timings.ended())
                    yield piece

    async def answer(self, generation: Generation) -> Answer:
        """Return the whole of a generation.

        Raises:
            TandemError: As `run`.
        """
        answer = Answer.empty()
        async with aclosing(self.run(generation, answer)) as pieces:
            async for piece in pieces:
                answer.add(piece)
        return answer

    async def answers(self, generations: Sequence[Generation]) -> list[Answer]:
        """Return the whole of several generations that run side by side.

        Raises:
            TandemError: One of them failed; the others are cancelled.
        """
        return await side_by_side([self.answer(generation) for generation in generations])

    async def abort(self, request_id: str) -> bool:
        """End the generations a client named `request_id`; False if none of them is known."""
        ids = {request_id, *(id_ for id_ in self._running if _is_part(id_, request_id))}
        return any([await self.backend.abort(id_) for id_ in ids])

    async def abort_all(self) -> bool:
        """End every generation of this app; False if there is none."""
        return any([await self.backend.abort(id_) for id_ in tuple(self._running)])

    @contextmanager
    def _entered(self, generation: Generation, transcript: Transcript) -> Iterator[None]:
        request_id = generation.request.request_id
        if request_id in self._running:
            raise InvalidRequest(f"rid: a request with id {request_id!r} is running")
        self._running.add(request_id)
        self.metrics.running.inc()
        outcome: Outcome = "failed"
        try:
            yield
            outcome = "finished"
        except (GeneratorExit, asyncio.CancelledError):
            outcome = "cancelled"
            raise
        finally:
            generation.timings.outcome = outcome
            generation.timings.num_output_tokens = transcript.num_tokens
            self.metrics.output_tokens.inc(transcript.num_tokens)
            self.metrics.running.dec()
            self._running.discard(request_id)
            self._tell(generation)

    def _tell(self, generation: Generation) -> None:
        """Tell whoever listens where the time of a generation went that is over."""
        sinks = (
            self.timings_sinks
            if generation.trace is None
            else [*self.timings_sinks, generation.trace]
        )
        if sinks:
            report = generation.report()
            for sink in sinks:
                sink.request_ended(report)


EDGE = web.AppKey("edge", Edge)


def part_id(request_id: str, index: int) -> RequestId:
    """Return the id of one generation of a request that has several."""
    return RequestId(f"{request_id}_{index}")


def _follows_a_prompt(piece: Piece) -> bool:
    # A request that is aborted while it is queued ends without a token.
    return bool(piece.token_ids) or (piece.ending is not None and piece.ending.error is None)


def _is_part(part: str, request_id: str) -> bool:
    return part.startswith(f"{request_id}_") and part[len(request_id) + 1 :].isdigit()


async def side_by_side(work: Sequence[Coroutine[None, None, T]]) -> list[T]:
    """Run all of `work` at once and return its results in order.

    Raises:
        Exception: The first that one of them raised, alone; the others are cancelled.
    """
    if len(work) == 1:
        return [await work[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(part) for part in work]
    except BaseExceptionGroup as errors:
        raise _first(errors) from errors
    return [task.result() for task in tasks]


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    first = errors.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
