"""Several edge workers of one router, here of one process: what they ask each other through their parent."""

import asyncio
import socket
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec
import pytest
from aiohttp.test_utils import TestClient, TestServer

from tandem.frontend.app import create_app
from tandem.frontend.edge import EDGE
from tandem.frontend.options import FrontendOptions
from tandem.frontend.response_store import Stored, Wanted
from tandem.router import control
from tandem.router.cluster import Cluster
from tandem.router.combined import Combined, WorkerStatus, with_others
from tandem.router.config import RouterConfig
from tandem.router.control import Link
from tandem.router.launcher import Launcher
from tandem.router.membership import Announcement, Members
from tandem.router.nodes_api import NodesApi
from tests.frontend.fakes import FakeBackend
from tests.patience import PATIENCE_S
from tests.router.fake_node import until

CONFIG = RouterConfig(prefills=(), decodes=(), takes_announced=True, num_workers=4)


def node(url: str, requests: int, tokens: int) -> dict:
    return {"url": url, "in_flight_requests": requests, "in_flight_tokens": tokens}


def test_what_all_workers_run_on_a_node_is_added_up_and_an_unknown_node_is_passed_over():
    own = {"role": "router", "nodes": [node("a", 1, 10)]}
    in_flight = {"a": (3, 5), "new": (1, 1)}
    other = WorkerStatus(index=1, pid=9, is_serving=True, num_streams=3, in_flight=in_flight)
    merged = with_others(own, [other], [2])
    assert merged == {"role": "router", "nodes": [node("a", 4, 15)], "silent_workers": [2]}


class Worker:
    """What of an edge worker answers clients and other workers."""

    def __init__(self, index: int, link: Link, directory) -> None:
        self.link, self.backend = link, FakeBackend(None)
        self.cluster = Cluster(CONFIG)
        self.app = create_app(self.backend, FrontendOptions())
        nodes = NodesApi(self.cluster, link)
        self.app.add_routes(nodes.routes())
        combined = Combined(
            index=index,
            link=link,
            edge=self.app[EDGE],
            cluster=self.cluster,
            observer=None,
            metrics_directory=str(directory),
        )
        self.has_left = False
        link.on_asked = combined.replies()
        self.app[EDGE].responses.ask_others = combined.response_elsewhere
        link.on_told = {
            "members": lambda body: self.cluster.apply(msgspec.json.decode(body, type=Members)),
            "leave": lambda _body: setattr(self, "has_left", True),
        }
        self.app.middlewares.append(combined.middleware())
        self.client = TestClient(TestServer(self.app))


@pytest.fixture
async def router(monkeypatch, tmp_path):
    """The parent of four workers, of which two run, and those two."""
    # A worker that is there replies before it is taken for silent, however busy the machine.
    monkeypatch.setattr(control, "TIMEOUT_S", PATIENCE_S)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        parent = Launcher(CONFIG, sock, [], "")
        async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
            workers, running = [], []
            for known in parent._workers[:2]:
                ours, theirs = socket.socketpair()
                running.append(tasks.create_task((await parent.linked(known, ours, 0)).run()))
                link = await Link.over(theirs)
                await link._reader.readline()  # the start
                worker = Worker(known.index, link, tmp_path)
                worker.running = tasks.create_task(link.run())
                running.append(worker.running)
                await stack.enter_async_context(worker.client)
                workers.append(worker)
            yield parent, *workers
            for task in running:
                task.cancel()


@asynccontextmanager
async def generating(worker, name: str):
    """Have a request run on a worker, and yield its response once that is there."""
    body = {"input_ids": [1, 2], "rid": name, "sampling_params": {"max_new_tokens": 100}}
    worker.backend.script = lambda _: [[7], asyncio.Event()]
    posting = asyncio.ensure_future(worker.client.post("/generate", json=body))
    await until(lambda: "1 running" in repr(worker.app[EDGE]))
    yield posting


async def post(worker, path: str, **body) -> dict:
    async with worker.client.post(path, json=body) as response:
        return await response.json()


async def test_an_operator_ends_all_requests_whichever_worker_is_asked(router):
    _, asked, running = router
    async with generating(running, "mine") as posting:
        answer = await post(asked, "/abort_request", abort_all=True)
        assert answer == {"aborted": True, "silent_workers": [2, 3]}
        async with await posting as response:
            assert (await response.json())["meta_info"]["finish_reason"]["type"] == "abort"


async def test_a_stored_response_is_found_and_deleted_whichever_worker_is_asked(router):
    _, asked, keeping = router
    keeping.app[EDGE].responses.put("", "r", Stored(msgspec.Raw(b'{"id":"r"}'), []))
    async with asked.client.get("/v1/responses/r") as response:
        assert await response.json() == {"id": "r"}
    async with asked.client.delete("/v1/responses/r") as response:
        assert (await response.json())["deleted"]
    assert keeping.app[EDGE].responses.own(Wanted("", "r")) is None
    # Two workers of this router do not run: they might keep it.
    async with asked.client.get("/v1/responses/r") as response:
        assert response.status == 503
        assert "retry" in (await response.json())["error"]["message"]


async def test_a_worker_that_does_not_reply_is_named_and_holds_nothing_up(router, monkeypatch):
    _, asked, stopped = router
    monkeypatch.setattr(Link.ask, "__defaults__", (None, 0.1))
    stopped.link.on_asked = {"abort": lambda _body: asyncio.sleep(10 * PATIENCE_S)}
    async with asyncio.timeout(PATIENCE_S):
        answer = await post(asked, "/abort_request", rid="x")
    assert answer == {"aborted": False, "silent_workers": [1, 2, 3]}


async def test_a_node_announced_to_one_worker_is_known_to_all_and_too_many_are_refused(
    router, monkeypatch
):
    monkeypatch.setattr("tandem.router.membership.MAX_ANNOUNCED", 1)
    _, asked, other = router
    assert (await post(asked, "/nodes", url="http://a:1"))["source"] == "announced"
    await until(lambda: [node.url for node in other.cluster.roster] == ["http://a:1"])
    refused = await post(other, "/nodes", url="http://b:1")
    assert "1 nodes were announced already" in refused["error"]["message"]


async def test_a_node_that_is_up_at_any_worker_counts_as_up(router):
    parent, _, worker = router
    worker.link.tell("up", ["http://a:1"])
    await until(lambda: parent._is_up("http://a:1"))
    worker.link.tell("up", [])
    await until(lambda: not parent._is_up("http://a:1"))


@pytest.mark.parametrize("sent", ["{}", "[[[", '{"type":"Call","kind":"up","body":7}', "\\ud800"])
async def test_a_line_that_cannot_be_read_ends_the_link_of_its_worker_alone(router, sent):
    parent, worker, other = router
    worker.link._writer.write(f"{sent}\n".encode())
    await asyncio.wait_for(worker.running, PATIENCE_S)  # its input ends: it stops
    assert await parent._workers[1].link.ask("status", timeout_s=PATIENCE_S)
    other.link.tell("up", ["http://a:1"])
    await until(lambda: parent._is_up("http://a:1"))


async def test_metrics_have_a_line_for_each_worker(router):
    _, asked, _ = router
    async with asked.client.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    assert 'tandem_edge_worker_streams{worker="0"} 0.0' in lines
    assert 'tandem_edge_worker_streams{worker="1"} 0.0' in lines


async def test_a_worker_leaves_and_stops_when_its_parent_has_it(router):
    parent, worker, _ = router
    parent._signalled(delay_s=0.0, drain_s=1.0)
    await until(lambda: worker.has_left)
    await asyncio.wait_for(worker.running, PATIENCE_S)
    # What changes while it drains reaches it no more, and breaks nothing.
    await parent._announce(msgspec.json.encode(Announcement(url="http://a:1")))
    parent._stop()
    assert len(list(worker.cluster.roster)) == 0
