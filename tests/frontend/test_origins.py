"""Requests of web pages to servers without API keys: other origins' pages change nothing, and no page picks the name."""

import socket
from contextlib import asynccontextmanager

import aiohttp
import pytest

from tandem.frontend.app import create_app
from tandem.frontend.http.server import listen, serving
from tandem.frontend.options import FrontendOptions, HttpOptions
from tests.frontend.conftest import serve

PAGE = "https://evil.example"
BODY = (
    b'{"input_ids": [5], "bootstrap_host": "10.0.0.9", "bootstrap_port": 22, "bootstrap_room": 1}'
)
PLAIN = {"Content-Type": "text/plain"}


async def status_of(client, method, path, headers) -> int:
    async with client.request(method, path, data=BODY, headers=PLAIN | headers) as response:
        return response.status


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": PAGE},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Origin": PAGE, "Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/generate"), ("PUT", "/generate"), ("POST", "/abort_request")]
)
async def test_page_of_another_origin_runs_nothing(client, backend, method, path, headers):
    sent = PLAIN | headers
    async with client.request(method, path, data=BODY, headers=sent) as response:
        assert response.status == 403
        error = (await response.json())["error"]
    assert error["code"] == "origin_not_allowed"
    assert "--cors-allow-origin" in error["message"]
    assert not backend.requests


async def test_own_page_and_other_clients_are_served(client, backend):
    own = str(client._base_url).rstrip("/")
    for headers in (
        {"Origin": own},
        {"Origin": "https://proxy.example", "Sec-Fetch-Site": "same-origin"},
        {"Sec-Fetch-Site": "none"},
        {},
    ):
        assert await status_of(client, "POST", "/generate", headers) == 200
    assert len(backend.requests) == 4
    assert await status_of(client, "GET", "/health", {"Origin": PAGE}) == 200


@pytest.mark.parametrize(
    "http", [{"cors_origins": (PAGE,)}, {"cors_origins": ("*",)}, {"api_keys": ("k",)}]
)
async def test_allowed_page_or_page_with_a_key_is_served(backend, http):
    async with serve(backend, FrontendOptions(http=HttpOptions(**http))) as client:
        headers = {"Origin": PAGE, "Sec-Fetch-Site": "cross-site", "Authorization": "Bearer k"}
        assert await status_of(client, "POST", "/generate", headers) == 200


NAMES = [
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "[::1",
]
OWN_NAMES = [
    "localhost:8000",
    "LOCALHOST.",
    "127.0.0.1",
    "127.8.9.1:80",
    "[::1]:8000",
    "api.localhost",
    "my.local",
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/health"])
async def test_loopback_listener_refuses_foreign_host_names(client, name, path):
    async with client.get(path, headers={"Host": name}) as response:
        assert response.status == 403
        error = (await response.json())["error"]
    assert error["code"] == "host_not_allowed"
    assert "--allowed-host" in error["message"]
    assert "--api-key" in error["message"]


@pytest.mark.parametrize("name", [*OWN_NAMES, socket.gethostname()])
async def test_loopback_listener_accepts_names_of_its_machine(client, name):
    assert await status_of(client, "GET", "/health", {"Host": name}) == 200


@pytest.mark.parametrize("http", [{"allowed_hosts": ("evil.example",)}, {"api_keys": ("k",)}])
async def test_allowed_host_or_api_keys_accept_a_foreign_host_name(backend, http):
    async with serve(backend, FrontendOptions(http=HttpOptions(**http))) as client:
        headers = {"Host": "Evil.example:80", "Authorization": "Bearer k"}
        assert await status_of(client, "GET", "/v1/models", headers) == 200


@asynccontextmanager
async def served_everywhere(backend):
    sock = listen("0.0.0.0", 0)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    async with serving(create_app(backend), sock), aiohttp.ClientSession(url) as client:
        yield client


async def test_service_names_reach_a_listener_on_all_addresses(backend):
    service = {"Host": "tandem.default.svc:8000"}
    async with served_everywhere(backend) as client:
        for path in ("/health", "/live", "/v1/models"):
            assert await status_of(client, "GET", path, service) == 200
        assert await status_of(client, "POST", "/generate", service) == 200


async def test_flush_cache_with_get_is_refused_and_names_post(client, backend):
    async with client.get("/flush_cache") as response:
        assert (response.status, response.headers["Allow"]) == (405, "POST")
        assert "use POST" in (await response.json())["error"]["message"]
    assert backend.num_flushes == 0
