"""Who may ask for what: clients, routers, operators, and pages of other origins."""

from types import SimpleNamespace

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from multidict import CIMultiDict

from tandem.frontend.app import create_app
from tandem.frontend.http.keys import OPEN_ROUTES, Forbidden, operators_only
from tandem.frontend.options import FrontendOptions, HttpOptions
from tandem.wire.keys import operator_key, reader_key
from tests.frontend.conftest import serve
from tests.frontend.fakes import FakeBackend


async def change(request: web.Request) -> web.Response:
    return web.Response(text="changed")


async def status(options: FrontendOptions, key: str, path: str = "/change") -> int:
    app = create_app(FakeBackend(None), options)
    app.router.add_post("/change", operators_only(change))
    app.router.add_post("/other", change)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with TestClient(TestServer(app)) as client, client.post(path, headers=headers) as answer:
        return answer.status


@pytest.mark.parametrize("api_keys", [(), ("client",)])
async def test_operator_routes_require_the_operator_key(api_keys):
    options = FrontendOptions(
        http=HttpOptions(api_keys=api_keys), operator_key=operator_key("secret")
    )
    assert await status(options, operator_key("secret")) == 200
    for wrong in ("", "client", "secret", operator_key("other")):
        assert await status(options, wrong) == 401
    assert await status(options, operator_key("secret"), "/other") == 200


async def test_api_key_does_not_open_operator_routes():
    options = FrontendOptions(http=HttpOptions(api_keys=("client",)))
    for path in ("/change", "/flush_cache", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        assert await status(options, "client", path) == 403
        assert await status(options, "", path) == 401


async def test_without_keys_local_requests_are_the_operator():
    assert await status(FrontendOptions(), "") == 200
    assert await status(FrontendOptions(), "", "/flush_cache") == 200


@pytest.mark.parametrize(
    ("remote", "headers"),
    [
        ("10.0.0.7", {}),
        ("127.0.0.1", {"Origin": "https://example.com"}),
        ("127.0.0.1", {"Forwarded": "for=10.0.0.7"}),
        ("127.0.0.1", {"X-Forwarded-For": "10.0.0.7"}),
        ("127.0.0.1", {"x-forwarded-proto": "https"}),
        ("::1", {"X-Real-IP": "10.0.0.7"}),
        ("127.0.0.1", {"Via": "1.1 proxy"}),
        ("127.0.0.1", {"Sec-Fetch-Site": "cross-site"}),
        ("127.0.0.1", {"Referer": "https://chat.example/"}),
    ],
)
async def test_without_keys_remote_proxied_or_web_requests_are_rejected(remote, headers):
    app = create_app(FakeBackend(None), FrontendOptions())
    request = SimpleNamespace(app=app, remote=remote, headers=CIMultiDict(headers))
    with pytest.raises(Forbidden, match="TANDEM_CLUSTER_KEY"):
        await operators_only(change)(request)


async def test_abort_all_requires_an_operator():
    options = FrontendOptions(
        http=HttpOptions(api_keys=("client",)), operator_key=operator_key("secret")
    )
    app = create_app(FakeBackend(None), options)
    async with TestClient(TestServer(app)) as client:

        async def abort(key, body) -> int:
            headers = {"Authorization": f"Bearer {key}"}
            async with client.post("/abort_request", json=body, headers=headers) as answer:
                return answer.status

        assert await abort("client", {"abort_all": True}) == 401
        assert await abort("client", {"abort_all": True, "rid": "a"}) == 401
        assert await abort("client", {"rid": "a"}) == 200
        assert await abort(operator_key("secret"), {"abort_all": True}) == 200


@pytest.mark.parametrize("is_node", [True, False])
async def test_reader_key_opens_only_reader_routes(is_node):
    key = operator_key("secret")
    options = FrontendOptions(
        http=HttpOptions(api_keys=("client",)),
        operator_key=key,
        tokenizer_files=(lambda: {"tokenizer.json": "{}"}) if is_node else None,
    )
    app = create_app(FakeBackend(None), options)
    routes = {
        (route.method, route.resource.canonical.replace("{name}", "smol"))
        for route in app.router.routes()
    }
    headers = {"Authorization": f"Bearer {reader_key(key)}"}
    opened = set()
    async with TestClient(TestServer(app)) as client:
        for method, path in routes:
            async with client.request(method, path, headers=headers) as answer:
                if answer.status != 401 and path not in OPEN_ROUTES:
                    opened.add((method, path))
    asked = {
        (method, path) for method in ("GET", "HEAD") for path in ("/server_info", "/tokenizer")
    }
    assert opened == (asked if is_node else set())


async def test_every_route_accepts_the_key_in_either_header(backend):
    keys = tuple(f"key-{number}" for number in range(1000))
    async with serve(backend, FrontendOptions(http=HttpOptions(api_keys=keys))) as client:

        async def ask_with(headers) -> set[int]:
            statuses = set()
            for path in ("/v1/models", "/v1/models/smol", "/get_load"):
                async with client.get(path, headers=headers) as response:
                    statuses.add(response.status)
            return statuses

        for key in (keys[0], keys[-1]):
            assert await ask_with({"x-api-key": key}) == {200}
            assert await ask_with({"Authorization": f"Bearer {key}"}) == {200}
        for wrong in ("key-1000", "key-", ""):
            assert await ask_with({"x-api-key": wrong}) == {401}
        assert await ask_with({"Authorization": "Bearer no", "x-api-key": keys[0]}) == {401}


def test_derived_keys_hide_the_secret():
    key = operator_key("secret")
    assert len({"secret", key, reader_key(key)}) == 3
    assert "secret" not in key
    assert operator_key("") == reader_key("") == ""


ORIGIN = "https://chat.example"
BODY = {"input_ids": [5], "max_new_tokens": 2}
QUESTION = {
    "Origin": ORIGIN,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


def options(*origins: str) -> FrontendOptions:
    return FrontendOptions(http=HttpOptions(cors_origins=origins, api_keys=("k",)))


async def ask(client, headers) -> tuple[int, dict[str, str]]:
    async with client.options("/generate", headers=headers) as response:
        return response.status, response.headers


async def test_no_cors_headers_by_default(client):
    status, headers = await ask(client, QUESTION)
    assert status == 405
    async with client.get("/health", headers={"Origin": ORIGIN}) as response:
        assert response.status == 200
        assert not [name for name in (*headers, *response.headers) if name.startswith("Access-")]


async def test_preflight_of_an_allowed_origin_needs_no_key(backend):
    async with serve(backend, options(ORIGIN)) as client:
        status, headers = await ask(client, QUESTION)
    assert (status, headers["Access-Control-Allow-Origin"]) == (204, ORIGIN)
    assert headers["Access-Control-Allow-Methods"] == "GET, HEAD, POST, PUT, DELETE"
    assert headers["Access-Control-Allow-Headers"] == "authorization,content-type"
    assert headers["Vary"] == "Origin"


async def test_other_origin_gets_no_cors_headers(backend):
    async with serve(backend, options(ORIGIN)) as client:
        status, headers = await ask(client, QUESTION | {"Origin": "https://evil.example"})
        assert (status, headers.get("Access-Control-Allow-Origin")) == (401, None)
        async with client.get("/health", headers={"Origin": "https://evil.example"}) as response:
            assert "Access-Control-Allow-Origin" not in response.headers


async def test_answers_streams_and_errors_have_cors_headers(backend):
    sent = {"Origin": ORIGIN, "Authorization": "Bearer k"}
    async with serve(backend, options(ORIGIN)) as client:
        for body, headers, status in (
            (BODY, sent, 200),
            (BODY | {"stream": True}, sent, 200),
            ({}, sent, 400),
            (BODY, {"Origin": ORIGIN}, 401),
        ):
            async with client.post("/generate", json=body, headers=headers) as response:
                assert response.status == status
                assert response.headers["Access-Control-Allow-Origin"] == ORIGIN


async def test_origin_star_allows_every_page_without_vary(backend):
    async with serve(backend, options("*")) as client:
        _, headers = await ask(client, QUESTION)
        assert headers["Access-Control-Allow-Origin"] == "*"
        assert "Vary" not in headers
