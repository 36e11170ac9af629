"""What an edge worker sees of nodes that speak the real wire, what is merged of several, and what clients get."""

import asyncio
from contextlib import aclosing, asynccontextmanager

import pytest
from aiohttp.test_utils import TestClient, TestServer

from tandem.frontend.app import create_app
from tandem.frontend.edge import EDGE
from tandem.frontend.options import FrontendOptions, HttpOptions
from tandem.router.config import node_id
from tandem.router.console import Observer, OverviewApi, PageFiles
from tandem.router.overview import (
    Latencies,
    NodeView,
    Overview,
    PairView,
    Quantiles,
    Rates,
    Totals,
    after,
    latencies,
    merged,
)
from tandem.wire.messages import NodeLoad, StartPrefill
from tests.router.fake_node import FakeNode, request, until
from tests.router.test_backend import cluster, watched

KEY = {"Authorization": "Bearer k"}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Watched:
    """One prefill, two decodes, a backend, and the observer of it with a clock of its own."""

    def __init__(self, setup) -> None:
        [self.prefill], self.decodes = setup.prefills, setup.decodes
        self.backend, self.cluster, self.clock = setup.backend, setup.backend._cluster, Clock()
        http = HttpOptions(api_keys=("k",))
        page = PageFiles()
        self.app = create_app(self.backend, FrontendOptions(http=http, open_paths=page.paths))
        self.observer = Observer(self.cluster, self.backend, self.app[EDGE].live, self.clock)
        self.app.add_routes([*OverviewApi(self.observer).routes(), *page.routes()])

    def look(self, at: float):
        self.clock.now = at
        self.observer.look()
        return self.observer.overview()

    def node(self, fake, overview):
        [view] = [view for view in overview.nodes if view.url == fake.url]
        return view

    async def loads(self, fake, load: NodeLoad) -> None:
        """Have a node tell this load."""
        fake.engine.load = load
        node = self.cluster.node(fake.url)
        await until(lambda: node.client.load == load)


@asynccontextmanager
async def watching():
    async with cluster(num_decodes=2) as setup:
        yield Watched(setup)


async def test_a_request_shows_as_a_running_pair_with_what_is_pushed_and_is_gone_when_it_ended():
    async with (
        watching() as watched,
        aclosing(watched.backend.generate(request(prompt_ids=range(40)))) as deltas,
    ):
        watched.look(0)
        first = asyncio.ensure_future(anext(deltas))
        start = await watched.prefill.engine.next(StartPrefill)
        await watched.loads(watched.prefill, NodeLoad(pushed_bytes=5000, prompt_tokens=40))
        overview = watched.look(5)
        [pair] = overview.pairs
        assert pair.prefill == watched.prefill.url
        assert pair.decode in {decode.url for decode in watched.decodes}
        assert (pair.num_running, pair.num_started) == (1, 1)
        assert watched.node(watched.prefill, overview).rates.pushed_bytes == 1000
        assert overview.num_in_flight == 1
        watched.prefill.engine.say(start, 0, [7], reason="stop")
        await first
        await deltas.aclose()
        overview = watched.look(6)
        assert [pair.num_running for pair in overview.pairs] == [0]
        assert (overview.num_in_flight, overview.totals.num_finished) == (0, 1)
        assert overview.rates.requests > 0


async def test_what_a_node_counted_before_it_was_known_is_the_work_of_no_second():
    node, clock = FakeNode("decode"), Clock()
    node.engine.load = NodeLoad(generated_tokens=9_000_000)
    async with node.serving(), watched([], [node], takes_announced=True) as backend:
        observer = Observer(backend._cluster, backend, list, clock)
        observer.look()  # as a worker begins, before any node has answered
        await until(lambda: backend._cluster.node(node.url).is_up)
        for clock.now in (1.0, 2.0):
            observer.look()
        assert observer.overview().rates.generated_tokens == 0


async def test_a_document_is_made_four_times_a_second_however_many_look():
    async with watching() as watched:
        watched.look(0)
        made = watched.observer.overview()
        watched.clock.now = 0.24
        assert watched.observer.overview() is made
        watched.clock.now = 0.25
        assert watched.observer.overview() is not made


async def test_clients_get_it_with_their_key_and_the_page_without():
    async with watching() as watched, TestClient(TestServer(watched.app)) as client:
        watched.observer.request_ended({"request_id": "r", "phases": []})
        watched.look(0)
        async with client.get("/overview") as response:
            assert response.status == 401
        async with client.get("/overview?after=soon", headers=KEY) as response:
            assert response.status == 400
        async with client.get("/overview", headers=KEY) as response:
            shown = await response.json()
        assert [node["id"] for node in shown["nodes"]] == [
            node_id(node.url) for node in (watched.prefill, *watched.decodes)
        ]
        assert [timings["request_id"] for timings in shown["recent"]] == ["r"]
        async with client.get(
            f"/overview?after={shown['now_unix_s'] + 60}", headers=KEY
        ) as response:
            later = await response.json()
        assert later["recent"] == []
        assert later["nodes"] == shown["nodes"]
        async with client.get("/") as response:
            assert response.status == 200
            assert "default-src 'self'" in response.headers["Content-Security-Policy"]
            etag = response.headers["ETag"]
        async with client.get("/", headers={"If-None-Match": etag}) as response:
            assert response.status == 304
        async with client.get("/page/main.js") as response:
            assert response.content_type == "text/javascript"
        async with client.get("/page/../worker.py") as response:
            assert response.status in {401, 404}


# ── several workers' ─────────────────────────────────────────────────────────────────────────────

P, D, E = "http://p:1", "http://d:1", "http://e:1"


def node(url, **changes) -> NodeView:
    return NodeView(**{"id": url, "url": url, "role": "decode", "state": "up"} | changes)


def pair(prefill, decode, running, tokens=0.0) -> PairView:
    return PairView(
        prefill=prefill,
        decode=decode,
        num_running=running,
        num_started=10 * running,
        prompt_tokens_per_s=tokens,
    )


def ended(request_id, at) -> dict:
    return {"request_id": request_id, "ended_unix_s": at}


def begun(request_id, at) -> dict:
    return {"request_id": request_id, "started_unix_s": at}


def overview(**changes) -> Overview:
    return Overview(
        **{"now_unix_s": 9.0, "version": "1", "is_serving": True, "detail": ""} | changes
    )


def test_what_workers_count_is_added_up_and_what_they_watch_is_the_asked_ones():
    own = overview(
        num_in_flight=1,
        num_queued=2,
        nodes=[node(P, in_flight_requests=1, zone="own"), node(D)],
        totals=Totals(num_finished=5, num_replays=1),
        rates=Rates(requests=2.0, generated_tokens=70.0),
        live=[begun("v", 3)],
        recent=[ended("x", 1), ended("z", 6)],
    )
    other = overview(
        num_in_flight=10,
        num_queued=20,
        nodes=[node(P, in_flight_requests=4, zone="other"), node(E, in_flight_requests=1)],
        totals=Totals(num_finished=7, num_refused=3),
        rates=Rates(requests=0.5, generated_tokens=70.0),
        live=[begun("u", 2)],
        recent=[ended("y", 2)],
    )
    both = merged(own, [other], [2])
    assert (both.num_workers, both.silent_workers) == (2, [2])
    assert (both.num_in_flight, both.num_queued) == (11, 22)
    assert [(n.url, n.zone, n.in_flight_requests) for n in both.nodes] == [
        (P, "own", 5),
        (D, "", 0),
    ]
    assert both.totals == Totals(num_finished=12, num_replays=1, num_refused=3)
    # Tokens are counted by nodes, of which both workers see the same.
    assert both.rates == Rates(requests=2.5, generated_tokens=70.0)
    assert [each["request_id"] for each in both.live] == ["u", "v"]
    assert [each["request_id"] for each in both.recent] == ["x", "y", "z"]


def test_pairs_of_several_workers_are_one():
    own = overview(pairs=[pair(P, D, 1, tokens=100.0)])
    other = overview(pairs=[pair(P, E, 2, tokens=300.0), pair(P, D, 3, tokens=500.0)])
    to_d, to_e = merged(own, [other], []).pairs
    assert (to_d.decode, to_d.num_running, to_d.num_started) == (D, 4, 40)
    assert (to_d.prompt_tokens_per_s, to_e.prompt_tokens_per_s) == (600.0, 300.0)


def timed(ttft_s, e2e_s, num_output_tokens=11, outcome="finished") -> dict:
    fields = {"ttft_s": ttft_s, "e2e_s": e2e_s, "num_output_tokens": num_output_tokens}
    return {**fields, "outcome": outcome, "ended_unix_s": 1.0}


def test_latencies_are_those_of_all_workers_requests_that_finished():
    own = overview(recent=[timed(number / 100, 1 + number / 100) for number in range(1, 100)])
    unfinished = [timed(None, 9.0, outcome="failed"), timed(7.0, 9.0, outcome="cancelled")]
    both = merged(own, [overview(recent=[timed(1.0, 3.0), *unfinished])], []).latencies
    assert both.ttft == Quantiles(p50_s=0.5, p99_s=0.99)
    assert both.e2e == Quantiles(p50_s=1.5, p99_s=1.99)
    assert both.itl.p50_s == pytest.approx(0.1)


def test_one_token_has_no_time_between_tokens_and_no_request_no_latency():
    assert latencies([timed(0.2, 0.2, num_output_tokens=1)]).itl == Quantiles()
    assert latencies([]) == Latencies()


def test_a_client_gets_what_is_younger_than_what_it_has():
    shown = overview(recent=[ended("x", 4), ended("y", 5)])
    newer = after(shown, 4)
    assert [each["request_id"] for each in newer.recent] == ["y"]
    assert after(shown, 0) == shown
