"""Traces received by a collector."""

import asyncio
import gzip
import threading
from functools import partial

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider

from tandem.frontend.http import tracing
from tandem.frontend.http.tracing import Tracing
from tandem.frontend.options import FrontendOptions, HttpOptions, checked_endpoint
from tandem.wire.errors import ConfigInvalid, NoNodeAvailable
from tests.frontend.conftest import serve
from tests.frontend.fakes import say
from tests.frontend.helpers import post
from tests.patience import PATIENCE_S

TRACE_ID, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT}-01"


class Collector:
    """Takes OTLP over HTTP and keeps the spans."""

    def __init__(self):
        self.spans = []
        self.services = set()
        app = web.Application()
        app.add_routes([web.post("/v1/traces", self.take)])
        self.server = TestServer(app)

    @property
    def url(self):
        return checked_endpoint(str(self.server.make_url("/")))

    async def take(self, request):
        body = await request.read()
        if request.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            names = {each.key: each.value.string_value for each in resource.resource.attributes}
            self.services.add(names["service.name"])
            for scope in resource.scope_spans:
                self.spans += scope.spans
        return web.Response(content_type="application/x-protobuf")

    def named(self, name):
        return [span for span in self.spans if span.name == name]


@pytest.fixture
async def collector(monkeypatch):
    # It answers even on a busy machine, so that the exporter drops nothing.
    monkeypatch.setattr(tracing, "_EXPORT_TIMEOUT_S", PATIENCE_S)
    patient = partial(Tracing, shutdown_timeout_s=PATIENCE_S)
    monkeypatch.setattr(tracing, "Tracing", patient)
    collector = Collector()
    async with collector.server:
        yield collector


def options(collector):
    return FrontendOptions(http=HttpOptions(traces_endpoint=collector.url), service="tandem-test")


async def test_request_is_one_trace_under_the_parent_span(backend, collector):
    async with serve(backend, options(collector)) as client:
        body = {"text": "Hello", "max_new_tokens": 3}
        async with client.post("/generate", json=body, headers={"traceparent": TRACEPARENT}) as got:
            answer = await got.json()
    # The app has ended, so all spans were sent.
    (root,) = collector.named("POST /generate")
    (generation,) = collector.named("generation")
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE_ID}
    assert root.parent_span_id.hex() == PARENT
    assert generation.parent_span_id == root.span_id
    phases = [span for span in collector.spans if span.parent_span_id == generation.span_id]
    names = [span.name for span in sorted(phases, key=lambda span: span.start_time_unix_nano)]
    assert names == ["tokenize", "link", "detokenize", "stream"]
    # Floating-point seconds since 1970 have a resolution of a microsecond.
    ends = [span.end_time_unix_nano - 10**4 for span in phases]
    assert max(ends) <= generation.end_time_unix_nano <= root.end_time_unix_nano + 10**6
    facts = {each.key: each.value for each in generation.attributes}
    assert facts["tandem.request_id"].string_value == answer["meta_info"]["id"]
    assert facts["gen_ai.usage.output_tokens"].int_value == 3
    assert collector.services == {"tandem-test"}


async def test_unsampled_trace_is_not_exported(backend, collector):
    async with serve(backend, options(collector)) as client:
        headers = {"traceparent": TRACEPARENT[:-1] + "0"}
        body = {"text": "Hello", "max_new_tokens": 1}
        async with client.post("/generate", json=body, headers=headers) as got:
            assert got.status == 200
    assert collector.spans == []


async def test_failed_request_has_error_status(backend, collector):
    backend.script = say(NoNodeAvailable("no pair"))
    async with serve(backend, options(collector)) as client:
        assert (await post(client, "/generate", {"text": "Hello"}))[0] == 503
    (root,) = collector.named("POST /generate")
    (generation,) = collector.named("generation")
    assert root.status.code == 2
    facts = {each.key: each.value for each in generation.attributes}
    assert facts["tandem.outcome"].string_value == "failed"


async def test_hanging_collector_does_not_delay_shutdown():
    answers = threading.Event()

    class Hangs(SpanProcessor):
        def shutdown(self):
            answers.wait(10 * PATIENCE_S)

    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(Hangs())
    app = web.Application()
    app.cleanup_ctx.append(Tracing(provider, shutdown_timeout_s=0.01).lifespan)
    try:
        async with asyncio.timeout(PATIENCE_S):
            async with TestServer(app):
                pass
    finally:
        answers.set()


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("", ""),
        ("http://127.0.0.1:4318", "http://127.0.0.1:4318/v1/traces"),
        ("http://127.0.0.1:4318/", "http://127.0.0.1:4318/v1/traces"),
        ("https://[::1]:4318/other", "https://[::1]:4318/other"),
    ],
)
def test_endpoint_gets_the_default_path(given, read):
    assert checked_endpoint(given) == read


@pytest.mark.parametrize(
    "given", ["grpc://127.0.0.1:4317", "127.0.0.1:4318", "http://", "http://[::1", "http://a:99999"]
)
def test_invalid_endpoint_is_rejected(given):
    with pytest.raises(ConfigInvalid, match="4318"):
        checked_endpoint(given)
