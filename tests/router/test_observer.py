"""What an edge worker sees of nodes that speak the real wire, over HTTP as clients get it."""

import asyncio
from contextlib import aclosing, asynccontextmanager

from aiohttp.test_utils import TestClient, TestServer

from tandem.frontend.app import create_app
from tandem.frontend.options import FrontendOptions, HttpOptions
from tandem.router.config import node_id
from tandem.router.console import Observer, OverviewApi, PageFiles
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
        self.observer = Observer(self.cluster, self.backend, self.clock)
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
        observer = Observer(backend._cluster, backend, clock)
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
