"""The edge's measurements: reader threads, tokens, timings and outcomes."""

import asyncio
import json
import threading
from types import SimpleNamespace

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from tandem.frontend.apis.answering import CollectedAnswer
from tandem.frontend.app import create_app
from tandem.frontend.http.edge import EDGE, INLINE_BYTES, MAX_READERS, SHORT_BYTES
from tandem.frontend.http.metrics import FrontendMetrics
from tandem.frontend.http.sse import DONE, EventStream
from tandem.frontend.text import transcript
from tandem.frontend.text.detokenizer import NoText
from tandem.frontend.text.stops import TextRules
from tandem.frontend.text.transcript import StreamInterval, Transcript
from tandem.frontend.timings import Timings
from tandem.wire.errors import NoNodeAvailable, Overloaded
from tandem.wire.generation import Phase
from tandem.wire.messages import TokenDelta
from tests.frontend.conftest import serve_app
from tests.frontend.fakes import FakeBackend, length, say
from tests.frontend.helpers import post
from tests.patience import PATIENCE_S, Clock

SHORT, LARGE = (b'{"text": "' + b"a" * size + b'"}' for size in (INLINE_BYTES, SHORT_BYTES))


class Readers:
    """Readers that hold their thread until the test lets go."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Semaphore(0), threading.Event()

    def read(self, data):
        self.begun.release()
        assert self.may_end.wait(PATIENCE_S)
        return data

    async def begin(self) -> None:
        assert await asyncio.to_thread(self.begun.acquire, timeout=PATIENCE_S)


async def test_readers_of_disconnected_clients_still_count():
    edge, readers = create_app(FakeBackend(None))[EDGE], Readers()
    for _ in range(MAX_READERS):
        gone = asyncio.ensure_future(edge.read(LARGE, readers.read))
        await readers.begin()
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
    order = []
    late = asyncio.ensure_future(edge.read(LARGE, lambda _: order.append("late")))
    small = await edge.read(b"{}", lambda data: data)
    assert small == {}
    assert await asyncio.to_thread(lambda: "free") == "free"
    assert order == []
    order.append("let go")
    readers.may_end.set()
    await late
    assert order == ["let go", "late"]


async def test_short_body_is_read_while_long_ones_wait():
    edge, readers = create_app(FakeBackend(None))[EDGE], Readers()
    waiting = [
        asyncio.ensure_future(edge.read(LARGE, readers.read)) for _ in range(MAX_READERS + 1)
    ]
    for _ in range(MAX_READERS):
        await readers.begin()
    assert await edge.read(SHORT, lambda _: "short") == "short"
    readers.may_end.set()
    await asyncio.gather(*waiting)


@pytest.mark.parametrize(
    ("steps", "outcome"),
    [
        ([[5], length(6)], "finished"),
        ([[5], NoNodeAvailable("no pair")], "failed"),
        ([[5], asyncio.Event()], "cancelled"),
    ],
)
async def test_every_generation_reports_its_outcome(backend, steps, outcome):
    backend.script = say(*steps)
    app, reports = create_app(backend), asyncio.Queue()
    app[EDGE].timings_sinks.append(SimpleNamespace(request_ended=reports.put_nowait))
    async with asyncio.timeout(PATIENCE_S), serve_app(app) as client:
        body = {"input_ids": [1, 2], "stream": True}
        async with client.post("/generate", json=body) as response:
            first = json.loads((await response.content.readline()).removeprefix(b"data: "))
            if outcome != "cancelled":
                await response.read()
        report = (await reports.get())()
    assert first["meta_info"]["cached_tokens"] == report.num_cached_tokens == 1
    assert report.outcome == outcome
    assert report.num_output_tokens == (2 if outcome == "finished" else 1)


async def test_running_generation_is_listed_until_it_ends(backend):
    may_end = asyncio.Event()
    backend.script = say([5], may_end, length(6))
    app = create_app(backend)
    async with asyncio.timeout(PATIENCE_S), serve_app(app) as client:
        body = {"input_ids": [1, 2], "stream": True}
        async with client.post("/generate", json=body) as response:
            await response.content.readline()
            [report] = app[EDGE].live()
            assert (report.outcome, report.num_output_tokens) == ("running", 1)
            assert report.phases[-1]["name"] == "stream"
            may_end.set()
            await response.read()
    assert app[EDGE].live() == []


def gaps(metrics) -> dict[str, float]:
    name = "tandem_edge_inter_token_latency_seconds"
    (family,) = [
        family for family in text_string_to_metric_families(metrics.render()) if family.name == name
    ]
    return {
        sample.labels.get("le", sample.name.removeprefix(name)): sample.value
        for sample in family.samples
    }


def reading(metrics):
    """Return a function that passes a number of tokens to a transcript in one call."""
    reader = Transcript(
        TextRules(), NoText(), CollectedAnswer(), metrics.of("m").gaps, StreamInterval()
    )
    return lambda num_tokens: reader.take_ordinary([5] * num_tokens)


def test_tokens_that_arrive_together_share_the_gap(monkeypatch):
    now = iter((100.0, 100.25, 101.0))
    monkeypatch.setattr(transcript, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    metrics = FrontendMetrics()
    come = reading(metrics)
    for num_tokens in (1, 1, 3):
        come(num_tokens)
    assert gaps(metrics)["_count"] == 4
    assert gaps(metrics)["+Inf"] == 4
    assert gaps(metrics)["0.3"] - gaps(metrics)["0.2"] == 4
    assert gaps(metrics)["_sum"] == 1.0


def test_first_tokens_have_no_gap():
    metrics = FrontendMetrics()
    reading(metrics)(1)
    assert gaps(metrics)["_count"] == 0
    reading(metrics)(3)
    assert gaps(metrics)["_count"] == gaps(metrics)["0.001"] == 2
    assert gaps(metrics)["_sum"] == 0


def test_gaps_are_counted_by_model():
    metrics = FrontendMetrics()
    for model, num_tokens in (("a", 3), ("b", 5)):
        reader = Transcript(
            TextRules(), NoText(), CollectedAnswer(), metrics.of(model).gaps, StreamInterval()
        )
        reader.take_ordinary([5])
        reader.take_ordinary([5] * num_tokens)
    text = metrics.render()
    assert 'tandem_edge_inter_token_latency_seconds_count{model_name="a"} 3.0' in text
    assert 'tandem_edge_inter_token_latency_seconds_count{model_name="b"} 5.0' in text


def test_each_gap_is_exported_once():
    metrics = FrontendMetrics()
    come = reading(metrics)
    for _ in range(5):
        come(1)
        metrics.flush()
    assert gaps(metrics)["_count"] == 4
    buckets = [value for le, value in gaps(metrics).items() if le[0].isdigit()]
    assert buckets == sorted(buckets), "cumulative"


async def told(client) -> dict[str, float]:
    """Return what the edge counted of a single route, by name, and of its answers by status."""
    async with client.get("/metrics") as response:
        families = text_string_to_metric_families(await response.text())
        samples = [sample for family in families for sample in family.samples]
    return {
        sample.labels.get("status", sample.name): sample.value
        for sample in samples
        if sample.labels.get("route", "/generate") == "/generate"
    }


@pytest.mark.parametrize("is_stream", [True, False])
async def test_disconnected_client_counts_with_its_tokens(client, backend, is_stream):
    backend.script = say([5], [6, 7], asyncio.Event())
    body = {"input_ids": [1, 2, 3], "stream": is_stream}
    asking = asyncio.ensure_future(client.post("/generate", json=body))
    async with asyncio.timeout(PATIENCE_S):
        await backend.until(lambda: backend.num_yielded == 2)
        if is_stream:
            (await asking).close()
        asking.cancel()
        await backend.until(lambda: backend.cancelled)
        while "499" not in (counted := await told(client)):  # noqa: ASYNC110 - over HTTP
            await asyncio.sleep(0)
    assert counted["499"] == 1
    assert counted["tandem_edge_prompt_tokens_total"] == 3
    assert counted["tandem_edge_output_tokens_total"] == 3
    assert counted["tandem_edge_generations_running"] == 0


async def test_client_that_closes_after_the_last_chunk_counts_by_the_answer(backend):
    app, is_cancelled = create_app(backend), asyncio.Event()

    async def complete(request: web.Request) -> web.StreamResponse:
        edge, handling = request.app[EDGE], asyncio.current_task()

        def close() -> None:  # as aiohttp does when the client closes
            handling.cancel()
            is_cancelled.set()

        async with EventStream(request, PATIENCE_S, edge.outbox) as events:
            events.put(b"data: 1\n\n")
            await events.drain()
            asyncio.get_running_loop().call_soon(close)  # before any other task runs
            return await events.finish(DONE)

    app.add_routes([web.get("/complete", complete)])
    async with serve_app(app) as client:
        async with client.get("/complete") as response:
            assert (await response.read()).endswith(DONE)
        await is_cancelled.wait()
        async with client.get("/metrics") as response:
            text = await response.text()
    assert 'tandem_http_requests_total{route="/complete",status="200"} 1.0' in text
    assert 'status="499"' not in text


async def test_rejected_request_counts_no_prompt_tokens(client, backend):
    backend.script = say(Overloaded("the queue is full"))
    assert (await post(client, "/generate", {"input_ids": [1, 2, 3]}))[0] == 429
    assert (await told(client))["tandem_edge_prompt_tokens_total"] == 0
    backend.script = say([5], Overloaded("lost"))
    await post(client, "/generate", {"input_ids": [1, 2, 3]})
    counted = await told(client)
    assert counted["tandem_edge_prompt_tokens_total"] == 3
    assert counted["tandem_edge_output_tokens_total"] == 1


async def test_prompt_without_answer_counts_prompt_tokens(client):
    body = {"prompt": [1, 2, 3], "max_tokens": 0, "echo": True, "logprobs": 1}
    assert (await post(client, "/v1/completions", body))[0] == 200
    assert (await told(client))["tandem_edge_prompt_tokens_total"] == 3


ROW = ["tokenize", "queue", "pair", "reserve", "prefill_queue", "prefill"]


def delta(*phases, token_ids=(), cached=0, by_tier=None):
    return TokenDelta(
        request_id="r",
        attempt=0,
        index=0,
        token_ids=list(token_ids),
        cached_tokens=cached,
        cached_by_tier=by_tier or {},
        phases=list(phases),
    )


def durations(report):
    return {phase["name"]: phase["duration_s"] for phase in report.phases}


def started(clock):
    timings = Timings(50.0, clock=clock)
    clock.now_s = 51.0
    timings.mark_sent()
    return timings


def test_phases_add_up_to_the_time_to_first_token():
    clock = Clock(50.0)
    timings = started(clock)
    clock.now_s = 58.0
    timings.record_delta(
        delta(
            Phase("queue", 0.0, 1.0),
            Phase("pair", 1.0, 0.5, "http://d"),
            Phase("reserve", 1.5, 0.5, "http://p"),
            Phase("prefill_queue", 2.0, 0.25, "http://p"),
            Phase("prefill", 2.25, 3.0, "http://p"),
            Phase("prefill_chunk", 2.25, 3.0, "http://p"),
            token_ids=[7],
            cached=3,
            by_tier={"host": 2},
        )
    )
    clock.now_s = 58.5
    assert timings.record_text() == 8.5
    clock.now_s = 60.0
    timings.record_delta(delta(Phase("landed", 2.0, 4.5, "http://d")))
    timings.num_output_tokens = 9
    report = timings.report("r", "", 12)
    assert durations(report) == {
        "tokenize": 1.0,
        "queue": 1.0,
        "pair": 0.5,
        "reserve": 0.5,
        "prefill_queue": 0.25,
        "prefill": 3.0,
        "link": 1.75,
        "detokenize": 0.5,
        "stream": 1.5,
    }
    assert [phase["name"] for phase in report.beside] == ["prefill_chunk", "landed"]
    assert report.beside[1]["start_s"] == 3.0
    assert (report.ttft_s, report.e2e_s, report.num_attempts) == (8.5, 10.0, 1)
    assert (report.prefill, report.decode) == ("http://p", "http://d")
    assert (report.num_prompt_tokens, report.num_cached_tokens) == (12, 3)
    assert report.cached_by_tier == {"host": 2}
    assert report.num_output_tokens == 9


def test_late_report_ends_at_the_last_token():
    clock = Clock(50.0)
    timings = started(clock)
    timings.record_delta(delta(token_ids=[1]))
    timings.record_text()
    clock.now_s = 53.0
    assert timings.finish() == 3.0
    clock.now_s = 60.0  # a different choice of the same answer took longer
    report = timings.report("r", "", 1)
    assert (report.e2e_s, durations(report)["stream"]) == (3.0, 2.0)


def test_attempts_after_the_first_token_are_parallel_phases():
    clock = Clock(50.0)
    timings = started(clock)
    clock.now_s = 52.0
    timings.record_delta(delta(Phase("pair", 0.0, 0.5, "d1"), token_ids=[1]))
    timings.record_text()
    clock.now_s = 56.0
    timings.record_delta(delta(Phase("lost_attempt", 0.5, 2.0), Phase("pair", 2.5, 0.5, "d2")))
    report = timings.report("r", "", 1)
    assert [phase["name"] for phase in report.beside] == ["lost_attempt", "pair"]
    assert (report.num_attempts, report.decode) == (2, "d2")
    assert durations(report)["stream"] == 4.0


times = st.floats(0, 5, allow_nan=False)


@given(
    st.lists(st.tuples(st.sampled_from(ROW[1:]), times, times), max_size=8),
    times,
    times,
    times,
    times,
)
def test_phase_sums_hold_for_any_reported_phases(told, sent, first, read, rest):
    clock = Clock(50.0)
    timings = Timings(50.0, clock=clock)
    clock.now_s += sent
    timings.mark_sent()
    clock.now_s += first
    timings.record_delta(delta(*(Phase(*each) for each in told), token_ids=[1]))
    clock.now_s += read
    timings.record_text()
    clock.now_s += rest
    report = timings.report("r", "", 1)
    assert all(phase["duration_s"] >= 0 for phase in report.phases)
    until_first = sum(phase["duration_s"] for phase in report.phases[:-1])
    assert report.phases[-1]["name"] == "stream"
    assert until_first == pytest.approx(report.ttft_s, abs=1e-4)
    assert until_first + report.phases[-1]["duration_s"] == pytest.approx(report.e2e_s, abs=1e-4)
    ends = [phase["start_s"] + phase["duration_s"] for phase in report.phases]
    starts = [phase["start_s"] for phase in report.phases[1:]]
    assert starts == pytest.approx(ends[:-1], abs=1e-4)
