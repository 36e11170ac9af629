"""OpenTelemetry tracing: a span for each request, with child spans for its generations and their phases.

```
 traceparent in ──▶ POST /generate                 server span
                      └─ generation                one for each choice
                           ├─ queue, pair, reserve, prefill, ...    the phases of `tandem.frontend.timings`
                           └─ prefill_chunk, push, landed, ...
```

The spans of nodes are created here, from the durations that nodes report; `tandem.node` is the node's URL.
The OpenTelemetry SDK's environment variables (`OTEL_...`) configure sampling, export and the service name.
"""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from aiohttp import web

from tandem.frontend.timings import ReportMaker, RequestReport
from tandem.telemetry.log import get_logger

if TYPE_CHECKING:  # optional dependency
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

log = get_logger(__name__)

# Only these routes are traced.
TRACED = frozenset(
    {
        *("/generate", "/inference/v1/generate", "/v1/completions", "/v1/chat/completions"),
        *("/v1/messages", "/v1/responses"),
    }
)
# Timeout of one batch.
_EXPORT_TIMEOUT_S = 5.0
# A router's worker must exit within two seconds of its last stream, even if the collector is down.
SHUTDOWN_TIMEOUT_S = 1.5
_NS = 1_000_000_000


class RequestTrace:
    """The span of one HTTP request. A `TimingsSink` for its generations."""

    def __init__(self, tracer: "Tracer", span: "Span") -> None:
        self._tracer, self.span = tracer, span

    def request_ended(self, report: ReportMaker) -> None:
        """Create the spans of a generation."""
        if self.span.is_recording():
            self._add_spans(report())

    def end(self, status: int) -> None:
        """End the span with the status of the answer."""
        from opentelemetry.trace import StatusCode

        self.span.set_attribute("http.response.status_code", status)
        if status >= 500:
            self.span.set_status(StatusCode.ERROR)
        self.span.end()

    def _add_spans(self, report: RequestReport) -> None:
        started_s = report.started_unix_s
        generation = self._start_span("generation", started_s, self.span)
        generation.set_attributes(_attributes(report))
        for phase in (*report.phases, *report.beside):
            start = started_s + float(phase["start_s"])
            span = self._start_span(str(phase["name"]), start, generation)
            if phase["node"]:
                span.set_attribute("tandem.node", phase["node"])
            span.end(int((start + float(phase["duration_s"])) * _NS))
        generation.end(int((started_s + report.e2e_s) * _NS))

    def _start_span(self, name: str, start_unix_s: float, parent: "Span") -> "Span":
        from opentelemetry.trace import set_span_in_context

        context = set_span_in_context(parent)
        return self._tracer.start_span(name, context, start_time=int(start_unix_s * _NS))


TRACE: web.RequestKey[RequestTrace] = web.RequestKey("trace", RequestTrace)


def _attributes(report: RequestReport) -> dict[str, str | int | float]:
    attributes: dict[str, str | int | float | None] = {
        "tandem.request_id": report.request_id,
        "tandem.outcome": report.outcome,
        "tandem.num_attempts": report.num_attempts,
        "tandem.num_cached_tokens": report.num_cached_tokens,
        "gen_ai.usage.input_tokens": report.num_prompt_tokens,
        "gen_ai.usage.output_tokens": report.num_output_tokens,
        "tandem.time_to_first_token_s": report.ttft_s,
        "tandem.prefill": report.prefill or None,
        "tandem.decode": report.decode or None,
    }
    return {name: value for name, value in attributes.items() if value is not None}


class Tracing:
    """Creates and exports the spans of one app.

    Args:
        provider: A provider whose exporters are already configured.
        shutdown_timeout_s: Time limit for sending the last spans when the app ends.
    """

    def __init__(
        self, provider: "TracerProvider", shutdown_timeout_s: float = SHUTDOWN_TIMEOUT_S
    ) -> None:
        self._provider, self._shutdown_timeout_s = provider, shutdown_timeout_s
        self._tracer = provider.get_tracer("tandem")

    def start(self, request: web.Request) -> RequestTrace | None:
        """Start tracing a generation request. None: requests to its route are not traced."""
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        if request.path not in TRACED:
            return None
        parent = TraceContextTextMapPropagator().extract(request.headers)
        attributes = {"http.request.method": request.method, "http.route": request.path}
        name = f"{request.method} {request.path}"
        span = self._tracer.start_span(name, parent, kind=SpanKind.SERVER, attributes=attributes)
        request[TRACE] = trace = RequestTrace(self._tracer, span)
        return trace

    async def lifespan(self, _app: web.Application) -> AsyncIterator[None]:
        """Send the last spans when the app ends; for `cleanup_ctx`."""
        yield
        loop, is_done = asyncio.get_running_loop(), asyncio.Event()

        def shut_down() -> None:
            self._provider.shutdown()
            with contextlib.suppress(RuntimeError):  # the wait timed out and the loop is closed
                loop.call_soon_threadsafe(is_done.set)

        # A daemon thread: the export timeout is per batch, and several batches may be waiting.
        threading.Thread(target=shut_down, name="tracing-shutdown", daemon=True).start()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._shutdown_timeout_s):
                await is_done.wait()


def create_tracing(endpoint: str, service: str) -> Tracing:
    """Return a `Tracing` that exports to `endpoint`, a URL with its path.

    Args:
        service: Service name of this process, unless `OTEL_SERVICE_NAME` is set.
    """
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create()
    if str(resource.attributes.get(SERVICE_NAME, "unknown_service")).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: service}))
    provider = TracerProvider(resource=resource)
    exporter = OTLPSpanExporter(endpoint, timeout=_EXPORT_TIMEOUT_S)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    log.info("tracing.on", endpoint=endpoint, service=resource.attributes[SERVICE_NAME])
    return Tracing(provider)
