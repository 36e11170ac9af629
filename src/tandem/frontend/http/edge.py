"""State shared by the routes of one app: the backend, the options, the metrics and the running generations.

```
 serving ──begin_shutdown──▶ shutting down: /health is 503, each answer closes its connection ──▶ stops listening, drains
```

Load balancers notice the shutdown late. Connections that arrive until then are still served.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
from aiohttp import web
from typing_extensions import override

from tandem.frontend.backend import Backend, Health
from tandem.frontend.chat.body import read_json
from tandem.frontend.chat.generation import Generation
from tandem.frontend.http.metrics import FrontendMetrics
from tandem.frontend.http.sse import Outbox
from tandem.frontend.options import FrontendOptions
from tandem.frontend.request_ids import is_part
from tandem.frontend.text.detokenizer import Detokenizer, NoText
from tandem.frontend.text.transcript import Sink, StreamInterval, TextPiece, Transcript
from tandem.frontend.timings import RequestOutcome, RequestReport, TimingsSink
from tandem.settings.reload import ReloadedFiles
from tandem.telemetry.log import get_logger
from tandem.wire.errors import EngineFailed, TandemError
from tandem.wire.generation import RequestId
from tandem.wire.messages import TokenDelta

T = TypeVar("T")

log = get_logger(__name__)

# Parsing and tokenizing a body of this size blocks the loop for at most 2 ms. Larger bodies go to a thread.
INLINE_BYTES = 4096
# Each reader holds the GIL for 0.2 s while it parses 32 MiB, and engine links time out after 2 s of silence. Bodies up
# to `SHORT_BYTES` have a thread of their own, in which each takes 10 ms at most: they must not queue behind long ones.
MAX_READERS, SHORT_BYTES = 2, 32_768
# Each pulse flushes counts and reads changed files again. A killed worker loses the counts since its last pulse.
PULSE_INTERVAL_S = 0.5
# `live` returns only the newest generations.
MAX_LIVE = 200
SHUTTING_DOWN = Health(
    is_serving=False, detail="shutting down: send new requests to a different server"
)


class Edge:
    """Runs and times generations for the routes, and aborts them by id.

    Attributes:
        reloaded: Files that are read again when they change, until the app ends.
        timings_sinks: Receive the report of every generation when it ends.
        is_shutting_down: True once `begin_shutdown` was called.
        is_loopback_only: Whether only this machine can connect. Set by `serving`.
    """

    def __init__(self, backend: Backend, options: FrontendOptions) -> None:
        self.backend = backend
        self.options = options
        self.metrics = FrontendMetrics()
        self.outbox = Outbox()
        self.reloaded: list[ReloadedFiles] = []
        self.timings_sinks: list[TimingsSink] = []
        self.is_shutting_down = self.is_loopback_only = False
        self._interval = StreamInterval(options.http.stream_interval)
        self._running: dict[RequestId, _RunningGeneration] = {}
        # Not the loop's default executor: a reader keeps running after its client has disconnected, and
        # would delay DNS lookups there.
        self._short_reader = ThreadPoolExecutor(1, thread_name_prefix="short-reader")
        self._readers = ThreadPoolExecutor(MAX_READERS, thread_name_prefix="reader")

    @override
    def __repr__(self) -> str:
        return f"Edge({len(self._running)} running)"

    async def read(self, body: bytes, reader: Callable[[dict[str, Any]], T]) -> T:
        """Parse a JSON body and return `reader`'s result. Large bodies are read in a thread."""
        if len(body) <= INLINE_BYTES:
            return reader(read_json(body))
        loop, is_short = asyncio.get_running_loop(), len(body) <= SHORT_BYTES
        readers = self._short_reader if is_short else self._readers
        return await loop.run_in_executor(readers, lambda: reader(read_json(body)))

    async def run(self, generation: Generation, sink: Sink) -> None:
        """Run a generation to its end, and write every piece to the sink.

        The backend has finished or cancelled the request before the last piece is written. Cancelling
        this task cancels the request.

        Raises:
            ConnectionError: The client has disconnected.
            TandemError: Raised by the backend.
        """
        run = _RunningGeneration(generation, sink, self.metrics, self._interval)
        self._running[generation.request.request_id] = run
        run.metrics.running.inc()
        outcome: RequestOutcome = "failed"
        try:
            generation.timings.mark_sent()
            await self.backend.generate(
                generation.request, run, generation.bootstrap, generation.model
            )
            sink.write(run.last_piece())
            await sink.drain()
            outcome = "finished"
        except (ConnectionError, asyncio.CancelledError):
            outcome = "cancelled"
            raise
        except TandemError:
            run.flush()
            raise
        finally:
            del self._running[generation.request.request_id]
            run.metrics.running.dec()
            self._report(run, outcome)

    async def abort(self, request_id: str, owner: str | None) -> bool:
        """Abort the generations of the client's request `request_id`. False if the owner has none.

        Args:
            owner: Name of the key that sent the request; None: any key.
        """
        return await self._abort(
            lambda each: (
                owner in {None, each.request.client}
                and (each.id == request_id or is_part(each.id, request_id))
            )
        )

    async def abort_all(self) -> bool:
        """Abort every generation of this app. False if none is running."""
        return await self._abort(lambda _: True)

    async def _abort(self, is_meant: Callable[[Generation], bool]) -> bool:
        ids = [id_ for id_, run in self._running.items() if is_meant(run.generation)]
        return any([await self.backend.abort(id_) for id_ in ids])

    def live(self) -> list[RequestReport]:
        """Return the timing reports of the running generations so far, oldest first."""
        return [
            msgspec.structs.replace(
                run.generation.report(), outcome="running", num_output_tokens=run.num_tokens
            )
            for run in tuple(self._running.values())[-MAX_LIVE:]
        ]

    async def lifespan(self, _app: web.Application) -> AsyncIterator[None]:
        """Measure the loop's lag and update Prometheus while the app runs; for `cleanup_ctx`."""
        pulse = asyncio.create_task(self._pulse())
        yield
        pulse.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await pulse
        self.metrics.flush()
        for readers in (self._short_reader, self._readers):
            readers.shutdown(wait=False, cancel_futures=True)  # all routes have finished

    async def _pulse(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            began_s, computed_s = loop.time(), time.thread_time()
            due_s = began_s + PULSE_INTERVAL_S
            await asyncio.sleep(PULSE_INTERVAL_S)
            self._interval.adapt((time.thread_time() - computed_s) / (loop.time() - began_s))
            self.metrics.loop_lag.observe(max(0.0, loop.time() - due_s))
            self.metrics.flush()
            for files in self.reloaded:
                _refresh(files)

    def _report(self, run: "_RunningGeneration", outcome: RequestOutcome) -> None:
        generation, num_tokens = run.generation, run.num_tokens
        client, timings = generation.request.client, generation.timings
        run.metrics.output_tokens.inc(num_tokens)
        self.metrics.count_tokens_of(client, "output", num_tokens)
        self.metrics.count_generation_of(client, outcome)
        timings.outcome, timings.num_output_tokens = outcome, num_tokens
        timings.finish()
        for sink in (*self.timings_sinks, generation.trace):
            if sink is not None:
                sink.request_ended(generation.report)


class _RunningGeneration(Transcript):
    """The transcript of a running generation. It also records the generation's metrics."""

    __slots__ = ("_all_metrics", "generation", "metrics")

    def __init__(
        self,
        generation: Generation,
        sink: Sink,
        metrics: FrontendMetrics,
        interval: StreamInterval,
    ) -> None:
        self.generation, self.metrics = generation, metrics.of(generation.model)
        self._all_metrics = metrics
        rules, tokenizer = generation.rules, generation.tokenizer
        text: Detokenizer = NoText()
        if tokenizer is not None:
            text = tokenizer.detokenizer(rules.skip_special_tokens, rules.shown_tokens)
        super().__init__(rules, text, sink, self.metrics.gaps, interval)

    @override
    def take(self, delta: TokenDelta) -> None:
        timings, request = self.generation.timings, self.generation.request
        if timings.record_delta(delta):
            num_tokens = len(request.prompt_ids)
            self.metrics.prompt_tokens.inc(num_tokens)
            self._all_metrics.count_tokens_of(request.client, "prompt", num_tokens)
        super().take(delta)
        if self.num_tokens and (ttft_s := timings.record_text()) is not None:
            self.metrics.time_to_first_token.observe(ttft_s)

    def last_piece(self) -> TextPiece:
        """Return the last piece, and record the duration. Raises the error that ended the text."""
        if self.end is None:
            raise EngineFailed("the generation ended without a finish reason")
        if isinstance(self.end, TandemError):
            raise self.end
        timings = self.generation.timings
        timings.num_output_tokens = self.num_tokens
        self.metrics.duration.observe(timings.finish())
        return self.end


def _refresh(files: ReloadedFiles) -> None:
    if not files.refresh():
        return
    if files.problem:
        action = "their last valid content stays in use"
        log.warning("files.not_reloaded", reason=files.problem, action=action)
    else:
        log.info("files.reloaded", paths=files.paths)


EDGE = web.AppKey("edge", Edge)


def begin_shutdown(app: web.Application) -> None:
    """Answer `/health` with 503 and close each connection after its answer, from now on."""
    app[EDGE].is_shutting_down = True
