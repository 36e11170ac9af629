import asyncio

import pytest

from tandem.frontend.options import FrontendOptions, HttpOptions
from tests.frontend.conftest import serve
from tests.frontend.helpers import ROUTES, post

HEADER = "X-Request-Id"
each_route = pytest.mark.parametrize("path", ROUTES)


async def asked(client, path, body, **headers):
    """Return the header of an answer, and the answer."""
    async with client.post(path, json=body, headers=headers) as response:
        return response.headers[HEADER], await response.json()


def id_in(answer) -> str:
    return answer["meta_info"]["id"] if "meta_info" in answer else answer["id"]


@each_route
@pytest.mark.parametrize("name", ["rid", "request_id"])
async def test_body_id_is_the_request_id(client, backend, path, name):
    header, answer = await asked(client, path, ROUTES[path] | {name: "mine", "max_tokens": 2})
    assert (header, id_in(answer)) == ("mine", "mine")
    assert backend.client_ids == ["mine"]


@each_route
async def test_header_id_is_returned_and_prefixes_the_request_id(client, backend, path):
    body = ROUTES[path] | {"max_tokens": 2, "max_new_tokens": 2}
    for _ in range(2):
        header, answer = await asked(client, path, body, **{HEADER: "abc"})
        assert header == "abc"
        assert id_in(answer).startswith("abc_")
    assert len({request.request_id for request in backend.requests}) == 2
    header, answer = await asked(client, path, body | {"rid": "mine"}, **{HEADER: "abc"})
    assert (header, id_in(answer)) == ("abc", "mine")


@each_route
async def test_generated_id_is_returned_in_the_header(client, backend, path):
    header, answer = await asked(client, path, ROUTES[path])
    assert backend.client_ids == [header] == [id_in(answer)]


@pytest.mark.parametrize("given", ["é", "a" * 241, ""])
async def test_invalid_header_id_is_ignored(client, given):
    header, _ = await asked(client, "/generate", ROUTES["/generate"], **{HEADER: given})
    assert header.isalnum()
    assert len(header) == 24


async def test_id_unsafe_for_headers_is_not_sent(client):
    header, answer = await asked(client, "/generate", ROUTES["/generate"] | {"rid": "a\r\nb: c"})
    assert "\n" not in header
    assert id_in(answer) == "a\r\nb: c"


async def test_every_answer_including_errors_has_an_id(client):
    for path in ("/health", "/nowhere", "/metrics"):
        async with client.get(path, headers={HEADER: "abc"}) as response:
            assert response.headers[HEADER] == "abc"
        async with client.get(path) as response:
            assert response.headers[HEADER]


@each_route
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("where", ["body", "header"])
async def test_request_is_aborted_by_the_client_id(client, backend, path, n, where):
    backend.script = lambda _: [[5], asyncio.Event()]
    given = {"rid": "mine"} if where == "body" else {}
    headers = {HEADER: "mine"} if where == "header" else {}
    body = ROUTES[path] | given | {"n": n}
    async with asyncio.TaskGroup() as group:
        posting = group.create_task(post(client, path, body, headers=headers))
        await backend.until(lambda: len(backend.aborts) == n)
        assert (await post(client, "/abort_request", {"rid": "mine"}))[1] == {"aborted": True}
    assert (await posting)[0] == 200
    assert not backend.aborts


@each_route
async def test_requests_with_the_same_id_run_at_once_and_are_aborted_together(
    client, backend, path
):
    backend.script = lambda _: [[5], asyncio.Event()]
    async with asyncio.TaskGroup() as group:
        asking = [
            group.create_task(asked(client, path, ROUTES[path] | {"rid": "mine"})) for _ in range(2)
        ]
        await backend.until(lambda: len(backend.requests) == 2 and backend.aborts)
        assert len({request.request_id for request in backend.requests}) == 2
        await backend.until(lambda: len(backend.aborts) == 2)
        assert (await post(client, "/abort_request", {"rid": "mine"}))[1] == {"aborted": True}
    for task in asking:
        header, answer = await task
        assert (header, id_in(answer)) == ("mine", "mine")
    assert not backend.aborts


def key(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}"}


@each_route
@pytest.mark.parametrize("where", ["body", "header"])
async def test_key_aborts_only_its_own_requests(backend, path, where):
    backend.script = lambda _: [[5], asyncio.Event()]
    given = {"rid": "mine"} if where == "body" else {}
    headers = {HEADER: "mine"} if where == "header" else {}
    options = FrontendOptions(http=HttpOptions(api_keys=("one", "two")), operator_key="operator")
    async with serve(backend, options) as client:

        async def abort(name: str, rid: str = "mine") -> bool:
            status, answer = await post(client, "/abort_request", {"rid": rid}, headers=key(name))
            assert status == 200
            return answer["aborted"]

        async with asyncio.TaskGroup() as group:
            posting = group.create_task(
                post(client, path, ROUTES[path] | given, headers=headers | key("one"))
            )
            await backend.until(lambda: backend.aborts)
            [internal] = backend.aborts
            assert not await abort("two")
            assert not await abort("two", internal)
            assert await abort("one")
        assert (await posting)[0] == 200
        async with asyncio.TaskGroup() as group:
            posting = group.create_task(
                post(client, path, ROUTES[path] | given, headers=headers | key("one"))
            )
            await backend.until(lambda: backend.aborts)
            assert await abort("operator")
        assert (await posting)[0] == 200


@each_route
async def test_two_keys_may_use_the_same_id_at_once(backend, path):
    backend.script = lambda _: [[5], asyncio.Event()]
    body = ROUTES[path] | {"rid": "mine"}
    options = FrontendOptions(http=HttpOptions(api_keys=("one", "two")))
    async with serve(backend, options) as client, asyncio.TaskGroup() as group:
        asked_by = {
            name: group.create_task(asked(client, path, body, **key(name)))
            for name in ("one", "two")
        }
        await backend.until(lambda: len(backend.aborts) == 2)
        for name, task in asked_by.items():
            await post(client, "/abort_request", {"rid": "mine"}, headers=key(name))
            header, answer = await task
            assert (header, id_in(answer)) == ("mine", "mine")
