"""Several edge workers of one router, here of one process: what they ask each other through their parent."""

import asyncio
import socket
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec
import pytest
from aiohttp.test_utils import TestClient, TestServer

from tandem.frontend.app import create_app
from tandem.frontend.http.edge import EDGE
from tandem.frontend.options import FrontendOptions, HttpOptions
from tandem.router import control
from tandem.router.config import RouterConfig
from tandem.router.control import WorkerLink
from tandem.router.membership.membership import Announcement, Members
from tandem.router.nodes.api import NodesApi
from tandem.router.nodes.cluster import Cluster
from tandem.router.workers.combined import Combined, WorkerStatus, with_others
from tandem.router.workers.launcher import EdgeLauncher
from tests.frontend.fakes import FakeBackend
from tests.patience import PATIENCE_S, until_async

CONFIG = RouterConfig(prefills=(), decodes=(), discovers_announced=True, num_workers=4)


def node(url: str, requests: int, tokens: int) -> dict:
    return {"url": url, "in_flight_requests": requests, "in_flight_tokens": tokens}


def test_in_flight_requests_of_all_workers_are_added_per_known_node():
    own = {"role": "router", "nodes": [node("a", 1, 10)]}
    in_flight = {"a": (3, 5), "new": (1, 1)}
    other = WorkerStatus(index=1, pid=9, is_serving=True, num_streams=3, in_flight=in_flight)
    merged = with_others(own, [other], [2])
    assert merged == {"role": "router", "nodes": [node("a", 4, 15)], "silent_workers": [2]}


OPTIONS = FrontendOptions(http=HttpOptions(api_keys=("one", "two")), operator_key="operator")


@pytest.mark.parametrize(("node_wait_s", "waited_s"), [(7.0, 7.0), (0.0, 2.0)])
async def test_successor_of_a_worker_that_had_nodes_meets_a_pair_before_it_accepts_connections(
    node_wait_s, waited_s
):
    config = RouterConfig(discovers_announced=True, node_wait_s=node_wait_s)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        launcher = EdgeLauncher(config, sock, [], "")
        (worker,) = launcher._workers
        waits_s = []
        for _process in range(3):
            ours, theirs = socket.socketpair()
            with theirs:
                link = await launcher.open_link(worker, ours, sock.fileno())
                start = await asyncio.to_thread(control.read_start, theirs.fileno())
                waits_s.append(start.pair_wait_s)
                link.message_handlers["up"](b'["http://10.0.0.4:7000"]')
                link.message_handlers["up"](b"[]")
            await link.run()  # which ends, as its process has
            worker.reset()
    assert waits_s == [0.0, waited_s, waited_s]


def key(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}"}


class Worker:
    """What of an edge worker answers clients and other workers."""

    def __init__(self, index: int, link: WorkerLink, directory) -> None:
        self.link, self.backend = link, FakeBackend(None)
        self.cluster = Cluster(CONFIG)
        self.app = create_app(self.backend, OPTIONS)
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
        self.has_left, self.refused = False, []
        link.question_handlers = combined.question_handlers()
        link.message_handlers = {
            "members": lambda body: self.cluster.apply(msgspec.json.decode(body, type=Members)),
            "leave": lambda _body: setattr(self, "has_left", True),
            "refuse": lambda body: self.refused.append(msgspec.json.decode(body)),
        }
        self.app.middlewares.append(combined.middleware())
        self.client = TestClient(TestServer(self.app))


@pytest.fixture
async def router(monkeypatch, tmp_path):
    """The parent of four workers, of which two run, and those two."""
    # A worker that is there replies before it is taken for silent, however busy the machine.
    monkeypatch.setattr(control, "TIMEOUT_S", PATIENCE_S)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        parent = EdgeLauncher(CONFIG, sock, [], "")
        async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
            workers, running = [], []
            for known in parent._workers[:2]:
                ours, theirs = socket.socketpair()
                running.append(tasks.create_task((await parent.open_link(known, ours, 0)).run()))
                link = await WorkerLink.over(theirs)
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
    posting = asyncio.ensure_future(worker.client.post("/generate", json=body, headers=key("one")))
    await until_async(lambda: "1 running" in repr(worker.app[EDGE]))
    yield posting


async def post(worker, path: str, name: str = "operator", **body) -> dict:
    async with worker.client.post(path, json=body, headers=key(name)) as response:
        return await response.json()


async def test_operator_aborts_all_requests_through_any_worker(router):
    _, asked, running = router
    async with generating(running, "mine") as posting:
        answer = await post(asked, "/abort_request", abort_all=True)
        assert answer == {"aborted": True, "silent_workers": [2, 3]}
        async with await posting as response:
            assert (await response.json())["meta_info"]["finish_reason"]["type"] == "abort"


async def test_key_aborts_only_its_own_requests_through_any_worker(router):
    _, asked, running = router
    async with generating(running, "mine") as posting:
        assert not (await post(asked, "/abort_request", "two", rid="mine"))["aborted"]
        assert (await post(asked, "/abort_request", "one", rid="mine"))["aborted"]
        assert (await posting).status == 200


async def test_abort_ends_requests_with_the_same_id_at_all_workers(router):
    _, one, other = router
    async with generating(one, "mine") as first, generating(other, "mine") as second:
        assert (await post(one, "/abort_request", "one", rid="mine"))["aborted"]
        async with asyncio.timeout(PATIENCE_S):
            assert [(await posting).status for posting in (first, second)] == [200, 200]


async def test_unresponsive_worker_is_listed_and_delays_no_answer(router, monkeypatch):
    _, asked, stopped = router
    monkeypatch.setattr(WorkerLink.ask, "__defaults__", (None, 0.1))
    stopped.link.question_handlers = {"abort": lambda _body: asyncio.sleep(10 * PATIENCE_S)}
    async with asyncio.timeout(PATIENCE_S):
        answer = await post(asked, "/abort_request", rid="x")
    assert answer == {"aborted": False, "silent_workers": [1, 2, 3]}


async def test_announcement_reaches_all_workers_and_their_number_is_limited(router, monkeypatch):
    monkeypatch.setattr("tandem.router.membership.membership.MAX_ANNOUNCED", 1)
    _, asked, other = router
    assert (await post(asked, "/nodes", url="http://a:1"))["source"] == "announced"
    await until_async(lambda: [node.url for node in other.cluster.roster] == ["http://a:1"])
    refused = await post(other, "/nodes", url="http://b:1")
    assert "1 nodes are announced already" in refused["error"]["message"]


async def test_prompt_that_ended_engines_is_refused_by_all_workers(router):
    _, worker, other = router
    worker.link.send("refuse", "a hash")
    await until_async(lambda: worker.refused == other.refused == ["a hash"])


async def test_node_is_up_while_it_is_up_at_any_worker(router):
    parent, _, worker = router
    worker.link.send("up", ["http://a:1"])
    await until_async(lambda: parent._is_up("http://a:1"))
    worker.link.send("up", [])
    await until_async(lambda: not parent._is_up("http://a:1"))


@pytest.mark.parametrize("sent", ["{}", "[[[", '{"type":"Call","kind":"up","body":7}', "\\ud800"])
async def test_malformed_line_closes_only_the_link_of_its_worker(router, sent):
    parent, worker, other = router
    worker.link._writer.write(f"{sent}\n".encode())
    await asyncio.wait_for(worker.running, PATIENCE_S)  # its input ends: it stops
    assert await parent._workers[1].link.ask("status", timeout_s=PATIENCE_S)
    other.link.send("up", ["http://a:1"])
    await until_async(lambda: parent._is_up("http://a:1"))


async def test_metrics_have_one_line_per_worker(router):
    _, asked, _ = router
    async with asked.client.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    assert 'tandem_edge_worker_streams{worker="0"} 0.0' in lines
    assert 'tandem_edge_worker_streams{worker="1"} 0.0' in lines


async def test_worker_drains_and_stops_when_its_parent_stops(router):
    parent, worker, _ = router
    parent._on_signal(delay_s=0.0, drain_s=1.0)
    await until_async(lambda: worker.has_left)
    await asyncio.wait_for(worker.running, PATIENCE_S)
    # What changes while it drains reaches it no more, and breaks nothing.
    await parent._announce(msgspec.json.encode(Announcement(url="http://a:1")))
    parent._stop()
    assert len(list(worker.cluster.roster)) == 0
