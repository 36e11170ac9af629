"""What the routes of one app share: the backend, the options, the metrics, the running generations.

```
 serving ──leave──▶ leaving: /health is 503, each answer closes its connection ──▶ listens no more, drains
```

Balancers notice an end late: until then new connections still arrive, and each of them is served.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from typing import Any, TypeVar

import msgspec
from aiohttp import hdrs, web
from typing_extensions import override

from tandem.frontend.backend import Backend, Health
from tandem.frontend.body import read_json
from tandem.frontend.detokenizer import Detokenizer, NoText
from tandem.frontend.generation import Generation
from tandem.frontend.metrics import FrontendMetrics
from tandem.frontend.options import FrontendOptions
from tandem.frontend.request_ids import is_part
from tandem.frontend.response_store import ResponseStore
from tandem.frontend.sse import Outbox
from tandem.frontend.timings import Outcome, Report, TimingsSink
from tandem.frontend.transcript import Sink, Transcript
from tandem.wire.errors import EngineFailed, InvalidRequest
from tandem.wire.generation import RequestId

T = TypeVar("T")

# Reading so many bytes, tokenizing included, takes the loop 2 ms at most. Larger bodies go to a thread.
INLINE_BYTES = 4096
# Parsing 32 MiB holds the interpreter's lock for 0.2 s. Engine links are lost after 2 s of silence.
MAX_READERS = 2
# A worker that is killed loses what it counted since the last pulse.
PULSE_INTERVAL_S = 0.5
# The newest of the running generations that are shown.
MAX_LIVE = 200
LEAVING = Health(is_serving=False, detail="about to end: send what is new to another")


class Edge:
    """Runs generations for the routes, times them, and ends them by their id.

    Attributes:
        responses: The conversations that clients may continue.
        timings_sinks: Each gets the report of every generation that is over.
        is_leaving: Whether the server is about to end.
    """

    def __init__(self, backend: Backend, options: FrontendOptions) -> None:
        self.backend = backend
        self.options = options
        self.metrics = FrontendMetrics()
        self.outbox = Outbox()
        self.responses = ResponseStore()
        self.timings_sinks: list[TimingsSink] = []
        self.is_leaving = False
        self._running: dict[RequestId, tuple[Generation, Transcript]] = {}
        # Its own threads: a reader outlives its client, and must not keep others from DNS.
        self._readers = ThreadPoolExecutor(MAX_READERS, thread_name_prefix="reader")

    @override
    def __repr__(self) -> str:
        return f"Edge({len(self._running)} running)"

    async def read(self, body: bytes, reader: Callable[[dict[str, Any]], T]) -> T:
        """Return what `reader` makes of a JSON body. A large body is read in a thread."""
        if len(body) <= INLINE_BYTES:
            return reader(read_json(body))
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._readers, lambda: reader(read_json(body)))

    async def run(self, generation: Generation, sink: Sink) -> None:
        """Run a generation to its end: every piece of it goes to the sink.

        The backend's part is over, or cancelled, before the last piece is written and when this
        task is cancelled.

        Raises:
            InvalidRequest: A generation with this id is running.
            ConnectionError: The reader of the sink is gone.
            TandemError: As the backend raises it.
        """
        rules, tokenizer, timings = generation.rules, generation.tokenizer, generation.timings
        text: Detokenizer = NoText()
        if tokenizer is not None:
            text = tokenizer.detokenizer(rules.skip_special_tokens, rules.shown_tokens)
        transcript = Transcript(rules, text, sink, self.metrics.gaps)
        with self._entered(generation, transcript):
            timings.sent()
            deltas = self.backend.generate(generation.request, generation.bootstrap, transcript)
            async with aclosing(deltas):
                async for delta in deltas:
                    if timings.came(delta):
                        self.metrics.prompt_tokens.inc(len(generation.request.prompt_ids))
                    piece = transcript.take(delta)
                    if piece is None:
                        continue
                    if piece.token_ids and (ttft_s := timings.token_read()) is not None:
                        self.metrics.time_to_first_token.observe(ttft_s)
                    if piece.ending is not None:
                        break
                    sink.write(piece)
                    transcript.has_room = await sink.drain()
                else:
                    raise EngineFailed("the generation ended without saying why")
            timings.num_output_tokens = transcript.num_tokens
            self.metrics.duration.observe(timings.ended())
            sink.write(piece)
            await sink.drain()

    async def abort(self, request_id: str) -> bool:
        """End the generations a client named `request_id`. False if none of them is known."""
        ids = {request_id, *(id_ for id_ in self._running if is_part(id_, request_id))}
        return any([await self.backend.abort(id_) for id_ in ids])

    async def abort_all(self) -> bool:
        """End every generation of this app. False if there is none."""
        return any([await self.backend.abort(id_) for id_ in tuple(self._running)])

    def live(self) -> list[Report]:
        """Return where the time of the running generations has gone so far, the oldest first."""
        return [
            msgspec.structs.replace(
                generation.report(), outcome="running", num_output_tokens=transcript.num_tokens
            )
            for generation, transcript in tuple(self._running.values())[-MAX_LIVE:]
        ]

    async def running(self, _app: web.Application) -> AsyncIterator[None]:
        """Measure the loop and update Prometheus while the app runs; for `cleanup_ctx`."""
        beating = asyncio.create_task(self._pulse())
        yield
        beating.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await beating
        self._readers.shutdown(wait=False, cancel_futures=True)  # no route runs any more

    async def _pulse(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + PULSE_INTERVAL_S
            await asyncio.sleep(PULSE_INTERVAL_S)
            self.metrics.loop_lag.observe(max(0.0, loop.time() - due_s))
            self.metrics.gather()

    @contextmanager
    def _entered(self, generation: Generation, transcript: Transcript) -> Iterator[None]:
        request_id = generation.request.request_id
        if request_id in self._running:
            raise InvalidRequest(f"rid: a request with id {request_id!r} is running")
        self._running[request_id] = (generation, transcript)
        self.metrics.running.inc()
        outcome: Outcome = "failed"
        try:
            yield
            outcome = "finished"
        except (ConnectionError, asyncio.CancelledError):
            outcome = "cancelled"
            raise
        finally:
            generation.timings.outcome = outcome
            generation.timings.num_output_tokens = transcript.num_tokens
            self.metrics.output_tokens.inc(transcript.num_tokens)
            self.metrics.running.dec()
            del self._running[request_id]
            self._report(generation)

    def _report(self, generation: Generation) -> None:
        if sinks := [*self.timings_sinks, *filter(None, [generation.trace])]:
            report = generation.report()
            for sink in sinks:
                sink.request_ended(report)


EDGE = web.AppKey("edge", Edge)


def leave(app: web.Application) -> None:
    """Have `/health` and every answer say that this server is about to end."""
    app[EDGE].is_leaving = True


async def close_when_leaving(request: web.Request, response: web.StreamResponse) -> None:
    """Make the client connect anew for its next request, once the server is leaving."""
    if request.app[EDGE].is_leaving:
        response.headers[hdrs.CONNECTION] = "close"
        response.force_close()
