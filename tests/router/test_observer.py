"""What an edge worker sees of nodes that speak the real wire, over HTTP as clients get it."""

import asyncio
import random
from contextlib import AsyncExitStack, aclosing, asynccontextmanager

import pytest
from aiohttp.test_utils import TestClient, TestServer

from tandem.frontend.app import create_app
from tandem.frontend.edge import EDGE
from tandem.frontend.options import FrontendOptions, HttpOptions
from tandem.router import siblings as siblings_module
from tandem.router.backend import ClusterBackend
from tandem.router.cluster import Cluster
from tandem.router.config import PrefillTarget, RouterConfig, node_id
from tandem.router.events import TIER_EVENTS
from tandem.router.observer import Observer
from tandem.router.overview_api import OverviewApi
from tandem.router.page_files import PageFiles
from tandem.router.policies import POLICIES
from tandem.router.pool import new_pool
from tandem.router.siblings import Siblings
from tandem.wire.errors import PeerLost
from tandem.wire.messages import NodeLoad, StartDecode, StartPrefill, TierLoad
from tests.patience import PATIENCE_S
from tests.router.fake_node import FakeNode, request, until

KEY = {"Authorization": "Bearer k"}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Watched:
    """One prefill, two decodes, a backend, and the observer of it with a clock of its own."""

    def __init__(self, nodes, backend, cluster) -> None:
        self.prefill, *self.decodes = nodes
        self.backend, self.cluster, self.clock = backend, cluster, Clock()
        http = HttpOptions(api_keys=("k",))
        page = PageFiles()
        self.app = create_app(backend, FrontendOptions(http=http, open_paths=page.paths))
        self.observer = Observer(cluster, backend, self.app[EDGE].metrics, self.clock)
        self.api = OverviewApi(self.observer)
        self.app.add_routes([*self.api.routes(), *page.routes()])

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
    nodes = [FakeNode("prefill"), FakeNode("decode"), FakeNode("decode")]
    async with AsyncExitStack() as stack:
        for node in nodes:
            await stack.enter_async_context(node.serving())
        config = RouterConfig(
            prefills=(PrefillTarget(nodes[0].url),), decodes=tuple(n.url for n in nodes[1:])
        )
        cluster = Cluster(config)
        backend = ClusterBackend(cluster, POLICIES["least_load"], 3, random.Random(0))
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(cluster.run())
            await until(lambda: len([n for n in cluster.roster if n.is_up]) == len(nodes))
            yield Watched(nodes, backend, cluster)
            running.cancel()


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


async def test_a_death_is_an_event_of_the_node_and_a_replay_one_of_the_request():
    async with watching() as watched, aclosing(watched.backend.generate(request())) as deltas:
        watched.look(0)
        assert {event.kind for event in watched.backend.events.all()} == {"up"}
        first = asyncio.ensure_future(anext(deltas))
        start = await watched.prefill.engine.next(StartPrefill)
        # The two halves come over links of their own, in either order.
        await until(lambda: not all(decode.engine.is_idle() for decode in watched.decodes))
        [decode] = [decode for decode in watched.decodes if not decode.engine.is_idle()]
        await decode.engine.next(StartDecode)
        watched.prefill.engine.fail(start, PeerLost("the writer was lost"))
        again = await watched.prefill.engine.next(StartPrefill)
        watched.prefill.engine.say(again, 0, [7], reason="stop")
        await first
        decode.now_says(is_healthy=False)
        await until(lambda: not watched.cluster.node(decode.url).is_up)
        events = watched.look(2).events
        [replay] = [event for event in events if event.kind == "replay"]
        assert replay.text == "the writer was lost (peer_lost)"
        [down] = [event for event in events if event.kind == "down"]
        assert (down.node, down.text) == (
            decode.url,
            "decode is down: says that it is not healthy",
        )


async def test_what_a_node_counted_before_it_was_known_is_the_work_of_no_second():
    node = FakeNode("decode")
    node.engine.load = NodeLoad(generated_tokens=9_000_000)
    async with node.serving():
        cluster = Cluster(
            RouterConfig(prefills=(PrefillTarget("http://127.0.0.1:1"),), decodes=(node.url,))
        )
        backend = ClusterBackend(cluster, POLICIES["least_load"], 3, random.Random(0))
        clock = Clock()
        observer = Observer(cluster, backend, create_app(backend)[EDGE].metrics, clock)
        observer.look()  # as a worker begins, before any node has answered
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(cluster.run())
            await until(lambda: cluster.node(node.url).is_up)
            for clock.now in (1.0, 2.0):
                observer.look()
            assert observer.overview().rates.generated_tokens == 0
            running.cancel()


async def test_a_link_that_is_made_anew_tells_no_corruption_again():
    async with watching() as watched:
        decode = watched.decodes[0]
        watched.look(0)
        await watched.loads(decode, NodeLoad(num_corrupted=3))
        watched.look(1)
        client = watched.cluster.node(decode.url).client
        told = client.load
        client.answered.clear()  # as a new link is until the engine's first word on it
        client.load = NodeLoad()
        watched.look(2)
        client.answered.set()
        client.load = told
        events = watched.look(3).events
        assert [event.count for event in events if event.kind == "corrupted"] == [1]


async def test_a_store_that_a_node_cannot_reach_is_an_event_and_silence_is_none():
    async with watching() as watched:
        decode = watched.decodes[0]
        for at, state in enumerate(["up", "backing_off", "backing_off", "up"]):
            await watched.loads(decode, NodeLoad(tiers=[TierLoad(name="redis", state=state)]))
            overview = watched.look(at)
        assert watched.node(decode, overview).load.tiers == [TierLoad(name="redis")]
        client = watched.cluster.node(decode.url).client
        client.answered.clear()  # as a new link is until the engine's first word on it
        watched.look(5)
        client.answered.set()
        events = [event for event in watched.look(6).events if event.kind in TIER_EVENTS]
        assert [(event.kind, event.text, event.node) for event in events] == [
            ("tier", "decode's tier redis is backing off", decode.url),
            ("tier up", "decode's tier redis is up", decode.url),
        ]


async def test_refusals_of_one_second_are_one_event_with_their_number():
    async with watching() as watched:
        watched.look(0)
        for _ in range(3):
            with pytest.raises(Exception, match="was over on arrival"):
                await anext(watched.backend.generate(request(deadline_s=0.0)))
        events = [event for event in watched.look(1).events if event.kind == "refused"]
        assert [(event.count, event.text) for event in events] == [
            (3, "not started: deadline passed")
        ]
        assert watched.look(2).totals.num_refused == 3


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
        watched.backend.recent.request_ended({"request_id": "r", "phases": []})
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
        assert (later["recent"], later["events"]) == ([], [])
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


async def test_whichever_worker_is_asked_all_are_in_the_answer(monkeypatch):
    monkeypatch.setattr(siblings_module, "TIMEOUT_S", PATIENCE_S)
    async with AsyncExitStack() as stack:
        pool = stack.enter_context(new_pool(3))
        workers = [await stack.enter_async_context(watching()) for _ in range(2)]
        for index, watched in enumerate(workers):
            siblings = Siblings(pool, index)
            await stack.enter_async_context(
                siblings.reachable(watched.app[EDGE], overview=watched.api)
            )
            watched.backend.recent.request_ended({"request_id": f"of {index}", "phases": []})
            watched.look(0)
        client = await stack.enter_async_context(TestClient(TestServer(workers[1].app)))
        async with client.get("/overview", headers=KEY) as response:
            shown = await response.json()
        assert (shown["num_workers"], shown["silent_workers"]) == (2, [2])
        assert {timings["request_id"] for timings in shown["recent"]} == {"of 0", "of 1"}
