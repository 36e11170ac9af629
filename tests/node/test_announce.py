"""A node that announces itself to a router, which is a small server."""

import asyncio
from contextlib import asynccontextmanager
from urllib.parse import unquote

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from structlog.testing import capture_logs

from tandem.engine.config import EngineConfig
from tandem.node.config import NodeConfig
from tandem.node.process import announce
from tandem.node.process.announce import TTL_S, Announcer, warn_of_loopback
from tandem.wire.keys import operator_key
from tests.patience import PATIENCE_S

CONFIG = NodeConfig(role="decode", served_model_names=("m",), engine=EngineConfig(model_dir="m"))


class FakeRouter:
    """Records requests, and answers with `status`."""

    def __init__(self) -> None:
        self.told: asyncio.Queue = asyncio.Queue()
        self.status = 200
        self.answers = asyncio.Event()
        self.answers.set()
        app = web.Application()
        app.router.add_post("/nodes", self._add)
        app.router.add_delete("/nodes/{node}", self._remove)
        self.server = TestServer(app)

    async def _add(self, request: web.Request) -> web.Response:
        key = request.headers.get("Authorization", "")
        self.told.put_nowait(("add", key, await request.json()))
        await self.answers.wait()
        body = {"error": {"message": "a sentence of the router's"}}
        return web.json_response(body, status=self.status)

    async def _remove(self, request: web.Request) -> web.Response:
        self.told.put_nowait(("remove", unquote(request.raw_path.removeprefix("/nodes/"))))
        return web.json_response({})

    @property
    def url(self) -> str:
        return str(self.server.make_url("")).rstrip("/")

    async def next(self):
        async with asyncio.timeout(PATIENCE_S):
            return await self.told.get()


@pytest.fixture
async def router(monkeypatch):
    monkeypatch.setattr(announce, "INTERVAL_S", 0.01)
    for limit in ("TIMEOUT_S", "LEAVE_TIMEOUT_S"):  # long enough for a busy machine
        monkeypatch.setattr(announce, limit, PATIENCE_S)
    made = FakeRouter()
    await made.server.start_server()
    yield made
    await made.server.close()


@asynccontextmanager
async def announced(*routers: str, role=lambda: "decode", bearer: str = "", **fields):
    config = msgspec.structs.replace(CONFIG, routers=routers, **fields)
    announcer = Announcer(config, 7001, role, bearer)
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(announcer.run())
        yield announcer
        announcer.stop()


async def test_node_announces_itself_repeatedly_and_withdraws_at_the_end(router):
    key, roles = operator_key("secret"), ["decode"]
    async with announced(router.url, role=lambda: roles[0], bearer=key):
        body = {"url": "http://127.0.0.1:7001", "role": "decode", "ttl_s": TTL_S}
        for _ in range(2):
            assert await router.next() == ("add", f"Bearer {key}", body)
        roles[0] = "prefill"
        while (told := await router.next())[2]["role"] == "decode":
            pass
        assert told[2] == body | {"role": "prefill"}
    while (told := await router.next())[0] == "add":
        pass
    assert told == ("remove", "http://127.0.0.1:7001")


async def test_rejection_is_logged_once_with_a_remedy_and_retried(router):
    router.status = 401
    with capture_logs() as logs:
        async with announced(router.url):
            for _ in range(3):
                await router.next()
            router.status = 200
            for _ in range(3):
                await router.next()
    events = [entry["event"] for entry in logs]
    assert events == ["announce.refused", "announce.accepted", "announce.left"]
    assert "a sentence of the router's: set TANDEM_CLUSTER_KEY on this node" in logs[0]["reason"]


async def test_node_withdraws_from_a_router_that_answered_late(router, monkeypatch):
    monkeypatch.setattr(announce, "TIMEOUT_S", 0.01)
    router.answers.clear()
    with capture_logs() as logs:
        async with announced(router.url):
            for _ in range(2):  # the second is sent when the first has timed out
                assert (await router.next())[0] == "add"
        while (told := await router.next())[0] == "add":
            pass
    assert told == ("remove", "http://127.0.0.1:7001")
    assert logs[0]["reason"] == announce.LATE
    router.answers.set()


async def test_unreachable_router_does_not_delay_others(router):
    with capture_logs() as logs:
        async with announced("http://127.0.0.1:9", router.url):
            assert (await router.next())[0] == "add"
            assert (await router.next())[0] == "add"
    (refused,) = [entry for entry in logs if entry["event"] == "announce.refused"]
    assert refused["router"] == "http://127.0.0.1:9"
    assert "cannot be reached (Connection refused)" in refused["reason"]


async def test_node_on_all_addresses_advertises_its_source_address():
    config = msgspec.structs.replace(CONFIG, host="0.0.0.0")
    announcer = Announcer(config, 7001, lambda: "decode")
    assert await announcer.advertised("http://127.0.0.1:8000") == "http://127.0.0.1:7001"
    assert await announcer.advertised("http://[::1]:8000") == "http://[::1]:7001"
    given = msgspec.structs.replace(config, advertise_url="https://decode-3.example")
    assert (
        await Announcer(given, 7001, lambda: "decode").advertised("http://127.0.0.1:8000")
        == "https://decode-3.example"
    )


def test_loopback_address_for_a_remote_router_is_warned_about():
    with capture_logs() as logs:
        for router in ("http://10.0.0.7:8000", "http://127.0.0.1:8000"):
            warn_of_loopback(msgspec.structs.replace(CONFIG, routers=(router,)))
    (warned,) = logs
    assert (warned["event"], warned["router"]) == ("announce.loopback", "http://10.0.0.7:8000")


async def test_invalid_router_host_name_falls_back_to_the_bound_address():
    config = msgspec.structs.replace(CONFIG, host="0.0.0.0")
    announcer = Announcer(config, 7001, lambda: "decode")
    assert await announcer.advertised(f"http://{'a' * 64}.example:8000") == "http://0.0.0.0:7001"
