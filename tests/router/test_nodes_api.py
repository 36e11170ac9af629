"""The routes that change who is known, on one edge worker over HTTP."""

from contextlib import asynccontextmanager
from urllib.parse import quote

import pytest
from aiohttp.test_utils import TestClient, TestServer

from tandem.frontend.app import create_app
from tandem.frontend.options import FrontendOptions, HttpOptions
from tandem.router.config import RouterConfig
from tandem.router.membership.membership import Membership
from tandem.router.nodes.api import NodesApi
from tandem.router.nodes.cluster import Cluster
from tests.frontend.fakes import FakeBackend

URL, ID = "http://10.0.0.1:7000", "10.0.0.1:7000"


class Parent:
    """The membership, as the parent process keeps it."""

    def __init__(self, cluster) -> None:
        self._cluster, self._membership = cluster, Membership(())

    async def ask(self, kind, announcement, _timeout_s) -> None:
        assert kind == "announce"
        self._membership.announce(announcement)
        self._cluster.apply(self._membership.members())


@asynccontextmanager
async def serving(*, key="", api_keys=()):
    """Yield a client of a router without nodes, which visits none either."""
    options = FrontendOptions(operator_key=key, http=HttpOptions(api_keys=api_keys))
    cluster = Cluster(RouterConfig(prefills=(), decodes=(), discovers_announced=True))
    app = create_app(FakeBackend(None), options)
    app.add_routes(NodesApi(cluster, Parent(cluster)).routes())
    async with TestClient(TestServer(app)) as client:
        yield client


async def post(client, **body) -> tuple[int, dict]:
    async with client.post("/nodes", json=body) as response:
        return response.status, await response.json()


async def delete(client, name: str) -> tuple[int, dict]:
    async with client.delete(f"/nodes/{name}") as response:
        return response.status, await response.json()


async def nodes(client) -> list[dict]:
    async with client.get("/nodes") as response:
        assert response.status == 200
        return (await response.json())["nodes"]


async def test_announced_node_is_listed_with_its_state():
    async with serving() as client:
        assert await nodes(client) == []
        status, answer = await post(client, url=f"{URL}/", role="decode", zone="z", ttl_s=10)
        assert status == 200
        assert answer == {
            "id": ID,
            "url": URL,
            "role": "decode",
            "model": "",
            "state": "down",
            "reason": "not reached yet",
            "source": "announced",
            "zone": "z",
            "in_flight_requests": 0,
            "in_flight_tokens": 0,
            "tiers": [],
        }
        await post(client, url=URL, role="decode", zone="z", ttl_s=10)
        assert await nodes(client) == [answer]


@pytest.mark.parametrize("name", [ID, quote(URL, safe=""), URL, quote(quote(URL, safe=""))])
async def test_node_is_removed_by_id_or_url(name):
    async with serving() as client:
        await post(client, url=URL, role="decode")
        status, answer = await delete(client, name)
        assert (status, answer["state"], answer["reason"]) == (200, "leaving", "was removed")
        # Said again, it belongs to the cluster again.
        assert (await post(client, url=URL, role="decode"))[1]["state"] == "down"


async def test_unknown_node_cannot_be_removed():
    async with serving() as client:
        status, answer = await delete(client, "10.0.0.9:1")
        assert status == 404
        assert "there is no node '10.0.0.9:1'" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({}, "url: is missing"),
        ({"url": 7}, "url: must be a string"),
        ({"url": "10.0.0.1:7000"}, "url: '10.0.0.1:7000' is not a node's URL"),
        ({"url": "http://10.0.0.1:7000?x=1"}, "is not a node's URL"),
        ({"url": URL, "role": "router"}, "role: must be 'decode' or 'prefill'"),
        ({"url": URL, "bootstrap_port": 70000}, "bootstrap_port: must be at most 65535"),
        ({"url": URL, "ttl_s": 0}, "ttl_s: must be more than 0"),
        ({"url": URL, "ttl_s": 1e9}, "ttl_s: must be at most 86400"),
        ({"url": "http://" + "a" * 2000}, "url: must have at most 1024 characters"),
    ],
)
async def test_invalid_announcement_is_rejected_with_the_field_name(body, sentence):
    async with serving() as client:
        status, answer = await post(client, **body)
        assert status == 400
        assert sentence in answer["error"]["message"]
        assert await nodes(client) == []


async def test_only_the_operator_key_changes_members_of_a_cluster_with_a_secret():
    async with serving(key="0p", api_keys=("client",)) as client:
        for key, expected in (("", 401), ("client", 401), ("0p", 200)):
            headers = {"Authorization": f"Bearer {key}"}
            body = {"url": URL, "role": "decode"}
            async with client.post("/nodes", json=body, headers=headers) as response:
                assert response.status == expected
            async with client.delete(f"/nodes/{ID}", headers=headers) as response:
                assert response.status == expected


async def test_client_api_key_cannot_announce_a_node():
    async with serving(api_keys=("client",)) as client:
        headers = {"Authorization": "Bearer client"}
        async with client.post("/nodes", json={"url": URL}, headers=headers) as response:
            assert response.status == 403
        async with client.get("/nodes", headers=headers) as response:
            assert (await response.json())["nodes"] == []
