"""One answer for several workers, here of one process."""

import asyncio
import socket
from contextlib import AsyncExitStack

import pytest
from aiohttp.test_utils import TestClient, TestServer

from tandem.frontend.app import create_app
from tandem.frontend.edge import EDGE
from tandem.router import siblings
from tandem.router.pool import Row, new_pool
from tandem.router.siblings import Answers, Siblings, merge_abort, merge_info
from tests.frontend.fakes import FakeBackend
from tests.patience import PATIENCE_S
from tests.router.fake_node import until


def node(url: str, requests: int, tokens: int) -> dict:
    return {"url": url, "in_flight_requests": requests, "in_flight_tokens": tokens}


def test_an_abort_happened_if_it_did_on_any_worker():
    assert merge_abort({"aborted": False}, Answers([{"aborted": True}], [])) == {"aborted": True}
    assert merge_abort({"aborted": False}, Answers([], [])) == {"aborted": False}


def test_what_all_workers_run_on_a_node_is_added_up():
    own = {"role": "router", "nodes": [node("a", 1, 10), node("b", 2, 20)]}
    others = Answers([{"nodes": [node("b", 3, 5), node("a", 1, 1)]}], [2])
    merged = merge_info(own, others)
    assert merged["nodes"] == [node("a", 2, 11), node("b", 5, 25)]
    assert merged["role"] == "router"
    assert merged["silent_workers"] == [2]


def test_a_node_that_one_worker_has_not_heard_of_yet_harms_nothing():
    others = Answers([{"nodes": [node("new", 3, 5), node("a", 1, 1)]}], [])
    assert merge_info({"nodes": [node("a", 1, 10)]}, others)["nodes"] == [node("a", 2, 11)]


class Worker:
    """What of an edge worker answers siblings and clients."""

    def __init__(self, pool, index: int) -> None:
        self.backend = FakeBackend(None)
        self.app = create_app(self.backend)
        self.siblings = Siblings(pool, index)
        self.app.middlewares.append(self.siblings.answering())
        self.client = TestClient(TestServer(self.app))


@pytest.fixture
async def workers(monkeypatch):
    """Two workers that serve and the pool of four that they belong to."""
    # Who is there answers before it is taken for silent, however busy the machine.
    monkeypatch.setattr(siblings, "TIMEOUT_S", PATIENCE_S)
    with new_pool(4) as pool:
        async with AsyncExitStack() as stack:
            made = [Worker(pool, 0), Worker(pool, 1)]
            for worker in made:
                await stack.enter_async_context(worker.siblings.reachable(worker.app[EDGE]))
                await stack.enter_async_context(worker.client)
            yield pool, made


async def test_a_request_is_aborted_whichever_worker_is_asked(workers):
    _, (asked, running) = workers
    body = {"input_ids": [1, 2], "rid": "mine", "sampling_params": {"max_new_tokens": 100}}
    running.backend.script = lambda _: [[7], asyncio.Event()]
    generating = asyncio.ensure_future(running.client.post("/generate", json=body))
    await until(lambda: "1 running" in repr(running.app[EDGE]))
    async with asked.client.post("/abort_request", json={"rid": "mine"}) as response:
        answer = await response.json()
    assert answer["aborted"] is True
    async with await generating as response:
        assert (await response.json())["meta_info"]["finish_reason"]["type"] == "abort"


async def test_an_operator_ends_all_requests_whichever_worker_is_asked(workers):
    _, (asked, running) = workers
    body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 100}}
    running.backend.script = lambda _: [[7], asyncio.Event()]
    generating = asyncio.ensure_future(running.client.post("/generate", json=body))
    await until(lambda: "1 running" in repr(running.app[EDGE]))
    async with asked.client.post("/abort_request", json={"abort_all": True}) as response:
        assert await response.json() == {"aborted": True, "silent_workers": [2, 3]}
    async with await generating as response:
        assert response.status == 200


async def test_workers_that_are_dead_or_stopped_are_named_and_hold_nothing_up(workers, monkeypatch):
    pool, (asked, _) = workers
    # Worker 2 listens and never answers, as one that was stopped does; worker 3 is not there.
    monkeypatch.setattr(siblings, "TIMEOUT_S", 0.1)
    with socket.socket(socket.AF_UNIX) as stopped:
        stopped.bind(pool.socket_path(2))
        stopped.listen()
        async with (
            asyncio.timeout(PATIENCE_S),
            siblings._session(pool.socket_path(2)) as asked.siblings._sessions[2],
            asked.client.post("/abort_request", json={"rid": "x"}) as response,
        ):
            assert await response.json() == {"aborted": False, "silent_workers": [2, 3]}


async def test_a_refused_request_is_refused_by_the_worker_that_was_asked(workers):
    _, (asked, _) = workers
    async with asked.client.post("/abort_request", json={}) as response:
        assert response.status == 400
        assert "rid" in (await response.json())["error"]["message"]


async def test_metrics_have_a_line_for_each_worker(workers):
    pool, (asked, _) = workers
    pool.write(1, Row(num_received=5, num_closed=2, num_streams=3))
    async with asked.client.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    assert 'tandem_edge_worker_connections{worker="1"} 3.0' in lines
    assert 'tandem_edge_worker_streams{worker="1"} 3.0' in lines
