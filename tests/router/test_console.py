"""What an edge worker sees of nodes that speak the real wire, what is merged of several, and what clients get."""

import asyncio
import hashlib
from contextlib import aclosing, asynccontextmanager

import pytest
from aiohttp.test_utils import TestClient, TestServer

from tandem.frontend.app import create_app
from tandem.frontend.http.edge import EDGE
from tandem.frontend.options import FrontendOptions, HttpOptions
from tandem.router.config import node_id
from tandem.router.console.console import OverviewApi, PageFiles, RequestObserver
from tandem.router.console.overview import (
    Latencies,
    NodeView,
    Overview,
    PairView,
    Quantiles,
    Rates,
    latencies,
    merged,
    restricted,
)
from tandem.router.metrics import Totals
from tandem.wire.messages import NodeLoad, StartPrefill
from tests.patience import Clock, until_async
from tests.receivers import deltas
from tests.router.fake_node import FakeNode, request
from tests.router.test_backend import cluster, watched

KEY, K_NAME = {"Authorization": "Bearer k"}, hashlib.sha256(b"k").hexdigest()[:8]


class Watched:
    """One prefill, two decodes, a backend, and the observer of it with a clock of its own."""

    def __init__(self, setup) -> None:
        [self.prefill], self.decodes = setup.prefills, setup.decodes
        self.backend, self.cluster, self.clock = setup.backend, setup.backend._cluster, Clock()
        http = HttpOptions(api_keys=("k",))
        page = PageFiles()
        self.app = create_app(self.backend, FrontendOptions(http=http, open_paths=page.paths))
        self.observer = RequestObserver(self.cluster, self.backend, self.app[EDGE].live, self.clock)
        self.app.add_routes([*OverviewApi(self.observer).routes(), *page.routes()])

    def look(self, at: float):
        self.clock.now_s = at
        self.observer.sample()
        return self.observer.overview()

    def node(self, fake, overview):
        [view] = [view for view in overview.nodes if view.url == fake.url]
        return view

    async def loads(self, fake, load: NodeLoad) -> None:
        """Have a node tell this load."""
        fake.engine.load = load
        node = self.cluster.node(fake.url)
        await until_async(lambda: node.client.load == load)


@asynccontextmanager
async def watching():
    async with cluster(num_decodes=2) as setup:
        yield Watched(setup)


async def test_running_request_shows_its_pair_and_push_rate_until_it_ends():
    async with (
        watching() as watched,
        aclosing(deltas(watched.backend, request(prompt_ids=range(40)))) as parts,
    ):
        watched.look(0)
        first = asyncio.ensure_future(anext(parts))
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
        await parts.aclose()
        overview = watched.look(6)
        assert [pair.num_running for pair in overview.pairs] == [0]
        assert (overview.num_in_flight, overview.totals.num_finished) == (0, 1)
        assert overview.rates.requests > 0


async def test_counters_from_before_the_first_sample_do_not_raise_rates():
    node, clock = FakeNode("decode"), Clock()
    node.engine.load = NodeLoad(generated_tokens=9_000_000)
    async with node.serving(), watched([], [node], discovers_announced=True) as backend:
        observer = RequestObserver(backend._cluster, backend, list, clock)
        observer.sample()  # as a worker begins, before any node has answered
        await until_async(lambda: backend._cluster.node(node.url).is_up)
        for clock.now_s in (1.0, 2.0):
            observer.sample()
        assert observer.overview().rates.generated_tokens == 0


async def test_overview_is_made_at_most_four_times_per_second():
    async with watching() as watched:
        watched.look(0)
        made = watched.observer.overview()
        watched.clock.now_s = 0.24
        assert watched.observer.overview() is made
        watched.clock.now_s = 0.25
        assert watched.observer.overview() is not made


async def test_overview_needs_the_api_key_and_the_page_does_not():
    async with watching() as watched, TestClient(TestServer(watched.app)) as client:
        watched.observer.request_ended(lambda: {"request_id": "r", "client": K_NAME, "phases": []})
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
    return {"request_id": request_id, "client": "", "ended_unix_s": at}


def begun(request_id, at) -> dict:
    return {"request_id": request_id, "client": "", "started_unix_s": at}


def overview(**changes) -> Overview:
    return Overview(
        **{"now_unix_s": 9.0, "version": "1", "is_serving": True, "detail": ""} | changes
    )


def test_merged_overview_adds_counts_and_keeps_the_nodes_of_one_worker():
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


def test_merged_overview_adds_the_same_pair_of_several_workers():
    own = overview(pairs=[pair(P, D, 1, tokens=100.0)])
    other = overview(pairs=[pair(P, E, 2, tokens=300.0), pair(P, D, 3, tokens=500.0)])
    to_d, to_e = merged(own, [other], []).pairs
    assert (to_d.decode, to_d.num_running, to_d.num_started) == (D, 4, 40)
    assert (to_d.prompt_tokens_per_s, to_e.prompt_tokens_per_s) == (600.0, 300.0)


def timed(ttft_s, e2e_s, num_output_tokens=11, outcome="finished") -> dict:
    fields = {"ttft_s": ttft_s, "e2e_s": e2e_s, "num_output_tokens": num_output_tokens}
    return {**fields, "outcome": outcome, "ended_unix_s": 1.0}


def test_latencies_cover_finished_requests_of_all_workers():
    own = overview(recent=[timed(number / 100, 1 + number / 100) for number in range(1, 100)])
    unfinished = [timed(None, 9.0, outcome="failed"), timed(7.0, 9.0, outcome="cancelled")]
    both = merged(own, [overview(recent=[timed(1.0, 3.0), *unfinished])], []).latencies
    assert both.ttft == Quantiles(p50_s=0.5, p99_s=0.99)
    assert both.e2e == Quantiles(p50_s=1.5, p99_s=1.99)
    assert both.itl.p50_s == pytest.approx(0.1)


def test_single_token_has_no_itl_and_no_requests_have_no_latencies():
    assert latencies([timed(0.2, 0.2, num_output_tokens=1)]).itl == Quantiles()
    assert latencies([]) == Latencies()


def test_overview_after_a_time_has_only_newer_requests():
    shown = overview(recent=[ended("x", 4), ended("y", 5)])
    newer = restricted(shown, None, 4)
    assert [each["request_id"] for each in newer.recent] == ["y"]
    assert restricted(shown, None, 0) == shown


@pytest.mark.parametrize(("name", "shown_ids"), [("one", ["a", "c"]), ("operator", list("abcd"))])
async def test_overview_shows_a_client_only_its_own_requests(name, shown_ids):
    async with cluster(num_decodes=1) as setup:
        http = HttpOptions(api_keys=("one", "two"))
        app = create_app(setup.backend, FrontendOptions(http=http, operator_key="operator"))
        one, two = (hashlib.sha256(key.encode()).hexdigest()[:8] for key in http.api_keys)
        live = [{"request_id": "a", "client": one}, {"request_id": "b", "client": two}]
        observer = RequestObserver(setup.backend._cluster, setup.backend, lambda: live)
        observer.request_ended(lambda: {"request_id": "c", "client": one})
        observer.request_ended(lambda: {"request_id": "d", "client": two})
        app.add_routes(OverviewApi(observer).routes())
        async with (
            TestClient(TestServer(app)) as client,
            client.get("/overview", headers={"Authorization": f"Bearer {name}"}) as response,
        ):
            shown = await response.json()
    assert [each["request_id"] for each in (*shown["live"], *shown["recent"])] == shown_ids
