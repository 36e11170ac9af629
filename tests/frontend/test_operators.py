from types import SimpleNamespace

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from frontend.app import create_app
from frontend.operators import Forbidden, operators_only
from frontend.options import FrontendOptions, HttpOptions
from tests.frontend.fakes import FakeBackend
from wire.keys import operator_key


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
async def test_only_the_key_of_the_clusters_secret_changes_a_cluster_that_has_one(api_keys):
    options = FrontendOptions(
        http=HttpOptions(api_keys=api_keys), operator_key=operator_key("secret")
    )
    assert await status(options, operator_key("secret")) == 200
    for wrong in ("", "client", "secret", operator_key("other")):
        assert await status(options, wrong) == 401
    assert await status(options, operator_key("secret"), "/other") == 200


async def test_without_a_secret_an_api_key_will_do_and_without_any_this_machine():
    assert await status(FrontendOptions(http=HttpOptions(api_keys=("client",))), "client") == 200
    assert await status(FrontendOptions(http=HttpOptions(api_keys=("client",))), "") == 401
    assert await status(FrontendOptions(), "") == 200


async def test_without_any_key_neither_another_machine_nor_a_web_page_changes_anything():
    app = create_app(FakeBackend(None), FrontendOptions())
    strangers = [
        SimpleNamespace(app=app, remote="10.0.0.7", headers={}),
        SimpleNamespace(app=app, remote="127.0.0.1", headers={"Origin": "https://example.com"}),
    ]
    for request in strangers:
        with pytest.raises(Forbidden, match="TANDEM_CLUSTER_KEY"):
            await operators_only(change)(request)


def test_the_operators_key_tells_nothing_of_the_secret_and_there_is_none_without():
    assert "secret" not in operator_key("secret")
    assert operator_key("") == ""
